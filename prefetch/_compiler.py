"""Keeping ``torch.compile`` out of what it cannot compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F) -> F:
    """Make a function opaque to the compiler, as ``torch.compiler.disable`` does, but without loading the compiler.

    That would take every import of this package some seconds. A process that compiles has loaded it already.
    """
    kept: Any = function

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments)
        # An attribute, since the compiler follows this code: a variable of the closure it took for None (torch 2.14).
        disabled = getattr(kept, "_opaque", None)
        if disabled is None:
            disabled = kept._opaque = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*arguments)

    return cast("F", call)
