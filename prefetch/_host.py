"""The way back: values of the device on the host, while the device goes on."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Any

import torch

from prefetch._arguments import check_dtype, checked_max_pending
from prefetch._arrays import arrays_of
from prefetch._compiler import opaque
from prefetch._device import has_streams, is_capturing, resolve
from prefetch._download import Download, accelerator_of, read
from prefetch._errors import PrefetchError


class HostFuture:
    """The values of one tree on their way to the host: what :func:`to_host` and :meth:`HostCopier.submit` return.

    It can be asked by any thread of its process, and after its copier is closed or gone. One that nobody asks costs no
    more than its copy.
    """

    __module__ = "prefetch"
    __slots__ = ("__weakref__", "_download", "_tree")

    def __init__(self, tree: Any, download: Download | None) -> None:
        self._tree = tree
        self._download = download

    def __reduce__(self) -> Any:
        """Neither pickled nor copied: the values of a copy would never arrive."""
        raise TypeError("a HostFuture cannot be copied or pickled: take its result()")

    @opaque
    def done(self) -> bool:
        """Whether :meth:`result` returns without waiting for the device; never waits itself.

        Raises:
            RuntimeError: The device has failed.
            PrefetchError: In a forked process, for values that its parent has not asked for.
        """
        download = self._download
        return download is None or download.is_done()

    @opaque
    def result(self) -> Any:
        """The tree with its tensors on the host; waits for its own copies, and not for those queued later.

        Returns:
            The same objects each time. What becomes of each kind of object is said in :func:`to_host`.

        Raises:
            RuntimeError: The device has failed.
            PrefetchError: In a forked process, for values that its parent has not asked for.
        """
        download = self._download
        if download is not None:
            download.finish()
            self._download = None
        return self._tree

    @opaque
    def numpy(self) -> Any:
        """The tree with a NumPy array in the place of each tensor; waits as :meth:`result` does.

        Returns:
            New containers of the same types. An array has the shape of its tensor, and shares memory with that of
            :meth:`result`. Objects with a ``.to`` of their own are those of :meth:`result`, tensors and all.

        Raises:
            TypeError: NumPy has no arrays of a leaf's type (bfloat16, float8) or layout (sparse, nested). The message
                names the leaf.
            RuntimeError: The device has failed, or NumPy is not installed.
            PrefetchError: In a forked process, for values that its parent has not asked for.
        """
        return arrays_of(self.result())


class HostCopier:
    """Copies from one device to the host on a side stream of its own, with bounded memory.

    :func:`to_host` has one for each device. Make another one for another bound, or to wait for its copies alone.
    Several threads may use one.

    Example:
        >>> with HostCopier(device="cpu") as copier:  # no device: the accelerator, where there is one
        ...     futures = [copier.submit({"loss": torch.tensor(0.5 * i)}) for i in range(3)]
        >>> [future.result()["loss"].item() for future in futures]
        [0.0, 0.5, 1.0]

    Args:
        device: The device from which tensors come, as in :class:`CUDAPrefetcher`.
        max_pending: How many submissions may be under way. Each takes as many bytes as its tensors have, once on the
            device and once in pinned memory; :meth:`submit` waits for the oldest when there are so many. As many pinned
            buffers again may wait in torch's allocator, which gives one out again when all copies are done that were
            queued before it came back (PyTorch, ``aten/src/ATen/core/CachingHostAllocator.h``).

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: ``max_pending`` is less than 1, or ``device`` is no device name.
        RuntimeError: ``device`` is an accelerator that is not there.
    """

    __module__ = "prefetch"

    def __init__(self, device: torch.device | str | int | None = None, *, max_pending: int = 4) -> None:
        self._most = checked_max_pending(max_pending)
        self._device = resolve(device)
        self._side = torch.Stream(self._device) if has_streams(self._device) else None
        self._process = os.getpid()
        self._pending: deque[Download] = deque()  # in the order of the side stream
        # One submission at a time, or the bound and that order would not hold. A finalizer may interrupt the thread
        # that holds it, and close the copier.
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def device(self) -> torch.device:
        """Where the tensors come from: the CPU, or an accelerator with its index."""
        return self._device

    def submit(self, tree: Any, *, dtype: torch.dtype | None = None) -> HostFuture:
        """Start to copy a tree to the host; see :func:`to_host`.

        Args:
            tree: Tensors of this copier's device and of the host, nested as you like.
            dtype: Floating-point type to which floating leaves are cast.

        Raises:
            TypeError: ``dtype`` is no ``torch.dtype``.
            ValueError: ``dtype`` is no floating-point type, or ``tree`` holds tensors of another accelerator.
            RuntimeError: The copier is closed, or the device has failed.
            PrefetchError: The current stream is capturing a graph, a container of the tree cannot be rebuilt, or the
                copier was made before this process was forked.
        """
        check_dtype(dtype)
        return self._submit(tree, dtype)

    @opaque
    def _submit(self, tree: Any, dtype: torch.dtype | None) -> HostFuture:
        device = accelerator_of(tree)
        if device is not None and device != self._device:
            raise ValueError(
                f"tree must hold tensors of {self._device}, which this HostCopier copies from, got some on {device}: "
                "make one for each device, or call to_host()"
            )
        return self._start(tree, dtype, device)

    def _start(self, tree: Any, dtype: torch.dtype | None, device: torch.device | None) -> HostFuture:
        self._check_is_usable()
        if device is None or self._side is None:
            return HostFuture(read(tree, dtype), None)
        if is_capturing(device):  # which would record the copies, and forbids to ask for events
            raise PrefetchError(
                "to_host() and submit() must not be called while the current stream captures a graph: "
                "call them after the replay, on what the graph has computed"
            )
        with self._lock:
            self._check_is_usable()  # again: another thread may have closed it
            self._let_go(self._most - 1)
            download = Download(self._side)
            future = HostFuture(download.start(tree, dtype), download)
            download.future = weakref.ref(future)
            self._pending.append(download)
        return future

    def close(self) -> None:
        """Wait for what is pending and take no more; leaving a ``with`` block does the same.

        Futures keep their values. In a process that was forked after the copier was made there is nothing to wait for.

        Raises:
            RuntimeError: The device has failed.
        """
        self._is_closed = True
        if os.getpid() != self._process:
            return  # what is pending, and whoever holds the lock, is in the parent process
        with self._lock:
            self._let_go(0)

    def __enter__(self) -> HostCopier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_is_usable(self) -> None:
        if os.getpid() != self._process:
            raise PrefetchError("this HostCopier is of another process: make one after the fork, or call to_host()")
        if self._is_closed:
            raise RuntimeError("this HostCopier is closed: make another one, or call to_host()")

    def _let_go(self, most: int) -> None:
        """Let go of what is done and, oldest first, of what is to be waited for, until at most so many are pending.

        Pinned memory goes too: values whose future is kept are moved out of it now. However many futures there are, no
        more than ``max_pending`` hold any.
        """
        while True:
            try:
                oldest = self._pending.popleft()
            except IndexError:  # not asked for beforehand, since a finalizer may be quicker
                return
            if len(self._pending) < most and not oldest.is_done():
                self._pending.appendleft(oldest)
                return
            oldest.let_go()  # if it has failed, it is gone all the same: its future tells the user


_shared: dict[tuple[int, torch.device], HostCopier] = {}  # by process too: a forked one has no use for its parent's


def to_host(tree: Any, *, dtype: torch.dtype | None = None) -> HostFuture:
    """Start to copy a tree to the host, and go on while the device and the bus are at work.

    Example:
        >>> future = to_host({"loss": torch.tensor(0.5), "step": 3})
        >>> future.result()  # waits for this copy, and for nothing else
        {'loss': tensor(0.5000), 'step': 3}

    ``tensor.to("cpu", non_blocking=True)`` starts a copy too, but hands out memory in which nothing has arrived yet.
    Here values are seen only once they are there. They are those of the moment of the call, in the order of the current
    stream: whatever is queued later may overwrite the tensors, or free them.

    What becomes of what a tree may hold:

    * Tensors on the device: tensors of the same shape and type, dense and detached, in ordinary memory. Two references
      to one stay references to one; views of one become tensors of their own.
    * Tensors on the host: passed on as they are, not copied; detached if they require gradients.
    * Sparse and nested tensors, and subclasses: the same kind of tensor, copied by its own ``.to``. That may choose
      pinned memory, which they then hold for as long as they are kept.
    * Objects with a method ``.to(device)``: a copy of the object, moved by that method. The same holds for pinned
      memory; ``dtype`` does not reach into them; and the current stream waits for their copies.
    * Mappings, sequences, named tuples, dataclasses, ``PackedSequence``, classes taught with
      :func:`register_batch_type`: others of the same type, or the same ones where nothing in them changes.
    * All else: passed on as it is. So are tensors that objects of other classes hide.

    With the CPU as the device nothing is copied, and on devices without streams (Apple's MPS) the call waits.

    At most four calls for each device are under way, and take as many bytes as the tensors have, once on the device and
    once in pinned memory: a fifth waits for the first. Values that have arrived are moved to ordinary memory when they
    are asked for, or by the next call.

    Args:
        tree: Tensors of one device and of the host, nested as in :class:`CUDAPrefetcher`.
        dtype: Floating-point type to which floating leaves are cast; others keep their type. A narrower type is made on
            the device, a wider one on the host, so that the narrow one crosses the bus. ``torch.float32`` is what NumPy
            needs in the place of bfloat16.

    Raises:
        TypeError: ``dtype`` is no ``torch.dtype``.
        ValueError: ``dtype`` is no floating-point type, or ``tree`` holds tensors of two accelerators.
        PrefetchError: The current stream is capturing a graph, or a container of the tree cannot be rebuilt.
        RuntimeError: The device has failed.
    """
    check_dtype(dtype)
    return _to_host(tree, dtype)


to_host.__module__ = "prefetch"


@opaque
def _to_host(tree: Any, dtype: torch.dtype | None) -> HostFuture:
    device = accelerator_of(tree)
    if device is None:
        return HostFuture(read(tree, dtype), None)
    key = os.getpid(), device
    # Without a lock, which a forked process could inherit held: of two that are made at once, one stays.
    copier = _shared.get(key) or _shared.setdefault(key, HostCopier(device))
    return copier._start(tree, dtype, device)
