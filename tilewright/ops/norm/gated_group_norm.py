"""RMS norm of each group of columns, times a gate: out = x * rstd * weight * act(gate), rstd = 1 / sqrt(mean(x**2) + eps) over
the group; out lies as gate does, which may be [length, batch, hidden] where x is [batch, length, hidden].

Backward, with a = act(gate) and g = dy * a * weight: dx = rstd * g - rstd**3 * x * mean(x * g),
dgate = dy * x * rstd * weight * act'(gate), and dweight is the sum over rows of dy * a * x * rstd. A sigmoid's slope is
sigmoid(gate) * sigmoid(-gate); autograd's 1 - sigmoid(gate) has no digits left for a gate of 20, so that torch's fp32 gradient
is rounding there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.format import Format, store
from ...core.signature import at_least
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, vector
from ...device.activation import activate, activate_slope
from ...device.groups import (
    Columns,
    Rows,
    columns,
    dot_pieces,
    inside_piece,
    load_pieces,
    load_tile,
    load_weight,
    load_weight_pieces,
    row_offsets,
    sum_group,
    zero_pieces,
)
from ...device.store import NOWHERE, store_rows
from ...formats.fill import fill, is_fast, row_way
from ...op import Gradient, Op, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .rms_norm import sum_columns

ACTIVATIONS = {"sigmoid": torch.sigmoid, "silu": lambda a: a * torch.sigmoid(a)}


def reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    groups: int = 1,
    transposed: bool = True,
    act: Literal["sigmoid", "silu"] = "sigmoid",
    out_format: Format | None = None,
) -> Tensor:
    """Scale each of `groups` equal parts of every row of `x` to unit root-mean-square, then by `weight` and `act(gate)`;
    in fp32, rounded once to the dtype of `x`.

    `x` is [batch, length, hidden]. `gate` and the result are [length, batch, hidden], or with `transposed=False` as `x` is.
    `weight` has a number for each column, or for each column of a group: then all groups share it. `out_format` gives a
    `Quantized` result.
    """
    (batch, length, hidden), width = x.shape, x.shape[-1] // groups
    wide = upcast(x).reshape(batch * length, groups, width)  # rows: so autograd's dx is contiguous, as the kernels' is
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        w = upcast(weight)
        y = y * (w.unflatten(0, (groups, width)) if w.shape[0] == hidden else w)
    y = y.reshape(x.shape)
    y = (y.transpose(0, 1) if transposed else y) * ACTIVATIONS[act](upcast(gate))
    return store(y, out_format, x.dtype)


def inputs(draw: Draw) -> dict:
    batch, length = draw.dim("batch"), draw.dim("length")
    groups = draw.option("groups", 1, 4, 3)
    hidden = cdiv(draw.dim("hidden"), groups) * groups
    transposed = draw.option("transposed", True, False)
    columns = hidden // groups if draw.option("shared_weight", False, True) else hidden
    return {
        "x": draw.tensor(batch, length, hidden),
        "gate": draw.tensor(*((length, batch) if transposed else (batch, length)), hidden, scale=2.0),
        "weight": draw.maybe("weight", lambda: draw.tensor(columns, scale=0.5, shift=1.0)),
        "eps": draw.option("eps", 1e-6, 1e-5),
        "groups": groups,
        "transposed": transposed,
        "act": draw.option("act", *ACTIVATIONS),
    }


ON_SM, ON_SM_PIECES = 20, 12  # warps of the backward on one SM, which has registers for more (H200, November 2026)
SIZE = 1024  # elements of its tiles, if not of pieces
FINEST = 8  # pieces to the power of two
MOST_A_THREAD = 48  # elements that a thread has at most, if of pieces
MOST_A_THREAD_BACKWARD = 20  # and backward, which at 36 spills
WIDEST = 8192  # columns of a group that one program holds in registers; a wider group is read twice
MOST_ROWS = 2**30  # row numbers and those of a last, partial block are 32-bit


class Given(NamedTuple):
    """What passes of their own found of groups too wide for one program, [rows, groups]: rstd and, backward, mean(x * rstd * g);
    `Given()` is nothing, where a program finds it by itself."""

    rstd: Any = None
    mean: Any = None


class Gradients(NamedTuple):
    """Where gradients go, each none where it is not wanted: dx as `Rows` of dense columns, dgate, dense, and shares of dweight."""

    x: Rows
    gate: Any
    weight: Any


def split_columns(D: int) -> tuple[int, int]:
    """(BLOCK, PIECES): how many columns a tile has, and how many tiles a group takes. That is one, or up to six where a power of
    two would leave a quarter of its lanes idle; a group that 8 does not divide is read element by element, as one."""
    whole = power_of_two(D)
    BLOCK = max(32, whole // FINEST)
    PIECES = cdiv(D, BLOCK)
    saved = whole - PIECES * BLOCK
    return (BLOCK, PIECES) if D % 8 == 0 and 4 * saved >= whole else (whole, 1)


def each_of(pieces: int, most: int) -> int:
    """How many elements of every piece a thread has: a power of two, at most the 16 bytes that a load takes."""
    return min(8, power_of_two(most // pieces + 1) // 2)


def _shape(a, size: int, run: int, warps: int) -> dict:
    """A tile of about `size` elements, in runs of `run` columns if whole groups make such runs."""
    BLOCK = a.COLUMNS.BLOCK
    GB = a.G & -a.G if BLOCK >= a.D else 1  # no more groups than divide them all
    GB = max(1, min(GB, run // BLOCK))
    return {"GB": GB, "ROWS": max(1, size // (GB * BLOCK)), "num_warps": warps}


def _default(a) -> dict:
    BLOCK, PIECES = a.COLUMNS.BLOCK, a.COLUMNS.PIECES
    if a.FORMAT is not None:  # store_rows wants whole rows
        GB = max(power_of_two(a.G), 128 // BLOCK)
        return {"GB": GB, "ROWS": max(1, 4096 // (GB * BLOCK)), "num_warps": min(16, max(4, GB * BLOCK // 1024))}
    if PIECES > 1:
        each = each_of(PIECES, MOST_A_THREAD)
        return _shape(a, each * 128, 512, max(4, BLOCK // (32 * each)))
    return _shape(a, 2048, 512, min(16, max(4, BLOCK // 512)))


def _candidates(a) -> list[dict]:
    if a.FORMAT is not None or a.COLUMNS.PIECES > 1:
        return [_default(a)]
    shapes = [(2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)]
    return [_default(a)] + [_shape(a, size, run, warps) for run in (512, 2048) for size, warps in shapes]


def rows_backward(columns: int, pieces: int, size: int) -> tuple[int, int]:
    """(ROWS, warps) of the backward's programs, whose tiles have so many columns of whole groups, or of pieces of them."""
    if pieces > 1:
        each = each_of(pieces, MOST_A_THREAD_BACKWARD)
        return max(1, each * 128 // columns), max(4, columns // (32 * each))
    ROWS = max(1, size // columns)
    return ROWS, min(16, max(4, ROWS * columns // 512))


def programs_on_sm(pieces: int, warps: int) -> int:
    return max(1, (ON_SM if pieces == 1 else ON_SM_PIECES) // warps)


REDUCING = 1024  # bytes of shared memory that the backward's sums take beside its stages, at most


def stage_backward(a, ROWS: int) -> int:
    """Bytes of shared memory that a stage of the backward's loop keeps: a block of every operand."""
    elements = ROWS * a.GB * a.COLUMNS.BLOCK * a.COLUMNS.PIECES
    return elements * sum(rows.data.element_size() for rows in (a.X, a.GATE, a.DY))


def _shape_backward(a, size: int | None = None, stages: int = 3) -> dict:
    PIECES = a.COLUMNS.PIECES
    ROWS, warps = rows_backward(a.GB * a.COLUMNS.BLOCK, PIECES, size or SIZE)
    room = Target.at(a.X.data.device).shared_memory // programs_on_sm(PIECES, warps)
    # All stages but one are in shared memory
    STAGES = stages if (stages - 1) * stage_backward(a, ROWS) + REDUCING <= room else 1
    return {"ROWS": ROWS, "STAGES": STAGES, "num_warps": warps}


def _candidates_backward(a) -> list[dict]:
    return [_shape_backward(a, size, stages) for size in (1024, 2048) for stages in (1, 2, 3)]


def programs_of_groups(a) -> int:
    """How many programs all groups of a block of rows take, of the widest ones several each."""
    return cdiv(a.G, a.GB) * (cdiv(a.D, a.COLUMNS.BLOCK) if a.GIVEN.rstd is not None else 1)


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS) * programs_of_groups(a),),
    tokens=("M", "INNER", "stride_s"),
    tune_by=("D", "G"),
    default=_default,
    candidates=_candidates,
)
def gated_group_norm_forward(
    M, INNER, D, X, GATE, W, GIVEN, RSTD, Y, ROW, stride_s, eps, inv_d, G: tl.constexpr, ACT: tl.constexpr,
    FORMAT: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, GB: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Y takes values, if it is there, or, with FORMAT, ROW codes. rstd [rows, groups] is GIVEN, else found and, unless RSTD is
    None, written there. Sizes come first: after the strides of X they cost up to 16 registers (ptxas 12.8, sm_90)."""
    BLOCK: tl.constexpr = COLUMNS.BLOCK
    PIECES: tl.constexpr = COLUMNS.PIECES
    parts = tl.cdiv(D, BLOCK) if GIVEN.rstd is not None else 1
    units = (G + GB - 1) // GB * parts
    unit = tl.program_id(0) % units
    first = tl.program_id(0) // units * ROWS
    s = tl.arange(0, ROWS * GB)
    row = first + s // GB
    g = unit // parts * GB + s % GB
    c = columns(unit % parts * BLOCK, BLOCK, COLUMNS.RUN)
    col = (g * D)[:, None, None] + c
    live = (row < M) & (g < G)
    x = load_pieces(X, row, INNER, col, c, D, live, COLUMNS)
    # All loads before the sum, which everything after it waits for
    if (Y.data is not None) or (ROW.codes is not None):
        a = load_pieces(GATE, row, INNER, col, c, D, live, COLUMNS)
        if W is not None:
            w = load_weight_pieces(W, c, col, D, live, SHARED, COLUMNS)
    at = row.to(tl.int64) * G + g
    if GIVEN.rstd is not None:
        rstd = tl.load(GIVEN.rstd + at, live, 0.0)
    else:
        # With eps 0 a row past the end, all zeros, would have an infinite rstd and give NaN
        rstd = tl.where(live, tl.rsqrt(dot_pieces(x, x, PIECES) * inv_d + eps), 0.0)
        if RSTD is not None:
            tl.store(RSTD + at, rstd, live)
    if (Y.data is not None) or (ROW.codes is not None):
        if FORMAT is None:
            to = row_offsets(Y, row, INNER) + col.to(tl.int64) * Y.stride_n
        for i in tl.static_range(PIECES):
            y = x[i] * rstd[:, None, None]
            if W is not None:
                y = y * w[i]
            y = y * activate(a[i], 1.0, ACT)
            if FORMAT is None:
                at_y = Y.data + to + tl.full([], i * BLOCK, tl.int64) * Y.stride_n
                tl.store(at_y, y.to(Y.data.dtype.element_ty), inside_piece(c, D, live, i, COLUMNS))
            else:  # of one piece
                r = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
                whole = tl.reshape(y, (ROWS, GB * BLOCK))
                store_rows(whole, ROW, r, 0, r < M, G * D, stride_s, FORMAT, "")


@kernel(
    grid=lambda a: (a.BANDS * programs_of_groups(a),),
    tokens=("M", "INNER", "BANDS"),
    tune_by=("D", "G"),
    default=_shape_backward,
    candidates=_candidates_backward,
)
def gated_group_norm_backward(
    X, GATE, W, GIVEN, DY, GRADIENTS, M, INNER, D, BANDS, eps, inv_d, G: tl.constexpr, ACT: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr, COLUMNS: tl.constexpr, GB: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes some groups of every BANDS-th block of rows and keeps its share of dweight in registers: [bands, hidden],
    or SHARED [programs, D]. PDL: the launch that sums the shares may begin, and waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK: tl.constexpr = COLUMNS.BLOCK
    RUN: tl.constexpr = COLUMNS.RUN
    PIECES: tl.constexpr = COLUMNS.PIECES
    DX, DGATE, DW = GRADIENTS.x, GRADIENTS.gate, GRADIENTS.weight
    parts = tl.cdiv(D, BLOCK) if GIVEN.rstd is not None else 1
    blocks: tl.constexpr = (G + GB - 1) // GB
    unit = tl.program_id(0) % (blocks * parts)
    band = tl.program_id(0) // (blocks * parts)
    s = tl.arange(0, ROWS * GB)
    g = unit // parts * GB + s % GB
    c = columns(unit % parts * BLOCK, BLOCK, RUN)
    col = (g * D)[:, None, None] + c
    if W is not None:
        w = load_weight_pieces(W, c, col, D, g < G, SHARED, COLUMNS)
    dw = zero_pieces(ROWS * GB, COLUMNS)
    for block in tl.range(band, tl.cdiv(M, ROWS), BANDS, num_stages=STAGES):
        row = block * ROWS + s // GB
        live = (row < M) & (g < G)
        x = load_pieces(X, row, INNER, col, c, D, live, COLUMNS)
        a = load_pieces(GATE, row, INNER, col, c, D, live, COLUMNS)
        dy = load_pieces(DY, row, INNER, col, c, D, live, COLUMNS)
        dn = ()  # the gradient of xhat * weight
        dg = ()
        da = ()  # before rstd is known, so that the factors of neither need be kept until then
        for i in tl.static_range(PIECES):
            value, slope = activate_slope(a[i], 1.0, ACT)
            dn = dn + (dy[i] * value,)
            da = da + (dy[i] * slope,)
            dg = dg + (dn[i] if W is None else dn[i] * w[i],)
        at = row.to(tl.int64) * G + g
        if GIVEN.rstd is not None:
            rstd = tl.load(GIVEN.rstd + at, live, 0.0)
            mean = tl.load(GIVEN.mean + at, live, 0.0)
        else:
            rstd = tl.where(live, tl.rsqrt(dot_pieces(x, x, PIECES) * inv_d + eps), 0.0)
            mean = dot_pieces(x, dg, PIECES) * inv_d * rstd
        more = ()
        for i in tl.static_range(PIECES):
            inside = inside_piece(c, D, live, i, COLUMNS)
            xhat = x[i] * rstd[:, None, None]
            more = more + (dw[i] if DW is None else dw[i] + dn[i] * xhat,)
            if DGATE is not None:
                dgate = da[i] * xhat
                if W is not None:
                    dgate *= w[i]
                to = DGATE + (row.to(tl.int64) * (G * D))[:, None, None] + col + i * BLOCK
                tl.store(to, dgate.to(DGATE.dtype.element_ty), inside)
            if DX.data is not None:
                dx = rstd[:, None, None] * (dg[i] - xhat * mean[:, None, None])
                to = DX.data + row_offsets(DX, row, INNER) + col + i * BLOCK
                tl.store(to, dx.to(DX.data.dtype.element_ty), inside)
        dw = more
    if DW is not None:
        for i in tl.static_range(PIECES):
            ci = c + i * BLOCK
            if SHARED:
                to = DW + (band * blocks + unit // parts).to(tl.int64) * D + ci
                tl.store(to, tl.sum(dw[i], axis=0)[None, :, :], ci < D)
            else:
                part = tl.sum(tl.reshape(dw[i], (ROWS, GB, BLOCK // RUN, RUN)), axis=0)
                h = (unit // parts * GB + tl.arange(0, GB))[:, None, None]
                tl.store(DW + band.to(tl.int64) * (G * D) + h * D + ci, part, (h < G) & (ci < D))


@triton.constexpr_function
def field(MODE, i):
    return MODE[i]


@triton.jit
def produce(SOURCE, row, col, inside, MODE: tl.constexpr):
    """A tile of y, rstd being given. MODE is (act, groups, whether they share the weight, whether 16 divides the columns of all
    and 128 those of a group), D the columns of a group; gate and x are dense, x with inner before outer."""
    X, GATE, W, RSTD, inner, outer, D = SOURCE
    G: tl.constexpr = field(MODE, 1)
    N = G * D
    if field(MODE, 3):
        N = N // 16 * 16  # says that rows are aligned
    # r // n by a reciprocal, too large by 1 at times: sixteen divisions a thread spill. Of 1 it is 0, and outer then 1
    r = row.to(tl.uint32)
    n = tl.full([], 0, tl.uint32) + inner
    o = tl.umulhi(r, tl.zeros_like(r) + (0xFFFFFFFF // n + 1))
    o -= (o * n > r).to(tl.uint32)
    source = (r - o * n).to(tl.int64) * outer + o
    y = tl.load(X + source * N + col, inside, 0.0).to(tl.float32)
    a = tl.load(GATE + row * N + col, inside, 0.0).to(tl.float32)
    if G == 1:
        rstd = tl.load(RSTD + row)
    elif field(MODE, 4):  # the tile lies in one group
        rstd = tl.load(RSTD + row * G + tl.min(col) // D)
    else:
        rstd = tl.load(RSTD + row * G + col // D)
    y = y * rstd
    if W is not None:
        y = y * tl.load(W + (col % D if field(MODE, 2) else col)).to(tl.float32)
    y = y * activate(a, 1.0, field(MODE, 0))
    return y


# Groups that are too wide for one program: their rstd and, backward, mean(x * rstd * g), come from a pass of their own.
ONE_GROUP = {
    "grid": lambda a: (a.M * a.G,),
    "tokens": ("M", "INNER"),
    "default": lambda a: {"BLOCK": 2048, "num_warps": 8},
}


@kernel(**ONE_GROUP)
def gated_group_norm_rstd(X, RSTD, M, INNER, D, eps, inv_d, G: tl.constexpr, BLOCK: tl.constexpr):
    """For groups too wide for one program: rstd of each."""
    row = tl.program_id(0) // G + tl.arange(0, 1)
    g = tl.program_id(0) % G + tl.arange(0, 1)
    square = tl.zeros([1, 1, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        c = columns(start, BLOCK, BLOCK)
        col = (g * D)[:, None, None] + c
        x = load_tile(X, row, INNER, col, c < D)
        square += x * x
    tl.store(RSTD + row.to(tl.int64) * G + g, tl.rsqrt(sum_group(square) * inv_d + eps))


@kernel(**ONE_GROUP)
def gated_group_norm_means(
    X, GATE, W, RSTD, DY, MEAN, M, INNER, D, inv_d, G: tl.constexpr, ACT: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For the same groups mean(xhat * g), given rstd."""
    row = tl.program_id(0) // G + tl.arange(0, 1)
    g = tl.program_id(0) % G + tl.arange(0, 1)
    cross = tl.zeros([1, 1, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        c = columns(start, BLOCK, BLOCK)
        col = (g * D)[:, None, None] + c
        x = load_tile(X, row, INNER, col, c < D)
        a = load_tile(GATE, row, INNER, col, c < D)
        dg = load_tile(DY, row, INNER, col, c < D) * activate(a, 1.0, ACT)
        if W is not None:
            dg = dg * load_weight(W, c, col, c < D, SHARED)
        cross += x * dg
    at = row.to(tl.int64) * G + g
    tl.store(MEAN + at, sum_group(cross) * inv_d * tl.load(RSTD + at))


# ---------------------------------------------------------------- host


def in_order(x: Tensor, transposed: bool) -> Tensor:
    """x as [outer, inner, hidden], which is the order of gate."""
    return x.transpose(0, 1) if transposed else x


def rows_of(t: Tensor | None) -> Rows:
    """A tensor [outer, inner, hidden], or none, as kernels take it."""
    return Rows() if t is None else Rows(t, *t.stride())


def is_shared(weight: Tensor | None, hidden: int) -> bool:
    return weight is not None and weight.shape[0] != hidden


def rstd_of(x: Tensor, eps: float, groups: int) -> Tensor:
    """rstd [rows, groups] for groups too wide for one program."""
    outer, inner, hidden = x.shape
    rstd = torch.empty(outer * inner, groups, dtype=torch.float32, device=x.device)
    D = hidden // groups
    gated_group_norm_rstd(rows_of(x), rstd, outer * inner, inner, D, eps, 1.0 / D, G=groups)
    return rstd


def columns_of(x: Tensor, block: int, pieces: int) -> Columns:
    return Columns(block, min(block, 512 // x.element_size()), pieces)


def launch(x, gate, weight, given, rstd, y, eps, groups, act, to=NOWHERE, stride_s=0, fmt=None) -> None:
    """One launch over rows of x and gate [outer, inner, hidden], into y or, with `fmt`, codes; of rstd, if it is not given, into
    `rstd` as well."""
    outer, inner, hidden = x.shape
    D = hidden // groups
    whole = (2048, 1) if given.rstd is not None else (power_of_two(D), 1) if fmt is not None else split_columns(D)
    gated_group_norm_forward(
        outer * inner, inner, D, rows_of(x), rows_of(gate), weight, given, rstd, rows_of(y), to, stride_s, eps, 1.0 / D,
        G=groups, ACT=act, FORMAT=None if fmt is None else fmt.device_format(is_fast(x)), SHARED=is_shared(weight, hidden),
        COLUMNS=columns_of(x, *whole),
    )  # fmt: skip


def quantised(x, gate, weight, eps, groups, transposed, act, fmt, q) -> None:
    """Fill q. Row-wise codes come from the launch that finds rstd where a program can hold a row and all that its scales need;
    column-wise ones, and all others, from a launch over tiles that takes rstd as given."""
    xs, (batch, length, hidden) = in_order(x, transposed), x.shape
    D = hidden // groups
    scaled = fmt.reach in ("block", "row", "given")
    whole = groups == 1 or power_of_two(D) == D  # then the columns of a tile are those of a row, one after another
    whole = whole and x.numel() > 0 and power_of_two(groups) * power_of_two(D) <= WIDEST
    rows_done = scaled and whole and q.data is not None
    rstd = None
    if x.numel() and power_of_two(D) > WIDEST:
        rstd = rstd_of(xs, eps, groups)
    elif not rows_done or q.data_t is not None:
        rstd = torch.empty(batch * length, groups, dtype=torch.float32, device=x.device)
    if rows_done:
        to, stride_s = row_way(q, fmt.tensor), fmt.scale_stride(q, "row")
        launch(xs, gate, weight, Given(), rstd, None, eps, groups, act, to, stride_s, fmt)
        if q.data_t is None:
            return
        q = q.twin()
    elif x.numel() and power_of_two(D) <= WIDEST:
        launch(xs, gate, weight, Given(), rstd, None, eps, groups, act)
    order = (batch, length) if transposed and batch > 1 and length > 1 else (1, 1)
    mode = (act, groups, is_shared(weight, hidden), hidden % 16 == 0, D % 128 == 0)
    source = (x.contiguous(), gate.contiguous(), weight, rstd, *order, max(1, D))
    fill(q, produce, source, mode, fmt.tensor, tiles_only=True)


def forward(x, gate, weight, eps, *, groups, transposed, act, out_format, out) -> Tensor:
    w = vector(weight)
    if out_format is not None:
        q = out if out is not None else out_format.empty(gate.shape, x.dtype, x.device)
        quantised(x, gate, w, eps, groups, transposed, act, out_format, q)
        return q
    y = out if out is not None else torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        xs, wide = in_order(x, transposed), power_of_two(x.shape[-1] // groups) > WIDEST
        launch(xs, gate, w, Given(rstd_of(xs, eps, groups) if wide else None), None, y, eps, groups, act)
    return y


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    """All gradients. dweight is summed in fp32, per program and then over programs, without atomics."""
    x, gate, w, groups, needs = saved.x, saved.gate, vector(saved.weight), saved.groups, saved.needs
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if "x" in needs else None
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if "gate" in needs else None
    dweight = torch.empty(w.shape, dtype=w.dtype, device=w.device) if "weight" in needs else None
    if not x.numel():
        return dx, dgate, None if dweight is None else dweight.zero_()
    xs, (outer, inner, hidden) = in_order(x, saved.transposed), gate.shape
    D, M = hidden // groups, outer * inner
    shared = is_shared(w, hidden)
    wide = power_of_two(D) > WIDEST
    BLOCK, PIECES = (2048, 1) if wide else split_columns(D)
    GB = 1 if PIECES > 1 else max(1, min(groups & -groups, 512 // BLOCK))
    units = cdiv(groups, GB) * (cdiv(D, BLOCK) if wide else 1)
    target = Target.at(x.device)
    ROWS, warps = rows_backward(GB * BLOCK, PIECES, SIZE)
    # At most what runs at once: a program more would be a second wave
    BANDS = max(1, min(programs_on_sm(PIECES, warps) * target.sms // units, cdiv(M, ROWS)))
    lines = (BANDS * cdiv(groups, GB), D) if shared else (BANDS, hidden)
    part = torch.empty(lines, dtype=torch.float32, device=x.device) if dweight is not None else None
    PDL = dweight is not None and target.early_launch
    X, GATE, DY, given = rows_of(xs), rows_of(gate), rows_of(dy), Given()
    if wide:
        given = Given(rstd_of(xs, saved.eps, groups), torch.empty(M, groups, dtype=torch.float32, device=x.device))
        gated_group_norm_means(
            X, GATE, w, given.rstd, DY, given.mean, M, inner, D, 1.0 / D, G=groups, ACT=saved.act, SHARED=shared
        )
    gradients = Gradients(rows_of(None if dx is None else in_order(dx, saved.transposed)), dgate, part)
    gated_group_norm_backward(
        X, GATE, w, given, DY, gradients, M, inner, D, BANDS, saved.eps, 1.0 / D, G=groups, ACT=saved.act, SHARED=shared,
        PDL=PDL, COLUMNS=columns_of(x, BLOCK, PIECES), GB=GB,
    )  # fmt: skip
    if dweight is not None:
        sum_columns(part, dweight, *lines, PDL=PDL)
    return dx, dgate, dweight


def check(x, gate, weight, eps, groups, transposed, act, out_format) -> None:
    batch, length, hidden = x.shape
    if hidden % groups:
        raise ValueError(f"gated_group_norm: groups must divide the {hidden} columns of x, got {groups}")
    wanted = (length, batch, hidden) if transposed else (batch, length, hidden)
    if tuple(gate.shape) != wanted:
        raise ValueError(
            f"gated_group_norm: gate is {list(gate.shape)}, but with transposed={transposed} it must be {list(wanted)}"
        )
    if weight is not None and weight.shape[0] not in (hidden, hidden // groups):
        raise ValueError(
            f"gated_group_norm: weight has {weight.shape[0]} numbers, but must have one for each of the {hidden} columns"
            f" or of a group's {hidden // groups}"
        )
    if batch * length > MOST_ROWS:
        raise ValueError(f"gated_group_norm: x has {batch * length} rows, but a launch takes at most {MOST_ROWS}")


def sharding(a: SimpleNamespace) -> Sharding:
    """The gate's dimensions and the result's are those of x, in its order or the other."""
    outer, inner = ("length", "batch") if a.transposed else ("batch", "length")
    return Sharding(("batch", "length"), {"tokens": outer, "rows": inner})


gated_group_norm = Op(
    "gated_group_norm", reference, inputs, Triton(forward, backward, single, out=True),
    where={
        "x": "float[batch length hidden]", "gate": "float[tokens rows hidden]", "weight": "float[columns]",
        "eps": at_least(0.0), "groups": at_least(1),
    },
    results={"out": "x[tokens rows hidden]"}, gradient=Gradient(of=("x", "gate", "weight")), check=check,
    sharding=sharding,
)  # fmt: skip
