"""Tiles of groups of columns: [groups, BLOCK / RUN, RUN], of any rows of a tensor [outer, inner, hidden].

A group that a power of two would pad much is a tuple of such tiles, PIECES of them, side by side.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """Rows of groups of columns, [outer, inner, hidden] in any order: a pointer and three strides; `Rows()` are none."""

    data: Any = None
    stride_o: Any = None
    stride_i: Any = None
    stride_n: Any = None


class Columns(NamedTuple):
    """How tiles hold the columns of a group: BLOCK of them, in runs of RUN (`columns`), in each of PIECES tiles."""

    BLOCK: int
    RUN: int
    PIECES: int


@triton.jit
def columns(start, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """The columns of a tile [groups, BLOCK / RUN, RUN]. One load of a warp covers RUN, and the compiler gives warps to the first
    dimension before the second: a group is, if it can be, one warp's, and its sum needs no barrier."""
    return start + tl.arange(0, BLOCK // RUN)[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]


@triton.jit
def row_offsets(X, row, INNER):
    """Where rows [n] of X begin, 64-bit, [n, 1, 1]."""
    o = row // INNER
    return (o.to(tl.int64) * X.stride_o + (row - o * INNER).to(tl.int64) * X.stride_i)[:, None, None]


@triton.jit
def load_tile(X, row, INNER, col, inside):
    """Columns `col` of rows of X, in fp32."""
    return tl.load(X.data + row_offsets(X, row, INNER) + col.to(tl.int64) * X.stride_n, inside, 0.0).to(tl.float32)


@triton.jit
def inside_piece(c, D, live, i: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements of the i-th piece there are: [groups, BLOCK / RUN, RUN]. Only the last may be short."""
    if i == COLUMNS.PIECES - 1:
        return live[:, None, None] & (c + i * COLUMNS.BLOCK < D)
    else:
        return tl.broadcast_to(live[:, None, None], [live.shape[0], c.shape[1], c.shape[2]])


@triton.jit
def load_pieces(X, row, INNER, col, c, D, live, COLUMNS: tl.constexpr):
    """The columns of groups whose first piece is at columns `col` of rows of X: PIECES tiles in fp32."""
    PIECES: tl.constexpr = COLUMNS.PIECES
    out = ()
    first = X.data + row_offsets(X, row, INNER) + col.to(tl.int64) * X.stride_n
    for i in tl.static_range(PIECES):
        inside = inside_piece(c, D, live, i, COLUMNS)
        further = tl.full([], i * COLUMNS.BLOCK, tl.int64) * X.stride_n
        out = out + (tl.load(first + further, inside, 0.0).to(tl.float32),)
    return out


@triton.jit
def load_weight(W, c, col, inside, SHARED: tl.constexpr):
    """The weight of a whole tile: one row of it would be laid out otherwise, and cost a barrier to spread."""
    return tl.load(W + tl.broadcast_to(c if SHARED else col, inside.shape), inside, 0.0).to(tl.float32)


@triton.jit
def load_weight_pieces(W, c, col, D, live, SHARED: tl.constexpr, COLUMNS: tl.constexpr):
    """The weight of groups in pieces."""
    PIECES: tl.constexpr = COLUMNS.PIECES
    out = ()
    for i in tl.static_range(PIECES):
        inside = inside_piece(c, D, live, i, COLUMNS)
        out = out + (load_weight(W + i * COLUMNS.BLOCK, c, col, inside, SHARED),)
    return out


@triton.jit
def zero_pieces(GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    BLOCK: tl.constexpr = COLUMNS.BLOCK
    RUN: tl.constexpr = COLUMNS.RUN
    PIECES: tl.constexpr = COLUMNS.PIECES
    out = ()
    for _ in tl.static_range(PIECES):
        out = out + (tl.zeros([GROUPS, BLOCK // RUN, RUN], tl.float32),)
    return out


@triton.jit
def dot_pieces(a, b, PIECES: tl.constexpr):
    """The sum over all columns of each group of a * b: [n]."""
    total = a[0] * b[0]
    for i in tl.static_range(1, PIECES):
        total += a[i] * b[i]
    return sum_group(total)


@triton.jit
def sum_group(t):
    """The sum over the columns of each group: [n]."""
    return tl.sum(tl.sum(t, axis=2), axis=1)
