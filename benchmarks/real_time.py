"""How near each loop comes to the least possible time, by the clock: ``python -m benchmarks.real_time``.

The device is simulated, the time is real: copies and kernels last as long as they are told, in threads of their own,
while the loop and the loader run as they would beside a GPU. No GPU takes part.

Each loop is given as a ratio to the least possible time of a pass: the longest of load, copy and compute in every step,
and each of the others once, for the start and the end. Where the consumer synchronises (it waits for its stream after
every step, as ``loss.item()`` does), a step takes at least the compute and what that waiting costs by itself, which is
measured in the same run. A load is a sleep in the loader.

Rounds alternate and the fastest of each counts, since other work on the machine can only add. The first row is what the
simulated device makes of the copies alone and of the kernels alone, the slower of the two: so late do its sleeps end.
Batches are small, and there beforehand but for those of the worker processes, so that the times are those of the
scenario and not those of moving bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import load_simulator, save, show
from benchmarks.loops import Batch, all_loops
from tests import simulator

STEPS = 100
ROUNDS = 3
SHORT_PASSES_US = 400_000  # passes are repeated for at least so long: one lost time slice is much of a short one
BATCH_SIZE = 8
DEVICE_ALONE = "(the device alone)"


class Scenario(NamedTuple):
    """What one step takes, in microseconds."""

    copy: int
    compute: int
    load: int = 0
    synchronises: bool = False
    workers: bool = False

    def __str__(self) -> str:
        times = {"load": self.load, "copy": self.copy, "compute": self.compute}
        parts = [f"{name} {us / 1000:g}" for name, us in times.items() if us]
        title = ", ".join(parts) + " ms"
        return title + ", synchronising" * self.synchronises + ", 2 worker processes" * self.workers


SCENARIOS = (
    Scenario(copy=5_000, compute=10_000),
    Scenario(copy=9_000, compute=10_000),
    Scenario(copy=10_000, compute=5_000),
    Scenario(copy=50, compute=200),  # the host's own work and the device's late sleeps are the limit
    Scenario(copy=1_000, compute=10_000, load=8_000, synchronises=True),
    Scenario(copy=1_000, compute=5_000, workers=True),
    Scenario(copy=1_000, compute=5_000, workers=True, synchronises=True),
)


class Ready:
    """Hands out pinned batches that are there already, each after ``load`` microseconds."""

    def __init__(self) -> None:
        self.load = 0
        self._batches = [
            (
                torch.zeros(BATCH_SIZE, 3, 8, 8, dtype=torch.uint8).pin_memory(),
                torch.zeros(BATCH_SIZE, dtype=torch.int64).pin_memory(),
            )
            for _ in range(8)
        ]

    def __iter__(self) -> Iterator[Batch]:
        for i in range(STEPS):
            if self.load:
                time.sleep(self.load / 1e6)
            yield self._batches[i % len(self._batches)]


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """A data set that costs nothing: what is left is what a ``DataLoader`` with worker processes takes."""

    def __len__(self) -> int:
        return STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 8, 8, dtype=torch.uint8), index


def pass_us(batches: Iterable[object], scenario: Scenario) -> float:
    """Microseconds from the start of a pass to the end of its last step on the device."""
    consumer = torch.accelerator.current_stream()
    start = time.perf_counter()
    for _ in batches:
        simulator.busy(scenario.compute)
        if scenario.synchronises:
            consumer.synchronize()
    consumer.synchronize()
    return (time.perf_counter() - start) * 1e6


def copies_us(batches: Iterable[Batch]) -> float:
    """Microseconds of a pass's copies alone."""
    start = time.perf_counter()
    for batch in batches:
        for tensor in batch:
            tensor.to("sim", non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    return (time.perf_counter() - start) * 1e6


def measure(loops: dict[str, Iterable[Batch]], ready: Ready, scenario: Scenario) -> dict[str, float]:
    """The ratio of each loop in one scenario."""
    simulator.configure(latency_us=scenario.copy // 2)  # a batch is two tensors
    times: dict[str, list[float]] = {name: [] for name in loops}
    copies, steps = [], []
    for _ in range(max(ROUNDS, SHORT_PASSES_US // (STEPS * scenario.compute))):
        ready.load = 0
        copies.append(copies_us(ready))
        steps.append(pass_us(range(STEPS), scenario))
        ready.load = scenario.load
        for name, batches in loops.items():
            torch.accelerator.synchronize()
            times[name].append(pass_us(batches, scenario))
    step = min(steps) / STEPS if scenario.synchronises else scenario.compute
    parts = (scenario.load, scenario.copy, step)
    longest = STEPS * max(parts)
    least = longest + sum(parts) - max(parts)
    alone = max(min(copies), min(steps)) / longest
    return {DEVICE_ALONE: alone} | {name: min(us) / least for name, us in times.items()}


def main() -> None:
    """Measure, print and save."""
    load_simulator(virtual=False)
    ready = Ready()
    workers: DataLoader[Any] = DataLoader(
        Samples(), batch_size=BATCH_SIZE, num_workers=2, persistent_workers=True, pin_memory=True
    )
    makers = all_loops()
    over_ready = {name: make(ready) for name, make in makers.items()}
    over_workers = {name: make(workers) for name, make in makers.items()}
    for batches in (*over_ready.values(), *over_workers.values()):  # the first call of anything takes longer
        pass_us(batches, Scenario(copy=0, compute=0))
    columns = {
        str(scenario): measure(over_workers if scenario.workers else over_ready, ready, scenario)
        for scenario in SCENARIOS
    }
    rows: list[dict[str, Any]] = [
        {"loop": name} | {title: round(ratios[name], 3) for title, ratios in columns.items()}
        for name in (DEVICE_ALONE, *makers)
    ]
    show(rows)
    print(f"\nratios to the least possible time, on a simulated device; written to {save('real_time', rows)}")


if __name__ == "__main__":
    main()
