"""What to change, and what that would gain: from numbers alone, so that it can be checked without a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from prefetch._stats import duration

_WORTH_IT = 0.03  # of a step: less is lost among the differences between two runs
_SPARE = 1.25  # workers are suggested for a quarter more than is needed now: not all batches take the same time


@dataclass(frozen=True)
class Facts:
    """What was measured; times in seconds a batch, or a step."""

    has_streams: bool
    cores: int
    load_s: float
    """The loader alone."""
    start_s: float
    """That the first batch of a pass takes longer."""
    pass_length: int | None
    plain_s: float
    """A step of the loop without prefetching."""
    prefetched_s: float
    """A step of the loop with it."""
    copy_s: float
    compute_s: float | None
    """``None``: no step was given."""
    issue_s: float
    """That the host takes to stage and queue the copies."""
    loader_wait_s: float
    """That the loop with prefetching waits for the loader."""
    pageable_leaves: int = 0
    is_data_loader: bool = True
    num_workers: int = 0
    pin_memory: bool = True
    persistent_workers: bool = False
    prefetch_factor: int | None = None

    @property
    def start_share_s(self) -> float:
        """Of the start of a pass, for each batch."""
        return self.start_s / self.pass_length if self.pass_length else 0.0

    @property
    def late_s(self) -> float:
        """That the loop with prefetching waits for the loader, but for the starts of passes."""
        return max(0.0, self.loader_wait_s - self.start_share_s)

    @property
    def base_s(self) -> float:
        """A step of the better of the two loops: what further changes are measured against."""
        return min(self.plain_s, self.prefetched_s)

    @property
    def busy_s(self) -> float:
        """The least that a step takes on the device, whatever the loader does."""
        return max(self.copy_s, self.compute_s or 0.0)

    @property
    def limit_s(self) -> float:
        """The least that a step takes with this loader, when everything else is hidden."""
        return max(self.load_s, self.busy_s)


class Hint(NamedTuple):
    """One change."""

    change: str
    saved_s: float
    """Of a step, by estimate."""
    share: float
    """Of a step that this is."""
    how: str
    """The gain was estimated."""

    def __str__(self) -> str:
        return f"{self.change}: saves {duration(self.saved_s)} a step ({self.share:.0%}), {self.how}"


def hints(facts: Facts) -> list[Hint]:
    """The changes that are worth making, most gain first. Each gain is of that change alone."""
    makers = (_wrap, _workers, _background, _pin_memory, _persistent_workers, _prefetch_factor)
    found = [hint for maker in makers if (hint := maker(facts)) is not None and hint.share >= _WORTH_IT]
    return sorted(found, key=lambda hint: hint.saved_s, reverse=True)


def why_nothing(facts: Facts) -> str:
    """Why there is no hint."""
    limit = facts.limit_s
    if facts.compute_s is not None and limit == facts.compute_s:
        reason = "the step's own computation is the limit, and all else is hidden behind it or short beside it"
    elif limit == facts.load_s:
        enough = facts.is_data_loader and facts.num_workers >= facts.cores
        used = f"; its {facts.num_workers} workers already share {facts.cores} cores" if enough else ""
        reason = f"the loader is the limit{used}: only cheaper samples help"
    else:
        reason = "copying is the limit: only smaller batches help, such as uint8 images that are cast on the device"
    return f"Nothing to gain: {reason} ({_times(facts)})."


def why_not_wrapped(facts: Facts) -> str | None:
    """Why ``CUDAPrefetcher`` itself is not among the hints; ``None`` if it is."""
    hint = _wrap(facts)
    if hint is not None and hint.share >= _WORTH_IT:
        return None
    if not facts.has_streams:
        return "CUDAPrefetcher gains nothing here: this device has no transfers that could run beside the step."
    change = facts.prefetched_s / facts.plain_s - 1
    if facts.copy_s < _WORTH_IT * facts.plain_s:
        reason = f"the copy is {facts.copy_s / facts.plain_s:.1%} of a step, and nothing can gain more than that"
    elif facts.limit_s == facts.load_s:
        reason = "the loader is the limit, and copies run while it is waited for"
    elif facts.loader_wait_s > facts.copy_s:
        reason = f"what the loop waits for is the loader ({duration(facts.loader_wait_s)} a step), not the copy"
    else:
        reason = "the plain loop hides as much"
    return f"CUDAPrefetcher gains nothing here (a step takes {change:+.1%}): {reason}."


def _times(facts: Facts) -> str:
    compute = "no step given" if facts.compute_s is None else f"compute {duration(facts.compute_s)}"
    return (
        f"load {duration(facts.load_s)}, copy {duration(facts.copy_s)}, {compute}; a step takes "
        f"{duration(facts.base_s)}"
    )


def _hint(facts: Facts, change: str, saved_s: float, how: str) -> Hint | None:
    if saved_s <= 0:
        return None
    return Hint(change, saved_s, saved_s / facts.base_s, how)


def _wrap(facts: Facts) -> Hint | None:
    saved = facts.plain_s - facts.prefetched_s
    if not facts.has_streams or saved <= 0:
        return None
    how = f"measured: {duration(facts.plain_s)} without, {duration(facts.prefetched_s)} with it"
    return Hint("wrap it: CUDAPrefetcher(loader)", saved, saved / facts.plain_s, how)


def _workers(facts: Facts) -> Hint | None:
    if not facts.is_data_loader:
        return None
    now = max(1, facts.num_workers)
    needed = math.ceil(_SPARE * facts.load_s * now / facts.busy_s) if facts.busy_s > 0 else facts.cores
    workers = max(1, min(needed, facts.cores))
    if workers <= facts.num_workers:
        return None
    load = facts.load_s * now / workers
    saved = min(facts.late_s, facts.base_s - facts.start_share_s - max(load, facts.busy_s))
    if workers == 1:
        how = f"at most: the loop waits {duration(facts.late_s)} a step for batches that could be made beside it"
    else:
        where = f"{facts.num_workers} worker processes" if facts.num_workers else "the main process"
        how = (
            f"at most: a batch takes {duration(facts.load_s)} in {where}, {duration(load)} if {workers} share the work"
        )
    return _hint(facts, f"num_workers={workers} (now {facts.num_workers})", saved, how)


def _background(facts: Facts) -> Hint | None:
    if facts.num_workers > 0:  # there is a thread already
        return None
    saved = min(facts.late_s, facts.base_s - facts.limit_s)
    how = (
        f"at most: the loop waits {duration(facts.late_s)} a step for a loader that could run beside it, as far as "
        "Python lets threads; random numbers may then be drawn in another order"
    )
    return _hint(facts, "CUDAPrefetcher(loader, background=True)", saved, how)


def _pin_memory(facts: Facts) -> Hint | None:
    if not facts.has_streams or facts.pageable_leaves == 0:
        return None
    if not facts.is_data_loader:
        change = "let the loader make its batches in pinned memory (Tensor.pin_memory())"
    elif facts.pin_memory:
        change = "give the class of the batches a method pin_memory(), which DataLoader(pin_memory=True) calls"
    else:
        change = "pin_memory=True"
    how = f"at most: the host takes {duration(facts.issue_s)} a batch to stage what is in pageable memory"
    return _hint(facts, change, min(facts.issue_s, facts.base_s - facts.limit_s), how)


def _persistent_workers(facts: Facts) -> Hint | None:
    if not facts.is_data_loader or facts.num_workers == 0 or facts.persistent_workers or not facts.pass_length:
        return None
    how = (
        f"in every pass but the first: starting the workers takes {duration(facts.start_s)}, spread over "
        f"{facts.pass_length} batches"
    )
    return _hint(facts, "persistent_workers=True", facts.start_share_s, how)


def _prefetch_factor(facts: Facts) -> Hint | None:
    # Where the loader is too slow on average, a longer queue is as empty as a short one.
    if not facts.is_data_loader or facts.num_workers == 0 or facts.load_s > facts.busy_s:
        return None
    factor = facts.prefetch_factor or 2
    saved = min(facts.late_s, facts.base_s - facts.start_share_s - facts.busy_s)
    how = f"at most: on average batches come in time, but the loop waits {duration(facts.late_s)} a step for late ones"
    return _hint(facts, f"prefetch_factor={2 * factor} (now {factor})", saved, how)
