"""The command as a whole: its arguments, its mistakes, and how it ends."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetch import __version__
from prefetch.cli import _arguments, main
from prefetch.cli._output import progress, table, verdict
from tests.cli_helpers import run, start, write_shop
from tests.helpers import ROOT, run_python


def test_console_script() -> None:
    """The name that the README says runs the function that is tested here."""
    assert '\n[project.scripts]\ncuda-prefetcher = "prefetch.cli:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """As other commands."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"cuda-prefetcher {__version__}\n"


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_help_gives_each_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option but -h says what happens without it."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    options = capsys.readouterr().out.partition("\noptions:\n")[2].partition("\n\n")[0]
    assert options.count("\n  -") == options.count("default:") == {"doctor": 5, "bench": 11}[command]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "cuda-prefetcher: error: the following arguments are required: COMMAND"),
        ("bench --sha 1", "cuda-prefetcher: error: unrecognized arguments: --sha 1"),
        (
            "bench --shape 4,0",
            (
                "cuda-prefetcher bench: error: argument --shape: must be positive integers separated by commas, such "
                "as 256,3,224,224, got '4,0'"
            ),
        ),
        (
            "bench --dtype int3",
            (
                "cuda-prefetcher bench: error: argument --dtype: must be a torch dtype of which tensors can be "
                "filled, such as uint8 or bfloat16, got 'int3'"
            ),
        ),
        (
            "bench --compute-ms -1",
            "cuda-prefetcher bench: error: argument --compute-ms: must be a number from 0 upwards, got '-1'",
        ),
        (
            "bench --load-ms nan",
            "cuda-prefetcher bench: error: argument --load-ms: must be a number from 0 upwards, got 'nan'",
        ),
        (
            "bench --steps 1.5",
            "cuda-prefetcher bench: error: argument --steps: must be an integer from 2 upwards, got '1.5'",
        ),
        (
            "bench --prefetch-batches -1",
            "cuda-prefetcher bench: error: argument --prefetch-batches: must be an integer from 0 upwards, got '-1'",
        ),
        (
            "bench --plot nowhere/x.png",
            "cuda-prefetcher bench: error: argument --plot: must be a file that can be written, got 'nowhere/x.png'",
        ),
        (
            "doctor --plot /proc/x.png",  # where no file can be made, by the super-user either
            "cuda-prefetcher doctor: error: argument --plot: must be a file that can be written, got '/proc/x.png'",
        ),
        (
            "doctor --device toaster",
            (
                "cuda-prefetcher doctor: error: argument --device: device must name a device such as 'cpu' or "
                "'cuda:0', got 'toaster'"
            ),
        ),
        (
            "doctor --seconds 0",
            "cuda-prefetcher doctor: error: argument --seconds: must be a number above 0, got '0'",
        ),
        (
            "doctor shop",
            (
                "cuda-prefetcher doctor: error: argument MODULE:FACTORY: must be a module and a name in it, such as "
                "package.module:name, got 'shop'"
            ),
        ),
    ],
    ids=lambda value: value.replace(" ", "_")[:25] if isinstance(value, str) else None,
)
def test_wrong_arguments(arguments: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and exactly one line, with the argument, the rule and the value."""
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", error + "\n")


def test_memory_policies_are_those_of_the_class(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists them."""
    with pytest.raises(SystemExit):
        main(["bench", "--memory", "swap"])
    error = capsys.readouterr().err
    assert error.startswith("cuda-prefetcher bench: error: argument --memory: invalid choice: 'swap' (choose from ")
    assert [name for name in re.findall(r"\w+", error) if name in ("record_stream", "consumer", "static")] == [
        "record_stream",
        "consumer",
        "static",
    ]


@pytest.mark.parametrize("option", ["bench --plot", "doctor --plot"])
def test_without_matplotlib(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to install, before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command, name = option.split()
    with pytest.raises(SystemExit) as end:
        main([command, name, str(tmp_path / "x.png")])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f'cuda-prefetcher {command}: error: argument {name}: needs matplotlib: pip install "cuda-prefetcher[plot]"\n'
    )


def test_as_a_module(tmp_path: Path) -> None:
    """``python -m prefetch`` has the command's name and its status."""
    ended = run(tmp_path, "prefetch", "bench", "--shape", "x")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("cuda-prefetcher bench: error: argument --shape: must be positive integers")
    assert ended.stderr.count("\n") == 1


def test_interrupt(tmp_path: Path) -> None:
    """Ctrl-C ends it at once with status 130 and one line."""
    write_shop(tmp_path)
    with start(tmp_path, "doctor", "shop:pageable", "--device", "cpu", "--seconds", "1000") as process:
        assert process.stdout is not None
        assert any(line.startswith("Loader: ") for line in process.stdout)  # from here on it measures
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "cuda-prefetcher doctor: interrupted\n")


def test_reader_goes_away(tmp_path: Path) -> None:
    """``| head`` is no error to show."""
    with start(tmp_path, "bench", "--device", "cpu", "--shape", "4", "--steps", "2") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("device    cpu: ")
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, "")


IMPORTS = """
import sys
import prefetch
print(sorted(name for name in sys.modules if name.startswith(("prefetch.cli", "matplotlib"))))
import prefetch.cli
print(sorted(name for name in sys.modules if name.startswith("matplotlib")))
"""


def test_imports() -> None:
    """The library does not import the command, and the command imports matplotlib when it is to draw."""
    result = run_python("-W", "error", "-c", IMPORTS)
    assert (result.stdout, result.stderr) == ("[]\n[]\n", "")


def test_device_by_index(sim: Any) -> None:
    """A number means the accelerator with that index."""
    assert _arguments.device("1") == torch.device("sim", 1)
    assert _arguments.device("") == torch.device("sim", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("uint8", torch.uint8), ("bfloat16", torch.bfloat16), ("complex64", torch.complex64)],
    ids=lambda value: str(value),
)
def test_dtype(text: str, expected: torch.dtype) -> None:
    """Any type of which tensors can be made."""
    assert _arguments.dtype(text) == expected


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("installed", [True, False])
def test_progress(
    terminal: bool, installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar only on a terminal, and only with tqdm; what is done is the same."""
    if installed:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress(2, "rounds") as advance:
        advance()
        advance()
    assert ("rounds" in capsys.readouterr().err) is (terminal and installed)


def test_progress_passes_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing module of the user's is not taken for a missing bar."""
    with pytest.raises(ImportError, match="theirs"), progress(1, "rounds"):
        raise ImportError("theirs")


RACE = """
import torch

source = torch.ones(1000).pin_memory()
with torch.Stream("sim"):
    moved = source.to("sim", non_blocking=True)
moved + 1  # without waiting
torch.accelerator.synchronize()
"""


@pytest.mark.usefixtures("sim")
def test_simulator_reports_races(tmp_path: Path) -> None:
    """A program that is run on the simulated accelerator as these tests do does not hide what the detectors find."""
    (tmp_path / "racy.py").write_text(RACE)
    ended = run(tmp_path, "tests.simulator", "--latency-us", 1000, "racy")
    assert ended.returncode == 70
    assert ended.stderr.startswith("races:\n")


def test_table() -> None:
    """Names to the left, numbers to the right."""
    assert table(["loop", "ms"], [["a", "10.5"], ["longer", "1"]]).splitlines() == [
        "loop      ms",
        "a       10.5",
        "longer     1",
    ]


def test_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the verdict's word, only on a terminal, and not where NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = "Bottleneck: copy: the copies are the limit"
    assert verdict("copy: the copies are the limit") == plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert verdict("copy: the copies are the limit") == plain.replace(" copy:", " \x1b[1;33mcopy\x1b[0m:")
    monkeypatch.setenv("NO_COLOR", "1")
    assert verdict("copy: the copies are the limit") == plain
