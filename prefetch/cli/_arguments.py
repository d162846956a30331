"""Command-line arguments: one line for each mistake, which names the argument, the rule and the value."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from prefetch._device import resolve

Invalid = argparse.ArgumentTypeError


class Parser(argparse.ArgumentParser):
    """A parser that does not print its usage before an error, nor take abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print the one line and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option ``--device``: a ``torch.device``, already resolved."""
    parser.add_argument(
        "--device",
        type=device,
        default="",  # a string, so that it is resolved like one, and only when it is used
        metavar="D",
        help="a device such as cuda:0, or an accelerator's index; default: the current accelerator, or the CPU "
        "where there is none",
    )


def device(text: str) -> torch.device:
    """A device that is there."""
    try:
        return resolve(int(text) if text.isdecimal() else text or None)
    except (ValueError, RuntimeError) as error:
        raise Invalid(str(error)) from error


def number(low: float, *, excluded: bool = False) -> Callable[[str], float]:
    """The type of a finite number from ``low`` upwards.

    Args:
        low: The lowest.
        excluded: Whether that one itself is not allowed.
    """

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low or (excluded and value == low):
            raise Invalid(
                f"must be a number {'above' if excluded else 'from'} {low:g}{_upwards(excluded)}, got {text!r}"
            )
        return value

    return convert


def _upwards(excluded: bool) -> str:
    return "" if excluded else " upwards"


def integer(low: int) -> Callable[[str], int]:
    """The type of an integer from ``low`` upwards."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise Invalid(f"must be an integer from {low} upwards, got {text!r}")
        return value

    return convert


def shape(text: str) -> tuple[int, ...]:
    """The sizes of a tensor, separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise Invalid(f"must be positive integers separated by commas, such as 256,3,224,224, got {text!r}")
    return tuple(map(int, parts))


def dtype(text: str) -> torch.dtype:
    """A type of which tensors can be made."""
    found = getattr(torch, text, None)
    try:
        if isinstance(found, torch.dtype):
            torch.ones(1, dtype=found)
            return found
    except RuntimeError:
        pass
    raise Invalid(f"must be a torch dtype of which tensors can be filled, such as uint8 or bfloat16, got {text!r}")


def reference(text: str) -> tuple[str, str]:
    """A module and the name of something in it."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise Invalid(f"must be a module and a name in it, such as package.module:name, got {text!r}")
    return module, name


def png_file(text: str) -> Path:
    """A file that can be written, and what it takes to draw it."""
    path = Path(text)
    if path.is_dir() or not (os.access(path, os.W_OK) if path.exists() else _is_open(path.parent)):
        raise Invalid(f"must be a file that can be written, got {text!r}")
    try:
        import matplotlib.figure  # noqa: F401 - now, rather than after minutes of measuring
    except ImportError as error:
        raise Invalid('needs matplotlib: pip install "cuda-prefetcher[plot]"') from error
    return path


def _is_open(folder: Path) -> bool:
    """Whether files can be made in it: the super-user is told so of all folders, of read-only ones too."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
