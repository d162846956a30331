"""The batches are exactly the bare loader's, errors included, whatever the length, the look-ahead and the break."""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from prefetch import CUDAPrefetcher
from tests.helpers import Failing

DEPTHS = [0, 1, 2, 4]


def as_lists(batches: Any) -> list[Any]:
    """Batches of a TensorDataset as nested lists."""
    return [[part.tolist() for part in batch] for batch in batches]


class Shuffled(Sampler[int]):
    """Another order in each epoch; drawn at once, so that a pass that is broken off does not matter for the next."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def loader_of(length: int, **options: Any) -> Any:
    """Shuffled batches of two numbers; without ``drop_last`` the last one is of one number."""
    data = TensorDataset(torch.arange(2 * length - 1 if length else 0))
    return DataLoader(data, batch_size=2, sampler=Shuffled(len(data)), pin_memory=True, **options)


WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("prefetch_batches", DEPTHS)
@pytest.mark.parametrize(
    ("device", "workers"),
    # Not with new workers for each pass on the CPU: it takes long, and the persistent ones show as much there.
    [("cpu", "no workers"), ("cpu", "persistent workers"), *(("sim", workers) for workers in WORKERS)],
)
def test_every_pass(
    sim: Any, device: str, workers: str, prefetch_batches: int, background: bool, drop_last: bool
) -> None:
    """Passes over 0 to 5 batches, three in a row broken off at each position, or run to the end, are the bare ones."""
    for length in (0, 1, 3) if workers == "workers" else range(6):  # two processes are forked for each pass
        wrapped = loader_of(length, drop_last=drop_last, **WORKERS[workers])
        prefetcher = CUDAPrefetcher(wrapped, device, prefetch_batches=prefetch_batches, background=background)
        bare = loader_of(length, drop_last=drop_last)
        for stop in (*range(len(bare) + 1), None):
            for _ in range(3):
                for loader in (bare, wrapped):
                    loader.sampler.epoch += 1
                assert as_lists(itertools.islice(prefetcher, stop)) == as_lists(itertools.islice(bare, stop))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("prefetch_batches", DEPTHS)
@pytest.mark.parametrize("background", [False, True])
def test_none_and_numbers_are_batches(sim: Any, device: str, prefetch_batches: int, background: bool) -> None:
    """Anything that a loader yields is a batch, None too."""
    batches = [None, 0, None, "text", (), None]
    assert list(CUDAPrefetcher(batches, device, prefetch_batches=prefetch_batches, background=background)) == batches


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("background", [False, True])
def test_exhausted_stays_exhausted(sim: Any, device: str, background: bool) -> None:
    """After the end there is nothing more, even if the loader's iterator starts again."""

    class Restarting(Iterator[int]):
        calls = 0

        def __next__(self) -> int:
            self.calls += 1
            if self.calls == 3:
                raise StopIteration
            return self.calls

    iterator = iter(CUDAPrefetcher(Restarting(), device, prefetch_batches=1, background=background))
    assert list(itertools.islice(iterator, 5)) == [1, 2]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("background", [False, True])
def test_close(sim: Any, device: str, background: bool) -> None:
    """A closed iterator is at its end; closing it twice is fine; the prefetcher starts a new pass afterwards."""
    prefetcher = CUDAPrefetcher([1, 2, 3], device, background=background)
    iterator: Any = iter(prefetcher)
    assert next(iterator) == 1
    iterator.close()
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)
    assert list(prefetcher) == [1, 2, 3]


class IteratorWatch:
    """A loader whose iterator can be watched."""

    def __init__(self) -> None:
        self.last: weakref.ref[Any] | None = None

    def __iter__(self) -> Iterator[int]:
        iterator = (i for i in range(5))
        self.last = weakref.ref(iterator)
        return iterator


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("end", ["break", "exhaust", "close"])
@pytest.mark.parametrize("background", [False, True])
def test_loaders_iterator_is_let_go(sim: Any, device: str, end: str, background: bool) -> None:
    """However a pass ends, the loader's iterator goes at once, without the garbage collector."""
    loader = IteratorWatch()
    iterator = iter(CUDAPrefetcher(loader, device, background=background))
    for _ in iterator:
        if end != "exhaust":
            break
    if end == "close":
        iterator.close()
    if end == "break":
        del iterator
    assert loader.last is not None
    assert loader.last() is None


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("background", [False, True])
def test_two_iterators(sim: Any, device: str, background: bool) -> None:
    """Two open passes of one prefetcher are as independent as the loader's."""
    bare, wrapped = loader_of(3), loader_of(3)
    want_first, want_second = as_lists(bare), as_lists(bare)
    prefetcher = CUDAPrefetcher(wrapped, device, prefetch_batches=1, background=background)
    first, second = iter(prefetcher), iter(prefetcher)
    got: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(3):
        got[0].append(next(first))
        got[1].append(next(second))
    assert (as_lists(got[0]), as_lists(got[1])) == (want_first, want_second)


class Augmented(Dataset[torch.Tensor]):
    """Draws from the global generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


@pytest.mark.parametrize(("device", "prefetch_batches"), [("cpu", 0), ("cpu", 2), ("sim", 0)])
def test_random_draws_are_the_bare_loops(sim: Any, device: str, prefetch_batches: int) -> None:
    """On the CPU, and without look-ahead, data set and step draw in the order of the bare loop."""
    loader = DataLoader(Augmented(), batch_size=2, shuffle=True, pin_memory=True)

    def loop(batches: Any) -> list[Any]:
        torch.manual_seed(3)
        return [(batch.tolist(), torch.rand(1).item()) for _ in range(2) for batch in batches]

    assert loop(CUDAPrefetcher(loader, device, prefetch_batches=prefetch_batches)) == loop(loader)


class Counting:
    """Counts the batches that it was asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            self.asked += 1
            yield i


@pytest.mark.parametrize("prefetch_batches", DEPTHS)
def test_look_ahead(sim: Any, prefetch_batches: int) -> None:
    """The loader is asked for the batch in use and prefetch_batches more, and for none before the first next()."""
    loader = Counting(10)
    iterator = iter(CUDAPrefetcher(loader, "sim", prefetch_batches=prefetch_batches))
    assert loader.asked == 0
    for position in range(10):
        assert next(iterator) == position
        assert loader.asked == min(position + 1 + prefetch_batches, 10)


def test_no_look_ahead_on_the_cpu() -> None:
    """On the CPU the loader is asked when the caller asks."""
    loader = Counting(4)
    for position, _ in enumerate(CUDAPrefetcher(loader, "cpu", prefetch_batches=3)):
        assert loader.asked == position + 1


def outcomes(batches: Any, calls: int) -> list[Any]:
    """What each of some calls of next() gives: the value, or the error itself."""
    iterator, results = iter(batches), []
    for _ in range(calls):
        try:
            results.append(next(iterator).tolist())
        except StopIteration:
            results.append("end")
        except Exception as error:  # noqa: BLE001 - the errors are what is compared
            results.append(error)
    return results


class TestErrors:
    """An error comes in its batch's place."""

    @pytest.mark.parametrize("prefetch_batches", DEPTHS)
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
    @pytest.mark.parametrize("background", [False, True])
    def test_of_the_loader(self, sim: Any, device: str, prefetch_batches: int, background: bool) -> None:
        """The loader's errors surface at their positions, and iteration goes on where the loader does."""
        errors: dict[int, BaseException] = {1: ValueError("one"), 3: KeyError("three"), 4: OSError("four")}
        loader = Failing(6, errors)
        prefetcher = CUDAPrefetcher(loader, device, prefetch_batches=prefetch_batches, background=background)
        want = [[0.0], errors[1], [2.0], errors[3], errors[4], [5.0], "end", "end"]
        assert outcomes(loader, 8) == want
        assert outcomes(prefetcher, 8) == want

    @pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
    @pytest.mark.parametrize("background", [False, True])
    def test_loader_is_not_asked_past_an_error(self, sim: Any, background: bool) -> None:
        """Whether to go on after an error is the caller's decision: until it is raised nothing more is fetched."""
        source = iter(Failing(9, {2: ValueError("two")}))
        iterator = iter(CUDAPrefetcher(source, "sim", prefetch_batches=4, background=background))
        assert [next(iterator).item(), next(iterator).item()] == [0.0, 1.0]
        with pytest.raises(ValueError, match="two"):
            next(iterator)
        assert source.position == 2
        assert next(iterator).item() == 3.0

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
    @pytest.mark.parametrize("background", [False, True])
    def test_of_the_transform(self, sim: Any, device: str, background: bool) -> None:
        """A transform's error takes only its own batch's place."""

        def transform(batch: torch.Tensor) -> torch.Tensor:
            if batch.sum().item() == 2:
                raise LookupError("two")
            return batch * 10

        got = outcomes(CUDAPrefetcher(Failing(4, {}), device, transform=transform, background=background), 5)
        assert got[:2] + got[3:] == [[0.0], [10.0], [30.0], "end"]
        assert repr(got[2]) == "LookupError('two')"

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize("background", [False, True])
    def test_traceback_leads_to_the_origin(self, sim: Any, device: str, background: bool) -> None:
        """The traceback ends where the error was raised, though the batch was fetched ahead."""

        class Origin:
            def __iter__(self) -> Iterator[int]:
                yield 0
                yield 1
                raise ZeroDivisionError("in the loader")

        iterator = iter(CUDAPrefetcher(Origin(), device, prefetch_batches=4, background=background))
        assert [next(iterator), next(iterator)] == [0, 1]
        with pytest.raises(ZeroDivisionError, match="in the loader") as info:
            next(iterator)
        last = traceback.extract_tb(info.value.__traceback__)[-1]
        assert last.line == 'raise ZeroDivisionError("in the loader")'
        with pytest.raises(StopIteration):
            next(iterator)

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize("background", [False, True])
    def test_stop_iteration_in_a_transform_is_no_end(self, sim: Any, device: str, background: bool) -> None:
        """A StopIteration that escapes a transform must not look like the end of the data."""

        def transform(batch: int) -> Any:
            return next(iter(())) if batch == 1 else batch

        iterator = iter(CUDAPrefetcher([0, 1, 2], device, transform=transform, background=background))
        assert next(iterator) == 0
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(iterator)
        assert list(iterator) == [2]

    @pytest.mark.parametrize("prefetch_batches", DEPTHS)
    @pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
    def test_interrupt_is_raised_at_once(self, sim: Any, prefetch_batches: int) -> None:
        """Ctrl-C while the loader works does not wait for its turn, and loses no batch that was ready."""
        iterator = iter(CUDAPrefetcher(Failing(5, {2: KeyboardInterrupt()}), "sim", prefetch_batches=prefetch_batches))
        delivered = [next(iterator) for _ in range(max(0, 2 - prefetch_batches))]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        delivered += iterator
        assert [batch.item() for batch in delivered] == [0, 1, 3, 4]

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize("background", [False, True])
    def test_of_starting_a_pass(self, sim: Any, device: str, background: bool) -> None:
        """An error of iter(loader) surfaces where the pass starts."""

        class Unstartable:
            def __iter__(self) -> Iterator[int]:
                raise PermissionError("not today")

        with pytest.raises(PermissionError, match="not today"):
            iter(CUDAPrefetcher(Unstartable(), device, background=background))
