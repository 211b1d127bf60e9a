"""Softmax across long columns, by parts, in the two passes of `passes.py`.

Rows that lie side by side are columns of a matrix. A *strip* is BLOCK_K of them: enough that memory is read in whole lines, and so
many that no program holds them. Its parts are a few tiles. A program goes over a part of one strip for the first pass and over the
same part of an earlier strip for the second, tile by tile, with the next tiles of both on their way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import passes, plans
from .functions import exp, log
from .passes import both_of, is_last, load_found, release, wait_for
from .plans import own
from .pointwise import stored, whole_words
from .row import compute_dtype
from .softmax_formulas import exp_for, finite_or_zero, gradient, normalised, term

SIZES = ("ROWS", "N", "INNER", "PARTS", "AHEAD")
TILE = {1: (64, 64), 2: (64, 32)}  # columns, and elements of 16 bits of each, by how many operands are read
TILES = 3  # of a part: what all programs that run have begun is to be less than the first pass is ahead


def programs(a) -> tuple[int]:
    return (a.PARTS * (cdiv(a.INNER, a.BLOCK_K) * (a.ROWS // a.INNER) + a.AHEAD),)


def walk(a, x: Tensor) -> dict[str, Any]:
    """LANES: how many elements of a column all threads take at once, 16 bytes each. Registers leave room for four programs on an
    SM. Elements that are not whole words are loaded one by one, and none ahead."""
    if not a.EVEN:
        return {"num_warps": 8, "STAGES": 1, "LANES": a.BLOCK_R}
    return {"num_warps": 4, "STAGES": 3, "LANES": min(a.BLOCK_R, 2048 // x.element_size() // a.BLOCK_K), "maxnreg": 128}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def columns_of(strip, ROWS, INNER, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """(outer index, inner indices, which of them there are) of a strip; none of one that is not there."""
    blocks = tl.cdiv(INNER, BLOCK_K)
    inner = (strip % blocks).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = (strip >= 0) & (strip < blocks * (ROWS // INNER))
    return (strip // blocks).to(tl.int64), inner, (inner < whole_words(INNER, EVEN)) & there


@triton.jit
def tile_of(outer, inner, r, s_outer, s_n, EVEN: tl.constexpr):
    """Where elements r of columns lie."""
    at = whole_words(s_outer, EVEN) * outer + inner
    return at[None, :] + (r * whole_words(s_n, EVEN))[:, None]


@triton.jit
def in_lanes(x, LANES: tl.constexpr):
    """A tile as [many, LANES, columns], so that what is summed over the first is in one thread's registers."""
    return x.reshape(x.shape[0] // LANES, LANES, x.shape[1])


@triton.jit
def load_parts(PART, part, rows, PARTS, column, inside, other):
    ok = (part < PARTS)[:, None] & inside[None, :]
    return tl.load(PART + part[:, None] * rows + column[None, :], ok, other, cache_modifier=".cg")


@triton.jit
def shifted_sum(PART, rows, PARTS, column, inside, BLOCK_P: tl.constexpr):
    """(the largest, the sum) of columns, from those of their parts."""
    largest = tl.full(column.shape, float("-inf"), PART.dtype.element_ty)
    total = tl.zeros(column.shape, PART.dtype.element_ty)
    for first in tl.range(0, PARTS, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        tops = load_parts(PART, p, rows, PARTS, column, inside, float("-inf"))
        sums = load_parts(PART + PARTS * rows, p, rows, PARTS, column, inside, 0.0)
        larger = tl.maximum(largest, tl.max(tops, 0))
        shift = finite_or_zero(larger)
        total = total * exp(largest - shift) + tl.sum(sums * exp(tops - shift[None, :]), 0)
        largest = larger
    return largest, total


@triton.jit
def plain_sum(PART, rows, PARTS, column, inside, BLOCK_P: tl.constexpr):
    total = tl.zeros(column.shape, PART.dtype.element_ty)
    for first in tl.range(0, PARTS, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        total += tl.sum(load_parts(PART, p, rows, PARTS, column, inside, 0.0), 0)
    return total


@kernel(grid=programs, tokens=(*SIZES, "x_outer", "x_n", "y_outer", "y_n"), default=lambda a: walk(a, a.X))
def softmax_columns(
    X, Y, PART, FOUND, DONE, ROWS, N, INNER, PARTS, AHEAD, x_outer, x_n, y_outer, y_n, LOG: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """PART [2, PARTS, ROWS]: the largest elements and the sums of parts. FOUND [2, ROWS]: what is taken from elements, and the sum
    or its logarithm; both of the dtype that is computed in."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    strip, earlier, part = both_of(PARTS, AHEAD)
    outer, inner, inside = columns_of(strip, ROWS, INNER, BLOCK_K, EVEN)
    outer2, inner2, inside2 = columns_of(earlier, ROWS, INNER, BLOCK_K, EVEN)
    rows, width = whole_words(ROWS.to(tl.int64), EVEN), whole_words(INNER, EVEN)
    if earlier >= 0:
        wait_for(DONE, earlier, PARTS)
    shift = load_found(FOUND, outer2 * width + inner2, inside2)[None, :]
    whole = load_found(FOUND, rows + outer2 * width + inner2, inside2)[None, :]
    largest = tl.full([LANES, BLOCK_K], float("-inf"), COMPUTE)
    total = tl.zeros([LANES, BLOCK_K], COMPUTE)
    first = part.to(tl.int64) * (TILES * BLOCK_R) + tl.arange(0, BLOCK_R)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r = first + tile * BLOCK_R
        here = (r < N)[:, None]
        again = here & inside2[None, :]
        x = tl.load(X + tile_of(outer, inner, r, x_outer, x_n, EVEN), here & inside[None, :], float("-inf"))
        x2 = tl.load(X + tile_of(outer2, inner2, r, x_outer, x_n, EVEN), again, 0.0, eviction_policy="evict_first")
        x = in_lanes(x.to(COMPUTE), LANES)
        larger = tl.maximum(largest, tl.max(x, 0))
        taken = finite_or_zero(larger)
        total = total * exp_for(largest - taken, Y) + tl.sum(exp_for(x - taken[None, :, :], Y), 0)
        largest = larger
        y = normalised(x2.to(COMPUTE), shift, whole, Y, LOG)
        there = Y + tile_of(outer2, inner2, r, y_outer, y_n, EVEN)
        tl.store(there, stored(y, Y), again, eviction_policy="evict_first")
    if strip < tl.cdiv(INNER, BLOCK_K) * (ROWS // INNER):
        column = outer * width + inner
        top = tl.max(largest, 0)
        tl.store(PART + part.to(tl.int64) * rows + column, top, inside)
        sums = tl.sum(total * exp_for(largest - finite_or_zero(top)[None, :], Y), 0)
        tl.store(PART + (PARTS + part.to(tl.int64)) * rows + column, sums, inside)
        if is_last(DONE, strip, PARTS):
            top, sums = shifted_sum(PART, rows, PARTS, column, inside, BLOCK_P)
            if LOG:
                sums = log(sums)
            tl.store(FOUND + column, finite_or_zero(top), inside)
            tl.store(FOUND + rows + column, sums, inside)
            release(DONE, strip)


@kernel(
    grid=programs,
    tokens=(*SIZES, "x_outer", "x_n", "g_outer", "g_n", "y_outer", "y_n"),
    default=lambda a: walk(a, a.Y),
)
def softmax_columns_backward(
    Y, DY, DX, PART, FOUND, DONE, ROWS, N, INNER, PARTS, AHEAD, x_outer, x_n, g_outer, g_n, y_outer, y_n, LOG: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr,
    LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Strides x of the result Y of the forward pass, g of DY, y of DX. PART [PARTS, ROWS], FOUND [ROWS]: sums; else as above."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    strip, earlier, part = both_of(PARTS, AHEAD)
    outer, inner, inside = columns_of(strip, ROWS, INNER, BLOCK_K, EVEN)
    outer2, inner2, inside2 = columns_of(earlier, ROWS, INNER, BLOCK_K, EVEN)
    rows, width = whole_words(ROWS.to(tl.int64), EVEN), whole_words(INNER, EVEN)
    if earlier >= 0:
        wait_for(DONE, earlier, PARTS)
    whole = load_found(FOUND, outer2 * width + inner2, inside2)[None, :]
    total = tl.zeros([LANES, BLOCK_K], COMPUTE)
    first = part.to(tl.int64) * (TILES * BLOCK_R) + tl.arange(0, BLOCK_R)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r = first + tile * BLOCK_R
        here = (r < N)[:, None]
        ok, again = here & inside[None, :], here & inside2[None, :]
        dy = tl.load(DY + tile_of(outer, inner, r, g_outer, g_n, EVEN), ok, 0.0).to(COMPUTE)
        y = dy
        if not LOG:
            y = tl.load(Y + tile_of(outer, inner, r, x_outer, x_n, EVEN), ok, 0.0).to(COMPUTE)
        dy2 = tl.load(DY + tile_of(outer2, inner2, r, g_outer, g_n, EVEN), again, 0.0, eviction_policy="evict_first")
        y2 = tl.load(Y + tile_of(outer2, inner2, r, x_outer, x_n, EVEN), again, 0.0, eviction_policy="evict_first")
        total += tl.sum(in_lanes(term(y, dy, LOG), LANES), 0)
        dx = gradient(y2.to(COMPUTE), dy2.to(COMPUTE), whole, DX, LOG)
        there = DX + tile_of(outer2, inner2, r, y_outer, y_n, EVEN)
        tl.store(there, stored(dx, DX), again, eviction_policy="evict_first")
    if strip < tl.cdiv(INNER, BLOCK_K) * (ROWS // INNER):
        column = outer * width + inner
        tl.store(PART + part.to(tl.int64) * rows + column, tl.sum(total, 0), inside)
        if is_last(DONE, strip, PARTS):
            tl.store(FOUND + column, plain_sum(PART, rows, PARTS, column, inside, BLOCK_P), inside)
            release(DONE, strip)


# ---- host ------------------------------------------------------------------------------------------------------------


def launch(operands: list[Tensor], out: Tensor, steps: list[tuple[int, int]], n: int, inner: int, log_: bool) -> None:
    """Over [outer, N, inner], each of `operands` and `out` with its two strides that are not 1."""
    compute = compute_dtype(operands[-1].dtype)
    backward = len(operands) > 1
    block_k, block_r = TILE[len(operands)]
    even = inner % 16 == 0 and not any(s % 16 for both in steps for s in both)
    block_r = max(16, 2 * block_r // out.element_size() // (1 if even else 2))
    rows = out.numel() // n
    strips = cdiv(inner, block_k) * (rows // inner)
    parts = cdiv(n, block_r * TILES)
    ahead = passes.ahead_of(strips, operands)

    def scratch(*shape: int) -> Tensor:
        return own(torch.empty(shape, dtype=compute, device=out.device))

    kept = () if backward else (2,)  # the largest and the sum, or the sum alone
    part, found = scratch(*kept, parts, rows), scratch(*kept, rows)
    done = passes.counters(strips, out.device)
    plans.launch(
        softmax_columns_backward if backward else softmax_columns, (*operands, out, part, found, done),
        (rows, n, inner, parts, ahead, *(s for both in steps for s in both)), LOG=log_,
        EVEN=even, BLOCK_K=block_k, BLOCK_R=block_r, TILES=TILES, BLOCK_P=16,
    )  # fmt: skip
