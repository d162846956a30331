"""Making objects anew with some of their content replaced, without running or trusting their own code too much.

Nothing here writes to the original, and no property of it is evaluated.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from types import MemberDescriptorType
from typing import Any

from prefetch._errors import PrefetchError


def stored_attributes(obj: Any) -> dict[str, Any]:
    """The attributes that an object stores, in its ``__dict__`` and its slots."""
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


def _find_slots(kind: type) -> tuple[tuple[str, MemberDescriptorType], ...]:
    return tuple(
        (name, slot)
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    )


# Bounded, since classes can be made at run time and a cached one is kept alive.
_slots: Callable[[type], tuple[tuple[str, MemberDescriptorType], ...]] = functools.lru_cache(maxsize=1024)(_find_slots)


def own_copy(node: Any) -> Any:
    """A shallow copy that can be written to, by item or by attribute, without the original noticing.

    ``copy.copy`` alone is not enough for classes that keep their items in an inner dict or list.

    Raises:
        PrefetchError: The object gives itself as its copy.
    """
    clone = copy.copy(node)
    if clone is node:
        raise PrefetchError(f"a {_name(node)} in the batch gives itself as its copy, so that it cannot be moved safely")
    if getattr(node, "__dict__", None) is node:  # the attribute-access dict: its items are its attributes
        clone.__dict__ = clone
        return clone
    shared = stored_attributes(clone)
    for name, value in stored_attributes(node).items():
        if type(value) in (dict, list) and shared.get(name) is value:
            object.__setattr__(clone, name, _own_structure(value))
    return clone


def _own_structure(value: Any) -> Any:
    if type(value) is dict:
        return {key: _own_structure(item) for key, item in value.items()}
    if type(value) is list:
        return [_own_structure(item) for item in value]
    return value


def refilled(node: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A copy of a mutable container in which ``items`` are set.

    Raises:
        Exception: Whatever a foreign class raises when it is not writable after all.
    """
    clone = own_copy(node)
    for key, value in items:
        clone[key] = value
    return clone


def remade(node: Any, content: Any) -> Any:
    """Another container of the type of ``node``, made from its content, with the attributes of ``node``.

    Raises:
        PrefetchError: The type cannot be made so.
    """
    try:
        return with_attributes(type(node)(content), node)
    except Exception as error:
        raise PrefetchError(
            f"a {_name(node)} in the batch holds tensors, but another {_name(node)} with the moved ones cannot be "
            "made: give the class a constructor that takes its content, or a method .to(device)"
        ) from error


def with_attributes(clone: Any, node: Any) -> Any:
    """``clone``, with those stored attributes of ``node`` that it does not have itself."""
    own = stored_attributes(clone)
    for name, value in stored_attributes(node).items():
        if name not in own:
            object.__setattr__(clone, name, value)
    return clone


def with_fields(node: Any, fields: dict[str, Any]) -> Any:
    """Another object with the stored attributes of ``node``, but for ``fields``; no code of its class runs.

    Raises:
        PrefetchError: The class is built on one that cannot be made empty.
    """
    try:
        clone = object.__new__(type(node))
    except TypeError as error:
        raise PrefetchError(
            f"a {_name(node)} in the batch cannot be made anew: give it a method .to(device)"
        ) from error
    for name, value in (stored_attributes(node) | fields).items():
        object.__setattr__(clone, name, value)  # frozen ones too
    return clone


def _name(node: Any) -> str:
    return f"{type(node).__module__}.{type(node).__qualname__}"
