"""Uniform registers that are read and were never written: the rule on machine code made by hand, and what ptxas 12.8 makes of
attention over tiles of several widths."""

from __future__ import annotations

import pytest
import torch
import triton

import tilewright as tw
from tests.attention_oracle import CALLS, call
from tilewright.attention import portable
from tilewright.check.variants import FORWARD, Call, launches, variant
from tilewright.toolchain.registers import unset

OLDEST = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."),
    reason="needs Triton 3.6, whose ptxas is 12.8: what it makes of this is held",
)


def code(*lines: str) -> str:
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * at:04x}*/                   {line} ;"
        for at, line in enumerate(lines)
    )


RIGHT = {
    "written before": ("UMOV UR4, 0x10", "UIADD3 UR5, UR4, 0x1, URZ", "MOV R1, UR5", "EXIT"),
    "two words": ("ULDC.64 UR4, c[0x0][0x208]", "MOV R1, UR5", "EXIT"),
    "written in a loop, on the way back": (
        "BRA `(.L_x_1)", ".L_x_0:", "MOV R1, UR4", "EXIT", ".L_x_1:", "UMOV UR4, 0x1", "BRA `(.L_x_0)",
    ),
    "on one of two ways": ("@P0 BRA `(.L_x_0)", "UMOV UR4, 0x1", ".L_x_0:", "MOV R1, UR4", "EXIT"),
    "by the chosen lane": ("ELECT P0, UR4, PT", "MOV R1, UR4", "EXIT"),
    "a factor in registers": ("UMOV UR6, 0x1", "UMOV UR7, 0x1", "HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56", "EXIT"),
    "never run": ("EXIT", "MOV R1, UR4"),
}  # fmt: skip
WRONG = {
    "added to itself": ("UIADD3 UR4, UP0, UR4, 0x40, URZ", "EXIT"),
    "the second word": ("UMOV UR4, 0x1", "MOV R1, UR5", "EXIT"),
    "written after": ("MOV R1, UR4", "UMOV UR4, 0x1", "EXIT"),
    "after a jump over it": ("BRA `(.L_x_0)", "UMOV UR4, 0x1", ".L_x_0:", "MOV R1, UR4", "EXIT"),
    "a descriptor": ("UMOV UR6, 0x1", "HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56", "EXIT"),
    "of two descriptors the first": ("UMOV UR6, 0x1", "UMOV UR7, 0x1", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "EXIT"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_written_on_some_way_is_not_said(name):
    assert unset(code(*RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_no_way_writes_is_said(name):
    assert "was never written" in unset(code(*WRONG[name]))[0]


@OLDEST
@pytest.mark.parametrize("least", [16, 64])
def test_tiles_of_several_widths(monkeypatch, least):
    """72 columns of keys beside 40 of values, read number by number, in parts of 64, 16 and 32, 16: rows of 128 and 64 bytes in one
    place."""
    monkeypatch.setattr(portable, "narrowest", lambda q: least)
    monkeypatch.setattr(portable, "in_words", portable.heads_of)
    op = tw.catalogue()["attention"]
    values = op.signature.bind((), {**call(**CALLS["72 and 40"]), "backend": "portable"})
    forward = next(one for one in launches(op, Call(values), "sm_90") if one.kernel.name == "attention_forward")
    assert bool(unset(variant(forward, "sm_90").compile().sass)) == (least == 16)


@pytest.mark.parametrize("queries, least", [(1, 16), (4, 16), (16, 64)])
def test_few_rows_need_no_wide_parts(queries, least):
    """Tiles of less than 64 rows are no product of whole warpgroups, and so have no descriptors: 80 columns are 64 and 16."""
    op, heads = tw.catalogue()["cached_attention"], 8
    q = torch.empty(2, queries, heads, 80, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(2, 256, 1, 80, dtype=torch.bfloat16, device="meta")
    values = op.signature.bind((q, cache, cache.clone()), {})
    (part, *_) = launches(op, Call(values, FORWARD), "sm_90")
    one = variant(part, "sm_90")
    assert one.constants["KEYS"].LAST == one.constants["VALUES"].LAST == least
    assert ("wgmma" in one.compile().text) == (least == 64)
