"""Host arithmetic on sizes and views that op files share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Integers of each size in bytes: what moves elements without looking at them takes them as these.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as options and errors have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def rows(x: Tensor) -> Tensor:
    """x as [rows, last dimension]. It is a view where the leading dimensions can be merged, else a copy."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def vector(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """An operand with one number per row or column as a flat, contiguous tensor, of this dtype if one is given."""
    if t is None:
        return None
    t = t.reshape(-1)
    return t.to(dtype or t.dtype).contiguous()


def fold(x: Tensor) -> tuple[Tensor, int, tuple[int, int, int]]:
    """(x, size of the inner of two leading dimensions, strides of outer, inner and last dimension).

    Leading dimensions are seen as two, for those of a batch without its last tokens, [batch, length - 1, vocab], cannot be
    one, and a copy would double the memory. What cannot be two either is copied."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        elif size != 1:
            merged.append((size, stride))
    if len(merged) > 2:
        return fold(x.contiguous())
    if not merged:  # one row: the stride that many would have, for 0 would be a variant of its own
        merged = [(1, x.stride(-2) if x.dim() > 1 else x.shape[-1])]
    (_, outer), (inner, step) = [(1, 0), *merged][-2:]
    return x, max(inner, 1), (outer, step, x.stride(-1))


def fold_like(t: Tensor, inner: int) -> tuple[Tensor, tuple[int, int]]:
    """(t, its strides) for one number per row of a tensor that was folded."""
    t = t.reshape(t.numel() // inner, inner)
    return t, t.stride()


def piece_count(t: Tensor, other: Tensor) -> int:
    """How many bf16 numbers stand for one number of the factor `t`: 3 for fp32, 2 for fp16.

    Two factors of fp16 have an instruction of their own, so that each counts as one piece.
    """
    if t.dtype == torch.float32:
        return 3
    return 2 if t.dtype == torch.float16 and other.dtype != torch.float16 else 1
