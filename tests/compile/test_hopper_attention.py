"""Hopper's attention, its forward at every tuned width and of every kind, its backward where the table of `test_kernels.py` has no
row: it is compiled into memory that there is, products are not serialised, and little is spilled if nothing is done to scores."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import triton

import tilewright as tw
from tests.compile.table import wrong_code
from tilewright.check.variants import Call, needed, variant
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
ATTENTION = tw.catalogue()["attention"]
CODED, CODED_PV = tw.catalogue()["attention_codes"], tw.catalogue()["attention_codes_pv"]
pytestmark = pytest.mark.skipif(
    not TARGETS["sm_90"].hopper_gluon, reason="this Triton's Gluon is not the one that kernels are written in"
)


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def marks():
    return blank(9, dtype=torch.int32)


EVERYTHING = {"left": 1000, "softcap": 30.0, "sink": blank(32), "slopes": blank(32)}


# Bytes a thread: spilled in the prologue and between tiles, hardly in the loops over blocks. By Triton 3.6, and by 3.9.
@pytest.mark.parametrize(
    ("D", "V", "options", "most"),
    [
        (64, 64, {"causal": True}, (0, 0)),
        (128, 128, {"causal": True}, (0, 108)),
        (128, 128, {}, (0, 0)),
        (96, 96, {"causal": True}, (0, 64)),
        (192, 128, {"causal": True}, (148, 308)),
        (256, 256, {"causal": True}, (144, 472)),
        (128, 128, {"causal": True, "cu_seqlens_q": marks(), "cu_seqlens_k": marks()}, (124, 0)),
        (128, 128, {"causal": True, **EVERYTHING}, (904, 1696)),
    ],
)
def test_compiled(D, V, options, most):
    q, k, v = blank(1, 16384, 32, D), blank(1, 16384, 8, D), blank(1, 16384, 8, V)
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        ATTENTION.run(ATTENTION.signature.bind((q, k, v), {**options, "backend": "hopper"}))
    for before in found[:-1]:  # which clears the counter of tiles, or makes their table
        variant(before).compile()
    one = variant(found[-1])
    assert one.kernel.name == "attention_forward_hopper"
    compiled = one.compile()
    assert compiled.shared_is_there and not compiled.serialised
    assert not wrong_code(one.kernel.name, compiled)
    assert compiled.spills <= most[not triton.__version__.startswith("3.6.")]


# By Triton 3.6 loops over blocks reload nothing, but four numbers in one of 192 columns; what 3.9 does there: `docs/measured.md`
@pytest.mark.parametrize(
    ("D", "V", "options", "most"),
    [
        (64, 64, {}, (0, 196)),
        (192, 128, {}, (380, 576)),
        (128, 128, {"cu_seqlens_q": marks(), "cu_seqlens_k": marks()}, (112, 432)),
    ],
)
def test_compiled_backward(D, V, options, most):
    q, k, v = blank(1, 16384, 32, D), blank(1, 16384, 8, D), blank(1, 16384, 8, V)
    call = Call({"q": q, "k": k, "v": v, "causal": True, "backend": "hopper", **options})
    (one,) = (one for one in needed(ATTENTION, [call]) if one.kernel.name == "attention_backward_hopper")
    compiled = one.compile()
    assert compiled.shared_is_there and not compiled.serialised
    assert not wrong_code(one.kernel.name, compiled)
    assert compiled.spills <= most[not triton.__version__.startswith("3.6.")]


# By Triton 3.6 the loops over blocks of keys spill nothing, but a tile's pointers and bounds are; by 3.9 scales of keys are too
@pytest.mark.parametrize(
    ("D", "options", "most"),
    [
        (64, {"causal": True}, (0, 380)),
        (128, {"causal": True}, (128, 1900)),
        (128, {"causal": True, "cu_seqlens_q": marks(), "cu_seqlens_k": marks()}, (140, 2160)),
    ],
)
@pytest.mark.parametrize(
    ("kind", "scaled"), [(torch.int8, "key"), (torch.float8_e4m3fn, "key"), (torch.float8_e4m3fn, "block")]
)
def test_compiled_of_codes(D, options, most, kind, scaled):
    q, v = blank(1, 16384, 32, D), blank(1, 16384, 8, D)
    k, scale = blank(1, 16384, 8, D, dtype=kind), blank(1, 16384, 8, dtype=torch.float32)
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        CODED.run(CODED.signature.bind((q, k, v, scale), {**options, "scaled": scaled, "backend": "hopper"}))
    for before in found[:-1]:  # which puts scales side by side, and what numbers have too
        variant(before).compile()
    one = variant(found[-1])
    assert one.kernel.name == "attention_codes_hopper"
    compiled = one.compile()
    assert compiled.shared_is_there and not compiled.serialised
    assert not wrong_code(one.kernel.name, compiled)
    assert compiled.spills <= most[not triton.__version__.startswith("3.6.")]
    if triton.__version__.startswith("3.6."):
        assert not any("LDL" in line or "STL" in line for loop in loops_of(compiled.sass, D // 32 + 8) for line in loop)


@pytest.mark.parametrize(
    ("D", "V", "options", "most"),
    [
        (64, 64, {"causal": True}, (0, 60)),
        (128, 64, {}, (0, 112)),
        (128, 128, {"causal": True}, (100, 1016)),
        (128, 128, {"causal": True, "cu_seqlens_q": marks(), "cu_seqlens_k": marks()}, (96, 1032)),
    ],
)
@pytest.mark.parametrize("scaled", ["key", "block"])
def test_compiled_of_codes_of_values(D, V, options, most, scaled):
    """Weights become codes in the registers that they are in: the loops move nothing between threads but what rows share. With one
    scale for a block no instruction is for a key's, and sums are awaited after the largest scores are found."""
    q, scale = blank(1, 16384, 32, D), blank(1, 16384, 8, dtype=torch.float32)
    k, v = (blank(1, 16384, 8, columns, dtype=torch.float8_e4m3fn) for columns in (D, V))
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        given = {**options, "scaled": scaled, "backend": "hopper"}
        CODED_PV.run(CODED_PV.signature.bind((q, k, v, scale, None, scale), given))
    for before in found[:-1]:
        assert not variant(before).compile().spills
    one = variant(found[-1])
    assert one.kernel.name == "attention_codes_hopper"
    compiled = one.compile()
    assert compiled.shared_is_there and not compiled.serialised
    assert not wrong_code(one.kernel.name, compiled)
    assert compiled.spills <= most[not triton.__version__.startswith("3.6.")]
    if triton.__version__.startswith("3.6."):
        loops = loops_of(compiled.sass, D // 32 + 4, "STS")
        assert scaled == "key" or min(map(len, loops)) <= (512 if V == 128 else 480)
        for loop in loops:
            names = [name for line in loop for name in ("LDL", "STL", "PRMT", "SHFL") if name in line]
            assert names == ["SHFL"] * 4  # of the largest score, of two rows
            waits = [line for line in loop if "DEPBAR" in line or "SHFL" in line]
            assert scaled == "key" or ["SHFL" in line for line in waits[:6]] == [False, True, True, True, True, False]
            issued = [line for line in loop if "GMMA" in line or "DEPBAR" in line or "MUFU" in line]
            assert all("GMMA" in line for line in issued[: D // 32 + 4]), (
                "products of a step are issued before any is awaited"
            )


def loops_of(sass: str, products: int, without: str = "EXIT") -> list[list[str]]:
    """The loops over blocks, which have so many products: instructions from a label to a branch back to it. Branches from where
    barriers are waited for, past the end, lead back too, over more products or fewer. `without`: what a loop around them has."""
    at, lines, found = {}, [], []
    for line in sass.splitlines():
        if (label := re.match(r"\s*(\.L_x_\d+):", line)) is not None:
            at[label[1]] = len(lines)
        elif ";" in line:
            lines.append(line)
            back = re.search(r"BRA.*\((\.L_x_\d+)\)", line)
            if back is not None and back[1] in at:
                found.append(lines[at[back[1]] :])
    found = [loop for loop in found if sum("GMMA" in line for line in loop) == products]
    found = [loop for loop in found if not any(without in line for line in loop)]
    assert len(found) == 4  # over whole blocks and over edges, of both warpgroups
    return found
