"""Windows of planes of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_window.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_window import (  # noqa: F401
    form,
    test_antialiased,
    test_averages,
    test_indices_of_elsewhere_are_not_followed,
    test_largest,
    test_nan_equals_and_nothing_finite,
    test_planes_of_three_dimensions_and_views,
    test_resampling,
    test_what_aten_refuses_is_refused,
    test_windows_around_a_plane,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
