"""Blocks of 16 or 32 numbers on the device: scales in e8m0 and e4m3, codes in e2m1, two of them a byte.

Rules are those of `formats/mx.py` and `formats/nvfp4.py`, bit for bit. An e2m1 code is sign, two exponent bits and a mantissa bit:
0, .5, 1, 1.5, 2, 3, 4, 6. An e8m0 scale is the exponent of a power of two, 0 being 2^-127 and 255 NaN.
"""

import triton
import triton.language as tl

from .quantize import code_bits, decode, has, quotient

SMALLEST = tl.constexpr(2.0**-80)  # scale of a whole tensor
LARGEST = tl.constexpr(2.0**100)  # of a static one


@triton.jit
def widen_e2m1(code):
    """The fp32 value of the e2m1 code in the low nibble of an integer, whatever lies above it; exact.

    `widen_e2m1(code).to(tl.bfloat16)` is exact too.
    """
    c = code.to(tl.int32)
    # Exponent and mantissa become fp32's, whose bias is 126 more: also where the exponent is 0, for fp32 has subnormals
    bits = ((c & 7) << 22) | ((c & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def scale_e8m0(code):
    """The fp32 power of two that an e8m0 code in a uint8 stands for, 255 being NaN; exact."""
    e = code.to(tl.int32)
    bits = tl.where(e == 0, 0x00400000, e << 23)  # 2^-127 is a subnormal
    bits = tl.where(e == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def code_e2m1(a):
    """The e2m1 code of a >= 0 in the low bits of an int32: nearest even, saturating; without meaning for NaN.

    Codes count steps of 1/2 up to 2, from there steps of 1, from 4 steps of 2: each count is right where it is the least. A number
    added to 2^23 is rounded to an integer, and as offsets are even a tie goes to the even code.
    """
    halves = a * 2.0 + 2.0**23
    ones = a + (2.0**23 + 2.0)
    twos = a * 0.5 + (2.0**23 + 4.0)
    least = tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 2.0**23 + 7.0))
    return least.to(tl.int32, bitcast=True)


@triton.constexpr_function
def roundup_of(FORMAT):
    """What added to the bits of amax carries into its exponent where the scale is to be the next power of two.

    rceil: the mantissa exceeds that of the largest code, 1.5 or 1.75; ceil: it is not 1; even: it rounds up to 2 at the code's
    precision; floor: never.
    """
    words = FORMAT.split(":")
    mantissa = {"e4m3": 3, "e5m2": 2, "e2m1": 1}[words[1]]
    largest = 0x400000 if words[1] == "e2m1" else 0x600000
    return {"rceil": 0x7FFFFF - largest, "ceil": 0x7FFFFF, "even": 1 << (22 - mantissa), "floor": 0}[words[2]]


@triton.jit
def mx_scale(amax, FORMAT: tl.constexpr):
    """(e8m0 code in an int32, multiplier) of blocks with this amax; 255 and NaN where it is not finite."""
    EXPONENT: tl.constexpr = 8 if has(FORMAT, "e4m3") else 15 if has(FORMAT, "e5m2") else 2  # of the largest code
    ROUNDUP: tl.constexpr = roundup_of(FORMAT)
    bits = amax.to(tl.int32, bitcast=True)
    finite = bits < 0x7F800000
    e = tl.maximum(((tl.where(finite, bits, 0) + ROUNDUP) >> 23) - EXPONENT, 0)
    mult = ((254 - e) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, e, 255), tl.where(finite, mult, float("nan"))


@triton.jit
def whole_scale(P, FORMAT: tl.constexpr):
    """The scale of a whole tensor in NVFP4: P points to a static one, or to the bits of the largest finite number."""
    if has(FORMAT, "static"):
        g = tl.load(P)
        g = tl.where(g > SMALLEST, tl.where(g < LARGEST, g, LARGEST), SMALLEST)
    else:
        amax = tl.load(P).to(tl.float32, bitcast=True)
        g = tl.where(amax == 0.0, 1.0, tl.maximum(tl.div_rn(amax, 2688.0), SMALLEST))
    return g


@triton.jit
def nv_scale(amax, g, FORMAT: tl.constexpr):
    """(e4m3 code in a uint8, scale of the codes: RN(g * its value), NaN where amax is not finite) of blocks.

    As g is at least 2^-80, `quotient` is exact for all that does not become code 0 anyway.
    """
    d = tl.minimum(quotient(amax, 6.0, 1.0 / 6.0), 512.0 * g)  # the largest code already; a quotient must not overflow
    r = tl.where(amax < float("inf"), quotient(d, g, tl.div_rn(1.0, g)), float("nan"))
    # By integers, though there is an instruction: where its codes are stored as one word and used as well, ptxas 12.8 uses another
    # register in their place
    code = code_bits(r, "e4m3").to(tl.uint8)
    return code, g * decode(code, "e4m3")
