"""What the tests of the command need: a user's module, and the command as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

# What the tests' user has written, as shop.py in the folder where the command is run.
SHOP = """
import time

import torch
from torch.utils.data import DataLoader

print("shop is imported")
steps = []


def pageable():
    return DataLoader(torch.arange(64, dtype=torch.float32).reshape(16, 4), batch_size=4)


def pinned():
    return [{"x": torch.ones(4, 4).pin_memory()} for _ in range(4)]


def with_step():
    return pageable(), step


def step(batch):
    steps.append(batch.device)
    batch.mul(2)


def bad_step(batch):
    raise ArithmeticError("it does not\\n add up")


def bad_factory():
    raise LookupError("no data")


class BadLoader:
    def __iter__(self):
        yield torch.ones(2)
        raise OSError("disk full")


def empty():
    return []


def generator():
    return (torch.ones(2) for _ in range(3))


class Once:
    def __init__(self):
        self.left = iter([torch.ones(2)] * 2)

    def __iter__(self):
        return iter(self.left)


def nothing():
    return None


number = 3
"""


def write_shop(folder: Path) -> None:
    """Put the user's module there."""
    (folder / "shop.py").write_text(SHOP)


def environment() -> dict[str, str]:
    """The environment of a user who has the library installed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """``python -W error -m ...`` in a folder."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", *map(str, arguments)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """``python -m prefetch ...`` in a folder, while it runs."""
    return subprocess.Popen(
        [sys.executable, "-m", "prefetch", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
