"""What a prefetcher says about itself agrees with the card's own clock."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher
from tests.gpu.helpers import COUNT, EACH_BACKGROUND, EACH_MEMORY, LATE_MS, copy_ms, keep_busy

pytestmark = pytest.mark.gpu


@EACH_MEMORY
@EACH_BACKGROUND
def test_compute_bound(batches: list[torch.Tensor], memory: Any, background: bool) -> None:
    """Long steps are named; their length, that of the copies and the overlap are right."""
    step_ms = max(3 * copy_ms(batches[0]), LATE_MS)
    prefetcher = CUDAPrefetcher(batches, "cuda", memory=memory, background=background, profile=True)
    for _ in range(2):  # in the first pass memory is allocated
        for _ in prefetcher:
            keep_busy(step_ms)
    stats = prefetcher.stats
    assert stats.bottleneck.startswith("compute")
    assert stats.bytes == 2 * sum(batch.nbytes for batch in batches)
    assert (stats.batches, stats.timed_batches, stats.timed_steps) == (2 * COUNT,) * 3
    second = [times for times in prefetcher.timeline.batches if times.pass_number == 1]
    for before, after in itertools.pairwise(second[3:]):
        assert before.compute is not None
        assert after.compute is not None
        assert before.compute.duration_s == pytest.approx(step_ms / 1e3, rel=0.2)  # the card's clock changes
        assert after.copy[-1].end_s <= after.compute.start_s + 1e-4
        assert after.compute.start_s >= before.compute.end_s - 1e-4


def test_copy_bound(batches: list[torch.Tensor]) -> None:
    """Steps of next to nothing: the copies are named."""
    prefetcher = CUDAPrefetcher(batches, "cuda", profile=True)
    for _ in range(3):
        for batch in prefetcher:
            batch[:1].add_(1)
    stats = prefetcher.stats
    assert stats.bottleneck.startswith("copy")
    assert 0.5 < stats.copy_gb_per_s < 500
    assert 0 < stats.exposed_copy_s <= 1.1 * stats.copy_s
