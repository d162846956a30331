"""WebDataset: samples from tar archives, as a stream without a length.

    pip install -e . webdataset         # once, in a clone of the project
    python examples/with_webdataset.py  # writes two small archives, and reads them again

The loop ends when the stream does; ``len(batches)`` raises ``TypeError``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import webdataset
from example_options import parse
from torch import nn
from torch.nn.functional import cross_entropy

from prefetch import CUDAPrefetcher

FEATURES = 16


def write_shards(folder: Path, count: int) -> list[str]:
    """Two archives with so many samples each: random features, and whether their sum is above zero."""
    generator = torch.Generator().manual_seed(0)
    paths = [str(folder / f"shard-{number}.tar") for number in range(2)]
    for number, path in enumerate(paths):
        with webdataset.TarWriter(path) as archive:
            for i in range(count):
                features = torch.randn(FEATURES, generator=generator)
                label = int(features.sum() > 0)
                archive.write({"__key__": f"{number}-{i:05}", "features.npy": features.numpy(), "label.cls": label})
    return paths


def make_batches(paths: list[str], device: torch.device) -> CUDAPrefetcher[Any]:
    """Batches of 32 tensors and labels, shuffled within a buffer."""
    data = (
        webdataset.WebDataset(paths, shardshuffle=2, seed=0)
        .shuffle(100, seed=0)
        .decode()
        .to_tuple("features.npy", "label.cls")
        .map_tuple(torch.from_numpy, torch.tensor)
        .batched(32)
    )
    return CUDAPrefetcher(webdataset.WebLoader(data, batch_size=None, pin_memory=device.type != "cpu"), device)


def main(argv: Sequence[str] | None = None) -> None:
    """Train over the archives."""
    device, steps = parse(argv, "Train over tar archives.", steps=24)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        batches = make_batches(write_shards(Path(folder), count=192), device)
        while len(losses) < steps:
            for inputs, labels in batches:
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.detach())
                if len(losses) == steps:
                    break
    print(f"{len(losses)} steps on {device}: the loss went from {losses[0].item():.3f} to {losses[-1].item():.3f}")


if __name__ == "__main__":
    main()
