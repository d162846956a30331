"""How long ``import prefetch`` takes where torch is imported already: ``python -m benchmarks.import_time``.

From compiled files, as an installed package has them: they are made in a temporary folder by a first import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.harness import save, show

ROUNDS = 15
PROGRAM = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import prefetch
print(middle - start, time.perf_counter() - middle)
"""


def main() -> None:
    """Measure, print and save."""
    with tempfile.TemporaryDirectory() as compiled:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        outputs = [
            subprocess.run(
                [sys.executable, "-c", PROGRAM],
                env=environment | {"PYTHONPYCACHEPREFIX": compiled},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            for _ in range(ROUNDS + 1)
        ][1:]
    rows: list[dict[str, Any]] = []
    for name, column in (("torch", 0), ("prefetch, after torch", 1)):
        times = sorted(float(output[column]) * 1e3 for output in outputs)
        rows.append({"import": name, "fastest, ms": round(times[0], 1), "median, ms": round(times[ROUNDS // 2], 1)})
    show(rows)
    print(f"\nwritten to {save('import_time', rows, device='none')}")


if __name__ == "__main__":
    main()
