"""Softmax along rows that no program holds, and its gradient: programs hold a part of a row each, and wait for one another.

So a row is read once. What a part comes to is left in memory for the others (`passes.py`, "held").
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
from .passes import came, held_part, load_found, say_there
from .plans import own
from .pointwise import stored, whole_words
from .row import compute_dtype
from .softmax_formulas import exp_for, finite_or_zero, gradient, normalised, term

SIZES = ("ROWS", "N", "PARTS", "PATIENCE")
BLOCK = 8192  # elements of a part


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def leave_shifted(x, PART, SUMS, at, Y):
    """Store the largest element of a part, and the sum."""
    top = tl.max(x, 0)
    tl.store(PART + at, top)
    tl.store(SUMS + at, tl.sum(exp_for(x - finite_or_zero(top), Y), 0))


@triton.jit
def shifted_sum(PART, SUMS, at, PARTS, BLOCK_P: tl.constexpr):
    """(the largest, the sum) of a row, from those of its parts."""
    largest = tl.full([], float("-inf"), PART.dtype.element_ty)
    total = tl.zeros([], PART.dtype.element_ty)
    for first in tl.range(0, PARTS, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        tops = tl.load(PART + at + p, p < PARTS, float("-inf"), cache_modifier=".cg")
        sums = load_found(SUMS, at + p, p < PARTS)
        larger = tl.maximum(largest, tl.max(tops, 0))
        shift = finite_or_zero(larger)
        total = total * exp(largest - shift) + tl.sum(sums * exp(tops - shift), 0)
        largest = larger
    return largest, total


@kernel(
    grid=lambda a: (a.ROWS * a.PARTS,), tokens=(*SIZES, "x_outer", "y_outer"),
    default=lambda a: passes.warps_held(a.BLOCK, a.PART, a.EVEN)
)  # fmt: skip
def softmax_long(
    X, Y, PART, DONE, ROWS, N, PARTS, PATIENCE, x_outer, y_outer, LOG: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """PART [2, ROWS, PARTS]: the largest elements and the sums of parts. EVEN: sizes and strides are whole words."""
    COMPUTE: tl.constexpr = PART.dtype.element_ty
    row, part = held_part(ROWS, PARTS)
    N = whole_words(N, EVEN)
    row = row.to(tl.int64)
    SUMS = PART + ROWS.to(tl.int64) * PARTS
    X += row * whole_words(x_outer, EVEN)
    Y += row * whole_words(y_outer, EVEN)
    lane = tl.arange(0, BLOCK)
    r = part * BLOCK + lane
    x = tl.load(X + r, r < N, float("-inf"), eviction_policy="evict_first").to(COMPUTE)
    leave_shifted(x, PART, SUMS, row * PARTS + part, Y)
    say_there(DONE, row)
    if not came(DONE, row, PARTS, PATIENCE):
        for other in tl.range(0, PARTS):
            there = other * BLOCK + lane
            leave_shifted(tl.load(X + there, there < N, float("-inf")).to(COMPUTE), PART, SUMS, row * PARTS + other, Y)
        tl.debug_barrier()
        x = tl.load(X + r, r < N, float("-inf")).to(COMPUTE)
    largest, total = shifted_sum(PART, SUMS, row * PARTS, PARTS, BLOCK_P)
    if LOG:
        total = log(total)
    y = normalised(x, finite_or_zero(largest), total, Y, LOG)
    tl.store(Y + r, stored(y, Y), r < N, eviction_policy="evict_first")


@triton.jit
def leave_sum(Y, DY, r, N, PART, at, LOG: tl.constexpr):
    """(Y, DY) of a part, of which the sum is stored; of a logarithm, Y is not asked for yet."""
    dy = tl.load(DY + r, r < N, 0, eviction_policy="evict_first").to(PART.dtype.element_ty)
    y = tl.load(Y + r, r < N, 0, eviction_policy="evict_first").to(PART.dtype.element_ty)
    tl.store(PART + at, tl.sum(term(y, dy, LOG), 0))
    return y, dy


@kernel(
    grid=lambda a: (a.ROWS * a.PARTS,), tokens=(*SIZES, "x_outer", "g_outer", "y_outer"),
    default=lambda a: passes.warps_held(2 * a.BLOCK, a.PART, a.EVEN),
)  # fmt: skip
def softmax_long_backward(
    Y, DY, DX, PART, DONE, ROWS, N, PARTS, PATIENCE, x_outer, g_outer, y_outer, LOG: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Strides x of the result Y of the forward pass, g of DY, y of DX. PART [ROWS, PARTS]: sums; else as above."""
    row, part = held_part(ROWS, PARTS)
    N = whole_words(N, EVEN)
    row = row.to(tl.int64)
    Y += row * whole_words(x_outer, EVEN)
    DY += row * whole_words(g_outer, EVEN)
    DX += row * whole_words(y_outer, EVEN)
    lane = tl.arange(0, BLOCK)
    r = part * BLOCK + lane
    y, dy = leave_sum(Y, DY, r, N, PART, row * PARTS + part, LOG)
    say_there(DONE, row)
    if not came(DONE, row, PARTS, PATIENCE):
        for other in tl.range(0, PARTS):
            leave_sum(Y, DY, other * BLOCK + lane, N, PART, row * PARTS + other, LOG)
        tl.debug_barrier()
        y, dy = leave_sum(Y, DY, r, N, PART, row * PARTS + part, LOG)
    total = tl.zeros([], PART.dtype.element_ty)
    for first in tl.range(0, PARTS, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        total += tl.sum(load_found(PART, row * PARTS + p, p < PARTS), 0)
    tl.store(DX + r, stored(gradient(y, dy, total, DX, LOG), DX), r < N, eviction_policy="evict_first")


# ---- host ------------------------------------------------------------------------------------------------------------


def takes(n: int, device: torch.device) -> bool:
    return passes.held(cdiv(n, BLOCK), device)


def launch(operands: list[Tensor], out: Tensor, outer: list[int], n: int, even: bool, log_: bool) -> None:
    """Along rows of N elements that are `outer` apart, of each of `operands` and of `out`."""
    rows, parts = out.numel() // n, cdiv(n, BLOCK)
    backward = len(operands) > 1
    kept = () if backward else (2,)  # the largest and the sum, or the sum alone
    part = own(torch.empty((*kept, rows, parts), dtype=compute_dtype(operands[-1].dtype), device=out.device))
    plans.launch(
        softmax_long_backward if backward else softmax_long, (*operands, out, part, passes.counters(rows, out.device)),
        (rows, n, parts, passes.patience(), *outer), LOG=log_, EVEN=even, BLOCK=BLOCK, BLOCK_P=64,
    )  # fmt: skip
