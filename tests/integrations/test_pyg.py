"""PyTorch Geometric: batches of graphs keep their type and all that they store."""

from __future__ import annotations

import importlib.util
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # it scripts functions when it is imported, which torch deprecates
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch, Data, HeteroData
    from torch_geometric.loader import DataLoader, NeighborLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

from prefetch import CUDAPrefetcher, PrefetchWarning
from tests.helpers import BY_MEMORY

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*`torch.jit.script.*is deprecated"),  # likewise, in what is imported later
]


def make_graph(number: int) -> Data:
    """A ring of as many nodes as the number says, and three more."""
    ring = torch.arange(number + 3)
    features = torch.full((number + 3, 2), float(number))
    return Data(
        x=features, edge_index=torch.stack([ring, ring.roll(1)]), y=torch.tensor([number]), name=f"ring {number}"
    )


def graphs(count: int = 7) -> list[Data]:
    """Rings of different sizes."""
    return [make_graph(number) for number in range(count)]


def assert_same(got: Any, expected: Any) -> None:
    """Both store the same."""
    assert type(got) is type(expected)
    got, expected = got.cpu().to_dict(), expected.to_dict()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got[name], value, rtol=0, atol=0)
        else:
            assert got[name] == value


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
def test_batches(sim: ModuleType, background: bool, memory: Any) -> None:
    """Each Batch arrives on the device with its edges, pointers and texts, and can be taken apart into its graphs."""
    loader = DataLoader(graphs(), batch_size=3, pin_memory=True)
    count = 0
    for got, expected in zip(
        CUDAPrefetcher(loader, "sim", background=background, memory=memory),
        DataLoader(graphs(), batch_size=3),
        strict=True,
    ):
        assert isinstance(got, Batch)
        assert {got.x.device, got.edge_index.device, got.batch.device} == {torch.device("sim", 0)}
        for graph in got.to_data_list():
            assert graph.name == f"ring {int(graph.y)}"
            count += 1
        assert_same(got, expected)
    assert count == 7


def test_pinned_batches_need_no_warning(sim: ModuleType) -> None:
    """What Batch.to moves is pinned: that the rest is not costs nothing, and nobody is warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrefetchWarning)
        list(CUDAPrefetcher(DataLoader(graphs(), batch_size=3, pin_memory=True), "sim"))
    assert [str(warning.message) for warning in caught] == []


def test_heterogeneous_batches(sim: ModuleType) -> None:
    """So does a batch of graphs with several types of nodes."""

    def graph(number: int) -> HeteroData:
        data = HeteroData()
        data["user"].x = torch.full((number + 1, 2), float(number))
        data["item"].x = torch.full((2, 3), float(number))
        data["user", "buys", "item"].edge_index = torch.tensor([[0, number], [0, 1]])
        return data

    data = [graph(number) for number in range(4)]
    batches = CUDAPrefetcher(DataLoader(data, batch_size=2, pin_memory=True), "sim")
    for got, expected in zip(batches, DataLoader(data, batch_size=2), strict=True):
        assert got["user"].x.device == torch.device("sim", 0)
        for name in ("user", "item"):
            assert got[name].x.tolist() == expected[name].x.tolist()
        key = ("user", "buys", "item")
        assert got[key].edge_index.tolist() == expected[key].edge_index.tolist()


def test_training_step() -> None:
    """On the CPU a convolution learns the same from prefetched batches."""

    def weights(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = GCNConv(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for batch in wrap(DataLoader(graphs(), batch_size=3)):
            optimizer.zero_grad()
            pooled = global_mean_pool(layer(batch.x, batch.edge_index), batch.batch)
            (pooled.flatten() - batch.y).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in layer.parameters()]

    expected = weights(lambda loader: loader)
    got = weights(lambda loader: CUDAPrefetcher(loader, "cpu", background=True))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


HAS_SAMPLER = any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse"))


@pytest.mark.skipif(not HAS_SAMPLER, reason="NeighborLoader needs pyg-lib or torch-sparse")
def test_neighbours(sim: ModuleType) -> None:
    """NeighborLoader's subgraphs arrive as Data."""
    loader = NeighborLoader(make_graph(20), num_neighbors=[2], batch_size=4, shuffle=False)
    seeds = []
    for batch in CUDAPrefetcher(loader, "sim"):
        assert batch.x.device == torch.device("sim", 0)
        seeds += batch.input_id.tolist()
    assert seeds == list(range(23))
