"""The way back: its arguments, and the state of the caller: devices, streams, modes, compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefetch import HostCopier, PrefetchError, to_host
from prefetch._compiler import opaque
from tests.host_helpers import DEVICES, Holder, ones, value_of
from tests.simulator.graphs import capture, numbers

ACCELERATOR = torch.accelerator


class TestArguments:
    """Each error names the argument, the value and the rule."""

    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            (True, TypeError, "max_pending must be an integer, got True"),
            (2.0, TypeError, "max_pending must be an integer, got 2.0"),
            (0, ValueError, "max_pending must be 1 or more, got 0"),
        ],
    )
    def test_max_pending(self, value: Any, error: type[Exception], message: str) -> None:
        """It is a positive integer."""
        with pytest.raises(error, match=message):
            HostCopier("cpu", max_pending=value)

    def test_dtype(self) -> None:
        """It is a floating type."""
        with HostCopier("cpu") as copier:
            calls: list[Any] = [to_host, copier.submit]
            for call in calls:
                with pytest.raises(TypeError, match=r"dtype must be a torch.dtype or None, got 'float32'"):
                    call(None, dtype="float32")
                with pytest.raises(ValueError, match=r"dtype must be a floating-point type, .* got torch.int64"):
                    call(None, dtype=torch.int64)

    def test_device(self, sim: Any) -> None:
        """It is resolved as the prefetcher's."""
        assert HostCopier().device == torch.device("sim", 0)
        assert HostCopier(1).device == HostCopier("sim:1").device == torch.device("sim", 1)
        with pytest.raises(RuntimeError, match="device='cuda' is not available"):
            HostCopier("cuda")

    @pytest.mark.parametrize("wrapped", [False, True], ids=["tensors", "in an object"])
    def test_two_accelerators(self, sim: Any, wrapped: bool) -> None:
        """A tree of two of them is refused, and so is a copier's tree of another one; both are named."""
        first, second = torch.ones(1, device="sim:0"), torch.ones(1, device="sim:1")
        other: Any = Holder(second) if wrapped else second
        with pytest.raises(ValueError, match=r"tensors of one device .* some on sim:0 and some on sim:1: call once"):
            to_host([first, other])
        with pytest.raises(ValueError, match=r"tensors of sim:0, which this HostCopier .* got some on sim:1: make one"):
            HostCopier("sim:0").submit(other)
        with pytest.raises(ValueError, match=r"tensors of cpu, which this HostCopier .* got some on sim:1"):
            HostCopier("cpu").submit(other)

    def test_capture(self, any_sim: Any) -> None:
        """While a graph is captured the call is refused; after a replay it gives what that one has computed."""
        any_sim.configure(latency_us=2000)
        stream = torch.Stream("sim")
        values = numbers(0)

        def work() -> torch.Tensor:
            with pytest.raises(PrefetchError, match="captures a graph: call them after the replay"):
                to_host(values)
            assert to_host(torch.ones(1)).done()
            return values * 2

        graph, doubled = capture(stream, work)
        futures = []
        with stream:
            for i in range(3):
                values.fill_(i)
                graph.replay()
                futures.append(to_host(doubled))
        assert [value_of(future.result()) for future in futures] == [0.0, 2.0, 4.0]
        assert any_sim.races() == []


class TestContexts:
    """The caller's state stays what it was, and does not change what comes out."""

    def test_device_and_stream(self, sim: Any) -> None:
        """Copies from another device than the current one are ordered after that one's current stream."""
        sim.configure(kernel_us=2000)
        stream, before = torch.Stream("sim:1"), ACCELERATOR.current_stream(1)
        ACCELERATOR.set_stream(stream)
        ACCELERATOR.set_device_index(0)
        try:
            source = torch.ones(8, device="sim:1")
            source.add_(2)
            with torch.enable_grad():
                future = to_host(source)
                assert torch.is_grad_enabled()
            assert ACCELERATOR.current_device_index() == 0
            assert ACCELERATOR.current_stream(1).stream_id == stream.stream_id
            assert value_of(future.result()) == 3.0
        finally:
            ACCELERATOR.set_stream(before)
            ACCELERATOR.set_device_index(0)
        assert sim.races() == []

    @DEVICES
    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
    def test_modes(self, sim: Any, device: str, mode: Any) -> None:
        """Under inference mode results are ordinary tensors, which can be trained on afterwards, and the mode stays."""
        with mode():
            future = to_host([torch.ones(3, device=device) * 2], dtype=torch.float64)
            result = future.result()[0]
            assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        (result * weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 3

    def test_default_device(self, sim: Any) -> None:
        """With the accelerator as the default device results are on the host all the same."""
        torch.set_default_device("sim:0")
        try:
            futures = [to_host(torch.full((8,), float(i))) for i in range(8)]
            results = [future.result() for future in futures]
            assert str(torch.ones(1).device) == "sim:0"
        finally:
            torch.set_default_device(None)
        assert [(str(result.device), value_of(result)) for result in results] == [("cpu", float(i)) for i in range(8)]

    def test_device_without_streams(self, sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A device without streams gets plain copies, which the call waits for."""
        monkeypatch.setattr("prefetch._device._WITHOUT_STREAMS", frozenset({"sim"}))
        monkeypatch.setattr("prefetch._host._shared", {})
        sim.configure(latency_us=2000)
        source = ones(3.0)
        future = to_host([source, Holder(source)], dtype=torch.float64)
        assert future.done()
        source.zero_()
        assert [value_of(future.result()[0]), value_of(future.result()[1].tensor)] == [3.0, 3.0]
        streams = {span.stream for span in sim.trace() if span.name == "copy_d2h"}
        assert streams == {ACCELERATOR.current_stream().stream_id}

    @DEVICES
    def test_compiled(self, sim: Any, device: str) -> None:
        """A compiled function may submit and ask; no copy is part of a graph."""
        graphs: list[Any] = []

        def backend(module: Any, inputs: Any) -> Any:
            graphs.append(module)
            return module.forward

        def step(batch: torch.Tensor, copier: HostCopier) -> Any:
            first, second = to_host(batch * 2), copier.submit(batch * 3, dtype=torch.float64)
            return first.result(), second.result(), second.done()

        torch.compiler.reset()
        compiled = torch.compile(step, backend=backend)
        with HostCopier(device) as copier:
            for i in range(3):
                first, second, done = compiled(torch.full((4,), float(i), device=device), copier)
                assert (value_of(first), value_of(second), done) == (2.0 * i, 3.0 * i, True)
        torch.compiler.reset()
        calls = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")}
        assert calls == {"<built-in function mul>"}

    def test_opaque_functions_first_called_by_compiled_code(self) -> None:
        """Several of them, in one compiled function, are each themselves."""

        class Numbers:
            @opaque
            def one(self) -> int:
                return 1

            @opaque
            def two(self) -> int:
                return 2

            @opaque
            def three(self) -> int:
                return 3

        def step(batch: torch.Tensor, numbers: Numbers) -> Any:
            return batch * 2, numbers.one(), numbers.two(), numbers.two(), numbers.three(), numbers.one()

        torch.compiler.reset()
        compiled = torch.compile(step, backend="eager")
        results = [compiled(torch.ones(2), Numbers())[1:] for _ in range(2)]
        torch.compiler.reset()
        assert results == [(1, 2, 2, 3, 1)] * 2
