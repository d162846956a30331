"""Where a loader stands, counted in batches delivered, not in batches looked ahead."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any


class Snapshot:
    """A copy of the loader's state, or the error that came instead of it."""

    __slots__ = ("_error", "_state")

    def __init__(self, take: Callable[[], Any]) -> None:
        self._state: Any = None
        self._error: Exception | None = None
        try:
            self._state = copy.deepcopy(take())  # it may hold what the loader goes on to change
        except Exception as error:  # noqa: BLE001 - who never asks for the state should not be stopped by this
            self._error = error

    def is_good(self) -> bool:
        """Whether there is a state."""
        return self._error is None

    def copied(self) -> Any:
        """The state, for the caller to keep.

        Raises:
            Exception: What the loader raised when it was asked.
        """
        if self._error is not None:
            raise self._error
        return copy.deepcopy(self._state)


class LoaderState:
    """``state_dict`` and ``load_state_dict`` of a loader that is looked ahead.

    After each batch that is fetched ahead a snapshot is taken, which travels with the batch and becomes the state when
    the batch is delivered. Where nothing is looked ahead, the loader's own state is right, and costs nothing until
    somebody asks for it. Only the newest pass counts: it is the one that the loader knows about.

    Args:
        loader: The loader; one without the two methods is never asked.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._pass = 0
        self._fields = threading.RLock()
        # A background thread takes snapshots, and a load must not come in between.
        self._loaders = threading.RLock()
        self._process = os.getpid()
        self._delivered: Snapshot | None = None

    def is_kept(self) -> bool:
        """Whether the loader has a state."""
        methods = (getattr(self._loader, name, None) for name in ("state_dict", "load_state_dict"))
        return all(callable(method) for method in methods)

    def state_dict(self) -> Any:
        """The state after the batches that were delivered, whatever has been looked ahead: a copy.

        After the last batch the pass is not over yet; once the loop has ended, it is.
        """
        delivered = self._delivered
        return copy.deepcopy(self._loader.state_dict()) if delivered is None else delivered.copied()

    def load_state_dict(self, state: Any) -> None:
        """Let the next pass start from ``state``, which is copied. A pass that is open goes on as it was."""
        state = copy.deepcopy(state)
        snapshot = Snapshot(lambda: state)
        with self._own_lock():
            self._loader.load_state_dict(state)
            with self._fields:
                self._pass += 1
                self._delivered = snapshot

    def new_pass(self) -> None:
        """Before a pass starts: earlier ones do not count any more."""
        with self._own_lock(), self._fields:
            self._pass += 1

    def track(self, *, looks_ahead: bool) -> PassState:
        """For the pass that has just started."""
        tracked = PassState(self, self._pass if looks_ahead and self.is_kept() else None)
        self._delivered = tracked.fetched()
        return tracked

    def take(self, number: int, is_over: Callable[[], bool] | None) -> Snapshot | None:
        """A snapshot for a pass; ``None`` if the loader's state is not that of this pass any more, or if it is over.

        With ``is_over``, for background threads, it never waits for long without a look at that: the thread that has
        the lock may be waiting, in a finalizer, for the one that calls this.
        """
        lock = self._own_lock()
        if is_over is None:
            with lock:
                return self._snapshot(number)
        while not lock.acquire(timeout=0.05):
            if is_over():
                return None
        try:
            return self._snapshot(number)
        finally:
            lock.release()

    def _snapshot(self, number: int) -> Snapshot | None:
        return Snapshot(self._loader.state_dict) if number == self._pass else None

    def advance(self, number: int, snapshot: Snapshot | None) -> None:
        """Make a snapshot the state, if the pass is the newest."""
        with self._fields:
            if number == self._pass and snapshot is not None:
                self._delivered = snapshot

    def _own_lock(self) -> threading.RLock:
        if self._process != os.getpid():  # a forked process may have got it locked, and nobody there to release it
            self._loaders, self._process = threading.RLock(), os.getpid()
        return self._loaders

    def __getstate__(self) -> dict[str, Any]:
        return {"_loader": self._loader, "_delivered": self._delivered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_loader"])  # type: ignore[misc] # for the locks, which cannot be copied
        delivered = state["_delivered"]
        if delivered is not None and delivered.is_good():  # the loader was copied where its look-ahead stands
            self.load_state_dict(delivered.copied())


class PassState:
    """The part of one pass; without a number there is nothing to do."""

    __slots__ = ("_number", "_owner")

    def __init__(self, owner: LoaderState, number: int | None) -> None:
        self._owner = owner
        self._number = number

    def fetched(self, is_over: Callable[[], bool] | None = None) -> Snapshot | None:
        """To be called after each answer of the loader: what is to be passed on with it."""
        return None if self._number is None else self._owner.take(self._number, is_over)

    def delivered(self, snapshot: Snapshot | None) -> None:
        """To be called when the answer is handed to the consumer."""
        if self._number is not None:
            self._owner.advance(self._number, snapshot)
