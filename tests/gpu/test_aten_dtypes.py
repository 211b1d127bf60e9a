"""Dtypes of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_dtypes.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_dtypes import (  # noqa: F401
    quiet,
    test_every_dtype_that_aten_takes,
    test_what_is_declined_is_in_the_table_and_nothing_else,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
