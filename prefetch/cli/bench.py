"""``cuda-prefetcher bench``: a loop with and without prefetching on this machine, for batches and steps you choose."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any, get_args

import torch

from prefetch._arguments import MemoryName
from prefetch._device import has_streams
from prefetch._prefetcher import CUDAPrefetcher
from prefetch._stats import amount
from prefetch._timeline import plot_together
from prefetch.cli import _arguments as arguments
from prefetch.cli._compare import ROUNDS, Ready, Result, compare, conclusion, too_large
from prefetch.cli._machine import environment
from prefetch.cli._measure import Compute, calibrated, device_scope, spare_core
from prefetch.cli._output import Report, progress, table, verdict, wrapped

_SUMMARY = "Time a loop with and without prefetching on this machine, for batches and steps you choose."
_EPILOG = """The loader is synthetic: batches are ready in pinned memory, and handed out after --load-ms of sleep. A
step multiplies matrices until the device has been busy for --compute-ms. Nothing is sent back to the host."""
_DRAWN_BATCHES = 8
_DRAWN_STEPS = 16  # the last of them are drawn: by then a loop goes as it will go on


def add_bench(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("bench", help=_SUMMARY, description=_SUMMARY, epilog=_EPILOG)
    add = parser.add_argument
    arguments.add_device(parser)
    add(
        "--shape",
        type=arguments.shape,
        default="256,3,224,224",
        metavar="N,C,H,W",
        help="of a batch, any number of dimensions; default: %(default)s",
    )
    add("--dtype", type=arguments.dtype, default="uint8", metavar="T", help="of a batch; default: %(default)s")
    add(
        "--compute-ms",
        type=arguments.number(0),
        default=10.0,
        metavar="X",
        help="that a step keeps the device busy, in ms; default: %(default)g",
    )
    add(
        "--load-ms",
        type=arguments.number(0),
        default=0.0,
        metavar="X",
        help="that the loader takes for a batch, in ms; default: %(default)g",
    )
    add(
        "--prefetch-batches",
        type=arguments.integer(0),
        default=2,
        metavar="N",
        help="as in CUDAPrefetcher, in batches; default: %(default)s",
    )
    add(
        "--memory",
        choices=get_args(MemoryName),
        default="record_stream",
        help="as in CUDAPrefetcher; default: %(default)s",
    )
    add(
        "--background",
        action=argparse.BooleanOptionalAction,
        help="as in CUDAPrefetcher: whether a thread loads and copies; default: its own choice, which is no thread for "
        "this loader",
    )
    add(
        "--steps",
        type=arguments.integer(2),
        default=100,
        metavar="N",
        help=f"of each pass, of which there are {ROUNDS} for each loop; default: %(default)s",
    )
    add("--plot", type=arguments.png_file, metavar="FILE", help="a PNG of both timelines; default: none is drawn")
    add("--json", action="store_true", help="print one JSON object instead of text; default: text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure, and print what was found.

    Raises:
        CommandError: The batches do not fit into memory.
    """
    device: torch.device = args.device
    with Report(as_json=args.json) as report, device_scope(device), spare_core(device):
        facts = environment(device)
        ready = Ready(args.shape, args.dtype, device, args.load_ms / 1e3)
        sizes = " x ".join(map(str, args.shape))
        dtype = str(args.dtype).removeprefix("torch.")
        pinned = "pinned" if has_streams(device) else "not pinned"
        report.text(
            f"device    {device}: {facts['device_name']}\nbatch     {sizes} {dtype}, {amount(ready.nbytes)}, {pinned}"
        )
        compute = calibrated(device, args.compute_ms / 1e3)
        how = "timing events" if has_streams(device) else "the clock"
        report.text(
            f"step      {args.compute_ms:g} ms asked for, {compute.seconds * 1e3:.3g} ms reached by {how}: "
            f"{compute.description}"
        )
        with _enough_memory(args):
            batches = _prefetcher(args, ready)
            with batches, progress(ROUNDS, "rounds") as advance:
                result = compare(ready, compute, batches, args.steps, background=args.background, advance=advance)
            report.text(*_paragraphs(result, args.steps))
            report.json(_json(args, facts, ready, compute, result))
            if args.plot is not None:
                _draw(args, ready, compute, f"{facts['device_name']}, {device}")
                report.text(f"\nPlot of both timelines: {args.plot}")


@contextlib.contextmanager
def _enough_memory(args: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        rule = f"the batches of a loop must fit into the memory of {args.device}"
        raise too_large(args.shape, args.dtype, rule, error) from error


def _prefetcher(args: argparse.Namespace, ready: Ready, **changes: Any) -> CUDAPrefetcher[torch.Tensor]:
    settings = {"prefetch_batches": args.prefetch_batches, "background": args.background, "memory": args.memory}
    return CUDAPrefetcher(ready, args.device, **(settings | changes))


def _paragraphs(result: Result, steps: int) -> list[str]:
    """What was measured, as text."""
    parts = f"load {result.load_s * 1e3:.4g}, copy {result.copy_s * 1e3:.4g}, compute {result.compute_s * 1e3:.4g}"
    limit = result.limit_s
    first = result.rows[0].step_s
    rows = [
        [
            row.name,
            f"{row.step_s * 1e3:.4g}",
            f"{row.step_s / limit:.2f}",
            f"{first / row.step_s:.2f}",
            f"{row.host_s * 1e6:.0f}",
        ]
        for row in result.rows
    ]
    explanation = (
        f"{steps} steps a pass, best of {ROUNDS} passes. Limit: the longest of load, copy and compute, each measured "
        "alone in this run. Host: what the loop's thread spends on getting a batch, besides waiting for the loader "
        "or, in CUDAPrefetcher, for room on the device; where .to blocks, it includes the copy."
    )
    return [
        f"alone     {parts} ms a step; limit {limit * 1e3:.4g} ms ({result.limit_name})",
        table(["loop", "ms a step", "ratio to limit", "speed-up", "host us a batch"], rows),
        wrapped(explanation),
        f"{verdict(result.bottleneck)}\n{wrapped(conclusion(result))}",
    ]


def _json(
    args: argparse.Namespace, facts: dict[str, Any], ready: Ready, compute: Compute, result: Result
) -> dict[str, Any]:
    return {
        "environment": facts,
        "settings": {
            "shape": list(args.shape),
            "dtype": str(args.dtype).removeprefix("torch."),
            "batch_bytes": ready.nbytes,
            "compute_ms": args.compute_ms,
            "load_ms": args.load_ms,
            "prefetch_batches": args.prefetch_batches,
            "memory": args.memory,
            "background": args.background,
            "steps": args.steps,
            "rounds": ROUNDS,
        },
        "calibrated_compute_s": compute.seconds,
        "step": compute.description,
        "load_s": result.load_s,
        "copy_s": result.copy_s,
        "compute_s": result.compute_s,
        "limit_s": result.limit_s,
        "limit": result.limit_name,
        "loops": [
            {
                "name": row.name,
                "step_s": row.step_s,
                "ratio_to_limit": row.step_s / result.limit_s,
                "speedup": result.rows[0].step_s / row.step_s,
                "host_s": row.host_s,
            }
            for row in result.rows
        ],
        "bottleneck": result.bottleneck,
        "conclusion": conclusion(result),
    }


def _draw(args: argparse.Namespace, ready: Ready, compute: Compute, title: str) -> None:
    """Both timelines, one above the other, on the same scale."""
    ready.steps = _DRAWN_STEPS
    without = {"prefetch_batches": 0, "background": False, "memory": "consumer"}
    timelines = {}
    for label, changes in (
        ("without prefetching", without),
        (f"CUDAPrefetcher, prefetch_batches={args.prefetch_batches}", {}),
    ):
        with _prefetcher(args, ready, profile=True, **changes) as batches:
            for _ in batches:
                compute.run()
            timelines[label] = batches.timeline  # which waits until the device is done
    plot_together(timelines, args.plot, title=title, batches=_DRAWN_BATCHES)
