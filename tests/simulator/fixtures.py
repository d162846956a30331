"""Pytest plugin: the simulated accelerator for tests, clean before and checked after each of them."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
import torch

import tests.simulator as simulator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def is_gpu_run(config: pytest.Config) -> bool:
    """Whether this is ``pytest -m gpu``, the tests on a real GPU: such a process never gets the simulated one."""
    return bool(config.getoption("markexpr") == "gpu")


def why_unavailable() -> str | None:
    """Why there is no simulated accelerator, if so; else it is loaded now."""
    try:
        simulator.load()
    except simulator.SimulatorUnavailable as reason:
        if os.environ.get("REQUIRE_SIMULATOR"):  # in CI a machine without a compiler must not look like success
            raise
        return str(reason)
    return None


@pytest.fixture(scope="session", autouse=True)
def simulator_unavailable(request: pytest.FixtureRequest) -> str | None:
    """Loads it before any test: autograd counts the devices at its first backward pass, and knows no later ones."""
    unavailable = "`pytest -m gpu` keeps it out of the process" if is_gpu_run(request.config) else why_unavailable()
    if unavailable is None:
        torch.ones(1, device="sim") + 1  # the first operator loads large parts of torch, which leaves frames in a cycle
    # Many tests collect garbage first. What is here now is not theirs, and takes longer than most of them.
    gc.collect()
    gc.freeze()
    return unavailable


def _simulated(virtual: bool, unavailable: str | None) -> Iterator[ModuleType]:
    if unavailable is not None:
        pytest.skip(unavailable)
    simulator.reset()
    simulator.configure(virtual=int(virtual))
    yield simulator
    torch.ops.sim.release_all()
    torch.ops.sim.synchronize_all()  # raises what an asynchronous kernel left behind
    races = simulator.races()
    simulator.reset()
    if races:
        pytest.fail("races which the test did not collect:\n" + "\n".join(races))


@pytest.fixture
def sim(simulator_unavailable: str | None) -> Iterator[ModuleType]:
    """The simulated accelerator in threads mode: real asynchrony, gates, wrong data."""
    yield from _simulated(False, simulator_unavailable)


@pytest.fixture
def virtual_sim(simulator_unavailable: str | None) -> Iterator[ModuleType]:
    """The simulated accelerator in virtual mode: exact simulated time, no threads."""
    yield from _simulated(True, simulator_unavailable)


@pytest.fixture(params=["threads", "virtual"])
def any_sim(request: pytest.FixtureRequest, simulator_unavailable: str | None) -> Iterator[ModuleType]:
    """The simulated accelerator in either mode."""
    yield from _simulated(request.param == "virtual", simulator_unavailable)
