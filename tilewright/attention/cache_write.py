"""What writes caches of keys and values: tokens into their slots, quantised as they are stored, and slots into other slots.

    cache[slots[t] // page, slots[t] % page] = k[t];  as codes: s = amax / 448 or 127,  code = round(k[t] / s)

A slot is a place of a page, counted through all pages. Kernels take keys and values in one launch, side by side. What is moved
is read by a first launch and written by a second, so that a slot may be both read and written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_indices
from ..core.draw import Draw
from ..core.tensor import cdiv, power_of_two
from ..device.dependent import begin_dependent
from ..device.integers import MAGIC, byte_code, integer_scale
from ..device.quantize import amax, encode, has, scale_of
from ..formats.fill import is_fast
from ..formats.fp8 import fp8
from ..formats.integers import int8
from ..op import Bars, Cost, Op, Triton, single
from ..runtime.kernel import kernel
from .cache_read import SCALED, as_codes
from .portable import Heads, heads_of

CACHE = "float|float8_e4m3fn|int8"
LARGEST = 448.0  # of e4m3


def reference(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Write `k` [..., kv_heads, head_dim] and `v` of tokens into the `slots` [...] of caches [pages, page, kv_heads, columns].

    Slot s is place `s % page` of page `s // page`; one below 0 or past the last is not written, and no two tokens may have the
    same. Without v, and v_cache, there are keys alone. A cache has the dtype of k, or it holds codes, e4m3 or int8. A scale
    [pages, page, kv_heads, 1], or with a number for each 128 columns in the place of 1, is written beside its codes: amax / 448, or
    127, as `fp8("row", pow2=False, rule="exact")` and `int8("row")` have it. Any other [1, 1, 1 or kv_heads, 1] is read: codes of
    k / scale, saturated; what is not finite becomes e4m3's NaN, or in int8 the largest code, and 0 for NaN.
    """
    return (
        *(written(x, cache, scale, slots)[0] for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale))),
        *(written(x, cache, scale, slots)[1] for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale))),
    )


def written(x: Tensor | None, cache: Tensor | None, scale: Tensor | None, slots: Tensor) -> tuple[Any, Any]:
    """What a cache and its scale become."""
    if x is None or cache is None:
        return None, None
    rows = x.reshape(slots.numel(), *cache.shape[2:])
    if scale is None:
        return put(cache, slots, rows.to(cache.dtype)), None
    if scale.shape[:3] != cache.shape[:3]:
        return put(cache, slots, static_codes(rows, scale, cache.dtype).to(cache.dtype)), scale.clone()
    blocked = scale.shape[3] != 1
    granularity = "1x128" if blocked else "row"
    format = int8(granularity) if cache.dtype == torch.int8 else fp8(granularity, pow2=False, rule="exact")
    codes = format.quantize(rows)
    made = (codes.scale.t() if blocked else codes.scale).reshape(*rows.shape[:2], scale.shape[3])
    return put(cache, slots, codes.data.to(cache.dtype)), put(scale, slots, made.to(scale.dtype))


def static_codes(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of [tokens, kv_heads, columns] by scales that are given, [1, 1, 1 or kv_heads, 1]."""
    x = rows.float()
    y = x / scale.float().reshape(-1, 1)
    if dtype == torch.int8:
        return torch.where(y.isnan(), 0.0, y).round().clamp(-127.0, 127.0).to(torch.int8)
    y = torch.where(x.isfinite(), y, torch.nan)
    codes = y.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(y.isnan(), 0x7F, codes).view(torch.float8_e4m3fn)


def put(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """A cache with rows [tokens, ...] in its slots."""
    codes = cache.dtype == torch.float8_e4m3fn  # which torch does not move
    flat = (cache.view(torch.uint8) if codes else cache).flatten(0, 1)
    rows = rows.view(torch.uint8) if codes else rows
    at = slots.reshape(-1).long()
    at = torch.where((at >= 0) & (at < flat.shape[0]), at, flat.shape[0])
    made = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])]).index_copy(0, at, rows)[:-1].reshape(cache.shape)
    return made.view(cache.dtype) if codes else made


def draw_cache(draw: Draw, name: str, heads: int, columns: int, blocked: bool = True) -> tuple[Tensor, Tensor | None]:
    """A cache of numbers, or of codes with a scale that is written or read."""
    shape = (draw.option("pages", 5, 2, 9), draw.option("page", 4, 1, 16), heads)
    if not draw.option(f"{name}_scale", False, True):
        return draw.tensor(*shape, columns), None
    kind = draw.option(f"{name}_codes", torch.float8_e4m3fn, torch.int8)
    sizes = ((*shape, 1), (1, 1, heads, 1), (1, 1, 1, 1), *([(*shape, -(-columns // SCALED))] if blocked else []))
    scale = draw.uniform(*draw.option(f"{name}_scales", *sizes), low=0.005, high=0.03, dtype=torch.float32)
    return draw.integers(*shape, columns, low=-9, high=9, dtype=torch.int8).to(kind), scale


def draw_slots(draw: Draw, tokens: int, places: int) -> Tensor:
    """Slots of which none is named twice, and some are none."""
    order = draw.uniform(places, dtype=torch.float32).argsort()
    order = torch.cat([order, order.new_full((tokens,), -1)])[:tokens]
    skipped = draw.uniform(tokens, dtype=torch.float32) < 0.2
    return torch.where(skipped, -1, order).to(draw.option("index", torch.int64, torch.int32))


def inputs(draw: Draw) -> dict[str, Any]:
    tokens, width = draw.dim("tokens"), draw.dim("head_dim", (64, 128, 40, 200, 17))
    heads = draw.dim("heads", (2, 1, 3))
    k_cache, k_scale = draw_cache(draw, "k", heads, width)
    v_cache, v_scale = draw_cache(draw, "v", heads, max(1, width // 2))
    own = draw.option("v", True, False)
    return {
        "k": draw.tensor(tokens, heads, width, scale=3.0),
        "v": draw.tensor(tokens, heads, max(1, width // 2)) if own else None,
        "k_cache": k_cache,
        "v_cache": v_cache if own else None,
        "slots": draw_slots(draw, tokens, k_cache.shape[0] * k_cache.shape[1]),
        "k_scale": k_scale,
        "v_scale": v_scale if own else None,
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def place_of(SLOTS, at, live, PAGES, PAGE):
    """(page, place in it, whether there is one) of the slots at these offsets."""
    slot = tl.load(SLOTS + at, live, -1).to(tl.int64)
    known = (slot >= 0) & (slot < PAGES.to(tl.int64) * PAGE)
    slot = tl.where(known, slot, 0)
    return slot // PAGE, slot % PAGE, known


@triton.jit
def own_scale(top, FORMAT: tl.constexpr):
    """(scale, multiplier) of codes of which the largest number is this."""
    if has(FORMAT, "int8"):
        return integer_scale(top, FORMAT)
    else:
        return scale_of(top, FORMAT)


@triton.jit
def codes_of(y, s, mult, FORMAT: tl.constexpr):
    """Codes of y by a scale of their own, or by one that is given, which has no multiplier; both spread over y."""
    if has(FORMAT, "static"):
        s = s + tl.zeros_like(y)
        if has(FORMAT, "int8"):
            v = tl.div_rn(y, s)
            kept = tl.where(
                v == v, -1, 0
            )  # of integers: the low bits of a number alone are stored wrongly (`toolchain/stores.py`)
            v = tl.minimum(tl.maximum(v, -127.0), 127.0)
            return ((v + MAGIC).to(tl.int32, bitcast=True) & kept).to(tl.int8)
        else:
            return encode(y, s, s, FORMAT)
    elif has(FORMAT, "int8"):
        return byte_code(y, s, mult, FORMAT)
    else:
        return encode(y, s, mult, FORMAT)


@triton.jit
def write_block(
    X, C, S, SLOTS, stride_s, row, ROWS, HEADS, PAGES, PAGE, block, COLUMNS, FORMAT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One block of columns of rows (token, head): as they are, or as codes with the block's scale."""
    # Found here and not once for keys and values: shared by two branches, they made Triton 3.6 move a conversion of layouts above
    # what it converts, and refuse the kernel ("operand #0 does not dominate this use")
    t = row // HEADS
    head = row % HEADS
    page, place, known = place_of(SLOTS, t * stride_s, row < ROWS, PAGES, PAGE)
    column = block * WIDTH + tl.arange(0, WIDTH)
    inside = known[:, None] & (column < COLUMNS)[None, :]
    at = t.to(tl.int64) * X.stride_t + head.to(tl.int64) * X.stride_h
    x = tl.load(X.data + at[:, None] + column.to(tl.int64)[None, :] * X.stride_d, inside, 0.0)
    at = page * C.stride_b + place * C.stride_t + head.to(tl.int64) * C.stride_h
    to = C.data + at[:, None] + column.to(tl.int64)[None, :] * C.stride_d
    if FORMAT == "":
        tl.store(to, x, inside)
    else:
        y = x.to(tl.float32)
        at = page * S.stride_b + place * S.stride_t + head.to(tl.int64) * S.stride_h + block * S.stride_d
        if has(FORMAT, "static"):
            s = tl.load(S.data + at, known, 1.0).to(tl.float32)
            mult = s
        else:
            s, mult = own_scale(amax(y, 1), FORMAT)
            tl.store(S.data + at, s, known & (block * WIDTH < COLUMNS))
        tl.store(to, codes_of(y, s[:, None], mult[:, None], FORMAT), inside)


@kernel(
    grid=lambda a: (cdiv(a.ROWS, a.BLOCK_R), a.BLOCKS, 1 if a.VC is None else 2), tokens=("ROWS", "PAGES"),
    default=lambda a: {"BLOCK_R": max(1, 4096 // max(a.K_WIDTH, a.V_WIDTH)), "num_warps": 4}, dependent=True,
)  # fmt: skip
def cache_write_rows(
    K, V, KC, VC, KS, VS, SLOTS, stride_s, ROWS, HEADS, PAGES, PAGE, K_COLUMNS, V_COLUMNS, BLOCKS, K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program for a few rows (token, head), and a block of their columns, of keys or of values."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    block = tl.program_id(1)
    if tl.program_id(2) == 0:
        write_block(K, KC, KS, SLOTS, stride_s, row, ROWS, HEADS, PAGES, PAGE, block, K_COLUMNS, K_FORMAT, K_WIDTH)
    elif VC is not None:
        write_block(V, VC, VS, SLOTS, stride_s, row, ROWS, HEADS, PAGES, PAGE, block, V_COLUMNS, V_FORMAT, V_WIDTH)


@triton.jit
def move_block(C, P, page, place, known, row, head, block, COLUMNS, OUT: tl.constexpr, WIDTH: tl.constexpr):
    """One block of columns of rows of a cache into P [rows, COLUMNS], or (OUT) from there."""
    column = block * WIDTH + tl.arange(0, WIDTH)
    inside = known[:, None] & (column < COLUMNS)[None, :]
    at = page * C.stride_b + place * C.stride_t + head.to(tl.int64) * C.stride_h
    cache = C.data + at[:, None] + column.to(tl.int64)[None, :] * C.stride_d
    kept = P + row[:, None] * COLUMNS + column[None, :]
    ZERO: tl.constexpr = 0 if P.dtype.element_ty.is_int() else 0.0
    if OUT:
        tl.store(cache, tl.load(kept, inside, ZERO), inside)
    else:
        tl.store(kept, tl.load(cache, inside, ZERO), inside)


@kernel(
    grid=lambda a: (cdiv(a.ROWS, a.BLOCK_R), a.BLOCKS, 1 if a.VC is None else 2), tokens=("ROWS", "PAGES"),
    default=lambda a: {"BLOCK_R": max(1, 4096 // a.WIDTH), "num_warps": 4}, dependent=True,
)  # fmt: skip
def cache_move_rows(
    KC, VC, KP, VP, SOURCE, TARGET, stride_s, stride_t, ROWS, HEADS, PAGES, PAGE, K_COLUMNS, V_COLUMNS, BLOCKS,
    OUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rows (move, head) from SOURCE to KP and VP, or (OUT) from there to TARGET, of moves that have both."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = row % HEADS
    page, place, known = place_of(SOURCE, row // HEADS * stride_s, row < ROWS, PAGES, PAGE)
    to_page, to_place, there = place_of(TARGET, row // HEADS * stride_t, row < ROWS, PAGES, PAGE)
    known &= there
    if OUT:
        page = to_page
        place = to_place
    block = tl.program_id(1)
    if tl.program_id(2) == 0:
        move_block(KC, KP, page, place, known, row, head, block, K_COLUMNS, OUT, WIDTH)
    elif VC is not None:
        move_block(VC, VP, page, place, known, row, head, block, V_COLUMNS, OUT, WIDTH)


# ---- host ------------------------------------------------------------------------------------------------------------


def by_tokens(x: Tensor) -> Heads:
    """[..., kv_heads, columns] by the strides of [tokens, kv_heads, columns]."""
    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return Heads(flat, 0, *flat.stride())


def format_of(cache: Tensor, scale: Tensor | None) -> str:
    """The words of a cache's codes (`device/store.py`): none of numbers."""
    if scale is None:
        return ""
    kind = "int8" if cache.dtype == torch.int8 else "e4m3"
    given = "row" if tuple(scale.shape[:3]) == tuple(cache.shape[:3]) else "static"
    return f"{kind}:{given}:fp32:exact" + (":fast" if is_fast(cache) else "")


def width_of(cache: Tensor, scale: Tensor | None) -> int:
    """Columns of a program: of a block that has its own scale, else all."""
    blocked = scale is not None and scale.shape[3] > 1
    return SCALED if blocked else max(16, power_of_two(cache.shape[3]))


def scale_heads(scale: Tensor | None) -> Heads | None:
    if scale is None:
        return None
    return Heads(scale, *(0 if n == 1 else s for n, s in zip(scale.shape, scale.stride())))


def forward(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    pages, page, heads, columns = k_cache.shape
    check_indices("cache_write", "slots", slots, -1, pages * page)
    if not k.numel() or not k_cache.numel():
        return
    at = slots.reshape(-1)
    widths = [width_of(c, s) if c is not None else 16 for c, s in ((k_cache, k_scale), (v_cache, v_scale))]
    wide = columns if v_cache is None else v_cache.shape[3]
    cache_write_rows(
        by_tokens(k), None if v is None else by_tokens(v), heads_of(as_codes(k_cache)),
        None if v_cache is None else heads_of(as_codes(v_cache)), scale_heads(k_scale), scale_heads(v_scale), at, at.stride(0),
        at.shape[0] * heads, heads, pages, page, columns, wide, max(cdiv(columns, widths[0]), cdiv(wide, widths[1])),
        K_FORMAT=format_of(k_cache, k_scale), V_FORMAT="" if v_cache is None else format_of(v_cache, v_scale),
        K_WIDTH=widths[0], V_WIDTH=widths[1],
    )  # fmt: skip


def check_cache(op: str, name: str, x: Tensor, cache: Tensor, scale: Tensor | None, sizes: tuple) -> None:
    """Raise where a cache does not hold what is written into it, or its scale is of none of these sizes."""
    codes = cache.element_size() == 1
    if not cache.shape[3]:
        raise ValueError(f"{op}: {name}_cache must have columns, got none")
    if codes != (scale is not None):
        raise ValueError(f"{op}: {name}_scale is for codes, and codes need it; {name}_cache has {cache.dtype}")
    if not codes and cache.dtype != x.dtype:
        raise ValueError(f"{op}: {name}_cache must be {x.dtype}, as what is written, or codes, got {cache.dtype}")
    if codes and tuple(scale.shape) not in sizes:
        said = ", ".join(str(list(size)) for size in dict.fromkeys(sizes))
        raise ValueError(f"{op}: {name}_scale must be one of {said}, got {list(scale.shape)}")


def check(k, v, k_cache, v_cache, slots, *, k_scale, v_scale) -> None:
    op = "cache_write"
    if (v is None) != (v_cache is None):
        raise ValueError(f"{op}: v and v_cache are given together or not at all")
    for name, x, cache, scale in (("k", k, k_cache, k_scale), ("v", v, v_cache, v_scale)):
        if cache is None:
            if scale is not None:
                raise ValueError(f"{op}: {name}_scale is given, but no {name}_cache")
            continue
        pages, page, heads, columns = cache.shape
        sizes = ((pages, page, heads, 1), (pages, page, heads, -(-columns // SCALED)), (1, 1, heads, 1), (1, 1, 1, 1))
        check_cache(op, name, x, cache, scale, sizes)


def cost(k, v, k_cache, v_cache, slots, *, k_scale, v_scale) -> tuple[int, int]:
    """Bytes read and written: of tokens, and of their slots in caches and scales."""
    there = [(k, k_cache, k_scale), *([] if v is None else [(v, v_cache, v_scale)])]
    read = sum(x.numel() * x.element_size() for x, _, _ in there) + slots.numel() * slots.element_size()
    tokens = slots.numel()
    stored = sum(x.numel() * c.element_size() for x, c, _ in there)
    return read, stored + sum(
        tokens * s.shape[2] * s.shape[3] * 4 for _, c, s in there if s is not None and s.shape[0] > 1
    )


cache_write = Op(
    "cache_write", reference, inputs, Triton(forward, None, single), check=check, cost=Cost(cost), bars=Bars("G"), results={},
    where={
        "k": "float[... kv_heads key_dim]", "v": "k[... kv_heads value_dim]", "k_cache": f"{CACHE}[pages page kv_heads key_dim]",
        "v_cache": f"{CACHE}[pages page kv_heads value_dim]", "slots": "int[...]",
        "k_scale": "float32|float64[pages? page? kv_heads? key_blocks]",
        "v_scale": "float32|float64[pages? page? kv_heads? value_blocks]",
    },
    writes=("k_cache", "v_cache", "k_scale", "v_scale"),
)  # fmt: skip


# ---- slots into slots ------------------------------------------------------------------------------------------------


def reference_move(
    k_cache: Tensor, v_cache: Tensor | None, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Copy what caches [pages, page, kv_heads, columns] hold in slots `source` [moves] into slots `target`.

    All are read before any is written, so that drafts that were accepted can close up. A move of which either slot is out of
    range is not made, and no two may have one target. Without v_cache there are keys alone; scales of tokens are a cache too.
    """
    return tuple(None if cache is None else moved(cache, source, target) for cache in (k_cache, v_cache))


def moved(cache: Tensor, source: Tensor, target: Tensor) -> Tensor:
    count = cache.shape[0] * cache.shape[1]
    known = (source >= 0) & (source < count)
    codes = cache.dtype == torch.float8_e4m3fn
    flat = (cache.view(torch.uint8) if codes else cache).flatten(0, 1)
    flat = flat if count else flat.new_zeros(1, *flat.shape[1:])
    rows = flat[torch.where(known, source, 0).long()]
    return put(cache, torch.where(known, target, -1), rows.view(cache.dtype) if codes else rows)


def inputs_move(draw: Draw) -> dict[str, Any]:
    columns = draw.dim("head_dim", (64, 40, 200, 17))
    shape = (draw.option("pages", 5, 2, 9), draw.option("page", 4, 1, 16), draw.dim("heads", (2, 1, 3)))
    kind, places, moves = (
        draw.option("kind", None, torch.float8_e4m3fn, torch.int8),
        shape[0] * shape[1],
        draw.dim("tokens"),
    )
    wide = draw.tensor(*shape, columns + max(1, columns // 2), scale=9.0)
    wide = wide if kind is None else wide.float().to(kind)
    return {
        "k_cache": wide[..., :columns].contiguous(),
        "v_cache": draw.maybe("v_cache", lambda: wide[..., columns:].contiguous()),
        "source": draw.integers(moves, low=-1, high=places + 1),
        "target": draw_slots(draw, moves, places),
    }


def forward_move(k_cache: Tensor, v_cache: Tensor | None, source: Tensor, target: Tensor) -> None:
    pages, page, heads, columns = k_cache.shape
    for name, slots in (("source", source), ("target", target)):
        check_indices("cache_move", name, slots, -1, pages * page)
    rows = source.shape[0] * heads
    if not rows or not k_cache.numel():
        return
    caches = [as_codes(k_cache), as_codes(v_cache)]
    kept = [None if c is None else torch.empty(rows, c.shape[3], dtype=c.dtype, device=c.device) for c in caches]
    wide = columns if v_cache is None else v_cache.shape[3]
    width = max(16, min(1024, power_of_two(max(columns, wide))))
    for out in (False, True):
        cache_move_rows(
            *(None if c is None else heads_of(c) for c in caches), *kept, source, target, source.stride(0), target.stride(0),
            rows, heads, pages, page, columns, wide, cdiv(max(columns, wide), width), OUT=out, WIDTH=width,
        )  # fmt: skip


def cost_move(k_cache: Tensor, v_cache: Tensor | None, source: Tensor, target: Tensor) -> tuple[int, int]:
    """Bytes read and written: of both slots of each move, and of their numbers."""
    each = sum(c.shape[2] * c.shape[3] * c.element_size() for c in (k_cache, v_cache) if c is not None)
    moves = source.shape[0]
    return moves * (each + source.element_size() + target.element_size()), moves * each


def check_move(k_cache: Tensor, v_cache: Tensor | None, source: Tensor, target: Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is not None and not cache.shape[3]:
            raise ValueError(f"cache_move: {name} must have columns, got none")


cache_move = Op(
    "cache_move", reference_move, inputs_move, Triton(forward_move, None, single), check=check_move, cost=Cost(cost_move),
    bars=Bars("G"),
    where={
        "k_cache": f"{CACHE}[pages page kv_heads key_dim]", "v_cache": f"{CACHE}[pages page kv_heads value_dim]",
        "source": "int[moves]", "target": "int[moves]",
    },
    results={}, writes=("k_cache", "v_cache"),
)  # fmt: skip
