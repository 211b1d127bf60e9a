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
# The lowest bytes of four words in one
PACK_BYTES = tl.constexpr(
    "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040; prmt.b32 $0, low, high, 0x5410; }"
)


@triton.jit
def integer_scale(amax, FORMAT: tl.constexpr):
    """(scale, its reciprocal) of a block with this amax; NaN if that is not finite."""
    MAX: tl.constexpr = 127.0 if has(FORMAT, "int8") else 7.0
    s = tl.maximum(quotient(amax, MAX, 1.0 / MAX), SMALLEST)  # exact for every amax, by 127 and by 7
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
    kept = tl.where(s == s, 0xFF if has(FORMAT, "int8") else 0xF, 0)
    if has(FORMAT, "zero"):
        code = tl.minimum(nearest(v, s) + z, 7) & kept
    else:
        code = (v + MAGIC).to(tl.int32, bitcast=True) & kept
    return code


@triton.jit
def byte_code(y, s, c, FORMAT: tl.constexpr):
    """The int8 code of y. Where the chip's own instructions may be named, four numbers of a thread are packed as one word: they may
    be of rows with different scales, so that each is masked by itself."""
    if has(FORMAT, "fast"):
        v = (quotient(y, s, c) + MAGIC).to(tl.int32, bitcast=True) & tl.where(s == s, -1, 0)
        code = tl.inline_asm_elementwise(PACK_BYTES, "=r,r,r,r,r", [v], dtype=tl.int8, is_pure=True, pack=4)
    else:
        code = integer_code(y, s, c, s, FORMAT).to(tl.int8)
    return code
