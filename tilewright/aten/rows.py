"""The rows of the pointwise engine: each of torch's operators that it serves, in one line.

Overloads that torch itself forwards to another ("div.Scalar" to "div.Tensor") are reached by that one, and not named here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import functions as f
from .row import Number, Row, kind_of

FLOAT, EXACT, ANY = ("float",), ("integer", "bool"), ("float", "integer", "bool")
NUMERIC = ("float", "integer")
TWO = ("self", "other")


def both(name: str) -> tuple[str, str]:
    """An overload and its in-place one: "add.Tensor" and "add_.Tensor"."""
    packet, dot, overload = name.partition(".")
    return name, f"{packet}_{dot}{overload}"


def unary(
    name: str, function: Any, promotes: str = "default", dtypes: tuple[str, ...] = ANY, in_place: bool = True
) -> Row:
    return Row(name, function, both(name) if in_place else (name,), promotes=promotes, dtypes=dtypes)


def dtype_of(value: Any) -> torch.dtype | None:
    """Of a tensor; a number in its place has none."""
    return value.dtype if isinstance(value, Tensor) else None


def comparison(name: str, function: Any) -> Row:
    return Row(name, function, (f"{name}.Tensor", f"{name}.Scalar"), TWO, promotes="bool")


def exact(values: dict[str, Any], name: str = "alpha") -> str | None:
    """torch refuses a fractional factor for integers."""
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    if isinstance(values[name], float) and not any(t.is_floating_point() for t in tensors):
        other = values.get("other")
        return None if isinstance(other, float) else "a fractional number for integers"
    return None


def factors(values: dict[str, Any]) -> str | None:
    """torch refuses a bool as alpha, unless the result is one too."""
    if isinstance(values["alpha"], bool) and not all(
        isinstance(v, bool) or dtype_of(v) == torch.bool for v in map(values.get, TWO)
    ):
        return "a bool as a factor"
    return exact(values)


def no_bools(values: dict[str, Any]) -> str | None:
    """torch refuses to subtract bools."""
    if any(
        isinstance(v, bool) or (isinstance(v, Tensor) and v.dtype == torch.bool)
        for v in (values["self"], values["other"])
    ):
        return "bool"
    return factors(values)


def whole_exponent(values: dict[str, Any]) -> str | None:
    """torch refuses negative numbers as exponents of integers."""
    base, exponent = values["self"], values["exponent"]
    if isinstance(base, complex) or isinstance(exponent, complex):
        return "a complex number"
    kinds = [
        kind_of(v.dtype) if isinstance(v, Tensor) else "float" if isinstance(v, float) else "integer"
        for v in (base, exponent)
    ]
    if "float" not in kinds and not isinstance(exponent, Tensor) and exponent < 0:
        return "a negative exponent of integers"
    return None


# Exponents for which aten has a formula of its own
POWERS = {0: f.power_0, 1: f.power_1, 2: f.power_2, 3: f.power_3, 0.5: f.power_half, -0.5: f.power_minus_half,
          -1: f.power_minus_1, -2: f.power_minus_2}  # fmt: skip


def known_power(exponent: float) -> tuple[float | None, bool]:
    """What `whole_exponent` and `power_by` ask of an exponent."""
    return float(exponent) if exponent in POWERS else None, exponent < 0


def power_by(values: dict[str, Any]) -> Any:
    exponent = values["exponent"]
    return f.power if isinstance(exponent, Tensor) else POWERS.get(exponent, f.power)


def rounding(values: dict[str, Any]) -> Any:
    return {"floor": f.floored_quotient, "trunc": f.truncated_quotient}[values["rounding_mode"]]


def rounds(values: dict[str, Any]) -> str | None:
    return None if values["rounding_mode"] in ("floor", "trunc") else "division that does not round"


def gelu_of(plain: Any, by_tanh: Any) -> Any:
    return lambda values: by_tanh if values["approximate"] == "tanh" else plain


def by_bits(plain: Any, of_16: Any) -> Any:
    """One choice of a function for 16-bit floats, of which a pass is bound by instructions, and one for others."""
    return lambda values: (of_16 if values["self"].element_size() == 2 else plain)(values)


def known_gelu(values: dict[str, Any]) -> str | None:
    return None if values["approximate"] in ("none", "tanh") else "an unknown approximation"


def fill_is_aten(self: Tensor, value: Any) -> str | None:
    """Why aten fills a tensor with this value, if it does."""
    if not isinstance(self, Tensor):
        return "a number in a tensor's place"
    if isinstance(value, Tensor) and (value.dim() or value.device != self.device):
        return "a value with dimensions, or elsewhere"
    return "complex" if isinstance(value, complex) else None


def plain_fill(values: dict[str, Any]) -> str | None:
    return fill_is_aten(values["self"], values["value"])


def cast_by(source: Any, to: torch.dtype) -> Any:
    """The function that makes of a source's elements those of a dtype. Floats are cut to what aten's casts on a GPU cut them to: an
    int32 for narrower integers too, of which they keep the last bits, but an int64 for bytes. A processor's own casts have other
    answers for what is out of range, and for NaNs."""
    if kind_of(to) != "integer" or not isinstance(source, Tensor) or not source.is_floating_point():
        return f.copy
    return f.cut_to_int64 if to in (torch.int64, torch.uint8) else f.cut_to_int32


def copies(values: dict[str, Any]) -> str | None:
    """Only what a kernel does better than a copy of bytes: plain copies are the driver's."""
    to, source = values["self"], values["src"]
    if not isinstance(source, Tensor):
        return fill_is_aten(to, source)
    return "a copy between devices" if to.device != source.device else None


def masks(values: dict[str, Any]) -> str | None:
    if dtype_of(values["mask"]) != torch.bool:
        return "a mask that is not bool"
    reason, value = plain_fill(values), values["value"]
    if reason is None and cast_by(value, values["self"].dtype) is not f.copy:
        return "a fraction in integers"  # of which aten asks on the host whether they hold it
    return reason


def clamps(values: dict[str, Any]) -> str | None:
    """torch refuses to clamp by nothing."""
    return "no bound" if values.get("min") is None and values.get("max") is None else None


def clamp_by(values: dict[str, Any]) -> Any:
    low, high = values.get("min") is not None, values.get("max") is not None
    return f.between if low and high else f.larger if low else f.smaller


def conditions(values: dict[str, Any]) -> str | None:
    out = values.get("out")
    if out is not None and out.dtype != torch.result_type(values["self"], values["other"]):
        return "a result of another dtype, which torch refuses"
    return None if dtype_of(values["condition"]) == torch.bool else "a condition that is not bool"


def scaled(values: dict[str, Any]) -> str | None:
    return exact(values, "value")


def divides(values: dict[str, Any]) -> str | None:
    """torch refuses to divide integers by integers here, whatever they are added to."""
    both = values["tensor1"], values["tensor2"]
    floats = [v.is_floating_point() if isinstance(v, Tensor) else isinstance(v, float) for v in both]
    return None if any(floats) else "integers divided by integers"


def lerps(values: dict[str, Any]) -> str | None:
    """torch promotes neither end; a weight without dimensions says nothing beside tensors with some."""
    one, end, weight = values["self"], values["end"], values["weight"]
    if dtype_of(one) != dtype_of(end):
        return "ends of two dtypes, which torch refuses"
    whole = not one.is_floating_point()  # which the promoted dtype may not be
    if isinstance(weight, Tensor):
        other = weight.dtype != one.dtype and (weight.dim() or not one.dim() or whole)
        return "a weight of another dtype" if other else None
    return "a fractional weight of integers" if whole and isinstance(weight, float) else None


def negative(number: float) -> bool:
    """Whether a number is not 0 or more: a NaN is one of these."""
    return not number >= 0


def slopes(values: dict[str, Any]) -> str | None:
    """torch refuses the gradient from a result that may have come from two operands."""
    if isinstance(values["alpha"], complex):
        return "a complex number"
    return "a negative slope" if values["is_result"] and negative(values["alpha"]) else None


ROWS = (
    # one operand
    unary("abs", f.absolute, dtypes=NUMERIC),
    unary("neg", f.negative, dtypes=NUMERIC),
    unary("relu", f.relu, dtypes=NUMERIC),
    unary("atan", f.atan, "float"),
    unary("cos", f.cos, "float"),
    unary("sin", f.sin, "float"),
    unary("erf", f.erf, "float"),
    unary("exp", f.exp, "float"),
    unary("exp2", f.exp2, "float"),
    unary("log", f.log, "float", in_place=False),
    unary("reciprocal", f.reciprocal, "float"),
    unary("rsqrt", f.reciprocal_root, "float"),
    unary("sigmoid", f.sigmoid, "float"),
    unary("sqrt", f.square_root, "float"),
    unary("tanh", f.tanh, "float"),
    unary("silu", f.silu, dtypes=FLOAT),
    unary("angle", f.angle, "float", in_place=False),
    unary("isnan", f.is_nan, "bool", in_place=False),
    unary("logical_not", f.logical_not, "bool", in_place=False),
    Row("bitwise_not", f.bitwise_not, both("bitwise_not"), dtypes=EXACT,
        choose=lambda v: f.flipped if v["self"].dtype == torch.bool else f.bitwise_not),
    Row("gelu", f.gelu, both("gelu"), dtypes=FLOAT, when=known_gelu,
        choose=by_bits(gelu_of(f.gelu, f.gelu_tanh), gelu_of(f.gelu_for_16_bits, f.gelu_tanh_for_16_bits))),
    Row("elu", f.elu, both("elu"), numbers=(Number("alpha"), Number("scale"), Number("input_scale")), dtypes=FLOAT,
        cast=("alpha", "scale", "input_scale")),
    Row("softplus", f.softplus, ("softplus",), numbers=(Number("beta"), Number("threshold")), dtypes=FLOAT,
        cast=("beta", "threshold")),
    Row("threshold", f.threshold, ("threshold",), numbers=(Number("threshold"), Number("value")), dtypes=NUMERIC,
        cast=("threshold", "value")),
    Row("fill", f.copy, ("fill_.Scalar", "fill_.Tensor"), ("value",), promotes="keep", when=plain_fill, fills=True,
        choose=lambda v: cast_by(v["value"], v["self"].dtype), cast=("value",)),
    Row("copy", f.copy, ("copy_",), ("src",), promotes="keep", when=copies, fills=True,
        choose=lambda v: cast_by(v["src"], v["self"].dtype), cast=("src",)),
    # two
    Row("add", f.add, both("add.Tensor"), TWO, (Number("alpha"),), when=factors, cast=("alpha",)),
    Row("sub", f.subtract, both("sub.Tensor"), TWO, (Number("alpha"),), when=no_bools, cast=("alpha",)),
    Row("mul", f.multiply, both("mul.Tensor"), TWO),
    Row("div", f.quotient, both("div.Tensor"), TWO, promotes="float"),
    Row("div_mode", f.floored_quotient, both("div.Tensor_mode"), TWO, dtypes=NUMERIC, when=rounds, choose=rounding),
    Row("floor_divide", f.floored_quotient, ("floor_divide", "floor_divide_.Tensor", "floor_divide.out"), TWO, dtypes=NUMERIC),
    Row("remainder", f.remainder, (*both("remainder.Tensor"), "remainder.Scalar_Tensor"), TWO, dtypes=NUMERIC),
    Row("maximum", f.larger, ("maximum",), TWO),
    Row("minimum", f.smaller, ("minimum",), TWO),
    Row("bitwise_and", f.bitwise_and, both("bitwise_and.Tensor"), TWO, dtypes=EXACT),
    Row("bitwise_or", f.bitwise_or, both("bitwise_or.Tensor"), TWO, dtypes=EXACT),
    Row("logical_and", f.logical_and, ("logical_and",), TWO, promotes="bool"),
    Row("logical_or", f.logical_or, ("logical_or",), TWO, promotes="bool"),
    Row("logical_xor", f.logical_xor, ("logical_xor",), TWO, promotes="bool"),
    comparison("eq", f.equal),
    comparison("ne", f.not_equal),
    comparison("lt", f.less),
    comparison("le", f.less_equal),
    comparison("gt", f.greater),
    comparison("ge", f.greater_equal),
    Row("pow", f.power, ("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow_.Tensor", "pow_.Scalar"),
        ("self", "exponent"), dtypes=NUMERIC, when=whole_exponent, choose=power_by, aside=("exponent",),
        cast=("exponent",), asks={"exponent": known_power}),
    Row("pow_of_number", f.power, ("pow.Scalar",), ("self", "exponent"), dtypes=NUMERIC, allocates="contiguous"),
    # three
    Row("where", f.chosen, ("where.self", "where.self_out"), ("condition", "self", "other"), when=conditions),
    Row("clamp", f.between, (*both("clamp"), *both("clamp.Tensor")), ("self", "min", "max"), dtypes=NUMERIC, when=clamps,
        choose=clamp_by, aside=("min", "max"), cast=("min", "max")),
    Row("clamp_min", f.larger, both("clamp_min"), ("self", "min"), dtypes=NUMERIC, aside=("min",), cast=("min",)),
    Row("masked_fill", f.filled, ("masked_fill.Scalar", "masked_fill.Tensor"), ("self", "mask", "value"), promotes="keep",
        when=masks, allocates="contiguous", cast=("value",)),
    Row("masked_fill_", f.filled, ("masked_fill_.Scalar", "masked_fill_.Tensor"), ("self", "mask", "value"), promotes="keep",
        when=masks, cast=("value",)),
    Row("addcmul", f.add_product, ("addcmul",), ("self", "tensor1", "tensor2"), (Number("value"),), dtypes=NUMERIC, when=scaled,
        cast=("value",)),
    Row("addcdiv", f.add_quotient, ("addcdiv",), ("self", "tensor1", "tensor2"), (Number("value"),), dtypes=FLOAT,
        when=divides, cast=("value",)),
    Row("lerp", f.lerp, (*both("lerp.Tensor"), *both("lerp.Scalar")), ("self", "end", "weight"), dtypes=FLOAT, when=lerps,
        aside=("weight",), cast=("weight",)),
    # formulas of backward passes
    Row("sigmoid_backward", f.sigmoid_backward, ("sigmoid_backward",), ("grad_output", "output"), dtypes=FLOAT),
    Row("tanh_backward", f.tanh_backward, ("tanh_backward",), ("grad_output", "output"), dtypes=FLOAT),
    Row("silu_backward", f.silu_backward, ("silu_backward",), ("grad_output", "self"), dtypes=FLOAT),
    Row("gelu_backward", f.gelu_backward, ("gelu_backward",), ("grad_output", "self"), dtypes=FLOAT, when=known_gelu,
        choose=gelu_of(f.gelu_backward, f.gelu_tanh_backward)),
    Row("threshold_backward", f.threshold_backward, ("threshold_backward",), ("self", "grad_output"), (Number("threshold"),),
        dtypes=NUMERIC, cast=("threshold",)),
    Row("elu_backward", f.elu_backward, ("elu_backward",), ("grad_output", "self_or_result"),
        (Number("alpha"), Number("scale"), Number("input_scale")), dtypes=FLOAT, when=slopes, asks={"alpha": negative},
        cast=("alpha", "scale", "input_scale"), choose=lambda v: f.elu_backward_of_result if v["is_result"] else f.elu_backward),
    Row("dropout_backward", f.dropout_backward, ("native_dropout_backward",), ("grad_output", "mask"), (Number("scale"),),
        dtypes=FLOAT, allocates="format"),
)  # fmt: skip
