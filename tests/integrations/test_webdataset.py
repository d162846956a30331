"""WebDataset: a stream from tar archives, without a length."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("webdataset")

import webdataset

from prefetch import CUDAPrefetcher

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # webdataset leaves archives to be closed by chance
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the same, where it happens
    pytest.mark.filterwarnings("ignore:.with_length.. only sets"),  # what is tested here
]

COUNT = 10


@pytest.fixture(name="shards")
def _shards(tmp_path: Path) -> list[str]:
    """Two archives of five samples each: a vector of the sample's number, and the number."""
    paths = [str(tmp_path / f"{number}.tar") for number in range(2)]
    for shard, path in enumerate(paths):
        with webdataset.TarWriter(path) as archive:
            for i in range(5 * shard, 5 * shard + 5):
                archive.write({"__key__": f"{i:05}", "x.npy": np.full(3, i, dtype=np.float32), "y.cls": i})
    return paths


def make_loader(shards: list[str], **options: Any) -> Any:
    """Batches of four tensors and four labels."""
    data = (
        webdataset.WebDataset(shards, shardshuffle=False)
        .decode()
        .to_tuple("x.npy", "y.cls")
        .map_tuple(torch.from_numpy, torch.tensor)
        .batched(4)
    )
    return webdataset.WebLoader(data, batch_size=None, pin_memory=True, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("background", [False, True])
def test_batches(sim: ModuleType, background: bool, workers: int, shards: list[str]) -> None:
    """Every pass has all samples on the device; workers share out the archives."""
    batches = CUDAPrefetcher(make_loader(shards, num_workers=workers), "sim", background=background)
    for _ in range(2):
        seen = []
        for inputs, labels in batches:
            assert {inputs.device, labels.device} == {torch.device("sim", 0)}
            assert inputs.tolist() == [[float(label)] * 3 for label in labels.tolist()]
            seen += labels.tolist()
        assert sorted(seen) == list(range(COUNT))
        assert seen == list(range(COUNT)) or workers == 2


def test_length_that_is_not_there(shards: list[str]) -> None:
    """There is none, until the loader is told one with with_length."""
    loader = make_loader(shards)
    with pytest.raises(TypeError):
        len(CUDAPrefetcher(loader, "cpu"))
    assert len(CUDAPrefetcher(loader.with_length(3), "cpu")) == 3
