"""One tree from the device to the host: the snapshots, the copies, and the memory in which the values arrive."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from prefetch._batch import Visitor, walk
from prefetch._device import HOST, is_host, on_stream
from prefetch._errors import PrefetchError
from prefetch._rebuild import own_copy
from prefetch._search import memory_of, tensors_in
from prefetch._staging import is_ordinary
from prefetch._transfer import asynchronous


def accelerator_of(tree: Any) -> torch.device | None:
    """The device that the tensors of a tree are on; ``None`` where all are on the host.

    Raises:
        ValueError: They are on several.
    """
    devices = _Devices()
    _walked(tree, devices)
    if len(devices.found) > 1:
        first, second, *_ = devices.found
        raise ValueError(
            f"tree must hold tensors of one device beside the host's, got some on {first} and some on {second}: "
            "call once for each device"
        )
    return next(iter(devices.found), None)


def read(tree: Any, dtype: torch.dtype | None) -> Any:
    """The tree with its tensors on the host, copied while the caller waits."""
    with _plain_mode():
        return _walked(tree, _Reading(dtype))


class Download:
    """The copies of one tree, which run on the side stream while the caller goes on.

    It holds pinned memory until :meth:`finish` or :meth:`let_go`. Nobody need call either: torch's allocators give no
    memory away, neither pinned nor on the device, that these copies still use.

    Args:
        side: The stream for the copies.
    """

    def __init__(self, side: torch.Stream) -> None:
        self.future: weakref.ref[Any] | None = None
        """Who may ask for the values."""
        self._side = side
        self._process = os.getpid()
        self._landings: list[tuple[torch.Tensor, torch.Tensor]] = []  # pinned, pageable
        self._copied: torch.Event | None = None  # until the values are in pageable memory
        # Values are moved once, or a second thread would overwrite what the user has written into them. A finalizer may
        # interrupt the thread that moves them, and ask for them.
        self._lock = threading.RLock()

    def start(self, tree: Any, dtype: torch.dtype | None) -> Any:
        """Queue the copies of a tree; its tensors have the values that the caller's current stream now gives them.

        Returns:
            The tree on the host. What it holds is not to be read before :meth:`finish`.

        Raises:
            PrefetchError: A container of the tree cannot be rebuilt.
            Exception: Whatever an object's own ``.to`` raises.
        """
        with _plain_mode():
            snapshots = _Snapshots(dtype, self._side)
            result = _walked(tree, snapshots)
            with _after_caller(self._side):
                self._landings = snapshots.queue_copies()
                self._copied = self._side.record_event()
        return result

    def is_done(self) -> bool:
        """Whether the copies are done; does not wait."""
        copied = self._event()
        return copied is None or copied.query()

    def finish(self) -> None:
        """Wait for the copies, and move the values to where the user finds them.

        Raises:
            RuntimeError: The device has failed.
            PrefetchError: This is a forked process.
        """
        copied = self._event()
        if copied is not None:
            copied.synchronize()
            with self._lock:
                self._move()

    def let_go(self) -> None:
        """Wait for the copies, and drop pinned memory: values that can still be asked for are moved out of it."""
        copied = self._event()
        if copied is None:
            return
        copied.synchronize()
        if self.future is None or self.future() is None:
            self._landings, self._copied = [], None
        # Not waited for: who has the lock moves them, and may be interrupted by a finalizer that waits for our caller.
        elif self._lock.acquire(blocking=False):
            try:
                self._move()
            finally:
                self._lock.release()

    def _move(self) -> None:
        for pinned, pageable in self._landings:
            pageable.copy_(pinned)
        self._landings = []
        self._copied = None  # last: other threads take it for the sign that all is moved

    def _event(self) -> torch.Event | None:
        copied = self._copied
        if copied is not None and os.getpid() != self._process:
            raise PrefetchError(
                "these values are on their way to the process that asked for them: call result() there, before it forks"
            )
        return copied


@contextlib.contextmanager
def _plain_mode() -> Iterator[None]:
    """Results are ordinary tensors without a graph, whatever the caller's mode."""
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches gradients on
        yield


@contextlib.contextmanager
def _after_caller(side: torch.Stream) -> Iterator[torch.Stream]:
    """Make ``side`` current, and have it wait for what the caller's stream has queued; gives the latter."""
    with on_stream(side) as caller:
        side.wait_stream(caller)
        yield caller


def _walked(tree: Any, visitor: Visitor) -> Any:
    try:
        return walk(tree, visitor)
    except RecursionError as error:
        raise PrefetchError("a container in the tree holds itself: give it a method .to(device)") from error


class _Devices(Visitor):
    """The traversal that collects the devices, the host apart, of what the others would copy."""

    def __init__(self) -> None:
        self.found: dict[torch.device, None] = {}  # a set that keeps the order

    def leaf(self, tensor: torch.Tensor) -> Any:
        if not is_host(tensor.device):
            self.found[tensor.device] = None
        return tensor

    def other(self, obj: Any) -> Any:
        for tensor in tensors_in(obj):
            self.leaf(tensor)
        return obj


class _Reading(Visitor):
    """The traversal that copies a tree, each tensor when it comes to it; two references to one stay references to one.

    Args:
        dtype: Floating-point type to which floating leaves are cast.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._known: dict[int, tuple[Any, Any]] = {}  # by id; the source is held, so that no id is used twice

    def leaf(self, source: torch.Tensor) -> Any:
        known = self._known.get(id(source))
        if known is None:
            result = self._resident(source) if is_host(source.device) else self._copied(source.detach())
            known = self._known[id(source)] = (source, result)
        return known[1]

    def other(self, source: Any) -> Any:
        known = self._known.get(id(source))
        if known is None:
            clone = own_copy(source)  # the .to of some classes works in place
            result = self._moved(clone)
            known = self._known[id(source)] = (source, clone if result is None else result)
        return known[1]

    def _resident(self, source: torch.Tensor) -> torch.Tensor:
        return (source.detach() if source.requires_grad else source).to(self._result_type(source))

    def _copied(self, source: torch.Tensor) -> torch.Tensor:
        return source.to(self._bus_type(source)).to(HOST).to(self._result_type(source))

    def _moved(self, clone: Any) -> Any:
        return clone.to(HOST)

    def _result_type(self, source: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and source.is_floating_point() else source.dtype

    def _bus_type(self, source: torch.Tensor) -> torch.dtype:
        """The narrower of the types before and after the cast: a cast to a wider one is the host's."""
        result_type = self._result_type(source)
        return source.dtype if source.dtype.itemsize < result_type.itemsize else result_type


class _Snapshots(_Reading):
    """The traversal that prepares a download: each tensor is first copied within the device.

    That is one pass over the device's memory, many times as fast as the bus that the download then takes. For it the
    caller may overwrite the source at once: gradients that are zeroed, weights in an optimizer's step, the output of a
    CUDA graph. Otherwise the caller's stream would have to wait for the bus.

    Args:
        dtype: Floating-point type to which floating leaves are cast.
        side: The stream for the copies to the host.
    """

    def __init__(self, dtype: torch.dtype | None, side: torch.Stream) -> None:
        super().__init__(dtype)
        self._side = side
        self._taken: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # snapshot, pinned, pageable

    def queue_copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queue the copies of the snapshots, on the side stream, which must be current.

        Returns:
            For each the pinned memory in which it will arrive, and the pageable memory that is for the user.
        """
        for snapshot, pinned, _ in self._taken:
            pinned.copy_(snapshot, non_blocking=True)
            snapshot.record_stream(self._side)
        landings = [(pinned, pageable) for _, pinned, pageable in self._taken]
        # Now, since the allocator takes a snapshot to be in use until all is done that is queued when it goes.
        self._taken.clear()
        return landings

    def _copied(self, source: torch.Tensor) -> torch.Tensor:
        if is_ordinary(source):
            # Dense whatever the source is, without lazy conjugation, and of the type that is to cross the bus.
            return self._land(source.to(self._bus_type(source), copy=True), self._result_type(source))
        snapshot = source.to(self._result_type(source), copy=True)
        with _after_caller(self._side):
            result = snapshot.to(HOST, non_blocking=True)  # only its class or layout knows of what it is made
        for memory in memory_of(snapshot):
            memory.record_stream(self._side)
        return result

    def _land(self, snapshot: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the values of a dense tensor: of the two the pageable one is returned.

        It is not touched before the values are moved there, so that it takes no room until then.
        """
        size, strides = snapshot.shape, snapshot.stride()
        # The device is said, since torch.set_default_device would change it.
        pinned = torch.empty_strided(size, strides, dtype=snapshot.dtype, device=HOST, pin_memory=True)
        pageable = torch.empty_strided(size, strides, dtype=dtype, device=HOST)
        self._taken.append((snapshot, pinned, pageable))
        return pageable

    def _moved(self, clone: Any) -> Any:
        with _after_caller(self._side) as caller:
            try:
                return clone.to(HOST, **asynchronous(type(clone)))
            finally:  # of an object no snapshot can be taken: what the caller does to it next has to wait
                caller.wait_stream(self._side)
