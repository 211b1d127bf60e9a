"""Rows as kernels of norms hold them: as pieces, side by side, of which the last may be short."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...core.format import Format
from ...core.tensor import cdiv, power_of_two
from ...device.store import store_rows

WIDEST = 16384  # columns of a row whose scale is found of it as one tensor, and of one whose backward is one program's
HELD = 2**17  # bytes of x, and of the residual, that a program's registers hold; a row of more is read twice
FINEST = 16  # pieces that the next power of two could be cut into


def split_columns(N: int, broadest: int, narrowest: int = 256, idle: int = 16) -> tuple[int, int]:
    """(BLOCK, PIECES): a row of N columns is held as PIECES of BLOCK, a power of two; the last may be short.

    They are as few as leave one of `idle` columns idle, or less. Where none do, as few as leave the fewest idle. A piece has
    `broadest` columns at most and, of several, `narrowest` at least. Rows of up to 1024 columns are one piece, for there a program
    has several.
    """
    whole = power_of_two(N)
    if whole <= 1024:
        return whole, 1
    sizes = [min(whole, broadest)]
    while sizes[-1] > max(narrowest, whole // FINEST):
        sizes.append(sizes[-1] // 2)
    covered = {size: cdiv(N, size) * size for size in sizes}
    close = [size for size in sizes if idle * (covered[size] - N) <= covered[size]]
    BLOCK = close[0] if close else min(sizes, key=covered.__getitem__)
    return BLOCK, cdiv(N, BLOCK)


# How the three kinds of launch hold a row: the best of what was tried at the widths of models, 1536 to 32768 (H200, November 2026)


def split_plain(N: int) -> tuple[int, int]:
    return split_columns(N, 4096 if N <= 4096 else 1024 if N <= 8192 else 4096 if N <= 16384 else 8192)


def plain_rows(BLOCK: int, PIECES: int) -> tuple[int, int]:
    """(rows of a program, its warps) of a norm whose result is as wide as its operand."""
    if PIECES > 1:
        # A thread has 8 bytes of bf16 of each piece: many loads in flight count, not their size
        return 1, min(32, BLOCK // (128 if BLOCK <= 1024 else 256))
    # 512 elements a warp, 4 warps or more: the best of 1-4 rows by 2-16 warps at 2048 and 4096 columns
    return max(1, min(16, 2048 // BLOCK)), min(16, max(4, BLOCK // 512))


def split_codes(N: int) -> tuple[int, int]:
    """Codes do more to an element than load and store it: idle lanes cost them less than more pieces do."""
    return split_columns(N, 8192 if N <= 8192 else 4096, narrowest=1024, idle=8)


def split_forward(x: Tensor, residual: Tensor | None, fmt: Format | None) -> tuple[int, int]:
    """(BLOCK, PIECES) of a forward over rows of x, with PIECES 0 where a row is read again for each sum."""
    N = x.shape[-1]
    BLOCK, PIECES = split_plain(N) if fmt is None else split_codes(N)
    if fmt is not None and fmt.reach == "row":
        BLOCK, PIECES = power_of_two(N), 1  # the scale is found of the row as one tensor
    if PIECES > 1 and N * x.element_size() * (1 if residual is None else 2) > HELD:
        BLOCK, PIECES = 4096, 0
    return BLOCK if fmt is None else max(128, BLOCK), PIECES


def split_backward(N: int) -> tuple[int, int]:
    return split_columns(
        N, 2048 if N <= 2048 else 1024 if N <= 5120 else 8192, narrowest=1024, idle=2 if N <= 8192 else 16
    )


def programs_per_sm(N: int) -> int:
    """Of the backward, each with its share of dweight: more make the column sum longer than they gain."""
    return 2 if N <= 5120 else 1


@triton.jit
def inside_piece(live, col, N, i: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Which elements of the i-th piece there are, `col` being the columns of the first. Only the last may be short."""
    if i == PIECES - 1:
        inside = live & (i * BLOCK + col < N)
    else:
        inside = live & (col >= 0)  # of all columns, in the shape of the piece
    return inside


@triton.jit
def load_pieces(
    P, row, col, live, N, stride_m, stride_n, EVICT: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr
):
    """Rows as they lie in memory: PIECES tensors [ROWS, BLOCK]. They are converted where they are used, for held as they are
    16-bit numbers take half the registers."""
    first = P + row * stride_m + col.to(tl.int64) * stride_n
    pieces = ()
    for i in tl.static_range(PIECES):
        at = first + tl.full([], i * BLOCK, tl.int64) * stride_n
        pieces = pieces + (tl.load(at, inside_piece(live, col, N, i, BLOCK, PIECES), 0.0, eviction_policy=EVICT),)
    return pieces


@triton.jit
def load_weight(W, col, inside, weight_offset):
    """weight + weight_offset at columns `col` [n]; an offset of 0 comes as None, so that no sum is left.

    One-dimensional, and expanded by the caller: of a [1, n] load the compiler makes a layout of its own, and eight barriers.
    """
    w = tl.load(W + col, inside, 0.0).to(tl.float32)
    if weight_offset is not None:
        w += weight_offset
    return w


@triton.jit
def weight_piece(W, N, weight_offset, i: tl.constexpr, BLOCK: tl.constexpr):
    """`load_weight` of the i-th piece of a row: [1, BLOCK]."""
    lane = tl.arange(0, BLOCK)
    return load_weight(W + i * BLOCK, lane, i * BLOCK + lane < N, weight_offset)[None, :]


@triton.jit
def weight_pieces(W, N, weight_offset, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """All pieces of the weight; none if there is none."""
    ws = ()
    if W is not None:
        for i in tl.static_range(PIECES):
            ws = ws + (weight_piece(W, N, weight_offset, i, BLOCK),)
    return ws


@triton.jit
def store_normed(y, Y, row, start, live, N, stride_s, FORMAT: tl.constexpr, KEEP: tl.constexpr):
    """The normalised rows, rounded once: to Y's dtype, or to codes."""
    if FORMAT is None:
        col = start + tl.arange(0, y.shape[1])[None, :]
        tl.store(Y.codes + row * N + col, y.to(Y.codes.dtype.element_ty), live & (col < N))
    else:
        # Codes written once and not read back should not push x out of the L2, where the column-wise launch looks for it
        EVICT: tl.constexpr = "evict_first" if KEEP else ""
        store_rows(y, Y, row, start, live, N, stride_s, FORMAT, EVICT)
