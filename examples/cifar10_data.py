"""The images for ``cifar10.py``: CIFAR-10 as torchvision reads it, a folder of images, or generated ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from cifar10_distributed import Group
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10, ImageFolder, VisionDataset
from torchvision.datasets.folder import is_image_file
from torchvision.transforms import v2

SIDE = 32  # pixels
GENERATED_TRAIN = 5_000
GENERATED_TEST = 1_000

# On the host an image stays uint8: a quarter of the bytes of float32 have to be batched, pinned and copied.
ON_THE_HOST = v2.Compose([v2.PILToTensor(), v2.Resize((SIDE, SIDE), antialias=True)])


TREE = "must hold images as train/<class>/* and test/<class>/*"


class DataError(Exception):
    """What ``--data`` names cannot be used."""


class Data(NamedTuple):
    """Items of both sets are a uint8 image (3, 32, 32) and the number of its class."""

    train: TensorDataset | VisionDataset
    test: TensorDataset | VisionDataset
    classes: Sequence[str]
    description: str


def load(folder: Path, group: Group) -> Data:
    """The images in a folder of the user's.

    Args:
        folder: A tree ``train/<class>/*``, ``test/<class>/*``, or a root of ``torchvision.datasets.CIFAR10``, into
            which that is downloaded when it is not there.
        group: The processes that do this together.

    Raises:
        DataError: There are no such images, or some that cannot be used.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"must be a folder, got the file {str(folder)!r}")
    has_cifar = (folder / CIFAR10.base_folder).exists()
    if not has_cifar and any((folder / part).is_dir() for part in ("train", "test")):
        return _load_tree(folder, group)
    found = (path for pattern in ("*", "*/*") for path in folder.glob(pattern) if is_image_file(path.name))
    if not has_cifar and (image := next(found, None)) is not None:  # nothing to download into
        raise DataError(f"{TREE}, got {str(folder)!r} with {image.relative_to(folder)}")
    return _load_cifar(folder, group)


def _load_tree(folder: Path, group: Group) -> Data:
    try:
        train, test = (ImageFolder(folder / part, transform=ON_THE_HOST) for part in ("train", "test"))
    except OSError as error:  # a part is missing, a part without classes, a class without images
        raise DataError(f"{TREE}, got {str(folder)!r}: {error}") from error
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(f"{TREE} with the same classes in both, got {str(folder)!r}: only one of them has {odd}")
    if len(train.classes) < 2:
        raise DataError(f"{TREE} of two or more classes, got {str(folder)!r} with {train.classes}")
    # Once before training, so that a broken file does not end it after an hour; each process looks at its share.
    for path, _ in (train.samples + test.samples)[group.rank :: group.size]:
        try:
            train.loader(path)
        except Exception as error:  # Pillow raises many kinds
            raise DataError(f"must hold images that can be read, got {path!r}: {error}") from error
    return Data(train, test, train.classes, f"{len(train):,} + {len(test):,} images of {folder}")


def _load_cifar(root: Path, group: Group) -> Data:
    def parts() -> list[CIFAR10]:
        return [CIFAR10(root, train=part, transform=ON_THE_HOST, download=True) for part in (True, False)]

    existed = root.exists()
    try:
        train, test = group.in_turns(parts)
    except (OSError, RuntimeError) as error:
        if not existed and root.exists() and not any(root.iterdir()):
            root.rmdir()  # made for the download
        raise DataError(
            "must be a folder with images as train/<class>/* and test/<class>/*, or a root of "
            f"torchvision.datasets.CIFAR10, got {str(root)!r}, which is neither, and the download into it failed: "
            f"{error}"
        ) from error
    return Data(train, test, train.classes, f"CIFAR-10 in {root}")


# Each class is a region of the plane. All are their own mirror images, so that a flip does not change the class.
SHAPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "disc": lambda x, y: x.hypot(y) < 1,
    "ring": lambda x, y: (x.hypot(y) < 1) & (x.hypot(y) > 0.6),
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) < 0.9,
    "frame": lambda x, y: (torch.maximum(x.abs(), y.abs()) - 0.7).abs() < 0.2,
    "diamond": lambda x, y: x.abs() + y.abs() < 1.2,
    "plus": lambda x, y: (torch.minimum(x.abs(), y.abs()) < 0.25) & (torch.maximum(x.abs(), y.abs()) < 1),
    "triangle": lambda x, y: (y < 0.9) & (x.abs() * 1.8 < y + 0.9),
    "bars": lambda x, y: (torch.sin(9 * x) > 0) & (torch.maximum(x.abs(), y.abs()) < 1),
    "rungs": lambda x, y: (torch.sin(9 * y) > 0) & (torch.maximum(x.abs(), y.abs()) < 1),
    "checks": lambda x, y: (torch.cos(6 * x) * torch.cos(6 * y) > 0) & (torch.maximum(x.abs(), y.abs()) < 1),
}


def generate(seed: int, train: int = GENERATED_TRAIN, test: int = GENERATED_TEST) -> Data:
    """Draw images of ten shapes: a network has to find the form, since place, size and colours say nothing.

    Args:
        seed: The same images for the same seed.
        train: How many to learn from.
        test: How many to test with: others, drawn in the same way.
    """
    generator = torch.Generator().manual_seed(seed)
    images, others = _draw(train, generator), _draw(test, generator)
    return Data(images, others, tuple(SHAPES), f"{train:,} + {test:,} generated images")


def _draw(count: int, generator: torch.Generator) -> TensorDataset:
    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    labels = torch.arange(count) % len(SHAPES)
    axis = torch.linspace(-1, 1, SIDE)
    down, right = torch.meshgrid(axis, axis, indexing="ij")

    # The coordinates of every pixel in the frame of its image's shape: moved, scaled, and tilted a little.
    size, tilt = uniform(0.45, 0.7, 1, 1), uniform(-math.pi / 12, math.pi / 12, 1, 1)
    x, y = (right - uniform(-0.3, 0.3, 1, 1)) / size, (down - uniform(-0.3, 0.3, 1, 1)) / size
    x, y = x * tilt.cos() + y * tilt.sin(), y * tilt.cos() - x * tilt.sin()
    inside = torch.empty(count, SIDE, SIDE, dtype=torch.bool)
    for label, shape in enumerate(SHAPES.values()):
        inside[label :: len(SHAPES)] = shape(x[label :: len(SHAPES)], y[label :: len(SHAPES)])

    # Two colours that differ in every channel, whichever is the brighter one; light from one side; noise.
    ground = uniform(0, 1, 3, 1, 1)
    figure = (ground + uniform(0.25, 0.75, 3, 1, 1)) % 1
    light = 1 + right * uniform(-0.4, 0.4, 1, 1) + down * uniform(-0.4, 0.4, 1, 1)
    images = torch.where(inside[:, None], figure, ground) * light[:, None]
    images += 0.1 * torch.randn(images.shape, generator=generator)
    return TensorDataset((images.clamp(0, 1) * 255).to(torch.uint8), labels)
