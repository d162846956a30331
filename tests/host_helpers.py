"""What the tests of the way back to the host share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SIZE = 1 << 19  # 2 MiB of floats: the simulated allocator's unit for large blocks, so that bytes count tensors
BYTES = 4 * SIZE

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])


def ones(value: float = 1.0) -> torch.Tensor:
    """A large tensor on the device, full of a value."""
    return torch.full((SIZE,), value, device="sim")


def value_of(tensor: torch.Tensor) -> float:
    """The one value that a tensor is full of."""
    (value,) = tensor.unique().tolist()
    return float(value)


def host_us(sim: Any, start_ns: int) -> float:
    """The host's simulated time since then."""
    return float(sim.host_time_ns() - start_ns) / 1e3


class Holder:
    """A class with a .to of its own, which works in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any, non_blocking: bool = False) -> None:
        """As torch.nn.Module does."""
        self.tensor = self.tensor.to(device, non_blocking=non_blocking)
