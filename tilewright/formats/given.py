"""Codes of a whole tensor with one given scale, as a kernel of pointers and sizes alone: what jax-triton can launch.

The arithmetic is that of `quantize(x, fp8("tensor", scale=s))`. What is stored may be the transpose, for cuBLASLt reads the second
factor of an FP8 product column by column.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from ..core.tensor import cdiv
from ..device.quantize import encode
from ..device.store import codes_at, given_scale
from ..runtime.kernel import kernel


def tiles(a: Any) -> tuple[int]:
    return (cdiv(a.M, a.ROWS) * cdiv(a.N, a.COLS),)


@kernel(grid=tiles, tokens=("M",), default=lambda a: {"ROWS": 32, "COLS": 128, "num_warps": 4})
def given_codes(
    X, SCALE, M, N, CODES, TRANSPOSED: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A program a tile of X [M, N]. The result comes last of what is no constant, as jax-triton gives it."""
    across = tl.cdiv(N, COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < M) & (col < N)
    scale, mult = given_scale(SCALE, FORMAT)
    codes = encode(tl.load(X + row * N + col, inside, 0.0).to(tl.float32), scale, mult, FORMAT)
    at = col * M + row if TRANSPOSED else row * N + col
    tl.store(codes_at(CODES, FORMAT) + at, codes, inside)
