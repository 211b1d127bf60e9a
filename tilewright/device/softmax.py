"""Running sums of exponentials, and the soft cap that may come before them; fp32.

A partial sum is a pair: m, the largest value so far, and s, the sum of exp(value - m). No value so far is (-inf, 0).
"""

import triton
import triton.language as tl

from .activation import reciprocal

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_or_zero(m):
    """A maximum that can be subtracted: with an infinite one, inf - inf would turn every term to NaN."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def extend(m, s, z):
    """Take the values z, [values, *lanes], into the sums of the lanes: one exponential a value and one a lane."""
    new = tl.maximum(m, tl.max(z, 0))
    base = finite_or_zero(new)
    terms = tl.exp2((z - tl.expand_dims(base, 0)) * LOG2E)
    return new, s * tl.exp2((m - base) * LOG2E) + tl.sum(terms, 0)


@triton.jit
def merge(m, s):
    """The partial sum of a row's lanes, [rows, lanes] to [rows, 1]."""
    largest = tl.max(m, 1, keep_dims=True)
    return largest, tl.sum(s * tl.exp2((m - finite_or_zero(largest)) * LOG2E), 1, keep_dims=True)


@triton.jit
def tanh(u):
    """To 2e-7 of the value, near 0 too, where 1 - exp(-2u) would cancel."""
    v = u * u
    small = u + u * v * (-0.3333307189 + v * (0.13324829 + v * (-0.05298924117 + v * 0.01714131905)))
    e = tl.exp2(tl.abs(u) * (-2.0 * LOG2E))
    r = reciprocal(1.0 + e)
    large = (1.0 - e) * (r + r * (1.0 - (1.0 + e) * r))
    return tl.where(tl.abs(u) < 0.5, small, tl.where(u < 0.0, -large, large))


@triton.jit
def cap(x, softcap):
    """softcap * tanh(x / softcap); x itself if softcap is None."""
    if softcap is None:
        return x
    else:
        return softcap * tanh(x * (1.0 / softcap))
