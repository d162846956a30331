"""How the documentation is built: ``python -m sphinx -n -W --keep-going docs docs/_build/html``, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # of the package as it is here, and of the directives

from prefetch import __version__  # noqa: E402 - found through the line above

project = "cuda-prefetcher"
author = "The cuda-prefetcher authors"
version = release = __version__

extensions = ["sphinx.ext.autodoc", "myst_parser", "directives", "docstrings"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"cuda-prefetcher {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 88

# With -n each reference must lead somewhere. The inventories of other projects would have to be fetched, so names of
# theirs are let off. Names of this project are not, but for type variables.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|np|numpy|os|matplotlib|collections|typing|types)\..*"),
    ("py:class", r"(prefetch\._\w+\.)?(T|B|Loaded)"),
]
