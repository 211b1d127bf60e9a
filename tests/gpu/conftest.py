"""Without a device every test here says so."""

from __future__ import annotations

import pytest
import torch

# Tests of another net that run here too: their assertions say what they compared
pytest.register_assert_rewrite("tests.aten.test_beyond", "tests.aten.test_opinfo", "tests.aten.test_router")
pytest.register_assert_rewrite("tests.aten.test_rows", "tests.aten.test_product", "tests.aten.test_window")


@pytest.hookimpl(tryfirst=True)  # before fixtures, which use the device
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
