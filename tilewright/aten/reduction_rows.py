"""The rows of the reduction engine, and the overloads that they serve."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import pointwise
from .functions import divide, is_close, is_close_or_nan, is_nan, power, square_root
from .reduction import InTurn, Row, dims_of, run, split
from .row import TAKEN, Declined
from .rows import negative

FAR = tl.constexpr(1 << 62)  # an index past every other


# ---- functions -------------------------------------------------------------------------------------------------------


@triton.jit
def itself(x, index):
    return x


@triton.jit
def is_not_zero(x, index):
    return (x != 0).to(x.dtype)


@triton.jit
def counted(x, index):
    """1 or 0, exactly: an fp32 sum stops at 2**24."""
    return (x != 0).to(tl.int64)


@triton.jit
def with_index(x, index):
    return x, index


@triton.jit
def one_value(x, index, correction):
    """(mean, sum of squares about it, how many)."""
    return x, x * 0.0, x * 0.0 + 1.0


@triton.jit
def magnitude(x, index):
    return tl.abs(x)


@triton.jit
def square(x, index):
    return x * x


@triton.jit
def to_the_power(x, index, p):
    return power(tl.abs(x), p)


@triton.jit
def to_the_power_in_fp32(x, index, p):
    """Of fp32 numbers that are added up in float64, whose own powers take as long as dozens of sums."""
    return power(tl.abs(x).to(tl.float32), p.to(tl.float32)).to(x.dtype)


@triton.jit
def squared_difference(x, y):
    return (x - y) * (x - y)


@triton.jit
def product(x, y):
    return x * y


@triton.jit
def near(x, y, rtol, atol):
    return is_close(x, y, rtol, atol).to(x.dtype)


@triton.jit
def near_or_nan(x, y, rtol, atol):
    return is_close_or_nan(x, y, rtol, atol).to(x.dtype)


@triton.jit
def same(x, y):
    return (x == y).to(x.dtype)


@triton.jit
def zero(t):
    return t


@triton.jit
def none_counted(t):
    return t.to(tl.int64)


@triton.jit
def one(t):
    return t + 1


@triton.jit
def lowest(t):
    if t.dtype == tl.int64:
        return t + -9223372036854775808
    else:
        return t + float("-inf")


@triton.jit
def highest(t):
    if t.dtype == tl.int64:
        return t + 9223372036854775807
    else:
        return t + float("inf")


@triton.jit
def lowest_with_index(t):
    return lowest(t), t.to(tl.int64) + FAR


@triton.jit
def highest_with_index(t):
    return highest(t), t.to(tl.int64) + FAR


@triton.jit
def no_values(t):
    return t, t, t


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def either(a, b):
    return tl.where(a != 0, a, b)


@triton.jit
def all_of(a, b):
    return tl.where(a == 0, a, b)


@triton.jit
def larger(a, b):
    return tl.where((a > b) | is_nan(a), a, b)


@triton.jit
def smaller(a, b):
    return tl.where((a < b) | is_nan(a), a, b)


@triton.jit
def first_largest(a, i, b, j):
    """A NaN before every number, and the first of equals."""
    same = (a == b) | (is_nan(a) & is_nan(b))
    left = ((a > b) & ~is_nan(b)) | (is_nan(a) & ~is_nan(b)) | (same & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)


@triton.jit
def first_smallest(a, i, b, j):
    same = (a == b) | (is_nan(a) & is_nan(b))
    left = ((a < b) & ~is_nan(b)) | (is_nan(a) & ~is_nan(b)) | (same & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)


@triton.jit
def both_moments(mean_a, about_a, count_a, mean_b, about_b, count_b):
    count = count_a + count_b
    share = tl.where(count > 0, count_b / tl.where(count > 0, count, 1.0), 0.0)
    apart = mean_b - mean_a
    mean = mean_a + apart * share
    # An infinity less an infinity, times no elements: nothing is added
    extra = tl.where((count_a > 0) & (count_b > 0), apart * apart * count_a * share, 0.0)
    mean = tl.where(count_a == 0, mean_b, tl.where(count_b == 0, mean_a, mean))
    return mean, about_a + about_b + extra, count


@triton.jit
def all_moments(mean, about, count, known):
    """Moments of each row of a tile of them: first the mean, then what is about it, both as differences from one of the means, by
    which equal ones stay equal however large they are. `known`: what the counts of each row add up to, or None."""
    if known is None:
        total = tl.sum(count, 1)
    else:
        total = tl.zeros([mean.shape[0]], mean.dtype) + known.to(mean.dtype)
    share = count * (1.0 / tl.maximum(total, 1.0))[:, None]
    one = tl.max(tl.where(count > 0, mean, float("-inf")), 1)
    apart = mean - one[:, None]
    off = tl.sum(apart * share, 1)
    apart -= off[:, None]
    # Weighed before it is squared: a state of nothing adds nothing, however far away it is
    around = tl.sum(about + apart * count * apart, 1)
    return tl.where(total > 1, one + off, one), around, total


# ---- elements in turn: a value and how many came before it, or a mean and the sum of squares about it


def of_pairs(compare: str, dtype: str) -> tl.constexpr:
    """`unless_larger` or `unless_smaller` of two elements at once: states $0, $1 after $2, $3, the elements $4 and their turn $5.
    A comparison that holds is 16 ones, by which bits are chosen."""
    return tl.constexpr(f"""{{
        .reg .b32 better, there;
        set.{compare}.u32.{dtype} better, $4, $2;
        set.num.u32.{dtype} there, $2, $2;
        and.b32 better, better, there;
        lop3.b32 $0, better, $4, $2, 0xCA;
        lop3.b32 $1, better, $5, $3, 0xCA;
    }}""")


LARGER_BF16, LARGER_FP16 = of_pairs("gtu", "bf16x2"), of_pairs("gtu", "f16x2")
SMALLER_BF16, SMALLER_FP16 = of_pairs("ltu", "bf16x2"), of_pairs("ltu", "f16x2")


@triton.jit
def none_before(t):
    return t.to(tl.uint16 if t.dtype.primitive_bitwidth == 16 else tl.int32)


@triton.jit
def lowest_or(x, ok):
    none = tl.zeros_like(x)
    return tl.where(ok, x, lowest(none)), none_before(none)


@triton.jit
def highest_or(x, ok):
    none = tl.zeros_like(x)
    return tl.where(ok, x, highest(none)), none_before(none)


@triton.jit
def unless_larger(best, before, x, n):
    """The first of equals stays, and a NaN does."""
    if x.dtype.primitive_bitwidth == 16:
        return two_at_once(best, before, x, n, LARGER_BF16 if x.dtype == tl.bfloat16 else LARGER_FP16)
    else:
        better = ~(x <= best) & ~is_nan(best)
        return tl.where(better, x, best), tl.where(better, n, before)


@triton.jit
def unless_smaller(best, before, x, n):
    if x.dtype.primitive_bitwidth == 16:
        return two_at_once(best, before, x, n, SMALLER_BF16 if x.dtype == tl.bfloat16 else SMALLER_FP16)
    else:
        better = ~(x >= best) & ~is_nan(best)
        return tl.where(better, x, best), tl.where(better, n, before)


@triton.jit
def two_at_once(best, before, x, n, ASM: tl.constexpr):
    turn = tl.cast(n, tl.uint16)
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,r,r,r,r", [best, before, x, turn], (x.dtype, tl.uint16), is_pure=True, pack=2
    )


@triton.jit
def index_of_turn(best, before, first, step, count):
    """A state that met no element has the lowest of values and an index past every element's."""
    if best.dtype.primitive_bitwidth == 16:
        best = best.to(tl.float32)
    return best, first + before.to(step.dtype) * step


@triton.jit
def mean_of_one(x, ok):
    """Elements that are not ok are 0."""
    return x, tl.zeros_like(x)


@triton.jit
def one_more(mean, about, x, n):
    """Welford's step. Its share, the same for all states, is divided once."""
    share = 1.0 / (n + 1).to(x.dtype)
    apart = x - mean
    new = mean + apart * share
    return new, about + apart * (x - new)


@triton.jit
def several_more(mean, about, xs, n):
    """Several steps at once: sums of differences from the mean so far and of their squares. Of the first elements that is one of
    them, so that what is subtracted from the squares is never nearly all of them; equal elements stay equal."""
    COUNT: tl.constexpr = len(xs)
    mean = tl.where(n == 0, xs[0], mean)
    off = tl.zeros_like(mean)
    squares = tl.zeros_like(mean)
    for i in tl.static_range(COUNT):
        apart = xs[i] - mean
        off += apart * (1.0 / COUNT)  # the mean of them: their sum may be too large
        squares += apart * apart
    step = off * (COUNT / (n + COUNT).to(mean.dtype))
    return mean + step, about + (squares - off * COUNT * step)


@triton.jit
def moments_of_turn(mean, about, first, step, count):
    return mean, about, count.to(mean.dtype)


@triton.jit
def as_it_is(total, count):
    return total


@triton.jit
def over_count(total, count):
    return divide(total, count.to(total.dtype))


@triton.jit
def value_and_index(value, index, count):
    return value, index


@triton.jit
def index_alone(value, index, count):
    return index


@triton.jit
def variance_and_mean(mean, about, weight, count, correction):
    return divide(about, tl.maximum(weight - correction, 0.0)), mean


@triton.jit
def deviation(mean, about, weight, count, correction):
    return square_root(divide(about, tl.maximum(weight - correction, 0.0)))


@triton.jit
def root(total, count):
    return square_root(total)


@triton.jit
def power_root(total, count, p):
    return power(total, divide(tl.full([], 1.0, total.dtype), p))


@triton.jit
def without_numbers(total, count, rtol, atol):
    return total


FLOAT, EXACT = ("float",), ("integer", "bool")
SUM = Row("sum", itself, plus, zero, as_it_is, wide=True)
MEAN = Row("mean", itself, plus, zero, over_count, dtypes=FLOAT, wide=True)
PROD = Row("prod", itself, times, one, as_it_is, wide=True)
AMAX = Row("amax", itself, larger, lowest, as_it_is, empty=False)
AMIN = Row("amin", itself, smaller, highest, as_it_is, empty=False)
ANY = Row("any", is_not_zero, either, zero, as_it_is)
ALL = Row("all", is_not_zero, all_of, one, as_it_is)
LARGEST_FIRST = InTurn(lowest_or, unless_larger, index_of_turn, pairs=True)
SMALLEST_FIRST = InTurn(highest_or, unless_smaller, index_of_turn, pairs=True)
MOMENTS = InTurn(mean_of_one, one_more, moments_of_turn, several_more)
COUNT = Row("count_nonzero", counted, plus, none_counted, as_it_is, results=("int64",))
ARGMAX = Row("argmax", with_index, first_largest, lowest_with_index, index_alone, 2, 0, ("int64",), ("float", "integer"), False,
             in_turn=LARGEST_FIRST)  # fmt: skip
ARGMIN = Row("argmin", with_index, first_smallest, highest_with_index, index_alone, 2, 0, ("int64",), ("float", "integer"), False,
             in_turn=SMALLEST_FIRST)  # fmt: skip
MAX = Row("max", with_index, first_largest, lowest_with_index, value_and_index, 2, results=("common", "int64"), empty=False,
          in_turn=LARGEST_FIRST)  # fmt: skip
MIN = Row("min", with_index, first_smallest, highest_with_index, value_and_index, 2, results=("common", "int64"), empty=False,
          in_turn=SMALLEST_FIRST)  # fmt: skip
VAR_MEAN = Row("var_mean", one_value, both_moments, no_values, variance_and_mean, 3, 1, ("common", "common"), FLOAT, empty=False,
               in_turn=MOMENTS, across=all_moments)  # fmt: skip
STD = Row("std", one_value, both_moments, no_values, deviation, 3, 1, dtypes=FLOAT, empty=False, in_turn=MOMENTS,
          across=all_moments)  # fmt: skip
NORM = {
    0.0: Row("norm_0", is_not_zero, plus, zero, as_it_is, dtypes=FLOAT),
    1.0: Row("norm_1", magnitude, plus, zero, as_it_is, dtypes=FLOAT, wide=True),
    2.0: Row("norm_2", square, plus, zero, root, dtypes=FLOAT, wide=True),
    math.inf: Row("norm_inf", magnitude, larger, zero, as_it_is, dtypes=FLOAT, empty=False),
    -math.inf: Row("norm_-inf", magnitude, smaller, highest, as_it_is, dtypes=FLOAT, empty=False),
}
NORM_P = Row("norm_p", to_the_power, plus, zero, power_root, numbers=1, dtypes=FLOAT)
NORM_P_FP32 = Row("norm_p", to_the_power_in_fp32, plus, zero, power_root, numbers=1, dtypes=FLOAT, wide=True)
SQUARES = {1: Row("mse_mean", squared_difference, plus, zero, over_count, dtypes=FLOAT, wide=True),
           2: Row("mse_sum", squared_difference, plus, zero, as_it_is, dtypes=FLOAT, wide=True)}  # fmt: skip
SQUARED = pointwise.Row("mse_loss", squared_difference, (), ("self", "other"), dtypes=FLOAT)
DOT = Row("dot", product, plus, zero, as_it_is, wide=True)
CLOSE = {
    equal_nan: Row("allclose", map, all_of, one, without_numbers, numbers=2, results=("bool",), dtypes=FLOAT)
    for equal_nan, map in ((False, near), (True, near_or_nan))
}
EQUAL = Row("allclose", same, all_of, one, as_it_is, results=("bool",), dtypes=EXACT)


# ---- overloads -------------------------------------------------------------------------------------------------------


def widened(self: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What integers are added up in."""
    return dtype or (self.dtype if self.is_floating_point() else torch.int64)


def sum_(
    self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Tensor | None = None
) -> Tensor:
    if out is not None and dtype is None:
        dtype = out.dtype
    return run(SUM, self, dim, keepdim, dtype=widened(self, dtype), outs=None if out is None else (out,))[0]


def whole_sum(self: Tensor, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
    return sum_(self, dtype=widened(self, dtype), out=out)  # whatever the dtype of `out`: aten refuses another here


def mean(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return run(MEAN, self, dim, keepdim, dtype=dtype or self.dtype)[0]


def whole_mean(self: Tensor, *, dtype: Any = None) -> Tensor:
    return mean(self, dtype=dtype)


def prod(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return run(PROD, self, dim, keepdim, dtype=widened(self, dtype))[0]


def whole_prod(self: Tensor, *, dtype: Any = None) -> Tensor:
    return prod(self, dtype=dtype)


def amax(self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return run(AMAX, self, dim, keepdim)[0]


def whole_max(self: Tensor) -> Tensor:
    return run(AMAX, self, None, False)[0]


def whole_min(self: Tensor) -> Tensor:
    return run(AMIN, self, None, False)[0]


def max_along(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, ...]:
    return run(MAX, self, dim, keepdim)


def min_along(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, ...]:
    return run(MIN, self, dim, keepdim)


def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return run(ARGMAX, self, dim, keepdim)[0]


def argmin(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return run(ARGMIN, self, dim, keepdim)[0]


def truth_of(row: Row, nothing_is_all: bool = True) -> Any:
    def reduce(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        if isinstance(dim, (list, tuple)) and not dim and not nothing_is_all:
            raise Declined("no dimension")
        return run(row, self, dim, keepdim, result=torch.uint8 if self.dtype == torch.uint8 else torch.bool)[0]

    return reduce


def count_nonzero(self: Tensor, dim: int | None = None) -> Tensor:
    return run(COUNT, self, dim, False)[0]


def check_freedom(self: Tensor, dim: Any, correction: Any) -> None:
    """Leave to aten a correction that it refuses, or warns of: one that leaves no degree of freedom. Where there are no results,
    aten counts no elements of each."""
    count = math.prod(split(self.shape, dims_of(dim, self.dim()))[1]) if self.numel() else 0
    if isinstance(correction, complex) or count - correction <= 0:
        raise Declined("no degrees of freedom")


def moments(row: Row) -> Any:
    def reduce(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        correction = 1 if correction is None else correction
        check_freedom(self, dim, correction)
        made = run(row, self, dim, keepdim, numbers=(correction,))
        return made if len(made) > 1 else made[0]

    return reduce


def widens(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether both are floats, and the other holds what the one does."""
    floats = one in TAKEN and other in TAKEN and one.is_floating_point and other.is_floating_point
    return floats and torch.promote_types(one, other) == other


def vector_norm(self: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dtype is not None and not widens(self.dtype, dtype):
        raise Declined("a dtype that is refused")
    if isinstance(ord, complex) or (ord < 0 and not self.numel()):
        raise Declined("an order that is refused, or may be of nothing")
    common = dtype or self.dtype
    row = NORM.get(float(ord))
    if row is not None:
        return run(row, self, dim, keepdim, dtype=common)[0]
    row = NORM_P_FP32 if common == torch.float32 else NORM_P
    return run(row, self, dim, keepdim, dtype=common, numbers=(float(ord),))[0]


def mse_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    if reduction == 0:
        return pointwise.run(SQUARED, {"self": self, "other": target}, None)
    if self.shape != target.shape or self.dtype != target.dtype or reduction not in SQUARES:
        raise Declined("shapes that broadcast, two dtypes, or an unknown reduction")
    return run(SQUARES[reduction], self, None, False, other=target)[0]


def dot(self: Tensor, tensor: Tensor) -> Tensor:
    if self.dim() != 1 or self.shape != tensor.shape or self.dtype != tensor.dtype or self.dtype == torch.bool:
        raise Declined("no two vectors of one length and dtype")
    return run(DOT, self, None, False, other=tensor)[0]


def vdot(self: Tensor, other: Tensor) -> Tensor:
    return dot(self, other)


def trace(self: Tensor) -> Tensor:
    if self.dim() != 2:
        raise Declined("no matrix")
    return run(SUM, self.diagonal(), None, False, dtype=widened(self, None))[0]


def allclose(self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Integers are compared as in `forms.isclose`."""
    if self.shape != other.shape or self.dtype != other.dtype or negative(rtol) or negative(atol):
        raise Declined("shapes that broadcast, two dtypes, or a negative tolerance")
    if self.is_floating_point():
        dtype = self.dtype
    elif rtol == atol == 0:
        return bool(run(EQUAL, self, None, False, other=other)[0])
    else:
        dtype = torch.get_default_dtype()
    return bool(run(CLOSE[equal_nan], self, None, False, other=other, dtype=dtype, numbers=(rtol, atol))[0])


FORMS = {
    "sum": whole_sum, "sum.out": whole_sum, "sum.dim_IntList": sum_, "sum.IntList_out": sum_, "mean": whole_mean,
    "mean.dim": mean, "prod": whole_prod, "prod.dim_int": prod, "amax": amax, "max": whole_max, "min": whole_min,
    "max.dim": max_along, "min.dim": min_along, "argmax": argmax, "argmin": argmin, "any": truth_of(ANY),
    "any.dim": truth_of(ANY), "any.dims": truth_of(ANY, False), "all": truth_of(ALL), "all.dim": truth_of(ALL),
    "all.dims": truth_of(ALL, False), "count_nonzero": count_nonzero, "std.correction": moments(STD),
    "var_mean.correction": moments(VAR_MEAN), "linalg_vector_norm": vector_norm, "mse_loss": mse_loss, "dot": dot,
    "vdot": vdot, "trace": trace, "allclose": allclose,
}  # fmt: skip
