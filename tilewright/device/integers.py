"""INT8 and INT4 quantisation on the device: scale, zero point, codes, and the tile that is stored row-wise, column-wise or both.

Rules and layouts are those of `formats/integers.py`, bit for bit. The compile-time FORMAT is a string of words: int8 or
int4; 1x128, 128x128, row or tensor; and zero for zero points. A 128x128 tile is four [32, 128] tensors as in `quantize.py`.
"""

import triton
import triton.language as tl

from .quantize import amax, amax4, has, interleave4, max_nan, quotient, store_words

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


@triton.jit
def row_stats(y, axis: tl.constexpr, FORMAT: tl.constexpr):
    """(scale, reciprocal, zero point) along an axis; without the word zero the last is nothing of use."""
    if has(FORMAT, "zero"):
        high = max_nan(tl.reduce(y, axis, max_nan), 0.0)
        low = max_nan(tl.reduce(-y, axis, max_nan), 0.0) * -1.0
        s, c, z = zero_scale(high, low)
    else:
        s, c = integer_scale(amax(y, axis), FORMAT)
        z = s
    return s, c, z


@triton.jit
def pairs(code):
    """[R, C] codes of 4 bits -> [R, C / 2] bytes, the even columns' in the low nibbles."""
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def store_integer_rows(
    y, k: tl.constexpr, s, c, Q, AMAX, row0, col0, rows_left, stride_q, FORMAT: tl.constexpr, FULL: tl.constexpr
):
    """Store the codes of rows 4g+k of a tile; (their scales, zero points)."""
    r = 4 * tl.arange(0, 32) + k
    z = s
    if has(FORMAT, "1x128"):
        s, c, z = row_stats(y, 1, FORMAT)
    elif has(FORMAT, "row"):
        s, c = integer_scale(tl.load(AMAX + row0 + r, r < rows_left, 0).to(tl.float32, bitcast=True), FORMAT)
        z = s
    if has(FORMAT, "1x128", "row"):
        code = integer_code(y, s[:, None], c[:, None], z[:, None], FORMAT)
    else:
        code = integer_code(y, s, c, z, FORMAT)
    if has(FORMAT, "int4"):
        pair = tl.arange(0, 64)[None, :]
        at = Q + (row0 + r)[:, None] * stride_q + col0 // 128 * 64 + pair
        codes = pairs(code)
        inside = (r[:, None] < rows_left) & (col0 // 128 * 64 + pair < stride_q)
    else:
        col = tl.arange(0, 128)[None, :]
        at = Q + (row0 + r)[:, None] * stride_q + col0 + col
        codes = code.to(tl.int8)
        inside = (r[:, None] < rows_left) & (col0 + col < stride_q)
    if FULL:
        tl.store(at, codes)
    else:
        tl.store(at, codes, inside)
    return s, z


@triton.jit
def store_halves(halves, QT, row0, col0, rows_left, N, M, ALIGN: tl.constexpr, FULL: tl.constexpr):
    """Store [128 columns, 32] int32 whose low halves are four 4-bit codes at QT[col0:, row0 / 2:]: as int16 where 4 divides M."""
    c = col0 + tl.arange(0, 128)[:, None]
    g = tl.arange(0, 32)[None, :]
    if ALIGN >= 4:
        # Offsets as products with ALIGN: at 16 the compiler sees that 8 bytes may be stored at once
        PER: tl.constexpr = ALIGN // 4
        at = QT.to(tl.pointer_type(tl.int16), bitcast=True) + c.to(tl.int64) * (M // ALIGN * PER) + g
        at += row0 // ALIGN * PER
        if FULL:
            tl.store(at, halves.to(tl.int16))
        else:
            tl.store(at, halves.to(tl.int16), (c < N) & (g < rows_left // ALIGN * PER))
    else:
        at = QT + c.to(tl.int64) * (M // 2) + row0 // 2 + 2 * g
        tl.store(at, halves.to(tl.uint8), (c < N) & (4 * g < rows_left))
        tl.store(at + 1, (halves >> 8).to(tl.uint8), (c < N) & (4 * g + 2 < rows_left))


@triton.jit
def column_stats(y0, y1, y2, y3, FORMAT: tl.constexpr):
    """`row_stats` down a tile."""
    if has(FORMAT, "zero"):
        top = max_nan(max_nan(y0, y1), max_nan(y2, y3))
        bottom = max_nan(max_nan(-y0, -y1), max_nan(-y2, -y3))
        high = max_nan(tl.reduce(top, 0, max_nan), 0.0)
        low = max_nan(tl.reduce(bottom, 0, max_nan), 0.0) * -1.0
        s, c, z = zero_scale(high, low)
    else:
        s, c = integer_scale(amax(amax4(y0, y1, y2, y3), 0), FORMAT)
        z = s
    return s, c, z


@triton.jit
def store_integer_columns(
    y0, y1, y2, y3, s, c, QT, ST, ZT, AMAX_T, row0, col0, block, group, rows_left, M, N, stride_st,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Store the codes of the tile's columns, transposed, and their scales if it is the tile that gives them."""
    col = col0 + tl.arange(0, 128)
    z = s
    if has(FORMAT, "1x128"):
        s, c, z = column_stats(y0, y1, y2, y3, FORMAT)
        at = block.to(tl.int64) * (stride_st // 4 * 4) + col
        tl.store(ST + at, s, col < N)
        if ZT is not None:
            tl.store(ZT + at, z.to(tl.float32), col < N)
    elif has(FORMAT, "row"):
        bits = tl.load(AMAX_T + group.to(tl.int64) * N + col, col < N, 0)
        s, c = integer_scale(bits.to(tl.float32, bitcast=True), FORMAT)
        z = s
    if has(FORMAT, "1x128", "row"):
        s = s[None, :]
        c = c[None, :]
        z = z[None, :]
    c0 = integer_code(y0, s, c, z, FORMAT)
    c1 = integer_code(y1, s, c, z, FORMAT)
    c2 = integer_code(y2, s, c, z, FORMAT)
    c3 = integer_code(y3, s, c, z, FORMAT)
    if has(FORMAT, "int4"):
        halves = tl.trans(c0 | (c1 << 4) | (c2 << 8) | (c3 << 12))
        store_halves(halves, QT, row0, col0, rows_left, N, M, ALIGN, FULL)
    else:
        words = tl.trans(c0 | (c1 << 8) | (c2 << 16) | (c3 << 24))
        store_words(words, QT, row0, col0, rows_left, N, M, ALIGN, GROUPED, FULL)


@triton.jit
def store_integer_tile(
    y0, y1, y2, y3, Q, S, Z, QT, ST, ZT, AMAX, AMAX_T, row0, col0, block, group, rows_left, M, N, stride_q, stride_s, stride_st,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Quantise the tile y and store what is not None; as `store_tile4`, and row and tensor leave the scales to
    `store_integer_scales`."""
    r = tl.arange(0, 128)
    tile = col0 // 128
    s = 1.0
    c = 1.0
    if has(FORMAT, "128x128"):
        s, c = integer_scale(amax(amax(amax4(y0, y1, y2, y3), 0), 0), FORMAT)
        if S is not None:
            tl.store(S + block.to(tl.int64) * stride_s + tile, s)
        if ST is not None:
            tl.store(ST + tile.to(tl.int64) * stride_st + block, s)
    elif has(FORMAT, "tensor"):
        s, c = integer_scale(tl.load(AMAX).to(tl.float32, bitcast=True), FORMAT)
    if Q is not None:
        s0, z0 = store_integer_rows(y0, 0, s, c, Q, AMAX, row0, col0, rows_left, stride_q, FORMAT, FULL)
        s1, z1 = store_integer_rows(y1, 1, s, c, Q, AMAX, row0, col0, rows_left, stride_q, FORMAT, FULL)
        s2, z2 = store_integer_rows(y2, 2, s, c, Q, AMAX, row0, col0, rows_left, stride_q, FORMAT, FULL)
        s3, z3 = store_integer_rows(y3, 3, s, c, Q, AMAX, row0, col0, rows_left, stride_q, FORMAT, FULL)
        if has(FORMAT, "1x128"):
            at = tile.to(tl.int64) * (stride_s // 4 * 4) + row0 + r
            tl.store(S + at, interleave4(s0, s1, s2, s3), r < rows_left)
            if Z is not None:
                tl.store(Z + at, interleave4(z0, z1, z2, z3).to(tl.float32), r < rows_left)
    if QT is not None:
        store_integer_columns(
            y0, y1, y2, y3, s, c, QT, ST, ZT, AMAX_T, row0, col0, block, group, rows_left, M, N, stride_st, FORMAT, ALIGN,
            GROUPED, FULL,
        )  # fmt: skip


@triton.jit
def store_integer_scales(S, ST, AMAX, AMAX_T, row0, col0, block, groups, rows_left, N, stride_st, FORMAT: tl.constexpr):
    """Store the scales of row and tensor, each by one tile; `block` and col0 say which."""
    i = tl.arange(0, 128)
    if has(FORMAT, "row"):
        if S is not None:
            if col0 == 0:
                bits = tl.load(AMAX + row0 + i, i < rows_left, 0)
                s, _ = integer_scale(bits.to(tl.float32, bitcast=True), FORMAT)
                tl.store(S + row0 + i, s, i < rows_left)
        if ST is not None:
            if block < groups:
                bits = tl.load(AMAX_T + block.to(tl.int64) * N + col0 + i, col0 + i < N, 0)
                s, _ = integer_scale(bits.to(tl.float32, bitcast=True), FORMAT)
                tl.store(ST + block.to(tl.int64) * stride_st + col0 + i, s, col0 + i < N)
    elif has(FORMAT, "tensor"):
        if (block == 0) & (col0 == 0):
            s, _ = integer_scale(tl.load(AMAX).to(tl.float32, bitcast=True), FORMAT)
            if S is not None:
                tl.store(S, s)
            if ST is not None:
                tl.store(ST, s)
