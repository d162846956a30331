"""The example of CUDA graphs: every way trains the same on the simulated accelerator; without one it says so."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher
from tests.helpers import ROOT, run_python

OPTIONS = ("--batch-size", "8", "--features", "16", "--depth", "1")
FEATURES, CLASSES = 16, 10


@pytest.fixture(name="example")
def _example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module; its folder is no package, as a script's is not."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("cuda_graph")


def test_on_the_cpu() -> None:
    """Without anything that captures graphs the step runs eagerly, and the example says so."""
    result = run_python("examples/cuda_graph.py", "--steps", "3", *OPTIONS)
    assert (result.stderr, result.returncode) == ("", 0)
    first, second = result.stdout.splitlines()
    assert first == "no device here that captures graphs (cpu): the step runs eagerly, and there is no speed-up"
    assert second.startswith("eager ")


def test_all_ways(sim: Any, example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """With graphs all ways have the same losses, and each has its speed-up printed."""
    assert example.main(["--steps", "9", *OPTIONS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:40].strip() for line in lines] == [
        "eager",
        "a graph for each slot",
        "one graph, and a copy into its input",
    ]
    assert len({line.partition("last loss")[2] for line in lines}) == 1
    assert sim.races() == []


@pytest.mark.parametrize(
    ("way", "memory", "captures"), [("GraphForEachSlot", "static", 6), ("GraphWithInput", "record_stream", 1)]
)
def test_replays(any_sim: Any, example: ModuleType, way: str, memory: Any, captures: int) -> None:
    """After the warm-up the step is captured once for each slot, and for each to which a short last batch comes."""
    any_sim.configure(latency_us=300)
    generator = torch.Generator().manual_seed(1)
    sizes = [8] * 9 + [5]
    loader = [
        (
            torch.randn(size, FEATURES, generator=generator).pin_memory(),
            torch.randint(CLASSES, (size,), generator=generator).pin_memory(),
        )
        for size in sizes
    ]
    made = []
    original = example.captured

    def counted(*arguments: Any) -> Any:
        made.append(1)  # not the arguments, which hold a batch
        return original(*arguments)

    losses: dict[str, list[float]] = {}
    for name in ("eager", way):
        training = example.Training(FEATURES, 1, torch.device("sim", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(example, "captured", counted)
            step: Callable[..., None] = training.step if name == "eager" else getattr(example, way)(training)
            prefetcher: Any = CUDAPrefetcher(loader, "sim", memory=memory)
            found = []
            for _ in range(2):
                for inputs, labels in prefetcher:
                    step(inputs, labels)
                    found.append(training.loss.clone())
                    del inputs, labels
        losses[name] = torch.stack(found).tolist()
    assert losses[way] == losses["eager"]
    assert len(made) == captures
    assert any_sim.races() == []


def test_losses_that_differ(
    sim: Any, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A way that trains on something else is told, and the exit code is not zero."""

    class Wrong(example.GraphWithInput):  # type: ignore[name-defined, misc]
        def __call__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
            super().__call__(inputs * 2, labels)

    monkeypatch.setattr(example, "GraphWithInput", Wrong)
    assert example.main(["--steps", "5", *OPTIONS]) == 1
    assert capsys.readouterr().err == (
        "one graph, and a copy into its input: the losses are not those of the eager loop\n"
    )


@pytest.mark.parametrize("name", ["--steps", "--batch-size", "--features", "--depth"])
def test_arguments(example: ModuleType, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A number that is too small is told with its rule."""
    with pytest.raises(SystemExit):
        example.main([name, "0"])
    assert f"argument {name}: must be 1 or more, got 0" in capsys.readouterr().err
