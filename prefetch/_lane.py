"""The way to the device that all passes of one prefetcher share."""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

import torch

from prefetch._device import CallerState, current_stream, has_streams, on_stream
from prefetch._memory import RecordStream, Sources
from prefetch._search import tensors_on
from prefetch._transfer import Transfer


class Arrival(NamedTuple):
    """A batch whose copy is queued: not to be read before ``copied``."""

    batch: Any
    tensors: list[torch.Tensor]
    copied: torch.Event


class Lane(ABC):
    """How a host batch becomes the consumer's, and which thread does what.

    :meth:`issue` is called by whoever advances the loader, a background thread perhaps, once the consumer's requests
    allow for the batch; everything else by the thread that asks for batches.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def take_warning(self) -> str | None:
        """What has come up since the last call that the caller should be told."""
        return self._transfer.take_warning()

    @abstractmethod
    def caller_state(self) -> CallerState:
        """What a background thread, which is about to advance the loader, takes over from the calling thread."""

    @abstractmethod
    def start_pass(self) -> None:
        """Order transforms after what the caller has queued so far: they may read tensors of the caller's."""

    @abstractmethod
    def step_done(self) -> None:
        """The consumer asks for the next batch."""

    @abstractmethod
    def issue(self, batch: Any) -> Any:
        """Start the transfer of a batch that the loader gave in this thread."""

    @abstractmethod
    def deliver(self, issued: Any, last_copied: deque[torch.Event]) -> Any:
        """The batch, for use in the calling thread now; its copy's event, if any, is added to ``last_copied``."""

    @abstractmethod
    def end_pass(self) -> None:
        """Order what the caller does next after work on the caller's tensors that is under way: it may change them."""

    @abstractmethod
    def is_gone(self) -> bool:
        """Whether the device is not ours any more."""


class PlainLane(Lane):
    """Without streams: a batch that is issued is there."""

    def caller_state(self) -> CallerState:
        """See :meth:`Lane.caller_state`."""
        return CallerState(self._transfer.device, None)

    def start_pass(self) -> None:
        """Nothing is queued."""

    def step_done(self) -> None:
        """Nothing is waited for."""

    def issue(self, batch: Any) -> Any:
        """Move a batch, if anything is to be done to it."""
        return self._transfer(batch)[0]

    def deliver(self, issued: Any, last_copied: deque[torch.Event]) -> Any:  # noqa: ARG002 - as in Lane
        """The batch itself."""
        return issued

    def end_pass(self) -> None:
        """Nothing is under way."""

    def is_gone(self) -> bool:
        """There is nothing that could be."""
        return False


class SideStreamLane(Lane):
    """The side stream, and the memory in flight on it."""

    def __init__(self, stream: torch.Stream, transfer: Transfer, prefetch_batches: int) -> None:
        self._stream = stream
        super().__init__(transfer)
        self._device = transfer.device
        self._memory = RecordStream()
        self._sources = Sources(limit=prefetch_batches + 3)
        self._process = os.getpid()
        self._last_issued: torch.Event | None = None
        self._works_on_callers_tensors = transfer.has_transform
        self._loaders_stream: torch.Stream | None = None
        self._lock = threading.Lock()  # passes in several threads

    def caller_state(self) -> CallerState:
        """See :meth:`Lane.caller_state`.

        What the loader itself does on the device, in that thread, gets a stream of its own, which comes after what the
        caller has queued so far. On the side stream it would hold up the copies.
        """
        with self._lock:
            if self._loaders_stream is None:
                self._loaders_stream = torch.Stream(self._device)
        self._loaders_stream.wait_stream(current_stream(self._device))
        return CallerState(self._device, self._loaders_stream)

    def start_pass(self) -> None:
        """See :meth:`Lane.start_pass`."""
        if self._transfer.has_transform:
            self._stream.wait_stream(current_stream(self._device))

    def step_done(self) -> None:
        """The consumer asks for the next batch."""
        self._memory.moved_on()
        self._sources.release()

    def issue(self, batch: Any) -> Arrival:
        """Queue the transfer of a host batch on the side stream."""
        self._memory.make_room()
        self._sources.make_room()
        with on_stream(self._stream) as producer:
            # What the loader has made on the device itself comes before us and, through us, before the consumer.
            resident = tensors_on(batch, self._device)
            if resident:
                self._stream.wait_stream(producer)
                self._works_on_callers_tensors = True
            moved = None
            try:
                moved, tensors = self._transfer(batch)
            finally:  # after an error too: some leaves may be on their way
                self._last_issued = copied = self._stream.record_event()
                if moved is not batch:  # else nothing was copied
                    # Device tensors by name: the loader may fill the batch's list anew.
                    self._sources.hold((batch, resident), copied)
        return Arrival(moved, tensors + resident, copied)

    def deliver(self, arrival: Arrival, last_copied: deque[torch.Event]) -> Any:
        """The batch, for the stream that is current now; its copy's event is added to ``last_copied``."""
        last_copied.append(arrival.copied)
        consumer = current_stream(self._device)
        consumer.wait_event(arrival.copied)
        self._memory.hand_over(arrival.tensors, consumer)
        return arrival.batch

    def end_pass(self) -> None:
        """See :meth:`Lane.end_pass`."""
        caller = current_stream(self._device)
        if self._works_on_callers_tensors and self._last_issued is not None:
            caller.wait_event(self._last_issued)
        if self._loaders_stream is not None:
            caller.wait_stream(self._loaders_stream)
        self._sources.release()

    def is_gone(self) -> bool:
        """Whether the device is not ours any more: the interpreter ends, or this is a forked process."""
        return sys.is_finalizing() or os.getpid() != self._process


def new_lane(transfer: Transfer, prefetch_batches: int) -> Lane:
    """The way to the device of a transfer."""
    if not has_streams(transfer.device):
        return PlainLane(transfer)
    return SideStreamLane(torch.Stream(transfer.device), transfer, prefetch_batches)
