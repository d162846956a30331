"""How the library is used, for the type checkers only: nobody runs this."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

from prefetch import CUDAPrefetcher

Batch = tuple[torch.Tensor, int]
loader: list[Batch] = []


def first(batch: Batch) -> torch.Tensor:
    """A transform that changes the type."""
    return batch[0]


prefetcher = CUDAPrefetcher(loader)
assert_type(prefetcher, CUDAPrefetcher[Batch])
for batch in prefetcher:
    assert_type(batch, Batch)

transformed = CUDAPrefetcher(loader, "cpu", prefetch_batches=1, transform=first)
assert_type(transformed, CUDAPrefetcher[torch.Tensor])
iterator = iter(transformed)
assert_type(next(iterator), torch.Tensor)
iterator.close()
assert_type(transformed.device, torch.device)
