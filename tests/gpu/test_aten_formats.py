"""How results of torch's operators, replaced, lie on a GPU: the tests of `tests/aten/test_formats.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_formats import (  # noqa: F401
    test_formats_of_what_is_joined,
    test_formats_of_what_is_padded,
    test_rms_norm_of_dimensions_of_1,
    test_the_format_of_strides_is_torchs,
    test_what_is_only_cut_keeps_its_strides,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
