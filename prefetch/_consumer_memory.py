"""``memory="consumer"``: batches on the consumer's stream, as if its loop had allocated them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence

import torch

from prefetch._device import current_stream, is_capturing, on_stream
from prefetch._memory import Destination, Layout, Memory, PassMemory, is_gone

# How long a batch that is ready is held back at most until a thread has allocated another. That takes microseconds,
# unless the batch has objects whose own .to takes longer.
_PATIENCE_S = 0.01


class Consumer(Memory):
    """The policy.

    A block that the loop frees is its stream's again at once, so that memory never waits for the device, however far
    the host runs ahead: with ``p = prefetch_batches`` it holds ``p`` batches ahead, the new one, and the one that the
    loop's variable still names.

    What the allocator hands out may have been in use by all that is queued on that stream, so the copies wait for an
    event that is recorded there after the allocation: before the step that the consumer is about to queue, or nothing
    would overlap.
    """

    def __init__(self, prefetch_batches: int) -> None:
        self.prefetch_batches = prefetch_batches
        self.layouts: tuple[Layout, ...] = ()  # of the last batch: what the next one probably needs

    def new_pass(self) -> PassMemory:
        """See :meth:`Memory.new_pass`."""
        return _ConsumerPass(self)


class _ConsumerPass(PassMemory):
    """Reserves memory for the batches that are asked for but not issued yet.

    A background thread issues when the loader is ready, when the consumer may have queued its next step: an event after
    an allocation made then would make the copy wait for that step. So the consumer's thread allocates beforehand, as
    the last batch needed it; and if the thread has begun to allocate by itself, no step is queued until it has.
    """

    def __init__(self, policy: Consumer) -> None:
        self._policy = policy
        self._consumer: torch.Stream | None = None
        self._allowed = 0  # batches of the pass that may be issued
        self._delivered = 0
        self._issued = 0
        self._reserved: deque[_ConsumerDestination] = deque()
        self._is_allocated = threading.Event()  # clear while a batch's memory is being allocated as it is issued
        self._is_allocated.set()
        self._lock = threading.RLock()

    def asked(self, device: torch.device) -> None:
        """See :meth:`PassMemory.asked`."""
        with self._lock:
            self._consumer = current_stream(device)
            self._allowed = self._delivered + 1 + self._policy.prefetch_batches
        self._reserve()

    def destination(self, position: int) -> Destination:
        """See :meth:`PassMemory.destination`."""
        with self._lock:
            self._issued = position + 1
            while len(self._reserved) > max(0, self._allowed - position):  # an error took the place of a batch
                self._reserved.pop()
            if self._reserved:
                return self._reserved.popleft()
            assert self._consumer is not None  # a batch is issued after it is asked for
            self._is_allocated.clear()
            return _ConsumerDestination(self._policy, self._consumer, (), self._is_allocated)

    def delivered(self, position: int) -> None:
        """See :meth:`PassMemory.delivered`."""
        self._delivered = position + 1
        self._reserve()  # the first batches were asked for when their layouts were not known
        self._is_allocated.wait(_PATIENCE_S)

    def end(self) -> None:
        """See :meth:`PassMemory.end`."""
        with self._lock:
            self._allowed = 0
            self._reserved.clear()

    def _reserve(self) -> None:
        policy = self._policy
        with self._lock:
            if not policy.layouts or self._consumer is None:
                return
            for _ in range(self._allowed - self._issued - len(self._reserved)):
                self._reserved.append(_ConsumerDestination(policy, self._consumer, policy.layouts))


class _ConsumerDestination(Destination):
    def __init__(
        self,
        policy: Consumer,
        consumer: torch.Stream,
        layouts: tuple[Layout, ...],
        is_allocated: threading.Event | None = None,
    ) -> None:
        self._is_allocated = is_allocated
        self._policy = policy
        self._consumer = consumer
        self._process = os.getpid()
        self._tensors: list[torch.Tensor] = []
        self._layouts: list[Layout] = []
        self._reserved: deque[tuple[Layout, torch.Tensor]] = deque()
        self._allocated: torch.Event | None = None
        self._side: torch.Stream | None = None
        if layouts:
            with on_stream(consumer):
                self._reserved.extend((layout, _allocated(layout, consumer.device)) for layout in layouts)
            self._allocated = consumer.record_event()

    def tensor(self, layout: Layout) -> torch.Tensor | None:
        """See :meth:`Destination.tensor`."""
        tensor = None
        if self._reserved:
            reserved_layout, tensor = self._reserved.popleft()
            if reserved_layout != layout:
                tensor = None
                self._reserved.clear()  # before more is allocated
        if tensor is None:
            with on_stream(self._consumer):
                if is_capturing(self._consumer.device):  # the graph would own the memory
                    return None
                tensor = _allocated(layout, self._consumer.device)
            self._allocated = None
        self._layouts.append(layout)
        self._tensors.append(tensor)
        return tensor

    def open(self, side: torch.Stream) -> None:
        """See :meth:`Destination.open`."""
        self._reserved.clear()
        self._side = side
        if self._tensors:
            side.wait_event(self._allocated or self._consumer.record_event())
            self._policy.layouts = tuple(self._layouts)
        self._allocation_is_over()

    def hand_over(self, consumer: torch.Stream) -> Sequence[torch.Tensor]:
        """See :meth:`Destination.hand_over`."""
        tensors, self._tensors = self._tensors, []
        return tensors if consumer != self._consumer else ()

    def give_back(self) -> None:
        """See :meth:`Destination.give_back`."""
        self._allocation_is_over()
        tensors, self._tensors = self._tensors, []
        if not tensors or self.copied is None or self._side is None or is_gone(self._process):
            return
        # The allocator will hand them to the consumer's next kernels. A device that has failed says so elsewhere.
        with contextlib.suppress(RuntimeError), on_stream(self._consumer):
            if is_capturing(self._consumer.device):  # which must not wait for what is no part of the graph
                for tensor in tensors:
                    tensor.record_stream(self._side)
            else:
                self._consumer.wait_event(self.copied)

    def _allocation_is_over(self) -> None:
        is_allocated, self._is_allocated = self._is_allocated, None
        if is_allocated is not None:
            is_allocated.set()


def _allocated(layout: Layout, device: torch.device) -> torch.Tensor:
    if torch.is_inference_mode_enabled():  # such a loop gets ordinary tensors all the same
        with torch.inference_mode(False):
            return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)
