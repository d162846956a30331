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
        "self.tensors += memory\n        return result",
        "return result",
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
        "self.tensors += found",
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
        "consumer = current_stream(self._device)\n        mark = arrival.mark",
        'consumer = self.__dict__.setdefault("_first", current_stream(self._device))\n        mark = arrival.mark',
        "tests/test_streams.py",
    ),
    Mutant(
        "copy on the consumer's stream",
        "_lane",
        "with on_stream(side.stream) as producer:",
        "with on_stream(current_stream(self._device)) as producer:",
        "tests/test_streams.py",
    ),
    Mutant(
        "blocking copy",
        "_transfer",
        "return source.to(self.device, non_blocking=self.non_blocking)",
        "return source.to(self.device, non_blocking=False)",
        "tests/test_streams.py",
    ),
    Mutant(
        "copy waits for the consumer",
        "_lane",
        "        mark = None if meter.mark",
        "        side.stream.wait_stream(current_stream(self._device))\n        mark = None if meter.mark",
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
        "ready batches count as on their way",
        "_memory",
        "max(0, self._prefetch_batches - in_flight)",
        "0",
        "tests/test_memory.py -k hold_no_batch",
    ),
    Mutant(
        "batches on their way not counted",
        "_lane",
        "self._issued - self._moved_on",
        "0",
        "tests/test_memory.py",
    ),
    Mutant(
        "run-ahead bound too wide", "_memory", "_UNFINISHED_STEPS = 1", "_UNFINISHED_STEPS = 2", "tests/test_memory.py"
    ),
    Mutant(
        "a stream each pass",
        "_prefetcher",
        "        if self._side is None:\n"
        "            with _side_lock:  # two threads may start the first pass\n"
        "                if self._side is None:\n",
        "        if True:\n            with _side_lock:\n                if True:\n",
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
        "queue.append(Item(None, error, self._state.fetched()))",
        "raise",
        "tests/test_sequence.py -k TestErrors",
    ),
    Mutant(
        "error lost",
        "_feeder",
        "queue.append(Item(None, error, self._state.fetched()))",
        "pass",
        "tests/test_sequence.py -k TestErrors",
    ),
    Mutant(
        "transform's error lost",
        "_feeder",
        "queue.append(Item(None, error, snapshot))",
        "pass",
        "tests/test_sequence.py -k TestErrors",
    ),
    Mutant(
        "asked again after an error",
        "_feeder",
        "self._iterator is None or (queue and queue[-1].error is not None)",
        "self._iterator is None",
        "tests/test_sequence.py -k TestErrors",
    ),
    Mutant(
        "last batch lost",
        "_feeder",
        "if not queue:",
        "if not queue or (len(queue) == 2 and queue[1].is_end):",
        "tests/test_sequence.py -k none_and_numbers",
    ),
    Mutant(
        "one batch too far ahead",
        "_feeder",
        "len(queue) <= self._look_ahead",
        "len(queue) <= self._look_ahead + 1",
        "tests/test_sequence.py",
    ),
    Mutant(
        "None ends the pass",
        "_feeder",
        "        if not queue:\n",
        "        if not queue or (queue[0].error is None and queue[0].issued.batch is None):\n",
        "tests/test_sequence.py -k none_and_numbers",
    ),
    Mutant(
        "iterator kept at the end",
        "_feeder",
        "            self._iterator = None\n            queue.append(",
        "            queue.append(",
        "tests/test_sequence.py -k let_go",
    ),
    Mutant(
        "end forgotten on the CPU",
        "_epoch",
        "            self.close()\n            raise",
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
    Mutant(
        "host batch not held", "_lane", "side.sources.hold((batch, resident), copied)", "pass", "tests/test_memory.py"
    ),
    Mutant("host batch never released", "_sources", "if not first[0].query():", "if True:", "tests/test_memory.py"),
    Mutant(
        "host batches kept at the end",
        "_lane",
        "            copied.synchronize()\n        self.end()",
        "            pass\n        self.end()",
        "tests/test_memory.py",
    ),
    Mutant(
        "aliases copied twice",
        "_transfer",
        "        result = self._moved(source)\n        self._done[id(source)] = (source, result)\n",
        "        result = self._moved(source)\n",
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
        "result = transfer.copy(source)",
        "result = transfer.copy(transfer.convert(source))",
        "tests/test_transform.py",
    ),
    Mutant(
        "closed-over tensors not awaited",
        "_lane",
        "if side.transfer.has_transform:",
        "if False:",
        "tests/test_transform.py",
    ),
    Mutant(
        "device leaves not awaited", "_lane", "side.stream.wait_stream(producer)", "pass", "tests/test_transform.py"
    ),
    Mutant("transform with gradients", "_transfer", "with torch.no_grad():\n", "if True:\n", "tests/test_transform.py"),
    Mutant(
        "false transform not called",
        "_transfer",
        "if self._transform is None:\n            for",
        "if not self._transform:\n            for",
        "tests/test_transform.py",
    ),
    Mutant("pass kept by an error that waits", "_epoch", "del self  # see", "pass  # see", "tests/test_memory.py"),
    Mutant(
        "end of a pass waits for all passes",
        "_lane",
        "            copied.synchronize()\n        self.end()",
        "            self._side.last_issued.synchronize()\n        self.end()",
        "tests/test_memory.py",
    ),
    Mutant(
        "transforms not awaited after a break",
        "_lane",
        "caller.wait_event(side.last_issued)",
        "pass",
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
        "device tensors not passed to the consumer", "_lane", "lent + resident,", "lent,", "tests/test_transform.py"
    ),
    Mutant("items of subclasses not searched", "_search", ", *items(node)]", "]", "tests/test_memory.py"),
    Mutant(
        "attributes of tensors not searched",
        "_search",
        "if kind is torch.Tensor and not node.__dict__:",
        "if kind is torch.Tensor:",
        "tests/test_memory.py",
    ),
    Mutant(
        "host batches unbounded under errors",
        "_sources",
        "for copied, _ in held[: len(held) - self._limit + 1]:",
        "for copied, _ in []:",
        "tests/test_memory.py",
    ),
    Mutant(
        "host batch held that was not copied", "_lane", "if moved is not batch:", "if True:", "tests/test_memory.py"
    ),
    Mutant(
        "waits for the parent's copies",
        "_sources",
        "if os.getpid() != self._process:",
        "if False:",
        "tests/test_memory.py",
    ),
    Mutant(
        "frames of waiting errors not cleared",
        "_feeder",
        "traceback.clear_frames(item.error.__traceback__)",
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
        "state of the look-ahead",
        "_state",
        "copy.deepcopy(self._loader.state_dict()) if delivered is None else delivered.copied()",
        "copy.deepcopy(self._loader.state_dict())",
        "tests/test_state.py",
    ),
    Mutant(
        "stream pickled",
        "_prefetcher",
        'return self.__dict__ | {"_side": None, ',
        "return self.__dict__ | {",
        "tests/test_delegation.py",
    ),
    Mutant(
        "iterated at construction",
        "_prefetcher",
        "self._loader = loader",
        "self._loader = loader; iter(loader)",
        "tests/test_arguments.py",
    ),
    Mutant(
        "batch held back",
        "_background",
        "self.ready.append((position, item, loading))\n        self.news.ring()",
        "self.held = [*getattr(self, 'held', []), (position, item, loading)]\n"
        "        if position == -1 or len(self.held) > 1:\n"
        "            self.ready += self.held if position == -1 else self.held[:1]\n"
        "            self.held = self.held[1:]\n"
        "            self.news.ring()",
        "tests/test_background.py",
    ),
    Mutant(
        "worker's stream recorded",
        "_lane",
        "self._side.lent.hand_over(lent, consumer)",
        "self._side.lent.hand_over(lent, self._side.stream)",
        "tests/test_memory.py",
    ),
    Mutant(
        "thread runs ahead",
        "_background",
        "if self._is_asked_for(position + 1 - look_ahead):",
        "if not self.is_stopped:",
        "tests/test_background.py",
    ),
    Mutant(
        "one batch in hand without look-ahead",
        "_background",
        "in_hand = min(look_ahead, 1)",
        "in_hand = 1",
        "tests/test_background.py",
    ),
    Mutant("thread not joined", "_background", "is_gone = self.join()", "is_gone = True", "tests/test_background.py"),
    Mutant(
        "thread not told to stop",
        "_background",
        "        self.is_stopped = True\n        self._requests.ring()",
        "        self._requests.ring()",
        "tests/test_background.py",
    ),
    Mutant(
        "error in the thread lost",
        "_background",
        "self._put(position, Item(None, error, snapshot or self._snapshot()))",
        "pass",
        "tests/test_sequence.py -k TestErrors",
    ),
    Mutant(
        "thread asks past an error",
        "_background",
        "position + 1 if failed else position + 1 - look_ahead - in_hand",
        "position + 1 - look_ahead - in_hand",
        "tests/test_sequence.py -k TestErrors",
    ),
    Mutant("caller's modes not taken over", "_background", "with caller:", "if True:", "tests/test_background.py"),
    Mutant(
        "tensors made before the pass not awaited",
        "_lane",
        "        side.loaders_stream.wait_stream(current_stream(self._device))\n",
        "",
        "tests/test_background.py",
    ),
    Mutant(
        "thread beside a transform",
        "_prefetcher",
        " and not self._transfer.has_transform and loads_apart",
        " and loads_apart",
        "tests/test_background.py",
    ),
    Mutant(
        "thread beside the user's sampler",
        "_loaders",
        "for part in parts_of(loader))",
        "for part in [loader])",
        "tests/test_background.py",
    ),
    Mutant(
        "thread on the CPU",
        "_prefetcher",
        "background = has_streams(self._device) and",
        "background =",
        "tests/test_background.py",
    ),
    Mutant(
        "thread kept a host batch",
        "_background",
        "                batch = None  # neither this frame nor an error that the caller keeps is to hold it\n",
        "",
        "tests/test_memory.py -k keeps_no_host_batch",
    ),
    Mutant("stuck loader not told of", "_epoch", "if not is_gone:", "if False:", "tests/test_background.py"),
    Mutant(
        "state not copied from the loader",
        "_state",
        "copy.deepcopy(take())",
        "take()",
        "tests/test_state.py -k TestSnapshots",
    ),
    Mutant(
        "state not copied for the caller",
        "_state",
        "return copy.deepcopy(self._state)",
        "return self._state",
        "tests/test_state.py -k TestSnapshots",
    ),
    Mutant(
        "state overwritten by an open pass",
        "_state",
        "                self._pass += 1\n                self._delivered = snapshot\n\n    def new_pass",
        "                self._delivered = snapshot\n\n    def new_pass",
        "tests/test_state.py -k TestSnapshots",
    ),
    Mutant(
        "state of an older pass",
        "_state",
        "            self._pass += 1\n\n    def track",
        "            pass\n\n    def track",
        "tests/test_state.py -k TestSnapshots",
    ),
    Mutant(
        "no state at the start",
        "_state",
        "self._delivered = tracked.fetched()",
        "pass",
        "tests/test_state.py -k TestSnapshots",
    ),
    Mutant(
        "end of the pass not in the state",
        "_feeder",
        "queue.append(Item(None, StopIteration(), self._state.fetched()))",
        "queue.append(Item(None, StopIteration(), None))",
        "tests/test_state.py",
    ),
    Mutant(
        "pageable leaves not staged",
        "_staging",
        "return _staged(source) if self._pins",
        "return _staged(source) if False",
        "tests/test_staging.py -k host_does_not_wait",
    ),
    Mutant(
        "staging buffer overwritten",
        "_staging",
        "    buffer = torch.empty_strided(",
        "    known = globals().setdefault('_known', {})\n"
        "    buffer = known.get(key := (*source.shape, *strides)) if not source.is_complex() else None\n"
        "    buffer = known[key] = buffer if buffer is not None else torch.empty_strided(",
        "tests/test_staging.py -k overwritten",
    ),
    Mutant(
        "strides of a staged view lost",
        "_staging",
        'else tensor.to("meta").stride()',
        'else torch.empty(tensor.shape, device="meta").stride()',
        "tests/test_staging.py",
    ),
    Mutant(
        "gaps in pinned memory not staged",
        "_staging",
        "if _is_dense(source):",
        "if True:",
        "tests/test_staging.py -k gaps",
    ),
    Mutant(
        "pageable memory told of each time",
        "_staging",
        "        self._looks_for_pageable = False\n        self._pageable",
        "        self._pageable",
        "tests/test_staging.py",
    ),
    Mutant(
        "overtaken pass not told",
        "_prefetcher",
        "            epoch.supersede(iterator)\n",
        "            pass\n",
        "tests/test_end.py -k Overtaken",
    ),
    Mutant(
        "overtaken pass still at work", "_prefetcher", "epoch.supersede(None)", "pass", "tests/test_end.py -k Overtaken"
    ),
    Mutant("registered parts not searched", "_search", "*known.parts(node).values()]", "]", "tests/test_registered.py"),
    Mutant(
        "functions searched",
        "_search",
        "FunctionType, BuiltinFunctionType, ModuleType, torch",
        "ModuleType, torch",
        "tests/test_memory.py -k functions",
    ),
    Mutant(
        "open to the compiler",
        "_compiler",
        'if "torch._dynamo" not in sys.modules:',
        "if True:",
        "tests/test_compile.py",
    ),
    Mutant(
        "overtaken by another prefetcher",
        "_prefetcher",
        "for epoch in _open_passes.alive():\n            epoch",
        "for epoch in self._passes.alive():\n            epoch",
        "tests/test_end.py -k Overtaken",
    ),
    Mutant(
        "interrupted hand-over forgotten",
        "_background",
        "        self._next = position + 1\n        work.ready.popleft()\n",
        "",
        "tests/test_background.py -k ctrl_c",
    ),
    Mutant("state waits for ever", "_state", "if is_over():", "if False:", "tests/test_state.py -k Locks"),
    Mutant(
        "state locked in a forked process",
        "_state",
        "if self._process != os.getpid():",
        "if False:",
        "tests/test_state.py -k Locks",
    ),
    Mutant(
        "released twice",
        "_sources",
        "if self._held and self._held[0] is first:",
        "if self._held:",
        "tests/test_memory.py -k within_a_release",
    ),
    Mutant(
        "thread left behind not awaited",
        "_prefetcher",
        "            wait_for_threads(loader)\n",
        "",
        "tests/test_end.py -k Overtaken",
    ),
    Mutant(
        "registered results not checked",
        "_registered",
        "if not isinstance(other, self.kind) or other is node:",
        "if False:",
        "tests/test_registered.py",
    ),
    Mutant(
        "caller not after the loader's own work",
        "_lane",
        "caller.wait_stream(side.loaders_stream)",
        "pass",
        "tests/test_background.py -k computes_on",
    ),
    Mutant(
        "device tensors not held under a cast",
        "_lane",
        "hold((batch, resident), copied)",
        "hold(batch, copied)",
        "tests/test_memory.py -k while_they_are_cast",
    ),
    Mutant(
        "two threads after an interrupted start",
        "_background",
        "if self._thread is not None:  # the",
        "if False:  # the",
        "tests/test_background.py -k ctrl_c",
    ),
    Mutant(
        "iterator that is still asked",
        "_prefetcher",
        "        check_is_free(iterator)\n",
        "",
        "tests/test_end.py -k Overtaken",
    ),
    Mutant(
        "ready batch waits for a state",
        "_state",
        "        with self._fields:\n            if number",
        "        with self._own_lock():\n            if number",
        "tests/test_state.py -k Locks",
    ),
    Mutant(
        "copy goes on where the look-ahead is",
        "_state",
        "self.load_state_dict(delivered.copied())",
        "self._delivered = delivered",
        "tests/test_state.py -k TestSnapshots",
    ),
    Mutant(
        "exit without a word to the threads",
        "_background",
        "_at_work.add(self)",
        "pass",
        "tests/test_end.py -k something",
    ),
    Mutant(
        "caller's context lost",
        "_background",
        "contextvars.copy_context().run",
        "contextvars.Context().run",
        "tests/test_background.py -k context",
    ),
    Mutant(
        "values before they are there",
        "_download",
        "            copied.synchronize()\n            with self._lock:",
        "            with self._lock:",
        "tests/test_host.py",
    ),
    Mutant("done before the copy", "_download", "copied is None or copied.query()", "True", "tests/test_host.py"),
    Mutant(
        "done() waits",
        "_download",
        "copied is None or copied.query()",
        "copied is None or copied.synchronize() is None",
        "tests/test_host.py -k done_in_the_end",
    ),
    Mutant(
        "result waits for later copies",
        "_download",
        "            copied.synchronize()\n            with self._lock:",
        "            self._side.synchronize()\n            with self._lock:",
        "tests/test_host.py",
    ),
    Mutant(
        "snapshot freed under its copy",
        "_download",
        "            snapshot.record_stream(self._side)\n",
        "",
        "tests/test_host.py",
    ),
    Mutant(
        "snapshot of a layout freed under its copy",
        "_download",
        "            memory.record_stream(self._side)\n",
        "            pass\n",
        "tests/test_host_trees.py",
    ),
    Mutant("copy before the producer", "_download", "        side.wait_stream(caller)\n", "", "tests/test_host.py"),
    Mutant(
        "copy on the caller's stream",
        "_download",
        "    with on_stream(side) as caller:\n        side.wait_stream(caller)",
        "    with on_stream(torch.accelerator.current_stream(side.device.index)) as caller:\n        pass",
        "tests/test_host.py",
    ),
    Mutant(
        "no snapshot",
        "_download",
        "source.to(self._bus_type(source), copy=True)",
        "source.to(self._bus_type(source)).resolve_conj().resolve_neg()",
        "tests/test_host.py",
    ),
    Mutant(
        "objects overwritten under their copy",
        "_download",
        "                caller.wait_stream(self._side)",
        "                pass",
        "tests/test_host_trees.py",
    ),
    Mutant(
        "submissions not bounded",
        "_host",
        "self._let_go(self._most - 1)",
        "self._let_go(1000)",
        "tests/test_host.py -k TestBounds",
    ),
    Mutant(
        "one submission too many",
        "_host",
        "self._let_go(self._most - 1)",
        "self._let_go(self._most)",
        "tests/test_host.py -k TestBounds",
    ),
    Mutant(
        "one submission too few",
        "_host",
        "self._let_go(self._most - 1)",
        "self._let_go(max(self._most - 2, 0))",
        "tests/test_host.py -k TestBounds",
    ),
    Mutant(
        "waits though there is room",
        "_host",
        "if len(self._pending) < most and not oldest.is_done():",
        "if len(self._pending) < most - 1 and not oldest.is_done():",
        "tests/test_host.py -k TestBounds",
    ),
    Mutant(
        "results in pinned memory",
        "_download",
        "        return pageable\n",
        "        return pinned\n",
        "tests/test_host.py",
    ),
    Mutant(
        "pinned memory kept by futures",
        "_download",
        "        elif self._lock.acquire(blocking=False):",
        "        elif False:",
        "tests/test_host.py -k TestBounds",
    ),
    Mutant(
        "values moved twice",
        "_download",
        "        self._landings = []\n        self._copied = None  # last",
        "        pass  # last",
        "tests/test_host.py",
    ),
    Mutant(
        "unwanted values moved",
        "_download",
        "if self.future is None or self.future() is None:",
        "if self.future is None:",
        "tests/test_host.py -k unwanted",
    ),
    Mutant(
        "copier waits for a thread that asks",
        "_download",
        "self._lock.acquire(blocking=False)",
        "self._lock.acquire()",
        "tests/test_host_end.py -k while_the_copier",
    ),
    Mutant(
        "cast on the host",
        "_download",
        "source.dtype if source.dtype.itemsize < result_type.itemsize else result_type",
        "source.dtype",
        "tests/test_host_trees.py -k TestDtype",
    ),
    Mutant(
        "wide type crosses the bus",
        "_download",
        "source.dtype if source.dtype.itemsize < result_type.itemsize else result_type",
        "result_type",
        "tests/test_host_trees.py -k TestDtype",
    ),
    Mutant(
        "integers cast",
        "_download",
        "self._dtype is not None and source.is_floating_point()",
        "self._dtype is not None",
        "tests/test_host_trees.py -k TestDtype",
    ),
    Mutant(
        "aliases lost on the way back",
        "_download",
        "        known = self._known.get(id(source))\n        if known is None:\n            result = self._resident",
        "        known = None\n        if known is None:\n            result = self._resident",
        "tests/test_host_trees.py",
    ),
    Mutant(
        "aliased objects copied twice",
        "_download",
        "        known = self._known.get(id(source))\n        if known is None:\n            clone",
        "        known = None\n        if known is None:\n            clone",
        "tests/test_host_trees.py",
    ),
    Mutant(
        "aliased arrays made twice",
        "_arrays",
        "if id(tensor) not in self._arrays:",
        "if True:",
        "tests/test_host_trees.py",
    ),
    Mutant(
        "in-place .to reaches the source on the way back",
        "_download",
        "clone = own_copy(source)",
        "clone = source",
        "tests/test_host_trees.py",
    ),
    Mutant(
        "graph kept on the way back",
        "_download",
        "(source.detach() if source.requires_grad else source)",
        "source",
        "tests/test_host_trees.py",
    ),
    Mutant(
        "inference tensors on the way back",
        "_download",
        "with torch.inference_mode(False), torch.no_grad():",
        "with torch.no_grad():",
        "tests/test_host_contexts.py",
    ),
    Mutant(
        "devices of objects not looked for",
        "_download",
        "for tensor in tensors_in(obj):",
        "for tensor in ():",
        "tests/test_host_contexts.py",
    ),
    Mutant("copies during capture", "_host", "if is_capturing(device):", "if False:", "tests/test_host_contexts.py"),
    Mutant(
        "close does not wait", "_host", "            self._let_go(0)\n", "            pass\n", "tests/test_host_end.py"
    ),
    Mutant(
        "closed copier goes on",
        "_host",
        "        if self._is_closed:\n",
        "        if False:\n",
        "tests/test_host_end.py",
    ),
    Mutant(
        "one submission at a time, even within another",
        "_host",
        "self._lock = threading.RLock()",
        "self._lock = threading.Lock()",
        "tests/test_host_end.py -k within",
    ),
    Mutant(
        "copier of the parent process used",
        "_host",
        '            raise PrefetchError("this HostCopier is of another process',
        '            PrefetchError("this HostCopier is of another process',
        "tests/test_host_end.py -k forked",
    ),
    Mutant(
        "values of the parent process waited for",
        "_download",
        "if copied is not None and os.getpid() != self._process:",
        "if False:",
        "tests/test_host_end.py -k forked",
    ),
    Mutant(
        "close in a forked process waits for its parent's copies",
        "_host",
        "            return  # what is pending",
        "            pass  # what is pending",
        "tests/test_host_end.py -k forked",
    ),
    Mutant(
        "one opaque function for all",
        "_compiler",
        "kept: Any = function",
        "kept: Any = opaque",
        "tests/test_host_contexts.py -k opaque",
    ),
    Mutant(
        "to_host open to the compiler",
        "_host",
        "@opaque\ndef _to_host",
        "def _to_host",
        "tests/test_host_contexts.py -k compiled",
    ),
    Mutant(
        "what unflatten makes is not recorded",
        "_batch",
        "    visitor.made(made)\n",
        "",
        "tests/test_registered.py",
    ),
    Mutant(
        "slot overwritten while held",
        "_static_memory",
        "self._delivered.popleft()\n            return _Slot(), True",
        "return self._delivered.popleft(), True",
        "tests/test_static.py",
    ),
    Mutant(
        "views not seen",
        "_static_memory",
        "return self._uses() > self._own_uses",
        "return False",
        "tests/test_static.py",
    ),
    Mutant("storages not seen", "_static_memory", " + sys.getrefcount(self.storage)", "", "tests/test_static.py"),
    Mutant(
        "slot written to before its batch is done with",
        "_static_memory",
        "            side.wait_event(event)\n",
        "            pass\n",
        "tests/test_streams.py",
    ),
    Mutant(
        "slot free as soon as a batch is handed over",
        "_static_memory",
        "for slot in [slot for slot in self._delivered if not slot.is_held()]:",
        "for slot in list(self._delivered):",
        "tests/test_static.py",
    ),
    Mutant("grown slots not recorded", "_static_memory", "            self.lent_to = []\n", "", "tests/test_static.py"),
    Mutant(
        "slots not recorded",
        "_static_memory",
        "return [buffer.tensor for buffer in slot.buffers]",
        "return []",
        "tests/test_static.py",
    ),
    Mutant(
        "last consumer's stream not awaited",
        "_static_memory",
        "else [consumer, slot.consumer]",
        "else [consumer]",
        "tests/test_streams.py",
    ),
    Mutant(
        "slots end with their pass", "_static_memory", "self._policy.take_back(ring)", "pass", "tests/test_static.py"
    ),
    Mutant(
        "two passes share slots",
        "_static_memory",
        "ring = self._rings.pop()",
        "ring = self._rings[-1]",
        "tests/test_static.py",
    ),
    Mutant(
        "slot of a failed batch lost",
        "_static_memory",
        "            self._ring.give_back(slot)\n",
        "            pass\n",
        "tests/test_static.py",
    ),
    Mutant(
        "slots grow by themselves",
        "_static_memory",
        "self._sizes[index] = max(self._sizes[index], needed)",
        "self._sizes[index] = needed",
        "tests/test_static.py",
    ),
    Mutant(
        "slots filled when needed", "_static_memory", "self._ring.fill_up(self._device)", "pass", "tests/test_static.py"
    ),
    Mutant(
        "device leaves not in slots",
        "_static_memory",
        "takes_device_tensors = True",
        "takes_device_tensors = False",
        "tests/test_static.py",
    ),
    Mutant("held batches not told", "_static_memory", "self._policy.note_held()", "pass", "tests/test_static.py"),
    Mutant("told of each held batch", "_static_memory", "self._is_told = True", "pass", "tests/test_static.py"),
    Mutant(
        "attributes of results lost",
        "_placing",
        "place.__dict__.update(source.__dict__)",
        "pass",
        "tests/test_static.py",
    ),
    Mutant(
        "transform results not in slots",
        "_transfer",
        "        if destination is None:\n            return moved, tensors_on",
        "        if True:\n            return moved, tensors_on",
        "tests/test_static.py",
    ),
    Mutant(
        "back-wait in a capture",
        "_consumer_memory",
        "if is_capturing(self._consumer.device):  # which must not",
        "if False:  # which must not",
        "tests/test_capture.py",
    ),
    Mutant(
        "no back-wait in a capture",
        "_consumer_memory",
        "                    tensor.record_stream(self._side)\n",
        "                    pass\n",
        "tests/test_capture.py",
    ),
    Mutant("futures copied", "_host", "    def __reduce__", "    def reduce", "tests/test_host_end.py"),
    Mutant(
        "no back-wait", "_consumer_memory", "self._consumer.wait_event(self.copied)", "pass", "tests/test_memory.py"
    ),
    Mutant(
        "allocation after the gate",
        "_consumer_memory",
        "                tensor = _allocated(layout, self._consumer.device)\n            self._allocated = None\n",
        "                tensor = _allocated(layout, self._consumer.device)\n",
        "tests/test_consumer.py",
    ),
    Mutant(
        "no gate",
        "_consumer_memory",
        "side.wait_event(self._allocated or self._consumer.record_event())",
        "pass",
        "tests/test_streams.py",
    ),
    Mutant(
        "memory of the consumer on the side stream",
        "_consumer_memory",
        "            with on_stream(self._consumer):\n                if",
        "            if True:\n                if",
        "tests/test_memory.py",
    ),
    Mutant(
        "memory not reserved",
        "_consumer_memory",
        "if not policy.layouts or",
        "if True or",
        "tests/test_streams.py -k makespan",
    ),
    Mutant(
        "reserved for one batch too many",
        "_consumer_memory",
        "self._allowed = self._delivered + 1 + self._policy.prefetch_batches",
        "self._allowed = self._delivered + 2 + self._policy.prefetch_batches",
        "tests/test_memory.py",
    ),
    Mutant(
        "reserved under inference mode",
        "_consumer_memory",
        "with torch.inference_mode(False):\n            return torch.empty_strided(",
        "if True:\n            return torch.empty_strided(",
        "tests/test_streams.py",
    ),
    Mutant(
        "memory not recorded on another stream",
        "_consumer_memory",
        "return tensors if consumer != self._consumer else ()",
        "return ()",
        "tests/test_streams.py",
    ),
    Mutant(
        "more is given up than was reserved",
        "_consumer_memory",
        "max(0, self._allowed - position)",
        "self._allowed - position",
        "tests/test_consumer.py",
    ),
    Mutant("asked for in a capture", "_lane", "if is_capturing(self._device):", "if False:", "tests/test_capture.py"),
    Mutant(
        "refused ways keep the batch",
        "_batch",
        "reason = None  # its traceback holds this frame",
        "pass",
        "tests/test_memory.py",
    ),
    Mutant(
        "warm-up counts",
        "_marked",
        "mark.is_typical = number >= WARM_UP",
        "mark.is_typical = True",
        "tests/test_stats.py",
    ),
    Mutant(
        "wait for memory counted as copying",
        "_transfer",
        "placing.destination.open(current_stream(self.device))\n"
        "        if timer is not None:\n            timer.resume()\n",
        "_ = timer is None or timer.resume()\n        placing.destination.open(current_stream(self.device))\n",
        "tests/test_stats.py",
    ),
    Mutant(
        "wait for a slot counted as copying",
        "_transfer",
        "            timer.pause()\n        placed",
        "            pass\n        placed",
        "tests/test_stats.py",
    ),
    Mutant(
        "copy measured with its wait",
        "_mark",
        "self.wait_start = timed_event(consumer, self._spare)\n        consumer.wait_event(copied)",
        "consumer.wait_event(copied)\n        self.wait_start = timed_event(consumer, self._spare)",
        "tests/test_stats.py",
    ),
    Mutant(
        "step ends where the batch arrives",
        "_mark",
        "self.step_end = timed_event(consumer, self._spare)",
        "self.step_end = self.wait_end",
        "tests/test_stats.py",
    ),
    Mutant(
        "step ends on any stream",
        "_mark",
        "if consumer == self._consumer:",
        "if True:",
        "tests/test_stats.py",
    ),
    Mutant(
        "first load counted",
        "_meter",
        "later_load=meter.load_ns - meter.first_load_ns",
        "later_load=meter.load_ns",
        "tests/test_stats.py",
    ),
    Mutant(
        "loads of a thread are waited for",
        "_meter",
        "loader_wait=meter.waited_load_ns if meter.has_thread else meter.load_ns",
        "loader_wait=meter.load_ns",
        "tests/test_stats.py",
    ),
    Mutant(
        "room not measured",
        "_lane",
        "meter.room_ns += now - meter.load_end_ns",
        "pass",
        "tests/test_stats.py",
    ),
    Mutant(
        "bytes after the cast",
        "_transfer",
        "self.bytes += part.nbytes",
        "self.bytes += transfer.convert(result).nbytes",
        "tests/test_stats.py",
    ),
    Mutant(
        "bytes of what is there",
        "_transfer",
        "if id(tensor) not in resident)",
        "if True)",
        "tests/test_stats.py",
    ),
    Mutant(
        "bytes in a destination not counted",
        "_transfer",
        "move.bytes += source.nbytes",
        "pass",
        "tests/test_stats.py",
    ),
    Mutant(
        "pageable leaves counted once",
        "_staging",
        "            self.pageable_leaves += 1\n",
        "            self.pageable_leaves = 1\n",
        "tests/test_stats.py",
    ),
    Mutant(
        "all batches marked",
        "_marked",
        "1 if self.profile or number",
        "1 if True or number",
        "tests/test_stats.py",
    ),
    Mutant(
        "timeline without a bound",
        "_marked",
        "deque(maxlen=_KEPT)",
        "deque()",
        "tests/test_stats.py",
    ),
    Mutant(
        "passes kept",
        "_meter",
        "if old.is_over]",
        "if False]",
        "tests/test_stats.py",
    ),
    Mutant(
        "measured again after a copy",
        "_prefetcher",
        ", _meter=meter)",
        ")",
        "tests/test_stats.py",
    ),
    Mutant(
        "exposed copy of the first batch typical",
        "_marked",
        "is_typical=mark.is_typical and mark.position > 0",
        "is_typical=mark.is_typical",
        "tests/test_stats.py",
    ),
    Mutant(
        "statistics wait for themselves",
        "_marked",
        "threading.RLock()",
        "threading.Lock()",
        "tests/test_stats.py -k signal",
    ),
    Mutant(
        "timeline on two clocks",
        "_marked",
        "self._anchor = anchor, clock()",
        "self._anchor = anchor, 0",
        "tests/test_stats.py",
    ),
    Mutant(
        "hidden loads mentioned",
        "_stats",
        "min(loader_wait, step - compute - exposed_copy)",
        "loader_wait",
        "tests/test_stats.py",
    ),
    Mutant(
        "staging is not copying",
        "_stats",
        "copy = max(means.copy, means.issue)",
        "copy = means.copy",
        "tests/test_stats.py",
    ),
    Mutant(
        "ranges lost",
        "_epoch",
        "meter.has_ranges = meter.has_nvtx or profiler._is_profiler_enabled\n    return",
        "meter.has_ranges = meter.has_nvtx\n    return",
        "tests/test_stats.py",
    ),
    Mutant(
        "passes broken off on the CPU kept",
        "_epoch",
        "    def __del__(self) -> None:\n        self._meter.ended()",
        "    def gone(self) -> None:\n        self._meter.ended()",
        "tests/test_stats.py",
    ),
]


def places(mutant: Mutant) -> int:
    """How often the line that the mutant changes is there: it must be once."""
    return (ROOT / "prefetch" / f"{mutant.module}.py").read_text().count(mutant.old)


def run_tests(tests: str, mutant: Mutant | None = None) -> tuple[int, str]:
    """The exit code of pytest in a copy of the project, and its first failure or last line; 1 if a test hangs."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("prefetch", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            module = Path(folder, "prefetch", f"{mutant.module}.py")
            module.write_text(module.read_text().replace(mutant.old, mutant.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "faulthandler_timeout=60",
        ]
        run = subprocess.run([*command, *tests.split()], cwd=folder, capture_output=True, text=True, check=False)
    lines = (run.stdout + run.stderr).splitlines()
    if any(line.startswith("Timeout (") for line in lines):
        return 1, "a test hangs"
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
