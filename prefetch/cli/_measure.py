"""Measuring a device: how long copies and kernels take, by events on its streams."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch

from prefetch._device import current_stream, has_streams, is_host, timed_event
from prefetch.cli._machine import cores

Direction = Literal["to device", "to host"]
Memory = Literal["pinned", "pageable"]

SIZES = tuple(64 * 1024 * 4**i for i in range(7))  # 64 KiB to 256 MiB
_ROUNDS = 5
_ROUND_S = 1e-3  # copies are repeated within a round for at least so long: the clock's own errors are some microseconds
_MOST_COPIES = 32
_LATENCY_ROUNDS = 30

_SMALLEST, _LARGEST = 32, 8192  # of the square matrices that are multiplied to keep a device busy
_PARTS = 20  # a step is made of at least so many products, so that its length can be set to 5 %
_MOST_PRODUCTS = 100_000  # where launching costs the host more than the product the device


class Bandwidth(NamedTuple):
    """What copies of one size reach."""

    nbytes: int
    memory: Memory
    direction: Direction
    gb_per_s: float


class Compute(NamedTuple):
    """A step that keeps the device busy."""

    run: Callable[[], None]
    seconds: float
    """That it was measured to take."""
    description: str


def device_scope(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device current, for code that does not name one."""
    return torch.accelerator.device_index(device.index) if has_streams(device) else contextlib.nullcontext()


@contextlib.contextmanager
def spare_core(device: torch.device) -> Iterator[None]:
    """Where the CPU is the device, leaves one core to whatever else runs, or every operation waits for that."""
    threads = torch.get_num_threads()
    if is_host(device):
        torch.set_num_threads(max(1, min(threads, cores() - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued."""
    if not is_host(device):
        torch.accelerator.synchronize(device)


def device_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """How long the device takes for what ``work`` queues on the current stream; by the clock if it has no streams."""
    synchronize(device)
    if not has_streams(device):
        return host_seconds(device, work)
    stream = current_stream(device)
    start = timed_event(stream, [])
    work()
    end = timed_event(stream, [])
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def host_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """How long it takes by the clock until all that ``work`` does and queues is done."""
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def bandwidths(device: torch.device, sizes: Sequence[int] = SIZES) -> Iterator[list[Bandwidth]]:
    """Measure copies between host and device: for each size, in both directions, from and to both kinds of memory.

    Sizes for which there is not enough memory are left out.
    """
    for nbytes in sizes:
        try:
            on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
            pageable = torch.ones(nbytes, dtype=torch.uint8)  # written to: untouched pages are copied faster
            pinned = pageable.pin_memory()
        except RuntimeError:  # of several kinds: the device, page-locked memory, the host
            return
        row = []
        cells: tuple[tuple[Memory, Direction, torch.Tensor, torch.Tensor], ...] = (
            ("pinned", "to device", on_device, pinned),
            ("pageable", "to device", on_device, pageable),
            ("pinned", "to host", pinned, on_device),
            ("pageable", "to host", pageable, on_device),
        )
        for memory, direction, target, source in cells:
            seconds = _copy_seconds(device, target, source, is_pinned=memory == "pinned")
            row.append(Bandwidth(nbytes, memory, direction, nbytes / seconds / 1e9))
        yield row


def _copy_seconds(device: torch.device, target: torch.Tensor, source: torch.Tensor, *, is_pinned: bool) -> float:
    """Seconds of one copy: the fastest of several rounds, since other work on the machine can only add."""
    # Only the host's clock sees all of a copy from pageable memory, which the host makes in parts.
    clock = device_seconds if is_pinned else host_seconds

    def seconds(count: int) -> float:
        def copy() -> None:
            for _ in range(count):
                target.copy_(source, non_blocking=is_pinned)

        return clock(device, copy) / count

    first = seconds(1)  # which is the warm-up, too
    count = min(_MOST_COPIES, max(1, math.ceil(_ROUND_S / first)))
    return min(seconds(count) for _ in range(_ROUNDS))


def latency_s(device: torch.device) -> float:
    """Seconds of the smallest copy to the device, from pinned memory: the median of several."""
    source = torch.ones(1).pin_memory()
    target = torch.ones(1, device=device)
    return statistics.median(
        device_seconds(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(_LATENCY_ROUNDS)
    )


def calibrated(device: torch.device, seconds: float) -> Compute:
    """A step that keeps the device busy for about so long: products of matrices, of a size that the device takes well.

    Products, because they leave the bandwidth of the device's memory to the copies.
    """
    if seconds <= 0:
        return Compute(lambda: None, 0.0, "nothing")
    size = _SMALLEST
    product = _product(device, size)
    one = _typical(device, product)
    while one < seconds / _PARTS and size < _LARGEST:
        larger = _product(device, 2 * size)
        slower = _typical(device, larger)
        if slower > seconds / 4:
            break
        size, product, one = 2 * size, larger, slower
    count = 1
    for _ in range(3):  # many in a row may take less each than few do
        count = min(_MOST_PRODUCTS, max(1, round(count * seconds / _typical(device, _repeated(product, count)))))
    run = _repeated(product, count)
    return Compute(run, _typical(device, run), f"{count} products of {size} x {size} matrices")


def _product(device: torch.device, size: int) -> Callable[[], object]:
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    result = torch.empty(size, size, device=device)  # given, so that the step does not allocate
    return lambda: torch.mm(left, right, out=result)


def _repeated(work: Callable[[], object], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            work()

    return run


def _typical(device: torch.device, work: Callable[[], object]) -> float:
    """The median of some runs after a first one, which may take any time."""
    work()
    return statistics.median(device_seconds(device, work) for _ in range(5))
