"""The one store of quantised numbers: rows, or 128x128 tiles, of fp32 values into codes and scales of any format.

Rules and layouts are those of the files in `formats/`, bit for bit. The compile-time FORMAT is a string of words from
`Format.device_format`: the code (e4m3, e5m2, int8, int4, e2m1); what a scale is for (1x128, 1x32, 1x16, 128x128, row, tensor), or
that it is given (static, unit); the family where its rules are its own (mx, nvfp4) and what these depend on; swizzled where the
scales of small blocks lie as Blackwell reads them; and fast for the conversion instructions of sm_89 and later, without which
integer arithmetic gives the same codes (the interpreter runs no assembly).

A 128x128 tile is four [32, 128] tensors, the k-th holding rows 4g+k. Four codes of one column, one from each tensor, are one
int32 (or, of 4 bits, its lower half), and the transposed store is a transpose of [32, 128] int32: no byte is shuffled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .integers import byte_code, integer_code, integer_scale, zero_scale
from .quantize import amax, amax4, encode, has, interleave4, max_nan, pack4, quotient, scale_of, scaled
from .small_blocks import code_e2m1, mx_scale, nv_scale, whole_scale


class Way(NamedTuple):
    """Where one way of a value is stored, the row-wise operand or its column-wise twin: pointers, None for what there is not.

    `shared` is the scale of the whole and `zero` the zero points, where a format has them. `given` is what scales follow from
    that no program sees by itself: a static scale, or bits of amax, of the whole or of each row (of the twin: column).
    """

    codes: Any = None
    scale: Any = None
    shared: Any = None
    zero: Any = None
    given: Any = None


NOWHERE = Way()


@triton.constexpr_function
def block_of(FORMAT):
    """How many numbers along a row share a scale, where blocks do."""
    return next((n for n in (128, 32, 16) if f"1x{n}" in FORMAT.split(":")), 0)


@triton.constexpr_function
def codes_in_byte(FORMAT):
    return 2 if {"int4", "e2m1"} & set(FORMAT.split(":")) else 1


# ---- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def scales(amax, whole, FORMAT: tl.constexpr):
    """(scale as it is stored, what `codes` multiplies or divides by) of blocks with this amax; `whole` is NVFP4's."""
    if has(FORMAT, "int8", "int4"):
        s, m = integer_scale(amax, FORMAT)
    elif has(FORMAT, "nvfp4"):
        s, m = nv_scale(amax, whole, FORMAT)
    elif has(FORMAT, "mx"):
        s, m = mx_scale(amax, FORMAT)
    else:
        s, m = scale_of(amax, FORMAT)
    return s, m


@triton.jit
def given_scale(P, FORMAT: tl.constexpr):
    """`scales` where all numbers of a value share them: of the bits of amax that P points to, or of its static scale."""
    if has(FORMAT, "tensor"):
        s, m = scales(tl.load(P).to(tl.float32, bitcast=True), 1.0, FORMAT)
    elif has(FORMAT, "static") and not has(FORMAT, "nvfp4"):
        s = tl.load(P)
        m = tl.div_rn(1.0, s)
    else:
        s = 1.0
        m = 1.0
    return s, m


@triton.jit
def whole_of(WAY, FORMAT: tl.constexpr):
    """The scale of the whole in formats that have one beside those of blocks."""
    g = 1.0
    if has(FORMAT, "nvfp4"):
        g = whole_scale(WAY.given, FORMAT)
    return g


@triton.jit
def block_scales(y, axis: tl.constexpr, whole, FORMAT: tl.constexpr):
    """(scale, multiplier, zero point) along an axis of y; the last is nothing of use where a format has none."""
    if has(FORMAT, "zero"):
        high = max_nan(tl.reduce(y, axis, max_nan), 0.0)
        low = max_nan(tl.reduce(-y, axis, max_nan), 0.0) * -1.0
        s, m, z = zero_scale(high, low)
    else:
        s, m = scales(amax(y, axis), whole, FORMAT)
        z = m
    return s, m, z


@triton.jit
def nibbles(y, s, m, z, FORMAT: tl.constexpr):
    """4-bit codes of y, and the 8-bit ones of integers, in the low bits of int32s whose others are 0."""
    if has(FORMAT, "int8", "int4"):
        code = integer_code(y, s, m, z, FORMAT)
    else:
        if has(FORMAT, "nvfp4"):
            near = tl.abs(y)
            if has(FORMAT, "static"):
                near = tl.minimum(near, 8.0 * m)  # the largest code already; a quotient must not overflow
            kept = m > 0.0
            d = tl.where(kept, m, 1.0)  # neither NaN nor 0, by which nothing is divided
            a = quotient(near, d, tl.div_rn(1.0, d))
        else:
            a = tl.abs(y) * m
            kept = m == m
        sign = (y.to(tl.int32, bitcast=True) >> 28) & 8
        code = ((code_e2m1(a) & 7) | sign) & tl.where(kept, 15, 0)
    return code


@triton.jit
def codes(y, s, m, z, COLS: tl.constexpr, FORMAT: tl.constexpr):
    """What is stored of y [rows, COLS], or in blocks [rows, blocks, numbers]: a code each, or [rows, pairs] of 4-bit ones."""
    if has(FORMAT, "int8"):
        out = byte_code(y, s, m, FORMAT)
    elif codes_in_byte(FORMAT) == 2:
        code = nibbles(y, s, m, z, FORMAT)
        low, high = tl.split(tl.reshape(code, (y.shape[0], COLS // 2, 2)))
        out = (low | (high << 4)).to(tl.uint8)
    elif has(FORMAT, "mx"):
        out = encode(y, m, m, FORMAT)
    else:
        out = encode(y, s, m, FORMAT)
    return out


@triton.jit
def words(y0, y1, y2, y3, s, m, z, FORMAT: tl.constexpr):
    """The codes of four numbers in one int32, y0's in the lowest bits."""
    if has(FORMAT, "e4m3", "e5m2"):
        if has(FORMAT, "mx"):
            s = m
        y0 = scaled(y0, s, m, FORMAT)
        y1 = scaled(y1, s, m, FORMAT)
        y2 = scaled(y2, s, m, FORMAT)
        y3 = scaled(y3, s, m, FORMAT)
        word = pack4(y0, y1, y2, y3, FORMAT)
    else:
        BITS: tl.constexpr = 8 // codes_in_byte(FORMAT)
        word = nibbles(y0, s, m, z, FORMAT) | (nibbles(y1, s, m, z, FORMAT) << BITS)
        word = word | (nibbles(y2, s, m, z, FORMAT) << (2 * BITS)) | (nibbles(y3, s, m, z, FORMAT) << (3 * BITS))
    return word


@triton.jit
def codes_at(P, FORMAT: tl.constexpr):
    """A pointer to codes, of the type that `codes` gives."""
    if has(FORMAT, "e4m3", "e5m2") and not has(FORMAT, "fast"):
        P = P.to(tl.pointer_type(tl.uint8), bitcast=True)
    return P


@triton.jit
def scale_at(P, row, block, stride, FORMAT: tl.constexpr):
    """Where the scale of a block of a row is, both 64-bit. `stride` is that of the scale's first dimension; swizzled, the number
    of a row's blocks with padding."""
    if has(FORMAT, "swizzled"):
        tile = row // 128 * 128 * stride + block // 4 * 512
        at = P + tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    elif has(FORMAT, "1x32", "1x16"):
        at = P + row * stride + block
    else:
        at = P + block * stride + row
    return at


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit
def store_rows(y, WAY, row, start, live, N, stride_s, FORMAT: tl.constexpr, EVICT: tl.constexpr):
    """Store y [ROWS, COLS], columns `start` and on of rows `row` [ROWS, 1], 64-bit, where `live`; zero past column N.

    For formats whose scales are given or for a block, which divides COLS and `start`, or for a row, of which y is then the whole.
    EVICT is how codes are to be cached.
    """
    ROWS: tl.constexpr = y.shape[0]
    COLS: tl.constexpr = y.shape[1]
    PER: tl.constexpr = codes_in_byte(FORMAT)
    BLOCK: tl.constexpr = block_of(FORMAT)
    whole = whole_of(WAY, FORMAT)
    if BLOCK > 0:
        blocks = tl.reshape(y, (ROWS, COLS // BLOCK, BLOCK))
        s, m, z = block_scales(blocks, 2, whole, FORMAT)
        b = start // BLOCK + tl.arange(0, COLS // BLOCK)[None, :]
        there = live & (b * BLOCK < N)
        at = scale_at(WAY.scale, row, b.to(tl.int64), stride_s, FORMAT)
        tl.store(at, s.to(WAY.scale.dtype.element_ty), there)
        if WAY.zero is not None:
            tl.store(scale_at(WAY.zero, row, b.to(tl.int64), stride_s, FORMAT), z.to(tl.float32), there)
        made = codes(blocks, s[:, :, None], m[:, :, None], z[:, :, None], COLS, FORMAT)
        made = tl.reshape(made, (ROWS, COLS // PER))
    elif has(FORMAT, "row"):
        s, m, z = block_scales(y, 1, whole, FORMAT)
        tl.store(WAY.scale + row, s[:, None], live)
        made = codes(y, s[:, None], m[:, None], z[:, None], COLS, FORMAT)
    else:
        s, m = given_scale(WAY.given, FORMAT)
        if tl.program_id(0) == 0:
            tl.store(WAY.scale, s)
        made = codes(y, s, m, m, COLS, FORMAT)
    if WAY.shared is not None:
        if tl.program_id(0) == 0:
            tl.store(WAY.shared, whole)
    c = start // PER + tl.arange(0, COLS // PER)[None, :]
    at = codes_at(WAY.codes, FORMAT) + row * (N // PER) + c
    tl.store(at, made, live & (c < N // PER), eviction_policy=EVICT)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def store_quarter(
    y, k: tl.constexpr, s, m, whole, ROW, row0, col0, rows_left, N, stride_s, FORMAT: tl.constexpr, FULL: tl.constexpr
):
    """Store the codes of rows 4g+k of a tile, and the scales of small blocks; (scales, zero points) of the rows."""
    BLOCK: tl.constexpr = block_of(FORMAT)
    PER: tl.constexpr = codes_in_byte(FORMAT)
    r = 4 * tl.arange(0, 32) + k
    z = s
    if BLOCK == 128:
        s, m, z = block_scales(y, 1, whole, FORMAT)
    elif has(FORMAT, "row"):
        s, m = scales(tl.load(ROW.given + row0 + r, r < rows_left, 0).to(tl.float32, bitcast=True), whole, FORMAT)
        z = s
    if BLOCK > 0 and BLOCK < 128:
        blocks = tl.reshape(y, (32, 128 // BLOCK, BLOCK))
        s, m, z = block_scales(blocks, 2, whole, FORMAT)
        b = col0 // BLOCK + tl.arange(0, 128 // BLOCK)[None, :]
        at = scale_at(ROW.scale, (row0 + r)[:, None], b.to(tl.int64), stride_s, FORMAT)
        tl.store(at, s.to(tl.uint8), (r[:, None] < rows_left) & (b * BLOCK < N))
        made = tl.reshape(codes(blocks, s[:, :, None], m[:, :, None], z[:, :, None], 128, FORMAT), (32, 128 // PER))
    elif BLOCK == 128 or has(FORMAT, "row"):
        made = codes(y, s[:, None], m[:, None], z[:, None], 128, FORMAT)
    else:
        made = codes(y, s, m, z, 128, FORMAT)
    c = tl.arange(0, 128 // PER)[None, :]
    at = codes_at(ROW.codes, FORMAT) + (row0 + r)[:, None] * (N // PER) + col0 // PER + c
    if FULL:
        tl.store(at, made)
    else:
        tl.store(at, made, (r[:, None] < rows_left) & (col0 // PER + c < N // PER))
    return s, z


@triton.jit
def column_scales(y0, y1, y2, y3, whole, FORMAT: tl.constexpr):
    """`block_scales` down the columns of a tile: of [128], or [small blocks, 128]."""
    BLOCK: tl.constexpr = block_of(FORMAT)
    if has(FORMAT, "zero"):
        top = max_nan(max_nan(y0, y1), max_nan(y2, y3))
        bottom = max_nan(max_nan(-y0, -y1), max_nan(-y2, -y3))
        high = max_nan(tl.reduce(top, 0, max_nan), 0.0)
        low = max_nan(tl.reduce(bottom, 0, max_nan), 0.0) * -1.0
        s, m, z = zero_scale(high, low)
    elif BLOCK < 128:
        most = tl.reshape(amax4(y0, y1, y2, y3), (128 // BLOCK, BLOCK // 4, 128))
        s, m = scales(amax(most, 1), whole, FORMAT)
        z = m
    else:
        s, m = scales(amax(amax4(y0, y1, y2, y3), 0), whole, FORMAT)
        z = m
    return s, m, z


@triton.jit
def store_columns(
    y0, y1, y2, y3, s, m, whole, COL, row0, col0, block, group, rows_left, M, N, stride_st,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Store the codes of the tile's columns, transposed, and their scales if it is the tile that gives them."""
    BLOCK: tl.constexpr = block_of(FORMAT)
    i = tl.arange(0, 128)
    c = col0 + i
    z = s
    if BLOCK > 0:
        s, m, z = column_scales(y0, y1, y2, y3, whole, FORMAT)
        if BLOCK == 128:
            # Sums of pointers in this order, block then column, keep fewer addresses in registers
            at = COL.scale + block.to(tl.int64) * (stride_st // 4 * 4) + col0 + i
            if FULL:
                tl.store(at, s)
            else:
                tl.store(at, s, c < N)
            if COL.zero is not None:
                at = COL.zero + block.to(tl.int64) * (stride_st // 4 * 4) + col0 + i
                tl.store(at, z.to(tl.float32), c < N)
        else:
            b = row0 // BLOCK + tl.arange(0, 128 // BLOCK)
            at = scale_at(COL.scale, c.to(tl.int64)[None, :], b[:, None], stride_st, FORMAT)
            tl.store(at, s.to(tl.uint8), (c[None, :] < N) & (b[:, None] * BLOCK < row0 + rows_left))
    elif has(FORMAT, "row"):
        bits = tl.load(COL.given + group.to(tl.int64) * N + c, c < N, 0)
        s, m = scales(bits.to(tl.float32, bitcast=True), whole, FORMAT)
        z = s
    if BLOCK == 128 or has(FORMAT, "row"):
        s = s[None, :]
        m = m[None, :]
        z = z[None, :]
    elif BLOCK > 0:
        s = s[:, None, :]
        m = m[:, None, :]
        z = z[:, None, :]
        y0 = tl.reshape(y0, (128 // BLOCK, BLOCK // 4, 128))
        y1 = tl.reshape(y1, (128 // BLOCK, BLOCK // 4, 128))
        y2 = tl.reshape(y2, (128 // BLOCK, BLOCK // 4, 128))
        y3 = tl.reshape(y3, (128 // BLOCK, BLOCK // 4, 128))
    word = tl.trans(tl.reshape(words(y0, y1, y2, y3, s, m, z, FORMAT), (32, 128)))
    if codes_in_byte(FORMAT) == 2:
        store_halves(word, COL.codes, row0, col0, rows_left, M, N, ALIGN, FULL)
    else:
        store_words(word, COL.codes, row0, col0, rows_left, M, N, ALIGN, GROUPED, FULL)


@triton.jit
def store_words(word, QT, row0, col0, rows_left, M, N, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr):
    """Store [128 columns, 32] words of four codes at QT[col0:, row0:], whose rows have M codes: as int32 where ALIGN rows divide
    all offsets.

    ALIGN is 16, 4 or 1, and 1 means bytes. Writing offsets as products with ALIGN tells the compiler: at 16 it stores 16
    bytes at once. Groups may start and end anywhere: there the choice is made at run time.
    """
    c = col0 + tl.arange(0, 128)[:, None]
    g = tl.arange(0, 32)[None, :]
    bytewise = ALIGN < 4
    if GROUPED and ALIGN >= 4:
        bytewise = (row0 % ALIGN != 0) | ((rows_left % ALIGN != 0) & (rows_left < 128))
    if ALIGN >= 4:
        if not bytewise:
            PER: tl.constexpr = ALIGN // 4
            at = QT.to(tl.pointer_type(tl.int32), bitcast=True) + c.to(tl.int64) * (M // ALIGN * PER) + g
            at += row0 // ALIGN * PER
            if FULL:
                tl.store(at, word)
            else:
                tl.store(at, word, (c < N) & (g < rows_left // ALIGN * PER))
    if bytewise:
        at = QT.to(tl.pointer_type(tl.uint8), bitcast=True) + c.to(tl.int64) * M + row0 + 4 * g
        for k in tl.static_range(4):
            tl.store(at + k, (word >> (8 * k)).to(tl.uint8), (c < N) & (4 * g + k < rows_left))


@triton.jit
def store_halves(halves, QT, row0, col0, rows_left, M, N, ALIGN: tl.constexpr, FULL: tl.constexpr):
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
def store_tile(
    y0, y1, y2, y3, ROW, COL, row0, col0, block, group, rows_left, M, N, stride_s, stride_st,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Quantise the tile y (rows row0.., 64-bit, columns col0.. of a matrix [M, N]) and store the ways that have codes.

    What lies outside the matrix must not exceed what lies inside, of the same rows and columns. `block` is the row of block scales,
    `group` that of column scales. Formats row, tensor, static and unit leave their scales to `store_given`. FULL says that the
    tile lies wholly inside; ALIGN and GROUPED are told in `store_words`.
    """
    r = tl.arange(0, 128)
    tile = col0 // 128
    if has(FORMAT, "128x128"):
        s, m = scales(amax(amax(amax4(y0, y1, y2, y3), 0), 0), 1.0, FORMAT)
        if ROW.scale is not None:
            tl.store(ROW.scale + block.to(tl.int64) * stride_s + tile, s)
        if COL.scale is not None:
            tl.store(COL.scale + tile.to(tl.int64) * stride_st + block, s)
    if ROW.codes is not None:
        if not has(FORMAT, "128x128"):
            s, m = given_scale(ROW.given, FORMAT)
        whole = whole_of(ROW, FORMAT)
        s0, z0 = store_quarter(y0, 0, s, m, whole, ROW, row0, col0, rows_left, N, stride_s, FORMAT, FULL)
        s1, z1 = store_quarter(y1, 1, s, m, whole, ROW, row0, col0, rows_left, N, stride_s, FORMAT, FULL)
        s2, z2 = store_quarter(y2, 2, s, m, whole, ROW, row0, col0, rows_left, N, stride_s, FORMAT, FULL)
        s3, z3 = store_quarter(y3, 3, s, m, whole, ROW, row0, col0, rows_left, N, stride_s, FORMAT, FULL)
        if has(FORMAT, "1x128"):
            at = ROW.scale + tile.to(tl.int64) * (stride_s // 4 * 4) + row0 + r
            if FULL:
                tl.store(at, interleave4(s0, s1, s2, s3))
            else:
                tl.store(at, interleave4(s0, s1, s2, s3), r < rows_left)
            if ROW.zero is not None:
                at = ROW.zero + tile.to(tl.int64) * (stride_s // 4 * 4) + row0 + r
                tl.store(at, interleave4(z0, z1, z2, z3).to(tl.float32), r < rows_left)
    if COL.codes is not None:
        if not has(FORMAT, "128x128"):
            s, m = given_scale(COL.given, FORMAT)
        store_columns(
            y0, y1, y2, y3, s, m, whole_of(COL, FORMAT), COL, row0, col0, block, group, rows_left, M, N, stride_st,
            FORMAT, ALIGN, GROUPED, FULL,
        )  # fmt: skip


@triton.jit
def store_given(ROW, COL, row0, col0, block, groups, rows_left, N, stride_st, FORMAT: tl.constexpr):
    """Store the scales that no tile finds: of formats row, tensor, static and unit, and of the whole in NVFP4; each by one tile,
    `block` and col0 saying which."""
    i = tl.arange(0, 128)
    if has(FORMAT, "row"):
        if ROW.scale is not None:
            if col0 == 0:
                bits = tl.load(ROW.given + row0 + i, i < rows_left, 0)
                s, _ = scales(bits.to(tl.float32, bitcast=True), 1.0, FORMAT)
                tl.store(ROW.scale + row0 + i, s, i < rows_left)
        if COL.scale is not None:
            if block < groups:
                bits = tl.load(COL.given + block.to(tl.int64) * N + col0 + i, col0 + i < N, 0)
                s, _ = scales(bits.to(tl.float32, bitcast=True), 1.0, FORMAT)
                tl.store(COL.scale + block.to(tl.int64) * stride_st + col0 + i, s, col0 + i < N)
    elif has(FORMAT, "nvfp4"):
        if (block == 0) & (col0 == 0):
            if ROW.shared is not None:
                tl.store(ROW.shared, whole_of(ROW, FORMAT))
            if COL.shared is not None:
                tl.store(COL.shared, whole_of(COL, FORMAT))
    elif has(FORMAT, "tensor", "static", "unit"):
        if (block == 0) & (col0 == 0):
            if ROW.scale is not None:
                s, _ = given_scale(ROW.given, FORMAT)
                tl.store(ROW.scale, s)
            if COL.scale is not None:
                s, _ = given_scale(COL.given, FORMAT)
                tl.store(COL.scale, s)
