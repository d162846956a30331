"""Graphs: what a capture records, and what a replay does with it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.simulator.graphs import capture, capturing, numbers, pinned, replay

if TYPE_CHECKING:
    from types import ModuleType


def test_a_replay_computes_on_what_is_there_then(any_sim: ModuleType) -> None:
    """Nothing runs at capture; each replay reads the input as it is, and writes the same output."""
    side = torch.Stream("sim")
    values = numbers(1)
    graph, result = capture(side, lambda: (values * 2 + 1).relu())
    assert result.isnan().all()
    for value in (1, 5):
        values.fill_(value)
        torch.accelerator.synchronize()
        replay(graph, side)
        assert result.unique().tolist() == [2 * value + 1]


def test_copies_are_replayed(any_sim: ModuleType) -> None:
    """From and to pinned memory, what is there at each replay."""
    side = torch.Stream("sim")
    source, target = pinned(1), pinned(0)
    values = numbers(0)

    def there_and_back() -> None:
        values.copy_(source, non_blocking=True)
        target.copy_(values * 2, non_blocking=True)

    graph, _ = capture(side, there_and_back)
    assert target.unique().tolist() == [0]
    for value in (3, 4):
        source.fill_(value)
        replay(graph, side)
        assert target.unique().tolist() == [2 * value]
        assert values.unique().tolist() == [value]


def test_a_replayed_copy_is_watched(any_sim: ModuleType) -> None:
    """The host overwriting its source too early is found as for any other copy."""
    side = torch.Stream("sim")
    source, values = pinned(1), numbers(0)
    graph, _ = capture(side, lambda: values.copy_(source, non_blocking=True))
    source.fill_(2)  # the capture reads nothing
    assert any_sim.races() == []
    with side:
        graph.replay()
    source.fill_(3)
    side.synchronize()
    assert ["the host overwrites pinned memory" in race for race in any_sim.races()] == [True]


def test_replays_run_in_order_on_the_stream_that_is_current(any_sim: ModuleType) -> None:
    """Kernels, copies and operators leave the same spans as without a graph, and none at capture."""
    side, elsewhere = torch.Stream("sim"), torch.Stream("sim")
    source, values = pinned(1), numbers(0)

    def work() -> None:
        any_sim.busy(50)
        values.copy_(source, non_blocking=True)
        values.add_(1)

    any_sim.trace()
    graph, _ = capture(side, work)
    assert any_sim.trace() == []
    replay(graph, elsewhere)
    spans = any_sim.trace()
    assert [span.name for span in spans] == ["busy", "copy_h2d", "aten::add"]
    assert {span.stream for span in spans} == {elsewhere.stream_id}
    assert spans[0].end_ns - spans[0].start_ns >= 50_000
    assert spans[1].end_ns - spans[1].start_ns >= 20_000


def test_replays_take_simulated_time_and_captures_none(virtual_sim: ModuleType) -> None:
    """A kernel of 10 ms captured once and replayed five times lasts 50 ms."""
    side = torch.Stream("sim")
    torch.accelerator.synchronize()
    started = virtual_sim.host_time_ns()
    graph, _ = capture(side, lambda: virtual_sim.busy(10_000))
    side.synchronize()
    assert virtual_sim.host_time_ns() == started
    with side:
        for _ in range(5):
            graph.replay()
    side.synchronize()
    assert virtual_sim.host_time_ns() - started == 50_000_000


def test_replays_are_asynchronous(sim: ModuleType) -> None:
    """They queue behind what the stream has."""
    side = torch.Stream("sim")
    values = numbers(0)
    graph, _ = capture(side, lambda: values.add_(1))
    with side:
        sim.hold_kernel()
        graph.replay()
        graph.replay()
    assert not side.query()
    sim.release_kernels()
    side.synchronize()
    assert values.unique().tolist() == [2]


def train(model: nn.Module, steps: int, on: torch.Stream, captured: bool) -> list[torch.Tensor]:
    """Warm up on a stream, then train on changing data, eagerly or by replays; the parameters afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, targets = torch.zeros(8, 4, device="sim"), torch.zeros(8, 2, device="sim")
    torch.manual_seed(1)
    data = [(torch.randn(8, 4).pin_memory(), torch.randn(8, 2).pin_memory()) for _ in range(2 + steps)]

    def step() -> None:
        (model(images) - targets).square().mean().backward()
        optimizer.step()

    on.wait_stream(torch.accelerator.current_stream())
    with on:
        for i in range(2):
            images.copy_(data[i][0], non_blocking=True)
            targets.copy_(data[i][1], non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            step()
        optimizer.zero_grad(set_to_none=True)
    graph = capture(on, step)[0] if captured else None
    with on:
        for batch in data[2:]:
            images.copy_(batch[0], non_blocking=True)
            targets.copy_(batch[1], non_blocking=True)
            if graph is not None:
                graph.replay()
            else:
                optimizer.zero_grad(set_to_none=True)
                step()
    on.synchronize()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_captured_training_step_trains_like_the_eager_one(any_sim: ModuleType) -> None:
    """Forward, backward and SGD in one graph leave the same parameters as the loop, without a race."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    eager = train(copy.deepcopy(model).to("sim"), 4, torch.Stream("sim"), captured=False)
    replayed = train(copy.deepcopy(model).to("sim"), 4, torch.Stream("sim"), captured=True)
    torch.testing.assert_close(replayed, eager, rtol=0, atol=0)
    assert not torch.equal(eager[0], model.weight)
    assert any_sim.races() == []


def test_each_replay_draws_new_random_numbers(any_sim: ModuleType) -> None:
    """From the device's generator, as eager operators do."""
    side = torch.Stream("sim")
    graph, drawn = capture(side, lambda: torch.rand(8, device="sim"))
    torch.get_device_module("sim").manual_seed(3)
    replays = []
    for _ in range(2):
        replay(graph, side)
        replays.append(drawn.tolist())
    torch.get_device_module("sim").manual_seed(3)
    assert replays == [torch.rand(8, device="sim").tolist() for _ in range(2)]


def test_a_replay_inside_of_a_capture_is_captured(any_sim: ModuleType) -> None:
    """The outer graph contains the inner one's work."""
    side = torch.Stream("sim")
    source, values = pinned(2), numbers(0)

    def inner_work() -> None:
        values.copy_(source, non_blocking=True)
        values.mul_(3)

    inner, _ = capture(side, inner_work)

    def outer_work() -> None:
        inner.replay()
        values.add_(1)

    outer, _ = capture(side, outer_work)
    assert values.unique().tolist() == [0]
    replay(outer, side)
    assert values.unique().tolist() == [7]


@pytest.mark.parametrize("when", ["before", "during"])
def test_an_input_overwritten_beside_a_replay_is_a_race(any_sim: ModuleType, when: str) -> None:
    """A copy on another stream that nothing puts in order with the replay is reported, whichever comes first."""
    side, copies = torch.Stream("sim"), torch.Stream("sim")
    source, values = pinned(1), numbers(0)
    graph, _ = capture(side, lambda: values + 1)

    def overwrite() -> None:
        with copies:
            values.copy_(source, non_blocking=True)

    if when == "before":
        overwrite()
    with side:
        graph.replay()
    if when == "during":
        overwrite()
    torch.accelerator.synchronize()
    verb = "reads what is written by" if when == "before" else "overwrites what is read by"
    assert [verb in race and "aten::add" in race for race in any_sim.races()] == [True]


def test_an_input_overwritten_in_order_is_no_race(any_sim: ModuleType) -> None:
    """Waits outside of the graph order its replays."""
    side, copies = torch.Stream("sim"), torch.Stream("sim")
    source, values = pinned(1), numbers(0)
    graph, result = capture(side, lambda: values + 1)
    for _ in range(2):
        copies.wait_stream(side)
        with copies:
            values.copy_(source, non_blocking=True)
        side.wait_stream(copies)
        with side:
            graph.replay()
    torch.accelerator.synchronize()
    assert any_sim.races() == []
    assert result.unique().tolist() == [2]


# ---- resetting


def test_a_graph_can_capture_again_after_a_reset(any_sim: ModuleType) -> None:
    """Also after a failed capture, whose memory is free again."""
    side, graph = torch.Stream("sim"), torch.accelerator.Graph()
    values = numbers(1)
    reserved = torch.accelerator.memory_reserved()
    with side:
        graph.capture_begin()
        result = values + 1
        with pytest.raises(RuntimeError, match="querying a stream"):
            side.query()
        with pytest.raises(RuntimeError, match="the capture is invalid"):
            graph.capture_end()
        del result
        torch.accelerator.empty_cache()
        assert torch.accelerator.memory_reserved() == reserved
        graph.capture_begin()
        result = values + 2
        graph.capture_end()
        graph.reset()
        graph.capture_begin()
        graph.reset()  # in the middle
        graph.capture_begin()
        result = values + 3
        graph.capture_end()
    replay(graph, side)
    assert result.unique().tolist() == [4]


def test_a_lost_graph_ends_its_capture(any_sim: ModuleType) -> None:
    """The stream runs work again."""
    side = torch.Stream("sim")
    values = numbers(1)
    graph = torch.accelerator.Graph()
    with side:
        graph.capture_begin()
        del graph
        assert not capturing()
        result = values + 1
    side.synchronize()
    assert result.unique().tolist() == [2]


def test_resetting_the_simulator_ends_captures_and_empties_graphs(any_sim: ModuleType) -> None:
    """As after loading, although a test has lost control in the middle."""
    virtual = any_sim.setting("virtual")
    values = numbers(1)
    done, result = capture(torch.Stream("sim"), lambda: values + 1)
    open_graph = torch.accelerator.Graph()
    torch.accelerator.set_stream(torch.Stream("sim"))
    open_graph.capture_begin()
    values.add_(1)
    del result
    any_sim.reset()
    any_sim.configure(virtual=virtual)
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    assert values.unique().tolist() == [1]
    for graph in (done, open_graph):
        with pytest.raises(RuntimeError, match="has captured nothing"):
            graph.replay()
    replay(capture(torch.Stream("sim"), lambda: values.add_(1))[0], torch.Stream("sim"))
    assert values.unique().tolist() == [2]
