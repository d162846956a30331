"""A device that fails says so in the loop, or at the next wait; nothing hangs."""

from __future__ import annotations

import pytest

from tests.helpers import run_python

pytestmark = pytest.mark.gpu

LOOP = """
import os, sys
os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
import torch
from prefetch import CUDAPrefetcher, to_host

memory, background = sys.argv[1], sys.argv[2] == "True"
batches = [torch.full((1 << 20,), 3 if i == 2 else 0).pin_memory() for i in range(9)]
table = torch.zeros(3, device="cuda")
try:
    for batch in CUDAPrefetcher(batches, "cuda", memory=memory, background=background):
        to_host(table[batch]).result()
except RuntimeError as error:
    print("error:", type(error).__name__, flush=True)
else:
    print("no error", flush=True)
"""


@pytest.mark.parametrize(
    ("memory", "background"),
    [("record_stream", False), ("record_stream", True), ("consumer", False), ("static", False)],
)
def test_assertion_on_the_device(memory: str, background: bool) -> None:
    """An index out of range on the device is a RuntimeError in the loop, and the process comes to its end."""
    result = run_python("-c", LOOP, memory, str(background), timeout=120)
    # The exit code is not ours to promise: torch ends the process when it frees memory of a device that has failed.
    assert result.stdout.startswith("error: "), result.stderr
