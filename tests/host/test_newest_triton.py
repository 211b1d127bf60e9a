"""The newest Triton compiles what is hot: the table of `tests/compile` is the oldest one's."""

from __future__ import annotations

from functools import cache

import pytest

import tilewright as tw
from tilewright.check.variants import HOT, Call, Variant, drawn, in_hot_formats, is_gluon, needed

OPS = tw.catalogue()
# Bytes a thread: another compiler may keep a few addresses in memory, not a tile. Kernels in Gluon fill the registers that they
# are given, and Triton 3.9 has its assembler allocate these by a simpler rule: `docs/measured.md` says what that comes to
SPILLS, GLUON_SPILLS = 64, 192


@cache
def hot_variants() -> dict[str, list[Variant]]:
    """By op, what its plain and its quantised hot call compile, the kernels of several ops with the first of them."""
    found: dict[str, list[Variant]] = {}
    seen: set[str] = set()
    for op in OPS.values():
        mine = needed(op, (Call(drawn(op, HOT[0])), *in_hot_formats(op, drawn(op, HOT[0]))))
        assert mine, f"{op.name} launches nothing"
        found[op.name] = [one for one in mine if one.name not in seen]
        seen.update(one.name for one in mine)
    return found


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_hot_calls_compile_for_hopper(op):
    for one in hot_variants()[op.name]:
        compiled = one.compile()
        most = GLUON_SPILLS if is_gluon(one.kernel) else SPILLS
        assert compiled.shared_is_there and compiled.spills <= most, f"{one.name}: {compiled}"
