"""Classes that the user has taught the library to take apart and to put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from prefetch._errors import PrefetchError

B = TypeVar("B")


class Registered(NamedTuple):
    """How to handle the objects of a class."""

    kind: type
    flatten: Callable[[Any], Mapping[str, Any]]
    unflatten: Callable[[Any, dict[str, Any]], Any]

    def parts(self, node: Any) -> Mapping[str, Any]:
        """What ``flatten`` gives, if it is what it should be."""
        parts = self.flatten(node)
        if not isinstance(parts, Mapping):
            raise PrefetchError(f"flatten of the registered {self.kind} must return a mapping by name, got {parts!r}")
        return parts

    def remade(self, node: Any, parts: dict[str, Any]) -> Any:
        """What ``unflatten`` makes, if it is another object of the class."""
        other = self.unflatten(node, parts)
        if not isinstance(other, self.kind) or other is node:
            raise PrefetchError(f"unflatten of the registered {self.kind} must return another one, got {other!r}")
        return other


_classes: dict[type, Registered] = {}
_caches: list[Callable[[], None]] = []


def registered(kind: type) -> Registered | None:
    """What is known about a class, or the nearest class that it is built on."""
    return next((_classes[base] for base in kind.__mro__ if base in _classes), None) if _classes else None


def forgets(clear: Callable[[], None]) -> None:
    """Have a cache that depends on :func:`registered` cleared when a class is added."""
    _caches.append(clear)


def register_batch_type(
    kind: type[B],
    flatten: Callable[[B], Mapping[str, Any]],
    unflatten: Callable[[B, dict[str, Any]], B],
) -> None:
    """Teach all prefetchers, and :func:`to_host`, to move objects of a class that holds tensors in a way of its own.

    Not needed for mappings, sequences, dataclasses and classes with a method ``.to(device)``. What is registered here
    comes before all that, for subclasses too; a second registration of a class replaces the first.

    Example:
        >>> class Pair:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> register_batch_type(
        ...     Pair,
        ...     lambda pair: {"left": pair.left, "right": pair.right},
        ...     lambda pair, parts: Pair(**parts),
        ... )

    Args:
        kind: The class.
        flatten: Gives the parts of an object by name; they may be nested batches. ``skip_keys`` and warnings use the
            names.
        unflatten: Makes another object like the one given, from parts by the same names. Must not write to the one
            given. Called only if a part has changed. It may compute with tensors on the device; but in
            :func:`to_host` it is called before the values of the parts have arrived, and must not look at them.

    A batch for which one of them returns something else raises ``PrefetchError`` in its place; what they raise is
    raised there as it is.

    Raises:
        TypeError: ``kind`` is no class, or ``flatten`` or ``unflatten`` cannot be called.
    """
    if not isinstance(kind, type):
        raise TypeError(f"kind must be a class, got {kind!r}")
    for name, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {function!r}")
    _classes[kind] = Registered(kind, flatten, unflatten)
    for clear in _caches:
        clear()


register_batch_type.__module__ = "prefetch"
