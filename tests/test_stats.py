"""What a prefetcher says about itself: the verdict, the times, the counters, and the timeline they come from."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from prefetch import CUDAPrefetcher, PrefetchError, PrefetchWarning
from prefetch._stats import Means, amount, bottleneck, duration
from tests.helpers import BY_MEMORY, SIZE, Numbered, numbered

BYTES = 4 * SIZE
LENGTHS = (1000, 2000, 3500, 6000, 12000)  # us
# Where the truth is not borderline: the longest is at least a tenth longer than the others.
TRIPLES = [
    triple
    for triple in itertools.product((0, *LENGTHS), LENGTHS, LENGTHS)
    if sorted(triple)[-1] >= 1.1 * sorted(triple)[-2]
]


@pytest.fixture
def clock(virtual_sim: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The simulated host's time in the place of the real one, beside the simulated device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("prefetch.") and hasattr(module, "clock"):
            monkeypatch.setattr(module, "clock", virtual_sim.host_time_ns)
    return virtual_sim


def batches(sim: Any, count: int, load_us: int = 0) -> Iterator[torch.Tensor]:
    """Pinned batches that take the simulated host some time each."""
    ready = numbered(4)
    for i in range(count):
        sim.host_busy(load_us)
        yield ready[i % 4]


def run(sim: Any, load: int, copy_us: int, compute: int, count: int = 40, **options: Any) -> CUDAPrefetcher[Any]:
    """A pass in which each batch takes so many microseconds, and the prefetcher that has seen it."""
    sim.configure(latency_us=copy_us)
    prefetcher = CUDAPrefetcher(batches(sim, count, load), "sim", **options)
    for _ in prefetcher:
        sim.busy(compute)
    return prefetcher


class TestVerdict:
    """What holds a loop back is named, where the truth is known."""

    def test_there_are_enough(self) -> None:
        """The grid is one of 60 at least, and each of the three is the longest in many."""
        assert len(TRIPLES) >= 60
        assert all(sum(max(t) == t[part] for t in TRIPLES) >= 15 for part in range(3))

    @pytest.mark.parametrize("profile", [False, True])
    @pytest.mark.parametrize(("load", "copy_us", "compute"), TRIPLES)
    def test_longest_is_named(self, clock: Any, load: int, copy_us: int, compute: int, profile: bool) -> None:
        """Of a pass of 40 batches, with all of them timed and with few."""
        longest = {load: "loader", copy_us: "copy", compute: "compute"}[max(load, copy_us, compute)]
        assert run(clock, load, copy_us, compute, profile=profile).stats.bottleneck.startswith(longest + ":")

    @BY_MEMORY
    @pytest.mark.parametrize("depth", [0, 1, 4])
    def test_whoever_owns_the_memory(self, clock: Any, memory: Any, depth: int) -> None:
        """What copies wait for on the side stream, for memory of theirs, is not taken for copying."""
        for triple, longest in (((1000, 2000, 5000), "compute"), ((1000, 5000, 2000), "copy")):
            stats = run(clock, *triple, memory=memory, prefetch_batches=depth, profile=True).stats
            assert stats.bottleneck.startswith(longest)
            assert stats.copy_s == pytest.approx(40 * triple[1] / 1e6, rel=0.03)

    def test_what_else_is_not_hidden(self, clock: Any) -> None:
        """A loop that synchronises after each step waits for the loader, though the step takes longest."""
        clock.configure(latency_us=1000)
        prefetcher = CUDAPrefetcher(batches(clock, 40, 4000), "sim", profile=True)
        for _ in prefetcher:
            clock.busy(6000)
            torch.accelerator.synchronize()
        assert re.search(
            r"^compute: .*; 3.79 ms of each step are spent waiting for the loader$", prefetcher.stats.bottleneck
        )

    def test_asked_for_in_the_loop(self, clock: Any) -> None:
        """While a step is under way, those before it count, and no more."""
        clock.configure(latency_us=5000)
        prefetcher = CUDAPrefetcher(batches(clock, 6), "sim", profile=True)
        for position, _ in enumerate(prefetcher):
            clock.busy(10_000)
            assert prefetcher.stats.step_s == pytest.approx(0.01 if position > 1 else 0)

    def test_warm_up_does_not_count(self, clock: Any) -> None:
        """The first steps, which compile and tune, are in the sums, not in the verdict."""
        clock.configure(latency_us=5000)
        prefetcher = CUDAPrefetcher(batches(clock, 40), "sim", profile=True)
        for position, _ in enumerate(prefetcher):
            clock.busy(1000 if position else 1_000_000)
        assert prefetcher.stats.compute_s == pytest.approx(1.039)
        assert prefetcher.stats.bottleneck.startswith("copy")

    def test_starts_do_not_count(self, clock: Any) -> None:
        """Of a pass, when workers start and the first copy is waited for; in passes of three this would be much."""
        clock.configure(latency_us=5000)

        class Starting:
            def __iter__(self) -> Iterator[torch.Tensor]:
                clock.host_busy(100_000)
                yield from batches(clock, 3)

        prefetcher = CUDAPrefetcher(Starting(), "sim", profile=True)
        for _ in range(4):
            for _ in prefetcher:
                clock.busy(10_000)
        assert prefetcher.stats.load_s == pytest.approx(0.4)
        assert prefetcher.stats.exposed_copy_s == pytest.approx(0.02)
        assert prefetcher.stats.bottleneck.startswith("compute")
        assert "waiting for the copy" not in prefetcher.stats.bottleneck

    def test_of_nothing(self) -> None:
        """Before the first step there is none."""
        stats = CUDAPrefetcher([], "cpu").stats
        assert stats.bottleneck == "unknown: no step has been timed yet"
        assert (stats.batches, stats.step_s, stats.copy_gb_per_s) == (0, 0, 0)

    def test_staging_is_copying(self) -> None:
        """Where the host takes longer to stage a batch than the bus to copy it, this is what is named."""
        verdict = bottleneck(Means(load=1e-3, issue=9e-3, copy=2e-3, compute=5e-3), 9e-3, 0, 0)
        assert verdict.startswith("copy: the host takes long to stage the batches; ")


class TestTimes:
    """The figures are those that the simulated device was told."""

    @BY_MEMORY
    @pytest.mark.parametrize(("copy_us", "compute"), [(5000, 10000), (10000, 5000)])
    def test_of_the_device(self, clock: Any, memory: Any, copy_us: int, compute: int) -> None:
        """Copies, what of them is exposed, steps, bandwidth: within 3 % in simulated time."""
        stats = run(clock, 0, copy_us, compute, memory=memory, profile=True).stats
        exposed = copy_us + 39 * max(0, copy_us - compute)  # the first one is
        assert stats.copy_s == pytest.approx(40 * copy_us / 1e6, rel=0.03)
        assert stats.exposed_copy_s == pytest.approx(exposed / 1e6, rel=0.03)
        assert stats.compute_s == pytest.approx(40 * compute / 1e6, rel=0.03)
        assert stats.step_s == pytest.approx(max(copy_us, compute) / 1e6, rel=0.03)
        assert stats.copy_gb_per_s == pytest.approx(BYTES / copy_us / 1e3, rel=0.03)
        assert (stats.batches, stats.timed_batches, stats.timed_steps) == (40, 40, 40)

    def test_bandwidth(self, clock: Any) -> None:
        """Of copies that last by their size."""
        clock.configure(h2d_mb_s=1000, latency_us=0)
        prefetcher = CUDAPrefetcher([torch.ones(1 << 20).pin_memory()] * 10, "sim", profile=True)
        for _ in prefetcher:
            clock.busy(100)
        assert prefetcher.stats.copy_gb_per_s == pytest.approx(1.0, rel=0.03)

    @pytest.mark.parametrize("background", [False, True])
    def test_in_real_time(self, sim: Any, background: bool) -> None:
        """Within 10 %, in threads; sleeps end late on a busy machine, hence the least of three."""
        sim.configure(latency_us=10_000)
        copies, exposures = [], []
        for _ in range(3):
            prefetcher = CUDAPrefetcher(numbered(12), "sim", profile=True, background=background)
            for _ in prefetcher:
                sim.busy(4_000)
            copies.append(prefetcher.stats.copy_s)
            exposures.append(prefetcher.stats.exposed_copy_s)
        assert min(copies) == pytest.approx(0.12, rel=0.1)
        assert min(exposures) == pytest.approx(0.01 + 11 * 0.006, rel=0.1)

    def test_of_the_host(self, clock: Any) -> None:
        """What the loader takes and is waited for, and what the host waits because it is ahead of the device."""
        stats = run(clock, 3000, 1000, 10000, profile=True).stats
        assert stats.load_s == pytest.approx(40 * 3e-3)
        assert stats.loader_wait_s == stats.load_s  # no thread
        assert stats.host_wait_s == pytest.approx(37 * 10e-3 - 37 * 3e-3, rel=0.1)
        assert stats.step_s == pytest.approx(10e-3)

    def test_waiting_for_a_thread(self, sim: Any) -> None:
        """With a thread only what a request waits is waited for: not a load that took place meanwhile."""
        is_asked, may_go_on = threading.Event(), threading.Event()

        def loader() -> Iterator[int]:
            yield 0
            yield 1
            is_asked.set()
            may_go_on.wait(60)
            yield 2

        prefetcher = CUDAPrefetcher(loader(), "cpu", background=True, prefetch_batches=1)
        iterator = iter(prefetcher)
        assert next(iterator) == 0
        is_asked.wait(60)
        before = prefetcher.stats
        start = time.perf_counter()
        while time.perf_counter() < start + 0.05:
            pass
        may_go_on.set()
        assert list(iterator) == [1, 2]
        after = prefetcher.stats
        assert after.load_s - before.load_s >= 0.05
        assert after.loader_wait_s - before.loader_wait_s < 0.05

    def test_few_are_timed_without_profile(self, clock: Any) -> None:
        """The third to the eighth, then one in 251, over all passes; the sums are theirs."""
        prefetcher = CUDAPrefetcher(numbered(100), "sim")
        clock.configure(latency_us=2000)
        for _ in range(6):
            for _ in prefetcher:
                clock.busy(1000)
        torch.accelerator.synchronize()
        stats = prefetcher.stats
        assert (stats.batches, stats.timed_batches, stats.timed_steps) == (600, 8, 8)
        assert stats.copy_s == pytest.approx(8 * 2e-3)
        assert stats.bytes == 600 * BYTES


class TestCounters:
    """Batches, bytes, leaves, over passes."""

    @pytest.mark.parametrize("background", [False, True])
    @BY_MEMORY
    def test_bytes(self, sim: Any, memory: Any, background: bool) -> None:
        """What crosses the bus, in the type in which it does: aliases once, what is there already not at all."""
        shared = torch.ones(100, dtype=torch.uint8).pin_memory()
        batch = {
            "again": [shared, shared],
            "there": torch.ones(50, device="sim"),
            "skipped": torch.ones(7),
            "wide": torch.ones(10, 3, dtype=torch.float64).pin_memory(),
            "sparse": torch.eye(4).to_sparse().pin_memory(),
        }
        prefetcher = CUDAPrefetcher(
            [batch] * 3, "sim", dtype=torch.float16, memory=memory, background=background, skip_keys=["skipped"]
        )
        for _ in prefetcher:
            pass
        assert prefetcher.stats.bytes == 3 * (100 + 240 + 4 * (2 * 8 + 4))

    def test_bytes_of_objects(self, sim: Any) -> None:
        """With their own ``.to``, as far as it makes tensors."""

        class Pair:
            def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
                self.left, self.right = left, right

            def to(self, device: Any, non_blocking: bool = False) -> Pair:
                return Pair(self.left.to(device, non_blocking=non_blocking), self.right.to(device))

        pair = Pair(torch.ones(10).pin_memory(), torch.ones(10, device="sim"))
        prefetcher = CUDAPrefetcher([pair], "sim")
        list(prefetcher)
        assert prefetcher.stats.bytes == 40

    @pytest.mark.parametrize("pin_memory", [False, True])
    def test_pageable_leaves(self, sim: Any, pin_memory: bool) -> None:
        """Counted, though only the first is warned of."""
        data = [{"pageable": torch.ones(4), "also": torch.ones(4), "pinned": torch.ones(4).pin_memory()}] * 3
        prefetcher = CUDAPrefetcher(data, "sim", pin_memory=pin_memory)
        with pytest.warns(PrefetchWarning, match="pageable"):
            list(prefetcher)
        assert prefetcher.stats.pageable_leaves == 6

    @pytest.mark.parametrize("depth", [0, 1, 3])
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_held(self, sim: Any, device: str, depth: int) -> None:
        """As many as are looked ahead, and the one that is handed over; on the CPU only that one."""
        prefetcher = CUDAPrefetcher(numbered(6), device, prefetch_batches=depth)
        list(prefetcher)
        assert prefetcher.stats.peak_batches_held == (1 + depth if device == "sim" else 1)

    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_over_passes(self, sim: Any, device: str, background: bool) -> None:
        """Whole ones and broken-off ones, counted together; a snapshot stays what it was."""
        prefetcher = CUDAPrefetcher(numbered(5), device, background=background)
        list(prefetcher)
        first = prefetcher.stats
        list(itertools.islice(prefetcher, 2))
        with pytest.raises(AttributeError):
            first.batches = 7  # type: ignore[misc]
        assert (first.batches, prefetcher.stats.batches) == (5, 7)
        assert prefetcher.stats.elapsed_s > first.elapsed_s > 0

    def test_copies_start_anew(self, sim: Any) -> None:
        """What was measured is not copied or pickled; whether to profile is."""
        prefetcher = CUDAPrefetcher(Numbered(3), "sim", profile=True)
        list(prefetcher)
        for other in (copy.copy(prefetcher), copy.deepcopy(prefetcher), pickle.loads(pickle.dumps(prefetcher))):
            assert (other.stats.batches, other.timeline.batches) == (0, ())
            list(other)
            assert (other.stats.batches, len(other.timeline.batches)) == (3, 3)
        assert prefetcher.stats.batches == 3

    def test_on_the_cpu(self) -> None:
        """Nothing crosses a bus; the loader's time and the step's are told apart by the host's clock."""

        def slow() -> Iterator[torch.Tensor]:
            for i in range(4):
                time.sleep(0.02)
                yield torch.full((8,), float(i))

        prefetcher = CUDAPrefetcher(slow(), "cpu", profile=True)
        list(prefetcher)
        stats = prefetcher.stats
        assert (stats.batches, stats.bytes, stats.copy_s, stats.copy_gb_per_s) == (4, 0, 0, 0)
        assert stats.load_s >= 0.08
        assert stats.compute_s < stats.load_s
        assert stats.bottleneck.startswith("loader")
        assert [times.copy for times in prefetcher.timeline.batches] == [()] * 4

    def test_transform_on_the_cpu(self) -> None:
        """Is waited for, like a copy."""

        def slow(batch: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return batch

        prefetcher = CUDAPrefetcher([torch.ones(1)] * 4, "cpu", transform=slow, profile=True)
        list(prefetcher)
        stats = prefetcher.stats
        assert stats.copy_s >= 0.08
        assert stats.exposed_copy_s == stats.copy_s
        assert stats.bottleneck.startswith("copy")

    def test_asked_for_by_a_signal_handler(self, sim: Any) -> None:
        """At any moment, in the middle of a count too: nothing waits for itself."""
        prefetcher = CUDAPrefetcher(numbered(20), "sim", profile=True)
        seen = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal seen
            if "prefetch/_m" in frame.f_code.co_filename:
                sys.settrace(None)
                seen = max(seen, prefetcher.stats.batches)
                sys.settrace(trace)
            return trace

        sys.settrace(trace)
        try:
            list(prefetcher)
        finally:
            sys.settrace(None)
        assert seen > 0

    def test_text(self, clock: Any) -> None:
        """A short table, with the verdict at its end."""
        lines = str(run(clock, 3000, 5000, 10000, profile=True).stats).splitlines()
        assert lines[0] == f"40 batches, {40 * BYTES / 1e6:.3g} MB copied, at most 3 held at once"
        assert [line.split()[:3] for line in lines[2:6]] == [
            ["loader", "3", "ms"],
            ["copy", "5", "ms"],
            ["compute", "10", "ms"],
            ["queueing", "0", "us"],
        ]
        assert lines[-1].startswith("bottleneck: compute")
        assert (duration(1.5), duration(2e-3), duration(3e-6)) == ("1.5 s", "2 ms", "3 us")
        assert (amount(12), amount(2.5e6), amount(3e12)) == ("12 B", "2.5 MB", "3 TB")


class TestTimeline:
    """What happened to each batch, and when."""

    @BY_MEMORY
    def test_overlap(self, clock: Any, memory: Any) -> None:
        """In simulated time: steps follow each other, and each batch is copied while the one before it is used."""
        timeline = run(clock, 1000, 5000, 10000, memory=memory, profile=True).timeline
        assert [times.position for times in timeline.batches] == list(range(40))
        for before, after in itertools.pairwise(timeline.batches[3:]):
            assert after.load.duration_s == pytest.approx(1e-3)
            (copied,) = after.copy
            assert copied.duration_s == pytest.approx(5e-3)
            assert after.load.end_s <= copied.start_s
            assert copied.end_s <= after.wait.end_s == pytest.approx(after.wait.start_s)
            assert before.compute is not None
            assert after.compute is not None
            assert after.compute.start_s == pytest.approx(before.compute.end_s)
            assert after.compute.duration_s == pytest.approx(10e-3)

    def test_agrees_with_the_device(self, sim: Any) -> None:
        """In real time: copies are where the simulated device says that they were, by one clock."""
        sim.configure(latency_us=3000)
        prefetcher = CUDAPrefetcher(numbered(5), "sim", profile=True)
        for _ in prefetcher:
            sim.busy(1000)
        ours = [times.copy[0] for times in prefetcher.timeline.batches]
        theirs = sorted(
            (span for span in sim.trace() if "h2d" in span.name or "copy" in span.name), key=lambda s: s.start_ns
        )
        assert len(theirs) == 5
        for (left, right), (mine, other) in zip(itertools.pairwise(ours), itertools.pairwise(theirs), strict=True):
            assert right.start_s - left.start_s == pytest.approx((other.start_ns - mine.start_ns) / 1e9, abs=2e-3)

    def test_static_results_of_a_transform(self, clock: Any) -> None:
        """They are copied into their slots after a wait for these, which is no copying: two intervals."""
        prefetcher = run(clock, 0, 2000, 5000, memory="static", transform=lambda batch: batch, profile=True)
        assert all(len(times.copy) == 2 for times in prefetcher.timeline.batches)
        assert prefetcher.stats.bottleneck.startswith("compute")

    def test_broken_off(self, clock: Any) -> None:
        """The last step of a pass that is left has no end; the next pass has the next number."""
        prefetcher = CUDAPrefetcher(numbered(5), "sim", profile=True)
        for _ in range(2):
            for _ in itertools.islice(prefetcher, 2):
                clock.busy(1000)
        found = [(times.pass_number, times.position, times.compute is None) for times in prefetcher.timeline.batches]
        assert found == [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)]

    def test_two_consumers(self, sim: Any) -> None:
        """Where the next batch is asked for on another stream, nobody knows where the step ends."""
        streams = [torch.Stream("sim"), torch.Stream("sim")]
        prefetcher = CUDAPrefetcher(numbered(4), "sim", profile=True)
        iterator = iter(prefetcher)
        for stream in [streams[0], streams[0], streams[1]]:
            with stream:
                next(iterator)
        torch.accelerator.synchronize()
        assert [times.compute is not None for times in prefetcher.timeline.batches] == [True, False]
        assert prefetcher.stats.timed_steps == 1

    def test_only_when_asked_for(self) -> None:
        """Without ``profile`` the error says what to do."""
        with pytest.raises(PrefetchError, match="profile=True"):
            _ = CUDAPrefetcher([], "cpu").timeline

    def test_bad_profile(self) -> None:
        """Is named."""
        with pytest.raises(TypeError, match="profile must be True or False, got 1"):
            CUDAPrefetcher([], "cpu", profile=1)  # type: ignore[call-overload]

    def test_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run of a month keeps the last ones only."""
        monkeypatch.setattr("prefetch._marked._KEPT", 7)
        prefetcher = CUDAPrefetcher([1] * 20, "cpu", profile=True)
        list(prefetcher)
        assert [times.position for times in prefetcher.timeline.batches] == list(range(13, 20))

    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_no_pass_is_kept(self, sim: Any, device: str, background: bool) -> None:
        """Nor grows anything with the number of passes, whole ones or broken-off ones."""
        prefetcher = CUDAPrefetcher([1, 2], device, background=background)
        for count in (1, 2) * 25:
            list(itertools.islice(prefetcher, count))
            list(prefetcher)
        assert len(prefetcher._meter._passes) <= 2
        assert prefetcher.stats.batches == 75 + 100

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_failures_have_no_times(self, sim: Any, device: str) -> None:
        """What fails on its way is not taken for the batch after it."""

        def picky(batch: torch.Tensor) -> torch.Tensor:
            if batch[0] in (2, 4):
                raise ValueError("not this one")
            return batch

        prefetcher = CUDAPrefetcher(numbered(5), device, transform=picky, profile=True)
        iterator = iter(prefetcher)
        got = []
        for _ in range(7):
            with contextlib.suppress(ValueError, StopIteration):
                got.append(next(iterator)[0].item())
        assert got == [1, 3, 5]
        assert [times.position for times in prefetcher.timeline.batches] == [0, 2, 4]
        assert (prefetcher.stats.batches, prefetcher.stats.timed_batches) == (3, 3)

    def test_chrome_trace(self, clock: Any, tmp_path: Path) -> None:
        """A file in the format that Perfetto and Chrome read: names, lanes, microseconds."""
        prefetcher = run(clock, 1000, 8000, 5000, count=6, profile=True)
        prefetcher.timeline.save_chrome_trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert list(lanes.values()) == ["loader (host)", "copy (side stream)", "consumer's stream"]
        spans = [event for event in events if event["ph"] == "X"]
        assert {(event["cat"], lanes[event["tid"]]) for event in spans} == {
            ("load", "loader (host)"),
            ("copy", "copy (side stream)"),
            ("wait", "consumer's stream"),
            ("compute", "consumer's stream"),
        }
        (third,) = [event for event in spans if event["name"] == "copy 3"]
        assert third["dur"] == pytest.approx(8000)
        assert third["args"] == {"pass": 0, "position": 3}

    def test_plot(self, clock: Any, tmp_path: Path) -> None:
        """A bar for all that took time of the batches asked for, in its lane; a picture in a file."""
        from matplotlib.figure import Figure

        timeline = run(clock, 1000, 8000, 5000, count=9, profile=True).timeline
        axes = Figure().subplots()
        timeline.draw(axes, batches=4)
        widths = sorted(round(bar.get_width(), 3) for container in axes.containers for bar in container)
        assert widths == [1.0] * 4 + [3.0] * 4 + [5.0] * 4 + [8.0] * 4
        assert [label.get_text() for label in axes.get_yticklabels()] == [
            "loader (host)",
            "copy (side stream)",
            "consumer's stream",
        ]
        timeline.plot(tmp_path / "timeline.png")
        assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")

    def test_bad_plots(self) -> None:
        """Nothing to draw, and a number of batches that is none, are named."""
        prefetcher = CUDAPrefetcher([1], "cpu", profile=True)
        with pytest.raises(ValueError, match="no batch to draw yet"):
            prefetcher.timeline.plot("nowhere.png")
        list(prefetcher)
        with pytest.raises(ValueError, match="batches must be an integer from 1 upwards, got 0"):
            prefetcher.timeline.plot("nowhere.png", batches=0)

    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_ranges(self, sim: Any, device: str, background: bool) -> None:
        """In torch's profiler, by stable names; in a thread they are in it if it looks at all threads."""
        prefetcher = CUDAPrefetcher(numbered(3), device, background=background, transform=lambda batch: batch)
        list(prefetcher)  # none is left from it
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
            list(prefetcher)
        counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("prefetch.")}
        expected = {"prefetch.load": 4, "prefetch.copy": 3}  # the loader is asked once more at the end
        assert counts == expected | ({"prefetch.next": 4} if (device, background) != ("cpu", False) else {})
