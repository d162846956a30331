"""What the documentation shows runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize("page", ["docs/how-to.md"])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    """All Python blocks of a page, one after the other, in one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    result = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
