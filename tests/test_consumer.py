"""memory="consumer": memory that the consumer's thread allocates in time, for batches that a thread issues later."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher

ACCELERATOR = torch.accelerator
SIZE = 1 << 19  # 2 MiB of floats: the simulated allocator's unit for large blocks, so that bytes count batches
BACKGROUND = pytest.mark.parametrize("background", [False, True])


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """What other tests have left in cycles is not counted."""
    gc.collect()


@BACKGROUND
@pytest.mark.parametrize("prefetch_batches", [0, 1, 3])
def test_changing_shapes(any_sim: Any, prefetch_batches: int, background: bool) -> None:
    """Batches that need other memory than the last one, more or less of it, get it."""
    any_sim.configure(latency_us=300)

    def batch(i: int) -> list[torch.Tensor]:
        kinds = [(1, SIZE, torch.float32), (3, SIZE // 2, torch.int64), (2, 2 * SIZE, torch.float16)]
        count, size, dtype = kinds[i % 3]
        return [torch.full((size,), i + part, dtype=dtype).pin_memory() for part in range(count)]

    sums = []
    for got in CUDAPrefetcher(
        (batch(i) for i in range(15)),
        "sim",
        memory="consumer",
        prefetch_batches=prefetch_batches,
        background=background,
    ):
        any_sim.busy(700)
        sums.append(torch.stack([part.float().mean() for part in got]).sum())
    assert torch.stack(sums).tolist() == [sum(float(i + part) for part in range((1, 3, 2)[i % 3])) for i in range(15)]
    assert any_sim.races() == []


def test_late_loader(any_sim: Any) -> None:
    """Memory allocated after the consumer has queued its step, and let its batch go, is not written to during it.

    It was not reserved, since the batch is larger than the last one.
    """
    any_sim.configure(latency_us=100)
    is_queued = threading.Semaphore(0)

    def batches() -> Iterator[torch.Tensor]:
        for i in range(12):
            if i > 1:
                assert is_queued.acquire(timeout=60)
            yield torch.full((SIZE if i % 2 else 4 * SIZE,), float(i)).pin_memory()

    iterator = iter(CUDAPrefetcher(batches(), "sim", memory="consumer", prefetch_batches=1, background=True))
    means = []
    for _ in range(12):
        batch = next(iterator)
        any_sim.busy(2000)
        means.append(batch.mean())
        del batch
        is_queued.release()
    assert torch.stack(means).tolist() == [float(i) for i in range(12)]
    assert any_sim.races() == []


@BACKGROUND
@pytest.mark.parametrize("prefetch_batches", [1, 2])
def test_batches_that_fail(any_sim: Any, prefetch_batches: int, background: bool) -> None:
    """Errors in the place of batches, many in a row too, cost no memory, and the batches after them none more."""
    any_sim.configure(latency_us=200, race=0)

    class Refusing:
        """Fails when it is moved, after the leaf before it has its place."""

        def to(self, device: Any) -> Any:
            raise ValueError("no good")

    fails = [i % 3 == 1 or 20 <= i < 30 for i in range(40)]
    batches = ([torch.full((SIZE,), float(i)).pin_memory(), Refusing() if fails[i] else None] for i in range(40))
    iterator = iter(
        CUDAPrefetcher(batches, "sim", memory="consumer", prefetch_batches=prefetch_batches, background=background)
    )
    failed = []
    batch: Any = None
    total = torch.zeros(SIZE, device="sim")
    while True:
        try:
            batch = next(iterator)
        except ValueError:
            failed.append(True)
        except StopIteration:
            break
        else:
            any_sim.busy(500)
            total.add_(batch[0])
            failed.append(False)
    assert failed == fails
    assert total[0].item() == sum(i for i in range(40) if not fails[i])
    del batch
    assert ACCELERATOR.memory_reserved() // (4 * SIZE) - 1 <= prefetch_batches + 2
