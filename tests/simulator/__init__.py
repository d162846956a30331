"""A simulated accelerator: ``torch.device("sim")`` on a machine without a GPU.

It has what the correctness and the speed of a prefetcher depend on. Two devices, each with asynchronous streams,
events, one engine for copies host -> device and one for device -> host; copies last ``latency_us`` plus bytes over
bandwidth, kernels ``kernel_us`` or what :func:`busy` says. A caching allocator knows streams, honours
``record_stream``, hands out the last freed block first and poisons it (0xFF: NaN, or -1). A pinned allocator keeps
blocks until the copies that use them are over. Copies from pageable memory block. A race detector follows what was
waited for, not when things happened: it reports every access that no wait puts in order, also the host's writes to
pinned memory that a copy still reads. ``torch.accelerator.Graph`` captures the work of a stream, and of those that wait
for it, and replays it on whatever is at its addresses then.

Two modes. *Threads*: every stream has a worker thread, durations are real, wrong programs compute wrong data; gates
(:func:`hold_copies`, :func:`hold_kernel`) stop the device where a test wants it, so that no test races a clock.
*Virtual* (``configure(virtual=1)``): work runs when it is submitted and time is simulated, exact and the same in every
run; wrong programs show as races and as lost time, not as wrong data, except that a copy to pinned memory becomes
visible when the host has waited for it. There each polling query that finds something unfinished takes the host 1 us.

Use the fixtures of :mod:`tests.simulator.fixtures`. Importing this module neither compiles nor registers anything.

Limits
------
* There are no copies between the two devices, no stream priorities; memory is not limited.
* Memory allocated in a capture is new, poisoned then and never by a replay, and nobody else's until the graph is reset,
  whatever pool was named. All other memory, pinned memory included, must be kept by the program; a replay that uses
  some which was given back to the system raises. To wait for anything, or ask whether it has finished, counts as unsafe
  during a capture; for the whole device it is as forbidden as for the capturing stream. Operators that wait for their
  stream (see below) cannot be captured, nor can copies that are not asynchronous. Each replay runs what other streams
  did in the capture on the same streams of the graph's own, so two replays at once are in some order there.
* Races are seen per block of memory: disjoint slices of one tensor used by two streams are reported.
* What one host thread waited for counts as known to all of them, which can hide a race between threads. They share
  one simulated clock too: what two of them spend with :func:`host_busy` adds up.
* The host's own accesses are invisible. Its writes to pinned memory are found by comparing bytes, so writing what was
  there already goes unseen, and so does writing to a buffer into which the device may still be copying. Its reading
  the destination of a copy under way is no race report, only old or poisoned data.
* A blocking or pageable copy waits for its whole stream, as does ``.item()``.
* Operators run their CPU kernels; those with data-dependent shapes, lists as results, views without a kernel of their
  own and sparse arguments wait for the stream. Each operator costs the host some 100 us, the very first one 2 s. There
  is no LSTM or GRU (no CPU kernel does what torch asks of a device). Sparse and nested tensors can be moved and taken
  apart, not computed with.
* ``torch.Generator(device="sim")`` does not exist; random operators draw from a generator of the device's own.
* The device takes precedence over CUDA in ``torch.accelerator``, so a process has the one or the other.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Literal, NamedTuple

import torch
from torch.utils import backend_registration

from tests.simulator.build import SimulatorUnavailable, built_library

__all__ = [
    "DEVICE_COUNT",
    "SimulatorUnavailable",
    "Span",
    "busy",
    "configure",
    "hold_copies",
    "hold_kernel",
    "host_busy",
    "host_time_ns",
    "load",
    "pinned_allocations",
    "pinned_blocks",
    "races",
    "release_copies",
    "release_kernels",
    "reset",
    "setting",
    "trace",
]

DEVICE_COUNT = 2

Direction = Literal["h2d", "d2h"]

_DEFAULTS = {
    "latency_us": 20,
    "h2d_mb_s": 0,
    "d2h_mb_s": 0,
    "kernel_us": 0,
    "poison": 1,
    "race": 1,
    "virtual": 0,
    "trace": 1,
}
_HIGHEST = {"poison": 2, "race": 1, "virtual": 1, "trace": 1}

_load_lock = threading.Lock()
_loaded = False
_loaded_by = 0  # process id


class Span(NamedTuple):
    """Something that ran on a stream; real time in threads mode, simulated time in virtual mode."""

    name: str
    stream: int
    start_ns: int
    end_ns: int


def load() -> None:
    """Make ``torch.device("sim")`` exist in this process, compiling it first if need be.

    Raises:
        SimulatorUnavailable: there is no compiler, or a real accelerator is in use in this process.
    """
    global _loaded, _loaded_by
    with _load_lock:
        if _loaded:
            return
        if torch.cuda.is_available():
            raise SimulatorUnavailable(
                "torch.cuda.is_available(): the simulated and a real GPU never share a process; "
                'hide the real one with CUDA_VISIBLE_DEVICES=""'
            )
        torch.ops.load_library(built_library())
        from tests.simulator import device_module

        backend_registration.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", device_module.make(DEVICE_COUNT))
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        atexit.register(_finish)
        _loaded = True
        _loaded_by = os.getpid()


def _finish() -> None:
    """Let the streams come to an end before the interpreter does: their work uses torch."""
    if os.getpid() == _loaded_by:  # a forked child has no streams
        torch.ops.sim.reset()


def configure(**settings: int) -> None:
    """Change settings; the others stay.

    Args:
        **settings: ``latency_us``, ``h2d_mb_s``, ``d2h_mb_s`` (0: infinite), ``kernel_us``; ``poison`` (0: off,
            1: memory handed out, 2: freed memory too); ``race``, ``virtual``, ``trace`` (0 or 1).

    Raises:
        ValueError: there is no such setting, or it cannot have this value.
    """
    for name, value in settings.items():
        if name not in _DEFAULTS:
            raise ValueError(f"there is no setting {name!r}, only {', '.join(_DEFAULTS)}")
        highest = _HIGHEST.get(name)
        if int(value) != value or value < 0 or (highest is not None and value > highest):
            allowed = "0 or more" if highest is None else f"from 0 to {highest}"
            raise ValueError(f"{name} is a whole number, {allowed}, not {value!r}")
    for name, value in settings.items():
        torch.ops.sim.configure(name, int(value))


def setting(name: str) -> int:
    """The present value of a setting."""
    if name not in _DEFAULTS:
        raise ValueError(f"there is no setting {name!r}, only {', '.join(_DEFAULTS)}")
    return int(torch.ops.sim.setting(name))


def reset() -> None:
    """Everything as after loading: gates open, all work finished, nothing cached, recorded or configured.

    Simulated time goes on: compare times, do not expect them to start at 0. Tensors that are still alive keep counting
    in the memory statistics, and :func:`pinned_allocations` counts on.
    """
    torch.ops.sim.reset()
    configure(**_DEFAULTS)


def busy(us: int) -> None:
    """Queue a kernel of this length on the current stream."""
    torch.ops.sim.busy(us)


def hold_kernel() -> None:
    """Queue a kernel on the current stream that runs until :func:`release_kernels` (threads mode only)."""
    torch.ops.sim.hold_kernel()


def release_kernels() -> None:
    """End all kernels queued by :func:`hold_kernel`."""
    torch.ops.sim.release_kernels()


def hold_copies(direction: Direction) -> None:
    """From now on copies in this direction wait, those under way included (threads mode only)."""
    torch.ops.sim.hold_copies(direction)


def release_copies(direction: Direction) -> None:
    """Let the copies in this direction go on."""
    torch.ops.sim.release_copies(direction)


def races() -> list[str]:
    """Report the races found so far, and forget them."""
    return list(torch.ops.sim.races())


def trace() -> list[Span]:
    """Report what ran since the last call, in the order in which it ended, and forget it."""
    names, numbers = torch.ops.sim.trace()
    return [Span(name, *numbers[3 * i : 3 * i + 3]) for i, name in enumerate(names)]


def host_time_ns() -> int:
    """The host's simulated time: moved by waiting for the device and by :func:`host_busy`, in both modes."""
    return int(torch.ops.sim.host_time_ns())


def host_busy(us: int) -> None:
    """The host works for this long: simulated, and in threads mode for real as well."""
    torch.ops.sim.host_busy(us)


def pinned_allocations() -> int:
    """How many blocks of pinned memory were handed out in this process, new ones and reused ones."""
    return int(torch.ops.sim.pinned_allocations())


def pinned_blocks() -> int:
    """How many blocks of pinned memory were allocated in this process, reused ones counted once."""
    return int(torch.ops.sim.pinned_blocks())
