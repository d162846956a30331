"""One pass over the loader: how batches reach the consumer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from prefetch._device import current_stream, on_stream
from prefetch._feeder import InlineFeeder
from prefetch._memory import RecordStream, Sources
from prefetch._transfer import Transfer


class Arrival(NamedTuple):
    """A batch whose copy is queued: not to be read before ``copied``."""

    batch: Any
    tensors: list[torch.Tensor]
    copied: torch.Event


class Lane:
    """What all passes of one prefetcher share: the side stream and the memory in flight on it."""

    def __init__(self, device: torch.device, stream: torch.Stream, transfer: Transfer) -> None:
        self._device = device
        self._stream = stream
        self._transfer = transfer
        self._memory = RecordStream()
        self._sources = Sources()

    def start_pass(self) -> None:
        """Order the side stream after what the caller has queued, for tensors that the transform closes over."""
        if self._transfer.has_transform:
            self._stream.wait_stream(current_stream(self._device))

    def step_done(self) -> None:
        """The consumer asks for the next batch."""
        self._memory.moved_on()
        self._sources.release()

    def issue(self, batch: Any) -> Arrival:
        """Queue the transfer of a host batch on the side stream."""
        self._memory.make_room()
        with on_stream(self._stream) as producer:
            try:
                moved, tensors = self._transfer(batch, producer)
            finally:  # after an error too: some leaves may be on their way
                copied = self._stream.record_event()
                self._sources.hold(batch, copied)
        return Arrival(moved, tensors, copied)

    def deliver(self, arrival: Arrival) -> Any:
        """The batch, for the stream that is current now."""
        consumer = current_stream(self._device)
        consumer.wait_event(arrival.copied)
        self._memory.hand_over(arrival.tensors, consumer)
        return arrival.batch

    def finish_pass(self) -> None:
        """Release the last host batches.

        The wait costs the device nothing: the consumer's last step is queued, and itself waits for the same copy.
        """
        self._sources.drain()


class SideStreamEpoch(Iterator[Any]):
    """A pass that copies ahead on the side stream."""

    def __init__(self, iterator: Iterator[Any], lane: Lane, prefetch_batches: int) -> None:
        self._lane = lane
        self._feeder = InlineFeeder(iterator, lane.issue, prefetch_batches)
        lane.start_pass()

    def __next__(self) -> Any:
        """The next batch, ready for the stream that is current in the calling thread."""
        self._lane.step_done()
        try:
            arrival = self._feeder.take()
        except StopIteration:
            self._lane.finish_pass()
            raise
        return self._lane.deliver(arrival)

    def close(self) -> None:
        """End the pass: the loader's iterator and the batches on their way are dropped."""
        self._feeder.close()


class PlainEpoch(Iterator[Any]):
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
