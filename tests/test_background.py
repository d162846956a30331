"""The background thread: what is ready is handed over, nothing runs too far ahead, all is as in the caller's."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

from prefetch import CUDAPrefetcher, PrefetchError, PrefetchWarning
from prefetch._background import _Bell
from prefetch._lane import Side, SideStreamLane
from prefetch._state import PassState
from tests.helpers import Numbered, feeding_threads, join_feeding_threads, numbered

ACCELERATOR = torch.accelerator
DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])
DEPTHS = pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 4])
PATIENCE_S = 60  # for what must happen; a test that passes never waits so long


@pytest.fixture(autouse=True)
def _no_pass_of_another_test() -> None:
    """An error that was raised may keep the frame of its test, and with it an open pass, until it is collected."""
    gc.collect()


class Stuck:
    """Gives some numbers; the next one comes when it is allowed to, and no more after it."""

    def __init__(self, ready: int) -> None:
        self.ready = ready
        self.is_waiting = threading.Event()
        self.may_go_on = threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield from range(self.ready)
        self.is_waiting.set()
        assert self.may_go_on.wait(PATIENCE_S)
        yield self.ready


@DEVICES
@DEPTHS
@pytest.mark.parametrize("ready", [1, 2, 5])
def test_a_ready_batch_is_handed_over(sim: Any, device: str, prefetch_batches: int, ready: int) -> None:
    """All batches that the loader has given are delivered while the next one does not come."""
    loader = Stuck(ready)
    iterator = iter(CUDAPrefetcher(loader, device, prefetch_batches=prefetch_batches, background=True))
    assert [next(iterator) for _ in range(ready)] == list(range(ready))
    assert not loader.may_go_on.is_set()
    loader.may_go_on.set()
    assert list(iterator) == [ready]


class Asked:
    """Counts the batches that it was asked for."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        for position in range(12):
            self.asked += 1
            yield position


def wait_until_idle(thread: threading.Thread) -> None:
    """Until a background thread has done all that it may, and waits to be asked for more, or has ended."""
    while thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None and frame.f_code is _Bell.wait.__code__ and frame.f_back is not None:
            waiting = frame.f_back.f_locals  # of _is_asked_for
            if waiting["self"]._asked_for < waiting["count"]:
                return
        time.sleep(0)


@DEVICES
@DEPTHS
def test_look_ahead(sim: Any, device: str, prefetch_batches: int) -> None:
    """The thread asks for the batch in use, prefetch_batches more and one in hand; with 0 for none before its time."""
    loader = Asked()
    iterator = iter(CUDAPrefetcher(loader, device, prefetch_batches=prefetch_batches, background=True))
    ahead = prefetch_batches + 1 if prefetch_batches else 0
    for position in range(12):
        assert next(iterator) == position
        for thread in feeding_threads():
            wait_until_idle(thread)
        assert loader.asked == min(position + 1 + ahead, 12)


@DEPTHS
def test_copies_ahead(sim: Any, prefetch_batches: int) -> None:
    """Copied are the batch in use and prefetch_batches more; the one in hand is still on the host."""
    iterator = iter(CUDAPrefetcher(numbered(9), "sim", prefetch_batches=prefetch_batches, background=True))
    copies = 0
    for position in range(9):
        assert next(iterator)[0].item() == position + 1
        for thread in feeding_threads():
            wait_until_idle(thread)
        ACCELERATOR.synchronize()
        copies += [span.name for span in sim.trace()].count("copy_h2d")
        assert copies == min(position + 1 + prefetch_batches, 9)


class Endless(IterableDataset[torch.Tensor]):
    """Numbers for ever, from each worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1)


class OwnSampler(Sampler[int]):
    """Could do anything, and so must not be advanced beside the loop."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class TestDefault:
    """Without background= there is a thread where it cannot change results, and only there."""

    DATA = TensorDataset(torch.arange(8))

    def threads(self, loader: Any, device: str, **options: Any) -> int:
        """How many threads a pass has after its first batch."""
        iterator: Any = iter(CUDAPrefetcher(loader, device, **options))
        next(iterator)
        count = len(feeding_threads())
        iterator.close()
        return count

    def loader(self, **options: Any) -> DataLoader[Any]:
        """Whose data set runs in worker processes."""
        return DataLoader(self.DATA, **({"num_workers": 1, "pin_memory": True} | options))

    def test_with_workers(self, sim: Any) -> None:
        """A data set in workers and one of torch's samplers have nothing in common with the loop."""
        assert self.threads(self.loader(), "sim") == 1
        assert self.threads(self.loader(shuffle=True, batch_size=4), "sim") == 1
        assert self.threads(DataLoader(Endless(), num_workers=1, pin_memory=True), "sim") == 1

    def test_said_otherwise(self, sim: Any) -> None:
        """What the caller says counts."""
        assert self.threads(self.loader(), "sim", background=False) == 0
        assert self.threads(self.loader(num_workers=0), "sim", background=True) == 1
        assert self.threads(self.loader(num_workers=0), "cpu", background=True) == 1

    def test_on_the_cpu(self) -> None:
        """Nothing is looked ahead there."""
        assert self.threads(self.loader(pin_memory=False), "cpu") == 0

    def test_in_the_main_process(self, sim: Any) -> None:
        """A data set, a sampler or a transform of the user's may share random numbers with the loop."""
        assert self.threads(self.loader(num_workers=0), "sim") == 0
        assert self.threads(numbered(3), "sim") == 0
        assert self.threads(self.loader(sampler=OwnSampler()), "sim") == 0
        within: Any = BatchSampler(OwnSampler(), batch_size=2, drop_last=False)
        assert self.threads(self.loader(batch_sampler=within), "sim") == 0
        assert self.threads(self.loader(shuffle=True, generator=torch.Generator()), "sim") == 0
        assert self.threads(self.loader(), "sim", transform=lambda batch: batch) == 0

    def test_of_another_class(self, sim: Any) -> None:
        """A subclass may do anything in its own __iter__."""

        class Custom(DataLoader[Any]):
            pass

        assert self.threads(Custom(self.DATA, num_workers=1, pin_memory=True), "sim") == 0


class TestCallersState:
    """The loader and the transform run in the thread as they would in the caller's."""

    @DEVICES
    def test_modes(self, sim: Any, device: str) -> None:
        """Grad and inference mode, autocast and the default device are those of the first next()."""

        def state() -> tuple[Any, ...]:
            return (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_default_device(),
            )

        class Observer:
            def __iter__(self) -> Iterator[Any]:
                yield state()

        seen = []
        for contexts in (
            [],
            [torch.no_grad()],
            [torch.inference_mode()],
            [torch.autocast("cpu", torch.bfloat16)],
            [torch.device("meta")],
        ):
            iterator = iter(CUDAPrefetcher(Observer(), device, background=True))
            for context in contexts:
                context.__enter__()
            want = state()
            (got,) = iterator
            for context in contexts:
                context.__exit__(None, None, None)
            assert got == want
            seen.append(got)
        assert len(set(seen)) == 5

    @pytest.mark.parametrize("index", [0, 1])
    def test_device_and_stream(self, sim: Any, index: int) -> None:
        """Work of the loader's own on the device is queued on the side stream of the prefetcher's device."""

        class Observer:
            def __iter__(self) -> Iterator[Any]:
                yield ACCELERATOR.current_device_index(), ACCELERATOR.current_stream()

        prefetcher = CUDAPrefetcher(Observer(), f"sim:{index}", background=True)
        ((device, stream),) = prefetcher
        assert device == index
        assert stream.device_index == index
        assert stream != ACCELERATOR.current_stream(index)

    def test_tensors_made_before_the_pass(self, any_sim: Any) -> None:
        """What the caller's stream still computes when the pass starts is awaited before a thread reads it."""
        any_sim.configure(kernel_us=2000)
        batches = [torch.full((1 << 14,), float(i), device="sim") * 2 for i in range(4)]
        prefetcher = CUDAPrefetcher(batches, "sim", background=True, dtype=torch.float64)
        assert [batch.mean().item() for batch in prefetcher] == [0.0, 2.0, 4.0, 6.0]
        assert any_sim.races() == []

    @pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["plain", "transform"])
    def test_loader_that_computes_on_the_device(self, any_sim: Any, transform: Any) -> None:
        """It reads what the caller had queued before the pass, and what the caller does after the pass waits for it."""
        any_sim.configure(kernel_us=2000)
        table = torch.ones(1 << 18, device="sim")

        def batches() -> Iterator[torch.Tensor]:
            for i in range(9):
                yield table * i

        table.mul_(10)
        iterator: Any = iter(CUDAPrefetcher(batches(), "sim", background=True, transform=transform))
        means = [next(iterator).mean() for _ in range(4)]
        iterator.close()
        table.fill_(0)
        ACCELERATOR.synchronize()
        assert [mean.item() for mean in means] == [0.0, 10.0, 20.0, 30.0]
        assert any_sim.races() == []

    def test_context_variables(self) -> None:
        """They are those of the caller."""
        name: ContextVar[str] = ContextVar("name", default="nobody")

        def batches() -> Iterator[str]:
            yield name.get()

        name.set("caller")
        assert list(CUDAPrefetcher(batches(), "cpu", background=True)) == ["caller"]

    def test_random_draws_without_look_ahead(self, sim: Any) -> None:
        """With prefetch_batches=0 data set and step draw in the order of the bare loop, thread or not."""
        data = [torch.zeros(1)] * 6
        loader: Any = DataLoader(data, collate_fn=lambda batch: torch.rand(1), shuffle=True)  # type: ignore[arg-type]

        def loop(batches: Any) -> list[Any]:
            torch.manual_seed(3)
            return [(batch.item(), torch.rand(1).item()) for _ in range(2) for batch in batches]

        assert loop(CUDAPrefetcher(loader, "cpu", prefetch_batches=0, background=True)) == loop(loader)


@pytest.fixture
def interrupts_raise() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, though these tests may run in a background job, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestErrors:
    """Nothing that goes wrong in the thread is lost, or hangs the loop."""

    @DEVICES
    def test_that_end_a_program(self, sim: Any, device: str) -> None:
        """SystemExit in a loader is raised in the loop, after the good batches."""

        def batches() -> Iterator[int]:
            yield 0
            yield 1
            raise SystemExit(3)

        iterator = iter(CUDAPrefetcher(batches(), device, background=True))
        assert [next(iterator), next(iterator)] == [0, 1]
        with pytest.raises(SystemExit):
            next(iterator)
        assert list(iterator) == []

    def test_ctrl_c_loses_nothing(self, interrupts_raise: None) -> None:
        """Interrupted while it waits for the loader, the loop can go on with the very batch it waited for."""
        interrupted = threading.Event()

        def batches() -> Iterator[int]:
            yield 0
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.wait(PATIENCE_S)
            yield 1
            yield 2

        iterator = iter(CUDAPrefetcher(batches(), "cpu", prefetch_batches=0, background=True))
        assert next(iterator) == 0
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        interrupted.set()
        assert list(iterator) == [1, 2]

    @DEPTHS
    def test_ctrl_c_at_the_wrong_moment(self, monkeypatch: pytest.MonkeyPatch, prefetch_batches: int) -> None:
        """Interrupted again and again while a batch is being handed over, the loop neither hangs nor loses any."""
        interrupts = iter([False, True, True, False, True] * 9)
        real = PassState.delivered

        def delivered(state: PassState, snapshot: Any) -> None:
            real(state, snapshot)
            if next(interrupts):
                raise KeyboardInterrupt

        monkeypatch.setattr(PassState, "delivered", delivered)
        got: list[int] = []
        iterator = iter(CUDAPrefetcher(range(12), "cpu", prefetch_batches=prefetch_batches, background=True))
        while len(got) < 12:
            with contextlib.suppress(KeyboardInterrupt):
                got.append(next(iterator))
        assert got == list(range(12))

    def test_ctrl_c_while_the_thread_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Interrupted after the thread has been started, the loop goes on with that thread and no other."""
        real = threading.Thread.start
        started: list[threading.Thread] = []

        def start(thread: threading.Thread) -> None:
            started.append(thread)
            if len(started) == 1:
                raise KeyboardInterrupt  # the thread is on its way, but has not come far
            for each in started:
                real(each)

        iterator = iter(CUDAPrefetcher(range(30), "cpu", background=True))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
            assert next(iterator) == 0
        assert list(iterator) == list(range(1, 30))
        assert len(started) == 2

    def test_kept_error_keeps_no_batch(self) -> None:
        """An error that the caller keeps does not keep what was in the thread's hand when the pass ended."""
        made: list[weakref.ref[torch.Tensor]] = []

        class Loader(Iterator[torch.Tensor]):
            def __next__(self) -> torch.Tensor:
                if len(made) == 1:
                    made.append(made[0])
                    raise ValueError("one")
                batch = torch.ones(len(made) + 1)
                made.append(weakref.ref(batch))
                return batch

        iterator: Any = iter(CUDAPrefetcher(Loader(), "cpu", prefetch_batches=1, background=True))
        next(iterator)
        with pytest.raises(ValueError, match="one") as kept:
            next(iterator)
        next(iterator)
        iterator.close()
        assert [ref() for ref in made] == [None] * len(made)
        assert kept.value.__traceback__ is not None

    def test_pass_that_cannot_start(self, sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error is the device's, and nothing else is complained about."""

        def fails(lane: SideStreamLane, side: Side, meter: Any) -> None:
            raise RuntimeError("device lost")

        prefetcher = CUDAPrefetcher(numbered(2), "sim", background=True)
        monkeypatch.setattr(SideStreamLane, "__init__", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            iter(prefetcher)

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_in_a_forked_process(self) -> None:
        """There is no thread in a forked process: the pass says so there, and goes on in the parent."""
        iterator = iter(CUDAPrefetcher([0, 1, 2], "cpu", background=True))
        assert next(iterator) == 0
        child = os.fork()
        if child == 0:
            try:
                next(iterator)
            except PrefetchError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert list(iterator) == [1, 2]


class TestEnd:
    """However a pass ends, its thread does."""

    @DEVICES
    @pytest.mark.parametrize("end", ["exhaust", "break", "close", "error", "prefetcher", "with"])
    def test_thread_is_joined(self, sim: Any, device: str, end: str) -> None:
        """After the end of a pass there is no thread, and there was one before."""

        def batches() -> Iterator[int]:
            yield from range(9)
            if end == "error":
                raise ValueError("nine")

        prefetcher = CUDAPrefetcher(batches(), device, background=True)
        iterator: Any = iter(prefetcher)
        assert next(iterator) == 0
        assert len(feeding_threads()) == 1
        if end == "exhaust":
            assert list(iterator) == list(range(1, 9))
        if end == "break":
            del iterator
        if end == "close":
            iterator.close()
        if end == "error":
            with pytest.raises(ValueError, match="nine"):
                list(iterator)
            assert list(iterator) == []
        if end == "prefetcher":
            prefetcher.close()
        if end == "with":
            with prefetcher:
                pass
        assert feeding_threads() == []

    @DEVICES
    def test_closed_by_the_transform(self, sim: Any, device: str) -> None:
        """A transform that ends its own pass from within the thread does not wait for itself."""

        def transform(batch: int) -> int:
            if batch == 2:
                iterator.close()
            return batch

        iterator: Any = iter(CUDAPrefetcher(range(9), device, prefetch_batches=1, background=True, transform=transform))
        assert list(iterator) in ([0], [0, 1])
        join_feeding_threads()
        assert feeding_threads() == []

    def test_closed_while_another_thread_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """close() wakes a consumer that waits for a batch, though the loader is stuck."""
        monkeypatch.setattr("prefetch._background._JOIN_S", 0.01)
        loader = Stuck(0)
        iterator: Any = iter(CUDAPrefetcher(loader, "cpu", background=True))
        ends: SimpleQueue[list[int]] = SimpleQueue()
        consumer = threading.Thread(target=lambda: ends.put(list(iterator)))
        consumer.start()
        assert loader.is_waiting.wait(PATIENCE_S)
        with pytest.warns(PrefetchWarning, match="still at work"):
            iterator.close()
        assert ends.get(timeout=PATIENCE_S) == []
        loader.may_go_on.set()
        join_feeding_threads()
        assert feeding_threads() == []

    def test_of_a_stuck_loader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A loader that does not return is left behind with a warning, and its thread ends when it does."""
        monkeypatch.setattr("prefetch._background._JOIN_S", 0.01)
        loader = Stuck(1)
        iterator: Any = iter(CUDAPrefetcher(loader, "cpu", background=True))
        assert next(iterator) == 0
        assert loader.is_waiting.wait(PATIENCE_S)
        (thread,) = feeding_threads()
        with pytest.warns(PrefetchWarning, match="still at work") as warned:
            iterator.close()
        assert [warning.filename for warning in warned] == [__file__]
        with pytest.raises(StopIteration):
            next(iterator)
        loader.may_go_on.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert list(iterator) == []

    def test_iterator_that_is_never_asked(self) -> None:
        """A pass that is not advanced has no thread."""
        iterator: Any = iter(CUDAPrefetcher([1], "cpu", background=True))
        assert feeding_threads() == []
        iterator.close()
        assert list(iterator) == []
        assert feeding_threads() == []


def test_many_passes_at_once(sim: Any) -> None:
    """Several passes over several prefetchers, in turn, each with its own thread."""
    sim.configure(latency_us=200)
    prefetchers = [CUDAPrefetcher(Numbered(6), f"sim:{i % 2}", background=True) for i in range(4)]
    iterators = [iter(prefetcher) for prefetcher in prefetchers for _ in range(2)]
    sums = [[next(iterator).mean() for iterator in iterators] for _ in range(6)]
    assert [[value.item() for value in row] for row in sums] == [[float(i + 1)] * 8 for i in range(6)]
    assert [next(iterator, None) for iterator in iterators] == [None] * 8
    assert feeding_threads() == []
    assert sim.races() == []


def test_sequential_sampler_is_torchs() -> None:
    """What the choice of the default rests on: where torch's samplers are defined."""
    assert type(DataLoader(TensorDataset(torch.arange(2))).sampler) is SequentialSampler
    assert SequentialSampler.__module__ == "torch.utils.data.sampler"
