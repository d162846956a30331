"""What the benchmarks measure in simulated time is what their committed results say."""

from __future__ import annotations

import json

import pytest

from tests.helpers import ROOT, run_python

OVERLAP = """
import json
from benchmarks.overlap import LOOPS, STEPS, measure

measured = {name: measure(loop, 5, 10) for name, loop in LOOPS.items()}
print(json.dumps({name: [round(one.ms / (5 + STEPS * 10), 3), one.allocations] for name, one in measured.items()}))
"""


@pytest.mark.usefixtures("sim")
def test_overlap() -> None:
    """Exact figures: each loop's ratio, and how often it asks for memory."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "overlap.json").read_text())["rows"]
    expected = {row["loop"]: [row["copy 5 ms, compute 10 ms"], row["allocations, second pass"]] for row in rows}
    ended = run_python("-c", OVERLAP)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == expected


PARTS = """
from benchmarks import compare
from benchmarks.devices import SimulatedDevice
from benchmarks.peers import PEERS

device = SimulatedDevice()
for batch in (compare.images, compare.large):
    scenario = compare.Scenario("short", batch, copy=0.5, compute=5)
    column = compare.measure(scenario, [peer for peer in PEERS if peer.package is None][:4], device)
    assert all(0.5 < ratio for ratio in column["ratios"].values()), column
    assert column["reserved"], column
print(sorted(column["ratios"]), sorted(compare.host_us(PEERS[:1], device)))
"""


@pytest.mark.usefixtures("sim")
def test_compare_runs() -> None:
    """Its scenarios can be run; the figures are the machine's."""
    ended = run_python("-c", PARTS)
    assert ended.returncode == 0, ended.stderr
    assert "batch.to(device)" in ended.stdout
