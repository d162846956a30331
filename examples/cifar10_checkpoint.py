"""Checkpoints of ``cifar10.py``: all that a run needs to go on in the middle of an epoch as if it had not stopped.

This training draws no random numbers once it has begun. A model that does, with dropout for one, needs the states of
the generators too, those of each process: ``torch.get_rng_state()`` and ``torch.cuda.get_rng_state()``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from cifar10_data import Data
from cifar10_distributed import Group

FORMAT = "cifar10.py, version 1"
# With another value of one of these a run would not be the same run.
SAME = ("epochs", "steps", "batch_size", "workers", "seed", "amp")


class CheckpointError(Exception):
    """There is no checkpoint to go on from, or it is that of another run."""


class Stateful(Protocol):
    """A part of a run: model, optimizer, ..."""

    def state_dict(self) -> dict[str, Any]:
        """What it is now."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Become what it was."""


def description(args: argparse.Namespace, data: Data) -> dict[str, Any]:
    """What a run and its checkpoint must have in common."""
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in SAME}
    return {**options, "training images": len(data.train), "classes": list(data.classes)}


class Checkpoints:
    """The file of a run.

    Args:
        path: Where to save. An older file is replaced when the new one is complete: there is always a whole one.
        run: What :func:`description` says of this run.
        group: The processes of the run. Their loaders differ, all else is the same in each.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], group: Group) -> None:
        self._path, self._group = path, group
        self._run = {"world size": group.size, **run}
        self._read: dict[str, Any] | None = None

    def read(self, path: Path) -> None:
        """Look at the file to go on from.

        Raises:
            CheckpointError: It cannot be used.
        """
        try:
            file = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"must be a file that can be read, got {str(path)!r}: {error.strerror}") from error
        try:
            with file:
                # Not to the device on which it was saved: for every process that would be the first one's.
                checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling raises many kinds
            raise CheckpointError(f"must be a checkpoint of this example, got {str(path)!r}, which is none") from error
        if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
            raise CheckpointError(f"must be a checkpoint of this example, got {str(path)!r}, which is none")
        for name, value in self._run.items():
            other = checkpoint["run"][name]
            if other != value:
                raise CheckpointError(
                    f"must be a checkpoint of a run like this one, with {name} {value}, "
                    f"got {str(path)!r} of one with {name} {other}"
                )
        self._read = checkpoint

    def restore(self, parts: Mapping[str, Stateful], loader: Stateful) -> None:
        """Make the parts, and the loader of this process, what they were in the file that was read, if one was."""
        if self._read is None:
            return
        for name, part in parts.items():
            part.load_state_dict(self._read["parts"][name])
        loader.load_state_dict(self._read["loaders"][self._group.rank])
        self._read = None

    def save(self, parts: Mapping[str, Stateful], loader: Stateful) -> None:
        """Write what the parts, and the loaders of all processes, are now; to be called in each process."""
        loaders = self._group.gather(loader.state_dict())
        if self._group.rank > 0:
            return
        states = {name: part.state_dict() for name, part in parts.items()}
        partial = self._path.with_name(f"{self._path.name}.partial")
        with partial.open("wb") as file:
            torch.save({"format": FORMAT, "run": self._run, "parts": states, "loaders": loaders}, file)
            file.flush()
            # Before it takes the name, or a machine that loses its power could have the name of half a file.
            os.fsync(file.fileno())
        partial.replace(self._path)
