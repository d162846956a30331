"""The command line that the examples of frameworks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch

from prefetch import CUDAPrefetcher


class Options(NamedTuple):
    """What an example is told."""

    device: torch.device
    steps: int


def parse(argv: Sequence[str] | None, description: str, *, steps: int, has_index: bool = True) -> Options:
    """The options of a command line, or those of this program's own.

    Args:
        argv: The words after the program's name; ``None``: those with which it was started.
        description: What the example does, for ``--help``.
        steps: How many training steps there are by default.
        has_index: Whether the device may be one of several; some frameworks choose that themselves.

    Raises:
        SystemExit: An option's value cannot be used (status 2).
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", help="default: the current accelerator, or the CPU where there is none")
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help="of training; default: %(default)s")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"argument --steps: must be 1 or more, got {args.steps}")
    try:
        device = CUDAPrefetcher((), args.device).device
    except (ValueError, RuntimeError) as error:
        parser.error(f"argument --device: {error}")
    if not has_index and args.device is not None and (":" in args.device or args.device.isdecimal()):
        parser.error(f"argument --device: must be without a number, which the framework chooses, got {args.device!r}")
    return Options(device, args.steps)
