"""CUDA graphs and their like: no capture has the prefetcher's work in it, and replays find batches in static slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher, PrefetchError
from tests.helpers import BY_MEMORY, Numbered
from tests.simulator.graphs import capturing

ACCELERATOR = torch.accelerator
BACKGROUND = pytest.mark.parametrize("background", [False, True])


@BY_MEMORY
@BACKGROUND
def test_batches_are_not_asked_for_in_a_capture(any_sim: Any, background: bool, memory: Any) -> None:
    """To ask for a batch in a capture is an error that costs nothing: the capture is valid, and no batch is lost."""
    any_sim.configure(latency_us=200)
    iterator = iter(CUDAPrefetcher(Numbered(6), "sim", background=background, memory=memory))
    stream = torch.Stream("sim")
    static = torch.ones(4, device="sim")
    ACCELERATOR.synchronize()
    graph = ACCELERATOR.Graph(capture_error_mode="thread_local")
    values = []
    for position in range(6):
        values.append(next(iterator)[0].item())
        if position % 2 == 0:
            with stream, graph:
                static.add_(1)
                with pytest.raises(PrefetchError, match=r"asked for while a graph is captured.* before the capture"):
                    next(iterator)
                assert capturing()
            with stream:
                graph.replay()
            graph.reset()
            stream.synchronize()
    assert values == [i + 1.0 for i in range(6)]
    assert static.tolist() == [1.0 + 3] * 4


@BY_MEMORY
def test_capture_beside_copies(sim: Any, memory: Any) -> None:
    """Copies that are under way when a capture begins are no part of it, and land while it goes on."""
    prefetcher = CUDAPrefetcher(Numbered(4), "sim", prefetch_batches=2, memory=memory)
    iterator = iter(prefetcher)
    first = next(iterator)
    assert first[0].item() == 1.0
    sim.hold_copies("h2d")
    batch = next(iterator)  # and the fourth is on its way
    graph = ACCELERATOR.Graph(capture_error_mode="relaxed")
    with torch.Stream("sim") as stream:
        graph.capture_begin()
        first.add_(1)
        sim.release_copies("h2d")
        prefetcher._side.stream.synchronize()  # type: ignore[union-attr]
        landed = [span.name for span in sim.trace()].count("copy_h2d")
        graph.capture_end()
        graph.replay()
    stream.synchronize()
    assert landed == 4
    assert [value[0].item() for value in (first, batch, *iterator)] == [2.0, 2.0, 3.0, 4.0]


def step(batch: torch.Tensor, total: torch.Tensor) -> None:
    """Work on a batch, into a tensor that stays."""
    total.add_(batch.mean())


@BACKGROUND
@pytest.mark.parametrize("prefetch_batches", [0, 1, 2])
def test_a_graph_for_each_slot(any_sim: Any, prefetch_batches: int, background: bool) -> None:
    """A step captured once for each slot, and replayed on later batches there, gives what each batch gives."""
    any_sim.configure(latency_us=300, kernel_us=400)
    prefetcher = CUDAPrefetcher(
        Numbered(12), "sim", memory="static", prefetch_batches=prefetch_batches, background=background
    )
    graphs: dict[int, torch.accelerator.Graph] = {}
    stream = torch.Stream("sim")
    total, totals = torch.zeros((), device="sim"), []
    stream.wait_stream(ACCELERATOR.current_stream())
    for _ in range(3):
        for batch in on(stream, prefetcher):
            graph = graphs.get(batch.data_ptr())
            if graph is None:
                graph = graphs[batch.data_ptr()] = ACCELERATOR.Graph(capture_error_mode="thread_local")
                with stream, graph:
                    step(batch, total)
            with stream:
                graph.replay()
                totals.append(total.clone())
        del batch
    stream.synchronize()
    assert len(graphs) == prefetch_batches + 2
    sums = torch.tensor([float(i + 1) for i in range(12)] * 3).cumsum(0).tolist()
    assert [value.item() for value in totals] == sums
    assert any_sim.races() == []


@BY_MEMORY
@BACKGROUND
def test_one_graph_with_an_input_of_its_own(any_sim: Any, background: bool, memory: Any) -> None:
    """A step captured once, replayed on a copy of each batch, gives what each batch gives, with any memory."""
    any_sim.configure(latency_us=300, kernel_us=400)
    prefetcher = CUDAPrefetcher(Numbered(12), "sim", memory=memory, background=background)
    stream = torch.Stream("sim")
    total, totals = torch.zeros((), device="sim"), []
    inputs = torch.zeros(next(iter(Numbered(1))).shape, device="sim")
    ACCELERATOR.synchronize()
    graph = ACCELERATOR.Graph()
    with stream, graph:
        step(inputs, total)
    for batch in on(stream, prefetcher):
        with stream:
            inputs.copy_(batch)
            graph.replay()
            totals.append(total.clone())
    stream.synchronize()
    assert [value.item() for value in totals] == torch.arange(1.0, 13.0).cumsum(0).tolist()
    assert any_sim.races() == []


def on(stream: torch.Stream, prefetcher: Any) -> Any:
    """The batches of a pass, each asked for on a stream."""
    iterator = iter(prefetcher)
    while True:
        with stream:
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
        del batch
