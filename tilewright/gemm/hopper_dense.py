"""`scaled_mm` of FP8 codes on Hopper with full accumulation: 1x128 by 128x128 blocks, and scales of rows or whole tensors.

Which of two tiles is faster depends on how many are left for the last round: see `tile_for`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv
from .hopper_rows import CODES, OUT, box_of, copies_in_bulk, promoted_rows_hopper, stores_in_bulk
from .operands import DTYPES, ONCE
from .portable import fill
from .tiles import BAND

BLOCKWISE = ("BlockWise1x128", "BlockWise128x128")
BULK = dict(OUT.values())  # results of 16 bits


class Tile(NamedTuple):
    """Rows and columns that a program multiplies at a time, by how many warpgroups, and how well these fill the tensor cores."""

    rows: int
    columns: int
    warpgroups: int
    rate: float


# Rates relative to each other where the number of tiles does not matter: 4096x24576x1536 on an H200, November 2026
TILES = (Tile(128, 256, 2, 1.0), Tile(192, 128, 3, 0.95))


def tile_for(M: int, N: int, sms: int) -> Tile:
    """The tile that takes least time for M by N results: programs go over their tiles in rounds, of which the last may be
    nearly empty."""

    def time(tile: Tile) -> float:
        rounds = cdiv(cdiv(M, tile.rows) * cdiv(N, tile.columns), sms)
        return rounds * tile.rows * tile.columns / tile.rate

    return min(TILES, key=time)


def fits(target: Target, a: SimpleNamespace) -> bool:
    """FP8 codes whose inner dimension is contiguous, in rows that begin at multiples of 16 bytes; at least one."""
    if not (target.arch == "sm_90" and target.tma and target.gluon):
        return False
    once = a.recipe_a in ONCE and a.recipe_b in ONCE and a.accumulate == "full"
    if a.a.dtype not in CODES or a.b.dtype not in CODES or not (once or (a.recipe_a, a.recipe_b) == BLOCKWISE):
        return False
    if any(isinstance(t, Tensor) and t.stride(1) != 1 for t in (a.c, a.out if a.out_format is None else None)):
        return False
    sizes = (*a.a.shape, a.b.shape[1])
    return min(sizes) > 0 and max(sizes) < 2**31 - 256 and copies_in_bulk(a.a, a.b.t())


def forward(
    a, b, scale_a, scale_b, recipe_a, recipe_b, *, bias, act, c, beta, out_dtype, out_format, out, tile: Tile | None = None, **_
) -> Tensor:  # fmt: skip
    """`tile` is there for comparisons; without it the better one is taken."""
    (M, K), N, sms = a.shape, b.shape[1], Target.at(a.device).sms
    tile = tile or tile_for(M, N, sms)
    y, dtype = out, DTYPES[out_dtype]
    if out_format is not None or out is None:
        y = torch.empty(M, N, dtype=dtype if out_format is None else torch.float32, device=a.device)
    add = None if beta == 0.0 else c
    # A bulk copy wants rows of the result at multiples of 16 bytes. fp32 goes straight from registers: a warp writes whole sectors,
    # and what it would be staged in is a quarter of the operands' ring
    C = box_of(y, [64, 128], BULK[y.dtype]) if y.dtype in BULK and stores_in_bulk(y) else None
    strides_a, strides_b = ((s.stride(0) * (s.shape[0] > 1), s.stride(1)) for s in (scale_a, scale_b))
    down = cdiv(M, tile.rows)
    promoted_rows_hopper(
        box_of(a, [128 if tile.warpgroups == 2 else 64, 128], CODES[a.dtype]),
        box_of(b.t().unsqueeze(0), [1, 128, 128], CODES[b.dtype]),
        C, y, scale_a, scale_b, None if bias is None else bias.contiguous(), add, None, M, down, N, cdiv(K, 128), *strides_a, 0,
        *strides_b, y.stride(0), 0 if add is None else add.stride(0), float(beta), min(sms, down * cdiv(N, tile.columns)),
        ACT=act, BLOCKS=recipe_a == BLOCKWISE[0], BAND=BAND, STAGES=4, WARPGROUPS=tile.warpgroups,
    )  # fmt: skip
    if out_format is None:
        return y
    q = out if out is not None else out_format.empty((M, N), dtype, a.device)
    fill(q, y, out_format)
    return q
