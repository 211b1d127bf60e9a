"""Activations in fp32, chosen by the compile-time name ACT (alpha is silu's alone), and the gated unit of one.

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
LARGEST = tl.constexpr(2.0**126)  # Inf * 0 would be NaN


@triton.jit
def reciprocal(x):
    """1/x of a positive x, to 3e-7: one instruction and a product, where a division takes five. 1/inf is 0."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def sigmoid(x, slope):
    """sigmoid(slope * x) of a scalar slope."""
    return reciprocal(1.0 + tl.exp2(x * (slope * -LOG2E)))


@triton.jit
def sigmoid_both(x, slope):
    """(sigmoid(slope * x), sigmoid(-slope * x)): the second to full relative precision, for what has no bound multiplies it;
    but 0 where the first is, so that products of the two are."""
    e = tl.exp2(x * (slope * -LOG2E))
    s = reciprocal(1.0 + e)
    return s, tl.minimum(e, LARGEST) * s


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
        return a * sigmoid(a, alpha)
    elif ACT == "gelu_tanh":
        return a * sigmoid(a + a * a * (a * GELU_CUBE), GELU_SLOPE)
    elif ACT == "gelu_erf":
        p, _ = normal(a)
        return a * p
    elif ACT == "relu":
        return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return sigmoid(a, 1.0)


@triton.jit
def activate_slope(a, alpha, ACT: tl.constexpr):
    """(value, derivative) at a."""
    if ACT == "silu":
        s, t = sigmoid_both(a, alpha)
        value = a * s
        return value, value * t * alpha + s
    elif ACT == "gelu_tanh":
        square = a * a
        s, t = sigmoid_both(a + square * (a * GELU_CUBE), GELU_SLOPE)
        value = a * s
        return value, value * t * ((square * (3.0 * GELU_CUBE) + 1.0) * GELU_SLOPE) + s
    elif ACT == "gelu_erf":
        p, density = normal(a)
        return a * p, a * density + p
    elif ACT == "relu":
        return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(a <= 0.0, 0.0, 1.0)
    else:
        s, t = sigmoid_both(a, 1.0)
        return s, s * t


@triton.jit
def clamped(a, b, limit):
    if limit is not None:
        a = tl.minimum(a, limit, propagate_nan=tl.PropagateNan.ALL)
        b = tl.maximum(b, -limit, propagate_nan=tl.PropagateNan.ALL)
        b = tl.minimum(b, limit, propagate_nan=tl.PropagateNan.ALL)
    return a, b


@triton.jit
def gated(a, b, limit, alpha, ACT: tl.constexpr):
    """act(a) * b in fp32."""
    a, b = clamped(a.to(tl.float32), b.to(tl.float32), limit)
    return activate(a, alpha, ACT) * b


@triton.jit
def gated_gradient(a, b, dy, scale, limit, alpha, ACT: tl.constexpr):
    """(dgate, dup, terms of dscale) in fp32."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    dy = dy.to(tl.float32)
    gate, up = clamped(a, b, limit)
    value, slope = activate_slope(gate, alpha, ACT)
    db = dy * value
    terms = db * up
    if scale is not None:
        dy *= scale
        db *= scale
    da = dy * up * slope
    if limit is not None:
        da = tl.where(a <= limit, da, 0.0)
        db = tl.where(tl.abs(b) <= limit, db, 0.0)
    return da, db, terms
