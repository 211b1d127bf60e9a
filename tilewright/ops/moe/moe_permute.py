"""Rows of tokens grouped by expert, and back: rows[r] = x[source[r]], y[t] = sum over t's rows r of rows[r] * probs[r].

`moe_permute` finds the rows too (`moe_map.py`). Backward: dx[t] = sum over t's rows of drows, and each pair's probability gets
its row's gradient. Of `moe_unpermute`: drows[r] = dy[t] * probs[r], dprobs[r] = dy[t] . rows[r] for the token t of row r.
Sums go in ascending order of rows, in fp32.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...core.cost import tensor_bytes
from ...core.debug import check_indices
from ...core.draw import Draw
from ...core.format import Format, store
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...device.labels import load_if
from ...formats.fill import fill
from ...op import Bars, Cost, Gradient, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel
from .moe_map import (
    LIVE,
    MAP_ROWS,
    NUMBERS,
    RowMap,
    build_map,
    check_routing,
    draw_routing,
    find_rows,
    named_sizes,
    routing_form,
    sizes,
    slot_experts,
)
from .prefetch import prefetch

UNROLLED = 16  # slots up to which loops over a token's rows are unrolled: all its accesses are under way at once


def reference(
    x: Tensor,
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    experts: int | None = None,
    topk: int | None = None,
    align: int = 16,
    capacity: int | None = None,
    out_format: Format | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows [capacity, hidden], row_probs [capacity], row_map, source, offsets, overflow): rows of `x` grouped by expert.

    `routing`, `experts`, `topk`, `align` and `capacity`, and the last four results, are those of `moe_row_map`. `row_probs`
    has the entry of `probs`, shaped like `routing`, for each row (1 without `probs`, then fp32); where a token has an expert
    several times, their sum. Padding rows are 0 and so are their probabilities. Rows past the last offset are unspecified:
    nothing may read them. `out_format` gives `rows` as `Quantized`, its groups those of `offsets`.
    """
    found = find_rows(routing, experts, topk, align, capacity)
    token = torch.where(found.source < 0, x.shape[0], found.source)
    rows = F.pad(upcast(x), (0, 0, 0, 1))[token]
    return store(rows, out_format, x.dtype, found.offsets), probs_of_rows(routing, probs, found), *found[:4]


def probs_of_rows(routing: Tensor, probs: Tensor | None, found: RowMap) -> Tensor:
    """The sum over the slots that name each row of their probabilities, 1 each without `probs`."""
    capacity = found.source.shape[0]
    weights = torch.ones(routing.shape, device=routing.device) if probs is None else probs
    none = torch.zeros(capacity + 1, dtype=upcast(weights).dtype, device=weights.device)
    return none.scatter_add(0, found.rows.reshape(-1), upcast(weights).reshape(-1)).to(weights.dtype)[:capacity]


def inputs(draw: Draw) -> dict:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    drawn = draw_routing(draw, tokens)
    dtype = draw.option("prob_dtype", torch.float32, draw.dtype)
    probs = draw.maybe("probs", lambda: draw.uniform(tokens, drawn["routing"].shape[1], low=0.1, dtype=dtype))
    return {"x": draw.tensor(tokens, hidden), "probs": probs, **drawn}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def row_of(MAP, t, k, T, R, stride_t, stride_k):
    """(the k-th row of each token, whether there is one): device data, of which nothing outside [0, R) is used."""
    row = tl.load(MAP + t.to(tl.int64) * stride_t + k * stride_k, t < T, -1)
    live = (t < T) & (row >= 0) & (row < R)
    return tl.where(live, row, 0).to(tl.int64), live


@triton.jit
def token_of(SOURCE, row, inside, BASE: tl.constexpr):
    """The token of a row, negative for none: as `moe_row_map` has it, or with BASE 1 one more than that."""
    return tl.load(SOURCE + row, inside, 0) - BASE


@triton.jit
def is_unused(SOURCE, OFFSETS, r, R, E, BASE: tl.constexpr):
    """Whether rows r are to be zeroed: those of no token, below the last offset if there are any."""
    limit = R
    if OFFSETS is not None:
        limit = tl.load(OFFSETS + E - 1)
    return (r < limit) & (r < R) & (token_of(SOURCE, r, r < R, BASE) < 0)


@triton.jit
def unused_rows(SOURCE, OFFSETS, first, R, E, BASE: tl.constexpr, COUNT: tl.constexpr):
    """(rows [COUNT, 1], which of them are to be zeroed)."""
    r = first + tl.arange(0, COUNT).to(tl.int64)[:, None]
    return r, is_unused(SOURCE, OFFSETS, r, R, E, BASE)


@triton.jit
def copy_rows(
    v, k, MAP, SOURCE, W, OUT, t, col, T, N, R, stride_mt, stride_mk, stride_w, BASE: tl.constexpr, STORES: tl.constexpr
):
    """Store tokens' rows v at the k-th rows of each, times those rows' weights."""
    row, live = row_of(MAP, t, k, T, R, stride_mt, stride_mk)
    if BASE:  # of two tokens that name one row the last has it
        live = live & (token_of(SOURCE, row, live, BASE) == t)
    if W is not None:
        v = v.to(tl.float32) * load_if(W + row * stride_w, live)
    tl.store(OUT + row * N + col, v.to(OUT.dtype.element_ty), live & (col < N), eviction_policy=STORES)


@triton.jit
def prefetch_tokens(
    X, program, wave, across, T, N, stride_xt, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """Ask for what AHEAD later programs, a wave apart, read of X."""
    i = tl.arange(0, 256)
    other = program + (1 + i // ROWS) * wave
    t = other // across * ROWS + i % ROWS
    col = other % across * BLOCK
    nbytes = tl.minimum(BLOCK, N - col) * (X.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(X + t.to(tl.int64) * stride_xt + col, nbytes, (i < AHEAD * ROWS) & (t < T) & (nbytes > 0))


def _shape(a, size: int = 2048, warps: int = 8) -> dict:
    """Whole rows of a token while they are short, and then several: a 16-byte access of a thread for every 8 elements."""
    BLOCK = max(16, min(size, power_of_two(a.N)))
    return {"ROWS": max(1, min(32, size // BLOCK)), "BLOCK": BLOCK, "num_warps": warps}


SHARE = tl.constexpr(16)  # rows of the result that a program looks after for each token that it copies
WAVE = 4  # programs of an SM that wait for the map from its beginning
AHEAD = 4  # programs whose tokens each of them asks for meanwhile
STORES = "evict_first"  # keeps what is asked for in the L2 until it is read
SPREAD = {
    "tokens": ("T", "R", "wave"),
    "tune_by": ("N",),
    "default": lambda a: {**_shape(a), "launch_pdl": a.PDL},
    "candidates": lambda a: [
        {**_shape(a, size, warps), "launch_pdl": a.PDL} for size in (1024, 2048, 4096) for warps in (4, 8)
    ],
}


def _programs(a) -> int:
    """So many that all tokens are copied and all rows looked after."""
    return cdiv(max(a.T, cdiv(a.R, SHARE.value)), a.ROWS)


@kernel(grid=lambda a: (_programs(a) * max(1, cdiv(a.N, a.BLOCK)),), **SPREAD)
def moe_spread(
    X, MAP, SOURCE, OFFSETS, W, OUT, T, N, R, E, wave, stride_xt, stride_xn, stride_mt, stride_mk, stride_w,
    SLOTS: tl.constexpr, BASE: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    STORES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT[row] = X[token] [* W[row]]. A program reads a token's row once and writes all its copies; it also zeroes the rows of
    no token among SHARE: a program for each row of the result takes a third longer (H200, November 2026). PDL: X was there
    before the launches that make the map; while they run, the first `wave` programs bring more of it into the L2."""
    across = tl.maximum(tl.cdiv(N, BLOCK), 1)
    first = tl.program_id(0) // across * ROWS
    mine = first.to(tl.int64) * SHARE
    t = first + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(X + t.to(tl.int64) * stride_xt + col.to(tl.int64) * stride_xn, (t < T) & (col < N), 0)
    if PDL:
        if AHEAD > 0 and tl.program_id(0) < wave:
            prefetch_tokens(X, tl.program_id(0), wave, across, T, N, stride_xt, ROWS, BLOCK, AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # In one dimension first, where a thread holds one row: few programs have any, and a column of rows is in every thread
    some = tl.max(is_unused(SOURCE, OFFSETS, mine + tl.arange(0, SHARE * ROWS), R, E, BASE).to(tl.int32), 0)
    if UNROLL:
        for k in tl.static_range(SLOTS):
            copy_rows(v, k, MAP, SOURCE, W, OUT, t, col, T, N, R, stride_mt, stride_mk, stride_w, BASE, STORES)
    else:
        for k in range(SLOTS):
            copy_rows(v, k, MAP, SOURCE, W, OUT, t, col, T, N, R, stride_mt, stride_mk, stride_w, BASE, STORES)
    if some > 0:
        for i in range(SHARE):
            r, unused = unused_rows(SOURCE, OFFSETS, mine + i * ROWS, R, E, BASE, ROWS)
            tl.store(OUT + r * N + col, tl.zeros([ROWS, BLOCK], OUT.dtype.element_ty), unused & (col < N))


@triton.jit
def spread_and_dot(
    k, DY, MAP, SOURCE, W, ROWS_IN, DROWS, DW, t, T, N, R, stride_dt, stride_dn, stride_mt, stride_mk, stride_w, stride_rt,
    stride_rn, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both gradients of the k-th row of each token."""
    row, live = row_of(MAP, t, k, T, R, stride_mt, stride_mk)
    live = live & (token_of(SOURCE, row, live, 1) == t)
    weight = load_if(W + row * stride_w, live)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        inside = live & (col < N)
        dy = tl.load(DY + t.to(tl.int64) * stride_dt + col.to(tl.int64) * stride_dn, inside, 0.0).to(tl.float32)
        x = tl.load(ROWS_IN + row * stride_rt + col.to(tl.int64) * stride_rn, inside, 0.0).to(tl.float32)
        total += dy * x
        if DROWS is not None:
            tl.store(DROWS + row * N + col, (dy * weight).to(DROWS.dtype.element_ty), inside)
    tl.store(DW + row, tl.sum(total, 1)[:, None].to(DW.dtype.element_ty), live)


@kernel(grid=lambda a: (_programs(a),), **{**SPREAD, "tokens": ("T", "R")})
def moe_spread_and_dot(
    DY, MAP, SOURCE, W, ROWS_IN, DROWS, DW, T, N, R, stride_dt, stride_dn, stride_mt, stride_mk, stride_w, stride_rt,
    stride_rn, SLOTS: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DROWS[row] = DY[token] * W[row] and DW[row] = DY[token] . ROWS_IN[row]; SOURCE has one more than the token, 0 for none."""
    first = tl.program_id(0) * ROWS
    t = first + tl.arange(0, ROWS)[:, None]
    if UNROLL:
        for k in tl.static_range(SLOTS):
            spread_and_dot(
                k, DY, MAP, SOURCE, W, ROWS_IN, DROWS, DW, t, T, N, R, stride_dt, stride_dn, stride_mt, stride_mk,
                stride_w, stride_rt, stride_rn, ROWS, BLOCK,
            )  # fmt: skip
    else:
        for k in range(SLOTS):
            spread_and_dot(
                k, DY, MAP, SOURCE, W, ROWS_IN, DROWS, DW, t, T, N, R, stride_dt, stride_dn, stride_mt, stride_mk,
                stride_w, stride_rt, stride_rn, ROWS, BLOCK,
            )  # fmt: skip
    r, unused = unused_rows(SOURCE, None, first.to(tl.int64) * SHARE, R, 0, 1, SHARE * ROWS)
    if tl.max(unused.to(tl.int32)) > 0:
        tl.store(DW + r, tl.zeros([SHARE * ROWS, 1], DW.dtype.element_ty), unused)
        if DROWS is not None:
            for start in range(0, N, BLOCK):
                col = start + tl.arange(0, BLOCK)[None, :]
                tl.store(
                    DROWS + r * N + col, tl.zeros([SHARE * ROWS, BLOCK], DROWS.dtype.element_ty), unused & (col < N)
                )


@triton.jit
def add_rows(total, k, ROWS_IN, MAP, W, t, col, T, N, R, stride_rt, stride_rn, stride_mt, stride_mk, stride_w):
    row, live = row_of(MAP, t, k, T, R, stride_mt, stride_mk)
    at = ROWS_IN + row * stride_rt + col.to(tl.int64) * stride_rn
    v = tl.load(at, live & (col < N), 0.0, eviction_policy="evict_first").to(tl.float32)
    if W is not None:
        v *= load_if(W + row * stride_w, live)
    return total + v


@kernel(
    grid=lambda a: (cdiv(a.T, a.ROWS) * cdiv(a.N, a.BLOCK),),
    tokens=("T", "R"),
    tune_by=("N",),
    default=lambda a: {**_shape(a, 2048, 4), "launch_pdl": a.PDL},
    candidates=lambda a: [{**_shape(a, 2048, warps), "launch_pdl": a.PDL} for warps in (2, 4, 8)],
)
def moe_sum(
    ROWS_IN, MAP, W, Y, T, N, R, stride_rt, stride_rn, stride_mt, stride_mk, stride_w, SLOTS: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Y[token] = sum of its rows [* W[row]], in the order of the map. PDL: programs may be here before the last launch is over,
    and those of the next before this one is, if they wait as well."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    across = tl.cdiv(N, BLOCK)
    t = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    strides = (stride_rt, stride_rn, stride_mt, stride_mk, stride_w)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if UNROLL:
        for k in tl.static_range(SLOTS):
            total = add_rows(total, k, ROWS_IN, MAP, W, t, col, T, N, R, *strides)
    else:
        for k in range(SLOTS):
            total = add_rows(total, k, ROWS_IN, MAP, W, t, col, T, N, R, *strides)
    # Nothing read here is read again, nor what is written: neither is to push out the other (4 % at 8192x2048, H200, November 2026)
    y = total.to(Y.dtype.element_ty)
    tl.store(Y + t.to(tl.int64) * N + col, y, (t < T) & (col < N), eviction_policy="evict_first")


@kernel(
    grid=lambda a: (cdiv(a.T, a.TOKENS),),
    tokens=("T",),
    default=lambda a: {"TOKENS": max(1, 1024 // a.BLOCK_S), "num_warps": 4},
)
def moe_prob_gradient(
    R, MAP, DROW, DPROBS, T, E, stride_d, FORM: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr
):
    """DPROBS, laid out as the routing: the gradient of the row that each slot names, 0 where there is none."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    k = tl.arange(0, BLOCK_S)[None, :]
    named, _, place = slot_experts(t, k, R, T, E, FORM)
    row = tl.load(MAP + t.to(tl.int64) * FORM.WIDTH + place, named >= 0, -1)
    d = tl.load(DROW + tl.maximum(row, 0).to(tl.int64) * stride_d, row >= 0, 0.0)
    tl.store(DPROBS + t.to(tl.int64) * FORM.SLOTS + k, d.to(DPROBS.dtype.element_ty), (t < T) & (k < FORM.SLOTS))


@kernel(
    grid=lambda a: (cdiv(a.T * a.SLOTS, 1024),), tokens=("T", "R"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def moe_invert(MAP, SOURCE, T, R, stride_t, stride_k, SLOTS: tl.constexpr):
    """SOURCE[row], zeroed before, becomes one more than the last token that names the row: a maximum of integers, so that the
    order of programs means nothing."""
    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    t = at // SLOTS
    row = tl.load(MAP + t * stride_t + at % SLOTS * stride_k, t < T, -1).to(tl.int64)
    live = (row >= 0) & (row < R)
    tl.atomic_max(SOURCE + tl.where(live, row, 0), (t + 1).to(tl.int32), live, sem="relaxed")


@triton.jit
def produce(SOURCE, row, col, inside, MODE: tl.constexpr):
    """The tokens of rows; padding is 0."""
    X, TOKEN, stride_t, stride_n = SOURCE
    token = tl.load(TOKEN + row)
    at = X + tl.maximum(token, 0).to(tl.int64) * stride_t + col.to(tl.int64) * stride_n
    return tl.load(at, inside & (token >= 0), 0.0).to(tl.float32)


# ---- permute ---------------------------------------------------------------------------------------------------------


def spread(
    x: Tensor, row_map: Tensor, source: Tensor, offsets: Tensor | None, weight: Tensor | None, base: int, early: bool = False
) -> Tensor:  # fmt: skip
    """x[token] [* weight[row]] at each of its rows, 0 at those of no token. `early`: x was there before the map was made."""
    (T, N), R, slots = x.shape, source.shape[0], row_map.shape[1]
    out = torch.empty((R, N), dtype=x.dtype, device=x.device)
    target = Target.at(x.device)
    pdl = early and target.early_launch
    moe_spread(
        x, row_map, source, offsets, weight, out, T, N, R, 0 if offsets is None else offsets.shape[0], target.sms * WAVE,
        *x.stride(), *row_map.stride(), 0 if weight is None else weight.stride(0), SLOTS=slots, BASE=base,
        UNROLL=slots <= UNROLLED, PDL=pdl, AHEAD=AHEAD if pdl and x.stride(1) == 1 else 0, STORES=STORES,
    )  # fmt: skip
    return out


def sum_rows(rows: Tensor, row_map: Tensor, weight: Tensor | None) -> Tensor:
    """The sum of each token's rows [* weight[row]]."""
    (T, slots), (R, N) = row_map.shape, rows.shape
    y = torch.empty((T, N), dtype=rows.dtype, device=rows.device)
    moe_sum(
        rows, row_map, weight, y, T, N, R, *rows.stride(), *row_map.stride(), 0 if weight is None else weight.stride(0),
        SLOTS=slots, UNROLL=slots <= UNROLLED, PDL=Target.at(rows.device).early_launch,
    )  # fmt: skip
    return y


def build_rows(op: str, routing: Tensor, probs: Tensor | None, *sizing: int | None) -> tuple[RowMap, Tensor]:
    """The map, and the probability of each row."""
    _, _, capacity = sizes(routing, *sizing)
    row_probs = torch.empty(capacity, dtype=torch.float32 if probs is None else probs.dtype, device=routing.device)
    return build_map(op, routing, probs, *sizing, row_probs), row_probs


def forward(x, routing, probs, *, experts, topk, align, capacity, out_format) -> tuple:
    found, row_probs = build_rows("moe_permute", routing, probs, experts, topk, align, capacity)
    if out_format is None:
        rows = spread(x, found.row_map, found.source, found.offsets, None, 0, early=True)
    else:
        shape = found.source.shape[0], x.shape[1]
        rows = out_format.empty(shape, x.dtype, x.device, found.offsets.shape[0], found.offsets)
        fill(rows, produce, (x, found.source, *x.stride()), scale=out_format.tensor)
    return rows, row_probs, *found[:4]


def backward(saved: SimpleNamespace, drows: Tensor | None, drow_probs: Tensor | None) -> tuple:
    dx = dprobs = None
    if "x" in saved.needs and drows is not None:
        dx = sum_rows(drows, saved.row_map, None)
    if "probs" in saved.needs and drow_probs is not None:
        routing, (T, slots), width = saved.routing, saved.routing.shape, saved.row_map.shape[1]
        R, form = routing_form(routing, saved.experts, width)
        E = slots if saved.experts is None else saved.experts
        dprobs = torch.empty((T, slots), dtype=drow_probs.dtype, device=drow_probs.device)
        moe_prob_gradient(
            R, saved.row_map, drow_probs, dprobs, T, E, drow_probs.stride(0), FORM=form, BLOCK_S=power_of_two(slots)
        )
    return dx, dprobs


def check_tokens(op: str, name: str, x: Tensor, routing: Tensor) -> None:
    if routing.shape[0] != x.shape[0]:
        raise ValueError(f"{op}: routing has {routing.shape[0]} tokens, {name} has {x.shape[0]}")


def check(x, routing, probs, *, experts, topk, align, capacity, out_format) -> None:
    check_tokens("moe_permute", "x", x, routing)
    check_routing("moe_permute", routing, experts, topk, align, capacity)


def cost(x, routing, probs, *, experts, topk, align, capacity, out_format) -> tuple[int, int]:
    """x, routing and probs are read once. Written are the rows that there are, not the worst case that there is room for: one for
    every slot and, on average, half an alignment of padding for each expert; for each of them where it came from, and the map."""
    T, slots = routing.shape
    width, groups = (slots, experts) if experts is not None else (slots if topk is None else topk, slots)
    count = T * width + groups * (align - 1) // 2
    count = count if capacity is None else min(count, capacity)
    rows = torch.empty(count, x.shape[1], dtype=x.dtype, device="meta")
    stored = rows if out_format is None else out_format.empty(rows.shape, x.dtype, "meta", groups)
    read = sum(tensor_bytes(t) for t in (x, routing, probs))
    return read, tensor_bytes(stored) + 8 * count + 4 * T * width + 4 * groups


def row_probs_row(a: SimpleNamespace) -> str:
    return "float32[capacity]" if a.probs is None else "probs[capacity]"


RESULTS = {"rows": "x[capacity hidden]", "row_probs": row_probs_row, **MAP_ROWS}
moe_permute = Op(
    "moe_permute", reference, inputs, Triton(forward, backward, single), cost=Cost(cost),
    # The tokens of routing have a name of their own: one token's experts decide where the rows of the others go.
    groups="offsets", where={
        "x": "float[tokens hidden]", "routing": "int_or_bool[rows slots]", "probs": "float[tokens slots]", **NUMBERS,
    },
    results=RESULTS, sizes=named_sizes, out=Out(contiguous=tuple(RESULTS), live=LIVE), check=check,
    gradient=Gradient(
        of=("x", "probs"), through=("rows", "row_probs"), saves=("routing", "row_map"),
        shape_only=lambda values: ("x", "probs"),
    ),
    bars=Bars("G", gradient="B"),
)  # fmt: skip


# ---- unpermute -------------------------------------------------------------------------------------------------------


def reference_sum(rows: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """Each token's sum of its rows, in fp32 and in the order of `row_map`, [tokens, hidden].

    `row_map` [tokens, slots] is `moe_permute`'s, so that the order is ascending; entries outside the rows, -1 among them, are
    none. `probs`, a number per row (`moe_permute`'s `row_probs`), multiplies the rows. A row belongs to one token: if
    several name it, each gets it, but its gradient is the last one's.
    """
    count = rows.shape[0]
    at = torch.where((row_map >= 0) & (row_map < count), row_map, count)
    y = F.pad(upcast(rows), (0, 0, 0, 1))[at]
    if probs is not None:
        y = y * F.pad(upcast(probs), (0, 1))[at].unsqueeze(-1)
    return y.sum(1).to(rows.dtype)


def inputs_sum(draw: Draw) -> dict:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    found = find_rows(**{"experts": None, "topk": None, **draw_routing(draw, tokens)})
    count = found.source.shape[0]
    return {
        "rows": draw.tensor(count, hidden),
        "row_map": found.row_map.to(draw.option("map_dtype", torch.int32, torch.int64)),
        "probs": draw.maybe("probs", lambda: draw.uniform(count, low=0.1, dtype=torch.float32)),
    }


def forward_sum(rows, row_map, probs) -> Tensor:
    check_indices("moe_unpermute", "row_map", row_map, -1, max(rows.shape[0], 0))
    return sum_rows(rows, row_map, probs)


def backward_sum(saved: SimpleNamespace, dy: Tensor) -> tuple:
    row_map, rows, probs = saved.row_map, saved.rows, saved.probs
    (T, slots), (R, N) = row_map.shape, rows.shape
    source = torch.zeros(R, dtype=torch.int32, device=dy.device)
    moe_invert(row_map, source, T, R, *row_map.stride(), SLOTS=slots)
    if "probs" not in saved.needs:
        return spread(dy, row_map, source, None, probs, 1), None
    drows = torch.empty((R, N), dtype=dy.dtype, device=dy.device) if "rows" in saved.needs else None
    dprobs = torch.empty(R, dtype=probs.dtype, device=dy.device)
    moe_spread_and_dot(
        dy, row_map, source, probs, rows, drows, dprobs, T, N, R, *dy.stride(), *row_map.stride(),
        probs.stride(0), *rows.stride(), SLOTS=slots, UNROLL=slots <= UNROLLED, PDL=False,
    )  # fmt: skip
    return drows, dprobs


def check_sum(rows, row_map, probs) -> None:
    if max(rows.shape[0], row_map.shape[0]) >= 2**31 - 1:
        raise ValueError("moe_unpermute: rows and row_map must have fewer than 2**31 - 1 rows")


def cost_sum(rows, row_map, probs) -> tuple[int, int]:
    """The rows that the map names, at most; the others are not read."""
    count, size = min(rows.shape[0], row_map.numel()), rows.shape[1] * rows.element_size()
    return count * (size + (0 if probs is None else probs.element_size())) + row_map.nbytes, row_map.shape[0] * size


moe_unpermute = Op(
    "moe_unpermute", reference_sum, inputs_sum, Triton(forward_sum, backward_sum, single), cost=Cost(cost_sum),
    where={"rows": "float[rows hidden]", "row_map": "int[tokens slots]", "probs": "float[rows]"},
    results={"out": "rows[tokens hidden]"}, out=Out(contiguous=("out",)), check=check_sum, bars=Bars("B"),
    gradient=Gradient(of=("rows", "probs"), shape_only=lambda values: ("rows",) if values["probs"] is None else ()),
)  # fmt: skip
