"""Every value is right, though the device is late and memory is used again; and loops exist for which it is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from prefetch import CUDAPrefetcher, PrefetchWarning
from tests.gpu.helpers import COUNT, EACH_BACKGROUND, EACH_MEMORY, LATE_MS, SIZE, all_numbers, keep_busy

pytestmark = pytest.mark.gpu


def unread() -> torch.Tensor:
    """A row for each batch."""
    return torch.full((COUNT, SIZE), -1, dtype=torch.int32, device="cuda")


def read(batches: Iterable[torch.Tensor], out: torch.Tensor, late_ms: float) -> set[int]:
    """Queue the reading of each batch behind a kernel, and let go of it at once; the addresses that they had."""
    addresses = set()
    rows = iter(out)
    for batch in batches:  # enumerate and zip would hold it until they have the next one
        addresses.add(batch.data_ptr())
        if late_ms:
            keep_busy(late_ms)
        next(rows).copy_(batch)
        del batch
    return addresses


@EACH_MEMORY
@EACH_BACKGROUND
@pytest.mark.parametrize("prefetch_batches", [0, 1, 2])
def test_late_consumer(batches: list[torch.Tensor], memory: Any, background: bool, prefetch_batches: int) -> None:
    """Whoever owns the memory, and though addresses come again, each element is that of its own batch."""
    out = unread()
    loader = CUDAPrefetcher(batches, "cuda", memory=memory, background=background, prefetch_batches=prefetch_batches)
    addresses = read(loader, out, LATE_MS)
    assert len(addresses) < COUNT  # else nothing was shown
    assert torch.equal(out, all_numbers())


@EACH_MEMORY
@EACH_BACKGROUND
def test_early_consumer(batches: list[torch.Tensor], memory: Any, background: bool) -> None:
    """A consumer that does nothing but read, faster than the copies, waits for each of them."""
    out = unread()
    read(CUDAPrefetcher(batches, "cuda", memory=memory, background=background), out, 0)
    assert torch.equal(out, all_numbers())


@EACH_MEMORY
@EACH_BACKGROUND
def test_consumer_on_a_side_stream(batches: list[torch.Tensor], memory: Any, background: bool) -> None:
    """A loop that runs on a stream of its own is waited for like one on the default stream."""
    out = unread()
    loader = CUDAPrefetcher(batches, "cuda", memory=memory, background=background)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        addresses = read(loader, out, LATE_MS)
    torch.cuda.synchronize()
    assert len(addresses) < COUNT
    assert torch.equal(out, all_numbers())


@EACH_MEMORY
@EACH_BACKGROUND
def test_consumer_changes_streams(batches: list[torch.Tensor], memory: Any, background: bool) -> None:
    """Each batch is ready for, and protected from, the stream that is current when it is asked for."""
    out = unread()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    iterator = iter(CUDAPrefetcher(batches, "cuda", memory=memory, background=background))
    addresses = set()
    torch.cuda.synchronize()
    for position in range(COUNT):
        with torch.cuda.stream(streams[position % 3]):
            batch = next(iterator)
            addresses.add(batch.data_ptr())
            keep_busy(LATE_MS)
            out[position].copy_(batch)
            del batch
    torch.cuda.synchronize()
    assert len(addresses) < COUNT
    assert torch.equal(out, all_numbers())


@EACH_MEMORY
@EACH_BACKGROUND
def test_transform(batches: list[torch.Tensor], memory: Any, background: bool) -> None:
    """What a transform allocates is ready, and protected, too."""
    out = unread()
    loader: Any = CUDAPrefetcher(
        batches, "cuda", memory=memory, background=background, transform=lambda batch: (batch + 1).sub_(1)
    )
    addresses = read(loader, out, LATE_MS)
    assert len(addresses) < COUNT
    assert torch.equal(out, all_numbers())


@EACH_BACKGROUND
def test_pageable_memory(background: bool) -> None:
    """Batches that are staged through pinned buffers, which are used again, arrive whole."""

    def pageable() -> Iterator[torch.Tensor]:
        for position in range(COUNT):
            yield torch.arange(position * SIZE, (position + 1) * SIZE, dtype=torch.int32)

    out = unread()
    with pytest.warns(PrefetchWarning, match="pageable memory"):
        read(CUDAPrefetcher(pageable(), "cuda", background=background), out, LATE_MS)
    assert torch.equal(out, all_numbers())


class Samples(Dataset[torch.Tensor]):
    """Sample ``i`` is full of ``i``."""

    def __len__(self) -> int:
        return 4 * COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 16,), float(index))


def test_worker_processes() -> None:
    """With worker processes, and every option as it is by default, a loop gets the data set."""
    loader = CUDAPrefetcher(DataLoader(Samples(), batch_size=4, num_workers=2, pin_memory=True))
    out = torch.full((4 * COUNT, 1 << 16), -1.0, device="cuda")
    for position, batch in enumerate(loader):
        keep_busy(LATE_MS)
        out[4 * position : 4 * position + 4].copy_(batch)
    assert torch.equal(out, torch.arange(4.0 * COUNT, device="cuda")[:, None].expand_as(out))


def test_control_without_wait(batches: list[torch.Tensor]) -> None:
    """Control: what a stream reads without waiting for the copy is what was there before."""
    side = torch.cuda.Stream()
    target = torch.zeros(SIZE, dtype=torch.int32, device="cuda")
    out = torch.ones_like(target)
    out.copy_(target)  # once before, so that nothing is loaded below
    keep_busy(1)
    out.fill_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy(50)  # as if the bus were busy
        target.copy_(batches[1], non_blocking=True)
    out.copy_(target)
    torch.cuda.synchronize()
    assert out.unique().tolist() == [0]
    assert torch.equal(target, all_numbers()[1])


def test_control_without_record_stream(batches: list[torch.Tensor]) -> None:
    """Control: memory of the side stream that is let go early is overwritten by the next copies before it is read."""
    side = torch.cuda.Stream()
    consumer = torch.cuda.current_stream()

    def naive() -> Iterator[torch.Tensor]:
        for source in batches:
            with torch.cuda.stream(side):
                batch = source.to("cuda", non_blocking=True)
            consumer.wait_stream(side)
            yield batch
            del batch

    out = unread()
    keep_busy(1)
    torch.cuda.synchronize()
    addresses = read(naive(), out, LATE_MS)
    assert len(addresses) < COUNT
    assert not torch.equal(out, all_numbers())
