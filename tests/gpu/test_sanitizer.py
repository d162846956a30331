"""torch's CUDA sanitizer, which follows what each stream has waited for, finds no race.

It sees the main thread only, and nothing of memory that is used again: for these there are the tests of values.
"""

from __future__ import annotations

import pytest

from tests.helpers import run_python

pytestmark = pytest.mark.gpu

SANITIZER = """
import os
os.environ["TORCH_CUDA_SANITIZER"] = "1"  # which torch asks for when it is imported
import torch

batches = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(9)]
total = torch.zeros(1 << 20, device="cuda")
torch.cuda.synchronize()
"""

LOOP = (
    SANITIZER
    + """
from prefetch import CUDAPrefetcher, to_host

for memory in ("record_stream", "consumer", "static"):
    for transform in (None, lambda batch: batch * 2):
        loader = CUDAPrefetcher(batches, "cuda", memory=memory, transform=transform, background=False)
        for _ in range(2):
            for batch in loader:
                total.add_(batch)
futures = []
for _ in range(3):  # which none of the calls waits for: a wait of the host would put all in order
    total.add_(1)
    futures.append(to_host(total))
    total.mul_(1)
print([future.result()[0].item() for future in futures])
"""
)

NAIVE = (
    SANITIZER
    + """
with torch.cuda.stream(torch.cuda.Stream()):
    batch = batches[1].to("cuda", non_blocking=True)
total.add_(batch)
"""
)


def test_no_race() -> None:
    """Loops over every policy, with copies in both directions, are in order."""
    result = run_python("-c", LOOP)
    assert "CSAN detected" not in result.stderr
    assert (result.stdout, result.returncode) == ("[649.0, 650.0, 651.0]\n", 0), result.stderr


def test_control() -> None:
    """Control: a copy on a side stream that nobody waits for is reported."""
    result = run_python("-c", NAIVE)
    assert "CSAN detected" in result.stderr
    assert result.returncode != 0
