"""Parts of the keys of a cache: how long they are, where they store their sums, and the launch that merges them.

A part's o and lse are fp32. They are added up one after the other, wherever the last one is: what a row's bits depend on is its own
sequence, and nothing of the batch around it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv, power_of_two
from ..device.dependent import begin_dependent
from ..device.softmax import LOG2E
from ..runtime.kernel import kernel
from .merge import at_columns, at_row, whole_of
from .portable import Heads, heads_of


@triton.jit
def load_lse(LSE, row, first, last, PARTS, COUNT: tl.constexpr):
    """The lse of COUNT parts of rows, -inf of those that are not before `last`, or of a row below 0."""
    lse = ()
    for k in tl.static_range(COUNT):
        lse += (tl.load(LSE + row * PARTS + first + k, (row >= 0) & (first + k < last), float("-inf")),)
    return lse


@triton.jit
def load_parts(P, LSE, row, first, last, PARTS, V, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """(lse, o) of COUNT parts of rows: all are asked for before one is waited for."""
    lse = load_lse(LSE, row, first, last, PARTS, COUNT)
    column = tl.arange(0, BLOCK)
    o = ()
    for k in tl.static_range(COUNT):
        there = ((row >= 0) & (first + k < last))[:, None] & (column < V)[None, :]
        o += (tl.load(P + (row * PARTS + first + k)[:, None] * V + column[None, :], there, 0.0),)
    return lse, o


@triton.jit
def largest_of(top, lost, used, lse, first, COUNT: tl.constexpr):
    """The largest lse so far, what is NaN of them, which a maximum loses, how many parts are up to the last that saw anything."""
    for k in tl.static_range(COUNT):
        lost += tl.where(lse[k] == lse[k], 0.0, lse[k])
        top = tl.maximum(top, lse[k])
        used = tl.where(lse[k] != float("-inf"), first + k + 1, used)
    return top, lost, used


@triton.jit
def add_parts(total, sums, lse, o, base, COUNT: tl.constexpr):
    """One after the other: a part that saw nothing changes no bit."""
    for k in tl.static_range(COUNT):
        weight = tl.exp2((lse[k] - base) * LOG2E)
        total += weight
        sums += weight[:, None] * tl.where((lse[k] != float("-inf"))[:, None], o[k], 0.0)
    return total, sums


@kernel(
    grid=lambda a: (cdiv(a.ROWS, a.BLOCK_R),), tokens=("ROWS", "L", "PARTS"),
    default=lambda a: {"num_warps": max(4, a.BLOCK_R * a.BLOCK // 64)}, dependent=True,
)  # fmt: skip
def attention_parts_merge(
    P, LSE, O, OUT, ROWS, L, HEADS, PARTS, V, COUNT: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """O and OUT, the lse, of rows of the parts P [ROWS, PARTS, V] and LSE [ROWS, PARTS]. Parts are added up in order, whatever
    COUNT, of how many a thread waits for together; with ALL these are all."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < ROWS
    row = tl.where(inside, row, -1)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    lost = tl.zeros([BLOCK_R], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    sums = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    if ALL:
        lse, o = load_parts(P, LSE, row, 0, PARTS, PARTS, V, COUNT, BLOCK)
        top, lost, _ = largest_of(top, lost, 0, lse, 0, COUNT)
        base = tl.where(top == float("-inf"), 0.0, top) + lost
        total, sums = add_parts(total, sums, lse, o, base, COUNT)
    else:
        used = tl.zeros([BLOCK_R], tl.int32)
        for first in range(0, PARTS, COUNT):
            lse = load_lse(LSE, row, first, PARTS, PARTS, COUNT)
            top, lost, used = largest_of(top, lost, used, lse, first, COUNT)
        base = tl.where(top == float("-inf"), 0.0, top) + lost
        last = tl.max(used, 0)
        for first in range(0, last, COUNT):
            lse, o = load_parts(P, LSE, row, first, last, PARTS, V, COUNT, BLOCK)
            total, sums = add_parts(total, sums, lse, o, base, COUNT)
    empty = total == 0.0
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    column = tl.arange(0, BLOCK)
    at = at_columns(O, row, column, L, HEADS)
    tl.store(O.data + at, (sums * share[:, None]).to(O.data.dtype.element_ty), inside[:, None] & (column < V)[None, :])
    lse = tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, total)))
    tl.store(OUT.data + at_row(OUT, row, L, HEADS), lse, inside)


# ---- host ------------------------------------------------------------------------------------------------------------


FEW_ROWS = 1024  # each of which a program merges; of more it has as many as have 256 columns
TOGETHER = 32  # parts that a thread of a merge waits for at a time, at most: two columns of each
LEAST = 512  # keys of a part where the chip is full: with fewer, its beginning and its end take longer than the keys between them
LONGEST = 2048  # of a part, where sequences may be far shorter than there is room for and lie beside long ones
ROUNDS = 5  # of programs that run at a time: so many leave few idle while the last ones end
MOST_ROUNDS = 16  # where most may find nothing to do, and take time to come and go


def part_length(capacity: int, programs: int, at_a_time: int, least: int, step: int) -> int:
    """Keys of a part, a multiple of `step`: as many parts, each of so many `programs`, as keep a chip busy on which some run
    `at_a_time`. What the device alone knows has no say.

    A part's blocks come one after the other. Where parts of LEAST keys would leave some of the chip idle, shorter ones are over
    sooner, for they go on beside each other: as many as run at a time, unless those would have fewer than `least` keys."""
    alone = max(least, cdiv(capacity, max(1, at_a_time // max(1, programs))))
    if alone < LEAST and capacity > 2 * step:  # a merge takes as long as two blocks
        return max(1, cdiv(alone, step)) * step
    total = capacity * max(1, programs)
    wanted = max(LEAST, least, total // (MOST_ROUNDS * at_a_time), min(LONGEST, total // (ROUNDS * at_a_time)))
    parts = max(1, round(capacity / wanted))
    rounds, rest = divmod(parts * programs, at_a_time)
    if 1 <= rounds < 3 and 0 < rest < 0.9 * at_a_time:  # the chip would wait for a last round that does not fill it
        parts = max(1, rounds * at_a_time // programs)
    return max(1, cdiv(cdiv(capacity, parts), step)) * step


class Made(NamedTuple):
    """Where parts store their o and lse, and how far those of one row lie apart."""

    o: Heads
    stride_o: int
    lse: Heads
    stride_lse: int


def room_for(o: Tensor, lse: Tensor, parts: int) -> Made:
    """Results themselves are room for one part; more have room of their own, in fp32."""
    if parts == 1:
        return Made(heads_of(o), 0, whole_of(lse), 0)
    each = torch.empty(*o.shape[:3], parts, o.shape[3], dtype=torch.float32, device=o.device)
    each_lse = torch.empty(*o.shape[:3], parts, dtype=torch.float32, device=o.device)
    return Made(Heads(each, *each.stride()[:3], 1), o.shape[3], Heads(each_lse, *each_lse.stride()[:3], 0), 1)


def merge(made: Made, o: Tensor, lse: Tensor, parts: int) -> None:
    """Make results of parts, if there are several."""
    if parts > 1:
        batch, length, heads, columns = o.shape
        rows, block = batch * length * heads, max(32, power_of_two(columns))
        together = TOGETHER if block <= 512 else TOGETHER // 2  # of 16 warps each has few registers
        count = min(together, power_of_two(parts))
        attention_parts_merge(
            made.o.data, made.lse.data, heads_of(o), whole_of(lse), rows, length, heads, parts, columns, COUNT=count,
            ALL=parts <= count, BLOCK=block, BLOCK_R=1 if rows <= FEW_ROWS else max(1, 256 // block),
        )  # fmt: skip


class Results(NamedTuple):
    """Those of a call, and where parts store theirs: `whole` has whole columns, and is o if that has."""

    o: Tensor
    lse: Tensor
    whole: Tensor
    parts: int
    made: Made


def results_of(a: SimpleNamespace, columns: int, parts: int) -> Results:
    """Memory for results of so many columns. The caller's memory for o may have any strides; a kernel that writes whole columns
    gets memory of its own then."""
    batch, length, heads, _ = a.q.shape
    o = torch.empty(batch, length, heads, columns, dtype=a.q.dtype, device=a.q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=a.q.device)
    whole = o if o.stride(-1) == 1 or parts > 1 else torch.empty(o.shape, dtype=o.dtype, device=o.device)
    return Results(o, lse, whole, parts, room_for(whole, lse, parts))


def finished(results: Results) -> tuple[Tensor, Tensor]:
    """(o, lse) of what a kernel has stored."""
    o, lse, whole, parts, made = results
    merge(made, o, lse, parts)
    if whole is not o:
        o.copy_(whole)
    return o, lse
