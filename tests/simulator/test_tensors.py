"""Whatever a batch may hold reaches the device and comes back."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


@pytest.fixture
def quiet_prototypes() -> Iterator[None]:
    """Sparse and nested tensors announce themselves as prototypes; nothing else is silenced."""
    with warnings.catch_warnings():
        for message in ("Sparse", "The PyTorch API of nested tensors"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1), (2, 3, 4)], ids=str)
def test_round_trip(any_sim: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every dtype and shape, pinned and asynchronous, arrives bit by bit."""
    source = torch.randint(0, 100, shape).to(dtype).pin_memory()
    on_device = source.to("sim", non_blocking=True)
    assert on_device.device.type == "sim"
    back = on_device.cpu()
    assert back.shape == source.shape
    assert back.dtype == dtype
    assert back.untyped_storage().tolist() == source.untyped_storage().tolist()
    assert any_sim.races() == []


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "columns": lambda x: x[:, 1:],
    "every other row": lambda x: x[::2],
    "one row": lambda x: x[1],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "unfolded": lambda x: x.unfold(0, 2, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("non_blocking", [True, False], ids=["async", "blocking"])
def test_layouts(any_sim: ModuleType, layout: Any, non_blocking: bool) -> None:
    """Views of any kind are copied both ways, and made of memory on the device too."""
    source = torch.arange(4 * 3 * 2 * 2).reshape(4, 3, 2, 2).pin_memory()
    expected = layout(source)
    on_device = expected.to("sim", non_blocking=non_blocking)
    assert torch.equal(on_device.cpu(), expected)
    assert torch.equal(layout(source.to("sim")).cpu(), expected)
    target = torch.zeros_like(expected.contiguous()).pin_memory()
    target.copy_(layout(source.to("sim")), non_blocking=non_blocking)
    torch.accelerator.synchronize()
    assert torch.equal(target, expected)


@pytest.mark.parametrize("non_blocking", [True, False], ids=["async", "blocking"])
def test_dtype_conversion(any_sim: ModuleType, non_blocking: bool) -> None:
    """A copy may convert, in both directions and into a view."""
    source = torch.arange(12, dtype=torch.uint8).reshape(3, 4).pin_memory()
    converted = source.to("sim", torch.float16, non_blocking=non_blocking)
    assert converted.dtype == torch.float16
    assert torch.equal(converted.cpu(), source.half())
    target = torch.zeros(3, 8, dtype=torch.int32, device="sim")
    target[:, ::2].copy_(source, non_blocking=non_blocking)
    assert torch.equal(target.cpu()[:, ::2], source.int())
    back = torch.empty(3, 4, dtype=torch.float64).pin_memory()
    back.copy_(converted, non_blocking=non_blocking)
    torch.accelerator.synchronize()
    assert torch.equal(back, source.double())


def test_where_a_conversion_runs(virtual_sim: ModuleType) -> None:
    """As with CUDA: asynchronous copies move the narrow type and convert on the device."""
    virtual_sim.configure(latency_us=0, h2d_mb_s=1)
    source = torch.zeros(100, dtype=torch.uint8).pin_memory()
    for non_blocking, expected_us in ((True, 100), (False, 400)):
        started = virtual_sim.host_time_ns()
        source.to("sim", torch.float32, non_blocking=non_blocking)
        torch.accelerator.synchronize()
        assert virtual_sim.host_time_ns() - started == expected_us * 1_000


@pytest.mark.parametrize(
    ("view", "asynchronous"),
    [("transposed", True), ("channels_last", True), ("one row", True), ("columns", False), ("every other row", False)],
)
def test_views_with_holes_are_silently_synchronous(virtual_sim: ModuleType, view: str, asynchronous: bool) -> None:
    """As with CUDA: they go through a pageable temporary."""
    virtual_sim.configure(latency_us=100)
    source = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last).pin_memory()
    if view != "channels_last":
        source = LAYOUTS[view](torch.zeros(4, 3, 2, 2).pin_memory())
    assert source.is_pinned()
    started = virtual_sim.host_time_ns()
    source.to("sim", non_blocking=True)
    assert (virtual_sim.host_time_ns() == started) is asynchronous


def test_size_one_dimensions_do_not_matter(virtual_sim: ModuleType) -> None:
    """Strides that address nothing do not make a copy slow."""
    virtual_sim.configure(latency_us=100)
    source = torch.zeros(4, 1).pin_memory()
    target = torch.empty(1, 4, device="sim").t()
    assert source.stride() != target.stride()
    started = virtual_sim.host_time_ns()
    target.copy_(source, non_blocking=True)
    assert virtual_sim.host_time_ns() == started


def test_lazy_conjugation_and_negation(any_sim: ModuleType) -> None:
    """They are resolved on the way, in both directions."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(value.conj().to("sim").cpu(), value.conj())
    assert torch.equal(value.to("sim").conj().cpu(), value.conj())
    assert torch.equal(value.to("sim").conj().imag.cpu(), value.conj().imag)
    assert "1.+2.j" in repr(value.to("sim"))


def test_resize_set_and_views(any_sim: ModuleType) -> None:
    """What torch does to storages works on the device."""
    tensor = torch.arange(3, device="sim")
    tensor.resize_(5)
    assert tensor[:3].tolist() == [0, 1, 2]
    other = torch.empty(0, dtype=torch.int64, device="sim").set_(tensor.untyped_storage())
    assert other.data_ptr() == tensor.data_ptr()
    assert tensor.is_set_to(tensor)
    assert tensor.view(torch.uint8).shape == (40,)


def test_save_and_load(any_sim: ModuleType) -> None:
    """torch.save and torch.load know the device."""
    file = io.BytesIO()
    torch.save(torch.arange(3, device="sim:1"), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == torch.device("sim", 1)
    assert loaded.tolist() == [0, 1, 2]


def record(tensor: torch.Tensor) -> None:
    """Call record_stream on what is one tensor inside."""
    tensor.record_stream(torch.Stream("sim"))


@pytest.mark.usefixtures("quiet_prototypes")
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
def test_sparse_coo(any_sim: ModuleType, pin: bool) -> None:
    """Moves both ways, keeps being coalesced, and lets its parts be recorded."""
    with torch.sparse.check_sparse_tensor_invariants():
        source = torch.eye(3).to_sparse().coalesce()
        moved = (source.pin_memory() if pin else source).to("sim", non_blocking=True)
    assert moved.device.type == "sim"
    assert moved.is_coalesced()
    record(moved._indices())
    record(moved._values())
    assert torch.equal(moved.cpu().to_dense(), torch.eye(3))


@pytest.mark.usefixtures("quiet_prototypes")
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
def test_sparse_csr(any_sim: ModuleType, pin: bool) -> None:
    """Moves both ways and lets its parts be recorded."""
    source = torch.eye(3).to_sparse_csr()
    moved = (source.pin_memory() if pin else source).to("sim", non_blocking=True)
    assert moved.device.type == "sim"
    for part in (moved.crow_indices(), moved.col_indices(), moved.values()):
        record(part)
    assert torch.equal(moved.cpu().to_dense(), torch.eye(3))


@pytest.mark.usefixtures("quiet_prototypes")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
def test_nested(any_sim: ModuleType, layout: torch.layout, pin: bool) -> None:
    """Moves both ways, comes apart, and lets its buffer be recorded."""
    parts = [torch.ones(2, 3), torch.zeros(4, 3)]
    source = torch.nested.nested_tensor(parts, layout=layout)
    moved = (source.pin_memory() if pin else source).to("sim", non_blocking=True)
    assert moved.device.type == "sim"
    record(moved.values())
    record(moved)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(moved.unbind(), parts, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(moved.cpu().unbind(), parts, strict=True))


def test_packed_sequence(any_sim: ModuleType) -> None:
    """Its batch sizes stay on the host."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]).to(torch.device("sim"))  # type: ignore[arg-type]  # annotated for dtypes only
    assert packed.data.device.type == "sim"
    assert packed.batch_sizes.device.type == "cpu"
    assert packed.cpu().data.eq(1).all()


# Python 3.12 and later warn about any fork of a process with threads, and torch has threads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_pins_its_batches(any_sim: ModuleType, workers: int) -> None:
    """DataLoader finds the accelerator, and forked workers do not trip over it."""
    torch.ones(1, device="sim").sum().item()  # there are worker threads that a fork does not inherit
    data = TensorDataset(torch.arange(6))
    loader = DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    moved = [batch.to("sim", non_blocking=True) for batch in batches]
    assert [batch.tolist() for batch in moved] == [[0, 1], [2, 3], [4, 5]]
