"""The network for ``cifar10.py``: nothing in it has to do with prefetching."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions around which the input takes a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short_cut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short_cut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pictures (or what the layers before made of them), channels second."""
        return torch.relu(self.body(x) + self.short_cut(x))


def small_resnet(classes: int, width: int = 24) -> nn.Module:
    """Three stages of one block each, 0.2 million parameters at the default width: small enough for two CPU cores."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),  # to half the height and width
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, stride=1),
        Block(width, 2 * width, stride=2),  # to a quarter
        Block(2 * width, 4 * width, stride=2),  # to an eighth
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )
