"""Reductions of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_reduction.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_reduction import (  # noqa: F401
    test_every_form,
    test_few_elements_of_several_loops,
    test_few_elements_that_make_one_result,
    test_losses_that_are_not_added_up,
    test_moments_of_nan_and_of_large_numbers,
    test_the_first_of_equals_and_of_nans,
    test_two_operands,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
