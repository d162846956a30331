"""How the library is used, for the type checkers only: nobody runs this."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

from prefetch import CUDAPrefetcher, HostCopier, HostFuture, to_host

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

assert_type(to_host({"loss": torch.ones(())}, dtype=torch.float32), HostFuture)
with HostCopier("cpu", max_pending=2) as copier:
    future = copier.submit(torch.ones(()))
assert_type(future, HostFuture)
assert_type(future.done(), bool)
static = CUDAPrefetcher(loader, memory="static")
assert_type(static, CUDAPrefetcher[Batch])

profiled = CUDAPrefetcher(loader, profile=True)
assert_type(profiled.stats.batches, int)
assert_type(profiled.stats.copy_gb_per_s, float)
assert_type(profiled.stats.bottleneck, str)
profiled.timeline.save_chrome_trace("trace.json")
profiled.timeline.plot("timeline.png", batches=4)
