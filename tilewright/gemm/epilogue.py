"""What a product's fp32 sums go through before they are stored: a bias, an activation, or a gated unit of pairs of columns."""

import triton
import triton.language as tl

from ..device.activation import activate


@triton.jit
def columns_of(across, N, BLOCK_N: tl.constexpr, GLU: tl.constexpr):
    """The columns of tile `across`, N or more where there are none. Of a gated unit those of gate and up, which are the halves of
    the columns, alternate: a thread then holds both of a pair, and nothing need be exchanged."""
    j = tl.arange(0, BLOCK_N)
    if GLU is None:
        return across * BLOCK_N + j
    else:
        pair = across * (BLOCK_N // 2) + j // 2
        return tl.where(pair < N // 2, j % 2 * (N // 2) + pair, N)


@triton.jit
def finish(y, BIAS, col, N, ACT: tl.constexpr, GLU: tl.constexpr):
    """act(y + bias) of sums [rows, columns] in fp32; of a gated unit act(gate) * up, half as many columns."""
    if BIAS is not None:
        y += tl.load(BIAS + col, col < N, 0.0).to(tl.float32)[None, :]
    if GLU is not None:
        gate, up = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
        y = activate(gate, 1.0, GLU) * up
    elif ACT is not None:
        y = activate(y, 1.0, ACT)
    return y


@triton.jit
def store_finished(y, Y, BIAS, row, col, across, rows, N, ACT: tl.constexpr, GLU: tl.constexpr, BLOCK_N: tl.constexpr):
    """`finish` a tile and store it in Y, which begins at the tile's first row; `row` counts from there, and there are `rows`."""
    WIDTH: tl.constexpr = BLOCK_N if GLU is None else BLOCK_N // 2
    columns = N if GLU is None else N // 2
    y = finish(y, BIAS, col, N, ACT, GLU)
    c = across * WIDTH + tl.arange(0, WIDTH)
    at = Y + row.to(tl.int64)[:, None] * columns + c[None, :]
    tl.store(at, y.to(Y.dtype.element_ty), (row < rows)[:, None] & (c < columns)[None, :])
