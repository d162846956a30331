"""Ray Train: each worker prefetches its share of the batches.

    pip install -e . "ray[train]"  # once, in a clone of the project
    python examples/with_ray.py    # starts a small cluster on this machine, and stops it

``prepare_data_loader`` gives each worker its share; ``move_to_device=False`` leaves the copies to the prefetcher.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from example_options import parse
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from prefetch import CUDAPrefetcher

BATCH_SIZE = 32
FEATURES = 16


def train(config: dict[str, Any]) -> dict[str, Any]:
    """What each worker does; what the first of them returns is the result."""
    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    features = torch.randn(12 * BATCH_SIZE, FEATURES)
    data = TensorDataset(features, (features.sum(dim=1) > 0).long())
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, pin_memory=device.type != "cpu")
    batches = CUDAPrefetcher(ray.train.torch.prepare_data_loader(loader, move_to_device=False), device)
    network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    losses: list[torch.Tensor] = []
    epoch = 0
    while len(losses) < config["steps"]:
        batches.set_epoch(epoch)  # reaches the DistributedSampler, where there is one
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
            if len(losses) == config["steps"]:
                break
        epoch += 1
    first, last = losses[0].item(), losses[-1].item()
    return {"steps": len(losses), "device": str(batches.device), "first": first, "last": last}


def main(argv: Sequence[str] | None = None) -> None:
    """Train with one worker."""
    device, steps = parse(argv, "Train with Ray Train, in a cluster on this machine.", steps=24, has_index=False)
    # The workers are other processes, which import this file's modules from its folder.
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = ray.train.torch.TorchTrainer(
                train,
                train_loop_config={"steps": steps},
                scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu=device.type == "cuda"),
                run_config=ray.train.RunConfig(storage_path=folder),
            )
            end = trainer.fit().return_value
    finally:
        ray.shutdown()
    print(f"{end['steps']} steps on {end['device']}: the loss went from {end['first']:.3f} to {end['last']:.3f}")


if __name__ == "__main__":
    main()
