"""The statistics of groups too wide for one program, which `gated_group_norm` takes from a pass of its own: rstd =
1 / sqrt(mean(x**2) + eps) and, backward, mean(x * rstd * g)."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...device.activation import activate
from ...device.groups import columns, load_tile, load_weight, row_offsets, sum_group
from ...runtime.kernel import kernel

ONE_GROUP = {
    "grid": lambda a: (a.M * a.G,),
    "tokens": ("M", "INNER"),
    "default": lambda a: {"BLOCK": 2048, "num_warps": 8},
}


@kernel(**ONE_GROUP)
def gated_group_norm_rstd(
    X, RSTD, M, INNER, D, stride_xo, stride_xi, stride_xn, eps, inv_d, G: tl.constexpr, BLOCK: tl.constexpr
):
    """For groups too wide for one program: rstd of each."""
    row = tl.program_id(0) // G + tl.arange(0, 1)
    g = tl.program_id(0) % G + tl.arange(0, 1)
    square = tl.zeros([1, 1, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        c = columns(start, BLOCK, BLOCK)
        col = (g * D)[:, None, None] + c
        x = load_tile(X, row_offsets(row, INNER, stride_xo, stride_xi), col, c < D, stride_xn)
        square += x * x
    tl.store(RSTD + row.to(tl.int64) * G + g, tl.rsqrt(sum_group(square) * inv_d + eps))


@kernel(**ONE_GROUP)
def gated_group_norm_means(
    X, GATE, W, RSTD, DY, MEAN, M, INNER, D, stride_xo, stride_xi, stride_xn, stride_go, stride_gi, stride_gn, stride_yo,
    stride_yi, stride_yn, inv_d, G: tl.constexpr, ACT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For the same groups mean(xhat * g), given rstd."""
    row = tl.program_id(0) // G + tl.arange(0, 1)
    g = tl.program_id(0) % G + tl.arange(0, 1)
    cross = tl.zeros([1, 1, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        c = columns(start, BLOCK, BLOCK)
        col = (g * D)[:, None, None] + c
        x = load_tile(X, row_offsets(row, INNER, stride_xo, stride_xi), col, c < D, stride_xn)
        a = load_tile(GATE, row_offsets(row, INNER, stride_go, stride_gi), col, c < D, stride_gn)
        dg = load_tile(DY, row_offsets(row, INNER, stride_yo, stride_yi), col, c < D, stride_yn) * activate(a, 1.0, ACT)
        if W is not None:
            dg = dg * load_weight(W, c, col, c < D, SHARED)
        cross += x * dg
    at = row.to(tl.int64) * G + g
    tl.store(MEAN + at, sum_group(cross) * inv_d * tl.load(RSTD + at))


def rstd_of(x: Tensor, eps: float, groups: int) -> Tensor:
    """rstd [rows, groups] for groups too wide for one program."""
    outer, inner, hidden = x.shape
    rstd = torch.empty(outer * inner, groups, dtype=torch.float32, device=x.device)
    D = hidden // groups
    gated_group_norm_rstd(x, rstd, outer * inner, inner, D, *x.stride(), eps, 1.0 / D, G=groups)
    return rstd
