"""A training step captured as a CUDA graph, and replayed over prefetched batches.

    pip install -e .               # once, in a clone of the project
    python examples/cuda_graph.py  # prints what each way makes of the same training, and its speed-up

A graph reads its inputs at the addresses that it was captured with. ``memory="static"`` brings batches to a few fixed
addresses, so that the step can be captured once for each of these. Or it is captured once, with an input of its own,
into which each batch is copied: any ``memory=`` will do, for one copy within the device a step. ``torch.compile`` makes
the graphs by itself, and needs to be told that the addresses stay.

Without a GPU there is nothing to capture: the step runs eagerly.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from prefetch import CUDAPrefetcher

WARM_UP_STEPS = 3  # run eagerly before a capture, for what a step allocates and loads only once
COMPARED = 50  # losses of two ways, at the beginning, before differences in rounding have grown
TOLERANCE = 1e-3  # between them, relatively
CLASSES = 10

Step = Callable[[torch.Tensor, torch.Tensor], None]


class Training:
    """A network of many small layers, whose kernels take the host longer to launch than the device to run.

    Args:
        features: Numbers in a sample.
        depth: Layers.
        device: Where it is trained.
    """

    def __init__(self, features: int, depth: int, device: torch.device) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(features, features), nn.LayerNorm(features), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(features, CLASSES)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loss = torch.zeros((), device=device)  # of the last step, always at this address
        self.device = device

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch of shape (samples, features)."""
        return cross_entropy(self.model(inputs), labels)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Learn from a batch. Nothing of it is kept, or its slot would count as held."""
        self.learn(self.forward(inputs, labels))

    def learn(self, loss: torch.Tensor) -> None:
        """The backward pass, and the update of the weights."""
        self.optimizer.zero_grad(set_to_none=True)  # in a capture, gradients get memory of the graph's own
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def warm_up(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """An ordinary step, on a stream that is not the default one, as a capture will be."""
        caller = torch.accelerator.current_stream(self.device)
        with torch.Stream(self.device) as side:
            side.wait_stream(caller)
            self.step(inputs, labels)
        caller.wait_stream(side)


def captured(work: Callable[[], None], device: torch.device, other: Any = None) -> Any:
    """A graph of what ``work`` does; nothing of it runs yet. Shares the memory of an ``other`` graph, if given.

    Only this thread's calls are checked ("thread_local"): the prefetcher's, and the DataLoader's that pins memory, go
    on meanwhile.
    """
    pool = None if other is None else other.pool()
    graph: Any
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
    else:
        graph = torch.accelerator.Graph(pool=pool, capture_error_mode="thread_local")
        with torch.Stream(device), graph:
            work()
    return graph


class GraphForEachSlot:
    """Captures the step for each new address and shape; a short last batch gets a graph of its own.

    The graphs run one after the other, and none reads what another has left in its memory: so they can share it.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.warm_up_steps = WARM_UP_STEPS
        self.graphs: dict[Any, Any] = {}

    def __call__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """One step."""
        if self.warm_up_steps:
            self.warm_up_steps -= 1
            self.training.warm_up(inputs, labels)
            return
        key = inputs.data_ptr(), inputs.shape
        if key not in self.graphs:
            other = next(iter(self.graphs.values()), None)
            self.graphs[key] = captured(lambda: self.training.step(inputs, labels), self.training.device, other)
        self.graphs[key].replay()


class GraphWithInput:
    """Captures the step once, with inputs of its own, and copies each batch there."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.warm_up_steps = WARM_UP_STEPS
        self.inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self.graph: Any = None

    def __call__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """One step."""
        if self.warm_up_steps:
            self.warm_up_steps -= 1
            self.training.warm_up(inputs, labels)
            return
        if self.inputs is None:
            own = self.inputs = torch.empty_like(inputs), torch.empty_like(labels)
            self.graph = captured(lambda: self.training.step(*own), self.training.device)
        if inputs.shape != self.inputs[0].shape:  # a short last batch
            self.training.step(inputs, labels)
            return
        self.inputs[0].copy_(inputs)
        self.inputs[1].copy_(labels)
        self.graph.replay()


class Compiled:
    """``torch.compile(mode="reduce-overhead")`` captures forward and backward pass, once for each slot."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.forward = torch.compile(training.forward, mode="reduce-overhead")

    def __call__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """One step."""
        for tensor in (inputs, labels):  # or the graph would get inputs of its own, and a copy
            torch._dynamo.mark_static_address(tensor, guard=False)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self.training.learn(self.forward(inputs, labels))


def train(
    step: Step, training: Training, loader: DataLoader[Any], steps: int, memory: Any
) -> tuple[torch.Tensor, float]:
    """The losses of two passes of so many steps, and how many steps a second the second took."""
    losses: list[torch.Tensor] = []
    prefetcher = CUDAPrefetcher(loader, training.device, memory=memory)
    seconds = 0.0
    for _ in range(2):
        synchronize(training.device)
        start = time.perf_counter()
        for inputs, labels in prefetcher:
            step(inputs, labels)
            losses.append(training.loss.clone())
        del inputs, labels  # a batch that is still named keeps its slot
        synchronize(training.device)
        seconds = time.perf_counter() - start
    return torch.stack(losses).cpu(), steps / seconds


def synchronize(device: torch.device) -> None:
    """Wait for all that was queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def make_loader(features: int, batch_size: int, steps: int) -> DataLoader[Any]:
    """Random batches, the same for all; ready-made, since what is measured here is the step."""
    generator = torch.Generator().manual_seed(0)
    count = steps * batch_size
    labels = torch.randint(CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, features, generator=generator) + labels[:, None] / CLASSES
    sampler = BatchSampler(RandomSampler(range(count), generator=generator), batch_size, drop_last=False)
    # A batch is one sample here: the data set is indexed once, with a list.
    return DataLoader(
        TensorDataset(inputs, labels), batch_size=None, sampler=sampler, pin_memory=torch.accelerator.is_available()
    )


def main(arguments: list[str] | None = None) -> int:
    """Train in each way, and print how fast it was."""
    parser = argparse.ArgumentParser(description="A training step as a CUDA graph over prefetched batches.")
    parser.add_argument("--steps", type=int, default=300, help="steps in a pass; there are two (default: 300)")
    parser.add_argument("--batch-size", type=int, default=256, help="samples in a batch (default: 256)")
    parser.add_argument("--features", type=int, default=256, help="numbers in a sample (default: 256)")
    parser.add_argument("--depth", type=int, default=12, help="layers of the network (default: 12)")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "features", "depth"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be 1 or more, got {getattr(options, name)}")

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    ways: dict[str, tuple[Callable[[Training], Step], str]] = {
        "eager": (lambda training: training.step, "record_stream"),
    }
    if hasattr(torch.get_device_module(device), "is_current_stream_capturing"):
        ways["a graph for each slot"] = GraphForEachSlot, "static"
        ways["one graph, and a copy into its input"] = GraphWithInput, "record_stream"
        if device.type == "cuda" and importlib.util.find_spec("triton"):
            ways["torch.compile, reduce-overhead"] = Compiled, "static"
    else:
        print(f"no device here that captures graphs ({device.type}): the step runs eagerly, and there is no speed-up")

    speeds: dict[str, float] = {}
    expected = None
    for name, (make, memory) in ways.items():
        training = Training(options.features, options.depth, device)
        loader = make_loader(options.features, options.batch_size, options.steps)
        losses, speeds[name] = train(make(training), training, loader, options.steps, memory)
        expected = losses if expected is None else expected
        if not torch.allclose(losses[:COMPARED], expected[:COMPARED], rtol=TOLERANCE):
            print(f"{name}: the losses are not those of the eager loop", file=sys.stderr)
            return 1
        print(
            f"{name:40} memory={memory!r:16} {speeds[name]:8.1f} steps/s, {speeds[name] / speeds['eager']:.2f} times "
            f"the eager loop; last loss {losses[-1].item():.4f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
