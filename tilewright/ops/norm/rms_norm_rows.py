"""rms_norm in FP8 or INT8 row-wise on Hopper, in Gluon, for rows of a few times 1024 columns.

A row that is no power of two fills its next power of two badly, and codes are bound by instructions. Here a program holds a
row as pieces of 1024 columns, eight consecutive ones a thread, and the weight with it; it walks over rows and loads the next
one before it works on this one. The maxima of the 128-column blocks are exchanged once for all pieces, so that each scale is
computed by two threads and not by sixteen: 9 instructions an element, where the Triton kernel takes 17 at 7168 columns. A row in
INT8 has one scale, of a maximum that is exchanged together with the row's sum.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...core.format import Format, Quantized
from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import gl, gluon
from ...device.integers import byte_code, integer_scale
from ...device.quantize import encode, has, max_nan, scale_of
from ...formats.fp8 import Fp8
from ...formats.integers import Int8
from ...op import single
from ...runtime.kernel import kernel

# Programs on an SM by pieces: what registers leave room for. The Triton kernel is as fast at other widths (H200, November 2026)
PER_SM = {Fp8: {3: 5, 5: 4, 6: 3, 7: 3}, Int8: {3: 5, 4: 4, 5: 4, 6: 3, 7: 3}}
PIECE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # eight blocks of 128 columns
BLOCKS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))  # two threads to a block
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def columns_of_piece():
    block = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, PIECE)), 1)
    return block * 128 + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, PIECE)), 0)


@gluon.jit
def load_pieces(P, PIECES: gl.constexpr):
    """A row, as it lies in memory."""
    at = columns_of_piece()
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces = pieces + (gl.load(P + at + i * 1024),)
    return pieces


@gluon.jit
def load_weight(W, weight_offset, PIECES: gl.constexpr):
    ws = ()
    if W is not None:
        raw = load_pieces(W, PIECES)
        for i in gl.static_range(PIECES):
            w = raw[i].to(gl.float32)
            if weight_offset is not None:
                w = w + weight_offset
            ws = ws + (w,)
    return ws


@gluon.jit
def stack(t):
    """Eight [8, 16] as one [64, 16]."""
    low = gl.join(gl.join(t[0], t[4]), gl.join(t[2], t[6]))
    high = gl.join(gl.join(t[1], t[5]), gl.join(t[3], t[7]))
    return gl.convert_layout(gl.join(low, high).permute((2, 3, 4, 0, 1)).reshape([64, 16]), BLOCKS)


@gluon.jit
def squares_of(xs, PIECES: gl.constexpr):
    """Of a row, summed over pieces."""
    total = gl.zeros([8, 128], gl.float32, PIECE)
    for i in gl.static_range(PIECES):
        x = xs[i].to(gl.float32)
        total += x * x
    return total


@gluon.jit
def largest_of(ys, PIECES: gl.constexpr):
    """|y|, the largest over pieces; NaN if there is one."""
    top = gl.abs(ys[0])
    for i in gl.static_range(1, PIECES):
        top = max_nan(top, gl.abs(ys[i]))
    return top


@gluon.jit
def add_and_max(a, b, c, d):
    return a + c, max_nan(b, d)


@gluon.jit
def times(xs, ws, PIECES: gl.constexpr):
    """x * w in fp32; no `ws` are ones."""
    out = ()
    for i in gl.static_range(PIECES):
        x = xs[i].to(gl.float32)
        if len(ws) > 0:
            x = x * ws[i]
        out = out + (x,)
    return out


@gluon.jit
def store_whole(ys, amax, Q, S, row, at, PIECES: gl.constexpr, FORMAT: gl.constexpr):
    """Codes of a row with one scale, its largest |y| being known."""
    s, c = integer_scale(amax, FORMAT)
    gl.store(S + row, s)
    for i in gl.static_range(PIECES):
        gl.store(Q + at + i * 1024, byte_code(ys[i], s, c, FORMAT))


@gluon.jit
def store_blocks(ys, Q, S, row, stride_s, mults, at, PIECES: gl.constexpr, FORMAT: gl.constexpr):
    """Codes of a row with a scale for each 128 columns."""
    b = gl.arange(0, 64, gl.SliceLayout(1, BLOCKS))
    tops = ()
    for i in gl.static_range(PIECES):
        tops = tops + (gl.reduce(gl.abs(ys[i]).reshape([8, 16, 8]), 2, max_nan),)
    for _ in gl.static_range(8 - PIECES):
        tops = tops + (gl.zeros_like(tops[0]),)
    s, m = scale_of(gl.reduce(stack(tops), 1, max_nan), FORMAT)
    gl.store(S + b.to(gl.int64) * stride_s + row, s, b < 8 * PIECES)
    mults.store(m)
    for i in gl.static_range(PIECES):
        m = gl.expand_dims(mults.slice(8 * i, 8).load(gl.SliceLayout(1, PIECE)), 1)
        gl.store(Q + at + i * 1024, encode(ys[i], m, m, FORMAT))


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("M", "stride_s", "PROGRAMS"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def rms_norm_rows(
    X, W, RSTD_IN, Q, S, RSTD, M, stride_xm, stride_s, eps, inv_n, weight_offset, PROGRAMS,
    PIECES: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Codes and scales of rows of PIECES * 1024 columns; RSTD is written unless None."""
    if not has(FORMAT, "row"):
        mults = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    ws = load_weight(W, weight_offset, PIECES)
    first = gl.program_id(0)
    xs = load_pieces(X + first.to(gl.int64) * stride_xm, PIECES)
    at = columns_of_piece()
    for row in range(first, M, PROGRAMS):
        ahead = load_pieces(X + gl.minimum(row + PROGRAMS, M - 1).to(gl.int64) * stride_xm, PIECES)
        if has(FORMAT, "row"):
            # rstd last, as in `rms_norm_forward`: one exchange gives both the sum and the largest |y|
            products = times(xs, ws, PIECES)
            sums = gl.reduce((squares_of(xs, PIECES), largest_of(products, PIECES)), 1, add_and_max)
            square, top = gl.reduce(sums, 0, add_and_max)
        else:
            square = gl.sum(gl.sum(squares_of(xs, PIECES), 1), 0)
        if RSTD_IN is None:
            rstd = gl.rsqrt(square * inv_n + eps)
        else:
            rstd = gl.load(RSTD_IN + row)
        if RSTD is not None:
            gl.store(RSTD + row, rstd)
        ys = ()
        q = Q + row.to(gl.int64) * (PIECES * 1024)
        if has(FORMAT, "row"):
            for i in gl.static_range(PIECES):
                ys = ys + (products[i] * rstd,)
            store_whole(ys, top * rstd, q, S, row, at, PIECES, FORMAT)
        else:
            for i in gl.static_range(PIECES):
                y = xs[i].to(gl.float32) * rstd
                if W is not None:
                    y = y * ws[i]
                ys = ys + (y,)
            store_blocks(ys, q, S, row, stride_s, mults, at, PIECES, FORMAT)
        xs = ahead


def takes(target: Target, x: Tensor, format: Format | None, out: Quantized | None = None) -> bool:
    """Whether the kernel above takes this x into this format."""
    N = x.shape[-1]
    blocks = isinstance(format, Fp8) and (format.granularity, format.ways, format.pow2) == ("1x128", "row", True)
    whole = isinstance(format, Int8) and (format.granularity, format.ways) == ("row", "row")
    return (
        target.wgmma
        and target.fp8
        and target.takes_gluon
        and x.dtype in (torch.bfloat16, torch.float16)
        and (blocks or whole)
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and x.numel() > 0
        and N % 1024 == 0
        and N // 1024 in PER_SM[type(format)]
        and (out is None or out.data.data_ptr() % 16 == 0)
    )


def in_rows(x, residual, weight, rstd_in, h, rstd, eps, weight_offset, fmt, q) -> None:
    """Fill q with the norm of x [M, N], row-wise, and rstd if it is given."""
    M, N = x.shape
    PIECES = N // 1024
    # As many programs as share the rows evenly
    programs = cdiv(M, cdiv(M, PER_SM[type(fmt)][PIECES] * Target.at(x.device).sms))
    rms_norm_rows(
        x, weight, rstd_in, q.data, q.scale, rstd, M, x.stride(0), fmt.scale_stride(q, "row"), eps, 1.0 / N,
        weight_offset or None, programs, PIECES=PIECES, FORMAT=fmt.device_format(True),
    )  # fmt: skip


def fits_rows(target: Target, a: SimpleNamespace) -> bool:
    """Whether the kernel above takes this call. x is None where a backward has another residual instead."""
    return a.x is not None and single(target, a) and takes(target, a.x, a.out_format, getattr(a, "out", None))
