"""One pass over the loader: how batches reach the consumer."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from prefetch._compiler import opaque
from prefetch._errors import PrefetchWarning
from prefetch._feeder import Feeder, superseded
from prefetch._lane import Lane, moved_on_host
from prefetch._meter import PassMeter
from prefetch._transfer import Transfer

T = TypeVar("T")


class Epoch(Iterator[T]):
    """A pass over the loader. Letting go of it ends it, as :meth:`close` does."""

    loader: Any
    """What it is a pass over."""

    @abstractmethod
    def close(self) -> None:
        """End the pass: the loader's iterator and the batches on their way are dropped.

        Waits a moment for a background thread whose loader is at work; if it does not return, its thread ends when it
        does, and a ``PrefetchWarning`` says so. (Letting go of the iterator says nothing.)
        """

    @abstractmethod
    def supersede(self, iterator: Iterator[Any] | None) -> None:
        """Close, if more was to be asked of ``iterator`` (``None``: of any), for it is to serve another pass."""


class AheadEpoch(Epoch[Any]):
    """A pass that looks ahead.

    Args:
        lane: The way to the device, of this pass.
        feeder: Gives what the lane has issued.
    """

    def __init__(self, lane: Lane, feeder: Feeder[Any]) -> None:
        self._lane = lane
        self._feeder = feeder

    def __next__(self) -> Any:
        """The next batch, ready for the stream that is current in the calling thread."""
        lane, feeder = self._lane, self._feeder
        del self  # see InlineFeeder: an error that waits for its turn refers to this frame
        if lane.warnings:  # before a batch is taken: a warning may be made an error
            with contextlib.suppress(IndexError):  # another pass, in another thread, was quicker
                warnings.warn(lane.warnings.popleft(), PrefetchWarning, stacklevel=2)
        if torch.compiler.is_compiling():
            return _opaque_next(lane, feeder)
        return _next(lane, feeder)

    def close(self) -> None:
        """See :meth:`Epoch.close`; copies under way go on, and keep their host batches."""
        is_gone = self._feeder.close()
        self._lane.end()
        if not is_gone:
            text = "the loader is still at work on a batch: the pass ends without it, and its thread when it returns"
            warnings.warn(text, PrefetchWarning, stacklevel=2)

    def supersede(self, iterator: Iterator[Any] | None) -> None:
        """See :meth:`Epoch.supersede`."""
        self._feeder.supersede(iterator)

    def __del__(self) -> None:
        self._feeder.close()
        if not self._lane.is_gone():
            self._lane.end()


def _next(lane: Lane, feeder: Feeder[Any]) -> Any:
    meter = lane.meter
    # A variable of torch's, since entering a range that nobody sees takes longer than all else that is measured.
    meter.has_ranges = meter.has_nvtx or profiler._is_profiler_enabled
    return meter.within("prefetch.next", _take, lane, feeder) if meter.has_ranges else _take(lane, feeder)


_opaque_next = opaque(_next)


def _take(lane: Lane, feeder: Feeder[Any]) -> Any:
    lane.ask()
    try:
        return lane.deliver(feeder.take())
    except StopIteration:
        lane.finish()
        raise


class PlainEpoch(Epoch[T]):
    """A pass without look-ahead and without streams: on the CPU, and on devices that have none."""

    def __init__(self, iterator: Iterator[Any], transfer: Transfer, meter: PassMeter) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._transfer = None if transfer.is_identity else transfer
        self._meter = meter
        self._is_superseded = False

    def __next__(self) -> Any:
        """The next batch."""
        if torch.compiler.is_compiling():
            return _opaque_take(self)
        return self.take()

    def take(self) -> Any:
        """What the compiler must not look into, for it does not know clocks."""
        if self._iterator is None:
            raise superseded() if self._is_superseded else StopIteration
        meter = self._meter
        start = meter.asked_on_host()
        try:
            meter.has_ranges = meter.has_nvtx or profiler._is_profiler_enabled
            batch = meter.within("prefetch.load", next, self._iterator) if meter.has_ranges else next(self._iterator)
        except StopIteration:
            self.close()
            raise
        meter.loaded(start)
        if self._transfer is None:
            mark, meter.mark = meter.mark, None
        else:
            batch, mark = moved_on_host(self._transfer, batch, meter)
        meter.delivered(mark)
        return batch

    def close(self) -> None:
        """See :meth:`Epoch.close`."""
        self._iterator = None
        self._meter.ended()

    def supersede(self, iterator: Iterator[Any] | None) -> None:
        """See :meth:`Epoch.supersede`."""
        if self._iterator is not None and (iterator is None or iterator is self._iterator):
            self.close()
            self._is_superseded = True

    def __del__(self) -> None:
        self._meter.ended()


@opaque
def _opaque_take(epoch: PlainEpoch[Any]) -> Any:
    return epoch.take()
