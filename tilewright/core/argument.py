"""What an op's argument can be: the types that a reference's signature may have, and how torch's schema language writes them.

Such a type is a `Tensor`, a `Format`, `float`, `int`, `bool`, `str`, a `Literal`, `int | float` (which stays what it was given as),
`list[Tensor]`, a list of numbers or a tuple of so many (`list[int]`, `tuple[float, float]`), `torch.dtype` or `torch.Generator`,
and each of these can be optional. A call with a generator makes no plan: what a generator gives next is in no key.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .format import Format
from .rule import Range, Row
from .tensor import name_of

SCALAR = int | float
SCHEMA_TYPES = {
    float: "float", int: "int", bool: "bool", str: "str", Tensor: "Tensor", Format: "str", list: "Tensor[]", SCALAR: "Scalar",
    torch.dtype: "ScalarType", torch.Generator: "Generator",
}  # fmt: skip
MADE_OF = (int, float, bool)  # what lists and tuples of numbers hold


@dataclass(frozen=True)
class Numbers:
    """The kind of an argument that is several numbers: a list, or a tuple of `count`."""

    of: type
    count: int | None = None

    @property
    def __name__(self) -> str:
        name = self.of.__name__
        return f"list[{name}]" if self.count is None else f"tuple[{', '.join([name] * self.count)}]"

    @property
    def words(self) -> str:
        return f"a list of {self.of.__name__}" if self.count is None else f"a tuple of {self.count} {self.of.__name__}"

    def own(self, value: Any) -> Any:
        """The numbers in a list or a tuple of the call's own; what is neither is left to be refused."""
        if not isinstance(value, (list, tuple)):
            return value
        return list(value) if self.count is None else tuple(value)


Kind = type | types.UnionType | Numbers


def kind_name(kind: Kind) -> str:
    """The kind of an argument as a signature has it."""
    if kind in (torch.dtype, torch.Generator):
        return f"torch.{kind.__name__}"
    return str(kind) if kind == SCALAR else kind.__name__


@dataclass(frozen=True)
class Parameter:
    """One argument: its Python type, whether None is allowed, its default and its rule."""

    name: str
    kind: Kind
    optional: bool
    default: Any
    choices: tuple | None
    rule: Row | Range | None

    def schema(self, default: bool = True) -> str:
        """Its part of a schema, with the default or without."""
        if isinstance(self.kind, Numbers):
            kind = f"{self.kind.of.__name__}[{'' if self.kind.count is None else self.kind.count}]"
        else:
            kind = SCHEMA_TYPES[self.kind]
        text = f"{kind}{'?' if self.optional else ''} {self.name}"
        return f"{text}={_literal(self.default)}" if default and self.default is not inspect.Parameter.empty else text

    @property
    def writable(self) -> bool:
        """Whether a schema can have the default. There is no word for an infinity, and none for a list in the place of None."""
        if isinstance(self.default, (list, tuple)):
            return not self.optional and all(math.isfinite(v) for v in self.default)
        return not isinstance(self.default, float) or math.isfinite(self.default)


def _literal(value: Any) -> str:
    """A default in torch's schema language."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, torch.dtype):
        return name_of(value)
    return repr(list(value) if isinstance(value, (list, tuple)) else value)


def kind_of(annotation: Any) -> tuple[Kind, bool, tuple | None]:
    """(the kind, None allowed, choices) of an annotation."""
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
        optional = type(None) in members
        rest = [m for m in members if m is not type(None)]
        if Tensor in rest:  # `Tensor | Quantized` is a tensor to the registered op
            rest = [Tensor]
        if {*rest} == {int, float}:
            return SCALAR, optional, None
        if len(rest) != 1:
            raise TypeError(f"an op's argument has one type, not {annotation}")
        annotation = rest[0]
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return type(members[0]), optional, members
    if annotation == list[Tensor]:
        return list, optional, None
    if origin is list and members[0] in MADE_OF:
        return Numbers(members[0]), optional, None
    if origin is tuple and members:
        if members[0] not in MADE_OF or {*members} != {members[0]}:
            raise TypeError(f"an op's argument that is a tuple holds so many int, float or bool, not {annotation}")
        return Numbers(members[0], len(members)), optional, None
    if annotation is list or annotation not in SCHEMA_TYPES:
        raise TypeError(f"an op's argument cannot be of type {annotation}")
    return annotation, optional, None
