"""The same batches through three loops: what each takes, beside what loading, copying and computing take alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from prefetch._device import has_streams, is_host
from prefetch._prefetcher import CUDAPrefetcher
from prefetch._stats import duration
from prefetch.cli._measure import Compute, host_seconds, synchronize
from prefetch.cli._output import CommandError

BLOCKING = "batch.to(device)"
NON_BLOCKING = "batch.to(device, non_blocking=True)"
PREFETCHED = "CUDAPrefetcher(batches)"
ROUNDS = 3
_READY_BATCHES = 4
_WARM_UP_STEPS = 5
_WORTH_IT = 1.03  # times as fast: less is lost among the differences between two runs


def too_large(shape: tuple[int, ...], dtype: torch.dtype, rule: str, error: RuntimeError) -> CommandError:
    """What is raised instead of an error of an allocator."""
    return CommandError(f"argument --shape: {rule}, got {','.join(map(str, shape))!r} of {dtype}: {error}")


class Ready:
    """Hands out batches that are there already, a few in turn.

    Args:
        shape: Of a batch, a tensor.
        dtype: Of its elements.
        device: Where batches are to go; for one with streams they are in pinned memory.
        load_s: Seconds of sleep before each.

    Raises:
        CommandError: There is not enough memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, load_s: float) -> None:
        try:
            batches = [torch.ones(shape, dtype=dtype) for _ in range(_READY_BATCHES)]
            self._batches = [batch.pin_memory() for batch in batches] if has_streams(device) else batches
        except RuntimeError as error:
            raise too_large(shape, dtype, f"{_READY_BATCHES} batches must fit into memory", error) from error
        self.nbytes = self._batches[0].nbytes
        self.load_s = load_s
        self.steps = 0
        self.spent_s = 0.0
        """That handing them out has taken so far, in whichever thread."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self._batch, range(self.steps))

    def _batch(self, position: int) -> torch.Tensor:
        start = time.perf_counter()
        if self.load_s:
            time.sleep(self.load_s)
        batch = self._batches[position % _READY_BATCHES]
        self.spent_s += time.perf_counter() - start
        return batch


class Row(NamedTuple):
    """One loop."""

    name: str
    step_s: float
    """Of the fastest pass, until the device was done."""
    host_s: float
    """That the loop's thread takes to get a batch, besides waiting for the loader or, in the prefetcher, for room."""


@dataclass(frozen=True)
class Result:
    """Everything that was measured, in seconds a step; the best of several rounds."""

    is_host: bool
    looks_ahead: bool
    """Whether the prefetcher can load or copy beside the step: not where there are neither streams nor a thread."""
    load_s: float
    copy_s: float
    """Alone, one after the other."""
    compute_s: float
    """Alone."""
    rows: tuple[Row, Row, Row]
    bottleneck: str

    @property
    def limit_s(self) -> float:
        """The longest of load, copy and compute: where everything else is hidden behind it."""
        return max(self.load_s, self.copy_s, self.compute_s, 1e-9)

    @property
    def limit_name(self) -> str:
        """Which of them that is."""
        times = {"load": self.load_s, "copy": self.copy_s, "compute": self.compute_s}
        return max(times, key=lambda name: times[name])

    @property
    def speedup(self) -> float:
        """Of prefetching over the faster of the plain loops."""
        blocking, non_blocking, prefetched = self.rows
        return min(blocking.step_s, non_blocking.step_s) / prefetched.step_s

    @property
    def possible_speedup(self) -> float:
        """Of a loop in which all is hidden behind the longest, over one that can only load beside the device."""
        plain = self.load_s + self.compute_s if self.is_host else max(self.load_s, self.copy_s + self.compute_s)
        return plain / self.limit_s


def compare(
    ready: Ready,
    compute: Compute,
    batches: CUDAPrefetcher[torch.Tensor],
    steps: int,
    *,
    background: bool | None,
    advance: Callable[[], object],
) -> Result:
    """Measure in alternating rounds.

    Args:
        ready: What is iterated over.
        compute: The step.
        batches: The prefetcher around ``ready``.
        steps: Of each pass.
        background: What the prefetcher was told.
        advance: Called after each of the :data:`ROUNDS`.
    """
    device = batches.device
    ready.steps = min(_WARM_UP_STEPS, steps)
    for warm_up in (_plain(ready, device, non_blocking=False), _plain(ready, device, non_blocking=True), iter(batches)):
        _pass(warm_up, compute, device)
    ready.steps = steps
    loads, copies, computes = [], [], []
    passes: dict[str, list[tuple[float, float]]] = {BLOCKING: [], NON_BLOCKING: [], PREFETCHED: []}
    for _ in range(ROUNDS):
        ready.load_s, load_s = 0.0, ready.load_s
        nothing = Compute(lambda: None, 0.0, "nothing")
        copies.append(_pass(_plain(ready, device, non_blocking=True), nothing, device)[0] / steps)
        ready.load_s = load_s
        computes.append(host_seconds(device, lambda: [compute.run() for _ in range(steps)]) / steps)
        for name in (BLOCKING, NON_BLOCKING):
            before = ready.spent_s
            whole, got = _pass(_plain(ready, device, non_blocking=name == NON_BLOCKING), compute, device)
            loads.append((ready.spent_s - before) / steps)
            passes[name].append((whole / steps, got / steps - loads[-1]))
        before_s = _waited(batches)
        whole, got = _pass(iter(batches), compute, device)
        passes[PREFETCHED].append((whole / steps, (got - (_waited(batches) - before_s)) / steps))
        advance()
    blocking, non_blocking, prefetched = (
        Row(name, min(whole for whole, _ in both), max(0.0, min(got for _, got in both)))
        for name, both in passes.items()
    )
    return Result(
        is_host=is_host(device),
        looks_ahead=has_streams(device) or bool(background),
        load_s=min(loads),
        copy_s=0.0 if is_host(device) else min(copies),
        compute_s=min(computes),
        rows=(blocking, non_blocking, prefetched),
        bottleneck=batches.stats.bottleneck,
    )


def _waited(batches: CUDAPrefetcher[torch.Tensor]) -> float:
    stats = batches.stats
    return stats.loader_wait_s + stats.host_wait_s


def _plain(ready: Ready, device: torch.device, *, non_blocking: bool) -> Iterator[torch.Tensor]:
    return (batch.to(device, non_blocking=non_blocking and has_streams(device)) for batch in ready)


def _pass(batches: Iterator[Any], compute: Compute, device: torch.device) -> tuple[float, float]:
    """The seconds of a pass until the device is done, and those of it that were spent on getting batches."""
    synchronize(device)
    got_s = 0.0
    start = asked = time.perf_counter()
    for _batch in batches:
        got_s += time.perf_counter() - asked
        compute.run()
        asked = time.perf_counter()
    synchronize(device)
    return time.perf_counter() - start, got_s


def conclusion(result: Result) -> str:
    """What prefetching gains here, or why it does not: one or two sentences."""
    if not result.looks_ahead:
        where = "the batches are on the CPU already" if result.is_host else "this device has no streams"
        return (
            f"Prefetching does not help here: {where}, and without a thread (--background) CUDAPrefetcher does what "
            "the plain loop does; differences are chance."
        )
    if min(result.speedup, result.possible_speedup) >= _WORTH_IT:  # more than is possible is chance
        return (
            f"Prefetching makes the loop {result.speedup:.2f} times as fast as the faster plain loop; "
            f"{result.possible_speedup:.2f} times would be possible."
        )
    return f"Prefetching does not help here ({result.speedup:.2f} times as fast): {_why_not(result)}."


def _why_not(result: Result) -> str:
    limit = result.limit_s
    if result.copy_s < 0.05 * limit and not (result.is_host and result.load_s >= 0.05 * limit):
        return (
            f"the copy ({duration(result.copy_s)}) is {result.copy_s / limit:.1%} of a step ({duration(limit)}), and "
            "nothing can gain more than that"
        )
    if result.limit_name == "load":
        return (
            f"the loader is the limit ({duration(result.load_s)} a batch), and the rest is done while it is waited "
            "for: make the loader faster"
        )
    if result.compute_s < 0.05 * limit:
        return (
            f"the copy is the limit ({duration(result.copy_s)}), and there is hardly any computation "
            f"({duration(result.compute_s)}) behind which it could be hidden"
        )
    return (
        f"a step takes {duration(result.rows[2].step_s)} where {duration(limit)} would be possible, so the host or "
        f"other programs are in the way; getting a batch takes the host {duration(result.rows[2].host_s)}"
    )
