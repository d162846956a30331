"""The way to the device: what all passes of one prefetcher share, and how the batches of one pass go."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

import torch

from prefetch._arguments import MemoryName
from prefetch._consumer_memory import Consumer
from prefetch._device import CallerState, current_stream, is_capturing, on_stream
from prefetch._errors import PrefetchError
from prefetch._mark import Mark, clock
from prefetch._memory import Destination, Lent, Memory, RecordStream, is_gone
from prefetch._meter import PassMeter
from prefetch._search import tensors_on
from prefetch._sources import Sources
from prefetch._static_memory import Static
from prefetch._transfer import Transfer


class Arrival(NamedTuple):
    """A batch whose copy is queued: not to be read before ``copied``."""

    position: int
    mark: Mark | None
    batch: Any
    lent: list[torch.Tensor]
    destination: Destination | None
    copied: torch.Event


class Lane(ABC):
    """How the host batches of one pass become the consumer's, and which thread does what.

    :meth:`issue` is called by whoever advances the loader, a background thread perhaps, once the consumer's requests
    allow for the batch; everything else by the thread that asks for batches.

    Args:
        meter: Told about each batch.
        warnings: What comes up that the caller should be told.
    """

    def __init__(self, meter: PassMeter, warnings: deque[str]) -> None:
        self.meter = meter
        self.warnings = warnings

    @abstractmethod
    def caller_state(self) -> CallerState:
        """What a background thread, which is about to advance the loader, takes over from the calling thread."""

    @abstractmethod
    def ask(self) -> None:
        """The consumer has queued its work on the last batch, and asks for the next.

        Raises:
            PrefetchError: The work of this thread is captured into a graph at the moment.
        """

    @abstractmethod
    def issue(self, batch: Any, position: int) -> Any:
        """Start the transfer of the batch that the loader gave in this thread, at a position of the pass."""

    @abstractmethod
    def deliver(self, issued: Any) -> Any:
        """The batch, for use in the calling thread now."""

    @abstractmethod
    def finish(self) -> None:
        """The pass has come to its end: after the last batch is delivered."""

    @abstractmethod
    def end(self) -> None:
        """No more is asked for. What the caller does next comes after work on the caller's tensors that is under way.

        The caller may change them. May be called more than once.
        """

    @abstractmethod
    def is_gone(self) -> bool:
        """Whether the device is not ours any more."""


class PlainLane(Lane):
    """Without streams: a batch that is issued is there."""

    def __init__(self, transfer: Transfer, meter: PassMeter) -> None:
        super().__init__(meter, transfer.warnings)
        self._transfer = transfer

    def caller_state(self) -> CallerState:
        """See :meth:`Lane.caller_state`."""
        return CallerState(self._transfer.device, None)

    def ask(self) -> None:
        """Nothing is waited for."""
        self.meter.asked_on_host()

    def issue(self, batch: Any, position: int) -> Any:  # noqa: ARG002 - as in Lane
        """Move a batch, if anything is to be done to it."""
        return moved_on_host(self._transfer, batch, self.meter)

    def deliver(self, issued: Any) -> Any:
        """The batch itself."""
        batch, mark = issued
        self.meter.delivered(mark)
        return batch

    def finish(self) -> None:
        """Nothing is held."""
        self.end()

    def end(self) -> None:
        """Nothing is under way."""
        self.meter.ended()

    def is_gone(self) -> bool:
        """There is nothing that could be."""
        return False


def moved_on_host(transfer: Transfer, batch: Any, meter: PassMeter) -> tuple[Any, Mark | None]:
    """The batch, moved where there are no streams, so that the host waits for it; and its mark, if it is marked."""
    mark, meter.mark = meter.mark, None
    start = clock()
    moved, _, copied = meter.within("prefetch.copy", transfer, batch) if meter.has_ranges else transfer(batch)
    end = clock()
    meter.issue_ns += end - start
    meter.bytes += copied
    if mark is not None:
        mark.issue_start_ns, mark.issue_end_ns = start, end
    return moved, mark


def _policy(name: MemoryName, prefetch_batches: int, transfer: Transfer) -> Memory:
    if name == "consumer":
        return Consumer(prefetch_batches)
    if name == "static":
        return Static(prefetch_batches, transfer.device, transfer.warnings)
    return RecordStream()


class Side:
    """The side stream, and what is in flight on it: of all passes of one prefetcher, for its whole life."""

    def __init__(self, transfer: Transfer, memory: MemoryName, prefetch_batches: int) -> None:
        self.stream = torch.Stream(transfer.device)
        self.transfer = transfer
        self.memory = _policy(memory, prefetch_batches, transfer)
        self.lent = Lent(prefetch_batches)
        self.sources = Sources(limit=prefetch_batches + 3)
        self.process = os.getpid()
        self.last_issued: torch.Event | None = None
        self.works_on_callers_tensors = transfer.has_transform
        self.loaders_stream: torch.Stream | None = None
        self.lock = threading.Lock()  # passes in several threads


class SideStreamLane(Lane):
    """Over a side stream. Starts after what the caller has queued so far, if a transform may read tensors of theirs."""

    def __init__(self, side: Side, meter: PassMeter) -> None:
        super().__init__(meter, side.transfer.warnings)
        self._side = side
        self._device = side.transfer.device
        self._memory = side.memory.new_pass()
        self._last_copied: torch.Event | None = None
        self._issued = self._delivered = self._moved_on = 0  # batches
        if side.transfer.has_transform:
            side.stream.wait_stream(current_stream(self._device))

    def caller_state(self) -> CallerState:
        """See :meth:`Lane.caller_state`.

        What the loader itself does on the device, in that thread, gets a stream of its own, which comes after what the
        caller has queued so far. On the side stream it would hold up the copies.
        """
        side = self._side
        with side.lock:
            if side.loaders_stream is None:
                side.loaders_stream = torch.Stream(self._device)
        side.loaders_stream.wait_stream(current_stream(self._device))
        return CallerState(self._device, side.loaders_stream)

    def ask(self) -> None:
        """See :meth:`Lane.ask`."""
        if is_capturing(self._device):
            raise PrefetchError(
                "a batch is asked for while a graph is captured, which would record the copies: ask before the capture"
            )
        if self.meter.in_use is not None:
            self.meter.end_marked_step(None, current_stream(self._device))
        self._side.lent.moved_on()
        self._moved_on = self._delivered  # after that: a background thread reads it
        self._memory.asked(self._device)
        self._side.sources.release()

    def issue(self, batch: Any, position: int) -> Arrival:
        """Queue the transfer of a host batch on the side stream."""
        side, meter = self._side, self.meter
        if side.lent.make_room(self._issued - self._moved_on) | side.sources.make_room():
            meter.room_end_ns = now = clock()
            meter.room_ns += now - meter.load_end_ns
        mark = None if meter.mark is None else meter.issue_marked(side.stream)
        timer = None if mark is None else mark.device
        with on_stream(side.stream) as producer:
            # What the loader has made on the device itself comes before us and, through us, before the consumer.
            resident = tensors_on(batch, self._device)
            if resident:
                side.stream.wait_stream(producer)
                side.works_on_callers_tensors = True
            destination = self._memory.destination(position)
            moved = None
            is_issued = False
            try:
                if meter.has_ranges:
                    result = meter.within("prefetch.copy", side.transfer, batch, destination, timer)
                else:
                    result = side.transfer(batch, destination, timer)
                moved, lent, copied_bytes = result
                is_issued = True
            finally:  # after an error too: some leaves may be on their way
                copied = side.stream.record_event() if timer is None else timer.pause()
                side.last_issued = copied
                if destination is not None:
                    destination.copied = copied
                    if not is_issued:  # now, for the error's traceback keeps it
                        destination.give_back()
                if moved is not batch:  # else nothing was copied
                    # Device tensors by name: the loader may fill the batch's list anew.
                    side.sources.hold((batch, resident), copied)
        meter.bytes += copied_bytes
        if mark is not None:
            mark.issue_ends(copied_bytes)
        self._issued += 1
        return Arrival(position, mark, moved, lent + resident, destination, copied)

    def deliver(self, arrival: Arrival) -> Any:
        """The batch, for the stream that is current now."""
        self._last_copied = arrival.copied
        consumer = current_stream(self._device)
        mark = arrival.mark
        if mark is None or mark.device is None:
            consumer.wait_event(arrival.copied)
        else:
            mark.device.wait(consumer, arrival.copied)
        lent = arrival.lent
        if arrival.destination is not None:
            lent = [*lent, *arrival.destination.hand_over(consumer)]
        self._side.lent.hand_over(lent, consumer)
        self._memory.delivered(arrival.position)
        self._delivered += 1
        self.meter.delivered(mark)
        return arrival.batch

    def finish(self) -> None:
        """See :meth:`Lane.finish`: lets the last host batches go.

        The wait costs the device nothing: what the caller has queued on the last batch waits for the same copy.
        """
        copied, self._last_copied = self._last_copied, None
        if copied is not None:
            copied.synchronize()
        self.end()

    def end(self) -> None:
        """See :meth:`Lane.end`."""
        side = self._side
        self._memory.end()
        self.meter.ended()
        caller = current_stream(self._device)
        if side.works_on_callers_tensors and side.last_issued is not None:
            caller.wait_event(side.last_issued)
        if side.loaders_stream is not None:
            caller.wait_stream(side.loaders_stream)
        side.sources.release()

    def is_gone(self) -> bool:
        """Whether the device is not ours any more: the interpreter ends, or this is a forked process."""
        return is_gone(self._side.process)
