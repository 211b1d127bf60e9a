"""Products of tiles in bf16 tensor cores whose factors have more digits than bf16.

A factor is a sum of bf16 pieces, each the rounding of what the pieces before it left over: one piece is bf16 itself, two hold
fp16 exactly and fp32 to 2**-17, three hold fp32 exactly (but above bf16's largest number, 3.39e38, it becomes infinite). A
product of two bf16 numbers is exact in fp32: what is lost is the accumulation's rounding, and the products of pieces that are
too small to matter.
"""

import triton
import triton.language as tl


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
