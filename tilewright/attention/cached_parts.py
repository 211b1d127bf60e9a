"""Attention over caches by portable kernels: one launch over parts of the keys, and one that merges them where there are several.

A tile holds the query heads that share a key head, and several tokens of them, so that each key is read once for all. A program
goes over one part of the keys of one sequence for one tile. Parts end at multiples of `split`, and blocks of keys begin where
parts do: what a row's bits depend on is its own sequence, and nothing of the batch around it. A part's o and lse are fp32; they
are merged in the order of the parts, a few at a time, wherever the last one is.

Head columns are cut into parts of one width but for the last: 576 is 512 + 64, and columns with a scale for every 128 are blocks of
128, whose products are scaled one by one, for codes times scales would have to be rounded.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_ends, check_indices
from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.products import add_product
from ..device.quantize import decode
from ..device.softmax import LN2, LOG2E
from ..formats.fill import is_fast
from ..runtime.kernel import kernel
from .merge import at_columns, at_row, whole_of
from .portable import Heads, Scores, bend, heads_of, narrowest, parts_of
from .tiles import Lengths, Window, is_seen, keys_seen, lengths, tile_at

SCALED = 128  # columns that share a scale, where there are several


class Table(NamedTuple):
    """Pages of sequences, [sequences, most]: the number of each."""

    data: Any
    stride_s: Any
    stride_m: Any


class Scales(NamedTuple):
    """Scales of codes: none, of heads or all (stride_p None), of tokens too (stride_c None), or of blocks of their columns."""

    data: Any
    stride_p: Any
    stride_t: Any
    stride_h: Any
    stride_c: Any


class Columns(NamedTuple):
    """How many columns there are, and how many parts they are cut into, each FIRST wide but the last."""

    ALL: int
    FIRST: int
    LAST: int
    COUNT: int


class Pieces(NamedTuple):
    """How many bf16 pieces the factors of both products are (`device/products.py`)."""

    Q: int
    K: int
    P: int
    V: int


# ---- reading a cache -------------------------------------------------------------------------------------------------


@triton.constexpr_function
def width_of(first, last, count, i):
    """The width of the i-th part of columns. Numbers, for Triton 3.6 hands such a function no named tuple."""
    return last if i == count - 1 else first


@triton.jit
def find(TABLE, sequence, j, there, PAGES, PAGE: tl.constexpr):
    """(page, place in it, whether there is such a page) of keys j of a sequence; one that has no such page is not read."""
    if TABLE is None:
        return tl.zeros_like(j).to(tl.int64) + sequence, j, there
    else:
        at = sequence.to(tl.int64) * TABLE.stride_s + (j // PAGE).to(tl.int64) * TABLE.stride_m
        page = tl.load(TABLE.data + at, there, 0).to(tl.int64)
        known = there & (page >= 0) & (page < PAGES)
        return tl.where(known, page, 0), j % PAGE, known


@triton.jit
def load_cached(X, page, place, head, live, ALL: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH]: columns FROM to FROM + WIDTH, of ALL, of one head at places of pages; 0 where it is not live."""
    column = FROM + tl.arange(0, WIDTH)
    at = page * X.stride_b + place.to(tl.int64) * X.stride_t + head.to(tl.int64) * X.stride_h
    at = at[:, None] + column.to(tl.int64)[None, :] * X.stride_d
    inside = live[:, None]
    if FROM + WIDTH > ALL:
        inside = inside & (column < ALL)[None, :]
    return tl.load(X.data + at, inside, 0 if X.data.dtype.element_ty.is_int() else 0.0)


@triton.jit
def numbers(x, DTYPE: tl.constexpr):
    """Codes as numbers of a dtype that holds them all; what is no code, as it is."""
    if x.dtype == tl.uint8:
        return decode(x, "e4m3").to(DTYPE)
    elif x.dtype == tl.int8 or x.dtype == tl.float8e4nv:
        return x.to(DTYPE)
    else:
        return x


@triton.jit
def load_scale(S, page, place, head, live, part):
    """The scale of a part of columns: a number, or [n] of places of pages."""
    if S.stride_p is None:
        return tl.load(S.data + head.to(tl.int64) * S.stride_h).to(tl.float32)
    else:
        at = page * S.stride_p + place.to(tl.int64) * S.stride_t + head.to(tl.int64) * S.stride_h
        if S.stride_c is not None:
            at += part * S.stride_c
        return tl.load(S.data + at, live, 0.0).to(tl.float32)


@triton.jit
def load_queries(Q, batch, head, token, live, ALL: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH]: columns of q, of a head and a token for each row."""
    column = FROM + tl.arange(0, WIDTH)
    at = batch.to(tl.int64) * Q.stride_b + token.to(tl.int64) * Q.stride_t + head.to(tl.int64) * Q.stride_h
    at = at[:, None] + column.to(tl.int64)[None, :] * Q.stride_d
    return tl.load(Q.data + at, live[:, None] & (column < ALL)[None, :], 0.0)


@triton.jit
def rounded(p, dtype: tl.constexpr, PIECES: tl.constexpr):
    """Weights as they are multiplied: rounded to what the values are, unless they are several pieces."""
    if PIECES == 1:
        return p.to(dtype)
    else:
        return p


# ---- a part of the keys ----------------------------------------------------------------------------------------------


@triton.jit
def scores_of(SCORES, q, turned, k, rope, KS, page, place, kv_head, live, KEYS: tl.constexpr, PIECES: tl.constexpr):
    """The scores of a block of keys, in base 2, after scale and softcap: [n, m]. q and k are in parts; where `rope` has the last
    columns of the keys, `turned` are those of q."""
    COUNT: tl.constexpr = KEYS.COUNT
    raw = tl.zeros([q[0].shape[0], k[0].shape[0]], tl.float32)
    if KS.stride_c is None:
        for i in tl.static_range(COUNT):
            raw = add_product(raw, q[i], tl.trans(k[i]), PIECES.Q, PIECES.K)
        if KS.data is not None:
            scale = load_scale(KS, page, place, kv_head, live, 0)
            raw *= scale if KS.stride_p is None else scale[None, :]
    else:
        for i in tl.static_range(COUNT):
            one = add_product(tl.zeros_like(raw), q[i], tl.trans(k[i]), PIECES.Q, PIECES.K)
            raw += one * load_scale(KS, page, place, kv_head, live, i)[None, :]
    if rope is not None:
        raw = add_product(raw, turned, tl.trans(rope), PIECES.Q, PIECES.Q)
    s, _ = bend(SCORES, raw)
    return s


@kernel(
    grid=lambda a: (a.PARTS * a.TILES * a.HEAD_TILES * a.KV_HEADS * a.BATCH,),
    tokens=("L", "CAPACITY", "PAGES", "TILES", "PARTS", "SPLIT", "BATCH"),
    default=lambda a: {"num_warps": 8 if a.BLOCK_M * a.VALUES.ALL > 16384 or a.VALUES.ALL > 256 else 4},
)  # fmt: skip
def attention_part(
    Q, K, V, ROPE, KS, VS, TABLE, KV_LEN, stride_len, TREE, stride_tb, stride_tl, O, stride_op, LSE, stride_lp, SINK, SCORES,
    WINDOW, LENGTHS, L, CAPACITY, PAGES, KV_HEADS, BATCH, TILES, HEAD_TILES, PARTS, SPLIT, GROUP: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr, VALUES: tl.constexpr, PIECES: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """O and LSE of one part of the keys, [part, batch, token, head], for a tile of rows: a token's heads of one group, or part
    of them, and as many tokens as fit. SHARED: values are the first parts of the keys."""
    pid = tl.program_id(0)
    part = pid % PARTS
    pid = pid // PARTS
    kv_head = pid % KV_HEADS
    pid = pid // KV_HEADS
    head_tile = pid % HEAD_TILES
    pid = pid // HEAD_TILES
    index = pid % TILES
    batch = pid // TILES
    KEY_PARTS: tl.constexpr = KEYS.COUNT
    VALUE_PARTS: tl.constexpr = VALUES.COUNT
    TOGETHER: tl.constexpr = min(GROUP, BLOCK_M)  # heads of a tile
    TOKENS: tl.constexpr = BLOCK_M // TOGETHER
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
        last = tl.minimum(tile.start + TOKENS, tile.count_q) - 1
        start, stop, _, _ = keys_seen(WINDOW, shift, count, tile.start, last)
        begin = part * SPLIT
        start = tl.maximum(start, begin)
        stop = tl.minimum(stop, begin + tl.minimum(SPLIT, CAPACITY - begin))
        bits = tl.zeros([BLOCK_M], tl.int64)
        if TREE is not None:
            at = batch.to(tl.int64) * stride_tb + token.to(tl.int64) * stride_tl
            bits = tl.load(TREE + at, live, 0)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if SCORES.slopes is not None:
            slope = tl.load(SCORES.slopes + head, live, 0.0).to(tl.float32) * LOG2E
        q = ()
        for i in tl.static_range(KEY_PARTS):
            q = q + (
                load_queries(
                    Q,
                    batch,
                    head,
                    token,
                    live,
                    KEYS.ALL,
                    i * KEYS.FIRST,
                    width_of(KEYS.FIRST, KEYS.LAST, KEYS.COUNT, i),
                ),
            )
        turned = q[0]
        if ROPE is not None:
            turned = load_queries(Q, batch, head, token, live, KEYS.ALL + TURNED.ALL, KEYS.ALL, TURNED.FIRST)
        acc = ()
        for i in tl.static_range(VALUE_PARTS):
            acc = acc + (tl.zeros([BLOCK_M, width_of(VALUES.FIRST, VALUES.LAST, VALUES.COUNT, i)], tl.float32),)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINK is not None:  # one more key of the first part, whose value is 0
            sink = tl.load(SINK + head, live & (part == 0), float("-inf")).to(tl.float32) * LOG2E
            top = sink
            total = tl.where(sink == float("-inf"), 0.0, 1.0)
        CODE: tl.constexpr = tl.bfloat16 if PIECES.Q > 1 else Q.data.dtype.element_ty  # both hold all codes
        VALUE: tl.constexpr = tl.bfloat16 if PIECES.P > 1 else Q.data.dtype.element_ty
        first = begin + tl.maximum(start - begin, 0) // BLOCK_N * BLOCK_N
        for n in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
            j = n + tl.arange(0, BLOCK_N)
            there = (j >= start) & (j < stop)
            page, place, found = find(TABLE, sequence, j, there, PAGES, PAGE)
            k = ()
            for i in tl.static_range(KEY_PARTS):
                codes = load_cached(
                    K,
                    page,
                    place,
                    kv_head,
                    found,
                    KEYS.ALL,
                    i * KEYS.FIRST,
                    width_of(KEYS.FIRST, KEYS.LAST, KEYS.COUNT, i),
                )
                k = k + (numbers(codes, CODE),)
            rope = None
            if ROPE is not None:
                rope = load_cached(ROPE, page, place, kv_head, found, TURNED.ALL, 0, TURNED.FIRST)
            s = scores_of(SCORES, q, turned, k, rope, KS, page, place, kv_head, found, KEYS, PIECES)
            position = (row + shift)[:, None]
            ok = is_seen(WINDOW, position, j[None, :], count) & there[None, :]
            if TREE is not None:
                draft = (j - shift)[None, :]
                bit = (bits[:, None] >> tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)) & 1
                ok &= (draft < 0) | ((draft < 64) & (bit != 0))
            if SCORES.slopes is not None:
                s -= slope[:, None] * tl.abs(position - j[None, :]).to(tl.float32)
            if TABLE is not None:
                s = tl.where(found[None, :], s, float("nan"))
            s = tl.where(ok, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            base = tl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
            p = tl.exp2(s - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(p, 1)
            top = new
            used = found
            if TREE is not None:  # it may hide a key from all queries, and a NaN with it
                used = found & (tl.max((ok & live[:, None]).to(tl.int32), 0) > 0)
            grown = ()
            for i in tl.static_range(VALUE_PARTS):
                if SHARED:
                    v = k[i]
                else:
                    codes = load_cached(
                        V,
                        page,
                        place,
                        kv_head,
                        found,
                        VALUES.ALL,
                        i * VALUES.FIRST,
                        width_of(VALUES.FIRST, VALUES.LAST, VALUES.COUNT, i),
                    )
                    v = numbers(codes, VALUE)
                if TREE is not None:
                    v = tl.where(used[:, None], v, 0.0)
                weight = p
                if VS.stride_p is not None:
                    weight = p * load_scale(VS, page, place, kv_head, used, i)[None, :]
                sums = acc[i] * fade[:, None]
                grown = grown + (add_product(sums, rounded(weight, v.dtype, PIECES.P), v, PIECES.P, PIECES.V),)
            acc = grown
        empty = total == 0.0
        share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
        lse = tl.where(empty, float("-inf"), top * LN2 + tl.log(tl.where(empty, 1.0, total)))
        if VS.data is not None and VS.stride_p is None:
            share *= load_scale(VS, 0, 0, kv_head, True, 0)
        poison = tl.where(wrong, float("nan"), 0.0)
        at = batch.to(tl.int64) * O.stride_b + token.to(tl.int64) * O.stride_t + head.to(tl.int64) * O.stride_h
        at = at + part.to(tl.int64) * stride_op
        there = live & ((start < stop) | (part == 0))  # of other parts the lse says that there is nothing
        for i in tl.static_range(VALUE_PARTS):
            column = i * VALUES.FIRST + tl.arange(0, width_of(VALUES.FIRST, VALUES.LAST, VALUES.COUNT, i))
            value = (acc[i] * share[:, None] + poison).to(O.data.dtype.element_ty)
            inside = there[:, None] & (column < VALUES.ALL)[None, :]
            tl.store(O.data + at[:, None] + column.to(tl.int64)[None, :] * O.stride_d, value, inside)
        at = batch.to(tl.int64) * LSE.stride_b + token.to(tl.int64) * LSE.stride_t + head.to(tl.int64) * LSE.stride_h
        tl.store(LSE.data + at + part.to(tl.int64) * stride_lp, lse + poison, live)


# ---- all parts -------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (cdiv(a.ROWS, a.BLOCK_R),), tokens=("ROWS", "L", "PARTS"),
    default=lambda a: {"BLOCK_R": max(1, 512 // a.BLOCK), "num_warps": 4},
)  # fmt: skip
def attention_parts_merge(
    P, LSE, O, OUT, ROWS, L, HEADS, PARTS, V, FEW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
):
    """O and OUT, the lse, of rows of the parts P [ROWS, PARTS, V] and LSE [ROWS, PARTS]. Sums are of FEW parts at a time, so that
    parts that saw nothing, of which there are more where there is more room, change no bit of them."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < ROWS
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    lost = tl.zeros([BLOCK_R], tl.float32)
    used = 0  # parts up to the last that saw anything
    MANY: tl.constexpr = (
        64 if BLOCK == 32 else 32
    )  # not BLOCK: Triton 3.6 fails where ranges of one size are of two tiles
    for first in range(0, PARTS, MANY):
        i = first + tl.arange(0, MANY)
        one = tl.load(LSE + row[:, None] * PARTS + i[None, :], inside[:, None] & (i < PARTS)[None, :], float("-inf"))
        lost += tl.sum(tl.where(one == one, 0.0, one), 1)  # a NaN, which a maximum loses
        top = tl.maximum(top, tl.max(one, 1))
        used = tl.maximum(used, tl.max(tl.max(tl.where(one != float("-inf"), i[None, :] + 1, 0), 1), 0))
    base = tl.where(top == float("-inf"), 0.0, top) + lost
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_R], tl.float32)
    sums = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    for first in range(0, used, FEW):
        i = first + tl.arange(0, FEW)
        at = row[:, None] * PARTS + i[None, :]
        one = tl.load(LSE + at, inside[:, None] & (i < PARTS)[None, :], float("-inf"))
        seen = (one != float("-inf"))[:, :, None] & (column < V)[None, None, :]
        own = tl.load(P + at[:, :, None] * V + column[None, None, :], seen, 0.0)
        weight = tl.exp2((one - base[:, None]) * LOG2E)
        total += tl.sum(weight, 1)
        sums += tl.sum(weight[:, :, None] * own, 1)
    empty = total == 0.0
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    at = at_columns(O, row, column, L, HEADS)
    tl.store(O.data + at, (sums * share[:, None]).to(O.data.dtype.element_ty), inside[:, None] & (column < V)[None, :])
    lse = tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, total)))
    tl.store(OUT.data + at_row(OUT, row, L, HEADS), lse, inside)


# ---- host ------------------------------------------------------------------------------------------------------------


LEAST = 512  # keys of a part: with fewer, its beginning and its end take longer than the keys between them
PROGRAMS = 8  # for each SM, of which two or so run at a time: fewer leave some idle while the last parts end


def part_length(capacity: int, programs: int, sms: int) -> int:
    """Keys of a part, for as many parts as keep a chip busy; what the device alone knows has no say."""
    wanted = power_of_two(cdiv(PROGRAMS * sms, max(1, programs)))
    return max(LEAST, cdiv(cdiv(capacity, wanted), LEAST) * LEAST)


class Blocks(NamedTuple):
    own: int  # rows of queries that a program holds
    other: int  # keys that it takes in at a time
    stages: int


def most_rows(rows: int | None) -> int:
    """Rows of queries that a program holds where there is room for them, if so many share a key head."""
    return 64 if rows is None or rows > 32 else 32 if rows > 16 else 16


def blocks(
    q: Tensor, k: Tensor, rows: int | None, key_columns: int, value_columns: int, paged: bool, bits: bool
) -> Blocks:
    """Tiles that registers and shared memory take. `rows` are those of a sequence that share a key head, None if the device alone
    knows how many; `value_columns` those that are read beside the keys."""
    if q.dtype == torch.float32:  # which is three bf16 numbers in registers and shared memory
        return Blocks(16, 32 if key_columns + value_columns <= 256 else 16, 1)
    memory, wide = Target.at(q.device).shared_memory, key_columns > 256
    own = most_rows(rows)
    columns, widened = key_columns + value_columns, k.element_size() == 1

    def room(own: int, other: int) -> int:
        """What queries, and codes that were widened, leave."""
        return memory - own * key_columns * 2 - (2 * other * columns if widened else 0)

    if wide:
        while own > 16 and room(own, 32) < 2 * 32 * columns * k.element_size():
            own //= 2
    other = 32 if (wide or bits) and own > 16 else 64  # keys times rows of bits take registers too
    while other > 16 and room(own, other) < 2 * other * columns * k.element_size():
        other //= 2
    # Keys are loaded two blocks ahead, those of pages one, and their pages two: 0.96 of the memory's speed with 64 keys, November
    # 2026 on an H200
    stages = 4 if paged else 3
    return Blocks(own, other, max(1, min(stages, room(own, other) // (other * columns * k.element_size()))))


def columns_of(count: int, blocked: bool, least: int) -> Columns:
    """Columns in parts of at least that many."""
    if blocked:
        parts = max(1, cdiv(count, SCALED))
        rest = count - (parts - 1) * SCALED
        last = max(least, power_of_two(rest))
        return Columns(count, SCALED if parts > 1 else last, last, parts)
    first, rest = parts_of(count, least)
    return Columns(count, first, rest or first, 2 if rest else 1)


def scales_of(scale: Tensor | None) -> Scales:
    """A scale that broadcasts to [pages, page, kv_heads, blocks of columns]."""
    if scale is None:
        return Scales(None, None, None, None, None)
    s = [0 if n == 1 else stride for n, stride in zip(scale.shape, scale.stride())]
    each = any(scale.shape[i] != 1 for i in (0, 1, 3))  # a scale of all tokens is one number to a program
    return Scales(scale, s[0] if each else None, s[1] if each else None, s[2], s[3] if scale.shape[3] > 1 else None)


def as_codes(t: Tensor | None) -> Tensor | None:
    """FP8 codes as bytes where the chip has no instructions that convert them."""
    bytewise = t is not None and t.dtype == torch.float8_e4m3fn and not is_fast(t)
    return t.view(torch.uint8) if bytewise else t


def forward(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    batch, length, heads, head_dim = q.shape
    pages, page, kv_heads, key_dim = k_cache.shape
    value_dim = value_columns(v_cache, k_cache, a.value_dim)
    capacity = page if a.block_table is None else page * a.block_table.shape[1]
    o = torch.empty(batch, length, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    check_ends("cached_attention", "cu_seqlens_q", a.cu_seqlens_q, length)
    if a.kv_len is not None:
        check_indices("cached_attention", "kv_len", a.kv_len, 0, capacity + 1)
    if not lse.numel():
        return o, lse
    k_scale, v_scale = scales_of(a.k_scale), scales_of(a.k_scale if v_cache is None else a.v_scale)
    codes, value_codes = k_cache.element_size() == 1, (k_cache if v_cache is None else v_cache).element_size() == 1
    group = heads // kv_heads
    rows = None if a.cu_seqlens_q is not None else group * length
    least = narrowest(q) if most_rows(rows) >= 64 else 16  # fewer rows are no product of whole warpgroups
    keys = columns_of(key_dim, k_scale.stride_c is not None, least)
    values = columns_of(value_dim, v_scale.stride_c is not None, least)
    single = q.dtype == torch.float32
    # Weights times scales of tokens may be too small for fp16
    small = q.dtype == torch.float16 and v_scale.stride_p is not None
    pieces = Pieces(
        3 if single else 1, 3 if single and not codes else 1, 3 if single else 2 if small else 1,
        3 if single and not value_codes else 1,
    )  # fmt: skip
    shared = v_cache is None and values.FIRST == keys.FIRST and not (small and codes)
    shared = shared and (values.COUNT < keys.COUNT or values[2:] == keys[2:])
    turned = Columns(0, 0, 0, 0)
    if a.k_rope is not None:
        turned = columns_of(a.k_rope.shape[-1], False, least)._replace(
            FIRST=max(least, power_of_two(a.k_rope.shape[-1]))
        )
    wide = keys.FIRST * (keys.COUNT - 1) + keys.LAST + turned.FIRST
    beside = 0 if shared else values.FIRST * (values.COUNT - 1) + values.LAST
    block = blocks(
        q,
        k_cache,
        rows,
        wide,
        beside,
        a.block_table is not None,
        a.tree is not None,
    )
    tokens = max(1, block.own // group)
    how, tiles = Lengths(), cdiv(length, tokens)
    if a.cu_seqlens_q is not None:
        how, tiles = lengths(a.cu_seqlens_q, a.cu_seqlens_q, length, length, None, tokens, False)
    head_tiles = cdiv(group, block.own)
    programs = tiles * head_tiles * kv_heads * batch
    split = a.split or part_length(capacity, programs, Target.at(q.device).sms)
    parts = max(1, cdiv(capacity, split))
    made = room_for(o, lse, parts)
    table = None if a.block_table is None else Table(a.block_table, *a.block_table.stride())
    tree = (None, 0, 0) if a.tree is None else (a.tree, *a.tree.stride())
    scale = 1.0 / math.sqrt(head_dim) if a.scale is None else float(a.scale)
    slopes = None if a.slopes is None else a.slopes.contiguous()
    attention_part(
        heads_of(q), heads_of(as_codes(k_cache)), None if shared else heads_of(as_codes(k_cache if v_cache is None else v_cache)),
        None if a.k_rope is None else heads_of(a.k_rope), k_scale, v_scale, table, a.kv_len,
        0 if a.kv_len is None else a.kv_len.stride(0), *tree, *made,
        None if a.sink is None else a.sink.contiguous(),
        Scores(scale, float(a.softcap) or None, slopes, None, None, None, None, None),
        Window(a.left, 0 if a.causal and a.tree is None else None), how, length, capacity, pages, kv_heads, batch, tiles,
        head_tiles, parts, split, GROUP=group, PAGE=0 if table is None else page, KEYS=keys, TURNED=turned, VALUES=values,
        PIECES=pieces, SHARED=shared, BLOCK_M=block.own, BLOCK_N=block.other, STAGES=block.stages,
    )  # fmt: skip
    merge(made, o, lse, parts)
    return o, lse


class Made(NamedTuple):
    """Where parts store their o and lse, and how far those of one row lie apart."""

    o: Heads
    stride_o: int
    lse: Heads
    stride_lse: int


def room_for(o: Tensor, lse: Tensor, parts: int) -> Made:
    """Results themselves are room for one part; more have room of their own, in fp32."""
    if parts == 1:
        return Made(heads_of(o), 0, whole_of(lse), 0)
    each = torch.empty(*o.shape[:3], parts, o.shape[3], dtype=torch.float32, device=o.device)
    each_lse = torch.empty(*o.shape[:3], parts, dtype=torch.float32, device=o.device)
    return Made(Heads(each, *each.stride()[:3], 1), o.shape[3], Heads(each_lse, *each_lse.stride()[:3], 0), 1)


def merge(made: Made, o: Tensor, lse: Tensor, parts: int) -> None:
    """Make results of parts, if there are several."""
    if parts > 1:
        batch, length, heads, columns = o.shape
        attention_parts_merge(
            made.o.data, made.lse.data, heads_of(o), whole_of(lse), batch * length * heads, length, heads, parts, columns, FEW=8,
            BLOCK=max(16, power_of_two(columns)),
        )  # fmt: skip


def value_columns(v_cache: Tensor | None, k_cache: Tensor, value_dim: int | None) -> int:
    """How wide values are: those of a cache of their own, or the first columns of the keys."""
    if v_cache is not None:
        return v_cache.shape[-1]
    return k_cache.shape[-1] if value_dim is None else value_dim
