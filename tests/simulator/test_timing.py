"""Simulated time is exact; real work is asynchronous and can be held."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType

MEGABYTE = 1_000_000


def pinned(nbytes: int) -> torch.Tensor:
    """A pinned tensor of this size."""
    return torch.zeros(nbytes, dtype=torch.uint8).pin_memory()


def elapsed_us(sim: ModuleType, started_ns: int) -> float:
    """Wait for the device; how long that took since then, in simulated time."""
    for device in range(sim.DEVICE_COUNT):
        torch.accelerator.synchronize(device)
    return float(sim.host_time_ns() - started_ns) / 1e3


@pytest.mark.parametrize(("latency_us", "mb_s", "expected_us"), [(20, 0, 20), (0, 100, 10_000), (7, 1_000, 1_007)])
def test_a_copy_lasts_latency_plus_bytes_over_bandwidth(
    virtual_sim: ModuleType, latency_us: int, mb_s: int, expected_us: int
) -> None:
    """Both directions follow the formula, each with its own bandwidth."""
    virtual_sim.configure(latency_us=latency_us, h2d_mb_s=mb_s, d2h_mb_s=2 * mb_s)
    source = pinned(MEGABYTE)
    started = virtual_sim.host_time_ns()
    on_device = source.to("sim", non_blocking=True)
    assert elapsed_us(virtual_sim, started) == expected_us
    started = virtual_sim.host_time_ns()
    source.copy_(on_device, non_blocking=True)
    assert elapsed_us(virtual_sim, started) == latency_us + (expected_us - latency_us) / 2


def test_an_engine_runs_one_copy_at_a_time(virtual_sim: ModuleType) -> None:
    """Copies in one direction queue up, whatever their streams; the other direction is independent."""
    virtual_sim.configure(latency_us=100)
    on_device = torch.zeros(8, device="sim")
    torch.accelerator.synchronize()
    virtual_sim.trace()
    up, also_up, down = (torch.Stream("sim") for _ in range(3))
    source, target = pinned(8), pinned(32).view(torch.float32)
    started = virtual_sim.host_time_ns()
    with up:
        source.to("sim", non_blocking=True)
    with also_up:
        source.to("sim", non_blocking=True)
    with down:
        target.copy_(on_device, non_blocking=True)
    assert elapsed_us(virtual_sim, started) == 200
    spans = [(span.name, span.stream, span.start_ns - started, span.end_ns - started) for span in virtual_sim.trace()]
    assert spans == [
        ("copy_h2d", up.stream_id, 0, 100_000),
        ("copy_h2d", also_up.stream_id, 100_000, 200_000),
        ("copy_d2h", down.stream_id, 0, 100_000),
    ]


def test_a_waiting_copy_does_not_block_its_engine(virtual_sim: ModuleType) -> None:
    """A copy whose stream still waits leaves the engine to one that is ready, though it was submitted first."""
    virtual_sim.configure(latency_us=100)
    virtual_sim.busy(1_000)
    late, ready = torch.Stream("sim"), torch.Stream("sim")
    late.wait_stream(torch.accelerator.current_stream())
    source = pinned(8)
    with late:
        source.to("sim", non_blocking=True)
    with ready:
        source.to("sim", non_blocking=True)
    started = virtual_sim.host_time_ns()
    ready.synchronize()
    assert virtual_sim.host_time_ns() - started == 100_000
    late.synchronize()
    assert virtual_sim.host_time_ns() - started == 1_100_000


def test_kernels_overlap_copies_and_other_streams(virtual_sim: ModuleType) -> None:
    """Work on different streams runs side by side, work on one stream in order."""
    virtual_sim.configure(latency_us=300, kernel_us=50)
    side = torch.Stream("sim")
    source = pinned(8)
    started = virtual_sim.host_time_ns()
    virtual_sim.busy(200)
    torch.zeros(4, device="sim")  # an operator lasts kernel_us
    with side:
        source.to("sim", non_blocking=True)
    assert elapsed_us(virtual_sim, started) == 300
    started = virtual_sim.host_time_ns()
    virtual_sim.busy(200)
    torch.zeros(4, device="sim")
    assert elapsed_us(virtual_sim, started) == 250


def test_pageable_and_blocking_copies_make_the_host_wait(any_sim: ModuleType) -> None:
    """Only a non-blocking copy from pinned memory returns before it is over."""
    any_sim.configure(latency_us=500)
    pageable = torch.zeros(8)
    source = pageable.pin_memory()
    for tensor, non_blocking, waited_ns in ((source, True, 0), (source, False, 500_000), (pageable, True, 500_000)):
        started = any_sim.host_time_ns()
        tensor.to("sim", non_blocking=non_blocking)
        assert any_sim.host_time_ns() - started == waited_ns
        torch.accelerator.synchronize()


def test_host_time_moves_with_the_host(virtual_sim: ModuleType) -> None:
    """The host's own work takes simulated time, and what it submits starts no earlier."""
    started = virtual_sim.host_time_ns()
    virtual_sim.host_busy(70)
    virtual_sim.busy(30)
    assert elapsed_us(virtual_sim, started) == 100


def test_events_in_virtual_mode(virtual_sim: ModuleType) -> None:
    """elapsed_time is exact, an unfinished event says so, and polling for it comes to an end."""
    first, last = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    first.record()
    virtual_sim.busy(1_500)
    last.record()
    assert first.query()
    assert not last.query()
    polls = 0
    while not last.query():
        polls += 1
    assert 1_000 < polls <= 1_500
    started = virtual_sim.host_time_ns()
    last.synchronize()
    assert virtual_sim.host_time_ns() == started
    assert first.elapsed_time(last) == 1.5


def test_an_event_that_was_never_recorded_is_finished(any_sim: ModuleType) -> None:
    """There is nothing to wait for."""
    event = torch.Event("sim")
    assert event.query()
    event.synchronize()
    event.wait()
    assert any_sim.races() == []


def test_events_in_threads_mode(sim: ModuleType) -> None:
    """An event is finished when the work before it is, and only then; timing events measure real time."""
    first, last = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    first.record()
    sim.hold_kernel()
    last.record()
    assert not last.query()
    assert not torch.accelerator.current_stream().query()
    sim.release_kernels()
    last.synchronize()
    assert last.query()
    assert torch.accelerator.current_stream().query()
    assert first.elapsed_time(last) > 0


def test_recording_again_replaces_the_event(sim: ModuleType) -> None:
    """Who waited for the first recording is not held up by the second."""
    event = torch.Event("sim")
    event.record()
    other = torch.Stream("sim")
    other.wait_event(event)
    sim.hold_kernel()
    event.record()
    other.synchronize()
    assert not event.query()
    sim.release_kernels()
    event.synchronize()
    assert event.query()


def test_waiting_releases_the_gil(sim: ModuleType) -> None:
    """Another thread can release the kernel that this one waits for."""
    sim.hold_kernel()
    waiting = threading.Event()

    def release() -> None:
        waiting.wait()
        sim.release_kernels()

    thread = threading.Thread(target=release)
    thread.start()
    waiting.set()
    torch.accelerator.synchronize()
    thread.join()
    assert torch.accelerator.current_stream().query()


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_held_copies_wait_and_only_those(sim: ModuleType, direction: str) -> None:
    """A held engine stops its direction; kernels and the other direction go on."""
    on_device = torch.zeros(8, device="sim")
    torch.accelerator.synchronize()
    up, down = torch.Stream("sim"), torch.Stream("sim")
    source, target = torch.ones(8).pin_memory(), torch.empty(8).pin_memory()
    sim.hold_copies(direction)
    with up:
        source.to("sim", non_blocking=True)
    with down:
        target.copy_(on_device, non_blocking=True)
    held, free = (up, down) if direction == "h2d" else (down, up)
    free.synchronize()
    torch.accelerator.current_stream().synchronize()
    assert not held.query()
    sim.release_copies(direction)
    held.synchronize()
    assert held.query()


def test_held_kernels_end_at_the_next_release(sim: ModuleType) -> None:
    """A release ends those queued before it, not those queued after it."""
    current = torch.accelerator.current_stream()
    sim.hold_kernel()
    sim.release_kernels()
    current.synchronize()
    sim.hold_kernel()
    assert not current.query()
    sim.release_kernels()
    current.synchronize()
    assert current.query()
