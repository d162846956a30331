"""The package as a whole: what it exports, what imports what, and what an import does."""

from __future__ import annotations

import ast
import doctest
import re
from types import ModuleType

import torch

import prefetch
from tests.helpers import ROOT, run_python

# From the top downwards; a module may import from rows below its own only.
LAYERS = [
    ["__main__"],
    ["cli.__init__"],
    ["cli.doctor", "cli.bench"],
    ["cli._loops", "cli._compare"],
    ["cli._user", "cli._hints", "cli._bandwidth_plot"],
    ["cli._measure"],
    ["cli._arguments", "cli._machine", "cli._output"],
    ["__init__"],
    ["_prefetcher"],
    ["_epoch", "_loaders", "_host"],
    ["_lane", "_background", "_download", "_arrays"],
    ["_feeder", "_transfer", "_arguments", "_consumer_memory", "_static_memory", "_sources"],
    ["_placing", "_meter"],
    ["_marked"],
    ["_mark", "_timeline"],
    ["_memory", "_batch", "_staging", "_state", "_plot", "_stats"],
    ["_search", "_device", "_intervals"],
    ["_rebuild", "_compiler", "_members"],
    ["_registered"],
    ["_errors"],
]


SOURCES = sorted((ROOT / "prefetch").rglob("*.py"))


def test_exports() -> None:
    """The façade lists what it exports, sorted, and everything reports itself as part of it."""
    attributes = vars(prefetch).items()  # the command is one of them once it has been imported
    public = {name for name, value in attributes if not name.startswith("_") and not isinstance(value, ModuleType)}
    assert sorted(public) == prefetch.__all__
    assert {getattr(prefetch, name).__module__ for name in prefetch.__all__} == {"prefetch"}


def test_imports_point_downwards() -> None:
    """No module imports from its own layer or one above, and every module has a layer."""
    layer = {name: depth for depth, names in enumerate(LAYERS) for name in names}
    files = {".".join(file.relative_to(ROOT / "prefetch").with_suffix("").parts): file for file in SOURCES}
    assert sorted(layer) == sorted(files)
    upwards = []
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("prefetch") for alias in node.names), "one form is enough to check"
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                module = str(node.module)
                if module.split(".")[0] == "prefetch":
                    parts = [".".join([*module.split(".")[1:], alias.name]) for alias in node.names]
                    whole = module.removeprefix("prefetch").removeprefix(".")
                    # A module's name or, of a package, those of its modules or of what it has itself.
                    targets = [
                        p if p in layer else whole if whole in layer else f"{whole}.__init__".lstrip(".") for p in parts
                    ]
                    upwards += [(name, target) for target in targets if layer[target] <= layer[name]]
    assert upwards == []


def test_only_the_device_module_names_devices() -> None:
    """No other module names a device type in code, nor calls torch.cuda."""
    named = []
    for file in SOURCES:
        if file.stem == "_device":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(r"(cpu|cuda|xpu|mps)(:\d+)?", str(node.value)):
                named.append((file.stem, node.lineno))
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "is_cpu", "xpu", "mps"):
                named.append((file.stem, node.lineno))
    assert named == []


def test_docstring_examples() -> None:
    """The examples in the documentation of what is exported give what they say."""
    runner = doctest.DocTestRunner()
    for name in prefetch.__all__:
        for test in doctest.DocTestFinder().find(
            getattr(prefetch, name), name, globs=vars(prefetch) | {"torch": torch}
        ):
            runner.run(test)
    assert runner.summarize(verbose=False) == (0, 9)


NO_ACCELERATOR_CALLS = """
import torch

def forbidden(*args, **kwargs):
    raise AssertionError("accelerator call")

for name in torch.accelerator.__all__:
    if callable(getattr(torch.accelerator, name)):
        setattr(torch.accelerator, name, forbidden)
torch.Stream = torch.Event = forbidden
state = torch.get_rng_state()

from prefetch import CUDAPrefetcher

prefetcher = CUDAPrefetcher([torch.ones(2), {"a": torch.ones(2)}], "cpu")
print(list(prefetcher))
cast = CUDAPrefetcher([torch.ones(2)], "cpu", dtype=torch.float64, transform=lambda batch: batch + 1)
print(list(cast))
assert torch.equal(state, torch.get_rng_state())
assert not torch.cuda.is_initialized()
"""


def test_import_and_cpu_path_leave_the_accelerator_alone() -> None:
    """Importing and a pass on the CPU make no accelerator call, no generator and no random draw."""
    result = run_python("-W", "error", "-c", NO_ACCELERATOR_CALLS)
    assert result.stderr == ""
    assert result.stdout == ("[tensor([1., 1.]), {'a': tensor([1., 1.])}]\n[tensor([2., 2.], dtype=torch.float64)]\n")


NO_DEVICE = """
import torch
from prefetch import CUDAPrefetcher

print(CUDAPrefetcher([1]).device, list(CUDAPrefetcher([1, 2])))
for device in ("cuda", "cuda:0", 0):
    try:
        CUDAPrefetcher([1], device)
    except RuntimeError as error:
        print(error)
"""


def test_without_an_accelerator() -> None:
    """The default is the CPU; an accelerator that is asked for and not there is an error with the remedy."""
    result = run_python("-c", NO_DEVICE)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "cpu [1, 2]"
    assert lines[1].startswith("device='cuda' is not available: there is no accelerator; pass device=None")
    assert lines[2].startswith("device='cuda:0' is not available: there is no accelerator; pass device=None")
    assert lines[3].startswith("device=0 is not available: there is no accelerator; pass device=None")
