"""The backward of the norms of `modulated_norm.py`, n being the norm of h.

With g = dy * (1 + scale) * (weight + weight_offset): dh = rstd * (g - mean(g) - n * mean(n * g)), of which mean(g) is left out
without CENTRED. dweight is the sum over rows of dy * (1 + scale) * n, and dbias that without n; dscale is
dy * (n * (weight + weight_offset) + bias), and dshift is dy. With a gradient of h itself added to dh, dresidual = dh,
dx = gate * dh and dgate = x * dh.

What rows share has a sum for its gradient: programs keep their shares of it in registers, each of rows of one group alone, and
`sum_norm_shares` adds them up.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, rows, vector
from ...device.groups import Rows
from ...runtime.kernel import kernel
from ..activation.epilogue import backward as epilogue_backward
from ..activation.epilogue import summed
from .modulated_norm import (
    Norm,
    centre,
    columns_at,
    laid_pieces,
    lay,
    load_at,
    mean_of,
    modulate,
    one_loop,
    pick,
    square_pieces,
    sum_pieces,
)
from .row_pieces import inside_piece, load_pieces, programs_per_sm, split_backward, weight_piece, weight_pieces

# Columns of a row whose backward one program holds: of an affine norm, of one that is modulated or gated, and of both; more spill
WIDEST_AFFINE, WIDEST_MODULATED, WIDEST_BOTH = 12288, 8192, 5120
REDUCING = 1024  # bytes of shared memory that the backward's sums take beside its stages, at most


class Given(NamedTuple):
    """What a pass of its own found of rows too wide for one program, [rows]: mean, rstd, mean(g) and mean(n * g)."""

    mean: Any = None
    rstd: Any = None
    g: Any = None
    cross: Any = None


@triton.jit
def add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def shared_piece(P, group, col0, N, i: tl.constexpr, BLOCK: tl.constexpr):
    """The i-th piece, from column `col0` on, of an operand that the rows of a group share: [1, BLOCK]. It is loaded as one
    dimension for the reason that `load_weight` has."""
    c = col0 + i * BLOCK + tl.arange(0, BLOCK)
    at = P.data + group * P.stride_o + c.to(tl.int64) * P.stride_n
    return tl.load(at, c < N, 0.0)[None, :]


@triton.jit
def shared_pieces(P, group, col0, N, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """All pieces of such an operand; none if there is none."""
    pieces = ()
    if P.data is not None:
        for i in tl.static_range(PIECES):
            pieces = pieces + (shared_piece(P, group, col0, N, i, BLOCK),)
    return pieces


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


def sums_kept(a) -> int:
    """How many sums over rows a program of the backward keeps, each as many registers as the row has numbers."""
    modulating = zip((a.DSCALE, a.DSHIFT, a.DGATE), a.EACH)
    return (a.DW is not None) + (a.DB is not None) + sum(t is not None and not each for t, each in modulating)


def _default_backward(a) -> dict:
    columns = a.BLOCK * a.PIECES
    ROWS, num_warps = max(1, min(16, 4096 // columns)), 4 if columns <= 3584 else 8 if columns <= 5120 else 16
    shared = (a.W, a.B, None if a.EACH[0] else a.SCALE.data, None if a.EACH[2] else a.GATE.data)
    of_rows = (a.DH, a.V, a.SCALE.data if a.EACH[0] else None, a.GATE.data if a.EACH[2] else None)
    if 2 * sums_kept(a) + sum(t is not None for t in (*shared, *of_rows)) > 6 and num_warps < 16:
        # Fewer numbers a thread: in 4 warps an affine norm of 2048 columns that is modulated would spill 1.5 KB
        ROWS, num_warps = max(1, ROWS // 2), 2 * num_warps
    elif sums_kept(a) == 0:
        ROWS = max(1, ROWS // 2)  # nothing is gained by rows that are summed together
    RELOAD = columns > 8192
    room = Target.at(a.X.device).shared_memory
    # Three stages keep two blocks of every operand in shared memory
    STAGES = 3 if 2 * stage_backward(a, ROWS, RELOAD) + REDUCING <= room else 1
    return dict(ROWS=ROWS, num_warps=num_warps, STAGES=STAGES, RELOAD=RELOAD)


@triton.constexpr_function
def field(EACH, i):
    return EACH[i]


@triton.jit
def upstream(dy, s):
    """dy * (1 + s) in fp32."""
    dn = dy.to(tl.float32)
    if s is not None:
        dn = dn * (1.0 + s.to(tl.float32))
    return dn


@triton.jit
def times_if(dn, w):
    """dn * w, where there is a w."""
    if w is not None:
        dn = dn * w
    return dn


@triton.jit
def add_if(total, term, DO: tl.constexpr):
    """total + term where it is wanted."""
    if DO:
        total = total + term
    return total


@kernel(
    grid=lambda a: (a.GROUPS * a.SPLIT, cdiv(a.N, a.BLOCK * a.PIECES)),
    tokens=("GROUPS", "LENGTH", "SPLIT", "INNER"),
    tune_by=("N",),
    default=_default_backward,
)
def modulated_norm_backward(
    X, V, W, B, SCALE, GATE, DY, DH, GIVEN, DX, DV, DW, DB, DSCALE, DSHIFT, DGATE, GROUPS, LENGTH, SPLIT, INNER, N, stride_xm,
    stride_xn, stride_vm, stride_vn, stride_ym, stride_yn, stride_hm, stride_hn, eps, inv_n, weight_offset, CENTRED: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
):  # fmt: skip
    """A program takes every SPLIT-th block of rows of a group, which has LENGTH rows: all columns of them, as pieces, or, where
    sums are GIVEN, one block of columns. X is what was normalised, V what the gate was multiplied with. EACH says of scale, shift
    and gate whether they have numbers for each row. If so they lie as the forward has them, and their gradient is stored for each
    row; else they have numbers for each group, or for all, and, as of weight and bias, this program's share of the gradient is
    stored. PDL: the launch that sums the shares may begin, and waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EACH_S: tl.constexpr = field(EACH, 0)
    EACH_T: tl.constexpr = field(EACH, 1)
    EACH_G: tl.constexpr = field(EACH, 2)
    share = tl.program_id(0)
    group = (share // SPLIT).to(tl.int64)
    col0 = tl.program_id(1) * (BLOCK * PIECES)
    lane = tl.arange(0, BLOCK)
    col = col0 + lane[None, :]
    if not RELOAD:
        all_w = weight_pieces(None if W is None else W + col0, N - col0, weight_offset, BLOCK, PIECES)
        all_b = weight_pieces(None if B is None else B + col0, N - col0, None, BLOCK, PIECES)
        if not EACH_S:
            all_s = shared_pieces(SCALE, group, col0, N, BLOCK, PIECES)
        if not EACH_G:
            all_g = shared_pieces(GATE, group, col0, N, BLOCK, PIECES)
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
    for block in tl.range(share % SPLIT, tl.cdiv(LENGTH, ROWS), SPLIT, num_stages=STAGES):
        turn = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        live = turn < LENGTH
        row = group * LENGTH + turn
        xs = load_pieces(X, row, col, live, N, stride_xm, stride_xn, "", BLOCK, PIECES)
        dys = load_pieces(DY, row, col, live, N, stride_ym, stride_yn, "", BLOCK, PIECES)
        if RELOAD:
            ws = weight_pieces(W, N, weight_offset, BLOCK, PIECES)
        else:
            ws = all_w
        if EACH_S:
            ss = laid_pieces(SCALE, row, INNER, col, live, N, BLOCK, PIECES)
        elif RELOAD:
            ss = shared_pieces(SCALE, group, col0, N, BLOCK, PIECES)
        else:
            ss = all_s
        mean = None
        if GIVEN.rstd is not None:
            if CENTRED:
                mean = tl.load(GIVEN.mean + row, live, 0.0)
                mean_g = tl.load(GIVEN.g + row, live, 0.0)
            rstd = tl.load(GIVEN.rstd + row, live, 0.0)
            mean_cross = tl.load(GIVEN.cross + row, live, 0.0)
        else:
            if CENTRED:
                mean = mean_of(tl.sum(sum_pieces(xs, PIECES), axis=1), N, inv_n)[:, None]
            squares = square_pieces(xs, mean, col, N, BLOCK, PIECES)
            g = times_if(upstream(dys[0], pick(ss, 0)), pick(ws, 0))
            total = g
            cross = g * centre(xs[0], mean, col, N, 0, BLOCK, PIECES)
            for i in tl.static_range(1, PIECES):
                g = times_if(upstream(dys[i], pick(ss, i)), pick(ws, i))
                total += g
                cross += g * centre(xs[i], mean, col, N, i, BLOCK, PIECES)
            square, cross, total = tl.reduce((squares, cross, total), 1, add_triples)
            # Past the last row x is 0, and with an eps of 0 the sums over rows would take 0 * inf
            rstd = tl.where(live, tl.rsqrt(square * inv_n + eps)[:, None], 0.0)
            mean_cross = (cross * inv_n)[:, None] * rstd
            if CENTRED:
                mean_g = mean_of(total, N, inv_n)[:, None]
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
            b = None
            if RELOAD:
                if W is not None:
                    w = weight_piece(W, N, weight_offset, i, BLOCK)
                if B is not None:
                    b = weight_piece(B, N, None, i, BLOCK)
                if SCALE.data is not None and not EACH_S:
                    s = shared_piece(SCALE, group, col0, N, i, BLOCK)
            else:
                b = pick(all_b, i)
            n = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
            dn = upstream(dys[i], s)
            g = times_if(dn, w)
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
                    gate = load_at(GATE, row, INNER, c, inside)
                elif RELOAD:
                    gate = shared_piece(GATE, group, col0, N, i, BLOCK)
                else:
                    gate = pick(all_g, i)
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
    X, W, SCALE, RSTD_IN, DY, GIVEN, M, INNER, N, stride_xm, stride_xn, stride_ym, stride_yn, eps, inv_n, weight_offset,
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
        mean = mean_of(tl.sum(total, axis=1), N, inv_n)[:, None]
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
        g = times_if(upstream(dys[0], load_at(SCALE, row, INNER, c[None, :], inside)), w)
        squares += x * x
        cross += x * g
        total += g
    square, cross, total = tl.reduce((squares, cross, total), 1, add_triples)
    if RSTD_IN is None:
        rstd = tl.rsqrt(square * inv_n + eps)
    else:
        rstd = tl.load(RSTD_IN + tl.program_id(0) + tl.arange(0, 1))
    tl.store(GIVEN.rstd + row, rstd[:, None])
    tl.store(GIVEN.cross + row, (cross * inv_n * rstd)[:, None])
    if CENTRED:
        tl.store(GIVEN.g + row, mean_of(total, N, inv_n)[:, None])


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
def sum_norm_shares(P, OUTS, GROUPS, SHARES, N, PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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


# ---------------------------------------------------------------- host


def in_groups(t: Tensor | None, N: int) -> Rows:
    """An operand that rows share, with numbers for each group of them or for all."""
    if t is None:
        return Rows()
    t = t.reshape(t.numel() // N, N)
    return Rows(t, t.stride(0) if t.shape[0] > 1 else 0, None, t.stride(1))


class Sharing(NamedTuple):
    """Which rows have an operand's numbers together: "each" has its own, a "group" of `length` consecutive ones or "all" share
    them; "mixed" is any other way to broadcast, for which each row counts as having its own."""

    kind: str
    length: int = 1


def sharing(t: Tensor | None, x: Tensor) -> Sharing:
    """It follows from shapes alone, so that the order of sums does not depend on how operands lie."""
    if t is None or t.shape == x.shape:
        return Sharing("each")
    lead = x.shape[:-1]
    own = (*(1 for _ in range(x.dim() - t.dim())), *t.shape[:-1])
    wide = [d for d, size in enumerate(lead) if size != 1]
    over = [d for d in wide if own[d] == 1]
    if over == wide:  # of one row too, for the variant does not depend on how many there are
        return Sharing("all")
    if over == wide[len(wide) - len(over) :]:
        return Sharing("group", math.prod(lead[d] for d in over)) if over else Sharing("each")
    return Sharing("mixed")


class Wanted(NamedTuple):
    """Gradients by argument, None where they are not wanted; `h` is that of what was normalised."""

    h: Tensor | None = None
    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    gate: Tensor | None = None


def gradients(x, v, weight, bias, scale, shift, gate, dy, dh, norm: Norm, needs, rstd_in=None) -> Wanted:
    """Gradients of the norm of x, to which `dh` is added, and of what x came from: v times the gate, and a residual. Sums over rows
    are made in fp32, per program and then over programs, without atomics."""
    x2, dy2 = rows(x), rows(dy)
    M, N = x2.shape
    like = Wanted(x, v, weight, bias, scale, shift, gate)
    asked = {n: t for n, t in like._asdict().items() if n in needs}
    if not x.numel():
        return Wanted(**{n: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for n, t in asked.items()})
    shares_of = {n: sharing(t, x) for n, t in (("scale", scale), ("shift", shift), ("gate", gate))}
    length = next((one.length for one in shares_of.values() if one.kind == "group"), M)
    kinds = {"weight": "all", "bias": "all"} | {
        n: "mixed" if one.kind == "group" and one.length != length else one.kind for n, one in shares_of.items()
    }
    each = tuple(kinds[n] in ("each", "mixed") for n in ("scale", "shift", "gate"))
    groups = M // length
    layout = lay(x, (scale if each[0] else None, gate if each[2] else None))
    scales, gates = (own if one else in_groups(t, N) for own, one, t in zip(layout.operands, each[::2], (scale, gate)))
    target = Target.at(x.device)
    plain, affine = gate is None and scale is None, weight is not None or bias is not None
    widest = WIDEST_AFFINE if plain else WIDEST_BOTH if affine else WIDEST_MODULATED
    widest = widest if rstd_in is None else 0  # the pass for sums takes it
    BLOCK, PIECES = (1024, 1) if widest < N else split_backward(N)
    most = max(1, programs_per_sm(N) * target.sms // groups)
    split = max(1, min(most, cdiv(length, 4 if widest < N else max(1, 2048 // power_of_two(N)))))
    split = (
        cdiv(split, 4) * 4
    )  # so that the shares of each sum begin at whole words, for one token too; some may be of no rows
    shares = groups * split
    made: dict[str, Tensor] = {}
    to: dict[str, Tensor] = {}
    summing: dict[int, list[str]] = {}  # names by how many groups their sums have
    for n, t in asked.items():
        kind = kinds.get(n, "each")
        if kind in ("all", "group"):
            made[n] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            summing.setdefault(1 if kind == "all" else groups, []).append(n)
        else:
            dtype = torch.float32 if kind == "mixed" else t.dtype
            made[n] = to[n] = torch.empty(t.shape if kind == "each" else x.shape, dtype=dtype, device=x.device)
    parts = {}
    for count, names in summing.items():
        parts[count] = torch.empty(len(names), shares, N, dtype=torch.float32, device=x.device)
        to.update(zip(names, parts[count]))
    PDL = bool(parts) and target.early_launch
    numbers = (norm.eps, 1.0 / N, norm.weight_offset or None)
    given = Given()
    weight2, bias2 = vector(weight), vector(bias)
    if widest < N:
        means = [torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(4 if norm.centred else 2)]
        given = Given(*means) if norm.centred else Given(rstd=means[0], cross=means[1])
        whole = lay(x, (scale,))
        modulated_norm_sums(
            x2, weight2, *whole.operands, vector(rstd_in), dy2, given, M, one_loop(whole), N, *x2.stride(), *dy2.stride(), *numbers,
            CENTRED=norm.centred,
        )  # fmt: skip
    v2 = rows(v) if "gate" in needs else None
    dh2 = None if dh is None else rows(dh)
    strides = [s for t in (x2, v2, dy2, dh2) for s in ((0, 0) if t is None else t.stride())]
    modulated_norm_backward(
        x2, v2, weight2, bias2 if "scale" in needs else None, scales, gates if "x" in asked else Rows(), dy2, dh2, given,
        *(to.get(n) for n in Wanted._fields), groups, length, split, one_loop(layout), N, *strides, *numbers,
        CENTRED=norm.centred, EACH=each, BLOCK=BLOCK, PIECES=PIECES, PDL=PDL,
    )  # fmt: skip
    for count, names in summing.items():
        outs = tuple(made[n] for n in names)
        sum_norm_shares(parts[count], outs, count, shares // count, N, PDL=PDL)
        PDL = False  # the next comes after this one
    for n in ("scale", "shift", "gate"):
        if n in made and kinds[n] == "mixed":
            made[n] = summed(made[n], asked[n])
    return Wanted(**made)


def added_gradients(saved: SimpleNamespace, bias, dy: Tensor | None, dh: Tensor | None, norm: Norm) -> Wanted:
    """`gradients` of a norm of h = residual + gate * x, that of the residual as `h`; dy is None where only h was used."""
    gate = saved.gate
    if dy is None and gate is None:
        return Wanted(h=dh, x=dh)
    if dy is None:  # h alone is what `epilogue` gives
        needs = saved.needs & {"x", "residual", "gate"}
        alone = SimpleNamespace(
            x=saved.x, bias=None, add=None, act=None, gate=gate, residual=saved.h, alpha=1.0, needs=needs
        )
        dx, _, _, dgate, dresidual = epilogue_backward(alone, dh)
        return Wanted(h=dresidual, x=dx, gate=dgate)
    same = {"residual": "h"} if gate is not None else {"residual": "h", "x": "h"}
    needs = {same.get(n, n) for n in saved.needs}
    operands = (saved.weight, bias, saved.scale, saved.shift, gate)
    made = gradients(saved.h, saved.x, *operands, dy, dh, norm, needs)
    return made if gate is not None else made._replace(x=made.h)
