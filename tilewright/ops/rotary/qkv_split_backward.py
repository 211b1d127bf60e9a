"""The backward of `qkv_split`: dqkv in one pass, and both weights' gradients from shares that programs keep in registers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...device.activation import sigmoid_both
from ...device.rotary import (
    QKV,
    Angles,
    Heads,
    Rows,
    column_of,
    load_angles,
    load_pairs,
    load_vector_pairs,
    locate,
    pair_columns,
    rotate_back,
    store_pairs,
)
from ...runtime.kernel import kernel
from .rope import block_of, rows_of

PER_SM = 4  # programs on an SM, by their registers and the shared memory of their stages
SIZE = 2048  # elements of a tile
KEY_SHARE = 1  # tiles of keys, each with one of values, are so much smaller than one of queries


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def through_silu(x, SILU: tl.constexpr):
    """(value, derivative): of silu, or x itself and 1."""
    if SILU:
        s, other = sigmoid_both(x, 1.0)
        return x * s, s + x * (s * other)
    else:
        return x, 1.0


@triton.jit
def split_gradient(
    X, W, G, DX, ANGLES, at, up, to, inside, angles_at, position, live, eps, weight, sums, D: tl.constexpr,
    COLUMNS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dx of heads at offsets `at` of X, `up` of G and `to` of DX; and `sums` with these heads' shares of dweight. Of the four
    parts of weight and sums, (a, b) are the pairs that are rotated, (d, e) the others; absent ones have one element."""
    PAIRS: tl.constexpr = COLUMNS.PAIRS
    HALF: tl.constexpr = COLUMNS.HALF
    REST: tl.constexpr = COLUMNS.REST
    INTERLEAVED: tl.constexpr = COLUMNS.INTERLEAVED
    OTHERS: tl.constexpr = D - 2 * PAIRS
    wa, wb, wd, we = weight
    da, db, dd, de = sums
    if PAIRS > 0:
        a, b = load_pairs(X.data, at, inside, X.stride_n, 0, 2 * PAIRS, HALF, INTERLEAVED)
        ga, gb = load_pairs(G.data, up, inside, G.stride_d, 0, 2 * PAIRS, HALF, INTERLEAVED)
    if REST > 0:
        d, e = load_pairs(X.data, at, inside, X.stride_n, 2 * PAIRS, OTHERS, REST, INTERLEAVED)
        gd, ge = load_pairs(G.data, up, inside, G.stride_d, 2 * PAIRS, OTHERS, REST, INTERLEAVED)
        d, slope_d = through_silu(d, SILU)
        e, slope_e = through_silu(e, SILU)
    if PAIRS > 0:
        c, s = load_angles(ANGLES, angles_at, position, live, PAIRS, HALF)
        ga, gb = rotate_back(ga, gb, c, s)
        a, slope_a = through_silu(a, SILU)
        b, slope_b = through_silu(b, SILU)
    if W is not None:
        if REST == 0:
            square, cross = tl.reduce((a * a + b * b, a * ga * wa + b * gb * wb), 2, add_pairs)
        elif PAIRS == 0:
            square, cross = tl.reduce((d * d + e * e, d * gd * wd + e * ge * we), 2, add_pairs)
        elif HALF == REST:
            squares = a * a + b * b + (d * d + e * e)
            products = a * ga * wa + b * gb * wb + (d * gd * wd + e * ge * we)
            square, cross = tl.reduce((squares, products), 2, add_pairs)
        else:
            square, cross = tl.reduce((a * a + b * b, a * ga * wa + b * gb * wb), 2, add_pairs)
            square += tl.sum(d * d + e * e, 2)
            cross += tl.sum(d * gd * wd + e * ge * we, 2)
        rstd = tl.rsqrt(square * (1.0 / D) + eps)
        pull = (cross * (1.0 / D) * (rstd * rstd))[:, :, None]  # mean(xhat * g * w) * rstd
        rstd = rstd[:, :, None]
        if PAIRS > 0:
            da += ga * (a * rstd)
            db += gb * (b * rstd)
            ga = rstd * (ga * wa - a * pull)
            gb = rstd * (gb * wb - b * pull)
        if REST > 0:
            dd += gd * (d * rstd)
            de += ge * (e * rstd)
            gd = rstd * (gd * wd - d * pull)
            ge = rstd * (ge * we - e * pull)
    if PAIRS > 0:
        store_pairs(DX, ga * slope_a, gb * slope_b, to, inside, 2 * PAIRS, HALF, INTERLEAVED)
    if REST > 0:
        store_pairs(DX, gd * slope_d, ge * slope_e, to + 2 * PAIRS, inside, OTHERS, REST, INTERLEAVED)
    return da, db, dd, de


@triton.jit
def copy_gradient(X, G, DX, at, up, to, inside, D: tl.constexpr, LANES: tl.constexpr, SILU: tl.constexpr):
    i = tl.arange(0, LANES)[None, None, :]
    inside = inside & (i < D)
    g = tl.load(G.data + up + i.to(tl.int64) * G.stride_d, inside, 0.0)
    if SILU:
        _, slope = through_silu(tl.load(X.data + at + i.to(tl.int64) * X.stride_n, inside, 0.0).to(tl.float32), SILU)
        g = g.to(tl.float32) * slope
    tl.store(DX + to + i, g.to(DX.dtype.element_ty), inside)


@triton.jit
def load_weight(W, D: tl.constexpr, COLUMNS: tl.constexpr):
    """A weight as a head's columns are: pairs that are rotated, then the others; one 0 for what there is not."""
    PAIRS: tl.constexpr = COLUMNS.PAIRS
    wa = tl.zeros([1, 1, 1], tl.float32)
    wb = tl.zeros([1, 1, 1], tl.float32)
    wd = tl.zeros([1, 1, 1], tl.float32)
    we = tl.zeros([1, 1, 1], tl.float32)
    if W is not None:
        if PAIRS > 0:
            wa, wb = load_vector_pairs(W, 2 * PAIRS, COLUMNS.HALF, COLUMNS.INTERLEAVED)
        if COLUMNS.REST > 0:
            wd, we = load_vector_pairs(W + 2 * PAIRS, D - 2 * PAIRS, COLUMNS.REST, COLUMNS.INTERLEAVED)
    return wa, wb, wd, we


@triton.jit
def zero_pair(T: tl.constexpr, HB: tl.constexpr, HALF: tl.constexpr):
    if HALF > 0:
        return tl.zeros([T, HB, HALF], tl.float32), tl.zeros([T, HB, HALF], tl.float32)
    else:
        return tl.zeros([1, 1, 1], tl.float32), tl.zeros([1, 1, 1], tl.float32)


@triton.jit
def zero_sums(T: tl.constexpr, HB: tl.constexpr, COLUMNS: tl.constexpr):
    a, b = zero_pair(T, HB, COLUMNS.HALF)
    d, e = zero_pair(T, HB, COLUMNS.REST)
    return a, b, d, e


@triton.jit
def store_pair_sums(PART, a, b, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr):
    if COUNT > 0:
        first, second, has_first, has_second = pair_columns(COUNT, a.shape[2], INTERLEAVED)
        tl.store(PART + first, tl.sum(tl.sum(a, 0), 0), has_first)
        tl.store(PART + second, tl.sum(tl.sum(b, 0), 0), has_second)


@triton.jit
def store_sums(PART, sums, D: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's share of dweight."""
    a, b, d, e = sums
    store_pair_sums(PART, a, b, 2 * COLUMNS.PAIRS, COLUMNS.INTERLEAVED)
    store_pair_sums(PART + 2 * COLUMNS.PAIRS, d, e, D - 2 * COLUMNS.PAIRS, COLUMNS.INTERLEAVED)


def _default(a) -> dict:
    # A thread holds 16 elements each of x, of its gradient, of the weight and of its sum: at 128 registers four programs of
    # four warps fit on an SM, which have 64 KB of bf16 loads in flight
    rows = max(a.T * a.HB, 2 * a.TK * a.KB)
    x, c = a.X.data, a.COLUMNS
    ahead = 2 * rows * 2 * (c.HALF * (c.PAIRS > 0) + c.REST) * (x.element_size() + a.G.q.data.element_size())
    STAGES = 3 if ahead + 4096 <= Target.at(x.device).shared_memory else 1
    even = not a.SILU and (c.HALF == c.REST or 0 in (c.PAIRS, c.REST)) and a.X.stride_n == 1  # others would spill
    return {"num_warps": 4, "STAGES": STAGES, **({"maxnreg": 128} if even else {})}


@kernel(
    grid=lambda a: (a.SLOTS * cdiv(a.H, a.HB) + a.KEY_SLOTS * cdiv(a.KV, a.KB),),
    tokens=("B", "L", "P", "SLOTS", "KEY_SLOTS"),
    tune_by=("D",),
    default=_default,
    candidates=lambda a: [
        _default(a),
        *({"num_warps": warps, "STAGES": stages} for warps in (4, 8) for stages in (1, 2)),
    ],
)
def qkv_split_backward(
    X, WEIGHTS, ANGLES, G, DX, PART, B, L, P, eps, SLOTS, KEY_SLOTS, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPED: tl.constexpr, SILU: tl.constexpr, BATCH_INNER: tl.constexpr, T: tl.constexpr,
    HB: tl.constexpr, TK: tl.constexpr, KB: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every SLOTS-th block of T tokens for its query heads, or every KEY_SLOTS-th of TK for its key heads and
    their values, and keeps its share of dweight in registers. PDL: the launch that sums the shares may begin, and waits by
    itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    QUERIES: tl.constexpr = (H + HB - 1) // HB
    W: tl.constexpr = (H + 2 * KV) * D
    asking = SLOTS * QUERIES
    if PART is not None:
        PART += tl.program_id(0).to(tl.int64) * D
    # Names of their own in each branch: a name of both must have one shape
    if tl.program_id(0) < asking:
        head_q = tl.program_id(0) // SLOTS * HB + tl.arange(0, HB)[None, :, None]
        column_q = column_of(head_q, "q", H, KV, D, GROUPED)
        weight_q = load_weight(WEIGHTS.q, D, COLUMNS)
        sums_q = zero_sums(T, HB, COLUMNS)
        for block in tl.range(tl.program_id(0) % SLOTS, tl.cdiv(B * L, T), SLOTS, num_stages=STAGES):
            row = block * T + tl.arange(0, T)
            batch, index, position = locate(row, B, L, P, ANGLES, BATCH_INNER)
            at_q = (batch * X.stride_b + index * X.stride_l)[:, None, None] + column_q * X.stride_n
            up_q = (batch * G.q.stride_b + index * G.q.stride_l)[:, None, None] + head_q.to(tl.int64) * G.q.stride_h
            to_q = (index * B + batch if BATCH_INNER else batch * L + index)[:, None, None] * W + column_q
            sums_q = split_gradient(
                X, WEIGHTS.q, G.q, DX, ANGLES, at_q, up_q, to_q, (row < B * L)[:, None, None] & (head_q < H),
                position * ANGLES.stride_l, position, row < B * L, eps, weight_q, sums_q, D, COLUMNS, SILU,
            )  # fmt: skip
        if WEIGHTS.q is not None and PART is not None:
            store_sums(PART, sums_q, D, COLUMNS)
    else:
        other = tl.program_id(0) - asking
        head_k = other // KEY_SLOTS * KB + tl.arange(0, KB)[None, :, None]
        column_k = column_of(head_k, "k", H, KV, D, GROUPED)
        column_v = column_of(head_k, "v", H, KV, D, GROUPED)
        weight_k = load_weight(WEIGHTS.k, D, COLUMNS)
        sums_k = zero_sums(TK, KB, COLUMNS)
        for block in tl.range(other % KEY_SLOTS, tl.cdiv(B * L, TK), KEY_SLOTS, num_stages=STAGES):
            row = block * TK + tl.arange(0, TK)
            batch, index, position = locate(row, B, L, P, ANGLES, BATCH_INNER)
            inside = (row < B * L)[:, None, None] & (head_k < KV)
            start = (batch * X.stride_b + index * X.stride_l)[:, None, None]
            token = (index * B + batch if BATCH_INNER else batch * L + index)[:, None, None] * W
            up_v = (batch * G.v.stride_b + index * G.v.stride_l)[:, None, None] + head_k.to(tl.int64) * G.v.stride_h
            copy_gradient(
                X, G.v, DX, start + column_v * X.stride_n, up_v, token + column_v, inside, D, COLUMNS.LANES, SILU
            )  # fmt: skip
            up_k = (batch * G.k.stride_b + index * G.k.stride_l)[:, None, None] + head_k.to(tl.int64) * G.k.stride_h
            sums_k = split_gradient(
                X, WEIGHTS.k, G.k, DX, ANGLES, start + column_k * X.stride_n, up_k, token + column_k, inside,
                position * ANGLES.stride_l, position, row < B * L, eps, weight_k, sums_k, D, COLUMNS, SILU,
            )  # fmt: skip
        if WEIGHTS.k is not None and PART is not None:
            store_sums(PART, sums_k, D, COLUMNS)


@kernel(
    grid=lambda a: (cdiv(a.D, a.BLOCK), 2),
    tokens=("Q", "K"),
    default=lambda a: {"ROWS": 256, "BLOCK": 8, "num_warps": 4, **({"launch_pdl": True} if a.PDL else {})},
)
def sum_shares(PART, DQ, DK, Q, K, D: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """DQ = the sum of the first Q rows of PART, DK of the K rows after them, always in the same order."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    keys = tl.program_id(1) == 1
    first = tl.where(keys, Q, 0)
    last = tl.where(keys, Q + K, Q)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(PART + row.to(tl.int64) * D + c[None, :], (row < last) & (c < D)[None, :], 0.0)
    out = tl.sum(total, axis=0)
    if DQ is not None:
        tl.store(DQ + c, out.to(DQ.dtype.element_ty), (c < D) & (not keys))
    if DK is not None:
        tl.store(DK + c, out.to(DK.dtype.element_ty), (c < D) & keys)


def blocks(a, size: int, share: int) -> dict:
    """The tokens and heads of a tile of about `size` elements, for queries and then for keys and values: these go together, in
    tiles that are `share` times smaller each."""
    c = a.COLUMNS
    rows = rows_of(size, 2 * (c.HALF * (c.PAIRS > 0) + c.REST))
    HB = block_of(a.H, min(8, rows))
    KB = block_of(a.KV, max(1, min(8, rows) // 2))
    # The fewer key heads, the more tokens: tiles of one head by T tokens would be loaded by single elements
    return {"T": max(1, rows // HB), "HB": HB, "TK": max(1, rows // share // KB), "KB": KB}


def units(a) -> int:
    """How many programs share a block of max(T, TK) tokens."""
    span = max(a.T, a.TK)
    return cdiv(a.H, a.HB) * (span // a.T) + cdiv(a.KV, a.KB) * (span // a.TK)


def slots_of(a, programs: int) -> tuple[int, int]:
    """How many programs each block of query heads and each block of key heads gets, by the bytes that they move."""
    queries, keys = 3 * a.HB, (6 if a.SILU else 5) * a.KB  # x, gradient and dx; values need no x
    whole = cdiv(a.H, a.HB) * queries + cdiv(a.KV, a.KB) * keys
    tokens = a.B * a.L
    slots = ((queries, a.T), (keys, a.TK))
    return tuple(max(1, min(programs * share // whole, cdiv(tokens, rows))) for share, rows in slots)


def gradients(
    x: Rows, weights: QKV, angles: Angles, grads: list[Tensor], sizes: tuple[int, int, int], eps: float, constants: dict,
    needs: frozenset[str],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dqkv, dq_weight, dk_weight). `sizes` are the batch, the length and how many positions have angles."""
    qkv, (B, L, P) = x.data, sizes
    a = SimpleNamespace(**constants)
    chosen = blocks(a, SIZE, KEY_SHARE)
    target = Target.at(qkv.device)
    slots = slots_of(SimpleNamespace(**constants, **chosen, B=B, L=L), PER_SM * target.sms)
    queries, keys = cdiv(a.H, chosen["HB"]) * slots[0], cdiv(a.KV, chosen["KB"]) * slots[1]
    dweights = [torch.empty_like(w) if n in needs else None for n, w in zip(("q_weight", "k_weight"), weights)]
    wanted = any(d is not None for d in dweights)
    part = torch.empty(queries + keys, a.D, dtype=torch.float32, device=qkv.device) if wanted else None
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    PDL = wanted and target.early_launch
    G = QKV(*(Heads(g, *g.stride()) for g in grads))
    qkv_split_backward(x, weights, angles, G, dqkv, part, B, L, P, eps, *slots, **constants, **chosen, PDL=PDL)
    if wanted:
        sum_shares(part, *dweights, queries, keys, D=a.D, PDL=PDL)
    return dqkv, *dweights
