"""What a loader shows of how it works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


def has_one_iterator(loader: Any) -> bool:
    """Whether all passes over a loader share an iterator: each new one takes it from the one before."""
    keeps_workers = getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0) > 0
    return bool(keeps_workers) or isinstance(loader, Iterator)


def loads_apart(loader: object) -> bool:
    """Whether advancing a loader in a thread, beside the loop, cannot change what either of them computes.

    A data set in worker processes shares no random numbers and no objects with the loop. The sampler stays in this
    process, but torch's own draw all they need when the pass starts, unless they were given a generator. Classes that
    are not torch's may do anything.
    """
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers > 0
        and all(_is_torchs(part) and getattr(part, "generator", None) is None for part in parts_of(loader))
    )


def parts_of(loader: Any) -> list[Any]:
    """A loader, its sampler, its batch sampler and that one's sampler, as far as they are there."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [loader, *(sampler for sampler in samplers if sampler is not None)]


def _is_torchs(obj: object) -> bool:
    return type(obj).__module__.partition(".")[0] in ("torch", "torchdata")
