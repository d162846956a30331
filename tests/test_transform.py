"""What is done to a batch on the device: cast, memory format, transform, in this order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from prefetch import CUDAPrefetcher
from tests.helpers import Numbered, numbered

DEVICES = ["cpu", "sim"]


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned, keeping its strides."""
    return tensor.pin_memory()


@pytest.mark.parametrize("device", DEVICES)
def test_dtype_casts_floating_leaves_only(sim: Any, device: str) -> None:
    """Floats of any width are cast, everything else keeps its type."""
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    source = [pinned(torch.ones(2, dtype=kind)) for kind in kinds]
    (result,) = CUDAPrefetcher([source], device, dtype=torch.float16)
    assert [leaf.dtype for leaf in result] == [torch.float16] * 3 + kinds[3:]
    assert [leaf.dtype for leaf in source] == kinds
    assert all(leaf.tolist() == [1, 1] for leaf in result)


def test_the_narrow_type_crosses_the_bus(sim: Any) -> None:
    """The copy carries the source's bytes: with bandwidth as the only cost it takes the time of the narrow type."""
    source = pinned(torch.ones(1 << 16, dtype=torch.float16))
    sim.configure(virtual=True, latency_us=0, h2d_mb_s=1000)
    (result,) = CUDAPrefetcher([source], "sim", dtype=torch.float64)
    (span,) = [span for span in sim.trace() if span.name == "copy_h2d"]
    assert span.end_ns - span.start_ns == 2 * (1 << 16)  # bytes at 1 byte/ns
    assert result.dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("memory_format", "formatted"),
    [
        (torch.channels_last, [False, True, False]),
        (torch.channels_last_3d, [False, False, True]),
        (torch.contiguous_format, [False, False, False]),
        (torch.preserve_format, [False, False, False]),
    ],
    ids=str,
)
def test_memory_format(sim: Any, device: str, memory_format: torch.memory_format, formatted: list[bool]) -> None:
    """Leaves with the dimensions for it get the format, the others are left; values stay."""
    source = [pinned(torch.arange(2.0 * 3**n).reshape([2] + [3] * n)) for n in (2, 3, 4)]
    (result,) = CUDAPrefetcher([source], device, memory_format=memory_format)
    for leaf, original, is_formatted in zip(result, source, formatted, strict=True):
        assert torch.equal(leaf.cpu(), original)
        assert (leaf.stride() != original.stride()) == is_formatted
    assert result[1].is_contiguous(memory_format=torch.channels_last) == formatted[1]
    assert result[2].is_contiguous(memory_format=torch.channels_last_3d) == formatted[2]


@pytest.mark.parametrize("device", DEVICES)
def test_contiguous_format_undoes_channels_last(sim: Any, device: str) -> None:
    """The contiguous format is given to leaves that have another."""
    source = pinned(torch.arange(36.0).reshape(1, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    (result,) = CUDAPrefetcher([source], device, memory_format=torch.contiguous_format)
    assert result.is_contiguous()
    assert torch.equal(result.cpu(), source)


@pytest.mark.parametrize("device", DEVICES)
def test_order(sim: Any, device: str) -> None:
    """The transform sees leaves on the device, cast and formatted, and its result is delivered as it is."""
    seen = []

    def transform(batch: torch.Tensor) -> tuple[str, torch.Tensor]:
        seen.append((batch.device.type, batch.dtype, batch.is_contiguous(memory_format=torch.channels_last)))
        return "transformed", batch[0, 0, 0]

    source = pinned(torch.ones(1, 2, 3, 3))
    prefetcher = CUDAPrefetcher(
        [source], device, transform=transform, dtype=torch.float64, memory_format=torch.channels_last
    )
    ((text, row),) = prefetcher
    assert seen == [(device, torch.float64, True)]
    assert (text, row.tolist(), row.dtype) == ("transformed", [1.0, 1.0, 1.0], torch.float64)
    assert source.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_no_graph_is_recorded(sim: Any, device: str) -> None:
    """The transform runs without gradients, and the caller's mode is back afterwards."""
    weight = torch.ones(4, requires_grad=True, device=device)
    modes = []

    def transform(batch: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return batch * weight

    (result,) = CUDAPrefetcher([pinned(torch.ones(4))], device, transform=transform)
    assert (result.requires_grad, modes, torch.is_grad_enabled()) == (False, [False], True)


@pytest.mark.parametrize("current", [0, 1])
def test_runs_on_the_side_stream(sim: Any, current: int) -> None:
    """Inside the transform the prefetcher's device and side stream are current, so that new tensors go there."""
    torch.accelerator.set_device_index(current)
    seen = set()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        stream = torch.accelerator.current_stream()
        seen.add((torch.accelerator.current_device_index(), stream.stream_id))
        return batch + torch.ones(batch.shape, device="sim")

    prefetcher = CUDAPrefetcher(numbered(3), "sim:1", transform=transform)
    assert [batch[0].item() for batch in prefetcher] == [2.0, 3.0, 4.0]
    copies = {span.stream for span in sim.trace() if span.name == "copy_h2d"}
    assert seen == {(1, next(iter(copies)))}
    assert len(copies) == 1
    assert copies != {torch.accelerator.current_stream(1).stream_id}


def test_transform_overlaps_the_step(virtual_sim: Any) -> None:
    """Copy and transform together, not longer than the step, are hidden behind it."""
    batches = numbered(10)
    virtual_sim.configure(latency_us=3000)

    def transform(batch: torch.Tensor) -> torch.Tensor:
        virtual_sim.busy(4000)
        return batch

    start = virtual_sim.host_time_ns()
    for _ in CUDAPrefetcher(batches, "sim", transform=transform):
        virtual_sim.busy(10000)
    torch.accelerator.synchronize()
    assert (virtual_sim.host_time_ns() - start) / 1e6 == pytest.approx(7 + 10 * 10, rel=0.01)


def test_closed_over_tensors_are_ready(any_sim: Any) -> None:
    """Tensors that the transform closes over, still being computed when a pass starts, are waited for."""
    any_sim.configure(kernel_us=3000)
    scale = torch.ones(1, device="sim")
    prefetcher = CUDAPrefetcher(Numbered(3), "sim", transform=lambda batch: batch * scale)
    for expected in (2.0, 4.0):
        scale.mul_(2)
        any_sim.busy(3000)
        got = [batch[0] for batch in prefetcher]
        torch.accelerator.synchronize()
        assert [value.item() for value in got] == [expected * (i + 1) for i in range(3)]
    assert any_sim.races() == []


class Carrier:
    """Moves itself, and carries a tensor that is on the device already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Carrier:
        """Makes another one."""
        return Carrier(self.tensor.to(device))


def add_one(batch: Any) -> torch.Tensor:
    """A transform for batches in several packings."""
    if isinstance(batch, dict):
        batch = batch["there"]
    result: torch.Tensor = (batch.tensor if isinstance(batch, Carrier) else batch) + 1
    return result


@pytest.mark.parametrize(
    ("pack", "options"),
    [
        (lambda tensor: tensor, {"transform": add_one}),
        (Carrier, {"transform": add_one}),
        (lambda tensor: {"there": tensor}, {"transform": add_one, "skip_keys": ["there"]}),
        (lambda tensor: tensor + 1, {"dtype": torch.float64}),
        (lambda tensor: tensor + 1, {}),
    ],
    ids=["transform", "own to", "skipped", "cast", "passed on"],
)
def test_leaves_already_on_the_device_are_ordered(any_sim: Any, pack: Any, options: Any) -> None:
    """What a loader makes on the device is ready for cast, transform and consumer, on whatever streams they are."""
    any_sim.configure(kernel_us=1000)

    def batches() -> Any:
        for i in range(6):
            yield pack(torch.full((1 << 14,), float(i), device="sim") * 2)

    streams = [torch.Stream("sim"), torch.Stream("sim")]
    # Each batch is asked for, and so made, on the stream on which the one before it is used.
    iterator = iter(CUDAPrefetcher(batches(), "sim", prefetch_batches=1, **options))
    results = []
    for position in range(6):
        with streams[position % 2]:
            batch = next(iterator)
            results.append(batch.mean())
            del batch
    torch.accelerator.synchronize()
    assert [value.item() for value in results] == [2.0 * i + 1 for i in range(6)]
    assert any_sim.races() == []


def test_closed_over_tensors_may_change_after_a_break(any_sim: Any) -> None:
    """When a pass is let go, what its transforms still read on the side stream is not overwritten under them."""
    any_sim.configure(kernel_us=2000)
    scale = torch.ones(1, device="sim")
    prefetcher = CUDAPrefetcher(Numbered(5), "sim", transform=lambda batch: batch * scale)
    for factor in (1.0, 2.0):
        for batch in prefetcher:
            assert batch[0].item() == factor
            break
        scale.mul_(2)
    assert any_sim.races() == []


def test_transform_that_closes_the_pass(sim: Any) -> None:
    """A pass that its own transform closes is at its end: no later batch is delivered in place of an earlier one."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if batch[0].item() == 3:
            iterator.close()
        return batch

    iterator: Any = iter(CUDAPrefetcher(numbered(5), "sim", prefetch_batches=1, transform=transform))
    assert next(iterator)[0].item() == 1.0
    assert list(iterator) == []


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_under_inference_mode(sim: Any, device: str) -> None:
    """Under inference mode a transform may write to its batch, on the CPU as on the device."""
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, pin_memory=True)
    with torch.inference_mode():
        batches = list(CUDAPrefetcher(loader, device, transform=lambda batch: batch[0].div_(2)))
    assert [batch.tolist() for batch in batches] == [[0.0, 0.5], [1.0, 1.5]]


@pytest.mark.parametrize("device", DEVICES)
def test_transform_that_is_false(sim: Any, device: str) -> None:
    """A transform counts by being there, not by its truth."""

    class Pipeline(list[Any]):
        def __call__(self, batch: torch.Tensor) -> str:
            return "called"

    assert list(CUDAPrefetcher(numbered(1), device, transform=Pipeline())) == ["called"]


def test_cpu_batches_pass_through() -> None:
    """Without anything to do the loader's own objects are delivered."""
    batches = [torch.ones(2), {"x": torch.ones(1)}, None]
    assert all(got is given for got, given in zip(CUDAPrefetcher(batches, "cpu"), batches, strict=True))


def test_cpu_cast_leaves_the_source_alone() -> None:
    """On the CPU a cast or an in-place change of a container never reaches the loader's batch."""
    batch = {"x": torch.ones(2, dtype=torch.float64), "y": torch.ones(2)}
    (result,) = CUDAPrefetcher([batch], "cpu", dtype=torch.float32)
    assert result["y"] is batch["y"]
    assert (result["x"].dtype, batch["x"].dtype) == (torch.float32, torch.float64)


def test_cpu_moves_nothing(sim: Any) -> None:
    """With the CPU as the device, tensors that the loader made elsewhere stay there, whatever else is done."""
    there = torch.ones(2, device="sim")
    (result,) = CUDAPrefetcher([there], "cpu")
    assert result is there
    (result,) = CUDAPrefetcher([there], "cpu", dtype=torch.float64)
    assert (str(result.device), result.dtype, result.tolist()) == ("sim:0", torch.float64, [1.0, 1.0])
