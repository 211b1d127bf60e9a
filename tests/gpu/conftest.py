"""Without a device every test here says so."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch

from tilewright.core.target import Target

LIMIT = 300  # seconds for a test of a kernel that may wait for ever, compiling included

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


@pytest.fixture
def on_hopper() -> Iterator[None]:
    """For kernels in Gluon, whose barriers may be wrong: the process ends, with what it was doing, if a test takes too long."""
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("the kernel is Hopper's")
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
