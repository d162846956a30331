"""Broken variants of the library, each of which the tests must catch: ``python -m tests.mutants [NAME ...]``.

Each variant changes one line in a copy of the project and runs the tests named with it there. A variant that no test
fails on is reported, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    """``old`` in ``prefetch/<module>.py`` becomes ``new``; ``tests`` are pytest arguments."""

    name: str
    module: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant("no wait", "_lane", "consumer.wait_event(arrival.copied)", "pass", "tests/test_streams.py"),
    Mutant("no record", "_memory", "tensor.record_stream(consumer)", "pass", "tests/test_memory.py"),
    Mutant(
        "moved leaves not recorded",
        "_transfer",
        "self.tensors += memory_of(result)",
        "pass",
        "tests/test_properties.py",
    ),
    Mutant(
        "tuples not entered",
        "_batch",
        "return _tuple if kind is tuple else _tuple_subclass",
        "return _untouched",
        "tests/test_properties.py",
    ),
    Mutant(
        "own objects not recorded",
        "_transfer",
        "self.tensors += tensors_on(result, transfer.device)",
        "pass",
        "tests/test_memory.py",
    ),
    Mutant(
        "transform results not recorded",
        "_transfer",
        "return moved, tensors_on(moved, self.device)",
        "return moved, move.tensors",
        "tests/test_memory.py",
    ),
    Mutant(
        "attributes of objects not searched",
        "_search",
        "    return lambda node: stored_attributes(node).values()\n",
        "    return lambda node: ()\n",
        "tests/test_memory.py",
    ),
    Mutant(
        "consumer's stream captured once",
        "_lane",
        "consumer = current_stream(self._device)",
        'consumer = self.__dict__.setdefault("_first", current_stream(self._device))',
        "tests/test_streams.py",
    ),
    Mutant(
        "copy on the consumer's stream",
        "_lane",
        "with on_stream(self._stream) as producer:",
        "with on_stream(current_stream(self._device)) as producer:",
        "tests/test_streams.py",
    ),
    Mutant(
        "blocking copy",
        "_transfer",
        "non_blocking=transfer.non_blocking)",
        "non_blocking=False)",
        "tests/test_streams.py",
    ),
    Mutant(
        "copy waits for the consumer",
        "_lane",
        "        self._memory.make_room()\n",
        "        self._memory.make_room()\n        self._stream.wait_stream(current_stream(self._device))\n",
        "tests/test_streams.py",
    ),
    Mutant("run-ahead not bounded", "_memory", "step.synchronize()", "pass", "tests/test_memory.py"),
    Mutant(
        "run-ahead bound too tight",
        "_memory",
        "_UNFINISHED_STEPS = 1",
        "_UNFINISHED_STEPS = 0",
        "tests/test_streams.py",
    ),
    Mutant(
        "run-ahead bound too wide", "_memory", "_UNFINISHED_STEPS = 1", "_UNFINISHED_STEPS = 2", "tests/test_memory.py"
    ),
    Mutant(
        "a stream each pass",
        "_prefetcher",
        "        if self._lane is None:\n            with _lane_lock:  # two threads may start the first pass\n"
        "                if self._lane is None:\n",
        "        if True:\n            with _lane_lock:\n                if True:\n",
        "tests/test_streams.py",
    ),
    Mutant(
        "device not restored", "_device", "self._device.__exit__(kind, error, trace)", "pass", "tests/test_streams.py"
    ),
    Mutant(
        "stream not restored", "_device", "torch.accelerator.set_stream(self._before)", "pass", "tests/test_streams.py"
    ),
    Mutant(
        "inference tensors",
        "_transfer",
        "if self.moves and torch.is_inference_mode_enabled():",
        "if False:",
        "tests/test_streams.py",
    ),
    Mutant(
        "index not frozen",
        "_device",
        "return torch.device(accelerator.type, torch.accelerator.current_device_index())",
        "return accelerator",
        "tests/test_arguments.py",
    ),
    Mutant(
        "error early",
        "_feeder",
        "queue.append(error)\n            return True\n        try",
        "raise\n        try",
        "tests/test_sequence.py",
    ),
    Mutant(
        "error lost",
        "_feeder",
        "queue.append(error)\n            return True\n        try",
        "return True\n        try",
        "tests/test_sequence.py",
    ),
    Mutant(
        "transform's error lost",
        "_feeder",
        "queue.append(error)\n            return True\n        if",
        "return True\n        if",
        "tests/test_sequence.py",
    ),
    Mutant(
        "asked again after an error",
        "_feeder",
        "self._iterator is None or (queue and isinstance(queue[-1], Exception))",
        "self._iterator is None",
        "tests/test_sequence.py",
    ),
    Mutant(
        "last batch lost",
        "_feeder",
        "if not self._queue:",
        "if len(self._queue) < 1 + (self._iterator is None):",
        "tests/test_sequence.py",
    ),
    Mutant(
        "one batch too far ahead", "_feeder", "<= self._look_ahead", "<= self._look_ahead + 1", "tests/test_sequence.py"
    ),
    Mutant(
        "None ends the pass",
        "_feeder",
        "if not self._queue:",
        "if not self._queue or self._queue[0].batch is None:",
        "tests/test_sequence.py",
    ),
    Mutant(
        "end forgotten",
        "_feeder",
        "            self._iterator = None\n            return True",
        "            return True",
        "tests/test_sequence.py",
    ),
    Mutant(
        "end forgotten on the CPU",
        "_epoch",
        "            self._iterator = None\n            raise",
        "            raise",
        "tests/test_sequence.py",
    ),
    Mutant(
        "StopIteration of a transform ends the pass",
        "_transfer",
        "except StopIteration as error:",
        "except ZeroDivisionError as error:",
        "tests/test_sequence.py",
    ),
    Mutant(
        "delivered batch kept",
        "_lane",
        "return arrival.batch",
        "self._last = arrival.batch; return arrival.batch",
        "tests/test_memory.py",
    ),
    Mutant("host batch not held", "_lane", "self._sources.hold(batch, copied)", "pass", "tests/test_memory.py"),
    Mutant(
        "host batch never released",
        "_memory",
        "if not self._held or not self._held[0][0].query():",
        "if True:",
        "tests/test_memory.py",
    ),
    Mutant(
        "host batches kept at the end",
        "_epoch",
        "last_copied.pop().synchronize()",
        "last_copied.pop()",
        "tests/test_memory.py",
    ),
    Mutant(
        "aliases copied twice",
        "_transfer",
        "self._moved[id(source)] = (source, result)\n        return result\n\n    def other",
        "return result\n\n    def other",
        "tests/test_containers.py",
    ),
    Mutant(
        "in-place .to reaches the source",
        "_transfer",
        "clone = own_copy(source)",
        "clone = source",
        "tests/test_containers.py",
    ),
    Mutant(
        "inner dict shared",
        "_rebuild",
        "isinstance(value, (dict, list, set, deque))",
        "isinstance(value, ())",
        "tests/test_containers.py",
    ),
    Mutant(
        "inner objects shared",
        "_rebuild",
        " or (has_own_to(type(value)) and not isinstance(value, type))",
        "",
        "tests/test_containers.py",
    ),
    Mutant(
        "copies lose their aliases",
        "_rebuild",
        "    if id(value) in memo:\n        return memo[id(value)]\n",
        "",
        "tests/test_containers.py",
    ),
    Mutant(
        "__post_init__ runs again",
        "_batch",
        "with_attributes(object.__new__(type(node)), visited)",
        "with_attributes(type(node)(None), visited)",
        "tests/test_containers.py",
    ),
    Mutant(
        "remade containers not compared",
        "_batch",
        " and _equal(list(items_of(clone)), items)",
        "",
        "tests/test_containers.py",
    ),
    Mutant(
        "batch_sizes moved", "_batch", 'del fields["batch_sizes"]', 'fields["batch_sizes"]', "tests/test_containers.py"
    ),
    Mutant(
        "cast before the copy",
        "_transfer",
        "result = source.to(transfer.device, non_blocking=transfer.non_blocking)",
        "result = transfer.convert(source).to(transfer.device, non_blocking=transfer.non_blocking)",
        "tests/test_transform.py",
    ),
    Mutant(
        "closed-over tensors not awaited",
        "_lane",
        "if self._transfer.has_transform:",
        "if False:",
        "tests/test_transform.py",
    ),
    Mutant(
        "device leaves not awaited", "_lane", "self._stream.wait_stream(producer)", "pass", "tests/test_transform.py"
    ),
    Mutant("transform with gradients", "_transfer", "with torch.no_grad():\n", "if True:\n", "tests/test_transform.py"),
    Mutant(
        "false transform not called",
        "_transfer",
        "if self._transform is None:\n            return moved",
        "if not self._transform:\n            return moved",
        "tests/test_transform.py",
    ),
    Mutant("pass kept by an error that waits", "_epoch", "del self  # see", "pass  # see", "tests/test_memory.py"),
    Mutant(
        "end of a pass waits for all passes",
        "_epoch",
        "last_copied.pop().synchronize()",
        "lane._last_copied.synchronize(); last_copied.pop()",
        "tests/test_memory.py",
    ),
    Mutant(
        "transforms not awaited after a break",
        "_lane",
        ".wait_event(self._last_copied)",
        "",
        "tests/test_transform.py",
    ),
    Mutant(
        "asynchronous copies without streams",
        "_transfer",
        "self.non_blocking = has_streams(device)",
        "self.non_blocking = self.moves",
        "tests/test_streams.py",
    ),
    Mutant(
        "device tensors not passed to the consumer",
        "_lane",
        "tensors + resident,",
        "tensors,",
        "tests/test_transform.py",
    ),
    Mutant("items of subclasses not searched", "_search", ", *items(node)]", "]", "tests/test_memory.py"),
    Mutant(
        "attributes of tensors not searched",
        "_search",
        "if type(node) is not torch.Tensor or node.__dict__:",
        "if False:",
        "tests/test_memory.py",
    ),
    Mutant(
        "host batches unbounded under errors",
        "_memory",
        "for copied in waits_for:",
        "for copied in []:",
        "tests/test_memory.py",
    ),
    Mutant(
        "host batch held that was not copied", "_lane", "if moved is not batch:", "if True:", "tests/test_memory.py"
    ),
    Mutant(
        "waits for the parent's copies",
        "_memory",
        "if os.getpid() != self._process:",
        "if False:",
        "tests/test_memory.py",
    ),
    Mutant(
        "frames of waiting errors not cleared",
        "_feeder",
        "traceback.clear_frames(item.__traceback__)",
        "pass",
        "tests/test_memory.py",
    ),
    Mutant(
        "closed pass goes on",
        "_feeder",
        "if self._iterator is not None:  # the",
        "if True:  # the",
        "tests/test_transform.py",
    ),
    Mutant(
        "state of the look-ahead", "_prefetcher", "if name in _NOT_DELEGATED:", "if False:", "tests/test_delegation.py"
    ),
    Mutant(
        "stream pickled",
        "_prefetcher",
        'return self.__dict__ | {"_lane": None}',
        "return self.__dict__",
        "tests/test_delegation.py",
    ),
    Mutant(
        "iterated at construction",
        "_prefetcher",
        "self._loader = loader",
        "self._loader = loader; iter(loader)",
        "tests/test_arguments.py",
    ),
]


def places(mutant: Mutant) -> int:
    """How often the line that the mutant changes is there: it must be once."""
    return (ROOT / "prefetch" / f"{mutant.module}.py").read_text().count(mutant.old)


def run_tests(tests: str, mutant: Mutant | None = None) -> tuple[int, str]:
    """The exit code of pytest in a copy of the project, and its first failure or last line; 1 if the tests hang."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("prefetch", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            module = Path(folder, "prefetch", f"{mutant.module}.py")
            module.write_text(module.read_text().replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
        try:
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return 1, "the tests hang"
    lines = (run.stdout + run.stderr).splitlines()
    return run.returncode, next((line[7:110] for line in lines if line.startswith("FAILED")), lines[-1])


def main() -> int:
    """Try the named mutants, or all of them."""
    options = argparse.ArgumentParser(description="Break the library on purpose and see whether the tests notice.")
    options.add_argument("names", nargs="*", metavar="NAME", help="a mutant's name; default: all of them")
    names = options.parse_args().names
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        options.error(f"argument NAME: no such mutant, got {sorted(unknown)}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    for tests in sorted({mutant.tests for mutant in chosen}):
        code, line = run_tests(tests)
        if code:
            print(f"{tests} fails without any mutant: {line}")
            return 2
    missed = 0
    for mutant in chosen:
        if places(mutant) != 1:
            code, line = 0, f"its line is there {places(mutant)} times"
        else:
            code, line = run_tests(mutant.tests, mutant)
        missed += code != 1
        print(f"{'caught' if code == 1 else 'SURVIVED':8} {mutant.name}: {line}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
