"""Who advances the loader: a thread of its own, so that a batch is handed over whatever the next one takes."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from prefetch._device import CallerState
from prefetch._errors import PrefetchError, PrefetchWarning
from prefetch._feeder import Feeder, Issued, Item, clear_frames, superseded
from prefetch._state import PassState

# How long the end of a pass waits for the loader to return from the batch that it is at. DataLoader gives its own
# workers as long.
_JOIN_S = 5.0
_STUCK = f"the loader has not returned from a batch for {_JOIN_S:g} s"
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
        issue: Callable[[Any], Issued],
        look_ahead: int,
        state: PassState,
        caller_state: Callable[[], CallerState],
    ) -> None:
        self._work = _Work(iterator, issue, look_ahead, state)
        self._state = state
        self._caller_state = caller_state
        self._has_asked = False
        self._is_superseded = False
        # Runs when this object goes, or else before the interpreter tears down what the thread is using.
        self._finalizer = weakref.finalize(self, self._work.stop)

    def take(self) -> Issued:
        """See :meth:`Feeder.take`."""
        work = self._work
        if os.getpid() != work.process:
            raise PrefetchError("a pass with a background thread cannot be continued in a forked process")
        work.start(self._caller_state)
        if not self._has_asked:  # what was interrupted by Ctrl-C has asked already
            work.requests.put(True)
            self._has_asked = True
        item = work.ready.get()
        if work.is_stopped:
            work.ready.put(_END)  # for another thread that may wait
            raise superseded() if self._is_superseded else StopIteration
        self._state.delivered(item.snapshot)
        if item.is_end:
            work.ready.put(item)
            work.join()
            raise StopIteration
        self._has_asked = False
        if item.error is not None:
            error: Any = item.error
            del item
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return item.issued  # type: ignore[no-any-return]

    def close(self) -> None:
        """See :meth:`Feeder.close`; waits some seconds for a loader that is at work."""
        if not self._is_stopped():
            warnings.warn(
                f"{_STUCK}; the pass ends without it, its thread when it returns", PrefetchWarning, stacklevel=3
            )

    def supersede(self, iterator: Iterator[Any] | None) -> None:
        """See :meth:`Feeder.supersede`."""
        held = self._work.iterator
        if held is not None and (iterator is None or iterator is held):
            self._is_superseded = True
            if not self._is_stopped():
                raise PrefetchError(f"{_STUCK}, which an earlier pass has asked for: no other pass can start")

    def _is_stopped(self) -> bool:
        """Stop, unless that has been done; whether the thread is gone, or has been given up."""
        return self._finalizer.detach() is None or self._work.stop()


class _Work:
    """What the thread does. It refers to nothing that its owner is part of."""

    def __init__(self, iterator: Iterator[Any], issue: Callable[[Any], Any], look_ahead: int, state: PassState) -> None:
        self.iterator: Iterator[Any] | None = iterator
        self.process = os.getpid()
        self.is_stopped = False
        # Simple queues may be used in finalizers, which can interrupt their own methods. (threading.Condition may not.)
        self.requests: SimpleQueue[bool] = SimpleQueue()
        self.ready: SimpleQueue[Item] = SimpleQueue()
        self._issue = issue
        self._look_ahead = look_ahead
        self._state = state
        self._requested = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # another thread may end the pass while it starts

    def start(self, caller_state: Callable[[], CallerState]) -> None:
        """Begin, if that has not been done; what the loader can notice of the caller's thread is taken over."""
        with self._lock:
            if self._thread is None and not self.is_stopped:
                thread = threading.Thread(target=self._run, args=(caller_state(),), name="cuda-prefetcher", daemon=True)
                thread.start()
                self._thread = thread

    def join(self) -> bool:
        """Wait until the thread is gone, but not for ever; whether it is."""
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread():  # a transform, or a finalizer, may end the pass
            return True
        thread.join(_JOIN_S)
        return not thread.is_alive()

    def stop(self) -> bool:
        """End the pass; whether the thread is gone."""
        if os.getpid() != self.process:  # the thread, and what it holds, are the parent's
            return True
        self.is_stopped = True
        self.requests.put(False)
        is_gone = self.join()
        if is_gone:
            self.iterator = None
        with contextlib.suppress(Empty):
            while True:
                clear_frames(self.ready.get_nowait())
        self.ready.put(_END)
        return is_gone

    def _run(self, caller: CallerState) -> None:
        try:
            with caller:
                last = self._feed()
                self.iterator = None  # here, since a generator may have code to run at its end
        except BaseException as error:  # noqa: BLE001 - nobody else is there to see it
            self.ready.put(Item(None, error, None))
            last = _END
        self.ready.put(last)

    def _feed(self) -> Item:
        """Put one item after the other, but the last, which is returned."""
        look_ahead = self._look_ahead
        in_hand = min(look_ahead, 1)
        position = 0  # of the next batch; it may be issued once ``position + 1 - look_ahead`` batches are asked for
        failed = False
        while self._is_asked_for(position + 1 if failed else position + 1 - look_ahead - in_hand):
            snapshot = None
            failed = True
            try:
                batch = next(self.iterator)  # type: ignore[arg-type]
                snapshot = self._state.fetched()
                if not self._is_asked_for(position + 1 - look_ahead):
                    break
                self.ready.put(Item(self._issue(batch), None, snapshot))
                del batch
                failed = False
            except StopIteration:
                return Item(None, StopIteration(), self._state.fetched())
            except BaseException as error:  # noqa: BLE001 - raised in its turn by take()
                self.ready.put(Item(None, error, snapshot or self._state.fetched()))
            position += 1
        return _END

    def _is_asked_for(self, count: int) -> bool:
        """Wait until the consumer has asked for ``count`` batches; false if the pass ends instead."""
        while self._requested < count and not self.is_stopped:
            self._requested += self.requests.get()
        return not self.is_stopped
