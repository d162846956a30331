"""How near each loop comes to the least possible time, by the clock: ``python -m benchmarks.compare``.

On a GPU where there is one, else on the simulated accelerator, where copies and kernels last as long as they are told,
in threads of their own, while loop and loader run as they would beside a GPU. The result says what it was measured on.

Each loop is given as a ratio to the least possible time of a pass: in every step the longest of load, copy and compute,
each of them measured alone in the same run, and the others once, for the start and the end. Where the loop
synchronises, the compute is measured with that. Rounds alternate, and the fastest of each counts, since other work on
the machine can only add. Memory is what the device's allocator has reserved after the first pass over "large batches",
in batches: a loop that reserves as many as a pass has would reserve more in a longer one. The
host's cost of one batch of two small tensors, over the bare loader, is measured where the device takes no time.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.devices import Device, SimulatedDevice, measured_device
from benchmarks.harness import save, show
from benchmarks.peers import PEERS, Peer, moved
from benchmarks.scenarios import READY, SCENARIOS, Scenario, images, large, loader_of

ROUNDS = 3
HOST_ROUNDS = 20
HOST = Scenario("host", large, copy=0, compute=1)
HOST_BYTES = 2 * 4096
MEMORY_SCENARIO = "large batches"
SETTLED = 0.03  # ratios that differ by less are called equal: two runs of one loop differ by as much


def pass_s(batches: Iterable[object], step: Callable[[], None], *, synchronises: bool) -> float:
    """Seconds from the start of a pass to the end of its last step on the device."""
    consumer = torch.accelerator.current_stream()
    start = time.perf_counter()
    for _ in batches:
        step()
        if synchronises:
            consumer.synchronize()
    consumer.synchronize()
    return time.perf_counter() - start


def nothing() -> None:
    """The step where only the rest is measured."""


def takes(peer: Peer, scenario: Scenario) -> bool:
    """Whether the loop can be run on such batches."""
    return not peer.images_only or scenario.batch is images


def copies_s(host: list[Any], steps: int, device: Device) -> float:
    """Seconds of so many copies, one after the other, of batches that are there."""
    start = time.perf_counter()
    for batch in itertools.islice(itertools.cycle(host), steps):
        moved(batch, device.device, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    return time.perf_counter() - start


def on_device(name: str, batches: Iterable[Any], device: Device) -> Iterator[Any]:
    """The batches.

    Raises:
        RuntimeError: One of them is elsewhere, so that the loop would be compared without its copies.
    """
    for batch in batches:
        for tensor in batch.values() if isinstance(batch, dict) else batch:
            if tensor.device != device.device:
                raise RuntimeError(f"{name} leaves a tensor on {tensor.device}, not on {device.device}")
        yield batch


def measure(scenario: Scenario, peers: list[Peer], device: Device) -> dict[str, Any]:
    """The ratio of each loop, and what the parts take."""
    nbytes = device.batch_bytes(scenario.copy)
    loader = loader_of(scenario, nbytes)
    host = [batch for position, batch in enumerate(loader) if position < READY]  # to its end: workers would go on
    step = device.compute(scenario.compute)
    loops = {peer.name: peer.make(loader, device.device) for peer in peers if takes(peer, scenario)}
    alone: dict[str, list[float]] = {"load": [], "copy": [], "compute": []}
    times: dict[str, list[float]] = {name: [] for name in loops}
    reserved_bytes: dict[str, int] = {}
    for round_number in range(ROUNDS + 1):
        parts = {
            "load": pass_s(loader, nothing, synchronises=False),
            "copy": copies_s(host, scenario.steps, device),
            "compute": pass_s(range(scenario.steps), step, synchronises=scenario.synchronises),
        }
        for name, batches in loops.items():
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            if round_number:
                times[name].append(pass_s(batches, step, synchronises=scenario.synchronises))
            else:  # the first call of anything takes longer
                before = torch.accelerator.memory_reserved()
                pass_s(on_device(name, batches, device), step, synchronises=scenario.synchronises)
                reserved_bytes[name] = torch.accelerator.memory_reserved() - before
        if round_number:
            for part, seconds in parts.items():
                alone[part].append(seconds)
    passes = {part: min(seconds) for part, seconds in alone.items()}
    longest = max(passes.values())
    least = longest + (sum(passes.values()) - longest) / scenario.steps
    return {
        "ms a step": {part: round(seconds / scenario.steps * 1e3, 3) for part, seconds in passes.items()},
        "ratios": {name: round(min(seconds) / least, 3) for name, seconds in times.items()},
        "reserved": {name: round(count / nbytes, 2) for name, count in reserved_bytes.items()} if nbytes else {},
    }


def host_us(peers: list[Peer], device: Device) -> dict[str, float]:
    """Microseconds of the host for a batch of two small tensors, over the bare loader."""
    device.only_host_counts()
    loader = loader_of(HOST, HOST_BYTES)
    loops: dict[str, Iterable[Any]] = {"": loader}
    loops |= {peer.name: peer.make(loader, device.device) for peer in peers if takes(peer, HOST)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(HOST_ROUNDS):
        for name, batches in loops.items():
            torch.accelerator.synchronize()
            start = time.perf_counter()
            for _ in batches:
                pass
            times[name].append(time.perf_counter() - start)
    bare = min(times.pop(""))
    return {name: round((min(seconds) - bare) / HOST.steps * 1e6, 1) for name, seconds in times.items()}


def lost(columns: dict[str, dict[str, Any]]) -> list[str]:
    """Where a loop of others is quicker than the best, or than the plain use, of this library."""
    lines = []
    for title, column in columns.items():
        ratios = column["ratios"]
        theirs = {peer.name: ratios[peer.name] for peer in PEERS if peer.name in ratios and not peer.is_ours}
        ours = {peer.name: ratios[peer.name] for peer in PEERS if peer.name in ratios and peer.is_ours}
        quickest = min(theirs, key=theirs.__getitem__)
        lines += [
            f"{title}: {name} {ratio:.2f}, {quickest} {theirs[quickest]:.2f}"
            for name, ratio in ours.items()
            if ratio > theirs[quickest] + SETTLED
        ]
    return lines


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.parse_args()
    device = measured_device()
    peers = [peer for peer in PEERS if peer.package is None or peer.version is not None]
    for peer in PEERS:
        if peer not in peers:
            print(f"left out, since {peer.package} is not installed: {peer.name}")
    columns = {
        scenario.name: measure(scenario, peers, device)
        for scenario in tqdm(SCENARIOS, desc="scenarios", unit="scenario", disable=None)
    }
    host = host_us(peers, device)
    rows = [
        {"loop": peer.name}
        | {title: column["ratios"].get(peer.name) for title, column in columns.items()}
        | {
            "reserved, batches": columns[MEMORY_SCENARIO]["reserved"].get(peer.name),
            "host, us a batch": host.get(peer.name),
        }
        for peer in peers
    ]
    show(rows)
    for line in lost(columns):
        print(f"slower than a peer by more than {SETTLED:g}: {line}")
    name = "compare" if isinstance(device, SimulatedDevice) else "compare_" + "_".join(device.label.split()).lower()
    versions = {peer.package: peer.version for peer in peers if peer.package is not None}
    scenarios = {title: column["ms a step"] for title, column in columns.items()}
    path = save(name, rows, device=device.label, versions=versions, ms_a_step=scenarios)
    print(f"\nratios to the least possible time; measured on: {device.label}; written to {path}")


if __name__ == "__main__":
    main()
