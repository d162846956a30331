"""When one batch was loaded, copied, waited for and used."""

from __future__ import annotations

from typing import NamedTuple

# Names of the lanes, in the order in which they are drawn, and of what happens in them.
LANES = {
    "load": "loader (host)",
    "copy": "copy (side stream)",
    "wait": "consumer's stream",
    "compute": "consumer's stream",
}


class Interval(NamedTuple):
    """Seconds since the prefetcher's first batch was asked of the loader."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


class BatchTimes(NamedTuple):
    """One batch. Times of the device are exact to each other; to those of the host, to some 10 us."""

    pass_number: int
    """Passes are counted from 0."""
    position: int
    """In its pass, from 0."""
    load: Interval
    """The loader was at work on it."""
    copy: tuple[Interval, ...]
    """The side stream was: one interval, or two where the result of a ``transform`` waits for its place."""
    wait: Interval
    """The consumer's stream stood still for it; of no length if it was there."""
    compute: Interval | None
    """From its arrival to the end of what was queued until the next was asked for; ``None`` if none was."""


def intervals(times: BatchTimes) -> list[tuple[str, Interval]]:
    """What happened to a batch, by name, without what took no time."""
    named = [("load", times.load), *(("copy", copy) for copy in times.copy), ("wait", times.wait)]
    if times.compute is not None:
        named.append(("compute", times.compute))
    return [(name, interval) for name, interval in named if interval.duration_s > 0]
