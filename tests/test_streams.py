"""Copies run beside the consumer, are seen by the right stream, and leave the caller's state alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher, PrefetchWarning
from tests.helpers import BY_MEMORY, Numbered, numbered

ACCELERATOR = torch.accelerator


def caller_state() -> tuple[Any, ...]:
    """Everything of the calling thread that a prefetcher could disturb."""
    streams = [ACCELERATOR.current_stream(index) for index in range(2)]
    return (ACCELERATOR.current_device_index(), *streams, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


@BY_MEMORY
@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 4])
@pytest.mark.parametrize("background", [False, True])
def test_values_under_a_late_reader(any_sim: Any, prefetch_batches: int, background: bool, memory: Any) -> None:
    """With slow copies, a slow consumer and poisoned memory every value is right and nothing races."""
    any_sim.configure(latency_us=700)
    sums = []
    for batch in CUDAPrefetcher(
        Numbered(12), "sim", prefetch_batches=prefetch_batches, background=background, memory=memory
    ):
        any_sim.busy(1500)
        sums.append(batch.mean())
    assert torch.stack(sums).tolist() == [float(i + 1) for i in range(12)]
    assert any_sim.races() == []


@BY_MEMORY
@pytest.mark.parametrize("prefetch_batches", [0, 2])
@pytest.mark.parametrize("background", [False, True])
def test_values_under_slow_copies(any_sim: Any, prefetch_batches: int, background: bool, memory: Any) -> None:
    """A consumer that is faster than the copies waits for each of them."""
    any_sim.configure(latency_us=3000)
    sums = [
        batch.mean()
        for batch in CUDAPrefetcher(
            Numbered(8), "sim", prefetch_batches=prefetch_batches, background=background, memory=memory
        )
    ]
    assert torch.stack(sums).tolist() == [float(i + 1) for i in range(8)]
    assert any_sim.races() == []


@BY_MEMORY
def test_copies_overlap_a_running_kernel(sim: Any, memory: Any) -> None:
    """While a kernel of the consumer is held, the look-ahead's copies land all the same."""
    prefetcher = CUDAPrefetcher(Numbered(4), "sim", prefetch_batches=2, memory=memory)
    iterator = iter(prefetcher)
    first = next(iterator)
    sim.hold_kernel()
    total = first.sum()
    prefetcher._side.stream.synchronize()  # type: ignore[union-attr]  # would never return if a copy waited
    assert [span.name for span in sim.trace()].count("copy_h2d") == 3
    sim.release_kernels()
    assert total.item() == float(first.numel())


@BY_MEMORY
def test_host_is_not_held_by_copies(sim: Any, memory: Any) -> None:
    """A batch is handed out, and the step on it queued, while its copy has not even begun."""
    sim.hold_copies("h2d")
    iterator = iter(CUDAPrefetcher(Numbered(3), "sim", memory=memory))
    batch = next(iterator)
    total = batch.sum()
    done = ACCELERATOR.current_stream().record_event()
    assert not done.query()
    sim.release_copies("h2d")
    assert total.item() == float(batch.numel())


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_one_side_stream_for_life(sim: Any, background: bool, memory: Any) -> None:
    """All passes of a prefetcher copy on the same stream, which is not the consumer's."""
    prefetcher = CUDAPrefetcher(Numbered(3), "sim", background=background, memory=memory)
    for _ in range(5):
        for batch in prefetcher:
            batch.sum()
    ACCELERATOR.synchronize()
    streams = {span.stream for span in sim.trace() if span.name == "copy_h2d"}
    assert len(streams) == 1
    assert streams != {ACCELERATOR.current_stream().stream_id}


def test_no_stream_before_the_first_pass(sim: Any) -> None:
    """The side stream is made with the first pass, and stays."""
    prefetcher = CUDAPrefetcher(Numbered(1), "sim")
    assert prefetcher._side is None
    list(prefetcher)
    side = prefetcher._side
    list(prefetcher)
    assert side is not None
    assert prefetcher._side is side


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_consumer_changes_streams(any_sim: Any, background: bool, memory: Any) -> None:
    """Each batch is made ready for the stream that is current when it is asked for."""
    any_sim.configure(latency_us=1000)
    streams = [torch.Stream("sim"), torch.Stream("sim"), ACCELERATOR.current_stream()]
    iterator = iter(CUDAPrefetcher(Numbered(30), "sim", background=background, memory=memory))
    sums = []
    for position in range(30):
        ACCELERATOR.set_stream(streams[position % 3])
        batch = next(iterator)
        any_sim.busy(800)
        sums.append(batch.mean())
        del batch
    ACCELERATOR.set_stream(streams[2])
    ACCELERATOR.synchronize()
    assert [value.item() for value in sums] == [float(i + 1) for i in range(30)]
    assert any_sim.races() == []


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_iterated_from_another_thread(sim: Any, background: bool, memory: Any) -> None:
    """Made in one thread, iterated in another on that thread's own stream: values and memory are safe."""
    sim.configure(latency_us=500)
    prefetcher = CUDAPrefetcher(Numbered(8), "sim:1", background=background, memory=memory)
    values: list[float] = []

    def consume() -> None:
        ACCELERATOR.set_stream(torch.Stream("sim:1"))
        sums = []
        for batch in prefetcher:
            sim.busy(1000)
            sums.append(batch.mean())
        values.extend(value.item() for value in sums)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    assert values == [float(i + 1) for i in range(8)]
    assert sim.races() == []


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_callers_state_is_left_alone(sim: Any, own: int, current: int, background: bool) -> None:
    """Device, streams of both devices and grad mode are what they were, at every batch, error and end."""
    ACCELERATOR.set_stream(torch.Stream("sim:1"))
    ACCELERATOR.set_stream(torch.Stream("sim:0"))
    ACCELERATOR.set_device_index(current)
    before = caller_state()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if batch[0].item() == 2:
            raise ValueError("two")
        return batch

    prefetcher = CUDAPrefetcher(
        Numbered(4), f"sim:{own}", prefetch_batches=1, transform=transform, background=background
    )
    assert caller_state() == before
    iterator = iter(prefetcher)
    assert caller_state() == before
    seen = []
    for _ in range(6):
        try:
            batch = next(iterator)
        except ValueError:
            seen.append("error")
        except StopIteration:
            seen.append("end")
        else:
            seen.append(str(batch.device))
        assert caller_state() == before
    assert seen == [f"sim:{own}", "error", f"sim:{own}", f"sim:{own}", "end", "end"]


@BY_MEMORY
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("background", [False, True])
def test_grad_modes(sim: Any, mode: Any, background: bool, memory: Any) -> None:
    """Under any mode batches are ordinary tensors without a graph, and the mode holds in the loop."""
    with mode():
        before = caller_state()
        prefetcher = CUDAPrefetcher(
            numbered(8),
            "sim",
            dtype=torch.float64,
            transform=lambda batch: batch * 2,
            background=background,
            memory=memory,
        )
        for batch in prefetcher:
            assert not batch.is_inference()
            assert not batch.requires_grad
            assert caller_state() == before
    weight = torch.ones(1, device="sim", requires_grad=True)
    (batch * weight).sum().backward()  # an inference tensor could not be saved for this
    assert weight.grad is not None
    assert weight.grad.item() == 16.0 * batch.numel()


@pytest.mark.parametrize("background", [False, True])
def test_two_prefetchers_on_two_devices(sim: Any, background: bool) -> None:
    """Side by side on two devices each keeps to its own."""
    pairs = zip(
        CUDAPrefetcher(Numbered(5), "sim:0", background=background),
        CUDAPrefetcher(Numbered(5), "sim:1", background=background),
        strict=True,
    )
    for position, (left, right) in enumerate(pairs):
        assert (str(left.device), str(right.device)) == ("sim:0", "sim:1")
        assert (left[0].item(), right[0].item()) == (position + 1, position + 1)


def test_device_without_streams(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without streams gets plain copies, in the caller's stream, and no look-ahead."""
    monkeypatch.setattr("prefetch._device._WITHOUT_STREAMS", frozenset({"sim"}))
    prefetcher = CUDAPrefetcher(numbered(3), "sim", dtype=torch.float64, transform=lambda batch: batch + 1)
    got = [(str(batch.device), batch.dtype, batch[0].item()) for batch in prefetcher]
    assert got == [("sim:0", torch.float64, value) for value in (2.0, 3.0, 4.0)]
    streams = {span.stream for span in sim.trace() if span.name == "copy_h2d"}
    assert streams == {ACCELERATOR.current_stream().stream_id}


@pytest.mark.parametrize("background", [False, True])
def test_device_without_streams_copies_synchronously(
    sim: Any, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Without a stream to wait for, a source may be overwritten as soon as its batch is there."""
    monkeypatch.setattr("prefetch._device._WITHOUT_STREAMS", frozenset({"sim"}))
    sim.configure(latency_us=3000)
    source = torch.ones(1 << 14).pin_memory()
    (batch,) = CUDAPrefetcher([source], "sim", background=background)
    source.fill_(7)
    assert batch.unique().tolist() == [1.0]


@BY_MEMORY
@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 3])
@pytest.mark.parametrize(("copy_ms", "compute_ms"), [(5, 10), (9, 10), (10, 10), (10, 5), (1, 20), (20, 1)])
@pytest.mark.parametrize("background", [False, True])
def test_makespan(
    virtual_sim: Any, copy_ms: int, compute_ms: int, prefetch_batches: int, background: bool, memory: Any
) -> None:
    """In simulated time a pass takes one copy and all compute, or all copies and one compute, within 1 %.

    Without look-ahead, memory="record_stream" alone does.
    """
    n = 20
    batches = numbered(n)
    virtual_sim.configure(latency_us=copy_ms * 1000)
    start = virtual_sim.host_time_ns()
    sums = []
    for batch in CUDAPrefetcher(
        batches, "sim", prefetch_batches=prefetch_batches, background=background, memory=memory
    ):
        virtual_sim.busy(compute_ms * 1000)
        sums.append(batch.mean())
    ACCELERATOR.synchronize()
    took_ms = (virtual_sim.host_time_ns() - start) / 1e6
    ideal_ms = copy_ms + n * compute_ms if compute_ms >= copy_ms else n * copy_ms + compute_ms
    # Memory that is known to be free only when a batch is asked for comes too late for a copy beside the last step.
    waits_for_memory = prefetch_batches == 0 and memory != "record_stream"
    assert ideal_ms <= took_ms <= (n * (copy_ms + compute_ms) if waits_for_memory else 1.01 * ideal_ms)
    assert torch.stack(sums).tolist() == [float(i + 1) for i in range(n)]
    assert virtual_sim.races() == []


@pytest.mark.parametrize("background", [False, True])
def test_pageable_memory_is_told_once(sim: Any, background: bool) -> None:
    """The first leaf that cannot be copied asynchronously is described, with the remedy, at the line of the loop."""
    prefetcher = CUDAPrefetcher([torch.full((2, 3), float(i)) for i in range(4)], "sim", background=background)
    with pytest.warns(PrefetchWarning, match=r"batch \(shape \(2, 3\), torch.float32\).*pin_memory=True") as warned:
        values = [batch[0, 0].item() for _ in range(2) for batch in prefetcher]
    assert values == [0.0, 1.0, 2.0, 3.0] * 2
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("background", [False, True])
def test_warning_made_an_error_costs_no_batch(sim: Any, background: bool) -> None:
    """Where warnings are errors, the loop that goes on after it has every batch."""
    iterator = iter(CUDAPrefetcher([torch.full((1,), float(i)) for i in range(4)], "sim", background=background))
    first = next(iterator)
    with pytest.raises(PrefetchWarning):
        next(iterator)
    assert [first.item(), *(batch.item() for batch in iterator)] == [0.0, 1.0, 2.0, 3.0]
