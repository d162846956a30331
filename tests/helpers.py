"""What several test files need."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
SIZE = 1 << 14  # floats in a test batch: large enough to get a block of its own in any allocator
# What holds whoever owns the memory. With memory="static" a caller that keeps batches is warned.
BY_MEMORY = pytest.mark.parametrize("memory", ["record_stream", "consumer", "static"])


def run_python(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in the project's root, where neither an accelerator nor a simulated one is loaded."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False
    )


class Numbered:
    """A loader of pinned batches of ``size`` floats, made when asked for; all elements of batch ``i`` are ``i + 1``."""

    def __init__(self, count: int, size: int = SIZE) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.count):
            yield torch.full((self.size,), float(i + 1)).pin_memory()


def numbered(count: int, size: int = SIZE) -> list[torch.Tensor]:
    """The batches of ``Numbered``, made beforehand."""
    return list(Numbered(count, size))


class Failing:
    """A loader of numbers that raises at some positions and continues after them."""

    def __init__(self, length: int, errors: dict[int, BaseException]) -> None:
        self.length = length
        self.errors = errors

    def __iter__(self) -> FailingIterator:
        return FailingIterator(self)


class FailingIterator(Iterator[Any]):
    """The iterator of ``Failing``: unlike a generator, it survives its own exceptions."""

    def __init__(self, loader: Failing) -> None:
        self.loader = loader
        self.position = -1

    def __next__(self) -> torch.Tensor:
        self.position += 1
        if self.position >= self.loader.length:
            raise StopIteration
        if self.position in self.loader.errors:
            raise self.loader.errors[self.position]
        return torch.tensor([float(self.position)])


def feeding_threads() -> list[threading.Thread]:
    """The background threads of all passes in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "cuda-prefetcher"]


def join_feeding_threads() -> None:
    """Wait until those that have been left behind, and may go on now, are gone."""
    for thread in feeding_threads():
        thread.join(60)
