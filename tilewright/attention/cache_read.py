"""How kernels over caches of keys and values read them: pages by a table, columns in parts, codes as numbers, their scales.

Head columns are cut into parts of one width but for the last: 576 is 512 + 64, and columns with a scale for every 128 are blocks of
128, whose products are scaled one by one, for codes times scales would have to be rounded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import can_read, check_ends, check_indices, check_pages
from ..core.tensor import cdiv, power_of_two
from ..device.quantize import decode
from ..formats.fill import is_fast
from .portable import Scores, parts_of
from .tiles import Lengths, Window

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


LIFT = tl.constexpr(2.0**15)  # of weights in fp16, which are at most 1: they have all their digits down to 2**-29


# ---- on the device ---------------------------------------------------------------------------------------------------


@triton.constexpr_function
def width_of(first, last, count, i):
    """The width of the i-th part of columns. Numbers, for Triton 3.6 hands such a function no named tuple."""
    return last if i == count - 1 else first


@triton.jit
def look_up(TABLE, sequence, j, there, PAGE: tl.constexpr):
    """What the table says is the page of keys j of a sequence."""
    number = (j.to(tl.uint32) // PAGE).to(tl.int32)  # a shift: no j is negative
    at = sequence.to(tl.int64) * TABLE.stride_s + number.to(tl.int64) * TABLE.stride_m
    return tl.load(TABLE.data + at, there, 0)


@triton.jit
def find(TABLE, page, sequence, j, there, PAGES, PAGE: tl.constexpr):
    """(page, place in it, whether there is such a page) of keys j of a sequence; one that has no such page is not read. `page` is
    what was looked up before, or None."""
    if TABLE is None:
        return sequence, j, there
    else:
        if page is None:
            page = look_up(TABLE, sequence, j, there, PAGE)
        known = there & (page >= 0) & (page < PAGES)
        return tl.where(known, page, 0).to(tl.int32), (j.to(tl.uint32) % PAGE).to(tl.int32), known


@triton.jit
def load_cached(X, page, place, head, live, ALL: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH]: columns FROM to FROM + WIDTH, of ALL, of one head at places of pages; 0 where it is not live."""
    column = FROM + tl.arange(0, WIDTH)
    at = page.to(tl.int64) * X.stride_b + head.to(tl.int64) * X.stride_h + place.to(tl.int64) * X.stride_t
    at = at[:, None] + column.to(tl.int64)[None, :] * X.stride_d
    inside = live[:, None]
    if FROM + WIDTH > ALL:
        inside = inside & (column < ALL)[None, :]
    return tl.load(X.data + at, inside, 0 if X.data.dtype.element_ty.is_int() else 0.0)


@triton.jit
def load_part(X, page, place, head, live, COLUMNS: tl.constexpr, i: tl.constexpr):
    """The i-th part of the columns."""
    WIDTH: tl.constexpr = width_of(COLUMNS.FIRST, COLUMNS.LAST, COLUMNS.COUNT, i)
    return load_cached(X, page, place, head, live, COLUMNS.ALL, i * COLUMNS.FIRST, WIDTH)


# Of two pairs: the first of both, and the second of both. The compiler would take them apart byte by byte
WIDEN_PAIRS = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)


@triton.jit
def numbers(x, DTYPE: tl.constexpr):
    """Codes as numbers of a dtype that holds them all; what is no code, as it is."""
    if x.dtype == tl.uint8:
        return decode(x, "e4m3").to(DTYPE)
    elif x.dtype == tl.float8e4nv:  # by way of fp32: from fp16 to bf16 there is only a slow instruction
        return x.to(tl.float16).to(tl.float32).to(DTYPE)
    elif x.dtype == tl.int8 and tl.float16 == DTYPE:  # the digits of 1152 + x: conversions of integers are slow
        return (x.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    elif x.dtype == tl.int8:
        return x.to(DTYPE)
    else:
        return x


@triton.jit
def numbers_of_pairs(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """(even columns, odd columns) of codes that were loaded two at a time."""
    if KIND == "e4m3":
        even, odd = tl.inline_asm_elementwise(WIDEN_PAIRS, "=r,=r,r", [x], (tl.float16, tl.float16), True, 2)
        return even.to(tl.float32).to(DTYPE), odd.to(tl.float32).to(DTYPE)
    else:
        even, odd = x.to(tl.uint8), (x >> 8).to(tl.uint8)
        if KIND == "int8":
            even, odd = even.to(tl.int8, bitcast=True), odd.to(tl.int8, bitcast=True)
        return numbers(even, DTYPE), numbers(odd, DTYPE)


@triton.jit
def load_scale(S, page, place, head, live, part):
    """The scale of a part of columns: a number, or [n] of places of pages."""
    if S.stride_p is None:
        return tl.load(S.data + head.to(tl.int64) * S.stride_h).to(tl.float32)
    else:
        at = page.to(tl.int64) * S.stride_p + place.to(tl.int64) * S.stride_t + head.to(tl.int64) * S.stride_h
        if S.stride_c is not None:
            at += part * S.stride_c
        return tl.load(S.data + at, live, 0.0).to(tl.float32)


# ---- host ------------------------------------------------------------------------------------------------------------


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


def pairs_of(t: Tensor, columns: int) -> str | None:
    """The kind of codes, if that many columns of them can be loaded two at a time."""
    odd = any(n % 2 for n in (columns, t.shape[3], *t.stride()[:3], t.storage_offset()))
    # Plans tell apart words of 16 bytes, and no smaller ones
    if t.element_size() > 1 or t.stride(3) != 1 or odd or t.data_ptr() % 16:
        return None
    return "int8" if t.dtype == torch.int8 else "e4m3" if is_fast(t) else "bytes"


def table_of(a: SimpleNamespace) -> Table | None:
    return None if a.block_table is None else Table(a.block_table, *a.block_table.stride())


def lengths_of(a: SimpleNamespace) -> Lengths:
    """Those of a dense batch."""
    return Lengths(None, a.kv_len, None if a.kv_len is None else a.kv_len.stride(0), None)


def window_of(a: SimpleNamespace) -> Window:
    """None to the left where it reaches all keys."""
    left = None if a.left is None or a.left >= capacity_of(a) else a.left
    return Window(left, 0 if a.causal and a.tree is None else None)


def bending_of(a: SimpleNamespace) -> Scores:
    scale = a.q.shape[-1] ** -0.5 if a.scale is None else float(a.scale)
    slopes = None if a.slopes is None else a.slopes.contiguous()
    return Scores(scale, float(a.softcap) or None, slopes, None, None, None, None, None)


def keys_together(page: int, most: int) -> int:
    """Keys that lie in one page wherever a block of them begins: the largest power of two that divides pages, `most` at most, and
    `most` where there are no pages."""
    return min(most, page & -page) if page else most


def capacity_of(a: SimpleNamespace) -> int:
    """How many keys a sequence has room for."""
    return a.k_cache.shape[1] * (1 if a.block_table is None else a.block_table.shape[1])


def value_columns(v_cache: Tensor | None, k_cache: Tensor, value_dim: int | None) -> int:
    """How wide values are: those of a cache of their own, or the first columns of the keys."""
    if v_cache is not None:
        return v_cache.shape[-1]
    return k_cache.shape[-1] if value_dim is None else value_dim


def check_keys(a: SimpleNamespace) -> None:
    """With TILEWRIGHT_DEBUG=1: raise where marks, lengths or pages on the device are not what they may be. Pages count if a query
    sees a key of theirs: those past kv_len or before every window do not."""
    op, length = "cached_attention", a.q.shape[1]
    check_ends(op, "cu_seqlens_q", a.cu_seqlens_q, length)
    if a.kv_len is None:
        return
    check_indices(op, "kv_len", a.kv_len, 0, capacity_of(a) + 1)
    if a.block_table is None or not can_read(a.kv_len):
        return
    keys = a.kv_len.long()
    queries = torch.full_like(keys, length) if a.cu_seqlens_q is None else a.cu_seqlens_q.diff().long()
    first = torch.zeros_like(keys) if a.left is None else keys - queries - min(a.left, capacity_of(a))
    last = torch.where(queries > 0, keys, 0)
    check_pages(op, "block_table", a.block_table, a.k_cache.shape[1], a.k_cache.shape[0], first, last)
