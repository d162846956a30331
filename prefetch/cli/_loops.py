"""The user's loop, run for some seconds in three ways: the loader alone, plain copies, and prefetching."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from prefetch._batch import Visitor, walk
from prefetch._device import current_stream, has_streams, is_host
from prefetch._errors import PrefetchWarning
from prefetch._loaders import loads_apart
from prefetch._prefetcher import CUDAPrefetcher
from prefetch._rebuild import own_copy
from prefetch._stats import Stats
from prefetch._transfer import asynchronous
from prefetch.cli._measure import synchronize
from prefetch.cli._output import user_code
from prefetch.cli._user import Endless, Passes, Program, Step

_WARM_UP_STEPS = 3  # in which things are compiled, tuned and allocated
_STEPS_AHEAD = 4  # of the device, that the host may be: so far, and no longer, the device goes on when the time is up


class Loop(NamedTuple):
    """What was measured of one way."""

    seconds: float
    """Of a step."""
    steps: int


class Loading(NamedTuple):
    """What was measured of the loader alone."""

    loop: Loop
    start_s: float
    """That the first batch of a pass takes longer than others: starting worker processes, for one."""
    pass_length: int | None
    """Batches in a pass; ``None`` if that is not known."""


def plain(program: Program, device: torch.device, seconds: float) -> Loop:
    """The loop as it is usually written, with ``.to(device, non_blocking=True)``."""
    return _timed(_Plain(Passes(program.loader), device), program, device, seconds)


def prefetched(program: Program, device: torch.device, seconds: float) -> tuple[Loop, Stats]:
    """The same loop through ``CUDAPrefetcher(loader)``, and what that has measured."""
    endless = Endless(program.loader)
    with (
        warnings.catch_warnings(),
        CUDAPrefetcher(endless, device, background=_background(program.loader, device), profile=True) as batches,
    ):
        warnings.simplefilter("ignore", PrefetchWarning)  # what they are about is in the statistics
        loop = _timed(iter(batches), program, device, seconds)
        return loop, batches.stats


def _background(loader: Any, device: torch.device) -> bool:
    """What ``background=None`` would mean for the loader, which is hidden behind another."""
    return has_streams(device) and loads_apart(loader)


def loading(program: Program, seconds: float) -> Loading:
    """The loader alone, in this thread."""
    loader = program.loader
    starts: list[float] = []
    gaps: list[float] = []
    first = end = time.perf_counter()
    passes = Passes(loader)
    least = _warm_up(loader) + 1
    while len(starts) + len(gaps) < least or end - first < seconds:
        start = end
        next(passes)
        end = time.perf_counter()
        if not starts:
            first = end
        (starts if passes.is_at_start else gaps).append(end - start)
    if not gaps:  # passes of one batch: what starts them cannot be told apart
        return Loading(Loop(sum(starts) / len(starts), len(starts)), 0.0, 1)
    # Workers that started at the same time deliver their first batches at the same time: those after them tell more.
    typical = gaps[_warm_up(loader) :] or gaps
    mean = sum(typical) / len(typical)
    started = starts[1:] or starts  # the very first also imports and opens things
    length = passes.pass_lengths[-1] if passes.pass_lengths else _length(loader)
    return Loading(Loop(mean, len(typical)), max(0.0, sum(started) / len(started) - mean), length)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # the latter from some samplers
        return None


def _warm_up(loader: Any) -> int:
    return max(_WARM_UP_STEPS, getattr(loader, "num_workers", 0))


def _timed(batches: Iterable[Any], program: Program, device: torch.device, seconds: float) -> Loop:
    """Run the step over batches until the time is up; the steps after the first few count."""
    iterator = iter(batches)
    run = _Runner(program.step, device)
    begin = time.perf_counter()
    for count in itertools.count(1):
        run(_next(iterator))
        if count == _warm_up(program.loader) or time.perf_counter() - begin > seconds:
            break
    synchronize(device)
    begin = time.perf_counter()
    for count in itertools.count(1):  # noqa: B007 - it is used below
        run(_next(iterator))
        if time.perf_counter() - begin > seconds:
            break
    synchronize(device)
    return Loop((time.perf_counter() - begin) / count, count)


def _next(batches: Iterator[Any]) -> Any:
    with user_code("moving a batch to the device"):
        return next(batches)


class _Runner:
    """Runs steps, not too many ahead of the device.

    Args:
        step: What to call with each batch, if anything.
        device: Where it works.
    """

    def __init__(self, step: Step | None, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._ends: deque[torch.Event] = deque()

    def __call__(self, batch: Any) -> None:
        if self._step is not None:
            with user_code("the step"):
                self._step(batch)
        if has_streams(self._device):
            self._ends.append(current_stream(self._device).record_event())
            if len(self._ends) > _STEPS_AHEAD:
                self._ends.popleft().synchronize()


class _Plain(Iterator[Any]):
    """Batches copied on the consumer's stream when they are asked for."""

    def __init__(self, batches: Iterator[Any], device: torch.device) -> None:
        self._batches = batches
        self._move = _PlainMove(device)

    def __next__(self) -> Any:
        batch = next(self._batches)
        return batch if is_host(self._move.device) else walk(batch, self._move)


class _PlainMove(Visitor):
    """``.to(device, non_blocking=True)`` of all tensors of a batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def leaf(self, tensor: torch.Tensor) -> Any:
        return tensor.to(self.device, non_blocking=has_streams(self.device))

    def other(self, obj: Any) -> Any:
        clone = own_copy(obj)  # the .to of some classes works in place
        moved = clone.to(self.device, **(asynchronous(type(obj)) if has_streams(self.device) else {}))
        return clone if moved is None else moved
