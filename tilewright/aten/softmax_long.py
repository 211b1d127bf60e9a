"""Softmax along rows that no program holds, and its gradient: programs hold a part of a row each, and wait for one another.

So a row is read once. A program keeps its part in registers, leaves in memory what it comes to, and waits for the parts of the row
that have just begun or are about to. Nothing but their order promises that they do, so that it waits for so long and no longer,
then finds the sums of all parts itself, which are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import INTERPRETING, Target
from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import passes, plans
from .functions import exp, log
from .passes import load_found
from .plans import own
from .pointwise import stored, whole_words
from .row import compute_dtype
from .softmax_formulas import exp_for, finite_or_zero, gradient, normalised, term

SIZES = ("ROWS", "N", "PARTS", "PATIENCE")
BLOCK = 8192  # elements that a part holds, of one operand or of two
PATIENCE = 1 << 16  # how often a program looks for the others, half a microsecond each time or more


def warps(a, elements: int) -> dict[str, int]:
    """Threads that hold the elements in the dtype that is computed in, 32 registers of them each, and have no more than 64 in all:
    an SM holds 128 KB then. Elements that are not whole words have addresses of their own, and twice as many threads."""
    wide = a.PART.element_size() // 4
    made = {"num_warps": min(32, max(4, elements * wide * (1 if a.EVEN else 2) // 1024))}
    return {**made, "maxnreg": 64} if a.EVEN and wide == 1 else made


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def held_part(ROWS, PARTS):
    """(row, part) of a program. The last row is first: who made it has just written it, and the cache may have it still."""
    pid = tl.program_id(0)
    return (ROWS - 1 - pid // PARTS).to(tl.int64), pid % PARTS


@triton.jit
def say_there(DONE, row):
    """Say that what this program has stored of its part is there."""
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(DONE + row, 1, sem="release")


@triton.jit
def came(DONE, row, PARTS, PATIENCE):
    """Wait until all parts of a row are there; whether they are."""
    there = tl.atomic_add(DONE + row, 0, sem="acquire")
    tries = PATIENCE
    while (there < PARTS) & (tries > 0):
        there = tl.atomic_add(DONE + row, 0, sem="acquire")
        tries -= 1
    return there >= PARTS


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
    default=lambda a: warps(a, a.BLOCK),
)  # fmt: skip
def softmax_long(
    X, Y, PART, DONE, ROWS, N, PARTS, PATIENCE, x_outer, y_outer, LOG: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """PART [2, ROWS, PARTS]: the largest elements and the sums of parts. EVEN: sizes and strides are whole words."""
    COMPUTE: tl.constexpr = PART.dtype.element_ty
    row, part = held_part(ROWS, PARTS)
    N = whole_words(N, EVEN)
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
    """(Y, DY) of a part, whose sum of terms is stored. Of a logarithm the terms are DY alone; Y, which the gradient takes, is
    loaded with it all the same, before anyone waits."""
    dy = tl.load(DY + r, r < N, 0, eviction_policy="evict_first").to(PART.dtype.element_ty)
    y = tl.load(Y + r, r < N, 0, eviction_policy="evict_first").to(PART.dtype.element_ty)
    tl.store(PART + at, tl.sum(term(y, dy, LOG), 0))
    return y, dy


@kernel(
    grid=lambda a: (a.ROWS * a.PARTS,), tokens=(*SIZES, "x_outer", "g_outer", "y_outer"),
    default=lambda a: warps(a, 2 * a.BLOCK),
)  # fmt: skip
def softmax_long_backward(
    Y, DY, DX, PART, DONE, ROWS, N, PARTS, PATIENCE, x_outer, g_outer, y_outer, LOG: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Strides x of the result Y of the forward pass, g of DY, y of DX. PART [ROWS, PARTS]: sums; else as above."""
    row, part = held_part(ROWS, PARTS)
    N = whole_words(N, EVEN)
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


def takes(n: int, operands: int, device: torch.device) -> bool:
    """Whether the parts of a row are on the chip at once: no more than there are SMs, each of which has several."""
    return cdiv(n, BLOCK // operands) <= Target.at(device).sms


def launch(operands: list[Tensor], out: Tensor, outer: list[int], n: int, even: bool, log_: bool) -> None:
    """Along rows of N elements that are `outer` apart, of each of `operands` and of `out`."""
    block = BLOCK // len(operands)
    rows, parts = out.numel() // n, cdiv(n, block)
    backward = len(operands) > 1
    kept = () if backward else (2,)  # the largest and the sum, or the sum alone
    part = own(torch.empty((*kept, rows, parts), dtype=compute_dtype(operands[-1].dtype), device=out.device))
    patience = 0 if INTERPRETING else PATIENCE  # what runs programs one after the other lets none wait
    plans.launch(
        softmax_long_backward if backward else softmax_long, (*operands, out, part, passes.counters(rows, out.device)),
        (rows, n, parts, patience, *outer), LOG=log_, EVEN=even, BLOCK=block, BLOCK_P=64,
    )  # fmt: skip
