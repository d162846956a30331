"""Two devices that share nothing, and streams that belong to threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def current() -> tuple[int, int]:
    """This thread's current device and stream."""
    return torch.accelerator.current_device_index(), torch.accelerator.current_stream().stream_id


def test_it_is_the_accelerator(any_sim: ModuleType) -> None:
    """Torch finds the device type through its generic interface."""
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("sim")
    assert torch.accelerator.device_count() == any_sim.DEVICE_COUNT == 2
    assert torch.ones(2).to("sim").device == torch.device("sim", 0)
    assert torch.ones(2).to("sim:1").device == torch.device("sim", 1)
    assert getattr(torch.ones(2, device="sim"), "is_sim")  # noqa: B009 -- known at run time only
    with pytest.raises(RuntimeError, match="no device 2"):
        torch.ones(2, device="sim:2")


def test_streams_belong_to_a_device(any_sim: ModuleType) -> None:
    """Each device has a default stream and a pool; making another device's stream current changes the device."""
    streams = [torch.Stream(f"sim:{index}") for index in range(2)]
    assert [stream.device_index for stream in streams] == [0, 1]
    defaults = [torch.accelerator.current_stream(index) for index in range(2)]
    assert len({stream.stream_id for stream in streams + defaults}) == 4
    with streams[1]:
        assert current() == (1, streams[1].stream_id)
        assert torch.ones(2, device="sim").device.index == 1
    assert current() == (0, defaults[0].stream_id)


def test_nested_streams_are_restored(any_sim: ModuleType) -> None:
    """Leaving a stream's block brings back the one before."""
    outer, inner = torch.Stream("sim"), torch.Stream("sim")
    before = current()
    with outer:
        with inner:
            assert current() == (0, inner.stream_id)
        assert current() == (0, outer.stream_id)
    assert current() == before


def test_current_device_and_stream_are_per_thread(any_sim: ModuleType) -> None:
    """A new thread starts on device 0's default stream and does not disturb this one."""
    stream = torch.Stream("sim:1")

    def elsewhere() -> tuple[tuple[int, int], tuple[int, int]]:
        at_start = current()
        torch.accelerator.set_stream(torch.Stream("sim:0"))
        return at_start, current()

    default = current()
    with stream:
        at_start, changed = in_thread(elsewhere)
        assert at_start == default
        assert changed != default
        assert current() == (1, stream.stream_id)


def test_the_pool_wraps_around(any_sim: ModuleType) -> None:
    """Like CUDA's, the pool has 32 streams; the 33rd is the first again."""
    ids = [torch.Stream("sim:1").stream_id for _ in range(33)]
    assert len(set(ids)) == 32
    assert ids[32] == ids[0]


def test_synchronize_waits_for_one_device(sim: ModuleType) -> None:
    """Work held on device 0 does not stop device 1."""
    sim.hold_kernel()
    on_other = torch.ones(3, device="sim:1") * 2
    torch.accelerator.synchronize(1)
    assert torch.accelerator.current_stream(1).query()
    assert not torch.accelerator.current_stream(0).query()
    assert on_other.tolist() == [2, 2, 2]
    sim.release_kernels()


def test_each_device_has_its_own_engines(virtual_sim: ModuleType) -> None:
    """Copies to two devices run at the same time."""
    virtual_sim.configure(latency_us=100)
    source = torch.ones(4).pin_memory()
    started = virtual_sim.host_time_ns()
    for index in range(2):
        source.to(f"sim:{index}", non_blocking=True)
    for index in range(2):
        torch.accelerator.synchronize(index)
    assert virtual_sim.host_time_ns() - started == 100_000


def test_memory_is_counted_per_device(any_sim: ModuleType) -> None:
    """An allocation shows in the statistics of its device only."""
    before = [torch.accelerator.memory_allocated(index) for index in range(2)]
    tensor = torch.empty(1024, device="sim:1")
    after = [torch.accelerator.memory_allocated(index) for index in range(2)]
    assert tensor.device.index == 1
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 4096]


def test_no_copies_between_devices(any_sim: ModuleType) -> None:
    """They are not simulated, and say so."""
    with pytest.raises(RuntimeError, match="no copies between devices"):
        torch.ones(2, device="sim:0").to("sim:1")


def test_kernels_run_on_the_device_of_their_arguments(any_sim: ModuleType) -> None:
    """Whatever the current device is."""
    on_other = torch.ones(2, device="sim:1")
    torch.accelerator.synchronize(1)
    any_sim.trace()
    result = on_other + 1
    torch.accelerator.synchronize(1)
    assert [span.stream for span in any_sim.trace()] == [torch.accelerator.current_stream(1).stream_id]
    assert result.tolist() == [2, 2]
    assert torch.accelerator.current_device_index() == 0
