"""What the page on frameworks shows runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.integration

PACKAGES = (
    "accelerate",
    "lightning",
    "ray",
    "tensordict",
    "tokenizers",
    "torch_geometric",
    "torchdata",
    "transformers",
    "webdataset",
)


def test_blocks_run(tmp_path: Path) -> None:
    """All Python blocks of the page, one after the other, in one program."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    text = (ROOT / "docs" / "how-to" / "frameworks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 10
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    result = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
