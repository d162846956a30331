"""torchdata's nodes: a pipeline that stops in mid-epoch, and goes on from a checkpoint.

    pip install -e . torchdata              # once, in a clone of the project
    python examples/with_torchdata_nodes.py

``batches.state_dict()`` is the pipeline's, as it stood when the last batch was delivered: what had been looked ahead is
not lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from example_options import parse
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import RandomSampler, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, PinMemory, SamplerWrapper

from prefetch import CUDAPrefetcher

COUNT = 384
FEATURES = 16


def sample(index: int) -> tuple[torch.Tensor, int]:
    """The same at every call: random features, and whether their sum is above zero."""
    features = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
    return features, int(features.sum() > 0)


def make_batches(device: torch.device) -> CUDAPrefetcher[Any]:
    """A shuffled pass over all samples, read by two threads."""
    sampler = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(0))
    node: Any = ParallelMapper(SamplerWrapper(sampler), sample, num_workers=2, method="thread")
    node = Mapper(Batcher(node, batch_size=32), default_collate)
    if device.type != "cpu":
        node = PinMemory(node)
    return CUDAPrefetcher(Loader(node), device)


def main(argv: Sequence[str] | None = None) -> None:
    """Train one half in one pipeline, and the rest in another that goes on where the first one stood."""
    device, steps = parse(argv, "Train over a torchdata pipeline, interrupted once.", steps=24)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[torch.Tensor] = []

    def train(batches: CUDAPrefetcher[Any], until: int) -> None:
        while len(losses) < until:
            for inputs, labels in batches:
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.detach())
                if len(losses) == until:
                    break

    batches = make_batches(device)
    train(batches, until=steps // 2)
    checkpoint = batches.state_dict()  # beside the model and the optimiser, with torch.save

    batches = make_batches(device)  # in a new process
    batches.load_state_dict(checkpoint)
    train(batches, until=steps)
    print(f"{len(losses)} steps on {device}: the loss went from {losses[0].item():.3f} to {losses[-1].item():.3f}")


if __name__ == "__main__":
    main()
