"""The timeline as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from prefetch._intervals import LANES, BatchTimes, intervals


class _Look(NamedTuple):
    color: str
    hatch: str


# Of the palette of Okabe and Ito, which those who are colour-blind can tell apart; hatched, for print in grey.
_LOOKS = {
    "load": _Look("#E69F00", "///"),
    "copy": _Look("#56B4E9", "\\\\\\"),
    "compute": _Look("#009E73", ""),
    "wait": _Look("#FFFFFF", "xxxx"),
}
_HEIGHT = 0.7
_DIGIT_WIDTH = 0.016  # of the axes, with some room


def new_figure(rows: int = 1) -> tuple[Any, Any]:
    """A figure for so many timelines one above the other, and their axes (of one row the axes themselves).

    Raises:
        ImportError: matplotlib is not there.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "cuda-prefetcher[plot]"') from error
    figure = Figure(figsize=(9, 0.6 + 2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, sharex=True)


def draw(axes: Any, chosen: Sequence[BatchTimes]) -> None:
    """Draw the lanes of some batches into axes of matplotlib."""
    lanes = list(dict.fromkeys(LANES.values()))
    origin = min(interval.start_s for times in chosen for _, interval in intervals(times))
    for name, look in _LOOKS.items():
        bars = [(interval, times) for times in chosen for kind, interval in intervals(times) if kind == name]
        lane = -lanes.index(LANES[name])
        axes.barh(
            [lane] * len(bars),
            [interval.duration_s * 1e3 for interval, _ in bars],
            left=[(interval.start_s - origin) * 1e3 for interval, _ in bars],
            height=_HEIGHT,
            color=look.color,
            hatch=look.hatch,
            edgecolor="black",
            linewidth=0.6,
        )
    end = max(interval.end_s - origin for times in chosen for _, interval in intervals(times)) * 1e3
    for times in chosen:
        for name, interval in intervals(times):
            is_wide_enough = interval.duration_s * 1e3 > _DIGIT_WIDTH * len(str(times.position)) * end
            if name != "wait" and is_wide_enough:
                axes.text(
                    ((interval.start_s + interval.end_s) / 2 - origin) * 1e3,
                    -lanes.index(LANES[name]),
                    str(times.position),
                    ha="center",
                    va="center",
                    fontsize=8,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )
    axes.set_yticks([-lane for lane in range(len(lanes))], lanes)
    axes.set_ylim(-len(lanes) + 0.5, 0.5)
    axes.set_xlim(0, end)
    axes.set_xlabel("ms (the numbers are those of the batches)")


def add_legend(figure: Any) -> None:
    """Say above all axes of a figure what the looks mean."""
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=look.color, hatch=look.hatch, edgecolor="black", linewidth=0.6, label=name)
        for name, look in _LOOKS.items()
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
