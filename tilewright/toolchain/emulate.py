"""What a GPU computes, for Triton's interpreter: the numbers.

The stock interpreter holds bf16 and FP8 values as bare integers and, depending on the version, rounds casts wrongly,
does bf16 arithmetic on bit patterns, rounds `fma` twice, and lets NaN through `max`. Here: casts to nearest even (FP8
saturating as `cvt.satfinite` does, NaN kept), bf16 arithmetic, comparison, dot and reduction through float32 with one
rounding, single-rounding `fma`, `max`/`min`/`clamp` that drop or keep NaN as asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.runtime.interpreter import TensorHandle


class SmallFloat(NamedTuple):
    """A float format that numpy lacks: its codes are held as unsigned integers."""

    bits: int
    mantissa: int
    lowest: int  # exponent of the smallest normal number
    top: int  # code of the largest magnitude a cast may give
    infinity: int | None
    nan: int


SMALL = {
    "bf16": SmallFloat(16, 7, -126, 0x7F80, 0x7F80, 0x7FC0),
    "fp8e4nv": SmallFloat(8, 3, -6, 0x7E, None, 0x7F),
    "fp8e5": SmallFloat(8, 2, -14, 0x7B, 0x7C, 0x7F),
}
_HALF = SmallFloat(16, 10, -14, 0x7C00, 0x7C00, 0x7E00)  # numpy has it, but rounds it to nearest only
_OTHER_FLOATS = ("fp16", "fp32", "fp64")


def _decode(code: np.ndarray, fmt: SmallFloat) -> np.ndarray:
    """The exact float32 values of `code`."""
    if fmt.bits == 16:
        return (code.astype(np.uint32) << 16).view(np.float32)
    code = code.astype(np.int64)
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    exponent = np.maximum(magnitude >> fmt.mantissa, 1)
    significand = magnitude - ((exponent - 1) << fmt.mantissa)
    value = np.ldexp(significand.astype(np.float64), exponent - 1 + fmt.lowest - fmt.mantissa)
    if fmt.infinity is not None:
        value = np.where(magnitude == fmt.infinity, np.inf, value)
    value = np.where(magnitude > (fmt.infinity or fmt.top), np.nan, value)
    return np.where(code >> (fmt.bits - 1), -value, value).astype(np.float32)


def _encode(value: np.ndarray, fmt: SmallFloat, toward_zero: bool = False) -> np.ndarray:
    """Codes of `value`, rounded once, to nearest even or toward zero."""
    if fmt.bits == 16 and fmt.mantissa == 7 and value.dtype == np.float32 and not toward_zero:
        bits = value.view(np.uint32)  # bf16 is its upper half: a carry is a rounding up here too
        code = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(value), np.uint16(fmt.nan), code)
    value = value.astype(np.float64)
    magnitude = np.where(np.isfinite(value), np.abs(value), 2.0**200)
    exponent = np.maximum(np.where(magnitude == 0, fmt.lowest, np.frexp(magnitude)[1] - 1), fmt.lowest)
    scaled = np.ldexp(magnitude, fmt.mantissa - exponent)
    significand = (np.floor(scaled) if toward_zero else np.rint(scaled)).astype(np.int64)
    # A carry out of the significand runs into the exponent field, which is what rounding up to the next binade means.
    code = np.minimum(((exponent - fmt.lowest).astype(np.int64) << fmt.mantissa) + significand, fmt.top)
    if toward_zero and fmt.top == fmt.infinity:
        code = np.where(np.isfinite(value), np.minimum(code, fmt.top - 1), code)
    code = np.where(np.isnan(value), fmt.nan, code | (np.signbit(value).astype(np.int64) << (fmt.bits - 1)))
    return code.astype(f"u{fmt.bits // 8}")


def _widen(handle: TensorHandle) -> np.ndarray:
    """The values of `handle` in a type that numpy computes with."""
    fmt = SMALL.get(handle.dtype.scalar.name) if not handle.dtype.is_ptr() else None
    return handle.data if fmt is None or handle.data.dtype == np.bool_ else _decode(handle.data, fmt)


def _narrow(value: np.ndarray, dtype: tl.dtype, toward_zero: bool = False) -> TensorHandle:
    dtype = dtype.scalar
    fmt = SMALL.get(dtype.name) if not dtype.is_ptr() else None
    if fmt is not None:
        return TensorHandle(_encode(value, fmt, toward_zero), dtype)
    if toward_zero:
        if dtype != tl.float16:
            raise NotImplementedError(f"rounding toward zero to {dtype}")
        return TensorHandle(_encode(value, _HALF, toward_zero).view(np.float16), dtype)
    return TensorHandle(value.astype(stock._get_np_dtype(dtype), copy=False), dtype)


def _to_integer(value: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """Toward zero, saturating, NaN to 0, as PTX does: numpy's own answer differs from one CPU to another."""
    target = np.dtype(stock._get_np_dtype(dtype))
    # Narrow targets go through 32 bits and wrap, so that no kernel can lean on a saturation the hardware lacks.
    limits = np.iinfo(target if target.itemsize >= 4 else np.int32)
    wide = np.trunc(value.astype(np.float64))
    above, below = wide >= float(limits.max + 1), wide <= float(limits.min)
    whole = np.where(above | below | np.isnan(wide), 0.0, wide).astype(limits.dtype)
    whole[above], whole[below] = limits.max, limits.min
    return TensorHandle(whole.astype(target), dtype.scalar)


def _cast(self: Any, src: TensorHandle, dst_type: tl.dtype, rounding: Any = None) -> TensorHandle:
    source, target = src.dtype.scalar, dst_type.scalar
    if source.is_floating() and target.is_int():
        return _to_integer(_widen(src), target)
    return _narrow(_widen(src), target, toward_zero=rounding == stock._ir.ROUNDING_MODE.RTZ)


_STOCK_FP_TO_FP = stock.InterpreterBuilder.create_fp_to_fp
_STOCK_CONVERT = stock._convert_float
_STOCK_FMA = stock.InterpreterBuilder.create_fma


def _known(*dtypes: tl.dtype) -> bool:
    return all(dtype.scalar.name in SMALL or dtype.scalar.name in _OTHER_FLOATS for dtype in dtypes)


def _fp_to_fp(self: Any, src: TensorHandle, dst_type: tl.dtype, rounding: Any) -> TensorHandle:
    if _known(src.dtype, dst_type):
        return _cast(self, src, dst_type, rounding)
    return _STOCK_FP_TO_FP(self, src, dst_type, rounding)


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    if not _known(source, target):
        return _STOCK_CONVERT(data, source, target, rounding)
    raw = np.ascontiguousarray(data).view(stock._get_np_dtype(source)).reshape(data.shape)
    out = _cast(None, TensorHandle(raw, source), target, rounding).data
    return out.view(f"u{out.dtype.itemsize}")


def _binary(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: np.ufunc) -> TensorHandle:
    left, right = _widen(lhs), _widen(rhs)
    if left.dtype == np.bool_ and right.dtype == np.bool_ and op in (np.add, np.subtract, np.multiply):
        # int1 wraps like any integer; numpy's bool saturates and cannot subtract.
        return TensorHandle((op(left.astype(np.int8), right.astype(np.int8)) & 1).astype(np.bool_), tl.int1)
    out = op(left, right)
    # A comparison keeps the operand's type in the stock interpreter, so a mask of bf16 values would be "bf16" later.
    return TensorHandle(out, tl.int1) if out.dtype == np.bool_ else _narrow(out, lhs.dtype)


def _unary(self: Any, arg: TensorHandle, op: Callable[[np.ndarray], np.ndarray]) -> TensorHandle:
    return _narrow(op(_widen(arg)), arg.dtype)


def _maxnum(self: Any, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    return _binary(self, lhs, rhs, np.fmax)


def _minnum(self: Any, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    return _binary(self, lhs, rhs, np.fmin)


def _clamp(self: Any, arg: TensorHandle, low: TensorHandle, high: TensorHandle, propagate: Any) -> TensorHandle:
    if propagate == stock._ir.PROPAGATE_NAN.NONE:
        return _minnum(self, _maxnum(self, arg, low), high)
    return _binary(self, _binary(self, arg, low, np.maximum), high, np.minimum)


def _fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    if z.data.dtype == np.float64:
        return _STOCK_FMA(self, x, y, z)
    a, b, c = (_widen(h).astype(np.float64) for h in (x, y, z))
    product = a * b  # exact: at most 48 significant bits
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    # Rounding the float64 sum to odd makes the second rounding, to the narrow type, the only one that counts.
    even = (total.view(np.int64) & 1) == 0
    total = np.where((error > 0) & even, np.nextafter(total, np.inf), total)
    total = np.where((error < 0) & even, np.nextafter(total, -np.inf), total)
    return _narrow(total, z.dtype)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, imprecise: Any) -> TensorHandle:
    accumulator = _widen(d)
    return _narrow(np.matmul(_widen(a), _widen(b), dtype=accumulator.dtype) + accumulator, d.dtype)


def _histogram(self: Any, data: TensorHandle, bins: int, mask: TensorHandle | None) -> TensorHandle:
    valid = (data.data >= 0) & (data.data < bins)
    if mask is not None:
        valid &= mask.data
    return TensorHandle(np.bincount(data.data[valid], minlength=bins).astype(np.int32), tl.int32)


def _get_bf16(self: Any, value: float) -> TensorHandle:
    return _narrow(np.array([value], dtype=np.float64), tl.bfloat16)


# ---- reductions and scans ------------------------------------------------------------------------------------------

_STOCK_REDUCE = stock.ReduceOps.apply_impl


def _call_combine(op: Any, left: list[np.ndarray], right: list[np.ndarray], dtypes: list[tl.dtype]) -> list[np.ndarray]:
    arguments = [op.to_tensor(data, dtype) for data, dtype in zip(left + right, dtypes * 2)]
    out = op.combine_fn(*arguments)
    out = out if isinstance(out, (tuple, tl.tuple)) else (out,)
    if [part.dtype for part in out] != dtypes:
        raise TypeError(f"the combining function turns {dtypes} into {[part.dtype for part in out]}")
    return [part.handle.data for part in out]


def _tree_reduce(self: Any, inputs: tuple) -> list:
    """Combine neighbours, whole slices at a time: the stock loop calls the function once per element."""
    dtypes = [t.dtype for t in inputs]
    shape = inputs[0].handle.data.shape
    flat = self.axis is None
    axis = 0 if flat else self.axis % len(shape)
    parts = [t.handle.data.reshape(-1) if flat else t.handle.data for t in inputs]
    while parts[0].shape[axis] > 1:
        evens, odds = ([p.take(range(k, p.shape[axis], 2), axis) for p in parts] for k in (0, 1))
        parts = _call_combine(self, evens, odds, dtypes)
    kept = (
        ([1] * len(shape) if flat else list(parts[0].shape))
        if self.keep_dims
        else list(np.delete(parts[0].shape, axis))
    )
    return [self.to_tensor(p.reshape([int(n) for n in kept]), dtype) for p, dtype in zip(parts, dtypes)]


def _reduce(self: Any, inputs: tuple) -> Any:
    if any(t.dtype.name in SMALL for t in inputs):
        return _tree_reduce(self, inputs)
    return _STOCK_REDUCE(self, inputs)


def _scan(self: Any, inputs: tuple) -> list:
    dtypes = [t.dtype for t in inputs]
    axis = self.axis % len(inputs[0].shape)
    flip = (lambda d: np.flip(d, axis)) if self.reverse else (lambda d: d)
    parts = [flip(t.handle.data) for t in inputs]
    if self.combine_fn is tl.standard._sum_combine and dtypes[0].name not in SMALL:
        out = [np.cumsum(parts[0], axis=axis, dtype=parts[0].dtype)]
    else:
        out, apart = [np.array(p) for p in parts], 1
        while apart < out[0].shape[axis]:  # all at once, as a warp does it, for what is combined is associative
            late = (*(slice(None),) * axis, slice(apart, None))  # the first ones have nothing before them: as they are
            for o, step in zip(out, _call_combine(self, [np.roll(o, apart, axis) for o in out], out, dtypes)):
                o[late] = step[late]
            apart *= 2
    return [self.to_tensor(np.ascontiguousarray(flip(o)), dtype) for o, dtype in zip(out, dtypes)]


# ---- which of these the installed Triton needs ----------------------------------------------------------------------


class Correction(NamedTuple):
    right: Callable[[Any], bool]  # does the stock builder already do it?
    methods: dict[str, Any]


def _f32(*values: float) -> TensorHandle:
    return TensorHandle(np.array(values, np.float32), tl.float32)


def _bf16(*values: float) -> TensorHandle:
    return _narrow(np.array(values, np.float64), tl.bfloat16)


def _casts_right(builder: Any) -> bool:
    bf16 = builder.create_fp_trunc(_f32(1.00390625, 1.01171875, 3.4e38, float("nan")), tl.bfloat16).data
    fp8 = builder.create_fp_to_fp(_f32(31.2, 1e9, 2.0**-10, 3 * 2.0**-10), tl.float8e4nv, stock._ir.ROUNDING_MODE.RTNE)
    whole = builder.create_si_to_fp(TensorHandle(np.array([3], np.int32), tl.int32), tl.bfloat16).data
    index = builder.create_fp_to_si(_f32(float("nan"), 3e9), tl.int32).data
    return (
        bf16.tolist()[:3] == [0x3F80, 0x3F82, 0x7F80]
        and bf16[3] & 0x7FFF > 0x7F80
        and fp8.data.tolist() == [0x60, 0x7E, 0x00, 0x02]
        and whole.tolist() == [0x4040]
        and index.tolist() == [0, 2**31 - 1]
    )


def _arithmetic_right(builder: Any) -> bool:
    one, truth = _bf16(1.0), TensorHandle(np.array([True]), tl.int1)
    less = builder.create_fcmpOLT(one, _bf16(-2.0))
    return (
        builder.create_fadd(one, one).data.tolist() == _bf16(2.0).data.tolist()
        and less.dtype == tl.int1
        and not less.data[0]
        and not builder.create_add(truth, truth).data[0]
    )


def _selects_right(builder: Any) -> bool:
    nan, one, two = _f32(float("nan")), _f32(1.0), _f32(2.0)
    none = stock._ir.PROPAGATE_NAN.NONE
    return builder.create_maxnumf(nan, one).data[0] == 1 and builder.create_clampf(nan, one, two, none).data[0] == 1


def _fma_right(builder: Any) -> bool:
    x = _f32(1 + 2.0**-12)  # the square needs 25 bits: two roundings lose the 2**-24
    exact = builder.create_fma(x, x, _f32(-1.0)).data[0] == 2.0**-11 + 2.0**-24
    return exact and builder.create_fma(_bf16(2.0), _bf16(3.0), _bf16(1.0)).data.tolist() == _bf16(7.0).data.tolist()


def _dot_right(builder: Any) -> bool:
    a, d = TensorHandle(_bf16(1.0, 2.0, 3.0, 4.0).data.reshape(2, 2), tl.bfloat16), _f32(0.0, 0.0, 0.0, 0.0)
    d = TensorHandle(d.data.reshape(2, 2), tl.float32)
    return builder.create_dot(a, a, d, None, None).data.tolist() == [[7.0, 10.0], [15.0, 22.0]]


def _histogram_right(builder: Any) -> bool:
    values = TensorHandle(np.array([0, 1, 1, 2], np.int64), tl.int64)
    out = builder.create_histogram(values, 2, None).data
    return out.dtype == np.int32 and out.tolist() == [1, 2]


def _constant_right(builder: Any) -> bool:
    return builder.get_bf16(1.01171875).data.tolist() == [0x3F82]


CORRECTIONS = {
    "casts": Correction(_casts_right, {"cast_impl": _cast, "create_fp_to_fp": _fp_to_fp}),
    "arithmetic": Correction(_arithmetic_right, {"binary_op": _binary, "unary_op": _unary}),
    "selection": Correction(
        _selects_right, {"create_maxnumf": _maxnum, "create_minnumf": _minnum, "create_clampf": _clamp}
    ),
    "fma": Correction(_fma_right, {"create_fma": _fma}),
    "dot": Correction(_dot_right, {"create_dot": _dot}),
    "histogram": Correction(_histogram_right, {"create_histogram": _histogram}),
    "constants": Correction(_constant_right, {"get_bf16": _get_bf16}),
}


def _needed(correction: Correction) -> bool:
    try:
        with np.errstate(all="ignore"):
            return not correction.right(stock.interpreter_builder)
    except Exception:  # a stock method that raises is as wrong as one that lies
        return True


def correct() -> tuple[str, ...]:
    """Replace what the probes find wrong; returns the names of those corrections."""
    names = tuple(name for name, correction in CORRECTIONS.items() if _needed(correction))
    for name in names:
        for method, function in CORRECTIONS[name].methods.items():
            setattr(stock.InterpreterBuilder, method, function)
    if "casts" in names:
        stock._convert_float = _convert_float
    stock.ReduceOps.apply_impl, stock.ReduceOps.generic_reduce = _reduce, _tree_reduce
    stock.ScanOps.apply_impl = _scan
    return names
