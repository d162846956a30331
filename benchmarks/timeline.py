"""A loop without and with prefetching, drawn: ``python -m benchmarks.timeline``.

In simulated time, the host's included, so that the picture shows how things follow each other and nothing else. Writes
``docs/images/timeline.png``, which the README shows, and prints the statistics of both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Ready, load_simulator
from prefetch import CUDAPrefetcher
from prefetch._timeline import plot_together
from tests import simulator

LOAD_US, COPY_US, COMPUTE_US = 3_000, 5_000, 10_000
STEPS, DRAWN = 200, 10
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "timeline.png"


def batches() -> Ready:
    """Pinned batches that take the simulated host some time each."""
    ready = [torch.ones(1 << 18).pin_memory() for _ in range(4)]
    return Ready(ready, STEPS, lambda _: simulator.host_busy(LOAD_US))


def simulate_the_clock() -> None:
    """What the prefetcher takes for the host's time is the simulated host's from now on."""
    for name, module in list(sys.modules.items()):
        if name.startswith("prefetch.") and hasattr(module, "clock"):
            module.clock = simulator.host_time_ns  # type: ignore[attr-defined]


def main() -> None:
    """Run, draw and print."""
    load_simulator(virtual=True)
    simulator.configure(latency_us=COPY_US)
    simulate_the_clock()
    loops: dict[str, dict[str, Any]] = {
        "without prefetching (prefetch_batches=0)": {"prefetch_batches": 0, "memory": "consumer"},
        "with CUDAPrefetcher(loader)": {},
    }
    timelines = {}
    for label, options in loops.items():
        prefetcher = CUDAPrefetcher(batches(), "sim", profile=True, **options)
        for _ in prefetcher:
            simulator.busy(COMPUTE_US)
        print(f"{label}, simulated:\n{prefetcher.stats}\n")
        timelines[label] = prefetcher.timeline
    PICTURE.parent.mkdir(exist_ok=True)
    plot_together(timelines, PICTURE, title="simulated device and time", batches=DRAWN)
    print(f"drawn into {PICTURE.relative_to(Path.cwd()) if PICTURE.is_relative_to(Path.cwd()) else PICTURE}")


if __name__ == "__main__":
    main()
