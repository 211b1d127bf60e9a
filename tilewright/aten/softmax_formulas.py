"""The formulas of softmax, its logarithm and their gradients, as kernels over rows and over columns share them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.quantize import quotient
from .functions import divide, exp

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_or_zero(largest):
    """What is taken from elements: of a row of which none is finite yet, 0, for -inf from -inf would be no number."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def exp_for(x, P):
    """exp(x) on the way to P. Where that holds 16 bits, by the chip's own 2 ** x: 2 instructions, not 8, and an error of some |x|
    steps of fp32, which no rounding to 16 bits shows."""
    if P.dtype.element_ty.primitive_bitwidth == 16:
        return tl.exp2(x * LOG2E)
    else:
        return exp(x)


@triton.jit
def share_for(e, total, P):
    """e / total on the way to P: rounded to nearest, but where the next rounding is to 16 bits."""
    if P.dtype.element_ty.primitive_bitwidth == 16:
        return e * (1.0 / total)
    elif e.dtype == tl.float32:
        return quotient(e, total, divide(tl.full(total.shape, 1.0, tl.float32), total))
    else:
        return e / total


@triton.jit
def normalised(x, shift, total, P, LOG: tl.constexpr):
    """`total` is the sum, or its logarithm."""
    if LOG:
        return (x - shift) - total
    else:
        return share_for(exp_for(x - shift, P), total, P)


@triton.jit
def term(y, dy, LOG: tl.constexpr):
    return dy if LOG else dy * y


@triton.jit
def gradient(y, dy, total, P, LOG: tl.constexpr):
    return dy - exp_for(y, P) * total if LOG else y * (dy - total)
