"""What the commands print: plain text that reads well in a log file, or JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_HERE = str(Path(__file__).parent)
_BOLD_YELLOW = "\x1b[1;33m"
_PLAIN = "\x1b[0m"


class CommandError(Exception):
    """Ends a command with one line on stderr."""

    status = 2

    def show(self, prog: str) -> None:
        """Print what there is to say, under the command's name."""
        print(f"{prog}: error: {self}", file=sys.stderr)


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


def verdict(sentence: str) -> str:
    """A sentence whose first word is the verdict: that one in colour, if a person is looking."""
    word, colon, rest = sentence.partition(":")
    if not colon or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return sentence
    return f"{_BOLD_YELLOW}{word}{_PLAIN}:{rest}"


@contextlib.contextmanager
def json_only(enabled: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Keeps stdout for one JSON object: what else is printed, by the user's code too, goes to stderr.

    Args:
        enabled: Whether JSON is wanted at all.

    Yields:
        What prints the object, if it is wanted.
    """
    stdout = sys.stdout

    def show(result: dict[str, Any]) -> None:
        if enabled:
            print(json.dumps(result, indent=1), file=stdout)

    with contextlib.redirect_stdout(sys.stderr) if enabled else contextlib.nullcontext():
        yield show


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
