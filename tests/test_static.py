"""memory="static": addresses that stay, and batches that nobody overwrites while they are in use."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher, PrefetchWarning
from tests.helpers import Numbered, numbered

ACCELERATOR = torch.accelerator
SIZE = 1 << 19  # 2 MiB of floats: the simulated allocator's unit for large blocks, so that bytes count batches
BATCH_BYTES = 4 * SIZE
BACKGROUND = pytest.mark.parametrize("background", [False, True])


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """What other tests have left in cycles is not counted."""
    gc.collect()


def allocations() -> int:
    """How often device memory has been asked for so far."""
    return int(ACCELERATOR.memory_stats()["allocation.all.allocated"])


def reserved_batches() -> int:
    """Whole batches; small blocks may be left from other tests."""
    return ACCELERATOR.memory_reserved() // BATCH_BYTES


def full(*shape: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A pinned tensor."""
    return torch.full(shape, value, dtype=dtype).pin_memory()


def split(batch: torch.Tensor) -> dict[str, Any]:
    """A transform with two results, one of them new."""
    return {"raw": batch, "rest": [batch[: SIZE // 2] * 2]}


def leaves(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch."""
    if isinstance(batch, dict):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, (list, tuple)):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch]


def addresses(prefetcher: Any, stop: int = -1) -> list[tuple[int, ...]]:
    """Where the leaves of the batches of one pass are, in a plain loop that works on them; stops after one of them."""
    found = []
    for position, batch in enumerate(prefetcher):
        for leaf in leaves(batch):
            leaf.add_(1)
        found.append(tuple(leaf.data_ptr() for leaf in leaves(batch)))
        if position == stop:
            break
    return found


class TestAddresses:
    """Slots are allocated once, and batches go through them in turn."""

    @BACKGROUND
    @pytest.mark.parametrize("prefetch_batches", [0, 1, 2])
    @pytest.mark.parametrize(
        "options",
        [{}, {"dtype": torch.float64}, {"memory_format": torch.channels_last}, {"transform": split}],
        ids=["plain", "dtype", "memory format", "transform"],
    )
    def test_in_turn(self, any_sim: Any, prefetch_batches: int, options: Any, background: bool) -> None:
        """In every pass batch i is where batch i + prefetch_batches + 2 is, whatever is done to batches."""
        any_sim.configure(race=0)
        slots = prefetch_batches + 2
        prefetcher = CUDAPrefetcher(
            [full(2, 4, 8, 8, value=float(i)) for i in range(9)],
            "sim",
            memory="static",
            prefetch_batches=prefetch_batches,
            background=background,
            **options,
        )
        first = addresses(prefetcher)
        assert len(set(first)) == slots
        assert first == [first[i % slots] for i in range(9)]
        for _ in range(3):
            assert set(addresses(prefetcher)) == set(first)

    @BACKGROUND
    def test_broken_off_passes(self, virtual_sim: Any, background: bool) -> None:
        """Passes that are broken off anywhere use the slots of the first one, and allocate nothing."""
        prefetcher = CUDAPrefetcher(numbered(6), "sim", memory="static", background=background)
        known = set(addresses(prefetcher))
        before = allocations()
        for epoch in range(24):
            assert set(addresses(prefetcher, stop=epoch % 6)) <= known
        assert allocations() == before

    @BACKGROUND
    @pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 4])
    def test_memory(self, any_sim: Any, prefetch_batches: int, background: bool) -> None:
        """Exactly prefetch_batches + 2 batches are allocated, with the first batch, and never anything after it."""
        any_sim.configure(latency_us=50, race=0)
        prefetcher = CUDAPrefetcher(
            Numbered(60, SIZE), "sim", memory="static", prefetch_batches=prefetch_batches, background=background
        )
        counted = []
        before = allocations()
        for _ in range(3):
            for batch in prefetcher:
                any_sim.busy(100)
                batch.mul_(2)
                counted.append(allocations())
        slots = prefetch_batches + 2
        assert reserved_batches() == slots
        assert set(counted) == {before + slots}

    def test_short_batch(self, any_sim: Any) -> None:
        """A short last batch is the beginning of its slot, at the slot's address."""
        batches = [*(full(8, 2, value=float(i)) for i in range(4)), full(3, 2, value=4.0)]
        prefetcher = CUDAPrefetcher(batches, "sim", memory="static")
        known = set(addresses(prefetcher))
        for batch in prefetcher:
            assert (batch.data_ptr(),) in known
            assert batch.untyped_storage().nbytes() == 8 * 2 * 4
            value = batch.flatten()[0].item()
            assert (tuple(batch.shape), batch.unique().tolist()) == ((3, 2) if value == 4.0 else (8, 2), [value])
        assert len(known) == 4

    @BACKGROUND
    def test_larger_batch(self, any_sim: Any, background: bool) -> None:
        """A batch that is larger than its slot makes each slot grow once; then the addresses stay again."""
        any_sim.configure(latency_us=200)
        batches = [full(4 if i < 6 else 8, 512, value=float(i)) for i in range(12)]
        prefetcher = CUDAPrefetcher(batches, "sim", memory="static", background=background)
        sums = []
        for batch in prefetcher:
            any_sim.busy(500)
            sums.append(batch.mean())
        del batch
        assert torch.stack(sums).tolist() == [float(i) for i in range(12)]
        before = allocations()
        known = addresses(prefetcher)
        assert len(set(known)) == 4
        assert set(addresses(prefetcher)) == set(known)
        assert allocations() == before
        assert any_sim.races() == []

    @BACKGROUND
    def test_one_large_batch(self, virtual_sim: Any, background: bool) -> None:
        """All slots grow for a batch that is larger, whichever it comes to first: later it comes to others."""
        batches = [full(8 if i == 1 else 4, 512, value=float(i)) for i in range(9)]
        prefetcher = CUDAPrefetcher(batches, "sim", memory="static", background=background)
        known = set(addresses(prefetcher)[-4:])
        before = allocations()
        for _ in range(4):
            assert set(addresses(prefetcher)) == known
        assert allocations() == before

    def test_several_types(self, sim: Any) -> None:
        """Nested leaves of several types each have their place; an empty one needs none."""

        def batch(i: int) -> dict[str, Any]:
            return {
                "image": full(2, 3, 4, 4, value=float(i)),
                "label": (full(2, value=i, dtype=torch.int64), [full(2, value=i % 2, dtype=torch.bool)]),
                "half": full(5, value=float(i), dtype=torch.bfloat16),
                "scalar": torch.tensor(float(i)).pin_memory(),
                "empty": torch.empty(0, 3),
                "name": f"number {i}",
            }

        prefetcher = CUDAPrefetcher([batch(i) for i in range(8)], "sim", memory="static")
        passes: list[list[tuple[int, ...]]] = []
        for _ in range(2):
            passes.append([])
            for i, got in enumerate(prefetcher):
                parts = [got["image"], got["label"][0], got["label"][1][0], got["half"], got["scalar"]]
                assert [part.unique().tolist() for part in parts] == [[i], [i], [bool(i % 2)], [i], [i]]
                assert got["image"].dtype == torch.float32
                assert got["half"].dtype == torch.bfloat16
                assert (tuple(got["empty"].shape), got["name"]) == ((0, 3), f"number {i}")
                passes[-1].append(tuple(part.data_ptr() for part in parts))
                del parts
        assert [len(set(found)) for found in passes] == [4, 4]
        assert set(passes[0]) == set(passes[1])
        assert len({address for slot in passes[0] for address in slot}) == 4 * 5

    def test_aliases(self, sim: Any) -> None:
        """Two references to one tensor are references to one, and need memory once."""
        tensors = numbered(6, SIZE)
        prefetcher = CUDAPrefetcher([{"a": tensor, "b": [tensor]} for tensor in tensors], "sim", memory="static")
        for i, batch in enumerate(prefetcher):
            assert batch["a"] is batch["b"][0]  # type: ignore[index]
            assert batch["a"].unique().tolist() == [i + 1.0]
        assert reserved_batches() == 4

    @BACKGROUND
    def test_leaves_on_the_device(self, any_sim: Any, background: bool) -> None:
        """What the loader has made on the device is copied to the slots, when it is ready."""
        any_sim.configure(kernel_us=500)
        own: list[int] = []

        def batches() -> Iterator[torch.Tensor]:
            for i in range(8):
                made = torch.full((SIZE,), float(i), device="sim") * 2
                own.append(made.data_ptr())
                yield made

        found, sums = [], []
        for batch in CUDAPrefetcher(batches(), "sim", memory="static", background=background):
            found.append(batch.data_ptr())
            sums.append(batch.mean())
        assert torch.stack(sums).tolist() == [2.0 * i for i in range(8)]
        assert len(set(found)) == 4
        assert not set(found) & set(own)
        assert any_sim.races() == []

    def test_attributes_of_results(self, sim: Any) -> None:
        """What a transform has stored on a tensor is there on the one in the slot."""

        def mark(batch: torch.Tensor) -> torch.Tensor:
            batch.mark = batch[0].item()  # type: ignore[attr-defined]
            return batch

        prefetcher = CUDAPrefetcher(numbered(6), "sim", memory="static", transform=mark)
        assert [batch.mark for batch in prefetcher] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # type: ignore[attr-defined]

    def test_another_object_each_time(self, sim: Any) -> None:
        """What is done to a tensor object is not seen on later batches of its slot."""
        seen = []
        for batch in CUDAPrefetcher(numbered(9), "sim", memory="static"):
            seen.append((batch.requires_grad, hasattr(batch, "mark"), batch._version, tuple(batch.shape)))
            batch.mark = 1  # type: ignore[attr-defined]
            batch.mul_(2).resize_(3).requires_grad_()
        assert seen == [seen[0]] * 9
        assert seen[0][:2] == (False, False)

    def test_two_open_passes(self, any_sim: Any) -> None:
        """Passes that are open at once have different slots, which serve later passes when they are closed."""
        any_sim.configure(latency_us=300)
        prefetcher = CUDAPrefetcher(Numbered(8), "sim", memory="static")
        found: list[set[int]] = []
        for _ in range(2):
            left, right, pairs = set(), set(), []
            for first, second in zip(prefetcher, prefetcher, strict=True):
                any_sim.busy(800)
                left.add(first.data_ptr())
                right.add(second.data_ptr())
                pairs.append((first.mean(), second.mean()))
            del first, second
            assert [(one.item(), other.item()) for one, other in pairs] == [(i + 1.0, i + 1.0) for i in range(8)]
            assert not left & right
            found += [left, right]
        assert found[:2] in (found[2:], found[:1:-1])  # the same slots, in one order or the other
        before = allocations()
        for _ in range(4):
            assert {address for (address,) in addresses(prefetcher)} in found
        assert allocations() == before
        assert any_sim.races() == []


def graph_of(batch: torch.Tensor) -> torch.Tensor:
    """A result whose graph needs the batch for its backward pass."""
    return batch * torch.ones(1, device="sim", requires_grad=True)


# What may be kept of a batch, and how to read the batch from it.
HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], list[float]]]] = {
    "batch": (lambda batch: batch, lambda kept: kept.unique().tolist()),
    "list": (lambda batch: [batch], lambda kept: kept[0].unique().tolist()),
    "view": (lambda batch: batch[3:7], lambda kept: kept.unique().tolist()),
    "detached": (lambda batch: batch.detach(), lambda kept: kept.unique().tolist()),
    "data": (lambda batch: batch.data, lambda kept: kept.unique().tolist()),
    "storage": (
        lambda batch: batch.untyped_storage(),
        lambda kept: torch.empty(0, device="sim").set_(kept, 0, (8,), (1,)).unique().tolist(),
    ),
    "graph": (graph_of, lambda kept: kept.grad_fn._saved_self.unique().tolist()),
}


class TestHeld:
    """A batch that is still held when its slot comes round keeps its memory."""

    @pytest.mark.parametrize("holder", HOLDERS)
    @BACKGROUND
    def test_is_not_overwritten(self, any_sim: Any, holder: str, background: bool) -> None:
        """Whatever refers to the memory of a batch finds the batch there, also after the slot has come round often."""
        any_sim.configure(latency_us=200)
        keep, read = HOLDERS[holder]
        prefetcher = CUDAPrefetcher(Numbered(16), "sim", memory="static", background=background)
        kept, sums = None, []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for batch in prefetcher:
                any_sim.busy(500)
                if kept is None:
                    kept = keep(batch)
                sums.append(batch.mean())
        assert read(kept) == [1.0]
        assert torch.stack(sums).tolist() == [i + 1.0 for i in range(16)]
        # A thread that does not get ahead of the loop does not need the slot.
        assert len(warned) in ((0, 1) if background else (1,))
        for one in warned:
            assert str(one.message).startswith("a batch is still held while 3 later ones")
            assert (one.category, one.filename) == (PrefetchWarning, __file__)
        assert any_sim.races() == []

    @BACKGROUND
    def test_all_kept(self, any_sim: Any, background: bool) -> None:
        """A caller that keeps every batch has every value, is told once, and once all are let go slots serve again."""
        any_sim.configure(latency_us=200)
        prefetcher = CUDAPrefetcher(Numbered(10), "sim", memory="static", background=background)
        with pytest.warns(PrefetchWarning) as warned:
            kept = [batch for _ in range(2) for batch in prefetcher]
        assert [batch.unique().tolist() for batch in kept] == [[i + 1.0] for i in range(10)] * 2
        assert len({batch.data_ptr() for batch in kept}) == 20
        assert len(warned) == 1
        kept.clear()
        known = set(addresses(prefetcher))
        before = allocations()
        assert len(known) == 4
        assert set(addresses(prefetcher)) == known
        assert allocations() == before

    @BACKGROUND
    @pytest.mark.parametrize("grows", [False, True])
    @pytest.mark.filterwarnings("ignore:a batch is still held")
    def test_let_go_late(self, any_sim: Any, grows: bool, background: bool) -> None:
        """Memory that a held batch has kept is not used again while what was queued on it last still reads it."""
        any_sim.configure(latency_us=100)
        batches = [full(SIZE // 4 if grows and i < 6 else SIZE, value=float(i)) for i in range(24)]
        kept: deque[torch.Tensor] = deque()
        sums = []
        for position, batch in enumerate(CUDAPrefetcher(batches, "sim", memory="static", background=background)):
            kept.append(batch)
            if len(kept) > (6 if position > 10 else 0):
                any_sim.busy(1000)
                sums.append(kept[0].mean())
                kept.popleft()
        assert torch.stack(sums).tolist() == [float(i) for i in range(18)]
        assert any_sim.races() == []

    @BACKGROUND
    def test_last_batch_and_this_one(self, any_sim: Any, background: bool) -> None:
        """A step that works on the last batch too keeps its slot until then, and nothing is warned of."""
        any_sim.configure(latency_us=200, kernel_us=700)
        last, sums = None, []
        for batch in CUDAPrefetcher(Numbered(16), "sim", memory="static", background=background):
            if last is not None:
                sums.append((batch * last).mean())
            last = batch
        assert torch.stack(sums).tolist() == [(i + 1.0) * (i + 2.0) for i in range(15)]
        assert any_sim.races() == []

    def test_warning_made_an_error(self, sim: Any) -> None:
        """Where warnings are errors, the loop that goes on after it has every batch."""
        iterator = iter(CUDAPrefetcher(Numbered(8), "sim", memory="static"))
        kept: list[torch.Tensor] = []
        errors = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            while len(kept) < 8:
                try:
                    kept.append(next(iterator))
                except PrefetchWarning:
                    errors += 1
        assert [batch.unique().tolist() for batch in kept] == [[i + 1.0] for i in range(8)]
        assert errors == 1


class TestErrors:
    """Batches that come to nothing."""

    @BACKGROUND
    @pytest.mark.parametrize("after_a_result", [False, True])
    def test_transform_that_fails(self, any_sim: Any, after_a_result: bool, background: bool) -> None:
        """Slots of batches whose transform fails serve the next ones: nothing is allocated for them."""
        any_sim.configure(latency_us=200, race=0)

        class Refusing:
            """Fails when it is moved, after the leaf before it has its place."""

            def to(self, device: Any) -> Any:
                raise ValueError("no good")

        def batch(i: int) -> list[Any]:
            bad = i % 2 == 1
            return [full(SIZE, value=float(i)), Refusing() if bad and after_a_result else bad]

        def transform(batch: list[Any]) -> list[Any]:
            if batch[1]:
                raise ValueError("no good")
            return batch

        iterator = iter(
            CUDAPrefetcher(
                (batch(i) for i in range(40)),
                "sim",
                memory="static",
                transform=None if after_a_result else transform,
                background=background,
            )
        )
        got: list[float] = []
        errors = 0
        while True:
            try:
                got.append(next(iterator)[0][0].item())
            except ValueError:
                errors += 1
            except StopIteration:
                break
        assert got == [float(i) for i in range(0, 40, 2)]
        assert errors == 20
        # Beside the slots, the raw batches that a transform works on.
        assert reserved_batches() <= (4 if after_a_result else 4 + 5)
