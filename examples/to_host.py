"""Evaluate a small ResNet and bring predictions and gradients to the host with ``to_host``, beside ``.cpu()``.

    pip install -e ".[examples]"                    # once, in a clone of the project
    python examples/to_host.py                      # generated images: nothing to download
    python examples/to_host.py --data data          # CIFAR-10, downloaded when it is not there

For each test image: what the network answers, and how its loss depends on each pixel. Both loops bring the same to
the host; only the one with ``.cpu()`` waits for each copy. The histogram shows which images a small change
would matter for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from cifar10_data import DataError, generate, load
from cifar10_distributed import Group
from cifar10_model import small_resnet
from cifar10_options import can_write, integer
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from prefetch import CUDAPrefetcher, to_host

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Arrays: TypeAlias = dict[str, np.ndarray]


def examine(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is to come to the host of one batch: N right labels, N answers, and N gradients of shape (3, 32, 32)."""
    images.requires_grad_()
    scores = model(images)
    (gradient,) = torch.autograd.grad(cross_entropy(scores, labels, reduction="sum"), images)
    return {"label": labels, "answer": scores.argmax(dim=1), "gradient": gradient}


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> list[Arrays]:
    """The loop that this example is about: it queues the copies and goes on."""
    futures = [to_host(examine(model, images, labels)) for images, labels in batches]
    return [future.numpy() for future in futures]


def evaluate_with_cpu(model: nn.Module, batches: Iterable[Batch]) -> list[Arrays]:
    """The loop that everybody writes: each .cpu() waits until the device has done all that was asked of it."""
    results = []
    for images, labels in batches:
        values = examine(model, images, labels)
        results.append({name: value.cpu().numpy() for name, value in values.items()})
    return results


def check(model: nn.Module, batches: Iterable[Batch]) -> int:
    """Bring the same values to the host in both ways.

    Returns:
        How many images there were.

    Raises:
        AssertionError: One bit differs.
    """
    kept = []
    for images, labels in batches:
        values = examine(model, images, labels)
        kept.append((to_host(values), values))
    for future, values in kept:
        for name, array in future.numpy().items():
            np.testing.assert_array_equal(array, values[name].cpu().numpy(), err_msg=name)
    return sum(len(values["label"]) for _, values in kept)


def seconds(loop: Callable[..., list[Arrays]], model: nn.Module, batches: Iterable[Batch]) -> float:
    """How long a loop takes until all its values are on the host."""
    begin = time.perf_counter()
    loop(model, batches)
    return time.perf_counter() - begin


def train(model: nn.Module, batches: Iterable[Batch], steps: int) -> None:
    """So many steps, over as many epochs as they need: enough to answer better than by guessing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    step = 0
    while step < steps:
        for images, labels in batches:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step == steps:
                return


def plot(results: list[Arrays], title: str, path: Path) -> None:
    """Draw how much the loss depends on the pixels, for images with right and with wrong answers."""
    labels, answers, gradients = (
        np.concatenate([result[name] for result in results]) for name in ("label", "answer", "gradient")
    )
    norms = np.linalg.norm(gradients.reshape(len(gradients), -1), axis=1)
    right = labels == answers
    high = norms.max()
    low = high / 1e4  # where the network is very sure, norms go down to zero
    norms = np.maximum(norms, low)
    edges = np.geomspace(low / 1.001, 1.001 * high, 41)

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.hist(
        [norms[right], norms[~right]],
        bins=edges.tolist(),
        stacked=True,
        label=[f"right answer ({right.sum():,})", f"wrong answer ({(~right).sum():,})"],
    )
    axes.set(
        xscale="log",
        xlabel="norm of the loss's gradient with respect to the pixels, which are from 0 to 1 (nats)\n"
        "the lowest bar counts all that is below it too",
        ylabel="images",
    )
    axes.set_title(f"How much the loss of an image depends on its pixels\n({title})", fontsize="medium")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=150)


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description="Bring predictions and gradients to the host as the device goes on.")
    add = options.add_argument
    add("--data", type=Path, metavar="DIR", help="as for cifar10.py; without it images are generated")
    add("--device", help="default: the current accelerator, or the CPU where there is none")
    add("--steps", type=integer(0), default=60, metavar="N", help="of training before; default: %(default)s")
    add("--batch-size", type=integer(1), default=128, metavar="N", help="default: %(default)s")
    add("--repetitions", type=integer(1), default=3, metavar="N", help="of each loop; default: %(default)s")
    add("--seed", type=integer(0, 2**63 - 1), default=0, metavar="N", help="default: %(default)s")
    add("--plot", type=Path, default=Path("to_host.png"), metavar="PATH", help="the PNG; default: %(default)s")
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Run the example.

    Args:
        argv: The options; by default those of the command line.

    Returns:
        The seconds that each repetition of each loop took.

    Raises:
        SystemExit: An option's value cannot be used (status 2). Nothing has been written by then.
    """
    options = parser()
    args = options.parse_args(argv)
    try:
        device = CUDAPrefetcher((), args.device).device
    except (ValueError, RuntimeError) as error:
        options.error(f"argument --device: {error}")
    if not can_write(args.plot):
        options.error(f"argument --plot: must be a file that can be written, got {str(args.plot)!r}")
    try:
        data = generate(args.seed) if args.data is None else load(args.data, Group(0, 1, 0))
    except DataError as error:
        options.error(f"argument --data: {error}")
    print(f"data: {data.description}{', since no --data was given' if args.data is None else ''}")
    print(f"device: {device}")
    if device.type == "cpu":  # one core is left to whatever else runs, or every operation waits for it
        torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1)))

    torch.manual_seed(args.seed)
    train_batches, test_batches = (
        CUDAPrefetcher(
            DataLoader(part, args.batch_size, shuffle=shuffle, pin_memory=device.type != "cpu"),
            device,
            transform=lambda batch: (batch[0] / 255, batch[1]),
        )
        for part, shuffle in ((data.train, True), (data.test, False))
    )
    model = small_resnet(len(data.classes)).to(device)
    train(model, train_batches, args.steps)
    model.eval()

    count = check(model, test_batches)  # the warm-up as well
    print(f"values of {count:,} images: the same with to_host() and with .cpu(), bit for bit")
    loops = {"to_host()": evaluate, ".cpu()": evaluate_with_cpu}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(args.repetitions):
        for name, loop in loops.items():  # in turn, so that whatever else the machine does falls on both
            times[name].append(seconds(loop, model, test_batches))
    for name, taken in times.items():
        print(
            f"{name:9} {1e3 * statistics.median(taken):8.1f} ms  "
            f"(median of {len(taken)}, from {1e3 * min(taken):.1f} to {1e3 * max(taken):.1f} ms)"
        )
    if device.type == "cpu":
        print("On the CPU nothing is copied, and there is nothing to overlap: the two times differ by chance.")

    plot(evaluate(model, test_batches), f"{data.description}, after {args.steps} steps of training", args.plot)
    print(f"histogram: {args.plot}")
    return times


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as a shell reports Ctrl-C
