"""Plans of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_plans.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_plans import (  # noqa: F401
    test_a_plan_keeps_no_tensor_alive,
    test_a_thousand_numbers_make_one_plan,
    test_calls_that_differ_are_told_apart,
    test_later_calls_are_atens_too,
    test_plans_are_bounded,
    test_threads_share_plans,
    test_version_counters_of_plans,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
