"""``memory="static"``: batches at addresses that stay, as CUDA graphs and reduce-overhead compilation need them."""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Sequence

import torch

from prefetch._device import current_stream
from prefetch._memory import Destination, Layout, Memory, PassMemory


class Static(Memory):
    """``prefetch_batches + 2`` slots, allocated once, that batches go through in turn.

    A slot is written to again after all that the consumer has queued until it was seen, at a request for a batch, that
    nothing refers to the slot's batch any more. In a plain loop this is the request after the next one, since the
    loop's variable still names a batch when the next is asked for; hence the two slots more than the look-ahead.

    An open pass has slots of its own. When it ends they serve the next pass.
    """

    def __init__(self, prefetch_batches: int, device: torch.device, warnings: deque[str]) -> None:
        self.device = device
        self._prefetch_batches = prefetch_batches
        self._rings: list[_Ring] = []  # those that no pass is using
        self._is_told = False
        self._warnings = warnings

    def new_pass(self) -> PassMemory:
        """See :meth:`Memory.new_pass`."""
        try:
            ring = self._rings.pop()
        except IndexError:
            ring = _Ring(self._prefetch_batches + 2)
        return _StaticPass(self, ring)

    def take_back(self, ring: _Ring) -> None:
        """For the next pass."""
        self._rings.append(ring)

    def note_held(self) -> None:
        """A batch was still held when its slot was needed."""
        if not self._is_told:
            self._is_told = True
            self._warnings.append(
                f"a batch is still held while {self._prefetch_batches + 1} later ones are on their way: with "
                f"memory='static' there are prefetch_batches + 2 = {self._prefetch_batches + 2} slots, so it keeps its "
                "memory and the slot gets new memory, at another address. Let go of batches in time, views of them "
                "and graphs of autograd included; keep clones, or use another memory= policy"
            )


class _StaticPass(PassMemory):
    def __init__(self, policy: Static, ring: _Ring) -> None:
        self._policy = policy
        self._ring: _Ring | None = ring

    def asked(self, device: torch.device) -> None:
        """See :meth:`PassMemory.asked`."""
        if self._ring is not None:
            self._ring.look_for_free_slots(current_stream(device))

    def destination(self, position: int) -> Destination:  # noqa: ARG002 - as in PassMemory
        """See :meth:`PassMemory.destination`."""
        ring = self._ring
        if ring is None:  # a thread that was left behind: the slots are another pass's now
            ring = _Ring(1)
        slot, is_held = ring.take()
        if is_held:
            self._policy.note_held()
        return _SlotDestination(ring, slot, self._policy.device)

    def end(self) -> None:
        """See :meth:`PassMemory.end`. Slots of batches under way come back to the ring when these are let go."""
        ring, self._ring = self._ring, None
        if ring is not None:
            self._policy.take_back(ring)


class _Buffer:
    """Bytes for one tensor of a batch."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self.storage = self.tensor.untyped_storage()
        self._own_uses = self._uses()

    def is_held(self) -> bool:
        """Whether anything else refers to the memory: tensors, views of them, graphs of autograd."""
        return self._uses() > self._own_uses

    def _uses(self) -> int:
        # Not part of torch's documented API, but what its own CUDA graph trees go by. There is no other way to see a
        # view, or what autograd has saved.
        # Storages themselves are one Python object however many times they are asked for.
        return torch._C._storage_Use_Count(self.storage._cdata) + sys.getrefcount(self.storage)


class _Slot:
    """The memory of one batch: a buffer for each of its tensors, in the order of the traversal."""

    def __init__(self) -> None:
        self.buffers: list[_Buffer] = []
        self.consumer: torch.Stream | None = None  # of the batch that was last delivered from here
        self.free_after: list[torch.Event] = []
        self.lent_to: list[torch.Stream] = []

    def is_held(self) -> bool:
        """Whether the batch that was delivered from here, or a part of it, is still in use by somebody."""
        return any(buffer.is_held() for buffer in self.buffers)

    def buffer(self, index: int, size: int, device: torch.device) -> _Buffer:
        """The buffer at ``index``, with ``size`` bytes at least; made on the current stream, if need be."""
        buffers = self.buffers
        if index >= len(buffers) or buffers[index].size < size:
            buffers[index : index + 1] = [_Buffer(size, device)]
            self.lent_to = []
        return buffers[index]


class _Ring:
    """The slots of a pass, in the order in which they become free."""

    def __init__(self, count: int) -> None:
        self._free = deque(_Slot() for _ in range(count))
        self._delivered: deque[_Slot] = deque()
        self._sizes: list[int] = []  # the most that a batch has needed, by index of the buffer
        # A finalizer may interrupt the thread that holds it, and give a slot back.
        self._lock = threading.RLock()

    def look_for_free_slots(self, consumer: torch.Stream) -> None:
        """All that was queued on a batch that nobody refers to any more was queued before this."""
        with self._lock:
            for slot in [slot for slot in self._delivered if not slot.is_held()]:
                streams = [consumer] if slot.consumer in (consumer, None) else [consumer, slot.consumer]
                slot.free_after = [stream.record_event() for stream in streams if stream is not None]
                self._delivered.remove(slot)
                self._free.append(slot)

    def take(self) -> tuple[_Slot, bool]:
        """The slot for the next batch, and whether its last batch is held, so that the memory had to be given up."""
        with self._lock:
            if self._free:
                return self._free.popleft(), False
            if not self._delivered:  # the others are with a thread that was left behind
                return _Slot(), False
            self._delivered.popleft()
            return _Slot(), True

    def size(self, index: int, needed: int) -> int:
        """How large a buffer should be that needs so many bytes: as all others at that index."""
        with self._lock:
            self._sizes += [0] * (index + 1 - len(self._sizes))
            self._sizes[index] = max(self._sizes[index], needed)
            return self._sizes[index]

    def fill_up(self, device: torch.device) -> None:
        """Allocate for all slots, on the current stream, what the first one needed."""
        with self._lock:
            for slot in self._free:
                if not slot.buffers:
                    for index, size in enumerate(self._sizes):
                        slot.buffer(index, size, device)

    def give_back(self, slot: _Slot) -> None:
        """A slot whose batch was never delivered."""
        with self._lock:
            self._free.append(slot)

    def deliver(self, slot: _Slot) -> None:
        """A slot whose batch is the consumer's."""
        with self._lock:
            self._delivered.append(slot)


class _SlotDestination(Destination):
    takes_device_tensors = True

    def __init__(self, ring: _Ring, slot: _Slot, device: torch.device) -> None:
        self._ring = ring
        self._slot: _Slot | None = slot
        self._device = device
        self._count = 0

    def tensor(self, layout: Layout) -> torch.Tensor | None:
        """See :meth:`Destination.tensor`: another tensor each time, so that nothing done to one shows in the next."""
        assert self._slot is not None  # neither handed over nor given back
        size = self._ring.size(self._count, math.prod(layout.shape) * layout.dtype.itemsize)
        buffer = self._slot.buffer(self._count, size, self._device)
        self._count += 1
        new = torch.empty(0, dtype=layout.dtype, device=self._device)
        return new.set_(buffer.storage, 0, layout.shape, layout.strides)

    def open(self, side: torch.Stream) -> None:
        """See :meth:`Destination.open`."""
        assert self._slot is not None
        for event in self._slot.free_after:
            side.wait_event(event)
        self._slot.free_after = []
        self._ring.fill_up(self._device)

    def hand_over(self, consumer: torch.Stream) -> Sequence[torch.Tensor]:
        """See :meth:`Destination.hand_over`: once for each stream is enough."""
        slot, self._slot = self._slot, None
        assert slot is not None
        slot.consumer = consumer
        self._ring.deliver(slot)
        if consumer in slot.lent_to:
            return ()
        slot.lent_to.append(consumer)
        return [buffer.tensor for buffer in slot.buffers]

    def give_back(self) -> None:
        """See :meth:`Destination.give_back`. What is written to it next comes after on the side stream."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._ring.give_back(slot)
