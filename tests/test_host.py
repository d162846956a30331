"""The way back: right values, seen only when they are there, with bounded memory, while the device goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher, HostCopier, HostFuture, to_host
from tests.host_helpers import BYTES, SIZE, host_us, ones, value_of

ACCELERATOR = torch.accelerator


class TestValues:
    """What is handed out is what the tensor held at the moment of the call, and nothing before it is there."""

    def test_not_before_the_copy(self, sim: Any) -> None:
        """While the copy is held the future is not done; after it the values are right."""
        sim.hold_copies("d2h")
        future = to_host({"loss": ones(3.0)})
        assert not future.done()
        sim.release_copies("d2h")
        assert value_of(future.result()["loss"]) == 3.0
        assert future.done()

    def test_slow_copy(self, sim: Any) -> None:
        """With a copy that takes 30 ms the future is not done at once, and its result waits."""
        sim.configure(latency_us=30_000)
        future = to_host(ones(3.0))
        assert not future.done()
        assert value_of(future.result()) == 3.0

    def test_visible_after_the_event_only(self, virtual_sim: Any) -> None:
        """A result takes the host as long as the copy takes, to the microsecond."""
        virtual_sim.configure(latency_us=700)
        source = ones(3.0)
        ACCELERATOR.synchronize()
        start = virtual_sim.host_time_ns()
        future = to_host(source)
        assert host_us(virtual_sim, start) == 0
        assert value_of(future.result()) == 3.0
        assert host_us(virtual_sim, start) == 700

    def test_done_in_the_end(self, virtual_sim: Any) -> None:
        """Asked once each microsecond, a future is done when its copy is, and stays so; the result waits no more."""
        virtual_sim.configure(latency_us=100)
        source = ones(3.0)
        ACCELERATOR.synchronize()
        future = to_host(source)
        start = virtual_sim.host_time_ns()
        assert [future.done() for _ in range(103)] == [False] * 100 + [True] * 3
        assert value_of(future.result()) == 3.0
        assert host_us(virtual_sim, start) == 100

    def test_same_objects_each_time(self, sim: Any) -> None:
        """Every call of result() gives the same tree, in several threads too."""
        sim.configure(latency_us=2000)
        future = to_host([ones(3.0)])
        results: list[Any] = []
        threads = [threading.Thread(target=lambda: results.append(future.result())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [result is results[0] for result in results] == [True] * 4
        assert value_of(results[0][0]) == 3.0

    def test_result_belongs_to_the_user(self, sim: Any) -> None:
        """What the user writes into a result stays there."""
        future = to_host(ones(3.0))
        future.result().fill_(7.0)
        to_host(ones()).result()
        assert value_of(future.result()) == 7.0

    def test_source_overwritten(self, any_sim: Any) -> None:
        """What is queued after the call, in place, does not reach the values."""
        any_sim.configure(latency_us=3000)
        source = ones(3.0)
        futures = []
        for _ in range(3):
            futures.append(to_host(source))
            source.mul_(2)
        assert [value_of(future.result()) for future in futures] == [3.0, 6.0, 12.0]
        assert any_sim.races() == []

    def test_source_dropped(self, sim: Any) -> None:
        """The source's memory is free at once, the snapshot's when the copy is done, and neither before it may be."""
        reserved = ACCELERATOR.memory_reserved()
        sim.hold_copies("d2h")
        future = to_host(ones(3.0))
        later = [ones(9.0) for _ in range(2)]
        assert ACCELERATOR.memory_reserved() - reserved == 3 * BYTES  # one of the two has the source's block
        sim.release_copies("d2h")
        assert value_of(future.result()) == 3.0
        later.append(ones(9.0))
        assert ACCELERATOR.memory_reserved() - reserved == 3 * BYTES  # this one the snapshot's
        assert [value_of(tensor.cpu()) for tensor in later] == [9.0] * 3
        assert sim.races() == []

    def test_late_producer(self, any_sim: Any) -> None:
        """The copy waits for the kernel that computes the values."""
        any_sim.configure(kernel_us=3000)
        source = ones(1.0)
        source.add_(2.0)
        assert value_of(to_host(source).result()) == 3.0
        assert any_sim.races() == []

    def test_producer_on_another_stream(self, any_sim: Any) -> None:
        """Values are those in the order of the stream that is current at the call, not of the default stream."""
        any_sim.configure(kernel_us=3000)
        stream = torch.Stream("sim")
        with stream:
            source = ones(1.0)
            source.add_(2.0)
            future = to_host(source)
            source.zero_()
        assert value_of(future.result()) == 3.0
        assert any_sim.races() == []

    def test_caller_does_not_wait(self, virtual_sim: Any) -> None:
        """What the caller queues next runs beside the copy."""
        virtual_sim.configure(latency_us=5000)
        source = ones(3.0)
        ACCELERATOR.synchronize()
        start = virtual_sim.host_time_ns()
        future = to_host(source)
        virtual_sim.busy(5000)
        ACCELERATOR.current_stream().synchronize()
        future.result()
        assert host_us(virtual_sim, start) == 5000

    def test_not_behind_later_copies(self, virtual_sim: Any) -> None:
        """The first result waits for its own copy, not for those queued behind it."""
        virtual_sim.configure(latency_us=1000)
        sources = [ones(float(i)) for i in range(3)]
        ACCELERATOR.synchronize()
        start = virtual_sim.host_time_ns()
        futures = [to_host(source) for source in sources]
        for i, future in enumerate(futures):
            assert value_of(future.result()) == float(i)
            assert host_us(virtual_sim, start) == 1000 * (i + 1)

    def test_device_error(self, any_sim: Any) -> None:
        """A kernel that fails on the device is reported by result(); the copier does not mind."""
        any_sim.configure(latency_us=1000)
        index = torch.tensor([7]).pin_memory().to("sim", non_blocking=True)
        copier = HostCopier("sim", max_pending=1)
        future = copier.submit(torch.ones(3, device="sim")[index])
        with pytest.raises(IndexError, match="out of bounds"):
            future.result()
        assert value_of(copier.submit(ones(3.0)).result()) == 3.0
        copier.close()


class TestBounds:
    """No more than max_pending submissions hold device or pinned memory."""

    def test_submit_waits_for_room(self, virtual_sim: Any) -> None:
        """The submission that is one too many waits for the oldest, and no longer."""
        virtual_sim.configure(latency_us=1000)
        sources = [ones(float(i)) for i in range(5)]
        ACCELERATOR.synchronize()
        copier = HostCopier("sim", max_pending=2)
        start = virtual_sim.host_time_ns()
        waited = []
        for source in sources:
            copier.submit(source)
            waited.append(round(host_us(virtual_sim, start), -2))  # each question that finds it undone takes 1 us
        assert waited == [0, 0, 1000, 2000, 3000]

    def test_waits_in_a_thread(self, sim: Any) -> None:
        """A thread that submits one too many goes on when copies do."""
        sim.hold_copies("d2h")
        copier = HostCopier("sim", max_pending=1)
        first = copier.submit(ones(0.0))
        second: list[HostFuture] = []
        thread = threading.Thread(target=lambda: second.append(copier.submit(ones(1.0))))
        thread.start()
        sim.release_copies("d2h")
        thread.join()
        assert [value_of(future.result()) for future in (first, *second)] == [0.0, 1.0]

    @pytest.mark.parametrize("keep", ["futures", "results", "nothing"])
    def test_constant_memory(self, any_sim: Any, keep: str) -> None:
        """200 submissions, whatever is kept of them, take the pinned and the device memory of max_pending."""
        any_sim.configure(latency_us=100, race=0)
        blocks, reserved = any_sim.pinned_blocks(), ACCELERATOR.memory_reserved()
        source = ones(0.0)
        copier = HostCopier("sim", max_pending=3)
        kept: list[Any] = []
        for _ in range(200):
            future = copier.submit(source)
            source.add_(1)
            if keep != "nothing":
                kept.append(future if keep == "futures" else future.result())
        assert any_sim.pinned_blocks() - blocks <= 3
        assert ACCELERATOR.memory_reserved() - reserved <= (1 + 3) * BYTES
        results = [future.result() for future in kept] if keep == "futures" else kept
        assert [value_of(result) for result in results] == [float(i) for i in range(len(results))]
        assert not any(result.is_pinned() for result in results)

    def test_memory_goes_with_the_result(self, sim: Any) -> None:
        """Once the result is there, neither device nor pinned memory is held for it."""
        blocks, reserved = sim.pinned_blocks(), ACCELERATOR.memory_reserved()
        source = ones(3.0)
        result = to_host(source).result()
        again = to_host(source).result()
        assert sim.pinned_blocks() - blocks == 1
        assert ACCELERATOR.memory_reserved() - reserved == 2 * BYTES
        assert value_of(result) == value_of(again) == 3.0

    def test_source_is_not_held(self, sim: Any) -> None:
        """The caller's tensor goes when the caller lets go of it, though the copy is held."""
        sim.hold_copies("d2h")
        source = ones(3.0)
        gone = weakref.ref(source)
        future = to_host([source])
        del source
        assert gone() is None
        sim.release_copies("d2h")
        assert value_of(future.result()[0]) == 3.0

    def test_unwanted_values_are_not_moved(self, sim: Any) -> None:
        """A future that was let go costs no copy out of pinned memory: its ordinary memory is never written to."""
        copier = HostCopier("sim")
        torch.use_deterministic_algorithms(True)  # new memory is full of NaN
        try:
            wanted, unwanted = copier.submit(ones(3.0)), copier.submit(ones(3.0))
        finally:
            torch.use_deterministic_algorithms(False)
        ordinary = [wanted._tree, unwanted._tree]
        del unwanted
        copier.close()
        assert [bool(tensor.isnan().all()) for tensor in ordinary] == [False, True]
        assert value_of(wanted.result()) == 3.0

    def test_threads(self, any_sim: Any) -> None:
        """Several threads, each on a stream of its own, submit and ask at once: values right, memory bounded."""
        any_sim.configure(latency_us=50)
        copier = HostCopier("sim", max_pending=2)
        start = any_sim.pinned_blocks()
        got: dict[int, list[float]] = {}

        def work(number: int) -> None:
            ACCELERATOR.set_stream(torch.Stream("sim"))
            source = torch.full((SIZE,), 100.0 * number, device="sim")
            futures = []
            for _ in range(20):
                futures.append(copier.submit(source))
                source.add_(1)
            got[number] = [value_of(future.result()) for future in futures]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {number: [100.0 * number + i for i in range(20)] for number in range(3)}
        assert any_sim.pinned_blocks() - start <= 2
        assert any_sim.races() == []


class TestBothWays:
    """A loop that brings batches of 5 ms in and takes results of 4 ms out, with 10 ms of compute for each."""

    COUNT = 40
    IN, OUT = 1_250_000, 1_000_000  # floats: 5 and 4 ms at 1000 MB/s
    COMPUTE_US = 10_000

    @pytest.fixture(name="loader")
    def _loader(self, virtual_sim: Any) -> Iterable[torch.Tensor]:
        """Pinned batches, all elements of batch ``i`` are ``i``."""
        virtual_sim.configure(latency_us=0, h2d_mb_s=1000, d2h_mb_s=1000)
        buffers = [torch.full((self.IN,), float(i)).pin_memory() for i in range(4)]
        return (buffers[i % 4] for i in range(self.COUNT))

    def step(self, sim: Any, batch: torch.Tensor) -> torch.Tensor:
        """What is done to each batch."""
        sim.busy(self.COMPUTE_US)
        return batch[: self.OUT] * 2

    def ratio(self, sim: Any, start_ns: int) -> float:
        """The time since then to the least possible."""
        return host_us(sim, start_ns) / (self.COUNT * self.COMPUTE_US)

    def test_overlapped(self, virtual_sim: Any, loader: Iterable[torch.Tensor]) -> None:
        """Copies in both directions hide behind the computing, but for the first one in and the last one out."""
        start = virtual_sim.host_time_ns()
        futures = [to_host(self.step(virtual_sim, batch)) for batch in CUDAPrefetcher(loader, "sim")]
        values = [value_of(future.result()) for future in futures]
        assert self.ratio(virtual_sim, start) <= 1.03
        assert values == [2.0 * (i % 4) for i in range(self.COUNT)]
        assert virtual_sim.races() == []

    def test_plain(self, virtual_sim: Any, loader: Iterable[torch.Tensor]) -> None:
        """The plain loop, with .to() and .cpu(), takes the three one after the other: 19 ms for 10."""
        start = virtual_sim.host_time_ns()
        values = [value_of(self.step(virtual_sim, batch.to("sim", non_blocking=True)).cpu()) for batch in loader]
        assert self.ratio(virtual_sim, start) == pytest.approx(1.9)
        assert values == [2.0 * (i % 4) for i in range(self.COUNT)]
