"""Blocks of 128 rows, which begin anew where a group of rows does, and the 128x128 tiles of a matrix."""

import triton
import triton.language as tl


@triton.jit
def find_block(block, OFFSETS, E, M, BLOCK_E: tl.constexpr):
    """(group, first row, rows from there to the group's end) of a 128-row block; no rows when there is no such block.

    OFFSETS are device data: clamped to [0, M], so that whatever they hold no row outside the tensor is touched.
    """
    e = tl.arange(0, BLOCK_E)
    ends = tl.minimum(tl.maximum(tl.load(OFFSETS + e, e < E, 0).to(tl.int64), 0), M)
    starts = tl.minimum(tl.maximum(tl.load(OFFSETS + e - 1, (e > 0) & (e < E), 0).to(tl.int64), 0), M)
    count = tl.maximum(ends - starts, 0)
    blocks = (count + 127) // 128
    last = tl.cumsum(blocks, 0)
    here = (last > block) & (last - blocks <= block)
    group = tl.sum(tl.where(here, e, 0), 0)
    first = tl.sum(tl.where(here, (block - last + blocks) * 128, 0), 0)
    start = tl.sum(tl.where(here, starts, 0), 0)
    rows = tl.sum(tl.where(here, count, 0), 0)
    return group, start + first, rows - first


@triton.jit
def find_tile(OFFSETS, M, N, E, BLOCK_E: tl.constexpr):
    """(block, group, first row, rows left, first column) of this program's tile; columns vary fastest."""
    tiles = tl.maximum(tl.cdiv(N, 128), 1)
    block = tl.program_id(0) // tiles
    col0 = tl.program_id(0) % tiles * 128
    if OFFSETS is None:
        group = block * 0
        row0 = block.to(tl.int64) * 128
        rows_left = M - row0
    else:
        group, row0, rows_left = find_block(block, OFFSETS, E, M, BLOCK_E)
    return block, group, row0, rows_left, col0
