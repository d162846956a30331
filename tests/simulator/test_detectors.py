"""Correct prefetchers run clean and at full speed; each way of being wrong is noticed, in both modes."""

from __future__ import annotations

import queue
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tests.simulator.reference_prefetcher import Bug, Memory, ReferencePrefetcher

if TYPE_CHECKING:
    from types import ModuleType

BATCHES = 10
NUMBERS = 1 << 12
COPY_US = 1_000
STEP_US = 2_000
# The first copy cannot overlap anything; all others hide behind the steps.
BEST_US = COPY_US + BATCHES * STEP_US


class Outcome(NamedTuple):
    """What a run showed."""

    wrong: int
    races: list[str]
    simulated_us: float


def host_batches() -> list[torch.Tensor]:
    """Batch i is full of i + 1."""
    return [torch.full((NUMBERS,), float(i + 1)) for i in range(BATCHES)]


def judge(sim: ModuleType, means: list[torch.Tensor], started_ns: int) -> Outcome:
    """Wait for the device and compare."""
    torch.accelerator.synchronize()
    simulated_us = (sim.host_time_ns() - started_ns) / 1e3
    races = sim.races()
    values = [mean.item() for mean in means]
    return Outcome(sum(value != i + 1 for i, value in enumerate(values)), races, simulated_us)


def train(sim: ModuleType, **how: Any) -> Outcome:
    """Iterate over known batches; each step is a long kernel, then one that reads the batch."""
    sim.configure(latency_us=COPY_US)
    started = sim.host_time_ns()
    means = []
    for batch in ReferencePrefetcher(host_batches(), **how):
        sim.busy(STEP_US)
        means.append(batch.mean())
        del batch
    return judge(sim, means, started)


CORRECT: list[dict[str, Any]] = [
    *({"memory": memory} for memory in ("record_stream", "back_wait", "slots")),
    *({"depth": depth, "memory": memory} for depth in (1, 4) for memory in ("record_stream", "slots")),
]


@pytest.mark.parametrize("how", CORRECT, ids=lambda how: "-".join(map(str, how.values())))
def test_correct_prefetchers_are_clean_and_overlap(any_sim: ModuleType, how: dict[str, Any]) -> None:
    """No variant that is right is reported, delivers wrong data, or loses time."""
    outcome = train(any_sim, **how)
    assert outcome.wrong == 0
    assert outcome.races == []
    assert outcome.simulated_us == pytest.approx(BEST_US)


@pytest.mark.parametrize("poison", [0, 2])
def test_poison_does_not_change_the_verdict(any_sim: ModuleType, poison: int) -> None:
    """Without poison, and with poison at free as well, record_stream is right and leaving it out is a race."""
    any_sim.configure(poison=poison)
    right = train(any_sim)
    assert right.wrong == 0
    assert right.races == []
    assert train(any_sim, bug="no record_stream").races


RACES: list[tuple[Bug, Memory, str]] = [
    ("no wait", "record_stream", "mean on stream 0 reads what is written by copy_h2d"),
    (
        "no record_stream",
        "record_stream",
        "hand-out of memory on stream .* overwrites what is read by aten::mean on stream 0",
    ),
    ("no back-wait", "slots", "copy_h2d on stream .* overwrites what is read by aten::mean on stream 0"),
    ("staging overwritten", "record_stream", "the host overwrites pinned memory which copy_h2d"),
]


@pytest.mark.parametrize(("bug", "memory", "report"), RACES, ids=[bug for bug, _, _ in RACES])
def test_races_are_reported(any_sim: ModuleType, bug: Bug, memory: Memory, report: str) -> None:
    """Each missing wait is reported by name, whatever ran when."""
    outcome = train(any_sim, bug=bug, memory=memory)
    assert outcome.races
    assert all(re.search(report, race) for race in outcome.races), outcome.races


@pytest.mark.parametrize(("bug", "memory", "report"), RACES, ids=[bug for bug, _, _ in RACES])
def test_races_give_wrong_data_in_threads_mode(sim: ModuleType, bug: Bug, memory: Memory, report: str) -> None:
    """Where the device is held at the worst moment, the same mistakes spoil what the consumer computes."""
    copies_are_late = bug in ("no wait", "staging overwritten")
    sim.configure(latency_us=0)
    if copies_are_late:
        sim.hold_copies("h2d")
    else:
        sim.hold_kernel()  # the consumer reads every batch after all copies have landed
    prefetcher = ReferencePrefetcher(host_batches(), bug=bug, memory=memory)
    means = []
    for batch in prefetcher:
        means.append(batch.mean())
        del batch
    if bug == "no wait":
        torch.accelerator.current_stream().synchronize()
    elif not copies_are_late:
        prefetcher.side.synchronize()
    sim.release_copies("h2d")
    sim.release_kernels()
    outcome = judge(sim, means, 0)
    assert outcome.wrong > 0
    assert outcome.races


@pytest.mark.parametrize("bug", ["own stream", "pageable", "blocking"])
def test_lost_overlap_shows_in_the_simulated_time(any_sim: ModuleType, bug: Bug) -> None:
    """Right data, no race, but the copies are not hidden: the simulated time is longer than it need be."""
    outcome = train(any_sim, bug=bug)
    assert outcome.wrong == 0
    assert outcome.races == []
    assert outcome.simulated_us >= BEST_US + COPY_US


def test_producer_thread_is_clean(any_sim: ModuleType) -> None:
    """Copies issued by another thread, on its own current stream, are ordered by the event handed over."""
    any_sim.configure(latency_us=COPY_US)
    side = torch.Stream("sim")
    ready: queue.Queue[tuple[torch.Tensor, torch.Event] | None] = queue.Queue(2)

    def produce() -> None:
        torch.accelerator.set_stream(side)
        for host in host_batches():
            batch = host.pin_memory().to("sim", non_blocking=True)
            ready.put((batch, side.record_event()))
        ready.put(None)

    thread = threading.Thread(target=produce)
    thread.start()
    consumer = torch.accelerator.current_stream()
    started = any_sim.host_time_ns()
    means = []
    while (item := ready.get()) is not None:
        batch, copied = item
        consumer.wait_event(copied)
        batch.record_stream(consumer)
        any_sim.busy(STEP_US)
        means.append(batch.mean())
        del item, batch
    thread.join()
    outcome = judge(any_sim, means, started)
    assert outcome.wrong == 0
    assert outcome.races == []


def test_reuse_while_a_third_stream_reads_is_reported(any_sim: ModuleType) -> None:
    """Only the stream named by record_stream is protected; a further reader is not."""
    home, named, unnamed = torch.accelerator.current_stream(), torch.Stream("sim"), torch.Stream("sim")
    tensor = torch.ones(NUMBERS, device="sim")
    for reader in (named, unnamed):
        reader.wait_stream(home)
        with reader:
            tensor.sum()
    tensor.record_stream(named)
    del tensor
    named.synchronize()  # the block is free again
    torch.zeros(NUMBERS, device="sim")
    races = any_sim.races()
    assert len(races) == 1
    assert f"on stream 0 overwrites what is read by aten::sum on stream {unnamed.stream_id}" in races[0]


def test_detection_is_off_without_race(any_sim: ModuleType) -> None:
    """With ``race=0`` nothing is recorded, so a benchmark does not pay for it."""
    any_sim.configure(race=0)
    assert train(any_sim, bug="no record_stream").races == []
    assert train(any_sim, bug="staging overwritten").races == []


def test_unordered_writes_are_reported(any_sim: ModuleType) -> None:
    """Two streams that fill one tensor must be ordered, even if nobody reads in between."""
    first, second = torch.Stream("sim"), torch.Stream("sim")
    slot = torch.empty(NUMBERS, device="sim")
    source = torch.ones(NUMBERS).pin_memory()
    for stream in (first, second):
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            slot.copy_(source, non_blocking=True)
    races = any_sim.races()
    assert len(races) == 1
    assert f"copy_h2d on stream {second.stream_id} overwrites what is written by copy_h2d" in races[0]
    torch.accelerator.synchronize()
    second.wait_stream(first)
    with second:
        slot.copy_(source, non_blocking=True)
    assert any_sim.races() == []
