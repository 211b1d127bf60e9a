"""Products of tiles in bf16 tensor cores whose factors have more digits than bf16.

A factor is a sum of bf16 pieces, each the rounding of what the pieces before it left over: one piece is bf16 itself, two hold
fp16 exactly and fp32 to 2**-17, three hold fp32 exactly (but above bf16's largest number, 3.39e38, it becomes infinite). A
product of two bf16 numbers is exact in fp32: what is lost is the accumulation's rounding, and the products of pieces that are
too small to matter.
"""

import triton
import triton.language as tl

from .quantize import decode


@triton.jit
def finite(x):
    """x, 0 where it is NaN or infinite."""
    wide = x.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(x.dtype)


@triton.jit
def peel(x):
    """(x rounded to bf16, what that leaves of it): nothing of a NaN or an infinity, which `x - x` would make NaN."""
    top = x.to(tl.bfloat16)
    wide = top.to(tl.float32)
    return top, tl.where(tl.abs(wide) < float("inf"), x - wide, 0.0)


@triton.jit
def pieces_of(x, PIECES: tl.constexpr):
    """The first, second and third piece of x; those beyond PIECES are of no meaning."""
    if PIECES == 1:
        return x, x, x
    else:
        first, rest = peel(x.to(tl.float32))
        second, rest = peel(rest)
        return first, second, rest.to(tl.bfloat16)


@triton.jit
def add_product(total, a, b, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr):
    """total + a @ b, without the products of pieces that are below the last one of the longer factor."""
    LONGER: tl.constexpr = max(PIECES_A, PIECES_B)
    if LONGER == 1:
        total = tl.dot(a, b, total)
    else:
        a0, a1, a2 = pieces_of(a, PIECES_A)
        b0, b1, b2 = pieces_of(b, PIECES_B)
        # An infinity times a lower piece, which may be 0 or of the other sign, would be NaN
        if LONGER == 3:
            if PIECES_B == 3:
                total = tl.dot(finite(a0), b2, total)
            if PIECES_A == 3:
                total = tl.dot(a2, finite(b0), total)
            if PIECES_A > 1 and PIECES_B > 1:
                total = tl.dot(a1, b1, total)
        if PIECES_B > 1:
            total = tl.dot(finite(a0), b1, total)
        if PIECES_A > 1:
            total = tl.dot(a1, finite(b0), total)
        total = tl.dot(a0, b0, total)
    return total


@triton.jit
def multiply(
    total, A, B, row, col, start, end, M, N, stride_am, stride_ak, stride_bk, stride_bn,
    PIECES_A: tl.constexpr, PIECES_B: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`total`, and the tile at `row`, `col` of A[M, .] @ B[., N], summed over the inner dimension from `start` to `end`."""
    A += row.to(tl.int64)[:, None] * stride_am
    B += col.to(tl.int64)[None, :] * stride_bn
    # A loop that may not run leaves zeros in the accumulator from elsewhere, for which ptxas serialises all products
    stop = tl.maximum(end, start + 1)
    tl.assume(start < stop)
    for first in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        step = k.to(tl.int64)
        a = tl.load(A + step[None, :] * stride_ak, (row < M)[:, None] & (k < end)[None, :], 0.0)
        b = tl.load(B + step[:, None] * stride_bk, (k < end)[:, None] & (col < N)[None, :], 0.0)
        total = add_product(total, a, b, PIECES_A, PIECES_B)
    return total


@triton.jit
def sum_parts(P, at, COUNT, PARTS):
    """The sum over parts of P[part, at], in their order; P is [PARTS, COUNT]."""
    total = tl.zeros([at.shape[0]], tl.float32)
    for part in range(PARTS):
        total += tl.load(P + part.to(tl.int64) * COUNT + at, at < COUNT, 0.0)
    return total


@triton.jit
def widen_codes(x, E5M2: tl.constexpr):
    """FP8 codes in bytes as bf16, which holds them all."""
    return decode(x, "e5m2" if E5M2 else "e4m3").to(tl.bfloat16)


@triton.jit
def multiply_scaled(
    A, B, SA, SB, row, col, start, end, M, N, K, COLUMNS: tl.constexpr, NATIVE: tl.constexpr, E5M2_A: tl.constexpr,
    E5M2_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The tile at `row`, `col` of A[M, K] @ B[K, N] in FP8 codes, over blocks of 128 of the inner dimension from `start`, which
    128 divides, to `end`: SA [blocks, rows] has a scale for every row of a block, SB [blocks, columns / COLUMNS] for every COLUMNS
    columns. NATIVE: the chip multiplies codes; elsewhere they come as bytes and are widened, which loses nothing."""
    at_a = A.data + row.to(tl.int64)[:, None] * A.stride_r
    at_b = B.data + col.to(tl.int64)[None, :] * B.stride_c
    at_sa = SA.data + row.to(tl.int64) * SA.stride_c
    at_sb = SB.data + (col // COLUMNS).to(tl.int64) * SB.stride_c
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(start, end, 128, num_stages=STAGES):
        first = tl.multiple_of(at, 128)  # of which, and of K, the compiler knows that codes can be loaded by words
        k = first + tl.arange(0, 128)
        step = k.to(tl.int64)
        a = tl.load(at_a + step[None, :] * A.stride_c, (row < M)[:, None] & (k < K)[None, :], 0.0 if NATIVE else 0)
        b = tl.load(at_b + step[:, None] * B.stride_r, (k < K)[:, None] & (col < N)[None, :], 0.0 if NATIVE else 0)
        block = (first // 128).to(tl.int64)
        sa = tl.load(at_sa + block * SA.stride_r, row < M, 0.0)
        sb = tl.load(at_sb + block * SB.stride_r, col < N, 0.0)
        if NATIVE:
            part = tl.dot(a, b)
        else:
            part = tl.dot(widen_codes(a, E5M2_A), widen_codes(b, E5M2_B))
        total += part * sa[:, None] * sb[None, :]
    return total


@triton.jit
def multiply_codes(
    A, B, row, col, start, end, M, N, NATIVE: tl.constexpr, E5M2_A: tl.constexpr, E5M2_B: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The tile at `row`, `col` of A[M, .] @ B[., N] in FP8 codes without scales, from `start` to `end` of the inner dimension,
    wherever these are; sums of 128 are added up in fp32, since tensor cores may keep fewer bits."""
    at_a = A.data + row.to(tl.int64)[:, None] * A.stride_r
    at_b = B.data + col.to(tl.int64)[None, :] * B.stride_c
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(start, end, 128, num_stages=STAGES):
        k = first + tl.arange(0, 128)
        step = k.to(tl.int64)
        a = tl.load(at_a + step[None, :] * A.stride_c, (row < M)[:, None] & (k < end)[None, :], 0.0 if NATIVE else 0)
        b = tl.load(at_b + step[:, None] * B.stride_r, (k < end)[:, None] & (col < N)[None, :], 0.0 if NATIVE else 0)
        if NATIVE:
            total += tl.dot(a, b)
        else:
            total += tl.dot(widen_codes(a, E5M2_A), widen_codes(b, E5M2_B))
    return total
