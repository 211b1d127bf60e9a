"""Sylvester's Hadamard matrix, H[i, j] = (-1)**(number of ones in i & j), as a factor of tile products.

A product of its entries, 1 and -1, with a bf16 or fp16 number is exact and sums are fp32; an fp32 factor goes as three bf16
pieces, which hold it exactly. Nothing here divides by the square root of the size.
"""

import triton
import triton.language as tl

from ...device.products import add_product, finite


@triton.jit
def sylvester(SIZE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """H of size BLOCK along the diagonal of a [SIZE, SIZE] matrix; sizes to 256."""
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    shared = i & j & (BLOCK - 1)
    shared = shared ^ (shared >> 4)
    odd = (0x6996 >> (shared & 15)) & 1  # bit n of 0x6996 is the parity of n
    h = 1 - 2 * odd
    if BLOCK < SIZE:
        h = tl.where(i // BLOCK == j // BLOCK, h, 0)
    return h.to(tl.float32).to(DTYPE)


@triton.jit
def times(x, h):
    """x @ h in fp32; an fp32 x goes as three bf16 pieces."""
    total = tl.zeros([x.shape[0], h.shape[1]], tl.float32)
    PIECES: tl.constexpr = 3 if x.dtype == tl.float32 else 1
    return add_product(total, x, h, PIECES, 1)


@triton.constexpr_function
def factor_dtype(dtype):
    return tl.bfloat16 if dtype == tl.float32 else dtype


@triton.jit
def rotate_columns(x, BLOCK: tl.constexpr):
    """Every run of BLOCK columns of x times H, in fp32: no run sees another's NaN."""
    h = sylvester(BLOCK, BLOCK, factor_dtype(x.dtype))
    runs = tl.reshape(x, (x.shape[0] * x.shape[1] // BLOCK, BLOCK))
    return tl.reshape(times(runs, h), (x.shape[0], x.shape[1]))


@triton.jit
def rotate_fourths(x, BLOCK: tl.constexpr):
    """H of size BLOCK / 4 times every run of that many rows of x [32, C], as [C, 32]; a run with a NaN or Inf is NaN."""
    RUN: tl.constexpr = BLOCK // 4
    SIZE: tl.constexpr = max(RUN, 16)  # tensor cores sum no fewer
    h = sylvester(SIZE, RUN, factor_dtype(x.dtype))
    runs = tl.reshape(tl.trans(x), (x.shape[1] * 32 // SIZE, SIZE))
    if RUN < SIZE:
        # A run beside one with a NaN would get 0 * NaN: it is counted instead
        lost = tl.where(tl.abs(runs.to(tl.float32)) < float("inf"), 0.0, 1.0).to(h.dtype)
        z = times(finite(runs), h)
        z = tl.where(tl.dot(lost, tl.abs(h.to(tl.float32)).to(h.dtype)) > 0.0, float("nan"), z)
    else:
        z = times(runs, h)
    return tl.reshape(z, (x.shape[1], 32))


@triton.jit
def rotate_rows4(x0, x1, x2, x3, BLOCK: tl.constexpr):
    """H times every run of BLOCK rows of a tile in four tensors [32, C], the k-th holding rows 4g+k; so are the results.

    H of size B is that of size B / 4 over g and that of size 4 over k: the latter is additions, element by element.
    """
    z0 = rotate_fourths(x0, BLOCK)
    z1 = rotate_fourths(x1, BLOCK)
    z2 = rotate_fourths(x2, BLOCK)
    z3 = rotate_fourths(x3, BLOCK)
    a = z0 + z1
    b = z0 - z1
    c = z2 + z3
    d = z2 - z3
    return tl.trans(a + c), tl.trans(b + d), tl.trans(a - c), tl.trans(b - d)
