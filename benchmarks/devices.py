"""The device that ``benchmarks.compare`` measures on: a GPU where there is one, else the simulated accelerator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from benchmarks.harness import SIMULATED, load_simulator
from prefetch.cli._machine import device_name
from prefetch.cli._measure import bandwidths, calibrated
from tests import simulator

SIMULATED_BYTES = 4 << 20  # of a batch; the simulated device copies as fast as makes this last as long as it should
SIMULATED_LATENCY_US = 10
PROBE_BYTES = 64 << 20


class Device(ABC):
    """Where batches go, and how to keep it busy.

    Attributes:
        device: Of torch.
        label: What a reader must know about figures of it.
    """

    device: torch.device
    label: str

    @abstractmethod
    def batch_bytes(self, copy_ms: float) -> int:
        """The size of a batch whose copy takes so long, from now on."""

    @abstractmethod
    def compute(self, ms: float) -> Callable[[], None]:
        """A step that keeps the current stream busy for about so long."""

    @abstractmethod
    def only_host_counts(self) -> None:
        """From now on, where that is possible, neither copies nor kernels take any time."""


class SimulatedDevice(Device):
    """The accelerator of the tests, in real time: copies and kernels last as long in threads of their own."""

    def __init__(self) -> None:
        load_simulator(virtual=False)
        self.device = torch.device("sim", 0)
        self.label = SIMULATED

    def batch_bytes(self, copy_ms: float) -> int:
        """See :meth:`Device.batch_bytes`."""
        simulator.configure(
            latency_us=SIMULATED_LATENCY_US, h2d_mb_s=round(SIMULATED_BYTES / copy_ms / 1e3) if copy_ms else 0
        )
        return SIMULATED_BYTES

    def compute(self, ms: float) -> Callable[[], None]:
        """See :meth:`Device.compute`."""
        return lambda: simulator.busy(round(ms * 1e3))

    def only_host_counts(self) -> None:
        """See :meth:`Device.only_host_counts`."""
        load_simulator(virtual=True)
        simulator.configure(latency_us=0)


class RealDevice(Device):
    """The current accelerator. Its copies take what they take: batches are as large as that asks for."""

    def __init__(self) -> None:
        index = torch.accelerator.current_device_index()
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        assert accelerator is not None
        self.device = torch.device(accelerator.type, index)
        self.label = device_name(self.device)
        rows = next(bandwidths(self.device, (PROBE_BYTES,)))
        self._gb_per_s = next(row for row in rows if (row.memory, row.direction) == ("pinned", "to device")).gb_per_s

    def batch_bytes(self, copy_ms: float) -> int:
        """See :meth:`Device.batch_bytes`."""
        return round(self._gb_per_s * copy_ms * 1e6)

    def compute(self, ms: float) -> Callable[[], None]:
        """See :meth:`Device.compute`."""
        return calibrated(self.device, ms / 1e3).run

    def only_host_counts(self) -> None:
        """See :meth:`Device.only_host_counts`: small copies, which the host queues more slowly than they run."""


def measured_device() -> Device:
    """The one to measure on. The simulated one and a real one never share a process."""
    return RealDevice() if torch.accelerator.is_available() else SimulatedDevice()
