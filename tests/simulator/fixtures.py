"""Pytest plugin: the simulated accelerator for tests, clean before and checked after each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import tests.simulator as simulator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def _simulated(virtual: bool) -> Iterator[ModuleType]:
    try:
        simulator.load()
    except simulator.SimulatorUnavailable as reason:
        pytest.skip(str(reason))
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
def sim() -> Iterator[ModuleType]:
    """The simulated accelerator in threads mode: real asynchrony, gates, wrong data."""
    yield from _simulated(virtual=False)


@pytest.fixture
def virtual_sim() -> Iterator[ModuleType]:
    """The simulated accelerator in virtual mode: exact simulated time, no threads."""
    yield from _simulated(virtual=True)


@pytest.fixture(params=["threads", "virtual"])
def any_sim(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The simulated accelerator in either mode."""
    yield from _simulated(virtual=request.param == "virtual")
