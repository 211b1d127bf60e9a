"""INT8 and INT4 arithmetic on the device: scale, zero point, codes.

Rules are those of `formats/integers.py`, bit for bit. Of the words of FORMAT (`store.py`) those that count here are int8 or int4,
and zero for zero points.
"""

import triton
import triton.language as tl

from .quantize import has, quotient

SMALLEST = tl.constexpr(2.0**-100)  # smallest scale: below it `quotient` would not be exact
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it rounds to an integer, in the low bits
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def integer_scale(amax, FORMAT: tl.constexpr):
    """(scale, its reciprocal) of a block with this amax; NaN if that is not finite."""
    s = tl.maximum(tl.div_rn(amax, 127.0 if has(FORMAT, "int8") else 7.0), SMALLEST)
    s = tl.where(amax == 0.0, 1.0, s) + amax * 0.0
    return s, tl.div_rn(1.0, s)


@triton.jit
def zero_scale(high, low):
    """(scale, its reciprocal, zero point) of blocks whose largest and smallest elements, 0 among them, are these."""
    half = high * 0.5 - low * 0.5  # the whole range may overflow
    s = tl.maximum(tl.div_rn(half, 15.0) * 2.0, SMALLEST)
    s = tl.where(half == 0.0, 1.0, s) + half * 0.0
    c = tl.div_rn(1.0, s)
    z = -8 - nearest(quotient(low, s, c), s)
    return s, c, tl.where(s == s, z, 0)


@triton.jit
def nearest(v, s):
    """v as an int32, ties to even; 0 where the scale s is NaN."""
    return tl.where(s == s, (v + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS, 0)


@triton.jit
def integer_code(y, s, c, z, FORMAT: tl.constexpr):
    """The code of y in the low bits of an int32 whose others are 0. No code exceeds 127, or 7, but for a zero point's."""
    v = quotient(y, s, c)
    if has(FORMAT, "int8"):
        code = tl.where(s == s, (v + MAGIC).to(tl.int32, bitcast=True) & 0xFF, 0)
    elif has(FORMAT, "zero"):
        code = tl.where(s == s, tl.minimum(nearest(v, s) + z, 7) & 0xF, 0)
    else:
        code = tl.where(s == s, (v + MAGIC).to(tl.int32, bitcast=True) & 0xF, 0)
    return code
