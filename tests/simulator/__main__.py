"""Run a module on a machine with the simulated accelerator: ``python -m tests.simulator [OPTIONS] MODULE [ARGS]``.

For example ``python -m tests.simulator --h2d-mb-s 2000 --kernel-us 1000 prefetch bench``. If the module's program has a
race, it is reported on stderr, and the exit status is 70.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from tests import simulator

_RACES = 70


def main() -> None:
    """Load the accelerator, and become the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__, allow_abbrev=False)
    settings = ("latency_us", "h2d_mb_s", "d2h_mb_s", "kernel_us")
    for setting in settings:
        parser.add_argument(
            f"--{setting.replace('_', '-')}", type=int, metavar="N", help="as in tests.simulator.configure"
        )
    parser.add_argument("module", metavar="MODULE")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the two never share a process
    simulator.load()
    simulator.configure(**{name: value for name in settings if (value := getattr(args, name)) is not None})
    sys.argv = [args.module, *args.arguments]
    try:
        runpy.run_module(args.module, run_name="__main__", alter_sys=True)
    finally:
        if races := simulator.races():
            print("races:", *races, sep="\n", file=sys.stderr)
            sys.exit(_RACES)


if __name__ == "__main__":
    main()
