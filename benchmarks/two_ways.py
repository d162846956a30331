"""Batches in and results out in one loop: ``python -m benchmarks.two_ways``.

Each step copies a batch of 5 MB to the device, computes for 10 ms, and copies a result of 4 MB back, at 1 GB/s each
way. Times are simulated and exact; no GPU takes part. Each loop is given as a ratio to the compute alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Ready, load_simulator, save, show
from prefetch import CUDAPrefetcher, to_host
from tests import simulator

STEPS = 100
COMPUTE_US = 10_000
FLOATS_IN, FLOATS_OUT = 1_250_000, 1_000_000


def pinned() -> Ready:
    """Batches from a few pinned buffers."""
    return Ready([torch.ones(FLOATS_IN).pin_memory() for _ in range(8)], STEPS)


def step(batch: torch.Tensor) -> torch.Tensor:
    """The compute, and its result."""
    simulator.busy(COMPUTE_US)
    return batch[:FLOATS_OUT] * 2


def plain() -> list[torch.Tensor]:
    """The plain loop: all three after one another."""
    return [step(batch.to("sim", non_blocking=True)).cpu() for batch in pinned()]


def prefetched() -> list[torch.Tensor]:
    """The way in overlaps."""
    return [step(batch).cpu() for batch in CUDAPrefetcher(pinned(), "sim")]


def both_ways() -> list[torch.Tensor]:
    """Both ways do."""
    futures = [to_host(step(batch)) for batch in CUDAPrefetcher(pinned(), "sim")]
    return [future.result() for future in futures]


LOOPS: dict[str, Callable[[], list[torch.Tensor]]] = {
    ".to(device, non_blocking=True) and .cpu()": plain,
    "CUDAPrefetcher and .cpu()": prefetched,
    "CUDAPrefetcher and to_host()": both_ways,
}


def measure(loop: Callable[[], list[torch.Tensor]]) -> float:
    """Simulated milliseconds."""
    load_simulator(virtual=True)
    simulator.configure(latency_us=0, h2d_mb_s=1000, d2h_mb_s=1000)
    start = simulator.host_time_ns()
    loop()
    return (simulator.host_time_ns() - start) / 1e6


def main() -> None:
    """Measure, print and save."""
    rows: list[dict[str, Any]] = []
    for name, loop in LOOPS.items():
        took_ms = measure(loop)
        rows.append({"loop": name, "ms": took_ms, "ratio to compute": round(took_ms / (STEPS * COMPUTE_US / 1000), 3)})
    show(rows)
    print(f"\nsimulated; written to {save('two_ways', rows)}")


if __name__ == "__main__":
    main()
