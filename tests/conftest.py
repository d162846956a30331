"""Shared by every test: no real GPU in a process that may hold the simulated one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest_plugins = ["tests.simulator.fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    """Hide a GPU that is there, unless this is ``pytest -m gpu``; torch has not looked for one yet.

    The simulated accelerator takes precedence over CUDA in torch.accelerator: the two never share a process.
    """
    from tests.simulator.fixtures import is_gpu_run

    if not is_gpu_run(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # As a job in the background has it, and as the programs under test would inherit it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``pytest -m gpu`` imports no other file: a machine with a GPU need not have what the other tests need."""
    from tests.simulator.fixtures import is_gpu_run

    is_other = collection_path.suffix == ".py" and Path(__file__).parent / "gpu" not in collection_path.parents
    return True if is_other and is_gpu_run(config) else None
