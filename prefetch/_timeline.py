"""When each batch was loaded, copied, waited for and used, on one clock."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefetch._intervals import LANES, BatchTimes, intervals
from prefetch._plot import add_legend, draw, new_figure


@dataclass(frozen=True)
class Timeline:
    """The batches that ``profile=True`` has followed; a snapshot.

    At most the last 10 000 are kept.
    """

    batches: Sequence[BatchTimes]
    """In the order in which they were delivered."""

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open.

        Args:
            path: The JSON file.
        """
        lanes = list(dict.fromkeys(LANES.values()))
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}}
            for lane, name in enumerate(lanes)
        ]
        for times in self.batches:
            for name, interval in intervals(times):
                events.append(
                    {
                        "ph": "X",
                        "name": f"{name} {times.position}",
                        "cat": name,
                        "pid": 0,
                        "tid": lanes.index(LANES[name]),
                        "ts": interval.start_s * 1e6,
                        "dur": interval.duration_s * 1e6,
                        "args": {"pass": times.pass_number, "position": times.position},
                    }
                )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def plot(self, path: str | os.PathLike[str], *, batches: int = 12) -> None:
        """Draw the lanes of the last batches into a picture.

        Args:
            path: The file; matplotlib knows the format by its suffix.
            batches: How many.

        Raises:
            ImportError: matplotlib is not there.
            ValueError: There is no batch to draw, or ``batches`` is not 1 or more.
        """
        figure, axes = new_figure()
        self.draw(axes, batches=batches)
        add_legend(figure)
        figure.savefig(path, dpi=150)

    def draw(self, axes: Any, *, batches: int = 12) -> None:
        """Draw the lanes of the last batches.

        Args:
            axes: Of matplotlib.
            batches: How many.

        Raises:
            ValueError: There is no batch to draw, or ``batches`` is not 1 or more.
        """
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise ValueError(f"batches must be an integer from 1 upwards, got {batches!r}")
        if not self.batches:
            raise ValueError("the timeline has no batch to draw yet")
        draw(axes, self.batches[-batches:])


def plot_together(timelines: Mapping[str, Timeline], path: str | os.PathLike[str], *, title: str, batches: int) -> None:
    """Draw several timelines into one PNG, one above the other and on the same scale.

    Args:
        timelines: By what is written above each.
        path: The file.
        title: Of the whole.
        batches: How many are drawn, the last ones.
    """
    figure, plots = new_figure(len(timelines))
    ends = []
    for axes, (label, timeline) in zip(plots, timelines.items(), strict=True):
        timeline.draw(axes, batches=batches)
        axes.set_title(label, fontsize="medium", loc="left")
        axes.label_outer()
        ends.append(axes.get_xlim()[1])
    plots[0].set_xlim(0, max(ends))  # they share it
    plots[0].set_title(title, fontsize="medium", loc="right")
    add_legend(figure)
    figure.savefig(path, format="png", dpi=150)
