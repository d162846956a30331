"""The results of ``benchmarks.compare``, each of its files as a picture: ``python -m benchmarks.compare_plot``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness import RESULTS

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SHOWN = 2.2  # ratios beyond are written at the edge
NOT_SCENARIOS = ("loop", "reserved, batches", "host, us a batch")
# Of the palette of Okabe and Ito; shapes as well, for print in grey.
OTHERS: dict[str, Any] = {"color": "#D55E00", "marker": "o", "facecolors": "none", "label": "other loops"}
OURS: dict[str, Any] = {"color": "#0072B2", "marker": "D", "label": "this library, background=True and by policy"}
OUR_DEFAULT: dict[str, Any] = {"color": "#009E73", "marker": "s", "label": "CUDAPrefetcher(loader)"}
DEFAULT = "CUDAPrefetcher(loader)"


def draw(result: dict[str, Any], path: Path) -> None:
    """One line for each scenario, one mark for each loop."""
    rows = result["rows"]
    scenarios = [name for name in rows[0] if name not in NOT_SCENARIOS]
    figure = Figure(figsize=(9, 0.6 + 0.45 * len(scenarios)), layout="constrained")
    axes = figure.subplots()
    ours_from = next(i for i, row in enumerate(rows) if row["loop"] == DEFAULT)
    for kind, chosen, shift in (
        (OTHERS, rows[:ours_from], 0.16),
        (OUR_DEFAULT, rows[ours_from : ours_from + 1], -0.04),
        (OURS, rows[ours_from + 1 :], -0.2),
    ):
        points = [
            (min(row[scenario], SHOWN), -line + shift)
            for line, scenario in enumerate(scenarios)
            for row in chosen
            if row[scenario] is not None
        ]
        axes.scatter([x for x, _ in points], [y for _, y in points], s=30, clip_on=False, zorder=3, **kind)
    axes.axvline(1, color="black", linewidth=0.8)
    times = result["ms_a_step"]
    labels = [
        f"{name} ({', '.join(f'{part} {ms:.2g}' for part, ms in times[name].items() if ms >= 0.05)} ms)"
        for name in scenarios
    ]
    axes.set_yticks([-line for line in range(len(scenarios))], labels, fontsize="small")
    axes.set_xlim(0.95, SHOWN)
    ticks = [1, 1.2, 1.4, 1.6, 1.8, 2, SHOWN]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks[:-1]] + [f"≥ {SHOWN:g}"])
    axes.set_xlabel(
        f"time of a pass, as a ratio to the least possible; {result['machine']['device']}", fontsize="small"
    )
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(path, format="png", dpi=150)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_plot", description=__doc__)
    parser.parse_args()
    for result in sorted(RESULTS.glob("compare*.json")):  # of the simulated accelerator, and of GPUs
        path = IMAGES / f"{result.stem}.png"
        draw(json.loads(result.read_text()), path)
        print(f"drawn into {path}")


if __name__ == "__main__":
    main()
