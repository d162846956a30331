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

    @functools.cache
    def disabled() -> Callable[..., Any]:
        return cast("Callable[..., Any]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return disabled()(*arguments)
        return function(*arguments)

    return cast("F", call)
