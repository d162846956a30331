"""Classes that the user registers are taken apart and put together as the user says, everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher, PrefetchError, PrefetchWarning, register_batch_type
from prefetch._registered import _caches, _classes
from tests.helpers import BY_MEMORY


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    before = dict(_classes)
    yield
    _classes.clear()
    _classes.update(before)
    for clear in _caches:
        clear()


class Graph:
    """Keeps its tensors where only its own code finds them."""

    def __init__(self, nodes: Any, edges: Any, name: str) -> None:
        def content() -> tuple[Any, Any]:
            return nodes, edges

        self.content = content
        self.name = name


def register_graph() -> None:
    """As a user would."""
    register_batch_type(
        Graph,
        lambda graph: dict(zip(("nodes", "edges"), graph.content(), strict=True)),
        lambda graph, parts: Graph(parts["nodes"], parts["edges"], graph.name),
    )


def graphs(count: int) -> Iterator[Graph]:
    """Pinned ones; nodes of graph ``i`` are ``i + 1``."""
    for i in range(count):
        yield Graph(torch.full((1 << 14,), float(i + 1)).pin_memory(), {"index": torch.arange(3).pin_memory()}, "g")


class Sums:
    """Computes from its tensor when it is made."""

    def __init__(self, values: torch.Tensor, total: torch.Tensor | None = None) -> None:
        self.values = values
        self.total = values.mean() if total is None else total


@BY_MEMORY
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", ["batch", "transform"])
def test_values_are_there_when_put_together(any_sim: Any, where: str, background: bool, memory: Any) -> None:
    """What puts a batch together may compute with the moved tensors: it finds their values."""
    register_batch_type(Sums, lambda sums: {"values": sums.values}, lambda sums, parts: Sums(parts["values"]))
    any_sim.configure(latency_us=1500)
    batches = (torch.full((1 << 14,), float(i + 1)).pin_memory() for i in range(8))
    prefetcher: Any = CUDAPrefetcher(
        (Sums(batch) if where == "batch" else batch for batch in batches),
        "sim",
        transform=None if where == "batch" else lambda batch: Sums(batch * 1),
        background=background,
        memory=memory,
    )
    totals = []
    for sums in prefetcher:
        any_sim.busy(500)
        totals.append(sums.total + sums.values.mean())
    assert torch.stack(totals).tolist() == [2.0 * (i + 1) for i in range(8)]
    assert any_sim.races() == []


@pytest.mark.parametrize("background", [False, True])
def test_moved_and_protected(any_sim: Any, background: bool) -> None:
    """Moved at any depth, and not reused while it is read late."""
    register_graph()
    any_sim.configure(latency_us=200)
    means = []
    for (graph,) in CUDAPrefetcher(([graph] for graph in graphs(8)), "sim", background=background):
        nodes, edges = graph.content()
        assert (type(graph), graph.name, nodes.device.type) == (Graph, "g", "sim")
        assert edges["index"].device.type == "sim"
        any_sim.busy(1500)
        means.append(nodes.mean())
        del graph, nodes, edges
    assert torch.stack(means).tolist() == [float(i + 1) for i in range(8)]
    assert any_sim.races() == []


def test_results_of_a_transform_are_protected(any_sim: Any) -> None:
    """What a transform puts into such an object is found there."""
    register_graph()
    any_sim.configure(latency_us=200)

    def transform(graph: Graph) -> Graph:
        nodes, edges = graph.content()
        return Graph(nodes * 2, edges, graph.name)

    means = []
    for graph in CUDAPrefetcher(graphs(8), "sim", transform=transform):
        any_sim.busy(1500)
        means.append(graph.content()[0].mean())
        del graph
    assert torch.stack(means).tolist() == [2.0 * (i + 1) for i in range(8)]
    assert any_sim.races() == []


def test_names_are_used(sim: Any) -> None:
    """By skip_keys, and by the warning about pageable memory."""
    register_graph()
    batches = [Graph(torch.ones(2), torch.ones(3), "g") for _ in range(2)]
    iterator = iter(CUDAPrefetcher(batches, "sim", skip_keys=["edges"]))
    nodes, edges = next(iterator).content()
    assert (nodes.device.type, edges.device.type) == ("sim", "cpu")
    with pytest.warns(PrefetchWarning, match=r"^batch\.nodes \(shape \(2,\)"):
        next(iterator)


def test_before_and_after(sim: Any) -> None:
    """A class that was met before it was registered is moved from then on; before, it passed as it was."""
    prefetcher = CUDAPrefetcher(list(graphs(1)), "sim")
    (before,) = prefetcher
    assert before.content()[0].device.type == "cpu"
    register_graph()
    (after,) = prefetcher
    assert after.content()[0].device.type == "sim"


def test_comes_first_and_for_subclasses(sim: Any) -> None:
    """A registered class is handled as registered though it is a list, and so are classes built on it."""

    class Marked(list[Any]):
        mark = ""

    class Special(Marked):
        pass

    def unflatten(old: Marked, parts: dict[str, Any]) -> Marked:
        new = type(old)(parts.values())
        new.mark = old.mark + "!"
        return new

    register_batch_type(Marked, lambda marked: {str(i): item for i, item in enumerate(marked)}, unflatten)
    source = Special([torch.ones(2).pin_memory()])
    source.mark = "special"
    (got,) = CUDAPrefetcher([source], "sim")
    assert (type(got), got.mark, got[0].device.type) == (Special, "special!", "sim")
    assert (source.mark, source[0].device.type) == ("special", "cpu")


def test_unchanged_passes_as_it_is(sim: Any) -> None:
    """Without anything to move the very object is passed on."""
    register_graph()
    graph = Graph(1, "two", "g")
    (got,) = CUDAPrefetcher([graph], "sim")
    assert got is graph


def test_errors_of_the_users_code(sim: Any) -> None:
    """What flatten raises takes the batch's place."""

    def broken(graph: Graph) -> Any:
        raise ArithmeticError("cannot be taken apart")

    register_batch_type(Graph, broken, lambda graph, parts: graph)
    iterator = iter(CUDAPrefetcher([1, *graphs(1), 2], "sim"))
    assert next(iterator) == 1
    with pytest.raises(ArithmeticError, match="cannot be taken apart"):
        next(iterator)
    assert list(iterator) == [2]


@pytest.mark.parametrize(
    ("flatten", "unflatten", "message"),
    [
        (lambda graph: list(graph.content()), None, "flatten of the registered .*Graph.* must return a mapping"),
        (lambda graph: {"x": torch.ones(1)}, lambda graph, parts: None, "unflatten .*Graph.* another one, got None"),
        (lambda graph: {"x": torch.ones(1)}, lambda graph, parts: graph, "unflatten .*Graph.* must return another one"),
    ],
)
@pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
def test_bad_results(sim: Any, flatten: Any, unflatten: Any, message: str) -> None:
    """What cannot be the batch is not delivered as one."""
    register_batch_type(Graph, flatten, unflatten or (lambda graph, parts: graph))
    iterator = iter(CUDAPrefetcher([*graphs(1), 2], "sim", background=False))
    with pytest.raises(PrefetchError, match=message):
        next(iterator)
    assert list(iterator) == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, len, len), "kind must be a class, got 1"),
        ((Graph, None, len), "flatten must be callable, got None"),
        ((Graph, len, "x"), "unflatten must be callable, got 'x'"),
    ],
)
def test_bad_arguments(arguments: Any, message: str) -> None:
    """Each error names the argument, the value and the rule."""
    with pytest.raises(TypeError, match=message):
        register_batch_type(*arguments)
