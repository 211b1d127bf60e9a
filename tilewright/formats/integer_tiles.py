"""INT8 and INT4 values from matrices: kernels over 128x128 tiles and over whole rows. Rules and layouts are `integers.py`'s."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..core.format import Quantized
from ..core.tensor import cdiv, power_of_two
from ..device.integers import integer_code, pairs, row_stats, store_integer_scales, store_integer_tile
from ..device.quantize import has
from ..runtime.kernel import kernel
from .tiles import amax_tiles, find_tile, load_tile, produce_rows, row_stride

WIDEST = 16384  # longest row that a program holds whole


def _tiles(a: Any) -> tuple[int]:
    # At least one program, which stores the scale of an empty tensor
    return (max(1, cdiv(a.M, 128) + a.E) * max(1, cdiv(a.N, 128)),)


def _tiles_config(a: Any) -> dict[str, int]:
    # At 4 warps the tile is 128 registers; both ways, or zero points, beside it would spill
    many = (a.Q is not None and a.QT is not None) or "zero" in a.FORMAT
    return {"num_warps": 8} if many else {"num_warps": 4, "maxnreg": 168}


@kernel(grid=_tiles, tokens=("M", "stride_s", "stride_st"), default=_tiles_config)
def quantize_integer_tiles(
    X, Q, S, Z, QT, ST, ZT, AMAX, AMAX_T, OFFSETS, M, N, E, stride_x, stride_c, stride_q, stride_s, stride_st,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program, one tile: read once, stored in all the ways that are not None."""
    block, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    store_integer_scales(S, ST, AMAX, AMAX_T, row0, col0, block, tl.maximum(E, 1), rows_left, N, stride_st, FORMAT)
    if not FULL:
        if (rows_left <= 0) | (col0 >= N):
            return
    r = 4 * tl.arange(0, 32)
    y0 = produce_rows(
        r, X, None, None, None, stride_x, stride_c, 0.0, 0.0, row0, col0, rows_left, N, load_tile, 0, COLS, FULL
    )
    y1 = produce_rows(
        r + 1, X, None, None, None, stride_x, stride_c, 0.0, 0.0, row0, col0, rows_left, N, load_tile, 0, COLS, FULL
    )
    y2 = produce_rows(
        r + 2, X, None, None, None, stride_x, stride_c, 0.0, 0.0, row0, col0, rows_left, N, load_tile, 0, COLS, FULL
    )
    y3 = produce_rows(
        r + 3, X, None, None, None, stride_x, stride_c, 0.0, 0.0, row0, col0, rows_left, N, load_tile, 0, COLS, FULL
    )
    store_integer_tile(
        y0, y1, y2, y3, Q, S, Z, QT, ST, ZT, AMAX, AMAX_T, row0, col0, block, group, rows_left, M, N, stride_q, stride_s,
        stride_st, FORMAT, ALIGN, OFFSETS is not None, FULL,
    )  # fmt: skip


def _rows_config(a: Any) -> dict[str, int]:
    rows = max(1, 2048 // a.BLOCK)
    return {"ROWS": rows, "num_warps": min(16, rows * a.BLOCK // 512)}


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), default=_rows_config)
def quantize_integer_rows(
    X, Q, S, M, N, stride_x, stride_c, stride_q, FORMAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """A program holds whole rows: one trip to memory where a scale is for a row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < M) & (col < N)
    x = tl.load(X + row[:, None] * stride_x + col.to(tl.int64) * stride_c, inside, 0.0).to(tl.float32)
    s, c, z = row_stats(x, 1, FORMAT)
    tl.store(S + row, s, row < M)
    code = integer_code(x, s[:, None], c[:, None], z[:, None], FORMAT)
    if has(FORMAT, "int4"):
        pair = tl.arange(0, BLOCK // 2)[None, :]
        tl.store(Q + row[:, None] * stride_q + pair, pairs(code), (row[:, None] < M) & (pair < stride_q))
    else:
        tl.store(Q + row[:, None] * stride_q + col, code.to(tl.int8), inside)


def store_integers(q: Quantized, x: Tensor, words: str) -> None:
    """Fill `q` with the codes of `x`; `words` are what the device functions are compiled for.

    It takes one launch. Scales per tensor, and per row where a row is long or the twin is wanted, take another before it, for amax.
    """
    granularity = q.format.granularity
    (M, N), width = x.shape, x.shape[1] // (2 if q.format.name == "int4" else 1)  # bytes of a row of codes
    if granularity == "row" and q.data_t is None and 0 < N <= WIDEST and q.offsets is None:
        quantize_integer_rows(x, q.data, q.scale, M, N, *x.stride(), width, FORMAT=words, BLOCK=max(2, power_of_two(N)))
        return
    groups = 0 if q.offsets is None else q.offsets.shape[0]
    common = {"COLS": 128 if N % 128 == 0 else 16 if N % 16 == 0 else 1, "BLOCK_E": power_of_two(groups)}
    bits = bits_t = None
    if granularity in ("tensor", "row"):
        by_row = granularity == "row"
        if q.data is not None or not by_row:
            bits = torch.zeros(M if by_row else 1, dtype=torch.int32, device=x.device)
        if q.data_t is not None and by_row:
            bits_t = torch.zeros(max(1, groups) * N, dtype=torch.int32, device=x.device)
        amax_tiles(
            x, None, None, None, bits, bits_t, q.offsets, M, N, groups, *x.stride(), 0.0, 0.0, PRODUCE=load_tile, MODE=0,
            FORMAT=granularity, **common,
        )  # fmt: skip
    aligned = q.data_t is None or q.data_t.data_ptr() % 16 == 0
    quantize_integer_tiles(
        x, q.data, q.scale, q.zero, q.data_t, q.scale_t, q.zero_t, bits, bits_t, q.offsets, M, N, groups, *x.stride(),
        width, row_stride(q.scale), row_stride(q.scale_t), FORMAT=words, **common,
        ALIGN=16 if aligned and M % 16 == 0 else 4 if aligned and M % 4 == 0 else 1,
        FULL=groups == 0 and M * N > 0 and M % 128 == 0 and N % 128 == 0,
    )  # fmt: skip
