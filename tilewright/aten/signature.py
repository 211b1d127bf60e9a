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
from .layout import is_dense
from .table import overload_of

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
    """An argument that a signature has a word for: its place, its name and its default."""

    at: int
    name: str
    default: Any


@functools.cache
def told(name: str) -> tuple[Argument, ...]:
    """The arguments of an overload that are dimensions, amounts or options: flags, words, dtypes."""

    def default(a: Any) -> Any:
        value = a.default_value if a.has_default_value() else None
        return value if a.name in DIMS else value or None  # the first dimension is one, and no flag

    return tuple(
        Argument(at, a.name, default(a))
        for at, a in enumerate(overload_of(name)._schema.arguments)
        if a.name in (*DIMS, *AMOUNTS)
        or a.name.endswith("dtype")
        or any(kind in str(a.type) for kind in ("bool", "str"))
    )


def signature_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """The signature of a call of an overload."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    if len(tensors) < len(args) or kwargs:
        tensors = [t for value in (*args, *kwargs.values()) for t in tensors_of(value)]
    layout = f"{len(tensors)} {lying(tensors)}"
    for at, argument, default in told(name):
        value = args[at] if at < len(args) else kwargs.get(argument, default)
        if argument in DIMS:
            layout += f", dim {place(value, tensors[0].dim() if tensors else 0)}"
        elif argument in AMOUNTS or (value or None) != default:
            layout += f", {argument}={word(value)}"
    dtypes, nbytes = [], 0
    for t in tensors:
        nbytes += t.nbytes
        if t.dtype not in dtypes:
            dtypes.append(t.dtype)
    return Signature(name, "+".join([NAMES[dtype] for dtype in dtypes]), layout, nbytes)


class Names(dict):
    """The names of dtypes."""

    def __missing__(self, dtype: torch.dtype) -> str:
        self[dtype] = name_of(dtype)
        return self[dtype]


NAMES = Names()


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (one for one in value if isinstance(one, Tensor))


def lying(tensors: Sequence[Tensor]) -> str:
    """How tensors lie, in a word."""
    if all(t.is_contiguous() for t in tensors):
        shape = tensors[0].shape if tensors else ()
        return "flat" if all(t.shape == shape for t in tensors[1:]) else "broadcast"
    return "turned" if all(map(is_dense, tensors)) else "strided"


def place(dims: Any, rank: int) -> str:
    """Where dimensions are among so many: the order of memory makes the last and the first differ."""
    if type(dims) is int and rank == 2:  # most calls
        return "last" if dims in (1, -1) else "first"
    named = [dims] if isinstance(dims, int) else dims
    every = set(range(rank))
    found = every if not named and not isinstance(dims, int) else {d % max(1, rank) for d in named}
    if found >= every:
        return "all"
    if found == set(range(rank - len(found), rank)):
        return "last"
    return "first" if found == set(range(len(found))) else "middle"


def word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return name_of(value)
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
