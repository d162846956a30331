"""Who advances the loader: in the caller's thread, when the caller asks."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Issued = TypeVar("Issued")


class InlineFeeder(Generic[Issued]):
    """Keeps up to ``look_ahead`` issued batches beyond the one that is taken.

    An error of the loader, or of issuing a batch, takes that batch's place: it is raised when its turn comes, and
    the loader is not asked again before. What is no ``Exception`` (Ctrl-C) is raised at once, and loses the batch that
    was being issued, if any, as it would in the bare loop.

    The traceback of a queued error refers to the frames that were running, with all their local names. So none of these
    may name a good batch, nor the owner of the feeder, who calls :meth:`close` in the end.

    Args:
        iterator: The loader's iterator; dropped when it ends, so that its workers end too.
        issue: Starts the transfer of one host batch. Must not refer to the feeder: the end of a pass rests on
            reference counts.
        look_ahead: Batches beyond the one taken.
    """

    def __init__(self, iterator: Iterator[Any], issue: Callable[[Any], Issued], look_ahead: int) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._issue = issue
        self._look_ahead = look_ahead
        self._queue: deque[Issued | Exception] = deque()

    def take(self) -> Issued:
        """The next issued batch.

        Raises:
            StopIteration: There is none, now and ever after.
            Exception: What the loader or ``issue`` raised in this batch's place.
        """
        while len(self._queue) <= self._look_ahead and self._fetch():
            pass
        if not self._queue:
            raise StopIteration
        if isinstance(self._queue[0], Exception):
            error: Any = self._queue.popleft()
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._queue.popleft()  # type: ignore[return-value] # which has just been seen to be no error

    def close(self) -> None:
        """Let go of the loader's iterator and of all batches not taken."""
        self._iterator = None
        for item in self._queue:
            if isinstance(item, Exception):
                # An error that a worker process sent is in a cycle with torch's frames, which hold the iterator.
                traceback.clear_frames(item.__traceback__)
        self._queue.clear()

    def _fetch(self) -> bool:
        """Ask the loader for one batch, unless it has ended or an error stands before it; whether it was asked."""
        queue = self._queue
        if self._iterator is None or (queue and isinstance(queue[-1], Exception)):
            return False
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return True
        except Exception as error:  # noqa: BLE001 - raised in its turn by take()
            queue.append(error)
            return True
        try:
            issued = self._issue(batch)
        except Exception as error:  # noqa: BLE001 - likewise
            queue.append(error)
            return True
        if self._iterator is not None:  # the transform may have closed the pass
            queue.append(issued)
        return True
