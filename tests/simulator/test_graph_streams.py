"""Which streams a capture includes, and how a replay keeps their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.simulator.graphs import NUMBERS, capture, capturing, in_another_thread, numbers, pinned, replay

if TYPE_CHECKING:
    from types import ModuleType


def test_who_is_capturing(any_sim: ModuleType) -> None:
    """The calling thread's current stream of the current device: the streams and threads beside it are not."""
    side = torch.Stream("sim")
    graph = torch.accelerator.Graph(capture_error_mode="relaxed")
    assert not capturing()
    with side:
        assert not capturing()
        with graph:
            assert capturing()
            assert side.is_capturing()
            assert not in_another_thread(capturing)
            with torch.Stream("sim"):
                assert not capturing()
            with torch.get_device_module("sim").device(1):
                assert not capturing()
        assert not capturing()
        assert not side.is_capturing()


def test_other_streams_run_as_ever(any_sim: ModuleType) -> None:
    """Work of this and of other threads, with memory from the cache, events and asynchronous copies."""
    side, other = torch.Stream("sim"), torch.Stream("sim")
    values, source = numbers(1), pinned(5)
    with other:
        reserve = [torch.empty(NUMBERS, device="sim") for _ in range(3)]
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with side, graph:  # which empties the cache
        del reserve

        def elsewhere() -> torch.Tensor:
            with other:
                result = source.to("sim", non_blocking=True) + values
                torch.Stream("sim").wait_stream(other)
                result.record_stream(torch.Stream("sim"))
                return result

        results = [in_another_thread(elsewhere)]
        with other:
            results.append(values + 1)
    torch.accelerator.synchronize()
    assert [result.unique().tolist() for result in results] == [[6], [2]]


def test_events_inside_of_a_capture(any_sim: ModuleType) -> None:
    """Recording one and waiting for it on the capturing stream is the stream's own order."""
    side = torch.Stream("sim")
    values = numbers(1)

    def work() -> torch.Tensor:
        doubled = values * 2
        event = side.record_event()
        side.wait_event(event)
        return doubled + 1

    graph, result = capture(side, work)
    replay(graph, side)
    assert result.unique().tolist() == [3]


# ---- fork and join


def test_a_stream_that_waits_for_a_capture_joins_it(any_sim: ModuleType) -> None:
    """Its work, memory and copies become the graph's, until the capture ends."""
    side, other = torch.Stream("sim"), torch.Stream("sim")
    source, values = pinned(1), numbers(0)

    def work() -> torch.Tensor:
        values.add_(1)
        other.wait_stream(side)
        with other:
            assert capturing()
            copied = torch.empty(NUMBERS, device="sim")
            copied.copy_(source, non_blocking=True)
            on_other = copied + values
        on_side = values * 10
        side.wait_stream(other)
        return on_side + on_other

    graph, result = capture(side, work)
    assert not other.is_capturing()
    assert values.unique().tolist() == [0]
    for step in (1, 2):
        source.fill_(step)
        replay(graph, side)
        assert result.unique().tolist() == [10 * step + step + step]


def test_branches_run_beside_each_other(virtual_sim: ModuleType) -> None:
    """Two of 10 ms last 10 ms, on streams that are the replay's own."""
    side, other = torch.Stream("sim"), torch.Stream("sim")

    def work() -> None:
        other.wait_stream(side)
        with other:
            virtual_sim.busy(10_000)
        virtual_sim.busy(10_000)
        side.wait_stream(other)

    graph, _ = capture(side, work)
    torch.accelerator.synchronize()
    started = virtual_sim.host_time_ns()
    virtual_sim.trace()
    with side:
        graph.replay()
        graph.replay()
    side.synchronize()
    assert virtual_sim.host_time_ns() - started == 20_000_000
    streams = {span.stream for span in virtual_sim.trace()}
    assert len(streams) == 2
    assert side.stream_id in streams
    assert other.stream_id not in streams


@pytest.mark.parametrize("waits", [True, False])
def test_branches_that_do_not_wait_race(any_sim: ModuleType, waits: bool) -> None:
    """At each replay, where nothing in the graph puts their accesses in order."""
    side, other = torch.Stream("sim"), torch.Stream("sim")
    values = numbers(1)

    def work() -> None:
        other.wait_stream(side)
        with other:
            values.add_(1)
        if waits:
            side.wait_stream(other)
        values.mul_(2)
        side.wait_stream(other)

    graph, _ = capture(side, work)
    assert any_sim.races() == []
    replay(graph, side)
    assert bool(any_sim.races()) == (not waits)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_has_joined_is_in_no_order_with_replays(any_sim: ModuleType, waits: bool) -> None:
    """It was a branch of the capture, and has to wait for a replay like any other stream."""
    side, other = torch.Stream("sim"), torch.Stream("sim")
    values = numbers(1)

    def work() -> None:
        other.wait_stream(side)
        with other:
            values.add_(1)
        side.wait_stream(other)

    graph, _ = capture(side, work)
    with side:
        graph.replay()
    if waits:
        other.wait_stream(side)
    with other:
        doubled = values * 2
    torch.accelerator.synchronize()
    assert bool(any_sim.races()) == (not waits)
    if waits:
        assert doubled.unique().tolist() == [4]


def test_a_graph_with_branches_inside_of_a_capture(any_sim: ModuleType) -> None:
    """The outer graph has the inner one's branches, in their order."""
    side, other = torch.Stream("sim"), torch.Stream("sim")
    values = numbers(0)

    def inner_work() -> None:
        other.wait_stream(side)
        with other:
            values.add_(1)
        side.wait_stream(other)

    inner, _ = capture(side, inner_work)

    def outer_work() -> None:
        inner.replay()
        values.mul_(3)
        inner.replay()

    outer, _ = capture(side, outer_work)
    replay(outer, side)
    assert values.unique().tolist() == [4]
