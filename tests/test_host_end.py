"""The way back: its end: close(), and copiers, futures and processes that go."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

from prefetch import HostCopier, HostFuture
from tests.helpers import run_python
from tests.host_helpers import BYTES, SIZE, Holder, host_us, ones, value_of

ACCELERATOR = torch.accelerator


class TestEnd:
    """close(), and copiers, futures and processes that go."""

    def test_close_waits(self, virtual_sim: Any) -> None:
        """After close() all is done and nothing is held; a second one does nothing."""
        virtual_sim.configure(latency_us=1000)
        sources = [ones(float(i)) for i in range(3)]
        ACCELERATOR.synchronize()
        blocks, start = virtual_sim.pinned_blocks(), virtual_sim.host_time_ns()
        with HostCopier("sim") as copier:
            futures = [copier.submit(source) for source in sources]
        assert round(host_us(virtual_sim, start), -2) == 3000
        closed = virtual_sim.host_time_ns()
        assert [future.done() for future in futures] == [True] * 3
        again = [torch.empty(SIZE).pin_memory() for _ in range(3)]
        assert virtual_sim.pinned_blocks() - blocks == len(again)
        copier.close()
        assert [value_of(future.result()) for future in futures] == [0.0, 1.0, 2.0]
        assert virtual_sim.host_time_ns() == closed

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
    def test_futures_are_not_copied(self, sim: Any, copied: Any) -> None:
        """The values of a copy would never arrive."""
        future = HostCopier("sim").submit(ones(1.0))
        with pytest.raises(TypeError, match="a HostFuture cannot be copied or pickled"):
            copied(future)

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize("tree", [None, torch.ones(1)], ids=["nothing", "tensor"])
    def test_submit_after_close(self, sim: Any, device: str, tree: Any) -> None:
        """A closed copier takes nothing, not even what needs no copy."""
        copier = HostCopier(device)
        copier.close()
        for what in (tree, None if tree is None else tree.to(device)):
            with pytest.raises(RuntimeError, match="this HostCopier is closed"):
                copier.submit(what)

    def test_futures_outlive_the_copier(self, sim: Any) -> None:
        """A copier that is let go under a running copy neither waits nor takes the values along."""
        sim.hold_copies("d2h")
        future = HostCopier("sim").submit(ones(3.0))
        later = [ones(9.0) for _ in range(3)]
        assert not future.done()
        sim.release_copies("d2h")
        assert value_of(future.result()) == 3.0
        assert [value_of(tensor.cpu()) for tensor in later] == [9.0] * 3
        assert sim.races() == []

    def test_all_let_go(self, sim: Any) -> None:
        """When nobody waits for a copy, letting go does not either: memory is used again once the copy is done."""
        reserved = ACCELERATOR.memory_reserved()
        sim.hold_copies("d2h")
        HostCopier("sim").submit(ones(3.0))
        later = [ones(9.0) for _ in range(2)]
        assert ACCELERATOR.memory_reserved() - reserved == 3 * BYTES  # one of the two has the source's block
        sim.release_copies("d2h")
        ACCELERATOR.synchronize()
        later.append(ones(9.0))
        assert ACCELERATOR.memory_reserved() - reserved == 3 * BYTES
        assert [value_of(tensor.cpu()) for tensor in later] == [9.0] * 3
        assert sim.races() == []

    def test_submission_within_a_submission(self, sim: Any) -> None:
        """Code that runs while the copier is at work, an object's .to or a finalizer, may use it; nothing is lost."""
        copier = HostCopier("sim", max_pending=2)
        within: list[HostFuture] = []

        class Nested(Holder):
            def to(self, device: Any, non_blocking: bool = False) -> None:
                within.append(copier.submit(self.tensor))
                super().to(device, non_blocking)

        futures = [copier.submit([ones(float(i)), Nested(ones(10.0 + i))]) for i in range(4)]
        copier.close()
        assert [value_of(future.result()[0]) for future in futures] == [0.0, 1.0, 2.0, 3.0]
        assert [value_of(future.result()) for future in within] == [10.0, 11.0, 12.0, 13.0]

    def test_result_asked_while_the_copier_moves_it(self, sim: Any) -> None:
        """A thread that asks for values, and is interrupted by code that submits, does not block the copier."""
        copier = HostCopier("sim", max_pending=1)
        first = copier.submit(ones(1.0))
        ACCELERATOR.synchronize()
        download = first._download
        assert download is not None
        second: list[HostFuture] = []
        thread = threading.Thread(target=lambda: second.append(copier.submit(ones(2.0))))
        with download._lock:  # as result() has while it moves them
            thread.start()
            thread.join(30)  # only a copier that waits for this thread takes so long
            assert not thread.is_alive()
        assert [value_of(future.result()) for future in (first, *second)] == [1.0, 2.0]


FORK = """
import gc, os, torch
from tests import simulator
simulator.load()
simulator.configure(latency_us=200_000)
from prefetch import HostCopier, to_host

copier = HostCopier("sim")
futures = [copier.submit(torch.ones(4, device="sim")), to_host(torch.ones(4, device="sim") * 2)]
child = os.fork()
if child == 0:
    assert to_host([torch.ones(1)]).done()
    submit = lambda: copier.submit([1])
    calls = [submit, lambda: to_host(torch.ones(1, device="sim")), futures[0].done, futures[1].numpy]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    copier.close()
    del copier, futures, calls
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print([future.result().tolist() for future in futures])
"""

EXIT = """
import torch
from tests import simulator
simulator.load()
simulator.configure(latency_us=200_000)
from prefetch import HostCopier, to_host

copier = HostCopier("sim")
futures = [copier.submit(torch.ones(4, device="sim")), to_host(torch.ones(4, device="sim"))]
to_host(torch.ones(4, device="sim"))
cycle = [copier, futures]
cycle.append(cycle)
"""


def test_forked_process_leaves_the_copies_to_its_parent(sim: Any) -> None:
    """It neither waits for them nor hangs: what cannot work there says so. The parent has its values."""
    result = run_python("-W", "ignore", "-c", FORK, timeout=60)
    refused = [
        "this HostCopier is of another process: make one after the fork, or call to_host()",
        "sim: the device cannot be used in a forked child process",
        *["these values are on their way to the process that asked for them: call result() there, before it forks"] * 2,
    ]
    values = "[[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]"
    assert (result.stderr, result.stdout.splitlines(), result.returncode) == ("", [*refused, values], 0)


def test_interpreter_exits_quietly(sim: Any) -> None:
    """With copies under way, and futures that nobody asked."""
    result = run_python("-c", EXIT, timeout=60)
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)
