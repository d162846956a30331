"""Which of these tests run, what they share, and a clean card for each."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.helpers import COUNT, SIZE
from tests.simulator.fixtures import is_gpu_run


def why_skipped(config: pytest.Config) -> str | None:
    """What these tests lack in this run, if anything."""
    if not is_gpu_run(config):
        return "needs `pytest -m gpu`, in a process without the simulated accelerator"
    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip by a marker, so that no fixture is set up: neither the card nor the simulated accelerator is touched."""
    tests = [item for item in items if item.get_closest_marker("gpu") is not None]
    if tests and (reason := why_skipped(config)) is not None:
        for item in tests:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _clean_card() -> Iterator[None]:
    """No blocks that an earlier test has left to the allocator: which address comes next depends on them."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


@pytest.fixture(scope="session")
def batches() -> list[torch.Tensor]:
    """``COUNT`` pinned batches, in which no number comes twice."""
    return [
        torch.arange(position * SIZE, (position + 1) * SIZE, dtype=torch.int32).pin_memory()
        for position in range(COUNT)
    ]
