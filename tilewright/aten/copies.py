"""Copies whose rows are short, odd or repeated: rows of tensors side by side, elements of two in turn, each element several times,
and tiles that are written several times.

The tiles of a copy of any strides (`pointwise.py`) would be mostly empty, and move elements one by one. Here a program reads whole
rows as they lie, in words, and finds the row of each element without a division: the product with an inverse that the host makes.
What one program writes has no gaps, or is filled at once, so that memory is written in whole sectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import layout, plans
from .pointwise import SMALL, WORDS, whole_words

BLOCK = 4096  # elements of a tensor that a program moves
INVERSE = 30  # bits behind the point of an inverse, which is exact for numbers below 2 BLOCK by divisors to BLOCK
MOST_TIMES = 64  # that an element is repeated side by side; rows that are longer fill tiles
FEWEST = 1 << 20  # elements to repeat, of which tiles fill the chip
LONGEST = 1 << 26  # elements of a row: WORDS rows of these an int32 counts


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def quotient(i, more, inverse):
    """i + more by the divisor of which this is the inverse. (A sum of products is an instruction less than a product of sums.)"""
    return tl.umulhi(i * 4 + more * 4, inverse)


@triton.jit
def move_rows(OUT, X, start, N, C, W, inverse, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of X from the `start`th of N on, in rows of C, into rows that are W apart."""
    i = tl.arange(0, BLOCK)
    inside = i < whole_words(tl.minimum(tl.maximum(N - start, 0), BLOCK), EVEN)
    x = tl.load(X + start + i, inside)
    row = start * 0
    if start >= C:
        row = start // C
    low = start - row * C
    # A row that is longer than a block ends once in it at most: only how far its end is matters
    step = tl.minimum(C, BLOCK)
    down = quotient(i, step - tl.minimum(C - low, step), inverse)
    tl.store(OUT + (row.to(tl.int64) * W + low) + (i + down * (W - C)), x, inside)


@kernel(
    grid=lambda a: (cdiv(a.ROWS, a.rows) * a.parts,),
    tokens=("ROWS", "W", "at", "rows", "parts", "C0", "C1", "inverse0", "inverse1"), default=lambda a: {"num_warps": 4},
)  # fmt: skip
def rows_beside(
    OUT, X0, X1, ROWS, W, at, rows, parts, C0, C1, inverse0, inverse1, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of C0 elements of X0, then, if C1 is not 0, of C1 elements of X1, from place `at` of rows that are W apart. A program
    moves a part of `rows` of them, which is a multiple of 16. EVEN: so is ROWS."""
    group = tl.program_id(0)
    start = group * 0
    if parts > 1:
        start = group % parts * BLOCK
        group = group // parts
    first = group.to(tl.int64) * whole_words(rows, True)
    left = tl.minimum(rows, ROWS - first).to(tl.int32)
    to = OUT + first * W + at
    move_rows(to, X0 + first * C0, start, left * C0, C0, W, inverse0, EVEN, BLOCK)
    if C1 > 0:
        move_rows(to + C0, X1 + first * C1, start, left * C1, C1, W, inverse1, EVEN, BLOCK)


@triton.jit
def gather_rows(OUT, X0, X1, rows, C0, C1, inverse, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of X0 and X1 side by side, of which each has BLOCK elements at most."""
    W = C0 + C1
    i = tl.arange(0, BLOCK)
    x = tl.load(X0 + i, i < whole_words(rows * C0, EVEN))
    y = tl.load(X1 + i, i < whole_words(rows * C1, EVEN))
    if x.dtype == tl.int1:  # which shared memory takes one by one, and bytes in words
        x, y = x.to(tl.int8), y.to(tl.int8)
    to = tl.arange(0, 2 * BLOCK)
    row = quotient(to, 0, inverse)
    # Element to - row * C1 of X0, or to - (row + 1) * C0 of X1: of both in turn, the one twice as far, or the one after that
    at = 2 * to - tl.where(to - row * W < C0, row * (2 * C1), (row + 1) * (2 * C0) - 1)
    value = tl.gather(tl.interleave(x, y), at & (2 * BLOCK - 1), 0)  # what is behind the last row comes from anywhere
    tl.store(OUT + to, value, to < whole_words(rows * W, EVEN))


@kernel(
    grid=lambda a: (cdiv(a.ROWS, a.rows),), tokens=("ROWS", "rows", "C0", "C1", "inverse"), default=lambda a: {"num_warps": 4},
)  # fmt: skip
def rows_gathered(OUT, X0, X1, ROWS, rows, C0, C1, inverse, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of C0 elements of X0 and C1 of X1, and nothing else, by way of shared memory: they are written in words too. A program
    has `rows` of them, a multiple of 16, with BLOCK elements of a tensor at most. EVEN: so is ROWS."""
    first = tl.program_id(0).to(tl.int64) * whole_words(rows, True)
    left = tl.minimum(rows, ROWS - first).to(tl.int32)
    to, x, y = OUT + first * (C0 + C1), X0 + first * C0, X1 + first * C1
    if EVEN:
        gather_rows(to, x, y, left, C0, C1, inverse, True, BLOCK)
    elif left == rows:
        gather_rows(to, x, y, whole_words(rows, True), C0, C1, inverse, True, BLOCK)
    else:  # the last program
        gather_rows(to, x, y, left, C0, C1, inverse, False, BLOCK)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N",), default=lambda a: {"num_warps": 4})
def in_turn(OUT, X0, X1, N, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """An element of X0, then one of X1 (or the same again), and so on. EVEN: N is whole words."""
    N = whole_words(N, EVEN)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X0 + i, i < N)
    y = x if X1 is None else tl.load(X1 + i, i < N)
    to = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(OUT + to, tl.interleave(x, y), to < 2 * N)


@kernel(
    grid=lambda a: (cdiv(a.N, a.some),), tokens=("N", "some", "times", "inverse"), default=lambda a: {"num_warps": 8}
)
def several_times(OUT, X, N, some, times, inverse, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Each of N elements several times. A program has `some` of them, a multiple of 16. EVEN: so is N."""
    first = tl.program_id(0).to(tl.int64) * whole_words(some, True)
    i = tl.arange(0, BLOCK)
    inside = i < whole_words((tl.minimum(some, N - first) * times).to(tl.int32), EVEN)
    x = tl.load(X + first + quotient(i, 0, inverse), inside)
    tl.store(OUT + first * times + i, x, inside)


@kernel(
    grid=lambda a: (cdiv(a.N0, a.COLUMNS) * cdiv(a.N1, a.ROWS),), tokens=("N0", "N1", "o1", "x1", "R0", "R1", "p0", "p1"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def tiles_again(OUT, X, N0, N1, o1, x1, R0, R1, p0, p1, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """N1 rows of N0 elements, which are o1 and x1 apart, R0 x R1 times, which are p0 and p1 apart; N0 and what is
    apart are whole words. Elements are read once."""
    across = tl.cdiv(N0, COLUMNS)
    col = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < N1)[:, None] & (col < whole_words(N0, True))[None, :]
    x = tl.load(X + row[:, None] * whole_words(x1, True) + col[None, :], inside)
    to = OUT + row[:, None] * whole_words(o1, True) + col[None, :]
    for i in range(0, R1):
        for j in range(0, R0):
            tl.store(to + (i * whole_words(p1, True).to(tl.int64) + j * whole_words(p0, True).to(tl.int64)), x, inside)


# ---- host ------------------------------------------------------------------------------------------------------------


def inverse_of(divisor: int) -> int:
    return cdiv(1 << INVERSE, min(max(divisor, 1), BLOCK))


def rows_of(tensors: Sequence[Tensor], form: torch.memory_format, dim: int) -> tuple[int, list[int]] | None:
    """(how many rows, how many elements of each tensor side by side in one) of tensors that are joined along a dimension, and lie
    without gaps in this format. None if they do not, or if a copy of any strides moves them as fast: in whole words, or as one."""
    if not all(t.is_contiguous(memory_format=form) and t.dtype == tensors[0].dtype for t in tensors):
        return None
    order = list(range(tensors[0].dim()))
    if form != torch.contiguous_format:  # channels come last
        order.append(order.pop(1))
    outer, inner = order[: order.index(dim)], order[order.index(dim) :]
    rows = math.prod(tensors[0].shape[d] for d in outer)
    sizes = [math.prod(t.shape[d] for d in inner) for t in tensors]
    in_words = all(size % WORDS == 0 for size in sizes)
    reach = (BLOCK // min(sizes) + 2) * sum(sizes)  # of what a program writes
    if rows < WORDS or in_words or rows * sum(sizes) < SMALL or max(*sizes, reach // WORDS) > LONGEST:
        return None
    return rows, sizes


def join_rows(out: Tensor, tensors: Sequence[Tensor], rows: int, sizes: Sequence[int]) -> None:
    """Fill `out` with rows of tensors side by side: two tensors at a time, so that few have parts of one sector to write."""
    even, at, whole = rows % WORDS == 0, 0, sum(sizes)
    if list(sizes) == [1, 1]:
        plans.launch(in_turn, (out, *tensors), (rows,), EVEN=even, BLOCK=BLOCK // 4)
        return
    if len(tensors) == 2:
        block = BLOCK if out.element_size() <= 2 else BLOCK // 2  # so that registers hold it
        some = block // max(sizes) // WORDS * WORDS
        # An empty lane of a gather costs as much as a full one (of 65 and 3 columns most are), a quarter of them what it gains
        if 4 * some * whole >= 3 * 2 * block:
            numbers = rows, some, *sizes, inverse_of(whole)
            plans.launch(rows_gathered, (out, *tensors), numbers, EVEN=even, BLOCK=block)
            return
    for i in range(0, len(tensors), 2):
        (one, other), (c0, c1) = [*tensors[i : i + 2], tensors[i]][:2], [*sizes[i : i + 2], 0][:2]
        widest = max(c0, c1)
        # Half a block is faster while 2 WORDS rows fit in it; of longer ones, WORDS rows can leave half of it empty
        block = BLOCK // 2 if 2 * WORDS * widest <= BLOCK // 2 else BLOCK
        some = max(block // widest // WORDS, 1) * WORDS
        numbers = rows, whole, at, some, cdiv(some * widest, block), c0, c1, inverse_of(c0), inverse_of(c1)
        plans.launch(rows_beside, (out, one, other), numbers, EVEN=even, BLOCK=block)
        at += c0 + c1


def repeat_into(out: Tensor, x: Tensor) -> bool:
    """Fill `out` with `x`, of the same shape, if elements or rows of that are repeated in one of these ways: whether it was."""
    if out.numel() < SMALL or out.dtype != x.dtype or 0 not in x.stride():
        return False
    sizes, (steps, own) = layout.loops(tuple(out.shape), [out.stride(), x.stride()])
    loops = list(zip(sizes, steps, own))
    rows, again = [one for one in loops if one[2]], [one for one in loops if not one[2]]
    if not 1 <= len(rows) <= 2 or not 1 <= len(again) <= 2:
        return False
    (n0, o0, x0), (n1, o1, x1) = [*rows, (1, 0, 0)][:2]
    (r0, p0, _), (r1, p1, _) = [*again, (1, 0, 0)][:2]
    if (p0, o0, x0) == (1, r0, 1) and len(loops) == 2 and r0 <= MOST_TIMES:  # each element, side by side
        even = n0 % WORDS == 0
        if r0 == 2:
            plans.launch(in_turn, (out, x, None), (n0,), EVEN=even, BLOCK=BLOCK // 4)
        else:
            some = BLOCK // r0 // WORDS * WORDS
            plans.launch(several_times, (out, x), (n0, some, r0, inverse_of(r0)), EVEN=even, BLOCK=BLOCK)
        return True
    in_words = not any(n % WORDS for n in (n0, o1, x1, p0, p1))
    if (o0, x0) == (1, 1) and in_words and n0 * n1 >= FEWEST:
        columns = 1024 if n0 > 512 else 256
        numbers = n0, n1, o1, x1, r0, r1, p0, p1
        plans.launch(tiles_again, (out, x), numbers, ROWS=BLOCK // columns, COLUMNS=columns)
        return True
    return False
