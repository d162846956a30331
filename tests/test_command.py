"""The command ``cuda-prefetcher``: as users run it, in processes of their own, and its parts on numbers alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefetch.cli import main
from prefetch.cli._hints import Facts, hints, why_not_wrapped, why_nothing
from prefetch.cli._output import table, verdict
from tests.helpers import ROOT

USER_MODULE = """
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

calls = []


def loader():
    return DataLoader(TensorDataset(torch.ones(64, 1000)), batch_size=8, pin_memory=torch.accelerator.is_available())


def slow():
    class Slow:
        def __iter__(self):
            for _ in range(5):
                time.sleep(0.02)
                yield torch.ones(8).pin_memory() if torch.accelerator.is_available() else torch.ones(8)

    return Slow()


def with_step():
    return slow(), step


def step(batch):
    return batch[0] * 2


def fails():
    raise KeyError("no data here")


def fails_later():
    def batches():
        yield torch.ones(2)
        raise ValueError("bad sample")

    class Failing:
        def __iter__(self):
            return batches()

    return Failing()


def empty():
    return []
"""


def run(*arguments: str, cwd: Path, simulated: bool = False) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    start = ["tests.simulator", "--h2d-mb-s", "1000", "prefetch"] if simulated else ["prefetch"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", *start, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the user's module."""
    (tmp_path / "mine.py").write_text(USER_MODULE)
    return tmp_path


class TestDoctor:
    """``cuda-prefetcher doctor``."""

    def test_on_the_cpu(self, folder: Path) -> None:
        """The machine, what cannot be measured, the user's loop with its verdict, and the block to paste."""
        ended = run("doctor", "mine:with_step", "--device", "cpu", "--seconds", "0.3", cwd=folder)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "no bandwidth, latency or overlap to measure on 'cpu': nothing is transferred to it" in ended.stdout
        assert "\nBottleneck: loader: " in ended.stdout
        assert "CUDAPrefetcher gains nothing here" in ended.stdout
        assert "\x1b" not in ended.stdout  # no terminal, no colour
        block = ended.stdout.partition("```text\n")[2].partition("\n```")[0]
        assert [line.split()[0] for line in block.splitlines()] == [
            *("versions", "machine", "device", "copies", "loader", "loops", "verdict", "hints")
        ]

    def test_on_the_simulated_device(self, simulator_unavailable: str | None, folder: Path) -> None:
        """Bandwidths of both ways, in a table, in JSON with nothing else beside it, and as a picture."""
        if simulator_unavailable is not None:
            pytest.skip(simulator_unavailable)
        ended = run(
            *("doctor", "mine:loader", "--step", "mine:step", "--seconds", "0.5", "--json", "--plot", "copies.png"),
            cwd=folder,
            simulated=True,
        )
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert found["environment"]["device_name"] == "simulated accelerator (no GPU)"
        kinds = {(cell["direction"], cell["memory"]) for cell in found["bandwidths"]}
        assert kinds == {(way, memory) for way in ("to device", "to host") for memory in ("pinned", "pageable")}
        pinned = [c for c in found["bandwidths"] if (c["direction"], c["memory"]) == ("to device", "pinned")]
        assert 0.2 < max(c["gb_per_s"] for c in pinned) < 1.1  # 1.0 was configured; a busy machine is slower
        assert found["loop"]["bottleneck"].split(":")[0] in ("loader", "copy", "compute")
        assert found["loop"]["stats"]["timed_batches"] == found["loop"]["stats"]["batches"] > 8
        assert (folder / "copies.png").read_bytes().startswith(b"\x89PNG")

    def test_mistakes_of_the_user(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
        """One line with the rule, and status 2; of what the user's code raises the traceback, and 1."""
        monkeypatch.chdir(folder)
        short = ["--device", "cpu", "--seconds", "0.05"]
        wrong = {
            ("doctor", "nowhere:loader"): "argument MODULE:FACTORY: must name a module that can be imported from here",
            ("doctor", "mine:nothing"): "argument MODULE:FACTORY: must name something that is there, got 'nothing'",
            ("doctor", "mine:calls"): "argument MODULE:FACTORY: must be callable without arguments",
            ("doctor", "mine:empty"): "the loader gave no batch",
            ("doctor", "mine:loader", "--step", "mine:nothing"): "argument --step: must name something that is there",
            ("doctor", "--step", "mine:step"): "argument --step: needs MODULE:FACTORY as well",
            ("doctor", "--plot", "p.png"): "argument --plot: there are no transfers to draw on 'cpu'",
        }
        for arguments, message in wrong.items():
            assert main([*arguments, *short]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"cuda-prefetcher doctor: error: {message}")
        for factory, message in {"fails": "KeyError: 'no data here'", "fails_later": "ValueError: bad sample"}.items():
            assert main(["doctor", f"mine:{factory}", *short]) == 1
            error = capsys.readouterr().err
            assert message in error
            assert "Traceback" in error
            assert "prefetch/cli" not in error

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["doctor", "mine"], "argument MODULE:FACTORY: must be a module and a name in it"),
            (["doctor", "--seconds", "0"], "argument --seconds: must be a number above 0, got '0'"),
            (["doctor", "--device", "toaster"], "argument --device: device must name a device"),
            (["bench", "--shape", "3,x"], "argument --shape: must be positive integers separated by commas"),
            (["bench", "--dtype", "floot"], "argument --dtype: must be a torch dtype"),
            (["bench", "--steps", "1"], "argument --steps: must be an integer from 2 upwards, got '1'"),
            (["bench", "--compute-ms", "-1"], "argument --compute-ms: must be a number from 0 upwards, got '-1'"),
            (["bench", "--png", "nowhere/p.png"], "argument --png: must be a file in a folder that exists"),
            (["bench", "--memory", "own"], "argument --memory: invalid choice: 'own'"),
        ],
    )
    def test_bad_options(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        """One line, status 2, nothing done."""
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert (ended.value.code, captured.out) == (2, "")
        (line,) = captured.err.splitlines()
        assert line.startswith(f"cuda-prefetcher {arguments[0]}: error: {message}")

    @pytest.mark.parametrize("command", ["doctor", "bench"])
    def test_every_option_has_help(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        """With its default."""
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        options = [part for part in text.split() if part.startswith("--")]
        assert len(set(options)) >= 5
        assert text.count("default:") >= text.partition("options:")[2].count(" --") - text.count("--no-background") - 2

    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Ctrl-C ends it with one line."""

        def interrupted(device: object) -> object:
            raise KeyboardInterrupt

        monkeypatch.setattr("prefetch.cli.doctor.environment", interrupted)
        assert main(["doctor", "--device", "cpu"]) == 130
        assert capsys.readouterr().err == "cuda-prefetcher doctor: interrupted\n"


class TestBench:
    """``cuda-prefetcher bench``."""

    def test_on_the_cpu(self, tmp_path: Path) -> None:
        """There is nothing to copy, and it says so."""
        ended = run("bench", "--shape", "8,10", "--compute-ms", "1", "--steps", "5", "--device", "cpu", cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "Prefetching does not help here" in ended.stdout
        assert "not pinned" in ended.stdout

    def test_on_the_simulated_device(self, simulator_unavailable: str | None, tmp_path: Path) -> None:
        """Copies of 8 ms beside steps of 8 ms: hidden by prefetching alone. The label, the JSON, the picture."""
        if simulator_unavailable is not None:
            pytest.skip(simulator_unavailable)
        options = ["--shape", "8000,1000", "--compute-ms", "8", "--steps", "12", "--json", "--png", "lanes.png"]
        ended = run("bench", *options, cwd=tmp_path, simulated=True)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert found["environment"]["device_name"] == "simulated accelerator (no GPU)"
        assert found["settings"]["batch_bytes"] == 8_000_000
        blocking, _, prefetched = (loop["ratio_to_limit"] for loop in found["loops"])
        assert prefetched < blocking
        assert 8e-3 <= found["copy_s"] < 40e-3  # 8 ms were configured; a busy machine is slower
        assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


GOOD = Facts(
    has_streams=True,
    cores=8,
    load_s=1e-3,
    start_s=0.0,
    pass_length=100,
    plain_s=10e-3,
    prefetched_s=10e-3,
    copy_s=1e-4,
    compute_s=10e-3,
    issue_s=1e-5,
    loader_wait_s=0.0,
    num_workers=4,
)


class TestHints:
    """What to change follows from the numbers, in order of gain."""

    def test_nothing_to_gain(self) -> None:
        """And why not."""
        assert hints(GOOD) == []
        assert "the step's own computation is the limit" in why_nothing(GOOD)
        assert "the copy is 1.0% of a step" in (why_not_wrapped(GOOD) or "")

    def test_order(self) -> None:
        """The largest gain first, each with what it saves and how that was found."""
        facts = dataclasses.replace(
            GOOD,
            num_workers=0,
            load_s=30e-3,
            plain_s=45e-3,
            prefetched_s=40e-3,
            copy_s=5e-3,
            loader_wait_s=30e-3,
            pageable_leaves=3,
            pin_memory=False,
            issue_s=2e-3,
        )
        found = hints(facts)
        assert [hint.change for hint in found] == [
            "num_workers=4 (now 0)",
            "CUDAPrefetcher(loader, background=True)",
            "wrap it: CUDAPrefetcher(loader)",
            "pin_memory=True",
        ]
        assert [round(hint.saved_s * 1e3, 3) for hint in found] == [30, 10, 5, 2]
        assert str(found[3]).startswith("pin_memory=True: saves 2 ms a step (5%), at most: the host takes 2 ms a batch")

    def test_workers_that_start_again(self) -> None:
        """For each pass: persistent ones save that."""
        (hint,) = hints(dataclasses.replace(GOOD, start_s=2.0, pass_length=200))
        assert hint.change == "persistent_workers=True"
        assert hint.saved_s == pytest.approx(10e-3)

    def test_late_batches(self) -> None:
        """Of a loader that is fast enough on average: a longer queue."""
        facts = dataclasses.replace(GOOD, loader_wait_s=2e-3, prefetched_s=12e-3, plain_s=12e-3)
        assert [hint.change for hint in hints(facts)] == ["prefetch_factor=4 (now 2)"]

    def test_without_streams(self) -> None:
        """There is nothing to overlap."""
        facts = dataclasses.replace(GOOD, has_streams=False, plain_s=12e-3)
        assert hints(facts) == []
        assert "no transfers" in (why_not_wrapped(facts) or "")


def test_table() -> None:
    """Columns are aligned: the first to the left, the others to the right."""
    assert table(["a", "bb"], [["ccc", "1"], ["d", "222"]]) == "a     bb\nccc    1\nd    222"


def test_colour_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only if it is not unwanted."""
    assert verdict("copy: slow") == "copy: slow"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert verdict("copy: slow") == "\x1b[1;33mcopy\x1b[0m: slow"
    monkeypatch.setenv("NO_COLOR", "1")
    assert verdict("copy: slow") == "copy: slow"
