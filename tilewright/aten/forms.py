"""Overloads of the pointwise engine whose arguments are not yet operands: views of them are, or halves, or a real view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import copies
from . import functions as f
from .layout import result_strides
from .plans import own
from .pointwise import run
from .row import Declined, Number, Row, of_numbers, taken
from .rows import cast_by, fill_is_aten, negative

TWO = ("self", "other")
COPY = Row("copy", f.copy, (), promotes="keep", fills=True)
CAST = Row("cast", f.copy, (), promotes="keep", fills=True, choose=lambda v: cast_by(v["self"], v["dtype"]))
FILL = Row("fill", f.copy, (), ("value",), promotes="keep", fills=True, cast=("value",))
FINITE_NUMBER = Row("nan_to_num", f.finite_number, (), numbers=(Number("nan"), Number("posinf"), Number("neginf")),
                    dtypes=("float",), allocates="like")  # fmt: skip
FINITE = Row("isfinite", f.is_finite, (), promotes="bool", dtypes=("float",))
INFINITE = Row("isinf", f.is_infinite, (), promotes="bool", dtypes=("float",))
TOLERANCES = Number("rtol"), Number("atol")
CLOSE = {
    equal_nan: Row("isclose", function, (), TWO, TOLERANCES, promotes="float to bool", dtypes=("float",))
    for equal_nan, function in ((False, f.is_close), (True, f.is_close_or_nan))
}
EQUAL = Row("isclose", f.equal, (), TWO, promotes="bool")
GLU = Row("glu", f.gate, (), TWO, dtypes=("float",))
GLU_OTHER = Row("glu_backward", f.gate_backward, (), ("grad", "self", "other"), dtypes=("float",))
ADDR = Row("addr", f.add_outer, (), ("self", "one", "other"), (Number("beta"), Number("alpha")), cast=("beta", "alpha"))
OUTER = Row("addr", f.outer, (), ("one", "other"), (Number("alpha"),), cast=("alpha",))
LOG_SIGMOID = Row("log_sigmoid", f.log_sigmoid, (), dtypes=("float",))
BELOW_ONE = Row("log_sigmoid", f.below_one, (), dtypes=("float",))
REAL = Row("polar", f.times_cosine, (), TWO, dtypes=("float",))
IMAGINARY = Row("polar", f.times_sine, (), TWO, dtypes=("float",))


def glu(self: Tensor, dim: int = -1) -> Tensor:
    one, other = halves(self, dim)
    return run(GLU, {"self": one, "other": other}, None)


def glu_backward(grad_output: Tensor, self: Tensor, dim: int) -> Tensor:
    one, other = halves(self, dim)
    if grad_output.shape != one.shape or grad_output.dtype != self.dtype:
        raise Declined("a gradient that is not like the result")
    made = own(torch.empty(self.shape, dtype=self.dtype, device=self.device))
    first, second = halves(made, dim)
    run(GLU, {"self": grad_output, "other": other}, first)
    run(GLU_OTHER, {"grad": grad_output, "self": one, "other": other}, second)
    return made


def log_sigmoid_forward(self: Tensor) -> tuple[Tensor, Tensor]:
    """Its second result is for aten's backward, which reads it on a processor alone. There aten has both without gaps in the order
    of dimensions; on a GPU the result lies as the operand does."""
    if self.is_cuda:
        made = run(LOG_SIGMOID, {"self": self}, own(torch.empty_like(self)))
        return made, own(torch.empty(0, dtype=self.dtype, device=self.device))
    made, below = (own(torch.empty_like(self, memory_format=torch.contiguous_format)) for _ in range(2))
    return run(LOG_SIGMOID, {"self": self}, made), run(BELOW_ONE, {"self": self}, below)


def halves(t: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if not -t.dim() <= dim < t.dim() or t.shape[dim] % 2:
        raise Declined("no two halves")
    return tuple(t.chunk(2, dim)) if t.shape[dim] else (t, t)


def addr(self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if vec1.dim() != 1 or vec2.dim() != 1 or not {self.dtype} == {vec1.dtype} == {vec2.dtype}:
        raise Declined("no two vectors, or several dtypes")
    if not self.is_floating_point() and (isinstance(alpha, float) or isinstance(beta, float)):
        raise Declined("fractions of integers")
    if self.dtype != torch.bool and (isinstance(alpha, bool) or isinstance(beta, bool)):
        raise Declined("a bool as a factor")
    rows, columns, shape = vec1.unsqueeze(1), vec2.unsqueeze(0), (vec1.shape[0], vec2.shape[0])
    if self.dim() > 2:
        raise Declined("shapes that do not broadcast")
    whole = self.expand(shape)
    strides = result_strides(shape, [whole, rows, columns])
    out = own(torch.empty_strided(shape, strides, dtype=self.dtype, device=self.device))
    if beta == 0:  # what self holds is not looked at, NaN included
        return run(OUTER, {"one": rows, "other": columns, "alpha": alpha}, out)
    return run(ADDR, {"self": whole, "one": rows, "other": columns, "beta": beta, "alpha": alpha}, out)


def polar(abs: Tensor, angle: Tensor) -> Tensor:
    if abs.dtype != angle.dtype or abs.dtype not in (torch.float32, torch.float64):
        raise Declined("no two floats of one dtype")
    if abs.shape != angle.shape:
        raise Declined("shapes that broadcast")
    wide = torch.complex64 if abs.dtype == torch.float32 else torch.complex128
    strides = result_strides(tuple(abs.shape), [abs, angle])
    made = own(torch.empty_strided(abs.shape, strides, dtype=wide, device=abs.device))
    parts = torch.view_as_real(made)
    for row, part in ((REAL, parts[..., 0]), (IMAGINARY, parts[..., 1])):
        run(row, {"self": abs, "other": angle}, part)
    return made


@of_numbers("value")
def fill(self: Tensor, value: Any) -> Tensor:
    reason = fill_is_aten(self, value)
    if reason is not None:
        raise Declined(reason)
    row = CAST if isinstance(value, Tensor) else FILL
    return run(row, {"self": value, "value": value, "dtype": self.dtype}, own(torch.empty_like(self)))


def zero(self: Tensor) -> Tensor:
    return run(FILL, {"value": 0}, self)


def clone(self: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    taken(self)
    made = own(torch.empty_like(self, memory_format=memory_format or torch.preserve_format))
    return made if copies.repeat_into(made, self) else run(COPY, {"self": self}, made)


def to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    if (
        (device is not None and torch.device(device) != self.device)
        or pin_memory
        or layout not in (None, torch.strided)
    ):
        raise Declined("a copy to another device or layout")
    made = own(torch.empty_like(self, dtype=dtype, memory_format=memory_format or torch.preserve_format))
    return run(CAST, {"self": self, "dtype": made.dtype}, made)


def of_floats(row: Row, otherwise: bool) -> Callable[[Tensor], Tensor]:
    """A question about floats, to which integers have one answer."""

    def ask(self: Tensor) -> Tensor:
        taken(self)
        if self.is_floating_point():
            return run(row, {"self": self}, None)
        return run(FILL, {"value": otherwise}, own(torch.empty_like(self, dtype=torch.bool)))

    return ask


@of_numbers("nan", "posinf", "neginf")
def nan_to_num(self: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    """Infinities become the largest numbers of the dtype, if no others are given."""
    if not self.is_floating_point():
        return clone(self)
    most = torch.finfo(self.dtype).max
    ends = {"posinf": most if posinf is None else posinf, "neginf": -most if neginf is None else neginf}
    return run(FINITE_NUMBER, {"self": self, "nan": nan, **ends}, None)


def sign(tolerance: float) -> int:
    """-1 is of those that torch refuses, NaNs among them."""
    return -1 if negative(tolerance) else int(tolerance > 0)


@of_numbers("rtol", "atol", asks={"rtol": sign, "atol": sign})
def isclose(self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Integers are compared as floats of the default dtype, as aten does, unless only equal ones are close."""
    if self.dtype != other.dtype or negative(rtol) or negative(atol):
        raise Declined("two dtypes or a negative tolerance, which torch refuses")
    values = {"self": self, "other": other, "rtol": rtol, "atol": atol}
    return run(EQUAL if not self.is_floating_point() and rtol == atol == 0 else CLOSE[equal_nan], values, None)


FORMS = {
    "glu": glu, "glu_backward": glu_backward, "log_sigmoid_forward": log_sigmoid_forward, "addr": addr, "polar": polar,
    "fill.Scalar": fill, "fill.Tensor": fill, "zero_": zero, "clone": clone, "_to_copy": to_copy,
    "isfinite": of_floats(FINITE, True), "isinf": of_floats(INFINITE, False), "nan_to_num": nan_to_num, "isclose": isclose,
}  # fmt: skip
