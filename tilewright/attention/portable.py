"""Attention by portable kernels: tiles of queries in the forward, of queries and of keys in the two halves of the backward.

A program goes over the blocks of keys that its queries see. Blocks that all of them see need no mask, so that there are up to
three walks, of the left edge, the middle and the right edge. Head columns are two parts, each a power of two: 192 is 128 + 64.
The backward makes dq in one launch and dk, dv in another: each sum has one program, so that it is added up in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.activation import reciprocal
from ..device.dependent import begin_dependent
from ..device.products import add_product
from ..device.softmax import LN2, LOG2E, tanh
from ..op import single
from ..runtime.kernel import kernel
from .tiles import (
    Window,
    check_lengths,
    is_seen,
    keys_of,
    keys_seen,
    lengths,
    queries_seeing,
    row_keys,
    tile_at,
)

TOGETHER = 16  # heads whose tiles are launched side by side: their keys and values fit into the L2


class Heads(NamedTuple):
    """A tensor [batch, tokens, heads, columns] of any strides. Where that of columns is None they lie side by side, and the other
    strides count words of 16 bytes."""

    data: Any
    stride_b: Any
    stride_t: Any
    stride_h: Any
    stride_d: Any


class Scores(NamedTuple):
    """What is done to scores before the softmax: numbers, or None; the mask with its strides."""

    scale: Any
    softcap: Any
    slopes: Any
    mask: Any
    stride_b: Any
    stride_h: Any
    stride_l: Any
    stride_k: Any


class Sizes(NamedTuple):
    """Columns of q and k, and of v, each in two parts that are powers of two; the second may be 0."""

    D: int
    D0: int
    D1: int
    V: int
    V0: int
    V1: int


# ---- parts of tiles --------------------------------------------------------------------------------------------------


@triton.jit
def places_of(X, batch, head, token, column):
    """[n, m]: where columns [m] of tokens [n] of one head lie, in elements."""
    at = batch.to(tl.int64) * X.stride_b + head.to(tl.int64) * X.stride_h
    if X.stride_d is None:
        WORD: tl.constexpr = 128 // X.data.dtype.element_ty.primitive_bitwidth
        return (at + token.to(tl.int64)[:, None] * X.stride_t) * WORD + column.to(tl.int64)[None, :]
    else:
        return at + token.to(tl.int64)[:, None] * X.stride_t + column.to(tl.int64)[None, :] * X.stride_d


@triton.jit
def load_part(X, batch, head, token, live, COLUMNS: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH]: columns FROM to FROM + WIDTH, of COLUMNS, of tokens [n] of one head, numbers or codes; 0 where there is none. A
    number of no width, for Triton 3.6 returns no None."""
    if WIDTH == 0:
        return 0.0
    else:
        column = FROM + tl.arange(0, WIDTH)
        at = places_of(X, batch, head, token, column)
        inside = live[:, None]
        if FROM + WIDTH > COLUMNS:
            inside = inside & (column < COLUMNS)[None, :]
        ZERO: tl.constexpr = 0 if X.data.dtype.element_ty.is_int() else 0.0
        return tl.load(X.data + at, inside, ZERO)


@triton.jit
def store_part(X, batch, head, token, live, value, COLUMNS: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr):
    if WIDTH > 0:
        column = FROM + tl.arange(0, WIDTH)
        at = places_of(X, batch, head, token, column)
        tl.store(X.data + at, value.to(X.data.dtype.element_ty), live[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def no_part(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Zeros to add a part of that width to; a number where there is none, for loops carry no None."""
    if WIDTH == 0:
        return 0.0
    else:
        return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def product_of_rows(a0, a1, b0, b1, SECOND: tl.constexpr, PIECES: tl.constexpr):
    """a @ b.T, [n, m], of rows in two parts."""
    total = add_product(tl.zeros([a0.shape[0], b0.shape[0]], tl.float32), a0, tl.trans(b0), PIECES, PIECES)
    if SECOND > 0:
        total = add_product(total, a1, tl.trans(b1), PIECES, PIECES)
    return total


@triton.jit
def add_part(total, a, b, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """total + a @ b of a part [k, WIDTH] of b; a is rounded to what b is, unless that is fp32."""
    if WIDTH == 0:
        return total
    else:
        return add_product(total, a.to(b.dtype), b, PIECES, PIECES)


@triton.jit
def used_rows(used, t, WIDTH: tl.constexpr):
    """A part of a tile with 0 for the rows that are not used, which may hold NaN."""
    if WIDTH == 0:
        return t
    else:
        return tl.where(used[:, None], t, 0.0)


# ---- scores ----------------------------------------------------------------------------------------------------------


@triton.jit
def bend(SCORES, raw):
    """(scores in base 2 after scale and softcap, the softcap's slope or 1) of products q . k."""
    if SCORES.softcap is None:
        return raw * (SCORES.scale * LOG2E), 1.0
    else:
        u = raw * (SCORES.scale / SCORES.softcap)
        # The slope is 1 - tanh(u)**2, which would cancel where scores are far above the cap; this is as precise there
        e = tl.exp2(tl.abs(u) * (-2.0 * LOG2E))
        r = reciprocal(1.0 + e)
        return tanh(u) * (SCORES.softcap * LOG2E), 4.0 * e * (r * r)


@triton.jit
def shape_scores(SCORES, s, ok, batch, head, query, key, position, j, live):
    """(scores after slopes and mask, what is seen of them): [n, m] or [m, n], as the indices are laid out."""
    if SCORES.slopes is not None:
        s -= tl.load(SCORES.slopes + head).to(tl.float32) * LOG2E * tl.abs(position - j).to(tl.float32)
    if SCORES.mask is not None:
        at = batch.to(tl.int64) * SCORES.stride_b + head.to(tl.int64) * SCORES.stride_h
        at = at + query.to(tl.int64) * SCORES.stride_l + key.to(tl.int64) * SCORES.stride_k
        inside = ok & live
        if SCORES.mask.dtype.element_ty == tl.int1:
            ok = ok & (tl.load(SCORES.mask + at, inside, 0) != 0)
        else:
            s += tl.load(SCORES.mask + at, inside, 0.0).to(tl.float32) * LOG2E
    return s, ok


@triton.jit
def load_lse(LSE, at, live):
    """In base 2; of rows that saw nothing, or only scores of -inf, infinite: their weights are 0, and not exp(-inf + inf)."""
    lse = tl.load(LSE + at, live, 0.0) * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def weight(s, lse):
    """exp2(s - lse), which is at most 1: fp32 keeps both to less than that where they are above 2**23."""
    return tl.exp2(tl.minimum(s - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))


def warps(columns: int) -> Callable[[Any], dict[str, int]]:
    """Four for up to so many columns of 16 bits, eight for more."""
    return lambda a: {"num_warps": 4 if columns >= a.SIZES.D0 + a.SIZES.V0 and a.PIECES == 1 else 8}


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def walk_keys(
    acc0, acc1, top, total, q0, q1, K, V, SCORES, WINDOW, tile, batch, head, kv_head, row, limit, shift, start, stop, from_, to,
    EDGE: tl.constexpr, PLAIN: tl.constexpr, SIZES: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Take in the keys of blocks from `from_` to `to`. EDGE: some are seen by some queries alone; none outside of [start, stop) is
    seen by any, and those are not read. PLAIN: all others are seen by some."""
    for n in tl.range(from_, to, BLOCK_N, num_stages=STAGES):
        j = n + tl.arange(0, BLOCK_N)
        token = tile.first_k + j
        there = (j >= start) & (j < stop)
        k0 = load_part(K, batch, kv_head, token, there, SIZES.D, 0, SIZES.D0)
        k1 = load_part(K, batch, kv_head, token, there, SIZES.D, SIZES.D0, SIZES.D1)
        s, _ = bend(SCORES, product_of_rows(q0, q1, k0, k1, SIZES.D1, PIECES))
        position = (row + shift)[:, None]
        ok = is_seen(WINDOW, position, j[None, :], limit[:, None])
        s, ok = shape_scores(
            SCORES, s, ok, batch, head, (tile.first_q + row)[:, None], token[None, :], position, j[None, :],
            (row < tile.count_q)[:, None],
        )  # fmt: skip
        if EDGE:
            s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        top = new
        v0 = load_part(V, batch, kv_head, token, there, SIZES.V, 0, SIZES.V0)
        v1 = load_part(V, batch, kv_head, token, there, SIZES.V, SIZES.V0, SIZES.V1)
        if not PLAIN:
            used = tl.max((ok & (row < tile.count_q)[:, None]).to(tl.int32), 0) > 0
            v0 = used_rows(used, v0, SIZES.V0)
            v1 = used_rows(used, v1, SIZES.V1)
        acc0 = add_part(acc0 * fade[:, None], p, v0, SIZES.V0, PIECES)
        if SIZES.V1 > 0:
            acc1 = add_part(acc1 * fade[:, None], p, v1, SIZES.V1, PIECES)
    return acc0, acc1, top, total


@triton.jit
def unit_of(pid, TILES, HEADS, BATCH, TOGETHER: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(tile, head, batch) of a program: the tiles of TOGETHER heads side by side, the last first where these are the longest."""
    units = HEADS * BATCH
    band = pid // (TILES * TOGETHER)
    within = pid - band * (TILES * TOGETHER)
    wide = tl.minimum(TOGETHER, units - band * TOGETHER)
    tile = within // wide
    unit = band * TOGETHER + within - tile * wide
    return TILES - 1 - tile if LAST_FIRST else tile, unit % HEADS, unit // HEADS


@kernel(
    grid=lambda a: (a.TILES * a.HEADS * a.BATCH,), tokens=("L", "KEYS", "HEADS", "GROUP", "TILES", "BATCH"),
    default=warps(512), dependent=True,
)  # fmt: skip
def attention_forward(
    Q, K, V, O, LSE, SINK, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, SIZES: tl.constexpr,
    PLAIN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """PLAIN: nothing but the window and the number of keys says what is seen, so that blocks between its edges need no mask. A
    mask, or a number of keys for each row, may hide a key from all queries, and then a NaN with it."""
    begin_dependent(DEPENDENT)
    index, head, batch = unit_of(tl.program_id(0), TILES, HEADS, BATCH, TOGETHER, WINDOW.right is not None)
    kv_head = head // GROUP
    tile = tile_at(LENGTHS, index, batch, L, KEYS, BLOCK_M)
    if tile.start < tile.count_q:
        row = tile.start + tl.arange(0, BLOCK_M)
        live = row < tile.count_q
        token = tile.first_q + row
        count, wrong = keys_of(LENGTHS, tile)
        shift = count - tile.count_q
        limit, wrong_row = row_keys(LENGTHS, tile, batch, row, count)
        last = tl.minimum(tile.start + BLOCK_M, tile.count_q) - 1
        start, stop, whole_start, whole_stop = keys_seen(WINDOW, shift, count, tile.start, last)
        if LENGTHS.stride_l is not None:
            stop = tl.maximum(start, tl.minimum(stop, tl.max(tl.where(live, limit, 0), 0)))
        q0 = load_part(Q, batch, head, token, live, SIZES.D, 0, SIZES.D0)
        q1 = load_part(Q, batch, head, token, live, SIZES.D, SIZES.D0, SIZES.D1)
        acc0 = no_part(BLOCK_M, SIZES.V0)
        acc1 = no_part(BLOCK_M, SIZES.V1)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINK is not None:  # one more key, whose value is 0
            sink = tl.load(SINK + head).to(tl.float32) * LOG2E
            top = tl.zeros([BLOCK_M], tl.float32) + sink
            total += tl.where(sink == float("-inf"), 0.0, 1.0)
        first = start // BLOCK_N * BLOCK_N
        end = stop
        if PLAIN:
            middle = tl.minimum(
                tl.maximum(tl.cdiv(whole_start, BLOCK_N) * BLOCK_N, first), tl.cdiv(stop, BLOCK_N) * BLOCK_N
            )
            after = tl.maximum(middle, whole_stop // BLOCK_N * BLOCK_N)
            if WINDOW.left is not None:
                acc0, acc1, top, total = walk_keys(
                    acc0, acc1, top, total, q0, q1, K, V, SCORES, WINDOW, tile, batch, head, kv_head, row, limit, shift, start,
                    stop, first, tl.minimum(middle, end), True, PLAIN, SIZES, BLOCK_N, PIECES, STAGES,
                )  # fmt: skip
            acc0, acc1, top, total = walk_keys(
                acc0, acc1, top, total, q0, q1, K, V, SCORES, WINDOW, tile, batch, head, kv_head, row, limit, shift, start, stop,
                middle, tl.minimum(after, end), False, PLAIN, SIZES, BLOCK_N, PIECES, STAGES,
            )  # fmt: skip
            first = after
        acc0, acc1, top, total = walk_keys(
            acc0, acc1, top, total, q0, q1, K, V, SCORES, WINDOW, tile, batch, head, kv_head, row, limit, shift, start, stop,
            first, end, True, PLAIN, SIZES, BLOCK_N, PIECES, STAGES,
        )  # fmt: skip
        empty = total == 0.0
        share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
        lse = tl.where(empty, float("-inf"), top * LN2 + tl.log(tl.where(empty, 1.0, total)))
        poison = tl.where(wrong_row | wrong, float("nan"), 0.0)
        store_part(O, batch, head, token, live, acc0 * share[:, None] + poison[:, None], SIZES.V, 0, SIZES.V0)
        if SIZES.V1 > 0:
            store_part(
                O, batch, head, token, live, acc1 * share[:, None] + poison[:, None], SIZES.V, SIZES.V0, SIZES.V1
            )
        at = (batch.to(tl.int64) * HEADS + head) * L + token
        tl.store(LSE + at, lse + poison, live)


# ---- backward --------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (cdiv(a.L, a.ROWS), a.HEADS, a.BATCH), tokens=("L", "HEADS", "BATCH"),
    default=lambda a: {"ROWS": max(1, 4096 // a.BLOCK), "num_warps": 4},
)  # fmt: skip
def attention_delta(
    O, DO, DLSE, DELTA, L, HEADS, BATCH, stride_b, stride_h, stride_l, V, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """DELTA [batch, heads, L]: the sum of o * do over each row, less the gradient of its lse."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    live = token < L
    column = tl.arange(0, BLOCK)
    inside = live[:, None] & (column < V)[None, :]
    o = tl.load(O.data + places_of(O, batch, head, token, column), inside, 0.0).to(tl.float32)
    do = tl.load(DO.data + places_of(DO, batch, head, token, column), inside, 0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if DLSE is not None:
        at = batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + token.to(tl.int64) * stride_l
        delta -= tl.load(DLSE + at, live, 0.0).to(tl.float32)
    tl.store(DELTA + (batch.to(tl.int64) * HEADS + head) * L + token, delta, live)


@kernel(grid=lambda a: (a.HEADS,), tokens=("L", "HEADS", "BATCH"), default=lambda a: {"BLOCK": 1024, "num_warps": 4})
def attention_sink_gradient(SINK, LSE, DELTA, DSINK, L, HEADS, BATCH, BLOCK: tl.constexpr):
    """DSINK [heads]: minus the sum over all rows of the sink's weight times delta, in the order of the rows."""
    head = tl.program_id(0)
    sink = tl.load(SINK + head).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for batch in range(BATCH):
        base = (batch.to(tl.int64) * HEADS + head) * L
        for first in range(0, L, BLOCK):
            row = first + tl.arange(0, BLOCK)
            lse = tl.load(LSE + base + row, row < L, float("inf"))
            delta = tl.load(DELTA + base + row, row < L, 0.0)
            # A sink of -inf weighs nothing, where its row sees nothing else too
            total += tl.where((row < L) & (lse != float("-inf")), tl.exp2((sink - lse) * LOG2E) * delta, 0.0)
    tl.store(DSINK + head, -tl.sum(total, 0))


@kernel(
    grid=lambda a: (a.TILES * a.HEADS * a.BATCH,), tokens=("L", "KEYS", "HEADS", "GROUP", "TILES", "BATCH"),
    default=warps(256),
)  # fmt: skip
def attention_backward_queries(
    Q, K, V, DO, DQ, LSE, DELTA, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, SIZES: tl.constexpr,
    PLAIN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, over the keys that they see."""
    index, head, batch = unit_of(tl.program_id(0), TILES, HEADS, BATCH, TOGETHER, WINDOW.right is not None)
    kv_head = head // GROUP
    tile = tile_at(LENGTHS, index, batch, L, KEYS, BLOCK_M)
    if tile.start < tile.count_q:
        row = tile.start + tl.arange(0, BLOCK_M)
        live = row < tile.count_q
        token = tile.first_q + row
        count, _ = keys_of(LENGTHS, tile)
        shift = count - tile.count_q
        limit, _ = row_keys(LENGTHS, tile, batch, row, count)
        last = tl.minimum(tile.start + BLOCK_M, tile.count_q) - 1
        start, stop, _, _ = keys_seen(WINDOW, shift, count, tile.start, last)
        if LENGTHS.stride_l is not None:
            stop = tl.maximum(start, tl.minimum(stop, tl.max(tl.where(live, limit, 0), 0)))
        q0 = load_part(Q, batch, head, token, live, SIZES.D, 0, SIZES.D0)
        q1 = load_part(Q, batch, head, token, live, SIZES.D, SIZES.D0, SIZES.D1)
        do0 = load_part(DO, batch, head, token, live, SIZES.V, 0, SIZES.V0)
        do1 = load_part(DO, batch, head, token, live, SIZES.V, SIZES.V0, SIZES.V1)
        at = (batch.to(tl.int64) * HEADS + head) * L + token
        lse = load_lse(LSE, at, live)
        delta = tl.load(DELTA + at, live, 0.0)
        dq0 = no_part(BLOCK_M, SIZES.D0)
        dq1 = no_part(BLOCK_M, SIZES.D1)
        position = (row + shift)[:, None]
        for n in tl.range(start // BLOCK_N * BLOCK_N, stop, BLOCK_N, num_stages=STAGES):
            j = n + tl.arange(0, BLOCK_N)
            key = tile.first_k + j
            there = (j >= start) & (j < stop)
            k0 = load_part(K, batch, kv_head, key, there, SIZES.D, 0, SIZES.D0)
            k1 = load_part(K, batch, kv_head, key, there, SIZES.D, SIZES.D0, SIZES.D1)
            v0 = load_part(V, batch, kv_head, key, there, SIZES.V, 0, SIZES.V0)
            v1 = load_part(V, batch, kv_head, key, there, SIZES.V, SIZES.V0, SIZES.V1)
            s, slope = bend(SCORES, product_of_rows(q0, q1, k0, k1, SIZES.D1, PIECES))
            ok = is_seen(WINDOW, position, j[None, :], limit[:, None]) & live[:, None]
            s, ok = shape_scores(
                SCORES, s, ok, batch, head, token[:, None], key[None, :], position, j[None, :], live[:, None]
            )
            p = weight(s, lse[:, None])
            ds = p * (product_of_rows(do0, do1, v0, v1, SIZES.V1, PIECES) - delta[:, None]) * slope
            ds = tl.where(ok, ds, 0.0)
            if not PLAIN:
                used = tl.max(ok.to(tl.int32), 0) > 0
                k0 = used_rows(used, k0, SIZES.D0)
                k1 = used_rows(used, k1, SIZES.D1)
            dq0 = add_part(dq0, ds, k0, SIZES.D0, PIECES)
            dq1 = add_part(dq1, ds, k1, SIZES.D1, PIECES)
        store_part(DQ, batch, head, token, live, dq0 * SCORES.scale, SIZES.D, 0, SIZES.D0)
        if SIZES.D1 > 0:
            store_part(DQ, batch, head, token, live, dq1 * SCORES.scale, SIZES.D, SIZES.D0, SIZES.D1)


@kernel(
    grid=lambda a: (a.TILES * a.KV_HEADS * a.BATCH,), tokens=("L", "KEYS", "KV_HEADS", "GROUP", "TILES", "BATCH"),
    default=warps(128),
)  # fmt: skip
def attention_backward_keys(
    Q, K, V, DO, DK, DV, LSE, DELTA, SCORES, WINDOW, LENGTHS, L, KEYS, KV_HEADS, GROUP, BATCH, TILES, SIZES: tl.constexpr,
    PLAIN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, over the queries that see them: those of one query head after the other."""
    index, kv_head, batch = unit_of(tl.program_id(0), TILES, KV_HEADS, BATCH, TOGETHER, False)
    tile = tile_at(LENGTHS, index, batch, L, KEYS, BLOCK_N)
    if tile.start < tile.count_k:
        j = tile.start + tl.arange(0, BLOCK_N)
        live = j < tile.count_k
        key = tile.first_k + j
        count, wrong = keys_of(LENGTHS, tile)
        shift = count - tile.count_q
        last = tl.minimum(tile.start + BLOCK_N, count) - 1
        start, stop = queries_seeing(WINDOW, shift, tile.count_q, tile.start, last)
        stop = tl.where(last < tile.start, start, stop)
        there = j < count
        k0 = load_part(K, batch, kv_head, key, there, SIZES.D, 0, SIZES.D0)
        k1 = load_part(K, batch, kv_head, key, there, SIZES.D, SIZES.D0, SIZES.D1)
        v0 = load_part(V, batch, kv_head, key, there, SIZES.V, 0, SIZES.V0)
        v1 = load_part(V, batch, kv_head, key, there, SIZES.V, SIZES.V0, SIZES.V1)
        dk0 = no_part(BLOCK_N, SIZES.D0)
        dk1 = no_part(BLOCK_N, SIZES.D1)
        dv0 = no_part(BLOCK_N, SIZES.V0)
        dv1 = no_part(BLOCK_N, SIZES.V1)
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            base = (batch.to(tl.int64) * (KV_HEADS * GROUP) + head) * L + tile.first_q
            for m in tl.range(start // BLOCK_M * BLOCK_M, stop, BLOCK_M, num_stages=STAGES):
                row = m + tl.arange(0, BLOCK_M)
                seeing = (row >= start) & (row < stop)
                token = tile.first_q + row
                q0 = load_part(Q, batch, head, token, seeing, SIZES.D, 0, SIZES.D0)
                q1 = load_part(Q, batch, head, token, seeing, SIZES.D, SIZES.D0, SIZES.D1)
                do0 = load_part(DO, batch, head, token, seeing, SIZES.V, 0, SIZES.V0)
                do1 = load_part(DO, batch, head, token, seeing, SIZES.V, SIZES.V0, SIZES.V1)
                lse = load_lse(LSE, base + row, seeing)
                delta = tl.load(DELTA + base + row, seeing, 0.0)
                limit, wrong_row = row_keys(LENGTHS, tile, batch, row, count)
                s, slope = bend(SCORES, product_of_rows(k0, k1, q0, q1, SIZES.D1, PIECES))
                position = (row + shift)[None, :]
                ok = is_seen(WINDOW, position, j[:, None], limit[None, :]) & seeing[None, :]
                s, ok = shape_scores(
                    SCORES, s, ok, batch, head, token[None, :], key[:, None], position, j[:, None], seeing[None, :]
                )
                p = tl.where(ok, weight(s, lse[None, :]), 0.0)
                if not PLAIN:
                    used = tl.max(ok.to(tl.int32), 0) > 0
                    q0 = used_rows(used, q0, SIZES.D0)
                    q1 = used_rows(used, q1, SIZES.D1)
                    do0 = used_rows(used, do0, SIZES.V0)
                    do1 = used_rows(used, do1, SIZES.V1)
                dv0 = add_part(dv0, p, do0, SIZES.V0, PIECES)
                dv1 = add_part(dv1, p, do1, SIZES.V1, PIECES)
                ds = p * (product_of_rows(v0, v1, do0, do1, SIZES.V1, PIECES) - delta[None, :]) * slope
                ds = tl.where(ok, ds, 0.0)
                dk0 = add_part(dk0, ds, q0, SIZES.D0, PIECES)
                dk1 = add_part(dk1, ds, q1, SIZES.D1, PIECES)
        store_part(DK, batch, kv_head, key, live, dk0 * SCORES.scale, SIZES.D, 0, SIZES.D0)
        store_part(DV, batch, kv_head, key, live, dv0, SIZES.V, 0, SIZES.V0)
        if SIZES.D1 > 0:
            store_part(DK, batch, kv_head, key, live, dk1 * SCORES.scale, SIZES.D, SIZES.D0, SIZES.D1)
        if SIZES.V1 > 0:
            store_part(DV, batch, kv_head, key, live, dv1, SIZES.V, SIZES.V0, SIZES.V1)


# ---- host ------------------------------------------------------------------------------------------------------------


def parts_of(width: int, least: int = 16) -> tuple[int, int]:
    """A width as a power of two and what is left, rounded up to one: both at least `least`, or 0. Products need 16."""
    first = power_of_two(width)
    if first != width and first > least:
        first //= 2
    first = max(least, first)
    rest = max(0, width - first)
    return first, max(least, power_of_two(rest)) if rest else 0


def sizes_of(q: Tensor, v: Tensor, least: int = 16) -> Sizes:
    (D, V) = q.shape[-1], v.shape[-1]
    return Sizes(D, *parts_of(D, least), V, *parts_of(V, least))


def narrowest(q: Tensor) -> int:
    """The narrowest part of columns. Products of whole warpgroups get rows of 128 bytes: tiles of other widths are laid out in
    other ways, and ptxas 12.8 may take one's place in memory for that of another (`toolchain/registers.py`)."""
    return 64 if q.dtype != torch.float32 and Target.at(q.device).wgmma else 16


class Blocks(NamedTuple):
    own: int  # rows that a program holds
    other: int  # rows that it takes in at a time
    stages: int
    most: int  # stages that shared memory has room for


def blocks(q: Tensor, sizes: Sizes, widest: int, sums: int = 1) -> Blocks:
    """Tiles that registers and shared memory take, for a program that keeps so many `sums`, the widest of `widest` columns."""
    columns = sizes.D0 + sizes.D1 + sizes.V0 + sizes.V1
    if q.dtype == torch.float32:  # which is three bf16 numbers in registers and shared memory
        return Blocks(32 if columns <= 256 else 16, 16, 1, 1)
    memory = Target.at(q.device).shared_memory // (2 * columns)  # in rows
    own, other = (64 if columns <= 640 else 32), (64 if widest <= 128 else 32) // sums
    while own + other > memory and own > 16:
        own, other = own // 2, max(16, other // 2)
    most = max(1, (memory - own) // other)
    return Blocks(own, other, min(4 - sums, most), most)


def heads_of(t: Tensor) -> Heads:
    return Heads(t, *t.stride())


def in_words(t: Tensor) -> Heads:
    """`heads_of`, as `places_of` takes it. Of strides the compiler knows whether they are multiples of 16, no more: it would load
    heads of 72 columns number by number, and no copy of keys to come would be under way. Of strides in words it knows enough."""
    word, (*strides, step) = 16 // t.element_size(), t.stride()
    if step != 1 or any(stride % word for stride in strides) or not any(stride % 16 for stride in strides):
        return heads_of(t)
    return Heads(t, *(stride // word for stride in strides), None)


def scores_of(a: SimpleNamespace) -> Scores:
    scale = 1.0 / math.sqrt(a.q.shape[-1]) if a.scale is None else float(a.scale)
    strides = (None,) * 4
    if a.mask is not None:
        whole = (a.q.shape[0], a.q.shape[2], a.q.shape[1], a.k.shape[1])
        strides = tuple(0 if n == 1 and m != 1 else s for s, n, m in zip(a.mask.stride(), a.mask.shape, whole))
    slopes = None if a.slopes is None else a.slopes.contiguous()
    return Scores(scale, float(a.softcap) or None, slopes, a.mask, *strides)


def window_of(a: SimpleNamespace) -> Window:
    return window_between(a.left, 0 if a.causal else a.right, a.q.shape[1], a.k.shape[1])


def window_between(left: int | None, right: int | None, length: int, keys: int) -> Window:
    """The window, less the sides of it that reach past every key: those need no mask, and no numbers of more than 32 bits."""
    wide_left, wide_right = (side is None or side >= far for side, far in ((left, keys), (right, keys + length)))
    return Window(None if wide_left else left, None if wide_right else right)


def constants_of(a: SimpleNamespace) -> dict[str, Any]:
    """The constants that all three kernels take."""
    plain = a.mask is None and (a.kv_len is None or a.kv_len.dim() == 1)
    pieces = 3 if a.q.dtype == torch.float32 else 1
    return {"SIZES": sizes_of(a.q, a.v, narrowest(a.q)), "PLAIN": plain, "TOGETHER": TOGETHER, "PIECES": pieces}


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether shared memory holds tiles of 16 rows: in fp32 each number is three of 16 bits."""
    sizes = sizes_of(a.q, a.v, narrowest(a.q))
    room = 2 * 16 * (sizes.D0 + sizes.D1 + sizes.V0 + sizes.V1) * (6 if a.q.dtype == torch.float32 else 2)
    return single(target, a) and room <= target.shared_memory


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k=k, v=v, **options)
    batch, length, heads, _ = q.shape
    o = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    check_lengths("attention", q, k, a.kv_len, a.cu_seqlens_q, a.cu_seqlens_k)
    if not lse.numel():
        return o, lse
    sizes = sizes_of(q, v, narrowest(q))
    block = blocks(q, sizes, sizes.V)
    how, tiles = lengths(a.cu_seqlens_q, a.cu_seqlens_k, length, k.shape[1], a.kv_len, block.own, False)
    # Programs that have an SM each hide nothing of each other's waits; others would be one fewer on it
    alone = tiles * heads * batch <= Target.at(q.device).sms
    attention_forward(
        in_words(q), in_words(k), in_words(v), in_words(o), lse, None if a.sink is None else a.sink.contiguous(), scores_of(a),
        window_of(a), how, length, k.shape[1], heads, heads // k.shape[2], batch, tiles, **constants_of(a),
        BLOCK_M=block.own, BLOCK_N=block.other, STAGES=min(block.stages + alone, block.most),
    )  # fmt: skip
    return o, lse


def backward(saved: SimpleNamespace, do: Tensor | None, dlse: Tensor | None) -> tuple:
    a, needs = saved, saved.needs
    q, k, v = a.q, a.k, a.v
    batch, length, heads, _ = q.shape
    if do is None:
        do = torch.zeros(1, dtype=q.dtype, device=q.device).expand(a.o.shape)
    delta = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    dq, dk, dv, dsink = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if n in needs else None
        for n, t in (("q", q), ("k", k), ("v", v), ("sink", a.sink))
    )
    if not delta.numel():
        return dq, *(None if t is None else t.zero_() for t in (dk, dv, dsink))
    strides = (0, 0, 0) if dlse is None else dlse.stride()
    width = max(16, power_of_two(v.shape[-1]))
    attention_delta(in_words(a.o), in_words(do), dlse, delta, length, heads, batch, *strides, v.shape[-1], BLOCK=width)
    sizes, kv_heads = sizes_of(q, v, narrowest(q)), k.shape[2]
    if dsink is not None:
        dsink = torch.empty(heads, dtype=torch.float32, device=q.device)
        attention_sink_gradient(a.sink.contiguous(), a.lse, delta, dsink, length, heads, batch)
        dsink = dsink.to(a.sink.dtype)
    given = (in_words(q), in_words(k), in_words(v), in_words(do))
    if dq is not None:
        block = blocks(q, sizes, sizes.D)
        how, tiles = lengths(a.cu_seqlens_q, a.cu_seqlens_k, length, k.shape[1], a.kv_len, block.own, False)
        attention_backward_queries(
            *given, in_words(dq), a.lse, delta, scores_of(a), window_of(a), how, length, k.shape[1], heads, heads // kv_heads,
            batch, tiles, **constants_of(a), BLOCK_M=block.own, BLOCK_N=block.other, STAGES=block.stages,
        )  # fmt: skip
    if (dk is not None or dv is not None) and k.numel():
        # Both come from one walk: what is not wanted is a small part of it
        dk, dv = (
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if d is None else d for t, d in ((k, dk), (v, dv))
        )
        block = blocks(q, sizes, max(sizes.D, sizes.V), sums=2)
        how, tiles = lengths(a.cu_seqlens_k, a.cu_seqlens_q, k.shape[1], length, a.kv_len, block.own, True)
        attention_backward_keys(
            *given, in_words(dk), in_words(dv), a.lse, delta, scores_of(a), window_of(a), how, length, k.shape[1], kv_heads,
            heads // kv_heads, batch, tiles, **constants_of(a), BLOCK_M=block.other, BLOCK_N=block.own, STAGES=block.stages,
        )  # fmt: skip
    return dq, dk if "k" in needs else None, dv if "v" in needs else None, dsink


def backward_of_o(saved: SimpleNamespace, do: Tensor) -> tuple:
    return backward(saved, do, None)
