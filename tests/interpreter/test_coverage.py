"""The calls behind the rows of the coverage lists, their kernels run by the interpreter."""

from __future__ import annotations

import pytest

import tilewright as tw
from tilewright.check.provided.rows import CHECKS


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in CHECKS.items() for row in rows])
def test_the_call_behind_a_row(name, row):
    with tw.force("triton"):
        CHECKS[name][row]("cpu")
