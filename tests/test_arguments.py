"""Bad arguments name the argument, the value and the rule, and leave nothing half done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from prefetch import CUDAPrefetcher


class NotIterable:
    """Says so."""

    __iter__ = None


GOOD: list[Any] = [torch.zeros(1)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loader": 3}, TypeError, "loader must be iterable, such as a DataLoader, got 3"),
        ({"loader": None}, TypeError, "loader must be iterable, such as a DataLoader, got None"),
        ({"loader": NotIterable()}, TypeError, "loader must be iterable, such as a DataLoader, got <tests"),
        (
            {"loader": TensorDataset(torch.ones(2))},
            TypeError,
            "loader must be iterable; wrap the data set in a DataLoader",
        ),
        ({"loader": list}, TypeError, "loader must be iterable, such as a DataLoader, got <class 'list'>"),
        ({"background": "yes"}, TypeError, "background must be True, False or None, got 'yes'"),
        ({"background": 1}, TypeError, "background must be True, False or None, got 1"),
        ({"pin_memory": None}, TypeError, "pin_memory must be True or False, got None"),
        ({"prefetch_batches": -1}, ValueError, "prefetch_batches must be 0 or more, got -1"),
        ({"prefetch_batches": 1.5}, TypeError, "prefetch_batches must be an integer, got 1.5"),
        ({"prefetch_batches": True}, TypeError, "prefetch_batches must be an integer, got True"),
        ({"prefetch_batches": "2"}, TypeError, "prefetch_batches must be an integer, got '2'"),
        ({"prefetch_batches": np.array([1, 2])}, TypeError, "prefetch_batches must be an integer, got array([1, 2])"),
        ({"prefetch_batches": torch.tensor(2.0)}, TypeError, "prefetch_batches must be an integer, got tensor(2.)"),
        ({"prefetch_batches": None}, TypeError, "prefetch_batches must be an integer, got None"),
        ({"memory": "mine"}, ValueError, "memory must be one of ('record_stream', 'consumer', 'static'), got 'mine'"),
        ({"memory": None}, ValueError, "memory must be one of ('record_stream', 'consumer', 'static'), got None"),
        (
            {"memory": np.array(["a", "b"])},
            ValueError,
            "memory must be one of ('record_stream', 'consumer', 'static'), got array(",
        ),
        (
            {"memory": ["record_stream"]},
            ValueError,
            "memory must be one of ('record_stream', 'consumer', 'static'), got ['record_stream']",
        ),
        ({"transform": 3}, TypeError, "transform must be callable or None, got 3"),
        ({"dtype": "float16"}, TypeError, "dtype must be a torch.dtype or None, got 'float16'"),
        ({"dtype": torch.int32}, ValueError, "dtype must be a floating-point type"),
        ({"memory_format": "channels_last"}, TypeError, "memory_format must be a torch.memory_format or None"),
        ({"memory_format": []}, TypeError, "memory_format must be a torch.memory_format or None, got []"),
        ({"skip_keys": "meta"}, TypeError, "skip_keys must be a collection of keys such as ('meta',)"),
        ({"skip_keys": 3}, TypeError, "skip_keys must be a collection of strings, got 3"),
        ({"skip_keys": ("a", 3)}, TypeError, "skip_keys must hold strings, got 3 in ('a', 3)"),
        (
            {"device": 1.0},
            TypeError,
            "device must be a torch.device, a name such as 'cuda:0', an index or None, got 1.0",
        ),
        ({"device": True}, TypeError, "device must be a torch.device, a name such as 'cuda:0', an index or None"),
        ({"device": -1}, ValueError, "device must be an index from 0 upwards, got -1"),
        ({"device": "gpu"}, ValueError, "device must name a device such as 'cpu' or 'cuda:0', got 'gpu'"),
        ({"device": "cuda:-1"}, ValueError, "device must name a device such as 'cpu' or 'cuda:0', got 'cuda:-1'"),
        ({"device": ""}, ValueError, "device must name a device such as 'cpu' or 'cuda:0', got ''"),
        ({"device": "meta"}, RuntimeError, "device='meta' is not available"),
        ({"device": "cuda"}, RuntimeError, "device='cuda' is not available"),
        ({"device": "xpu:1"}, RuntimeError, "device='xpu:1' is not available"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_argument(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each wrong argument raises its own error at construction."""
    with pytest.raises(error, match=re.escape(message)):
        CUDAPrefetcher(**({"loader": GOOD, "device": "cpu"} | arguments))


def test_options_are_keywords() -> None:
    """Only the loader and the device may be given by position."""
    with pytest.raises(TypeError, match="positional"):
        CUDAPrefetcher(GOOD, "cpu", 2)  # type: ignore[call-overload]


def test_numpy_integer_depth() -> None:
    """An integer of another library is an integer."""
    int_like: Any = np.int64(1)
    assert list(CUDAPrefetcher([1, 2], "cpu", prefetch_batches=int_like)) == [1, 2]


class OldSequence:
    """Iterable only through ``__getitem__``."""

    def __getitem__(self, index: int) -> int:
        return [10, 11][index]


def test_old_sequence_protocol() -> None:
    """What iter() accepts is accepted, with or without __iter__."""
    assert list(CUDAPrefetcher(OldSequence(), "cpu")) == [10, 11]  # type: ignore[call-overload]


class NeverStarted:
    """Fails as soon as it is asked for anything but its existence."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("iterated at construction")


def test_constructor_does_not_iterate() -> None:
    """The loader's pass starts with the prefetcher's, not before."""
    prefetcher = CUDAPrefetcher(NeverStarted(), "cpu")
    with pytest.raises(AssertionError, match="iterated at construction"):
        iter(prefetcher)


class TestDevice:
    """What ``device`` means, with two simulated accelerators."""

    def test_default_is_the_current_accelerator(self, sim: Any) -> None:
        """None is the accelerator that is current at construction."""
        torch.accelerator.set_device_index(1)
        assert CUDAPrefetcher(GOOD).device == torch.device("sim:1")

    @pytest.mark.parametrize("kind", [str, torch.device])
    def test_name_without_index_is_frozen(self, sim: Any, kind: Any) -> None:
        """A name without an index keeps the index that was current at construction."""
        with torch.accelerator.device_index(1):
            prefetcher = CUDAPrefetcher([torch.ones(3).pin_memory()], kind("sim"))
        assert prefetcher.device == torch.device("sim:1")
        (batch,) = prefetcher
        assert batch.device == torch.device("sim:1")

    def test_index(self, sim: Any) -> None:
        """An integer is an index of the accelerator."""
        assert CUDAPrefetcher(GOOD, 1).device == torch.device("sim:1")

    @pytest.mark.parametrize("device", [2, "sim:2", 10**30])
    def test_index_that_is_not_there(self, sim: Any, device: Any) -> None:
        """An index beyond the last device is an error that says how many there are."""
        with pytest.raises(RuntimeError, match=r"is not available: 2 'sim' device\(s\) found"):
            CUDAPrefetcher(GOOD, device)

    def test_cpu_beside_an_accelerator(self, sim: Any) -> None:
        """The CPU can be asked for where an accelerator is, with any index."""
        assert CUDAPrefetcher(GOOD, "cpu:0").device == torch.device("cpu")
