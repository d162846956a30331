"""The network for ``cifar10.py``: nothing in it has to do with prefetching."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions around which the input takes a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            batch_norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            batch_norm(outputs),
        )
        self.short_cut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short_cut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), batch_norm(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (or what the layers before made of them), channels second."""
        return torch.relu(self.body(x) + self.short_cut(x))


def small_resnet(classes: int, width: int = 24, batch_norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Three stages of one block each, 0.2 million parameters at the default width: small enough for two CPU cores.

    Args:
        classes: How many scores it gives for an image.
        width: Channels of the first stage; the others have two and four times as many.
        batch_norm: Makes each normalisation, given the number of channels.
    """
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),  # to half the height and width
        batch_norm(width),
        nn.ReLU(),
        Block(width, width, stride=1, batch_norm=batch_norm),
        Block(width, 2 * width, stride=2, batch_norm=batch_norm),  # to a quarter
        Block(2 * width, 4 * width, stride=2, batch_norm=batch_norm),  # to an eighth
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )
