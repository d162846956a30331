"""Lightning: batches arrive once, and what Lightning knows of a loader it knows of a prefetcher."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from prefetch import CUDAPrefetcher

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # advice on speed
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),  # lightning and newer torch
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata and newer torch
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),  # one model serves all tests
]


class Model(LightningModule):
    """Notes the batches that come, as they are before and after Lightning's own transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.arrived: list[int] = []
        self.trained: list[list[float]] = []
        self.addresses: list[int] = []
        self.devices: set[torch.device] = set()
        self.validated: list[list[float]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.arrived.append(batch[0].data_ptr())
        return batch

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.addresses.append(batch[0].data_ptr())
        self.devices.add(batch[0].device)
        self.trained.append(batch[0].flatten().tolist())
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.validated.append(batch[0].flatten().tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class SimulatedAccelerator(Accelerator):
    """What Lightning must know of a device: nearly nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return [torch.device("sim", 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def numbers(count: int) -> TensorDataset:
    """Samples of one float each: 0, 1, 2, ..."""
    return TensorDataset(torch.arange(float(count)).unsqueeze(1))


def prefetched(count: int = 8, device: str = "cpu", **options: Any) -> CUDAPrefetcher[Any]:
    """Batches of two numbers."""
    return CUDAPrefetcher(DataLoader(numbers(count), batch_size=2, **options), device)


def make_trainer(folder: Path, **options: Any) -> Trainer:
    """One that prints nothing, and keeps what it writes in the test's folder."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(**(defaults | options))


def test_batches_are_not_moved_again(sim: ModuleType, tmp_path: Path) -> None:
    """What the step gets on the accelerator is the memory into which the prefetcher has copied."""
    device = torch.device("sim", 0)
    model = Model()
    accelerator = SimulatedAccelerator()
    trainer = make_trainer(tmp_path, accelerator=accelerator, strategy=SingleDeviceStrategy(device), max_epochs=2)
    trainer.fit(model, prefetched(device="sim", pin_memory=True))
    assert model.trained == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] * 2
    assert model.devices == {device}
    assert model.addresses == model.arrived


def test_epochs_and_validation(tmp_path: Path) -> None:
    """Each epoch has all batches, for training and for validation."""
    model = Model()
    trainer = make_trainer(tmp_path, max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(model, prefetched(), prefetched(4))
    assert model.trained == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] * 3
    assert model.validated == [[0.0, 1.0], [2.0, 3.0]] * 3
    assert trainer.num_training_batches == 4
    assert trainer.num_val_batches == [2]


def test_progress_bar_knows_the_length(tmp_path: Path) -> None:
    """The total that a progress bar shows is the loader's."""
    totals = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            bar = trainer.progress_bar_callback
            assert bar is not None
            totals.append(bar.total_train_batches)

    make_trainer(tmp_path, enable_progress_bar=True, callbacks=[Watch()]).fit(Model(), prefetched())
    assert totals == [4]


def test_length_that_is_not_there(tmp_path: Path) -> None:
    """A stream without a length is trained to its end."""

    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter([[torch.tensor([[float(i)]])] for i in range(3)])

    model = Model()
    make_trainer(tmp_path).fit(model, CUDAPrefetcher(DataLoader(Stream(), batch_size=None), "cpu"))
    assert model.trained == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("background", [False, True])
def test_epochs_that_are_broken_off(background: bool, tmp_path: Path) -> None:
    """With limit_train_batches each epoch begins with the first batch."""
    model = Model()
    batches = CUDAPrefetcher(DataLoader(numbers(8), batch_size=2), "cpu", background=background)
    make_trainer(tmp_path, max_epochs=2, limit_train_batches=2).fit(model, batches)
    assert model.trained == [[0.0, 1.0], [2.0, 3.0]] * 2


def test_set_epoch(tmp_path: Path) -> None:
    """Lightning finds the DistributedSampler in the prefetcher, and shuffles anew for each epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(numbers(8), num_replicas=2, rank=1, shuffle=True)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected.append([float(i) for i in sampler])
    model = Model()
    make_trainer(tmp_path, max_epochs=2).fit(model, prefetched(sampler=sampler))
    got = [list(itertools.chain(*model.trained[start : start + 2])) for start in (0, 2)]
    assert got == expected
    assert got[0] != got[1]


@pytest.fixture(name="process_group")
def _process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where a strategy for several processes starts one for this one alone, it ends with the test."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "")  # so that what Lightning puts there is undone
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_no_sampler_is_put_in(is_wrapped: bool, process_group: None, tmp_path: Path) -> None:
    """Where a plain DataLoader is made anew with a DistributedSampler, a wrapped one stays as it is."""
    loader = DataLoader(numbers(8), batch_size=2, shuffle=True)
    trainer = make_trainer(tmp_path, strategy="ddp", devices=1)
    trainer.fit(Model(), CUDAPrefetcher(loader, "cpu") if is_wrapped else loader)
    used = trainer.train_dataloader
    assert isinstance(used, CUDAPrefetcher) == is_wrapped
    assert isinstance(used.sampler, DistributedSampler) == (not is_wrapped)


@pytest.mark.parametrize("background", [False, True])
def test_resume_in_mid_epoch(background: bool, tmp_path: Path) -> None:
    """A checkpoint of Lightning's holds the loader's state: what follows is the rest of the epoch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def batches() -> CUDAPrefetcher[Any]:
        return CUDAPrefetcher(stateful.StatefulDataLoader(numbers(8), batch_size=2), "cpu", background=background)

    path = tmp_path / "middle.ckpt"

    class Save(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(path)

    whole = Model()
    make_trainer(tmp_path, callbacks=[Save()]).fit(whole, batches())
    resumed = Model()
    make_trainer(tmp_path).fit(resumed, batches(), ckpt_path=path, weights_only=False)
    assert whole.trained == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert resumed.trained == [[4.0, 5.0], [6.0, 7.0]]


@pytest.mark.parametrize("has_own_seed", [False, True])
def test_order_of_a_shuffled_loader(has_own_seed: bool, tmp_path: Path) -> None:
    """Lightning starts a pass to see that it can, which draws a number: no matter to a sampler with its own seed."""

    def trained(wrap: Callable[[Any], Any]) -> list[list[float]]:
        torch.manual_seed(0)
        model = Model()
        data = numbers(64)
        options: dict[str, Any] = {"sampler": DistributedSampler(data, 1, 0)} if has_own_seed else {"shuffle": True}
        make_trainer(tmp_path).fit(model, wrap(DataLoader(data, batch_size=2, **options)))
        return model.trained

    same = trained(lambda loader: loader) == trained(lambda loader: CUDAPrefetcher(loader, "cpu"))
    assert same == has_own_seed


def test_workers_that_persist(sim: ModuleType, tmp_path: Path) -> None:
    """The pass that Lightning starts and drops does no harm to those that follow with the same workers."""
    model = Model()
    batches = CUDAPrefetcher(
        DataLoader(numbers(8), batch_size=2, num_workers=2, persistent_workers=True), "cpu", background=True
    )
    make_trainer(tmp_path, max_epochs=2).fit(model, batches)
    assert model.trained == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] * 2
