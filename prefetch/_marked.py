"""What has been learnt from the batches that were marked: sums of their times, and the timeline."""

from __future__ import annotations

import os
import threading
from collections import deque

import torch

from prefetch._device import has_streams, is_capturing, timed_event
from prefetch._intervals import BatchTimes, Interval
from prefetch._mark import DeviceMark, Mark, clock
from prefetch._memory import is_gone
from prefetch._timeline import Timeline

# The batches that are marked without ``profile``, since that costs the host some 24 us for each.
_FIRST_MARKED = 2
_LAST_OF_FIRST_MARKED = 7
_MARKED_EVERY = 251  # a prime: not in step with what a loop does every few steps
# Batches in whose steps things are compiled, tuned and allocated. They do not count for what is typical.
WARM_UP = 2
_KEPT = 10_000  # batches of the timeline
_S_PER_NS = 1e-9
_S_PER_MS = 1e-3
_NS_PER_MS = 1e6


class Sum:
    """Seconds in all, and their mean without what is not typical."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._typical_count = 0
        self._typical_total = 0.0

    def add(self, seconds: float, *, is_typical: bool) -> None:
        """One more."""
        self.count += 1
        self.total += seconds
        if is_typical:
            self._typical_count += 1
            self._typical_total += seconds

    def mean(self) -> float:
        """Of the typical ones, if there are any; 0.0 of none at all."""
        if self._typical_count:
            return self._typical_total / self._typical_count
        return self.total / max(1, self.count)


class Marked:
    """Of all passes of one prefetcher.

    Args:
        device: Where the batches go.
        profile: Whether all batches are marked, and the timeline is kept.
    """

    def __init__(self, device: torch.device, *, profile: bool) -> None:
        self.profile = profile
        self.device = device
        self.has_streams = has_streams(device)
        self._next = 0 if profile else _FIRST_MARKED
        self.issue, self.copy, self.exposed, self.step = Sum(), Sum(), Sum(), Sum()
        self.bytes = 0
        self.spare_events: list[torch.Event] = []
        self.elapsed_s = 0.0
        self.intervals = 0
        # Reentrant: a signal handler may ask for the statistics while the loop is in here.
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._pending: deque[Mark] = deque()
        self._kept: deque[_Kept] = deque(maxlen=_KEPT)
        self._origin_ns: int | None = None
        self._anchor: tuple[torch.Event, float] | None = None
        self._last_arrival = -1, 0.0  # the pass and the time

    def next_in_pass(self, loads_before: int) -> int:
        """The first position to be marked in a pass that starts after so many batches; -1: none is."""
        return max(0, self._next - loads_before) if self.profile or self.has_streams else -1

    def mark(
        self, pass_number: int, loads_before: int, position: int, load_start_ns: int, load_end_ns: int
    ) -> tuple[Mark, int]:
        """Mark a batch. Returns the next position to be marked, too."""
        if self._origin_ns is None:
            self._origin_ns = load_start_ns
        mark = Mark(pass_number, position, load_start_ns, load_end_ns)
        number = loads_before + position
        mark.is_typical = number >= WARM_UP
        self._next = number + (1 if self.profile or number < _LAST_OF_FIRST_MARKED else _MARKED_EVERY)
        return mark, self._next - loads_before

    def set_clocks(self, side: torch.Stream) -> None:
        """Find out what the host's clock says at a moment of the device's; waits for the stream."""
        anchor = timed_event(side, [])
        anchor.synchronize()
        self._anchor = anchor, clock()

    def end_step(self, mark: Mark, end_ns: int | None, *, is_asked: bool) -> None:
        """The next batch has been asked for, or none will be: all of the step is queued, and without streams done."""
        if mark.device is not None:
            self._pending.append(mark)
            if is_asked:
                self._resolve(waits=False)
        elif not self.has_streams:
            with self.lock:
                self._keep_host_times(mark, end_ns)

    def resolve(self, *, waits: bool) -> None:
        """Take the times of the batches whose steps the device has finished, or with ``waits`` of all.

        Not while a graph is captured, nor where the device is not ours any more.
        """
        if self._pending and not is_gone(self._process) and not is_capturing(self.device):
            self._resolve(waits=waits)

    def _resolve(self, *, waits: bool) -> None:
        pending = self._pending
        with self.lock:
            while pending:
                mark = pending[0]
                device = mark.device
                assert device is not None
                end = device.step_end or device.wait_end
                if waits:
                    end.synchronize()
                elif not end.query():
                    return
                pending.popleft()
                self._take(mark, device)

    def timeline(self) -> Timeline:
        """See :class:`Timeline`. Waits until the device has finished the steps that are queued."""
        self.resolve(waits=True)
        with self.lock:
            return Timeline(tuple(kept.times(self._origin_ns or 0) for kept in self._kept))

    def _take(self, mark: Mark, device: DeviceMark) -> None:
        self.issue.add((mark.issue_end_ns - mark.issue_start_ns) * _S_PER_NS, is_typical=mark.is_typical)
        copies = [start.elapsed_time(end) * _S_PER_MS for start, end in device.copies]
        self.copy.add(sum(copies), is_typical=mark.is_typical)
        self.bytes += mark.bytes
        exposed = device.wait_start.elapsed_time(device.wait_end) * _S_PER_MS
        self.exposed.add(exposed, is_typical=mark.is_typical and mark.position > 0)
        step = None
        if device.step_end is not None:
            step = device.wait_end.elapsed_time(device.step_end) * _S_PER_MS
            self.step.add(step, is_typical=mark.is_typical)
        if self._anchor is not None:
            self._keep(mark, device, self._anchor, copies, exposed, step)
        # Not the end of the copies: others may wait for it still.
        self.spare_events += [start for start, _ in device.copies]
        self.spare_events += [device.wait_start, device.wait_end]
        if device.step_end is not None:
            self.spare_events.append(device.step_end)

    def _keep(
        self,
        mark: Mark,
        device: DeviceMark,
        anchor: tuple[torch.Event, float],
        copies: list[float],
        exposed: float,
        step: float | None,
    ) -> None:
        anchor_event, anchor_ns = anchor
        arrival_ns = anchor_ns + anchor_event.elapsed_time(device.wait_end) * _NS_PER_MS
        if self._last_arrival[0] == mark.pass_number:
            self.elapsed_s += (arrival_ns - self._last_arrival[1]) * _S_PER_NS
            self.intervals += 1
        self._last_arrival = mark.pass_number, arrival_ns
        starts = [
            (anchor_ns + anchor_event.elapsed_time(start) * _NS_PER_MS, seconds)
            for (start, _), seconds in zip(device.copies, copies, strict=True)
        ]
        self._kept.append(_Kept(mark, starts, arrival_ns - exposed / _S_PER_NS, exposed, step))
        # A later event, since torch counts from one to the other in single precision.
        self._anchor, device.wait_end = (device.wait_end, arrival_ns), anchor_event

    def _keep_host_times(self, mark: Mark, end_ns: int | None) -> None:
        issue_ns, wait_ns = mark.issue_end_ns - mark.issue_start_ns, mark.delivered_ns - mark.asked_ns
        copies = [(float(mark.issue_start_ns), issue_ns * _S_PER_NS)] if issue_ns else []
        step = None if end_ns is None else (end_ns - mark.delivered_ns) * _S_PER_NS
        self._kept.append(_Kept(mark, copies, mark.asked_ns, wait_ns * _S_PER_NS, step))


class _Kept:
    """What of a batch becomes its times in the timeline, when somebody asks for that."""

    __slots__ = ("_copies", "_load", "_pass_number", "_position", "_step", "_wait")

    def __init__(
        self, mark: Mark, copies: list[tuple[float, float]], wait_start_ns: float, wait_s: float, step_s: float | None
    ) -> None:
        self._pass_number = mark.pass_number
        self._position = mark.position
        self._load = mark.load_start_ns, mark.load_end_ns
        self._copies = copies
        self._wait = wait_start_ns, wait_s
        self._step = step_s

    def times(self, origin_ns: int) -> BatchTimes:
        load_start, load_end = self._load
        wait = _interval(*self._wait, origin_ns)
        return BatchTimes(
            self._pass_number,
            self._position,
            _interval(load_start, (load_end - load_start) * _S_PER_NS, origin_ns),
            tuple(_interval(start, seconds, origin_ns) for start, seconds in self._copies),
            wait,
            None if self._step is None else Interval(wait.end_s, wait.end_s + self._step),
        )


def _interval(start_ns: float, seconds: float, origin_ns: int) -> Interval:
    start = (start_ns - origin_ns) * _S_PER_NS
    return Interval(start, start + seconds)
