"""Who advances the loader: in the caller's thread, when the caller asks."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from prefetch._errors import PrefetchError
from prefetch._mark import clock
from prefetch._meter import PassMeter
from prefetch._state import PassState, Snapshot

Issued = TypeVar("Issued")


class Item(NamedTuple):
    """One answer of the loader: a batch on its way, or an error in its place."""

    issued: Any
    error: BaseException | None
    """``StopIteration`` is the end."""
    snapshot: Snapshot | None

    @property
    def is_end(self) -> bool:
        """Whether nothing comes after it."""
        return isinstance(self.error, StopIteration)


def clear_frames(item: Item) -> None:
    """Before an item is dropped: the error of a worker process is in a cycle with torch's frames, which hold much."""
    if item.error is not None:
        traceback.clear_frames(item.error.__traceback__)


def superseded() -> PrefetchError:
    """The error of a pass whose loader has begun another one with the same iterator."""
    return PrefetchError(
        "a later pass has taken over this one's iterator: the loader (a DataLoader with persistent_workers=True, for "
        "example) has only one; finish or close a pass before the next"
    )


class Feeder(ABC, Generic[Issued]):
    """Gives the batches of one pass in their order; errors of the loader, or of issuing a batch, at their position.

    Args:
        iterator: The loader's iterator; dropped when it ends, so that its workers end too.
        issue: Starts the transfer of the host batch at a position of the pass, counted from 0, with errors of the
            loader. Must not refer to the feeder: the end of a pass rests on reference counts.
        look_ahead: Batches beyond the one taken.
        state: Told after each answer of the loader, and when the answer is taken.
        meter: Told when the loader is at work.
    """

    @abstractmethod
    def take(self) -> Issued:
        """The next issued batch.

        Raises:
            StopIteration: There is none, now and ever after.
            PrefetchError: The loader has begun another pass with this one's iterator.
            Exception: What the loader or ``issue`` raised in this batch's place.
        """

    @abstractmethod
    def close(self) -> bool:
        """Let go of the loader's iterator and of all batches not taken; whether the loader is not at work any more."""

    @abstractmethod
    def supersede(self, iterator: Iterator[Any] | None) -> None:
        """Close, if more was to be asked of ``iterator`` (``None``: of any), for it is to serve another pass."""


class InlineFeeder(Feeder[Issued]):
    """Asks the loader when the caller asks.

    The loader is not asked again before an error has been raised. What is no ``Exception`` (Ctrl-C) is raised at once,
    and loses the batch that was being issued, if any, as it would in the bare loop.

    The traceback of a queued error refers to the frames that were running, with all their local names. So none of these
    may name a good batch, nor the owner of the feeder, who calls :meth:`close` in the end.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        issue: Callable[[Any, int], Issued],
        look_ahead: int,
        state: PassState,
        meter: PassMeter,
    ) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._issue = issue
        self._look_ahead = look_ahead
        self._state = state
        self._meter = meter
        self._queue: deque[Item] = deque()
        self._position = -1  # of the loader's last answer
        self._is_superseded = False

    def take(self) -> Issued:
        """See :meth:`Feeder.take`."""
        queue = self._queue
        while len(queue) <= self._look_ahead and self._fetch():
            pass
        if not queue:
            raise superseded() if self._is_superseded else StopIteration
        self._state.delivered(queue[0].snapshot)
        if queue[0].error is None:
            return queue.popleft().issued  # type: ignore[no-any-return]
        if queue[0].is_end:
            raise StopIteration
        error: Any = queue.popleft().error
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def close(self) -> bool:
        """See :meth:`Feeder.close`."""
        self._iterator = None
        for item in self._queue:
            clear_frames(item)
        self._queue.clear()
        return True

    def supersede(self, iterator: Iterator[Any] | None) -> None:
        """See :meth:`Feeder.supersede`."""
        if self._iterator is not None and (iterator is None or iterator is self._iterator):
            self.close()
            self._is_superseded = True

    def _fetch(self) -> bool:
        """Ask the loader for one batch, unless it has ended or an error stands before it; whether it was asked."""
        queue = self._queue
        if self._iterator is None or (queue and queue[-1].error is not None):
            return False
        self._position += 1
        meter = self._meter
        start = clock()
        try:
            batch = meter.within("prefetch.load", next, self._iterator) if meter.has_ranges else next(self._iterator)
        except StopIteration:
            self._iterator = None
            queue.append(Item(None, StopIteration(), self._state.fetched()))
            return True
        except Exception as error:  # noqa: BLE001 - raised in its turn by take()
            queue.append(Item(None, error, self._state.fetched()))
            return True
        meter.loaded(start)
        snapshot = self._state.fetched()
        try:
            issued = self._issue(batch, self._position)
        except Exception as error:  # noqa: BLE001 - likewise
            queue.append(Item(None, error, snapshot))
            return True
        if self._iterator is not None:  # the transform may have closed the pass
            queue.append(Item(issued, None, snapshot))
        return True
