"""Capturing graphs on the simulated accelerator, for tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

NUMBERS = 1 << 12


def numbers(value: float) -> torch.Tensor:
    """A device tensor full of a number, complete before anything that comes."""
    tensor = torch.full((NUMBERS,), float(value), device="sim")
    torch.accelerator.synchronize()
    return tensor


def pinned(value: float) -> torch.Tensor:
    """A pinned tensor full of a number."""
    return torch.full((NUMBERS,), float(value)).pin_memory()


def capture(stream: torch.Stream, work: Callable[[], Result]) -> tuple[torch.accelerator.Graph, Result]:
    """A graph of what ``work`` does, and what it returns."""
    graph = torch.accelerator.Graph()
    with stream, graph:
        result = work()
    return graph, result


def replay(graph: torch.accelerator.Graph, stream: torch.Stream) -> None:
    """Replay on a stream, and wait for it."""
    with stream:
        graph.replay()
    stream.synchronize()


def in_another_thread(work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def capturing() -> bool:
    """As programs ask."""
    return bool(torch.get_device_module("sim").is_current_stream_capturing())
