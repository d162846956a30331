"""CUDA graphs and compiled steps over fixed addresses, and what is refused while a graph is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefetch import CUDAPrefetcher, PrefetchError, to_host
from tests.gpu.helpers import EACH_MEMORY, keep_busy

pytestmark = pytest.mark.gpu

PREFETCH_BATCHES = 1
SLOTS = PREFETCH_BATCHES + 2
ROWS, FEATURES = 64, 256


def small_batches() -> list[torch.Tensor]:
    """Pinned batches of small whole numbers, so that sums are exact; no multiple of the number of slots."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(-4, 5, (ROWS, FEATURES), generator=generator).float().pin_memory() for _ in range(3 * SLOTS + 1)
    ]


class Training:
    """Gradient descent, whose state stays at its addresses."""

    def __init__(self) -> None:
        self.weight = torch.full((FEATURES,), 0.5, device="cuda", requires_grad=True)
        self.losses = torch.zeros((), device="cuda")

    def step(self, batch: torch.Tensor) -> None:
        """Keeps nothing of the batch."""
        loss = (batch * self.weight).sum(dim=1).square().mean()
        (gradient,) = torch.autograd.grad(loss, [self.weight])
        with torch.no_grad():
            self.weight.sub_(gradient, alpha=1e-3)
            self.losses.add_(loss.detach())


def warm_up() -> None:
    """What a step allocates and loads for once must not fall into a capture; see torch's notes on CUDA graphs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        training, batch = Training(), torch.zeros(ROWS, FEATURES, device="cuda")
        for _ in range(3):
            training.step(batch)
    torch.cuda.current_stream().wait_stream(side)


def test_replay() -> None:
    """A training step, captured once for each address, gives what it gives eagerly."""
    batches = small_batches()
    eager = Training()
    for _ in range(2):
        for batch in batches:
            eager.step(batch.to("cuda"))

    warm_up()
    training = Training()
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    loader = CUDAPrefetcher(batches, "cuda", memory="static", background=False, prefetch_batches=PREFETCH_BATCHES)
    for _ in range(2):
        for batch in loader:
            address = batch.data_ptr()
            if address not in graphs:
                graphs[address] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[address], capture_error_mode="thread_local"):
                    training.step(batch)
            keep_busy(2)  # so that a slot which is written to too early shows
            graphs[address].replay()
    assert len(graphs) == SLOTS
    torch.testing.assert_close(training.losses, eager.losses)
    torch.testing.assert_close(training.weight, eager.weight)


@EACH_MEMORY
def test_asked_while_capturing(memory: Any) -> None:
    """Neither the next batch nor a copy to the host is given during a capture, which goes on, as the loop does."""
    batches = small_batches()
    loader = CUDAPrefetcher(batches, "cuda", memory=memory, background=False, prefetch_batches=PREFETCH_BATCHES)
    iterator = iter(loader)
    first = next(iterator)
    result = torch.zeros_like(first)
    torch.mul(first, 1, out=result)  # loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with pytest.raises(PrefetchError, match="while a graph is captured"):
            next(iterator)
        with pytest.raises(PrefetchError, match="captures a graph"):
            to_host(first)
        torch.mul(first, 2, out=result)
    graph.replay()
    assert torch.equal(result.cpu(), 2 * batches[0])
    assert torch.equal(to_host(first).result(), batches[0])
    del first  # or its slot counts as held
    rest = [batch.cpu() for batch in iterator]
    assert len(rest) == len(batches) - 1
    assert all(torch.equal(got, expected) for got, expected in zip(rest, batches[1:], strict=True))


@pytest.mark.filterwarnings("ignore")  # of the compiler's, which differ from version to version
def test_reduce_overhead() -> None:
    """A step compiled with CUDA graphs, told that addresses are static, gives what it gives eagerly."""
    pytest.importorskip("triton")
    import torch._dynamo

    torch.compiler.reset()
    batches = small_batches()
    step = torch.compile(lambda batch: (batch * 2 + 1).sum(dim=1), mode="reduce-overhead")
    loader = CUDAPrefetcher(batches, "cuda", memory="static", background=False, prefetch_batches=PREFETCH_BATCHES)
    out = torch.zeros(2, len(batches), ROWS, device="cuda")
    addresses = set()
    for row in out:
        for position, batch in enumerate(loader):
            addresses.add(batch.data_ptr())
            torch._dynamo.mark_static_address(batch, guard=False)
            torch.compiler.cudagraph_mark_step_begin()
            keep_busy(2)
            row[position].copy_(step(batch))
    torch.compiler.reset()
    expected = torch.stack([(batch * 2 + 1).sum(dim=1) for batch in batches])
    assert torch.equal(out.cpu(), torch.stack([expected, expected]))
    assert len(addresses) == SLOTS
