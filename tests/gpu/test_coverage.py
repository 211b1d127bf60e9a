"""The calls behind the rows of the coverage lists, on hardware."""

from __future__ import annotations

import pytest

from tilewright.check.provided.rows import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in CHECKS.items() for row in rows])
def test_the_call_behind_a_row(name, row):
    CHECKS[name][row]("cuda")
