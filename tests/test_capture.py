"""CUDA graphs and their like: no capture has the prefetcher's work in it, and replays find batches in static slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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


@BY_MEMORY
@pytest.mark.parametrize("end", ["error", "close"])
def test_batches_given_up_beside_a_capture(any_sim: Any, end: str, memory: Any) -> None:
    """A batch that comes to nothing while the consumer's stream captures has no part in the capture."""
    any_sim.configure(latency_us=300)

    class Refusing:
        """Fails when it is moved, after the leaf before it."""

        def to(self, device: Any) -> Any:
            has_failed.set()
            raise ValueError("no good")

    may_fail, has_failed = threading.Event(), threading.Event()

    def batches() -> Iterator[list[Any]]:
        for i in range(5):
            if i == 3 and end == "error":
                assert may_fail.wait(60)
            yield [torch.full((1 << 14,), float(i)).pin_memory(), Refusing() if i == 3 and end == "error" else None]

    values = torch.ones(4, device="sim")
    with torch.Stream("sim") as stream:
        iterator: Any = iter(CUDAPrefetcher(batches(), "sim", memory=memory, background=end == "error"))
        first, second = next(iterator)[0], next(iterator)[0]
        ACCELERATOR.synchronize()
        graph = ACCELERATOR.Graph(capture_error_mode="thread_local")
        graph.capture_begin()
        values.add_(1)
        if end == "error":
            may_fail.set()
            assert has_failed.wait(60)
            while not prefetched_error(iterator):
                pass
        else:
            iterator._feeder.close()
        values.add_(first[:4])
        graph.capture_end()
        graph.replay()
        later = [torch.full((1 << 14,), 7.0, device="sim") for _ in range(6)]
        means = [tensor.mean() for tensor in (second, *later)]
    stream.synchronize()
    assert values.tolist() == [2.0] * 4
    assert [mean.item() for mean in means] == [1.0] + [7.0] * 6
    assert any_sim.races() == []


def prefetched_error(iterator: Any) -> bool:
    """Whether a pass has met its error, which waits for its turn."""
    return any(item.error is not None for _, item, _ in list(iterator._feeder._work.ready))


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
