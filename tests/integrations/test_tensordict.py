"""TensorDict: nested ones and tensorclasses arrive as what they are."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("tensordict")

from tensordict import TensorDict, tensorclass
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from prefetch import CUDAPrefetcher
from tests.helpers import BY_MEMORY

pytestmark = pytest.mark.integration

COUNT = 10
BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@tensorclass
class Sample:
    """Features and a label, with a note that is no tensor."""

    features: torch.Tensor
    label: torch.Tensor
    note: str


def as_it_is(batch: Any) -> Any:
    """Instead of torch's own, which would take the batch apart."""
    return batch


def by_index(data: Any) -> DataLoader[Any]:
    """Batches made by indexing once."""
    sampler = BatchSampler(SequentialSampler(range(COUNT)), 4, drop_last=False)
    return DataLoader(data, batch_size=None, sampler=sampler, collate_fn=as_it_is, pin_memory=True)


def nested() -> TensorDict:
    """Features within, and labels."""
    features = torch.arange(2.0 * COUNT).reshape(COUNT, 2)
    return TensorDict({"input": TensorDict({"features": features}, [COUNT]), "label": torch.arange(COUNT)}, [COUNT])


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_nested(sim: ModuleType, background: bool, memory: Any) -> None:
    """A TensorDict arrives on the device with its nesting, batch size and values."""
    labels = []
    for batch in CUDAPrefetcher(by_index(nested()), "sim", background=background, memory=memory):
        assert type(batch) is TensorDict
        assert batch.batch_size == batch["label"].shape
        assert batch["input"].batch_size == batch["label"].shape
        assert {batch.device, batch["input", "features"].device} == {torch.device("sim", 0)}
        assert (batch["input", "features"][:, 0] == 2 * batch["label"]).all()
        labels.append(batch["label"].tolist())
    assert labels == BATCHES


def test_collated_samples(sim: ModuleType) -> None:
    """So does one that a collate_fn stacks from samples."""
    data = nested()
    loader = DataLoader(data, batch_size=4, collate_fn=as_it_is, pin_memory=True)
    got = [batch["label"].tolist() for batch in CUDAPrefetcher(loader, "sim")]
    assert got == BATCHES


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_tensorclass(sim: ModuleType, background: bool, memory: Any) -> None:
    """A tensorclass arrives as one, with what is no tensor."""
    make: Any = Sample  # its constructor takes a batch_size, too
    data = make(torch.arange(2.0 * COUNT).reshape(COUNT, 2), torch.arange(COUNT), note="small", batch_size=[COUNT])
    labels = []
    for batch in CUDAPrefetcher(by_index(data), "sim", background=background, memory=memory):
        assert type(batch) is Sample
        assert batch.note == "small"
        assert {batch.features.device, batch.label.device} == {torch.device("sim", 0)}
        labels.append(batch.label.tolist())
    assert labels == BATCHES
