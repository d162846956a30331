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
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*arguments)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*arguments)

    return cast("F", call)
