"""What the batches of a prefetcher took, and what holds its loop back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# What is not hidden is worth a word from this share of a step on.
_WORTH_MENTIONING = 0.05


class Means(NamedTuple):
    """Seconds that a batch takes, without the first batch of each pass and the first steps: what the verdict is on."""

    load: float
    issue: float
    copy: float
    compute: float | None
    """``None``: no step has been timed yet."""


@dataclass(frozen=True)
class Stats:
    """What all passes of a prefetcher together have taken so far; a snapshot.

    Times of the host are from one clock and count every batch. Times of the device are from events on its streams, of
    *timed* batches: all of them with ``profile=True``, else the third to eighth of each prefetcher and then one in 251,
    so that counting costs next to nothing. Where there are no streams, the CPU included, the host's clock is the
    device's, and all batches are timed.

    With ``n`` batches in ``m`` passes, ``step_s`` is ``elapsed_s / (n - m)``; ``copy_gb_per_s`` is the bytes of the
    timed batches over ``copy_s``, in units of 1e9 bytes a second. Where everything is hidden, a step takes the longest
    of ``load_s / n``, ``copy_s / timed_batches`` and ``compute_s / timed_steps``.
    """

    batches: int
    """Delivered."""
    bytes: int
    """That crossed the bus for them: in the type and size in which they were copied."""
    pageable_leaves: int
    """Tensors that the loader gave in pageable memory, which the host had to copy."""
    peak_batches_held: int
    """The most batches that were on the device, or on their way, when one was handed over, that one included."""
    elapsed_s: float
    """From the first batch of each pass to its last: when they arrived in the consumer's stream, with ``profile=True``,
    else when they were handed over, which a host that runs ahead of the device does early."""
    step_s: float
    """Mean time between two batches of a pass; 0.0 before the second."""
    load_s: float
    """That the loader took, in whichever thread: of worker processes only what was waited for."""
    loader_wait_s: float
    """That requests for a batch waited for the loader. Hidden all the same where the device has work queued."""
    host_wait_s: float
    """That requests for a batch waited until the device had room, because the host ran ahead of it."""
    issue_s: float
    """That the host took to stage and to queue the copies of the timed batches, in whichever thread."""
    timed_batches: int
    """Those in ``copy_s`` and ``exposed_copy_s``."""
    copy_s: float
    """That the copies took on the side stream, with cast and ``transform``, but not what they waited for there."""
    exposed_copy_s: float
    """That the consumer's stream stood still for a batch to arrive, once it was asked for."""
    copy_gb_per_s: float
    """Of the timed batches; 0.0 if nothing was copied."""
    timed_steps: int
    """Those in ``compute_s``."""
    compute_s: float
    """From a batch's arrival to the end of what was queued until the next was asked for."""
    bottleneck: str
    """What holds the loop back, and why: begins with "loader", "copy" or "compute"; "unknown" before the first step."""

    def __str__(self) -> str:
        """A table of a few lines."""
        batches, timed = max(1, self.batches), max(1, self.timed_batches)
        waits = [
            f"waited for {duration(self.loader_wait_s / batches)}",
            f"exposed {duration(self.exposed_copy_s / timed)}, {self.copy_gb_per_s:.3g} GB/s",
            f"the host waited {duration(self.host_wait_s / batches)} for it",
            f"{self.pageable_leaves} leaves in pageable memory",
        ]
        times = {
            "loader": self.load_s / batches,
            "copy": self.copy_s / timed,
            "compute": self.compute_s / max(1, self.timed_steps),
            "queueing": self.issue_s / timed,
        }
        rows = [
            f"  {name:<9}{duration(time):>9}  {wait}" for (name, time), wait in zip(times.items(), waits, strict=True)
        ]
        return "\n".join(
            [
                f"{self.batches} batches, {amount(self.bytes)} copied, at most {self.peak_batches_held} held at once",
                f"  a step takes {duration(self.step_s)}; means of a batch, the device's of {self.timed_batches}:",
                *rows,
                f"bottleneck: {self.bottleneck}",
            ]
        )


def amount(count: float) -> str:
    """A number of bytes, in the unit in which it is easiest to read."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def duration(seconds: float) -> str:
    """A time, in the unit in which it is easiest to read."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def bottleneck(means: Means, step: float, loader_wait: float, exposed_copy: float) -> str:
    """The verdict: the longest of the three, in the words of :attr:`Stats.bottleneck`, and what else is not hidden.

    Args:
        means: Of load, copy and compute.
        step: Seconds between two hand-overs.
        loader_wait: Seconds a step that requests waited for the loader.
        exposed_copy: Seconds a step that the device waited for copies.
    """
    if means.compute is None:
        return "unknown: no step has been timed yet"
    copy = max(means.copy, means.issue)  # the host's part, and the device's, of different batches run side by side
    load, compute = means.load, means.compute
    times = f"the loader takes {duration(load)} a batch, the copy {duration(copy)}, a step {duration(compute)}"
    longest = max(load, copy, compute)
    # What the loop waits for the loader costs nothing while the device has work: only what is left of a step then.
    left = min(loader_wait, step - compute - exposed_copy)
    exposed = [
        f"{duration(time)} of each step are spent waiting for {what}"
        for time, what, is_named in (
            (left, "the loader", longest == load),
            (exposed_copy, "the copy", longest == copy),
        )
        if not is_named and time > _WORTH_MENTIONING * step
    ]
    if longest == load:
        kind = "loader: the device waits for batches"
    elif longest == copy:
        staged = means.issue > means.copy
        kind = "copy: the host takes long to stage the batches" if staged else "copy: the copies are the limit"
    else:
        kind = "compute: batches are there in time"
    return "; ".join([f"{kind}; {times}", *exposed])
