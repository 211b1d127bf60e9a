"""Dtypes of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_dtypes.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_dtypes import (  # noqa: F401
    quiet,
    test_even_steps_in_every_dtype,
    test_every_dtype_that_aten_takes,
    test_floats_are_cut_to_integers,
    test_floored_quotients_of_16_bits_are_rounded_once,
    test_integers_in_questions_about_floats,
    test_numbers_that_a_dtype_cannot_hold_are_refused,
    test_what_is_declined_is_in_the_table_and_nothing_else,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
