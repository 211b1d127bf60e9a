"""`qkv_split` whose keys and values go into caches: split, norm, rotation, codes and slots, in one launch.

    q = rope(norm(q));  k_cache[slots[t] // page, slots[t] % page] = codes(rope(norm(k[t]))),  and v likewise, as it is

Everything is fp32 up to one rounding: of q to its dtype, of keys and values to numbers or codes.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.cache_read import SCALED, as_codes
from ...attention.cache_write import (
    CACHE,
    check_cache,
    codes_of,
    draw_cache,
    draw_slots,
    format_of,
    own_scale,
    place_of,
    scale_heads,
    written,
)
from ...attention.portable import heads_of
from ...core.debug import check_indices
from ...core.draw import Draw
from ...core.signature import above, at_least
from ...core.tensor import cdiv
from ...device.activation import sigmoid
from ...device.dependent import begin_dependent
from ...device.quantize import amax, has, max_nan
from ...device.rotary import Indices, column_of, load_angles, locate, pair_columns, rotate
from ...op import Cost, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel
from .qkv_split import check as check_split
from .qkv_split import constants_of, local_heads, normed_heads, operands, split_heads
from .qkv_split import reference as split
from .qkv_split_backward import blocks, units
from .rope import HEAD_DIMS, SMALL_HEADS, draw_tables

BLOCK_COLUMNS = tl.constexpr(SCALED)
FEW = 64  # tokens, up to which programs are many and small: a launch of few is as long as its longest program


def reference(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    freqs: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    packing: Literal["grouped", "plain"] = "grouped",
    silu: bool = False,
    mscale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q [batch, length, heads, head_dim] of `qkv` [batch, length, width]; keys and values are written into `slots` of caches.

    It is `qkv_split`, with its options, and `cache_write` [pages, page, kv_heads, head_dim] of what that gives, without the
    rounding in between: numbers of qkv's dtype or codes, with a scale [pages, page, kv_heads, 1], or with a number for each 128
    columns in the place of 1, that is written, or one of [1, 1, 1 or kv_heads, 1] that is read. `slots` [batch, length] out of
    range write nothing; `positions` [batch, length] say where tokens stand, or else they stand at their indices. A position
    without an angle makes q NaN, and what is written.
    """
    options = {"eps": eps, "rotary_dim": rotary_dim, "pairing": pairing, "packing": packing, "silu": silu}
    q, k, v = split(
        upcast(qkv), heads, kv_heads, head_dim, q_weight, k_weight, freqs, cos, sin, mscale=mscale, positions=positions, **options
    )  # fmt: skip
    stored = [written(x, cache, scale, slots) for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale))]
    return q.to(qkv.dtype), stored[0][0], stored[1][0], stored[0][1], stored[1][1]


def inputs(draw: Draw) -> dict[str, Any]:
    batch, length = draw.dim("batch"), draw.dim("length")
    head_dim, heads = draw.dim("head_dim", (1, *HEAD_DIMS, 136, 200)), draw.dim("heads", SMALL_HEADS)
    queries = math.gcd(heads, draw.option("queries_per_key", 8, 1, 2, 3))
    kv_heads = 1 if queries == 1 and heads > max(SMALL_HEADS) else heads // max(1, queries)
    rotary_dim = max(2, head_dim // draw.option("share", 1, 2, 3) // 2 * 2)
    rotates = head_dim > 1 and draw.option("turns", True, True, False)
    known = draw.option("positions_known", length + 9, max(1, length))
    given = draw.option("told", "given", "by order") == "given"
    index = draw.option("index", torch.int64, torch.int32)
    k_cache, k_scale = draw_cache(draw, "k", kv_heads, head_dim)
    v_cache, v_scale = draw_cache(draw, "v", kv_heads, head_dim)
    places = k_cache.shape[0] * k_cache.shape[1]
    return {
        "qkv": draw.tensor(batch, length, (heads + 2 * kv_heads) * head_dim),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slots": draw_slots(draw, batch * length, places).reshape(batch, length),
        "q_weight": draw.maybe("q_weight", lambda: draw.tensor(head_dim, scale=0.5, shift=1.0)),
        "k_weight": draw.maybe("k_weight", lambda: draw.tensor(head_dim, scale=0.5, shift=1.0)),
        **(draw_tables(draw, rotary_dim // 2, known) if rotates else {}),
        "positions": draw.integers(batch, length, high=known, dtype=index) if given else None,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "eps": draw.option("eps", 1e-6, 1e-5),
        "rotary_dim": rotary_dim if head_dim > 1 else None,
        "pairing": draw.option("pairing", "half", "interleaved"),
        "packing": draw.option("packing", "grouped", "plain"),
        "silu": draw.option("silu", False, True),
        "mscale": draw.option("mscale", 1.0, 1.25),
    }


# ---------------------------------------------------------------- on the device


@triton.jit
def put_pairs(
    C, to, inside, a, b, FIRST: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Pairs [TOKENS, HEADS, HALF] as COUNT columns from FIRST on of the cache's rows at offsets `to`."""
    a = a.to(C.data.dtype.element_ty)
    b = b.to(C.data.dtype.element_ty)
    if INTERLEAVED:
        i = tl.arange(0, 2 * HALF)[None, None, :]
        y = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * HALF])
        tl.store(C.data + to + (FIRST + i).to(tl.int64) * C.stride_d, y, inside & (i < COUNT))
    else:
        first, second, has_first, has_second = pair_columns(COUNT, HALF, False)
        tl.store(C.data + to + (FIRST + first).to(tl.int64) * C.stride_d, a, inside & has_first)
        tl.store(C.data + to + (FIRST + second).to(tl.int64) * C.stride_d, b, inside & has_second)


@triton.jit
def scale_at(S, page, place, head, known, top, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """(scale, multiplier) [TOKENS, HEADS, 1] of a block of codes: read, or of the largest numbers `top` [TOKENS, HEADS] and
    stored."""
    at = (
        (page * S.stride_b + place * S.stride_t)[:, None] + head.to(tl.int64)[None, :] * S.stride_h + BLOCK * S.stride_d
    )
    if has(FORMAT, "static"):
        s = tl.load(S.data + at, known, 1.0).to(tl.float32)
        mult = s
    else:
        s, mult = own_scale(top, FORMAT)
        tl.store(S.data + at, s, known)
    return s[:, :, None], mult[:, :, None]


@triton.jit
def block_top(x, column, there, BLOCK: tl.constexpr):
    """The largest numbers [TOKENS, HEADS] of x [TOKENS, HEADS, n] in the columns [n] of a block that are there."""
    return amax(tl.where((there & (column // BLOCK_COLUMNS == BLOCK))[None, None, :], x, 0.0), 2)


@triton.jit
def in_block(new, column, before, BLOCK: tl.constexpr):
    """`before`, or in the columns [n] of a block what is new there."""
    return tl.where((column // BLOCK_COLUMNS == BLOCK)[None, None, :], new, before)


@triton.jit
def codes_by_block(
    S, a, b, d, e, page, place, head, known, D: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr
):
    """Codes of a head's pairs, of those that are turned and of the rest, with a scale for each block of the head's columns."""
    PAIRS: tl.constexpr = COLUMNS.PAIRS
    REST: tl.constexpr = COLUMNS.REST
    BLOCKS: tl.constexpr = (D + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    if PAIRS > 0:
        at_a, at_b, there_a, there_b = pair_columns(2 * PAIRS, COLUMNS.HALF, COLUMNS.INTERLEAVED)
        s_a = tl.zeros_like(a)
        s_b = tl.zeros_like(b)
        mult_a = s_a
        mult_b = s_b
    if REST > 0:
        at_d, at_e, there_d, there_e = pair_columns(D - 2 * PAIRS, REST, COLUMNS.INTERLEAVED)
        at_d += 2 * PAIRS
        at_e += 2 * PAIRS
        s_d = tl.zeros_like(d)
        s_e = tl.zeros_like(e)
        mult_d = s_d
        mult_e = s_e
    for BLOCK in tl.static_range(BLOCKS):
        top = tl.zeros([known.shape[0], known.shape[1]], tl.float32)
        if PAIRS > 0:
            top = max_nan(top, max_nan(block_top(a, at_a, there_a, BLOCK), block_top(b, at_b, there_b, BLOCK)))
        if REST > 0:
            top = max_nan(top, max_nan(block_top(d, at_d, there_d, BLOCK), block_top(e, at_e, there_e, BLOCK)))
        s, mult = scale_at(S, page, place, head, known, top, FORMAT, BLOCK)
        if PAIRS > 0:
            s_a = in_block(s, at_a, s_a, BLOCK)
            s_b = in_block(s, at_b, s_b, BLOCK)
            mult_a = in_block(mult, at_a, mult_a, BLOCK)
            mult_b = in_block(mult, at_b, mult_b, BLOCK)
        if REST > 0:
            s_d = in_block(s, at_d, s_d, BLOCK)
            s_e = in_block(s, at_e, s_e, BLOCK)
            mult_d = in_block(mult, at_d, mult_d, BLOCK)
            mult_e = in_block(mult, at_e, mult_e, BLOCK)
    if PAIRS > 0:
        a = codes_of(a, s_a, mult_a, FORMAT)
        b = codes_of(b, s_b, mult_b, FORMAT)
    if REST > 0:
        d = codes_of(d, s_d, mult_d, FORMAT)
        e = codes_of(e, s_e, mult_e, FORMAT)
    return a, b, d, e


@triton.jit
def write_keys(
    X, W, C, S, ANGLES, at, to, inside, angles_at, position, live, page, place, head, known, eps, D: tl.constexpr,
    COLUMNS: tl.constexpr, SILU: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Keys at offsets `at` of X, normed and rotated, to offsets `to` of the cache. `known` [TOKENS, HEADS]: what is written."""
    PAIRS: tl.constexpr = COLUMNS.PAIRS
    HALF: tl.constexpr = COLUMNS.HALF
    REST: tl.constexpr = COLUMNS.REST
    INTERLEAVED: tl.constexpr = COLUMNS.INTERLEAVED
    a, b, d, e = normed_heads(X, W, at, inside, eps, D, COLUMNS, SILU)
    if PAIRS > 0:
        cosine, sine = load_angles(ANGLES, angles_at, position, live, PAIRS, HALF)
        a, b = rotate(a, b, cosine, sine)
    if has(FORMAT, "1x128"):
        a, b, d, e = codes_by_block(S, a, b, d, e, page, place, head, known, D, COLUMNS, FORMAT)
    elif FORMAT != "":
        top = tl.zeros([known.shape[0], known.shape[1]], tl.float32)
        if PAIRS > 0:
            top = max_nan(top, max_nan(amax(a, 2), amax(b, 2)))
        if REST > 0:
            top = max_nan(top, max_nan(amax(d, 2), amax(e, 2)))
        s, mult = scale_at(S, page, place, head, known, top, FORMAT, 0)
        if PAIRS > 0:
            a = codes_of(a, s, mult, FORMAT)
            b = codes_of(b, s, mult, FORMAT)
        if REST > 0:
            d = codes_of(d, s, mult, FORMAT)
            e = codes_of(e, s, mult, FORMAT)
    wanted = known[:, :, None]
    if PAIRS > 0:
        put_pairs(C, to, wanted, a, b, 0, 2 * PAIRS, HALF, INTERLEAVED)
    if REST > 0:
        put_pairs(C, to, wanted, d, e, 2 * PAIRS, D - 2 * PAIRS, REST, INTERLEAVED)


@triton.jit
def write_values(
    X, C, S, at, to, inside, page, place, head, known, D: tl.constexpr, LANES: tl.constexpr, SILU: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, LANES)[None, None, :]
    x = tl.load(X.data + at + i.to(tl.int64) * X.stride_n, inside & (i < D), 0.0).to(tl.float32)
    if SILU:
        x *= sigmoid(x, 1.0)
    if has(FORMAT, "1x128"):
        column = tl.arange(0, LANES)
        scale = tl.zeros_like(x)
        multiplier = scale
        for BLOCK in tl.static_range((D + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS):
            s, mult = scale_at(S, page, place, head, known, block_top(x, column, column < D, BLOCK), FORMAT, BLOCK)
            scale = in_block(s, column, scale, BLOCK)
            multiplier = in_block(mult, column, multiplier, BLOCK)
        x = codes_of(x, scale, multiplier, FORMAT)
    elif FORMAT != "":
        s, mult = scale_at(S, page, place, head, known, amax(x, 2), FORMAT, 0)
        x = codes_of(x, s, mult, FORMAT)
    tl.store(C.data + to + i.to(tl.int64) * C.stride_d, x.to(C.data.dtype.element_ty), known[:, :, None] & (i < D))


def _tile(a, size: int | None = None, warps: int = 4) -> dict:
    return {**blocks(a, size or (1024 if a.B * a.L <= FEW else 4096), 2), "num_warps": warps}


@kernel(
    grid=lambda a: (cdiv(a.B * a.L, max(a.T, a.TK)) * units(a),),
    tokens=("B", "L", "P", "PAGES"),
    tune_by=("D",),
    default=_tile,
    candidates=lambda a: [
        _tile(a), *(_tile(a, size, warps) for size in (512, 1024, 2048, 4096) for warps in (2, 4)),
    ],
    dependent=True,
)  # fmt: skip
def qkv_split_cache_rows(
    X, WEIGHTS, ANGLES, Q, KC, VC, KS, VS, SLOTS, B, L, P, PAGES, PAGE, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPED: tl.constexpr, SILU: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    T: tl.constexpr, HB: tl.constexpr, TK: tl.constexpr, KB: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program takes T tokens by HB query heads, or TK tokens by KB key heads and their values."""
    begin_dependent(DEPENDENT)
    SPAN: tl.constexpr = max(T, TK)
    QUERIES: tl.constexpr = (H + HB - 1) // HB
    ASKING: tl.constexpr = QUERIES * (SPAN // T)
    KEYS: tl.constexpr = (KV + KB - 1) // KB
    UNITS: tl.constexpr = ASKING + KEYS * (SPAN // TK)
    unit = tl.program_id(0) % UNITS
    start = tl.program_id(0) // UNITS * SPAN
    # Names of their own in each branch: a name of both must have one shape
    if unit < ASKING:
        row_q = start + unit // QUERIES * T + tl.arange(0, T)
        live_q = row_q < B * L
        batch_q, index_q, position_q = locate(row_q, B, L, P, ANGLES, False)
        head_q = unit % QUERIES * HB + tl.arange(0, HB)[None, :, None]
        column_q = column_of(head_q, "q", H, KV, D, GROUPED)
        at_q = (batch_q * X.stride_b + index_q * X.stride_l)[:, None, None] + column_q * X.stride_n
        to_q = ((batch_q * L + index_q)[:, None, None] * H + head_q) * D
        split_heads(
            X, WEIGHTS.q, Q, ANGLES, at_q, to_q, live_q[:, None, None] & (head_q < H), position_q * ANGLES.stride_l, position_q,
            live_q, eps, D, COLUMNS, SILU,
        )  # fmt: skip
    else:
        other = unit - ASKING
        row = start + other // KEYS * TK + tl.arange(0, TK)
        live = row < B * L
        batch, index, position = locate(row, B, L, P, ANGLES, False)
        head = other % KEYS * KB + tl.arange(0, KB)
        inside = (live[:, None] & (head < KV)[None, :])[:, :, None]
        page, place, there = place_of(SLOTS.data, batch * SLOTS.stride_b + index * SLOTS.stride_l, live, PAGES, PAGE)
        known = there[:, None] & (head < KV)[None, :]
        h = head.to(tl.int64)[None, :, None]
        from_ = (batch * X.stride_b + index * X.stride_l)[:, None, None]
        at_v = from_ + column_of(head[None, :, None], "v", H, KV, D, GROUPED) * X.stride_n
        to_v = (page * VC.stride_b + place * VC.stride_t)[:, None, None] + h * VC.stride_h
        write_values(X, VC, VS, at_v, to_v, inside, page, place, head, known, D, COLUMNS.LANES, SILU, V_FORMAT)
        at_k = from_ + column_of(head[None, :, None], "k", H, KV, D, GROUPED) * X.stride_n
        to_k = (page * KC.stride_b + place * KC.stride_t)[:, None, None] + h * KC.stride_h
        write_keys(
            X, WEIGHTS.k, KC, KS, ANGLES, at_k, to_k, inside, position * ANGLES.stride_l, position, live, page, place, head,
            known, eps, D, COLUMNS, SILU, K_FORMAT,
        )  # fmt: skip


# ---------------------------------------------------------------- host


def forward(**values) -> Tensor:
    a = SimpleNamespace(**values, transposed=False, cu_seqlens=None, cp_size=1, cp_rank=0)
    pages, page = a.k_cache.shape[:2]
    check_indices("qkv_split_cache", "slots", a.slots, -1, pages * page)
    constants = constants_of(a)
    del constants["BATCH_INNER"]
    x, weights, angles, (B, L, P) = operands(a, "qkv_split_cache")
    q = torch.empty(B, L, constants["H"], a.head_dim, dtype=a.qkv.dtype, device=a.qkv.device)
    qkv_split_cache_rows(
        x, weights, angles, q, heads_of(as_codes(a.k_cache)), heads_of(as_codes(a.v_cache)), scale_heads(a.k_scale),
        scale_heads(a.v_scale), Indices(a.slots, *a.slots.stride()), B, L, P, pages, page, a.eps,
        K_FORMAT=words_of(a.k_cache, a.k_scale), V_FORMAT=words_of(a.v_cache, a.v_scale), **constants,
    )  # fmt: skip
    return q


def words_of(cache: Tensor, scale: Tensor | None) -> str:
    """The words of a cache's codes: a program here has whole heads, and must know of blocks within them."""
    words = format_of(cache, scale)
    return words if scale is None or scale.shape[3] == 1 else words.replace(":row:", ":1x128:")


def check(
    qkv, heads, kv_heads, head_dim, k_cache, v_cache, slots, q_weight, k_weight, freqs, cos, sin, positions, k_scale, v_scale, eps,
    rotary_dim, pairing, packing, silu, mscale,
) -> None:  # fmt: skip
    op = "qkv_split_cache"
    check_split(
        qkv, heads, kv_heads, head_dim, q_weight, k_weight, freqs, cos, sin, eps, rotary_dim, pairing, packing, False, silu, mscale,
        None, 1, 0, positions, op,
    )  # fmt: skip
    own = local_heads(qkv, heads, kv_heads, head_dim, op)[1]
    for name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        pages, page = cache.shape[:2]
        if tuple(cache.shape[2:]) != (own, head_dim):
            raise ValueError(
                f"{op}: {name}_cache must be [pages, page, kv_heads, head_dim] = [.., .., {own}, {head_dim}],"
                f" got {list(cache.shape)}"
            )
        blocks_of = -(-head_dim // SCALED)
        sizes = ((pages, page, own, 1), (pages, page, own, blocks_of), (1, 1, own, 1), (1, 1, 1, 1))
        check_cache(op, name, qkv, cache, scale, sizes)


def cost(
    qkv, k_cache, v_cache, slots, positions, k_scale, v_scale, freqs, cos, sin, head_dim, **_: Any
) -> tuple[int, int]:
    """Bytes read and written: of tokens, with their slots and angles, and of their places in caches and scales."""
    tokens, kv_heads = slots.numel(), k_cache.shape[2]
    angles = [t for t in (freqs, cos, sin) if t is not None]
    read = qkv.numel() * qkv.element_size() + sum(tokens * t.shape[-1] * t.element_size() for t in angles)
    read += sum(t.numel() * t.element_size() for t in (slots, positions) if t is not None)
    keys = tokens * kv_heads * head_dim
    stored = (qkv.numel() - 2 * keys) * qkv.element_size() + keys * (k_cache.element_size() + v_cache.element_size())
    scales = (s for s in (k_scale, v_scale) if s is not None and s.shape[0] > 1)
    return read, stored + sum(4 * tokens * kv_heads * s.shape[3] for s in scales)


qkv_split_cache = Op(
    "qkv_split_cache", reference, inputs, Triton(forward, None, single),
    where={
        "qkv": "float[batch length width]", **dict.fromkeys(("q_weight", "k_weight"), "float[head_dim]"),
        **dict.fromkeys(("freqs", "cos", "sin"), "float[positions angles]"),
        **dict.fromkeys(("k_cache", "v_cache"), f"{CACHE}[pages page kv_heads head_dim]"),
        **{f"{n}_scale": f"float32|float64[pages? page? kv_heads? {n}_blocks]" for n in ("k", "v")},
        **dict.fromkeys(("slots", "positions"), "int[batch length]"), "mscale": above(0.0),
        "heads": at_least(1), "kv_heads": at_least(1), "head_dim": at_least(1), "eps": at_least(0.0),
    },
    results={"q": "qkv[batch length own_heads head_dim]"}, writes=("k_cache", "v_cache", "k_scale", "v_scale"),
    sizes=lambda a: {"own_heads": local_heads(a.qkv, a.heads, a.kv_heads, a.head_dim, "qkv_split_cache")[0]},
    out=Out(contiguous=("q",)), check=check, cost=Cost(cost),
)  # fmt: skip
