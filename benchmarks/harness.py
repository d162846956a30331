"""What the benchmarks share: the simulated device, a loader, the machine's record, and where results go."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from prefetch.cli._machine import cores, processor
from tests import simulator

RESULTS = Path(__file__).parent / "results"


def load_simulator(*, virtual: bool) -> None:
    """The simulated accelerator, clean, without the detectors that would be part of every measured call."""
    simulator.load()
    simulator.reset()
    simulator.configure(virtual=int(virtual), race=0, poison=0, trace=0)


SIMULATED = "simulated accelerator (tests/simulator), no GPU"


class Ready(IterableDataset[Any]):
    """Hands out batches that are there already, in turn.

    Args:
        batches: Those.
        steps: Of a pass.
        load: Called with the position of each before it is handed out.
    """

    def __init__(self, batches: list[Any], steps: int, load: Callable[[int], None] | None = None) -> None:
        self._batches, self._steps, self._load = batches, steps, load

    def __iter__(self) -> Iterator[Any]:
        for position in range(self._steps):
            if self._load is not None:
                self._load(position)
            yield self._batches[position % len(self._batches)]


def machine(device: str = SIMULATED) -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "device": device,
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(name: str, rows: list[dict[str, Any]], device: str = SIMULATED, **more: Any) -> Path:
    """Write rows with the machine's record, and what more there is to know, to ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(device), **more, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    return path


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a Markdown table."""
    heads = list(rows[0])
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row.values()) + " |")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
