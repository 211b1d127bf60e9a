"""Which rows of which sequence a program works on, and which keys these see.

A tile is BLOCK rows of one sequence: queries, or keys in a backward that goes over them. Dense sequences are as long as the
tensors; of packed ones a kernel before makes a table, since their lengths are known to the device alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_ends, check_indices
from ..core.tensor import cdiv
from ..runtime.kernel import kernel

FIELDS = tl.constexpr(8)  # numbers of a tile in a table, of which the last is spare: a row is two words of 16 bytes
MARKS = tl.constexpr(64)  # marks that are looked at together


class Lengths(NamedTuple):
    """What says how long sequences are: a table of tiles or None, and how many keys there are, [batch or sequences] or, with a
    stride for rows, [batch, length], or None."""

    table: Any = None
    kv_len: Any = None
    stride_b: Any = None
    stride_l: Any = None


class Window(NamedTuple):
    """How many keys before and after its own position a query sees; None is all."""

    left: Any = None
    right: Any = None


class Tile(NamedTuple):
    """Rows of a sequence: which sequence (or batch), its first query and key among all, how many there are of both, the first of
    the tile's own rows in it."""

    sequence: Any
    first_q: Any
    count_q: Any
    first_k: Any
    count_k: Any
    start: Any


@triton.jit
def mark_at(MARKS_OF, i, COUNT, TOKENS):
    """The i-th beginning of a sequence: 0, the COUNT marks, TOKENS. Marks may still fall."""
    inside = (i >= 1) & (i <= COUNT)
    mark = tl.load(MARKS_OF + tl.where(inside, i - 1, 0), inside, 0).to(tl.int64)
    mark = tl.where(i > COUNT, TOKENS, mark)
    return tl.minimum(tl.maximum(mark, 0), TOKENS).to(tl.int32)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def begin_of(MARKS_OF, sequence, COUNT, TOKENS):
    """Where sequences [n] begin: the largest of the marks up to each."""
    found = tl.zeros_like(sequence)
    for i0 in range(0, COUNT + 2, MARKS):
        i = i0 + tl.arange(0, MARKS)
        mark = tl.where(i < COUNT + 2, mark_at(MARKS_OF, i, COUNT, TOKENS), 0)
        found = tl.maximum(found, tl.max(tl.where(i[None, :] <= sequence[:, None], mark[None, :], 0), 1))
    return found


@kernel(
    grid=lambda a: (cdiv(a.TILES, a.ENTRIES),),
    tokens=("TILES", "COUNT", "ROWS", "OTHERS"),
    default=lambda a: {"num_warps": 4},
)
def attention_tiles(
    TABLE, OWN, OTHER, TILES, COUNT, ROWS, OTHERS, KEYS_OWN: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr
):
    """TABLE [TILES, FIELDS]: tiles of BLOCK of the ROWS tokens that OWN [COUNT] marks, with what OTHER marks of OTHERS tokens.

    The tokens before the first mark and after the last are sequences too, without any of the others. KEYS_OWN: the rows are keys,
    the others queries. Entries past the last tile have no rows.
    """
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    # The sequence of an entry is how many sequences end at or before it, counted in tiles
    sequence = tl.zeros([ENTRIES], tl.int32)
    before = tl.zeros([ENTRIES], tl.int32)  # tiles of the sequences before that one
    tiles = tl.zeros([], tl.int32)
    top = tl.zeros([], tl.int32)  # the largest mark so far
    for i0 in range(0, COUNT + 1, MARKS):
        i = i0 + tl.arange(0, MARKS)
        inside = i < COUNT + 1
        end = tl.where(inside, mark_at(OWN, i + 1, COUNT, ROWS), 0)
        begin = tl.where(inside, mark_at(OWN, i, COUNT, ROWS), 0)
        end = tl.maximum(tl.associative_scan(tl.maximum(end, begin), 0, larger), top)
        begin = tl.maximum(tl.associative_scan(begin, 0, larger), top)
        own = tl.where(inside, tl.cdiv(end - begin, BLOCK), 0)
        done = tiles + tl.cumsum(own, 0)
        passed = (done[None, :] <= entry[:, None]) & inside[None, :]
        sequence += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, done[None, :], 0), 1))
        tiles += tl.sum(own, 0)
        top = tl.maximum(top, tl.max(end, 0))
    live = sequence < COUNT + 1
    last = tl.minimum(sequence, COUNT)
    own_first = begin_of(OWN, last, COUNT, ROWS)
    own_count = begin_of(OWN, last + 1, COUNT, ROWS) - own_first
    other_first = begin_of(OTHER, last, COUNT, OTHERS)
    other_count = begin_of(OTHER, last + 1, COUNT, OTHERS) - other_first
    real = live & (last >= 1) & (last < COUNT)
    own_count = tl.where(live, own_count, 0)
    other_count = tl.where(real, other_count, 0)
    at = TABLE + entry * FIELDS
    inside = entry < TILES
    tl.store(at, tl.where(real, last - 1, -1), inside)
    tl.store(at + 1, tl.where(KEYS_OWN, other_first, own_first), inside)
    tl.store(at + 2, tl.where(KEYS_OWN, other_count, own_count), inside)
    tl.store(at + 3, tl.where(KEYS_OWN, own_first, other_first), inside)
    tl.store(at + 4, tl.where(KEYS_OWN, own_count, other_count), inside)
    tl.store(at + 5, (entry - before) * BLOCK, inside)


@triton.jit
def tile_at(LENGTHS, index, batch, L, KEYS, BLOCK: tl.constexpr):
    """The tile of this index: of a table, or of a batch's dense sequence."""
    if LENGTHS.table is None:
        return Tile(batch, 0, L, 0, KEYS, index * BLOCK)
    else:
        at = LENGTHS.table + index * FIELDS
        return Tile(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5))


@triton.jit
def keys_of(LENGTHS, tile):
    """(how many keys the tile's sequence has, whether that is more than there is room for, and then it has none)."""
    count = tile.count_k
    wrong = False
    if LENGTHS.kv_len is not None and LENGTHS.stride_l is None:
        known = tile.sequence >= 0
        given = tl.load(LENGTHS.kv_len + tl.maximum(tile.sequence, 0).to(tl.int64) * LENGTHS.stride_b, known, 0).to(
            tl.int64
        )
        wrong = given > count
        count = tl.where(wrong, 0, tl.maximum(given, 0)).to(tl.int32)
    return count, wrong


@triton.jit
def row_keys(LENGTHS, tile, batch, row, count):
    """The same of each row [n] of queries, where lengths are given by row; elsewhere that of the sequence for all."""
    if LENGTHS.stride_l is not None:
        live = row < tile.count_q
        at = batch.to(tl.int64) * LENGTHS.stride_b + (tile.first_q + row).to(tl.int64) * LENGTHS.stride_l
        given = tl.load(LENGTHS.kv_len + at, live, 0).to(tl.int64)
        wrong = given > count
        return tl.where(wrong, 0, tl.maximum(given, 0)).to(tl.int32), wrong
    else:
        return tl.zeros_like(row) + count, row < 0


@triton.jit
def keys_seen(WINDOW, shift, count, first, last):
    """[from, to) of the keys that any of the queries first to last sees, and [from, to) of those that all of them see."""
    start = 0
    stop = count
    whole_start = 0
    whole_stop = count
    if WINDOW.left is not None:
        start = tl.maximum(start, first + shift - WINDOW.left)
        whole_start = tl.maximum(whole_start, last + shift - WINDOW.left)
    if WINDOW.right is not None:
        stop = tl.minimum(stop, last + shift + WINDOW.right + 1)
        whole_stop = tl.minimum(whole_stop, first + shift + WINDOW.right + 1)
    return start, tl.maximum(stop, start), whole_start, whole_stop


@triton.jit
def queries_seeing(WINDOW, shift, count, first, last):
    """[from, to) of the queries that see any of the keys first to last."""
    start = 0
    stop = count
    if WINDOW.right is not None:
        start = tl.maximum(start, first - WINDOW.right - shift)
    if WINDOW.left is not None:
        stop = tl.minimum(stop, last + WINDOW.left - shift + 1)
    return start, tl.maximum(stop, start)


@triton.jit
def is_seen(WINDOW, position, j, limit):
    """Whether queries at positions see keys j of the `limit` that there are."""
    ok = (j >= 0) & (j < limit)
    if WINDOW.left is not None:
        ok &= j >= position - WINDOW.left
    if WINDOW.right is not None:
        ok &= j <= position + WINDOW.right
    return ok


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def is_drawn(bits, draft):
    """Whether bits say that drafts are seen; what is before the drafts always is."""
    bit = (bits >> tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)) & 1
    return (draft < 0) | ((draft < 64) & (bit != 0))


# ---- host ------------------------------------------------------------------------------------------------------------


def lengths(
    own: Tensor | None, other: Tensor | None, rows: int, others: int, kv_len: Tensor | None, block: int, keys_own: bool
) -> tuple[Lengths, int]:
    """What says how long sequences are, and how many tiles of `block` rows there are at most in a batch."""
    by_row = kv_len is not None and kv_len.dim() == 2
    given = (None, None) if kv_len is None else (kv_len.stride(0), kv_len.stride(1) if by_row else None)
    if own is None:
        return Lengths(None, kv_len, *given), cdiv(rows, block)
    tiles = cdiv(rows, block) + own.shape[0] + 1
    table = torch.empty(tiles, FIELDS.value, dtype=torch.int32, device=own.device)
    attention_tiles(
        table, own.contiguous(), other.contiguous(), tiles, own.shape[0], rows, others, KEYS_OWN=keys_own, BLOCK=block,
        ENTRIES=32,
    )  # fmt: skip
    return Lengths(table, kv_len, *given), tiles


def check_lengths(op: str, q: Tensor, k: Tensor, kv_len, cu_seqlens_q, cu_seqlens_k) -> None:
    """With TILEWRIGHT_DEBUG=1: raise where lengths on the device are not what they may be."""
    check_ends(op, "cu_seqlens_q", cu_seqlens_q, q.shape[1])
    check_ends(op, "cu_seqlens_k", cu_seqlens_k, k.shape[1])
    if kv_len is not None:
        check_indices(op, "kv_len", kv_len, 0, k.shape[1] + 1)
