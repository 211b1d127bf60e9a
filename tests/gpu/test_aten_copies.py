"""Copies of rows of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_copies.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_copies import (  # noqa: F401
    few_are_enough,
    launched,
    test_clones_of_what_is_expanded,
    test_every_dtype,
    test_other_ways_to_lie,
    test_repeats,
    test_rows_side_by_side,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
