# ruff: noqa: ARG001 - what Sphinx calls takes all that it hands over
"""Docstrings in Google's style, for autodoc.

``sphinx.ext.napoleon`` does this too, but takes the beginning of a property's or an attribute's docstring, up to a
colon, for its type, and then reads no sections in it. Here all docstrings are read in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sphinx.ext.napoleon.docstring import GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def read(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Turn the sections of a docstring into what Sphinx understands, in place."""
    lines[:] = GoogleDocstring(lines).lines()


def name_torch(
    app: Sphinx, what: str, name: str, item: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Keep ``torch.`` before its names, or a signature says ``device: device``."""
    return signature and signature.replace("~torch.", "torch."), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", read)
    app.connect("autodoc-process-signature", name_torch)
    return {"parallel_read_safe": True}
