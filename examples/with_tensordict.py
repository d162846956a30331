"""TensorDict: batches that are one nested TensorDict.

    pip install -e . tensordict         # once, in a clone of the project
    python examples/with_tensordict.py

The data set is a TensorDict, too: with ``batch_size=None`` and a sampler of batches it is indexed once for each batch,
and no samples are put together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from example_options import parse
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from prefetch import CUDAPrefetcher

COUNT = 384
FEATURES = 16


def as_it_is(batch: TensorDict) -> TensorDict:
    """Instead of torch's own, which would take the batch apart."""
    return batch


def main(argv: Sequence[str] | None = None) -> None:
    """Train on nested batches."""
    device, steps = parse(argv, "Train on batches that are TensorDicts.", steps=24)
    torch.manual_seed(0)
    features = torch.randn(COUNT, FEATURES)
    data = TensorDict(
        {"input": {"features": features, "weight": torch.ones(COUNT, 1)}, "label": (features.sum(dim=1) > 0).long()},
        batch_size=[COUNT],
    )
    sampler = BatchSampler(RandomSampler(range(COUNT)), batch_size=32, drop_last=False)
    loader = DataLoader(data, batch_size=None, sampler=sampler, collate_fn=as_it_is, pin_memory=device.type != "cpu")
    batches = CUDAPrefetcher(loader, device)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[torch.Tensor] = []
    while len(losses) < steps:
        for batch in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch["input", "features"] * batch["input", "weight"]), batch["label"])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
            if len(losses) == steps:
                break
    print(f"{len(losses)} steps on {device}: the loss went from {losses[0].item():.3f} to {losses[-1].item():.3f}")


if __name__ == "__main__":
    main()
