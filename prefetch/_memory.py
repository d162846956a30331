"""Who keeps memory alive while streams use it: on the device, and the host batches under running copies."""

from __future__ import annotations

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

    With ``p = prefetch_batches``, when batch ``j`` is allocated the step on batch ``j - (p + 2)`` is done, and device
    memory holds at most ``p + 3`` batches: ``p`` ahead, the new one, the one that the loop's variable still
    holds, and the one before, whose release may be under way.

    Belongs to a prefetcher, not to a pass, so that the bound holds over short and broken-off passes.
    """

    def __init__(self) -> None:
        self._consumer: torch.Stream | None = None
        self._steps: deque[torch.Event] = deque()

    def moved_on(self) -> None:
        """The consumer has queued all its work on the last batch and asks for the next."""
        if self._consumer is not None:
            self._steps.append(self._consumer.record_event())
            self._consumer = None

    def make_room(self) -> None:
        """Wait, on the host, until the next batch may be allocated."""
        while len(self._steps) > _UNFINISHED_STEPS:
            self._steps.popleft().synchronize()

    def hand_over(self, tensors: Iterable[torch.Tensor], consumer: torch.Stream) -> None:
        """Give a batch's memory to the work that ``consumer`` will queue on it."""
        for tensor in tensors:
            tensor.record_stream(consumer)
        self._consumer = consumer


class Sources:
    """Host batches whose copies may still run: held until they are done, and not longer.

    The pinned allocator protects only blocks that it handed out itself; memory that was page-locked by other means
    would be freed under the running copy.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[torch.Event, Any]] = deque()
        self._lock = threading.Lock()  # passes in several threads share a side stream

    def hold(self, batch: Any, copied: torch.Event) -> None:
        """Keep ``batch`` until ``copied`` has happened."""
        self._held.append((copied, batch))

    def release(self) -> None:
        """Drop those whose copies are done."""
        with self._lock:
            while self._held and self._held[0][0].query():
                self._held.popleft()

    def drain(self) -> None:
        """Wait, on the host, for all copies, and drop all."""
        with self._lock:
            while self._held:
                self._held[0][0].synchronize()
                self._held.popleft()

    def __del__(self) -> None:
        self.drain()
