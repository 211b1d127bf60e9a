"""Python's numbers in calls of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_numbers.py`, CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_numbers import (  # noqa: F401
    test_a_bool_scales_bools_alone,
    test_a_negative_slope_in_place_has_no_gradient,
    test_a_number_promotes_as_one_where_a_call_is_declined,
    test_complex_numbers_are_atens,
    test_divisors_wrap_around_to_the_dtype,
    test_how_results_without_elements_lie,
    test_integers_that_no_int64_is,
    test_lerp_promotes_neither_end,
    test_numbers_alone_promote_as_numbers,
    test_numbers_that_the_dtype_cannot_hold,
    test_what_is_written_is_the_tensor_that_was_given,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
