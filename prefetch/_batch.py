"""Nested batches: one traversal that rebuilds them, and the search for the memory that they hold.

Rules:

* the batch that comes in is never written to; what does not change is passed on as the same object;
* container types and their extra attributes are kept, or :class:`PrefetchError` says that they cannot be;
* of foreign objects only what they store is looked at: no property of theirs is evaluated.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import numbers
from collections import UserString
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence, Set
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prefetch._rebuild import refilled, remade, stored_attributes, with_attributes, with_fields

# Some are sequences by their interface, but they hold no tensors.
_ATOMS = (str, bytes, bytearray, memoryview, range, array.array, UserString, numbers.Number, type(None))


class Visitor(Protocol):
    """What a traversal does with what it finds; one object for each traversal."""

    skip_keys: frozenset[str]
    """Mapping keys and field names whose values are not visited."""

    def leaf(self, tensor: torch.Tensor, /) -> Any:
        """What takes the place of a tensor."""

    def other(self, obj: Any, /) -> Any:
        """What takes the place of an object that is no container."""

    def skipped(self, value: Any, /) -> None:
        """A value under one of ``skip_keys`` was passed by."""


Handler = Callable[[Any, Visitor], Any]


def walk(node: Any, visitor: Visitor) -> Any:
    """The batch with every tensor and foreign object replaced by what ``visitor`` makes of it.

    Raises:
        PrefetchError: A container holds something that changed, but a container of its type cannot be made.
        RecursionError: A container holds itself.
    """
    return _handler(type(node))(node, visitor)


def has_own_to(kind: type) -> bool:
    """Whether a class, and not an instance or a property of it, defines ``.to``."""
    return callable(getattr(kind, "to", None))


# ---------------------------------------------------------------- the search


def tensors_on(node: Any, device: torch.device) -> list[torch.Tensor]:
    """Strided tensors whose memory on ``device`` a batch holds, wherever they are stored in it.

    Objects of any class are searched through their stored attributes, and containers through their items. A tensor can
    be listed more than once.
    """
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # by id; the objects are held, so that no id is used twice
    open_nodes = [node]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, torch.Tensor):
            if node.device == device:
                found += memory_of(node)
        elif id(node) not in seen and not isinstance(node, _ATOMS):
            seen[id(node)] = node
            open_nodes += _contents(node)
    return found


def _contents(node: Any) -> Iterable[Any]:
    kind = type(node)
    if kind is tuple or kind is list:
        return node  # type: ignore[no-any-return]
    if kind is dict:
        return node.values()  # type: ignore[no-any-return]
    if isinstance(node, (type, ModuleType)):
        return ()
    contents = list(stored_attributes(node).values())
    if not has_own_to(kind):  # those are no containers: asking for items might compute them
        if isinstance(node, Mapping):
            contents += node.values()
        elif isinstance(node, (Sequence, Set)):
            contents += node
    return contents


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that own a tensor's memory on its device, whatever its layout or wrapper class."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        return [tensor]
    if is_traceable_wrapper_subclass(tensor):  # jagged nested tensors, DTensor, quantised tensors
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]  # some stay on the host: jagged ones keep lengths there
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


# ---------------------------------------------------------------- the traversal: which handler a type gets


def _choose_handler(kind: type) -> Handler:
    if issubclass(kind, torch.Tensor):
        return _leaf
    if issubclass(kind, _ATOMS):
        return _untouched
    if issubclass(kind, PackedSequence):
        return _packed_sequence
    if has_own_to(kind):
        return _other
    if issubclass(kind, Mapping):
        return _dict if kind is dict else _mapping
    if issubclass(kind, tuple):
        return _named_tuple if hasattr(kind, "_fields") else _tuple
    if dataclasses.is_dataclass(kind):
        return _dataclass
    if issubclass(kind, Sequence):
        return _list if kind is list else _sequence
    return _untouched


# Bounded, since classes can be made at run time and a cached one is kept alive.
_handler: Callable[[type], Handler] = functools.lru_cache(maxsize=1024)(_choose_handler)


def _leaf(node: Any, visitor: Visitor) -> Any:
    return visitor.leaf(node)


def _other(node: Any, visitor: Visitor) -> Any:
    return visitor.other(node)


def _untouched(node: Any, visitor: Visitor) -> Any:  # noqa: ARG001 - one signature for all handlers
    return node


def _visited_fields(fields: Iterable[tuple[Any, Any]], visitor: Visitor) -> tuple[dict[Any, Any], bool]:
    """The values by key after the visit, and whether any is another object than before."""
    skip = visitor.skip_keys
    visited, changed = {}, False
    for key, value in fields:
        if key in skip:
            visitor.skipped(value)
            visited[key] = value
        else:
            visited[key] = result = _handler(type(value))(value, visitor)
            changed = changed or result is not value
    return visited, changed


def _visited_items(items: Iterable[Any], visitor: Visitor) -> tuple[list[Any], bool]:
    """The same without keys."""
    visited, changed = [], False
    for value in items:
        result = _handler(type(value))(value, visitor)
        visited.append(result)
        changed = changed or result is not value
    return visited, changed


def _dict(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_fields(node.items(), visitor)
    return visited if changed else node


def _mapping(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_fields(node.items(), visitor)
    if not changed:
        return node
    return _filled_or_made(node, visited.items(), visited, MutableMapping)


def _list(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    return visited if changed else node


def _sequence(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    if not changed:
        return node
    return _filled_or_made(node, enumerate(visited), visited, MutableSequence)


def _filled_or_made(node: Any, items: Iterable[tuple[Any, Any]], content: Any, mutable: type) -> Any:
    if not isinstance(node, mutable):
        return remade(node, content)
    try:
        return refilled(node, items)
    except Exception:  # noqa: BLE001 - a class that calls itself mutable may refuse in any way; remade() chains to this
        return remade(node, content)


def _tuple(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    if not changed:
        return node
    kind = type(node)
    if kind is tuple:
        return tuple(visited)
    if getattr(kind, "__new__", None) is tuple.__new__:  # its __init__ may want anything: do not call it
        return with_attributes(tuple.__new__(kind, visited), node)
    return remade(node, visited)


def _named_tuple(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_fields(zip(node._fields, node, strict=True), visitor)
    return with_attributes(type(node)._make(visited.values()), node) if changed else node


def _packed_sequence(node: Any, visitor: Visitor) -> Any:
    fields = node._asdict()
    del fields["batch_sizes"]  # torch requires it on the CPU
    visited, changed = _visited_fields(fields.items(), visitor)
    return node._replace(**visited) if changed else node


def _dataclass(node: Any, visitor: Visitor) -> Any:
    stored = stored_attributes(node)
    fields = [field.name for field in dataclasses.fields(node) if field.name in stored]
    visited, changed = _visited_fields(((name, stored[name]) for name in fields), visitor)
    return with_fields(node, visited) if changed else node
