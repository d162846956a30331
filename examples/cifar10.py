"""Train a small ResNet on CIFAR-10: the loader wrapped in a CUDAPrefetcher, images normalised on the device.

    pip install -e ".[examples]"                    # once, in a clone of the project
    python examples/cifar10.py --data data          # CIFAR-10, downloaded when it is not there
    python examples/cifar10.py --data my-images     # train/<class>/*, test/<class>/*
    python examples/cifar10.py                      # generated images: nothing to download
    torchrun --nproc-per-node 2 examples/cifar10.py # two GPUs; without a GPU, two processes on the CPU

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
from collections.abc import Iterable, Sequence

import torch
from cifar10_batches import Batch, PlainLoop, Prepare, evaluation_batches, training_batches
from cifar10_checkpoint import CheckpointError, Checkpoints, Stateful, description
from cifar10_data import Data, DataError, generate, load
from cifar10_distributed import Group, own_device, process_group, world_size
from cifar10_model import small_resnet
from cifar10_options import check, parser
from cifar10_result import Recorder, Result, plot
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from prefetch import CUDAPrefetcher

LEARNING_RATE = 0.1  # at its peak
SECONDS_BETWEEN_LOSSES = 1.0  # in the progress bar


def train(
    data: Data, device: torch.device, group: Group, args: argparse.Namespace, checkpoints: Checkpoints | None
) -> Result:
    """Train and test as the options say, and report on the standard output after each epoch.

    Args:
        data: What to train and test with, the same in each process.
        device: Where this process computes.
        group: The processes that train together.
        args: The options.
        checkpoints: Where to save, and what to go on from.
    """
    torch.manual_seed(args.seed)  # the same weights and flips in each process
    model = small_resnet(len(data.classes), batch_norm=group.batch_norm(device))
    model = model.to(memory_format=torch.channels_last).to(device)
    autocast = torch.autocast(device.type, torch.bfloat16) if args.amp else contextlib.nullcontext()

    loader = training_batches(data.train, device, args, group.rank, group.size)
    steps = min(args.epochs * len(loader), args.steps or sys.maxsize)
    epochs = math.ceil(steps / len(loader))
    flips = torch.rand(epochs, len(data.train)) < 0.5
    prepare = Prepare(device, flips[:, group.rank :: group.size])  # images are dealt out to the processes in this way

    # The line that this example is about.
    loop = CUDAPrefetcher if args.prefetch else PlainLoop
    batches = loop(loader, device, transform=prepare)
    test_loader = evaluation_batches(data.test, device, args, group.rank, group.size)
    test_batches = loop(test_loader, device, transform=Prepare(device))

    parallel = group.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_cosine, steps=steps))
    result = Result()
    parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, "schedule": schedule, "result": result}
    if checkpoints is not None:
        checkpoints.restore(parts, batches)
    recorder = Recorder(result, device, group)
    for epoch in range(len(result.accuracies), epochs):
        done = (recorder.steps - epoch * len(loader)) * args.batch_size  # images; none, but after a resumption
        batches.set_epoch(epoch)  # another order in each epoch
        prepare.start(epoch, done // group.size)
        model.train()
        recorder.start()
        shown = time.perf_counter()
        # disable=None: no bar where the standard error is not a terminal.
        with tqdm(
            total=len(loader) * args.batch_size,
            initial=done,
            desc=f"epoch {epoch + 1}/{epochs}",
            unit=" images",
            leave=False,
            disable=None if group.rank == 0 else True,
        ) as bar:
            for images, labels in itertools.islice(batches, steps - recorder.steps):
                with autocast:
                    loss = cross_entropy(parallel(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                recorder.add(loss.detach())
                bar.update(args.batch_size)
                if not bar.disable and time.perf_counter() - shown > SECONDS_BETWEEN_LOSSES:
                    bar.set_postfix_str(f"loss {float(loss):.3f}")
                    shown = time.perf_counter()
                if checkpoints is not None and recorder.steps % args.checkpoint_every == 0:
                    recorder.settle()
                    checkpoints.save(parts, batches)
                    recorder.start()  # saving is not training
        recorder.end_epoch((recorder.steps - epoch * len(loader)) * args.batch_size)
        result.accuracies.append(evaluate(model, test_batches, autocast, group))
        losses = result.losses[epoch * len(loader) :]
        group.say(
            f"epoch {epoch + 1}/{epochs}: loss {sum(losses) / len(losses):.3f}, "
            f"accuracy {100 * result.accuracies[-1]:.2f} %, {result.images_per_s[-1]:,.0f} images/s"
        )
    if checkpoints is not None:
        checkpoints.save(parts, batches)
    return result


def warm_up_and_cosine(step: int, *, steps: int) -> float:
    """The factor of the learning rate: up in the first fifth of the run, then down to zero."""
    return min(5 * (step + 1) / steps, 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], autocast: contextlib.AbstractContextManager[object], group: Group
) -> float:
    """The fraction of the test set that the model gets right; each process looks at its share of the images."""
    model.eval()
    device = next(model.parameters()).device
    right_and_seen = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in batches:
        with autocast:
            scores = model(images)
        right_and_seen[0] += (scores.argmax(dim=1) == labels).sum()
        right_and_seen[1] += len(labels)
    right, seen = group.total(right_and_seen).tolist()
    return float(right / seen)


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
        device = own_device(args.device)
    except (ValueError, RuntimeError) as error:
        options.error(f"argument --device: {error}")
    check(options, args, device, world_size())
    with process_group(device) as group:
        try:
            data = generate(args.seed) if args.data is None else load(args.data, group)
        except DataError as error:
            options.error(f"argument --data: {error}")
        if args.batch_size > len(data.train):
            options.error(
                f"argument --batch-size: must be at most {len(data.train)}, the number of images to learn from, "
                f"got {args.batch_size}"
            )
        checkpoints = None
        if args.checkpoint is not None:
            run = description(args, data)
            checkpoints = Checkpoints(args.checkpoint, run, group)
        try:
            if checkpoints is not None and args.resume is not None:
                checkpoints.read(args.resume)
        except CheckpointError as error:
            options.error(f"argument --resume: {error}")

        if device.type == "cpu":
            # One core is left to whatever else runs. With a thread on each, every operation waits for the core with the
            # busy neighbour: one other process made this training ten times slower. (torchrun asks for one thread.)
            torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1)))

        how = "with CUDAPrefetcher" if args.prefetch else "in the plain loop"
        where = str(device) if group.size == 1 else f"{group.size} of type {device.type}"
        group.say(f"data: {data.description}{', since no --data was given' if args.data is None else ''}")
        group.say(f"device: {where}, {how}")
        result = train(data, device, group, args, checkpoints)
        if group.rank == 0:
            plot(result, f"{data.description}, on {where}, {how}", 1 / len(data.classes), args.plot)
        group.say(f"curves: {args.plot}")
        group.say(f"test accuracy {100 * result.accuracies[-1]:05.2f} %")
    return result


if __name__ == "__main__":
    try:
        record(main)()  # so that torchrun's report of an error has its traceback
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as a shell reports Ctrl-C
