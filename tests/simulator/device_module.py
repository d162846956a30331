"""The module torch expects for a device type: ``torch.sim``, the counterpart of ``torch.cuda``."""

from __future__ import annotations

import os
import types
from typing import Any

import torch


class device:  # noqa: N801 -- torch looks for this name
    """Context manager that makes a device the current one."""

    def __init__(self, index: torch.device | str | int | None) -> None:
        self._index = _index_of(index)
        self._before = -1

    def __enter__(self) -> device:
        self._before = torch.accelerator.current_device_index()
        if self._index is not None:
            torch.accelerator.set_device_index(self._index)
        return self

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _index_of(index: torch.device | str | int | None) -> int | None:
    if index is None or isinstance(index, int):
        return index
    return torch.device(index).index


def _is_current_stream_capturing() -> bool:
    # Naming the index spares torch the longer way to it: loops ask this at every step.
    return torch.accelerator.current_stream(torch.accelerator.current_device_index()).is_capturing()


def make(device_count: int) -> types.ModuleType:
    """Build the module; to be registered once, under the backend's name."""
    pid = os.getpid()
    module = types.ModuleType("torch.sim")
    contents: dict[str, Any] = {
        "device": device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: device_count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "get_device_name": lambda device=None: "simulated accelerator (no GPU)",
        "is_current_stream_capturing": _is_current_stream_capturing,
        "synchronize": torch.accelerator.synchronize,
        "manual_seed": torch.ops.sim.manual_seed,
        "manual_seed_all": torch.ops.sim.manual_seed,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        # DataLoader workers seed every device type unless told that they are forks.
        "_is_in_bad_fork": lambda: os.getpid() != pid,
    }
    vars(module).update(contents)
    return module
