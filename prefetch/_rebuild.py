"""Making objects anew with some of their content replaced, without running or trusting their own code too much.

Nothing here writes to the original, and no property of it is evaluated.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any

import torch

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


def has_own_to(kind: type) -> bool:
    """Whether a class, and not an instance or a property of it, defines ``.to``."""
    return callable(getattr(kind, "to", None))


def own_copy(node: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy that can be written to, by item or by attribute, without the original noticing.

    More than ``copy.copy``: dicts, lists, sets and deques that it holds are copied too, and objects with a ``.to`` of
    their own, for the ``.to`` of the whole may write to all these. Tensors and modules are shared. An object that
    gives itself as its copy calls itself immutable, and is taken at its word.

    Args:
        node: The object.
        memo: What has been copied, by id, so that two references stay references to one.

    Raises:
        PrefetchError: The object cannot be copied.
    """
    memo = {} if memo is None else memo
    try:
        clone = copy.copy(node)
    except Exception as error:
        raise PrefetchError(f"a {_name(node)} in the batch cannot be copied: give it a method __copy__()") from error
    memo[id(node)] = clone
    if clone is node:
        return node
    _own_items(clone, node, memo)
    if getattr(node, "__dict__", None) is node:  # the attribute-access dict: its items are its attributes
        clone.__dict__ = clone
        return clone
    cloned = stored_attributes(clone)
    for name, value in stored_attributes(node).items():
        if cloned.get(name) is value and (own := _own_value(value, memo)) is not value:
            object.__setattr__(clone, name, own)
    return clone


def _own_items(clone: Any, node: Any, memo: dict[int, Any]) -> None:
    if isinstance(node, dict):
        for key, value in dict.items(node):
            dict.__setitem__(clone, key, _own_value(value, memo))
    elif isinstance(node, list):
        list.__setitem__(clone, slice(None), [_own_value(value, memo) for value in list.__iter__(node)])


def _own_value(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return value
    if isinstance(value, (dict, list, set, deque)) or (has_own_to(type(value)) and not isinstance(value, type)):
        return own_copy(value, memo)
    return value


def with_attributes(clone: Any, attributes: dict[str, Any]) -> Any:
    """``clone``, after its attributes are set to these: frozen ones too, and without its class noticing."""
    for name, value in attributes.items():
        object.__setattr__(clone, name, value)
    return clone


def cannot_remake(node: Any) -> PrefetchError:
    """The error for a container of which another one with other content cannot be made."""
    return PrefetchError(
        f"a {_name(node)} in the batch holds tensors, but another {_name(node)} with the moved ones cannot be made: "
        "give the class a constructor that takes its content, or a method .to(device)"
    )


def _name(node: Any) -> str:
    return f"{type(node).__module__}.{type(node).__qualname__}"
