"""The way to the device that all passes of one prefetcher share."""

from __future__ import annotations

import os
import sys
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
        """What a background thread takes over from the calling thread."""

    @abstractmethod
    def start_pass(self) -> torch.Event | None:
        """What the caller has queued so far, which may come before the loader's batches."""

    @abstractmethod
    def step_done(self) -> None:
        """The consumer asks for the next batch."""

    @abstractmethod
    def issue(self, batch: Any, started: Any) -> Any:
        """Start the transfer of a batch that the loader gave in this thread; ``started`` is from :meth:`start_pass`."""

    @abstractmethod
    def deliver(self, issued: Any, last_copied: deque[torch.Event]) -> Any:
        """The batch, for use in the calling thread now; its copy's event, if any, is added to ``last_copied``."""

    @abstractmethod
    def end_pass(self) -> None:
        """Order what the caller does next after transforms that are under way: it may change what they read."""

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

    def issue(self, batch: Any, started: None) -> Any:  # noqa: ARG002 - as in Lane
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
        self._last_copied: torch.Event | None = None

    def caller_state(self) -> CallerState:
        """See :meth:`Lane.caller_state`."""
        return CallerState(self._device, self._stream)

    def start_pass(self) -> torch.Event:
        """What the caller has queued so far: tensors that the loader made beforehand, or that the transform uses."""
        started = current_stream(self._device).record_event()
        if self._transfer.has_transform:
            self._stream.wait_event(started)
        return started

    def step_done(self) -> None:
        """The consumer asks for the next batch."""
        self._memory.moved_on()
        self._sources.release()

    def issue(self, batch: Any, started: torch.Event) -> Arrival:
        """Queue the transfer of a host batch on the side stream."""
        self._memory.make_room()
        self._sources.make_room()
        with on_stream(self._stream) as producer:
            # What the loader has made on the device itself comes before us and, through us, before the consumer.
            resident = tensors_on(batch, self._device)
            if resident:
                self._stream.wait_event(started)
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


def new_lane(transfer: Transfer, prefetch_batches: int) -> Lane:
    """The way to the device of a transfer."""
    if not has_streams(transfer.device):
        return PlainLane(transfer)
    return SideStreamLane(torch.Stream(transfer.device), transfer, prefetch_batches)
