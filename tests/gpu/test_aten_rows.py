"""Softmax and norms of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_rows.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_rows import (  # noqa: F401
    form,
    test_batch_norm,
    test_few_channels_by_parts,
    test_gradients_by_differences,
    test_group_norm,
    test_groups_that_programs_hold,
    test_layer_norm,
    test_rms_norm,
    test_softmax_of_infinities,
    test_softmax_of_views,
    test_softmax_over_any_dimension,
    test_weight_norm,
    test_wide_results_of_halves,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
