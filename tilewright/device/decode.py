"""Operands of products from codes: a tile [rows, inner] as tensor cores take it, whatever it is stored in.

KIND says what the codes are: e4m3, e5m2, int8, int4, e2m1, or float for numbers as they are. MATH is what is multiplied: fp8 and
int8 are codes as they are, bf16 and fp16 hold every code exactly, f32 is for factors that take two bf16 pieces (`products.py`).

Two 4-bit codes are in a byte. They are not put beside each other: HALVES says that the tile is wanted as two, its even and its odd
columns, for a sum over both does not mind in which order it goes.
"""

import triton
import triton.language as tl

from .products import widen_codes
from .small_blocks import scale_e8m0, widen_e2m1


@triton.constexpr_function
def four_bits(KIND):
    return KIND in ("int4", "e2m1")


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
        y = narrow(widen_codes(x, KIND == "e5m2"), MATH)
    else:
        y = narrow(x, MATH)
    return y


@triton.jit
def widen_scale(s, E8M0: tl.constexpr):
    """Scales of small blocks in fp32: e8m0 in bytes, or e4m3, in bytes where the chip does not know it."""
    if E8M0:
        y = scale_e8m0(s)
    elif s.dtype == tl.uint8:
        y = widen_codes(s, False).to(tl.float32)
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
