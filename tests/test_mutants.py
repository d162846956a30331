"""The broken variants of the library stay applicable; ``python -m tests.mutants`` shows that each is caught."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, Mutant, places


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant: Mutant) -> None:
    """The line that a variant changes is there, once."""
    assert places(mutant) == 1
