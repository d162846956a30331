"""``examples/cifar10.py`` as one process of several, on few images: it notes what it did, and may be told to fail.

``python program.py FOLDER [OPTIONS]``: the options are those of the example, without ``--plot``. In the folder each
process leaves ``<rank>.json``, and after its third step ``<rank>.pids``, its own process id and those of its loader's
workers. Every checkpoint is kept, as ``checkpoint.<number>``. With the environment variable ``FAIL_RANK`` that process
raises an error in its third step, with ``DOUBLE`` all compute in float64.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

cifar10: Any = importlib.import_module("cifar10")  # not in a package: it is a script

RANK = int(os.environ.get("RANK", "0"))


def main(folder: Path, *options: str) -> None:
    """Run it."""
    plots: list[str] = []
    batches: list[list[int]] = []  # the numbers of the images
    tested: list[int] = []
    saves: list[Path] = []
    steps = itertools.count(1)

    def generate(seed: int) -> Any:
        # Odd numbers: two processes cannot share them equally. An image's first pixel is its number.
        data = original["generate"](seed, train=111, test=21)
        for part in (data.train, data.test):
            part.tensors[0][:, 0, 0, 0] = torch.arange(len(part))
        return data

    def prepare(self: Any, batch: Any) -> Any:
        numbers = batch[0][:, 0, 0, 0].tolist()
        if self._flips is None:
            tested.extend(numbers)
        else:
            batches.append(numbers)
        images, labels = original["prepare"](self, batch)
        return images.to(torch.get_default_dtype()), labels

    def save(self: Any, *args: Any) -> None:
        original["save"](self, *args)
        if RANK == 0:
            saves.append(folder / f"checkpoint.{len(saves) + 1}")
            shutil.copy(self._path, saves[-1])

    def add(self: Any, loss: torch.Tensor) -> None:
        original["add"](self, loss)
        if next(steps) == 3:
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            written = folder / f"{RANK}.part"
            written.write_text(json.dumps(pids))
            written.rename(folder / f"{RANK}.pids")
            if os.environ.get("FAIL_RANK") == str(RANK):
                raise RuntimeError(f"a fault in rank {RANK}")

    original: dict[str, Any] = {
        "generate": cifar10.generate,
        "prepare": cifar10.Prepare.__call__,
        "save": cifar10.Checkpoints.save,
        "add": cifar10.Recorder.add,
    }
    cifar10.generate = generate
    cifar10.Prepare.__call__ = prepare
    cifar10.Checkpoints.save = save
    cifar10.Recorder.add = add
    cifar10.plot = lambda *args: plots.append(str(args[-1]))
    if "DOUBLE" in os.environ:
        torch.set_default_dtype(torch.float64)

    result = cifar10.main([*options, "--plot", str(folder / "plot.png")])
    notes = {
        "losses": result.losses,
        "accuracies": result.accuracies,
        "plots": plots,
        "batches": batches,
        "tested": tested,
    }
    (folder / f"{RANK}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    cifar10.record(functools.partial(main, Path(sys.argv[1]), *sys.argv[2:]))()
