"""Two passes over the same memory in one launch, of which the second reads from the cache.

What is summed together is a *group*, a strip of columns or a cell of a norm, and is cut into parts, a program each. The first pass
finds sums of each part; whichever program finishes a group last puts them together, in their order, so that results are the same in
each run. The second pass reads the part again and writes it. Programs are in an order in which the second pass over a group comes
AHEAD groups after the first: late enough that it seldom waits, early enough that the cache still has the group.

What a program waits for is done by programs before it, and programs begin in order: it is being done.

*Held*: where the parts of a group are on the chip at once, there is one pass. A program keeps its part in registers, and waits for
those of the group that have just begun or are about to. Nothing but their order promises that they do, so that it waits for so long
and no longer, then finds the sums of all parts itself, which are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import INTERPRETING, Target
from ..core.tensor import cdiv
from . import forms, pointwise
from .plans import own

L2_PARTS = 3  # of which groups between the passes take one; with half of that all kernels were slower (H200)
PATIENCE = 1 << 16  # how often a held part looks for the others, half a microsecond each time or more


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
def held_part(GROUPS, PARTS):
    """(group, part) of a program that holds it. The last group is first: who made it has just written it, and the cache may
    have it still."""
    pid = tl.program_id(0)
    return GROUPS - 1 - pid // PARTS, pid % PARTS


@triton.jit
def say_there(DONE, group):
    """Say that what this program has stored of its part, which it holds, is there."""
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(DONE + group, 1, sem="release")


@triton.jit
def came(DONE, group, PARTS, PATIENCE):
    """Wait until all parts of a group are there; whether they are."""
    there = tl.atomic_add(DONE + group, 0, sem="acquire")
    tries = PATIENCE
    while (there < PARTS) & (tries > 0):
        there = tl.atomic_add(DONE + group, 0, sem="acquire")
        tries -= 1
    return there >= PARTS


@triton.jit
def load_found(P, at, inside):
    """What other programs have stored, which a cache of this SM would not know."""
    return tl.load(P + at, inside, 0.0, cache_modifier=".cg")


def warps(of_16_bits: int, t: Tensor) -> dict[str, int]:
    """As many bytes a thread, of whichever dtype."""
    return {"num_warps": min(16, of_16_bits * t.element_size() // 2)}


def warps_held(elements: int, found: Tensor, even: bool, registers: int = 64) -> dict[str, int]:
    """Threads that hold `elements` of the dtype that is computed in, 32 registers of them each, and have no more than `registers`
    in all: at 64, an SM holds 128 KB. Elements that are not whole words have addresses of their own, and twice as many threads."""
    wide = found.element_size() // 4
    made = {"num_warps": min(32, max(4, elements * wide * (1 if even else 2) // 1024))}
    return {**made, "maxnreg": registers} if even and wide == 1 else made


def patience() -> int:
    """What runs programs one after the other lets none wait."""
    return 0 if INTERPRETING else PATIENCE


def held(parts: int, device: torch.device) -> bool:
    """Whether the parts of a group are on the chip at once: no more than there are SMs, each of which has several."""
    return parts <= Target.at(device).sms


def programs(groups: int, parts: int, ahead: int) -> int:
    return 2 * parts * (groups + ahead)


def ahead_of(groups: int, operands: list[Tensor]) -> int:
    """How many groups the first pass is ahead, of all that `operands` are read."""
    of_a_group = cdiv(sum(t.numel() * t.element_size() for t in operands), groups)
    return min(groups, cdiv(Target.at(operands[0].device).l2, L2_PARTS * of_a_group))


def counters(groups: int, device: torch.device) -> Tensor:
    """DONE: how many parts of each group are there, and 1 more where what was found of it is."""
    return pointwise.run(forms.FILL, {"value": 0}, own(torch.empty(groups, dtype=torch.int32, device=device)))
