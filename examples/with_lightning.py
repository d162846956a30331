"""Lightning: a data module whose loaders are prefetched.

    pip install -e . lightning         # once, in a clone of the project
    python examples/with_lightning.py

Lightning moves each batch that it gets to the device; what is there already, it leaves alone. It puts a
``DistributedSampler`` into a plain ``DataLoader``, but not into a wrapped one: the data module does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from example_options import parse
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from prefetch import CUDAPrefetcher

BATCH_SIZE = 32
FEATURES = 16


def samples(count: int, seed: int) -> TensorDataset:
    """Random features, and whether their sum is above zero."""
    features = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, (features.sum(dim=1) > 0).long())


class Data(LightningDataModule):  # type: ignore[misc] # its class may not be known
    """So many batches for training, and a few for validation."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.train_set = samples(batches * BATCH_SIZE, seed=0)
        self.val_set = samples(4 * BATCH_SIZE, seed=1)

    def train_dataloader(self) -> CUDAPrefetcher[Any]:
        """Shuffled."""
        return self.prefetched(self.train_set, shuffle=True)

    def val_dataloader(self) -> CUDAPrefetcher[Any]:
        """In order."""
        return self.prefetched(self.val_set, shuffle=False)

    def prefetched(self, data: TensorDataset, *, shuffle: bool) -> CUDAPrefetcher[Any]:
        """This process's share of the batches, on its device."""
        device = self.trainer.strategy.root_device
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, self.trainer.world_size, self.trainer.global_rank, shuffle=shuffle
        )
        loader = DataLoader(data, BATCH_SIZE, sampler=sampler, pin_memory=device.type != "cpu")
        return CUDAPrefetcher(loader, device)


class Model(LightningModule):  # type: ignore[misc]
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2))
        self.losses: list[torch.Tensor] = []  # of the training, on the device

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Nothing is moved here."""
        features, labels = batch
        loss = cross_entropy(self.network(features), labels)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """How many of the answers are right."""
        features, labels = batch
        self.log("accuracy", (self.network(features).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One for all weights."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(argv: Sequence[str] | None = None) -> None:
    """Train for two epochs or more."""
    device, steps = parse(argv, "Train with Lightning.", steps=24)
    torch.manual_seed(0)
    model = Model()
    trainer = Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        max_epochs=-1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=Data(batches=max(1, steps // 2)))
    print(f"validation accuracy {trainer.callback_metrics['accuracy'].item():.0%}")
    first, last = model.losses[0].item(), model.losses[-1].item()
    print(f"{len(model.losses)} steps on {device}: the loss went from {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()
