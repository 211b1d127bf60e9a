"""Softmax across long columns, by parts, in the two passes of `passes.py`.

Rows that lie side by side are columns of a matrix. A *strip* is BLOCK_K of them: enough that memory is read in whole lines, and so
many that no program holds them. Its parts are tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import passes, plans
from .functions import exp, log
from .passes import is_last, load_found, release, task_of, wait_for
from .plans import own
from .pointwise import stored, whole_words
from .row import compute_dtype
from .softmax_formulas import exp_for, finite_or_zero, gradient, normalised, term

SIZES = ("ROWS", "N", "INNER", "PARTS", "AHEAD")
TILE = {1: (64, 128), 2: (64, 128)}  # columns, and elements of each, by how many operands are read


def programs(a) -> tuple[int]:
    return (passes.programs(cdiv(a.INNER, a.BLOCK_K) * (a.ROWS // a.INNER), a.PARTS, a.AHEAD),)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def columns_of(strip, INNER, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """(outer index, inner indices, which of them there are) of a strip."""
    blocks = tl.cdiv(INNER, BLOCK_K)
    inner = (strip % blocks).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    return (strip // blocks).to(tl.int64), inner, inner < whole_words(INNER, EVEN)


@triton.jit
def tile_of(at, r, stride, EVEN: tl.constexpr):
    """Where elements r of columns lie that begin `at`."""
    return at[None, :] + (r * whole_words(stride, EVEN))[:, None]


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


@kernel(
    grid=programs,
    tokens=(*SIZES, "x_outer", "x_n", "y_outer", "y_n"),
    default=lambda a: passes.warps(4 if a.EVEN else 8, a.X),
)
def softmax_columns(
    X, Y, PART, FOUND, DONE, ROWS, N, INNER, PARTS, AHEAD, x_outer, x_n, y_outer, y_n, LOG: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """PART [2, PARTS, ROWS]: the largest elements and the sums of parts. FOUND [2, ROWS]: what is taken from elements, and the sum
    or its logarithm; both of the dtype that is computed in."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    strip, part, again = task_of(PARTS, AHEAD)
    outer, inner, inside = columns_of(strip, INNER, BLOCK_K, EVEN)
    rows, column = whole_words(ROWS.to(tl.int64), EVEN), outer * whole_words(INNER, EVEN) + inner
    part = part.to(tl.int64)
    r = part * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = (r < N)[:, None] & inside[None, :]
    here = X + tile_of(whole_words(x_outer, EVEN) * outer + inner, r, x_n, EVEN)
    if (strip >= 0) & (strip < tl.cdiv(INNER, BLOCK_K) * (ROWS // INNER)):
        if again:
            x = tl.load(here, ok, 0.0, eviction_policy="evict_first").to(COMPUTE)
            wait_for(DONE, strip, PARTS)
            shift = load_found(FOUND, column, inside)
            total = load_found(FOUND, rows + column, inside)
            y = normalised(x, shift[None, :], total[None, :], Y, LOG)
            there = Y + tile_of(whole_words(y_outer, EVEN) * outer + inner, r, y_n, EVEN)
            tl.store(there, stored(y, Y), ok, eviction_policy="evict_first")
        else:
            x = tl.load(here, ok, float("-inf")).to(COMPUTE)
            top = tl.max(x, 0)
            tl.store(PART + part * rows + column, top, inside)
            sums = tl.sum(exp_for(x - finite_or_zero(top)[None, :], Y), 0)
            tl.store(PART + (PARTS + part) * rows + column, sums, inside)
            if is_last(DONE, strip, PARTS):
                largest, whole = shifted_sum(PART, rows, PARTS, column, inside, BLOCK_P)
                if LOG:
                    whole = log(whole)
                tl.store(FOUND + column, finite_or_zero(largest), inside)
                tl.store(FOUND + rows + column, whole, inside)
                release(DONE, strip)


@kernel(
    grid=programs,
    tokens=(*SIZES, "x_outer", "x_n", "g_outer", "g_n", "y_outer", "y_n"),
    default=lambda a: passes.warps(8, a.Y),
)
def softmax_columns_backward(
    Y, DY, DX, PART, FOUND, DONE, ROWS, N, INNER, PARTS, AHEAD, x_outer, x_n, g_outer, g_n, y_outer, y_n, LOG: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Strides x of the result Y of the forward pass, g of DY, y of DX. PART [PARTS, ROWS], FOUND [ROWS]: sums; else as above."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    strip, part, again = task_of(PARTS, AHEAD)
    outer, inner, inside = columns_of(strip, INNER, BLOCK_K, EVEN)
    rows, column = whole_words(ROWS.to(tl.int64), EVEN), outer * whole_words(INNER, EVEN) + inner
    part = part.to(tl.int64)
    r = part * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = (r < N)[:, None] & inside[None, :]
    here_y = Y + tile_of(whole_words(x_outer, EVEN) * outer + inner, r, x_n, EVEN)
    here_g = DY + tile_of(whole_words(g_outer, EVEN) * outer + inner, r, g_n, EVEN)
    if (strip >= 0) & (strip < tl.cdiv(INNER, BLOCK_K) * (ROWS // INNER)):
        if again:
            y = tl.load(here_y, ok, 0.0, eviction_policy="evict_first").to(COMPUTE)
            dy = tl.load(here_g, ok, 0.0, eviction_policy="evict_first").to(COMPUTE)
            wait_for(DONE, strip, PARTS)
            total = load_found(FOUND, column, inside)
            dx = gradient(y, dy, total[None, :], DX, LOG)
            there = DX + tile_of(whole_words(y_outer, EVEN) * outer + inner, r, y_n, EVEN)
            tl.store(there, stored(dx, DX), ok, eviction_policy="evict_first")
        else:
            dy = tl.load(here_g, ok, 0.0).to(COMPUTE)
            y = dy
            if not LOG:
                y = tl.load(here_y, ok, 0.0).to(COMPUTE)
            tl.store(PART + part * rows + column, tl.sum(term(y, dy, LOG), 0), inside)
            if is_last(DONE, strip, PARTS):
                tl.store(FOUND + column, plain_sum(PART, rows, PARTS, column, inside, BLOCK_P), inside)
                release(DONE, strip)


# ---- host ------------------------------------------------------------------------------------------------------------


def launch(operands: list[Tensor], out: Tensor, steps: list[tuple[int, int]], n: int, inner: int, log_: bool) -> None:
    """Over [outer, N, inner], each of `operands` and `out` with its two strides that are not 1."""
    compute = compute_dtype(operands[-1].dtype)
    backward = len(operands) > 1
    block_k, block_r = TILE[len(operands)]
    rows = out.numel() // n
    strips = cdiv(inner, block_k) * (rows // inner)
    parts = cdiv(n, block_r)
    ahead = passes.ahead_of(strips, operands)

    def scratch(*shape: int) -> Tensor:
        return own(torch.empty(shape, dtype=compute, device=out.device))

    kept = () if backward else (2,)  # the largest and the sum, or the sum alone
    part, found = scratch(*kept, parts, rows), scratch(*kept, rows)
    done = passes.counters(strips, out.device)
    plans.launch(
        softmax_columns_backward if backward else softmax_columns, (*operands, out, part, found, done),
        (rows, n, inner, parts, ahead, *(s for both in steps for s in both)), LOG=log_,
        EVEN=inner % 16 == 0 and not any(s % 16 for both in steps for s in both), BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_P=32,
    )  # fmt: skip
