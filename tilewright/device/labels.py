"""Rows with two leading dimensions, and the label of each: device data, so that no label may lead outside its row."""

import triton
import triton.language as tl


@triton.jit
def offset_of(row, INNER, stride_outer, stride_inner):
    """Where a row begins; its leading dimensions are two, of which INNER is the size of the second."""
    return (row // INNER).to(tl.int64) * stride_outer + (row % INNER).to(tl.int64) * stride_inner


@triton.jit
def load_if(P, condition):
    """Numbers in fp32, or 0. Not by `other`: the interpreter takes the 0 of a load of one element for none."""
    return tl.where(condition, tl.load(P, condition).to(tl.float32), 0.0)


@triton.jit
def read_label(Y, row, M, INNER, N, stride_yo, stride_yi, ignore_index):
    """(label, whether its row counts, whether it is ignored). A label that does not count becomes 0: it is an index."""
    y = tl.load(Y + offset_of(row, INNER, stride_yo, stride_yi), row < M, -1).to(tl.int64)
    counts = (y >= 0) & (y < N) & (y != ignore_index)
    return tl.where(counts, y, 0), counts, y == ignore_index
