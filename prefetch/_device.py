"""Devices and streams: the only module that names a device type.

Everything goes through the device-generic API (``torch.accelerator``, ``torch.Stream``, ``torch.Event``), so that
every accelerator runs the same lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

# Named, not probed for: a failure to make a stream elsewhere is a fault to show, not a capability to work around.
_WITHOUT_STREAMS = frozenset({"mps"})
HOST = torch.device("cpu")
_REMEDY = (
    "pass device=None for the current accelerator (the CPU where there is none), or check the torch build and driver"
)


def resolve(device: torch.device | str | int | None) -> torch.device:
    """The device that an argument ``device`` means, with its index frozen at the caller's current one.

    Args:
        device: ``None`` for the current accelerator, or the CPU where there is none; an index of the current
            accelerator; a ``torch.device`` or its name.

    Raises:
        TypeError: ``device`` is of another type.
        ValueError: ``device`` is no device name, or a negative index.
        RuntimeError: ``device`` is an accelerator that is not there.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return HOST if accelerator is None else _indexed(accelerator)
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device must be a torch.device, a name such as 'cuda:0', an index or None, got {device!r}")
    if isinstance(device, int) and device < 0:
        raise ValueError(f"device must be an index from 0 upwards, got {device!r}")
    try:
        # torch itself takes an index for the current accelerator's, but names CUDA where there is none.
        wanted = None if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must name a device such as 'cpu' or 'cuda:0', got {device!r}") from error
    if wanted is not None and is_host(wanted):
        return HOST
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (wanted is not None and accelerator.type != wanted.type):
        there = "there is no accelerator" if accelerator is None else f"the accelerator is {accelerator.type!r}"
        raise RuntimeError(f"device={device!r} is not available: {there}; {_REMEDY}")
    index = device if isinstance(device, int) else wanted.index if wanted is not None else None
    count = torch.accelerator.device_count()
    if index is not None and index >= count:
        raise RuntimeError(
            f"device={device!r} is not available: {count} {accelerator.type!r} device(s) found; {_REMEDY}"
        )
    return _indexed(accelerator) if index is None else torch.device(accelerator.type, index)


def _indexed(accelerator: torch.device) -> torch.device:
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def is_host(device: torch.device) -> bool:
    """Whether tensors of this device live in host memory."""
    return device.type == "cpu"


def has_streams(device: torch.device) -> bool:
    """Whether work can be queued on side streams of the device."""
    return not is_host(device) and device.type not in _WITHOUT_STREAMS


def current_stream(device: torch.device) -> torch.Stream:
    """The stream of ``device`` on which the calling thread works at this moment."""
    return torch.accelerator.current_stream(device.index)  # for an index torch takes a shorter way


def is_capturing(device: torch.device) -> bool:
    """Whether work of the calling thread, on its current stream of ``device``, goes into a graph instead of running."""
    # There is no device-generic call; backends that have graphs have this one (torch.cuda, for one).
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def timed_event(stream: torch.Stream, spare: list[torch.Event]) -> torch.Event:
    """An event that knows when it happened, recorded on ``stream``: one of ``spare``, for making one takes longer."""
    try:
        event = spare.pop()
    except IndexError:
        event = torch.Event(stream.device, enable_timing=True)
    return stream.record_event(event)


def nvtx_range(device: torch.device) -> Callable[[str], AbstractContextManager[Any]] | None:
    """What makes a range of a name for NVIDIA's own profilers, where the device is theirs."""
    return torch.cuda.nvtx.range if device.type == "cuda" else None  # there is no device-generic call


class on_stream:  # noqa: N801 - a context manager, named like torch's own
    """Make a stream and its device current, and restore exactly what the thread had before.

    One object for each use: ``with stream:`` keeps its memory of what to restore in the stream object, which two
    threads (any version), or two levels (torch 2.7 to 2.9), would overwrite for each other.
    """

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._device: torch.accelerator.device_index | None = None

    def __enter__(self) -> torch.Stream:
        """Returns the stream of that device that was current before."""
        index = self._stream.device.index
        self._before = torch.accelerator.current_stream(index)
        if torch.accelerator.current_device_index() != index:
            # Unlike set_device_index, this restores without waking a device that was never used.
            self._device = torch.accelerator.device_index(index)
            self._device.__enter__()
        torch.accelerator.set_stream(self._stream)
        return self._before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.accelerator.set_stream(self._before)
        if self._device is not None:
            self._device.__exit__(kind, error, trace)


class CallerState:
    """What torch keeps for each thread, taken from the thread that makes this, for another that does its work.

    Grad and inference mode, autocast for the CPU and for ``device``, and the default device are taken over. Where there
    is a ``stream``, it and its device are made current.
    """

    def __init__(self, device: torch.device, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._default_device = torch.get_default_device()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", device.type}
            if torch.is_autocast_enabled(kind)
        ]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        enter = self._stack.enter_context
        if self._stream is not None:
            enter(on_stream(self._stream))
        if not is_host(self._default_device):  # else nothing was set, and setting it slows every call down
            enter(self._default_device)
        for kind, dtype, cache in self._autocast:
            enter(torch.autocast(kind, dtype, cache_enabled=cache))
        enter(torch.inference_mode(self._is_inference))
        enter(torch.set_grad_enabled(self._is_grad_enabled))

    def __exit__(self, *error: object) -> None:
        self._stack.close()
