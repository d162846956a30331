"""The examples run as a user runs them, and say what they have done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.integration

NEEDS = {
    "with_accelerate": ["accelerate"],
    "with_lightning": ["lightning"],
    "with_pyg": ["torch_geometric"],
    "with_ray": ["ray.train"],
    "with_tensordict": ["tensordict"],
    "with_torchdata_nodes": ["torchdata"],
    "with_transformers": ["transformers", "tokenizers", "accelerate"],
    "with_webdataset": ["webdataset"],
}
STEPS = 12


def run(name: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """An example, started in a folder that is not its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_each_is_here() -> None:
    """No example of a framework is left out."""
    assert sorted(path.stem for path in (ROOT / "examples").glob("with_*.py")) == sorted(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_it_trains(name: str, tmp_path: Path) -> None:
    """It makes the steps that it is asked for on the CPU, the loss falls, and no file is left behind."""
    for package in NEEDS[name]:
        pytest.importorskip(package)
    result = run(name, tmp_path, "--device", "cpu", "--steps", str(STEPS))
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    match = re.fullmatch(rf"{STEPS} steps on cpu: the loss went from (\S+) to (\S+)", last)
    assert match, last
    assert float(match[2]) < float(match[1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--steps", "0", "must be 1 or more, got 0"),
        ("--device", "nowhere", "'nowhere'"),
        ("--device", "cpu:0", "must be without a number, which the framework chooses, got 'cpu:0'"),
    ],
)
def test_bad_option(option: str, value: str, rule: str, tmp_path: Path) -> None:
    """A value that cannot be used is named with its option, and the status is 2."""
    pytest.importorskip("accelerate")  # all share the command line: one stands for them
    result = run("with_accelerate", tmp_path, option, value)
    assert result.returncode == 2
    assert f"argument {option}: " in result.stderr
    assert rule in result.stderr
