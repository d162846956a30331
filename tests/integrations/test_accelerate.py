"""Accelerate: below its loader the prefetcher keeps all in order; around it, a look-ahead tells it the end too early.

With one process ``gather_for_metrics`` gathers nothing, but cuts off what it takes for repeated samples: that
shows whether it goes by the right batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset, RandomSampler

from prefetch import CUDAPrefetcher

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata and newer torch
]

COUNT = 10
BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Numbers(Dataset[int]):
    """From 0 to 9."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(name="accelerator")
def _accelerator() -> Iterator[Accelerator]:
    """One for the CPU; what it keeps for the whole process is forgotten."""
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def prepared(accelerator: Accelerator, **options: Any) -> Any:
    """A prepared loader of the numbers from 0 to 9 in batches of four, the last one of two."""
    return accelerator.prepare(DataLoader(Numbers(), batch_size=4, **options))


def below(loader: Any, device: str, **options: Any) -> Any:
    """A prepared loader, with the prefetcher in it. What is not on Accelerate's device is left alone."""
    loader.device = None
    loader.base_dataloader = CUDAPrefetcher(loader.base_dataloader, device, **options)
    return loader


def around(loader: Any, device: str, **options: Any) -> Any:
    """A prepared loader, in the prefetcher."""
    loader.device = None
    return CUDAPrefetcher(loader, device, **options)


def gathered(accelerator: Accelerator, loader: Any) -> list[list[int]]:
    """What is kept of each batch for a metric."""
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def synchronised(accelerator: Accelerator, loader: Any) -> list[bool]:
    """Whether the optimiser steps after each batch, of which two make a step, or the last one alone."""
    model = torch.nn.Linear(1, 1)
    steps = []
    for _ in loader:
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
    return steps


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("place", [below, around])
def test_on_the_cpu_nothing_is_looked_ahead(place: Any, epochs: int, accelerator: Accelerator) -> None:
    """There the two places are as good as each other."""
    loader = place(prepared(accelerator), "cpu")
    for _ in range(epochs):
        assert gathered(accelerator, loader) == BATCHES
        assert synchronised(accelerator, loader) == [False, True, True]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 5])
def test_below(sim: ModuleType, background: bool, prefetch_batches: int, accelerator: Accelerator) -> None:
    """Whatever is looked ahead below, metrics have all samples, and gradients are synchronised where they should be."""
    options: dict[str, Any] = {"background": background, "prefetch_batches": prefetch_batches}
    loader = below(prepared(accelerator, pin_memory=True), "sim", **options)
    for _ in range(2):
        assert gathered(accelerator, loader) == BATCHES
        assert synchronised(accelerator, loader) == [False, True, True]


def test_around_with_look_ahead(sim: ModuleType, accelerator: Accelerator) -> None:
    """The end is known at the first batch: a metric loses samples, and the optimiser steps after the wrong batches."""
    loader = around(prepared(accelerator, pin_memory=True), "sim", prefetch_batches=2)
    got = gathered(accelerator, loader)
    assert got == [[0, 1], [4, 5, 6, 7], [8, 9]]  # two samples are lost
    assert synchronised(accelerator, loader) == [True, False, True]


def test_around_without_look_ahead(sim: ModuleType, accelerator: Accelerator) -> None:
    """With prefetch_batches=0 the prefetcher may be around it, too."""
    loader = around(prepared(accelerator, pin_memory=True), "sim", prefetch_batches=0, background=False)
    assert gathered(accelerator, loader) == BATCHES
    assert synchronised(accelerator, loader) == [False, True, True]


def test_moved_once(sim: ModuleType, accelerator: Accelerator) -> None:
    """Accelerate's own placement, which may stay on, leaves a batch that is on its device alone."""
    loader = prepared(accelerator, pin_memory=True)
    addresses: list[int] = []

    def note(batch: torch.Tensor) -> torch.Tensor:
        addresses.append(batch.data_ptr())
        return batch

    loader.device = torch.device("sim", 0)
    loader.base_dataloader = CUDAPrefetcher(loader.base_dataloader, "sim", transform=note)
    kept = list(loader)
    assert [batch.tolist() for batch in kept] == BATCHES
    assert [batch.data_ptr() for batch in kept] == addresses


def test_what_is_asked_of_the_loader(accelerator: Accelerator) -> None:
    """Length, data set and batch size are found through the prefetcher, and it is told the epoch."""
    loader = below(prepared(accelerator), "cpu")
    assert (len(loader), len(loader.dataset), loader.total_batch_size) == (3, COUNT, 4)

    class Told(RandomSampler):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    loader = below(prepared(accelerator, sampler=Told(range(COUNT))), "cpu")
    loader.set_epoch(3)
    assert Told.epochs == [3]


def test_skip_first_batches(accelerator: Accelerator) -> None:
    """What Accelerate makes anew to skip batches has all that follow, though not prefetched."""
    loader = below(prepared(accelerator), "cpu")
    rest = skip_first_batches(loader, 1)
    assert [batch.tolist() for batch in rest] == BATCHES[1:]
    assert not isinstance(rest.base_dataloader, CUDAPrefetcher)


@pytest.mark.parametrize("delivered", [0, 1, 2, 3])
@pytest.mark.parametrize(("device", "background"), [("cpu", False), ("cpu", True), ("sim", False), ("sim", True)])
def test_resume(sim: ModuleType, device: str, background: bool, delivered: int, accelerator: Accelerator) -> None:
    """With use_stateful_dataloader the state is that of the batches delivered: what follows is what would have."""
    pytest.importorskip("torchdata.stateful_dataloader")
    accelerator.dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=True)

    def rest(place: Callable[[Any], Any]) -> list[list[int]]:
        loader = place(prepared(accelerator, pin_memory=True))
        iterator = iter(loader)
        for _ in range(delivered):
            next(iterator)
        state = copy.deepcopy(loader.state_dict())
        resumed = place(prepared(accelerator, pin_memory=True))
        resumed.load_state_dict(state)
        return [batch.tolist() for batch in resumed]

    got = rest(lambda loader: below(loader, device, background=background))
    assert got == rest(lambda loader: loader)
    if delivered < len(BATCHES):
        assert got == BATCHES[delivered:]
