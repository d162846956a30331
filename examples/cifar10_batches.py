"""How the images of ``cifar10.py`` become batches on the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.transforms.v2 import functional as F  # noqa: N812 - its usual name

MEAN = (0.4914, 0.4822, 0.4465)  # of CIFAR-10's training images, channel by channel
STD = (0.2470, 0.2435, 0.2616)

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def training_batches(
    dataset: Dataset[Any], device: torch.device, args: argparse.Namespace, rank: int, world_size: int
) -> DataLoader[Batch]:
    """The loader of one process: each batch of the run is its part of the batches of all, and those are full.

    The sampler deals out one order, which depends on the seed and on the epoch alone, image by image: the batches
    of two processes together have the images of the batch that a single process would have.
    """
    order: DistributedSampler[Any] = DistributedSampler(
        dataset, world_size, rank, shuffle=True, seed=args.seed, drop_last=True
    )
    make: type[DataLoader[Any]] = DataLoader
    if args.checkpoint is not None:
        # It can say where it is in an epoch, and go on from there.
        from torchdata.stateful_dataloader import StatefulDataLoader

        make = StatefulDataLoader
    return _loader(make, dataset, device, args, world_size, sampler=order, drop_last=True)


def evaluation_batches(
    dataset: Dataset[Any], device: torch.device, args: argparse.Namespace, rank: int, world_size: int
) -> DataLoader[Batch]:
    """The loader of one process: its share of the images. Together they have each of them once."""
    count = len(dataset)  # type: ignore[arg-type]
    return _loader(DataLoader, Subset(dataset, range(rank, count, world_size)), device, args, world_size)


def _loader(
    make: type[DataLoader[Any]],
    dataset: Dataset[Any],
    device: torch.device,
    args: argparse.Namespace,
    world_size: int,
    **options: Any,
) -> DataLoader[Batch]:
    return make(
        dataset,
        args.batch_size // world_size,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        # Only from pinned memory can an accelerator copy while all else goes on. The CPU has no use for it.
        pin_memory=device.type != "cpu",
        **options,
    )


class Prepare:
    """What is done to each batch on the device, where it takes next to no time: flip, scale, normalise.

    On an accelerator the prefetcher calls this a few batches earlier than the plain loop does: between other draws from
    the global generator, if it drew from that one. So the flips are drawn before the first batch, into a table. The
    table is on the device: no batch has to wait for a copy of its part.

    Args:
        device: Where the batches are.
        flips: True where an image is to be mirrored, of shape (epochs, images); ``None`` for no flips.
    """

    def __init__(self, device: torch.device, flips: torch.Tensor | None = None) -> None:
        # As tensors on the device: from tuples, normalise() would copy both for every batch, and wait for the copy.
        self._mean = torch.tensor(MEAN, device=device)
        self._std = torch.tensor(STD, device=device)
        self._flips = None if flips is None else flips.to(device)
        self.start(0)

    def start(self, epoch: int, position: int = 0) -> None:
        """To be called before each epoch: an epoch broken off may have prepared batches that nobody saw.

        Args:
            epoch: The row of the table.
            position: How many images of the epoch the loader will leave out, since a run goes on in its middle.
        """
        self._epoch = epoch
        self._position = position

    def __call__(self, batch: Batch) -> Batch:
        """From uint8 to what the network takes."""
        images, labels = batch
        if self._flips is not None:
            end = self._position + len(images)
            flip = self._flips[self._epoch, self._position : end, None, None, None]
            self._position = end
            images = torch.where(flip, F.horizontal_flip(images), images)
        images = F.normalize(F.to_dtype(images, torch.float32, scale=True), self._mean, self._std)
        return images.contiguous(memory_format=torch.channels_last), labels


class PlainLoop:
    """What ``--no-prefetch`` runs: a batch is copied when it is asked for, and the step waits for it."""

    def __init__(self, loader: DataLoader[Batch], device: torch.device, *, transform: Callable[[Batch], Batch]) -> None:
        self._loader, self._device, self._transform = loader, device, transform

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self._loader:
            yield self._transform((images.to(self._device), labels.to(self._device)))

    def set_epoch(self, epoch: int) -> None:
        """Another order for the sampler."""
        self._loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, if it is one that can say so."""
        state: dict[str, Any] = self._loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there in the next loop."""
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]
