"""The newest Triton compiles what is hot: the table of `tests/compile` is the oldest one's."""

from __future__ import annotations

import pytest

import tilewright as tw
from tilewright.check.variants import HOT, Call, drawn, in_hot_formats, needed

OPS = tw.catalogue()
SPILLS = 64  # bytes a thread: another compiler may keep a few addresses in memory, not a tile


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_hot_calls_compile_for_hopper(op):
    which = Call(drawn(op, HOT[0])), *in_hot_formats(op, drawn(op, HOT[0]))
    found = needed(op, which)
    assert found, f"{op.name} launches nothing"
    for one in found:
        compiled = one.compile()
        assert compiled.fits and compiled.spills <= SPILLS, f"{one.name}: {compiled}"
