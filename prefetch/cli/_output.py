"""What the commands print: plain text that reads well in a log file, or JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_HERE = str(Path(__file__).parent)
_WIDTH = 100
_BOLD_YELLOW = "\x1b[1;33m"
_PLAIN = "\x1b[0m"


class CommandError(Exception):
    """Ends a command with one line on stderr."""

    status = 2

    def show(self, prog: str) -> None:
        """Print what there is to say, under the command's name."""
        print(f"{prog}: error: {' '.join(str(self).split())}", file=sys.stderr)


class UserCodeError(CommandError):
    """Code of the user's raised an exception: its traceback is shown before the line.

    Args:
        what: The code, as in "the loader".
        cause: The exception.
    """

    status = 1

    def __init__(self, what: str, cause: BaseException) -> None:
        lines = traceback.format_exception_only(type(cause), cause)
        super().__init__(f"{what} raised {lines[-1].strip()}")
        self.cause = cause

    def show(self, prog: str) -> None:
        """See :meth:`CommandError.show`."""
        theirs = _without_ours(self.cause.__traceback__)
        traceback.print_exception(type(self.cause), self.cause, theirs, file=sys.stderr)
        super().show(prog)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame on that is not of these commands; all of it if there is no other."""
    theirs = trace
    while theirs is not None and theirs.tb_frame.f_code.co_filename.startswith(_HERE):
        theirs = theirs.tb_next
    return theirs or trace


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns what the user's code raises into a :class:`UserCodeError`."""
    try:
        yield
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(what, error) from error


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    )


def wrapped(text: str, indent: str = "") -> str:
    """A sentence in lines that fit a terminal, all but the first indented."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def verdict(sentence: str) -> str:
    """A paragraph about the bottleneck; the sentence's first word is it: in colour, if a person is looking."""
    text = wrapped(f"Bottleneck: {sentence}")
    title, word, rest = text.split(":", 2)
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return f"{title}: {_BOLD_YELLOW}{word.strip()}{_PLAIN}:{rest}"


class Report:
    """Prints text as it comes, or at the end one JSON object and nothing else on stdout.

    Args:
        as_json: Whether it is to be JSON. What else Python code prints meanwhile, above all the user's,
            then goes to stderr.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._stdout = sys.stdout
        self._redirect = contextlib.redirect_stdout(sys.stderr)

    def __enter__(self) -> Report:
        if self._as_json:
            self._redirect.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._as_json:
            self._redirect.__exit__(*error)

    def text(self, *paragraphs: str) -> None:
        """Print text, of several paragraphs perhaps, with an empty line before each but the first."""
        if not self._as_json:
            print(*paragraphs, sep="\n\n", flush=True)

    def json(self, result: dict[str, Any]) -> None:
        """Print the object, if it is to be JSON."""
        if self._as_json:
            print(json.dumps(result, indent=1), file=self._stdout)


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[], object]]:
    """A bar on stderr, if that is a terminal and tqdm is installed.

    Yields:
        What is called after each of the ``total`` parts.
    """
    bar_class = _bar_class() if sys.stderr.isatty() else None
    if bar_class is None:
        yield lambda: None
        return
    with bar_class(total=total, desc=what, leave=False) as bar:
        yield bar.update


def _bar_class() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
