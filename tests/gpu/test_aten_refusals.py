"""What torch's operators, replaced, refuse or warn of on a GPU: the tests of `tests/aten/test_refusals.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_refusals import (  # noqa: F401
    test_a_term_that_is_not_read_may_be_the_result,
    test_bools_as_factors_of_an_outer_product,
    test_degrees_of_freedom,
    test_degrees_of_freedom_of_both_moments,
    test_gradients_of_diagonals,
    test_norms_in_another_dtype,
    test_norms_of_nothing,
    test_quotients_of_integers,
    test_scatters_that_reduce_warn_always_if_asked_to,
    test_sides_that_are_cut_off,
    test_terms_of_a_product,
    test_tolerances,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
