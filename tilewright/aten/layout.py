"""How operands of one operator lie in memory, brought to the simplest form; and where aten would put the result.

aten's TensorIterator decides both by rules that callers rely on (a transposed operand gives a transposed result), so these are
followed to the letter: dimensions are ordered by the strides of the operands, the first that tells two apart deciding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Ints = tuple[int, ...]


def broadcast(shapes: Sequence[Sequence[int]]) -> Ints | None:
    """The shape that all of these broadcast to; None if they do not. (`torch.broadcast_shapes` takes 29 us.)"""
    rank = max(map(len, shapes), default=0)
    made = [1] * rank
    for shape in shapes:
        for at, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if made[at] not in (1, size):
                    return None
                made[at] = size
    return tuple(made)


def expanded(t: Tensor, shape: Ints) -> Ints:
    """The strides of a tensor seen with that shape: 0 where it is repeated."""
    missing = len(shape) - t.dim()
    own = zip(t.shape, t.stride(), shape[missing:])
    return (0,) * missing + tuple(0 if size == 1 and whole != 1 else stride for size, stride, whole in own)


def contiguous_strides(shape: Ints) -> Ints:
    made, step = [], 1
    for size in reversed(shape):
        made.append(step)
        step *= max(size, 1)
    return tuple(reversed(made))


def order(shape: Ints, strides: Sequence[Ints]) -> list[int]:
    """The dimensions from the fastest to the slowest, as TensorIterator orders them."""
    found = list(range(len(shape)))[::-1]

    def swap(one: int, other: int) -> int:
        """1 if `one`, which comes first, should come after `other`; -1 if not; 0 if no operand tells."""
        for own in strides:
            a, b = own[one], own[other]
            if a == 0 or b == 0:
                continue
            if a != b:
                return -1 if a < b else 1
            if shape[one] > shape[other]:
                return 1
        return 0

    for i in range(1, len(found)):
        at = i
        for before in range(i - 1, -1, -1):
            said = swap(found[before], found[at])
            if said > 0:
                found[before], found[at] = found[at], found[before]
                at = before
            elif said < 0:
                break
    return found


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def lies(t: Tensor) -> torch.memory_format:
    """The memory format that torch takes a tensor to have. It goes by strides alone, those of dimensions of 1 among them (c10's
    `is_channels_last_strides_2d`): where they are of several formats, is_contiguous says another."""
    form = CHANNELS_LAST.get(t.dim())
    if form is None or not t.stride(1) or not t.numel():
        return torch.contiguous_format
    shape, strides, least = t.shape, t.stride(), 0
    for d in (1, *range(t.dim() - 1, 1, -1), 0):
        if strides[d] < least or (d == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[d] * shape[d]
    return form


def result_strides(shape: Ints, operands: Sequence[Tensor], with_number: bool = False) -> Ints:
    """The strides of the result that aten allocates for operands of these strides. A number that aten makes an operand of has no
    dimensions: operands are not of one shape then, even if all that we see are."""
    if not with_number and all(t.shape == shape for t in operands):
        if all(t.is_contiguous() for t in operands):
            return contiguous_strides(shape)
        if len(shape) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in operands):
            return torch.empty(shape, device="meta").to(memory_format=torch.channels_last).stride()
        first = operands[0].stride()
        if all(t.stride() == first for t in operands) and all(is_dense(t) for t in operands):
            return tuple(first)
    fastest = order(shape, [expanded(t, shape) for t in operands])
    made, step = [0] * len(shape), 1
    for dim in fastest:
        made[dim] = step
        step *= shape[dim]
    if fastest == list(range(len(shape)))[::-1]:
        return contiguous_strides(shape)
    return tuple(made)


def is_dense(t: Tensor) -> bool:
    """Whether a tensor fills its memory without overlaps, in some order of dimensions."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


class Loops(NamedTuple):
    """Loops over all elements, the innermost first: their sizes, and for each operand its strides."""

    sizes: Ints
    strides: tuple[Ints, ...]


def loops(shape: Ints, strides: Sequence[Ints]) -> Loops:
    """The fewest loops in the order of the first operand's memory: those of size 1 are gone, and two are one where every operand
    lies so that they can be."""
    dims = [d for d in order(shape, strides) if shape[d] != 1]
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d in dims:
        if sizes and all(own[d] == made[-1] * sizes[-1] for own, made in zip(strides, steps)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for own, made in zip(strides, steps):
            made.append(own[d])
    return Loops(tuple(sizes), tuple(map(tuple, steps)))
