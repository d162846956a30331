"""The loader's state is that of the batches delivered: what follows a resume is exactly the rest."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from prefetch import CUDAPrefetcher
from prefetch._state import LoaderState

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata with a newer torch
]
FEEDERS = pytest.mark.parametrize(
    ("device", "background"), [("cpu", False), ("cpu", True), ("sim", False), ("sim", True)]
)
LENGTH = 6


class Numbers(Dataset[int]):
    """As many numbers as make ``LENGTH`` batches of two."""

    def __len__(self) -> int:
        return 2 * LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Shard(IterableDataset[int]):
    """The same numbers, in order, shared out to the workers; keeps its own state."""

    def __init__(self) -> None:
        self.position = 0
        self.seen: list[int] = []  # a live object, which a state that is no copy would go on showing

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = list(range(2 * LENGTH))[number::count]
        start, self.position = self.position, 0
        for position in range(start, len(mine)):
            self.position = position + 1
            self.seen.append(mine[position])
            yield mine[position]
        self.position = 0
        self.seen.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.seen = list(state["seen"])


class Counter:
    """A loader with a state of its own and no relation to torch."""

    def __init__(self) -> None:
        self.position = 0
        self.log: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.position = self.position, 0
        for position in range(start, LENGTH):
            self.position = position + 1
            self.log.append(position)
            yield torch.tensor([position])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "log": self.log}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.log = state["log"]


def shuffled(**options: Any) -> Any:
    """A map-style data set in an order that only the state can give back."""
    return stateful.StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, **options)


def sharded(**options: Any) -> Any:
    """An iterable-style data set."""
    return stateful.StatefulDataLoader(Shard(), batch_size=2, **options)


LOADERS: dict[str, Any] = {
    "own": Counter,
    "map": shuffled,
    "map, 2 workers": lambda: shuffled(num_workers=2),
    "map, 2 persistent workers": lambda: shuffled(num_workers=2, persistent_workers=True),
    "iterable": sharded,
    "iterable, 2 workers": lambda: sharded(num_workers=2),
}


def lists(batches: Any) -> list[Any]:
    """Batches as lists."""
    return [batch.tolist() for batch in batches]


class TestResume:
    """From a state taken anywhere, in this pass or in a new prefetcher, exactly the rest comes."""

    @FEEDERS
    @pytest.mark.parametrize(
        ("loader", "prefetch_batches"),
        # Without look-ahead not with workers too: two are forked for each of many passes.
        [(name, depth) for name in LOADERS for depth in ([2] if "workers" in name else [0, 2])],
    )
    def test_after_each_batch(
        self, sim: Any, loader: str, device: str, background: bool, prefetch_batches: int
    ) -> None:
        """Also twice in a row, before the first batch, after the last one, and after the end."""
        make = LOADERS[loader]
        options: dict[str, Any] = {"prefetch_batches": prefetch_batches, "background": background}
        torch.manual_seed(7)
        prefetcher: Any = CUDAPrefetcher(make(), device, **options)
        iterator = iter(prefetcher)
        batches, states = [], [prefetcher.state_dict()]
        for batch in iterator:
            batches.append(batch.tolist())
            states.append(prefetcher.state_dict())
        states.append(prefetcher.state_dict())
        assert len(batches) == LENGTH
        kept = pickle.dumps(states)
        for delivered, state in enumerate(states[:-1]):
            again: Any = CUDAPrefetcher(make(), device, **options)
            again.load_state_dict(state)
            assert lists(again) == batches[delivered:]
            again.load_state_dict(state)
            first = lists(itertools.islice(again, 1))
            if first:
                again.load_state_dict(again.state_dict())
                assert first + lists(again) == batches[delivered:]
        after = CUDAPrefetcher(make(), device, **options)
        after.load_state_dict(states[-1])
        assert len(lists(after)) == LENGTH  # the next epoch
        assert pickle.dumps(states) == kept

    @FEEDERS
    def test_bare_loader_takes_it(self, sim: Any, device: str, background: bool) -> None:
        """The state is the loader's own: it can go on without the prefetcher, and the other way round."""
        torch.manual_seed(8)
        bare = shuffled()
        iterator = iter(bare)
        head = [next(iterator).tolist() for _ in range(2)]
        prefetcher: Any = CUDAPrefetcher(shuffled(), device, background=background)
        prefetcher.load_state_dict(bare.state_dict())
        middle = [next(it).tolist() for it in [iter(prefetcher)] for _ in range(2)]
        end = shuffled()
        end.load_state_dict(prefetcher.state_dict())
        assert sorted(itertools.chain(*head, *middle, *lists(end))) == list(range(2 * LENGTH))
        assert lists(iterator) == middle + lists(resumed(end, prefetcher.state_dict()))


def resumed(loader: Any, state: Any) -> Any:
    """A loader after it took a state."""
    loader.load_state_dict(state)
    return loader


class TestSnapshots:
    """What is handed out, and when."""

    @FEEDERS
    def test_never_changes(self, sim: Any, device: str, background: bool) -> None:
        """Neither the loader's going on nor the caller's writing reaches a state that was handed out."""
        prefetcher: Any = CUDAPrefetcher(Counter(), device, background=background)
        iterator = iter(prefetcher)
        next(iterator)
        first = prefetcher.state_dict()
        assert first == {"position": 1, "log": [0]}
        prefetcher.state_dict()["log"].append("mine")
        next(iterator)
        assert first == {"position": 1, "log": [0]}
        assert prefetcher.state_dict() == {"position": 2, "log": [0, 1]}

    def test_what_is_loaded_is_copied(self) -> None:
        """The caller may go on writing to a state after it was loaded."""
        prefetcher: Any = CUDAPrefetcher(Counter(), "cpu")
        state = {"position": 3, "log": [0, 1, 2]}
        prefetcher.load_state_dict(state)
        state["log"].append("mine")  # type: ignore[attr-defined]
        assert prefetcher.state_dict() == {"position": 3, "log": [0, 1, 2]}
        assert lists(prefetcher) == [[3], [4], [5]]
        assert prefetcher.state_dict()["log"] == [0, 1, 2, 3, 4, 5]

    @FEEDERS
    def test_load_in_the_middle_rules_the_next_pass(self, sim: Any, device: str, background: bool) -> None:
        """The open pass goes on as it was, and does not write over what was loaded."""
        prefetcher: Any = CUDAPrefetcher(Counter(), device, background=background)
        iterator = iter(prefetcher)
        assert next(iterator).tolist() == [0]
        prefetcher.load_state_dict({"position": 3, "log": []})
        assert lists(iterator) == [[1], [2], [3], [4], [5]]
        assert prefetcher.state_dict() == {"position": 3, "log": []}

    @FEEDERS
    def test_newest_pass_counts(self, sim: Any, device: str, background: bool) -> None:
        """With two open passes the state is that of the later one."""
        prefetcher: Any = CUDAPrefetcher(shuffled(), device, background=background)
        first, second = iter(prefetcher), iter(prefetcher)
        begun = next(second).tolist()
        next(first)
        state = prefetcher.state_dict()
        rest = lists(second)
        lists(first)
        assert lists(resumed(shuffled(), state)) == rest
        assert sorted(itertools.chain(begun, *rest)) == list(range(2 * LENGTH))

    @FEEDERS
    def test_with_an_error(self, sim: Any, device: str, background: bool) -> None:
        """An error that was raised counts as delivered, one that waits does not."""

        class Failing(Counter):
            def __iter__(self) -> Any:
                return self

            def __next__(self) -> int:
                self.position += 1
                if self.position == 2:
                    raise ValueError("two")
                if self.position > 4:
                    raise StopIteration
                return self.position

        prefetcher: Any = CUDAPrefetcher(Failing(), device, background=background)
        iterator = iter(prefetcher)
        assert next(iterator) == 1
        assert prefetcher.state_dict()["position"] == 1
        with pytest.raises(ValueError, match="two"):
            next(iterator)
        assert prefetcher.state_dict()["position"] == 2
        assert next(iterator) == 3
        assert prefetcher.state_dict()["position"] == 3

    def test_interrupted_at_the_start(self, sim: Any) -> None:
        """After Ctrl-C in the look-ahead of the first next() nothing counts as delivered."""

        class Interrupted(Counter):
            def __iter__(self) -> Iterator[torch.Tensor]:
                for batch in super().__iter__():
                    yield batch
                    raise KeyboardInterrupt

        prefetcher: Any = CUDAPrefetcher(Interrupted(), "sim")
        with pytest.raises(KeyboardInterrupt):
            next(iter(prefetcher))
        assert prefetcher.state_dict() == {"position": 0, "log": []}

    def test_loader_that_cannot_tell(self, sim: Any) -> None:
        """A state that the loader cannot give disturbs only who asks for it."""

        class Speechless(Counter):
            def state_dict(self) -> Any:
                raise NotImplementedError("no state today")

        prefetcher: Any = CUDAPrefetcher(Speechless(), "sim")
        iterator = iter(prefetcher)
        next(iterator)
        with pytest.raises(NotImplementedError, match="no state today"):
            prefetcher.state_dict()
        assert len(list(iterator)) == LENGTH - 1

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
    def test_of_a_copy(self, sim: Any, duplicate: Any) -> None:
        """A copied or unpickled prefetcher has the state of the original, and then its own."""
        prefetcher: Any = CUDAPrefetcher(Counter(), "sim", prefetch_batches=1)
        next(iter(prefetcher))
        again = duplicate(prefetcher)
        assert again.state_dict()["position"] == 1
        assert lists(again) == [[i] for i in range(1, LENGTH)]
        again.load_state_dict({"position": 4, "log": []})
        assert lists(again) == [[4], [5]]
        assert prefetcher.state_dict()["position"] == 1

    def test_from_another_thread(self, sim: Any) -> None:
        """A checkpointing thread may ask at any moment: what it gets is one of the states that there were."""
        prefetcher: Any = CUDAPrefetcher(Counter(), "sim", background=True)
        seen: list[Any] = []
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.is_set():
                seen.append(prefetcher.state_dict())

        watcher = threading.Thread(target=watch)
        lists(prefetcher)
        watcher.start()
        for _ in range(5):
            lists(prefetcher)
        is_over.set()
        watcher.join()
        assert seen
        assert all(state["log"][-1:] in ([], [(state["position"] or LENGTH) - 1]) for state in seen)


class TestLocks:
    """Who waits for whom."""

    def test_close_while_the_state_is_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pass ends at once though its thread wants what the closing thread holds, as in a finalizer."""
        wants_it = threading.Event()
        real = LoaderState.take

        def take(state: LoaderState, number: int, is_over: Any) -> Any:
            wants_it.set()
            return real(state, number, is_over)

        before = set(threading.enumerate())
        prefetcher: Any = CUDAPrefetcher(Counter(), "cpu", prefetch_batches=1, background=True)
        iterator: Any = iter(prefetcher)
        monkeypatch.setattr(LoaderState, "take", take)
        with prefetcher._state._own_lock():
            consumer = threading.Thread(target=lambda: next(iterator, None))
            consumer.start()
            assert wants_it.wait(60)
            iterator.close()  # would warn, which is an error here
        consumer.join(60)
        assert set(threading.enumerate()) <= before

    def test_a_ready_batch_does_not_wait_for_a_state(self) -> None:
        """It is handed over while the loader is being asked for its state after the next one."""
        may_tell = threading.Event()

        class Slow(Counter):
            def state_dict(self) -> dict[str, Any]:
                if self.position == 2:
                    assert may_tell.wait(60)
                return super().state_dict()

        prefetcher: Any = CUDAPrefetcher(Slow(), "cpu", prefetch_batches=1, background=True)
        iterator = iter(prefetcher)
        assert next(iterator).tolist() == [0]
        assert prefetcher.state_dict()["position"] == 1
        may_tell.set()
        assert next(iterator).tolist() == [1]

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_fork_while_the_state_is_busy(self) -> None:
        """A forked process can ask for the state, and start a pass, though a thread was at it when it was forked."""
        prefetcher: Any = CUDAPrefetcher(Counter(), "cpu", background=True)
        next(iter(prefetcher))
        is_held, may_go = threading.Event(), threading.Event()

        def hold() -> None:
            with prefetcher._state._own_lock():
                is_held.set()
                assert may_go.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert is_held.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends the process if it hangs
            prefetcher.load_state_dict({"position": 4, "log": []})
            os._exit(len(list(prefetcher)))
        may_go.set()
        holder.join(60)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


class TestPresence:
    """The two methods are there where the loader has both, and only there."""

    def test_of_a_loader_without(self) -> None:
        """As in the loader, so in the prefetcher."""
        for loader in (DataLoader(Numbers()), [1, 2]):
            prefetcher = CUDAPrefetcher(loader, "cpu")
            assert not hasattr(prefetcher, "state_dict")
            assert not hasattr(prefetcher, "load_state_dict")
            with pytest.raises(AttributeError, match="'CUDAPrefetcher' object has no attribute 'state_dict'"):
                _ = prefetcher.state_dict

    def test_of_a_subclass(self) -> None:
        """A subclass may have its own, and add to the state."""

        class Own(CUDAPrefetcher[Any]):
            def state_dict(self) -> Any:
                return {"loader": self._state.state_dict(), "mine": 1}

        own: Any = Own(Counter(), "cpu")
        assert own.state_dict() == {"loader": {"position": 0, "log": []}, "mine": 1}
        own.load_state_dict({"position": 5, "log": []})
        assert lists(own) == [[5]]

    def test_of_a_loader_with_one(self) -> None:
        """One of the two alone is none: it could not be resumed, and passed on it would count the look-ahead."""

        class Half(list[int]):
            def state_dict(self) -> dict[str, int]:
                return {}

        assert not hasattr(CUDAPrefetcher(Half([1])), "state_dict")

    def test_not_iterated_for_it(self) -> None:
        """Neither the constructor nor the state starts a pass."""

        class Unstartable(Counter):
            def __iter__(self) -> Iterator[torch.Tensor]:
                raise AssertionError("started")

        prefetcher: Any = CUDAPrefetcher(Unstartable(), "cpu")
        assert prefetcher.state_dict() == {"position": 0, "log": []}
        prefetcher.load_state_dict({"position": 2, "log": []})
        assert prefetcher.state_dict() == {"position": 2, "log": []}

    def test_checkpointing_finds_it(self) -> None:
        """torch.distributed.checkpoint saves what has the two methods, found statically from Python 3.12 on."""
        from torch.distributed.checkpoint.stateful import Stateful

        assert isinstance(CUDAPrefetcher(Counter(), "cpu"), Stateful)
        assert not isinstance(CUDAPrefetcher([1], "cpu"), Stateful)
        assert "state_dict" in vars(CUDAPrefetcher(Counter(), "cpu"))


@FEEDERS
def test_nested_prefetchers(sim: Any, device: str, background: bool) -> None:
    """The state goes through a prefetcher around a prefetcher."""
    inner = CUDAPrefetcher(Counter(), "cpu", background=background)
    prefetcher: Any = CUDAPrefetcher(inner, device, background=background)
    iterator = iter(prefetcher)
    next(iterator)
    assert prefetcher.state_dict()["position"] == 1
