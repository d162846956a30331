"""One traversal of nested batches, for every purpose.

:func:`walk` visits a batch and rebuilds what changed. Copying to the device and finding the memory to protect are
two functions handed to the same traversal, so that no container is known to one and unknown to the other.

Rules:

* the batch that comes in is never written to; what does not change is passed on as the same object;
* container types and their extra attributes are kept, or :class:`PrefetchError` says that they cannot be;
* properties of foreign objects are never evaluated, only what an object stores is looked at.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import numbers
from collections import UserString
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from types import MemberDescriptorType, ModuleType
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prefetch._errors import PrefetchError

# Sequences by their interface, but they hold no tensors.
_ATOMS = (str, bytes, bytearray, memoryview, range, array.array, UserString, numbers.Number, type(None))


class Visitor(Protocol):
    """What a traversal does with what it finds; one object for each traversal."""

    skip_keys: frozenset[str]
    """Mapping keys and field names whose values are not visited."""

    def leaf(self, tensor: torch.Tensor, /) -> Any:
        """What takes the place of a tensor."""

    def other(self, obj: Any, /) -> Any:
        """What takes the place of an object that is no container."""


Handler = Callable[[Any, Visitor], Any]


def walk(node: Any, visitor: Visitor) -> Any:
    """The batch with every tensor and foreign object replaced by what ``visitor`` makes of it.

    Raises:
        PrefetchError: a container holds something that changed, but a container of its type cannot be made.
    """
    return _handler(type(node))(node, visitor)


def tensors_on(node: Any, device: torch.device) -> list[torch.Tensor]:
    """Strided tensors whose memory on ``device`` keeps a batch alive, wherever they are stored in it.

    Foreign objects are searched through their stored attributes. A tensor can be listed more than once.
    """
    collector = _Collector(device)
    walk(node, collector)
    return collector.found


class _Collector:
    __slots__ = ("_device", "_seen", "found")

    skip_keys: frozenset[str] = frozenset()

    def __init__(self, device: torch.device) -> None:
        self.found: list[torch.Tensor] = []
        self._device = device
        self._seen: dict[int, Any] = {}  # by id; the objects are held, so that no id is used twice

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            self.found += memory_of(tensor)
        return tensor

    def other(self, obj: Any) -> Any:
        if id(obj) not in self._seen and not isinstance(obj, (type, ModuleType)):
            self._seen[id(obj)] = obj
            for value in _stored(obj).values():
                walk(value, self)
        return obj


def own_copy(node: Any) -> Any:
    """A shallow copy that can be written to, by item or by attribute, without the original noticing.

    ``copy.copy`` alone is not enough for classes that keep their items in an inner dict or list.
    """
    clone = copy.copy(node)
    if clone is node:
        raise PrefetchError(f"a {_name(node)} in the batch gives itself as its copy, so that it cannot be moved safely")
    stored = _stored(node)
    if getattr(node, "__dict__", None) is node:  # the attribute-access dict: its items are its attributes
        clone.__dict__ = clone
        return clone
    shared = _stored(clone)
    for name, value in stored.items():
        if type(value) in (dict, list) and shared.get(name) is value:
            object.__setattr__(clone, name, _own_structure(value))
    return clone


def _own_structure(value: Any) -> Any:
    if type(value) is dict:
        return {key: _own_structure(item) for key, item in value.items()}
    if type(value) is list:
        return [_own_structure(item) for item in value]
    return value


# ---------------------------------------------------------------- which handler a type gets


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
    return _other


# Bounded, since classes can be made at run time and a cached one is kept alive.
_handler: Callable[[type], Handler] = functools.lru_cache(maxsize=1024)(_choose_handler)


def has_own_to(kind: type) -> bool:
    """Whether a class, and not an instance or a property of it, defines ``.to``."""
    return callable(getattr(kind, "to", None))


def _leaf(node: Any, visitor: Visitor) -> Any:
    return visitor.leaf(node)


def _other(node: Any, visitor: Visitor) -> Any:
    return visitor.other(node)


def _untouched(node: Any, visitor: Visitor) -> Any:  # noqa: ARG001 - one signature for all handlers
    return node


def _changes(items: Iterator[tuple[Any, Any]] | Any, visitor: Visitor) -> tuple[dict[Any, Any], bool]:
    """The items by key after the visit, and whether any is another object than before."""
    skip = visitor.skip_keys
    visited, changed = {}, False
    for key, value in items:
        result = value if key in skip else _handler(type(value))(value, visitor)
        visited[key] = result
        changed = changed or result is not value
    return visited, changed


def _dict(node: Any, visitor: Visitor) -> Any:
    visited, changed = _changes(node.items(), visitor)
    return visited if changed else node


def _mapping(node: Any, visitor: Visitor) -> Any:
    visited, changed = _changes(node.items(), visitor)
    if not changed:
        return node
    return _rebuilt(node, visited.items(), visited, isinstance(node, MutableMapping))


def _packed_sequence(node: Any, visitor: Visitor) -> Any:
    fields = node._asdict()
    del fields["batch_sizes"]  # torch requires it on the CPU
    visited, changed = _changes(fields.items(), visitor)
    return node._replace(**visited) if changed else node


def _named_tuple(node: Any, visitor: Visitor) -> Any:
    visited, changed = _changes(zip(node._fields, node, strict=True), visitor)
    return _with_attributes(type(node)._make(visited.values()), node) if changed else node


def _visited_items(node: Any, visitor: Visitor) -> tuple[list[Any], bool]:
    visited, changed = [], False
    for value in node:
        result = _handler(type(value))(value, visitor)
        visited.append(result)
        changed = changed or result is not value
    return visited, changed


def _list(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    return visited if changed else node


def _tuple(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    if not changed:
        return node
    kind = type(node)
    if kind is tuple:
        return tuple(visited)
    if getattr(kind, "__new__", None) is tuple.__new__:  # its __init__ may want anything: do not call it
        return _with_attributes(tuple.__new__(kind, visited), node)
    return _rebuilt(node, (), visited, False)


def _sequence(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    if not changed:
        return node
    return _rebuilt(node, enumerate(visited), visited, isinstance(node, MutableSequence))


def _dataclass(node: Any, visitor: Visitor) -> Any:
    stored = _stored(node)
    fields = [field.name for field in dataclasses.fields(node) if field.name in stored]
    visited, changed = _changes(((name, stored[name]) for name in fields), visitor)
    if not changed:
        return node
    try:
        clone = object.__new__(type(node))  # neither __init__ nor __post_init__ runs a second time
    except TypeError as error:
        raise _cannot_rebuild(node) from error
    for name, value in (stored | visited).items():
        object.__setattr__(clone, name, value)  # frozen ones too
    return clone


# ---------------------------------------------------------------- rebuilding


def _rebuilt(node: Any, items: Any, content: Any, mutable: bool) -> Any:
    """A container of the type of ``node``: a filled copy where it can be written to, else made from its content."""
    if mutable:
        try:
            clone = own_copy(node)
            for key, value in items:
                clone[key] = value
        except Exception:  # noqa: BLE001 - whatever a foreign class raises: it is not writable after all
            pass
        else:
            return clone
    try:
        return _with_attributes(type(node)(content), node)
    except Exception as error:
        raise _cannot_rebuild(node) from error


def _with_attributes(clone: Any, node: Any) -> Any:
    for name, value in _stored(node).items():
        if name not in _stored(clone):
            object.__setattr__(clone, name, value)
    return clone


def _cannot_rebuild(node: Any) -> PrefetchError:
    return PrefetchError(
        f"a {_name(node)} in the batch holds tensors, but another {_name(node)} with the moved ones cannot be made: "
        "give the class a constructor that takes its content, or a method .to(device)"
    )


def _name(node: Any) -> str:
    return f"{type(node).__module__}.{type(node).__qualname__}"


# ---------------------------------------------------------------- what objects and tensors are made of


def _find_slots(kind: type) -> tuple[tuple[str, MemberDescriptorType], ...]:
    return tuple(
        (name, slot)
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    )


_slots: Callable[[type], tuple[tuple[str, MemberDescriptorType], ...]] = functools.lru_cache(maxsize=1024)(_find_slots)


def _stored(obj: Any) -> dict[str, Any]:
    """The attributes that an object stores, in its ``__dict__`` and its slots; no property is evaluated."""
    try:
        stored = dict(object.__getattribute__(obj, "__dict__"))
    except AttributeError:
        stored = {}
    for name, slot in _slots(type(obj)):
        try:
            stored[name] = slot.__get__(obj)
        except AttributeError:
            continue  # a slot that was never filled
    return stored


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
