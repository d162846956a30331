"""A wrapped loader is used like the loader."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from prefetch import CUDAPrefetcher


def loader_of(count: int, **options: Any) -> DataLoader[Any]:
    """Batches of one number each."""
    return DataLoader(TensorDataset(torch.arange(count)), **options)


class Endless(IterableDataset[int]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_attributes_are_the_loaders() -> None:
    """What the prefetcher does not have itself comes from the loader."""
    loader = loader_of(10, batch_size=4, drop_last=True)
    prefetcher = CUDAPrefetcher(loader, "cpu")
    assert prefetcher.dataset is loader.dataset
    assert prefetcher.sampler is loader.sampler
    assert (prefetcher.batch_size, prefetcher.drop_last, len(prefetcher)) == (4, True, 2)


def test_repr() -> None:
    """What is printed names the loader and the device."""
    assert repr(CUDAPrefetcher([1], "cpu")) == "CUDAPrefetcher([1], device='cpu')"


def test_missing_attribute_names_the_loader() -> None:
    """An attribute that neither has is missed from the loader."""
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'no_such_thing'"):
        _ = CUDAPrefetcher(loader_of(1), "cpu").no_such_thing


def test_length_that_is_not_there() -> None:
    """Without a length of the loader's there is none, and the loop and list() still work."""
    prefetcher = CUDAPrefetcher(DataLoader(Endless(), batch_size=None), "cpu")
    with pytest.raises(TypeError, match="has no len"):
        len(prefetcher)
    assert list(prefetcher) == [0, 1, 2]


def test_truth_is_the_loaders() -> None:
    """A loader without a length is true, an empty list of batches is false."""
    assert bool(CUDAPrefetcher((i for i in range(0)), "cpu"))
    assert not CUDAPrefetcher([], "cpu")
    assert CUDAPrefetcher([0], "cpu")


class Recorder:
    """Remembers the epochs it was told."""

    def __init__(self, **attributes: Any) -> None:
        self.epochs: list[int] = []
        self.__dict__.update(attributes)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(())


class TestSetEpoch:
    """Whoever wants the epoch hears it once."""

    def test_reaches_every_taker(self) -> None:
        """Loader, sampler, batch sampler and its sampler are told."""
        inner, sampler = Recorder(), Recorder()
        batch_sampler = Recorder(sampler=inner)
        loader = Recorder(sampler=sampler, batch_sampler=batch_sampler)
        CUDAPrefetcher(loader, "cpu").set_epoch(5)
        assert [taker.epochs for taker in (loader, sampler, batch_sampler, inner)] == [[5], [5], [5], [5]]

    def test_each_only_once(self) -> None:
        """A sampler that is found twice is told once."""
        sampler = Recorder()
        loader = Recorder(sampler=sampler, batch_sampler=Recorder(sampler=sampler))
        CUDAPrefetcher(loader, "cpu").set_epoch(1)
        assert sampler.epochs == [1]

    def test_distributed_sampler(self) -> None:
        """The order of a DataLoader with a DistributedSampler changes with the epoch, as without the prefetcher."""
        data = TensorDataset(torch.arange(64))
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
        prefetcher = CUDAPrefetcher(DataLoader(data, sampler=sampler), "cpu")
        orders = []
        for epoch in (0, 1):
            prefetcher.set_epoch(epoch)
            orders.append([batch[0].item() for batch in prefetcher])
        sampler.set_epoch(1)
        assert orders[1] == list(sampler)
        assert orders[0] != orders[1]

    def test_no_taker(self) -> None:
        """Without a taker nothing happens."""
        CUDAPrefetcher([1], "cpu").set_epoch(3)

    def test_nested_prefetchers(self) -> None:
        """The epoch goes through a prefetcher around a prefetcher."""
        loader = Recorder()
        CUDAPrefetcher(CUDAPrefetcher(loader, "cpu"), "cpu").set_epoch(2)
        assert loader.epochs == [2]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_work_on_their_own(sim: Any, duplicate: Any) -> None:
    """A copied or unpickled prefetcher has its own side stream and gives the same batches, used or not."""
    loader = loader_of(4, pin_memory=True)
    prefetcher = CUDAPrefetcher(loader, "sim:1", prefetch_batches=1)
    want = [[0], [1], [2], [3]]
    assert [batch[0].tolist() for batch in prefetcher] == want
    again = duplicate(prefetcher)
    assert again.device == torch.device("sim:1")
    assert [batch[0].tolist() for batch in again] == want
    assert [batch[0].tolist() for batch in prefetcher] == want
    streams = {span.stream for span in sim.trace() if span.name == "copy_h2d"}
    assert len(streams) == 2


def test_special_methods_are_not_the_loaders() -> None:
    """A loader that copies itself in its own way does not take over the copying of its prefetcher."""

    class CopiesItself(list[int]):
        def __deepcopy__(self, memo: Any) -> CopiesItself:
            return CopiesItself(self)

    again = copy.deepcopy(CUDAPrefetcher(CopiesItself([1, 2]), "cpu"))
    assert type(again) is CUDAPrefetcher
    assert list(again) == [1, 2]


def test_half_made_object_has_no_attributes() -> None:
    """Attribute access while there is no loader yet, as copy does, is an AttributeError and no endless recursion."""
    empty = CUDAPrefetcher.__new__(CUDAPrefetcher)
    with pytest.raises(AttributeError, match="dataset"):
        _ = empty.dataset
