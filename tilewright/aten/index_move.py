"""What indices name, and elements moved by them, from a tensor or into it: what the index engine's operators stand on.

An operator over indices is loops over the shape of what is taken or put. Each of up to three index tensors names a coordinate of
one dimension, and the other dimensions go along. An index outside its range poisons its own element (NaN, or the lowest integer) or
writes nothing, and no memory is touched for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_indices
from ..core.memory import overlapping, self_overlapping
from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import layout, plans, pointwise
from .layout import Ints
from .pointwise import WORDS, stored, tile_at, tile_of, whole_words
from .row import Declined, taken
from .select import nonzero

LOOPS, MOST = 4, 3  # loops of a launch, and index tensors
INDICES = (torch.int64, torch.int32)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def known_index(I, at, inside, n, WRAP: tl.constexpr):
    """(whether an index is one of n, the index or else 0). WRAP: negative ones count from the end."""
    i = tl.load(I + at, inside, 0).to(tl.int64)
    if WRAP:
        i = tl.where(i < 0, i + n, i)
    ok = (i >= 0) & (i < n)
    return ok, tl.where(ok, i, 0)


@triton.jit
def index_tile(I, outer, row, col, inside_r, inside_c, stride_r, stride_c, n, SAME: tl.constexpr, WRAP: tl.constexpr):
    """Indices of a tile: one for all columns if SAME."""
    if SAME:
        return known_index(I, outer + row[:, None] * stride_r, inside_r[:, None], n, WRAP)
    else:
        at = outer + row[:, None] * stride_r + col[None, :] * stride_c
        return known_index(I, at, inside_r[:, None] & inside_c[None, :], n, WRAP)


@triton.jit
def poison(P):
    """What stands for an element that is not there: no index is the lowest integer, so it goes on being poison."""
    if P.dtype.element_ty.is_floating():
        lowest: tl.constexpr = float("nan")
    elif P.dtype.element_ty == tl.int64:
        lowest: tl.constexpr = -0x8000000000000000
    elif P.dtype.element_ty == tl.int32:
        lowest: tl.constexpr = -0x80000000
    elif P.dtype.element_ty == tl.int16:
        lowest: tl.constexpr = -0x8000
    elif P.dtype.element_ty == tl.int8:
        lowest: tl.constexpr = -0x80
    else:
        lowest: tl.constexpr = 0
    # No constant: newer versions of Triton compare those that a function returns, and a NaN is not even itself
    return tl.full((), lowest, P.dtype.element_ty)


MOVED = (
    *(f"N{i}" for i in range(LOOPS)), *(f"{t}{i}" for t in "vxijk" for i in range(LOOPS)),
    *(f"{t}{i}" for t in ("dim", "step") for i in range(MOST)),
)  # fmt: skip


@kernel(
    grid=lambda a: (cdiv(a.N0, a.COLUMNS) * cdiv(a.N1, a.ROWS) * a.N2 * a.N3,), tokens=MOVED,
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def move_by_index(
    V, X, I, J, K, N0, N1, N2, N3, v0, v1, v2, v3, x0, x1, x2, x3, i0, i1, i2, i3, j0, j1, j2, j3, k0, k1, k2, k3,
    dim0, dim1, dim2, step0, step1, step2, PUT: tl.constexpr, WRAP: tl.constexpr, UNITS: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Loops N0, the innermost, to N3, over V with strides v. Each element is X's, whose strides are x, and 0 where indices I, J, K
    say which of dim it is, a step apart. PUT stores V there. UNITS: bits for V and X, if columns lie side by side; SAME: bits for
    indices that are one for all columns; EVEN: rows are whole words, and begin at them."""
    N0 = whole_words(N0, EVEN)
    row, col, outer = tile_at(N0, N1, ROWS, COLUMNS, True)
    c2, c3 = (outer % N2).to(tl.int64), (outer // N2).to(tl.int64)
    r = row < N1
    c = col < N0
    inside = r[:, None] & c[None, :]
    ok, i = index_tile(I, c2 * i2 + c3 * i3, row, col, r, c, i1, i0, dim0, (SAME & 1) > 0, WRAP)
    at = i * whole_words(step0, EVEN)
    if J is not None:
        ok_j, j = index_tile(J, c2 * j2 + c3 * j3, row, col, r, c, j1, j0, dim1, (SAME & 2) > 0, WRAP)
        ok = ok & ok_j
        at += j * whole_words(step1, EVEN)
    if K is not None:
        ok_k, k = index_tile(K, c2 * k2 + c3 * k3, row, col, r, c, k1, k0, dim2, (SAME & 4) > 0, WRAP)
        ok = ok & ok_k
        at += k * whole_words(step2, EVEN)
    at = at + whole_words(c2 * x2 + c3 * x3, EVEN) + row[:, None] * whole_words(x1, EVEN)
    at = at + (col[None, :] if (UNITS & 2) > 0 else col[None, :] * x0)
    there = whole_words(c2 * v2 + c3 * v3, EVEN) + row[:, None] * whole_words(v1, EVEN)
    there = there + (col[None, :] if (UNITS & 1) > 0 else col[None, :] * v0)
    if PUT:
        value = tl.load(V + there, inside & ok, 0)
        if V.dtype.element_ty == tl.int1:
            value = value.to(tl.int32)
        tl.store(X + at, stored(value, X), inside & ok)
    else:
        value = tl.load(X + at, inside & ok, 0)
        if V.dtype.element_ty == tl.int1:
            value = value.to(tl.int32)
        tl.store(V + there, stored(tl.where(ok, value, poison(V)), V), inside)


# ---- host ------------------------------------------------------------------------------------------------------------


def check_index(index: Tensor, dtypes: tuple[torch.dtype, ...] = INDICES) -> None:
    if index.dtype not in dtypes:
        raise Declined("indices of another dtype")


def check_written(x: Tensor, *read: Tensor) -> None:
    """Leave to aten memory that is written twice, or read and written."""
    if self_overlapping(x):
        raise Declined("a result that overlaps itself")
    if any(overlapping(x, t) for t in read):
        raise Declined("a result that overlaps an operand", lasting=False)


def dim_of(dim: int, rank: int) -> int:
    width = max(rank, 1)
    if not -width <= dim < width:
        raise Declined("a dimension that is not there")
    return dim % width


def without(strides: Ints, dim: int) -> Ints:
    return (*strides[:dim], 0, *strides[dim + 1 :])


class Named(NamedTuple):
    """An index tensor, seen with the shape of what is moved: its strides there, and the dimension that it names a coordinate of."""

    tensor: Tensor
    strides: Ints
    size: int
    step: int


def look_at_index(index: Tensor, size: int, wrap: bool) -> None:
    """Check indices of a dimension of this size, if that was asked for; with `wrap`, negative ones count from its end."""
    plans.look_at(index, lambda: check_indices("aten", "index", index, -size if wrap else 0, size))


def move(
    shape: Ints, v: Tensor, v_strides: Ints, x: Tensor, x_strides: Ints, named: Sequence[Named], put: bool, wrap: bool
) -> None:
    """Take `v`, of this shape, from `x` or put it there; `x_strides` are 0 where indices name the coordinate."""
    if not math.prod(shape):
        return
    if len(named) > MOST:
        raise Declined("more indices than a launch takes")
    for one in named:
        look_at_index(one.tensor, one.size, wrap)
    sizes, strides = layout.loops(shape, [v_strides, x_strides, *[one.strides for one in named]])
    if len(sizes) > LOOPS:
        raise Declined("more loops than a launch takes")
    missing = LOOPS - len(sizes)
    inner = [*sizes, *[1] * missing]
    steps = [[*own, *[0] * missing] for own in strides]
    small = math.prod(shape) < pointwise.SMALL
    units = same = 0
    even = False
    if not small:
        units = sum(1 << i for i in range(2) if steps[i][0] == 1)
        same = sum(1 << i for i, own in enumerate(steps[2:]) if own[0] == 0)
        words = [*steps[0][1:], *steps[1][1:], *[one.step for one in named], inner[0]]
        even = units == 3 and same == (1 << len(named)) - 1 and not any(n % WORDS for n in words)
    rows, columns = (32, 32) if small else tile_of(inner[0])
    absent = MOST - len(named)
    tensors = v, x, *[one.tensor for one in named], *[None] * absent
    numbers = [*inner, *[s for own in steps for s in own], *[0] * (LOOPS * absent)]
    numbers += [*[one.size for one in named], *[1] * absent, *[one.step for one in named], *[0] * absent]
    plans.launch(
        move_by_index, tensors, numbers, PUT=put, WRAP=wrap, UNITS=units, SAME=same, EVEN=even, ROWS=rows, COLUMNS=columns
    )  # fmt: skip


class Advanced(NamedTuple):
    """A tensor with several dimensions indexed: the shape of what that gives, the tensor's strides in it, 0 where indices name the
    coordinate, and these; and which dimensions are kept, in the order of the shape, from `at` on the indices'."""

    shape: Ints
    strides: Ints
    named: list[Named]
    kept: list[int]
    dims: list[int]
    at: int
    common: Ints


def indexed(self: Tensor, indices: Sequence[Tensor | None]) -> Advanced:
    """`self[indices]`. Masks are as many indices as they have dimensions."""
    whole: list[Tensor | None] = []
    for index in indices:
        if index is None:
            whole.append(None)
        elif index.dtype == torch.uint8:
            raise Declined("a mask of bytes, which aten warns of or refuses")
        elif index.dtype == torch.bool:
            taken(self, index)
            first = len(whole)
            if tuple(index.shape) != tuple(self.shape[first : first + index.dim()]) or not index.dim():
                raise Declined("a mask of another shape")
            whole += nonzero(index).unbind(1)
        else:
            taken(self, index)
            check_index(index)
            whole.append(index)
    if len(whole) > self.dim():
        raise Declined("more indices than dimensions")
    whole += [None] * (self.dim() - len(whole))
    dims = [d for d, index in enumerate(whole) if index is not None]
    common = layout.broadcast([whole[d].shape for d in dims])
    if not dims or common is None:
        raise Declined("no indices, or some that do not broadcast")
    kept = [d for d in range(self.dim()) if whole[d] is None]
    beside = dims == list(range(dims[0], dims[-1] + 1))
    at = dims[0] if beside else 0  # indices that are not side by side come first
    shape = (*[self.shape[d] for d in kept[:at]], *common, *[self.shape[d] for d in kept[at:]])
    if any(self.shape[d] == 0 for d in dims) and math.prod(shape):
        raise Declined("nothing to index")
    none = (0,) * len(common)
    strides = (*[self.stride(d) for d in kept[:at]], *none, *[self.stride(d) for d in kept[at:]])
    before, after = (0,) * at, (0,) * (len(kept) - at)
    named = [
        Named(whole[d], (*before, *layout.expanded(whole[d], common), *after), self.shape[d], self.stride(d))
        for d in dims
    ]
    return Advanced(shape, strides, named, kept, dims, at, common)
