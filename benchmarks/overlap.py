"""How much of the copies is hidden, and what memory that takes: ``python -m benchmarks.overlap``.

Times are simulated and exact; memory is what the simulated allocator reserved after passes of 200 steps that never
synchronise, and how often it was asked for some in the second. No GPU takes part. Each loop is given as a ratio to the
least possible time: one copy and all compute, or all copies and one compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import torch

from benchmarks.harness import Ready, load_simulator, save, show
from benchmarks.peers import Plain
from prefetch import CUDAPrefetcher
from prefetch._arguments import MemoryName
from tests import simulator

STEPS = 200
SIZE = 1 << 19  # floats in a batch: 2 MiB, the simulated allocator's unit

LOOPS: dict[str, Callable[[Ready, torch.device], Any]] = {
    "batch.to(device)": partial(Plain, non_blocking=False),
    "batch.to(device, non_blocking=True)": partial(Plain, non_blocking=True),
} | {
    f"CUDAPrefetcher, {memory}, prefetch_batches={ahead}": partial(
        CUDAPrefetcher, memory=memory, prefetch_batches=ahead
    )
    for memory in get_args(MemoryName)
    for ahead in (0, 1, 2)
}


class Measured(NamedTuple):
    """What a loop took."""

    ms: float
    """Simulated, for all steps of one pass."""
    reserved: float
    """Batches reserved by the allocator after two passes."""
    allocations: int
    """How often memory was asked for in the second pass."""


def measure(loop: Callable[[Ready, torch.device], Any], copy_ms: int, compute_ms: int) -> Measured:
    """Two passes that never synchronise."""
    load_simulator(virtual=True)
    batches = loop(Ready([(torch.ones(SIZE).pin_memory(),) for _ in range(8)], STEPS), torch.device("sim", 0))
    simulator.configure(latency_us=copy_ms * 1000)
    torch.accelerator.empty_cache()
    took_ms, counted = 0.0, [0]
    for _ in range(2):
        start = simulator.host_time_ns()
        for _ in batches:
            simulator.busy(compute_ms * 1000)
        reserved = torch.accelerator.memory_reserved() / (4 * SIZE)
        counted.append(torch.accelerator.memory_stats()["allocation.all.allocated"])
        torch.accelerator.synchronize()
        took_ms = (simulator.host_time_ns() - start) / 1e6
    return Measured(took_ms, reserved, counted[-1] - counted[-2])


def main() -> None:
    """Measure, print and save."""
    rows = []
    for name, loop in LOOPS.items():
        row: dict[str, Any] = {"loop": name}
        most: list[Measured] = []
        for copy_ms, compute_ms in ((5, 10), (9, 10), (10, 5)):
            measured = measure(loop, copy_ms, compute_ms)
            least = min(copy_ms, compute_ms) + STEPS * max(copy_ms, compute_ms)
            row[f"copy {copy_ms} ms, compute {compute_ms} ms"] = round(measured.ms / least, 3)
            most.append(measured)
        row["reserved, batches"] = max(measured.reserved for measured in most)
        row["allocations, second pass"] = max(measured.allocations for measured in most)
        rows.append(row)
    show(rows)
    print(f"\nwritten to {save('overlap', rows)}")


if __name__ == "__main__":
    main()
