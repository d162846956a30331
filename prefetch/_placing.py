"""The dense tensors of a batch in a destination: a place for each and, when they are copied, the exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from prefetch._batch import Visitor
from prefetch._device import is_host
from prefetch._memory import Destination, Layout
from prefetch._staging import dense_strides, is_ordinary

Placed: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Leaves and their places, by the leaf's id, which is not used twice while the leaf is held."""


class Placing(Visitor):
    """The traversal that finds the places for the dense tensors of a batch that is to be moved; it changes nothing.

    Args:
        destination: Where they go.
        device: The device of that.
        layout: What a leaf needs there.
        skip_keys: As in the traversal that moves.
    """

    def __init__(
        self,
        destination: Destination,
        device: torch.device,
        layout: Callable[[torch.Tensor], Layout],
        skip_keys: frozenset[str],
    ) -> None:
        self.destination = destination
        self.placed: Placed = {}
        self.skip_keys = skip_keys
        self._device = device
        self._layout = layout

    def leaf(self, source: torch.Tensor) -> Any:
        """Find a place, unless the tensor has one; whatever is no plain block of memory has none."""
        if id(source) not in self.placed and source.numel() and is_ordinary(source) and self._takes(source.device):
            place = self.destination.tensor(self._layout(source))
            if place is not None:
                if source.__dict__ and not is_host(source.device):  # else this very object would be passed on
                    place.__dict__.update(source.__dict__)
                self.placed[id(source)] = (source, place)
        return source

    def _takes(self, device: torch.device) -> bool:
        return is_host(device) or (self.destination.takes_device_tensors and device == self._device)


class PlacingResults(Placing):
    """The same for what a transform has returned: all that is on the device, as it is."""

    def __init__(self, destination: Destination, device: torch.device) -> None:
        super().__init__(destination, device, _own_layout, frozenset())

    def _takes(self, device: torch.device) -> bool:
        return device == self._device


def _own_layout(source: torch.Tensor) -> Layout:
    return Layout(tuple(source.shape), dense_strides(source), source.dtype)


class Exchange(Visitor):
    """The traversal that puts places where the leaves are."""

    def __init__(self, placed: Placed) -> None:
        self._placed = placed

    def leaf(self, source: torch.Tensor) -> Any:
        """The place of a tensor that has one."""
        placed = self._placed.get(id(source))
        return source if placed is None else placed[1]
