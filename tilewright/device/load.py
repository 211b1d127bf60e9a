"""The one load of quantised numbers: operands of products, and the values that codes and scales of any format stand for.

KIND says what the codes are: e4m3, e5m2, int8, int4, e2m1, or float for numbers as they are. MATH is what they are widened to: fp8
and int8 are codes as they are, bf16 and fp16 hold every code exactly, f32 is for values, and for factors that take two bf16
pieces (`products.py`).

An operand is a tile [rows, inner] as tensor cores take it (`load_operand`). Two 4-bit codes are in a byte. They are not put beside
each other: HALVES says that the tile is wanted as two, its even and its odd columns, for a sum over both does not mind in which
order it goes.

A value is (code - zero) * scale * shared, without what its format does not have, each step rounded to fp32 (`load_tile`). It takes
the `Way` and the words of FORMAT that `store.py` stores by. Of these it reads the code, what a scale is for (a FORMAT that names
neither a block nor a row has one scale for all), swizzled, and fast, by which the chip widens FP8 codes.
"""

import triton
import triton.language as tl

from .quantize import decode, has
from .small_blocks import scale_e8m0, widen_e2m1
from .store import block_of, codes_in_byte, scale_at


@triton.constexpr_function
def four_bits(KIND):
    return KIND in ("int4", "e2m1")


@triton.constexpr_function
def kind_of(FORMAT):
    """The KIND of a format's codes."""
    return next(kind for kind in ("e4m3", "e5m2", "int8", "int4", "e2m1") if kind in FORMAT.split(":"))


# ---- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def narrow(x, MATH: tl.constexpr):
    """Numbers in the type that is multiplied, which holds them."""
    if MATH == "bf16":
        return x.to(tl.bfloat16)
    elif MATH == "fp16":
        return x.to(tl.float16)
    else:
        return x.to(tl.float32)


@triton.jit
def signed_nibble(x):
    """The int4 code in the low nibble of a byte, whatever lies above it, as int8."""
    return (((x & 15) ^ 8).to(tl.int8) - 8).to(tl.int8)


@triton.jit
def widen(x, zero, KIND: tl.constexpr, MATH: tl.constexpr):
    """Codes in the type that is multiplied; 4-bit ones in the low nibbles of bytes. `zero`, a column or None, is subtracted first:
    that is exact where it has at most three binary places, and else rounded to MATH."""
    if KIND == "float":
        y = x if MATH != "f32" else x.to(tl.float32)
    elif KIND == "int8":
        y = x if MATH == "int8" else narrow(x, MATH)
    elif KIND == "int4":
        y = signed_nibble(x)
        if zero is not None:
            y = narrow(y.to(tl.float32) - zero, MATH)
        elif MATH != "int8":
            y = narrow(y, MATH)
    elif KIND == "e2m1":
        y = narrow(widen_e2m1(x), MATH)
    elif MATH == "fp8":
        y = x
    elif x.dtype == tl.uint8:
        y = narrow(decode(x, KIND), MATH)
    else:
        y = narrow(x, MATH)
    return y


@triton.jit
def widen_scale(s, E8M0: tl.constexpr):
    """Scales of small blocks in fp32: e8m0 in bytes, or e4m3, in bytes where the chip does not know it."""
    if E8M0:
        y = scale_e8m0(s)
    elif s.dtype == tl.uint8:
        y = decode(s, "e4m3")
    else:
        y = s.to(tl.float32)
    return y


@triton.jit
def times_blocks(x, s, MATH: tl.constexpr):
    """x [rows, columns] times s [rows, blocks], each for as many columns as there are for a block."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    BLOCKS: tl.constexpr = s.shape[1]
    y = x.to(tl.float32).reshape(ROWS, BLOCKS, COLUMNS // BLOCKS) * s[:, :, None]
    return narrow(y.reshape(ROWS, COLUMNS), MATH)


# ---- operands --------------------------------------------------------------------------------------------------------


@triton.jit
def load_scales(S, row, first, ROWS, K, stride_r, stride_k, ACROSS: tl.constexpr, STEP: tl.constexpr):
    """Scales of small blocks [rows, STEP / ACROSS] from element `first` on, as they are stored."""
    block = first // ACROSS + tl.arange(0, STEP // ACROSS)
    at = S + row.to(tl.int64)[:, None] * stride_r + block.to(tl.int64)[None, :] * stride_k
    return tl.load(
        at, (row < ROWS)[:, None] & (block * ACROSS < K)[None, :], 0.0 if S.dtype.element_ty.is_floating() else 0
    )


@triton.jit
def load_bytes(P, row, first, ROWS, K, stride_r, stride_k, KIND: tl.constexpr, STEP: tl.constexpr):
    """A tile of codes [rows, STEP] from element `first` of the inner dimension on, 4-bit ones as [rows, STEP / 2] bytes."""
    PER: tl.constexpr = 2 if four_bits(KIND) else 1
    k = first // PER + tl.arange(0, STEP // PER)
    at = P + row.to(tl.int64)[:, None] * stride_r + k.to(tl.int64)[None, :] * stride_k
    inside = (row < ROWS)[:, None] & (k < K // PER)[None, :]
    return tl.load(at, inside, 0.0 if P.dtype.element_ty.is_floating() else 0)


@triton.jit
def load_operand(
    P, S, row, first, ROWS, K, stride_r, stride_k, stride_sr, stride_sk, zero,
    KIND: tl.constexpr, ACROSS: tl.constexpr, MATH: tl.constexpr, HALVES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(even columns, odd columns) of a tile [rows, STEP] of an operand, or where not HALVES the tile twice. Scales of small blocks,
    each for ACROSS elements (0: there are none), are multiplied in."""
    codes = load_bytes(P, row, first, ROWS, K, stride_r, stride_k, KIND, STEP)
    low = widen(codes, zero, KIND, MATH)
    if ACROSS > 0:
        s = widen_scale(load_scales(S, row, first, ROWS, K, stride_sr, stride_sk, ACROSS, STEP), ACROSS == 32)
        low = times_blocks(low, s, MATH)
    high = low
    if four_bits(KIND):
        high = widen(codes >> 4, zero, KIND, MATH)
        if ACROSS > 0:
            high = times_blocks(high, s, MATH)
    elif HALVES:
        low, high = tl.split(low.reshape(low.shape[0], STEP // 2, 2))
    return low, high


# ---- values ----------------------------------------------------------------------------------------------------------


@triton.jit
def codes_from(P, FORMAT: tl.constexpr):
    """A pointer to codes, or to bytes that hold them, of the type that `widen` takes."""
    if has(FORMAT, "int8"):
        P = P.to(tl.pointer_type(tl.int8), bitcast=True)
    elif has(FORMAT, "fast") and has(FORMAT, "e4m3"):
        P = P.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    elif has(FORMAT, "fast") and has(FORMAT, "e5m2"):
        P = P.to(tl.pointer_type(tl.float8e5), bitcast=True)
    else:
        P = P.to(tl.pointer_type(tl.uint8), bitcast=True)
    return P


@triton.jit
def load_rows(
    WAY, row, first, ROWS, END, LENGTH, band, block, group, stride_s, FORMAT: tl.constexpr, STEP: tl.constexpr
):
    """Values [rows, STEP] of a way in fp32: its rows `row`, 64-bit and below ROWS, from element `first` on, below END. What lies
    past either is of no meaning.

    Rows and elements lie in one block of 128 each: `band` counts that of the rows, `block` that of the elements. STEP divides
    `first` where blocks are small or a byte has two codes. `group` is the line of the scales of rows, where groups have one each.
    A row has LENGTH elements. Zero points lie as scales do, by `stride_s`, of which `scale_at` tells.
    """
    PER: tl.constexpr = codes_in_byte(FORMAT)
    KIND: tl.constexpr = kind_of(FORMAT)
    BLOCK: tl.constexpr = block_of(FORMAT)
    line = block if BLOCK == 128 else group
    zero = None
    if WAY.zero is not None:
        zero = tl.load(WAY.zero + line * stride_s + row, row < ROWS, 0.0)[:, None]
    codes = load_bytes(codes_from(WAY.codes, FORMAT), row, first, ROWS, END, LENGTH // PER, 1, KIND, STEP)
    y = widen(codes, zero, KIND, "f32")
    if PER == 2:
        y = tl.reshape(tl.join(y, widen(codes >> 4, zero, KIND, "f32")), (row.shape[0], STEP))
    if BLOCK > 0 and BLOCK < 128:
        b = first // BLOCK + tl.arange(0, STEP // BLOCK)
        at = scale_at(WAY.scale, row[:, None], b.to(tl.int64)[None, :], stride_s, FORMAT)
        s = tl.load(at, (row < ROWS)[:, None] & (b * BLOCK < END)[None, :], 0)
        y = times_blocks(y, widen_scale(s, BLOCK == 32), "f32")
    elif BLOCK == 128 or has(FORMAT, "row"):
        y *= tl.load(WAY.scale + line * stride_s + row, row < ROWS, 0.0)[:, None]
    elif has(FORMAT, "128x128"):
        y *= tl.load(WAY.scale + band * stride_s + block)
    else:
        y *= tl.load(WAY.scale)
    if WAY.shared is not None:
        y *= tl.load(WAY.shared)
    return y


@triton.jit
def load_tile(
    WAY, first, row0, col0, block, group, rows_left, M, N, stride_s, FORMAT: tl.constexpr, TWIN: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Values [ROWS, 128] in fp32, from row `first` on, of a 128x128 tile that `store_tile` stored; ROWS divides `first`.

    WAY is the row-wise operand of the matrix [M, N] or, where TWIN, its column-wise twin, and stride_s that of its scale.
    """
    row = row0 + first
    end = row0 + rows_left
    tile = (col0 // 128).to(tl.int64)
    down = block.to(tl.int64)
    if TWIN:
        c = (col0 + tl.arange(0, 128)).to(tl.int64)
        y = tl.trans(load_rows(WAY, c, row, N, end, M, tile, down, group.to(tl.int64), stride_s, FORMAT, ROWS))
    else:
        y = load_rows(WAY, row + tl.arange(0, ROWS), col0, end, N, N, down, tile, 0, stride_s, FORMAT, 128)
    return y
