"""The search for the tensors that a batch holds, in containers and objects of any class."""

from __future__ import annotations

import array
import functools
import numbers
from collections import UserString, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prefetch._rebuild import stored_attributes
from prefetch._registered import forgets, registered

# Passed on as they are, and not searched. Some are sequences by their interface, but hold no tensors; modules and data
# sets may be referred to from anywhere, but are not part of a batch; functions store all names of their module.
ATOMS = (
    *(str, bytes, bytearray, memoryview, range, array.array, UserString, numbers.Number, type(None)),
    *(type, FunctionType, BuiltinFunctionType, ModuleType, torch.nn.Module, torch.utils.data.Dataset),
)


def tensors_on(node: Any, device: torch.device) -> list[torch.Tensor]:
    """Strided tensors whose memory on ``device`` a batch holds, wherever they are stored in it.

    As :func:`tensors_in` finds them. A tensor can be listed more than once.
    """
    return [memory for tensor in tensors_in(node) if tensor.device == device for memory in memory_of(tensor)]


def tensors_in(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a batch holds, of any layout and class, wherever they are stored in it.

    Containers are searched through their items, objects of any class through their stored attributes. Not found is what
    is hidden from both: in iterators, closures, arrays of objects. A tensor can come more than once.
    """
    seen: dict[int, Any] = {}  # by id; the objects are held, so that no id is used twice
    open_nodes = [node]
    while open_nodes:
        node = open_nodes.pop()
        kind = type(node)
        if kind is torch.Tensor and not node.__dict__:  # of nearly all of them
            yield node
            continue
        if isinstance(node, torch.Tensor):
            yield node
            open_nodes += stored_attributes(node).values()
            continue
        contents_of = _contents(kind)
        if contents_of is not None and id(node) not in seen:
            seen[id(node)] = node
            open_nodes += contents_of(node)


Contents = Callable[[Any], Iterable[Any]]

# Items are taken as the built-in classes keep them, whatever a class built on these makes of its interface.
_STORED_ITEMS: tuple[tuple[type, Contents], ...] = (
    (dict, dict.values),
    (tuple, tuple.__iter__),
    (list, list.__iter__),
    (deque, deque.__iter__),
    (set, set.__iter__),
    (frozenset, frozenset.__iter__),
)


def _choose_contents(kind: type) -> Contents | None:
    """What gives the contents of objects of a class; ``None`` where there are none."""
    if (known := registered(kind)) is not None:
        return lambda node: [*stored_attributes(node).values(), *known.parts(node).values()]
    if issubclass(kind, ATOMS):
        return None
    for base, items in _STORED_ITEMS:
        if kind is base:
            return items
        if issubclass(kind, base):
            return lambda node: [*stored_attributes(node).values(), *items(node)]
    if issubclass(kind, Mapping):
        return lambda node: stored_attributes(node).values() or node.values()
    if issubclass(kind, (Sequence, Set, ValuesView)):
        return lambda node: stored_attributes(node).values() or node  # without attributes it can only be asked
    return lambda node: stored_attributes(node).values()


# Bounded, since classes can be made at run time and a cached one is kept alive.
_cached_contents = functools.lru_cache(maxsize=1024)(_choose_contents)
_contents: Callable[[type], Contents | None] = _cached_contents
forgets(_cached_contents.cache_clear)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that own a tensor's memory on its device, whatever its layout or wrapper class."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        return [tensor]
    if is_traceable_wrapper_subclass(tensor):  # jagged nested tensors, DTensor, quantised tensors
        names, _ = tensor.__tensor_flatten__()
        parts = [part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)]
        # Some stay on the host: jagged ones keep lengths there.
        return [memory for part in parts if part.device == tensor.device for memory in memory_of(part)]
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def path_of(node: Any, wanted: Any, name: str = "batch") -> str:
    """How to get from a batch to an object in it, such as ``batch["image"]``; for something hidden just ``batch``."""
    open_nodes = [(node, name)]
    seen: dict[int, Any] = {}
    while open_nodes:
        node, path = open_nodes.pop()
        if node is wanted:
            return path
        if id(node) not in seen and not isinstance(node, (ATOMS, torch.Tensor)):
            seen[id(node)] = node
            open_nodes += [(value, path + step) for step, value in _steps(node)]
    return name


def _steps(node: Any) -> list[tuple[str, Any]]:
    if (known := registered(type(node))) is not None:
        return [(f".{name}", value) for name, value in known.parts(node).items()]
    if isinstance(node, Mapping):
        return [(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, tuple) and (names := getattr(type(node), "_fields", None)) is not None:
        return [(f".{name}", value) for name, value in zip(names, node, strict=True)]
    if isinstance(node, (Sequence, deque)):
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    return [(f".{name}", value) for name, value in stored_attributes(node).items()]
