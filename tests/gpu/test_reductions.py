"""Sums over a dimension that a reshape joined, on the GPU: right wherever `toolchain/reductions.py` finds nothing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tilewright.toolchain.reductions import AFFECTED, misread

pytestmark = pytest.mark.gpu
SHAPES = [
    (rows, groups, places, warps)
    for rows in (1, 2, 4, 16)
    for groups in (1, 2, 8, 32)
    for places in (1, 4, 8, 64)
    for warps in (1, 2, 4)
]


@triton.jit
def joined_sums(X, Y, ROWS: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None, None]
    group = tl.arange(0, GROUPS)[None, :, None]
    place = tl.arange(0, PLACES)[None, None, :]
    x = tl.load(X + (row * GROUPS + group) * PLACES + place)
    y = tl.sum(tl.reshape(x, [ROWS, GROUPS * PLACES]), 1)
    tl.store(Y + tl.arange(0, ROWS), y)


@pytest.mark.parametrize("rows, groups, places, warps", SHAPES)
def test_what_is_not_called_wrong_is_right(rows, groups, places, warps):
    x = torch.arange(rows * groups * places, dtype=torch.int32, device="cuda")
    y = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    made = joined_sums[(1,)](x, y, ROWS=rows, GROUPS=groups, PLACES=places, num_warps=warps)
    if AFFECTED and misread(made.asm["ttgir"]):
        pytest.skip("needs Triton 3.7 or later: this one lowers it wrongly, as foretold")
    assert torch.equal(y, x.view(rows, -1).sum(1, dtype=torch.int32))
