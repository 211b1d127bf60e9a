"""A chip that somebody adds: one row in the table, and the op of CONTRIBUTING.md compiles for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.contributed import contributed
from tilewright.check.variants import FORWARD, Call, launches, variant
from tilewright.core.target import TARGETS


@pytest.fixture(scope="module")
def op(tmp_path_factory):
    with contributed(tmp_path_factory.mktemp("ops")) as declared:
        yield declared


@pytest.mark.parametrize("arch, like", [("sm_87", "sm_86"), ("sm_103", "sm_100"), ("gfx90a", "gfx942")])
def test_a_row_is_enough(op, arch, like, monkeypatch):
    monkeypatch.setitem(TARGETS, arch, replace(TARGETS[like], arch=arch, ran=False))
    call = Call({"x": torch.empty(64, 256, dtype=torch.bfloat16, device="meta"), "scale": 0.5}, FORWARD)
    (wanted,) = launches(op, call, arch)
    made = variant(wanted, arch).compile()
    assert made.arch == arch and made.spills == 0 and made.shared_is_there
