"""Accelerate: the prefetcher goes below the loader that ``accelerator.prepare`` returns.

    pip install -e . accelerate         # once, in a clone of the project
    python examples/with_accelerate.py

The prepared loader tells Accelerate when its last batch has been asked for: ``gather_for_metrics`` and gradient
accumulation go by it. Around it, a prefetcher that looks ahead would ask for it too early. Below it, all is in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from example_options import parse
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from prefetch import CUDAPrefetcher

BATCH_SIZE = 32
FEATURES = 16
COUNT = 12 * BATCH_SIZE - 5  # the last batch is shorter


def main(argv: Sequence[str] | None = None) -> None:
    """Train with two batches for each update, and count the right answers."""
    device, steps = parse(argv, "Train with Accelerate.", steps=24, has_index=False)
    torch.manual_seed(0)
    features = torch.randn(COUNT, FEATURES)
    data = TensorDataset(features, (features.sum(dim=1) > 0).long())
    network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2))

    accelerator = Accelerator(cpu=device.type == "cpu", gradient_accumulation_steps=2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), lr=1e-2),
        DataLoader(data, BATCH_SIZE, shuffle=True, pin_memory=device.type != "cpu"),
        DataLoader(data, BATCH_SIZE, pin_memory=device.type != "cpu"),
    )
    for loader in (train_loader, test_loader):
        loader.base_dataloader = CUDAPrefetcher(loader.base_dataloader, accelerator.device)

    losses: list[torch.Tensor] = []  # on the device: asking for their values would wait for it
    while len(losses) < steps:
        for inputs, labels in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == steps:
                break

    model.eval()
    right = []
    with torch.no_grad():
        for inputs, labels in test_loader:
            right.append(accelerator.gather_for_metrics(model(inputs).argmax(dim=1) == labels))
    answers = torch.cat(right)
    accelerator.print(f"{answers.sum().item()} of {len(answers)} answers are right")
    first, last = losses[0].item(), losses[-1].item()
    accelerator.print(f"{len(losses)} steps on {accelerator.device}: the loss went from {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()
