"""PyTorch Geometric: batches of graphs, moved with their own ``.to``.

    pip install -e . torch_geometric  # once, in a clone of the project
    python examples/with_pyg.py

Nodes and edges of all graphs of a batch are in a few long tensors, which the prefetcher moves by calling ``Batch.to``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from example_options import parse
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

from prefetch import CUDAPrefetcher

FEATURES = 8


def make_graphs(count: int) -> list[Data]:
    """Rings of 3 to 8 nodes, and whether the sum of their nodes' features is above zero."""
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for _ in range(count):
        nodes = int(torch.randint(3, 9, (), generator=generator))
        ring = torch.arange(nodes)
        features = torch.randn(nodes, FEATURES, generator=generator)
        graphs.append(
            Data(x=features, edge_index=torch.stack([ring, ring.roll(1)]), y=(features.sum() > 0).long().reshape(1))
        )
    return graphs


class Network(nn.Module):
    """One convolution over the edges, and an answer for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = GCNConv(FEATURES, 64)
        self.answer = nn.Linear(64, 2)

    def forward(self, graphs: Batch) -> torch.Tensor:
        """Scores of shape (graphs, 2)."""
        nodes = self.convolution(graphs.x, graphs.edge_index).relu()
        scores: torch.Tensor = self.answer(global_mean_pool(nodes, graphs.batch, size=graphs.num_graphs))
        return scores


def main(argv: Sequence[str] | None = None) -> None:
    """Train on graphs."""
    device, steps = parse(argv, "Train on batches of graphs.", steps=24)
    torch.manual_seed(0)
    loader = DataLoader(make_graphs(384), batch_size=32, shuffle=True, pin_memory=device.type != "cpu")
    batches = CUDAPrefetcher(loader, device)
    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[torch.Tensor] = []
    while len(losses) < steps:
        for graphs in batches:  # each a Batch on the device
            optimizer.zero_grad()
            loss = cross_entropy(model(graphs), graphs.y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
            if len(losses) == steps:
                break
    print(f"{len(losses)} steps on {device}: the loss went from {losses[0].item():.3f} to {losses[-1].item():.3f}")


if __name__ == "__main__":
    main()
