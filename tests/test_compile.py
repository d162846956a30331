"""Around the loop: compiled functions, autocast, inference mode, a default device, deterministic algorithms."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher
from tests.helpers import numbered, run_python

FEEDERS = pytest.mark.parametrize(
    ("device", "background"), [("cpu", False), ("cpu", True), ("sim", False), ("sim", True)]
)


def prefetcher(device: str, background: bool, **options: Any) -> CUDAPrefetcher[Any]:
    """Six batches of ones, twos, ..."""
    return CUDAPrefetcher(numbered(6, size=8), device, background=background, **options)


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The graphs that torch.compile has captured with :func:`backend`."""
    torch.compiler.reset()
    _captured.clear()
    yield _captured
    torch.compiler.reset()


_captured: list[Any] = []


def backend(module: Any, inputs: Any) -> Any:
    """Keeps the graph and runs it as it is."""
    _captured.append(module)
    return module.forward


def operators(graphs: list[Any]) -> set[str]:
    """The names of what the graphs call."""
    return {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")}


@FEEDERS
def test_compiled_step(sim: Any, graphs: list[Any], device: str, background: bool) -> None:
    """A compiled step in an ordinary loop gets one graph for all batches."""
    step = torch.compile(lambda batch: (batch * 2).sum(), backend=backend)
    assert [step(batch).item() for batch in prefetcher(device, background)] == [16.0 * (i + 1) for i in range(6)]
    assert len(graphs) == 1


@FEEDERS
@pytest.mark.parametrize("transform", [None, lambda batch: torch.sqrt(batch * batch)], ids=["plain", "transform"])
def test_compiled_loop(sim: Any, graphs: list[Any], device: str, background: bool, transform: Any) -> None:
    """In a compiled function that holds the loop, what the prefetcher does is not part of any graph."""

    def loop(batches: Any) -> Any:
        total = torch.zeros(8, device=device)
        for batch in batches:
            total = total + batch * 2
        return total

    compiled = torch.compile(loop, backend=backend)
    for _ in range(2):
        assert compiled(prefetcher(device, background, transform=transform)).tolist() == [42.0] * 8
    assert not any("sqrt" in name or "record" in name or name == "to" for name in operators(graphs))


@FEEDERS
def test_compiled_next(sim: Any, graphs: list[Any], device: str, background: bool) -> None:
    """A compiled function may take batches from an iterator."""

    def two(batches: Any) -> Any:
        return next(batches) + next(batches)

    iterator = iter(prefetcher(device, background))
    compiled = torch.compile(two, backend=backend)
    assert [compiled(iterator).tolist() for _ in range(3)] == [[3.0] * 8, [7.0] * 8, [11.0] * 8]
    with pytest.raises(StopIteration):
        next(iterator)


def test_nothing_is_kept_once_the_compiler_is_loaded(sim: Any, graphs: list[Any]) -> None:
    """A pass that is let go with an error ahead goes at once, though each next() goes through the compiler's guard."""

    def batches() -> Iterator[torch.Tensor]:
        yield from numbered(1)
        raise ValueError("two")

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    source = batches()
    iterator = iter(CUDAPrefetcher(source, "sim"))
    gone = weakref.ref(iterator)
    batch = weakref.ref(next(iterator))
    assert batch() is None
    del iterator
    assert gone() is None


def test_the_compiler_is_not_loaded() -> None:
    """Importing and using the library does not import it, which takes seconds."""
    use = "from prefetch import CUDAPrefetcher; list(CUDAPrefetcher([1], 'cpu'))"
    assert run_python("-c", f"import sys; {use}; print('torch._dynamo' in sys.modules)").stdout == "False\n"


@FEEDERS
def test_autocast(sim: Any, device: str, background: bool) -> None:
    """Around the loop it holds in the loop and in a transform, and changes no batch."""
    weight = torch.ones(8, 8)

    def transform(batch: torch.Tensor) -> Any:
        return batch, (torch.ones(1, 8) @ weight).dtype

    with torch.autocast("cpu", torch.bfloat16):
        got = [
            (b.dtype, inner, (weight @ weight).dtype)
            for b, inner in prefetcher(device, background, transform=transform)
        ]
    assert got == [(torch.float32, torch.bfloat16, torch.bfloat16)] * 6


@FEEDERS
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_around_the_loop(sim: Any, device: str, background: bool, mode: Any) -> None:
    """Batches are ordinary tensors, which can be trained on afterwards, and a transform can work in place."""
    with mode():
        batches = list(prefetcher(device, background, transform=lambda batch: batch * 2))
        assert not torch.is_grad_enabled()
    if device == "sim":
        weight = torch.ones(1, device=device, requires_grad=True)
        (batches[0] * weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.item() == 16.0


@pytest.mark.parametrize("background", [False, True])
def test_default_device(sim: Any, background: bool) -> None:
    """With the accelerator as the default device a loader makes tensors there, in a thread too; so does a transform."""

    def batches() -> Iterator[torch.Tensor]:
        for i in range(4):
            yield torch.full((8,), float(i))

    torch.set_default_device("sim:1")
    try:
        prefetcher = CUDAPrefetcher(
            batches(), "sim:1", background=background, transform=lambda batch: batch + torch.ones(8)
        )
        got = [(str(batch.device), batch.mean().item()) for batch in prefetcher]
        assert str(torch.ones(1).device) == "sim:1"
    finally:
        torch.set_default_device(None)
    assert got == [("sim:1", float(i + 1)) for i in range(4)]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_default_device_with_pageable_batches(sim: Any, background: bool) -> None:
    """Staging makes its buffers on the host, whatever the default device is."""
    data = [torch.full((8,), float(i), device="cpu") for i in range(4)]
    torch.set_default_device("sim:0")
    try:
        got = [batch.tolist() for batch in CUDAPrefetcher(data, "sim", background=background)]
    finally:
        torch.set_default_device(None)
    assert got == [[float(i)] * 8 for i in range(4)]


@FEEDERS
def test_deterministic_algorithms(sim: Any, device: str, background: bool) -> None:
    """With memory filled before it is used, batches are right all the same."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        got = [batch.tolist() for batch in prefetcher(device, background, dtype=torch.float64)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert got == [[float(i + 1)] * 8 for i in range(6)]
    assert sim.races() == []
