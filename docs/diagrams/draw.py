"""Draw the diagrams of the explanations: ``python docs/diagrams/draw.py``.

They are committed beside this file, for whoever reads the pages without building them. Time runs to the right, and its
scale is made up. The background is transparent, and colours are of a middle lightness: white or black may be behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
LEFT, UNIT, LANE, BOX, TOP = 140, 16, 60, 30, 12  # pixels: of the names, of one unit of time, and down the page
COLOURS = {
    "host": "#b4b8bf",
    "copy": "#7fb2e5",
    "compute": "#f0b35e",
    "memory": "#8ccb9b",
    "free": "none",
}
LINE = "#7d7d7d"  # of what lies on the background: names, arrows, outlines


@dataclass(frozen=True)
class Box:
    """Something that lasts, in a lane."""

    lane: str
    start: float
    end: float
    text: str
    kind: str


@dataclass(frozen=True)
class Arrow:
    """What comes after what: from a time in one lane to a time in another."""

    from_lane: str
    from_time: float
    to_lane: str
    to_time: float
    text: str = ""
    """Stands to the right of a short arrow, and above a long one."""


def svg(title: str, boxes: Sequence[Box], arrows: Sequence[Arrow]) -> str:
    """A diagram, whose lanes are in the order in which boxes first name them.

    Args:
        title: What there is to see, for those who cannot.
        boxes: In their lanes.
        arrows: Between lanes.
    """
    lanes = list(dict.fromkeys(box.lane for box in boxes))
    length = max(box.end for box in boxes)
    width, height = LEFT + length * UNIT + 12, TOP + (len(lanes) - 1) * LANE + BOX + TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"',
        f'height="{height:g}" role="img" font-family="system-ui, sans-serif" font-size="12.5">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>',
    ]
    for lane in lanes:
        y = top(lanes, lane) + BOX / 2
        parts.append(f'<text x="0" y="{y + 4.5:g}" fill="{LINE}" font-weight="600">{escape(lane)}</text>')
        if not any(box.lane == lane and box.kind == "free" for box in boxes):  # whose text it would cross out
            parts.append(f'<path d="M{LEFT:g} {y:g}H{width:g}" stroke="{LINE}" stroke-opacity="0.35"/>')
    for box in boxes:
        x, y = LEFT + box.start * UNIT, top(lanes, box.lane)
        is_free = box.kind == "free"
        outline = f' stroke="{LINE}" stroke-dasharray="4 3"' if is_free else ""
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{(box.end - box.start) * UNIT - 1.5:g}" height="{BOX}" rx="4" '
            f'fill="{COLOURS[box.kind]}"{outline}/>'
        )
        parts.append(
            f'<text x="{x + (box.end - box.start) * UNIT / 2 - 0.75:g}" y="{y + BOX / 2 + 4.5:g}" text-anchor="middle" '
            f'fill="{LINE if is_free else "#1b1b1b"}">{escape(box.text)}</text>'
        )
    for arrow in arrows:
        is_down = lanes.index(arrow.to_lane) > lanes.index(arrow.from_lane)
        x1, y1 = LEFT + arrow.from_time * UNIT - 1, top(lanes, arrow.from_lane) + (BOX if is_down else 0)
        x2, y2 = LEFT + arrow.to_time * UNIT + 1, top(lanes, arrow.to_lane) + (0 if is_down else BOX)
        is_long = x2 - x1 > 8 * UNIT
        bend = y1 + (y2 - y1) * (0.66 if is_down == is_long else 0.4)
        parts.append(
            f'<path d="M{x1:g} {y1:g}V{bend:g}H{x2:g}V{y2:g}" fill="none" stroke="{LINE}" stroke-width="1.6" '
            'marker-end="url(#head)"/>'
        )
        if arrow.text:
            x, y = (x1 + 10, bend - 5) if is_long else (x2 + 9, (y1 + y2) / 2 + 4)
            parts.append(f'<text x="{x:g}" y="{y:g}" fill="{LINE}" font-size="11.5">{escape(arrow.text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def top(lanes: Sequence[str], lane: str) -> float:
    """Of the boxes in a lane."""
    return TOP + lanes.index(lane) * LANE


HOST, SIDE, CONSUMER = "host", "side stream", "consumer's stream"


def two_streams() -> str:
    """Requests with ``prefetch_batches=2``."""
    names = ("k", "k+1", "k+2", "k+3", "k+4")
    boxes = []
    for i in range(3):
        boxes.append(Box(HOST, 12 * i, 12 * i + 4, f"next({names[i]})", "host"))
        boxes.append(Box(HOST, 12 * i + 4, 12 * i + 11, f"queues step {names[i]}", "host"))
    boxes += [Box(SIDE, 12 * i + 4, 12 * i + 10, f"copy {names[i + 2]}", "copy") for i in range(3)]
    boxes += [Box(CONSUMER, 0, 7, "step k-1", "compute")]
    boxes += [Box(CONSUMER, 12 * i + 7, 12 * i + 19, f"step {names[i]}", "compute") for i in range(2)]
    boxes += [Box(CONSUMER, 31, 36, "step k+2", "compute")]
    waits = Arrow(SIDE, 10, CONSUMER, 31, "step k+2 waits for copy k+2, and for no other")
    return svg(
        "Copies run on the side stream while steps run on the consumer's; each step waits for its own copy.",
        boxes,
        [waits],
    )


def way_back() -> str:
    """``to_host`` and ``result``."""
    return svg(
        "A snapshot follows the step on the consumer's stream; the copy to the host runs beside the next step.",
        [
            Box(HOST, 3, 10, "to_host(result)", "host"),
            Box(HOST, 10, 22, "queues step k+1, …", "host"),
            Box(CONSUMER, 0, 11, "step k", "compute"),
            Box(CONSUMER, 11, 16, "snapshot", "copy"),
            Box(CONSUMER, 16, 36, "step k+1", "compute"),
            Box(SIDE, 16, 32, "copy to pinned memory", "copy"),
            Box("host, later", 20, 32, "future.result() waits", "host"),
            Box("host, later", 32, 36, "values", "memory"),
        ],
        [
            Arrow(CONSUMER, 16, SIDE, 16.3, "the copy waits for the snapshot"),
            Arrow(SIDE, 32, "host, later", 32),
        ],
    )


def record_stream() -> str:
    """The life of one batch, allocated on the side stream."""
    memory = "its memory"
    return svg(
        "With record_stream the memory of a batch is free again when the step that used it is done.",
        [
            Box(SIDE, 2, 9, "copy k", "copy"),
            Box(CONSUMER, 0, 12, "step k-1", "compute"),
            Box(CONSUMER, 12, 24, "step k", "compute"),
            Box(CONSUMER, 24, 36, "step k+1", "compute"),
            Box(memory, 2, 18, "batch k, named by the loop", "memory"),
            Box(memory, 18, 24, "let go", "memory"),
            Box(memory, 24, 36, "free for the side stream", "free"),
        ],
        [
            Arrow(SIDE, 9, CONSUMER, 12, "waits for the copy"),
            Arrow(CONSUMER, 24, memory, 24.3, "record_stream's event"),
        ],
    )


def consumer() -> str:
    """The life of one batch, allocated on the consumer's stream."""
    memory = "its memory"
    return svg(
        "With consumer the copy waits for the moment at which the memory was allocated on the consumer's stream.",
        [
            Box(memory, 4, 18, "batch k, named by the loop", "memory"),
            Box(memory, 18, 36, "free for the consumer's stream", "free"),
            Box(CONSUMER, 0, 4, "step k-3", "compute"),
            Box(CONSUMER, 4, 12, "steps k-2, k-1", "compute"),
            Box(CONSUMER, 12, 24, "step k", "compute"),
            Box(CONSUMER, 24, 36, "step k+1", "compute"),
            Box(SIDE, 4, 10, "copy k", "copy"),
        ],
        [
            Arrow(CONSUMER, 4, SIDE, 4.3),
            Arrow(SIDE, 10, CONSUMER, 12, "waits for the copy"),
        ],
    )


def static() -> str:
    """Two batches in one slot, with ``prefetch_batches=2``."""
    slot = "one of 4 slots"
    return svg(
        "With static a slot is written to again when all is done that was queued before its batch was let go.",
        [
            Box(SIDE, 0, 6, "copy k", "copy"),
            Box(SIDE, 20, 26, "copy k+4", "copy"),
            Box(CONSUMER, 0, 8, "step k-1", "compute"),
            Box(CONSUMER, 8, 16, "step k", "compute"),
            Box(CONSUMER, 16, 24, "step k+1", "compute"),
            Box(CONSUMER, 24, 36, "steps k+2, k+3", "compute"),
            Box(slot, 0, 20, "batch k", "memory"),
            Box(slot, 20, 36, "batch k+4, at the same address", "memory"),
        ],
        [
            Arrow(SIDE, 6, CONSUMER, 8, "waits for the copy"),
            Arrow(CONSUMER, 16, SIDE, 20, "waits for step k"),
        ],
    )


DIAGRAMS = {
    "two-streams": two_streams,
    "way-back": way_back,
    "memory-record-stream": record_stream,
    "memory-consumer": consumer,
    "memory-static": static,
}


def main() -> None:
    """Write all of them."""
    for name, draw in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
