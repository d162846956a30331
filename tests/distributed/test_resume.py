"""Two processes go on from a checkpoint as if they had not stopped; ``test_example_cifar10.py`` tests one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytest.importorskip("torchdata")

from tests.distributed.launch import notes, run

OPTIONS = ("--epochs", 2, "--checkpoint-every", 1)  # of 5 steps each
FIRST, MIDDLE, LAST = 1, 3, 5  # batches of the first epoch


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not interrupted, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("whole")
    ended = run(folder, 2, *OPTIONS, "--checkpoint", folder / "checkpoint")
    assert (ended.returncode, ended.stderr) == (0, "")
    return folder


def parts_at_the_end(folder: Path) -> Any:
    """Weights, momentum, schedule, from the last checkpoint."""
    return torch.load(folder / "checkpoint", weights_only=True)["parts"]


@pytest.mark.parametrize("step", [FIRST, MIDDLE, LAST])
def test_the_same_run(whole: Path, tmp_path: Path, step: int) -> None:
    """Losses, accuracies, batches and weights are equal bit for bit; no step before the checkpoint is done again."""
    options = ("--resume", whole / f"checkpoint.{step}", "--checkpoint", tmp_path / "checkpoint")
    ended = run(tmp_path, 2, *OPTIONS, *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    for rank in (0, 1):
        expected, got = notes(whole, rank), notes(tmp_path, rank)
        assert got["losses"] == expected["losses"]
        assert got["accuracies"] == expected["accuracies"]
        assert got["batches"] == expected["batches"][step:]
    expected, got = parts_at_the_end(whole), parts_at_the_end(tmp_path)
    for name in ("model", "optimizer", "schedule"):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0)


def test_another_number_of_processes(whole: Path, tmp_path: Path) -> None:
    """What two processes have saved is nothing for one: a line with both numbers, and status 2."""
    ended = run(tmp_path, 1, *OPTIONS, "--resume", whole / "checkpoint")
    assert (ended.returncode, ended.stdout) == (2, "")
    path = str(whole / "checkpoint")
    assert ended.stderr.splitlines()[-1] == (
        "program.py: error: argument --resume: must be a checkpoint of a run like this one, with world size 1, "
        f"got {path!r} of one with world size 2"
    )
