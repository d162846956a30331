"""Who keeps memory alive while streams use it: on the device, and the host batches under running copies."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

# Steps of the consumer that may be unfinished when the next batch is allocated. One step keeps the device at
# work while the host prepares the next; each further one would cost the memory of one more batch.
_UNFINISHED_STEPS = 1


class RecordStream:
    """Batches are allocated on the side stream and lent to the consumer's with ``record_stream``.

    The allocator then reuses a freed block only after the consumer's kernels. It learns that they are done when it
    is next asked for memory; a host that runs ahead of the device would therefore allocate new blocks without end.
    So before a batch is allocated, the host waits until all of the consumer's steps but the last have finished.

    With ``p = prefetch_batches``, when batch ``j`` is allocated, in answer to the request for batch ``j - p``, the step
    on batch ``j - (p + 2)`` is done. Device memory then holds at most ``p + 3`` batches: ``p`` ahead, the new one, the
    one that the loop's variable still holds, and the one before. The last was let go after the consumer had begun to
    wait for the next batch's copy, so that it is free only when that copy is done, though no kernel uses it any more.

    Belongs to a prefetcher, not to a pass, so that the bound holds over short and broken-off passes.
    """

    def __init__(self) -> None:
        self._consumer: torch.Stream | None = None
        self._steps: deque[torch.Event] = deque()

    def moved_on(self) -> None:
        """The consumer has queued all its work on the last batch and asks for the next."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._steps.append(consumer.record_event())

    def make_room(self) -> None:
        """Wait, on the host, until the next batch may be allocated."""
        while len(self._steps) > _UNFINISHED_STEPS:
            try:
                step = self._steps.popleft()
            except IndexError:  # another pass, in another thread, was quicker
                return
            step.synchronize()

    def hand_over(self, tensors: Iterable[torch.Tensor], consumer: torch.Stream) -> None:
        """Give a batch's memory to the work that ``consumer`` will queue on it."""
        for tensor in tensors:
            tensor.record_stream(consumer)
        self._consumer = consumer


class Sources:
    """Host batches whose copies may still run: held until the copies are seen to be done.

    The pinned allocator protects only blocks that it handed out itself; memory that was page-locked by other means
    would be freed under the running copy.

    Args:
        limit: How many batches may be held. While batches are delivered there are never so many, since the consumer's
            steps hold the host back; a transform that fails on each of them delivers none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._process = os.getpid()
        self._held: deque[tuple[torch.Event, Any]] = deque()
        # A finalizer may interrupt the thread that holds it, and call release(). Batches are let go outside of it, for
        # that may run any code.
        self._lock = threading.RLock()

    def make_room(self) -> None:
        """Wait, on the host, until another batch may be held."""
        if len(self._held) < self._limit:
            return
        held = list(self._held)
        for copied, _ in held[: len(held) - self._limit + 1]:
            copied.synchronize()
        del held
        self.release()

    def hold(self, batch: Any, copied: torch.Event) -> None:
        """Keep ``batch`` until ``copied`` has happened."""
        self._held.append((copied, batch))

    def release(self) -> None:
        """Drop those whose copies are done."""
        while True:
            try:
                first = self._held[0]
            except IndexError:
                return
            if not first[0].query():
                return
            with self._lock:
                if self._held and self._held[0] is first:  # no other thread, and no finalizer, was quicker
                    self._held.popleft()
            del first

    def __del__(self) -> None:
        if os.getpid() != self._process:
            return  # in a forked process the copies, and the device, are the parent's
        # A device that has failed runs no copies any more, and says so at the caller's next call.
        with contextlib.suppress(RuntimeError):
            for copied, _ in self._held:
                copied.synchronize()
