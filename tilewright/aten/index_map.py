"""The index-map engine: each element of a result from its coordinates.

A result has no gaps, and is seen in at most four loops in the order of its memory. `patch` puts a source into a box of it, with a
step, and a number or another tensor elsewhere: padding, slices that are scattered, and dimensions that are flipped. `band` keeps
what lies on one side of a diagonal, or on it: triangles, diagonals that are embedded. `ramp` counts. What is a copy of views (cat,
repeat) is one; of rows that are short or repeated, one of `copies.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..core.target import INTERPRETING
from ..core.tensor import cdiv, power_of_two
from ..runtime.kernel import Kernel, kernel
from . import copies, forms, plans, pointwise
from .copies import quotient
from .layout import is_dense, lies
from .plans import bits_of, cast_bits, own
from .pointwise import IN_TRITON, SMALL, SMALL_TILE, WORDS, number, over, stored, tile_at, tile_of, whole_words
from .row import TAKEN, Declined, compute_dtype, of_numbers, taken

LOOPS = 4
BLOCK = 1024
FLAT = 2048  # elements of a program that goes by how they lie
SHORTEST = 32  # row of which such a program asks
MOST_SOURCES = 64  # each is a launch
PATCH = tuple(f"{name}{i}" for name in ("n", "lo", "hi", "by", "x", "y") for i in range(LOOPS))


# ---- kernels ---------------------------------------------------------------------------------------------------------
#
# A program has a tile of rows and columns, the two innermost loops. What is asked of a coordinate is asked once a row or once
# a column, and the outer ones once a program: to ask for each element takes a hundred instructions and more.
#
# NEAR says what is known of elements along a row: ANY; EACH, that no step leaves some out; SIDE_BY_SIDE, that those of all operands
# also lie one after the other; IN_WORDS, that all rows are whole words as well and begin at one.

ANY, EACH, SIDE_BY_SIDE, IN_WORDS = range(4)


@triton.jit
def far(c, stride):
    return c.to(tl.int64) * stride


@triton.jit
def in_box(c, lo, hi, by):
    """(whether a coordinate is one of lo, lo + by ... before hi, which of them)."""
    which = (c - lo) // by
    return (c >= lo) & (c < hi) & (which * by == c - lo), which


@triton.jit
def columns_in_box(c, lo, hi, by, NEAR: tl.constexpr):
    """The same of columns."""
    if NEAR == 0:
        return in_box(c, lo, hi, by)
    else:
        lo = whole_words(lo, NEAR == 3)
        return (c >= lo) & (c < whole_words(hi, NEAR == 3)), c - lo


@triton.jit
def chosen(ok, value, other):
    if value.dtype == tl.int1:
        return tl.where(ok, value.to(tl.int32), other.to(tl.int32)) != 0
    else:
        return tl.where(ok, value, other)


@kernel(
    grid=lambda a: (cdiv(a.n0, a.COLUMNS) * cdiv(a.n1, a.ROWS) * a.n2 * a.n3,), tokens=("start", "S0", *PATCH),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def patch(
    OUT, X, Y, start, n0, n1, n2, n3, lo0, lo1, lo2, lo3, hi0, hi1, hi2, hi3, by0, by1, by2, by3, x0, x1, x2, x3, y0, y1, y2, y3,
    S0: tl.int64, COMPUTE: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """X, from its element `start` with strides x, in the box of each loop; elsewhere Y, of strides y, or the number S0. Loop 0 is
    the innermost."""
    WORDS: tl.constexpr = NEAR == 3
    c1, c0, outer = tile_at(n0, n1, ROWS, COLUMNS, False)
    c2, c3 = outer % n2, outer // n2
    ok0, at0 = columns_in_box(c0, lo0, hi0, by0, NEAR)
    ok1, at1 = in_box(c1, lo1, hi1, by1)
    ok2, at2 = in_box(c2, lo2, hi2, by2)
    ok3, at3 = in_box(c3, lo3, hi3, by3)
    width = whole_words(n0, WORDS)
    inside = (c1 < n1)[:, None] & (c0 < width)[None, :]
    ok = inside & (ok1 & ok2 & ok3)[:, None] & ok0[None, :]
    x = X + whole_words(start + far(at2, x2) + far(at3, x3), WORDS)
    x += whole_words(far(at1, x1), WORDS)[:, None] + (at0 if NEAR >= 2 else far(at0, x0))[None, :]
    value = tl.load(x, ok, 0)
    if Y is None:
        other = tl.broadcast_to(stored(number(S0, COMPUTE), OUT), [ROWS, COLUMNS])
    else:
        y = Y + whole_words(far(c2, y2) + far(c3, y3), WORDS)
        y += whole_words(far(c1, y1), WORDS)[:, None] + (c0 if NEAR >= 2 else far(c0, y0))[None, :]
        other = tl.load(y, inside & ~ok, 0)
    row = far(outer, n1) + c1
    tl.store(OUT + (row * width)[:, None] + c0[None, :], chosen(ok, value, other), inside)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "inverse", "start", "S0", *PATCH), default=lambda a: {"num_warps": 4}
)  # fmt: skip
def patch_odd(
    OUT, X, Y, N, inverse, start, n0, n1, n2, n3, lo0, lo1, lo2, lo3, hi0, hi1, hi2, hi3, by0, by1, by2, by3, x0, x1, x2, x3, y0,
    y1, y2, y3, S0: tl.int64, COMPUTE: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`patch` of rows that are no whole words. A program has BLOCK of the N elements as they lie, over the ends of rows, and writes
    words: rows by tiles would be written in parts of sectors. What is asked of its ROWS rows is looked up by their elements."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    row, low = over(first, n0, N)
    row, low = row.to(tl.int32), low.to(tl.int32)
    # As in `copies.move_rows`: a row that is longer than a block ends once in it at most
    step = tl.minimum(n0, BLOCK)
    down = quotient(i, step - tl.minimum(n0 - low, step), inverse).to(tl.int32)
    c0 = low + i - down * n0
    line = row + tl.arange(0, ROWS)
    outer = line // n1
    c1, c2, c3 = line - outer * n1, outer % n2, outer // n2
    ok1, at1 = in_box(c1, lo1, hi1, by1)
    ok2, at2 = in_box(c2, lo2, hi2, by2)
    ok3, at3 = in_box(c3, lo3, hi3, by3)
    begin = tl.where(ok1 & ok2 & ok3, start + far(at1, x1) + far(at2, x2) + far(at3, x3), -1)
    there = tl.gather(begin, down, 0)
    ok0, at0 = columns_in_box(c0, lo0, hi0, by0, NEAR)
    inside = i < tl.minimum(N - first, BLOCK).to(tl.int32)
    ok = inside & ok0 & (there >= 0)
    value = tl.load(X + there + (at0 if NEAR >= 2 else far(at0, x0)), ok, 0)
    if Y is None:
        other = tl.broadcast_to(stored(number(S0, COMPUTE), OUT), [BLOCK])
    else:
        y = Y + tl.gather(far(c1, y1) + far(c2, y2) + far(c3, y3), down, 0)
        other = tl.load(y + (c0 if NEAR >= 2 else far(c0, y0)), inside & ~ok, 0)
    value = chosen(ok, value, other)
    if first + BLOCK <= N:  # without a mask, in words
        tl.store(OUT + first + i, value)
    else:
        tl.store(OUT + first + i, value, inside)


@kernel(
    grid=lambda a: (cdiv(a.COLS, a.COLUMNS) * cdiv(a.LINES, a.ROWS) * a.MATRICES,),
    tokens=("MATRICES", "LINES", "COLS", "diagonal", "outer", "row", "col"), default=lambda a: {"num_warps": 4},
)  # fmt: skip
def band(
    OUT, X, MATRICES, LINES, COLS, diagonal, outer, row, col, KEEP: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Matrices of LINES x COLS: X where column - line is at least `diagonal` (KEEP "above"), or is it ("on"); 0 elsewhere. X has a
    stride for matrices, lines and columns; on the diagonal, for its elements alone."""
    WORDS: tl.constexpr = NEAR == 3
    r, c, m = tile_at(COLS, LINES, ROWS, COLUMNS, False)
    width = whole_words(COLS, WORDS)
    inside = (r < LINES)[:, None] & (c < width)[None, :]
    x = X + whole_words(far(m, outer), WORDS)
    if KEEP == "above":
        ok = inside & (c[None, :] - r[:, None] >= diagonal)
        x += whole_words(far(r, row), WORDS)[:, None] + (c if NEAR >= 2 else far(c, col))[None, :]
    else:
        ok = inside & (c[None, :] - r[:, None] == diagonal)
        x += far(tl.minimum(r[:, None], c[None, :]), col)
    value = tl.load(x, ok, 0)
    if OUT.dtype.element_ty == tl.int1:
        value = value.to(tl.int32)
    line = far(m, LINES) + r
    tl.store(OUT + (line * width)[:, None] + c[None, :], stored(value, OUT), inside)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "S0", "S1"), default=lambda a: {"num_warps": 4})
def ramp(OUT, N, S0: tl.int64, S1: tl.int64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """S0, S0 + S1, S0 + 2 S1 ..."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = number(S0, COMPUTE) + i.to(COMPUTE) * number(S1, COMPUTE)
    tl.store(OUT + i, stored(value, OUT), i < N)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "S0", "S1", "S2", "S3"), default=lambda a: {"num_warps": 4})
def ramp_between(
    OUT, N, S0: tl.int64, S1: tl.int64, S2: tl.int64, S3: tl.int64, COMPUTE: tl.constexpr, POWERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """N numbers from S0 to S1, S2 apart: as torch has them, the first half counted from S0 and the others back from S1, so that
    both ends are what they are. POWERS: S3 to the power of these. Integers are what is left without a fraction."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = i < N // 2
    steps = tl.where(first, i, i - (N - 1)).to(COMPUTE)
    value = tl.where(first, number(S0, COMPUTE), number(S1, COMPUTE)) + steps * number(S2, COMPUTE)
    if POWERS:
        value = libdevice.pow(number(S3, COMPUTE) + value * 0.0, value)
    if OUT.dtype.element_ty.is_int():
        # As torch's are cut: of an end that fp32 has no number for, the nearest one may be too large for the dtype
        value = value.to(tl.int64 if OUT.dtype.element_ty == tl.int64 else tl.int32)
    tl.store(OUT + i, stored(value, OUT), i < N)


# ---- host ------------------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """Coordinates lo, lo + by ... before hi of one dimension."""

    lo: int
    hi: int
    by: int = 1


def put(
    out: Tensor, x: Tensor, boxes: Sequence[Box], other: Tensor | None = None, value: Any = 0, start: int = 0,
    strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Fill `out`, which has no gaps, with `x` in the box of each dimension, and with `other` or `value` elsewhere. `x` is read from
    its element `start` on, by these strides if they are not its own."""
    compute = compute_dtype(out.dtype)
    bits = cast_bits(value, out.dtype)
    if not out.numel():
        return out
    steps = x.stride() if strides is None else strides
    others = [0] * out.dim() if other is None else other.stride()
    # The innermost first: elements are counted as they lie
    dims = sorted(
        (d for d in range(out.dim()) if out.shape[d] != 1 or boxes[d] != (0, 1, 1)), key=lambda d: (out.stride(d), -d)
    )
    loops = joined([Loop(out.shape[d], *boxes[d], steps[d], others[d]) for d in dims])
    inner, outer = [*loops[:LOOPS], *[Loop(1)] * (LOOPS - len(loops))], loops[LOOPS:]
    parts = math.prod(one.n for one in outer)  # of the result, which lie one after the other
    if parts > pointwise.MOST_LAUNCHES or (outer and other is not None):
        raise Declined("more loops than a launch takes")
    size, first = out.numel() // parts, out.storage_offset()
    for at, index in enumerate(itertools.product(*[range(one.n) for one in reversed(outer)])):
        here = out.as_strided((size,), (1,), first + at * size) if outer else out
        launch_patch(here, x, other, *at_index(inner, outer, index[::-1], start), bits, compute)
    return out


def at_index(inner: list[Loop], outer: list[Loop], index: Sequence[int], start: int) -> tuple[list[Loop], int]:
    """(the inner loops, where in the first operand they begin) at an index of the outer ones. Outside of one of their boxes, a box
    of the inner ones is empty."""
    for one, i in zip(outer, index):
        which, rest = divmod(i - one.lo, one.by)
        if rest or not one.lo <= i < one.hi:
            return [inner[0]._replace(lo=0, hi=0), *inner[1:]], start
        start += which * one.x
    return inner, start


def launch_patch(
    out: Tensor, x: Tensor, other: Tensor | None, loops: list[Loop], start: int, bits: int, compute: torch.dtype
) -> None:
    small, width = out.numel() < SMALL, loops[0].n
    near = ANY if small else nearness(loops, start, other is not None)
    numbers = start, *(n for own in zip(*loops) for n in own)
    how = {"COMPUTE": IN_TRITON[compute], "NEAR": near}
    if not small and width % WORDS and SHORTEST <= width <= copies.LONGEST:
        rows = power_of_two(FLAT // width + 2)
        numbers = out.numel(), copies.inverse_of(min(width, FLAT)), *numbers
        plans.launch(patch_odd, (out, x, other), numbers, (bits,), **how, ROWS=rows, BLOCK=FLAT)
        return
    rows, columns = SMALL_TILE if small else large_tile(width)
    plans.launch(patch, (out, x, other), numbers, (bits,), **how, ROWS=rows, COLUMNS=columns)


class Loop(NamedTuple):
    """A loop over n elements of a result, its box, and the steps of both operands."""

    n: int
    lo: int = 0
    hi: int = 1
    by: int = 1
    x: int = 0
    y: int = 0

    @property
    def whole(self) -> bool:
        return (self.lo, self.hi, self.by) == (0, self.n, 1)


def joined(loops: list[Loop]) -> list[Loop]:
    """Fewer loops, the innermost first, of which two that are whole are one where all steps go on."""
    made: list[Loop] = []
    for one in loops:
        last = made[-1] if made else None
        if last and last.whole and one.whole and one.x == last.x * last.n and one.y == last.y * last.n:
            made[-1] = Loop(last.n * one.n, 0, last.n * one.n, 1, last.x, last.y)
        else:
            made.append(one)
    return made


def large_tile(columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of 4096 elements: where a program is takes as many instructions as 20 of them."""
    rows, wide = tile_of(columns)
    return 4 * rows, wide


def nearness(loops: list[Loop], start: int, both: bool) -> int:
    """What is known of elements along a row; see the kernels."""
    inner, outer = loops[0], loops[1:]
    if inner.by != 1:
        return ANY
    if inner.x != 1 or (both and inner.y != 1):
        return EACH
    numbers = start, inner.n, inner.lo, inner.hi, *(n for one in outer for n in (one.x, one.y))
    return SIDE_BY_SIDE if any(n % WORDS for n in numbers) else IN_WORDS


@of_numbers("value")
def constant_pad_nd(self: Tensor, pad: list[int], value: Any = 0) -> Tensor:
    taken(self)
    before, after = [0] * self.dim(), [0] * self.dim()
    if len(pad) % 2 or len(pad) > 2 * self.dim():
        raise Declined("a pad that is refused")
    for i in range(len(pad) // 2):
        before[-1 - i], after[-1 - i] = pad[2 * i], pad[2 * i + 1]
    shape = [n + b + a for n, b, a in zip(self.shape, before, after)]
    cut = any(n + b < 0 or n + a < 0 for n, b, a in zip(self.shape, before, after))  # more of one side than there is
    if cut or any(n < 0 for n in shape) or (0 in self.shape) or isinstance(value, complex):
        raise Declined("a size that is refused, or nothing to pad")
    # A side that is cut off rather than padded begins further on
    x = self
    for d, b in enumerate(before):
        x = x.narrow(d, -b, x.shape[d] + b) if b < 0 else x
    boxes = [Box(max(0, b), min(n, max(0, b) + size)) for b, n, size in zip(before, shape, x.shape)]
    if all(n <= 0 for n in pad):  # torch clones what is left, which keeps its strides
        for d, a in enumerate(after):
            x = x.narrow(d, 0, x.shape[d] + a)
        out = torch.empty_like(x)
    else:
        out = torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=lies(self))
    # A view of nothing has no address, by which a plan would find it again
    return put(own(out), x if x.numel() else self, boxes, value=value)


def slice_scatter(self: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    taken(self, src)
    if not -self.dim() <= dim < self.dim() or step < 1 or self.dtype != src.dtype:
        raise Declined("a dimension, step or dtype that is refused")
    d = dim % self.dim()
    if self[(slice(None),) * d + (slice(start, end, step),)].shape != src.shape:
        raise Declined("a source of another shape")
    first = slice(start, end, step).indices(self.shape[d])[0]
    boxes = [Box(0, n) for n in self.shape]
    boxes[d] = Box(first, first + (src.shape[d] - 1) * step + 1 if src.shape[d] else first, step)
    return put(scattered(self), src, boxes, self)


def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    taken(self, src)
    if not -self.dim() <= dim < self.dim() or self.dtype != src.dtype:
        raise Declined("a dimension or dtype that is refused")
    d = dim % self.dim()
    if not -self.shape[d] <= index < self.shape[d] or self.select(d, index).shape != src.shape:
        raise Declined("an index that is not there, or a source of another shape")
    return slice_scatter(self, src.unsqueeze(d), d, index % self.shape[d], index % self.shape[d] + 1, 1)


def scattered(self: Tensor) -> Tensor:
    """Memory for the result: torch clones self with its strides, and its storage with it; or, where it overlaps, its elements."""
    if any(s == 0 and n > 1 for s, n in zip(self.stride(), self.shape)):
        return own(torch.empty_like(self))
    if not is_dense(self):
        raise Declined("a result with gaps")
    return own(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device))


def matrices(t: Tensor, rank: int) -> Tensor | None:
    """A tensor with its leading dimensions seen as one, so that there are `rank`; None where they cannot be."""
    try:
        return t.view(-1, *t.shape[t.dim() - rank + 1 :])
    except RuntimeError:
        return None


def launch_band(out: Tensor, x: Tensor, diagonal: int, strides: tuple[int, int, int], keep: str) -> None:
    lines, columns = out.shape[-2:]
    near, tile = ANY, SMALL_TILE
    if out.numel() >= SMALL:
        tile = large_tile(columns)
        near = (
            EACH if strides[2] != 1 else SIDE_BY_SIDE if any(n % WORDS for n in (columns, *strides[:2])) else IN_WORDS
        )
    sizes = out.numel() // (lines * columns), lines, columns, diagonal, *strides
    plans.launch(band, (out, x), sizes, KEEP=keep, NEAR=near, ROWS=tile[0], COLUMNS=tile[1])


def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    taken(self)
    if self.dim() < 2:
        raise Declined("no matrices")
    out = own(torch.empty(self.shape, dtype=self.dtype, device=self.device))
    if out.numel():
        seen = matrices(self, 3)
        if seen is None:
            raise Declined("leading dimensions that cannot be seen as one")
        launch_band(out, self, diagonal, seen.stride(), "above")
    return out


def on_diagonal(x: Tensor, out: Tensor, offset: int, dim1: int, dim2: int) -> Tensor:
    """Fill `out` with `x` on a diagonal, and with 0 elsewhere: in one pass where that is of the last two dimensions."""
    seen = matrices(x, 2) if dim1 in (-2, out.dim() - 2) and dim2 in (-1, out.dim() - 1) and x.numel() else None
    if seen is not None:
        launch_band(out, x, offset, (seen.stride(0), 0, seen.stride(1)), "on")
        return out
    pointwise.run(forms.FILL, {"value": 0}, out)
    if x.numel():
        pointwise.run(forms.COPY, {"self": x}, out.diagonal(offset, dim1, dim2))
    return out


def refused(dim1: int, dim2: int, rank: int) -> bool:
    return not -rank <= dim1 < rank or not -rank <= dim2 < rank or dim1 % rank == dim2 % rank


def diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    taken(self)
    rank = self.dim() + 1
    if self.dim() < 1 or refused(dim1, dim2, rank):
        raise Declined("dimensions that are refused")
    shape, size = list(self.shape[:-1]), self.shape[-1] + abs(offset)
    for d in sorted((dim1 % rank, dim2 % rank)):
        shape.insert(d, size)
    return on_diagonal(self, own(torch.empty(shape, dtype=self.dtype, device=self.device)), offset, dim1, dim2)


def diagonal_backward(grad_output: Tensor, input_sizes: list[int], offset: int, dim1: int, dim2: int) -> Tensor:
    taken(grad_output)
    if refused(dim1, dim2, len(input_sizes)) or any(n < 0 for n in input_sizes):
        raise Declined("dimensions that are refused")
    out = torch.empty(input_sizes, dtype=grad_output.dtype, device=grad_output.device)
    if grad_output.shape != out.diagonal(offset, dim1, dim2).shape:
        raise Declined("a gradient that is not of the diagonal's shape")
    return on_diagonal(grad_output, own(out), offset, dim1, dim2)


def flip(self: Tensor, dims: list[int]) -> Tensor:
    taken(self)
    rank = self.dim()
    if any(not -rank <= d < rank for d in dims) or len({d % rank for d in dims}) != len(dims):
        raise Declined("dimensions that are refused")
    turned = {d % rank for d in dims}
    # The first element of a turned dimension is its last, and strides go back from there
    strides = [-s if d in turned else s for d, s in enumerate(self.stride())]
    start = sum((self.shape[d] - 1) * self.stride(d) for d in turned)
    return put(own(torch.empty_like(self)), self, [Box(0, n) for n in self.shape], start=start, strides=strides)


def repeat(self: Tensor, repeats: list[int]) -> Tensor:
    taken(self)
    missing = len(repeats) - self.dim()
    if missing < 0 or any(n < 0 for n in repeats):
        raise Declined("repeats that are refused")
    wide = self[(None,) * missing] if missing else self
    out = own(torch.empty([r * n for r, n in zip(repeats, wide.shape)], dtype=self.dtype, device=self.device))
    if out.numel():
        pairs = [n for both in zip(repeats, wide.shape) for n in both]
        strides = [s for own in wide.stride() for s in (0, own)]
        seen, made = wide.as_strided(pairs, strides), out.view(pairs)
        if not copies.repeat_into(made, seen):
            pointwise.run(forms.COPY, {"self": seen}, made)
    return out


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    # torch leaves out vectors of nothing, whatever the rank of the others
    given = [t for t in tensors if not (t.dim() == 1 and t.shape[0] == 0)] or list(tensors)[:1]
    if not given or len(given) > MOST_SOURCES:
        raise Declined("none, or more than are launched for")
    taken(*tensors)
    rank = given[0].dim()
    if not rank or not -rank <= dim < rank or any(t.dim() != rank for t in given):
        raise Declined("a dimension or ranks that are refused")
    d, first = dim % rank, given[0]
    if any(n != m for t in given for i, (n, m) in enumerate(zip(t.shape, first.shape)) if i != d):
        raise Declined("sizes that are refused")
    forms_of = {lies(t) for t in tensors}  # also of those that are left out
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])
    shape = list(first.shape)
    shape[d] = sum(t.shape[d] for t in given)
    form = forms_of.pop() if len(forms_of) == 1 else torch.contiguous_format
    out = own(torch.empty(shape, dtype=dtype, device=first.device, memory_format=form))
    there = [t for t in given if t.numel()]
    found = copies.rows_of(there, form, d) if there and dtype == there[0].dtype else None
    if found is not None:
        copies.join_rows(out, there, *found)
        return out
    at = 0
    for t in there:
        pointwise.run(forms.COPY, {"self": t}, out.narrow(d, at, t.shape[d]))
        at += t.shape[d]
    return out


def like(value: Any) -> Any:
    def make(
        self: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Tensor:  # fmt: skip
        return filled_like(self, value, dtype, layout, device, pin_memory, memory_format)

    return make


@of_numbers("fill_value")
def full_like(
    self: Tensor, fill_value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    return filled_like(self, fill_value, dtype, layout, device, pin_memory, memory_format)


def filled_like(self, value, dtype, layout, device, pin_memory, memory_format) -> Tensor:
    dtype = dtype or self.dtype
    if (
        layout not in (None, torch.strided)
        or pin_memory
        or (device is not None and torch.device(device) != self.device)
    ):
        raise Declined("another layout or device")
    if dtype not in TAKEN or isinstance(value, complex):
        raise Declined(f"a value that is no {str(dtype).removeprefix('torch.')}")
    out = own(torch.empty_like(self, dtype=dtype, memory_format=memory_format or torch.preserve_format))
    return pointwise.run(forms.FILL, {"value": value}, out)


def check_line(out: Tensor, size: int) -> None:
    """Leave to aten a result of so many elements that it refuses, or has to do more for than to resize it."""
    taken(out)
    if out.dtype == torch.bool or out.numel() not in (0, size) or not out.is_contiguous():
        raise Declined("bool, or a result that is resized or strided")


def ramp_into(ramp: Kernel, out: Tensor, size: int, numbers: Sequence[Any], compute: torch.dtype, **how: Any) -> Tensor:
    """Fill `out`, which is resized as aten does, by one of the kernels that count, in this dtype."""
    bits = [bits_of(n, compute) for n in numbers]
    if out.numel() != size:
        plans.only_now()
        out.resize_(size)
    if size:
        plans.launch(ramp, (out,), (size,), bits, COMPUTE=IN_TRITON[compute], **how, BLOCK=BLOCK)
    return out


def arange_out(start: Any, end: Any, step: Any = 1, *, out: Tensor) -> Tensor:
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in (start, end, step)) or not step:
        raise Declined("numbers that are refused")
    if (end - start) * step < 0:
        raise Declined("an end on the other side")
    whole = all(isinstance(v, int) for v in (start, end, step))
    if not out.is_floating_point() and (isinstance(start, float) or isinstance(step, float)):
        raise Declined("fractions of integers")
    size = -((start - end) // step) if whole else math.ceil((end - start) / step)
    check_line(out, size)
    return ramp_into(ramp, out, size, (start, step), torch.float64 if out.is_floating_point() else torch.int64)


def linspace_out(start: Any, end: Any, steps: int, *, out: Tensor) -> Tensor:
    return even_steps(start, end, steps, None, out)


def logspace_out(start: Any, end: Any, steps: int, base: float = 10.0, *, out: Tensor) -> Tensor:
    return even_steps(start, end, steps, base, out)


def even_steps(start: Any, end: Any, steps: int, base: float | None, out: Tensor) -> Tensor:
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in (start, end)) or steps < 0:
        raise Declined("numbers that are refused")
    check_line(out, steps)
    cut = [plans.cast_to(out.dtype)(n) for n in (start, end)]  # which raises where aten refuses
    compute, step = torch.float64, (end - start) / max(1, steps - 1)
    if steps == 1:
        end = start
    elif not out.is_floating_point():
        # What is left without a fraction depends on every bit, and those are aten's: on a GPU of fp32, on a processor of float64
        compute = torch.float64 if INTERPRETING else torch.float32
        start, end = (rounded(n, compute) for n in cut)
        step = rounded(rounded(end - start, compute) / max(1, steps - 1), compute)
    powers = base is not None
    if powers and not out.is_floating_point():
        most = math.log2(torch.iinfo(out.dtype).max)
        if not (base > 0 and max(n * math.log2(base) for n in (start, end)) <= most):
            raise Declined("powers that are no integers of the dtype")
    return ramp_into(ramp_between, out, steps, (start, end, step, base or 0), compute, POWERS=powers)


def rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


def eye_out(n: int, m: int | None = None, *, out: Tensor) -> Tensor:
    m = n if m is None else m
    if n < 0 or m < 0 or out.numel() not in (0, n * m):
        raise Declined("sizes that are refused, or a result that is resized")
    taken(out)
    if out.shape != (n, m):
        plans.only_now()
        out.resize_(n, m)
    pointwise.run(forms.FILL, {"value": 0}, out)
    pointwise.run(forms.FILL, {"value": 1}, out.diagonal())
    return out


FORMS = {
    "arange.start_out": arange_out, "linspace.out": linspace_out, "logspace.out": logspace_out, "eye.out": eye_out,
    "eye.m_out": eye_out,
    "constant_pad_nd": constant_pad_nd, "slice_scatter": slice_scatter, "select_scatter": select_scatter, "triu": triu,
    "diag_embed": diag_embed, "diagonal_backward": diagonal_backward, "flip": flip, "repeat": repeat, "cat": cat,
    "full_like": full_like, "ones_like": like(1), "zeros_like": like(0),
}  # fmt: skip
