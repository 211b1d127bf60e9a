"""`Row`: what one of torch's operators is, to an engine.

A row is no op: aten itself is its reference, and autograd's own formulas its backward. It names the overloads that it serves, which
of their arguments are tensors and which are numbers that a kernel takes, and how dtypes are promoted. In-place overloads, `out=`
and those that take a number in a tensor's place come from the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.tensor import name_of


class Declined(Exception):
    """This call is aten's; the reason is counted. `lasting`: so is every call that is like it, wherever its tensors lie and
    whatever its numbers are."""

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


Asks = Mapping[str, Callable[[float], Any]]  # of a number, what host code asks: the answer is part of a plan's key


def of_numbers(*names: str, asks: Asks | None = None) -> Callable[[Any], Any]:
    """Say of a form that these arguments may be numbers, and reach a kernel as what they are: a plan has slots for them, and its
    key what `asks` asks of them. All else that is no tensor is part of a plan's key."""

    def mark(form: Any) -> Any:
        form.numbers, form.asks = frozenset(names), asks or {}
        return form

    return mark


class Number(NamedTuple):
    """An argument that is a number, and what it is where aten's default is None."""

    name: str
    default: float | int | bool = 0


@dataclass(frozen=True)
class Row:
    """One operator of the pointwise engine.

    `function` takes `tensors` in the compute dtype, but for those that are None, then `numbers`, and gives the value. `promotes`:
    "default" is torch's own promotion; "float" makes integers float; "bool" compares in the promoted dtype and gives bool; "keep"
    gives the dtype of the first tensor; "float to bool" makes integers float and gives bool. `dtypes` are the classes of promoted
    dtype that are taken: "float", "integer", "bool".
    `when(values)` may say why a call is aten's. `choose(values)` gives another function for some arguments (a rounding mode).
    `allocates` says how the result lies: as the "iterator" has it, "like" the first tensor, "contiguous", or on a GPU in the memory
    "format" of the first tensor and elsewhere as the iterator has it. `aside` are those of `tensors` that aten, if they are
    numbers, makes no operands of. `cast` are those of `tensors` and `numbers` that aten, if they are numbers, casts to the promoted
    dtype before, and refuses if that cannot hold them. `fills`: the result is one that is given, and operands are expanded to its
    shape and cast to its dtype. `asks`: all that `when` and `choose` ask of numbers that a kernel takes.
    """

    name: str
    function: Any
    overloads: tuple[str, ...]
    tensors: tuple[str, ...] = ("self",)
    numbers: tuple[Number, ...] = ()
    promotes: str = "default"
    dtypes: tuple[str, ...] = ("float", "integer", "bool")
    when: Callable[[dict[str, Any]], str | None] | None = None
    choose: Callable[[dict[str, Any]], Any] | None = None
    aside: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    allocates: str = "iterator"
    fills: bool = False
    asks: Asks | None = None


def kind_of(dtype: torch.dtype) -> str:
    """The class of a dtype, as rows name it."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "integer"


TAKEN = frozenset((
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool,
))  # fmt: skip


def taken(*tensors: Tensor) -> None:
    """Leave to aten what no engine takes: another dtype or layout, a lazy view, a second device."""
    device = tensors[0].device
    for t in tensors:
        if t.dtype not in TAKEN or t.layout != torch.strided or t.is_neg() or t.device != device:
            raise Declined(f"{name_of(t.dtype)}, {t.layout}, another device, or a lazy view")


def taken_as(dtype: torch.dtype, kinds: tuple[str, ...]) -> None:
    """Leave to aten a promoted dtype that a row does not take."""
    if dtype not in TAKEN or kind_of(dtype) not in kinds:
        raise Declined(f"dtype {name_of(dtype)}")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels compute in: fp32 for what is narrower, float64 for itself, and exact integers."""
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.int64
