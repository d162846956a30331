"""Measure everything again, and draw it: ``python -m benchmarks`` (15 minutes on two cores)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tqdm import tqdm

# Each in a process of its own: what one leaves in torch or in the allocators is nothing to the others.
SIMULATED = ("overlap", "two_ways", "timeline", "host_cost")  # always: a GPU is hidden from them
BENCHMARKS = (*SIMULATED, "import_time", "compare", "compare_plot")


def main() -> int:
    """Run one after the other; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"NAME must be one of {', '.join(BENCHMARKS)}, got {unknown[0]!r}")
    for name in tqdm(names or BENCHMARKS, unit="benchmark", disable=None):
        print(f"\n{name}\n", flush=True)
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if name in SIMULATED else {})
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], env=environment, check=False).returncode
        if status:
            print(f"benchmarks.{name} has failed, with status {status}", file=sys.stderr)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
