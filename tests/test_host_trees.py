"""The way back: what becomes of what a tree may hold."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from prefetch import HostCopier, PrefetchError, register_batch_type, to_host
from tests.host_helpers import DEVICES, Holder, host_us, ones, value_of

ACCELERATOR = torch.accelerator


@dataclass(frozen=True)
class Scores:
    """A container that can only be made anew."""

    logits: torch.Tensor
    name: str


class Pair(NamedTuple):
    """A named tuple."""

    left: torch.Tensor
    right: Any


class Unknown:
    """A class that the library must be taught."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Subclass(torch.Tensor):
    """A subclass that changes nothing."""


class TestTrees:
    """Containers, and what they may hold."""

    @DEVICES
    def test_nesting(self, sim: Any, device: str) -> None:
        """Containers keep their types, at any depth, and what is no tensor is passed on; the source is not changed."""
        tensor = torch.arange(3.0, device=device)
        other = object()
        tree: Any = {
            "a": [Scores(tensor, "n")],
            "b": Pair(tensor + 1, (None, "text", 3, other)),
            ("c", 1): [tensor + 2],
        }
        result = to_host(tree).result()
        assert isinstance(result["a"][0], Scores)
        assert (result["a"][0].logits.tolist(), result["a"][0].name) == ([0.0, 1.0, 2.0], "n")
        assert isinstance(result["b"], Pair)
        assert (result["b"].left.tolist(), result["b"].right) == ([1.0, 2.0, 3.0], (None, "text", 3, other))
        assert result[("c", 1)][0].tolist() == [2.0, 3.0, 4.0]
        assert {str(leaf.device) for leaf in (result["a"][0].logits, result["b"].left)} == {"cpu"}
        assert tree["a"][0].logits is tensor

    def test_aliases(self, sim: Any) -> None:
        """Two references to one object stay references to one, as tensors, as arrays, and in objects."""
        tensor, holder = ones(3.0), Holder(ones(4.0))
        future = to_host({"a": tensor, "b": [tensor, tensor.view(-1)], "c": holder, "d": holder})
        result, arrays = future.result(), future.numpy()
        assert result["a"] is result["b"][0]
        assert result["a"] is not result["b"][1]
        assert arrays["a"] is arrays["b"][0]
        assert result["c"] is result["d"]

    def test_packed_sequence(self, sim: Any) -> None:
        """A packed sequence comes back as one."""
        packed: Any = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
        result = to_host(packed.to("sim")).result()
        assert isinstance(result, PackedSequence)
        assert torch.equal(result.data, packed.data)
        assert torch.equal(result.batch_sizes, packed.batch_sizes)

    def test_state_dict(self, sim: Any) -> None:
        """A state dict keeps its type, its order and its versions."""
        model = torch.nn.BatchNorm1d(2).to("sim")
        state = model.state_dict()
        result = to_host(state).result()
        assert (type(result), list(result)) == (type(state), list(state))
        assert result._metadata == state._metadata  # type: ignore[attr-defined]
        assert {str(value.device) for value in result.values()} == {"cpu"}
        torch.nn.BatchNorm1d(2).load_state_dict(result)

    def test_registered_class(self, sim: Any) -> None:
        """A class that the library was taught comes back as one."""
        register_batch_type(Unknown, lambda x: {"tensor": x.tensor}, lambda x, parts: Unknown(parts["tensor"]))
        result = to_host(Unknown(ones(3.0))).result()
        assert isinstance(result, Unknown)
        assert value_of(result.tensor) == 3.0

    def test_object_with_own_to(self, any_sim: Any) -> None:
        """Its own .to copies it, and what the caller does to the object later does not reach the values."""
        any_sim.configure(latency_us=3000)
        holder = Holder(ones(3.0))
        future = to_host({"holder": holder, "tensor": ones(4.0)})
        holder.tensor.zero_()
        holder.tensor = ones(9.0)
        del holder
        later = [ones(9.0) for _ in range(3)]
        result = future.result()
        assert value_of(result["holder"].tensor) == 3.0
        assert value_of(result["tensor"]) == 4.0
        assert any_sim.races() == []
        del later

    def test_object_that_fails(self, any_sim: Any) -> None:
        """An error in an object's .to surfaces as it is; what was copied until then is let go when that is safe."""
        any_sim.configure(latency_us=3000)

        class Fails(Holder):
            def to(self, device: Any, non_blocking: bool = False) -> None:
                super().to(device, non_blocking)
                raise ValueError("no good")

        with HostCopier("sim", max_pending=1) as copier:
            with contextlib.suppress(ValueError):
                copier.submit([ones(1.0), Fails(ones(2.0))])
            later = [ones(9.0) for _ in range(3)]
            assert value_of(copier.submit(ones(3.0)).result()) == 3.0
        assert len(later) == 3
        assert any_sim.races() == []

    def test_container_in_itself(self, sim: Any) -> None:
        """A tree without an end is an error that says so."""
        tree: list[Any] = [ones(1.0)]
        tree.append(tree)
        with pytest.raises(PrefetchError, match="holds itself"):
            to_host(tree)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.tensor(3.5),
            lambda: torch.ones(0, 3),
            lambda: torch.tensor([True, False]),
            lambda: torch.tensor([1, 65535], dtype=torch.uint16),
            lambda: torch.ones(3, dtype=torch.bfloat16),
            lambda: torch.ones(3).to(torch.float8_e4m3fn),
            lambda: torch.tensor([1 + 2j, 3 - 1j]),
        ],
        ids=["0-dim", "empty", "bool", "uint16", "bfloat16", "float8", "complex"],
    )
    def test_kinds(self, sim: Any, make: Any) -> None:
        """Every type and shape arrives as it was."""
        expected = make()
        result = to_host(expected.to("sim")).result()
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert result.flatten().view(torch.uint8).tolist() == expected.flatten().view(torch.uint8).tolist()

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.t(),
            lambda x: x[:, ::2],
            lambda x: x[1:, 0].expand(5, 3),
            lambda x: x.conj(),
            lambda x: x.imag,
            lambda x: x.conj().imag,
            lambda x: torch.ones(2, 3, 4, 5, device=x.device).to(memory_format=torch.channels_last),
        ],
        ids=["transposed", "columns", "expanded", "conj", "imag", "neg", "channels_last"],
    )
    def test_views(self, virtual_sim: Any, view: Any) -> None:
        """Views of any kind arrive dense and without lazy bits, in one copy that the host does not wait for."""
        whole = torch.complex(torch.arange(16.0).view(4, 4), torch.ones(4, 4))
        expected = view(whole)
        source = view(whole.to("sim"))
        ACCELERATOR.synchronize()
        virtual_sim.configure(latency_us=1000)
        start = virtual_sim.host_time_ns()
        future = to_host(source)
        assert host_us(virtual_sim, start) == 0
        result = future.result()
        assert host_us(virtual_sim, start) == 1000
        assert torch.equal(result, expected.resolve_conj().resolve_neg())
        assert not result.is_conj()
        assert not result.is_neg()
        assert result.untyped_storage().nbytes() == result.nbytes
        if expected.dim() == 4:
            assert result.is_contiguous(memory_format=torch.channels_last)

    def test_requires_grad(self, any_sim: Any) -> None:
        """Results have no graph, wherever the leaf was; the leaf keeps its own."""
        weight = torch.ones(3, device="sim", requires_grad=True)
        on_host = torch.ones(3, requires_grad=True)
        future = to_host([weight, weight * 2, on_host, torch.nn.Parameter(torch.ones(2, device="sim"))])
        assert [leaf.requires_grad for leaf in future.result()] == [False] * 4
        assert [type(leaf) for leaf in future.result()] == [torch.Tensor] * 4
        assert [array.tolist() for array in future.numpy()] == [[1.0] * 3, [2.0] * 3, [1.0] * 3, [1.0] * 2]
        assert weight.requires_grad
        assert on_host.requires_grad

    @pytest.mark.parametrize("layout", ["sparse", "csr", "jagged", "subclass"])
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
    def test_other_layouts(self, any_sim: Any, layout: str) -> None:
        """Sparse and nested tensors and subclasses arrive as what they are, with the values at the call."""
        any_sim.configure(latency_us=2000)
        if layout == "subclass":
            host: torch.Tensor = torch.eye(3).as_subclass(Subclass)
        elif layout == "jagged":
            host = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        else:
            host = torch.eye(3).to_sparse() if layout == "sparse" else torch.eye(3).to_sparse_csr()
        source = host.to("sim")
        future = to_host(source)
        (source.detach() if layout == "subclass" else source.values()).zero_()
        del source
        later = [torch.full((3,), 9.0, device="sim") for _ in range(8)]
        result = future.result()
        assert any_sim.races() == []  # first: with wrong indices torch reads what is not there
        assert (type(result), result.layout, str(result.device)) == (type(host), host.layout, "cpu")
        if layout == "jagged":
            assert [part.tolist() for part in result.unbind()] == [[1.0] * 2, [1.0] * 3]
        else:
            assert torch.equal(result.to_dense(), torch.eye(3))
        assert len(later) == 8

    def test_host_tensors(self, sim: Any) -> None:
        """Tensors that are on the host already are passed on as they are, and wait for nothing."""
        tensor = torch.ones(3)
        tree = {"a": tensor, "b": [tensor]}
        assert to_host(tree).result() is tree
        sim.hold_copies("d2h")
        future = HostCopier("sim").submit(tree)
        assert future.done()
        assert future.result() is tree
        mixed = to_host({"a": tensor, "b": ones(3.0)})
        sim.release_copies("d2h")
        assert mixed.result()["a"] is tensor

    def test_on_the_cpu(self) -> None:
        """On the CPU all of it works, at once, and nothing is copied."""
        tensor = torch.ones(3)
        with HostCopier("cpu", max_pending=1) as copier:
            futures = [copier.submit([tensor, i]) for i in range(5)]
        assert copier.device == torch.device("cpu")
        assert all(future.done() for future in futures)
        assert all(future.result()[0] is tensor for future in futures)
        assert np.shares_memory(futures[0].numpy()[0], tensor.numpy())
        holder = Holder(torch.ones(2))
        assert to_host(holder).result().tensor.tolist() == [1.0, 1.0]


class TestDtype:
    """Floating leaves are cast, on the device."""

    @DEVICES
    def test_floating_leaves_only(self, sim: Any, device: str) -> None:
        """Integers, booleans and complex numbers stay what they are."""
        leaves = [
            torch.ones(2, dtype=dtype, device=device)
            for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
        ]
        result = to_host(leaves, dtype=torch.float32).result()
        assert [leaf.dtype for leaf in result] == [*[torch.float32] * 2, torch.int64, torch.bool, torch.complex64]
        assert [leaf.sum().item() for leaf in result] == [2] * 5

    @pytest.mark.parametrize(("dtype", "us"), [(None, 4000), (torch.float16, 2000), (torch.float64, 4000)])
    def test_what_crosses_the_bus(self, virtual_sim: Any, dtype: Any, us: int) -> None:
        """The narrower type, whether it is the source's or the one that was asked for."""
        source = torch.ones(1_000_000, device="sim")
        ACCELERATOR.synchronize()
        virtual_sim.configure(latency_us=0, d2h_mb_s=1000)
        start = virtual_sim.host_time_ns()
        with HostCopier("sim") as copier:
            result = copier.submit(source, dtype=dtype).result()
        assert host_us(virtual_sim, start) == us
        assert result.dtype == (dtype or torch.float32)
        assert value_of(result) == 1.0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    @DEVICES
    def test_numpy_lacks_it(self, sim: Any, device: str, dtype: torch.dtype) -> None:
        """The error names the leaf, its type and the remedy, which works."""
        tree = {"out": [{"logits": torch.ones(2, device=device).to(dtype)}]}
        with pytest.raises(TypeError) as caught:
            to_host(tree).numpy()
        message = str(caught.value)
        assert message.startswith(f'tree["out"][0]["logits"] ({dtype}) cannot become a NumPy array')
        assert message.endswith("pass dtype=torch.float32 to to_host() or submit()")
        array = to_host(tree, dtype=torch.float32).numpy()["out"][0]["logits"]
        assert (array.dtype, array.tolist()) == (np.float32, [1.0, 1.0])

    @DEVICES
    def test_numpy_has_no_such_layout(self, sim: Any, device: str) -> None:
        """Nor has it sparse or nested arrays; a conjugate view it gets."""
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        for tensor in (torch.eye(2).to_sparse(), nested):
            with pytest.raises(TypeError, match=r"^tree \(torch.float32\) cannot .* dense tensor .* before the copy"):
                to_host(tensor.to(device)).numpy()
        assert to_host(torch.tensor([1 + 2j]).to(device).conj()).numpy().tolist() == [1 - 2j]

    def test_numpy_shares_memory(self, sim: Any) -> None:
        """The arrays are the result's memory, and the containers are the same."""
        future = to_host({"a": ones(3.0), "b": Scores(torch.ones((), device="sim"), "n")})
        arrays = future.numpy()
        assert np.shares_memory(arrays["a"], future.result()["a"].numpy())
        assert isinstance(arrays["b"].logits, np.ndarray)
        assert arrays["b"].name == "n"

    @DEVICES
    def test_numpy_of_each_container(self, sim: Any, device: str) -> None:
        """Arrays are in packed sequences and named tuples too; objects with their own .to keep their tensors."""
        packed: Any = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
        tree = [packed.to(device), Pair(torch.ones(2, device=device), 1), Holder(torch.ones(2, device=device))]
        future = to_host(tree)
        arrays = future.numpy()
        assert [type(part) for part in arrays] == [PackedSequence, Pair, Holder]
        assert arrays[0].data.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0]
        assert [type(arrays[0].data), type(arrays[1].left)] == [np.ndarray] * 2
        assert arrays[2] is future.result()[2]
        assert value_of(arrays[2].tensor) == 1.0
