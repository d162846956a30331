"""How near each loop comes to the least possible time, by the clock: ``python -m benchmarks.real_time``.

The device is simulated, the time is real: copies and kernels last as long as they are told, in threads of their own,
while the loop and the loader run as they would beside a GPU. No GPU takes part.

Each loop is given as a ratio to the least possible time of a pass: the longest of load, copy and compute in each step,
and each of the others once, for the start and the end. In the last scenario the consumer waits for the device after
every step, as ``loss.item()`` does, and the loader takes its time (it sleeps); a step then takes at least the compute
and what that waiting costs by itself, which is measured in the same run.

Rounds alternate and the fastest of each counts, since other work on the machine can only add. The first row is what the
simulated device makes of the same copies and kernels without any loop: that far its sleeps overshoot. The batches are
small and there from the start, so that the times are those of the scenario and not those of moving bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.harness import load_simulator, save, show
from benchmarks.loops import Batch, all_loops
from tests import simulator

STEPS = 100
ROUNDS = 3


class Scenario(NamedTuple):
    """What one step takes, in microseconds."""

    copy: int
    compute: int
    load: int = 0
    synchronises: bool = False

    def __str__(self) -> str:
        parts = [f"load {self.load / 1000:g}"] if self.load else []
        parts += [f"copy {self.copy / 1000:g}", f"compute {self.compute / 1000:g} ms"]
        return ", ".join(parts) + (", synchronising" if self.synchronises else "")


SCENARIOS = (
    Scenario(copy=5_000, compute=10_000),
    Scenario(copy=9_000, compute=10_000),
    Scenario(copy=10_000, compute=5_000),
    Scenario(copy=50, compute=200),  # the host's own work is the limit here
    Scenario(copy=1_000, compute=10_000, load=8_000, synchronises=True),
)


class Loader:
    """Hands out pinned batches that are there already, each after ``load`` microseconds."""

    def __init__(self) -> None:
        self.load = 0
        self._batches = [
            (torch.zeros(8, 3, 8, 8, dtype=torch.uint8).pin_memory(), torch.zeros(8, dtype=torch.int64).pin_memory())
            for _ in range(8)
        ]

    def __iter__(self) -> Iterator[Batch]:
        for i in range(STEPS):
            if self.load:
                time.sleep(self.load / 1e6)
            yield self._batches[i % len(self._batches)]


def pass_us(batches: Iterable[object], scenario: Scenario) -> float:
    """Microseconds from the start of a pass to the end of its last step on the device."""
    consumer = torch.accelerator.current_stream()
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in batches:
        simulator.busy(scenario.compute)
        if scenario.synchronises:
            consumer.synchronize()
    consumer.synchronize()
    return (time.perf_counter() - start) * 1e6


def copies_us(loader: Loader) -> float:
    """Microseconds of a pass's copies alone."""
    side = torch.accelerator.current_stream()
    start = time.perf_counter()
    for batch in loader:
        for tensor in batch:
            tensor.to("sim", non_blocking=True)
    side.synchronize()
    return (time.perf_counter() - start) * 1e6


def measure(loops: dict[str, Iterable[Batch]], loader: Loader, scenario: Scenario) -> dict[str, float]:
    """The ratios of one scenario."""
    simulator.configure(latency_us=scenario.copy // 2)  # a batch is two tensors
    loader.load = 0
    fastest: dict[str, float] = {}

    def note(name: str, us: float) -> None:
        fastest[name] = min(us, fastest.get(name, us))

    for _ in range(ROUNDS):
        loader.load = 0
        note("copies", copies_us(loader))
        note("steps", pass_us(range(STEPS), scenario))
        loader.load = scenario.load
        for name, batches in loops.items():
            note(name, pass_us(batches, scenario))
    copies, steps = fastest.pop("copies"), fastest.pop("steps")
    step = steps / STEPS if scenario.synchronises else scenario.compute
    parts = (scenario.load, scenario.copy, step)
    least = STEPS * max(parts) + sum(parts) - max(parts)
    return {"(the device alone)": max(copies, steps) / (STEPS * max(parts))} | {
        name: us / least for name, us in fastest.items()
    }


def main() -> None:
    """Measure, print and save."""
    load_simulator(virtual=False)
    loader = Loader()
    loops = {name: loop(loader) for name, loop in all_loops().items()}
    for batches in loops.values():  # the first call of anything takes longer
        pass_us(batches, Scenario(copy=0, compute=0))
    columns = {str(scenario): measure(loops, loader, scenario) for scenario in SCENARIOS}
    rows: list[dict[str, Any]] = [
        {"loop": name} | {title: round(ratios[name], 3) for title, ratios in columns.items()}
        for name in ["(the device alone)", *loops]
    ]
    show(rows)
    print(f"\nwritten to {save('real_time', rows)}")


if __name__ == "__main__":
    main()
