"""The options of ``cifar10.py``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """What argparse makes an option's value with: an integer within bounds."""
    rule = f"must be an integer from {low} upwards" if high is None else f"must be an integer from {low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
        return value

    return convert


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description="Train a small ResNet on images that a CUDAPrefetcher brings in.")
    add = options.add_argument
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="root of torchvision.datasets.CIFAR10 (downloaded into it when it is not there), or a folder of images "
        "as train/<class>/* and test/<class>/*; without it images are generated",
    )
    add(
        "--device",
        help="default: the current accelerator, or the CPU where there is none; under torchrun without a number, as "
        '"cuda": each process has its own',
    )
    add("--epochs", type=integer(1), default=5, metavar="N", help="default: %(default)s")
    add("--steps", type=integer(1), metavar="N", help="end after so many steps, if the epochs have more")
    add(
        "--batch-size",
        type=integer(1),
        default=64,
        metavar="N",
        help="of all processes together, which share each batch equally; default: %(default)s",
    )
    add(
        "--workers",
        type=integer(0),
        metavar="N",
        help="processes that load, for each one that trains; default: 2, on the CPU 0",
    )
    add("--no-prefetch", dest="prefetch", action="store_false", help="the plain loop, for comparison: same results")
    add("--amp", action="store_true", help="compute in bfloat16 where autocast does so")
    add("--seed", type=integer(0, 2**63 - 1), default=0, metavar="N", help="default: %(default)s")
    add("--plot", type=Path, default=Path("cifar10.png"), metavar="PATH", help="the PNG; default: %(default)s")
    add(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="save to this file, which is replaced, in the middle of epochs too (needs torchdata)",
    )
    add(
        "--checkpoint-every",
        type=integer(1),
        default=100,
        metavar="N",
        help="save after so many steps, and at the end; default: %(default)s",
    )
    add(
        "--resume",
        type=Path,
        metavar="PATH",
        help="go on from this checkpoint of a run with the same options; it is replaced too, unless --checkpoint names "
        "another file",
    )
    return options


def can_write(path: Path) -> bool:
    """Whether there can be such a file; one that is there is replaced."""
    try:
        tempfile.TemporaryFile(dir=path.parent).close()  # the super-user is told that every folder can be written to
    except OSError:
        return False
    return not path.is_dir() and (not path.exists() or os.access(path, os.W_OK))


def check(options: argparse.ArgumentParser, args: argparse.Namespace, device: torch.device, processes: int) -> None:
    """Fill in the defaults that depend on others, and look for what argparse does not see.

    Args:
        options: The parser, which ends the program if a value cannot be used.
        args: What it parsed.
        device: That of this process.
        processes: How many train together.
    """
    if args.amp and not torch.amp.is_autocast_available(device.type):
        options.error(f"argument --amp: must be left out where there is no autocast, got device {str(device)!r}")
    if args.batch_size % processes:
        options.error(
            f"argument --batch-size: must be a multiple of the number of processes, {processes}, got {args.batch_size}"
        )
    if args.workers is None:
        args.workers = 0 if device.type == "cpu" else 2
    saving = "--checkpoint"
    if args.checkpoint is None:
        args.checkpoint, saving = args.resume, "--resume"
    for name, path in (("--plot", args.plot), (saving, args.checkpoint)):
        if path is not None and not can_write(path):
            options.error(f"argument {name}: must be a file that can be written, got {str(path)!r}")
    if args.checkpoint is not None and args.checkpoint.resolve() == args.plot.resolve():
        options.error(f"argument --plot: must be another file than that of {saving}, got {str(args.plot)!r}")
    if args.checkpoint is not None and importlib.util.find_spec("torchdata") is None:
        # Its loader knows where it is in an epoch; PyTorch's does not.
        options.error(f"argument {saving}: must be left out where torchdata is not installed (pip install torchdata)")
