"""``cuda-prefetcher doctor``: what this machine can do, what bounds a loop on it, and what to change."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from prefetch._device import has_streams, is_host
from prefetch._stats import Stats, duration
from prefetch.cli import _arguments as arguments
from prefetch.cli import _loops, _user
from prefetch.cli._bandwidth_plot import draw
from prefetch.cli._hints import Facts, Hint, hints, why_not_wrapped, why_nothing
from prefetch.cli._machine import cores, environment
from prefetch.cli._measure import SIZES, Bandwidth, bandwidths, device_scope, latency_s
from prefetch.cli._output import CommandError, Report, progress, table, verdict, wrapped

_SUMMARY = "Examine this machine and, given a loader, find what bounds its loop and what to change."
_EPILOG = """The loader is run three times for some seconds: alone, in a plain loop, and through CUDAPrefetcher. For the
loops to be yours, name the step too: a function that is called with each batch on the device."""

_START_SHOWN = 0.01  # of a step


def add_doctor(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("doctor", help=_SUMMARY, description=_SUMMARY, epilog=_EPILOG)
    parser.add_argument(
        "factory",
        nargs="?",
        type=arguments.reference,
        metavar="MODULE:FACTORY",
        help="a callable without arguments, importable from the current folder, that returns a loader or "
        "(loader, step); default: only the machine is examined",
    )
    parser.add_argument(
        "--step",
        type=arguments.reference,
        metavar="MODULE:FUNCTION",
        help="called with each batch on the device; default: the factory's step, or none",
    )
    arguments.add_device(parser)
    parser.add_argument(
        "--seconds",
        type=arguments.number(0, excluded=True),
        default=3.0,
        metavar="S",
        help="for each of the three runs of the loader, in seconds; default: %(default)g",
    )
    parser.add_argument(
        "--plot", type=arguments.png_file, metavar="FILE", help="a PNG of the bandwidths; default: none is drawn"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text; default: text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Examine, and print what was found.

    Raises:
        CommandError: What was named cannot be used, or raised an exception.
    """
    device: torch.device = args.device
    if args.step is not None and args.factory is None:
        raise CommandError(f"argument --step: needs MODULE:FACTORY as well, got only {':'.join(args.step)!r}")
    if args.plot is not None and not has_streams(device):
        raise CommandError(
            f"argument --plot: there are no transfers to draw on {str(device)!r}, got {str(args.plot)!r}"
        )
    with Report(as_json=args.json) as report, device_scope(device):
        # First, since a wrong name should not be reported after a minute of measuring.
        program = _user.load(args.factory, args.step) if args.factory is not None else None
        result: dict[str, Any] = {"environment": environment(device)}
        facts = [_environment_text(result["environment"])]
        report.text(facts[0])
        if has_streams(device):
            result |= _transfers(device, args.plot, report, facts)
        else:
            without = "nothing is transferred to it" if is_host(device) else "it has no streams"
            facts.append(f"copies    no bandwidth, latency or overlap to measure on {str(device)!r}: {without}")
            report.text(facts[-1])
        if program is not None:
            result["loop"] = _loop(program, device, args.seconds, report, facts)
        report.text("\nTo paste into a bug report:", "\n".join(["```text", *facts, "```"]))
        report.json(result)


def _environment_text(facts: dict[str, Any]) -> str:
    details = [
        facts["device_name"],
        f"{facts['device_memory_bytes'] / 2**30:.0f} GiB" if facts["device_memory_bytes"] else None,
        f"driver {facts['driver']}" if facts["driver"] else None,
        "streams" if facts["streams"] else "no streams",
    ]
    built = f" (built for {facts['torch_built_for']})" if facts["torch_built_for"] else ""
    return (
        f"versions  cuda-prefetcher {facts['cuda_prefetcher']}, Python {facts['python']}, "
        f"torch {facts['torch']}{built}\n"
        f"machine   {facts['platform']}, {facts['processor']}, {facts['cores']} cores\n"
        f"device    {facts['device']}: {', '.join(filter(None, details))}"
    )


# ---------------------------------------------------------------- copies


def _transfers(device: torch.device, plot: Path | None, report: Report, facts: list[str]) -> dict[str, Any]:
    latency = latency_s(device)
    found: list[list[Bandwidth]] = []
    with progress(len(SIZES), "copies") as advance:
        for row in bandwidths(device):
            found.append(row)
            advance()
    if not found:
        raise CommandError(f"there is not enough memory on {device} to copy {SIZES[0]} bytes")
    heads = ["copy of", *(f"{cell.memory} {cell.direction}" for cell in found[0])]
    rows = [[_size(row[0].nbytes), *(f"{cell.gb_per_s:.3g}" for cell in row)] for row in found]
    report.text("\nBandwidth in GB/s (1e9 bytes a second), best of several:", table(heads, rows))
    if len(found) < len(SIZES):
        report.text(f"From {_size(SIZES[len(found)])} on there was not enough memory.")
    report.text(f"\nLatency: the smallest copy takes {duration(latency)}, from pinned memory to the device.")
    largest = ", ".join(f"{cell.memory} {cell.direction} {cell.gb_per_s:.3g}" for cell in found[-1])
    facts.append(f"copies    latency {duration(latency)}; {_size(found[-1][0].nbytes)} in GB/s: {largest}")
    if plot is not None:
        draw(found, f"{environment(device)['device_name']}, {device}", plot)
        report.text(f"\nPlot: {plot}")
    cells = [cell._asdict() for row in found for cell in row]
    return {"copy_latency_s": latency, "bandwidths": cells}


def _size(nbytes: int) -> str:
    return f"{nbytes // 1024} KiB" if nbytes < 2**20 else f"{nbytes // 2**20} MiB"


# ---------------------------------------------------------------- the user's loop


def _loop(
    program: _user.Program, device: torch.device, seconds: float, report: Report, facts: list[str]
) -> dict[str, Any]:
    settings = _user.settings(program.loader)
    listed = ", ".join(f"{name}={value}" for name, value in settings.items())
    title = f"{program.name}, {type(program.loader).__name__}({listed or '...'})"
    report.text(f"\nLoader: {title}")
    with progress(3, "loops") as advance:
        loading = _loops.loading(program, seconds)
        advance()
        plain = _loops.plain(program, device, seconds)
        advance()
        prefetched, stats = _loops.prefetched(program, device, seconds)
        advance()
    measured = _measured(program, device, loading, plain, prefetched, stats)
    loops = {
        "the loader alone": loading.loop,
        "loop with .to(device, non_blocking=True)": plain,
        "loop over CUDAPrefetcher(loader)": prefetched,
    }
    cells = [[name, duration(loop.seconds), str(loop.steps)] for name, loop in loops.items()]
    report.text("\n" + table(["", "a batch takes", "batches"], cells))
    if measured.start_share_s > _START_SHOWN * plain.seconds:
        later = f"The first of {loading.pass_length} batches of a pass takes {duration(loading.start_s)} longer"
        report.text(f"{later}: in the loops' figures, not the loader's.")
    if program.step is None:
        report.text("There was no step: both loops only load and copy. Name yours with --step to see what it hides.")
    found = hints(measured)
    advice = _advice(measured, found)
    lines = [wrapped(line, "     " if line.startswith(" ") else "") for line in advice]
    report.text("\n" + verdict(stats.bottleneck), "\n".join(lines))
    times = ", ".join(duration(loop.seconds) for loop in loops.values())
    step = "with a step" if program.step is not None else "without a step"
    facts += [
        f"loader    {title}, {step}",
        f"a batch   alone, plain, prefetched: {times}",
        f"verdict   {stats.bottleneck}",
        f"hints     {'; '.join(f'{hint.change} ({hint.share:.0%})' for hint in found) or 'none'}",
    ]
    return {
        "factory": program.name,
        "loader": type(program.loader).__name__,
        "settings": settings,
        "has_step": program.step is not None,
        "loader_s": loading.loop.seconds,
        "loader_batches": loading.loop.steps,
        "pass_start_s": loading.start_s,
        "pass_length": loading.pass_length,
        "plain_s": plain.seconds,
        "plain_batches": plain.steps,
        "prefetched_s": prefetched.seconds,
        "prefetched_batches": prefetched.steps,
        "bottleneck": stats.bottleneck,
        "hints": [hint._asdict() for hint in found],
        "conclusion": advice,
        "stats": dataclasses.asdict(stats),
    }


def _measured(
    program: _user.Program,
    device: torch.device,
    loading: _loops.Loading,
    plain: _loops.Loop,
    prefetched: _loops.Loop,
    stats: Stats,
) -> Facts:
    timed = max(1, stats.timed_batches)
    settings = _user.settings(program.loader)
    make = functools.partial(
        Facts,
        has_streams=has_streams(device),
        cores=cores(),
        load_s=loading.loop.seconds,
        start_s=loading.start_s,
        pass_length=loading.pass_length,
        plain_s=plain.seconds,
        prefetched_s=prefetched.seconds,
        copy_s=stats.copy_s / timed,
        compute_s=None if program.step is None else stats.compute_s / max(1, stats.timed_steps),
        issue_s=stats.issue_s / timed,
        loader_wait_s=stats.loader_wait_s / max(1, stats.batches),
        pageable_leaves=stats.pageable_leaves,
    )
    if not settings:
        return make(is_data_loader=False)
    del settings["batch_size"]
    return make(**settings)


def _advice(facts: Facts, found: list[Hint]) -> list[str]:
    lines = []
    if found:
        lines.append("What to change, by estimated gain, each by itself (the gains do not add up):")
        lines += [f"  {place}. {hint}" for place, hint in enumerate(found, start=1)]
    else:
        lines.append(why_nothing(facts))
    not_wrapped = why_not_wrapped(facts)
    return lines if not_wrapped is None else [*lines, not_wrapped]
