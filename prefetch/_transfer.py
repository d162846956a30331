"""One host batch to the device: copy, cast, memory format, transform, in this order, on the current stream."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from prefetch._batch import Visitor, walk
from prefetch._device import current_stream, has_streams, is_host
from prefetch._errors import PrefetchError
from prefetch._mark import DeviceMark
from prefetch._memory import Destination, Layout
from prefetch._placing import Exchange, Placed, Placing, PlacingResults
from prefetch._rebuild import own_copy
from prefetch._search import memory_of, tensors_on
from prefetch._staging import Staging, dense_strides, is_plain

# The dimensions of the tensors to which a memory format can be given, as in torch.empty(memory_format=).
_MEMORY_FORMAT_DIMS = {
    torch.channels_last: (4,),
    torch.channels_last_3d: (5,),
    torch.contiguous_format: (4, 5),
    torch.preserve_format: (),
}


Moved: TypeAlias = tuple[Any, list[torch.Tensor], int]
"""A batch on the device; the tensors made for it, but those in a destination; the bytes that were copied."""


class Transfer:
    """Moves batches to one device; between batches it remembers only whether it has met pageable memory.

    Args:
        device: Where tensors go.
        transform: Called on each moved batch; its result takes the batch's place.
        dtype: Floating-point type to which floating leaves are cast after the copy.
        memory_format: Given to leaves that have the dimensions for it as ``torch.empty`` requires.
        skip_keys: Mapping keys and field names whose values are left as they are.
        pin_memory: Whether leaves that would be copied synchronously are staged.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        transform: Callable[[Any], Any] | None,
        dtype: torch.dtype | None,
        memory_format: torch.memory_format | None,
        skip_keys: frozenset[str],
        pin_memory: bool,
    ) -> None:
        self.device = device
        self.skip_keys = skip_keys
        self.moves = not is_host(device)  # a batch for the CPU stays where the loader made it
        # Without a stream to wait for, an asynchronous copy would read its source after it is gone.
        self.non_blocking = has_streams(device)
        self.converts = dtype is not None or bool(memory_format and _MEMORY_FORMAT_DIMS[memory_format])
        self._dtype = dtype
        self._memory_format = memory_format
        self._transform = transform
        self._staging = Staging(pin_memory=pin_memory)
        self.warnings = self._staging.warnings
        """What has come up that the caller should be told."""

    @property
    def is_identity(self) -> bool:
        """Whether batches come out as they went in."""
        return not self.moves and not self.converts and self._transform is None

    @property
    def pageable_leaves(self) -> int:
        """Tensors in pageable memory that were met so far."""
        return self._staging.pageable_leaves

    @property
    def has_transform(self) -> bool:
        """Whether code of the user's runs on the batches."""
        return self._transform is not None

    def __call__(self, batch: Any, destination: Destination | None = None, timer: DeviceMark | None = None) -> Moved:
        """Move a batch; nothing in ``batch`` is written to.

        Args:
            batch: What the loader gave.
            destination: The memory for the dense tensors of the result. What it has no memory for, tensors of other
                kinds, and those that objects make of themselves, are allocated on the current stream.
            timer: Told when the work on the batch begins, and when it is interrupted by a wait.

        Raises:
            PrefetchError: A container of the batch cannot be rebuilt.
            Exception: Whatever an object's own ``.to`` or the transform raises.
        """
        try:
            # Under inference_mode a loop gets ordinary tensors all the same. Where nothing moves, the loader's own
            # inference tensors are passed on, and only under the mode a transform may write to them.
            if self.moves and torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    return self._moved(batch, destination, timer)
            return self._moved(batch, destination, timer)
        except StopIteration as error:  # would end the user's loop without a word (PEP 479)
            raise RuntimeError("a batch's transform or .to() raised StopIteration") from error

    def _moved(self, batch: Any, destination: Destination | None, timer: DeviceMark | None) -> Moved:
        try:
            placed: Placed = {}
            if destination is not None and self._transform is None:
                placed = self._place(batch, Placing(destination, self.device, self.layout, self.skip_keys), timer)
            elif timer is not None:
                timer.resume()
            move = _Move(self, placed)
            moved = _walked(batch, move)
        finally:
            self._staging.name_pageable(batch)
        if self._transform is None:
            for source, _ in placed.values():
                if source.device != self.device:
                    move.bytes += source.nbytes
            return moved, move.tensors, move.bytes
        with torch.no_grad():
            moved = self._transform(moved)
        if destination is None:
            return moved, tensors_on(moved, self.device), move.bytes
        if timer is not None:
            timer.pause()
        placed = self._place(moved, PlacingResults(destination, self.device), timer)
        moved = _walked(moved, Exchange(placed))
        places = {id(place) for _, place in placed.values()}
        made = [tensor for tensor in tensors_on(moved, self.device) if id(tensor) not in places]
        return moved, made, move.bytes

    def _place(self, batch: Any, placing: Placing, timer: DeviceMark | None) -> Placed:
        """Copy the dense tensors of a batch into a destination.

        The batch is put together afterwards, since what makes its containers may look into the tensors.
        """
        _walked(batch, placing)
        placing.destination.open(current_stream(self.device))
        if timer is not None:
            timer.resume()
        for source, place in placing.placed.values():
            self._fill(place, source)
        return placing.placed

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast and format a leaf: after the copy, so that the narrow type crosses the bus."""
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        memory_format = self._memory_format
        if memory_format and tensor.dim() in _MEMORY_FORMAT_DIMS[memory_format] and is_plain(tensor):
            return tensor.to(dtype=dtype, memory_format=memory_format)
        return tensor.to(dtype)

    def layout(self, source: torch.Tensor) -> Layout:
        """What :meth:`copy` and :meth:`convert` would make of a dense tensor."""
        dtype = self._dtype if self._dtype is not None and source.is_floating_point() else source.dtype
        memory_format = self._memory_format
        if memory_format and source.dim() in _MEMORY_FORMAT_DIMS[memory_format]:
            strides = torch.empty(source.shape, device="meta", memory_format=memory_format).stride()
        else:
            strides = dense_strides(source)
        return Layout(tuple(source.shape), strides, dtype)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A leaf on the device, copied asynchronously where that is possible."""
        if self.non_blocking:
            source = self._staging.prepare(source)
        return source.to(self.device, non_blocking=self.non_blocking)

    def _fill(self, place: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a leaf to its place, and convert it on the way."""
        data = source
        if source.device != self.device:
            data = self._staging.prepare(source)
            if data.dtype != place.dtype or data.stride() != place.stride():
                data = data.to(self.device, non_blocking=True)  # the device converts faster, and while the host goes on
        place.copy_(data.detach() if data.requires_grad else data, non_blocking=True)
        if source.requires_grad:
            place.requires_grad_()

    def look_into(self, obj: Any, moved: Any) -> None:
        """Note pageable memory in an object that has copied itself."""
        if self.non_blocking:
            self._staging.look_into(obj, moved)


def _walked(batch: Any, visitor: Visitor) -> Any:
    try:
        return walk(batch, visitor)
    except RecursionError as error:
        raise PrefetchError("a container in the batch holds itself: give it a method .to(device)") from error


class _Move(Visitor):
    """The traversal that moves one batch; two references to one object stay references to one.

    Args:
        transfer: What is done to leaves.
        placed: Those that have been moved already.
    """

    def __init__(self, transfer: Transfer, placed: Placed) -> None:
        self.skip_keys = transfer.skip_keys
        self.tensors: list[torch.Tensor] = []
        self.bytes = 0
        self._transfer = transfer
        self._places = {id(place) for _, place in placed.values()} if placed else frozenset()
        self._done: dict[int, tuple[Any, Any]] = dict(placed)  # by id, as in Placed

    def leaf(self, source: torch.Tensor) -> Any:
        known = self._done.get(id(source))
        if known is not None:
            return known[1]
        result = self._moved(source)
        self._done[id(source)] = (source, result)
        return result

    def made(self, container: Any) -> None:
        if self._transfer.moves:
            found = tensors_on(container, self._transfer.device)
            self.tensors += [tensor for tensor in found if id(tensor) not in self._places]

    def _moved(self, source: torch.Tensor) -> torch.Tensor:
        transfer = self._transfer
        result = source
        memory: list[torch.Tensor] = []
        if transfer.moves:
            result = transfer.copy(source)
            if result is not source:
                memory = memory_of(result)
                for part in memory:
                    self.bytes += part.nbytes
        if transfer.converts:
            result = transfer.convert(result)
            if result is not source:
                memory = memory_of(result)
        if source.requires_grad and result is not source:
            result = result.detach().requires_grad_()  # a leaf, without the graph of the copy
        self.tensors += memory
        return result

    def other(self, source: Any) -> Any:
        transfer = self._transfer
        if not transfer.moves:
            return source
        known = self._done.get(id(source))
        if known is not None:
            return known[1]
        clone = own_copy(source)  # the .to of some classes works in place
        result = clone.to(transfer.device, **(asynchronous(type(source)) if transfer.non_blocking else {}))
        if result is None:
            result = clone
        transfer.look_into(source, result)
        resident = {id(tensor) for tensor in tensors_on(source, transfer.device)}
        found = tensors_on(result, transfer.device)
        self.tensors += found
        self.bytes += sum(tensor.nbytes for tensor in found if id(tensor) not in resident)
        self._done[id(source)] = (source, result)
        return result


def _asynchronous_copy(kind: type) -> dict[str, bool]:
    """The keyword for ``kind.to`` to copy asynchronously, where it knows the word."""
    try:
        parameters = inspect.signature(kind.to).parameters.values()  # type: ignore[attr-defined]
    except ValueError:  # a method without a signature, of a compiled class
        return {}
    knows = any(p.name == "non_blocking" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {"non_blocking": True} if knows else {}


asynchronous: Callable[[type], dict[str, bool]] = functools.lru_cache(maxsize=256)(_asynchronous_copy)
