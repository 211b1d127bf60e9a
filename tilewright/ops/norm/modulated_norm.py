"""Norms of rows that are modulated after and gated before: the kernels of `layer_norm` and `add_layer_norm`.

With n the norm of h, y = (n * (weight + weight_offset) + bias) * (1 + scale) + shift. h is x, or residual + gate * x, rounded once.
n = (h - mean) * rstd, where CENTRED, with rstd = 1 / sqrt(mean((h - mean)**2) + eps): the mean is found first and the squares
after it, both of the row that a program holds. Without CENTRED the mean counts as 0, which is an RMS norm.

Backward, with g = dy * (1 + scale) * (weight + weight_offset): dh = rstd * (g - mean(g) - n * mean(n * g)), of which mean(g) is
left out without CENTRED; dweight is the sum over rows of dy * (1 + scale) * n and dbias that without n, dscale is dy * (n * (weight +
weight_offset) + bias) and dshift is dy. With a gradient of h added to dh, dresidual = dh, dx = gate * dh and dgate = x * dh.

Rows are those of leading dimensions taken as two, [outer, inner]: scale, shift and gate have numbers of their own for each row, for
each outer index, or one for all. They are read as they lie, thirds of a tensor too. What has one for several rows has a sum for its
gradient, which programs keep in registers, each of rows of one outer index alone, and `sum_shares` adds up.
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

from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, rows, vector
from ...device.groups import Rows
from ...device.store import NOWHERE, Way
from ...formats.fill import fill, is_fast, row_way
from ...runtime.kernel import kernel
from ..activation.epilogue import backward as epilogue_backward
from ..activation.epilogue import loops, summed
from .rms_norm import (
    HELD,
    WIDEST,
    inside_piece,
    load_pieces,
    load_weight,
    programs_per_sm,
    split_backward,
    split_codes,
    split_plain,
    store_normed,
    weight_piece,
    weight_pieces,
)

MOST_ROWS = 2**31 - 64  # row numbers are divided as 32-bit ones
REDUCING = 1024  # bytes of shared memory that the backward's sums take beside its stages, at most


class Given(NamedTuple):
    """What a pass of its own found of rows too wide for one program, [rows]: mean, rstd, mean(g) and mean(n * g)."""

    mean: Any = None
    rstd: Any = None
    g: Any = None
    cross: Any = None


# ---------------------------------------------------------------- on the device


@triton.jit
def add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


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
def shared_piece(P, outer, col0, N, i: tl.constexpr, BLOCK: tl.constexpr):
    """The i-th piece, from column `col0` on, of an operand that rows of an outer index share: [1, BLOCK]. It is loaded as one
    dimension for the reason that `load_weight` has."""
    c = col0 + i * BLOCK + tl.arange(0, BLOCK)
    at = P.data + outer * P.stride_o + c.to(tl.int64) * P.stride_n
    return tl.load(at, c < N, 0.0)[None, :]


@triton.jit
def shared_pieces(P, outer, col0, N, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """All pieces of such an operand; none if there is none."""
    pieces = ()
    if P.data is not None:
        for i in tl.static_range(PIECES):
            pieces = pieces + (shared_piece(P, outer, col0, N, i, BLOCK),)
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


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "INNER", "stride_s"), tune_by=("N",), default=_default)
def modulated_norm_forward(
    X, R, GATE, W, B, SCALE, SHIFT, Y, S, SHARED, ZERO, STATIC, H, MEAN, RSTD, M, N, INNER, stride_xm, stride_xn, stride_rm,
    stride_rn, stride_s, eps, inv_n, weight_offset, CENTRED: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    FORMAT: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Y, H, MEAN and RSTD are each written unless None; Y takes values, or codes with what a `Way` has beside them. A row is held
    as PIECES of BLOCK columns, or with PIECES 0 read again for each sum. KEEP: x is read again soon."""
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
            mean = (tl.sum(sum_pieces(xs, PIECES), axis=1) * inv_n)[:, None]
        total = square_pieces(xs, mean, col, N, BLOCK, PIECES)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            xs = load_row(
                X, R, GATE, H, row, start + col, live, N, INNER, stride_xm, stride_xn, stride_rm, stride_rn, KEEP, BLOCK, 1
            )
            total += sum_pieces(xs, 1) if CENTRED else square_pieces(xs, None, start + col, N, BLOCK, 1)
        # What is read again: x, or h, which other threads of this program have just stored
        HELD_IN = X
        stride_m, stride_n = stride_xm, stride_xn
        if R is not None:
            tl.debug_barrier()
            HELD_IN = H
            stride_m, stride_n = N, 1
        if CENTRED:
            mean = (tl.sum(total, axis=1) * inv_n)[:, None]
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, N, BLOCK):
                xs = load_pieces(HELD_IN, row, start + col, live, N, stride_m, stride_n, "", BLOCK, 1)
                total += square_pieces(xs, mean, start + col, N, BLOCK, 1)
    rstd = tl.rsqrt(tl.sum(total, axis=1) * inv_n + eps)
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
                    w, b, s, t = pick(ws, i), pick(bs, i), pick(ss, i), pick(ts, i)
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
    """Rows of y, mean and rstd being given. SOURCE is flat, for Triton 3.6 takes a stride of 1 in a tuple in a tuple for None."""
    X, W, B, MEAN, RSTD, stride_xm, stride_xn, weight_offset, INNER, S, s_o, s_i, s_n, T, t_o, t_i, t_n = SOURCE
    n = tl.load(X + row * stride_xm + col.to(tl.int64) * stride_xn, inside, 0.0).to(tl.float32)
    if MEAN is not None:
        n = n - tl.load(MEAN + row)
    n = n * tl.load(RSTD + row)
    w = None
    b = None
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32)
        if weight_offset is not None:
            w += weight_offset
    if B is not None:
        b = tl.load(B + col, inside, 0.0).to(tl.float32)
    s = load_at(Rows(S, s_o, s_i, s_n), row, INNER, col, inside)
    t = load_at(Rows(T, t_o, t_i, t_n), row, INNER, col, inside)
    return modulate(n, w, b, s, t)


# ---------------------------------------------------------------- backward, on the device


def stage_backward(a, ROWS: int, RELOAD: bool) -> int:
    """Bytes of shared memory that a stage of the backward's loop keeps: a block of each load in it."""
    each_s, each_g = a.EACH[0], a.EACH[2]
    held = [a.X, a.DY, a.DH, a.V, a.SCALE.data if each_s else None, a.GATE.data if each_g else None]
    columns = a.BLOCK * a.PIECES
    bytes_ = ROWS * columns * sum(t.element_size() for t in held if t is not None)
    if RELOAD:
        # Those that all rows share are loaded for the sums and again for what is stored
        shared = [a.W, a.B, None if each_s else a.SCALE.data, None if each_g else a.GATE.data]
        bytes_ += 2 * columns * sum(t.element_size() for t in shared if t is not None)
    return bytes_


def rows_backward(columns: int) -> int:
    """Rows that a program of the backward takes at once."""
    return max(1, min(16, 4096 // columns))


def _default_backward(a) -> dict:
    columns = a.BLOCK * a.PIECES
    ROWS, num_warps = rows_backward(columns), 4 if columns <= 3584 else 8 if columns <= 5120 else 16
    kept = sum(t is not None for t in (a.DW, a.DB)) + sum(
        t is not None and not each for t, each in zip((a.DSCALE, a.DSHIFT, a.DGATE), a.EACH)
    )
    if kept > 2 and num_warps < 16:
        num_warps *= 2  # a sum is as many registers as the row has numbers
    RELOAD = columns > 8192
    room = Target.at(a.X.device).shared_memory
    STAGES = 3 if 2 * stage_backward(a, ROWS, RELOAD) + REDUCING <= room else 1
    return dict(ROWS=ROWS, num_warps=num_warps, STAGES=STAGES, RELOAD=RELOAD)


@triton.constexpr_function
def field(EACH, i):
    return EACH[i]


@triton.jit
def upstream(dy, w, s):
    """(dy * (1 + s), that times w), in fp32."""
    dn = dy.to(tl.float32)
    if s is not None:
        dn = dn * (1.0 + s.to(tl.float32))
    g = dn
    if w is not None:
        g = dn * w
    return dn, g


@triton.jit
def add_if(total, term, DO: tl.constexpr):
    """total + term where it is wanted."""
    if DO:
        total = total + term
    return total


@kernel(
    grid=lambda a: (a.OUTER * a.SPLIT, cdiv(a.N, a.BLOCK * a.PIECES)),
    tokens=("OUTER", "INNER", "SPLIT"),
    tune_by=("N",),
    default=_default_backward,
)
def modulated_norm_backward(
    X, V, W, B, SCALE, GATE, DY, DH, GIVEN, DX, DV, DW, DB, DSCALE, DSHIFT, DGATE, OUTER, INNER, N, SPLIT, stride_xm, stride_xn,
    stride_vm, stride_vn, stride_ym, stride_yn, stride_hm, stride_hn, eps, inv_n, weight_offset, CENTRED: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
):  # fmt: skip
    """A program takes every SPLIT-th block of rows of an outer index: all columns of them, as pieces, or, where sums are GIVEN, one
    block of columns. X is what was normalised, V what the gate was multiplied with. EACH says of scale, shift and gate whether
    they have numbers for each row: then their gradient is stored for each row, else, like those of weight and bias, this program's
    share of it. PDL: the launch that sums the shares may begin, and waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EACH_S: tl.constexpr = field(EACH, 0)
    EACH_T: tl.constexpr = field(EACH, 1)
    EACH_G: tl.constexpr = field(EACH, 2)
    share = tl.program_id(0)
    outer = (share // SPLIT).to(tl.int64)
    col0 = tl.program_id(1) * (BLOCK * PIECES)
    lane = tl.arange(0, BLOCK)
    col = col0 + lane[None, :]
    ws = ()
    bs = ()
    ss = ()
    gates = ()
    if not RELOAD:
        ws = weight_pieces(None if W is None else W + col0, N - col0, weight_offset, BLOCK, PIECES)
        bs = weight_pieces(None if B is None else B + col0, N - col0, None, BLOCK, PIECES)
        if not EACH_S:
            ss = shared_pieces(SCALE, outer, col0, N, BLOCK, PIECES)
        if not EACH_G:
            gates = shared_pieces(GATE, outer, col0, N, BLOCK, PIECES)
    dws = ()
    dbs = ()
    dss = ()
    dts = ()
    dgs = ()
    for _ in tl.static_range(PIECES):
        dws = dws + (tl.zeros([ROWS, BLOCK], tl.float32),)
        dbs = dbs + (tl.zeros([ROWS, BLOCK], tl.float32),)
        dss = dss + (tl.zeros([ROWS, BLOCK], tl.float32),)
        dts = dts + (tl.zeros([ROWS, BLOCK], tl.float32),)
        dgs = dgs + (tl.zeros([ROWS, BLOCK], tl.float32),)
    for block in tl.range(share % SPLIT, tl.cdiv(INNER, ROWS), SPLIT, num_stages=STAGES):
        inner = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        live = inner < INNER
        row = outer * INNER + inner
        xs = load_pieces(X, row, col, live, N, stride_xm, stride_xn, "", BLOCK, PIECES)
        dys = load_pieces(DY, row, col, live, N, stride_ym, stride_yn, "", BLOCK, PIECES)
        if EACH_S:
            at = Rows(None if SCALE.data is None else SCALE.data + outer * SCALE.stride_o, SCALE.stride_i, None, SCALE.stride_n)
            ss = laid_pieces(at, inner, None, col, live, N, BLOCK, PIECES)
        if RELOAD:
            ws = weight_pieces(None if W is None else W + col0, N - col0, weight_offset, BLOCK, PIECES)
            if not EACH_S:
                ss = shared_pieces(SCALE, outer, col0, N, BLOCK, PIECES)
        mean = None
        if GIVEN.rstd is not None:
            if CENTRED:
                mean = tl.load(GIVEN.mean + row, live, 0.0)
                mean_g = tl.load(GIVEN.g + row, live, 0.0)
            rstd = tl.load(GIVEN.rstd + row, live, 0.0)
            mean_cross = tl.load(GIVEN.cross + row, live, 0.0)
        else:
            if CENTRED:
                mean = (tl.sum(sum_pieces(xs, PIECES), axis=1) * inv_n)[:, None]
            squares = square_pieces(xs, mean, col, N, BLOCK, PIECES)
            _, g = upstream(dys[0], pick(ws, 0), pick(ss, 0))
            total = g
            cross = g * centre(xs[0], mean, col, N, 0, BLOCK, PIECES)
            for i in tl.static_range(1, PIECES):
                _, g = upstream(dys[i], pick(ws, i), pick(ss, i))
                total += g
                cross += g * centre(xs[i], mean, col, N, i, BLOCK, PIECES)
            square, cross, total = tl.reduce((squares, cross, total), 1, add_triples)
            # Past the last row x is 0, and with an eps of 0 the sums over rows would take 0 * inf
            rstd = tl.where(live, tl.rsqrt(square * inv_n + eps)[:, None], 0.0)
            mean_cross = (cross * inv_n)[:, None] * rstd
            mean_g = (total * inv_n)[:, None]
        more_w = ()
        more_b = ()
        more_s = ()
        more_t = ()
        more_g = ()
        for i in tl.static_range(PIECES):
            inside = inside_piece(live, col, N, i, BLOCK, PIECES)
            c = col.to(tl.int64) + i * BLOCK
            w = pick(ws, i)
            s = pick(ss, i)
            b = pick(bs, i)
            if RELOAD:
                if W is not None:
                    w = weight_piece(W, N, weight_offset, i, BLOCK)
                if B is not None:
                    b = weight_piece(B, N, None, i, BLOCK)
                if SCALE.data is not None and not EACH_S:
                    s = shared_piece(SCALE, outer, col0, N, i, BLOCK)
            n = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
            dn, g = upstream(dys[i], w, s)
            dy = dys[i].to(tl.float32)
            more_w = more_w + (add_if(dws[i], dn * n, DW is not None),)
            more_b = more_b + (add_if(dbs[i], dn, DB is not None),)
            more_s = more_s + (add_if(dss[i], dy * modulate(n, w, b, None, None), DSCALE is not None and not EACH_S),)
            more_t = more_t + (add_if(dts[i], dy, DSHIFT is not None and not EACH_T),)
            if DSCALE is not None and EACH_S:
                ds = dy * modulate(n, w, b, None, None)
                tl.store(DSCALE + row * N + c, ds.to(DSCALE.dtype.element_ty), inside)
            if DSHIFT is not None and EACH_T:
                tl.store(DSHIFT + row * N + c, dy.to(DSHIFT.dtype.element_ty), inside)
            dh = rstd * (g - n * mean_cross)
            if CENTRED:
                dh = rstd * (g - mean_g - n * mean_cross)
            if DH is not None:
                dh += tl.load(DH + row * stride_hm + c * stride_hn, inside, 0.0).to(tl.float32)
            if DX is not None:
                tl.store(DX + row * N + c, dh.to(DX.dtype.element_ty), inside)
            if DGATE is not None:
                # Past the row's end dh is what the mean of g leaves, and nothing of that is x's
                dg = dh * tl.load(V + row * stride_vm + c * stride_vn, inside, 0.0).to(tl.float32)
                if EACH_G:
                    tl.store(DGATE + row * N + c, dg.to(DGATE.dtype.element_ty), inside)
            else:
                dg = dh
            more_g = more_g + (add_if(dgs[i], dg, DGATE is not None and not EACH_G),)
            if DV is not None:
                if EACH_G:
                    at = GATE.data + outer * GATE.stride_o + inner * GATE.stride_i + c * GATE.stride_n
                    gate = tl.load(at, inside, 0.0)
                elif RELOAD:
                    gate = shared_piece(GATE, outer, col0, N, i, BLOCK)
                else:
                    gate = pick(gates, i)
                tl.store(DV + row * N + c, (dh * gate.to(tl.float32)).to(DV.dtype.element_ty), inside)
        dws = more_w
        dbs = more_b
        dss = more_s
        dts = more_t
        dgs = more_g
    for i in tl.static_range(PIECES):
        c = col0 + i * BLOCK + lane
        at = share.to(tl.int64) * N + c
        if DW is not None:
            tl.store(DW + at, tl.sum(dws[i], axis=0), c < N)
        if DB is not None:
            tl.store(DB + at, tl.sum(dbs[i], axis=0), c < N)
        if DSCALE is not None and not EACH_S:
            tl.store(DSCALE + at, tl.sum(dss[i], axis=0), c < N)
        if DSHIFT is not None and not EACH_T:
            tl.store(DSHIFT + at, tl.sum(dts[i], axis=0), c < N)
        if DGATE is not None and not EACH_G:
            tl.store(DGATE + at, tl.sum(dgs[i], axis=0), c < N)


@kernel(grid=lambda a: (a.M,), tokens=("M", "INNER"), default=lambda a: dict(BLOCK=4096, num_warps=8))
def modulated_norm_sums(
    X, W, SCALE, DY, GIVEN, M, INNER, N, stride_xm, stride_xn, stride_ym, stride_yn, eps, inv_n, weight_offset,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For rows too wide for one program: what is GIVEN of each."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    lane = tl.arange(0, BLOCK)
    live = row < M
    mean = None
    total = tl.zeros([1, BLOCK], tl.float32)
    if CENTRED:
        for start in range(0, N, BLOCK):
            xs = load_pieces(X, row, start + lane[None, :], live, N, stride_xm, stride_xn, "", BLOCK, 1)
            total += sum_pieces(xs, 1)
        mean = (tl.sum(total, axis=1) * inv_n)[:, None]
        tl.store(GIVEN.mean + row, mean)
    squares = tl.zeros([1, BLOCK], tl.float32)
    cross = tl.zeros([1, BLOCK], tl.float32)
    total = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = start + lane
        inside = live & (c < N)[None, :]
        xs = load_pieces(X, row, c[None, :], live, N, stride_xm, stride_xn, "", BLOCK, 1)
        x = centre(xs[0], mean, c[None, :], N, 0, BLOCK, 1)
        dys = load_pieces(DY, row, c[None, :], live, N, stride_ym, stride_yn, "", BLOCK, 1)
        w = columns_at(W, c, c < N, weight_offset)
        _, g = upstream(dys[0], w, load_at(SCALE, row, INNER, c[None, :], inside))
        squares += x * x
        cross += x * g
        total += g
    square, cross, total = tl.reduce((squares, cross, total), 1, add_triples)
    rstd = tl.rsqrt(square * inv_n + eps)
    tl.store(GIVEN.rstd + row, rstd[:, None])
    tl.store(GIVEN.cross + row, (cross * inv_n * rstd)[:, None])
    if CENTRED:
        tl.store(GIVEN.g + row, (total * inv_n)[:, None])


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK), a.GROUPS, len(a.OUTS)),
    tokens=("GROUPS", "SHARES"),
    default=lambda a: {
        "ROWS": 64 if a.SHARES <= 64 else 512,
        "BLOCK": 16,
        "num_warps": 4,
        **({"launch_pdl": True} if a.PDL else {}),
    },
)
def sum_shares(P, OUTS, GROUPS, SHARES, N, PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """OUTS[k][g, n] = sum over m of P[k, g, m, n], always in the same order, as `sum_columns`, of which this is several at once.
    PDL: started before the launch that fills P has ended, if that one says so."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    group = tl.program_id(1).to(tl.int64)
    first = (tl.program_id(2) * GROUPS.to(tl.int64) + group) * SHARES
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, SHARES, ROWS):
        m = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(P + (first + m) * N + col, (m < SHARES) & (col < N), 0.0)
    made = tl.sum(total, axis=0)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for k in tl.static_range(len(OUTS)):
        if tl.program_id(2) == k:
            tl.store(OUTS[k] + group * N + c, made.to(OUTS[k].dtype.element_ty), c < N)


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


def how_shared(t: Tensor | None, x: Tensor, inner: int) -> str:
    """How an operand's numbers are those of rows: "each" has its own, "group" those of one outer index share them, "all" share
    them; "mixed" is any other way to broadcast, for which each row counts as having its own."""
    if t is None:
        return "each"
    if t.dim() == 1 < x.dim():  # of a single row too: the kernel does not depend on how many there are
        return "all"
    lead = x.shape[:-1]
    own = (*(1 for _ in range(x.dim() - t.dim())), *t.shape[:-1])
    over = [d for d, (size, whole) in enumerate(zip(own, lead)) if size != whole]
    if not over:
        return "each"
    wide = [d for d, size in enumerate(lead) if size != 1]
    if over == wide:
        return "all"
    behind = wide[len(wide) - len(over) :]
    return "group" if over == behind and math.prod(lead[d] for d in behind) == inner else "mixed"


# ---------------------------------------------------------------- host


class Norm(NamedTuple):
    """What a norm is beside its tensors."""

    eps: float
    centred: bool
    weight_offset: float = 0.0


def launch_rows(
    x, residual, gate, weight, bias, scale, shift, y, h, mean, rstd, norm: Norm, inner, fmt=None, stride_s=0, keep=False
) -> None:
    """Launch the kernel over rows [M, N]; with `fmt`, y is a `Way` of codes."""
    M, N = x.shape
    BLOCK, PIECES = split_plain(N) if fmt is None else split_codes(N)
    if fmt is not None and fmt.reach == "row":
        BLOCK, PIECES = power_of_two(N), 1  # the scale is found of the row as one tensor
    if PIECES > 1 and N * x.element_size() * (1 if residual is None else 2) > HELD:
        BLOCK, PIECES = 4096, 0
    strides = residual.stride() if residual is not None else (0, 0)
    modulated_norm_forward(
        x, residual, gate, weight, bias, scale, shift, *y, h, mean, rstd, M, N, inner, *x.stride(), *strides, stride_s,
        norm.eps, 1.0 / N if N else math.nan, norm.weight_offset or None, CENTRED=norm.centred,
        BLOCK=max(128, BLOCK) if fmt is not None else BLOCK, PIECES=PIECES, KEEP=keep,
        FORMAT=None if fmt is None else fmt.device_format(is_fast(x)),
    )  # fmt: skip


def normalised(x, residual, gate, weight, bias, scale, shift, h, norm: Norm, out_format) -> Tensor:
    """y; h is filled if it is given. Row-wise codes come from the row launch where a program sees all it needs for their scales;
    the column-wise ones, and per-tensor or 128x128 scales, from a launch over tiles that takes mean and rstd as given."""
    layout = lay(x, (gate, scale, shift))
    inner, (gates, scales, shifts) = one_loop(layout), layout.operands
    x2, r2 = rows(x), None if residual is None else rows(residual)
    weight, bias = vector(weight), vector(bias)
    operands = (x2, r2, gates, weight, bias, scales, shifts)
    if out_format is None:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch_rows(*operands, Way(y), h, None, None, norm, inner)
        return y
    q, fmt, (M, N) = out_format.empty(x.shape, x.dtype, x.device), out_format, x2.shape
    wide = power_of_two(N) > WIDEST
    # Of no rows nothing is launched, and a scale that is given would not be stored
    rows_done = M > 0 and q.data is not None and (fmt.reach in ("block", "given") or (fmt.reach == "row" and not wide))
    tiles = not rows_done or q.data_t is not None
    mean = rstd = None
    if tiles:
        rstd = torch.empty(M, dtype=torch.float32, device=x.device)
        mean = torch.empty(M, dtype=torch.float32, device=x.device) if norm.centred else None
    to, stride_s = (row_way(q, fmt.tensor), fmt.scale_stride(q, "row")) if rows_done else (NOWHERE, 0)
    launch_rows(*operands, to, h, mean, rstd, norm, inner, fmt if rows_done else None, stride_s, keep=tiles)
    if tiles:
        source = x2 if h is None else h.view(M, N)
        flat = (source, weight, bias, mean, rstd, *source.stride(), norm.weight_offset or None, inner, *scales, *shifts)
        fill(q.twin() if rows_done else q, produce, flat, scale=fmt.tensor)
    return q


class Wanted(NamedTuple):
    """Gradients by argument, None where they are not wanted; `h` is that of what was normalised."""

    h: Tensor | None = None
    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    gate: Tensor | None = None


def gradients(x, v, weight, bias, scale, shift, gate, dy, dh, norm: Norm, needs) -> Wanted:
    """Gradients of the norm of x, to which `dh` is added, and of what x came from: v times the gate, and a residual. Sums over rows
    are made in fp32, per program and then over programs, without atomics."""
    like = Wanted(x, v, weight, bias, scale, shift, gate)
    asked = {n: t for n, t in like._asdict().items() if n in needs}
    if not x.numel():
        return Wanted(**{n: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for n, t in asked.items()})
    layout = lay(x, (gate, scale))
    outer, inner, (gates, scales) = layout
    shared = {
        "weight": "all", "bias": "all", "scale": how_shared(scale, x, inner), "shift": how_shared(shift, x, inner),
        "gate": how_shared(gate, x, inner),
    }  # fmt: skip
    x2, dy2 = rows(x), rows(dy)
    M, N = x2.shape
    if inner == 1:  # one loop, which is the inner one here
        outer, inner = 1, M
        gates, scales = (t if t.data is None else Rows(t.data, 0, t.stride_o, t.stride_n) for t in layout.operands)
    target = Target.at(x.device)
    wide = power_of_two(N) > WIDEST
    BLOCK, PIECES = (1024, 1) if wide else split_backward(N)
    most = max(1, programs_per_sm(N) * target.sms // outer)
    split = max(1, min(most, cdiv(inner, 4 if wide else max(1, 2048 // power_of_two(N)))))
    shares = outer * split
    made: dict[str, Tensor] = {}
    to: dict[str, Tensor] = {}
    summing: dict[int, list[str]] = {}  # names by how many groups their sums have
    for n, t in asked.items():
        kind = shared.get(n, "each")
        if kind in ("all", "group"):
            made[n] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            summing.setdefault(1 if kind == "all" else outer, []).append(n)
        else:
            dtype = torch.float32 if kind == "mixed" else t.dtype
            made[n] = to[n] = torch.empty(x.shape, dtype=dtype, device=x.device)
    parts = {}
    for groups, names in summing.items():
        parts[groups] = torch.empty(len(names), shares, N, dtype=torch.float32, device=x.device)
        to.update(zip(names, parts[groups]))
    each = tuple(shared[n] in ("each", "mixed") for n in ("scale", "shift", "gate"))
    PDL = bool(parts) and target.early_launch
    numbers = (norm.eps, 1.0 / N, norm.weight_offset or None)
    given = Given()
    weight2, bias2 = vector(weight), vector(bias)
    if wide:
        means = [torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(4 if norm.centred else 2)]
        given = Given(*means) if norm.centred else Given(rstd=means[0], cross=means[1])
        modulated_norm_sums(
            x2, weight2, layout.operands[1], dy2, given, M, one_loop(layout), N, *x2.stride(), *dy2.stride(), *numbers,
            CENTRED=norm.centred,
        )  # fmt: skip
    v2 = rows(v) if "gate" in needs else None
    dh2 = None if dh is None else rows(dh)
    strides = [s for t in (x2, v2, dy2, dh2) for s in ((0, 0) if t is None else t.stride())]
    modulated_norm_backward(
        x2, v2, weight2, bias2 if "scale" in needs else None, scales, gates if "x" in asked else Rows(), dy2, dh2, given,
        *(to.get(n) for n in Wanted._fields), outer, inner, N, split, *strides, *numbers,
        CENTRED=norm.centred, EACH=each, BLOCK=BLOCK, PIECES=PIECES, PDL=PDL,
    )  # fmt: skip
    for groups, names in summing.items():
        outs = tuple(made[n] for n in names)
        sum_shares(parts[groups], outs, groups, shares // groups, N, PDL=PDL)
        PDL = False  # the next comes after this one
    for n in ("scale", "shift", "gate"):
        if n in made and n in to and shared[n] != "all":
            made[n] = summed(made[n], asked[n]) if shared[n] == "mixed" else made[n].view(asked[n].shape)
    return Wanted(**made)


def gate_gradients(saved: SimpleNamespace, dh: Tensor) -> tuple:
    """(dx, dresidual, dgate) of h = residual + gate * x alone."""
    inner = SimpleNamespace(
        x=saved.x, bias=None, add=None, act=None, gate=saved.gate, residual=saved.h, alpha=1.0, needs=saved.needs
    )
    dx, _, _, dgate, dresidual = epilogue_backward(inner, dh)
    return dx, dresidual, dgate
