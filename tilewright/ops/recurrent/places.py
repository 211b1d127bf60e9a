"""Which tokens belong to which sequence: dense sequences are a batch's rows, packed ones lie between marks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.seen import marks_of, sequences
from ...attention.tiles import begin_of
from ...core.draw import Draw


class Places(NamedTuple):
    """`whose` [length] is the sequence of a token, -1 if it is in none, and `index` [length] its place there; `begin` and `count`
    [sequences] say where in its row of the batch a sequence begins, and how many tokens it has."""

    whose: Tensor
    index: Tensor
    begin: Tensor
    count: Tensor


def places(batch: int, length: int, marks: Tensor | None, device: torch.device) -> Places:
    """Of dense sequences all tokens of a row are in it, whatever the row: `whose` is then 0. Packed ones lie in a batch of 1, from
    a mark to the next; where marks fall there is none, and tokens before the first mark and after the last are in none."""
    if marks is None:
        index = torch.arange(length, device=device)
        begin = torch.zeros(batch, dtype=torch.int64, device=device)
        return Places(torch.zeros_like(index), index, begin, torch.full_like(begin, length))
    whose, index, _ = sequences(length, marks, device)
    begins = marks_of(length, marks, device)
    known = (whose >= 1) & (whose < marks.shape[0])
    return Places(torch.where(known, whose - 1, -1), index, begins[1:-2], (begins[1:] - begins[:-1])[1:-1])


def sequence_count(batch: int, marks: Tensor | None) -> int:
    """How many sequences a call has."""
    return batch if marks is None else marks.shape[0] - 1


def draw_marks(draw: Draw, length: int) -> Tensor:
    """Where a few sequences begin and end, some perhaps empty. Of few tokens all are in one; of many the first and the last may be
    in none."""
    count, apart = draw.option("marks", 2, 2, 3, 4), draw.option("apart", 0, 1) * min(1, length // 8)
    marks = draw.integers(count, low=apart, high=length + 1 - apart, dtype=torch.int32).sort().values
    marks[:1], marks[-1:] = apart, length - apart
    return marks


def check_marks(op: str, name: str, batch: int, marks: Tensor | None) -> None:
    """Raise where packed sequences do not lie in a batch of 1, or there is no mark."""
    if marks is None:
        return
    if batch != 1:
        raise ValueError(f"{op}: packed sequences lie in a batch of 1, got {name} with a batch of {batch}")
    if marks.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens must have a number for each sequence and one more, got none")


@triton.jit
def sequence_at(MARKS, sequence, COUNT, L):
    """(row of the batch, first token, how many) of a sequence."""
    if MARKS is None:
        return sequence, 0, L
    else:
        one = tl.zeros([1], tl.int32) + sequence
        first = tl.sum(begin_of(MARKS, one + 1, COUNT, L), 0)
        return tl.zeros_like(sequence), first, tl.sum(begin_of(MARKS, one + 2, COUNT, L), 0) - first
