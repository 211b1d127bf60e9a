"""Softmax across long columns, by parts, in the two passes of `passes.py`.

Rows that lie side by side are columns of a matrix. A *strip* is BLOCK_K of them: enough that memory is read in whole lines, and so
many that no program holds them. Its parts are tiles, in pieces of as many rows of memory as all threads load at once: a piece after
the other is converted and used, so that few registers hold more than memory does, and an SM holds more programs.
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
LANES = {1: 16, 2: 32}  # elements of a column that all threads load at once, 16 bytes each
TILE = {1: (64, 128), 2: (64, 128)}  # columns, and elements of each, by how many operands are read


def programs(a) -> tuple[int]:
    return (passes.programs(cdiv(a.INNER, a.BLOCK_K) * (a.ROWS // a.INNER), a.PARTS, a.AHEAD),)


def room(t: Tensor, even: bool, registers: int) -> dict[str, int]:
    """No more registers a thread than leave room for enough programs: a program takes some 4.5 us to come and go (by what an SM had
    of both passes at once, 80 KB forward and 128 backward, and the times of these on an H200), so that the bytes at once are the
    speed. Elements that are not whole words have addresses of their own, which take more; those of 32 bits are not two in a
    register."""
    return {"maxnreg": registers} if even and t.element_size() == 2 else {}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def columns_of(strip, INNER, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """(outer index, inner indices, which of them there are) of a strip."""
    blocks = tl.cdiv(INNER, BLOCK_K)
    inner = (strip % blocks).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    return (strip // blocks).to(tl.int64), inner, inner < whole_words(INNER, EVEN)


@triton.jit
def piece_at(outer, inner, first, s_outer, s_n, EVEN: tl.constexpr, LANES: tl.constexpr):
    """Where elements of columns lie from a tile's `first` on, and the step from piece to piece, the same for all threads."""
    step = whole_words(s_n.to(tl.int64), EVEN)
    at = whole_words(s_outer, EVEN) * outer + first * step + inner
    return at[None, :] + (tl.arange(0, LANES) * step)[:, None], LANES * step


@triton.jit
def piece_ok(i, left, inside, LANES: tl.constexpr):
    """Which elements of a piece there are, of the `left` ones from its tile's first on."""
    return (i * LANES + tl.arange(0, LANES) < left)[:, None] & inside[None, :]


@triton.jit
def load_pieces(P, at, step, left, inside, other, AGAIN: tl.constexpr, PIECES: tl.constexpr, LANES: tl.constexpr):
    """PIECES of a tile [LANES, columns], as they lie in memory: elements of 16 bits are two in a register until they are used."""
    xs = ()
    for i in tl.static_range(PIECES):
        ok = piece_ok(i, left, inside, LANES)
        xs = xs + (tl.load(P + i * step + at, ok, other, eviction_policy="evict_first" if AGAIN else ""),)
    return xs


@triton.jit
def store_piece(P, at, i, left, inside, value, LANES: tl.constexpr):
    ok = piece_ok(i, left, inside, LANES)
    tl.store(P + at, stored(value, P), ok, eviction_policy="evict_first")


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
    default=lambda a: {**passes.warps(4 if a.EVEN else 8, a.X), **room(a.X, a.EVEN, 72)},  # for 7 programs, 112 KB
)
def softmax_columns(
    X, Y, PART, FOUND, DONE, ROWS, N, INNER, PARTS, AHEAD, x_outer, x_n, y_outer, y_n, LOG: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PIECES: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """PART [2, PARTS, ROWS]: the largest elements and the sums of parts. FOUND [2, ROWS]: what is taken from elements, and the sum
    or its logarithm; both of the dtype that is computed in."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    LANES: tl.constexpr = BLOCK_R // PIECES
    strip, part, again = task_of(PARTS, AHEAD)
    outer, inner, inside = columns_of(strip, INNER, BLOCK_K, EVEN)
    rows, column = whole_words(ROWS.to(tl.int64), EVEN), outer * whole_words(INNER, EVEN) + inner
    part = part.to(tl.int64)
    first = part * BLOCK_R
    left = tl.minimum(N - first, BLOCK_R).to(tl.int32)
    at_x, step_x = piece_at(outer, inner, first, x_outer, x_n, EVEN, LANES)
    if (strip >= 0) & (strip < tl.cdiv(INNER, BLOCK_K) * (ROWS // INNER)):
        if again:
            xs = load_pieces(X, at_x, step_x, left, inside, 0.0, True, PIECES, LANES)
            wait_for(DONE, strip, PARTS)
            shift = load_found(FOUND, column, inside)[None, :]
            total = load_found(FOUND, rows + column, inside)[None, :]
            at_y, step_y = piece_at(outer, inner, first, y_outer, y_n, EVEN, LANES)
            for i in tl.static_range(PIECES):
                y = normalised(xs[i].to(COMPUTE), shift, total, Y, LOG)
                store_piece(Y, at_y, i, left, inside, y, LANES)
                at_y += step_y
        else:
            xs = load_pieces(X, at_x, step_x, left, inside, float("-inf"), False, PIECES, LANES)
            # Of -x, which the compiler takes for another number: what it converts here it does not keep until x is used again
            least = (-xs[0]).to(COMPUTE)
            for i in tl.static_range(1, PIECES):
                least = tl.minimum(least, (-xs[i]).to(COMPUTE))
            top = -tl.min(least, 0)
            shift = finite_or_zero(top)[None, :]
            sums = tl.zeros([LANES, BLOCK_K], COMPUTE)
            for i in tl.static_range(PIECES):
                sums += exp_for(xs[i].to(COMPUTE) - shift, Y)
            tl.store(PART + part * rows + column, top, inside)
            tl.store(PART + (PARTS + part) * rows + column, tl.sum(sums, 0), inside)
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
    # For 5 programs, 160 KB, or of a logarithm, whose exponentials take more, 4
    default=lambda a: {**passes.warps(8 if a.EVEN else 16, a.Y), **room(a.Y, a.EVEN, 56 if a.LOG else 48)},
)
def softmax_columns_backward(
    Y, DY, DX, PART, FOUND, DONE, ROWS, N, INNER, PARTS, AHEAD, x_outer, x_n, g_outer, g_n, y_outer, y_n, LOG: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PIECES: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Strides x of the result Y of the forward pass, g of DY, y of DX. PART [PARTS, ROWS], FOUND [ROWS]: sums; else as above."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    LANES: tl.constexpr = BLOCK_R // PIECES
    strip, part, again = task_of(PARTS, AHEAD)
    outer, inner, inside = columns_of(strip, INNER, BLOCK_K, EVEN)
    rows, column = whole_words(ROWS.to(tl.int64), EVEN), outer * whole_words(INNER, EVEN) + inner
    part = part.to(tl.int64)
    first = part * BLOCK_R
    left = tl.minimum(N - first, BLOCK_R).to(tl.int32)
    at_y, step_y = piece_at(outer, inner, first, x_outer, x_n, EVEN, LANES)
    at_g, step_g = piece_at(outer, inner, first, g_outer, g_n, EVEN, LANES)
    if (strip >= 0) & (strip < tl.cdiv(INNER, BLOCK_K) * (ROWS // INNER)):
        if again:
            ys = load_pieces(Y, at_y, step_y, left, inside, 0.0, True, PIECES, LANES)
            dys = load_pieces(DY, at_g, step_g, left, inside, 0.0, True, PIECES, LANES)
            wait_for(DONE, strip, PARTS)
            total = load_found(FOUND, column, inside)[None, :]
            at_x, step_x = piece_at(outer, inner, first, y_outer, y_n, EVEN, LANES)
            for i in tl.static_range(PIECES):
                dx = gradient(ys[i].to(COMPUTE), dys[i].to(COMPUTE), total, DX, LOG)
                store_piece(DX, at_x, i, left, inside, dx, LANES)
                at_x += step_x
        else:
            dys = load_pieces(DY, at_g, step_g, left, inside, 0.0, False, PIECES, LANES)
            ys = dys
            if not LOG:
                ys = load_pieces(Y, at_y, step_y, left, inside, 0.0, False, PIECES, LANES)
            sums = tl.zeros([LANES, BLOCK_K], COMPUTE)
            for i in tl.static_range(PIECES):
                sums += term(ys[i].to(COMPUTE), dys[i].to(COMPUTE), LOG)
            tl.store(PART + part * rows + column, tl.sum(sums, 0), inside)
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
    even = inner % 16 == 0 and not any(s % 16 for both in steps for s in both)
    plans.launch(
        softmax_columns_backward if backward else softmax_columns, (*operands, out, part, found, done),
        (rows, n, inner, parts, ahead, *(s for both in steps for s in both)), LOG=log_, EVEN=even, BLOCK_K=block_k,
        BLOCK_R=block_r, PIECES=block_r // LANES[len(operands)], BLOCK_P=16,
    )  # fmt: skip
