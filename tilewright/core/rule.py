"""What `where` says of an argument: the row of a tensor, `"float[... hidden]"` say, or the range of a number.

A row is `dtype[dims]`. The dims are names that must agree between arguments, integers, or a leading `...` (any leading dimensions,
equal wherever it appears). One whose name ends in `+` is at least 1. One whose name ends in `?` broadcasts: its size is the
dimension's or 1, and the dimension is 1 only if every size of it is. A leading `...?` broadcasts to the leading dimensions of the
arguments with a plain `...`, as torch broadcasts, or where none is given, with the others like it. The dtype is a class (`float`,
`integer`, `codes`, `any`), a torch dtype's name, several of those with a bar between them (`float|int32`), or another argument's
name (the same dtype). The rule of a number is `at_least(0)`, `above(0)`, `between(0, 1)` or `one_of(1, 2)`; that of several
numbers holds for each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = {
    "float": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "int": (torch.int32, torch.int64),
    "int_or_bool": (torch.int32, torch.int64, torch.bool),
    "integer": INTEGERS,
    "integer_or_bool": (*INTEGERS, torch.bool),
    "codes": (torch.float8_e4m3fn, torch.float8_e5m2),
    # What low-precision products take: codes, two 4-bit codes a byte, or plain numbers; and what scales codes
    "operand": (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bfloat16, torch.float16),
    "scale": (torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn),
    "any": None,
}


@dataclass(frozen=True)
class Range:
    """A predicate on a number, with the words for its error message."""

    words: str
    holds: Callable[[float], bool]
    finite: bool = True  # an infinity is refused whatever `holds` says


def at_least(low: float) -> Range:
    return Range(f">= {low:g}", lambda v: v >= low)


def above(low: float) -> Range:
    return Range(f"> {low:g}", lambda v: v > low)


def between(low: float, high: float) -> Range:
    return Range(f"in [{low:g}, {high:g}]", lambda v: low <= v <= high)


def one_of(*numbers: float) -> Range:
    return Range(f"one of {', '.join(f'{n:g}' for n in numbers)}", lambda v: v in numbers, finite=False)


@functools.lru_cache(4096)
def dtypes_of(text: str) -> tuple[torch.dtype, ...] | None:
    """The dtypes that a class, a dtype's name or several with bars between them allow; None is any."""
    found: dict[torch.dtype, None] = {}
    for name in text.split("|"):
        allowed = DTYPES.get(name, (getattr(torch, name, None),))
        if allowed is None:
            if name != text:
                raise ValueError(f"where: {text!r} joins {name} with other dtypes, which it has already")
            return None
        if not isinstance(allowed[0], torch.dtype):
            raise ValueError(f"where: {name!r} in {text!r} is neither a class of dtypes nor a torch dtype")
        found.update(dict.fromkeys(allowed))
    return tuple(found)


@dataclass(frozen=True)
class Row:
    """A parsed `dtype[dims]`; `many`: of each tensor in a list."""

    dtype: str
    dims: tuple[str, ...]
    leading: bool  # a plain `...`
    filled: frozenset[str] = frozenset()  # dimensions that are never 0
    many: bool = False
    loose: frozenset[int] = frozenset()  # the places among `dims` that may be 1 instead
    spread: bool = False  # a `...?`

    @staticmethod
    @functools.lru_cache(4096)
    def parse(text: str) -> Row:
        match = re.fullmatch(r"(\w+(?:\|\w+)*|wide\(\w+\))\[([^\]]*)\]", text)
        if match is None:
            raise ValueError(f"where: {text!r} is not of the form 'dtype[dims]'")
        dims = match[2].replace(",", " ").split()
        head = dims[0] if dims and dims[0] in ("...", "...?") else None
        parsed = []
        for dim in dims if head is None else dims[1:]:
            one = re.fullmatch(r"(\w+)(\+?\??|\?\+)", dim)
            if one is None:
                raise ValueError(
                    f"where: {dim!r} in {text!r} is no dimension: a name or an integer, perhaps with + or ?"
                )
            parsed.append(one.groups())
        names = tuple(name for name, _ in parsed)
        filled = frozenset(name for name, marks in parsed if "+" in marks)
        loose = frozenset(at for at, (_, marks) in enumerate(parsed) if "?" in marks)
        return Row(match[1], names, head == "...", filled, loose=loose, spread=head == "...?")

    @property
    def broadcasts(self) -> bool:
        return self.spread or bool(self.loose)

    @property
    def words(self) -> str:
        """The row as documents show it."""
        head = ["..."] if self.leading else ["...?"] if self.spread else []
        dims = [f"{name}?" if at in self.loose else name for at, name in enumerate(self.dims)]
        return f"{self.dtype}[{', '.join([*head, *dims])}]"

    def dtypes(self, values: Mapping[str, Any]) -> tuple[torch.dtype, ...] | None:
        """The dtypes that it allows beside these arguments; None is any."""
        return (values[self.dtype].dtype,) if self.dtype in values else dtypes_of(self.dtype)
