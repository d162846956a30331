"""A process that fails ends the run: with its reason, without a hang, and nothing is left of the others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytest.importorskip("torchdata")

from tests.distributed.launch import LONGEST_S, alive, run, started, wait_for

LONG = ("--epochs", 100_000, "--steps", 100_000)


def pids_of(folder: Path) -> list[int]:
    """The processes that train, by rank, and the workers of their loaders."""
    of_rank = [json.loads((folder / f"{rank}.pids").read_text()) for rank in (0, 1)]
    return [of_rank[0][0], of_rank[1][0], *of_rank[0][1:], *of_rank[1][1:]]


def test_a_process_is_killed(tmp_path: Path) -> None:
    """Killed in the middle of an epoch, as for want of memory: the report names it and the signal."""
    with started(tmp_path, 2, *LONG, "--workers", 1) as process:
        assert wait_for(lambda: process.poll() is not None or all((tmp_path / f"{r}.pids").exists() for r in (0, 1)))
        pids = pids_of(tmp_path)
        assert [alive(pid) for pid in pids] == [True] * len(pids)
        assert len(pids) >= 4
        os.kill(pids[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID " + str(pids[1]) in errors
    assert wait_for(lambda: not any(map(alive, pids)))


def test_a_process_raises(tmp_path: Path) -> None:
    """An error in one process, while the other waits for it: the report has the process and the traceback."""
    ended = run(tmp_path, 2, *LONG, "--workers", 1, FAIL_RANK="1")
    assert ended.returncode == 1
    root_cause = ended.stderr[ended.stderr.index("Root Cause") :]
    assert "rank      : 1 " in root_cause
    assert "RuntimeError: a fault in rank 1" in root_cause
    assert wait_for(lambda: not any(map(alive, pids_of(tmp_path))))


def test_a_bad_option(tmp_path: Path) -> None:
    """An option that no process can use: the line that says so, and nothing on the standard output."""
    ended = run(tmp_path, 2, "--batch-size", 15)
    assert ended.returncode == 1
    assert ended.stdout == ""
    expected = "error: argument --batch-size: must be a multiple of the number of processes, 2, got 15"
    assert expected in ended.stderr
