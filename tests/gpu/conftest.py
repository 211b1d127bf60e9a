"""Without a device every test here says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("tests.aten")  # which runs here too: its assertions say what they compared


@pytest.hookimpl(tryfirst=True)  # before fixtures, which use the device
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def on_the_gpu() -> Iterator[None]:
    """Tensors that a test makes without naming a device are CUDA's."""
    with torch.device("cuda"):
        yield
