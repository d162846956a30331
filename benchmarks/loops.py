"""The loops that ``benchmarks.real_time`` compares, each over batches of (uint8 images, int64 targets)."""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from prefetch import CUDAPrefetcher

Batch = tuple[torch.Tensor, torch.Tensor]
Loop = Callable[[Iterable[Batch]], Iterable[Batch]]


class Plain:
    """The plain loop, on the consumer's stream."""

    def __init__(self, loader: Iterable[Batch], *, non_blocking: bool) -> None:
        self._loader = loader
        self._non_blocking = non_blocking

    def __iter__(self) -> Iterator[Batch]:
        for images, targets in self._loader:
            yield (
                images.to("sim", non_blocking=self._non_blocking),
                targets.to("sim", non_blocking=self._non_blocking),
            )


class HandWritten:
    """What is usually written by hand (the best known is in NVIDIA's apex): one batch ahead, on a side stream."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._loader = loader
        self._side = torch.Stream("sim")

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self._loader)
        ahead = self._preload(iterator)
        while ahead is not None:
            consumer = torch.accelerator.current_stream()
            consumer.wait_stream(self._side)
            batch = ahead
            for tensor in batch:
                tensor.record_stream(consumer)
            ahead = self._preload(iterator)
            yield batch

    def _preload(self, iterator: Iterator[Batch]) -> Batch | None:
        host = next(iterator, None)
        if host is None:
            return None
        with self._side:
            return host[0].to("sim", non_blocking=True), host[1].to("sim", non_blocking=True)


def timm_loop(loader: Iterable[Batch]) -> Iterable[Batch]:
    """The class of timm itself, unchanged; beside the copies it converts and normalises the images on the side stream.

    It takes its streams from ``torch.cuda`` or ``torch.npu``, by the device's name. So that it uses streams on a device
    named "sim" too, it is told that this is the second kind, and the three names that it looks up in ``torch.npu`` are
    made to mean torch's device-generic streams.
    """
    names = types.SimpleNamespace(
        Stream=torch.Stream,
        stream=lambda stream: stream,  # which is a context manager itself
        current_stream=lambda device: torch.accelerator.current_stream(device),
    )
    setattr(torch, "npu", names)  # noqa: B010 - torch's types know no such module
    prefetcher: Any = importlib.import_module("timm.data.loader").PrefetchLoader(loader, device=torch.device("sim"))
    prefetcher.is_npu = True
    return prefetcher  # type: ignore[no-any-return]


def all_loops() -> dict[str, Loop]:
    """By name; timm's only where it is installed."""
    loops: dict[str, Loop] = {
        "batch.to(device)": partial(Plain, non_blocking=False),
        "batch.to(device, non_blocking=True)": partial(Plain, non_blocking=True),
        "written by hand, as in apex": HandWritten,
    }
    if importlib.util.find_spec("timm") is None:
        print("timm is not installed (pip install timm): its row is left out")
    else:
        loops["timm's PrefetchLoader"] = timm_loop
    for background in (False, True):
        for ahead in (1, 2):
            name = f"CUDAPrefetcher, prefetch_batches={ahead}, background={background}"
            loops[name] = partial(CUDAPrefetcher, device="sim", prefetch_batches=ahead, background=background)
    for memory in ("consumer", "static"):
        loops[f"CUDAPrefetcher, {memory}, prefetch_batches=2, background=True"] = partial(
            CUDAPrefetcher, device="sim", memory=memory, background=True
        )
    return loops
