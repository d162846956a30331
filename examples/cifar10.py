"""Train a small ResNet on CIFAR-10: the loader wrapped in a CUDAPrefetcher, pictures normalised on the device.

    pip install -e ".[examples]"                    # once, in a clone of the project
    python examples/cifar10.py --data data          # CIFAR-10, downloaded when it is not there
    python examples/cifar10.py --data my-pictures   # train/<class>/*, test/<class>/*
    python examples/cifar10.py                      # generated pictures: nothing to download

With ``--no-prefetch`` the same training runs in the plain loop, with the same losses: compare the images/s. (Bit for
bit so on the CPU. Some kernels of a GPU add in another order every time they run.)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from cifar10_data import DataError, Pictures, generate, load
from cifar10_model import small_resnet
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms.v2 import functional as F  # noqa: N812 - its usual name
from tqdm import tqdm

from prefetch import CUDAPrefetcher

MEAN = (0.4914, 0.4822, 0.4465)  # of CIFAR-10's training pictures, channel by channel
STD = (0.2470, 0.2435, 0.2616)
LEARNING_RATE = 0.1  # at its peak
SECONDS_BETWEEN_LOSSES = 1.0  # in the progress bar

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Result:
    """What a run measured; accuracies are fractions."""

    losses: list[float] = field(default_factory=list)  # one a step
    accuracies: list[float] = field(default_factory=list)  # one an epoch, on the test set
    images_per_s: list[float] = field(default_factory=list)  # one an epoch, while training


class Prepare:
    """What is done to each batch on the device, where it takes next to no time: flip, scale, normalise.

    On an accelerator the prefetcher calls this a few batches earlier than the plain loop does: between other draws from
    the global generator, if it drew from that one. So the flips are drawn before the first batch, into a table. The
    table is on the device: no batch has to wait for a copy of its part.

    Args:
        device: Where the batches are.
        flips: True where a picture is to be mirrored, of shape (epochs, pictures); ``None`` for no flips.
    """

    def __init__(self, device: torch.device, flips: torch.Tensor | None = None) -> None:
        # As tensors on the device: from tuples, normalise() would copy both for every batch, and wait for the copy.
        self._mean = torch.tensor(MEAN, device=device)
        self._std = torch.tensor(STD, device=device)
        self._flips = None if flips is None else flips.to(device)
        self.start(0)

    def start(self, epoch: int) -> None:
        """To be called before each epoch: an epoch broken off may have prepared batches that nobody saw."""
        self._epoch = epoch
        self._position = 0

    def __call__(self, batch: Batch) -> Batch:
        """From uint8 to what the network takes."""
        images, labels = batch
        if self._flips is not None:
            end = self._position + len(images)
            flip = self._flips[self._epoch, self._position : end, None, None, None]
            self._position = end
            images = torch.where(flip, F.horizontal_flip(images), images)
        images = F.normalize(F.to_dtype(images, torch.float32, scale=True), self._mean, self._std)
        return images.contiguous(memory_format=torch.channels_last), labels


class PlainLoop:
    """What ``--no-prefetch`` runs: a batch is copied when it is asked for, and the step waits for it."""

    def __init__(self, loader: Iterable[Batch], device: torch.device, *, transform: Callable[[Batch], Batch]) -> None:
        self._loader, self._device, self._transform = loader, device, transform

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self._loader:
            yield self._transform((images.to(self._device), labels.to(self._device)))


def train(pictures: Pictures, device: torch.device, args: argparse.Namespace) -> Result:
    """Train and test as the options say, and report on the standard output after each epoch."""
    torch.manual_seed(args.seed)
    model = small_resnet(len(pictures.classes)).to(memory_format=torch.channels_last).to(device)
    autocast = torch.autocast(device.type, torch.bfloat16) if args.amp else contextlib.nullcontext()

    # With a generator of its own the order depends on the seed alone: not on the workers, and not on look-ahead.
    generator = torch.Generator().manual_seed(args.seed)
    order = RandomSampler(pictures.train, generator=generator)
    loader = load_batches(pictures.train, device, args, order)
    steps = min(args.epochs * len(loader), args.steps or sys.maxsize)
    epochs = math.ceil(steps / len(loader))
    prepare = Prepare(device, flips=torch.rand(epochs, len(order), generator=generator) < 0.5)

    # The line that this example is about.
    loop = CUDAPrefetcher if args.prefetch else PlainLoop
    batches = loop(loader, device, transform=prepare)
    test_batches = loop(load_batches(pictures.test, device, args), device, transform=Prepare(device))

    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_cosine, steps=steps))
    result = Result()
    for epoch in range(epochs):
        prepare.start(epoch)
        model.train()
        losses: list[torch.Tensor] = []
        images_seen = 0
        begin = shown = time.perf_counter()
        # disable=None: no bar where the standard error is not a terminal.
        with tqdm(
            total=len(order), desc=f"epoch {epoch + 1}/{epochs}", unit=" images", leave=False, disable=None
        ) as bar:
            for images, labels in itertools.islice(batches, steps - len(result.losses)):
                with autocast:
                    loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                # Losses stay on the device until the end of the epoch. To read one is to wait until the device has done
                # all that was asked of it; in every step, that would leave it idle while the host asks for the next.
                losses.append(loss.detach())
                images_seen += len(images)
                bar.update(len(images))
                if not bar.disable and time.perf_counter() - shown > SECONDS_BETWEEN_LOSSES:
                    bar.set_postfix_str(f"loss {float(losses[-1]):.3f}")
                    shown = time.perf_counter()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # the host is ahead: the epoch ends when the device has ended it
        result.images_per_s.append(images_seen / (time.perf_counter() - begin))
        result.losses += torch.stack(losses).tolist()
        result.accuracies.append(evaluate(model, test_batches, autocast))
        print(
            f"epoch {epoch + 1}/{epochs}: loss {torch.stack(losses).mean():.3f}, "
            f"accuracy {100 * result.accuracies[-1]:.2f} %, {result.images_per_s[-1]:,.0f} images/s",
            flush=True,
        )
    return result


def load_batches(
    dataset: Dataset[Any], device: torch.device, args: argparse.Namespace, order: RandomSampler | None = None
) -> DataLoader[Batch]:
    """The loader of one set."""
    return DataLoader(
        dataset,
        args.batch_size,
        sampler=order,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        # Only from pinned memory can an accelerator copy while all else goes on. The CPU has no use for it.
        pin_memory=device.type != "cpu",
    )


def warm_up_and_cosine(step: int, *, steps: int) -> float:
    """The factor of the learning rate: up in the first fifth of the run, then down to zero."""
    return min(5 * (step + 1) / steps, 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], autocast: contextlib.AbstractContextManager[object]) -> float:
    """The fraction of the test set that the model gets right."""
    model.eval()
    right, seen = [], 0
    for images, labels in batches:
        with autocast:
            scores = model(images)
        right.append((scores.argmax(dim=1) == labels).sum())
        seen += len(labels)
    return int(torch.stack(right).sum()) / seen


def plot(result: Result, title: str, chance: float, path: Path) -> None:
    """Draw loss, accuracy and throughput."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(title, fontsize="medium", wrap=True)
    loss, accuracy, throughput = figure.subplots(1, 3)

    loss.plot(range(1, len(result.losses) + 1), result.losses, linewidth=1)
    loss.set(title="Training loss", xlabel="step", ylabel="cross-entropy (nats)", ylim=(0, None))

    epochs = range(1, len(result.accuracies) + 1)
    accuracy.plot(epochs, [100 * value for value in result.accuracies], marker="o", clip_on=False)
    accuracy.axhline(100 * chance, color="gray", linestyle="--")
    beside_the_axis = accuracy.get_yaxis_transform()  # x from 0 to 1, y in %
    accuracy.text(0.98, 100 * chance + 1, "guessing", ha="right", va="bottom", color="gray", transform=beside_the_axis)
    accuracy.set(title="Test accuracy", xlabel="epoch", ylabel="right answers (%)", ylim=(0, 100))

    top = 1.1 * max(result.images_per_s)
    throughput.plot(epochs, result.images_per_s, marker="o")
    throughput.set(title="Training throughput", xlabel="epoch", ylabel="images/s", ylim=(0, top))

    for axes in (loss, accuracy, throughput):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    figure.savefig(path, format="png", dpi=150)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """What argparse makes an option's value with: an integer within bounds."""
    rule = f"must be an integer from {low} upwards" if high is None else f"must be an integer from {low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
        return value

    return convert


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description="Train a small ResNet on pictures that a CUDAPrefetcher brings in.")
    add = options.add_argument
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="root of torchvision.datasets.CIFAR10 (downloaded into it when it is not there), or a folder of pictures "
        "as train/<class>/* and test/<class>/*; without it pictures are generated",
    )
    add("--device", help="default: the current accelerator, or the CPU where there is none")
    add("--epochs", type=integer(1), default=5, metavar="N", help="default: %(default)s")
    add("--steps", type=integer(1), metavar="N", help="end after so many steps, if the epochs have more")
    add("--batch-size", type=integer(1), default=64, metavar="N", help="default: %(default)s")
    add("--workers", type=integer(0), metavar="N", help="processes that load; default: 2, on the CPU 0")
    add("--no-prefetch", dest="prefetch", action="store_false", help="the plain loop, for comparison: same results")
    add("--amp", action="store_true", help="compute in bfloat16 where autocast does so")
    add("--seed", type=integer(0, 2**63 - 1), default=0, metavar="N", help="default: %(default)s")
    add("--plot", type=Path, default=Path("cifar10.png"), metavar="PATH", help="the PNG; default: %(default)s")
    return options


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the example.

    Args:
        argv: The options; by default those of the command line.

    Returns:
        What was measured.

    Raises:
        SystemExit: An option's value cannot be used (status 2). Nothing has been written by then.
    """
    options = parser()
    args = options.parse_args(argv)
    try:
        device = CUDAPrefetcher((), args.device).device
    except (ValueError, RuntimeError) as error:
        options.error(f"argument --device: {error}")
    if args.amp and not torch.amp.is_autocast_available(device.type):
        options.error(f"argument --amp: must be left out where there is no autocast, got device {str(device)!r}")
    if args.workers is None:
        args.workers = 0 if device.type == "cpu" else 2
    if args.plot.is_dir() or not args.plot.parent.is_dir():
        options.error(f"argument --plot: must be a file in a folder that exists, got {str(args.plot)!r}")
    try:
        pictures = generate(args.seed) if args.data is None else load(args.data)
    except DataError as error:
        options.error(f"argument --data: {error}")

    if device.type == "cpu":
        # One core is left to whatever else runs. With a thread on each, every operation waits for the core with the
        # busy neighbour: one other process made this training ten times slower.
        torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1)))

    how = "with CUDAPrefetcher" if args.prefetch else "in the plain loop"
    print(f"data: {pictures.description}{', since no --data was given' if args.data is None else ''}")
    print(f"device: {device}, {how}", flush=True)
    result = train(pictures, device, args)
    plot(result, f"{pictures.description}, on {device}, {how}", 1 / len(pictures.classes), args.plot)
    print(f"curves: {args.plot}")
    print(f"test accuracy {100 * result.accuracies[-1]:05.2f} %")
    return result


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as a shell reports Ctrl-C
