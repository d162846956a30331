"""``cuda-prefetcher doctor``: what it finds out about a machine and a loop, and what it makes of it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from prefetch.cli import _loops, _measure, doctor, main
from prefetch.cli._hints import Facts, hints, why_not_wrapped, why_nothing
from prefetch.cli._loops import loading, plain, prefetched
from prefetch.cli._output import CommandError
from prefetch.cli._user import Endless, Program
from tests.cli_helpers import run, write_shop

MS = 1e-3
QUICK = ("--seconds", "0.05")


@pytest.fixture(name="shop")
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with the user's module, as the current one."""
    write_shop(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("shop", None)


@pytest.fixture(name="small")
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small sizes of copies only."""
    sizes = _measure.SIZES[:2]
    monkeypatch.setattr(doctor, "SIZES", sizes)
    monkeypatch.setattr(doctor, "bandwidths", lambda device: _measure.bandwidths(device, sizes))


# ---------------------------------------------------------------- as a user runs it


def test_on_the_cpu(tmp_path: Path) -> None:
    """Text that ends in a block for a bug report, which repeats what was found."""
    write_shop(tmp_path)
    ended = run(tmp_path, "prefetch", "doctor", "shop:with_step", "--device", "cpu", *QUICK)
    assert (ended.returncode, ended.stderr) == (0, "")
    text, _, block = ended.stdout.partition("\nTo paste into a bug report:\n\n")
    assert text.startswith("shop is imported\nversions  cuda-prefetcher ")
    assert "copies    no bandwidth, latency or overlap to measure on 'cpu': nothing is transferred to it" in text
    assert "Loader: shop:with_step, DataLoader(batch_size=4, num_workers=0, pin_memory=False," in text
    for row in ("the loader alone", "loop with .to(device, non_blocking=True)", "loop over CUDAPrefetcher(loader)"):
        assert re.search(rf"^{re.escape(row)} +[\d.]+ (us|ms|s) +\d+$", text, re.MULTILINE)
    assert re.search(r"^Bottleneck: (loader|copy|compute): ", text, re.MULTILINE)
    assert "CUDAPrefetcher gains nothing here: this device has no transfers that could run beside the step." in (
        " ".join(text.split())
    )
    lines = block.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    names = ["versions", "machine", "device", "copies", "loader", "a batch", "verdict", "hints"]
    assert [line[:10].strip() for line in lines[1:-1]] == names
    assert "\x1b" not in ended.stdout


@pytest.mark.usefixtures("sim")
def test_on_an_accelerator(tmp_path: Path) -> None:
    """JSON and nothing else, although the user's module prints; a picture; and the device says that it is simulated."""
    image = pytest.importorskip("PIL.Image")
    write_shop(tmp_path)
    command = ("prefetch", "doctor", "shop:pinned", "--json", "--plot", "copies.png", *QUICK)
    ended = run(tmp_path, "tests.simulator", "--h2d-mb-s", 2000, *command)
    assert (ended.returncode, ended.stderr) == (0, "shop is imported\n")
    result = json.loads(ended.stdout)
    assert result["environment"]["device"] == "sim:0"
    assert result["environment"]["device_name"] == "simulated accelerator (no GPU)"
    assert result["environment"]["streams"] is True
    assert 10e-6 < result["copy_latency_s"] < 0.1
    cells = {(cell["nbytes"], cell["memory"], cell["direction"]): cell["gb_per_s"] for cell in result["bandwidths"]}
    assert {nbytes for nbytes, _, _ in cells} == set(_measure.SIZES)
    assert len(cells) == 4 * len(_measure.SIZES)
    assert all(speed > 0 for speed in cells.values())
    assert all(speed < 2.1 for (_, _, direction), speed in cells.items() if direction == "to device")  # as configured
    loop = result["loop"]
    assert (loop["loader"], loop["settings"], loop["has_step"], loop["pass_length"]) == ("list", {}, False, 4)
    assert loop["stats"]["bytes"] >= 64 * loop["stats"]["batches"] > 0
    assert loop["stats"]["pageable_leaves"] == 0
    assert loop["bottleneck"].split(":")[0] in ("loader", "copy", "compute")
    with image.open(tmp_path / "copies.png") as picture:
        picture.load()
        assert (picture.format, picture.size) == ("PNG", (1050, 720))
        assert len(picture.convert("RGB").getcolors(1050 * 720)) > 4


def test_user_code_raises(tmp_path: Path) -> None:
    """The traceback is of the user's code alone, then one line, and status 1."""
    write_shop(tmp_path)
    ended = run(tmp_path, "prefetch", "doctor", "shop:pageable", "--step", "shop:bad_step", "--device", "cpu", *QUICK)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "cuda-prefetcher doctor: error: the step raised ArithmeticError: it does not add up"
    assert [line.split(", line")[0] for line in lines if line.startswith("  File ")] == [
        f'  File "{tmp_path / "shop.py"}"'
    ]


# ---------------------------------------------------------------- in this process


@pytest.mark.usefixtures("small", "shop")
def test_machine_only(sim: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a loader: a table of both directions and both kinds of memory."""
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "device    sim:0: simulated accelerator (no GPU), streams" in text
    table = text.partition("best of several:\n\n")[2].partition("\n\n")[0].splitlines()
    assert table[0].split("  ") == [
        "copy of",
        *("pinned to device", "pageable to device", "pinned to host", "pageable to host"),
    ]
    assert [re.findall(r"^\d+ KiB|[\d.e+-]+", line)[0] for line in table[1:]] == ["64 KiB", "256 KiB"]
    assert "Loader" not in text


@pytest.mark.usefixtures("small", "shop")
def test_second_device(sim: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The step's device is the one that was asked for, also where it does not name one; afterwards nothing changed."""
    assert main(["doctor", "shop:with_step", "--device", "sim:1", "--json", *QUICK]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["environment"]["device"] == "sim:1"
    assert result["loop"]["has_step"] is True
    assert set(sys.modules["shop"].steps) == {torch.device("sim", 1)}
    assert torch.accelerator.current_device_index() == 0
    assert result["loop"]["stats"]["pageable_leaves"] >= 1
    assert result["loop"]["settings"]["pin_memory"] is False


@pytest.mark.usefixtures("shop")
def test_named_step_takes_precedence(capsys: pytest.CaptureFixture[str]) -> None:
    """Over the one that the factory returns."""
    assert main(["doctor", "shop:with_step", "--step", "shop:bad_step", "--device", "cpu"]) == 1
    assert "the step raised ArithmeticError" in capsys.readouterr().err
    assert sys.modules["shop"].steps == []


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (
            "shop:absent",
            2,
            "argument MODULE:FACTORY: must name something that is there, got 'absent', which is not in shop",
        ),
        (
            "shop.inner:x",
            2,
            (
                "argument MODULE:FACTORY: must name a module that can be imported from here, got 'shop.inner': No "
                "module named 'shop.inner'; 'shop' is not a package"
            ),
        ),
        ("shop:number", 2, "argument MODULE:FACTORY: must be callable without arguments, got 'shop:number': 3"),
        (
            "shop:nothing",
            2,
            "argument MODULE:FACTORY: must return a loader, or (loader, step), got None from 'shop:nothing'",
        ),
        (
            "shop:pageable --step shop:absent",
            2,
            "argument --step: must name something that is there, got 'absent', which is not in shop",
        ),
        ("--step shop:step", 2, "argument --step: needs MODULE:FACTORY as well, got only 'shop:step'"),
        ("shop:empty", 2, "the loader gave no batch"),
        ("shop:Once", 2, "the loader gave no batch in pass 2, though it must start anew each time"),
        ("shop:bad_factory", 1, "shop:bad_factory raised LookupError: no data"),
        ("shop:BadLoader", 1, "the loader raised OSError: disk full"),
        ("shop:pageable --step shop:number", 2, "argument --step: must be callable, got 'shop:number': 3"),
    ],
    ids=lambda value: value.replace(" ", "_")[:25] if isinstance(value, str) else None,
)
def test_what_cannot_be_used(arguments: str, status: int, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One clear line at the end; a traceback before it only where the user's own code raised."""
    assert main(["doctor", *arguments.split(), "--device", "cpu", *QUICK]) == status
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"cuda-prefetcher doctor: error: {error}"
    assert (len(lines) > 1) is (status == 1)


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("factory", "rule"),
    [
        ("shop:generator", "must return a loader that can be iterated over more than once"),
        ("wrapped", "the loader itself"),
    ],
)
def test_wrong_loaders(factory: str, rule: str, shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An iterator ends too early; a prefetcher would be wrapped twice."""
    (shop / "wrapped.py").write_text("import prefetch\n\ndef make():\n    return prefetch.CUDAPrefetcher([1], 'cpu')\n")
    assert main(["doctor", factory if ":" in factory else "wrapped:make"]) == 2
    error = capsys.readouterr().err
    assert rule in error
    assert error.count("\n") == 1


def test_plot_needs_transfers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU there is nothing to draw, and no file."""
    pytest.importorskip("matplotlib")
    assert main(["doctor", "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 2
    assert "argument --plot: there are no transfers to draw on 'cpu'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_import_error_inside_the_users_module(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is theirs to see in full, not a name that is not there."""
    (shop / "shop2.py").write_text("import module_that_nobody_has\n")
    assert main(["doctor", "shop2:make"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert any("import module_that_nobody_has" in line for line in lines)
    assert lines[-1].startswith("cuda-prefetcher doctor: error: importing shop2 raised ModuleNotFoundError: ")


# ---------------------------------------------------------------- the loops


def test_endless() -> None:
    """One pass after the other, whose lengths are known."""
    passes = iter(Endless([1, 2, 3]))
    assert [next(passes) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert passes.pass_lengths == [3, 3]
    assert passes.is_at_start


def test_endless_over_nothing() -> None:
    """Says so instead of turning for ever."""
    with pytest.raises(CommandError, match=r"^the loader gave no batch$"):
        next(iter(Endless([])))


def test_loops_see_the_same_batches(sim: Any) -> None:
    """Nested batches arrive on the device in both loops, and what is no tensor as it is."""
    seen: list[Any] = []
    host: list[dict[str, Any]] = [{"x": torch.full((2,), float(i)).pin_memory(), "name": str(i)} for i in range(3)]
    program = Program("test", host, lambda batch: seen.append((batch["x"].device, batch["x"].tolist(), batch["name"])))
    device = torch.device("sim", 0)
    loops: list[Callable[..., object]] = [plain, prefetched]
    for loop in loops:
        seen.clear()
        loop(program, device, 0.02)
        expected = [(device, [float(i % 3)] * 2, str(i % 3)) for i in range(len(seen))]
        assert len(seen) > 3
        assert seen == expected
    assert all(batch["x"].device.type == "cpu" for batch in host)


def test_loader_alone() -> None:
    """Its length and the time of a batch; there is no start to speak of without workers."""
    measured = loading(Program("test", DataLoader(TensorDataset(torch.arange(8)), batch_size=2), None), 0.05)
    assert measured.pass_length == 4
    assert measured.loop.steps > 4
    assert 0 < measured.loop.seconds < 0.05
    one = loading(Program("test", [torch.ones(1)], None), 0.01)
    assert (one.pass_length, one.start_s) == (1, 0.0)


def test_pageable_batches(sim: Any) -> None:
    """Its warning is not shown, but counted; all batches are timed."""
    stats = prefetched(Program("test", [torch.ones(4)] * 3, None), torch.device("sim", 0), 0.02)[1]
    assert stats.pageable_leaves >= stats.batches > 3
    assert stats.timed_batches == stats.batches


@pytest.mark.parametrize(("workers", "expected"), [(0, False), (2, True)])
def test_background(sim: Any, workers: int, expected: bool) -> None:
    """A thread is used where it would be for the user's own loader, though that is hidden behind another."""
    loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=workers)
    assert _loops._background(loader, torch.device("sim", 0)) is expected
    assert _loops._background(loader, torch.device("cpu")) is False


def test_states_are_part_of_the_loop(sim: Any) -> None:
    """A loader with a state is asked for it after each batch, as in the user's loop."""

    class Stateful(list[torch.Tensor]):
        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            """Not asked for here."""

    loader = Stateful([torch.ones(4).pin_memory()] * 3)
    stats = prefetched(Program("test", loader, None), torch.device("sim", 0), 0.02)[1]
    assert loader.asked > stats.batches


# ---------------------------------------------------------------- what to change, from numbers

# Everything is fine: the step is the limit, and the rest is hidden.
FINE = Facts(
    has_streams=True,
    cores=8,
    load_s=2 * MS,
    start_s=0,
    pass_length=100,
    plain_s=10.1 * MS,
    prefetched_s=10 * MS,
    copy_s=0.1 * MS,
    compute_s=10 * MS,
    issue_s=0.05 * MS,
    loader_wait_s=0,
    num_workers=2,
    persistent_workers=True,
    prefetch_factor=2,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"plain_s": 15 * MS}, [("wrap it: CUDAPrefetcher(loader)", 5)]),
        # 20 ms a batch of two workers, needed every 10 ms: 2 * 20 / 10 * 1.25
        (
            {"load_s": 20 * MS, "plain_s": 20.1 * MS, "prefetched_s": 20 * MS, "loader_wait_s": 19 * MS},
            [("num_workers=5 (now 2)", 10)],
        ),
        # no more than there are cores: four of them give a batch every 10 ms
        (
            {"load_s": 20 * MS, "plain_s": 20.1 * MS, "prefetched_s": 20 * MS, "loader_wait_s": 19 * MS, "cores": 3},
            [("num_workers=3 (now 2)", 20 - 40 / 3)],
        ),
        (
            {
                "load_s": 8 * MS,
                "plain_s": 18.1 * MS,
                "prefetched_s": 18 * MS,
                "loader_wait_s": 8 * MS,
                "num_workers": 0,
            },
            [("num_workers=1 (now 0)", 8), ("CUDAPrefetcher(loader, background=True)", 8)],
        ),
        (
            {
                "load_s": 8 * MS,
                "plain_s": 18.1 * MS,
                "prefetched_s": 18 * MS,
                "loader_wait_s": 8 * MS,
                "num_workers": 0,
                "is_data_loader": False,
            },
            [("CUDAPrefetcher(loader, background=True)", 8)],
        ),
        (
            {"pin_memory": False, "pageable_leaves": 9, "issue_s": 3 * MS, "plain_s": 13 * MS, "prefetched_s": 12 * MS},
            [("pin_memory=True", 2), ("wrap it: CUDAPrefetcher(loader)", 1)],
        ),
        ({"start_s": 100 * MS, "persistent_workers": False}, [("persistent_workers=True", 1)]),
        ({"start_s": 100 * MS, "persistent_workers": True}, []),
        ({"start_s": 100 * MS, "persistent_workers": False, "pass_length": None}, []),
        (
            {"plain_s": 13 * MS, "prefetched_s": 13 * MS, "loader_wait_s": 2.5 * MS},
            [("prefetch_factor=4 (now 2)", 2.5)],
        ),
        # what the start of a pass takes is not for a longer queue to gain
        (
            {
                "plain_s": 13 * MS,
                "prefetched_s": 13 * MS,
                "loader_wait_s": 2.5 * MS,
                "start_s": 250 * MS,
                "persistent_workers": False,
            },
            [("persistent_workers=True", 2.5)],
        ),
    ],
    ids=[
        "fine",
        "wrap",
        "too few workers",
        "too few cores",
        "no workers",
        "another loader",
        "pageable",
        "workers start anew",
        "workers stay",
        "unknown length",
        "jitter",
        "start is no jitter",
    ],
)
def test_hints(changes: dict[str, Any], expected: list[tuple[str, float]]) -> None:
    """What to change, most gain first, with the milliseconds of a step that it saves."""
    found = hints(dataclasses.replace(FINE, **changes))
    assert [hint.change for hint in found] == [change for change, _ in expected]
    assert [hint.saved_s / MS for hint in found] == pytest.approx([saved for _, saved in expected])
    assert all(hint.how in str(hint) and f"({hint.share:.0%})" in str(hint) for hint in found)


def test_pinning_by_other_means() -> None:
    """Where pin_memory=True is set and does not reach the batches, or there is no such setting."""
    pageable = dataclasses.replace(FINE, pageable_leaves=9, issue_s=3 * MS, plain_s=12 * MS, prefetched_s=12 * MS)
    assert [hint.change for hint in hints(pageable)] == [
        "give the class of the batches a method pin_memory(), which DataLoader(pin_memory=True) calls"
    ]
    assert [hint.change for hint in hints(dataclasses.replace(pageable, is_data_loader=False, num_workers=0))] == [
        "let the loader make its batches in pinned memory (Tensor.pin_memory())"
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "the step's own computation is the limit"),
        ({"load_s": 20 * MS, "num_workers": 8}, "the loader is the limit; its 8 workers already share 8 cores"),
        ({"copy_s": 20 * MS}, "copying is the limit"),
    ],
    ids=["compute", "loader", "copy"],
)
def test_nothing_to_gain(changes: dict[str, Any], reason: str) -> None:
    """Why."""
    facts = dataclasses.replace(FINE, **changes)
    assert hints(facts) == []
    assert why_nothing(facts).startswith(f"Nothing to gain: {reason}")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plain_s": 15 * MS}, None),
        ({}, "the copy is 1.0% of a step"),
        ({"has_streams": False}, "no transfers"),
        ({"copy_s": 2 * MS, "load_s": 11 * MS}, "the loader is the limit"),
        ({"copy_s": 2 * MS, "loader_wait_s": 3 * MS}, "what the loop waits for is the loader (3 ms a step)"),
        ({"copy_s": 2 * MS}, "the plain loop hides as much"),
    ],
    ids=["gain", "small copies", "no streams", "loader", "waiting", "else"],
)
def test_why_not_wrapped(changes: dict[str, Any], reason: str | None) -> None:
    """The library says where it is of no use."""
    said = why_not_wrapped(dataclasses.replace(FINE, **changes))
    assert said is None if reason is None else reason in str(said)
