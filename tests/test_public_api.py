"""What users' code depends on: names, arguments with their order and defaults, fields. A change here is a decision."""

from __future__ import annotations

import dataclasses
import inspect

import prefetch
from prefetch import CUDAPrefetcher
from tests.helpers import run_python

CALLS = {
    "CUDAPrefetcher": "loader, device=None, *, prefetch_batches=2, background=None, memory='record_stream', "
    "pin_memory=True, transform=None, dtype=None, memory_format=None, skip_keys=(), profile=False",
    "CUDAPrefetcher.close": "self",
    "CUDAPrefetcher.set_epoch": "self, epoch",
    "HostCopier": "device=None, *, max_pending=4",
    "HostCopier.close": "self",
    "HostCopier.submit": "self, tree, *, dtype=None",
    "HostFuture.done": "self",
    "HostFuture.numpy": "self",
    "HostFuture.result": "self",
    "register_batch_type": "kind, flatten, unflatten",
    "to_host": "tree, *, dtype=None",
}
PROPERTIES = ["CUDAPrefetcher.device", "CUDAPrefetcher.stats", "CUDAPrefetcher.timeline", "HostCopier.device"]
NOT_MADE_BY_USERS = ["HostFuture"]
STATS = [
    *("batches", "bytes", "pageable_leaves", "peak_batches_held", "elapsed_s", "step_s", "load_s", "loader_wait_s"),
    *("host_wait_s", "issue_s", "timed_batches", "copy_s", "exposed_copy_s", "copy_gb_per_s", "timed_steps"),
    *("compute_s", "bottleneck"),
]


def arguments(function: object) -> str:
    """Names, kinds and defaults, without types."""
    assert callable(function)
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


def test_calls() -> None:
    """Every public function, class and method takes what it took."""
    calls, properties = {}, []
    for name in prefetch.__all__:
        public = getattr(prefetch, name)
        if not inspect.isclass(public) or (name not in NOT_MADE_BY_USERS and not issubclass(public, Exception)):
            calls[name] = arguments(public)
        if inspect.isclass(public):
            for member, value in vars(public).items():
                if member.startswith("_"):
                    continue
                if isinstance(value, property):
                    properties.append(f"{name}.{member}")
                else:
                    calls[f"{name}.{member}"] = arguments(value)
    assert calls == CALLS
    assert sorted(properties) == PROPERTIES


def test_statistics() -> None:
    """Statistics have the fields that they had."""
    assert [field.name for field in dataclasses.fields(CUDAPrefetcher([], "cpu").stats)] == STATS


def test_errors() -> None:
    """The library's own error is a RuntimeError, its warning a UserWarning."""
    assert prefetch.PrefetchError.__mro__[1] is RuntimeError
    assert prefetch.PrefetchWarning.__mro__[1] is UserWarning


IMPORTS = """
import sys
import torch
before = set(sys.modules)
import prefetch
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_imports() -> None:
    """Beside torch an import loads nothing but the library itself; how long that takes is benchmarks.import_time's."""
    assert run_python("-c", IMPORTS).stdout.split() == ["prefetch"]
