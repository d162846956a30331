"""Memory from which the device can copy while the host goes on: page-locked, and dense."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from prefetch._device import HOST, is_host
from prefetch._search import path_of, tensors_on

# Classes whose .to() gives an ordinary tensor. Of others only their own .to knows how to make another one.
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Staging:
    """Brings host tensors into pinned memory, where they are not, on their way to the device.

    The buffers are torch's own: its allocator keeps pinned blocks for the next request, and hands none out again before
    the copies from it are done. So page-locked memory is allocated for the first batches only. [1]_

    Pinned tensors with gaps (columns, every other row) are staged too, in silence, because their loader did its part:
    torch would bring them together in a pageable buffer and wait.

    Args:
        pin_memory: Whether to do so. If not, such leaves are copied as they are, which the host waits for.

    .. [1] PyTorch, ``aten/src/ATen/core/CachingHostAllocator.h``.
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self.pageable_leaves = 0
        self._pins = pin_memory
        self._looks_for_pageable = True
        self._looks_into_objects = True
        self._pageable: torch.Tensor | None = None
        self.warnings: deque[str] = deque()
        """What the caller should be told."""

    def prepare(self, source: torch.Tensor) -> torch.Tensor:
        """The tensor to copy in the place of ``source``: itself, or a staged one of the same size, strides and type."""
        if source.is_pinned():
            if _is_dense(source):
                return source
        elif not _is_in_pageable_memory(source):
            return source
        else:
            self.pageable_leaves += 1
            if self._looks_for_pageable:
                self._note(source)
        return _staged(source) if self._pins and is_ordinary(source) else source

    def look_into(self, obj: Any, moved: Any) -> None:
        """Note pageable memory in the first object that has copied itself, and leave it as it is.

        Args:
            obj: The object.
            moved: Its copy. What this has on the host too was not moved.
        """
        if self._looks_for_pageable and self._looks_into_objects:
            self._looks_into_objects = False
            stayed = {id(tensor) for tensor in tensors_on(moved, HOST)}
            for tensor in tensors_on(obj, HOST):
                if id(tensor) not in stayed and not tensor.is_pinned() and _is_in_pageable_memory(tensor):
                    self._note(tensor)
                    return

    def name_pageable(self, batch: Any) -> None:
        """Make the warning for what was noted in this batch."""
        noted, self._pageable = self._pageable, None
        if noted is not None:
            self.warnings.append(
                f"{path_of(batch, noted)} (shape {tuple(noted.shape)}, {noted.dtype}) is in pageable memory: it is "
                "copied more slowly, on the host's time; build the loader with DataLoader(pin_memory=True), which also "
                "calls the method pin_memory() of classes that it does not know"
            )

    def _note(self, tensor: torch.Tensor) -> None:
        self._looks_for_pageable = False
        self._pageable = tensor


def _is_in_pageable_memory(unpinned: torch.Tensor) -> bool:
    return is_host(unpinned.device) and unpinned.numel() > 0 and is_plain(unpinned)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one block of memory, which its strides describe."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether the copy of a tensor is just another plain tensor of the same shape and type."""
    return type(tensor) in _ORDINARY and is_plain(tensor) and not tensor.is_quantized


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that ``.to`` gives a copy: of a dense tensor its own, of any other what torch thinks best."""
    return tensor.stride() if _is_dense(tensor) else tensor.to("meta").stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order; if not plain, torch copies part by part."""
    if not is_plain(tensor) or tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _staged(source: torch.Tensor) -> torch.Tensor:
    source = source.detach()
    # The device is said, since torch.set_default_device would change it.
    strides = dense_strides(source)
    buffer = torch.empty_strided(source.shape, strides, dtype=source.dtype, device=HOST, pin_memory=True)
    try:
        return buffer.copy_(source)
    except NotImplementedError:  # of types such as uint4 torch copies whole dense blocks only
        return source
