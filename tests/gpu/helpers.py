"""Kernels of a known length, and what the profiler saw of a loop."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

COUNT = 16  # batches
SIZE = 1 << 23  # int32 elements of each: 32 MiB, which takes a bus of 16 to 60 GB/s 0.5 to 2 ms
LATE_MS = 5.0  # longer than the copies of several batches, and than the host needs to queue the next steps

FROM_PINNED = "Memcpy HtoD (Pinned -> Device)"
TO_PINNED = "Memcpy DtoH (Device -> Pinned)"

EACH_MEMORY = pytest.mark.parametrize("memory", ["record_stream", "consumer", "static"])
EACH_BACKGROUND = pytest.mark.parametrize("background", [False, True])


def elapsed_ms(queue: Callable[[], object]) -> float:
    """How long the device takes for what a function queues on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    queue()
    end.record()
    end.synchronize()
    ms: float = start.elapsed_time(end)
    return ms


@functools.cache
def cycles_per_ms() -> float:
    """The device's clock; measured once."""
    cycles = 100_000_000
    elapsed_ms(lambda: torch.cuda._sleep(2 * cycles))  # while which an idle clock comes up
    return cycles / elapsed_ms(lambda: torch.cuda._sleep(cycles))


def keep_busy(ms: float) -> None:
    """Queue a kernel of this length, which uses neither memory nor more than one multiprocessor."""
    torch.cuda._sleep(int(ms * cycles_per_ms()))


def copy_ms(batch: torch.Tensor) -> float:
    """How long the copy of a pinned batch to the device takes."""
    target = torch.empty_like(batch, device="cuda")
    times = [elapsed_ms(lambda: target.copy_(batch, non_blocking=True)) for _ in range(4)]
    return max(times[1:])


def all_numbers() -> torch.Tensor:
    """What the fixture ``batches`` holds, one batch a row; made on the device, so that no copy is trusted."""
    return torch.arange(COUNT * SIZE, dtype=torch.int32, device="cuda").view(COUNT, SIZE)


class Activity(NamedTuple):
    """A copy or a kernel on the device."""

    name: str
    category: str
    stream: int
    start_us: float
    end_us: float


class Trace(NamedTuple):
    """What ran on the device, in the order of the starts."""

    activities: list[Activity]

    def copies(self, direction: str) -> list[Activity]:
        """The copies in a direction: ``HtoD``, ``DtoH``, ``DtoD``."""
        return [each for each in self.activities if each.name.startswith(f"Memcpy {direction}")]

    def kernels(self) -> list[Activity]:
        """What computes."""
        return [each for each in self.activities if each.category == "kernel"]


def parsed(chrome_trace: str) -> Trace:
    """The device's part of an exported trace."""
    activities = []
    for event in json.loads(chrome_trace)["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy"):
            start = float(event["ts"])
            stream = int(event["args"]["stream"])
            activities.append(Activity(event["name"], event["cat"], stream, start, start + float(event["dur"])))
    return Trace(sorted(activities, key=lambda each: each.start_us))


def profiled(loop: Callable[[], object], folder: Path) -> Trace:
    """Run a loop, and what it has queued to the end, under the profiler.

    Skips the test where the profiler sees nothing of the device; the loop must queue some work.
    """
    path = folder / "trace.json"
    profiler = profile(activities=[ProfilerActivity.CUDA])
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the profiler says of itself differs from version to version
        profiler.start()
    loop()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profiler.stop()
        profiler.export_chrome_trace(str(path))
    trace = parsed(path.read_text())
    if not trace.activities:
        pytest.skip("the profiler sees no activity of the device: CUPTI does not work on this machine")
    return trace


def streams(activities: Iterable[Activity]) -> set[int]:
    """Those on which the activities ran."""
    return {each.stream for each in activities}


def length_us(activities: Iterable[Activity]) -> float:
    """Their lengths together."""
    return sum(each.end_us - each.start_us for each in activities)


def shared_us(activities: Iterable[Activity], others: Iterable[Activity]) -> float:
    """The part of ``length_us(activities)`` in which some of the others ran too."""
    merged: list[list[float]] = []
    for other in sorted(others, key=lambda each: each.start_us):
        if merged and other.start_us <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], other.end_us)
        else:
            merged.append([other.start_us, other.end_us])
    return sum(
        max(0.0, min(each.end_us, end) - max(each.start_us, start)) for each in activities for start, end in merged
    )
