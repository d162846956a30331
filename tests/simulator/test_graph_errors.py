"""Graphs: what a capture forbids, to whom, and how it is misused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from tests.simulator.graphs import NUMBERS, Result, capture, in_another_thread, numbers, pinned, replay

if TYPE_CHECKING:
    from types import ModuleType


Mode = Literal["default", "global", "thread_local", "relaxed"]
Runner = Callable[[Callable[[], object]], object]

MODES: list[Mode] = ["default", "global", "thread_local", "relaxed"]


def in_this_thread(work: Callable[[], Result]) -> Result:
    """The same without another thread."""
    return work()


def new_memory() -> object:
    """Device memory that is in no cache, on a stream of its own."""
    with torch.Stream("sim"):
        return torch.empty(1 << 22, device="sim")


UNSAFE: dict[str, tuple[str, Callable[[], object]]] = {
    "new device memory": ("allocating device memory", new_memory),
    "new pinned memory": ("allocating pinned memory", lambda: torch.empty(1 << 22, pin_memory=True)),
    "event.query": ("querying an event", lambda: torch.Stream("sim").record_event().query()),
    "event.synchronize": ("synchronizing with an event", lambda: torch.Stream("sim").record_event().synchronize()),
    "stream.query": ("querying a stream", lambda: torch.Stream("sim").query()),
    "stream.synchronize": ("synchronizing with a stream", lambda: torch.Stream("sim").synchronize()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", [in_this_thread, in_another_thread])
@pytest.mark.parametrize("call", UNSAFE)
def test_modes_say_whose_unsafe_calls_are_forbidden(any_sim: ModuleType, call: str, run: Runner, mode: Mode) -> None:
    """Everyone's, the capturing thread's or nobody's; a violation makes the capture invalid."""
    what, unsafe = UNSAFE[call]
    forbidden = mode in ("default", "global") or (mode == "thread_local" and run is in_this_thread)
    graph = torch.accelerator.Graph(capture_error_mode=mode)
    with torch.Stream("sim"):
        graph.capture_begin()
        if not forbidden:
            run(unsafe)
            graph.capture_end()
            graph.replay()
            return
        with pytest.raises(RuntimeError, match=f"not permitted during the capture on stream [0-9]+: {what}"):
            run(unsafe)
        with pytest.raises(RuntimeError, match=f"the capture is invalid, because of: {what}"):
            graph.capture_end()
        with pytest.raises(RuntimeError, match=re.escape("replay() of a graph that has captured nothing")):
            graph.replay()


@pytest.mark.parametrize("run", [in_this_thread, in_another_thread])
@pytest.mark.parametrize("mode", MODES)
def test_item_is_unsafe(any_sim: ModuleType, mode: Mode, run: Runner) -> None:
    """On the other streams as the mode says, on the capturing one always."""
    values = torch.ones(1, device="sim")
    torch.accelerator.synchronize()
    forbidden = mode in ("default", "global") or (mode == "thread_local" and run is in_this_thread)
    side, graph = torch.Stream("sim"), torch.accelerator.Graph(capture_error_mode=mode)

    def item(stream: torch.Stream) -> float:
        with stream:
            return values.item()

    with side:
        graph.capture_begin()
        other = torch.Stream("sim")
        if forbidden:
            with pytest.raises(RuntimeError, match="a copy that blocks the host"):
                run(lambda: item(other))
        else:
            assert run(lambda: item(other)) == 1
        with pytest.raises(RuntimeError, match="a copy that blocks the host"):
            run(lambda: item(side))
        with pytest.raises(RuntimeError, match="the capture is invalid"):
            graph.capture_end()


IMPOSSIBLE: dict[str, Callable[[torch.Stream, torch.Event], object]] = {
    "stream.query": lambda stream, _: stream.query(),
    "stream.synchronize": lambda stream, _: stream.synchronize(),
    "event.query": lambda _, event: event.query(),
    "event.synchronize": lambda _, event: event.synchronize(),
    "synchronize": lambda *_: torch.accelerator.synchronize(),
    "empty_cache": lambda *_: torch.accelerator.empty_cache(),
}


@pytest.mark.parametrize("run", [in_this_thread, in_another_thread])
@pytest.mark.parametrize("call", IMPOSSIBLE)
def test_nobody_waits_for_a_capture(any_sim: ModuleType, call: str, run: Runner) -> None:
    """Its stream, its events, its device: in no mode and no thread, and trying makes it invalid."""
    side, graph = torch.Stream("sim"), torch.accelerator.Graph(capture_error_mode="relaxed")
    with side:
        graph.capture_begin()
        event = side.record_event()
        with pytest.raises(RuntimeError, match="not permitted during the capture"):
            run(lambda: IMPOSSIBLE[call](side, event))
        with pytest.raises(RuntimeError, match="the capture is invalid"):
            graph.capture_end()


def test_a_capture_waits_for_nothing_outside(any_sim: ModuleType) -> None:
    """An event recorded before it, or on another stream, belongs before the replay."""
    side, graph = torch.Stream("sim"), torch.accelerator.Graph(capture_error_mode="relaxed")
    before = side.record_event()
    for event in (before, torch.Stream("sim").record_event()):
        with side:
            graph.capture_begin()
            with pytest.raises(RuntimeError, match="waiting for an event that was recorded outside of it"):
                side.wait_event(event)
            with pytest.raises(RuntimeError, match="the capture is invalid"):
                graph.capture_end()


def test_the_default_stream_joins_no_capture(any_sim: ModuleType) -> None:
    """It cannot be captured, in no mode."""
    default, side = torch.accelerator.current_stream(), torch.Stream("sim")
    graph = torch.accelerator.Graph(capture_error_mode="relaxed")
    with side:
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="the default stream waiting for its event"):
            default.wait_stream(side)
        with pytest.raises(RuntimeError, match="the capture is invalid"):
            graph.capture_end()


def test_two_captures_do_not_join(any_sim: ModuleType) -> None:
    """A stream that is in one of them cannot wait for an event of the other."""
    sides = [torch.Stream("sim") for _ in range(2)]
    graphs = [torch.accelerator.Graph() for _ in range(2)]
    for side, graph in zip(sides, graphs, strict=True):
        with side:
            graph.capture_begin()
    with pytest.raises(RuntimeError, match="waiting for an event that was recorded outside of it"):
        sides[0].wait_stream(sides[1])
    with sides[0], pytest.raises(RuntimeError, match="the capture is invalid"):
        graphs[0].capture_end()
    with sides[1]:
        graphs[1].capture_end()


def test_what_joins_a_capture_must_be_waited_for(any_sim: ModuleType) -> None:
    """Or the capture is invalid, as soon as the other stream has work of its own."""
    side, other, values = torch.Stream("sim"), torch.Stream("sim"), numbers(1)
    graph = torch.accelerator.Graph()
    with side:
        graph.capture_begin()
        other.wait_stream(side)
        graph.capture_end()
        graph.reset()
        graph.capture_begin()
        other.wait_stream(side)
        with other:
            values.add_(1)
            event = other.record_event()
            values.add_(1)
        side.wait_event(event)
        with pytest.raises(RuntimeError, match="work of a stream that joined it and that its own does not wait for"):
            graph.capture_end()
    assert not other.is_capturing()
    assert values.unique().tolist() == [1]


def test_an_event_of_a_capture_never_happens(any_sim: ModuleType) -> None:
    """After the capture, too, nobody can wait for it or ask for its time, until it is recorded again."""
    side, event = torch.Stream("sim"), torch.Event("sim", enable_timing=True)
    capture(side, lambda: event.record())
    with pytest.raises(RuntimeError, match="querying an event that was recorded during a capture"):
        event.query()
    with pytest.raises(RuntimeError, match="it never happens"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="it never happens"):
        side.wait_event(event)
    with pytest.raises(RuntimeError, match="it never happens"):
        event.elapsed_time(side.record_event(torch.Event("sim", enable_timing=True)))
    event.record(side)
    event.synchronize()
    assert event.query()


def test_what_waits_for_the_host_cannot_be_captured(any_sim: ModuleType) -> None:
    """Operators whose shapes depend on data, that read host memory, and copies that are not asynchronous."""
    values, source = numbers(1), pinned(1)
    impossible: dict[str, Callable[[], object]] = {
        "aten::nonzero": lambda: values.nonzero(),
        "aten::_index_put_impl_": lambda: values.index_put_((torch.tensor([1]),), values[:1]),
        "a copy that blocks the host": lambda: values.copy_(source),
        "a copy that blocks .*": lambda: values.copy_(torch.ones(NUMBERS), non_blocking=True),
        "a copy that .*": lambda: values.tolist(),
    }
    graph = torch.accelerator.Graph(capture_error_mode="relaxed")
    with torch.Stream("sim"):
        for what, work in impossible.items():
            graph.capture_begin()
            with pytest.raises(RuntimeError, match=f"not permitted during the capture on stream [0-9]+: {what}"):
                work()
            with pytest.raises(RuntimeError, match=f"the capture is invalid, because of: {what}"):
                graph.capture_end()
    torch.accelerator.synchronize()
    assert values.unique().tolist() == [1]


def test_capturing_wrongly_is_an_error(any_sim: ModuleType) -> None:
    """Each misuse has its message and leaves the capture as it was."""
    graph, other = torch.accelerator.Graph(), torch.accelerator.Graph()
    side = torch.Stream("sim")
    values = numbers(1)
    with pytest.raises(RuntimeError, match="the default stream cannot be captured"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match=re.escape("capture_end() without capture_begin()")):
        graph.capture_end()
    with pytest.raises(RuntimeError, match=re.escape("replay() of a graph that has captured nothing")):
        graph.replay()
    with side:
        graph.capture_begin()
        result = values + 1
        with pytest.raises(RuntimeError, match="is capturing already"):
            other.capture_begin()
        with pytest.raises(RuntimeError, match=re.escape("replay() of a graph that has captured nothing")):
            graph.replay()
    with pytest.raises(RuntimeError, match="ends on the stream on which it began"):
        graph.capture_end()
    with side:
        with pytest.raises(RuntimeError, match="has captured already"):
            graph.capture_begin()
        in_another = pytest.raises(RuntimeError, match="ends in the thread in which it began")

        def end() -> None:
            with side:
                graph.capture_end()

        with in_another:
            in_another_thread(end)
        graph.capture_end()
        with pytest.raises(RuntimeError, match="has captured already"):
            graph.capture_begin()
    replay(graph, side)
    assert result.unique().tolist() == [2]


def test_a_held_kernel_cannot_be_captured(sim: ModuleType) -> None:
    """Its replays would not know which release is theirs."""
    with torch.Stream("sim"), torch.accelerator.Graph(), pytest.raises(RuntimeError, match="held cannot be captured"):
        sim.hold_kernel()
