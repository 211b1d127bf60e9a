"""Quantised stores for kernels that hold rows: y [ROWS, BLOCK] of consecutive columns, BLOCK a multiple of 128."""

import triton
import triton.language as tl

from .quantize import amax, codes_at, encode, has, scale_of


@triton.jit
def store_row_codes(
    y, Q, S, STATIC, row, start, live, N, stride_q, stride_s, FORMAT: tl.constexpr, EVICT: tl.constexpr = "",
):  # fmt: skip
    """Codes of y, whose first column is `start`, at Q, and their scales at S: formats 1x128 (S [blocks, rows]), row (y is the
    whole row), static (the scale is STATIC's) and unit. y must be zero past column N."""
    ROWS: tl.constexpr = y.shape[0]
    BLOCK: tl.constexpr = y.shape[1]
    col = start + tl.arange(0, BLOCK)[None, :]
    if has(FORMAT, "1x128"):
        blocks = tl.reshape(y, (ROWS, BLOCK // 128, 128))
        s, m = scale_of(amax(blocks, 2), FORMAT)
        b = start // 128 + tl.arange(0, BLOCK // 128)[None, :]
        tl.store(S + b.to(tl.int64) * stride_s + row, s, live & (b * 128 < N))
        codes = tl.reshape(encode(blocks, s[:, :, None], m[:, :, None], FORMAT), (ROWS, BLOCK))
    elif has(FORMAT, "row"):
        s, m = scale_of(amax(y, 1), FORMAT)
        tl.store(S + row, s[:, None], live)
        codes = encode(y, s[:, None], m[:, None], FORMAT)
    else:
        s = 1.0
        m = 1.0
        if has(FORMAT, "static"):
            s = tl.load(STATIC)
            m = tl.div_rn(1.0, s)
        if tl.program_id(0) == 0:
            tl.store(S, s)
        codes = encode(y, s, m, FORMAT)
    tl.store(codes_at(Q, FORMAT) + row * stride_q + col, codes, live & (col < N), eviction_policy=EVICT)
