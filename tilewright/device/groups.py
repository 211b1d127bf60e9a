"""Tiles of groups of columns: [groups, BLOCK / RUN, RUN], of any rows of a tensor [outer, inner, hidden]."""

import triton
import triton.language as tl


@triton.jit
def columns(start, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """The columns of a tile [groups, BLOCK / RUN, RUN]. One load of a warp covers RUN, and the compiler gives warps to the first
    dimension before the second: a group is, if it can be, one warp's, and its sum needs no barrier."""
    return start + tl.arange(0, BLOCK // RUN)[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]


@triton.jit
def row_offsets(row, INNER, stride_o, stride_i):
    """Where rows [n] of a tensor [outer, inner, hidden] begin, 64-bit, [n, 1, 1]."""
    o = row // INNER
    return (o.to(tl.int64) * stride_o + (row - o * INNER).to(tl.int64) * stride_i)[:, None, None]


@triton.jit
def load_tile(P, start, col, inside, stride):
    """Columns of rows that begin at `start`, in fp32."""
    return tl.load(P + start + col.to(tl.int64) * stride, inside, 0.0).to(tl.float32)


@triton.jit
def load_weight(W, c, col, inside, SHARED: tl.constexpr):
    """The weight of a whole tile: one row of it would be laid out otherwise, and cost a barrier to spread."""
    return tl.load(W + tl.broadcast_to(c if SHARED else col, inside.shape), inside, 0.0).to(tl.float32)


@triton.jit
def sum_group(t):
    """The sum over the columns of each group: [n]."""
    return tl.sum(tl.sum(t, axis=2), axis=1)
