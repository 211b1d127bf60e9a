"""RMS norm of each group of columns, times a gate: out = x * rstd * weight * act(gate), rstd = 1 / sqrt(mean(x**2) + eps) over
the group; out lies as gate does, which may be [length, batch, hidden] where x is [batch, length, hidden].

Backward, with a = act(gate) and g = dy * a * weight: dx = rstd * g - rstd**3 * x * mean(x * g),
dgate = dy * x * rstd * weight * act'(gate), and dweight is the sum over rows of dy * a * x * rstd.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.format import Format, Quantized, store
from ..core.kernel import kernel
from ..core.op import Op, Triton, single, upcast
from ..core.signature import at_least
from ..core.target import Target
from ..core.tensor import cdiv, power_of_two, vector
from ..device.activation import activate, activate_slope
from ..device.groups import columns, load_tile, load_weight, row_offsets, sum_group
from ..device.rows import store_row_codes
from ..formats.tiles import codes_of, is_fast, row_stride, store_tiles
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
    out: Tensor | Quantized | None = None,
) -> Tensor:
    """Scale each of `groups` equal parts of every row of `x` to unit root-mean-square, then by `weight` and `act(gate)`;
    in fp32, rounded once to the dtype of `x`.

    `x` is [batch, length, hidden]. `gate` and the result are [length, batch, hidden], or with `transposed=False` as `x` is.
    `weight` has a number for each column, or for each column of a group: then all groups share it. `out_format` gives a
    `Quantized` result, `out` writes into it.
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


ON_SM = 8192  # elements whose dweight the programs on one SM hold: 16 warps of 128 registers a thread
WIDEST = 8192  # columns of a group that one program holds in registers; a wider group is read twice
MOST_ROWS = 2**30  # row numbers and those of a last, partial block are 32-bit
MOST_COLUMNS = 2**24  # of a group in quantised tiles, which take the number as a float


def _shape(a, size: int, run: int, warps: int) -> dict:
    """A tile of about `size` elements, runs of `run` columns if whole groups make them."""
    GB = a.G & -a.G if a.BLOCK >= a.D else 1  # no more groups than divide them all
    GB = max(1, min(GB, run // a.BLOCK))
    return {"GB": GB, "ROWS": max(1, size // (GB * a.BLOCK)), "num_warps": warps}


def _default(a) -> dict:
    if a.FORMAT is not None:  # store_row_codes wants whole rows
        GB = max(power_of_two(a.G), 128 // a.BLOCK)
        return {"GB": GB, "ROWS": max(1, 4096 // (GB * a.BLOCK)), "num_warps": min(16, max(4, GB * a.BLOCK // 1024))}
    return _shape(a, 2048, 512, min(16, max(4, a.BLOCK // 512)))


def _candidates(a) -> list[dict]:
    if a.FORMAT is not None:
        return [_default(a)]
    shapes = [(2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)]
    return [_default(a)] + [_shape(a, size, run, warps) for run in (512, 2048) for size, warps in shapes]


def _shape_backward(a, size: int = 2048, stages: int = 3) -> dict:
    ROWS = max(1, size // (a.GB * a.BLOCK))
    elements = ROWS * a.GB * a.BLOCK
    # All stages but one keep a block of every operand in shared memory
    held = (stages - 1) * elements * sum(t.element_size() for t in (a.X, a.GATE, a.DY))
    STAGES = stages if held + 1024 <= Target.at(a.X.device).shared_memory else 1
    return {"ROWS": ROWS, "STAGES": STAGES, "num_warps": min(16, max(4, elements // 512))}


def _candidates_backward(a) -> list[dict]:
    return [_shape_backward(a, size, stages) for size in (2048, 4096) for stages in (1, 2, 3, 4)]


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.G, a.GB) * (cdiv(a.D, a.BLOCK) if a.GIVEN else 1),),
    tokens=("M", "INNER", "stride_s"),
    tune_by=("D", "G"),
    default=_default,
    candidates=_candidates,
)
def gated_group_norm_forward(
    X, GATE, W, RSTD, Y, S, STATIC, M, INNER, D, stride_xo, stride_xi, stride_xn, stride_go, stride_gi, stride_gn, stride_yo,
    stride_yi, stride_yn, stride_s, eps, inv_d, G: tl.constexpr, ACT: tl.constexpr, FORMAT: tl.constexpr,
    SHARED: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, GB: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Y takes values, or codes with scales in S, unless None. RSTD [rows, groups] is read if GIVEN, else written unless None."""
    parts = tl.cdiv(D, BLOCK) if GIVEN else 1
    units = (G + GB - 1) // GB * parts
    unit = tl.program_id(0) % units
    first = tl.program_id(0) // units * ROWS
    s = tl.arange(0, ROWS * GB)
    row = first + s // GB
    g = unit // parts * GB + s % GB
    c = columns(unit % parts * BLOCK, BLOCK, RUN)
    col = (g * D)[:, None, None] + c
    live = (row < M) & (g < G)
    inside = live[:, None, None] & (c < D)
    x = load_tile(X, row_offsets(row, INNER, stride_xo, stride_xi), col, inside, stride_xn)
    # All loads before the sum, which everything after it waits for
    if Y is not None:
        a = load_tile(GATE, row_offsets(row, INNER, stride_go, stride_gi), col, inside, stride_gn)
        if W is not None:
            w = load_weight(W, c, col, inside, SHARED)
    at = row.to(tl.int64) * G + g
    if GIVEN:
        rstd = tl.load(RSTD + at, live, 0.0)
    else:
        # With eps 0 a row past the end, all zeros, would have an infinite rstd and give NaN
        rstd = tl.where(live, tl.rsqrt(sum_group(x * x) * inv_d + eps), 0.0)
        if RSTD is not None:
            tl.store(RSTD + at, rstd, live)
    if Y is not None:
        y = x * rstd[:, None, None]
        if W is not None:
            y = y * w
        y = y * activate(a, 1.0, ACT)
        if FORMAT is None:
            to = row_offsets(row, INNER, stride_yo, stride_yi) + col.to(tl.int64) * stride_yn
            tl.store(Y + to, y.to(Y.dtype.element_ty), inside)
        else:
            r = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            whole = tl.reshape(y, (ROWS, GB * BLOCK))
            store_row_codes(whole, Y, S, STATIC, r, 0, r < M, G * D, G * D, stride_s, FORMAT, "")


@kernel(
    grid=lambda a: (a.BANDS * cdiv(a.G, a.GB) * (cdiv(a.D, a.BLOCK) if a.GIVEN else 1),),
    tokens=("M", "INNER", "BANDS"),
    tune_by=("D", "G"),
    default=_shape_backward,
    candidates=_candidates_backward,
)
def gated_group_norm_backward(
    X, GATE, W, RSTD, MEAN, DY, DX, DGATE, DW, M, INNER, D, BANDS, stride_xo, stride_xi, stride_xn, stride_go, stride_gi,
    stride_gn, stride_yo, stride_yi, stride_yn, stride_do, stride_di, eps, inv_d, G: tl.constexpr, ACT: tl.constexpr,
    SHARED: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, GB: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes some groups of every BANDS-th block of rows and keeps its share of dweight in registers: DW [bands,
    hidden], or SHARED [programs, D]. RSTD and MEAN [rows, groups] are read if GIVEN."""
    parts = tl.cdiv(D, BLOCK) if GIVEN else 1
    blocks: tl.constexpr = (G + GB - 1) // GB
    unit = tl.program_id(0) % (blocks * parts)
    band = tl.program_id(0) // (blocks * parts)
    s = tl.arange(0, ROWS * GB)
    g = unit // parts * GB + s % GB
    c = columns(unit % parts * BLOCK, BLOCK, RUN)
    col = (g * D)[:, None, None] + c
    if W is not None:
        w = load_weight(W, c, col, (g < G)[:, None, None] & (c < D), SHARED)
    dw = tl.zeros([ROWS * GB, BLOCK // RUN, RUN], tl.float32)
    for block in tl.range(band, tl.cdiv(M, ROWS), BANDS, num_stages=STAGES):
        row = block * ROWS + s // GB
        live = (row < M) & (g < G)
        inside = live[:, None, None] & (c < D)
        x = load_tile(X, row_offsets(row, INNER, stride_xo, stride_xi), col, inside, stride_xn)
        a = load_tile(GATE, row_offsets(row, INNER, stride_go, stride_gi), col, inside, stride_gn)
        dy = load_tile(DY, row_offsets(row, INNER, stride_yo, stride_yi), col, inside, stride_yn)
        value, slope = activate_slope(a, 1.0, ACT)
        dn = dy * value  # the gradient of xhat * weight
        da = dy * slope  # here, so that neither factor need be kept until rstd is known
        dg = dn
        if W is not None:
            dg = dn * w
        at = row.to(tl.int64) * G + g
        if GIVEN:
            rstd = tl.load(RSTD + at, live, 0.0)
            mean = tl.load(MEAN + at, live, 0.0)
        else:
            rstd = tl.where(live, tl.rsqrt(sum_group(x * x) * inv_d + eps), 0.0)
            mean = sum_group(x * dg) * inv_d * rstd
        xhat = x * rstd[:, None, None]
        if DW is not None:
            dw += dn * xhat
        if DGATE is not None:
            da *= xhat
            if W is not None:
                da *= w
            to = DGATE + (row.to(tl.int64) * (G * D))[:, None, None] + col
            tl.store(to, da.to(DGATE.dtype.element_ty), inside)
        if DX is not None:
            dx = rstd[:, None, None] * (dg - xhat * mean[:, None, None])
            to = DX + row_offsets(row, INNER, stride_do, stride_di) + col
            tl.store(to, dx.to(DX.dtype.element_ty), inside)
    if DW is not None:
        if SHARED:
            to = DW + (band * blocks + unit // parts).to(tl.int64) * D + c
            tl.store(to, tl.sum(dw, axis=0)[None, :, :], c < D)
        else:
            part = tl.sum(tl.reshape(dw, (ROWS, GB, BLOCK // RUN, RUN)), axis=0)
            h = (unit // parts * GB + tl.arange(0, GB))[:, None, None]
            tl.store(DW + band.to(tl.int64) * (G * D) + h * D + c, part, (h < G) & (c < D))


ONE_GROUP = {
    "grid": lambda a: (a.M * a.G,),
    "tokens": ("M", "INNER"),
    "default": lambda a: {"BLOCK": 2048, "num_warps": 8},
}


@kernel(**ONE_GROUP)
def gated_group_norm_rstd(
    X, RSTD, M, INNER, D, stride_xo, stride_xi, stride_xn, eps, inv_d, G: tl.constexpr, BLOCK: tl.constexpr
):
    """For groups too wide for one program: rstd of each."""
    row = tl.program_id(0) // G + tl.arange(0, 1)
    g = tl.program_id(0) % G + tl.arange(0, 1)
    square = tl.zeros([1, 1, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        c = columns(start, BLOCK, BLOCK)
        col = (g * D)[:, None, None] + c
        x = load_tile(X, row_offsets(row, INNER, stride_xo, stride_xi), col, c < D, stride_xn)
        square += x * x
    tl.store(RSTD + row.to(tl.int64) * G + g, tl.rsqrt(sum_group(square) * inv_d + eps))


@kernel(**ONE_GROUP)
def gated_group_norm_means(
    X, GATE, W, RSTD, DY, MEAN, M, INNER, D, stride_xo, stride_xi, stride_xn, stride_go, stride_gi, stride_gn, stride_yo,
    stride_yi, stride_yn, inv_d, G: tl.constexpr, ACT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For the same groups mean(xhat * g), given rstd."""
    row = tl.program_id(0) // G + tl.arange(0, 1)
    g = tl.program_id(0) % G + tl.arange(0, 1)
    cross = tl.zeros([1, 1, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        c = columns(start, BLOCK, BLOCK)
        col = (g * D)[:, None, None] + c
        x = load_tile(X, row_offsets(row, INNER, stride_xo, stride_xi), col, c < D, stride_xn)
        a = load_tile(GATE, row_offsets(row, INNER, stride_go, stride_gi), col, c < D, stride_gn)
        dg = load_tile(DY, row_offsets(row, INNER, stride_yo, stride_yi), col, c < D, stride_yn) * activate(a, 1.0, ACT)
        if W is not None:
            dg = dg * load_weight(W, c, col, c < D, SHARED)
        cross += x * dg
    at = row.to(tl.int64) * G + g
    tl.store(MEAN + at, sum_group(cross) * inv_d * tl.load(RSTD + at))


@triton.constexpr_function
def field(MODE, i):
    return MODE[i]


@triton.jit
def produce(X, GATE, W, RSTD, inner, outer, width, p1, row, col, inside, MODE: tl.constexpr):
    """A tile of y, rstd being given. MODE is (act, groups, whether they share the weight, whether 16 divides the columns of all
    and 128 those of a group), width the columns of a group; gate and x are dense, x with inner before outer."""
    G: tl.constexpr = field(MODE, 1)
    D = width.to(tl.int32)
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


# ---------------------------------------------------------------- host


def in_order(x: Tensor, transposed: bool) -> Tensor:
    """x as [outer, inner, hidden], the order of gate."""
    return x.transpose(0, 1) if transposed else x


def is_shared(weight: Tensor | None, hidden: int) -> bool:
    return weight is not None and weight.shape[0] != hidden


def launch(x, gate, weight, rstd, y, eps, groups, act, given=False, scale=None, fmt=None) -> None:
    """One launch over rows of x and gate [outer, inner, hidden]; `fmt` says that y are codes."""
    outer, inner, hidden = x.shape
    D = hidden // groups
    BLOCK = min(power_of_two(D), 2048) if given else power_of_two(D)
    strides = (0, 0, 0) if y is None or fmt is not None else y.stride()
    gated_group_norm_forward(
        x, gate, weight, rstd, y, scale, None if fmt is None else fmt.tensor, outer * inner, inner, D, *x.stride(),
        *gate.stride(), *strides, row_stride(scale), eps, 1.0 / D, G=groups, ACT=act, GIVEN=given, BLOCK=BLOCK,
        FORMAT=None if fmt is None else fmt.device_format(is_fast(x)), RUN=min(BLOCK, 512 // x.element_size()),
        SHARED=is_shared(weight, hidden),
    )  # fmt: skip


def rstd_of(x: Tensor, eps: float, groups: int) -> Tensor:
    """rstd [rows, groups] for groups too wide for one program."""
    outer, inner, hidden = x.shape
    rstd = torch.empty(outer * inner, groups, dtype=torch.float32, device=x.device)
    D = hidden // groups
    gated_group_norm_rstd(x, rstd, outer * inner, inner, D, *x.stride(), eps, 1.0 / D, G=groups)
    return rstd


def quantised(x, gate, weight, eps, groups, transposed, act, fmt, q) -> None:
    """Fill q. Row-wise codes come from the launch that finds rstd where a program can hold a row and all that its scales need;
    column-wise ones, and all others, from a launch over tiles that takes rstd as given."""
    xs, (batch, length, hidden) = in_order(x, transposed), x.shape
    D = hidden // groups
    scaled = fmt.granularity in ("1x128", "row") or fmt.source != "dynamic"
    whole = groups == 1 or power_of_two(D) == D  # then the columns of a tile are those of a row, one after another
    whole = whole and x.numel() > 0 and power_of_two(groups) * power_of_two(D) <= WIDEST
    rows_done = scaled and whole and q.data is not None
    rstd = None
    if x.numel() and power_of_two(D) > WIDEST:
        rstd = rstd_of(xs, eps, groups)
    elif not rows_done or q.data_t is not None:
        rstd = torch.empty(batch * length, groups, dtype=torch.float32, device=x.device)
    if rows_done:
        launch(xs, gate, weight, rstd, codes_of(q.data, is_fast(x)), eps, groups, act, scale=q.scale, fmt=fmt)
        if q.data_t is None:
            return
        q = Quantized.from_tensors(replace(fmt, ways="col"), q.dtype, q.shape, (q.data_t, q.scale_t))
    elif x.numel() and power_of_two(D) <= WIDEST:
        launch(xs, gate, weight, rstd, None, eps, groups, act)
    order = (batch, length) if transposed and batch > 1 and length > 1 else (1, 1)
    mode = (act, groups, is_shared(weight, hidden), hidden % 16 == 0, D % 128 == 0)
    operands = (x.contiguous(), gate.contiguous(), weight, rstd)
    store_tiles(q, produce, operands, order, (float(max(1, D)), 0.0), mode=mode, scale=fmt.tensor)


def forward(x, gate, weight, eps, *, groups, transposed, act, out_format, out) -> Tensor:
    w = vector(weight)
    if out_format is not None:
        q = out if out is not None else out_format.empty(gate.shape, x.dtype, x.device)
        quantised(x, gate, w, eps, groups, transposed, act, out_format, q)
        return q
    y = out if out is not None else torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        xs, given = in_order(x, transposed), power_of_two(x.shape[-1] // groups) > WIDEST
        launch(xs, gate, w, rstd_of(xs, eps, groups) if given else None, y, eps, groups, act, given)
    return y


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    """dweight is summed in fp32, per program and then over programs: no atomics."""
    x, gate, w, groups, needs = saved.x, saved.gate, vector(saved.weight), saved.groups, saved.needs
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if "x" in needs else None
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if "gate" in needs else None
    dweight = torch.empty(w.shape, dtype=w.dtype, device=w.device) if "weight" in needs else None
    if not x.numel():
        return dx, dgate, None if dweight is None else dweight.zero_()
    xs, (outer, inner, hidden) = in_order(x, saved.transposed), gate.shape
    D, M = hidden // groups, outer * inner
    shared = is_shared(w, hidden)
    given = power_of_two(D) > WIDEST
    BLOCK = 2048 if given else power_of_two(D)
    GB = max(1, min(groups & -groups, 512 // BLOCK))
    units = cdiv(groups, GB) * (cdiv(D, BLOCK) if given else 1)
    size = max(2048, GB * BLOCK)
    # At most what runs at once: a program more would be a second wave
    BANDS = max(1, min(ON_SM // size * Target.at(x.device).sms // units, cdiv(M, size // (GB * BLOCK))))
    lines = (BANDS * cdiv(groups, GB), D) if shared else (BANDS, hidden)
    part = torch.empty(lines, dtype=torch.float32, device=x.device) if dweight is not None else None
    rstd = mean = None
    if given:
        rstd, mean = rstd_of(xs, saved.eps, groups), torch.empty(M, groups, dtype=torch.float32, device=x.device)
        strides = (*xs.stride(), *gate.stride(), *dy.stride())
        gated_group_norm_means(
            xs, gate, w, rstd, dy, mean, M, inner, D, *strides, 1.0 / D, G=groups, ACT=saved.act, SHARED=shared
        )
    gated_group_norm_backward(
        xs, gate, w, rstd, mean, dy, dx, dgate, part, M, inner, D, BANDS, *xs.stride(), *gate.stride(), *dy.stride(),
        *(in_order(dx, saved.transposed).stride()[:2] if dx is not None else (0, 0)), saved.eps, 1.0 / D, G=groups,
        ACT=saved.act, SHARED=shared, GIVEN=given, BLOCK=BLOCK, GB=GB, RUN=min(BLOCK, 512 // x.element_size()),
    )  # fmt: skip
    if dweight is not None:
        sum_columns(part, dweight, *lines)
    return dx, dgate, dweight


def check(x, gate, weight, eps, groups, transposed, act, out_format, out) -> None:
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
    if out_format is not None and hidden // groups > MOST_COLUMNS:
        raise ValueError(
            f"gated_group_norm: x has groups of {hidden // groups} columns, out_format takes {MOST_COLUMNS}"
        )


gated_group_norm = Op(
    "gated_group_norm", reference, inputs, Triton(forward, backward, single),
    where={
        "x": "float[batch length hidden]", "gate": "float[tokens rows hidden]", "weight": "float[columns]",
        "eps": at_least(0.0), "groups": at_least(1), "out": "x[tokens rows hidden]",
    },
    differentiable=("x", "gate", "weight"), check=check,
)  # fmt: skip
