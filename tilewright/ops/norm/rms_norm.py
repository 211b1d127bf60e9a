"""RMS norm over the last dimension: y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x**2) + eps).

Where it is modulated, y * (1 + scale) + shift follows. `add_rms_norm` first adds a residual: h = residual + gate * x, rounded once
and returned, and y is the norm of that h. Modulated or gated calls are those of `modulated_norm.py`.
Backward, with g = dy * (weight + weight_offset): dx = rstd * g - rstd**3 * x * mean(x * g), and dweight is the sum over
rows of dy * x * rstd.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.format import Format, store
from ...core.signature import at_least
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, rows, vector
from ...device.dependent import begin_dependent, let_next_begin
from ...device.quantize import has, max_nan
from ...device.store import Way, codes_in_byte, row_codes, scales, store_codes, store_scales
from ...formats.fill import fill, is_fast, row_way
from ...op import Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from . import modulated_norm
from .modulated_norm_backward import added_gradients
from .modulated_norm_backward import gradients as modulated_gradients
from .rms_norm_hopper import fits_tiles, store_normed_tiles
from .rms_norm_rows import fits_rows, in_rows
from .rms_norm_shared import (
    aligned,
    backward_shape,
    fits_shared,
    forward_shape,
    launch_backward,
    launch_forward,
    programs_for,
)
from .row_pieces import (
    WIDEST,
    inside_piece,
    load_pieces,
    load_weight,
    plain_rows,
    programs_per_sm,
    split_backward,
    split_forward,
    store_normed,
    weight_piece,
    weight_pieces,
)


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    rstd: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    out_format: Format | None = None,
) -> Tensor:
    """Scale each row of `x` to unit root-mean-square, then by `weight + weight_offset`, then `* (1 + scale) + shift`; all in fp32,
    rounded once. What is None is left out.

    `rstd`, one number per row, is the statistic from an earlier call on the same `x` (`rms_norm_rstd` returns it): it is used
    instead of being computed, and the gradient is the same. `scale` and `shift` have the shape of `x`
    or broadcast to it over leading dimensions: numbers for each row, for each of a batch ([batch, 1, hidden]) or one vector. They
    are read as they lie, so that thirds of one tensor need not be copied. `out_format` gives a `Quantized` result.
    """
    return normalise(x, weight, eps, weight_offset, rstd, out_format, scale, shift)[0]


def normalise(x, weight, eps, weight_offset, rstd, out_format, scale=None, shift=None) -> tuple[Tensor, Tensor]:
    """(y, rstd). A given rstd replaces the computed one in value, not in the gradient."""
    wide = upcast(x)  # once: autograd would round a gradient for each use of x itself
    computed = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rstd is not None:
        # The difference is 0, and where x is not finite NaN: it must carry the gradient and leave the value alone
        computed = upcast(rstd).unsqueeze(-1) + torch.nan_to_num(computed - computed.detach())
    y = wide * computed
    if weight is not None:
        y = y * (upcast(weight) + weight_offset)
    y = y if scale is None else y * (1 + upcast(scale))
    y = y if shift is None else y + upcast(shift)
    return store(y, out_format, x.dtype), computed.squeeze(-1).detach()


def reference_rstd(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_format: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and the fp32 reciprocal root-mean-square of each row that it used."""
    y, rstd = normalise(x, weight, eps, weight_offset, None, out_format)
    return y, rstd


def reference_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    out_format: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = residual + gate * x, the new residual; `gate` broadcasts as `scale` and `shift` do, and without
    one h = x + residual. h may be stored over `residual`: `out=(y, residual)`."""
    added = upcast(x) if gate is None else upcast(gate) * upcast(x)
    h = (added + upcast(residual)).to(x.dtype)
    return normalise(h, weight, eps, weight_offset, None, out_format, scale, shift)[0], h


def inputs(draw: Draw) -> dict:
    return dict(
        x=draw.tensor("tokens", "hidden"),
        weight=draw.maybe("weight", lambda: draw.tensor("hidden", scale=0.5, shift=1.0)),
        eps=draw.option("eps", 1e-6, 1e-5),
        weight_offset=draw.option("weight_offset", 0.0, 1.0),
    )


def operand(draw: Draw, name: str, **how: float) -> Tensor | None:
    """Numbers for each row, or for all; none in most calls, whose kernels are others."""
    lead = {"rows": ("tokens",), "all": ()}[draw.option("over", "rows", "all")]
    if not draw.option("modulated", False, False, True):
        return None
    return draw.maybe(name, lambda: draw.tensor(*lead, "hidden", **how))


def inputs_modulated(draw: Draw) -> dict:
    return {**inputs(draw), "scale": operand(draw, "scale", scale=0.5), "shift": operand(draw, "shift", scale=0.5)}


def inputs_add(draw: Draw) -> dict:
    gate = operand(draw, "gate", scale=0.5, shift=1.0)
    return {**inputs_modulated(draw), "residual": draw.tensor("tokens", "hidden"), "gate": gate}


def _default(a) -> dict:
    if a.FORMAT is None and a.Y is not None:
        ROWS, num_warps = plain_rows(a.BLOCK, a.PIECES)
    elif a.PIECES > 1:
        ROWS, num_warps = 1, min(32, a.BLOCK // 256)
    else:
        # Codes are bound by instructions: 32 elements a thread share what is done once for a block of 128 or for a column
        ROWS, num_warps = max(1, min(16, 4096 // a.BLOCK)), min(16, max(4, a.BLOCK // 1024))
    return dict(ROWS=ROWS, num_warps=num_warps, TIGHT=a.PIECES > 1 and a.BLOCK * a.PIECES > 8192)


REDUCING = (
    1024  # bytes of shared memory that the backward's sums, and an rstd that is given, take beside its stages, at most
)


def stage_backward(a, ROWS: int, RELOAD: bool) -> int:
    """Bytes of shared memory that a stage of the backward's loop keeps: a block of each load in it.

    A weight that is loaded in the loop is there for the sums and again for dx, but for its first piece: before that nothing was
    stored, and one load serves both. Where there is no dx the loop stores nothing, and the compiler loads the weight before it.
    """
    in_rows = (a.X, a.DY, a.DH if a.DX is not None else None)
    held = ROWS * a.BLOCK * a.PIECES * sum(t.element_size() for t in in_rows if t is not None)
    if RELOAD and a.W is not None and a.DX is not None:
        held += (2 * a.PIECES - 1) * a.BLOCK * a.W.element_size()
    return held


def _default_backward(a) -> dict:
    columns = a.BLOCK * a.PIECES
    ROWS, num_warps = max(1, min(16, 4096 // columns)), 4 if a.N <= 3584 else 8 if a.N <= 5120 else 16
    RELOAD = columns > 8192
    # Three stages keep two blocks of every operand in shared memory; with two, ptxas spilled 3 KB (Triton 3.6)
    STAGES = 3 if 2 * stage_backward(a, ROWS, RELOAD) + REDUCING <= Target.at(a.X.device).shared_memory else 1
    return dict(ROWS=ROWS, num_warps=num_warps, STAGES=STAGES, TIGHT=a.PIECES > 1, RELOAD=RELOAD)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_and_max(a, b, c, d):
    return a + c, max_nan(b, d)


@triton.constexpr_function
def one_scale(FORMAT):
    """Whether a row in this format has one scale, of its largest number."""
    return FORMAT is not None and has(FORMAT, "row")


@triton.jit
def load_row(
    X, R, H, row, col, live, N, stride_xm, stride_xn, stride_rm, stride_rn,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The pieces of x, or of the new residual h = x + r, which is stored."""
    xs = load_pieces(X, row, col, live, N, stride_xm, stride_xn, "evict_last" if KEEP else "", BLOCK, PIECES)
    if R is not None:
        rs = load_pieces(R, row, col, live, N, stride_rm, stride_rn, "", BLOCK, PIECES)
        hs = ()
        for i in tl.static_range(PIECES):
            r = rs[i]
            hs = hs + ((xs[i].to(tl.float32) + r.to(tl.float32)).to(H.dtype.element_ty),)
        # H may lie on R, and of few columns several threads hold the same: all have read before one writes
        tl.debug_barrier()
        for i in tl.static_range(PIECES):
            tl.store(H + row * N + col + i * BLOCK, hs[i], inside_piece(live, col, N, i, BLOCK, PIECES))
        xs = hs
    return xs


@triton.jit
def let_go(pieces, TIGHT: tl.constexpr, PIECES: tl.constexpr):
    """Pieces for a sum of products of two of them. If TIGHT, -x for each x, which the compiler takes for another number: what it
    converts to fp32 for the sum it then does not keep until x is used again."""
    out = pieces
    if TIGHT:
        out = ()
        for i in tl.static_range(PIECES):
            out = out + (-pieces[i],)
    return out


@triton.jit
def times_pieces(a, b, PIECES: tl.constexpr):
    out = ()
    for i in tl.static_range(PIECES):
        out = out + (a[i].to(tl.float32) * b[i],)
    return out


@triton.jit
def dot_pieces(a, b, PIECES: tl.constexpr):
    """a * b, summed over pieces: [ROWS, BLOCK]."""
    total = a[0].to(tl.float32) * b[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        total += a[i].to(tl.float32) * b[i].to(tl.float32)
    return total


@triton.jit
def produce(SOURCE, row, col, inside, MODE: tl.constexpr):
    """Rows of y, rstd being given."""
    X, W, RSTD, stride_xm, stride_xn, weight_offset = SOURCE
    x = tl.load(X + row * stride_xm + col.to(tl.int64) * stride_xn, inside, 0.0).to(tl.float32) * tl.load(RSTD + row)
    if W is not None:
        x = x * (tl.load(W + col, inside, 0.0).to(tl.float32) + weight_offset)
    return x


@triton.jit
def store_one_scale(y, amax, Y, row, live, N, stride_s, FORMAT: tl.constexpr, KEEP: tl.constexpr):
    """Rows y [ROWS, BLOCK], whole, in a format with one scale a row, their largest |y| being known."""
    s, m = scales(amax, 1.0, FORMAT)
    store_scales(s, m, Y, row, None, live, False, N, stride_s, FORMAT)
    c = tl.arange(0, y.shape[1] // codes_in_byte(FORMAT))[None, :]
    store_codes(row_codes(y, s, m, m, FORMAT), Y, row, c, live, N, FORMAT, "evict_first" if KEEP else "")


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "stride_s"), tune_by=("N",), default=_default,
    dependent=lambda a: not a.PDL,
)  # fmt: skip
def rms_norm_forward(
    X, R, W, RSTD_IN, Y, S, SHARED, ZERO, STATIC, H, RSTD, M, N, stride_xm, stride_xn, stride_rm, stride_rn, stride_s, eps, inv_n,
    weight_offset, BLOCK: tl.constexpr, PIECES: tl.constexpr, FORMAT: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
    ROWS: tl.constexpr, TIGHT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Y, H and RSTD are each written unless None; Y takes values, or codes with what a `Way` has beside them. A row is held as
    PIECES of BLOCK columns, or with PIECES 0 read twice. TIGHT: registers are short. KEEP: x is read again soon. PDL: the next
    launch may start now and read x, which is there already since this launch is not dependent; it waits by itself for the rest."""
    begin_dependent(DEPENDENT)
    let_next_begin(PDL)
    ONE_SCALE: tl.constexpr = one_scale(None if Y is None else FORMAT)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = r[:, None]
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    live = row < M
    if PIECES > 0:
        xs = load_row(X, R, H, row, col, live, N, stride_xm, stride_xn, stride_rm, stride_rn, KEEP, BLOCK, PIECES)
        if not TIGHT:
            # Before the sum, which everything after it waits for: 14.5 us instead of 16.2 in FP8 (8192 x 2048, H200)
            ws = weight_pieces(W, N, weight_offset, BLOCK, PIECES)
        for_sum = let_go(xs, TIGHT, PIECES)
        total = dot_pieces(for_sum, for_sum, PIECES)
        if ONE_SCALE:
            # x * weight, and rstd last: the largest |y| is then the largest |x * weight| times rstd, for rounding keeps an order.
            # So one exchange between the program's threads gives both, where a maximum of y would have to wait for rstd
            xw = xs[0].to(tl.float32)
            if W is not None:
                xw = xw * (weight_piece(W, N, weight_offset, 0, BLOCK) if TIGHT else ws[0])
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            xs = load_row(
                X, R, H, row, start + col, live, N, stride_xm, stride_xn, stride_rm, stride_rn, KEEP, BLOCK, 1
            )
            total += dot_pieces(xs, xs, 1)
        if R is not None:
            tl.debug_barrier()  # other threads of this program read back what was just stored in H
    if ONE_SCALE:
        square, top = tl.reduce((total, tl.abs(xw)), 1, add_and_max)
    else:
        square = tl.sum(total, axis=1)
    if RSTD_IN is None:
        rstd = tl.rsqrt(square * inv_n + eps)
    else:
        rstd = tl.load(RSTD_IN + r, r < M, 0.0)
    if ONE_SCALE:
        top = top * rstd
    if RSTD is not None:
        tl.store(RSTD + r, rstd, r < M)
    rstd = rstd[:, None]
    if Y is not None:
        to = Way(Y, S, SHARED, ZERO, STATIC)
        if ONE_SCALE:
            store_one_scale(xw * rstd, top, to, row, live, N, stride_s, FORMAT, KEEP)
        elif PIECES > 0:
            for i in tl.static_range(PIECES):
                y = xs[i].to(tl.float32) * rstd
                if W is not None:
                    y = y * (weight_piece(W, N, weight_offset, i, BLOCK) if TIGHT else ws[i])
                store_normed(y, to, row, i * BLOCK, live, N, stride_s, FORMAT, KEEP)
        else:
            for start in range(0, N, BLOCK):
                c = start + col
                if R is not None:
                    x = tl.load(H + row * N + c, live & (c < N), 0.0).to(tl.float32)
                else:
                    x = tl.load(X + row * stride_xm + c.to(tl.int64) * stride_xn, live & (c < N), 0.0).to(tl.float32)
                y = x * rstd
                if W is not None:
                    y = y * load_weight(W, start + lane, start + lane < N, weight_offset)[None, :]
                store_normed(y, to, row, start, live, N, stride_s, FORMAT, KEEP)


@kernel(
    grid=lambda a: (a.PROGRAMS,),
    tokens=("M", "PROGRAMS"),
    tune_by=("N",),
    default=_default_backward,
)
def rms_norm_backward(
    X, W, RSTD, DY, DH, DX, DW, M, N, stride_xm, stride_xn, stride_ym, stride_yn, stride_hm, stride_hn, stride_dm, eps,
    inv_n, weight_offset, PROGRAMS, BLOCK: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, TIGHT: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Each program takes every PROGRAMS-th block of rows, as pieces, and keeps its share of dweight, DW[program], in registers.
    PDL: the launch that sums the shares may begin, and waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    if not RELOAD:
        ws = weight_pieces(W, N, weight_offset, BLOCK, PIECES)
    dws = ()
    for _ in tl.static_range(PIECES):
        dws = dws + (tl.zeros([ROWS, BLOCK], tl.float32),)
    # Without the pipeline a program waits for each block's loads: 42 us instead of 29 at 8192 x 2048 (H200, November 2026)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), PROGRAMS, num_stages=STAGES):
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < M
        xs = load_pieces(X, row, col, live, N, stride_xm, stride_xn, "", BLOCK, PIECES)
        dys = load_pieces(DY, row, col, live, N, stride_ym, stride_yn, "", BLOCK, PIECES)
        for_sum = let_go(xs, TIGHT, PIECES)
        gs = let_go(dys, TIGHT, PIECES)
        if RELOAD:
            ws = weight_pieces(W, N, weight_offset, BLOCK, PIECES)
        if W is not None:
            gs = times_pieces(gs, ws, PIECES)
        totals = dot_pieces(for_sum, for_sum, PIECES), dot_pieces(for_sum, gs, PIECES)
        square, cross = tl.reduce(totals, 1, add_pairs)
        if RSTD is None:
            # Past the last row x is 0, and with an eps of 0 the sum for dweight would take 0 * inf
            rstd = tl.where(live, tl.rsqrt(square * inv_n + eps)[:, None], 0.0)
        else:
            rstd = tl.load(RSTD + row, live, 0.0)
        mean = (cross * inv_n)[:, None] * rstd
        sums = ()
        for i in tl.static_range(PIECES):
            inside = inside_piece(live, col, N, i, BLOCK, PIECES)
            dy = dys[i].to(tl.float32)
            xhat = xs[i].to(tl.float32) * rstd
            sums = sums + (dws[i] if DW is None else dws[i] + dy * xhat,)
            if DX is not None:
                g = dy
                if W is not None:
                    g = dy * (weight_piece(W, N, weight_offset, i, BLOCK) if RELOAD else ws[i])
                dx = rstd * (g - xhat * mean)
                if DH is not None:
                    c = col.to(tl.int64) + i * BLOCK
                    dx += tl.load(DH + row * stride_hm + c * stride_hn, inside, 0.0).to(tl.float32)
                tl.store(DX + row * stride_dm + col + i * BLOCK, dx.to(DX.dtype.element_ty), inside)
        dws = sums
    if DW is not None:
        for i in tl.static_range(PIECES):
            c = i * BLOCK + lane
            tl.store(DW + tl.program_id(0).to(tl.int64) * N + c, tl.sum(dws[i], axis=0), c < N)


@kernel(grid=lambda a: (a.M,), tokens=("M",), default=lambda a: dict(BLOCK=4096, num_warps=8))
def rms_norm_row_sums(X, W, RSTD_IN, DY, RSTD, MEAN, M, N, stride_xm, stride_xn, stride_ym, stride_yn, eps, inv_n, weight_offset,
                      BLOCK: tl.constexpr):  # fmt: skip
    """For rows too wide for one program: rstd and mean(xhat * g) of each."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    square = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = start + col
        x = tl.load(X + row * stride_xm + c.to(tl.int64) * stride_xn, c < N, 0.0).to(tl.float32)
        g = tl.load(DY + row * stride_ym + c.to(tl.int64) * stride_yn, c < N, 0.0).to(tl.float32)
        if W is not None:
            g = g * load_weight(W, c, c < N, weight_offset)
        square += x * x
        cross += x * g
    if RSTD_IN is None:
        rstd = tl.rsqrt(tl.sum(square, axis=0) * inv_n + eps)
    else:
        rstd = tl.load(RSTD_IN + row)
    tl.store(RSTD + row, rstd)
    tl.store(MEAN + row, tl.sum(cross, axis=0) * inv_n * rstd)


@kernel(
    grid=lambda a: (a.BANDS, cdiv(a.N, a.BLOCK)), tokens=("M", "BANDS"), default=lambda a: dict(BLOCK=1024, num_warps=4)
)
def rms_norm_backward_wide(
    X, W, RSTD, MEAN, DY, DH, DX, DW, M, N, stride_xm, stride_xn, stride_ym, stride_yn, stride_hm, stride_hn, stride_dm,
    weight_offset, BANDS, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A band of rows by a block of columns, given the rows' sums. PDL: as in `rms_norm_backward`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < N
    dw = tl.zeros([BLOCK], tl.float32)
    for r in range(tl.program_id(0), M, BANDS):
        row = r.to(tl.int64)
        rstd = tl.load(RSTD + row)
        xhat = tl.load(X + row * stride_xm + col.to(tl.int64) * stride_xn, inside, 0.0).to(tl.float32) * rstd
        dy = tl.load(DY + row * stride_ym + col.to(tl.int64) * stride_yn, inside, 0.0).to(tl.float32)
        dw += dy * xhat
        if DX is not None:
            g = dy
            if W is not None:
                g = dy * load_weight(W, col, inside, weight_offset)
            dx = rstd * (g - xhat * tl.load(MEAN + row))
            if DH is not None:
                dx += tl.load(DH + row * stride_hm + col.to(tl.int64) * stride_hn, inside, 0.0).to(tl.float32)
            tl.store(DX + row * stride_dm + col, dx.to(DX.dtype.element_ty), inside)
    if DW is not None:
        tl.store(DW + tl.program_id(0).to(tl.int64) * N + col, dw, inside)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK),),
    tokens=("M",),
    default=lambda a: {
        "ROWS": 64 if a.M <= 64 else 512,
        "BLOCK": 16,
        "num_warps": 4,
        "PDL": a.get("PDL", False),
        **({"launch_pdl": True} if a.get("PDL", False) else {}),
    },
)
def sum_columns(P, OUT, M, N, PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[n] = sum over m of P[m, n], always in the same order. Narrow and tall: one load in flight per row, many programs. PDL:
    started before the launch that fills P has ended, if that one says so."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, M, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(P + row.to(tl.int64) * N + col, (row < M) & (col < N), 0.0)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + c, tl.sum(total, axis=0).to(OUT.dtype.element_ty), c < N)


def launch_rows(
    x, residual, weight, rstd_in, y, h, rstd, eps, weight_offset, fmt=None, stride_s=0, keep=False, pdl=False
) -> None:
    """Launch the kernel over rows [M, N]; with `fmt`, y is a `Way` of codes."""
    M, N = x.shape
    BLOCK, PIECES = split_forward(x, residual, fmt)
    strides = residual.stride() if residual is not None else (0, 0)
    to = y if isinstance(y, Way) else Way(y)
    rms_norm_forward(
        x, residual, weight, rstd_in, *to, h, rstd, M, N, *x.stride(), *strides, stride_s, eps,
        1.0 / N if N else math.nan, weight_offset or None,
        BLOCK=BLOCK, PIECES=PIECES, KEEP=keep, PDL=pdl,
        FORMAT=None if fmt is None else fmt.device_format(is_fast(x)),
    )  # fmt: skip


def launch_shared(x, residual, weight, rstd_in, y, h, rstd, eps, weight_offset) -> None:
    """`launch_rows`, by the kernel that holds rows in shared memory where that is the faster."""
    shape = forward_shape(Target.at(x.device), x, weight) if residual is None else None
    if shape is None:
        launch_rows(x, residual, weight, rstd_in, y, h, rstd, eps, weight_offset)
    else:
        launch_forward(shape, x, weight, rstd_in, y, rstd, eps, weight_offset)


def quantised(x, residual, weight, rstd_in, h, rstd, eps, weight_offset, fmt, q) -> None:
    """Fill q. Row-wise codes come from the row launch where a program sees all it needs for their scales; the column-wise
    ones, and per-tensor or 128x128 scales, from a launch over tiles that takes rstd as given and finds x in the L2."""
    M, N = x.shape
    wide = power_of_two(N) > WIDEST
    # Of no rows nothing is launched, and a scale that is given would not be stored
    rows_done = M > 0 and q.data is not None and (fmt.reach in ("block", "given") or (fmt.reach == "row" and not wide))
    tiles = not rows_done or q.data_t is not None
    if tiles and rstd is None:
        rstd = torch.empty(M, dtype=torch.float32, device=x.device) if rstd_in is None else rstd_in
    if rows_done or rstd is not rstd_in or h is not None:
        to, stride_s = (row_way(q, fmt.tensor), fmt.scale_stride(q, "row")) if rows_done else (None, 0)
        made = None if rstd is rstd_in else rstd
        launch_rows(x, residual, weight, rstd_in, to, h, made, eps, weight_offset, fmt, stride_s, keep=tiles)
    if tiles:
        source = x if h is None else h.view(M, N)
        if rows_done:
            q = q.twin()
        fill(q, produce, (source, weight, rstd, *source.stride(), weight_offset), scale=fmt.tensor)


def in_tiles(x, residual, weight, rstd_in, h, rstd, eps, weight_offset, fmt, q) -> None:
    """Fill q both ways from tiles, after a launch over rows for rstd (and h) unless rstd is given."""
    after = None
    if rstd_in is None:
        rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device) if rstd is None else rstd
        launch_rows(x, residual, None, None, None, h, rstd, eps, 0.0, keep=True, pdl=True)
        after = "rstd" if h is None else "x"
    store_normed_tiles(
        q, x if h is None else h.view(x.shape), weight, rstd_in if rstd is None else rstd, weight_offset, after
    )


def normalised(
    x, residual, weight, rstd_in, h, rstd, eps, weight_offset, out_format, out, how, plain=launch_rows
) -> Tensor:
    """The y of any of the three ops, by the function `plain`, or quantised by `how`; h and rstd are filled if given."""
    flat = (rows(x), None if residual is None else rows(residual), vector(weight), vector(rstd_in))
    if out_format is None:
        y = out if out is not None else torch.empty_like(x, memory_format=torch.contiguous_format)
        dense = y if y.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        plain(*flat, dense, h, rstd, eps, weight_offset)
        return y if dense is y else y.copy_(dense)
    q = out if out is not None else out_format.empty(x.shape, x.dtype, x.device)
    how(*flat, h, rstd, eps, weight_offset, out_format, q)
    return q


def forward(x, weight, eps, *, weight_offset, rstd, out_format, out, how=quantised, plain=launch_rows) -> Tensor:
    return normalised(x, None, weight, rstd, None, None, eps, weight_offset, out_format, out, how, plain)


def forward_rstd(
    x, weight, eps, *, weight_offset, out_format, how=quantised, plain=launch_rows
) -> tuple[Tensor, Tensor]:
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return normalised(x, None, weight, None, None, rstd, eps, weight_offset, out_format, None, how, plain), rstd


def forward_add(x, residual, weight, eps, *, weight_offset, out_format, how=quantised) -> tuple[Tensor, Tensor]:
    h = torch.empty_like(x, memory_format=torch.contiguous_format)
    return normalised(x, residual, weight, None, h, None, eps, weight_offset, out_format, None, how), h


def gradients(
    x, weight, rstd, dy, dh, eps, weight_offset, needs, shared: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight), None where not needed. dweight is summed in fp32, per program and then over programs, without atomics.
    `shared`: by the kernel that holds rows in shared memory if it takes them, x being known to lie as it wants."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if "x" in needs or "residual" in needs else None
    dweight = torch.empty_like(weight) if "weight" in needs else None
    x2, dy2 = rows(x), rows(dy)
    M, N = x2.shape
    dh2 = rows(dh) if dh is not None else None
    BLOCK, PIECES = split_backward(N)
    strides = (*x2.stride(), *dy2.stride(), *(dh2.stride() if dh2 is not None else (0, 0)), N)
    common = (eps, 1.0 / N if N else math.nan, weight_offset or None)
    weight, rstd = vector(weight), vector(rstd)
    target = Target.at(x.device)
    shape = backward_shape(target, x2, weight) if shared and aligned(dy2) and (dh2 is None or aligned(dh2)) else None
    PROGRAMS = max(1, min(programs_per_sm(N) * target.sms, cdiv(M, max(1, 2048 // power_of_two(N)))))
    PDL = dweight is not None and target.early_launch
    if shape is not None:
        PROGRAMS = programs_for(shape, target, M)
    part = torch.empty(PROGRAMS, N, dtype=torch.float32, device=x.device) if dweight is not None else None
    if shape is not None:
        launch_backward(shape, x2, weight, rstd, dy2, dh2, dx, part, eps, weight_offset, early=PDL)
    elif power_of_two(N) <= WIDEST:
        rms_norm_backward(
            x2, weight, rstd, dy2, dh2, dx, part, M, N, *strides, *common, PROGRAMS, BLOCK=BLOCK, PIECES=PIECES, PDL=PDL
        )
    else:
        sums = [torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2)]  # each aligned, whatever M is
        rms_norm_row_sums(x2, weight, rstd, dy2, *sums, M, N, *strides[:4], *common)
        rms_norm_backward_wide(
            x2, weight, *sums, dy2, dh2, dx, part, M, N, *strides, weight_offset or None, PROGRAMS, PDL=PDL
        )
    if dweight is not None:
        sum_columns(part, dweight, PROGRAMS, N, PDL=PDL)
    return dx, dweight


def backward(saved: SimpleNamespace, dy: Tensor, shared: bool = False) -> tuple:
    return gradients(
        saved.x,
        saved.weight,
        getattr(saved, "rstd", None),
        dy,
        None,
        saved.eps,
        saved.weight_offset,
        saved.needs,
        shared,
    )


def backward_add(saved: SimpleNamespace, dy: Tensor | None, dh: Tensor | None, shared: bool = False) -> tuple:
    if dy is None:
        return dh, dh, None
    dx, dweight = gradients(saved.h, saved.weight, None, dy, dh, saved.eps, saved.weight_offset, saved.needs, shared)
    return dx, dx, dweight


# ---------------------------------------------------------------- modulated and gated


def modulated(target: Target, a: SimpleNamespace) -> bool:
    """Whether a call is one of `modulated_norm.py`."""
    return single(target, a) and any(t is not None for t in (a.scale, a.shift, getattr(a, "gate", None)))


def forward_plain(x, weight, eps, *, scale, shift, **rest) -> Tensor:
    return forward(x, weight, eps, **rest)


def forward_add_plain(x, residual, weight, eps, *, scale, shift, gate, **rest) -> tuple[Tensor, Tensor]:
    return forward_add(x, residual, weight, eps, **rest)


def forward_modulated(x, weight, eps, *, weight_offset, rstd, scale, shift, out_format, out) -> Tensor:
    norm = modulated_norm.Norm(eps, False, weight_offset)
    return modulated_norm.normalised(x, None, None, weight, None, scale, shift, None, norm, out_format, out, rstd)


def forward_add_modulated(
    x, residual, weight, eps, *, weight_offset, scale, shift, gate, out_format
) -> tuple[Tensor, Tensor]:
    h, norm = torch.empty_like(x, memory_format=torch.contiguous_format), modulated_norm.Norm(eps, False, weight_offset)
    return modulated_norm.normalised(x, residual, gate, weight, None, scale, shift, h, norm, out_format), h


def backward_plain(saved: SimpleNamespace, dy: Tensor, shared: bool = False) -> tuple:
    return *backward(saved, dy, shared), None, None


def backward_add_plain(saved: SimpleNamespace, dy: Tensor | None, dh: Tensor | None, shared: bool = False) -> tuple:
    return *backward_add(saved, dy, dh, shared), None, None, None


def backward_modulated(saved: SimpleNamespace, dy: Tensor) -> tuple:
    needs = {"h" if n == "x" else n for n in saved.needs}
    norm = modulated_norm.Norm(saved.eps, False, saved.weight_offset)
    operands = (saved.weight, None, saved.scale, saved.shift, None)
    made = modulated_gradients(saved.x, None, *operands, dy, None, norm, needs, saved.rstd)
    return made.h, made.weight, made.scale, made.shift


def backward_add_modulated(saved: SimpleNamespace, dy: Tensor | None, dh: Tensor | None) -> tuple:
    made = added_gradients(saved, None, dy, dh, modulated_norm.Norm(saved.eps, False, saved.weight_offset))
    return made.x, made.h, made.weight, made.scale, made.shift, made.gate


WHERE = {"x": "float[... hidden]", "weight": "float[hidden]", "eps": at_least(0.0)}
MODULATED = {"scale": "float[...? hidden]", "shift": "float[...? hidden]"}

rms_norm_rstd = Op(
    "rms_norm_rstd", reference_rstd, inputs,
    Triton(partial(forward_rstd, how=in_tiles), backward, fits_tiles, "tiles"),
    Triton(partial(forward_rstd, how=in_rows), backward, fits_rows, "rows"),
    Triton(partial(forward_rstd, plain=launch_shared), partial(backward, shared=True), fits_shared, "shared"),
    Triton(forward_rstd, backward, single), sibling="rms_norm", where=WHERE,
    results={"y": "x[... hidden]", "rstd": "wide(x)[...]"}, out=Out(contiguous=("y", "rstd")),
    gradient=Gradient(of=("x", "weight"), saves=("x", "weight", "rstd")), sharding=Sharding(),
)  # fmt: skip
add_rms_norm = Op(
    "add_rms_norm", reference_add, inputs_add,
    Triton(forward_add_modulated, backward_add_modulated, modulated, "modulated"),
    Triton(partial(forward_add_plain, how=in_tiles), backward_add_plain, fits_tiles, "tiles"),
    Triton(forward_add_plain, partial(backward_add_plain, shared=True), fits_shared, "shared"),
    Triton(forward_add_plain, backward_add_plain, single),
    where={**WHERE, **MODULATED, "residual": "x[... hidden]", "gate": "float[...? hidden]"},
    results=dict.fromkeys(("y", "h"), "x[... hidden]"),
    out=Out(contiguous=("y", "h"), lies_on={"h": ("residual",)}), sharding=Sharding(),
    gradient=Gradient(
        of=("x", "residual", "weight", "scale", "shift", "gate"), through=("y", "h"),
        saves=("x", "weight", "scale", "gate", "h"), resume=modulated_norm.resume,
        shape_only=lambda values: ("shift", *(("x",) if values["gate"] is None else ())),
    ),
)  # fmt: skip
rms_norm = Op(
    "rms_norm", reference, inputs_modulated,
    Triton(forward_modulated, backward_modulated, modulated, "modulated", out=True),
    Triton(partial(forward_plain, how=in_tiles), backward_plain, fits_tiles, "tiles", out=True),
    Triton(partial(forward_plain, how=in_rows), backward_plain, fits_rows, "rows", out=True),
    Triton(partial(forward_plain, plain=launch_shared), partial(backward_plain, shared=True), fits_shared, "shared", out=True),
    Triton(forward_plain, backward_plain, single, out=True),
    where={**WHERE, **MODULATED, "rstd": "float32[...]"}, results={"out": "x[... hidden]"}, out=Out(lies_on={"out": ("x",)}),
    gradient=Gradient(of=("x", "weight", "scale", "shift"), shape_only=lambda values: ("shift",)), sharding=Sharding(),
)  # fmt: skip
