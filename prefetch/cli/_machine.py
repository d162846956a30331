"""What the figures depend on: versions, processor and device."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from prefetch import __version__
from prefetch._device import has_streams, is_host

# Kernel modules of GPU drivers that tell their version. PyTorch itself does not know it.
_DRIVERS = ("nvidia", "amdgpu")


def cores() -> int:
    """Processor cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only some systems can restrict a process
        return os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if is_host(device):
        return processor()
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else f"(the {device.type} module of torch knows no name)"


def processor() -> str:
    """The processor's model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, Any]:
    """Everything about the machine that may matter, by name; ``None`` for what is not known."""
    return {
        "cuda_prefetcher": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_built_for": _built_for(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "device": str(device),
        "device_name": device_name(device),
        "device_memory_bytes": None if is_host(device) else _property(device, "total_memory"),
        "driver": None if is_host(device) else _property(device, "driver_version") or _driver(),
        "streams": has_streams(device),
    }


def _built_for() -> str | None:
    """The run-time libraries of accelerators for which torch was built, with their versions."""
    known = {name: getattr(torch.version, name, None) for name in getattr(torch.version, "__all__", ())}
    found = [
        f"{name} {version}"
        for name, version in known.items()
        if isinstance(version, str) and name not in ("__version__", "git_version")
    ]
    return ", ".join(found) or None


def _property(device: torch.device, name: str) -> Any:
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return getattr(properties(device), name, None) if properties is not None else None


def _driver() -> str | None:
    found = []
    for name in _DRIVERS:
        version = Path("/sys/module") / name / "version"
        if version.exists():
            found.append(f"{name} {version.read_text().strip()}")
    return ", ".join(found) or None
