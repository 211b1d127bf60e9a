"""Products of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_product.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_product import (  # noqa: F401
    form,
    test_a_result_that_is_given,
    test_a_vector_and_a_matrix_that_is_not_small,
    test_products_of_matrices,
    test_products_with_vectors,
    test_tf32_where_it_is_allowed,
    test_what_beta_0_leaves_unread,
    test_what_is_left_to_aten,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
