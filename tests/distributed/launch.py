"""Start ``program.py`` as several processes, or as one, and read what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import ROOT

PROGRAM = Path(__file__).parent / "program.py"
LONGEST_S = 120  # what a run may take before it counts as one that hangs


def command(folder: Path, processes: int, *options: object) -> list[str]:
    """The program, from torchrun if there are several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [*(torchrun if processes > 1 else []), PROGRAM, folder, "--device", "cpu", "--batch-size", 20, *options]
    return [sys.executable, *map(str, words)]


@contextmanager
def started(folder: Path, processes: int, *options: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is under way; it is ended if it has not ended by then."""
    folder.mkdir(exist_ok=True)
    variables = {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore:'set_vital' is deprecated",  # torchdata with a newer torch
        **environment,
    }
    process = subprocess.Popen(
        command(folder, processes, *options),
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then ends what it has started


def run(folder: Path, processes: int, *options: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A whole run."""
    with started(folder, processes, *options, **environment) as process:
        output, errors = process.communicate(timeout=LONGEST_S)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def notes(folder: Path, rank: int = 0) -> Any:
    """What a process has left."""
    return json.loads((folder / f"{rank}.json").read_text())


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it came true before the deadline."""
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    """Whether a process is at work: not one that has ended, and that nobody has asked for its status."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
