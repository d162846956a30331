"""NumPy arrays in the place of host tensors."""

from __future__ import annotations

from typing import Any

import torch

from prefetch._batch import Visitor, walk
from prefetch._search import path_of
from prefetch._staging import is_ordinary


def arrays_of(tree: Any) -> Any:
    """The tree with an array in the place of each tensor, in the tensor's memory where that is possible.

    Raises:
        TypeError: NumPy has no arrays of a leaf's type or layout.
        RuntimeError: NumPy is not installed.
    """
    return walk(tree, _Arrays(tree))


class _Arrays(Visitor):
    """The traversal that gives NumPy arrays."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._arrays: dict[int, Any] = {}  # by id; the tree holds the tensors

    def leaf(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._arrays:
            self._arrays[id(tensor)] = self._array(tensor)
        return self._arrays[id(tensor)]

    def _array(self, tensor: torch.Tensor) -> Any:
        try:
            return tensor.numpy(force=True)
        except (TypeError, RuntimeError) as error:
            if is_ordinary(tensor) and isinstance(error, RuntimeError):
                raise  # NumPy is not installed
            remedy = (
                "pass dtype=torch.float32 to to_host() or submit()"
                if is_ordinary(tensor) and tensor.is_floating_point()
                else "make it a dense tensor of a type that NumPy has before the copy"
            )
            path = path_of(self._tree, tensor, "tree")
            raise TypeError(f"{path} ({tensor.dtype}) cannot become a NumPy array ({error}): {remedy}") from error
