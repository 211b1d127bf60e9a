"""Functions of numbers that the pointwise engine's rows name. x, y and z are operands in the compute dtype (fp32, float64 or
int64), then come numbers. A result may be of any kind: the engine casts it to the dtype that it is stored in."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

PI = tl.constexpr(3.141592653589793)
ROOT_2 = tl.constexpr(1.4142135623730951)
ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)
ROOT_1_OVER_2PI = tl.constexpr(0.3989422804014327)
CUBE = tl.constexpr(0.044715)
SHARPNESS = tl.constexpr(-2.302208198144325)  # -2 log2(e) times the root of 2 / pi
LN_2 = tl.constexpr(0.6931471824645996)
# As the nearest fp32 number and what is left
TWO_OVER_LN_2, TWO_OVER_LN_2_LOW = tl.constexpr(2.885390043258667), tl.constexpr(3.851926067000022e-08)
CUBIC = tl.constexpr(0.9758967161178589)  # a third of it, and so much more that the terms after it add least


@triton.jit
def is_nan(x):
    return x != x


@triton.jit
def divide(x, y):
    """Rounded to nearest, which plain fp32 division on a GPU is not."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def larger(x, y):
    return tl.where((x > y) | is_nan(x), x, y)  # of a NaN in y too, for no comparison with it holds


@triton.jit
def smaller(x, y):
    return tl.where((x < y) | is_nan(x), x, y)


@triton.jit
def zero_of(x):
    return x - x if x.dtype == tl.int64 else x * 0.0


# ---- one operand -----------------------------------------------------------------------------------------------------


@triton.jit
def copy(x):
    return x


@triton.jit
def cut_to_int32(x):
    """A float without its fraction. What no int32 is becomes the nearest one, and a NaN 0, or the lowest if it is of float64: so
    does the one instruction behind it, which is also what aten's casts are compiled to."""
    return x.to(tl.int32)


@triton.jit
def cut_to_int64(x):
    """The same of int64, but that every NaN becomes the lowest."""
    return x.to(tl.int64)


@triton.jit
def negative(x):
    return -x


@triton.jit
def absolute(x):
    return tl.abs(x)


@triton.jit
def angle(x):
    return tl.where(is_nan(x), x, tl.where(x < 0, PI, 0.0))


@triton.jit
def bitwise_not(x):
    return ~x


@triton.jit
def flipped(x):
    """Of a bool, which is 0 or 1 here."""
    return 1 - x


@triton.jit
def logical_not(x):
    return x == 0


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def sin(x):
    return libdevice.sin(x)


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def erf(x):
    return libdevice.erf(x)


@triton.jit
def square_root(x):
    """Rounded to nearest, which the library's of fp32 is not; and of numbers below the normal ones too."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return libdevice.sqrt(x)


@triton.jit
def reciprocal_root(x):
    return libdevice.rsqrt(x)


@triton.jit
def reciprocal(x):
    return divide(tl.full([], 1.0, x.dtype), x)


@triton.jit
def sigmoid(x):
    one = tl.full([], 1.0, x.dtype)
    return divide(one, one + libdevice.exp(-x))


@triton.jit
def silu(x):
    return divide(x, 1.0 + libdevice.exp(-x))


@triton.jit
def below_one(x):
    """What the sigmoid's logarithm is computed from, and its derivative too."""
    return libdevice.exp(-tl.abs(x))


@triton.jit
def log_sigmoid(x):
    return tl.where(x < 0, x, zero_of(x)) - libdevice.log1p(below_one(x))


@triton.jit
def relu(x):
    return larger(x, zero_of(x)) if x.dtype == tl.int64 else tl.where((x > 0) | is_nan(x), x, 0.0)


@triton.jit
def gelu(x):
    return x * 0.5 * (1.0 + libdevice.erf(x * (1.0 / ROOT_2)))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + libdevice.tanh((x + x * x * x * CUBE) * ROOT_2_OVER_PI))


@triton.jit
def gelu_for_16_bits(x):
    """GELU of which 16 bits are kept, in half the instructions: the logarithm of a normal number's chance to lie above |x| is
    nearly a polynomial, and the chance 2^-17 of it off at most up to |x| = 5.6, 2^-9 at 13. Below -3, where aten's sum with the
    error function cancels, this is nearer. An infinite |x| makes 0 of the chance, and so aten's NaN of minus infinity."""
    size = tl.abs(x)
    log = -2.2183652692575606e-09 * size + 1.5921666829399328e-07
    log = (log * size - 4.990305569663178e-06) * size + 9.072069224203005e-05
    log = (log * size - 0.0010753680253401399) * size + 0.008909808471798897
    log = (log * size - 0.05456214398145676) * size - 0.45802828669548035
    log = (log * size - 1.1513683795928955) * size - 0.9999902844429016
    above = tl.exp2(log)
    return x * tl.where(x > 0, 1.0 - above, above)


@triton.jit
def gelu_tanh_for_16_bits(x):
    """0.5 (1 + tanh u) = 1 / (1 + exp(-2 u)); the reciprocal, which need not be exact, is two instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(x * (x * x * (CUBE * SHARPNESS) + SHARPNESS)))
    return x * (root * root)


@triton.jit
def is_infinite(x):
    return tl.abs(x) == float("inf")


@triton.jit
def elu(x, alpha, scale, input_scale):
    return tl.where(x > 0, x * scale, libdevice.expm1(x * input_scale) * (alpha * scale))


@triton.jit
def softplus(x, beta, threshold):
    return tl.where(x * beta > threshold, x, divide(libdevice.log1p(libdevice.exp(x * beta)), beta))


@triton.jit
def threshold(x, least, value):
    return tl.where(x <= least, value, x)


@triton.jit
def finite_number(x, nan, largest, smallest):
    x = tl.where(is_nan(x), nan, x)
    return tl.where(x == float("inf"), largest, tl.where(x == float("-inf"), smallest, x))


@triton.jit
def constant(value):
    return value


# ---- two operands ----------------------------------------------------------------------------------------------------


@triton.jit
def add(x, y, alpha):
    return x + y * alpha


@triton.jit
def subtract(x, y, alpha):
    return x - y * alpha


@triton.jit
def multiply(x, y):
    return x * y


@triton.jit
def quotient(x, y):
    return divide(x, y)


@triton.jit
def truncated_quotient(x, y):
    if x.dtype == tl.int64:
        return x // y
    else:
        return libdevice.trunc(divide(x, y))


@triton.jit
def remainder(x, y):
    """With the sign of the divisor."""
    if x.dtype == tl.int64:
        rest = x % y
    else:
        rest = libdevice.fmod(x, y)
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def floored_quotient(x, y):
    if x.dtype == tl.int64:
        whole = x // y
        return tl.where((whole * y != x) & ((x < 0) != (y < 0)), whole - 1, whole)
    else:
        # The quotient of what is left when the remainder is taken away is nearly whole: round it, as torch does
        rest = libdevice.fmod(x, y)
        whole = divide(x - rest, y)
        whole = tl.where((rest != 0) & ((y < 0) != (rest < 0)), whole - 1.0, whole)
        low = libdevice.floor(whole)
        rounded = tl.where(whole - low > 0.5, low + 1.0, low)
        signed = libdevice.copysign(zero_of(x) * 0.0, divide(x, y))
        made = tl.where(whole != 0, rounded, signed)
        return tl.where(y == 0, divide(x, y), made)


@triton.jit
def equal(x, y):
    return x == y


@triton.jit
def not_equal(x, y):
    return x != y


@triton.jit
def less(x, y):
    return x < y


@triton.jit
def less_equal(x, y):
    return x <= y


@triton.jit
def greater(x, y):
    return x > y


@triton.jit
def greater_equal(x, y):
    return x >= y


@triton.jit
def bitwise_and(x, y):
    return x & y


@triton.jit
def bitwise_or(x, y):
    return x | y


@triton.jit
def logical_and(x, y):
    return (x != 0) & (y != 0)


@triton.jit
def logical_or(x, y):
    return (x != 0) | (y != 0)


@triton.jit
def logical_xor(x, y):
    return (x != 0) ^ (y != 0)


@triton.jit
def power_0(x, y):
    return tl.full([], 1, x.dtype)  # of a NaN too


@triton.jit
def power_1(x, y):
    return x


@triton.jit
def power_2(x, y):
    return x * x


@triton.jit
def power_3(x, y):
    return x * x * x


@triton.jit
def power_half(x, y):
    return square_root(x)  # a NaN for minus infinity, as aten has it, where C's pow is infinite


@triton.jit
def power_minus_half(x, y):
    return reciprocal_root(x)


@triton.jit
def power_minus_1(x, y):
    return reciprocal(x)


@triton.jit
def power_minus_2(x, y):
    return reciprocal(x * x)


@triton.jit
def product_rounded(x, y):
    """A product of fp32 numbers that the compiler does not put, unrounded, into a sum which it is part of."""
    return tl.fma(x, y, 0.0)


# Below a factor of -1.0 costs nothing, where Triton 3.6 makes of a unary minus a subtraction of its own


@triton.jit
def log2_in_two(x, step):
    """The logarithm of fp32 numbers above 0 as a sum of two, 2^-33 of it off at most: x is 2^e m with m about 1, and log2 m is
    K (q + q^3 / 3 + ...), K = 2 / ln 2, with q = (m - 1) / (m + 1), each term in as many digits as it takes. It is q times a
    slope: then that and one sum are all that rounds in the high digits. `step` is 2^-23, or else infinite or a NaN, and so is the
    logarithm then: 0 and infinity have m = 1, and an e of its sign."""
    tiny = x < 1.1754943508222875e-38
    bits = tl.where(tiny, x * 16777216.0, x).to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) & -0x800000  # from the root of a half on, 2^23 of it
    m = (bits - e).to(tl.float32, bitcast=True)
    exponent = tl.fma(e.to(tl.float32), step, tl.where(tiny, -24.0, 0.0))
    above = m - 1.0
    root = tl.rsqrt(m + 1.0)  # two instructions to a reciprocal that need not be exact, where a division takes ten
    r = root * root
    q = product_rounded(above, r)
    q_low = tl.fma(above * -1.0, q, tl.fma(q, -2.0, above)) * r  # the first difference is exact
    square = product_rounded(q, q)
    square_low = tl.fma(q, q, square * -1.0)
    later = tl.fma(tl.fma(0.3402206003665924, square, 0.41170623898506165), square, 0.5770828723907471)
    later = tl.fma(later, square, -0.014100036583840847)
    slope = tl.fma(square, CUBIC, TWO_OVER_LN_2)
    slope_low = tl.fma(square, later, tl.fma(square_low, CUBIC, TWO_OVER_LN_2_LOW))
    slope_low = tl.fma(square, CUBIC, TWO_OVER_LN_2 - slope) + slope_low
    log = tl.fma(q, slope, exponent)
    log_low = tl.fma(q, slope_low, tl.fma(q, slope, exponent - log))
    # K / (1 - q^2) is what a change of q makes of one in the logarithm
    return log, tl.fma(q_low, tl.fma(square, 2.957524538040161, TWO_OVER_LN_2), log_low)


@triton.jit
def exp2_of_two(high, low, sign):
    """2 to the power of a sum of which the second is below 0.01, and the first within 151 of 0, with `sign`: one rounding of the
    fraction f, one where the two parts of 1 + f ln 2 meet the rest, and another of numbers below the normal ones."""
    # Added to a number of which a step is 1, it is rounded to a whole one, whose last bits are 254 more than it
    shifted = high + 12583166.0
    f = high - (shifted - 12583166.0) + low
    curve = tl.fma(tl.fma(0.00015353360504377633, f, 0.0013398875016719103), f, 0.00961843691766262)
    curve = tl.fma(tl.fma(curve, f, 0.055503323674201965), f, 0.24022647738456726)
    curve = tl.fma(curve, f, 2.0391370370020923e-08)
    one = tl.fma(f, LN_2, 1.0)
    made = one + tl.fma(f, curve, tl.fma(f, LN_2, 1.0 - one))
    # In two steps, each by a half of the power of 2, which is a normal number: 127 of the 254 are its bias
    power = shifted.to(tl.int32, bitcast=True) << 22
    made = made * (power & 0x7F800000).to(tl.float32, bitcast=True)
    return made * (((power + 0x400000) & 0x7F800000) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def power_of_floats(x, y):
    """C's pow of fp32 numbers, 0.9 steps off at most. The compiler's own is 1.7 off, and takes results below the normal numbers
    for 0. Where the result is to be a NaN, the logarithm or y is one. Conditions that must hold together are a minimum, for each
    part of a conjunction is compiled to a choice of its own; the minimum of a NaN and a number is the number."""
    whole = tl.minimum(tl.abs(y), 1e30, propagate_nan=tl.PropagateNan.ALL)
    rest = tl.fma(tl.floor(whole * 0.5), -2.0, whole)  # 0 of an even or infinite exponent, 1 of an odd one
    fraction = tl.abs(tl.fma(rest, rest, rest * -1.0))
    step = tl.where(tl.minimum(fraction, x * -1.0) > 0, float("nan"), 1.1920928955078125e-07)
    size = tl.abs(x)
    # Of 0 and infinity it is infinite, of a NaN one; the product is larger than all others
    step = tl.where(size * 16777216.0 > size, step, size + float("inf"))
    log, log_low = log2_in_two(size, step)
    product = product_rounded(y, log)
    low = tl.fma(y, log_low, tl.fma(y, log, product * -1.0))
    low = tl.where(tl.abs(product) < 151.0, low, 0.0)  # for else it may be infinite or a NaN
    high = tl.where(tl.minimum(tl.abs(y), tl.abs(log)) == 0, 0.0, product)  # whatever the other is
    high = tl.clamp(high, -151.0, 151.0, propagate_nan=tl.PropagateNan.ALL)
    sign = tl.where(rest == 1, x.to(tl.int32, bitcast=True), 0) & -0x80000000
    return exp2_of_two(high, low, sign)


@triton.jit
def power(x, y):
    if x.dtype == tl.int64:
        # By repeated squaring; of a negative exponent, the whole part of the reciprocal. One of the two may be a single number,
        # and what a loop changes must have the shape of both
        base = x + y * 0
        made = base * 0 + 1
        left = tl.maximum(y, 0)
        for _ in range(63):
            made = tl.where((left & 1) != 0, made * base, made)
            base = base * base
            left = left >> 1
        odd = (y & 1) != 0
        below = tl.where(x == 1, 1, tl.where(x == -1, tl.where(odd, -1, 1), 0))
        return tl.where(y < 0, below, made)
    elif x.dtype == tl.float32:
        return power_of_floats(x, y)
    else:
        return libdevice.pow(x, y)


# ---- three -----------------------------------------------------------------------------------------------------------


@triton.jit
def chosen(condition, x, y):
    return tl.where(condition != 0, x, y)


@triton.jit
def add_product(x, y, z, value):
    """In aten's order on a GPU, with its bits: where the sum cancels, another order of factors may be twice as far off."""
    if x.dtype.is_floating():
        return tl.where(value == 1.0, tl.fma(y, z, x), tl.fma(value, y * z, x))
    else:
        return x + value * y * z


@triton.jit
def add_quotient(x, y, z, value):
    return x + value * divide(y, z)


@triton.jit
def between(x, low, high):
    return smaller(larger(x, low), high)


@triton.jit
def lerp(x, y, weight):
    """From the nearer end, as torch does, so that a weight of 1 gives y."""
    return tl.where(tl.abs(weight) < 0.5, x + weight * (y - x), y - (y - x) * (1.0 - weight))


@triton.jit
def filled(x, mask, value):
    return tl.where(mask != 0, value, x)


@triton.jit
def add_outer(x, y, z, beta, alpha):
    return beta * x + alpha * (y * z)


@triton.jit
def outer(y, z, alpha):
    return alpha * (y * z)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def is_close(x, y, rtol, atol):
    near = tl.abs(x - y) <= atol + tl.abs(rtol * y)
    return (x == y) | (near & (tl.abs(y) < float("inf")) & (tl.abs(x) < float("inf")))


@triton.jit
def is_close_or_nan(x, y, rtol, atol):
    return is_close(x, y, rtol, atol) | (is_nan(x) & is_nan(y))


@triton.jit
def times_cosine(x, y):
    return x * libdevice.cos(y)


@triton.jit
def times_sine(x, y):
    return x * libdevice.sin(y)


# ---- formulas of backward passes, which autograd calls ---------------------------------------------------------------


@triton.jit
def sigmoid_backward(dy, y):
    return dy * (1.0 - y) * y


@triton.jit
def tanh_backward(dy, y):
    return dy * (1.0 - y * y)


@triton.jit
def silu_backward(dy, x):
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


@triton.jit
def gelu_backward(dy, x):
    below = 0.5 * (1.0 + libdevice.erf(x * (1.0 / ROOT_2)))
    return dy * (below + x * (libdevice.exp(-0.5 * x * x) * ROOT_1_OVER_2PI))


@triton.jit
def gelu_tanh_backward(dy, x):
    t = libdevice.tanh((x + x * x * x * CUBE) * ROOT_2_OVER_PI)
    slope = (x * x * (3.0 * CUBE) + 1.0) * ROOT_2_OVER_PI
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)


@triton.jit
def threshold_backward(x, dy, least):
    return tl.where(x <= least, 0.0, dy) if x.dtype != tl.int64 else tl.where(x <= least, 0, dy)


@triton.jit
def elu_backward(dy, x, alpha, scale, input_scale):
    slope = (alpha * scale) * input_scale * libdevice.exp(x * input_scale)
    return tl.where(x <= 0, dy * slope, dy * scale)


@triton.jit
def elu_backward_of_result(dy, y, alpha, scale, input_scale):
    return tl.where(y <= 0, dy * input_scale * (y + alpha * scale), dy * scale)


@triton.jit
def gate(x, y):
    return x * sigmoid(y)


@triton.jit
def gate_backward(dy, x, y):
    """Of the gate's second operand."""
    s = sigmoid(y)
    return dy * x * s * (1.0 - s)


@triton.jit
def dropout_backward(dy, mask, scale):
    return dy * mask * scale
