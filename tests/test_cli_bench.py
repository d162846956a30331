"""``cuda-prefetcher bench``: what it measures, what it says about it, and what it draws."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetch.cli import main
from prefetch.cli._compare import BLOCKING, NON_BLOCKING, PREFETCHED, Ready, Result, Row, conclusion
from prefetch.cli._measure import calibrated, device_seconds
from prefetch.cli._output import CommandError
from tests.cli_helpers import run

MS = 1e-3
SMALL = ("--shape", "8,3,8,8", "--steps", "4", "--compute-ms", "2")


# ---------------------------------------------------------------- as a user runs it


def test_on_the_cpu(tmp_path: Path) -> None:
    """Text with a table, and the plain word that nothing is to be gained."""
    ended = run(tmp_path, "prefetch", "bench", "--device", "cpu", *SMALL)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("device    cpu: ")
    assert lines[1] == "batch     8 x 3 x 8 x 8 uint8, 1.54 kB, not pinned"
    assert re.match(
        r"step      2 ms asked for, [\d.e+]+ ms reached by the clock: \d+ products of \d+ x \d+ mat", lines[2]
    )
    names = [line.partition("   ")[0] for line in lines if line.startswith(("batch.to", "CUDAPrefetcher(b"))]
    assert names == [BLOCKING, NON_BLOCKING, PREFETCHED]
    said = " ".join(ended.stdout.split())
    assert "Prefetching does not help here: the batches are on the CPU already" in said
    assert "Limit: the longest of load, copy and compute, each measured alone in this run." in said
    assert "\x1b" not in ended.stdout


@pytest.mark.usefixtures("sim")
def test_on_an_accelerator(tmp_path: Path) -> None:
    """The result is labelled as simulated, copies last as configured, and the picture has both timelines."""
    image = pytest.importorskip("PIL.Image")
    settings = ("--h2d-mb-s", 20, "--latency-us", 20, "--kernel-us", 1000)  # 98 kB in 4.9 ms
    command = ("prefetch", "bench", "--shape", "8,3,64,64", "--steps", 20, "--plot", "both.png")
    ended = run(tmp_path, "tests.simulator", *settings, *command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(
        "device    sim:0: simulated accelerator (no GPU)\nbatch     8 x 3 x 64 x 64 uint8, 98.3 kB, pinned\n"
    )
    alone = re.search(r"load ([\d.e-]+), copy ([\d.]+), compute ([\d.]+) ms a step; limit", ended.stdout)
    assert alone is not None
    load, copy, compute = map(float, alone.groups())
    assert load < 1
    assert 4.9 <= copy < 50
    assert 5 < compute < 100
    assert "ms reached by timing events: " in ended.stdout
    assert re.search(r"^Bottleneck: (loader|copy|compute): ", ended.stdout, re.MULTILINE)
    assert "Plot of both timelines: both.png" in ended.stdout
    with image.open(tmp_path / "both.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.width > 1000
        assert picture.height > 500
        colors = {color for _, color in picture.convert("RGB").getcolors(picture.width * picture.height)}
    assert {(0x56, 0xB4, 0xE9), (0x00, 0x9E, 0x73)} <= colors  # copies and computation


# ---------------------------------------------------------------- in this process


@pytest.mark.parametrize(
    "options",
    [[], ["--background", "--load-ms", "1"], ["--memory", "static", "--prefetch-batches", "1", "--dtype", "float32"]],
    ids=["defaults", "background", "static"],
)
def test_json(sim: Any, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One object with all of it; times that fit together."""
    assert main(["bench", "--device", "sim", *SMALL, *options, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert result["environment"]["device_name"] == "simulated accelerator (no GPU)"
    settings = result["settings"]
    assert settings["shape"] == [8, 3, 8, 8]
    assert settings["batch_bytes"] == 1536 * (4 if settings["dtype"] == "float32" else 1)
    assert settings["background"] is (True if "--background" in options else None)
    assert settings["memory"] == ("static" if "static" in options else "record_stream")
    assert [loop["name"] for loop in result["loops"]] == [BLOCKING, NON_BLOCKING, PREFETCHED]
    assert result["limit_s"] == max(result["load_s"], result["copy_s"], result["compute_s"])
    assert result[f"{result['limit']}_s"] == result["limit_s"]
    assert result["loops"][0]["speedup"] == 1
    for loop in result["loops"]:
        assert loop["ratio_to_limit"] == pytest.approx(loop["step_s"] / result["limit_s"])
        assert loop["step_s"] > 0.3 * result["limit_s"]
        assert loop["host_s"] >= 0
    if "--load-ms" in options:
        assert result["load_s"] >= 1 * MS
    assert result["bottleneck"].split(":")[0] in ("loader", "copy", "compute")
    assert result["conclusion"].startswith("Prefetching ")


def test_out_of_device_memory(sim: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the option that asks for less."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("sim: out of memory")

    monkeypatch.setattr(torch.Tensor, "record_stream", full)  # part of each batch in the prefetched loop only
    assert main(["bench", "--device", "sim", *SMALL]) == 2
    assert capsys.readouterr().err == (
        "cuda-prefetcher bench: error: argument --shape: the batches of a loop must fit into the memory of sim:0, "
        "got '8,3,8,8' of torch.uint8: sim: out of memory\n"
    )


def test_no_computation(sim: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of 0 ms does nothing at all."""
    assert main(["bench", "--device", "sim:1", "--shape", "4", "--steps", "3", "--compute-ms", "0"]) == 0
    text = capsys.readouterr().out
    assert "step      0 ms asked for, 0 ms reached by timing events: nothing" in text
    assert torch.accelerator.current_device_index() == 0


def test_threads_are_restored(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU the step leaves a core to others; afterwards torch computes with as many threads as before."""
    threads = torch.get_num_threads()
    assert main(["bench", "--device", "cpu", *SMALL]) == 0
    assert torch.get_num_threads() == threads


def test_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    """Batches for which there is no memory are a wrong argument."""
    assert main(["bench", "--device", "cpu", "--shape", "1000000,1000000,1000"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cuda-prefetcher bench: error: argument --shape: 4 batches must fit into memory, got ")
    assert error.count("\n") == 1


def test_ready() -> None:
    """A few batches in turn, as many as a pass has steps, and how long that took."""
    ready = Ready((2, 3), torch.int16, torch.device("cpu"), 1 * MS)
    ready.steps = 6
    batches = list(ready)
    assert len(batches) == 6
    assert batches[0] is batches[4]
    assert batches[0] is not batches[1]
    assert (batches[0].shape, batches[0].dtype, ready.nbytes) == ((2, 3), torch.int16, 12)
    assert ready.spent_s >= 6 * MS


def test_ready_on_an_accelerator(sim: Any) -> None:
    """They are in pinned memory."""
    ready = Ready((2,), torch.uint8, torch.device("sim", 0), 0)
    ready.steps = 1
    assert next(iter(ready)).is_pinned()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_calibration(sim: Any, device: str) -> None:
    """The step lasts about as long as asked for, by the device's own clock."""
    sim.configure(kernel_us=500)
    step = calibrated(torch.device(device, 0) if device == "sim" else torch.device(device), 10 * MS)
    assert 2 * MS < step.seconds < 50 * MS
    assert re.fullmatch(r"\d+ products of \d+ x \d+ matrices", step.description)


def test_device_seconds(sim: Any) -> None:
    """What is queued on the current stream counts, not what the host takes to queue it."""
    taken = device_seconds(torch.device("sim", 0), lambda: sim.busy(20_000))
    assert 20 * MS <= taken < 1


def result(
    *steps: float,
    load: float = 0.0,
    copy: float = 5.0,
    compute: float = 10.0,
    host: bool = False,
    looks_ahead: bool = True,
) -> Result:
    """A result in milliseconds."""
    blocking, non_blocking, prefetched = (
        Row(name, step * MS, 50e-6) for name, step in zip((BLOCKING, NON_BLOCKING, PREFETCHED), steps, strict=True)
    )
    return Result(
        is_host=host,
        looks_ahead=looks_ahead,
        load_s=load * MS,
        copy_s=copy * MS,
        compute_s=compute * MS,
        rows=(blocking, non_blocking, prefetched),
        bottleneck="compute: batches are there in time",
    )


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (
            result(15.5, 15, 10),
            "Prefetching makes the loop 1.50 times as fast as the faster plain loop; 1.50 times would be possible.",
        ),
        (
            result(10.2, 10.1, 10, copy=0.1),
            (
                "Prefetching does not help here (1.01 times as fast): the copy (100 us) is 1.0% of a step (10 ms), and "
                "nothing can gain more than that."
            ),
        ),
        (
            result(11, 11, 10, copy=0.1),
            (
                "Prefetching does not help here (1.10 times as fast): the copy (100 us) is 1.0% of a step (10 ms), and "
                "nothing can gain more than that."
            ),
        ),
        (
            result(30.1, 30, 30, load=30),
            (
                "Prefetching does not help here (1.00 times as fast): the loader is the limit (30 ms a batch), and "
                "the rest is done while it is waited for: make the loader faster."
            ),
        ),
        (
            result(10.2, 10.1, 10.1, copy=10, compute=0.1),
            (
                "Prefetching does not help here (1.00 times as fast): the copy is the limit (10 ms), and there is "
                "hardly any computation (100 us) behind which it could be hidden."
            ),
        ),
        (
            result(15, 15, 16),
            (
                "Prefetching does not help here (0.94 times as fast): a step takes 16 ms where 10 ms would be "
                "possible, so the host or other programs are in the way; getting a batch takes the host 50 us."
            ),
        ),
        (
            result(10, 10, 8, copy=0, host=True, looks_ahead=False),
            (
                "Prefetching does not help here: the batches are on the CPU already, and without a thread "
                "(--background) CUDAPrefetcher does what the plain loop does; differences are chance."
            ),
        ),
        (
            result(15, 15, 10, load=5, copy=0, host=True),
            "Prefetching makes the loop 1.50 times as fast as the faster plain loop; 1.50 times would be possible.",
        ),
        (
            result(15, 15, 10, looks_ahead=False),
            (
                "Prefetching does not help here: this device has no streams, and without a thread (--background) "
                "CUDAPrefetcher does what the plain loop does; differences are chance."
            ),
        ),
    ],
    ids=["gain", "small copy", "chance", "loader", "no computation", "host", "CPU", "CPU with a thread", "no streams"],
)
def test_conclusion(measured: Result, said: str) -> None:
    """What prefetching gains, or why it does not."""
    assert conclusion(measured) == said


def test_limit() -> None:
    """The longest of the three, by name."""
    assert (result(1, 1, 1).limit_s, result(1, 1, 1).limit_name) == (10 * MS, "compute")
    assert result(1, 1, 1, load=11).limit_name == "load"
    assert dataclasses.replace(result(1, 1, 1), copy_s=1.0).limit_name == "copy"


def test_ready_without_memory() -> None:
    """As an error of the command, which names the argument."""
    with pytest.raises(
        CommandError, match="argument --shape: 4 batches must fit into memory, got '9999999,9999999,999'"
    ):
        Ready((9999999, 9999999, 999), torch.uint8, torch.device("cpu"), 0)
