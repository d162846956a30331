"""The example of the way back: both loops give the same, it says what it measured, and it draws a picture."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from PIL import Image

from prefetch import to_host
from tests import simulator
from tests.helpers import ROOT

EXAMPLES = ROOT / "examples"
OPTIONS = ("--steps", 2, "--batch-size", 16, "--repetitions", 2)

Run = Callable[..., dict[str, list[float]]]


@pytest.fixture(name="example")
def _example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as a module, with few images; its folder is no package, as a script's is not."""
    # autograd counts the accelerators at a process's first backward pass: one that is loaded later cannot have any.
    with contextlib.suppress(simulator.SimulatorUnavailable):  # then the test that needs it is skipped
        simulator.load()
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("to_host")
    monkeypatch.setattr(module, "generate", functools.partial(module.generate, train=32, test=40))
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)  # the example chooses a number


@pytest.fixture(name="run")
def _run(example: ModuleType, tmp_path: Path) -> Run:
    """A call of the example's main with options, its plot in the test's folder."""

    def run(*options: object) -> Any:
        return example.main(["--plot", str(tmp_path / "plot.png"), *map(str, options)])

    return run


def test_on_the_cpu(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says that there is nothing to overlap, gives the time of each repetition, and leaves a picture."""
    times = run("--device", "cpu", *OPTIONS)
    assert {name: len(taken) for name, taken in times.items()} == {"to_host()": 2, ".cpu()": 2}
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "data: 32 + 40 generated images, since no --data was given",
        "device: cpu",
        "values of 40 images: the same with to_host() and with .cpu(), bit for bit",
    ]
    assert [line.split()[0] for line in lines[3:5]] == ["to_host()", ".cpu()"]
    assert lines[5].startswith("On the CPU nothing is copied, and there is nothing to overlap")
    assert lines[6] == f"histogram: {tmp_path / 'plot.png'}"
    with Image.open(tmp_path / "plot.png") as picture:
        picture.load()
        assert (picture.format, picture.size) == ("PNG", (1050, 600))
        assert len(picture.convert("RGB").getcolors(1050 * 600)) > 2  # more than paper and ink


def test_on_an_accelerator(sim: Any, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulated one is the default; the values are the same there too, and its fixture finds no race."""
    run(*OPTIONS)
    output = capsys.readouterr().out
    assert "device: sim:0" in output
    assert "values of 40 images: the same" in output
    assert "On the CPU" not in output
    assert (tmp_path / "plot.png").exists()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_loops(sim: Any, example: ModuleType, device: str) -> None:
    """Both loops give the labels, answers and gradients of every batch, in order."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 4, 5)).to(device)
    host = [(torch.rand(2, 3, 4, 4), torch.randint(5, (2,))) for _ in range(3)]

    def batches() -> Any:
        return ((images.to(device, copy=True), labels.to(device)) for images, labels in host)

    streamed, plain = example.evaluate(model, batches()), example.evaluate_with_cpu(model, batches())
    assert [result["label"].tolist() for result in streamed] == [labels.tolist() for _, labels in host]
    assert [{name: array.shape for name, array in result.items()} for result in streamed] == [
        {"label": (2,), "answer": (2,), "gradient": (2, 3, 4, 4)}
    ] * 3
    for ours, theirs in zip(streamed, plain, strict=True):
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name])


def test_difference_is_found(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not pass whatever comes."""
    monkeypatch.setattr(example, "to_host", lambda values: to_host(values | {"answer": values["answer"] + 1}))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 5))
    with pytest.raises(AssertionError, match="answer"):
        example.check(model, [(torch.rand(2, 3, 1, 1), torch.zeros(2, dtype=torch.int64))])


def test_bad_options(tmp_path: Path) -> None:
    """Status 2, one line with the reason after the usage, no traceback, and no file."""
    for option, value, rule in (
        ("--repetitions", "0", "must be an integer from 1 upwards"),
        ("--device", "toaster", "device must name a device such as 'cpu' or 'cuda:0'"),
        ("--plot", "nowhere/plot.png", "must be a file that can be written"),
    ):
        ended = subprocess.run(
            [sys.executable, str(EXAMPLES / "to_host.py"), option, value],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.splitlines()[-1] == f"to_host.py: error: argument {option}: {rule}, got {value!r}"
        assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []
