"""Matrices as kernels take them: one argument for a pointer and the strides that go with it.

Triton specialises integers that lie in tuples, whatever a kernel says of the tuple. Those that must not be, such as the strides
of scales, which follow the number of tokens, are arguments of their own; a kernel makes `Strides` of them for its functions.
"""

from typing import Any, NamedTuple


class Matrix(NamedTuple):
    """A pointer, and how far apart rows and columns are; `Matrix()` is none."""

    data: Any = None
    stride_r: Any = None
    stride_c: Any = None


class Matrices(NamedTuple):
    """A matrix for each expert: a pointer, and how far apart matrices, rows and columns are; `Matrices()` are none."""

    data: Any = None
    stride_e: Any = None
    stride_r: Any = None
    stride_c: Any = None


class Strides(NamedTuple):
    """How far apart the scales, or zero points, of rows and of blocks of the inner dimension are."""

    r: Any = None
    k: Any = None


class Factor(NamedTuple):
    """An operand [rows, inner] of a product: a pointer to its codes, or numbers, with their strides; and pointers, None for what
    there is not, to the scales and zero points of blocks and to the scale of the whole."""

    codes: Any
    stride_r: Any
    stride_k: Any
    scale: Any = None
    zero: Any = None
    shared: Any = None


class Added(NamedTuple):
    """What a product adds to its sums: a number for each column, None for none, and beta times a matrix."""

    bias: Any
    c: Matrix
    beta: Any
