"""Who is still there."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

M = TypeVar("M")


class Members(Generic[M]):
    """Objects that somebody else keeps alive. Unlike a plain ``WeakSet`` it can be listed while another thread adds."""

    def __init__(self) -> None:
        self._set: weakref.WeakSet[M] = weakref.WeakSet()
        self._lock = threading.RLock()

    def add(self, member: M) -> None:
        """Remember ``member`` as long as it lives."""
        with self._lock:
            self._set.add(member)

    def alive(self) -> list[M]:
        """Those that are still there."""
        with self._lock:
            return list(self._set)
