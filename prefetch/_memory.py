"""Who owns the device memory of the batches, and when it may be used again: the interface of the policies.

And the simplest of them; the others are in ``_consumer_memory`` and ``_static_memory``.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

# Steps of the consumer that may be unfinished when the next batch is allocated and all of the look-ahead is on its way.
# One step keeps the device at work while the host prepares the next; each further one would cost one more batch.
_UNFINISHED_STEPS = 1


class Layout(NamedTuple):
    """What a dense tensor needs of its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Destination(ABC):
    """Where one batch goes. Its memory is given back if it is let go of before it is handed over."""

    takes_device_tensors = False
    """Whether leaves that are on the device already go here too. If not, they stay where they are."""

    copied: torch.Event | None = None
    """When all that was queued for the batch is done; to be set once it is queued, or has failed to be."""

    @abstractmethod
    def tensor(self, layout: Layout) -> torch.Tensor | None:
        """Memory for the batch's next tensor; ``None``: it is to be allocated on the side stream.

        In the order in which the batch is traversed.
        """

    @abstractmethod
    def open(self, side: torch.Stream) -> None:
        """After the last :meth:`tensor`: let ``side`` wait until all of them may be written to."""

    @abstractmethod
    def hand_over(self, consumer: torch.Stream) -> Sequence[torch.Tensor]:
        """The tensors belong to the consumer now; those that are to be recorded on its stream are returned."""

    @abstractmethod
    def give_back(self) -> None:
        """The batch will not be delivered, though copies of it may be under way. Does nothing after a hand-over."""

    def __del__(self) -> None:
        self.give_back()


class PassMemory(ABC):
    """A policy for one pass. :meth:`destination` is called by who issues batches, the rest by who asks for them."""

    def asked(self, device: torch.device) -> None:  # noqa: B027 - not every policy needs it
        """The next batch is asked for: all work on earlier ones is queued on this thread's current stream."""

    @abstractmethod
    def destination(self, position: int) -> Destination | None:
        """For the batch at a position of the pass; ``None``: all of it is to be allocated on the side stream."""

    def delivered(self, position: int) -> None:  # noqa: B027 - likewise
        """The batch at ``position`` has been handed over, and no work on it is queued yet."""

    def end(self) -> None:  # noqa: B027 - likewise
        """No batch of this pass will be asked for any more."""


class Memory(ABC):
    """A policy, for all passes of one prefetcher."""

    @abstractmethod
    def new_pass(self) -> PassMemory:
        """For a pass that starts."""


def is_gone(process: int) -> bool:
    """Whether the device is not that of ``process`` any more: the interpreter ends, or this is a forked process."""
    return sys.is_finalizing() or os.getpid() != process


class Lent:
    """Memory that is allocated on the side stream, and lent to the consumer's with ``record_stream``.

    The allocator then reuses a freed block only after the consumer's kernels. It learns that they are done when it
    is next asked for memory; a host that runs ahead of the device would therefore allocate new blocks without end.
    So before a batch is allocated, the host waits until enough of the consumer's steps have finished.

    With ``p = prefetch_batches``, when batch ``j`` is allocated the step on batch ``j - (p + 2)`` is done: of the
    ``p + 1`` batches before it, those that the consumer has moved on from may have unfinished steps, and the others
    are on their way or in use. Device memory then holds at most ``p + 3`` batches: these, the new one, and the one
    before them. The last was let go after the consumer had begun to wait for the next batch's copy, so that it is
    free only when that copy is done, though no kernel uses it any more.

    Belongs to a prefetcher, not to a pass, so that the bound holds over short and broken-off passes. Whatever the
    policy, some memory may be lent: what objects with a ``.to`` of their own allocate, for example.
    """

    def __init__(self, prefetch_batches: int) -> None:
        self._prefetch_batches = prefetch_batches
        self._consumer: torch.Stream | None = None
        self._steps: deque[torch.Event] = deque()

    def moved_on(self) -> None:
        """The consumer has queued all its work on the last batch and asks for the next."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._steps.append(consumer.record_event())

    def make_room(self, in_flight: int) -> bool:
        """Wait, on the host, until the next batch may be allocated; whether it had to.

        Args:
            in_flight: Batches of the pass that are issued, and that the consumer has not moved on from.
        """
        has_waited = False
        unfinished = _UNFINISHED_STEPS + max(0, self._prefetch_batches - in_flight)
        while len(self._steps) > unfinished:
            try:
                step = self._steps.popleft()
            except IndexError:  # another pass, in another thread, was quicker
                break
            if not step.query():
                step.synchronize()
                has_waited = True
        return has_waited

    def hand_over(self, tensors: Iterable[torch.Tensor], consumer: torch.Stream) -> None:
        """Give memory to the work that ``consumer`` will queue on it."""
        for tensor in tensors:
            tensor.record_stream(consumer)
            self._consumer = consumer


class RecordStream(Memory, PassMemory):
    """``memory="record_stream"``: everything is allocated on the side stream and lent."""

    def new_pass(self) -> RecordStream:
        """The same for all."""
        return self

    def destination(self, position: int) -> None:  # noqa: ARG002 - as in PassMemory
        """There is none."""
        return
