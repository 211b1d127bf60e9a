"""Attention over caches by portable kernels: one launch over parts of the keys, and one that merges them where there are several.

A tile holds the query heads that share a key head, and several tokens of them, so that each key is read once for all. A program
goes over one part of the keys of one sequence for one tile. Parts end at multiples of `split`, and blocks of keys begin where
parts do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.dependent import ask_l2, await_last, let_next_begin
from ..device.products import add_product
from ..device.softmax import LN2, LOG2E
from ..runtime.kernel import kernel
from .cache_parts import merge, part_length, room_for
from .cache_read import (
    LIFT,
    Columns,
    as_codes,
    bending_of,
    capacity_of,
    check_keys,
    columns_of,
    find,
    load_cached,
    load_part,
    load_scale,
    look_up,
    numbers,
    numbers_of_pairs,
    pairs_of,
    scales_of,
    table_of,
    value_columns,
    width_of,
    window_of,
)
from .portable import bend, heads_of, narrowest
from .tiles import Lengths, either, is_drawn, is_seen, keys_seen, lengths, tile_at


class Pieces(NamedTuple):
    """How many bf16 pieces the factors of both products are (`device/products.py`)."""

    Q: int
    K: int
    P: int
    V: int


class Half(NamedTuple):
    """Which products are of fp16 numbers: queries times keys, weights times values. Codes are, where q has 16 bits: an instruction
    makes fp16 of two e4m3 codes, and three slow ones more bf16 of that."""

    K: bool
    V: bool


# ---- queries ---------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a tile: whose they are, where they stand among the keys, and what is theirs alone."""

    batch: Any
    head: Any
    token: Any
    live: Any
    position: Any
    bits: Any  # of a tree
    slope: Any  # in base 2


class Seen(NamedTuple):
    """[start, stop) of the keys of a part that any row sees, and [lower, upper) of the blocks that all of them see whole. Blocks
    begin at `first`. Key j is a draft from `shift` on; `drafts` are those that any row sees."""

    first: Any
    start: Any
    stop: Any
    lower: Any
    upper: Any
    count: Any
    shift: Any
    drafts: Any


@triton.jit
def load_queries(Q, rows, ALL: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH]: columns of q, of a head and a token for each row."""
    column = FROM + tl.arange(0, WIDTH)
    at = rows.batch.to(tl.int64) * Q.stride_b + rows.token.to(tl.int64) * Q.stride_t
    at = (at + rows.head.to(tl.int64) * Q.stride_h)[:, None] + column.to(tl.int64)[None, :] * Q.stride_d
    return tl.load(Q.data + at, rows.live[:, None] & (column < ALL)[None, :], 0.0)


@triton.jit
def in_half(q, COUNT: tl.constexpr):
    """(bf16 queries in parts times a power of two for each row, in fp16; what takes it back, fp32 [n]). The largest of a row is
    below 2**15 then, and only what is 2**31 times smaller loses a digit. A row's infinities and NaN stay."""
    top = tl.zeros([q[0].shape[0]], tl.float32)
    for i in tl.static_range(COUNT):
        top = tl.maximum(top, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    exponent = tl.maximum((top.to(tl.int32, bitcast=True) >> 23) - 14, 1)  # so that both powers are normal numbers
    back = (exponent << 23).to(tl.float32, bitcast=True)
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = ()
    for i in tl.static_range(COUNT):
        scaled = scaled + ((q[i].to(tl.float32) * power[:, None]).to(tl.float16),)
    return scaled, back


@triton.jit
def part_seen(WINDOW, TREE, apart, rows, count, shift, first, last, begin, end, BLOCK: tl.constexpr):
    """What queries first to last see of the keys from `begin` to `end`. Unless whole blocks are taken `apart`, there are none."""
    start, stop, whole_start, whole_stop = keys_seen(WINDOW, shift, count, first, last)
    start = tl.maximum(start, begin)
    stop = tl.minimum(stop, end)
    whole_stop = tl.where(apart, whole_stop, 0)
    drafts = tl.zeros([], tl.int64)
    if TREE is not None:
        whole_stop = tl.minimum(whole_stop, shift)
        drafts = tl.reduce(tl.where(rows.live, rows.bits, 0), 0, either)
    block = begin + tl.maximum(start - begin, 0) // BLOCK * BLOCK
    lower = begin + tl.cdiv(tl.maximum(tl.maximum(whole_start, start) - begin, 0), BLOCK) * BLOCK
    upper = begin + tl.maximum(tl.minimum(whole_stop, stop) - begin, 0) // BLOCK * BLOCK
    any_whole = lower < upper
    lower, upper = tl.where(any_whole, lower, block), tl.where(any_whole, upper, block)
    return Seen(block, start, stop, lower, upper, count, shift, drafts)


# ---- a part of the keys ----------------------------------------------------------------------------------------------


@triton.jit
def scores_of(
    SCORES, q, back, turned, k, rope, KS, page, place, kv_head, live, KEYS: tl.constexpr, PIECES: tl.constexpr
):
    """The scores of a block of keys, in base 2, after scale and softcap: [n, m]. q and k are in parts; `back` times their products
    are meant. Where `rope` has the last columns of the keys, `turned` are those of q."""
    COUNT: tl.constexpr = KEYS.COUNT
    raw = tl.zeros([q[0].shape[0], k[0].shape[0]], tl.float32)
    if KS.stride_c is None:
        for i in tl.static_range(COUNT):
            raw = add_product(raw, q[i], tl.trans(k[i]), PIECES.Q, PIECES.K)
        if KS.stride_p is not None:
            raw *= load_scale(KS, page, place, kv_head, live, 0)[None, :]
    else:
        for i in tl.static_range(COUNT):
            one = add_product(tl.zeros_like(raw), q[i], tl.trans(k[i]), PIECES.Q, PIECES.K)
            raw += one * load_scale(KS, page, place, kv_head, live, i)[None, :]
    if back is not None:
        raw *= back[:, None]
    if rope is not None:
        raw = add_product(raw, turned, tl.trans(rope), PIECES.Q, PIECES.Q)
    s, _ = bend(SCORES, raw)
    return s


@triton.jit
def weights(p, dtype: tl.constexpr, PIECES: tl.constexpr, HALF: tl.constexpr):
    """Weights as they are multiplied: rounded to what the values are, unless they are several pieces."""
    if HALF:
        return (p * LIFT).to(tl.float16)
    elif PIECES == 1:
        return p.to(dtype)
    else:
        return p


@triton.jit
def load_values(
    V, k, page, place, kv_head, found, i: tl.constexpr, VALUES: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The i-th part of the columns of values: whole, or its even columns and its odd ones."""
    if SHARED:
        return (k[i],)
    elif PAIRS is None:
        return (numbers(load_part(V, page, place, kv_head, found, VALUES, i), DTYPE),)
    else:
        WIDTH: tl.constexpr = width_of(VALUES.FIRST, VALUES.LAST, VALUES.COUNT, i) // 2
        two = load_cached(V, page, place, kv_head, found, VALUES.ALL // 2, i * (VALUES.FIRST // 2), WIDTH)
        return numbers_of_pairs(two, PAIRS, DTYPE)


@triton.jit
def no_sums(ROWS: tl.constexpr, VALUES: tl.constexpr, i: tl.constexpr, HALVES: tl.constexpr):
    """Zeros for the i-th part of the columns of values, or for half of them."""
    WIDTH: tl.constexpr = width_of(VALUES.FIRST, VALUES.LAST, VALUES.COUNT, i) // HALVES
    return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def block_at(TREE, seen, step, EDGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(keys of the block at a step over whole blocks, or with EDGE over the others; whether they are there for any row)."""
    n = step
    if EDGE:  # the blocks before the whole ones, and then those after them
        n = tl.where(step < seen.lower, step, step + (seen.upper - seen.lower))
    j = n + tl.arange(0, BLOCK_N)
    there = tl.full([BLOCK_N], True, tl.int1)
    if EDGE:
        there = (j >= seen.start) & (j < seen.stop)
        if TREE is not None:  # it may hide a key from all queries, and a NaN with it
            there = there & is_drawn(seen.drafts, j - seen.shift)
    return j, there


@triton.jit
def steps_of(seen, EDGE: tl.constexpr):
    """[begin, end) of the steps over whole blocks, or with EDGE over the others."""
    if EDGE:
        return seen.first, seen.stop - (seen.upper - seen.lower)
    else:
        return seen.lower, seen.upper


@triton.jit
def look_up_block(TABLE, TREE, sequence, seen, step, PAGE: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of the block at a step; none if the steps are over."""
    j, there = block_at(TREE, seen, step, EDGE, BLOCK_N)
    _, end = steps_of(seen, EDGE)
    return look_up(TABLE, sequence, j, there & (step < end), PAGE)


@triton.jit
def take_in(
    K, V, ROPE, KS, VS, TABLE, PAGES, SCORES, WINDOW, TREE, sequence, kv_head, rows, seen, pages, q, back, turned, acc, top, total,
    PAGE: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr, VALUES: tl.constexpr, PIECES: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, SHARED: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) after the blocks that all rows see whole, which need no mask, or with EDGE after the others. `pages` of the
    first block: then those of each block are looked up while the one before is waited for. None: when the block comes."""
    KEY_PARTS: tl.constexpr = KEYS.COUNT
    VALUE_PARTS: tl.constexpr = VALUES.COUNT
    HALVES: tl.constexpr = 1 if PAIRS is None else 2
    KEY: tl.constexpr = tl.float16 if HALF.K else tl.bfloat16  # what codes become
    VALUE: tl.constexpr = tl.float16 if HALF.V else tl.bfloat16
    begin, end = steps_of(seen, EDGE)
    for step in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        j, there = block_at(TREE, seen, step, EDGE, BLOCK_N)
        page, place, found = find(TABLE, pages, sequence, j, there, PAGES, PAGE)
        if pages is not None:
            pages = look_up_block(TABLE, TREE, sequence, seen, step + BLOCK_N, PAGE, EDGE, BLOCK_N)
        # In whole blocks a page that there is not has the address of the first, and NaN for scores
        live = found if EDGE else there
        k = ()
        for i in tl.static_range(KEY_PARTS):
            k = k + (numbers(load_part(K, page, place, kv_head, live, KEYS, i), KEY),)
        rope = None
        if ROPE is not None:
            rope = load_cached(ROPE, page, place, kv_head, live, TURNED.ALL, 0, TURNED.FIRST)
        s = scores_of(SCORES, q, back, turned, k, rope, KS, page, place, kv_head, live, KEYS, PIECES)
        if SCORES.slopes is not None:
            s -= rows.slope[:, None] * tl.abs(rows.position[:, None] - j[None, :]).to(tl.float32)
        if TABLE is not None:
            s = tl.where(found[None, :], s, float("nan"))
        if EDGE:
            ok = is_seen(WINDOW, rows.position[:, None], j[None, :], seen.count) & there[None, :]
            if TREE is not None:
                ok &= is_drawn(rows.bits[:, None], (j - seen.shift)[None, :])
            s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        top = new
        grown = ()
        for i in tl.static_range(VALUE_PARTS):
            values = load_values(V, k, page, place, kv_head, live, i, VALUES, PAIRS, SHARED, VALUE)
            weight = p
            if VS.stride_p is not None:
                weight = p * load_scale(VS, page, place, kv_head, live, i)[None, :]
            weight = weights(weight, values[0].dtype, PIECES.P, HALF.V)
            for h in tl.static_range(HALVES):
                sums = acc[i * HALVES + h] * fade[:, None]
                grown = grown + (add_product(sums, weight, values[h], PIECES.P, PIECES.V),)
        acc = grown
    return acc, top, total


@triton.jit
def ask_early(TABLE, KV_LEN, stride_len, KS, VS, batch, kv_head, part, CAPACITY, SPLIT, PAGE: tl.constexpr):
    """Ask the L2 for what a part of a dense batch waits for before it reads a key: memory is far, and these loads come one after
    the other."""
    one = tl.arange(0, 1)
    if KV_LEN is not None:
        ask_l2(KV_LEN + batch.to(tl.int64) * stride_len + one, one == 0)
    if TABLE is not None:
        LINE: tl.constexpr = 1024 // TABLE.data.dtype.element_ty.primitive_bitwidth
        begin = part * SPLIT
        number = begin // PAGE + tl.arange(0, 32) * LINE  # the rest of a long part is read while keys are waited for
        at = batch.to(tl.int64) * TABLE.stride_s + number.to(tl.int64) * TABLE.stride_m
        ask_l2(TABLE.data + at, number < tl.cdiv(begin + tl.minimum(SPLIT, CAPACITY - begin), PAGE))
    if KS.data is not None and KS.stride_p is None:
        ask_l2(KS.data + kv_head.to(tl.int64) * KS.stride_h + one, one == 0)
    if VS.data is not None and VS.stride_p is None:
        ask_l2(VS.data + kv_head.to(tl.int64) * VS.stride_h + one, one == 0)


@triton.jit
def with_sink(SINK, rows, part, top, total):
    """(share of the sums that makes them o, lse) of a part. The sink is one more key of the first part, whose value is 0."""
    fade = 1.0
    if SINK is not None:
        sink = tl.load(SINK + rows.head, rows.live & (part == 0), float("-inf")).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        base = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
        top = new
    empty = total == 0.0
    share = tl.where(empty, 0.0, fade / tl.where(empty, 1.0, total))
    return share, tl.where(empty, float("-inf"), top * LN2 + tl.log(tl.where(empty, 1.0, total)))


@kernel(
    grid=lambda a: (a.PARTS * a.TILES * a.HEAD_TILES * a.KV_HEADS * a.BATCH,),
    tokens=("L", "CAPACITY", "PAGES", "TILES", "PARTS", "SPLIT", "BATCH"),
    default=lambda a: {"num_warps": 8 if a.BLOCK_M * a.VALUES.ALL > 16384 or a.VALUES.ALL > 256 else 4},
    dependent=True,
)  # fmt: skip
def attention_part(
    Q, K, V, ROPE, KS, VS, TABLE, KV_LEN, stride_len, TREE, stride_tb, stride_tl, O, stride_op, LSE, stride_lp, SINK, SCORES,
    WINDOW, LENGTHS, L, CAPACITY, PAGES, KV_HEADS, BATCH, TILES, HEAD_TILES, PARTS, SPLIT, GROUP: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr, VALUES: tl.constexpr, PIECES: tl.constexpr,
    HALF: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """O and LSE of one part of the keys, [part, batch, token, head], for a tile of rows: a token's heads of one group, or part
    of them, and as many tokens as fit. SHARED: values are the first parts of the keys. PAIRS: V holds pairs of such codes."""
    let_next_begin(DEPENDENT)
    pid = tl.program_id(0)
    part = pid % PARTS
    pid = pid // PARTS
    kv_head = pid % KV_HEADS
    pid = pid // KV_HEADS
    head_tile = pid % HEAD_TILES
    pid = pid // HEAD_TILES
    index = pid % TILES
    batch = pid // TILES
    if DEPENDENT and LENGTHS.table is None:
        ask_early(TABLE, KV_LEN, stride_len, KS, VS, batch, kv_head, part, CAPACITY, SPLIT, PAGE)
    await_last(DEPENDENT)
    KEY_PARTS: tl.constexpr = KEYS.COUNT
    VALUE_PARTS: tl.constexpr = VALUES.COUNT
    HALVES: tl.constexpr = 1 if PAIRS is None else 2
    TOGETHER: tl.constexpr = min(GROUP, BLOCK_M)  # heads of a tile
    TOKENS: tl.constexpr = BLOCK_M // TOGETHER
    APART: tl.constexpr = BLOCK_M * VALUES.ALL <= 16384  # two loops over more sums do not fit into registers
    tile = tile_at(LENGTHS, index, batch, L, CAPACITY, TOKENS)
    if tile.start < tile.count_q:
        r = tl.arange(0, BLOCK_M)
        row = tile.start + r // TOGETHER
        own = head_tile * TOGETHER + r % TOGETHER
        head = kv_head * GROUP + own
        live = (r < TOKENS * TOGETHER) & (row < tile.count_q) & (own < GROUP)
        token = tile.first_q + row
        # How many keys there are: more than there is room for makes rows NaN
        count = CAPACITY
        wrong = False
        known = tile.sequence >= 0
        sequence = tl.maximum(tile.sequence, 0)
        if KV_LEN is not None:
            given = tl.load(KV_LEN + sequence.to(tl.int64) * stride_len, known, 0).to(tl.int64)
            wrong = given > CAPACITY
            count = tl.where(wrong, 0, tl.maximum(given, 0)).to(tl.int32)
        count = tl.where(known, count, 0)
        shift = count - tile.count_q
        bits = tl.zeros([BLOCK_M], tl.int64)
        if TREE is not None:
            at = batch.to(tl.int64) * stride_tb + token.to(tl.int64) * stride_tl
            bits = tl.load(TREE + at, live, 0)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if SCORES.slopes is not None:
            slope = tl.load(SCORES.slopes + head, live, 0.0).to(tl.float32) * LOG2E
        rows = Rows(batch, head, token, live, row + shift, bits, slope)
        last = tl.minimum(tile.start + TOKENS, tile.count_q) - 1
        begin = part * SPLIT
        end = begin + tl.minimum(SPLIT, CAPACITY - begin)
        seen = part_seen(WINDOW, TREE, APART and PAGES > 0, rows, count, shift, tile.start, last, begin, end, BLOCK_N)
        q = ()
        for i in tl.static_range(KEY_PARTS):
            q = q + (load_queries(Q, rows, KEYS.ALL, i * KEYS.FIRST, width_of(KEYS.FIRST, KEYS.LAST, KEYS.COUNT, i)),)
        # Looked up before queries are waited for
        pages = None
        if AHEAD and APART:
            pages = look_up_block(TABLE, TREE, sequence, seen, seen.lower, PAGE, False, BLOCK_N)
        back = None
        if HALF.K and Q.data.dtype.element_ty == tl.bfloat16:
            q, back = in_half(q, KEY_PARTS)
        if KS.data is not None and KS.stride_p is None:
            back = load_scale(KS, 0, 0, kv_head, True, 0) * (
                tl.full([BLOCK_M], 1.0, tl.float32) if back is None else back
            )
        smaller = 1.0 / LIFT if HALF.V else 1.0  # all values' scale, loaded here: beside the end nothing goes on
        if VS.data is not None and VS.stride_p is None:
            smaller *= load_scale(VS, 0, 0, kv_head, True, 0)
        turned = None
        if ROPE is not None:
            turned = load_queries(Q, rows, KEYS.ALL + TURNED.ALL, KEYS.ALL, TURNED.FIRST)
        acc = ()
        for i in tl.static_range(VALUE_PARTS * HALVES):
            acc = acc + (no_sums(BLOCK_M, VALUES, i // HALVES, HALVES),)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if APART:
            acc, top, total = take_in(
                K, V, ROPE, KS, VS, TABLE, PAGES, SCORES, WINDOW, TREE, sequence, kv_head, rows, seen, pages, q, back, turned, acc,
                top, total, PAGE, KEYS, TURNED, VALUES, PIECES, HALF, PAIRS, SHARED, False, BLOCK_N, STAGES,
            )  # fmt: skip
        begin, end = steps_of(seen, True)
        if begin < end:  # few blocks are edges, and most parts have none
            if AHEAD:
                pages = look_up_block(TABLE, TREE, sequence, seen, begin, PAGE, True, BLOCK_N)
            acc, top, total = take_in(
                K, V, ROPE, KS, VS, TABLE, PAGES, SCORES, WINDOW, TREE, sequence, kv_head, rows, seen, pages, q, back, turned, acc,
                top, total, PAGE, KEYS, TURNED, VALUES, PIECES, HALF, PAIRS, SHARED, True, BLOCK_N,
                min(STAGES, 2) if APART else STAGES,
            )  # fmt: skip
        share, lse = with_sink(SINK, rows, part, top, total)
        share *= smaller
        poison = tl.where(wrong, float("nan"), 0.0)
        at = batch.to(tl.int64) * O.stride_b + token.to(tl.int64) * O.stride_t + head.to(tl.int64) * O.stride_h
        at = at + part.to(tl.int64) * stride_op
        there = live & ((seen.start < seen.stop) | (part == 0))  # of other parts the lse says that there is nothing
        for i in tl.static_range(VALUE_PARTS):
            sums = acc[i] if PAIRS is None else tl.interleave(acc[2 * i], acc[2 * i + 1])
            column = i * VALUES.FIRST + tl.arange(0, width_of(VALUES.FIRST, VALUES.LAST, VALUES.COUNT, i))
            value = (sums * share[:, None] + poison).to(O.data.dtype.element_ty)
            inside = there[:, None] & (column < VALUES.ALL)[None, :]
            tl.store(O.data + at[:, None] + column.to(tl.int64)[None, :] * O.stride_d, value, inside)
        at = batch.to(tl.int64) * LSE.stride_b + token.to(tl.int64) * LSE.stride_t + head.to(tl.int64) * LSE.stride_h
        tl.store(LSE.data + at + part.to(tl.int64) * stride_lp, lse + poison, live)


# ---- host ------------------------------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    own: int  # rows of queries that a program holds
    other: int  # keys that it takes in at a time
    stages: int
    resident: int  # programs that an SM holds
    ahead: bool  # whether the pages of a block are looked up a block before


def most_rows(rows: int | None) -> int:
    """Rows of queries that a program holds where there is room for them, if so many share a key head."""
    return 64 if rows is None or rows > 32 else 32 if rows > 16 else 16


def blocks(
    q: Tensor, k: Tensor, rows: int | None, key_columns: int, value_columns: int, page: int, bits: bool
) -> Blocks:
    """Tiles that registers and shared memory take. `rows` are those of a sequence that share a key head, None if the device alone
    knows how many; `value_columns` those that are read beside the keys."""
    if q.dtype == torch.float32:  # which is three bf16 numbers in registers and shared memory
        return Blocks(16, 32 if key_columns + value_columns <= 256 else 16, 1, 2, False)
    memory, wide = Target.at(q.device).shared_memory, key_columns > 256
    own = most_rows(rows)
    columns, widened = key_columns + value_columns, k.element_size() == 1

    def room(own: int, other: int) -> int:
        """What queries, and codes that were widened, leave."""
        return memory - own * key_columns * 2 - (2 * other * columns if widened else 0)

    def bytes_of(other: int) -> int:
        return other * columns * k.element_size()

    if wide:
        while own > 16 and room(own, 32) < 2 * bytes_of(32):
            own //= 2
    # Keys times rows of bits take registers too
    other = 32 if (wide or bits and columns > 256) and own > 16 else 64
    if widened and own == 16 and columns <= 256:
        other = 128  # as many bytes as 64 of 16 bits
    while other > 16 and room(own, other) < 2 * bytes_of(other):
        other //= 2
    fit = room(own, other) // bytes_of(other)
    # Two blocks of keys are in shared memory, one of them on its way, and a third where whole warpgroups multiply. Pages that are
    # fewer than threads the compiler fetches ahead too: of the stages that this takes, the keys have one in two. Small pages, of
    # which a block has many, are looked up by the program itself: pages of 1 at 0.90 of the memory's speed with two stages, 0.89
    # with three, and 0.85 as those of 16 are (H200, Triton 3.6)
    small = 0 < page < 16 and own == 16
    stages = max(1, min(2 if small else 3, fit))
    staged = page > 0 and not small and other < 128 and fit >= 3
    if staged:
        stages = 4 if own >= 64 else 5  # where warpgroups multiply, a third block would leave room for one program only
    there = max(1, min(2, fit - 1)) + (own >= 64 and stages == 3)
    taken = own * key_columns * 2 + there * bytes_of(other)
    return Blocks(own, other, stages, min(3, max(1, memory // taken)), page > 0 and not staged)


class Factors(NamedTuple):
    """As what queries, keys, weights and values are multiplied; whether values are parts of the keys that are there already."""

    pieces: Pieces
    half: Half
    pairs: str | None
    shared: bool


def factors(
    q: Tensor, k: Tensor, v: Tensor, keys: Columns, values: Columns, latent: bool, by_token: bool, least: int
) -> Factors:
    """`latent`: keys hold the values. `by_token`: tokens' values have scales of their own, which are multiplied into weights.
    `least`: columns that a product has at least."""
    single, fp16 = q.dtype == torch.float32, q.dtype == torch.float16
    codes, value_codes = k.element_size() == 1, v.element_size() == 1
    small = fp16 and by_token  # weights times scales of tokens may be too small for fp16
    pieces = Pieces(
        3 if single else 1, 3 if single and not codes else 1, 3 if single else 2 if small else 1,
        3 if single and not value_codes else 1,
    )  # fmt: skip
    shared = latent and values.FIRST == keys.FIRST and not (small and codes)
    shared = shared and (values.COUNT < keys.COUNT or values[2:] == keys[2:])
    half = Half(
        not single and (fp16 or codes and not (shared and by_token)),
        not single and not by_token and (fp16 or value_codes),
    )
    # Tensor cores take the values of two tokens in a word: single codes would have to be read from shared memory byte by byte
    wide = min(values.FIRST, values.LAST) >= 2 * least
    return Factors(pieces, half, pairs_of(v, values.ALL) if wide and not shared else None, shared)


def forward(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    batch, length, heads, _ = q.shape
    pages, page, kv_heads, key_dim = k_cache.shape
    value_dim = value_columns(v_cache, k_cache, a.value_dim)
    capacity = capacity_of(a)
    o = torch.empty(batch, length, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    check_keys(a)
    if not lse.numel():
        return o, lse
    k_scale, v_scale = scales_of(a.k_scale), scales_of(a.k_scale if v_cache is None else a.v_scale)
    values_at = k_cache if v_cache is None else v_cache
    group = heads // kv_heads
    rows = None if a.cu_seqlens_q is not None else group * length
    least = narrowest(q) if most_rows(rows) >= 64 else 16  # fewer rows are no product of whole warpgroups
    keys = columns_of(key_dim, k_scale.stride_c is not None, least)
    values = columns_of(value_dim, v_scale.stride_c is not None, least)
    form = factors(q, k_cache, values_at, keys, values, v_cache is None, v_scale.stride_p is not None, least)
    turned = Columns(0, 0, 0, 0)
    if a.k_rope is not None:
        turned = columns_of(a.k_rope.shape[-1], False, least)._replace(
            FIRST=max(least, power_of_two(a.k_rope.shape[-1]))
        )
    wide = keys.FIRST * (keys.COUNT - 1) + keys.LAST + turned.FIRST
    beside = 0 if form.shared else values.FIRST * (values.COUNT - 1) + values.LAST
    block = blocks(q, k_cache, rows, wide, beside, 0 if a.block_table is None else page, a.tree is not None)
    tokens = max(1, block.own // group)
    how, tiles = Lengths(), cdiv(length, tokens)
    if a.cu_seqlens_q is not None:
        how, tiles = lengths(a.cu_seqlens_q, a.cu_seqlens_q, length, length, None, tokens, False)
    head_tiles = cdiv(group, block.own)
    programs = tiles * head_tiles * kv_heads * batch
    # A part's sums, written and read in fp32, are at most an eighth of its keys
    key_bytes = (wide + beside) * k_cache.element_size()
    shortest = 8 * (8 * min(block.own, group * length) * value_dim) // key_bytes
    split = a.split or part_length(capacity, programs, block.resident * Target.at(q.device).sms, shortest, block.other)
    parts = max(1, cdiv(capacity, split))
    made = room_for(o, lse, parts)
    table = table_of(a)
    tree = (None, 0, 0) if a.tree is None else (a.tree, *a.tree.stride())
    attention_part(
        heads_of(q), heads_of(as_codes(k_cache)),
        None if form.shared else heads_of(as_codes(values_at) if form.pairs is None else values_at.view(torch.int16)),
        None if a.k_rope is None else heads_of(a.k_rope), k_scale, v_scale, table, a.kv_len,
        0 if a.kv_len is None else a.kv_len.stride(0), *tree, *made,
        None if a.sink is None else a.sink.contiguous(), bending_of(a),
        window_of(a), how, length, capacity, pages, kv_heads, batch, tiles,
        head_tiles, parts, split, GROUP=group, PAGE=0 if table is None else page, KEYS=keys, TURNED=turned, VALUES=values,
        PIECES=form.pieces, HALF=form.half, PAIRS=form.pairs, SHARED=form.shared, BLOCK_M=block.own, BLOCK_N=block.other,
        STAGES=block.stages, AHEAD=block.ahead,
    )  # fmt: skip
    merge(made, o, lse, parts)
    return o, lse
