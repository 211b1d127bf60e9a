"""Without a device every test here says so."""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before fixtures, which use the device
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
