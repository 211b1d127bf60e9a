"""Norms of rows that are modulated after and gated before: the kernels of `layer_norm` and, modulated or gated, of `rms_norm`.

With n the norm of h, y = (n * (weight + weight_offset) + bias) * (1 + scale) + shift. h is x, or residual + gate * x, rounded once.
n = (h - mean) * rstd, where CENTRED, with rstd = 1 / sqrt(mean((h - mean)**2) + eps): the mean is found first and the squares
after it, both of the row that a program holds. Without CENTRED the mean counts as 0, which is an RMS norm.

Scale, shift and gate have numbers for each row, for each group of consecutive rows (those of one of a batch), or for all. They are
read as they lie, thirds of a tensor too: their rows are one loop or two, an outer and an inner one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.tensor import cdiv, power_of_two, rows, vector
from ...device.dependent import begin_dependent
from ...device.groups import Rows
from ...device.quantize import quotient
from ...device.store import NOWHERE, Way
from ...formats.fill import fill, fill_from, is_fast, row_way
from ...op import upcast
from ...runtime.kernel import kernel
from ..activation.epilogue import loops
from .row_pieces import (
    WIDEST,
    inside_piece,
    load_pieces,
    load_weight,
    split_forward,
    store_normed,
    weight_pieces,
)

MOST_ROWS = 2**31 - 64  # row numbers are divided as 32-bit ones


# ---------------------------------------------------------------- on the device


@triton.jit
def row_starts(P, row, INNER):
    """Where rows [n, 1] of P begin, 64-bit. Without INNER all are outer ones."""
    if INNER is None:
        at = row * P.stride_o
    else:
        o = row.to(tl.int32) // INNER
        at = o.to(tl.int64) * P.stride_o + (row - o.to(tl.int64) * INNER) * P.stride_i
    return at


@triton.jit
def laid_pieces(P, row, INNER, col, live, N, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """`load_pieces` of an operand as it lies; none if there is none."""
    pieces = ()
    if P.data is not None:
        first = P.data + row_starts(P, row, INNER)
        pieces = load_pieces(first, 0, col, live, N, 0, P.stride_n, "", BLOCK, PIECES)
    return pieces


@triton.jit
def load_row(
    X, R, GATE, H, row, col, live, N, INNER, stride_xm, stride_xn, stride_rm, stride_rn,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The pieces of x, or of the new residual h = r + gate * x, which is stored."""
    xs = load_pieces(X, row, col, live, N, stride_xm, stride_xn, "evict_last" if KEEP else "", BLOCK, PIECES)
    if R is not None:
        rs = load_pieces(R, row, col, live, N, stride_rm, stride_rn, "", BLOCK, PIECES)
        gates = laid_pieces(GATE, row, INNER, col, live, N, BLOCK, PIECES)
        hs = ()
        for i in tl.static_range(PIECES):
            x = xs[i].to(tl.float32)
            r = rs[i]
            if GATE.data is not None:
                gate = gates[i]
                x = x * gate.to(tl.float32)
            hs = hs + ((r.to(tl.float32) + x).to(H.dtype.element_ty),)
        # H may lie on R, and of few columns several threads hold the same: all have read before one writes
        tl.debug_barrier()
        for i in tl.static_range(PIECES):
            tl.store(H + row * N + col + i * BLOCK, hs[i], inside_piece(live, col, N, i, BLOCK, PIECES))
        xs = hs
    return xs


@triton.jit
def sum_pieces(xs, PIECES: tl.constexpr):
    """The sum over pieces: [ROWS, BLOCK]."""
    total = xs[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        total += xs[i].to(tl.float32)
    return total


@triton.jit
def mean_of(total, N, inv_n):
    """The mean of rows with these sums [ROWS], as a division rounds it: where the sum is exact so is that of a row of equal
    numbers, of which then 0 is left. Their product with 1 / N may be a bit off, and contracted with the difference that follows
    it nearly always is; with all numbers equal rstd is 1 / sqrt(eps), which makes that show."""
    return quotient(total, tl.full(total.shape, N, tl.float32), inv_n)


@triton.jit
def centre(x, mean, col, N, i: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """x - mean of the i-th piece, 0 past the row's end, for which it need not be where the mean counts as 0 (None)."""
    x = x.to(tl.float32)
    if mean is not None:
        x = x - mean
        if i == PIECES - 1:
            x = tl.where(i * BLOCK + col < N, x, 0.0)
    return x


@triton.jit
def square_pieces(xs, mean, col, N, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """(x - mean)**2, summed over pieces: [ROWS, BLOCK]."""
    x = centre(xs[0], mean, col, N, 0, BLOCK, PIECES)
    total = x * x
    for i in tl.static_range(1, PIECES):
        x = centre(xs[i], mean, col, N, i, BLOCK, PIECES)
        total += x * x
    return total


@triton.jit
def modulate(n, w, b, s, t):
    """(n * w + b) * (1 + s) + t, each left out where it is None."""
    if w is not None:
        n = n * w
    if b is not None:
        n = n + b
    if s is not None:
        n = n * (1.0 + s.to(tl.float32))
    if t is not None:
        n = n + t.to(tl.float32)
    return n


@triton.jit
def load_at(P, row, INNER, c, inside):
    """Columns `c` [1, n] of rows `row` [m, 1] of an operand as it lies; None if there is none."""
    found = None
    if P.data is not None:
        found = tl.load(P.data + row_starts(P, row, INNER) + c.to(tl.int64) * P.stride_n, inside, 0.0)
    return found


@triton.jit
def columns_at(W, c, inside, weight_offset):
    """A weight, or a bias, at columns `c` [n], as [1, n]; None if there is none."""
    found = None
    if W is not None:
        found = load_weight(W, c, inside, weight_offset)[None, :]
    return found


@triton.jit
def pick(pieces, i: tl.constexpr):
    """The i-th of some pieces; None of none."""
    found = None
    if len(pieces) > 0:
        found = pieces[i]
    return found


def _default(a) -> dict:
    operands = sum(t is not None for t in (a.R, a.GATE.data, a.SCALE.data, a.SHIFT.data))
    if a.PIECES > 1:
        ROWS, num_warps = 1, min(32, a.BLOCK // (128 if a.FORMAT is None and a.BLOCK <= 1024 else 256))
    elif a.FORMAT is None or operands > 1:
        # 16 elements a thread of each operand, as in `rms_norm_forward`
        ROWS, num_warps = max(1, min(16, 2048 // a.BLOCK)), min(16, max(4, a.BLOCK // 512))
    else:
        ROWS, num_warps = max(1, min(16, 4096 // a.BLOCK)), min(16, max(4, a.BLOCK // 1024))
    # Late: what modulates is loaded after the sums, for which a wide row leaves no registers
    return dict(ROWS=ROWS, num_warps=num_warps, LATE=a.PIECES > 1 and a.BLOCK * a.PIECES > 8192)


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "INNER", "stride_s"), tune_by=("N",), default=_default, dependent=True,
)  # fmt: skip
def modulated_norm_forward(
    X, R, GATE, W, B, SCALE, SHIFT, RSTD_IN, Y, S, SHARED, ZERO, STATIC, H, MEAN, RSTD, M, N, INNER, stride_xm, stride_xn,
    stride_rm, stride_rn, stride_s, eps, inv_n, weight_offset, CENTRED: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    FORMAT: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, LATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Y, H, MEAN and RSTD are each written unless None; Y takes values, or codes with what a `Way` has beside them. A row is held
    as PIECES of BLOCK columns, or with PIECES 0 read again for each sum. KEEP: x is read again soon."""
    begin_dependent(DEPENDENT)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = r[:, None]
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    live = row < M
    to = Way(Y, S, SHARED, ZERO, STATIC)
    mean = None
    if PIECES > 0:
        xs = load_row(
            X, R, GATE, H, row, col, live, N, INNER, stride_xm, stride_xn, stride_rm, stride_rn, KEEP, BLOCK, PIECES
        )
        if not LATE and Y is not None:
            # Before the sums, which everything after them waits for
            ws = weight_pieces(W, N, weight_offset, BLOCK, PIECES)
            bs = weight_pieces(B, N, None, BLOCK, PIECES)
            ss = laid_pieces(SCALE, row, INNER, col, live, N, BLOCK, PIECES)
            ts = laid_pieces(SHIFT, row, INNER, col, live, N, BLOCK, PIECES)
        if CENTRED:
            mean = mean_of(tl.sum(sum_pieces(xs, PIECES), axis=1), N, inv_n)[:, None]
        total = square_pieces(xs, mean, col, N, BLOCK, PIECES)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            c = start + col
            xs = load_row(
                X, R, GATE, H, row, c, live, N, INNER, stride_xm, stride_xn, stride_rm, stride_rn, KEEP, BLOCK, 1
            )
            total += sum_pieces(xs, 1) if CENTRED else square_pieces(xs, None, c, N, BLOCK, 1)
        # What is read again: x, or h, which other threads of this program have just stored
        HELD_IN = X
        stride_m, stride_n = stride_xm, stride_xn
        if R is not None:
            tl.debug_barrier()
            HELD_IN = H
            stride_m, stride_n = N, 1
        if CENTRED:
            mean = mean_of(tl.sum(total, axis=1), N, inv_n)[:, None]
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, N, BLOCK):
                xs = load_pieces(HELD_IN, row, start + col, live, N, stride_m, stride_n, "", BLOCK, 1)
                total += square_pieces(xs, mean, start + col, N, BLOCK, 1)
    if RSTD_IN is None:
        rstd = tl.rsqrt(tl.sum(total, axis=1) * inv_n + eps)
    else:
        rstd = tl.load(RSTD_IN + r, r < M, 0.0)
    if MEAN is not None:
        tl.store(MEAN + row, mean, live)
    if RSTD is not None:
        tl.store(RSTD + r, rstd, r < M)
    rstd = rstd[:, None]
    if Y is not None:
        if PIECES > 0:
            for i in tl.static_range(PIECES):
                n = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
                if LATE:
                    c = i * BLOCK + lane
                    w = columns_at(W, c, c < N, weight_offset)
                    b = columns_at(B, c, c < N, None)
                    inside = inside_piece(live, col, N, i, BLOCK, PIECES)
                    s = load_at(SCALE, row, INNER, i * BLOCK + col, inside)
                    t = load_at(SHIFT, row, INNER, i * BLOCK + col, inside)
                else:
                    w = pick(ws, i)
                    b = pick(bs, i)
                    s = pick(ss, i)
                    t = pick(ts, i)
                y = modulate(n, w, b, s, t)
                store_normed(y, to, row, i * BLOCK, live, N, stride_s, FORMAT, KEEP)
        else:
            for start in range(0, N, BLOCK):
                c = start + lane
                inside = live & (start + col < N)
                xs = load_pieces(HELD_IN, row, start + col, live, N, stride_m, stride_n, "", BLOCK, 1)
                n = centre(xs[0], mean, start + col, N, 0, BLOCK, 1) * rstd
                w = columns_at(W, c, c < N, weight_offset)
                b = columns_at(B, c, c < N, None)
                s = load_at(SCALE, row, INNER, start + col, inside)
                t = load_at(SHIFT, row, INNER, start + col, inside)
                y = modulate(n, w, b, s, t)
                store_normed(y, to, row, start, live, N, stride_s, FORMAT, KEEP)


@triton.jit
def produce(SOURCE, row, col, inside, MODE: tl.constexpr):
    """Rows of y that is not modulated, mean and rstd being given."""
    X, W, B, MEAN, RSTD, stride_xm, stride_xn, weight_offset = SOURCE
    n = tl.load(X + row * stride_xm + col.to(tl.int64) * stride_xn, inside, 0.0).to(tl.float32)
    if MEAN is not None:
        n = n - tl.load(MEAN + row)
    n = n * tl.load(RSTD + row)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32)
        if weight_offset is not None:
            w += weight_offset
        n = n * w
    if B is not None:
        n = n + tl.load(B + col, inside, 0.0).to(tl.float32)
    return n


# ---------------------------------------------------------------- how operands lie


class Layout(NamedTuple):
    """Rows of x as [outer, inner], and each operand with its strides there; of one loop `inner` is 1."""

    outer: int
    inner: int
    operands: list[Rows]


def lay(x: Tensor, operands: Sequence[Tensor | None]) -> Layout:
    """How kernels take operands that broadcast to x. Where their rows are more than two loops they are copied."""
    M = math.prod(x.shape[:-1])
    shape = x.shape if x.dim() > 1 else (1, *x.shape)
    found = loops(shape, operands, merge=False)
    if found is None or found.sizes[1:] != (1, 1) or (found.sizes[0] != 1 and M > MOST_ROWS):
        operands = [None if t is None else t.expand(shape).contiguous() for t in operands]
        found = loops(shape, operands, merge=False)
    inner = found.sizes[0]
    laid = [Rows() if t is None else Rows(t, s[0], s[3], s[4]) for t, s in zip(operands, found.strides)]
    return Layout(M // max(1, inner), inner, laid)


def one_loop(layout: Layout) -> int | None:
    """The INNER of kernels that find a row's place by themselves."""
    return None if layout.inner == 1 else layout.inner


# ---------------------------------------------------------------- host


class Norm(NamedTuple):
    """What a norm is beside its tensors."""

    eps: float
    centred: bool
    weight_offset: float = 0.0


def launch_rows(
    x,
    residual,
    gate,
    weight,
    bias,
    scale,
    shift,
    rstd_in,
    y,
    h,
    mean,
    rstd,
    norm: Norm,
    inner,
    fmt=None,
    stride_s=0,
    keep=False,
) -> None:
    """Launch the kernel over rows [M, N]; with `fmt`, y is a `Way` of codes."""
    M, N = x.shape
    BLOCK, PIECES = split_forward(x, residual, fmt)
    strides = residual.stride() if residual is not None else (0, 0)
    modulated_norm_forward(
        x, residual, gate, weight, bias, scale, shift, rstd_in, *y, h, mean, rstd, M, N, inner, *x.stride(), *strides, stride_s,
        norm.eps, 1.0 / N if N else math.nan, norm.weight_offset or None, CENTRED=norm.centred,
        BLOCK=BLOCK, PIECES=PIECES, KEEP=keep,
        FORMAT=None if fmt is None else fmt.device_format(is_fast(x)),
    )  # fmt: skip


def normalised(
    x, residual, gate, weight, bias, scale, shift, h, norm: Norm, out_format, out=None, rstd_in=None
) -> Tensor:
    """y, in `out` if that is given; h is filled if it is given. Row-wise codes come from the row launch where a program sees all it
    needs for their scales; the column-wise ones, and per-tensor or 128x128 scales, from a launch over tiles that takes mean and
    rstd as given, or all of a modulated y."""
    layout = lay(x, (gate, scale, shift))
    inner, (gates, scales, shifts) = one_loop(layout), layout.operands
    x2, r2 = rows(x), None if residual is None else rows(residual)
    weight, bias = vector(weight), vector(bias)
    operands = (x2, r2, gates, weight, bias, scales, shifts, vector(rstd_in))
    if out_format is None:
        dense = out is not None and out.is_contiguous()
        y = out if dense else torch.empty_like(x, memory_format=torch.contiguous_format)
        launch_rows(*operands, Way(y), h, None, None, norm, inner)
        return y if out is None or dense else out.copy_(y)
    q, fmt, (M, N) = out if out is not None else out_format.empty(x.shape, x.dtype, x.device), out_format, x2.shape
    wide = power_of_two(N) > WIDEST
    # Of no rows nothing is launched, and a scale that is given would not be stored
    rows_done = M > 0 and q.data is not None and (fmt.reach in ("block", "given") or (fmt.reach == "row" and not wide))
    tiles = not rows_done or q.data_t is not None
    if tiles and (scale is not None or shift is not None):
        # In fp32 before: ptxas does not hold tiles of x, scale and shift at once without spilling
        wide = torch.empty(M, N, dtype=torch.float32, device=x.device)
        launch_rows(*operands, Way(wide), h, None, None, norm, inner)
        fill_from(q, wide, fmt.tensor)
        return q
    mean = rstd = None
    if tiles:
        rstd = torch.empty(M, dtype=torch.float32, device=x.device)
        mean = torch.empty(M, dtype=torch.float32, device=x.device) if norm.centred else None
    to, stride_s = (row_way(q, fmt.tensor), fmt.scale_stride(q, "row")) if rows_done else (NOWHERE, 0)
    launch_rows(*operands, to, h, mean, rstd, norm, inner, fmt if rows_done else None, stride_s, keep=tiles)
    if tiles:
        source = x2 if h is None else h.view(M, N)
        flat = (source, weight, bias, mean, rstd, *source.stride(), norm.weight_offset or None)
        fill(q.twin() if rows_done else q, produce, flat, scale=fmt.tensor)
    return q


def resume(saved: SimpleNamespace) -> dict[str, Any]:
    """The arguments that give the rest from h: without a gate h is the x that nothing is added to. A gate is multiplied with x, and
    then the residual is what h has beside that product, in float64, so that their sum is h again."""
    if saved.gate is None:
        return {**vars(saved), "x": saved.h, "residual": torch.zeros_like(saved.h)}
    added = upcast(saved.gate) * upcast(saved.x)
    return {**vars(saved), "residual": saved.h.double() - added.double()}
