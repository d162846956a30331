"""Who advances the loader: a thread of its own, so that a batch is handed over whatever the next one takes."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from prefetch._device import CallerState
from prefetch._errors import PrefetchError
from prefetch._feeder import Feeder, Issued, Item, clear_frames, superseded
from prefetch._mark import clock
from prefetch._members import Members
from prefetch._meter import PassMeter
from prefetch._state import PassState, Snapshot

# How long the end of a pass waits for the loader to return from the batch that it is at. To leave it behind does no
# harm: when it returns, its thread ends.
_JOIN_S = 1.0
# How long a new pass waits for it, if it is to use the same iterator.
_TAKE_OVER_S = 60.0
_END = Item(None, StopIteration(), None)


class BackgroundFeeder(Feeder[Issued]):
    """One thread for one pass. It loads ahead of what may be issued by one batch, which waits in its hand.

    A batch is issued only after the consumer has asked for the one ``look_ahead`` before it, as in the inline feeder:
    the bounds on memory are the same. With ``look_ahead=0`` the thread loads when asked, and not before.

    The thread starts with the first :meth:`take`, in the state (grad mode, autocast, default device, ...) that the
    caller's thread has then.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        issue: Callable[[Any, int], Issued],
        look_ahead: int,
        state: PassState,
        meter: PassMeter,
        caller_state: Callable[[], CallerState],
        loader: Any,
    ) -> None:
        self._work = _Work(iterator, issue, look_ahead, state, meter, loader)
        self._state = state
        self._meter = meter
        self._caller_state = caller_state
        self._next = 0  # the position of the batch that comes next
        self._is_superseded = False
        self._is_closed = False

    def take(self) -> Issued:
        """See :meth:`Feeder.take`. Ctrl-C at any moment costs one batch at the most, as in a bare loop."""
        work = self._work
        if os.getpid() != work.process:
            raise PrefetchError("a pass with a background thread cannot be continued in a forked process")
        work.start(self._caller_state)
        work.ask_for(self._next + 1)
        since_ns = None if work.ready else clock()
        while not work.ready and not work.is_stopped:
            work.news.wait()
        if work.is_stopped:
            work.news.ring()  # for another thread that may wait
            raise superseded() if self._is_superseded else StopIteration
        position, item, loading = work.ready[0]
        self._state.delivered(item.snapshot)
        if item.is_end:  # which stays
            work.join()
            raise StopIteration
        self._meter.peak_held = max(self._meter.peak_held, len(work.ready))
        self._next = position + 1
        work.ready.popleft()
        if item.error is not None:
            error: Any = item.error
            del item
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        if since_ns is not None:
            self._meter.waited(since_ns, loading)
        return item.issued  # type: ignore[no-any-return]

    def close(self) -> bool:
        """See :meth:`Feeder.close`; waits a moment for a loader that is at work."""
        is_gone = self._is_closed or self._work.stop()
        self._is_closed = True
        return is_gone

    def supersede(self, iterator: Iterator[Any] | None) -> None:
        """See :meth:`Feeder.supersede`."""
        held = self._work.iterator
        if held is not None and (iterator is None or iterator is held):
            self._is_superseded = True
            self.close()


class _Bell:
    """Wakes a thread that waits for news. Finalizers may ring it: they can interrupt the methods of a simple queue."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """There is something new, or will be at once."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self) -> None:
        """Until it is rung, or has been since the last time, or for a second; what is new must be looked for.

        A signal that comes just before the wait begins, on Windows any signal, does not end it: hence the second.
        """
        with contextlib.suppress(Empty):
            self._rings.get(timeout=1)


class _Work:
    """What the thread does. It must not refer to its owner: that would stay alive, and it is its end that ends this."""

    def __init__(
        self,
        iterator: Iterator[Any],
        issue: Callable[[Any, int], Any],
        look_ahead: int,
        state: PassState,
        meter: PassMeter,
        loader: Any,
    ) -> None:
        self.iterator: Iterator[Any] | None = iterator
        self.loader = loader
        self.process = os.getpid()
        self.is_stopped = False
        self.ready: deque[tuple[int, Item, tuple[int, int, int, int]]] = deque()
        self.news = _Bell()
        self._issue = issue
        self._look_ahead = look_ahead
        self._state = state
        self._meter = meter
        self._asked_for = 0
        self._requests = _Bell()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, caller_state: Callable[[], CallerState]) -> None:
        """Begin, if that has not been done; what the loader can notice of the caller's thread is taken over."""
        if self._thread is None and not self.is_stopped:
            _at_work.add(self)
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._run, caller_state()), name="cuda-prefetcher", daemon=True).start()

    def ask_for(self, count: int) -> None:
        """The consumer wants this many batches, from the first one on."""
        self._asked_for = count
        self._requests.ring()

    def tell_to_stop(self) -> None:
        """The thread is to end when the loader returns, and the consumer not to wait for it."""
        self.is_stopped = True
        self._requests.ring()
        self.news.ring()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread is gone, but not for ever; whether it is."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():  # a transform, or a finalizer, may end the pass
            return True
        thread.join(_JOIN_S if timeout is None else timeout)
        return not thread.is_alive()

    def stop(self) -> bool:
        """End the pass; whether the thread is gone."""
        if os.getpid() != self.process:  # the thread, and what it holds, are the parent's
            return True
        self.tell_to_stop()
        is_gone = self.join()
        if is_gone:
            self.iterator = None
        while self.ready:
            clear_frames(self.ready.popleft()[1])
        return is_gone

    def _run(self, caller: CallerState) -> None:
        with self._lock:
            if self._thread is not None:  # the start was interrupted, by Ctrl-C, and tried again
                return
            self._thread = threading.current_thread()
        try:
            with caller:
                last = self._feed()
                self.iterator = None  # here, since a generator may have code to run at its end
        except BaseException as error:  # noqa: BLE001 - nobody else is there to see it
            self._put(-1, Item(None, error, None))
            last = _END
        self._put(-1, last)

    def _feed(self) -> Item:
        """Put one item after the other, but the last, which is returned."""
        look_ahead, meter = self._look_ahead, self._meter
        in_hand = min(look_ahead, 1)
        position = 0  # of the next batch; it may be issued once ``position + 1 - look_ahead`` batches are asked for
        failed = False
        while self._is_asked_for(position + 1 if failed else position + 1 - look_ahead - in_hand):
            snapshot = None
            failed = True
            try:
                start = clock()
                batch: Any = meter.within("prefetch.load", self._next) if meter.has_ranges else self._next()
                meter.loaded(start)
                snapshot = self._snapshot()
                if self._is_asked_for(position + 1 - look_ahead):
                    self._put(
                        position,
                        Item(self._issue(batch, position), None, snapshot),
                        (start, meter.load_end_ns, meter.room_end_ns, clock()),
                    )
                batch = None  # neither this frame nor an error that the caller keeps is to hold it
                failed = False
            except StopIteration:
                return Item(None, StopIteration(), self._snapshot())
            except BaseException as error:  # noqa: BLE001 - raised in its turn by take()
                self._put(position, Item(None, error, snapshot or self._snapshot()))
                batch = None
            position += 1
        return _END

    def _next(self) -> Any:
        return next(self.iterator)  # type: ignore[arg-type]

    def _is_asked_for(self, count: int) -> bool:
        """Wait until the consumer has asked for ``count`` batches; false if the pass ends instead."""
        while self._asked_for < count and not self.is_stopped:
            self._requests.wait()
        return not self.is_stopped

    def _put(self, position: int, item: Item, loading: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        self.ready.append((position, item, loading))
        self.news.ring()

    def _snapshot(self) -> Snapshot | None:
        return self._state.fetched(lambda: self.is_stopped)


_at_work: Members[_Work] = Members()


def _own_works() -> list[_Work]:
    """Those of this process: a forked one has the objects of its parent, but none of the threads."""
    return [work for work in _at_work.alive() if work.process == os.getpid()]


def wait_for_threads(loader: Any) -> None:
    """Before another pass starts with a loader's only iterator: until no thread of an earlier one is asking it.

    Raises:
        PrefetchError: The loader does not return.
    """
    for work in _own_works():
        is_meant = work.loader is loader and work.iterator is not None
        if is_meant and not work.join(_TAKE_OVER_S):
            raise PrefetchError(
                f"an earlier pass has asked {loader!r} for a batch, and it has not returned for {_TAKE_OVER_S:g} s: no "
                "other pass can start with its only iterator"
            )


def check_is_free(iterator: Iterator[Any]) -> None:
    """Before another pass asks an iterator that its loader has just handed out.

    Raises:
        PrefetchError: A thread of an earlier pass, which has ended without it, is still asking it for a batch.
    """
    if any(work.iterator is iterator for work in _own_works()):
        raise PrefetchError(
            "the loader has handed out an iterator that an earlier pass is still waiting for: start this pass later"
        )


@atexit.register
def _end_all() -> None:
    """Before the interpreter tears down what the threads are using: all of them, within the time of one."""
    works = [work for work in _own_works() if not work.is_stopped]
    for work in works:
        work.tell_to_stop()
    end = time.monotonic() + _JOIN_S
    for work in works:
        work.join(max(0.0, end - time.monotonic()))
