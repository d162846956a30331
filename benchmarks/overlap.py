"""How much of the copies is hidden, and what memory that takes: ``python -m benchmarks.overlap``.

Times are simulated and exact; memory is what the simulated allocator reserved after 200 steps that never synchronise.
No GPU takes part. Each loop is given as a ratio to the least possible time: one copy and all compute, or all copies and
one compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.harness import load_simulator, save, show
from prefetch import CUDAPrefetcher
from tests import simulator

STEPS = 200
SIZE = 1 << 19  # floats in a batch: 2 MiB, the simulated allocator's unit


class Pinned:
    """Hands out pinned batches that are there already."""

    def __init__(self) -> None:
        self.batches = [torch.ones(SIZE).pin_memory() for _ in range(8)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(STEPS):
            yield self.batches[i % len(self.batches)]


def plain(loader: Pinned) -> Iterator[torch.Tensor]:
    """The plain loop."""
    for batch in loader:
        yield batch.to("sim")


def non_blocking(loader: Pinned) -> Iterator[torch.Tensor]:
    """The plain loop with asynchronous copies, on the consumer's stream."""
    for batch in loader:
        yield batch.to("sim", non_blocking=True)


LOOPS: dict[str, Callable[[Pinned], Any]] = {
    "batch.to(device)": plain,
    "batch.to(device, non_blocking=True)": non_blocking,
    "CUDAPrefetcher, prefetch_batches=1": partial(CUDAPrefetcher, device="sim", prefetch_batches=1),
    "CUDAPrefetcher, prefetch_batches=2": partial(CUDAPrefetcher, device="sim", prefetch_batches=2),
}


def measure(loop: Callable[[Pinned], Any], copy_ms: int, compute_ms: int) -> tuple[float, float]:
    """Simulated milliseconds of all steps, and batches reserved at the end."""
    load_simulator(virtual=True)
    loader = Pinned()
    simulator.configure(latency_us=copy_ms * 1000)
    torch.accelerator.empty_cache()
    start = simulator.host_time_ns()
    for _ in loop(loader):
        simulator.busy(compute_ms * 1000)
    reserved = torch.accelerator.memory_reserved() / (4 * SIZE)
    torch.accelerator.synchronize()
    return (simulator.host_time_ns() - start) / 1e6, reserved


def main() -> None:
    """Measure, print and save."""
    rows = []
    for name, loop in LOOPS.items():
        row: dict[str, Any] = {"loop": name}
        for copy_ms, compute_ms in ((5, 10), (9, 10), (10, 5)):
            took, reserved = measure(loop, copy_ms, compute_ms)
            least = min(copy_ms, compute_ms) + STEPS * max(copy_ms, compute_ms)
            row[f"copy {copy_ms} ms, compute {compute_ms} ms"] = round(took / least, 3)
            row["reserved, batches"] = max(reserved, row.get("reserved, batches", 0))
        row["reserved, batches"] = row.pop("reserved, batches")
        rows.append(row)
    show(rows)
    print(f"\nwritten to {save('overlap', rows)}")


if __name__ == "__main__":
    main()
