"""A picture of what copies of different sizes reach."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from prefetch.cli._measure import Bandwidth, Direction, Memory


class _Look(NamedTuple):
    color: str
    marker: str
    line: str


# Of the palette of Okabe and Ito, which those who are colour-blind can tell apart; markers and lines do so in grey.
_LOOKS: dict[tuple[Memory, Direction], _Look] = {
    ("pinned", "to device"): _Look("#0072B2", "o", "-"),
    ("pinned", "to host"): _Look("#009E73", "s", "--"),
    ("pageable", "to device"): _Look("#D55E00", "^", "-."),
    ("pageable", "to host"): _Look("#CC79A7", "D", ":"),
}


def draw(found: list[list[Bandwidth]], title: str, path: Path) -> None:
    """Write the picture.

    Args:
        found: For each size, what was measured.
        title: What was measured on.
        path: The PNG.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7, 4.8), layout="constrained")
    axes = figure.subplots()
    sizes = [row[0].nbytes / 2**20 for row in found]
    for (memory, direction), look in _LOOKS.items():
        speeds = [
            cell.gb_per_s for row in found for cell in row if (cell.memory, cell.direction) == (memory, direction)
        ]
        axes.plot(
            sizes,
            speeds,
            color=look.color,
            marker=look.marker,
            linestyle=look.line,
            label=f"{memory}, {direction}",
        )
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sizes, [f"{size:g}" if size >= 1 else f"1/{round(1 / size)}" for size in sizes])
    axes.set_xlabel("size of a copy (MiB)")
    axes.set_ylabel("bandwidth (GB/s)")
    axes.grid(visible=True, color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Copies between host and device\n({title})", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3.5)
    figure.savefig(path, format="png", dpi=150)
