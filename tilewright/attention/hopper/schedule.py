"""What a program of the forward does for a tile, which blocks of keys it walks over, and how much shared memory that takes.

A tile is 128 queries of one head, 64 for each of two warpgroups. All of a program's warps go over the same tiles and the same
blocks of keys, from the last that any query of the tile sees down to the first: each works them out for itself by these
functions, so that nothing but barriers and the number of the next tile passes between them. Where a warpgroup need not mask is
its own affair, for its 64 rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...runtime.kernel import kernel
from ..portable import TOGETHER, Sizes, unit_of
from ..tiles import keys_of, keys_seen, tile_at

ROWS = tl.constexpr(128)  # of a tile
HALF = tl.constexpr(64)  # of a warpgroup
BAND = tl.constexpr(TOGETHER)  # heads whose tiles are taken side by side, the longest first
SPARE = (
    8704  # bytes of shared memory for barriers, and for 64 rows of 128 bytes that results pass through on their way out
)


class Work(NamedTuple):
    """A tile of one head: its live `rows`, none if it is not there; how many keys its sequence has, and whether it says more than
    there is room for; blocks from `low` to before `high` of the keys that its queries see."""

    tile: Any
    head: Any
    batch: Any
    rows: Any
    count: Any
    wrong: Any
    low: Any
    high: Any


class Plan(NamedTuple):
    """Keys in a block; how many blocks of keys and of values shared memory holds, and of how many tiles the queries.

    `lazy`: the loop makes all weights of a block before it waits for the sum of the values before, and multiplies that sum only
    where a row's largest score has grown by more than LAG.
    """

    block: int
    stages: int
    queries: int
    lazy: bool


# ---- device ----------------------------------------------------------------------------------------------------------


@triton.jit
def blocks_seen(WINDOW, shift, count, first, last, BLOCK: tl.constexpr):
    """[low, high) of the blocks of keys that any of the queries first to last sees."""
    start, stop, _, _ = keys_seen(WINDOW, shift, count, first, last)
    low = start // BLOCK
    return low, tl.where(stop > start, tl.cdiv(stop, BLOCK), low)


@triton.jit
def whole_blocks(WINDOW, shift, count, first, last, low, high, BLOCK: tl.constexpr):
    """[lower, upper), within [low, high - 1], of the blocks below the last that all of the queries first to last see whole."""
    _, _, start, stop = keys_seen(WINDOW, shift, count, first, last)
    upper = tl.minimum(tl.maximum(tl.maximum(stop, 0) // BLOCK, low), high - 1)
    lower = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(start, 0), BLOCK), low), upper)
    return lower, upper


@triton.jit
def row_ends(WINDOW, position, count):
    """[from, to) of the keys that queries at positions see, of the `count` that there are."""
    start = position * 0
    stop = start + count
    if WINDOW.left is not None:
        start = tl.maximum(start, position - WINDOW.left)
    if WINDOW.right is not None:
        stop = tl.minimum(stop, position + WINDOW.right + 1)
    return start, stop


@triton.jit
def numbered(number, WINDOW, HEADS, BATCH, TILES):
    """(tile, head, batch) of a number. Where later queries see more keys, the longest tiles of a band of heads come first, so that
    programs end together. Else a head's tiles follow one another, and what all programs read at once is few heads' keys."""
    if WINDOW.right is None:
        return unit_of(number, TILES, HEADS, BATCH, 1, False)
    else:
        return unit_of(number, TILES, HEADS, BATCH, BAND, True)


@triton.jit
def work_of(number, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, PLAN: tl.constexpr):
    """What is to be done for the tile of a number, below TILES * HEADS * BATCH."""
    index, head, batch = numbered(number, WINDOW, HEADS, BATCH, TILES)
    tile = tile_at(LENGTHS, index, batch, L, KEYS, ROWS)
    rows = tl.minimum(tile.count_q - tile.start, ROWS)
    count, wrong = keys_of(LENGTHS, tile)
    last = tile.start + tl.maximum(rows, 1) - 1
    low, high = blocks_seen(WINDOW, count - tile.count_q, count, tile.start, last, PLAN.block)
    return Work(tile, head, batch, rows, count, wrong, low, tl.where(rows > 0, high, low))


@kernel(grid=lambda a: (1,), default=lambda a: {"num_warps": 1})
def clear_counter(COUNTER):
    tl.store(COUNTER, 0)


# ---- host ------------------------------------------------------------------------------------------------------------


def bytes_of(sizes: Sizes, plan: Plan) -> int:
    """Shared memory of 16-bit queries, keys and values."""
    keys, values = sizes.D0 + sizes.D1, sizes.V0 + sizes.V1
    return 2 * (plan.queries * ROWS.value * keys + plan.stages * plan.block * (keys + values))


def plan_for(sizes: Sizes, memory: int) -> Plan | None:
    """The largest block whose scores, weights and sums leave registers over, with two stages at least; then, if there is room, the
    queries of a second tile, which then come before the first is done; then more stages. None where nothing fits. Lazy where it was
    measured to be the faster, at keys of more than 128 columns."""
    lazy = sizes.D0 + sizes.D1 > 128
    for block in (128, 64) if sizes.V0 + sizes.V1 <= 128 else (64,):
        for queries in (2, 1):
            for stages in (4, 3, 2):
                plan = Plan(block, stages, queries, lazy)
                if bytes_of(sizes, plan) + SPARE <= memory:
                    return plan
    return None
