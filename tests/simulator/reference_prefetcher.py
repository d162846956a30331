"""A prefetcher as short as can be, correct in several ways and wrong in as many: the simulator must tell them apart."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Memory = Literal["record_stream", "back_wait", "slots"]

Bug = Literal[
    "none",
    "no wait",  # the consumer does not wait for the copy
    "no record_stream",  # a batch's memory is reused while the consumer reads it
    "no back-wait",  # a slot is overwritten while the consumer reads it
    "staging overwritten",  # pinned memory is filled again while the copy from it is under way
    "own stream",  # the copies run on the consumer's stream
    "pageable",  # the copies run from ordinary memory
    "blocking",  # the copies are waited for
]


class _Batch(NamedTuple):
    tensor: torch.Tensor
    copied: torch.Event
    slot: int


class ReferencePrefetcher:
    """Iterate over one-dimensional host tensors, copied ahead on a side stream.

    Args:
        batches: the host tensors, all of one shape.
        depth: how many batches are on their way.
        memory: why the memory of a batch is not overwritten early: ``record_stream``; the side stream waits for the
            consumer before each copy; or slots that the consumer gives back.
        bug: what to do wrong.
    """

    def __init__(
        self,
        batches: Iterable[torch.Tensor],
        *,
        depth: int = 2,
        memory: Memory = "record_stream",
        bug: Bug = "none",
    ) -> None:
        self._batches = iter(batches)
        self._depth = depth
        self._memory = memory
        self._bug = bug
        self._consumer = torch.accelerator.current_stream()
        self.side = self._consumer if bug == "own stream" else torch.Stream("sim")
        self._queue: collections.deque[_Batch] = collections.deque()
        self._issued = 0
        self._slots: dict[int, torch.Tensor] = {}
        self._slot_given_back: dict[int, torch.Event] = {}
        self._staging: torch.Tensor | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._fill_queue()
            if not self._queue:
                return
            batch = self._queue.popleft()
            if self._bug != "no wait":
                self._consumer.wait_event(batch.copied)
            if self._memory == "record_stream" and self._bug != "no record_stream":
                batch.tensor.record_stream(self._consumer)
            slot = batch.slot
            tensor = batch.tensor
            del batch
            yield tensor
            del tensor
            self._slot_given_back[slot] = self._consumer.record_event()

    def _fill_queue(self) -> None:
        while len(self._queue) < self._depth:
            host = next(self._batches, None)
            if host is None:
                return
            slot = self._issued % (self._depth + 1)
            self._issued += 1
            host = self._pin(host)
            with self.side:
                tensor = self._copy(host, slot)
                copied = self.side.record_event()
            self._queue.append(_Batch(tensor, copied, slot))

    def _pin(self, host: torch.Tensor) -> torch.Tensor:
        if self._bug == "pageable":
            return host
        if self._bug == "staging overwritten":
            if self._staging is None:
                self._staging = torch.empty_like(host).pin_memory()
            return self._staging.copy_(host)
        return host.pin_memory()

    def _copy(self, host: torch.Tensor, slot: int) -> torch.Tensor:
        non_blocking = self._bug != "blocking"
        if self._memory == "slots":
            if slot not in self._slots:
                self._slots[slot] = torch.empty(host.shape, dtype=host.dtype, device="sim")
            elif self._bug != "no back-wait":
                self.side.wait_event(self._slot_given_back[slot])
            return self._slots[slot].copy_(host, non_blocking=non_blocking)
        if self._memory == "back_wait":
            self.side.wait_stream(self._consumer)
        return host.to("sim", non_blocking=non_blocking)
