"""One pass over the loader: how batches reach the consumer."""

from __future__ import annotations

import os
import sys
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from prefetch._device import current_stream, on_stream
from prefetch._errors import PrefetchWarning
from prefetch._feeder import InlineFeeder
from prefetch._memory import RecordStream, Sources
from prefetch._search import tensors_on
from prefetch._transfer import Transfer

T = TypeVar("T")


class Arrival(NamedTuple):
    """A batch whose copy is queued: not to be read before ``copied``."""

    batch: Any
    tensors: list[torch.Tensor]
    copied: torch.Event


class Lane:
    """What all passes of one prefetcher share: the side stream and the memory in flight on it.

    Each method is called from the thread that asks for a batch.
    """

    def __init__(self, stream: torch.Stream, transfer: Transfer, prefetch_batches: int) -> None:
        self.prefetch_batches = prefetch_batches
        self._device = transfer.device
        self._stream = stream
        self._transfer = transfer
        self._memory = RecordStream()
        self._sources = Sources(limit=prefetch_batches + 3)
        self._process = os.getpid()
        self._last_copied: torch.Event | None = None

    def start_pass(self) -> None:
        """Order the side stream after what the caller has queued, for tensors that the transform closes over."""
        if self._transfer.has_transform:
            self._stream.wait_stream(current_stream(self._device))

    def step_done(self) -> None:
        """The consumer asks for the next batch."""
        self._memory.moved_on()
        self._sources.release()

    def take_warning(self) -> str | None:
        """What has come up since the last call that the caller should be told."""
        warning, self._transfer.pageable = self._transfer.pageable, None
        return warning

    def issue(self, batch: Any) -> Arrival:
        """Queue the transfer of a host batch on the side stream."""
        self._memory.make_room()
        self._sources.make_room()
        with on_stream(self._stream) as producer:
            # What the loader has made on the device itself comes before us and, through us, before the consumer.
            resident = tensors_on(batch, self._device)
            if resident:
                self._stream.wait_stream(producer)
            moved = None
            try:
                moved, tensors = self._transfer(batch)
            finally:  # after an error too: some leaves may be on their way
                self._last_copied = copied = self._stream.record_event()
                if moved is not batch:  # else nothing was copied
                    self._sources.hold(batch, copied)
        return Arrival(moved, tensors + resident, copied)

    def deliver(self, arrival: Arrival, last_copied: deque[torch.Event]) -> Any:
        """The batch, for the stream that is current now; its copy's event is added to ``last_copied``."""
        last_copied.append(arrival.copied)
        consumer = current_stream(self._device)
        consumer.wait_event(arrival.copied)
        self._memory.hand_over(arrival.tensors, consumer)
        return arrival.batch

    def end_pass(self) -> None:
        """Order what the caller does next after transforms that are under way: it may change what they read."""
        if self._transfer.has_transform and self._last_copied is not None:
            current_stream(self._device).wait_event(self._last_copied)
        self._sources.release()

    def is_gone(self) -> bool:
        """Whether the device is not ours any more: the interpreter ends, or this is a forked process."""
        return sys.is_finalizing() or os.getpid() != self._process


class Epoch(Iterator[T]):
    """A pass over the loader. Letting go of it ends it, as :meth:`close` does."""

    @abstractmethod
    def close(self) -> None:
        """End the pass: the loader's iterator and the batches on their way are dropped."""


class SideStreamEpoch(Epoch[Any]):
    """A pass that copies ahead on the side stream."""

    def __init__(self, iterator: Iterator[Any], lane: Lane) -> None:
        self._lane = lane
        self._feeder = InlineFeeder(iterator, lane.issue, lane.prefetch_batches)
        self._last_copied: deque[torch.Event] = deque(maxlen=1)
        lane.start_pass()

    def __next__(self) -> Any:
        """The next batch, ready for the stream that is current in the calling thread."""
        lane, feeder, last_copied = self._lane, self._feeder, self._last_copied
        del self  # see InlineFeeder: an error that waits for its turn refers to this frame
        if (warning := lane.take_warning()) is not None:  # before a batch is taken: a warning may be made an error
            warnings.warn(warning, PrefetchWarning, stacklevel=2)
        lane.step_done()
        try:
            return lane.deliver(feeder.take(), last_copied)
        except StopIteration:
            # Lets the last host batches go. The wait costs the device nothing: what the caller has queued on the last
            # batch waits for the same copy.
            while last_copied:
                last_copied.pop().synchronize()
            lane.end_pass()
            raise

    def close(self) -> None:
        """End the pass; copies under way go on, and keep their host batches."""
        self._feeder.close()
        self._lane.end_pass()

    def __del__(self) -> None:
        self._feeder.close()
        if not self._lane.is_gone():
            self._lane.end_pass()


class PlainEpoch(Epoch[Any]):
    """A pass without look-ahead: on the CPU, and on devices without streams."""

    def __init__(self, iterator: Iterator[Any], transfer: Transfer) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._transfer = None if transfer.is_identity else transfer

    def __next__(self) -> Any:
        """The next batch."""
        if self._iterator is None:
            raise StopIteration
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise
        return batch if self._transfer is None else self._transfer(batch)[0]

    def close(self) -> None:
        """End the pass: the loader's iterator is dropped."""
        self._iterator = None
