"""What one ``next()`` costs the host: ``python -m benchmarks.host_cost``.

A loader that hands out ready pinned batches of two 4 KB tensors is iterated over bare, by the PyTorch calls that any
prefetcher needs, and through ``CUDAPrefetcher``. The simulated device is in virtual mode, where it takes no time and
no core, so that what is measured is the host's work alone. Rounds alternate and the fastest of each counts, since other
work on the machine can only add; the ratio to the raw calls of the same run carries over to other machines.

Over a ``DataLoader`` the raw calls take longer too: what it does for each batch, with its own range for the profiler,
leaves the processor's caches worse for what follows.

What the statistics cost is the difference to a prefetcher that counts nothing, and with ``profile=True`` the difference
that this makes. Both are lines of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import torch
from torch.utils.data import DataLoader

from benchmarks.harness import Ready, load_simulator, save, show
from prefetch import CUDAPrefetcher
from prefetch._arguments import MemoryName
from prefetch._meter import PassMeter
from tests import simulator

BATCHES = 500
ROUNDS = 60
BARE, BARE_DATA_LOADER = "bare loader", "bare DataLoader"
RAW = "raw PyTorch calls"


def exhaust(batches: Any) -> None:
    """The loop around the measured calls."""
    for _ in batches:
        pass


def raw_calls(loader: Iterable[Any]) -> None:
    """The least that moves a batch ahead safely, written by hand for a pair of tensors."""
    device = torch.device("sim:0")
    side = torch.Stream(device)
    accelerator = torch.accelerator
    for left, right in loader:
        before = accelerator.current_stream(0)
        accelerator.set_stream(side)
        a, b = left.to(device, non_blocking=True), right.to(device, non_blocking=True)
        copied = side.record_event()
        accelerator.set_stream(before)
        before.wait_event(copied)
        a.record_stream(before)
        b.record_stream(before)
        before.record_event()


class CountsNothing(PassMeter):
    """In the place of what counts a pass. A few writes of attributes, which are not calls, remain."""

    __slots__ = ()

    def loaded(self, start_ns: int) -> None:
        """Not counted."""

    def delivered(self, mark: object) -> None:
        """Not counted."""


def uncounted(prefetcher: CUDAPrefetcher[Any]) -> CUDAPrefetcher[Any]:
    """A prefetcher without statistics."""
    marked = prefetcher._meter.marked
    prefetcher._meter.new_pass = partial(CountsNothing, marked, 0, 0)  # type: ignore[method-assign]
    return prefetcher


def fastest_us(loops: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds a batch of each loop: the fastest of alternating rounds."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            torch.accelerator.synchronize()
            start = time.perf_counter()
            loop()
            times[name].append((time.perf_counter() - start) / BATCHES * 1e6)
    return {name: min(values) for name, values in times.items()}


def main() -> None:
    """Measure, print and save."""
    load_simulator(virtual=True)
    simulator.configure(latency_us=0)  # else blocks whose copies are under way pile up behind the raw calls
    pinned = Ready([(torch.ones(1024).pin_memory(), torch.ones(1024).pin_memory()) for _ in range(8)], BATCHES)
    data_loader: DataLoader[Any] = DataLoader(pinned, batch_size=None)
    onto_device = {
        f"CUDAPrefetcher, simulated device, {memory}": partial(exhaust, CUDAPrefetcher(pinned, "sim", memory=memory))
        for memory in get_args(MemoryName)
    }
    fastest = fastest_us(
        {
            BARE: partial(exhaust, pinned),
            RAW: partial(raw_calls, pinned),
            **onto_device,
            "the first of them without statistics": partial(exhaust, uncounted(CUDAPrefetcher(pinned, "sim"))),
            "the first of them with profile=True": partial(exhaust, CUDAPrefetcher(pinned, "sim", profile=True)),
            BARE_DATA_LOADER: partial(exhaust, data_loader),
            f"{RAW} over a DataLoader": partial(raw_calls, data_loader),
            "the first of them over a DataLoader": partial(exhaust, CUDAPrefetcher(data_loader, "sim")),
            "CUDAPrefetcher, CPU": partial(exhaust, CUDAPrefetcher(pinned, "cpu")),
            "CUDAPrefetcher, CPU, without statistics": partial(exhaust, uncounted(CUDAPrefetcher(pinned, "cpu"))),
        }
    )
    raw = fastest[RAW] - fastest[BARE]
    rows: list[dict[str, Any]] = []
    for name, us in fastest.items():
        over = us - fastest[BARE_DATA_LOADER if name.endswith("DataLoader") else BARE]
        rows.append(
            {"loop": name, "us a batch over the bare loader": round(over, 2), "ratio to raw": round(over / raw, 3)}
        )
    show(rows)
    print(f"\nwritten to {save('host_cost', rows)}")


if __name__ == "__main__":
    main()
