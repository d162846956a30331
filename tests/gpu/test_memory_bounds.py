"""Device memory is bounded, as the allocator's statistics say, for a host that never waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher
from tests.gpu.helpers import EACH_BACKGROUND, EACH_MEMORY, copy_ms, keep_busy

pytestmark = pytest.mark.gpu

FLOATS = 1 << 24
BYTES = 4 * FLOATS  # 64 MiB: a multiple of the 2 MiB to which the allocator rounds large segments
STEPS = 70  # of each of three epochs


@pytest.fixture(scope="module")
def loader() -> list[torch.Tensor]:
    """Four pinned batches, again and again."""
    pinned = [torch.full((FLOATS,), float(value)).pin_memory() for value in range(1, 5)]
    return [pinned[step % 4] for step in range(STEPS)]


def epoch(batches: Any, total: torch.Tensor, step_ms: float) -> None:
    """A loop that allocates nothing, whose kernels are longer than the copies."""
    for batch in batches:
        keep_busy(step_ms)
        total.add_(batch)


@EACH_MEMORY
@EACH_BACKGROUND
@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_reserved(loader: list[torch.Tensor], memory: Any, background: bool, prefetch_batches: int) -> None:
    """The most that was reserved over three epochs is no more batches than the policy promises."""
    batches = CUDAPrefetcher(loader, "cuda", memory=memory, background=background, prefetch_batches=prefetch_batches)
    step_ms = 2 * copy_ms(loader[0])
    total = torch.zeros(FLOATS, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    peaks = []
    for _ in range(3):
        epoch(batches, total, step_ms)
        peaks.append((torch.cuda.max_memory_reserved() - before) / BYTES)
    assert total.unique().tolist() == [3.0 * sum(1 + step % 4 for step in range(STEPS))]
    if memory == "static":
        assert peaks == [prefetch_batches + 2] * 3
    elif memory == "consumer":
        assert max(peaks) <= prefetch_batches + 2
        assert background or len(set(peaks)) == 1  # a thread may be nearer to the bound in a later epoch
    else:
        assert max(peaks) <= prefetch_batches + 3


@EACH_BACKGROUND
def test_static_allocates_once(loader: list[torch.Tensor], background: bool) -> None:
    """After the first epoch a loop over fixed addresses asks the allocator for nothing, and sees no new address."""
    batches = CUDAPrefetcher(loader, "cuda", memory="static", background=background)
    total = torch.zeros(FLOATS, device="cuda")
    epoch(batches, total, 1)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    epoch(batches, total, 1)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert len({batch.data_ptr() for _ in range(2) for batch in batches}) == 4
