"""What kind of call a call of an overload is, to measurements: its dtypes, how its tensors lie, and how many bytes they are.

Two calls of one kind take the same way through the same kernels, ours or aten's, so that a measurement of one speaks for the other
of about its size. Numbers do not count, but for those that say how much is to be done (`k`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.tensor import name_of

DIMS = ("dim", "dims")
AMOUNTS = ("k", "kernel_size")  # integers that say how much a call does


class Signature(NamedTuple):
    """A kind of call. `dtype` names those of its tensors in order, each once; `layout` is, in words, how many there are, whether
    they are of one shape without gaps ("flat"), of several ("broadcast"), turned, or with gaps ("strided"), which dimensions it is
    about, and every option that is not the default; `bytes` are those of all its tensors."""

    overload: str
    dtype: str
    layout: str
    bytes: int


class Argument(NamedTuple):
    """What a schema says of an argument."""

    name: str
    default: Any


@functools.cache
def schema(overload: torch._ops.OpOverload) -> tuple[Argument, ...]:
    return tuple(
        Argument(a.name, a.default_value if a.has_default_value() else None) for a in overload._schema.arguments
    )


def signature_of(
    name: str, overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Signature:
    """The signature of a call of `overload`, whose name is `name`."""
    arguments = schema(overload)
    values = {**dict(zip([a.name for a in arguments], args)), **kwargs}
    tensors = [t for value in values.values() for t in tensors_of(value)]
    words = [f"{len(tensors)} {lying(tensors)}"]
    rank = tensors[0].dim() if tensors else 0
    for argument in arguments:
        value = values.get(argument.name, argument.default)
        if argument.name in DIMS:
            words.append(f"dim {place(value, rank)}")
        elif argument.name in AMOUNTS or (is_option(value) and (value or None) != (argument.default or None)):
            words.append(f"{argument.name}={word(value)}")
    dtypes = dict.fromkeys(name_of(t.dtype) for t in tensors)
    return Signature(
        name, "+".join(dtypes), ", ".join(words), sum(t.numel() * t.element_size() for t in tensors)
    )  # fmt: skip


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (one for one in value if isinstance(one, Tensor))


def lying(tensors: Sequence[Tensor]) -> str:
    """How tensors lie, in a word."""
    if all(t.is_contiguous() for t in tensors):
        return "flat" if all(t.shape == tensors[0].shape for t in tensors) else "broadcast"
    return "turned" if all(map(without_gaps, tensors)) else "strided"


def without_gaps(t: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def place(dims: Any, rank: int) -> str:
    """Where dimensions are among so many: the order of memory makes the last and the first differ."""
    named = [dims] if isinstance(dims, int) else dims
    every = set(range(rank))
    found = every if not named and not isinstance(dims, int) else {d % max(1, rank) for d in named}
    if found >= every:
        return "all"
    if found == set(range(rank - len(found), rank)):
        return "last"
    return "first" if found == set(range(len(found))) else "middle"


def is_option(value: Any) -> bool:
    """Whether a value chooses among ways to go: a flag, several, a word or a dtype."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(one, bool) for one in value)
    return isinstance(value, (bool, str, torch.dtype))


def word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return name_of(value)
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
