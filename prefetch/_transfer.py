"""One host batch to the device: copy, cast, memory format, transform, in this order, on the current stream."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from prefetch._batch import has_own_to, memory_of, own_copy, tensors_on, walk
from prefetch._device import current_stream, is_host
from prefetch._errors import PrefetchWarning

# The dimensions of the tensors to which a memory format can be given, as in torch.empty(memory_format=).
MEMORY_FORMAT_DIMS = {
    torch.channels_last: (4,),
    torch.channels_last_3d: (5,),
    torch.contiguous_format: (4, 5),
    torch.preserve_format: (),
}


class Transfer:
    """Moves batches to one device; has no state between batches but the warning that it has given.

    Args:
        device: Where tensors go.
        transform: Called on each moved batch; its result takes the batch's place.
        dtype: Floating-point type to which floating leaves are cast after the copy.
        memory_format: Given to leaves that have the dimensions for it (:data:`MEMORY_FORMAT_DIMS`).
        skip_keys: Mapping keys and field names whose values are left as they are.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        transform: Callable[[Any], Any] | None,
        dtype: torch.dtype | None,
        memory_format: torch.memory_format | None,
        skip_keys: frozenset[str],
    ) -> None:
        self.device = device
        self._transform = transform
        self._dtype = dtype
        self._memory_format = memory_format
        self._format_dims = () if memory_format is None else MEMORY_FORMAT_DIMS[memory_format]
        self.skip_keys = skip_keys
        self.moves = not is_host(device)  # a batch for the CPU stays where the loader made it
        self.warns = self.moves  # until it has
        self.works_on_leaves = bool(transform or dtype or self._format_dims)

    @property
    def is_identity(self) -> bool:
        """Whether batches come out as they went in."""
        return not self.moves and not self.works_on_leaves

    @property
    def has_transform(self) -> bool:
        """Whether code of the user's runs on the batches."""
        return self._transform is not None

    def __call__(self, batch: Any, producer: torch.Stream | None = None) -> tuple[Any, list[torch.Tensor]]:
        """Move a batch; nothing in ``batch`` is written to.

        Args:
            batch: Nested containers of tensors; see :mod:`prefetch._batch`.
            producer: The stream that made those leaves that are on the device already, where it is not the
                current one.

        Returns:
            The batch on the device, and the tensors whose memory there was made for it.

        Raises:
            PrefetchError: A container of the batch cannot be rebuilt.
            Exception: Whatever an object's own ``.to`` or the transform raises.
        """
        try:
            if torch.is_inference_mode_enabled():  # a loop under it gets ordinary tensors all the same
                with torch.inference_mode(False):
                    return self._moved(batch, producer)
            return self._moved(batch, producer)
        except StopIteration as error:  # would end the user's loop without a word (PEP 479)
            raise RuntimeError("a batch's transform or .to() raised StopIteration") from error

    def _moved(self, batch: Any, producer: torch.Stream | None) -> tuple[Any, list[torch.Tensor]]:
        move = _Move(self, producer)
        moved = walk(batch, move)
        if self._transform is None:
            return moved, move.tensors
        with torch.no_grad():
            moved = self._transform(moved)
        return moved, tensors_on(moved, self.device)

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast and format a leaf: after the copy, so that the narrow type crosses the bus."""
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if self._memory_format and tensor.dim() in self._format_dims and tensor.layout is torch.strided:
            tensor = tensor.contiguous(memory_format=self._memory_format)
        return tensor

    def warn_if_pageable(self, source: torch.Tensor) -> None:
        """Say once that a copy is synchronous, and what to do about it."""
        if source.numel() == 0 or source.layout is not torch.strided or not is_host(source.device):
            return
        self.warns = False
        warnings.warn(
            f"a {source.dtype} tensor of shape {tuple(source.shape)} in the batch is in pageable memory: its copy "
            "blocks the host and cannot overlap with compute; build the loader with DataLoader(pin_memory=True)",
            PrefetchWarning,
            stacklevel=2,
        )


class _Move:
    """The traversal that moves one batch; two references to one object stay references to one."""

    __slots__ = ("_moved", "_producer", "_transfer", "skip_keys", "tensors")

    def __init__(self, transfer: Transfer, producer: torch.Stream | None) -> None:
        self.skip_keys = transfer.skip_keys
        self.tensors: list[torch.Tensor] = []
        self._transfer = transfer
        self._producer = producer
        self._moved: dict[int, tuple[Any, Any]] = {}  # by id; the source is held, so that no id is used twice

    def leaf(self, source: torch.Tensor) -> Any:
        known = self._moved.get(id(source))
        if known is not None:
            return known[1]
        transfer = self._transfer
        result = source.to(transfer.device, non_blocking=True) if transfer.moves else source
        if result is source:
            if transfer.works_on_leaves and self._producer is not None:
                # It is on the device, made on the caller's stream, and about to be read on ours.
                stream = current_stream(transfer.device)
                stream.wait_stream(self._producer)
                source.record_stream(stream)
        elif transfer.warns and not source.is_pinned():
            transfer.warn_if_pageable(source)
        if transfer.works_on_leaves:
            result = transfer.convert(result)
        if result is not source:
            if source.requires_grad:
                result = result.detach().requires_grad_()  # a leaf, without the graph of the copy
            self.tensors += memory_of(result)
        self._moved[id(source)] = (source, result)
        return result

    def other(self, source: Any) -> Any:
        if not self._transfer.moves or not has_own_to(type(source)):
            return source
        known = self._moved.get(id(source))
        if known is not None:
            return known[1]
        clone = own_copy(source)  # the .to of some classes works in place
        result = clone.to(self._transfer.device, **_non_blocking(type(source)))
        if result is None:
            result = clone
        self.tensors += tensors_on(result, self._transfer.device)
        self._moved[id(source)] = (source, result)
        return result


def _knows_non_blocking(kind: type) -> dict[str, bool]:
    """The keyword for ``kind.to`` to copy asynchronously, where it knows the word."""
    try:
        parameters = inspect.signature(kind.to).parameters.values()  # type: ignore[attr-defined]
    except ValueError:  # a method without a signature, of a compiled class
        return {}
    knows = any(p.name == "non_blocking" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {"non_blocking": True} if knows else {}


_non_blocking: Callable[[type], dict[str, bool]] = functools.lru_cache(maxsize=256)(_knows_non_blocking)
