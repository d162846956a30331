"""Leaves that cannot be copied from where they are go through pinned memory, and arrive as .to() would bring them."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from prefetch import CUDAPrefetcher, PrefetchError, PrefetchWarning

ACCELERATOR = torch.accelerator
SIZE = 1 << 19  # 2 MiB of floats
FEEDERS = pytest.mark.parametrize("background", [False, True])


class Pageable:
    """New batches in ordinary memory; all elements of batch ``i`` are ``i + 1``."""

    def __init__(self, count: int, size: int = 1 << 14) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.count):
            yield torch.full((self.size,), float(i + 1))


@FEEDERS
@pytest.mark.parametrize("prefetch_batches", [0, 1, 3])
@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_buffers_are_not_overwritten_in_flight(any_sim: Any, prefetch_batches: int, background: bool) -> None:
    """With slow copies and reused buffers every value arrives, and nothing races."""
    any_sim.configure(latency_us=1500)
    prefetcher = CUDAPrefetcher(Pageable(20), "sim", prefetch_batches=prefetch_batches, background=background)
    sums = [batch.mean() for batch in prefetcher]
    assert torch.stack(sums).tolist() == [float(i + 1) for i in range(20)]
    assert any_sim.races() == []


@FEEDERS
@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_page_locked_memory_is_allocated_once(any_sim: Any, background: bool) -> None:
    """300 batches of two leaves take a fixed number of buffers, in which the host runs ahead as far as it may."""
    any_sim.configure(latency_us=300, race=0)
    batches = ((batch, batch[:100]) for batch in Pageable(300))
    before = any_sim.pinned_blocks()
    for batch in CUDAPrefetcher(batches, "sim", prefetch_batches=2, background=background):
        batch[0].mul_(2)
    assert 0 <= any_sim.pinned_blocks() - before <= 2 * (2 + 4)


@FEEDERS
def test_host_does_not_wait(sim: Any, background: bool) -> None:
    """The batch is handed out, and the loader has its memory back, while the copy has not begun."""
    sim.hold_copies("h2d")
    source = torch.ones(1 << 14)
    iterator = iter(CUDAPrefetcher([source], "sim", prefetch_batches=0, background=background))
    batch = next(iterator)
    assert not ACCELERATOR.current_stream().record_event().query()
    source.fill_(7)
    sim.release_copies("h2d")
    assert batch.unique().tolist() == [1.0]


def test_without_pinning(sim: Any) -> None:
    """With pin_memory=False nothing is pinned, and the copy is synchronous."""
    before = sim.pinned_allocations()
    source = torch.ones(1 << 14)
    iterator = iter(CUDAPrefetcher([source, source], "sim", pin_memory=False))
    batch = next(iterator)
    source.fill_(7)
    assert batch.unique().tolist() == [1.0]
    assert sim.pinned_allocations() == before
    with pytest.warns(PrefetchWarning, match="pageable"):
        next(iterator)


def base() -> torch.Tensor:
    """Some numbers in four dimensions."""
    return torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)


VIEWS = {
    "dense": base,
    "columns": lambda: base()[..., 1:],
    "every other": lambda: base()[::2, :, ::2],
    "transposed": lambda: base().transpose(1, 3),
    "transposed columns": lambda: base().transpose(0, 2)[1:, ..., 2:],
    "channels last": lambda: base().contiguous(memory_format=torch.channels_last),
    "channels last with gaps": lambda: base().contiguous(memory_format=torch.channels_last)[:, :, 1:],
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "no dimension": lambda: torch.tensor(3.0),
    "empty": lambda: base()[:, :0],
    "bool": lambda: base() > 7,
    "uint16": lambda: base().to(torch.uint16)[..., ::2],
    "bfloat16": lambda: base().to(torch.bfloat16)[:, 1:],
    "float8": lambda: base().to(torch.float8_e4m3fn),
    "complex": lambda: torch.complex(base(), -base())[..., :2],
    "conjugated": lambda: torch.complex(base(), -base()).conj(),
    "negated view": lambda: torch.complex(base(), -base()).conj().imag,
    "parameter": lambda: torch.nn.Parameter(base()),
    "with gradient": lambda: base().requires_grad_(),
    "with graph": lambda: base().requires_grad_() * 2,
}


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_arrives_as_with_to(sim: Any, view: str, pinned: bool) -> None:
    """Values, type, strides and gradients are those of .to(device)."""
    source = VIEWS[view]()
    if pinned and view not in ("parameter", "with graph", "conjugated", "negated view"):
        whole = (source if source._base is None else source._base).detach()
        again = whole.pin_memory().as_strided(source.shape, source.stride(), source.storage_offset())
        source = again.requires_grad_(source.requires_grad)
    want = source.to("sim")
    (got,) = CUDAPrefetcher([source], "sim")
    assert (type(got), got.dtype, got.shape, got.stride()) == (type(want), want.dtype, want.shape, want.stride())
    assert got.requires_grad == source.requires_grad
    assert torch.equal(got.detach().cpu().resolve_conj(), source.detach().resolve_conj().resolve_neg())


@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_types_that_cannot_be_copied_on_the_host(sim: Any) -> None:
    """Types for which torch has no copy from tensor to tensor arrive as .to() brings them."""
    uint4: torch.dtype = torch.uint4  # type: ignore[attr-defined] # torch's types do not know it
    (got,) = CUDAPrefetcher([torch.arange(8, dtype=torch.uint8).view(uint4)], "sim")
    assert got.dtype == uint4
    assert got.view(torch.uint8).tolist() == list(range(8))


def test_batch_that_cannot_be_remade(sim: Any) -> None:
    """Its pageable leaf is named, and not kept."""

    class Odd(list[Any]):
        def __init__(self) -> None:
            super().__init__()

        def __copy__(self) -> Any:
            raise TypeError("no copies")

    batch = {"odd": Odd()}
    batch["odd"].append(torch.ones(3))
    leaf = weakref.ref(batch["odd"][0])
    iterator = iter(CUDAPrefetcher([batch, 1], "sim", prefetch_batches=0))
    with pytest.raises(PrefetchError, match="cannot be made"):
        next(iterator)
    batch.clear()
    gc.collect()
    assert leaf() is None
    with pytest.warns(PrefetchWarning, match=r'^batch\["odd"\]\[0\] '):
        next(iterator)


@FEEDERS
def test_pinned_views_with_gaps(sim: Any, background: bool) -> None:
    """Columns of pinned memory, which torch copies synchronously in silence, are staged, and nothing is said."""
    sim.hold_copies("h2d")
    pinned = torch.ones(100, 100).pin_memory()
    iterator = iter(CUDAPrefetcher([pinned[:, 1:], pinned[::2]], "sim", prefetch_batches=1, background=background))
    columns, rows = next(iterator), next(iterator)  # a synchronous copy would not return
    sim.release_copies("h2d")
    assert (columns.sum().item(), rows.sum().item()) == (9900.0, 5000.0)
    assert list(iterator) == []


class Point(NamedTuple):
    """Named fields."""

    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    """A dataclass, which DataLoader leaves in pageable memory."""

    image: torch.Tensor
    label: int


class Mover:
    """Copies itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inside = [tensor]

    def to(self, device: torch.device, non_blocking: bool = False) -> Mover:
        return Mover(self.inside[0].to(device, non_blocking=non_blocking))


PLACES = {
    "batch": lambda leaf, pinned: leaf,
    'batch["image"]': lambda leaf, pinned: {"label": pinned, "image": leaf},
    'batch["a"][1].y': lambda leaf, pinned: {"a": [pinned, Point(pinned, leaf)]},
    "batch[2]": lambda leaf, pinned: (pinned, None, leaf),
    "batch[7].image": lambda leaf, pinned: {7: Sample(leaf, 1)},
    "batch.inside[0]": lambda leaf, pinned: Mover(leaf),
}


class TestWarning:
    """One for each prefetcher, that says where to look and what to do."""

    @FEEDERS
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("pin_memory", [False, True])
    def test_names_the_leaf(self, sim: Any, place: str, pin_memory: bool, background: bool) -> None:
        """The path is what the user would write to get at it."""
        pinned = torch.ones(2).pin_memory()
        batches = [PLACES[place](torch.ones(2, 3), pinned) for _ in range(4)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prefetcher = CUDAPrefetcher(batches, "sim", pin_memory=pin_memory, background=background)
            for _ in range(2):
                for _ in prefetcher:
                    pass
        (only,) = [str(warning.message) for warning in caught]
        assert only.startswith(f"{place} (shape (2, 3), torch.float32) is in pageable memory")
        assert "DataLoader(pin_memory=True)" in only

    @FEEDERS
    def test_nothing_to_say(self, sim: Any, background: bool) -> None:
        """Pinned batches, whatever else is in them, cause none (warnings are errors here)."""
        leaf = torch.ones(2).pin_memory()
        batch = {"a": leaf, "view": leaf[::2], "empty": torch.ones(0), "none": None, "object": SimpleNamespace(x=1)}
        assert len(list(CUDAPrefetcher([batch] * 3, "sim", background=background))) == 3

    def test_on_the_cpu(self) -> None:
        """Nothing is copied there."""
        assert len(list(CUDAPrefetcher([torch.ones(2)] * 3, "cpu", background=True))) == 3


class Samples(Dataset[Sample]):
    """Of a dataclass."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Sample:
        return Sample(torch.full((1 << 12,), float(index)), index)


def first(samples: list[Sample]) -> Sample:
    """A collate function for batches of one."""
    return samples[0]


@FEEDERS
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_dataclasses_of_a_dataloader(sim: Any, workers: int, background: bool) -> None:
    """They profit without a method of their own."""
    sim.configure(latency_us=500)
    loader = DataLoader(Samples(), collate_fn=first, num_workers=workers, pin_memory=True)
    got = [(type(b), b.image.mean(), b.label) for b in CUDAPrefetcher(loader, "sim", background=background)]
    assert [(kind, mean.item(), label) for kind, mean, label in got] == [(Sample, float(i), i) for i in range(6)]
