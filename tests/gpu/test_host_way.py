"""The way back: values are those of the moment of the call, and seen only once they are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefetch import CUDAPrefetcher, to_host
from tests.gpu.helpers import COUNT, EACH_BACKGROUND, SIZE, TO_PINNED, keep_busy, profiled, streams

pytestmark = pytest.mark.gpu

HELD_MS = 200.0  # how long a producer keeps values back: the host needs a few ms to look for them


def ones() -> torch.Tensor:
    """As large as a batch."""
    return torch.ones(SIZE, dtype=torch.int32, device="cuda")


@pytest.fixture
def _warm() -> None:
    """What is allocated and loaded for once might wait for a running kernel."""
    source = ones()
    keep_busy(1)
    source.fill_(2)
    to_host(source).result()
    torch.cuda.synchronize()


@pytest.mark.usefixtures("_warm")
def test_late_producer() -> None:
    """While a kernel holds the values back the future is not done; they are those before the source was overwritten."""
    source = ones()
    torch.cuda.synchronize()
    keep_busy(HELD_MS)
    source.fill_(7)
    future = to_host({"values": source, "step": 3})
    source.zero_()
    assert not future.done()
    result = future.result()
    assert future.done()
    assert result["step"] == 3
    assert result["values"].unique().tolist() == [7]
    assert not result["values"].is_pinned()


@pytest.mark.usefixtures("_warm")
def test_control_read_at_once() -> None:
    """Control: an asynchronous copy to pinned memory that is read at once shows what was there before."""
    source = ones()
    target = torch.zeros(SIZE, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    keep_busy(HELD_MS)
    source.fill_(7)
    target.copy_(source, non_blocking=True)
    seen = target.clone()
    torch.cuda.synchronize()
    assert seen.unique().tolist() == [0]
    assert target.unique().tolist() == [7]


@pytest.mark.usefixtures("_warm")
def test_producer_on_a_side_stream() -> None:
    """Values are those of the stream that is current at the call; a source that is let go at once is safe."""
    stream = torch.cuda.Stream()
    futures = []
    with torch.cuda.stream(stream):
        for value in range(8):
            keep_busy(5)
            source = torch.full((SIZE,), value, dtype=torch.int32, device="cuda")
            futures.append(to_host(source))
            del source
    assert [future.result().unique().tolist() for future in futures] == [[value] for value in range(8)]


@EACH_BACKGROUND
def test_both_ways(batches: list[torch.Tensor], background: bool) -> None:
    """What a loop sends back while batches arrive is what it has computed from each of them."""
    total = torch.zeros(SIZE, dtype=torch.int32, device="cuda")
    futures = []
    for batch in CUDAPrefetcher(batches, "cuda", background=background):
        keep_busy(2)
        total.copy_(batch).neg_()
        futures.append(to_host(total))
    assert len(futures) == COUNT
    assert all(torch.equal(future.result(), -batch) for future, batch in zip(futures, batches, strict=True))


def test_profile(tmp_path: Path) -> None:
    """All copies go to pinned memory, on one stream, which is not that of the kernels."""
    source = ones()

    def loop() -> None:
        for _ in range(8):
            keep_busy(1)
            source.add_(1)
            to_host(source)

    loop()
    trace = profiled(loop, tmp_path)
    copies = trace.copies("DtoH")
    assert [copy.name for copy in copies] == [TO_PINNED] * 8
    assert len(streams(copies)) == 1
    assert streams(copies).isdisjoint(streams(trace.kernels()))
