"""Two passes over the same memory in one launch, of which the second reads from the cache.

What is summed together is a *group*, a strip of columns or a cell of a norm, and is cut into parts, a program each. The first pass
finds sums of each part; whichever program finishes a group last puts them together, in their order, so that results are the same in
each run. The second pass reads the part again and writes it. Programs are in an order in which the second pass over a group comes
AHEAD groups after the first: late enough that it seldom waits, early enough that the cache still has the group.

What a program waits for is done by programs before it, and programs begin in order: it is being done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv
from . import forms, pointwise
from .plans import own

L2_PARTS = 3  # of which groups between the passes take one; with half of that all kernels were slower (H200)


@triton.jit
def task_of(PARTS, AHEAD):
    """(group, part, whether it is the second pass) of a program, in 32 bits, in which a division is a few instructions. There are
    no groups before 0, or after the last."""
    pid = tl.program_id(0)
    turn, own = pid // (2 * PARTS), pid % (2 * PARTS)
    again = own % 2 == 1
    return turn - tl.where(again, AHEAD, 0), own // 2, again


@triton.jit
def is_last(DONE, group, PARTS):
    """Say that what this program has stored of its part is there; whether all parts are."""
    tl.debug_barrier()  # all threads have stored
    return tl.atomic_add(DONE + group, 1, sem="acq_rel") == PARTS - 1


@triton.jit
def release(DONE, group):
    """Say that what was found of a group is there."""
    tl.debug_barrier()
    tl.atomic_add(DONE + group, 1, sem="release")


@triton.jit
def wait_for(DONE, group, PARTS):
    """Wait for `release`."""
    while tl.atomic_add(DONE + group, 0, sem="acquire") <= PARTS:
        pass


@triton.jit
def load_found(P, at, inside):
    """What other programs have stored, which a cache of this SM would not know."""
    return tl.load(P + at, inside, 0.0, cache_modifier=".cg")


def warps(of_16_bits: int, t: Tensor) -> dict[str, int]:
    """As many bytes a thread, of whichever dtype."""
    return {"num_warps": min(16, of_16_bits * t.element_size() // 2)}


def programs(groups: int, parts: int, ahead: int) -> int:
    return 2 * parts * (groups + ahead)


def ahead_of(groups: int, operands: list[Tensor]) -> int:
    """How many groups the first pass is ahead, of all that `operands` are read."""
    of_a_group = cdiv(sum(t.numel() * t.element_size() for t in operands), groups)
    return min(groups, cdiv(Target.at(operands[0].device).l2, L2_PARTS * of_a_group))


def counters(groups: int, device: torch.device) -> Tensor:
    """DONE: how many parts of each group are there, and 1 more where what was found of it is."""
    return pointwise.run(forms.FILL, {"value": 0}, own(torch.empty(groups, dtype=torch.int32, device=device)))
