"""Host batches under running copies."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Any

import torch


class Sources:
    """Host batches whose copies may still run: held until the copies are seen to be done.

    The pinned allocator protects only blocks that it handed out itself; memory that was page-locked by other means
    would be freed under the running copy.

    Args:
        limit: How many batches may be held. While batches are delivered there are never so many, since the consumer's
            steps hold the host back; a transform that fails on each of them delivers none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._process = os.getpid()
        self._held: deque[tuple[torch.Event, Any]] = deque()
        # A finalizer may interrupt the thread that holds it, and call release(). Batches are let go outside of it, for
        # that may run any code.
        self._lock = threading.RLock()

    def make_room(self) -> bool:
        """Wait, on the host, until another batch may be held; whether it had to."""
        if len(self._held) < self._limit:
            return False
        held = list(self._held)
        for copied, _ in held[: len(held) - self._limit + 1]:
            copied.synchronize()
        del held
        self.release()
        return True

    def hold(self, batch: Any, copied: torch.Event) -> None:
        """Keep ``batch`` until ``copied`` has happened."""
        self._held.append((copied, batch))

    def release(self) -> None:
        """Drop those whose copies are done."""
        while True:
            try:
                first = self._held[0]
            except IndexError:
                return
            if not first[0].query():
                return
            with self._lock:
                if self._held and self._held[0] is first:  # no other thread, and no finalizer, was quicker
                    self._held.popleft()
            del first

    def __del__(self) -> None:
        if os.getpid() != self._process:
            return  # in a forked process the copies, and the device, are the parent's
        # A device that has failed runs no copies any more, and says so at the caller's next call.
        with contextlib.suppress(RuntimeError):
            for copied, _ in self._held:
                copied.synchronize()
