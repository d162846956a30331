"""Nested batches: one traversal that rebuilds them.

Rules:

* the batch that comes in is never written to; what does not change is passed on as the same object;
* container types and their extra attributes are kept, or :class:`PrefetchError` says that they cannot be;
* of foreign objects only what they store is looked at: no property of theirs is evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from prefetch._rebuild import cannot_remake, has_own_to, own_copy, stored_attributes, with_attributes
from prefetch._registered import Registered, forgets, registered
from prefetch._search import ATOMS


class Visitor(ABC):
    """What a traversal does with what it finds; one object for each traversal."""

    skip_keys: frozenset[str] = frozenset()
    """Mapping keys and field names whose values are not visited."""

    @abstractmethod
    def leaf(self, tensor: torch.Tensor) -> Any:
        """What takes the place of a tensor."""

    def other(self, obj: Any) -> Any:
        """What takes the place of an object that is no container."""
        return obj

    def made(self, container: Any) -> None:  # noqa: B027 - not every traversal needs it
        """Code of the user's, or of a foreign class, has made this from visited content: it may hold more than that."""


Handler = Callable[[Any, Visitor], Any]


def walk(node: Any, visitor: Visitor) -> Any:
    """The batch with every tensor and foreign object replaced by what ``visitor`` makes of it.

    Raises:
        PrefetchError: A container holds something that changed, but a container of its type cannot be made.
        RecursionError: A container holds itself.
    """
    return _handler(type(node))(node, visitor)


def _choose_handler(kind: type) -> Handler:
    if (known := registered(kind)) is not None:
        return functools.partial(_registered, known)
    if issubclass(kind, ATOMS):
        return _untouched
    if issubclass(kind, torch.Tensor):
        return _leaf if getattr(kind, "to", None) is torch.Tensor.to else _other
    if issubclass(kind, PackedSequence):
        return _packed_sequence
    if has_own_to(kind):
        return _other
    if issubclass(kind, dict):
        return _dict if kind is dict else _dict_subclass
    if issubclass(kind, tuple):
        return _tuple if kind is tuple else _tuple_subclass
    if issubclass(kind, list):
        return _list if kind is list else _list_subclass
    if issubclass(kind, Mapping):
        return _mapping
    if dataclasses.is_dataclass(kind):
        return _by_attributes
    if issubclass(kind, Sequence):
        return _sequence
    return _untouched


# Bounded, since classes can be made at run time and a cached one is kept alive.
_cached_handler = functools.lru_cache(maxsize=1024)(_choose_handler)
_handler: Callable[[type], Handler] = _cached_handler
forgets(_cached_handler.cache_clear)


def _leaf(node: Any, visitor: Visitor) -> Any:
    return visitor.leaf(node)


def _other(node: Any, visitor: Visitor) -> Any:
    return visitor.other(node)


def _untouched(node: Any, visitor: Visitor) -> Any:  # noqa: ARG001 - one signature for all handlers
    return node


def _registered(known: Registered, node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_fields(known.parts(node).items(), visitor)
    if not changed:
        return node
    made = known.remade(node, visited)
    visitor.made(made)
    return made


def _visited_fields(fields: Iterable[tuple[Any, Any]], visitor: Visitor) -> tuple[dict[Any, Any], bool]:
    """The values by key after the visit, and whether any is another object than before."""
    skip = visitor.skip_keys
    visited, changed = {}, False
    for key, value in fields:
        visited[key] = result = value if key in skip else _handler(type(value))(value, visitor)
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


def _list(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    return visited if changed else node


def _tuple(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    return tuple(visited) if changed else node


def _tuple_subclass(node: Any, visitor: Visitor) -> Any:
    kind = type(node)
    if hasattr(kind, "_fields"):
        fields, changed = _visited_fields(zip(kind._fields, tuple.__iter__(node), strict=True), visitor)
        visited = list(fields.values())
    else:
        visited, changed = _visited_items(tuple.__iter__(node), visitor)
    if not changed:
        return node
    try:
        clone = tuple.__new__(kind, visited)  # not its own __new__, which may want anything
    except TypeError:  # a structure sequence, such as what torch.max returns
        return kind(visited)
    return with_attributes(clone, stored_attributes(node))


def _packed_sequence(node: Any, visitor: Visitor) -> Any:
    fields = node._asdict()
    del fields["batch_sizes"]  # torch requires it on the CPU
    visited, changed = _visited_fields(fields.items(), visitor)
    return node._replace(**visited) if changed else node


def _by_attributes(node: Any, visitor: Visitor) -> Any:
    """Visits what an object stores; nothing of its class's own code runs, neither __init__ nor __post_init__."""
    visited, changed = _visited_fields(stored_attributes(node).items(), visitor)
    if not changed:
        return node
    try:
        return with_attributes(object.__new__(type(node)), visited)
    except TypeError as error:  # it is built on a class that has to be made in its own way
        raise cannot_remake(node) from error


# ---------------------------------------------------------------- containers of other classes: made, then compared


def _dict_subclass(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_fields(dict.items(node), visitor)
    if not changed:
        return node
    items = list(visited.items())
    return _first_equal(node, visitor, items, dict.items, [_filled(items), _made(visited)])


def _list_subclass(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(list.__iter__(node), visitor)
    if not changed:
        return node
    items = list(enumerate(visited))
    return _first_equal(
        node, visitor, items, lambda clone: enumerate(list.__iter__(clone)), [_filled(items), _made(visited)]
    )


def _mapping(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_fields(node.items(), visitor)
    if not changed:
        return node
    items = list(visited.items())
    ways = [_stored(visitor), _filled(items), _made(visited)]
    return _first_equal(node, visitor, items, lambda clone: clone.items(), ways)


def _sequence(node: Any, visitor: Visitor) -> Any:
    visited, changed = _visited_items(node, visitor)
    if not changed:
        return node
    items = list(enumerate(visited))
    return _first_equal(node, visitor, items, enumerate, [_stored(visitor), _filled(items), _made(visited)])


Way = Callable[[Any], Any]


def _stored(visitor: Visitor) -> Way:
    """Another one by what it stores: for classes written in Python, the way that keeps everything."""
    return lambda node: _by_attributes(node, visitor)


def _filled(items: list[tuple[Any, Any]]) -> Way:
    """A copy in which the items are set."""

    def fill(node: Any) -> Any:
        clone = own_copy(node)
        for key, value in items:
            clone[key] = value
        return clone

    return fill


def _made(content: Any) -> Way:
    """Another one made from its content, with those of its attributes that this does not give it."""

    def make(node: Any) -> Any:
        clone = type(node)(content)
        own = stored_attributes(clone)
        return with_attributes(
            clone, {name: value for name, value in stored_attributes(node).items() if name not in own}
        )

    return make


def _first_equal(
    node: Any,
    visitor: Visitor,
    items: list[tuple[Any, Any]],
    items_of: Callable[[Any], Iterable[tuple[Any, Any]]],
    ways: list[Way],
) -> Any:
    """What the first of several ways makes that is another object of the same class with these items."""
    reason: Exception | None = None
    for way in ways:
        try:
            clone = way(node)
            if type(clone) is type(node) and clone is not node and _equal(list(items_of(clone)), items):
                reason = None  # its traceback holds this frame
                visitor.made(clone)
                return clone
        except Exception as error:  # noqa: BLE001 - a foreign class may refuse a way by raising anything
            reason = reason or error
    try:
        raise cannot_remake(node) from reason
    finally:
        del reason  # its traceback holds this frame


def _equal(got: list[tuple[Any, Any]], wanted: list[tuple[Any, Any]]) -> bool:
    return len(got) == len(wanted) and all(
        key == wanted_key and _stands_for(value, wanted_value)
        for (key, value), (wanted_key, wanted_value) in zip(got, wanted, strict=True)
    )


def _stands_for(value: Any, wanted: Any) -> bool:
    """Whether a value is the wanted one, or, of a class that makes its values when asked, one like it."""
    if isinstance(wanted, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.device == wanted.device and value.shape == wanted.shape
    return value is wanted or type(value) is type(wanted)
