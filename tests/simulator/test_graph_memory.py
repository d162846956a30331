"""Whose memory a graph uses: its own, and what it was captured with."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from tests.simulator.graphs import NUMBERS, capture, in_another_thread, numbers, pinned, replay

if TYPE_CHECKING:
    from types import ModuleType


def test_memory_of_a_graph_is_its_own(any_sim: ModuleType) -> None:
    """Freed during the capture, after it or not at all, nobody else gets it before the graph is reset."""
    side = torch.Stream("sim")
    values = numbers(1)
    addresses = set()

    def work() -> torch.Tensor:
        temporary = values * 2
        result = temporary + 1
        addresses.update([temporary.data_ptr(), result.data_ptr()])
        return result

    graph, result = capture(side, work)
    result_address = result.data_ptr()
    del result
    torch.accelerator.empty_cache()

    def elsewhere() -> list[torch.Tensor]:
        with side:
            return [torch.empty(NUMBERS, device="sim") for _ in range(4)]

    assert not addresses & {tensor.data_ptr() for tensor in elsewhere()}
    replay(graph, side)  # its addresses are still valid
    graph.reset()
    assert result_address in {tensor.data_ptr() for tensor in elsewhere()}
    assert addresses <= {tensor.data_ptr() for tensor in elsewhere()}


def test_a_tensor_outlives_the_graph_that_made_it(any_sim: ModuleType) -> None:
    """What is still in use when the graph goes is ordinary memory from then on."""
    side = torch.Stream("sim")
    values = numbers(1)
    graph, result = capture(side, lambda: values + 1)
    replay(graph, side)
    address = result.data_ptr()
    del graph
    with side:
        assert torch.empty(NUMBERS, device="sim").data_ptr() != address
    assert result.unique().tolist() == [2]
    del result
    with side:
        assert torch.empty(NUMBERS, device="sim").data_ptr() == address


def test_memory_of_a_graph_counts(any_sim: ModuleType) -> None:
    """As allocated while a tensor has it, as reserved until the graph is gone and the cache is emptied."""
    side = torch.Stream("sim")
    values = numbers(1)
    gc.collect()  # what other tests have left is not to go meanwhile
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    graph, result = capture(side, lambda: values + 1)
    size = values.nbytes
    assert torch.accelerator.memory_allocated() == before[0] + size
    del result
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == before[0]
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] == before[0]
    assert torch.accelerator.memory_reserved() == before[1] + size
    del graph
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == before[1]


def test_a_graph_keeps_no_memory_from_before_its_capture(any_sim: ModuleType) -> None:
    """A replay reads what the next owner of the address has put there."""
    side = torch.Stream("sim")
    lent = [numbers(1)]
    address = lent[0].data_ptr()
    graph, result = capture(side, lambda: lent[0] + 1)
    lent.clear()
    successor = numbers(10)
    assert successor.data_ptr() == address
    replay(graph, side)
    assert result.unique().tolist() == [11]


def test_memory_that_was_given_back_is_an_error(any_sim: ModuleType) -> None:
    """Device memory and pinned memory: the replay raises, where a real one would fault."""
    side = torch.Stream("sim")
    lent = [numbers(1)]
    graph, _ = capture(side, lambda: lent[0] + 1)
    lent.clear()
    torch.accelerator.empty_cache()
    with side, pytest.raises(RuntimeError, match="illegal memory access: a graph uses memory that has been given back"):
        graph.replay()
    lent, values = [pinned(1)], numbers(1)
    graph, _ = capture(side, lambda: values.copy_(lent[0], non_blocking=True))
    lent.clear()
    torch.accelerator.empty_host_cache()
    with side, pytest.raises(RuntimeError, match="illegal memory access: a graph uses pinned memory"):
        graph.replay()


def test_poison_is_no_part_of_a_graph(any_sim: ModuleType) -> None:
    """Memory of the graph is poisoned once; what the program writes there later survives the replays."""
    any_sim.configure(poison=2)
    side = torch.Stream("sim")
    with side:
        before = torch.zeros(NUMBERS, device="sim")
    side.synchronize()

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal before
        del before  # poisons, now
        buffer = torch.empty(NUMBERS, device="sim")
        return buffer, buffer + 1

    graph, (buffer, result) = capture(side, work)
    assert buffer.isnan().all()
    buffer.fill_(3)
    torch.accelerator.synchronize()
    any_sim.trace()
    for _ in range(2):
        replay(graph, side)
        assert result.unique().tolist() == [4]


def test_allocators_look_at_no_event_during_a_capture(any_sim: ModuleType) -> None:
    """Memory that another stream has used returns to its own when the capture is over, not before."""
    other = torch.Stream("sim")
    lent = numbers(1)
    address = lent.data_ptr()
    lent.record_stream(other)
    graph = torch.accelerator.Graph(capture_error_mode="relaxed")
    with torch.Stream("sim"), graph:
        del lent
        meanwhile = in_another_thread(lambda: torch.empty(NUMBERS, device="sim"))  # on the default stream
    assert meanwhile.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.empty(NUMBERS, device="sim").data_ptr() == address
