"""Measuring the batches of a prefetcher: counters for all of them, and marks for some."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch.autograd import profiler

from prefetch._device import nvtx_range
from prefetch._mark import Mark, clock
from prefetch._marked import WARM_UP, Marked
from prefetch._stats import Means, Stats, bottleneck

R = TypeVar("R")

_S_PER_NS = 1e-9


class PassMeter:
    """Counts what one pass does.

    Its attributes are written where things happen, without calls and locks, since that is part of every ``next()``:
    those named after loading and issuing by the thread that advances the loader, the others by the one that asks for
    batches.

    Args:
        marked: Of the prefetcher: batches that are marked go there.
        number: Of the pass.
        loads_before: Batches that the loader gave in passes before.
        has_thread: Whether a thread advances the loader.
        look_ahead: Batches that are issued beyond the one that is taken.
    """

    __slots__ = (
        "_loads_before",
        "_marked",
        "_number",
        "_sets_clocks",
        "asked_ns",
        "bytes",
        "cold_step_ns",
        "deliveries",
        "first_load_ns",
        "first_ns",
        "has_nvtx",
        "has_ranges",
        "has_thread",
        "in_use",
        "is_over",
        "issue_ns",
        "last_ns",
        "load_end_ns",
        "load_ns",
        "loads",
        "look_ahead",
        "mark",
        "next_marked",
        "peak_held",
        "room_end_ns",
        "room_ns",
        "step_ns",
        "steps",
        "waited_issue_ns",
        "waited_load_ns",
        "waited_room_ns",
    )

    def __init__(self, marked: Marked, number: int, loads_before: int, *, has_thread: bool, look_ahead: int) -> None:
        self.has_thread = has_thread
        self.look_ahead = look_ahead
        self.is_over = False
        self.has_nvtx = marked.profile and nvtx_range(marked.device) is not None
        self.has_ranges = False
        """Whether calls are to be made :meth:`within` a range."""
        self.next_marked = marked.next_in_pass(loads_before)
        """The position of the next batch to be marked."""
        self.mark: Mark | None = None
        """Of the batch that is loaded and not issued yet, if it is marked."""
        self.loads = self.load_ns = self.first_load_ns = self.load_end_ns = 0
        self.room_end_ns = self.room_ns = self.issue_ns = self.bytes = 0
        self.deliveries = self.first_ns = self.last_ns = self.peak_held = 0
        self.in_use: Mark | None = None
        """Of the batch that was handed over last, if it is marked."""
        self.asked_ns = self.steps = self.step_ns = self.cold_step_ns = 0
        self.waited_load_ns = self.waited_room_ns = self.waited_issue_ns = 0
        self._marked = marked
        self._number = number
        self._loads_before = loads_before
        self._sets_clocks = marked.profile

    def within(self, name: str, function: Callable[..., R], *arguments: object) -> R:
        """Call a function in a range of that name, for the profilers that look on."""
        with contextlib.ExitStack() as ranges:
            ranges.enter_context(profiler.record_function(name))
            if self.has_nvtx and (nvtx := nvtx_range(self._marked.device)) is not None:
                ranges.enter_context(nvtx(name))
            return function(*arguments)

    def loaded(self, start_ns: int) -> None:
        """The loader, asked at that time, has given a batch."""
        self.load_end_ns = now = clock()
        self.load_ns += now - start_ns
        position = self.loads
        self.loads = position + 1
        if not position:
            self.first_load_ns = now - start_ns
        if position == self.next_marked:
            self.mark, self.next_marked = self._marked.mark(self._number, self._loads_before, position, start_ns, now)

    def issue_marked(self, side: torch.Stream) -> Mark:
        """There is room on the device for the batch, which is marked."""
        if self._sets_clocks:
            self._sets_clocks = False
            self._marked.set_clocks(side)
        mark, self.mark = self.mark, None
        assert mark is not None
        mark.issue_begins(side, self._marked.spare_events)
        return mark

    def delivered(self, mark: Mark | None) -> None:
        """A batch has been handed over."""
        self.last_ns = now = clock()
        count = self.deliveries
        self.deliveries = count + 1
        if not count:
            self.first_ns = now
        if mark is not None:
            mark.asked_ns, mark.delivered_ns = self.asked_ns, now
            self.in_use = mark

    def asked_on_host(self) -> int:
        """The next batch is asked for, where the host's time is the device's; returns the time."""
        self.asked_ns = now = clock()
        if self.deliveries > self.steps:
            self.steps += 1
            self.step_ns += now - self.last_ns
            if self.steps <= WARM_UP:
                self.cold_step_ns = self.step_ns
        if self.in_use is not None:
            self.end_marked_step(now)
        return now

    def end_marked_step(self, end_ns: int | None, consumer: torch.Stream | None = None) -> None:
        """The step on a marked batch is queued; on ``consumer``, if the next one is asked for."""
        mark, self.in_use = self.in_use, None
        assert mark is not None
        if mark.device is not None and consumer is not None:
            mark.device.end_step(consumer)
        self._marked.end_step(mark, end_ns, is_asked=end_ns is not None or consumer is not None)

    def waited(self, since_ns: int, loading: tuple[int, int, int, int]) -> None:
        """A request has waited since then for a thread.

        Args:
            since_ns: The time.
            loading: When the thread began to load the batch, had loaded it, had room for it, and had issued it.
        """
        load_start, load_end, room_end, issue_end = loading
        self.waited_load_ns += max(0, load_end - max(since_ns, load_start))
        self.waited_room_ns += max(0, room_end - max(since_ns, load_end))
        self.waited_issue_ns += max(0, issue_end - max(since_ns, room_end, load_end))

    def ended(self) -> None:
        """Nothing will be asked for any more."""
        self.is_over = True
        if self.in_use is not None:
            self.end_marked_step(None)


class _Counts(NamedTuple):
    """Of one pass, or of several together; times in ns."""

    passes: int = 0
    loads: int = 0
    load: int = 0
    later_loads: int = 0
    later_load: int = 0
    loader_wait: int = 0
    host_wait: int = 0
    issue: int = 0
    exposed: int = 0
    bytes: int = 0
    deliveries: int = 0
    intervals: int = 0
    elapsed: int = 0
    peak_held: int = 0
    steps: int = 0
    step: int = 0
    warm_steps: int = 0
    warm_step: int = 0

    def plus(self, other: _Counts) -> _Counts:
        sums = _Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))
        return sums._replace(peak_held=max(self.peak_held, other.peak_held))


def _counts(meter: PassMeter) -> _Counts:
    return _Counts(
        passes=1,
        loads=meter.loads,
        load=meter.load_ns,
        later_loads=max(0, meter.loads - 1),
        later_load=meter.load_ns - meter.first_load_ns,
        loader_wait=meter.waited_load_ns if meter.has_thread else meter.load_ns,
        host_wait=meter.waited_room_ns if meter.has_thread else meter.room_ns,
        issue=meter.issue_ns,
        exposed=meter.waited_issue_ns if meter.has_thread else meter.issue_ns,
        bytes=meter.bytes,
        deliveries=meter.deliveries,
        intervals=max(0, meter.deliveries - 1),
        elapsed=meter.last_ns - meter.first_ns,
        peak_held=meter.peak_held if meter.has_thread else min(meter.loads, meter.look_ahead + 1),
        steps=meter.steps,
        step=meter.step_ns,
        warm_steps=max(0, meter.steps - WARM_UP),
        warm_step=meter.step_ns - meter.cold_step_ns,
    )


class Meter:
    """The sums over all passes of one prefetcher.

    Args:
        device: Where the batches go.
        profile: Whether all batches are marked, and the timeline is kept.
    """

    def __init__(self, device: torch.device, *, profile: bool) -> None:
        self.marked = Marked(device, profile=profile)
        self._past = _Counts()
        self._passes: list[PassMeter] = []

    def new_pass(self, *, has_thread: bool, look_ahead: int) -> PassMeter:
        """For a pass that starts."""
        with self.marked.lock:
            for old in [old for old in self._passes if old.is_over]:
                self._passes.remove(old)
                self._past = self._past.plus(_counts(old))
            before = functools.reduce(_Counts.plus, map(_counts, self._passes), self._past)
            new = PassMeter(self.marked, before.passes, before.loads, has_thread=has_thread, look_ahead=look_ahead)
            self._passes.append(new)
            return new

    def stats(self, pageable_leaves: int) -> Stats:
        """See :class:`Stats`."""
        marked = self.marked
        marked.resolve(waits=marked.profile)
        with marked.lock:
            counts = functools.reduce(_Counts.plus, map(_counts, self._passes), self._past)
            load = _mean(counts.later_load, counts.later_loads, counts.load, counts.loads)
            if marked.has_streams:
                issue, copy, exposed = marked.issue.total, marked.copy.total, marked.exposed.total
                timed, steps, compute = marked.copy.count, marked.step.count, marked.step.total
                copied = marked.bytes
                means = Means(load, marked.issue.mean(), marked.copy.mean(), marked.step.mean() if steps else None)
                exposed_mean = marked.exposed.mean()
            else:  # the host's time is the device's
                issue = copy = counts.issue * _S_PER_NS
                exposed = counts.exposed * _S_PER_NS
                timed, steps, compute = counts.deliveries, counts.steps, counts.step * _S_PER_NS
                copied = counts.bytes
                a_copy = copy / max(1, timed)
                step = _mean(counts.warm_step, counts.warm_steps, counts.step, steps) if steps else None
                means = Means(load, a_copy, a_copy, step)
                exposed_mean = exposed / max(1, timed)
            if marked.profile and marked.has_streams:
                elapsed, intervals = marked.elapsed_s, marked.intervals
            else:
                elapsed, intervals = counts.elapsed * _S_PER_NS, counts.intervals
        step_s = elapsed / max(1, intervals)
        waited_share = counts.loader_wait / counts.load if counts.load else 0.0
        return Stats(
            batches=counts.deliveries,
            bytes=counts.bytes,
            pageable_leaves=pageable_leaves,
            peak_batches_held=counts.peak_held,
            elapsed_s=elapsed,
            step_s=step_s,
            load_s=counts.load * _S_PER_NS,
            loader_wait_s=counts.loader_wait * _S_PER_NS,
            host_wait_s=counts.host_wait * _S_PER_NS,
            issue_s=issue,
            timed_batches=timed,
            copy_s=copy,
            exposed_copy_s=exposed,
            copy_gb_per_s=copied / copy / 1e9 if copy > 0 else 0.0,
            timed_steps=steps,
            compute_s=compute,
            bottleneck=bottleneck(means, step_s, load * waited_share, exposed_mean),
        )


def _mean(typical_ns: int, typical: int, all_ns: int, count: int) -> float:
    """Seconds, of the typical ones if there are any."""
    return (typical_ns / typical if typical else all_ns / max(1, count)) * _S_PER_NS
