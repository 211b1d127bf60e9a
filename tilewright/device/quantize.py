"""FP8 arithmetic on the device: amax, scale, codes; and what the other formats share with it.

Rules are those of `formats/fp8.py`, bit for bit. `store.py` says what the words of the compile-time FORMAT mean; those that count
here are e4m3 or e5m2; static or unit, where the scale is given; pow2 or fp32; te, exact or linghe; and fast.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)  # 1.75 * 2**8
E5M2_MAX = tl.constexpr(57344.0)  # 1.75 * 2**15
SMALLEST = tl.constexpr(2.0**-126)  # smallest scale but for linghe's
LINGHE_FLOOR = tl.constexpr(1e-30)
PACK_E4M3 = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
)
PACK_E5M2 = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;"
    " cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
)


@triton.constexpr_function
def has(FORMAT, *words):
    """Whether the format has one of these words."""
    return any(word in FORMAT.split(":") for word in words)


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(y, axis: tl.constexpr):
    """max |y| along an axis; NaN if there is one, which `tl.max` would drop."""
    return tl.reduce(tl.abs(y), axis, max_nan)


@triton.jit
def amax4(y0, y1, y2, y3):
    """max |y| of four tensors, element by element."""
    return max_nan(max_nan(tl.abs(y0), tl.abs(y1)), max_nan(tl.abs(y2), tl.abs(y3)))


@triton.jit
def finite(y):
    """y with 0 in the place of what is not finite."""
    return tl.where(tl.abs(y) < float("inf"), y, 0.0)


@triton.jit
def quotient(x, d, c):
    """RN(x / d) with c = RN(1 / d), |x / d| far from overflow.

    0 of 2.3e9 pairs differ from the rounded quotient, for three instructions where `div_rn` takes ten and a branch. The
    residual is taken negative: the other way round -0 would become +0. A product with -1 is a sign bit in the next
    instruction; Triton's own -x is 0 - x, which would keep both in registers.
    """
    q = x * c
    return tl.fma(tl.fma(q, d, x * -1.0), c * -1.0, q)


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr):
    """(stored scale, multiplier) of a block with this amax."""
    MAX: tl.constexpr = E4M3_MAX if has(FORMAT, "e4m3") else E5M2_MAX
    if has(FORMAT, "pow2"):
        # 1.75 is the mantissa of MAX: the exponent grows by one iff the mantissa of amax exceeds .75
        e = (amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
        e -= 0x4000000 if has(FORMAT, "e4m3") else 0x7800000
        e = tl.maximum(e, 0x0E000000 if has(FORMAT, "linghe") else 0x00800000)
        scale = e.to(tl.float32, bitcast=True)
        mult = (0x7F000000 - e).to(tl.float32, bitcast=True)
    elif has(FORMAT, "te"):
        mult = tl.minimum(tl.div_rn(MAX, amax), 1.0 / SMALLEST)
        scale = tl.div_rn(1.0, mult)
    else:
        scale = quotient(amax, MAX, 1.0 / MAX)
        scale = tl.maximum(scale, LINGHE_FLOOR if has(FORMAT, "linghe") else SMALLEST)
        mult = tl.div_rn(1.0, scale)
    if not has(FORMAT, "linghe"):
        scale = tl.where(amax == 0.0, 1.0, scale)
        if not has(FORMAT, "pow2"):
            mult = tl.where(amax == 0.0, 1.0, mult)
    # Inf * 0 and NaN * 0 are NaN: one more instruction each poisons the whole block
    poison = amax * 0.0
    return scale + poison, mult + poison


@triton.jit
def scaled(y, scale, mult, FORMAT: tl.constexpr):
    """The fp32 value whose code y gets."""
    if has(FORMAT, "static", "unit"):
        if has(FORMAT, "unit"):
            v = y
        elif has(FORMAT, "te"):
            v = y * mult
        else:
            v = tl.div_rn(y, scale)
        v = tl.fma(y, 0.0, v)  # Inf becomes NaN, not the largest code
    elif has(FORMAT, "pow2", "te"):
        v = y * mult
    else:
        v = quotient(y, scale, mult)
    return v


@triton.jit
def code_bits(v, FORMAT: tl.constexpr):
    """The code of v in an int32: nearest even, saturating, NaN to 0x7F."""
    E4M3: tl.constexpr = has(FORMAT, "e4m3")
    DROP: tl.constexpr = 20 if E4M3 else 21  # mantissa bits that fp32 has more
    REBIAS: tl.constexpr = 120 << 3 if E4M3 else 112 << 2
    NORMAL: tl.constexpr = 121 << 23 if E4M3 else 113 << 23  # smallest normal code, as fp32 bits
    MAGIC: tl.constexpr = 141 << 23 if E4M3 else 134 << 23  # its last mantissa bit is worth the smallest code
    LARGEST: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000
    bits = v.to(tl.int32, bitcast=True)
    a = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    normal = ((a + ((1 << (DROP - 1)) - 1) + ((a >> DROP) & 1)) >> DROP) - REBIAS
    magic = tl.full(a.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    small = (a.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    code = tl.where(a < NORMAL, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(v == v, code, 0x7F)


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """The fp32 value of a code in a uint8; exact."""
    c = code.to(tl.int32)
    if has(FORMAT, "e4m3"):
        x = (((c & 0x7F) << 20) | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)
        x = tl.where((c & 0x7F) == 0x7F, float("nan"), x * 2.0**120)  # the exponent bias is 120 less than fp32's
    else:
        x = (c << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # e5m2 is the upper half of fp16
    return x


@triton.jit
def encode(y, scale, mult, FORMAT: tl.constexpr):
    """The codes of y: an fp8 tile, without the word fast a uint8 one."""
    v = scaled(y, scale, mult, FORMAT)
    if not has(FORMAT, "fast"):
        codes = code_bits(v, FORMAT).to(tl.uint8)
    elif has(FORMAT, "e4m3"):
        codes = v.to(tl.float8e4nv)
    else:
        codes = v.to(tl.float8e5)
    return codes


@triton.jit
def pack4(a, b, c, d, FORMAT: tl.constexpr):
    """The codes of four fp32 values in one int32, a's in the lowest byte."""
    if has(FORMAT, "fast"):
        ASM: tl.constexpr = PACK_E4M3 if has(FORMAT, "e4m3") else PACK_E5M2
        word = tl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        word = code_bits(a, FORMAT) | (code_bits(b, FORMAT) << 8)
        word = word | (code_bits(c, FORMAT) << 16) | (code_bits(d, FORMAT) << 24)
    return word


@triton.jit
def interleave4(a, b, c, d):
    """[n] four times -> [4n] with element 4g+k from the k-th."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (4 * a.shape[0],))
