"""What loops are compared on: what a step takes, and what a batch looks like."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Ready

SIDE = 64  # pixels
TOKENS = 128  # of a sequence
SMALL_TENSORS = 64
READY = 8  # batches that are handed out in turn
WORKERS_BATCH = 8  # samples


def images(nbytes: int) -> Any:
    """uint8 images and the numbers of their classes."""
    count = max(1, nbytes // (3 * SIDE * SIDE))
    return torch.ones(count, 3, SIDE, SIDE, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64)


def tokens(nbytes: int) -> Any:
    """int64 tokens, and the targets, of the same shape."""
    count = max(1, nbytes // (2 * 8 * TOKENS))
    return torch.ones(count, TOKENS, dtype=torch.int64), torch.zeros(count, TOKENS, dtype=torch.int64)


def large(nbytes: int) -> Any:
    """Two halves of floats."""
    return torch.ones(nbytes // 8), torch.zeros(nbytes // 8)


def many_small(nbytes: int) -> Any:  # noqa: ARG001 - as the others; how long they take is the latency's affair
    """A dictionary of features, of 1 KiB each."""
    return {f"feature {i}": torch.ones(256) for i in range(SMALL_TENSORS)}


class Scenario(NamedTuple):
    """Milliseconds of one step."""

    name: str
    batch: Callable[[int], Any]
    copy: float
    """0: what it takes."""
    compute: float
    loads: tuple[float, ...] = (0.0,)
    """In turn: a sleep in the loader."""
    synchronises: bool = False
    """Whether the loop waits for the device after each step, as ``loss.item()`` does."""
    workers: int = 0
    """Processes of a DataLoader, whose samples cost nothing; then ``loads`` do not count."""

    @property
    def steps(self) -> int:
        """Of one pass: long enough that one lost time slice is little of it."""
        return max(60, min(1000, round(300 / self.compute)))


SCENARIOS = (
    Scenario("image batches", images, copy=4, compute=10, loads=(2,)),
    Scenario("token batches", tokens, copy=0.3, compute=5, loads=(0.5,)),
    Scenario("many small tensors", many_small, copy=0, compute=10, loads=(0.5,)),
    Scenario("large batches", large, copy=9, compute=10),
    Scenario("jittery loader", large, copy=2, compute=10, loads=(2, 2, 2, 2, 22)),
    Scenario("slow loader", large, copy=4, compute=5, loads=(10,)),
    Scenario("synchronising loop", large, copy=4, compute=10, loads=(3,), synchronises=True),
    Scenario("slow loader, synchronising", large, copy=1, compute=10, loads=(8,), synchronises=True),
    Scenario("transfer-bound", large, copy=10, compute=5),
    Scenario("short steps", large, copy=0.1, compute=0.3),
    Scenario("2 worker processes", images, copy=1, compute=5, workers=2),
)


class _Samples(Dataset[Any]):
    """Images that cost nothing."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3, 8, 8, dtype=torch.uint8), index


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory."""
    if isinstance(batch, dict):
        return {key: tensor.pin_memory() for key, tensor in batch.items()}
    return tuple(tensor.pin_memory() for tensor in batch)


def loader_of(scenario: Scenario, nbytes: int) -> DataLoader[Any]:
    """The loader: PyTorch's own, since not every peer takes another."""
    if scenario.workers:
        return DataLoader(
            _Samples(scenario.steps * WORKERS_BATCH),
            WORKERS_BATCH,
            num_workers=scenario.workers,
            persistent_workers=True,
            pin_memory=True,
        )

    def load(position: int) -> None:  # takes no core
        if ms := scenario.loads[position % len(scenario.loads)]:
            time.sleep(ms / 1e3)

    ready = [pinned(scenario.batch(nbytes)) for _ in range(READY)]
    return DataLoader(Ready(ready, scenario.steps, load), batch_size=None)
