"""Ray: two workers train on their shares, and a stream of Ray Data is copied ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train")

import ray
import ray.data
import ray.train.torch
import torch
from torch.utils.data import DataLoader, TensorDataset

from prefetch import CUDAPrefetcher

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's, of what it imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Ray's, of its own plans
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's, of the processes that it starts
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the same, found later
]

COUNT = 12


@pytest.fixture(name="cluster", scope="module")
def _cluster() -> Iterator[None]:
    """A small one on this machine, which ends with the tests."""
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def test_cluster(cluster: None, tmp_path: Path) -> None:
    """Each of two workers sees its half of each epoch; a stream of Ray Data arrives in order."""

    def train() -> list[list[list[int]]]:
        loader = DataLoader(TensorDataset(torch.arange(COUNT)), batch_size=2, shuffle=True)
        loader = ray.train.torch.prepare_data_loader(loader, move_to_device=False)
        batches = CUDAPrefetcher(loader, ray.train.torch.get_device(), background=True)
        epochs = []
        for epoch in range(2):
            batches.set_epoch(epoch)
            epochs.append([numbers.tolist() for (numbers,) in batches])
        shares: list[Any] = [None, None]
        torch.distributed.all_gather_object(shares, epochs)
        return shares

    trainer = ray.train.torch.TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    )
    shares = trainer.fit().return_value
    assert shares is not None
    for epoch in range(2):
        assert [len(share[epoch]) for share in shares] == [3, 3]
        assert sorted(number for share in shares for batch in share[epoch] for number in batch) == list(range(COUNT))
    assert shares[0][0] != shares[0][1]

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    stream = ray.data.range(COUNT).iterator().iter_torch_batches(batch_size=4, device="cpu")
    got = [batch["id"].tolist() for batch in CUDAPrefetcher(stream, "cpu", background=True)]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
