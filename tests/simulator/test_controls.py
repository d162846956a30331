"""The test controls, the fixtures and the build."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tests.simulator as simulator
from tests.simulator import build, fixtures

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]


def run_python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that can import the tests."""
    return subprocess.run(
        [sys.executable, "-Werror", *options, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def run_pytest(folder: Path, tests: str, **environment: str) -> str:
    """What pytest prints about these tests, which have the fixtures."""
    (folder / "test_inner.py").write_text(textwrap.dedent(tests))
    command = [sys.executable, "-m", "pytest", "-p", "tests.simulator.fixtures", "-p", "no:cacheprovider", "-rs"]
    result = subprocess.run(
        command,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return result.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latency": 1}, "no setting 'latency', only latency_us, h2d_mb_s"),
        ({"latency_us": -1}, "latency_us is a whole number, 0 or more, not -1"),
        ({"kernel_us": 0.5}, "kernel_us is a whole number, 0 or more, not 0.5"),
        ({"poison": 3}, "poison is a whole number, from 0 to 2, not 3"),
        ({"virtual": 2}, "virtual is a whole number, from 0 to 1, not 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configure_names_what_it_refuses(sim: ModuleType, settings: dict[str, Any], message: str) -> None:
    """Unknown names and impossible values are errors, and change nothing, not even what was right beside them."""
    with pytest.raises(ValueError, match=message):
        sim.configure(trace=0, **settings)
    assert sim.setting("trace") == 1


def test_unknown_setting_and_direction(sim: ModuleType) -> None:
    """Reading a setting and holding copies check their argument too."""
    with pytest.raises(ValueError, match="no setting 'speed'"):
        sim.setting("speed")
    with pytest.raises(ValueError, match='"h2d" or "d2h", not "up"'):
        sim.hold_copies("up")
    with pytest.raises(ValueError, match='"h2d" or "d2h", not "down"'):
        sim.release_copies("down")


def test_reset_restores_everything(sim: ModuleType) -> None:
    """Settings, gates, current device and streams, caches, records and statistics."""
    sim.configure(latency_us=1, poison=2, trace=0)
    torch.accelerator.set_stream(torch.Stream("sim:1"))
    tensor = torch.ones(1000, device="sim")
    side = torch.Stream("sim:1")
    with side:
        tensor.sum()  # a race
    sim.hold_copies("h2d")
    torch.ones(3).pin_memory().to("sim", non_blocking=True)
    sim.hold_kernel()
    del tensor
    sim.reset()
    assert [sim.setting(name) for name in ("latency_us", "poison", "trace")] == [20, 1, 1]
    assert torch.accelerator.current_device_index() == 0
    assert [torch.accelerator.current_stream(index).stream_id for index in range(2)] == [0, 33]
    assert sim.races() == []
    assert sim.trace() == []
    stats = torch.accelerator.memory_stats(1)
    assert stats["allocation.all.allocated"] == 0
    assert stats["reserved_bytes.all.current"] == stats["allocated_bytes.all.current"]
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.current"]
    assert torch.ones(3).to("sim").tolist() == [1, 1, 1]  # nothing is held any more


def test_reset_drops_an_error_that_nobody_saw(sim: ModuleType) -> None:
    """The next test starts clean."""
    torch.ones(3, device="sim")[torch.tensor([7], device="sim")]
    sim.reset()
    torch.accelerator.synchronize()
    assert sim.trace() == []


def test_holding_is_refused_in_virtual_mode(virtual_sim: ModuleType) -> None:
    """It would hang, so it is an error; releasing is harmless."""
    with pytest.raises(RuntimeError, match="a kernel cannot be held in virtual mode"):
        virtual_sim.hold_kernel()
    with pytest.raises(RuntimeError, match="copies cannot be held in virtual mode"):
        virtual_sim.hold_copies("h2d")
    virtual_sim.release_kernels()
    virtual_sim.release_copies("d2h")
    assert torch.ones(2).to("sim").tolist() == [1, 1]


def test_the_mode_cannot_change_while_something_is_held(sim: ModuleType) -> None:
    """It would hang too."""
    sim.hold_copies("h2d")
    with pytest.raises(RuntimeError, match="release what is held before changing the mode"):
        sim.configure(virtual=1)
    assert sim.setting("virtual") == 0


def test_trace_reports_and_clears(any_sim: ModuleType) -> None:
    """Names, streams and times of what ran; nothing with trace=0."""
    side = torch.Stream("sim")
    source = torch.ones(2).pin_memory()
    torch.accelerator.synchronize()
    any_sim.trace()
    with side:
        source.to("sim", non_blocking=True)
        any_sim.busy(50)
    side.synchronize()
    copy, busy = any_sim.trace()
    assert (copy.name, copy.stream, busy.name, busy.stream) == ("copy_h2d", side.stream_id, "busy", side.stream_id)
    assert copy.end_ns - copy.start_ns >= 20_000
    assert busy.start_ns >= copy.end_ns
    assert busy.end_ns - busy.start_ns >= 50_000
    any_sim.configure(trace=0)
    any_sim.busy(1)
    torch.accelerator.synchronize()
    assert any_sim.trace() == []


def test_host_busy_takes_time(any_sim: ModuleType) -> None:
    """The simulated host clock moves by exactly what was asked for."""
    started = any_sim.host_time_ns()
    any_sim.host_busy(30)
    assert any_sim.host_time_ns() - started == 30_000


def test_load_is_idempotent(sim: ModuleType) -> None:
    """Loading again changes nothing."""
    sim.configure(latency_us=3)
    sim.load()
    assert sim.setting("latency_us") == 3


def test_the_fixture_fails_a_test_that_leaves_races(sim: ModuleType, tmp_path: Path) -> None:
    """Also one that leaves an error; gates are opened, the next test starts clean, collected races are no failure."""
    output = run_pytest(
        tmp_path,
        """
        import torch

        def race():
            source = torch.ones(4).pin_memory()
            source.to("sim", non_blocking=True)
            source.fill_(2)

        def test_leaves_races(any_sim):
            race()

        def test_collects_races(any_sim):
            race()
            assert len(any_sim.races()) == 1

        def test_leaves_things_held(sim):
            sim.hold_copies("h2d")
            sim.hold_kernel()
            torch.ones(4).pin_memory().to("sim", non_blocking=True)

        def test_leaves_an_error(any_sim):
            torch.ones(3, device="sim")[torch.tensor([7]).pin_memory().to("sim", non_blocking=True)]

        def test_after_them(any_sim):
            torch.accelerator.synchronize()
            assert any_sim.races() == []
        """,
    )
    assert "9 passed, 4 errors" in output
    assert output.count("ERROR at teardown of test_leaves_races") == 2
    assert "races which the test did not collect" in output
    assert output.count("ERROR at teardown of test_leaves_an_error") == 2
    assert "IndexError: index 7 is out of bounds" in output


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had not loaded the simulator yet; for tests in which it does not come to that."""
    monkeypatch.setattr(simulator, "_loaded", False)


@pytest.mark.usefixtures("not_loaded")
def test_the_fixture_skips_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says what to install; where the simulator is required it is an error instead."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.delenv("REQUIRE_SIMULATOR", raising=False)
    reason = fixtures.why_unavailable()
    with pytest.raises(pytest.skip.Exception, match=r"there is no C\+\+ compiler here: install g\+\+"):
        next(fixtures._simulated(False, reason))
    monkeypatch.setenv("REQUIRE_SIMULATOR", "1")
    with pytest.raises(simulator.SimulatorUnavailable, match=r"there is no C\+\+ compiler here"):
        fixtures.why_unavailable()


@pytest.mark.usefixtures("not_loaded")
def test_it_refuses_to_share_a_process_with_a_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the way out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(simulator.SimulatorUnavailable, match="hide the real one with CUDA_VISIBLE_DEVICES"):
        simulator.load()


def test_import_does_nothing() -> None:
    """Importing the module registers no device and starts no build."""
    result = run_python(
        "import sys, torch, tests.simulator\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "assert torch.accelerator.current_accelerator(check_available=True) is None\n"
        "assert 'tests.simulator.device_module' not in sys.modules\n"
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_interpreter_exits_quietly(sim: ModuleType) -> None:
    """Although work is queued behind work that is held."""
    result = run_python(
        "import torch, tests.simulator as simulator\n"
        "simulator.load()\n"
        "side = torch.Stream('sim')\n"
        "simulator.hold_kernel(); simulator.hold_copies('h2d')\n"
        "source = torch.ones(1000).pin_memory()\n"
        "with side: copied = source.to('sim', non_blocking=True)\n"
        "simulator.busy(1000)\n"
        "torch.accelerator.current_stream().wait_stream(side)\n"
        "result = copied + 1\n"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_device_is_refused_in_a_forked_child(sim: ModuleType) -> None:
    """The child has no worker threads: it gets an error, where it would hang."""
    result = run_python(
        "import os, torch, tests.simulator as simulator\n"
        "simulator.load()\n"
        "torch.ones(1).to('sim')\n"
        "if os.fork() == 0:\n"
        "    try: torch.ones(1).to('sim')\n"
        "    except RuntimeError as error: print(str(error).splitlines()[0], flush=True)\n"
        "else: os.wait()\n",
        "-Wignore::DeprecationWarning",  # Python 3.12 and later warn about forking a process with threads
    )
    assert "the device cannot be used in a forked child process" in result.stdout
    assert result.stderr == ""


@pytest.mark.usefixtures("sim")  # there is a compiler
def test_a_source_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a reason to skip: the compiler's message is shown."""
    (tmp_path / "broken.cpp").write_text("#error this is broken\n")
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    monkeypatch.setattr(build, "_UNITS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="this is broken") as caught:
        build.built_library()
    assert not isinstance(caught.value, build.SimulatorUnavailable)
    assert not list(tmp_path.rglob("*.so"))


def test_a_read_only_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library then goes to a private folder among the temporary files."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    folder = build._cache_folder()
    assert folder.parent == tmp_path / "temporary"
    assert folder.stat().st_mode & 0o077 == 0


def test_every_source_file_is_compiled() -> None:
    """Units name existing files, none twice."""
    named = [name for unit in build._UNITS for name in unit]
    assert len(set(named)) == len(named)
    assert all((build._SOURCES / f"{name}.cpp").is_file() for name in named)
