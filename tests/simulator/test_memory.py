"""The two allocators: reuse, poison, pinned memory and what protects it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType


def test_last_freed_block_is_reused_first(any_sim: ModuleType) -> None:
    """On the stream it was allocated on: the order that exposes a missing record_stream."""
    first, second = (torch.empty(256, device="sim") for _ in range(2))
    addresses = first.data_ptr(), second.data_ptr()
    del first
    del second
    again = [torch.empty(256, device="sim") for _ in range(2)]
    assert [tensor.data_ptr() for tensor in again] == [addresses[1], addresses[0]]


def test_streams_do_not_share_freed_memory(any_sim: ModuleType) -> None:
    """A block returns to the pool of the stream it was allocated on."""
    tensor = torch.empty(256, device="sim")
    address = tensor.data_ptr()
    del tensor
    with torch.Stream("sim"):
        elsewhere = torch.empty(256, device="sim")
    assert elsewhere.data_ptr() != address
    assert torch.empty(256, device="sim").data_ptr() == address


def test_record_stream_delays_reuse(sim: ModuleType) -> None:
    """The block is kept while the recorded stream works, and reused afterwards."""
    side, home = torch.Stream("sim"), torch.accelerator.current_stream()
    tensor = torch.empty(256, device="sim")
    address = tensor.data_ptr()
    side.wait_stream(home)
    with side:
        sim.hold_kernel()
    tensor.record_stream(side)
    del tensor
    meanwhile = torch.empty(256, device="sim")
    assert meanwhile.data_ptr() != address
    sim.release_kernels()
    side.synchronize()
    assert torch.empty(256, device="sim").data_ptr() == address


def test_record_stream_delays_reuse_in_simulated_time(virtual_sim: ModuleType) -> None:
    """The same, by the simulated clock."""
    side = torch.Stream("sim")
    tensor = torch.empty(256, device="sim")
    address = tensor.data_ptr()
    with side:
        virtual_sim.busy(100)
    tensor.record_stream(side)
    del tensor
    meanwhile = torch.empty(256, device="sim")
    assert meanwhile.data_ptr() != address
    virtual_sim.host_busy(100)
    assert torch.empty(256, device="sim").data_ptr() == address


def test_recording_a_view_protects_the_whole_block(sim: ModuleType) -> None:
    """record_stream finds the block through the storage."""
    side = torch.Stream("sim")
    tensor = torch.empty(256, device="sim")
    address = tensor.data_ptr()
    with side:
        sim.hold_kernel()
    tensor[100:].record_stream(side)
    del tensor
    assert torch.empty(256, device="sim").data_ptr() != address
    sim.release_kernels()


@pytest.mark.parametrize(("dtype", "poisoned"), [(torch.float32, "nan"), (torch.int64, "-1"), (torch.uint8, "255")])
def test_memory_handed_out_is_poisoned(any_sim: ModuleType, dtype: torch.dtype, poisoned: str) -> None:
    """Uninitialised memory is never accidentally right."""
    for device in ("sim", "cpu"):
        tensor = torch.empty(5, dtype=dtype, device=device, pin_memory=device == "cpu")
        assert [str(value) for value in tensor.tolist()] == [poisoned] * 5


def test_poison_can_be_off_or_strict(any_sim: ModuleType) -> None:
    """0 leaves what was there; 2 poisons at free as well, which a late reader sees at once."""
    any_sim.configure(poison=0)
    tensor = torch.ones(256, device="sim")
    del tensor
    assert torch.empty(256, device="sim").sum().item() == 256
    any_sim.configure(poison=2)
    tensor = torch.ones(256, device="sim")
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.sum()
    del tensor
    assert ["free of memory" in race for race in any_sim.races()] == [True]


def test_statistics_follow_allocations(any_sim: ModuleType) -> None:
    """Allocated, reserved, peak and the event counters, through torch's generic interface."""
    allocated, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() - allocated == 1 << 20
    assert torch.accelerator.memory_reserved() - reserved == 1 << 20
    del tensor
    assert torch.accelerator.memory_allocated() == allocated
    assert torch.accelerator.memory_reserved() - reserved == 1 << 20
    assert torch.accelerator.max_memory_allocated() - allocated == 1 << 20
    assert torch.accelerator.memory_stats()["num_device_alloc"] == 1
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == reserved
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == allocated


def test_memory_in_use_by_another_stream_stays_active(sim: ModuleType) -> None:
    """Freed but recorded memory is not allocated any more, and not reusable yet."""
    side = torch.Stream("sim")
    before = torch.accelerator.memory_stats()["active_bytes.all.current"]
    tensor = torch.empty(256, device="sim")
    with side:
        sim.hold_kernel()
    tensor.record_stream(side)
    del tensor
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] - before == 1024
    sim.release_kernels()
    torch.accelerator.synchronize()
    torch.empty(0, device="sim")  # asks for nothing, hence frees nothing
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] - before == 1024
    del side
    torch.empty(1, device="sim")  # an allocation looks what has finished
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] == before


def test_pinned_memory_is_recognised(any_sim: ModuleType) -> None:
    """Through views, interior pointers and other dtypes; ordinary memory is not."""
    tensor = torch.ones(100).pin_memory()
    assert tensor.is_pinned()
    assert tensor[10:].is_pinned()
    assert tensor.view(10, 10).t().is_pinned()
    assert tensor.untyped_storage().is_pinned()
    assert torch.from_numpy(tensor.numpy()[7:]).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(100).is_pinned()
    assert not torch.ones(3, device="sim").is_pinned()
    assert torch.empty(0).pin_memory().numel() == 0


def test_pinned_allocations_are_counted(any_sim: ModuleType) -> None:
    """Reused blocks count like new ones."""
    before = any_sim.pinned_allocations()
    for _ in range(3):
        torch.ones(4).pin_memory()
    assert any_sim.pinned_allocations() - before == 3


def test_pinned_blocks_count_what_is_new(any_sim: ModuleType) -> None:
    """A block that is handed out again is no new one; one that is asked for beside it is."""
    size = 12_345_678  # like nothing else here, so that no cached block fits
    first = torch.empty(size, pin_memory=True)
    before = any_sim.pinned_blocks()
    del first
    first = torch.empty(size, pin_memory=True)
    assert any_sim.pinned_blocks() == before
    second = torch.empty(size, pin_memory=True)
    assert any_sim.pinned_blocks() == before + 1
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("part", [slice(None), slice(10, None)], ids=["whole", "interior"])
def test_freed_pinned_memory_is_kept_while_a_copy_reads_it(sim: ModuleType, part: slice) -> None:
    """Dropping the source early is safe, also if the copy was from a view inside the block."""
    side = torch.Stream("sim")
    source = torch.ones(100).pin_memory()
    address = source.data_ptr()
    sim.hold_copies("h2d")
    with side:
        copied = source[part].to("sim", non_blocking=True)
    del source
    other = torch.zeros(100).pin_memory()
    assert other.data_ptr() != address
    sim.release_copies("h2d")
    side.synchronize()
    assert copied.cpu().eq(1).all()
    assert torch.zeros(100).pin_memory().data_ptr() == address


def test_freed_pinned_memory_is_kept_in_simulated_time(virtual_sim: ModuleType) -> None:
    """The same, by the simulated clock."""
    virtual_sim.configure(latency_us=100)
    source = torch.ones(100).pin_memory()
    address = source.data_ptr()
    source.to("sim", non_blocking=True)
    del source
    other = torch.zeros(100).pin_memory()
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.zeros(100).pin_memory().data_ptr() == address


def test_freeing_the_source_early_is_no_race(any_sim: ModuleType) -> None:
    """The allocator protects a freed block, so nothing is reported and the data is right."""
    copies = []
    for i in range(20):
        source = torch.full((100,), float(i)).pin_memory()
        copies.append(source.to("sim", non_blocking=True))
        del source
        torch.full((100,), -1.0).pin_memory()
    assert [copy.unique().tolist() for copy in copies] == [[float(i)] for i in range(20)]
    assert any_sim.races() == []


def overwrite(source: torch.Tensor) -> torch.Tensor:
    """Copy, and overwrite the source before anybody waited for the copy."""
    copied = source.to("sim", non_blocking=True)
    source.fill_(-1)
    return copied


@pytest.mark.parametrize("noticed_by", ["asking", "waiting", "polling", "copying again", "freeing"])
def test_overwriting_pinned_memory_under_a_copy_is_reported_once(any_sim: ModuleType, noticed_by: str) -> None:
    """At the latest when the host learns that the copy is over, and however it learns it."""
    source = torch.ones(100).pin_memory()
    event = torch.Event("sim")
    copied = overwrite(source)
    event.record()
    if noticed_by == "waiting":
        torch.accelerator.synchronize()
        source.fill_(-2)  # lawful by now, and must not be confused with the first
    elif noticed_by == "polling":
        while not event.query():
            pass
        source.fill_(-2)
    elif noticed_by == "copying again":
        copied.copy_(source, non_blocking=True)
    elif noticed_by == "freeing":
        del source
    races = any_sim.races()
    assert len(races) == 1
    assert "the host overwrites pinned memory which copy_h2d on stream 0 may still read (400 bytes" in races[0]
    torch.accelerator.synchronize()
    assert any_sim.races() == []


def test_overwriting_is_reported_though_the_copy_has_run(sim: ModuleType) -> None:
    """A copy that happened to be over was not known to be: what counts is what the program waited for."""
    source = torch.ones(100).pin_memory()
    sim.configure(latency_us=0)
    sim.trace()
    copied = source.to("sim", non_blocking=True)
    while not sim.trace():  # it has run when it is in the trace, and looking there is no wait
        pass
    source.fill_(-1)
    assert len(sim.races()) == 1
    assert copied.eq(1).all()


def test_overwriting_after_waiting_is_lawful(any_sim: ModuleType) -> None:
    """Through the stream, an event, or another stream that waited for the copy."""
    source = torch.ones(100).pin_memory()
    side, other = torch.Stream("sim"), torch.Stream("sim")
    for value, wait in enumerate((side.synchronize, lambda: side.record_event().synchronize(), other.synchronize)):
        source.fill_(value)
        with side:
            source.to("sim", non_blocking=True)
        other.wait_stream(side)
        wait()
    source.fill_(-1)
    assert any_sim.races() == []


def test_the_device_may_overwrite_pinned_memory_in_order(any_sim: ModuleType) -> None:
    """A copy back into the same buffer on the same stream comes after the copy from it; on another it is a race."""
    source = torch.ones(100).pin_memory()
    twice = source.to("sim", non_blocking=True) * 2
    source.copy_(twice, non_blocking=True)
    torch.accelerator.synchronize()
    assert source.eq(2).all()
    assert any_sim.races() == []
    with torch.Stream("sim"):
        source.to("sim", non_blocking=True)
    source.copy_(twice, non_blocking=True)
    races = any_sim.races()
    assert len(races) == 1
    assert "copy_d2h on stream 0 overwrites what is read by copy_h2d" in races[0]


def test_results_are_not_there_before_the_host_waited(any_sim: ModuleType) -> None:
    """A copy to the host shows its result after the wait, and not before it, in both modes."""
    on_device = torch.ones(100, device="sim")
    torch.accelerator.synchronize()
    result = torch.empty(100).pin_memory().fill_(7)
    if not any_sim.setting("virtual"):
        any_sim.hold_copies("d2h")
    result.copy_(on_device, non_blocking=True)
    assert result.eq(7).all()
    any_sim.release_copies("d2h")
    torch.accelerator.synchronize()
    assert result.eq(1).all()


def test_the_device_sees_its_own_copy_in_pinned_memory(any_sim: ModuleType) -> None:
    """Down and up again on one stream, without the host: in order."""
    bounce = torch.empty(100).pin_memory()
    bounce.copy_(torch.ones(100, device="sim"), non_blocking=True)
    back = bounce.to("sim", non_blocking=True)
    assert back.sum().item() == 100
    assert any_sim.races() == []
