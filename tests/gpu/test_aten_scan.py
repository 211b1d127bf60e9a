"""Scans of torch's operators, replaced, on a GPU: the tests of `tests/aten/test_scan.py` with CUDA tensors."""

from __future__ import annotations

import pytest

from tests.aten.test_scan import (  # noqa: F401
    test_every_form,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
