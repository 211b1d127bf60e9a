"""Activations in fp32, chosen by the compile-time name ACT; alpha is silu's alone.

| ACT       | value at a              |
|-----------|-------------------------|
| silu      | a * sigmoid(alpha * a)  |
| gelu_tanh | a * sigmoid(2u), u = sqrt(2/pi) * (a + 0.044715 a**3), which is a/2 * (1 + tanh(u)) |
| gelu_erf  | a * Phi(a), Phi the normal distribution function |
| relu      | max(a, 0)               |
| sigmoid   | sigmoid(a)              |
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2/pi)
GELU_CUBE = tl.constexpr(0.044715)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2*pi)
LARGEST = tl.constexpr(126.0)  # exponent up to which both 2**n and its reciprocal are normal


@triton.jit
def reciprocal(x):
    """1/x of a positive x, to 3e-7: one instruction and a product, where a division takes five. 1/inf is 0."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def sigmoid_both(x):
    """(sigmoid(x), sigmoid(-x)), the second to full relative precision: arguments without bound multiply it."""
    e = tl.exp2(tl.minimum(x * -LOG2E, LARGEST, propagate_nan=tl.PropagateNan.ALL))
    s = reciprocal(1.0 + e)
    return s, e * s


@triton.jit
def normal(a):
    """(Phi(a), its derivative). The tail is a product: it keeps its relative precision where 1 + erf cancels."""
    e = tl.exp2(a * a * (-0.5 * LOG2E))
    t = reciprocal(1.0 + 0.35 * tl.abs(a))
    # exp(z**2/2) * Phi(-z) = t * p(t), t = 1/(1 + 0.35 z): relative error below 4e-8 for z >= 0
    p = 0.1440569907426834 - 0.029163070023059845 * t
    p = p * t - 0.25589466094970703
    p = p * t + 0.15938544273376465
    p = p * t - 0.023259181529283524
    p = p * t + 0.10557302832603455
    p = p * t + 0.1198159009218216
    p = p * t + 0.13986428081989288
    p = p * t + 0.13962125778198242
    tail = e * (t * p)
    return tl.where(a > 0.0, 1.0 - tail, tail), e * DENSITY


@triton.jit
def activate(a, alpha, ACT: tl.constexpr):
    """The value at a."""
    if ACT == "silu":
        return a * sigmoid(a * alpha)
    elif ACT == "gelu_tanh":
        return a * sigmoid((a + a * a * (a * GELU_CUBE)) * GELU_SLOPE)
    elif ACT == "gelu_erf":
        p, _ = normal(a)
        return a * p
    elif ACT == "relu":
        return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return sigmoid(a)


@triton.jit
def activate_slope(a, alpha, ACT: tl.constexpr):
    """(value, derivative) at a."""
    if ACT == "silu":
        s, t = sigmoid_both(a * alpha)
        return a * s, s * (a * alpha * t + 1.0)
    elif ACT == "gelu_tanh":
        square = a * a
        s, t = sigmoid_both((a + square * (a * GELU_CUBE)) * GELU_SLOPE)
        # in this order: far out t is 0 before the square overflows
        return a * s, s * (a * t * ((square * (3.0 * GELU_CUBE) + 1.0) * GELU_SLOPE) + 1.0)
    elif ACT == "gelu_erf":
        p, density = normal(a)
        return a * p, a * density + p
    elif ACT == "relu":
        return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(a <= 0.0, 0.0, 1.0)
    else:
        s, t = sigmoid_both(a)
        return s, s * t
