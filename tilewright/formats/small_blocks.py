"""Kernels of formats with blocks of 16 or 32 numbers: a matrix into codes and scales by rows, by columns or both."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import jit

from ..core.format import Quantized
from ..core.tensor import cdiv, power_of_two
from ..device.quantize import has
from ..device.small_blocks import store_blocks, whole_scale
from ..runtime.kernel import kernel
from .tiles import amax_tiles, is_fast, load_tile


def _grid(a: Any) -> tuple[int]:
    # At least one program, which stores the scale of an empty matrix
    return (max(1, cdiv(a.M, a.ROWS)) * max(1, cdiv(a.N, a.COLS)),)


def _tile(a: Any) -> dict[str, int]:
    # 64 numbers a thread. Transposed codes want long columns, the scales of rows long rows
    if a.QT is None:
        return {"ROWS": 16 if a.BLOCK == 16 else 32, "COLS": 256, "num_warps": 4}
    return {"ROWS": 64, "COLS": 64, "num_warps": 4}


@kernel(grid=_grid, tokens=("M", "stride_s", "stride_st"), default=_tile)
def quantize_blocks(
    X, Q, S, G, QT, ST, GT, WHOLE, OFFSETS, M, N, E, stride_x, stride_c, stride_s, stride_st, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program, one tile: read once, stored in the ways that are not None.

    WHOLE is the static scale of the whole, or the bits of its amax. ALIGN divides M: as a product with it, M tells the compiler
    that rows of transposed codes may be stored by whole words.
    """
    PER: tl.constexpr = 2 if has(FORMAT, "e2m1") else 1
    tiles = tl.maximum(tl.cdiv(N, COLS), 1)
    row0 = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    col0 = tl.program_id(0) % tiles * COLS
    g = 1.0
    if WHOLE is not None:
        g = whole_scale(WHOLE, FORMAT)
        if tl.program_id(0) == 0:
            if G is not None:
                tl.store(G, g)
            if GT is not None:
                tl.store(GT, g)
    rows = M // ALIGN * ALIGN
    if OFFSETS is not None:
        rows = tl.minimum(tl.maximum(tl.load(OFFSETS + E - 1).to(tl.int64), 0), M)
    r = row0 + tl.arange(0, ROWS)[:, None]
    c = col0 + tl.arange(0, COLS)[None, :]
    x = tl.load(X + r * stride_x + c.to(tl.int64) * stride_c, (r < rows) & (c < N), 0.0)
    if Q is not None:
        store_blocks(x, g, Q, S, row0, col0, rows, N, N // PER, stride_s, FORMAT, BLOCK)
    if QT is not None:
        stride_qt = M // ALIGN * (ALIGN // PER) if ALIGN > 1 else M // PER
        store_blocks(tl.trans(x), g, QT, ST, col0.to(tl.int64), row0, N, rows, stride_qt, stride_st, FORMAT, BLOCK)


@jit
def load_finite(A, B, C, D, stride_a, stride_b, p0, p1, row, col, inside, MODE: tl.constexpr):
    """The producer that reads a tensor with 0 in place of what is not finite."""
    x = load_tile(A, B, C, D, stride_a, stride_b, p0, p1, row, col, inside, MODE)
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


# ---- host ------------------------------------------------------------------------------------------------------------


def as_bytes(t: Tensor | None) -> Tensor | None:
    """Codes or scales as kernels take them, as bytes: Triton knows no e8m0, and e4m3 not on every chip."""
    return None if t is None or t.dtype == torch.float32 else t.view(torch.uint8)


def quantize_matrix(q: Quantized, x: Tensor, offsets: Tensor | None, static: Tensor | None) -> None:
    """Fill `q`, made by `empty`, with the matrix x. One launch does it; a scale of the whole takes one more unless static."""
    format = q.format
    M, N = x.shape
    groups = 0 if offsets is None else offsets.shape[0]
    whole = static
    if "shared" in format.parts and static is None:
        whole = torch.zeros(1, dtype=torch.int32, device=x.device)
        amax_tiles(
            x, None, None, None, whole, None, offsets, M, N, groups, *x.stride(), 0.0, 0.0, PRODUCE=load_finite, MODE=0,
            FORMAT="tensor", COLS=128 if N % 128 == 0 else 16 if N % 16 == 0 else 1, BLOCK_E=power_of_two(groups),
        )  # fmt: skip
    scale, scale_t = q.scale, q.scale_t
    quantize_blocks(
        x, as_bytes(q.data), as_bytes(scale), q.shared, as_bytes(q.data_t), as_bytes(scale_t), q.shared_t, whole, offsets,
        M, N, groups, *x.stride(), 0 if scale is None else scale.stride(0), 0 if scale_t is None else scale_t.stride(0),
        FORMAT=format.device_format(is_fast(x)), BLOCK=format.block, ALIGN=32 if q.data_t is not None and M % 32 == 0 else 1,
    )  # fmt: skip
