"""The checks of the arguments: each error names the argument, the value and the rule."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Literal, get_args

import torch
from torch.utils.data import Dataset

MemoryName = Literal["record_stream", "consumer", "static"]


def check_loader(loader: object) -> None:
    kind = type(loader)
    if getattr(kind, "__iter__", None) is not None:
        return
    if isinstance(loader, Dataset):  # iter() would count its samples up, if need be for ever
        raise TypeError(f"loader must be iterable; wrap the data set in a DataLoader, got {loader!r}")
    if not hasattr(kind, "__getitem__"):
        raise TypeError(f"loader must be iterable, such as a DataLoader, got {loader!r}")


def check_memory(memory: object) -> None:
    policies = get_args(MemoryName)
    if not isinstance(memory, str) or memory not in policies:
        raise ValueError(f"memory must be one of {policies}, got {memory!r}")


def check_transform(transform: object) -> None:
    if transform is not None and not callable(transform):
        raise TypeError(f"transform must be callable or None, got {transform!r}")


def check_background(background: object) -> None:
    if background is not None and not isinstance(background, bool):
        raise TypeError(f"background must be True, False or None, got {background!r}")


def check_pin_memory(pin_memory: object) -> None:
    if not isinstance(pin_memory, bool):
        raise TypeError(f"pin_memory must be True or False, got {pin_memory!r}")


def check_profile(profile: object) -> None:
    if not isinstance(profile, bool):
        raise TypeError(f"profile must be True or False, got {profile!r}")


def check_dtype(dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, since only floating leaves are cast, got {dtype!r}")


def check_memory_format(memory_format: object) -> None:
    if memory_format is not None and not isinstance(memory_format, torch.memory_format):
        raise TypeError(f"memory_format must be a torch.memory_format or None, got {memory_format!r}")


def checked_prefetch_batches(value: object) -> int:
    return _checked_integer("prefetch_batches", value, least=0)


def checked_max_pending(value: object) -> int:
    return _checked_integer("max_pending", value, least=1)


def checked_skip_keys(skip_keys: object) -> frozenset[str]:
    if isinstance(skip_keys, str):
        raise TypeError(
            f"skip_keys must be a collection of keys such as ({skip_keys!r},), got the string {skip_keys!r}"
        )
    if not isinstance(skip_keys, Collection):
        raise TypeError(f"skip_keys must be a collection of strings, got {skip_keys!r}")
    for key in skip_keys:
        if not isinstance(key, str):
            raise TypeError(f"skip_keys must hold strings, got {key!r} in {skip_keys!r}")
    return frozenset(skip_keys)


def _checked_integer(name: str, value: object, least: int) -> int:
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # arrays and tensors of other than one integer refuse too
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if count < least:
        raise ValueError(f"{name} must be {least} or more, got {count}")
    return count
