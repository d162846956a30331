"""The wrapper around a loader: arguments, delegation, and one pass after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Generic, TypeVar, overload

import torch

from prefetch._arguments import (
    MemoryName,
    check_background,
    check_dtype,
    check_loader,
    check_memory,
    check_memory_format,
    check_pin_memory,
    check_profile,
    check_transform,
    checked_prefetch_batches,
    checked_skip_keys,
)
from prefetch._background import BackgroundFeeder, check_is_free, wait_for_threads
from prefetch._compiler import opaque
from prefetch._device import has_streams, resolve
from prefetch._epoch import AheadEpoch, Epoch, PlainEpoch
from prefetch._errors import PrefetchError
from prefetch._feeder import InlineFeeder
from prefetch._lane import PlainLane, Side, SideStreamLane
from prefetch._loaders import has_one_iterator, loads_apart, parts_of
from prefetch._members import Members
from prefetch._meter import Meter
from prefetch._state import LoaderState
from prefetch._stats import Stats
from prefetch._timeline import Timeline
from prefetch._transfer import Transfer

T = TypeVar("T")
Loaded = TypeVar("Loaded")

# Methods that are here where the loader has them, and never the loader's own: those would count what is looked ahead.
_STATE_METHODS = ("state_dict", "load_state_dict")

_side_lock = threading.Lock()
_open_passes: Members[Epoch[Any]] = Members()  # of all prefetchers: two of them may wrap one loader


class CUDAPrefetcher(Generic[T]):
    """Iterate over ``loader`` with batches that already live on the device.

    While the device computes on one batch, the next ones are copied on a side stream. With the CPU as the device
    nothing is moved, nor looked ahead unless a background thread is asked for: the loader's batches pass through, and
    random numbers are drawn exactly as without the prefetcher.

    Example:
        >>> loader = torch.utils.data.DataLoader(range(4), batch_size=2)
        >>> loader = CUDAPrefetcher(loader, device="cpu")  # no device: the accelerator, where there is one
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]

    Batches keep their nesting: tensors of any shape, layout and type, mappings, named and plain tuples, lists and
    other sequences, dataclasses, ``PackedSequence``, and objects with a method ``.to(device)``, which is called;
    anything else, NumPy arrays too, is passed on as it is. Two references to one tensor stay two references to one
    tensor. The loader's batch is never written to. A leaf that requires gradients arrives as one that does.

    A batch can be used on the stream that is current when it is asked for, and on others after the usual
    ``wait_stream`` and ``record_stream``. Device memory holds at most ``prefetch_batches + 3`` batches, or 2 instead of
    3 (see ``memory``), beside what the caller keeps, what a cast or the transform needs for a moment, and what a second
    open pass holds. While a graph is captured no batch can be asked for (``PrefetchError``).

    If the loader has ``state_dict()`` and ``load_state_dict()``, so has the prefetcher: the state is that of the
    batches delivered, whatever has been looked ahead, in the loader's own format, and a copy. A state that is loaded
    rules the next pass. Every other attribute (``dataset``, ``sampler``, ``batch_size``, ...) is the loader's.

    Several passes can be open at once, if the loader's can. If it has only one iterator (``persistent_workers=True``),
    the older pass raises ``PrefetchError``.

    Args:
        loader: Anything that can be iterated over, best a ``DataLoader`` with ``pin_memory=True``: only pinned memory
            is copied while the host goes on (PyTorch, "A guide on good usage of non_blocking and pin_memory()").
        device: Where batches go. ``None``: the current accelerator, or the CPU where there is none. A name without an
            index ("cuda") means the device that is current now. An index means that accelerator.
        prefetch_batches: How many batches may be on the device, or on their way, beyond the one in use. With 0 there
            is no look-ahead: the loader is asked for a batch when the caller asks.
        background: Whether a thread advances the loader, copies and transforms, one for each pass: a batch that is
            ready is then handed over whatever the next one takes. It may load one batch more than the look-ahead, and
            draws random numbers beside the loop. Grad and inference mode, autocast and the default device in it are
            those of the first ``next()``. ``None``: exactly where a thread cannot change results, which is for a
            ``DataLoader`` with worker processes and torch's own samplers, without a ``transform``, on an accelerator.
        memory: Who owns the device memory. ``"record_stream"``: it is allocated on the side stream, and
            ``Tensor.record_stream`` keeps it from being reused before the consumer's kernels are done; before batch j
            is allocated, the host waits for step ``j - (prefetch_batches + 2)``. ``"consumer"``: it is allocated on the
            consumer's stream. ``"static"``: it is allocated once, in ``prefetch_batches + 2`` slots whose addresses
            stay. A batch that is still held when its slot comes round keeps its memory, and the slot gets other memory;
            one ``PrefetchWarning`` says so. Use of it on another stream must be waited for before it is let go. With
            both, a copy starts when the step before is done if nothing is looked ahead.
        pin_memory: Leaves that could only be copied synchronously, from pageable memory or from pinned memory with
            gaps, are staged through pinned buffers, which are reused. If false they are copied as they are. Either way
            the first leaf in pageable memory is named in one ``PrefetchWarning``.
        transform: Called on each device batch, on the side stream, under ``torch.no_grad``. Its result takes the
            batch's place; the tensors in its containers and in the stored attributes of its objects are protected,
            others (in an iterator, a closure) are not. Tensors that it closes over are waited for when a pass starts,
            and must neither be written to nor freed by the loop before it ends. With the CPU as the device it gets the
            loader's own batch, and should not write to it if the loader keeps it.
        dtype: Floating-point type to which floating leaves are cast, on the device, after the copy and before
            ``transform``.
        memory_format: As in ``Tensor.to``: ``torch.channels_last`` for 4-D leaves, ``torch.channels_last_3d`` for 5-D
            leaves, ``torch.contiguous_format`` for both. Objects with their own ``.to`` are neither cast nor
            reformatted.
        skip_keys: Mapping keys and field names, at any depth, whose values stay as the loader made them. Keys inside of
            objects with their own ``.to`` are not seen.
        profile: Take the device times of every batch for :attr:`stats`, and record :attr:`timeline` (the last 10 000
            batches); in ranges for NVIDIA's profilers too. Costs the host some 24 us a batch.

    Raises:
        TypeError: An argument is of the wrong type; ``loader`` cannot be iterated over.
        ValueError: An argument has a value that is not allowed.
        RuntimeError: ``device`` is an accelerator that is not there.
    """

    __module__ = "prefetch"

    @overload
    def __init__(
        self,
        loader: Iterable[T],
        device: torch.device | str | int | None = None,
        *,
        prefetch_batches: int = 2,
        background: bool | None = None,
        memory: MemoryName = "record_stream",
        pin_memory: bool = True,
        transform: None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        skip_keys: Collection[str] = (),
        profile: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self,
        loader: Iterable[Loaded],
        device: torch.device | str | int | None = None,
        *,
        prefetch_batches: int = 2,
        background: bool | None = None,
        memory: MemoryName = "record_stream",
        pin_memory: bool = True,
        transform: Callable[[Loaded], T],
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        skip_keys: Collection[str] = (),
        profile: bool = False,
    ) -> None: ...

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int | None = None,
        *,
        prefetch_batches: int = 2,
        background: bool | None = None,
        memory: MemoryName = "record_stream",
        pin_memory: bool = True,
        transform: Callable[[Any], T] | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        skip_keys: Collection[str] = (),
        profile: bool = False,
    ) -> None:
        check_loader(loader)
        check_memory(memory)
        check_transform(transform)
        check_background(background)
        check_pin_memory(pin_memory)
        check_dtype(dtype)
        check_memory_format(memory_format)
        check_profile(profile)
        self._prefetch_batches = checked_prefetch_batches(prefetch_batches)
        skipped = checked_skip_keys(skip_keys)
        self._device = resolve(device)
        self._loader = loader
        self._transfer = Transfer(
            self._device,
            transform=transform,
            dtype=dtype,
            memory_format=memory_format,
            skip_keys=skipped,
            pin_memory=pin_memory,
        )
        self._background = background
        self._memory = memory
        self._meter = Meter(self._device, profile=profile)
        self._side: Side | None = None
        self._passes: Members[Epoch[T]] = Members()
        self._state = LoaderState(loader)
        if self._state.is_kept():
            # Not methods of the class: who looks for them (torch.distributed.checkpoint, for one) must find them only
            # where there is a state. Bound to another object, they make no reference cycle.
            for name in _STATE_METHODS:
                if not hasattr(type(self), name):  # a subclass may have its own
                    setattr(self, name, getattr(self._state, name))

    @property
    def device(self) -> torch.device:
        """Where the batches are: the CPU, or an accelerator with its index."""
        return self._device

    @property
    def stats(self) -> Stats:
        """What the batches of all passes have taken so far, and what holds the loop back: ``print(loader.stats)``.

        With ``profile=True`` this waits until the device has finished the steps that are queued.
        """
        return self._meter.stats(self._transfer.pageable_leaves)

    @property
    def timeline(self) -> Timeline:
        """When each batch was loaded, copied, waited for and used. Waits until the queued steps are done.

        Raises:
            PrefetchError: It is recorded with ``profile=True`` only.
        """
        if not self._meter.marked.profile:
            raise PrefetchError("there is no timeline: it is recorded by CUDAPrefetcher(..., profile=True)")
        return self._meter.marked.timeline()

    @opaque
    def __iter__(self) -> Epoch[T]:
        """Start a pass: the loader's own pass starts now, in this thread.

        The iterator has a method ``close()``, which ends the pass early; letting go of the iterator does the same.
        """
        loader = self._loader
        if has_one_iterator(loader):  # which an earlier pass must let go of before it starts again
            for epoch in _open_passes.alive():
                if epoch.loader is loader:
                    epoch.supersede(None)
            wait_for_threads(loader)
        self._state.new_pass()
        iterator = iter(loader)
        for epoch in _open_passes.alive():
            epoch.supersede(iterator)
        check_is_free(iterator)
        new = self._new_epoch(iterator)
        new.loader = loader
        _open_passes.add(new)
        self._passes.add(new)
        return new

    def _new_epoch(self, iterator: Iterator[Any]) -> Epoch[T]:
        background = self._background
        if background is None:
            background = has_streams(self._device) and not self._transfer.has_transform and loads_apart(self._loader)
        is_plain = not background and not has_streams(self._device)
        look_ahead = 0 if is_plain else self._prefetch_batches
        meter = self._meter.new_pass(has_thread=background, look_ahead=look_ahead)
        state = self._state.track(looks_ahead=look_ahead > 0)
        if is_plain:
            return PlainEpoch(iterator, self._transfer, meter)
        lane = (
            SideStreamLane(self._own_side(), meter) if has_streams(self._device) else PlainLane(self._transfer, meter)
        )
        if background:
            feeder = BackgroundFeeder(iterator, lane.issue, look_ahead, state, meter, lane.caller_state, self._loader)
            return AheadEpoch(lane, feeder)
        return AheadEpoch(lane, InlineFeeder(iterator, lane.issue, look_ahead, state, meter))

    def _own_side(self) -> Side:
        if self._side is None:
            with _side_lock:  # two threads may start the first pass
                if self._side is None:
                    self._side = Side(self._transfer, self._memory, self._prefetch_batches)
        return self._side

    def close(self) -> None:
        """End every pass that is open. A later loop starts a new one; leaving a ``with`` block does the same.

        Waits a moment for a background thread whose loader is at work; if it does not return, its thread ends when it
        does, and a ``PrefetchWarning`` says so.
        """
        with contextlib.ExitStack() as closes:  # all of them, though a warning be made an error
            for epoch in self._passes.alive():
                closes.callback(epoch.close)

    def __enter__(self) -> CUDAPrefetcher[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CUDAPrefetcher({self._loader!r}, device={str(self._device)!r})"

    def __len__(self) -> int:
        """The loader's length.

        Raises:
            TypeError: The loader has none.
        """
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """As the loader: defining a length must not make a loader without one raise here."""
        return bool(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its sampler, its batch sampler and that one's sampler, where they want to know it."""
        for taker in {id(part): part for part in parts_of(self._loader)}.values():
            if callable(set_epoch := getattr(taker, "set_epoch", None)):
                set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not found here. During unpickling there is no loader yet.
        if (
            "_loader" not in self.__dict__ or name in _STATE_METHODS or name.startswith("__")
        ):  # copy asks for the latter
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __getstate__(self) -> dict[str, Any]:
        """All but the side stream, the open passes and what was measured: they belong to this object and process."""
        return self.__dict__ | {"_side": None, "_passes": None, "_meter": self._meter.marked.profile}

    def __setstate__(self, state: dict[str, Any]) -> None:
        meter = Meter(state["_device"], profile=state["_meter"])
        self.__dict__.update(state, _passes=Members(), _meter=meter)
