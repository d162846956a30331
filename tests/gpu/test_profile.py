"""What the profiler sees: asynchronous copies from pinned memory, on a stream of their own, beside the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from prefetch import CUDAPrefetcher, to_host
from tests.gpu.helpers import (
    COUNT,
    EACH_BACKGROUND,
    EACH_MEMORY,
    FROM_PINNED,
    LATE_MS,
    SIZE,
    TO_PINNED,
    copy_ms,
    keep_busy,
    length_us,
    profiled,
    shared_us,
    streams,
)

pytestmark = pytest.mark.gpu

PREFETCH_BATCHES = 2


def train(loader: Iterable[torch.Tensor], total: torch.Tensor, step_ms: float) -> None:
    """Compute on each batch for a time, without a copy or a wait in the loop."""
    for batch in loader:
        keep_busy(step_ms)
        total.add_(batch)


def step_length_ms(batches: list[torch.Tensor]) -> float:
    """Longer than a copy, also with a clock that has become faster, and than what the host may be late by."""
    return max(3 * copy_ms(batches[0]), LATE_MS)


def zeros() -> torch.Tensor:
    """As large as a batch."""
    return torch.zeros(SIZE, dtype=torch.int32, device="cuda")


@EACH_MEMORY
@EACH_BACKGROUND
def test_copies_beside_kernels(batches: list[torch.Tensor], memory: Any, background: bool, tmp_path: Path) -> None:
    """All copies but the first few are hidden: at least 80 % of their time lies within kernels."""
    loader = CUDAPrefetcher(batches, "cuda", memory=memory, background=background, prefetch_batches=PREFETCH_BATCHES)
    total = zeros()
    step_ms = step_length_ms(batches)
    train(loader, total, step_ms)  # what is allocated is allocated now
    trace = profiled(lambda: train(loader, total, step_ms), tmp_path)
    copies, kernels = trace.copies("HtoD"), trace.kernels()
    assert [copy.name for copy in copies] == [FROM_PINNED] * COUNT
    assert len(streams(copies)) == 1
    assert streams(copies).isdisjoint(streams(kernels))
    hidden = copies[PREFETCH_BATCHES + 1 :]
    assert shared_us(hidden, kernels) >= 0.8 * length_us(hidden)


def test_control_one_stream(batches: list[torch.Tensor], tmp_path: Path) -> None:
    """Control: the plain loop with non_blocking=True copies on the stream of its kernels, and hides nothing."""
    total = zeros()
    step_ms = step_length_ms(batches)
    trace = profiled(
        lambda: train((batch.to("cuda", non_blocking=True) for batch in batches), total, step_ms), tmp_path
    )
    copies, kernels = trace.copies("HtoD"), trace.kernels()
    assert [copy.name for copy in copies] == [FROM_PINNED] * COUNT
    assert streams(copies) == streams(kernels)
    assert shared_us(copies, kernels) < 0.01 * length_us(copies)  # time stamps are rounded


@EACH_BACKGROUND
def test_pinning_loader(background: bool, tmp_path: Path) -> None:
    """The batches of a DataLoader that pins are copied from the memory that it has pinned."""
    data: Any = torch.arange(COUNT * (1 << 18), dtype=torch.int32).view(2 * COUNT, 1 << 17)
    total = torch.zeros(2, 1 << 17, dtype=torch.int32, device="cuda")
    loader: Any = CUDAPrefetcher(DataLoader(data, batch_size=2, pin_memory=True), "cuda", background=background)
    trace = profiled(lambda: train(loader, total, 1), tmp_path)
    copies = trace.copies("HtoD")
    assert [copy.name for copy in copies] == [FROM_PINNED] * COUNT
    assert streams(copies).isdisjoint(streams(trace.kernels()))


@EACH_BACKGROUND
@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_pageable_loader(background: bool, tmp_path: Path) -> None:
    """The batches of a loader that does not pin are staged: none is copied from pageable memory."""

    def pageable() -> Iterator[torch.Tensor]:
        for position in range(COUNT):
            yield torch.full((SIZE,), position, dtype=torch.int32)

    total = zeros()
    loader = CUDAPrefetcher(pageable(), "cuda", background=background)
    trace = profiled(lambda: train(loader, total, 1), tmp_path)
    copies = trace.copies("HtoD")
    assert [copy.name for copy in copies] == [FROM_PINNED] * COUNT
    assert streams(copies).isdisjoint(streams(trace.kernels()))


def test_two_directions_at_once(batches: list[torch.Tensor], tmp_path: Path) -> None:
    """Copies to the device, copies to the host and kernels have a stream each, and run beside each other."""
    loader = CUDAPrefetcher(batches, "cuda", prefetch_batches=PREFETCH_BATCHES)
    total = zeros()
    step_ms = step_length_ms(batches)

    def both() -> None:
        for batch in loader:
            keep_busy(step_ms)
            total.add_(batch)
            to_host(total)  # nobody asks for the values: the host has no part in it

    both()
    trace = profiled(both, tmp_path)
    to_device, to_the_host, kernels = trace.copies("HtoD"), trace.copies("DtoH"), trace.kernels()
    assert [copy.name for copy in to_device] == [FROM_PINNED] * COUNT
    assert [copy.name for copy in to_the_host] == [TO_PINNED] * COUNT
    assert len(streams(to_device)) == len(streams(to_the_host)) == 1
    assert len(streams(to_device) | streams(to_the_host) | streams(kernels)) == 2 + len(streams(kernels))
    assert shared_us(to_device, kernels) > 0
    assert shared_us(to_the_host, kernels) > 0
    assert shared_us(to_device, to_the_host) > 0
