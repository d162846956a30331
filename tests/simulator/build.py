"""Compile the simulator once into the user's cache."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SOURCES = Path(__file__).with_name("csrc")
_ABI = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
# -w: torch's headers warn; -g0 -O1: the build's time matters, the code's speed hardly.
_FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-fvisibility=hidden", "-pthread", _ABI)

# Most of the time goes into torch's headers, so files that need the same ones are compiled as one. What is not named
# here makes up the last unit.
_UNITS = (("fallback", "autocast", "random", "bindings"), ("tensors", "copies", "layouts"))
_TORCH = Path(torch.__file__).parent
_INCLUDE = _TORCH / "include"
_NEWEST_HEADER = "ATen/core/GraphImplInterface.h"


class SimulatorUnavailable(RuntimeError):  # noqa: N818 -- it says that something is missing, not that something failed
    """This machine or this process cannot have the simulated accelerator; the message says why."""


def built_library() -> Path:
    """The compiled simulator; several processes may ask at once, one of them builds.

    Raises:
        SimulatorUnavailable: there is no C++ compiler, or torch is too old.
        RuntimeError: the compiler refuses the sources; its messages are included.
    """
    compiler = _find_compiler()
    if not (_INCLUDE / _NEWEST_HEADER).exists():
        raise SimulatorUnavailable(
            f"the simulated accelerator is built on {_NEWEST_HEADER} of torch, which torch {torch.__version__} has not"
        )
    folder = _cache_folder()
    library = folder / f"simulator-{_key(compiler)}.so"
    if library.exists():
        return library
    with _only_one_process(folder / "lock"):
        if not library.exists():
            _build(compiler, library)
    return library


def _find_compiler() -> str:
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for name in filter(None, candidates):
        if path := shutil.which(name):
            return path
    raise SimulatorUnavailable(
        "the simulated accelerator is compiled on first use, and there is no C++ compiler here: "
        "install g++ (or set CXX)"
    )


def _key(compiler: str) -> str:
    """Changes with whatever the library depends on."""
    digest = hashlib.sha256(repr((compiler, torch.__version__, torch.__file__, _FLAGS)).encode())
    for source in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """The user's cache or, where that is read-only, a private folder among the temporary files."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    temporary = Path(tempfile.gettempdir()) / f"cuda-prefetcher-{os.getuid()}"
    for folder in (cache / "cuda-prefetcher", temporary):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder
    raise SimulatorUnavailable(
        "the simulated accelerator needs a folder to be compiled into, "
        f"and neither {cache} nor {temporary} can be written"
    )


@contextlib.contextmanager
def _only_one_process(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, also when the process is killed
        yield


def _build(compiler: str, library: Path) -> None:
    headers = [f"-isystem{_INCLUDE}", f"-isystem{_INCLUDE / 'torch' / 'csrc' / 'api' / 'include'}"]
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as name:
        work = Path(name)

        def compile_unit(unit: Iterable[str]) -> Path:
            joined = work / f"{'-'.join(unit)}.cpp"
            joined.write_text("".join(f'#include "{_SOURCES / name}.cpp"\n' for name in unit))
            compiled = joined.with_suffix(".o")
            _run([compiler, *_FLAGS, *headers, "-c", str(joined), "-o", str(compiled)])
            return compiled

        named = {name for unit in _UNITS for name in unit}
        others = sorted(source.stem for source in _SOURCES.glob("*.cpp") if source.stem not in named)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, [*_UNITS, others]))
        linked = work / library.name
        libraries = [f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
        _run([compiler, "-shared", "-pthread", *map(str, objects), *libraries, "-o", str(linked)])
        linked.replace(library)  # in one step: nobody ever loads half a library


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        messages = "\n".join(result.stderr.splitlines()[:40])
        raise RuntimeError(f"the simulated accelerator does not compile: {' '.join(command)}\n{messages}")
