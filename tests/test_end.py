"""However a pass ends: no hang, no noise, nothing left behind, and an iterator that was overtaken says so."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from prefetch import CUDAPrefetcher, PrefetchError, PrefetchWarning
from tests.helpers import join_feeding_threads, run_python

ACCELERATOR = torch.accelerator
FEEDERS = pytest.mark.parametrize("background", [False, True])

PRELUDE = """
import gc, itertools, os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset
from tests import simulator
simulator.load()
from prefetch import CUDAPrefetcher

class Numbers(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((64,), float(index))

def loader(workers=0, **options):
    return DataLoader(Numbers(), batch_size=2, num_workers=workers, pin_memory=True, **options)

def prefetchers(make=loader, **options):
    for device in ("cpu", "sim"):
        for background in (False, True):
            yield CUDAPrefetcher(make(), device, background=background, **options)
"""

SCENARIOS = {
    "break, with workers": """
for prefetcher in prefetchers(lambda: loader(workers=2)):
    for batch in prefetcher:
        break
    assert not [thread for thread in threading.enumerate() if thread.name == "cuda-prefetcher"]
""",
    "exception in the loop": """
for prefetcher in prefetchers():
    try:
        for batch in prefetcher:
            raise ValueError("in the loop")
    except ValueError:
        pass
    assert len(list(prefetcher)) == 16
""",
    "close and with": """
for prefetcher in prefetchers(lambda: loader(workers=1)):
    with prefetcher as batches:
        first, second = iter(batches), iter(batches)
        next(first), next(second)
    assert list(first) == list(second) == []
    prefetcher.close()
    assert len(list(prefetcher)) == 16
""",
    "collected as garbage": """
class Owner:
    pass

for prefetcher in prefetchers():
    owner = Owner()
    owner.itself, owner.iterator = owner, iter(prefetcher)
    next(owner.iterator)
    del owner, prefetcher
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "cuda-prefetcher"]
""",
    "Ctrl-C in the loader": """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

class Interrupted:
    def __iter__(self):
        yield torch.zeros(2).pin_memory()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        yield torch.zeros(2).pin_memory()

for prefetcher in prefetchers(Interrupted):
    try:
        for batch in prefetcher:
            pass
        time.sleep(60)  # where the signal is delivered if it comes late
    except KeyboardInterrupt:
        print("interrupted")
""",
    "exit in the middle": """
open_passes = [iter(prefetcher) for prefetcher in prefetchers(lambda: loader(workers=1))]
for iterator in open_passes:
    next(iterator)
""",
    "exit in the middle, persistent workers": """
open_passes = [iter(prefetcher) for prefetcher in prefetchers(lambda: loader(workers=1, persistent_workers=True))]
for iterator in open_passes:
    next(iterator)
""",
    "exit in a transform": """
open_passes = [iter(prefetcher) for prefetcher in prefetchers(transform=lambda batch: batch + 1)]
for iterator in open_passes:
    next(iterator)
sys.exit(0)
""",
    "exit in the loop, under a running kernel": """
simulator.configure(latency_us=20_000)
for prefetcher in prefetchers():
    for batch in prefetcher:
        simulator.busy(50_000)
        batch.sum()
        break
sys.exit(0)
""",
    "exit while the loader has something to do at its end": """
def batches():
    try:
        while True:
            yield torch.zeros(2).pin_memory()
    finally:
        print("loader closed")

open_passes = [iter(CUDAPrefetcher(batches(), device, background=True)) for device in ("cpu", "sim")]
for iterator in open_passes:
    next(iterator)
""",
    "stuck loader": """
class Stuck:
    def __iter__(self):
        yield torch.zeros(2).pin_memory()
        threading.Event().wait()

import prefetch._background
prefetch._background._JOIN_S = 0.2
devices = ("cpu", "sim", "cpu")
open_passes = [iter(CUDAPrefetcher(Stuck(), device, background=True, prefetch_batches=1)) for device in devices]
for iterator in open_passes:
    next(iterator)
""",
    "stuck worker": """
class Stuck(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index > 1:
            time.sleep(10_000)
        return torch.zeros(2)

import prefetch._background
prefetch._background._JOIN_S = 0.2
def stuck():
    return DataLoader(Stuck(), batch_size=2, num_workers=1, pin_memory=True)
open_passes = [iter(CUDAPrefetcher(stuck(), device, background=True)) for device in ("cpu", "sim")]
for iterator in open_passes:
    next(iterator)
""",
    "workers forked under running threads": """
for prefetcher in prefetchers(lambda: loader(workers=1)):
    inner = CUDAPrefetcher(loader(workers=2), prefetcher.device, background=True)
    for position, _ in enumerate(itertools.islice(prefetcher, 4)):
        assert len(list(inner)) == 16, position
""",
    "two iterators at once": """
for prefetcher in prefetchers(lambda: loader(workers=1)):
    pairs = [(a[0, 0].item(), b[0, 0].item()) for a, b in zip(prefetcher, prefetcher)]
    assert pairs == [(2.0 * i, 2.0 * i) for i in range(16)], pairs
""",
    "copied and pickled in the middle": """
import copy, pickle
for prefetcher in prefetchers(lambda: loader(workers=1)):
    iterator = iter(prefetcher)
    next(iterator)
    for again in (copy.deepcopy(prefetcher), pickle.loads(pickle.dumps(prefetcher)), copy.copy(prefetcher)):
        assert len(list(again)) == 16
    assert len(list(iterator)) == 15
""",
}
OUTPUT = {
    "Ctrl-C in the loader": 4 * "interrupted\n",
    "exit while the loader has something to do at its end": 2 * "loader closed\n",
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_hang_and_no_noise(sim: Any, scenario: str) -> None:
    """On both devices, inline and in the background, a program comes to its end, silently."""
    result = run_python("-c", PRELUDE + SCENARIOS[scenario], timeout=120)
    assert (result.stderr, result.returncode) == ("", 0)
    assert result.stdout == OUTPUT.get(scenario, "")


class OneIterator:
    """Like a DataLoader with persistent workers: each pass resets the same iterator."""

    def __init__(self, *, says_so: bool) -> None:
        self.iterator = Resettable()
        self.persistent_workers = says_so
        self.num_workers = int(says_so)

    def __iter__(self) -> Resettable:
        self.iterator.position = 0
        return self.iterator


class Resettable(Iterator[int]):
    """Counts to ten."""

    position = 0
    in_next: threading.Event | None = None
    may_go_on: threading.Event

    def __next__(self) -> int:
        if self.in_next is not None:
            self.in_next.set()
            self.may_go_on.wait(60)
        self.position += 1
        if self.position > 10:
            raise StopIteration
        return self.position


class TestOvertaken:
    """A loader that has one iterator gives it to the newest pass; the older one does not mix batches, it says so."""

    @FEEDERS
    @pytest.mark.parametrize("says_so", [False, True])
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_says_so(self, sim: Any, device: str, background: bool, says_so: bool) -> None:
        """Again and again; the newer pass has all batches, and the next one too."""
        prefetcher = CUDAPrefetcher(OneIterator(says_so=says_so), device, prefetch_batches=1, background=background)
        older = iter(prefetcher)
        assert next(older) == 1
        newer = iter(prefetcher)
        assert next(newer) == 1
        for _ in range(2):
            with pytest.raises(PrefetchError, match="a later pass has taken over"):
                next(older)
        assert list(newer) == list(range(2, 11))
        assert list(prefetcher) == list(range(1, 11))
        with pytest.raises(PrefetchError, match="a later pass has taken over"):
            next(older)

    @FEEDERS
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_persistent_workers(self, sim: Any, device: str, background: bool) -> None:
        """The case in which it happens."""
        data = TensorDataset(torch.arange(12))
        loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True, pin_memory=True)
        prefetcher = CUDAPrefetcher(loader, device, background=background)
        older = iter(prefetcher)
        assert next(older)[0].tolist() == [0, 1]
        newer = iter(prefetcher)
        with pytest.raises(PrefetchError, match="persistent_workers=True"):
            next(older)
        assert [batch[0].tolist() for batch in newer] == [[2 * i, 2 * i + 1] for i in range(6)]

    @FEEDERS
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize("end", ["exhaust", "close"])
    def test_over_is_over(self, sim: Any, device: str, background: bool, end: str) -> None:
        """A pass that has ended before keeps ending."""
        prefetcher = CUDAPrefetcher(OneIterator(says_so=True), device, background=background)
        older: Any = iter(prefetcher)
        next(older)
        if end == "exhaust":
            list(older)
        else:
            older.close()
        iter(prefetcher)
        assert list(older) == []

    @FEEDERS
    def test_by_another_prefetcher(self, sim: Any, background: bool) -> None:
        """Also when the loader is wrapped anew for each epoch, and the older wrapper is still at work."""
        data = TensorDataset(torch.arange(12))
        loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True, pin_memory=True)
        for _ in range(4):
            older = iter(CUDAPrefetcher(loader, "sim", background=background))
            assert next(older)[0].tolist() == [0, 1]
            newer = CUDAPrefetcher(loader, "sim", background=background)
            assert [batch[0].tolist() for batch in newer] == [[2 * i, 2 * i + 1] for i in range(6)]
            with pytest.raises(PrefetchError, match="a later pass has taken over"):
                next(older)

    @pytest.mark.parametrize("end", ["close", "break"])
    def test_after_a_pass_that_was_left_behind(self, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
        """A new pass waits for the loader to return to a pass that has ended without it."""
        monkeypatch.setattr("prefetch._background._JOIN_S", 0.01)
        loader = OneIterator(says_so=True)
        prefetcher = CUDAPrefetcher(loader, "cpu", background=True, prefetch_batches=1)
        iterator: Any = iter(prefetcher)
        assert next(iterator) == 1
        loader.iterator.may_go_on, loader.iterator.in_next = threading.Event(), threading.Event()
        next(iterator)
        assert loader.iterator.in_next.wait(60)
        if end == "close":
            with pytest.warns(PrefetchWarning, match="still at work"):
                iterator.close()
        del iterator
        results: list[list[int]] = []
        consumer = threading.Thread(target=lambda: results.append(list(prefetcher)))
        consumer.start()
        loader.iterator.may_go_on.set()
        consumer.join(60)
        assert results == [list(range(1, 11))]

    @FEEDERS
    def test_by_another_prefetcher_unannounced(self, sim: Any, background: bool) -> None:
        """Also if the loader does not say that it has only one iterator."""
        loader = OneIterator(says_so=False)
        older = iter(CUDAPrefetcher(loader, "sim", prefetch_batches=1, background=background))
        assert next(older) == 1
        assert list(CUDAPrefetcher(loader, "sim", background=background)) == list(range(1, 11))
        with pytest.raises(PrefetchError, match="a later pass has taken over"):
            next(older)

    @FEEDERS
    def test_all_loaded_before(self, sim: Any, background: bool) -> None:
        """A pass whose batches have all been loaded keeps them."""
        loader: Any = OneIterator(says_so=True)
        prefetcher = CUDAPrefetcher(loader, "sim", prefetch_batches=12, background=background)
        older = iter(prefetcher)
        assert next(older) == 1
        join_feeding_threads()
        assert next(iter(prefetcher)) == 1
        assert list(older) == list(range(2, 11))

    def test_iterator_that_is_still_being_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A loader that hands out such an iterator, without having said so, starts no pass with it."""
        monkeypatch.setattr("prefetch._background._JOIN_S", 0.01)
        loader = OneIterator(says_so=False)
        loader.iterator.may_go_on = threading.Event()
        prefetcher = CUDAPrefetcher(loader, "cpu", background=True, prefetch_batches=1)
        older = iter(prefetcher)
        assert next(older) == 1
        loader.iterator.in_next = threading.Event()
        next(older)
        assert loader.iterator.in_next.wait(60)
        del older
        with pytest.raises(PrefetchError, match="an earlier pass is still waiting for"):
            iter(prefetcher)
        loader.iterator.may_go_on.set()
        join_feeding_threads()
        assert list(prefetcher) == list(range(1, 11))

    def test_independent_passes_stay_so(self, sim: Any) -> None:
        """A loader that makes an iterator for each pass has independent ones."""
        prefetcher = CUDAPrefetcher(DataLoader(TensorDataset(torch.arange(4)), pin_memory=True), "sim", background=True)
        older, newer = iter(prefetcher), iter(prefetcher)
        assert [next(newer)[0].item(), next(older)[0].item(), next(older)[0].item()] == [0, 0, 1]

    def expect_overtaken(self, iterator: Iterator[int]) -> None:
        """For the thread that waits in the older pass."""
        with pytest.raises(PrefetchError, match="a later pass has taken over"):
            next(iterator)

    def test_stuck_in_the_older_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A loader whose only iterator is being asked, and does not return, cannot start another pass."""
        monkeypatch.setattr("prefetch._background._JOIN_S", 0.01)
        monkeypatch.setattr("prefetch._background._TAKE_OVER_S", 0.01)
        loader = OneIterator(says_so=True)
        loader.iterator.in_next = threading.Event()
        loader.iterator.may_go_on = threading.Event()
        prefetcher = CUDAPrefetcher(loader, "cpu", background=True, prefetch_batches=1)
        older = iter(prefetcher)
        consumer = threading.Thread(target=self.expect_overtaken, args=(older,))
        consumer.start()
        assert loader.iterator.in_next.wait(60)
        with pytest.raises(PrefetchError, match="it has not returned"):
            iter(prefetcher)
        loader.iterator.may_go_on.set()
        consumer.join(60)
        join_feeding_threads()
        assert list(prefetcher) == list(range(1, 11))


def test_close_with_warnings_as_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes are ended, though the warning about the first is an error."""
    monkeypatch.setattr("prefetch._background._JOIN_S", 0.01)
    may_go_on, asked = threading.Event(), [threading.Event(), threading.Event()]

    class Stuck:
        passes = 0

        def __iter__(self) -> Iterator[int]:
            number = self.passes
            self.passes += 1
            return self.batches(asked[number])

        def batches(self, is_asked: threading.Event) -> Iterator[int]:
            yield 1
            is_asked.set()
            assert may_go_on.wait(60)

    prefetcher = CUDAPrefetcher(Stuck(), "cpu", background=True, prefetch_batches=1)
    passes = [iter(prefetcher), iter(prefetcher)]
    for iterator, event in zip(passes, asked, strict=True):
        assert next(iterator) == 1
        assert event.wait(60)
    with pytest.raises(PrefetchWarning, match="still at work"):
        prefetcher.close()
    assert [list(iterator) for iterator in passes] == [[], []]
    may_go_on.set()
    join_feeding_threads()


def resources(sim: Any) -> dict[str, int]:
    """What a process can run out of."""
    gc.collect()
    ACCELERATOR.synchronize()
    return {
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0,
        "pinned blocks": sim.pinned_blocks(),
        "reserved bytes": ACCELERATOR.memory_reserved(),
        "allocated bytes": ACCELERATOR.memory_allocated(),
        "objects": sum(str(type(obj).__module__).startswith("prefetch") for obj in gc.get_objects()),
    }


@FEEDERS
def test_thousand_passes(virtual_sim: Any, background: bool) -> None:
    """Broken off at random, over pinned and pageable leaves, they take no more than the first ten; no new stream."""
    chance = random.Random(1)
    batches = [(torch.ones(1 << 12).pin_memory(), torch.ones(100).pin_memory()[::2]) for _ in range(6)]
    prefetcher = CUDAPrefetcher(batches, "sim", background=background)
    virtual_sim.configure(latency_us=100, trace=1)

    def one_pass(stop: int) -> None:
        for position, (batch, _) in enumerate(prefetcher):
            batch.mul_(2)
            if position == stop:
                break

    def after() -> dict[str, int]:
        ACCELERATOR.synchronize()
        assert prefetcher.stats.batches > 0  # which takes the times that were not there before
        return resources(virtual_sim)

    for stop in range(10):
        one_pass(stop)
    after_ten = after()
    for _ in range(990):
        one_pass(chance.randrange(8))
    after_all = after()
    if background:  # how many a thread had in flight when its pass was broken off depends on the moment
        assert after_all.pop("pinned blocks") <= after_ten.pop("pinned blocks") + 2 + 3
        assert after_all.pop("reserved bytes") <= max(after_ten.pop("reserved bytes"), 1 << 21)
    assert after_all == after_ten
    assert len({span.stream for span in virtual_sim.trace() if span.name == "copy_h2d"}) == 1


@FEEDERS
def test_no_process_is_left(sim: Any, background: bool) -> None:
    """Neither of a pass that is broken off nor of one that is not."""
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=2, pin_memory=True)
    prefetcher = CUDAPrefetcher(loader, "sim", background=background)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    list(prefetcher)
    before = children.read_text().split() if children.exists() else []
    for stop in (1, 2, 4, 9):
        for position, _ in enumerate(prefetcher):
            if position == stop:
                break
        assert (children.read_text().split() if children.exists() else []) == before
