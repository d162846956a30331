"""The loops that ``benchmarks.compare`` compares: what people write, what they import, and this library.

Classes of other projects are theirs, unchanged. Some take their streams from ``torch.cuda`` by name; on the simulated
device they are given torch's device-generic ones under that name, for else they would not use streams at all.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from prefetch import CUDAPrefetcher

Make = Callable[[Any, torch.device], Iterable[Any]]


class Peer(NamedTuple):
    """One way to loop over a loader."""

    name: str
    make: Make
    package: str | None = None
    """That must be installed."""
    images_only: bool = False
    """Whether it takes pairs of images and targets, and nothing else."""
    is_ours: bool = False

    @property
    def version(self) -> str | None:
        """Of the package; ``None`` if it is not installed, or there is none."""
        try:
            return None if self.package is None else version(self.package)
        except PackageNotFoundError:
            return None


def moved(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """What a user writes for a batch of their own."""
    if isinstance(batch, dict):
        return {key: tensor.to(device, non_blocking=non_blocking) for key, tensor in batch.items()}
    return tuple(tensor.to(device, non_blocking=non_blocking) for tensor in batch)


class Plain:
    """The plain loop, on the consumer's stream."""

    def __init__(self, loader: Iterable[Any], device: torch.device, *, non_blocking: bool) -> None:
        self._loader, self._device, self._non_blocking = loader, device, non_blocking

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield moved(batch, self._device, non_blocking=self._non_blocking)


class HandWritten:
    """What is usually written by hand (the best known is in NVIDIA's apex): one batch ahead, on a side stream."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._side = torch.Stream(device)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        ahead = self._preload(iterator)
        while ahead is not None:
            consumer = torch.accelerator.current_stream()
            consumer.wait_stream(self._side)
            batch = ahead
            for tensor in batch.values() if isinstance(batch, dict) else batch:
                tensor.record_stream(consumer)
            ahead = self._preload(iterator)
            yield batch

    def _preload(self, iterator: Iterator[Any]) -> Any:
        host = next(iterator, None)
        if host is None:
            return None
        with self._side:
            return moved(host, self._device, non_blocking=True)


def _generic_streams(device: torch.device) -> types.SimpleNamespace:
    """What stands in for ``torch.cuda`` where the device is simulated."""
    return types.SimpleNamespace(
        Stream=lambda **_: torch.Stream(device),
        Event=lambda: torch.Event(device),
        stream=lambda stream: stream,  # which is a context manager itself
        current_stream=lambda device=None: torch.accelerator.current_stream(device),
    )


def timm_loop(loader: Any, device: torch.device) -> Iterable[Any]:
    """timm's; beside the copies it converts and normalises the images on the side stream."""
    prefetcher: Any = importlib.import_module("timm.data.loader").PrefetchLoader(loader, device=device)
    if device.type != "cuda":
        setattr(torch, "npu", _generic_streams(device))  # noqa: B010 - torch's types know no such module
        prefetcher.is_npu = True
    return prefetcher  # type: ignore[no-any-return]


def pyg_loop(loader: Any, device: torch.device) -> Iterable[Any]:
    """PyTorch Geometric's."""
    module = importlib.import_module("torch_geometric.loader.prefetch")
    prefetcher: Any = module.PrefetchLoader(loader, device=device)
    if device.type != "cuda":
        prefetcher.device_helper.is_gpu = True
        prefetcher.device_helper.module = _generic_streams(device)
    return prefetcher  # type: ignore[no-any-return]


class _LikeTorch(types.ModuleType):
    """torch, with other streams under ``cuda``."""

    def __init__(self, cuda: types.SimpleNamespace) -> None:
        super().__init__("torch")
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def tnt_loop(loader: Any, device: torch.device) -> Iterable[Any]:
    """TorchTNT's."""
    # Setuptools has dropped it; TorchTNT imports it for a version check that is not reached here.
    sys.modules.setdefault("pkg_resources", types.ModuleType("pkg_resources"))
    module = importlib.import_module("torchtnt.utils.data.data_prefetcher")
    if device.type == "cuda":
        return module.CudaDataPrefetcher(loader, device, 2)  # type: ignore[no-any-return]
    module.torch = _LikeTorch(_generic_streams(device))  # type: ignore[attr-defined]
    prefetcher = module.CudaDataPrefetcher((), types.SimpleNamespace(type="cuda"), 2)
    prefetcher.data_iterable, prefetcher.device = loader, device
    return prefetcher  # type: ignore[no-any-return]


def accelerate_loop(loader: Any, device: torch.device) -> Iterable[Any]:
    """What ``accelerator.prepare`` makes of a loader, with ``non_blocking=True``."""
    importlib.import_module("accelerate").PartialState(cpu=device.type != "cuda")
    prepare = importlib.import_module("accelerate.data_loader").prepare_data_loader
    return prepare(  # type: ignore[no-any-return]
        loader,
        device=device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        non_blocking=True,
        dispatch_batches=False,  # the one process reads what it trains on, whatever the kind of data set
    )


def lightning_loop(loader: Any, device: torch.device) -> Iterable[Any]:
    """What ``fabric.setup_dataloaders`` makes of a loader."""
    wrappers: Any = importlib.import_module("lightning.fabric.wrappers")
    return wrappers._FabricDataLoader(loader, device=device)  # type: ignore[no-any-return]


PEERS = (
    Peer("batch.to(device)", partial(Plain, non_blocking=False)),
    Peer("batch.to(device, non_blocking=True)", partial(Plain, non_blocking=True)),
    Peer("written by hand, as in apex", HandWritten),
    Peer("timm PrefetchLoader", timm_loop, "timm", images_only=True),
    Peer("PyG PrefetchLoader", pyg_loop, "torch_geometric"),
    Peer("TorchTNT CudaDataPrefetcher, 2", tnt_loop, "torchtnt"),
    Peer("Accelerate, prepared loader", accelerate_loop, "accelerate"),
    Peer("Lightning Fabric, set-up loader", lightning_loop, "lightning"),
    Peer("CUDAPrefetcher(loader)", CUDAPrefetcher, is_ours=True),
    Peer("CUDAPrefetcher, background=True", partial(CUDAPrefetcher, background=True), is_ours=True),
    Peer("… and memory='consumer'", partial(CUDAPrefetcher, background=True, memory="consumer"), is_ours=True),
    Peer("… and memory='static'", partial(CUDAPrefetcher, background=True, memory="static"), is_ours=True),
)
