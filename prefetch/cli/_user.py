"""The user's own loader and step: found by name, and run so that what they raise is told from our own mistakes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from prefetch._prefetcher import CUDAPrefetcher
from prefetch.cli._output import CommandError, user_code

Step = Callable[[Any], object]
Reference = tuple[str, str]
"""A module, and a name in it."""


class Program(NamedTuple):
    """What the user's loop is made of."""

    name: str
    loader: Any
    step: Step | None


def load(factory: Reference, step: Reference | None) -> Program:
    """Import what was named, and make the loader.

    Args:
        factory: What returns a loader, or a loader and a step.
        step: What is called with each device batch, instead of the step that the factory may return.

    Raises:
        CommandError: There is no such name, or what it stands for is of no use.
    """
    make = _found("MODULE:FACTORY", factory)
    chosen = _found("--step", step) if step is not None else None
    name = ":".join(factory)
    if chosen is not None and not callable(chosen):
        raise CommandError(f"argument --step: must be callable, got {':'.join(step or ())!r}: {chosen!r:.80}")
    if not callable(make):
        raise CommandError(f"argument MODULE:FACTORY: must be callable without arguments, got {name!r}: {make!r:.80}")
    with user_code(name):
        made = make()
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        made, own_step = made
        chosen = chosen or own_step
    rule = _broken_rule(made)
    if rule is not None:
        raise CommandError(f"argument MODULE:FACTORY: must return {rule}, got {made!r:.80} from {name!r}")
    return Program(name, made, chosen)


def _broken_rule(loader: object) -> str | None:
    """What the loader should have been."""
    if isinstance(loader, CUDAPrefetcher):
        return "the loader itself, which the doctor runs with and without CUDAPrefetcher"
    if isinstance(loader, Iterator):
        return "a loader that can be iterated over more than once, such as a DataLoader"
    # Other classes are asked by iterating over them: there are two ways of being iterable.
    return None if hasattr(loader, "__iter__") or hasattr(loader, "__getitem__") else "a loader, or (loader, step)"


def _found(argument: str, reference: Reference) -> Any:
    module_name, name = reference
    here = str(Path.cwd())
    if here not in sys.path:  # as with `python -m`, which the console script is not
        sys.path.insert(0, here)
    try:
        with user_code(f"importing {module_name}"):
            found: Any = importlib.import_module(module_name)
    except CommandError as error:
        cause = error.__cause__
        # Of the module that was named, or of a package that it is in. Any other is a mistake inside of it.
        if isinstance(cause, ModuleNotFoundError) and f"{module_name}.".startswith(f"{cause.name}."):
            raise CommandError(
                f"argument {argument}: must name a module that can be imported from here, got {module_name!r}: {cause}"
            ) from None
        raise
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise CommandError(
                f"argument {argument}: must name something that is there, got {name!r}, which is not in {module_name}"
            ) from None
    return found


class Endless:
    """The loader over and over, so that a loop over it ends with the time and not with the data.

    Args:
        loader: The user's.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Passes:
        return Passes(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Its state_dict above all: what a prefetcher asks of a loader that has one is part of what the loop takes.
        return getattr(self.loader, name)


class Passes(Iterator[Any]):
    """One pass after the other; knows how long they are and what starting them takes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.pass_lengths: list[int] = []
        """Batches of each pass that has come to its end."""
        self._count = 0
        self._start()

    def _start(self) -> None:
        with user_code("the loader"):
            self._iterator = iter(self._loader)

    def __next__(self) -> Any:
        for _ in range(2):
            with user_code("the loader"):
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    pass
                else:
                    self._count += 1
                    return batch
            if self._count == 0:
                break
            self.pass_lengths.append(self._count)
            self._count = 0
            self._start()
        is_spent = f" in pass {len(self.pass_lengths) + 1}, though it must start anew each time"
        raise CommandError(f"the loader gave no batch{is_spent if self.pass_lengths else ''}")

    @property
    def is_at_start(self) -> bool:
        """Whether the last batch was the first of its pass."""
        return self._count == 1


def settings(loader: Any) -> dict[str, Any]:
    """What a ``DataLoader`` was told that matters here; nothing for other loaders."""
    if not isinstance(loader, DataLoader):
        return {}
    names = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    return {name: getattr(loader, name) for name in names}
