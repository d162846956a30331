"""Two directives whose content is made when the pages are built, so that it cannot differ from what it shows.

``{results} NAME`` gives the table of ``benchmarks/results/NAME.json``, and the machine that it was measured on.
``{command} MODULE ARGUMENTS`` gives what ``python -m MODULE ARGUMENTS --help`` prints.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Results(SphinxDirective):
    """A table of measured figures, with the record of the machine above it.

    A file has ``machine`` and ``rows``; and, where they matter, ``versions`` of packages and ``ms_a_step``, by what was
    measured and by its parts.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Read the file, and have the Markdown parsed as if it stood on the page."""
        path = RESULTS / f"{self.arguments[0]}.json"
        if not path.is_file():
            raise self.error(f"there are no results named {self.arguments[0]!r}: {path.relative_to(ROOT)} is not there")
        self.env.note_dependency(str(path))
        measured = json.loads(path.read_text())
        text = [record(measured["machine"] | measured.get("versions", {})), "", *table(measured["rows"])]
        if steps := measured.get("ms_a_step"):
            text += ["", "Milliseconds that each part of a step took by itself:", ""]
            text += table([{"": title} | parts for title, parts in steps.items()])
        container = nodes.container(classes=["results"])
        self.state.nested_parse(StringList(text, str(path)), self.content_offset, container)
        return [container]


def record(machine: dict[str, Any]) -> str:
    """The machine in one sentence, which begins with whether the device was a simulated one."""
    device, *others = (f"{name} {value}" if name != "device" else str(value) for name, value in machine.items())
    is_simulated = str(machine.get("device", "")).startswith("simulated")
    return f"{'**Simulated**' if is_simulated else 'Measured'} on: {'; '.join([device, *others])}."


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a Markdown table; a row may lack some of the columns."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    # A hyphen at its end aligns a column to the right: figures are, names are not.
    columns = [[row[head] for row in rows if row.get(head) is not None] for head in heads]
    lines = [heads, ["---:" if all(map(is_figure, column)) else "---" for column in columns]]
    whole = [all(is_figure(value) and value == int(value) for value in column) for column in columns]
    lines += [[cell(row.get(head), is_whole=here) for head, here in zip(heads, whole, strict=True)] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def is_figure(value: Any) -> bool:
    """Whether it is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(value: Any, *, is_whole: bool) -> str:
    """A figure with three digits or two decimals, or with none in a column of whole ones; or text, as it is."""
    if value is None:
        return "-"
    if is_figure(value):
        return f"{value:,.{0 if is_whole or abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", str(value))  # Markdown would see marks in it


class Command(SphinxDirective):
    """The help of a command, as a terminal of 88 columns shows it."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Ask the command itself."""
        arguments = [sys.executable, "-m", *" ".join(self.arguments).split(), "--help"]
        environment = os.environ | {"COLUMNS": "88", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
        asked = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
        if asked.returncode:
            raise self.error(f"{' '.join(arguments)} failed: {asked.stderr}")
        block = nodes.literal_block(asked.stdout, asked.stdout)
        block["language"] = "text"
        return [block]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("results", Results)
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
