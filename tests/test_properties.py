"""Random nested batches: what arrives is what was sent, what was moved is what is protected, aliases stay aliases."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefetch import CUDAPrefetcher
from prefetch._search import tensors_on
from prefetch._transfer import Transfer

DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    """A data class."""

    value: Any
    note: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen data class with slots."""

    value: Any


class Boxed:
    """An object that moves itself."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def to(self, device: torch.device, non_blocking: bool = False) -> Boxed:
        """Makes another one."""
        return Boxed(self.value.to(device, non_blocking=non_blocking))


def a_tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A pinned tensor with values of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype).pin_memory()


tensors = st.builds(a_tensor, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES), st.integers(0, 1000))
atoms = st.none() | st.integers() | st.text(max_size=3) | st.booleans() | st.binary(max_size=3)


def nested(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers of every kind around items."""
    some = st.lists(items, max_size=3)
    keyed = st.dictionaries(st.text(max_size=2) | st.integers(0, 5), items, max_size=3)
    return st.one_of(
        some,
        some.map(tuple),
        some.map(deque),
        some.map(UserList),
        keyed,
        keyed.map(OrderedDict),
        keyed.map(UserDict),
        keyed.map(MappingProxyType),
        st.builds(Pair, items, items),
        st.builds(Record, items, items),
        st.builds(Frozen, items),
        some.map(lambda values: [*values, *values]),  # the same objects twice
    )


batches = st.recursive(tensors | atoms | tensors.map(Boxed), nested, max_leaves=12)


def assert_arrived(sent: Any, got: Any, counterparts: dict[int, Any]) -> None:
    """Check types, values, device, and that one tensor stays one."""
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert str(got.device) == "sim:0"
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert torch.equal(got.cpu(), sent)
        assert counterparts.setdefault(id(sent), got) is got
    elif isinstance(sent, Mapping):
        assert list(got) == list(sent)
        for key in sent:
            assert_arrived(sent[key], got[key], counterparts)
    elif isinstance(sent, (tuple, list, deque, UserList)):
        assert len(got) == len(sent)
        for before, after in zip(sent, got, strict=True):
            assert_arrived(before, after, counterparts)
    elif isinstance(sent, (Record, Frozen)):
        for field in dataclasses.fields(sent):
            assert_arrived(getattr(sent, field.name), getattr(got, field.name), counterparts)
    elif isinstance(sent, Boxed):
        assert_arrived(sent.value, got.value, {})  # its own .to may make a tensor of its own
    else:
        assert got is sent


def places(found: list[torch.Tensor]) -> set[int]:
    """The memory of tensors that have some."""
    return {tensor.data_ptr() for tensor in found if tensor.numel()}


def leaves(node: Any) -> list[torch.Tensor]:
    """All tensors of a batch, found in another way than the library does."""
    if isinstance(node, torch.Tensor):
        return [node]
    if isinstance(node, Mapping):
        return [leaf for key in node for leaf in leaves(node[key])]
    if isinstance(node, (tuple, list, deque, UserList)):
        return [leaf for item in node for leaf in leaves(item)]
    if isinstance(node, (Record, Frozen)):
        return [leaf for field in dataclasses.fields(node) for leaf in leaves(getattr(node, field.name))]
    return leaves(node.value) if isinstance(node, Boxed) else []


usual = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@usual
@given(sent=st.lists(batches, max_size=3), prefetch_batches=st.integers(0, 3))
def test_batches_arrive(sim: Any, sent: list[Any], prefetch_batches: int) -> None:
    """Any batches, with any look-ahead, arrive with their types, values and aliases; the sent ones stay on the host."""
    got = list(CUDAPrefetcher(sent, "sim:0", prefetch_batches=prefetch_batches))
    assert len(got) == len(sent)
    for before, after in zip(sent, got, strict=True):
        assert_arrived(before, after, {})
        assert {leaf.device.type for leaf in leaves(before)} <= {"cpu"}


@usual
@given(sent=batches)
def test_moved_is_protected_is_expected(sim: Any, sent: Any) -> None:
    """The memory that is recorded is that of the moved leaves, all of them and no other; the search finds the same."""
    device = torch.device("sim:0")
    options: dict[str, Any] = {"transform": None, "dtype": None, "memory_format": None, "skip_keys": frozenset()}
    transfer = Transfer(device, **options, pin_memory=True)
    moved, recorded, _ = transfer(sent)
    assert places(recorded) == places(leaves(moved))
    assert places(tensors_on(moved, transfer.device)) == places(leaves(moved))
    assert places(tensors_on(SimpleNamespace(inside={"x": moved}), transfer.device)) == places(leaves(moved))
