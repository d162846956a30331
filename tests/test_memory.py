"""Device and host memory: bounded, safe while streams use it, and let go when they are done."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from prefetch import CUDAPrefetcher
from prefetch._search import tensors_on
from prefetch._sources import Sources
from tests.helpers import BY_MEMORY, Numbered, run_python

ACCELERATOR = torch.accelerator
SIZE = 1 << 19  # 2 MiB of floats: the simulated allocator's unit for large blocks, so that bytes count batches
BATCH_BYTES = 4 * SIZE


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    """What these tests see go must go by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# Batches that each policy may reserve in a plain loop, beside those that are looked ahead.
BOUNDS = {"record_stream": 3, "consumer": 2, "static": 2}


def reserved_batches() -> int:
    """Device memory reserved by the allocator, in whole batches; small blocks may be left from other tests."""
    return ACCELERATOR.memory_reserved() // BATCH_BYTES


@BY_MEMORY
@pytest.mark.parametrize(("copy_us", "compute_us"), [(50, 200), (200, 50)])
@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 4])
@pytest.mark.parametrize("background", [False, True])
def test_bound_without_synchronisation(
    any_sim: Any, prefetch_batches: int, copy_us: int, compute_us: int, background: bool, memory: Any
) -> None:
    """After 200 steps of a loop that never synchronises no more than its policy's bound is reserved."""
    any_sim.configure(latency_us=copy_us, race=0)
    result = torch.zeros(SIZE, device="sim")
    for batch in CUDAPrefetcher(
        Numbered(200, SIZE), "sim", prefetch_batches=prefetch_batches, background=background, memory=memory
    ):
        any_sim.busy(compute_us)
        result.add_(batch)
    assert result[0].item() == 200 * 201 / 2
    assert reserved_batches() - 1 <= prefetch_batches + BOUNDS[memory]  # beside `result`


@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 3])
def test_steps_that_wait_hold_no_batch_back(sim: Any, prefetch_batches: int) -> None:
    """With a thread as many batches can be had before the device has done any step as the bound on memory allows."""
    iterator = iter(CUDAPrefetcher(Numbered(20), "sim", prefetch_batches=prefetch_batches, background=True))
    sim.hold_kernel()
    taken = []

    def count() -> None:
        for number in range(prefetch_batches + 2):
            next(iterator)
            sim.busy(1)
            taken.append(number)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    thread.join(20)
    got = len(taken)
    sim.release_kernels()
    thread.join()
    assert got == prefetch_batches + 2


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_constant_over_epochs(virtual_sim: Any, background: bool, memory: Any) -> None:
    """40 epochs, whole or broken off anywhere, reserve no more than the first eight did, and that within the bound."""
    virtual_sim.configure(latency_us=50)
    prefetcher = CUDAPrefetcher(Numbered(6, SIZE), "sim", background=background, memory=memory)
    reserved = []
    for epoch in range(40):
        for position, batch in enumerate(prefetcher):
            virtual_sim.busy(300)
            batch.mul_(2)
            if position == (epoch % 8):
                break
        reserved.append(reserved_batches())
    assert max(reserved) <= 2 + BOUNDS[memory]
    if not background:  # else it depends on how far the thread has come at a break
        assert set(reserved[8:]) == {reserved[7]}


@BY_MEMORY
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_bound_over_short_epochs(any_sim: Any, length: int, background: bool, memory: Any) -> None:
    """The bound counts batches over all epochs: short ones that never synchronise do not add up."""
    any_sim.configure(latency_us=50, race=0)
    prefetcher = CUDAPrefetcher(Numbered(length, SIZE), "sim", background=background, memory=memory)
    for _ in range(60):
        for batch in prefetcher:
            any_sim.busy(300)
            batch.mul_(2)
    assert reserved_batches() <= 2 + BOUNDS[memory]


@pytest.mark.parametrize("background", [False, True])
def test_kept_batches_stay_right(sim: Any, background: bool) -> None:
    """A caller that keeps every batch finds every value unchanged in the end."""
    sim.configure(latency_us=300)
    kept = []
    for batch in CUDAPrefetcher(Numbered(10), "sim", background=background):
        sim.busy(600)
        kept.append(batch)
    assert [batch.unique().tolist() for batch in kept] == [[float(i + 1)] for i in range(10)]


def means_read_late(sim: Any, prefetcher: Any, find: Any) -> list[float]:
    """The mean of a tensor in each batch, computed by a device that is late, of batches let go before it is."""
    sim.configure(latency_us=200)
    means = []
    for batch in prefetcher:
        sim.busy(1500)
        means.append(find(batch).mean())
        free_of_cycles(batch)
        del batch
    return torch.stack(means).tolist()


ONE_TO_TEN = [float(i + 1) for i in range(10)]


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_memory_let_go_early_is_protected(any_sim: Any, background: bool, memory: Any) -> None:
    """A batch that the caller drops while its kernels are still queued is not reused before they are done."""
    assert (
        means_read_late(
            any_sim, CUDAPrefetcher(Numbered(10), "sim", background=background, memory=memory), lambda batch: batch
        )
        == ONE_TO_TEN
    )
    assert any_sim.races() == []


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_transform_results_are_protected(any_sim: Any, background: bool, memory: Any) -> None:
    """Memory that the transform allocates, in any container, is not reused while the consumer reads it late."""
    any_sim.configure(kernel_us=200)
    prefetcher = CUDAPrefetcher(
        Numbered(10),
        "sim",
        transform=lambda batch: {"double": [batch * 2], "raw": batch},
        background=background,
        memory=memory,
    )
    means = means_read_late(any_sim, prefetcher, lambda batch: batch["double"][0] - batch["raw"])
    assert means == ONE_TO_TEN
    assert any_sim.races() == []


class Holder:
    """A foreign object that moves itself, hides its tensor in nested objects, and cannot be iterated over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = {"deep": [Inner(tensor)]}

    def to(self, device: torch.device, non_blocking: bool = False) -> Holder:
        """Makes another one."""
        return Holder(self.inner["deep"][0].tensor.to(device, non_blocking=non_blocking))


class Inner:
    """No container and without ``.to``; has slots and a cycle."""

    __slots__ = ("myself", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.myself: Inner | None = self


class DictWithTo(dict[str, torch.Tensor]):
    """A dict that moves itself."""

    def to(self, device: torch.device, non_blocking: bool = False) -> DictWithTo:
        """Makes another one."""
        return DictWithTo({key: value.to(device, non_blocking=non_blocking) for key, value in self.items()})


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that carries another one."""
    carrier = torch.zeros(4, device=tensor.device)
    carrier.mask = tensor * 1  # type: ignore[attr-defined]
    return carrier


# How to hide a tensor in a batch, and how to get at it.
HIDING_PLACES: dict[str, tuple[Any, Any]] = {
    "objects": (Holder, lambda batch: batch.inner["deep"][0].tensor),
    "dict with to": (lambda tensor: DictWithTo(x=tensor), lambda batch: batch["x"]),
    "packed": (lambda tensor: PackedSequence(tensor, torch.tensor([len(tensor)])), lambda batch: batch.data),
    "set": (lambda tensor: {tensor}, lambda batch: next(iter(batch))),
    "view of a dict": (lambda tensor: {"x": tensor}.values(), lambda batch: next(iter(batch))),
    "read-only dict": (lambda tensor: MappingProxyType({"x": tensor}), lambda batch: batch["x"]),
    "attribute of a tensor": (with_attribute, lambda batch: batch.mask),
    "plain object": (lambda tensor: SimpleNamespace(x=[tensor]), lambda batch: batch.x[0]),
}


def free_of_cycles(batch: Any) -> None:
    """Cut the cycle of a ``Holder``, which would keep its memory."""
    if isinstance(batch, Holder):
        batch.inner["deep"][0].myself = None


@BY_MEMORY
@pytest.mark.parametrize("place", HIDING_PLACES)
def test_hidden_results_are_protected(any_sim: Any, place: str, memory: Any) -> None:
    """Wherever the tensors of a transform's result are stored, they are not reused while they are read late."""
    hide, find = HIDING_PLACES[place]
    assert (
        means_read_late(any_sim, CUDAPrefetcher(Numbered(10), "sim", transform=hide, memory=memory), find) == ONE_TO_TEN
    )
    assert any_sim.races() == []


@BY_MEMORY
@pytest.mark.parametrize("place", ["objects", "dict with to", "packed", "read-only dict"])
@pytest.mark.parametrize("background", [False, True])
def test_moved_objects_are_protected(any_sim: Any, place: str, background: bool, memory: Any) -> None:
    """Tensors inside of objects that are moved, or move themselves, are not reused while they are read late."""
    hide, find = HIDING_PLACES[place]
    prefetcher = CUDAPrefetcher((hide(tensor) for tensor in Numbered(10)), "sim", background=background, memory=memory)
    assert means_read_late(any_sim, prefetcher, find) == ONE_TO_TEN
    assert any_sim.races() == []


@pytest.mark.parametrize("place", HIDING_PLACES)
@pytest.mark.parametrize("background", [False, True])
def test_hidden_device_tensors_are_awaited(any_sim: Any, place: str, background: bool) -> None:
    """Wherever the loader has put what it made on the device, a transform finds it ready."""
    hide, find = HIDING_PLACES[place]
    any_sim.configure(kernel_us=500)

    def batches() -> Iterator[Any]:
        for i in range(6):
            batch = hide(torch.full((1 << 14,), float(i), device="sim") * 2)
            yield batch
            free_of_cycles(batch)

    sums = [
        batch.mean()
        for batch in CUDAPrefetcher(batches(), "sim", transform=lambda batch: find(batch) + 1, background=background)
    ]
    ACCELERATOR.synchronize()
    assert [value.item() for value in sums] == [2.0 * i + 1 for i in range(6)]
    assert any_sim.races() == []


@pytest.mark.parametrize("background", [False, True])
def test_device_tensors_of_a_list_that_is_filled_again(any_sim: Any, background: bool) -> None:
    """What the loader made on the device is not reused under the transform, though the loader lets go of it."""
    any_sim.configure(kernel_us=1000)
    batch: list[Any] = [None]

    def batches() -> Iterator[list[Any]]:
        for i in range(8):
            batch[0] = torch.full((SIZE,), float(i), device="sim")
            yield batch

    prefetcher: Any = CUDAPrefetcher(
        batches(), "sim", prefetch_batches=3, transform=lambda batch: batch[0] * 2, background=background
    )
    assert [result[0].item() for result in prefetcher] == [2.0 * i for i in range(8)]
    assert any_sim.races() == []


def test_functions_are_not_searched(sim: Any) -> None:
    """A batch with a function in it does not drag in all that the function's module names."""
    batch = SimpleNamespace(function=means_read_late, method=Holder.to, builtin=len, module=gc)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "a_tensor_of_the_module", torch.ones(1, device="sim"))
        assert tensors_on(batch, torch.device("sim:0")) == []


def test_device_tensors_are_held_while_they_are_cast(any_sim: Any) -> None:
    """What the loader made on the device outlives the cast on the side stream, also when the transform then fails."""
    any_sim.configure(kernel_us=3000)
    batch: list[torch.Tensor] = []

    def batches() -> Iterator[list[torch.Tensor]]:
        batch.append(torch.full((SIZE,), 1.0, device="sim"))
        yield batch

    def fails(batch: Any) -> Any:
        raise ValueError("no good")

    iterator = iter(CUDAPrefetcher(batches(), "sim", prefetch_batches=0, dtype=torch.float64, transform=fails))
    with contextlib.suppress(ValueError):
        next(iterator)
    batch.clear()
    later = [torch.zeros(SIZE, device="sim") for _ in range(4)]
    ACCELERATOR.synchronize()
    assert sum(tensor.sum().item() for tensor in later) == 0
    assert any_sim.races() == []


class Given:
    """Hands out a fixed number of batches and forgets each at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __iter__(self) -> Given:
        return self

    def __next__(self) -> torch.Tensor:
        if len(self.made) == self.count:
            raise StopIteration
        batch = torch.full((SIZE,), float(len(self.made))).pin_memory()
        self.made.append(weakref.ref(batch))
        return batch

    def alive(self) -> list[int]:
        """The positions of the host batches that something still holds."""
        return [position for position, ref in enumerate(self.made) if ref() is not None]


class TestReferences:
    """Who holds what, and until when."""

    @BY_MEMORY
    @pytest.mark.parametrize(
        "transform",
        [None, lambda batch: (batch, batch + 1), lambda batch: MappingProxyType({"x": batch})],
        ids=["plain", "transform", "made in the second way"],
    )
    @pytest.mark.parametrize("background", [False, True])
    def test_delivered_batches_are_not_referenced(
        self, sim: Any, transform: Any, background: bool, memory: Any
    ) -> None:
        """As soon as the caller lets go of a batch it is gone."""
        iterator = iter(CUDAPrefetcher(Numbered(6), "sim", transform=transform, background=background, memory=memory))
        for _ in range(6):
            batch = next(iterator)
            found = tensors_on(batch, torch.device("sim:0"))
            leaves = [weakref.ref(leaf) for leaf in found]
            assert len(leaves) == (2 if isinstance(batch, tuple) else 1)
            del batch, found
            assert [leaf() for leaf in leaves] == [None] * len(leaves)

    def test_delivered_batches_on_the_cpu(self) -> None:
        """On the CPU too, for the loader's own batches."""
        iterator = iter(CUDAPrefetcher((torch.ones(i + 1) for i in range(3)), "cpu", dtype=torch.float64))
        for _ in range(3):
            batch = weakref.ref(next(iterator))
            assert batch() is None

    def test_host_batches_live_as_long_as_their_copies(self, sim: Any) -> None:
        """A host batch is held while its copy waits, and not after the copy is seen to be done."""
        loader = Given(5)
        iterator = iter(CUDAPrefetcher(loader, "sim", prefetch_batches=1))
        sim.hold_copies("h2d")
        batch = next(iterator)
        assert loader.alive() == [0, 1]
        sim.release_copies("h2d")
        ACCELERATOR.synchronize()
        batch = next(iterator)
        assert loader.alive() == [2]
        ACCELERATOR.synchronize()
        batch = next(iterator)
        assert loader.alive() == [3]
        assert batch[0].item() == 2.0

    def test_thread_keeps_no_host_batch(self, sim: Any) -> None:
        """While a background thread waits for the loader it holds no host batch that was copied."""
        is_asked, may_go_on = threading.Event(), threading.Event()

        class Slow(Given):
            def __next__(self) -> torch.Tensor:
                if self.made:
                    is_asked.set()
                    assert may_go_on.wait(60)
                return super().__next__()

        loader = Slow(3)
        prefetcher = CUDAPrefetcher(loader, "sim", background=True)
        iterator = iter(prefetcher)
        assert next(iterator)[0].item() == 0.0
        assert is_asked.wait(60)
        assert prefetcher._side is not None
        prefetcher._side.sources.release()
        assert loader.alive() == []
        may_go_on.set()
        assert [batch[0].item() for batch in iterator] == [1.0, 2.0]

    @BY_MEMORY
    @pytest.mark.parametrize("background", [False, True])
    def test_no_host_batch_after_the_end(self, sim: Any, background: bool, memory: Any) -> None:
        """With the end of a pass the last host batches are gone, though the consumer may still work."""
        sim.configure(latency_us=2000)
        loader = Given(4)
        iterator = iter(CUDAPrefetcher(loader, "sim", prefetch_batches=2, background=background, memory=memory))
        for _ in range(4):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
        assert loader.alive() == []

    @BY_MEMORY
    @pytest.mark.parametrize("background", [False, True])
    def test_host_batches_do_not_pile_up(self, sim: Any, background: bool, memory: Any) -> None:
        """A host that runs ahead of slow copies holds few host batches, also when it never reads a value."""
        sim.configure(latency_us=1000)
        loader = Given(60)
        peak = 0
        for _ in CUDAPrefetcher(loader, "sim", prefetch_batches=2, background=background, memory=memory):
            peak = max(peak, len(loader.alive()))
        assert peak <= 2 + 3 + background  # one is in the thread's hand

    @BY_MEMORY
    @pytest.mark.parametrize("background", [False, True])
    def test_host_batches_do_not_pile_up_under_errors(self, any_sim: Any, background: bool, memory: Any) -> None:
        """Nor when a transform fails on every batch, so that no step of the consumer holds the host back."""
        any_sim.configure(latency_us=2000)
        loader = Given(40)

        def transform(batch: torch.Tensor) -> Any:
            raise ValueError("never good")

        iterator = iter(
            CUDAPrefetcher(loader, "sim", prefetch_batches=2, transform=transform, background=background, memory=memory)
        )
        peak = failed = 0
        for _ in range(40):
            try:
                next(iterator)
            except ValueError:
                failed += 1
                peak = max(peak, len(loader.alive()))
        assert failed == 40
        assert peak <= 2 + 3 + background

    def test_batches_that_need_no_move_are_not_referenced(self, sim: Any) -> None:
        """What is passed on as it is goes as soon as the caller lets go of it, too."""
        batches = (torch.full((SIZE,), float(i), device="sim") for i in range(4))
        iterator = iter(CUDAPrefetcher(batches, "sim", prefetch_batches=1))
        for _ in range(3):
            batch = weakref.ref(next(iterator))
            assert batch() is None

    @BY_MEMORY
    def test_close_keeps_sources_of_running_copies(self, sim: Any, memory: Any) -> None:
        """A pass that is closed under running copies neither waits for them nor frees their host batches."""
        loader = Given(5)
        prefetcher = CUDAPrefetcher(loader, "sim", prefetch_batches=2, memory=memory)
        iterator: Any = iter(prefetcher)
        sim.hold_copies("h2d")
        batch = next(iterator)
        iterator.close()
        assert loader.alive() == [0, 1, 2]
        sim.release_copies("h2d")
        ACCELERATOR.synchronize()
        assert batch[0].item() == 0.0
        iterator.close()
        assert loader.alive() == []

    def test_prefetcher_that_goes_waits_for_its_copies(self, sim: Any) -> None:
        """When the prefetcher itself goes its sources outlive the copies, and then go."""
        sim.configure(latency_us=3000)
        loader = Given(5)
        batch = next(iter(CUDAPrefetcher(loader, "sim", prefetch_batches=2)))
        assert loader.alive() == []
        names = [span.name for span in sim.trace()]
        assert names.count("copy_h2d") == 3
        assert batch[0].item() == 0.0

    @pytest.mark.parametrize("background", [False, True])
    def test_undelivered_batches_go_with_the_pass(self, sim: Any, background: bool) -> None:
        """Letting go of the iterator frees the batches that were ahead, without the garbage collector."""
        prefetcher = CUDAPrefetcher(Numbered(8, SIZE), "sim", prefetch_batches=3, background=background)
        iterator = iter(prefetcher)
        batch = next(iterator)
        ACCELERATOR.synchronize()
        if not background:  # a thread may not have come so far yet
            assert ACCELERATOR.memory_allocated() == 4 * BATCH_BYTES
        del iterator
        assert ACCELERATOR.memory_allocated() == BATCH_BYTES
        assert batch[0].item() == 1.0

    @BY_MEMORY
    @pytest.mark.parametrize("background", [False, True])
    def test_destinations_of_a_closed_pass_are_not_overwritten_early(
        self, any_sim: Any, background: bool, memory: Any
    ) -> None:
        """The next pass takes over memory whose copies are under way without a race."""
        any_sim.configure(latency_us=3000)
        prefetcher = CUDAPrefetcher(Numbered(4), "sim", prefetch_batches=3, background=background, memory=memory)
        sums = []
        for _ in range(4):
            for batch in prefetcher:
                sums.append(batch.mean())
                break
        sums += [batch.mean() for batch in prefetcher]
        assert torch.stack(sums).tolist() == [1.0] * 4 + [1.0, 2.0, 3.0, 4.0]
        assert any_sim.races() == []

    @BY_MEMORY
    @pytest.mark.parametrize("background", [False, True])
    def test_destinations_of_a_closed_pass_are_not_handed_out_early(
        self, any_sim: Any, background: bool, memory: Any
    ) -> None:
        """What the caller allocates after closing a pass is not written to by copies that were under way."""
        any_sim.configure(latency_us=3000)
        prefetcher = CUDAPrefetcher(Numbered(5, SIZE), "sim", prefetch_batches=3, background=background, memory=memory)
        iterator: Any = iter(prefetcher)
        first = next(iterator).mean()
        iterator.close()
        later = [torch.full((SIZE,), 7.0, device="sim") for _ in range(6)]
        means = [tensor.mean() for tensor in later]
        assert torch.stack([first, *means]).tolist() == [1.0] + [7.0] * 6
        assert any_sim.races() == []

    def test_end_of_one_pass_does_not_wait_for_another(self, sim: Any) -> None:
        """A pass at its end waits for its own copies only."""
        prefetcher = CUDAPrefetcher(Numbered(2), "sim", prefetch_batches=1)
        first = iter(prefetcher)
        assert [next(first)[0].item(), next(first)[0].item()] == [1.0, 2.0]
        second = iter(prefetcher)
        sim.hold_copies("h2d")
        batch = next(second)
        with pytest.raises(StopIteration):
            next(first)
        sim.release_copies("h2d")
        assert batch[0].item() == 1.0

    @BY_MEMORY
    @pytest.mark.parametrize("culprit", ["loader", "transform"])
    @pytest.mark.parametrize("background", [False, True])
    def test_error_that_waits_keeps_nothing_alive(self, sim: Any, culprit: str, background: bool, memory: Any) -> None:
        """While an error waits for its turn delivered batches go as ever, and so does a pass that is let go."""

        class FailsSecond:
            asked = 0

            def __iter__(self) -> FailsSecond:
                return self

            def __next__(self) -> torch.Tensor:
                self.asked += 1
                if self.asked == 2 and culprit == "loader":
                    raise ValueError("two")
                return torch.full((SIZE,), float(self.asked)).pin_memory()

        def transform(batch: torch.Tensor) -> torch.Tensor:
            if batch[0].item() == 2:
                raise ValueError("two")
            return batch

        class Source:
            def __iter__(self) -> FailsSecond:
                iterator = FailsSecond()
                self.last = weakref.ref(iterator)
                return iterator

        source = Source()
        iterator = iter(
            CUDAPrefetcher(source, "sim", prefetch_batches=2, transform=transform, background=background, memory=memory)
        )
        batch = next(iterator)
        assert batch[0].item() == 1.0
        gone = weakref.ref(batch)
        del batch
        assert gone() is None
        assert source.last() is not None
        del iterator
        assert source.last() is None


class Copied:
    """Stands for the event of a copy."""

    def __init__(self, done: bool, also: Any = None) -> None:
        self.done = done
        self.also = also

    def query(self) -> bool:
        """Like a moment at which the garbage collector runs a finalizer."""
        if self.also is not None:
            also, self.also = self.also, None
            also()
        return self.done

    def synchronize(self) -> None:
        """Nothing is waited for."""


def test_host_batches_released_within_a_release() -> None:
    """A finalizer that interrupts the release of host batches releases no batch whose copy still runs."""
    sources = Sources(limit=9)
    batches = [torch.ones(i + 1) for i in range(2)]
    alive = [weakref.ref(batch) for batch in batches]
    first: Any = Copied(done=True, also=sources.release)
    second: Any = Copied(done=False)
    sources.hold(batches[0], first)
    sources.hold(batches[1], second)
    del batches
    sources.release()
    assert [ref() is not None for ref in alive] == [False, True]
    with sources._lock:  # where a finalizer can interrupt, too
        sources.release()


class OneBad(Dataset[torch.Tensor]):
    """Fails on one sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise ValueError("bad sample")
        return torch.ones(4)


@pytest.mark.parametrize("background", [False, True])
def test_workers_end_under_an_error_that_waits(sim: Any, background: bool) -> None:
    """A broken-off pass with a worker's error ahead ends the workers at once, as the bare loop does."""
    loader = DataLoader(OneBad(), batch_size=1, num_workers=2, pin_memory=True)
    iterator = iter(CUDAPrefetcher(loader, "sim", prefetch_batches=4, background=background))
    assert next(iterator).tolist() == [[1.0] * 4]
    workers = [child for child in multiprocessing.active_children() if child.name.startswith("Process")]
    assert len(workers) >= 2
    del iterator
    assert [worker for worker in multiprocessing.active_children() if worker in workers] == []


FORK = """
import gc, os
from types import SimpleNamespace
from tests import simulator
from tests.helpers import Numbered, run_python
simulator.load()
simulator.configure(latency_us=200_000)
from prefetch import CUDAPrefetcher
from prefetch._sources import Sources
from prefetch._search import tensors_on

prefetcher = CUDAPrefetcher(Numbered(4), "sim", transform=lambda batch: batch)
iterator = iter(prefetcher)
next(iterator)
child = os.fork()
if child == 0:
    del iterator, prefetcher
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(len(list(iterator)))
"""


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_lets_go_quietly(sim: Any) -> None:
    """A forked process that drops an open pass neither waits for copies that are not its own nor complains."""
    result = run_python("-W", "ignore", "-c", FORK, timeout=60)
    assert (result.stdout, result.stderr, result.returncode) == ("3\n", "", 0)
