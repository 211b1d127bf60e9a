"""The index-map engine: each element of a result from its coordinates.

A result is contiguous, seen in at most four loops. `patch` puts a source into a box of it, with a step, and a number or another
tensor elsewhere: padding, slices that are scattered, and dimensions that are flipped. `band` keeps what lies on one side of a
diagonal, or on it: triangles, diagonals that are embedded. `ramp` counts. What is a copy of views (cat, repeat) is one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import forms, plans, pointwise
from .plans import bits_of, own
from .pointwise import IN_TRITON, number, stored
from .row import TAKEN, Declined, compute_dtype, of_numbers, taken

LOOPS = 4
BLOCK = 1024
MOST_SOURCES = 64  # each is a launch
PATCH = tuple(f"{name}{i}" for name in ("n", "lo", "hi", "by", "x", "y") for i in range(LOOPS))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def in_box(c, lo, hi, by):
    """(whether a coordinate is one of lo, lo + by ... before hi, which of them)."""
    which = (c - lo) // by
    return (c >= lo) & (c < hi) & (which * by == c - lo), which


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "start", "S0", *PATCH), default=lambda a: {"num_warps": 8})
def patch(
    OUT, X, Y, N, start, n0, n1, n2, n3, lo0, lo1, lo2, lo3, hi0, hi1, hi2, hi3, by0, by1, by2, by3, x0, x1, x2, x3, y0, y1, y2, y3,
    S0: tl.int64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """X, from its element `start` with strides x, in the box of each loop; elsewhere Y, of strides y, or the number S0. Loop 0 is
    the innermost."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    c0 = i % n0
    c1 = i // n0 % n1
    c2 = i // n0 // n1 % n2
    c3 = i // n0 // n1 // n2
    ok0, at0 = in_box(c0, lo0, hi0, by0)
    ok1, at1 = in_box(c1, lo1, hi1, by1)
    ok2, at2 = in_box(c2, lo2, hi2, by2)
    ok3, at3 = in_box(c3, lo3, hi3, by3)
    ok = inside & ok0 & ok1 & ok2 & ok3
    x = tl.load(X + start + at0 * x0 + at1 * x1 + at2 * x2 + at3 * x3, ok, 0)
    if Y is None:
        other = tl.broadcast_to(stored(number(S0, COMPUTE), OUT), [BLOCK])
    else:
        other = tl.load(Y + c0 * y0 + c1 * y1 + c2 * y2 + c3 * y3, inside & ~ok, 0)
    if OUT.dtype.element_ty == tl.int1:
        value = tl.where(ok, x.to(tl.int32), other.to(tl.int32)) != 0
    else:
        value = tl.where(ok, x, other)
    tl.store(OUT + i, value, inside)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "ROWS", "COLUMNS", "diagonal", "outer", "row", "col"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def band(OUT, X, N, ROWS, COLUMNS, diagonal, outer, row, col, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """Matrices of ROWS x COLUMNS: X where column - row is at least `diagonal` (KEEP "above"), or is it ("on"); 0 elsewhere. X has a
    stride for matrices, rows and columns; on the diagonal, for its elements alone."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    c = i % COLUMNS
    r = i // COLUMNS % ROWS
    m = i // COLUMNS // ROWS
    ok = inside & (c - r >= diagonal if KEEP == "above" else c - r == diagonal)
    at = m * outer + (r * row + c * col if KEEP == "above" else tl.minimum(r, c) * col)
    value = tl.load(X + at, ok, 0)
    if OUT.dtype.element_ty == tl.int1:
        value = value.to(tl.int32)
    tl.store(OUT + i, stored(value, OUT), inside)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "S0", "S1"), default=lambda a: {"num_warps": 4})
def ramp(OUT, N, S0: tl.int64, S1: tl.int64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """S0, S0 + S1, S0 + 2 S1 ..."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = number(S0, COMPUTE) + i.to(COMPUTE) * number(S1, COMPUTE)
    tl.store(OUT + i, stored(value, OUT), i < N)


# ---- host ------------------------------------------------------------------------------------------------------------


def reversed_loops(values: list[int], fill: int) -> list[int]:
    """One number a dimension, the last first, filled up to the loops of a launch."""
    if len(values) > LOOPS:
        raise Declined("more loops than a launch takes")
    return [*reversed(values), *[fill] * (LOOPS - len(values))]


def put(
    out: Tensor, x: Tensor, lo: list[int], hi: list[int], by: list[int], other: Tensor | None, value: Any = 0
) -> Tensor:
    """Fill `out` with `x` in the box of each dimension, and with `other` or `value` elsewhere."""
    compute = compute_dtype(out.dtype)
    bits = bits_of(value, compute)
    if out.numel():
        shape = list(out.shape)
        y = [0] * LOOPS if other is None else reversed_loops(list(other.stride()), 0)
        sizes = (
            out.numel(), 0, *reversed_loops(shape, 1), *reversed_loops(lo, 0), *reversed_loops(hi, 1), *reversed_loops(by, 1),
            *reversed_loops(list(x.stride()), 0), *y,
        )  # fmt: skip
        plans.launch(patch, (out, x, other), sizes, (bits,), COMPUTE=IN_TRITON[compute], BLOCK=BLOCK)
    return out


@of_numbers("value")
def constant_pad_nd(self: Tensor, pad: list[int], value: Any = 0) -> Tensor:
    taken(self)
    before, after = [0] * self.dim(), [0] * self.dim()
    if len(pad) % 2 or len(pad) > 2 * self.dim():
        raise Declined("a pad that is refused")
    for i in range(len(pad) // 2):
        before[-1 - i], after[-1 - i] = pad[2 * i], pad[2 * i + 1]
    shape = [n + b + a for n, b, a in zip(self.shape, before, after)]
    if any(n < 0 for n in shape) or (0 in self.shape) or isinstance(value, complex):
        raise Declined("a size that is refused, or nothing to pad")
    if self.is_contiguous(memory_format=torch.channels_last) and self.dim() == 4 and not self.is_contiguous():
        raise Declined("channels last")
    # A side that is cut off rather than padded begins further on
    x = self
    for d, b in enumerate(before):
        x = x.narrow(d, -b, max(0, x.shape[d] + b)) if b < 0 else x
    lo = [max(0, b) for b in before]
    hi = [min(n, low + size) for n, low, size in zip(shape, lo, x.shape)]
    return put(own(torch.empty(shape, dtype=self.dtype, device=self.device)), x, lo, hi, [1] * self.dim(), None, value)


def slice_scatter(self: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    taken(self, src)
    if not -self.dim() <= dim < self.dim() or step < 1 or self.dtype != src.dtype:
        raise Declined("a dimension, step or dtype that is refused")
    part = self[(slice(None),) * (dim % self.dim()) + (slice(start, end, step),)]
    if part.shape != src.shape:
        raise Declined("a source of another shape")
    first = slice(start, end, step).indices(self.shape[dim])[0]
    lo, hi, by = [0] * self.dim(), list(self.shape), [1] * self.dim()
    d = dim % self.dim()
    lo[d], by[d] = first, step
    hi[d] = first + (src.shape[d] - 1) * step + 1 if src.shape[d] else first
    return put(scattered(self), src, lo, hi, by, self)


def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    taken(self, src)
    if not -self.dim() <= dim < self.dim() or self.dtype != src.dtype:
        raise Declined("a dimension or dtype that is refused")
    d = dim % self.dim()
    if not -self.shape[d] <= index < self.shape[d] or self.select(d, index).shape != src.shape:
        raise Declined("an index that is not there, or a source of another shape")
    return slice_scatter(self, src.unsqueeze(d), d, index % self.shape[d], index % self.shape[d] + 1, 1)


def scattered(self: Tensor) -> Tensor:
    """Memory for the result: torch clones self, so that only a contiguous one is contiguous again."""
    if not self.is_contiguous():
        raise Declined("a result that keeps strides")
    return own(torch.empty(self.shape, dtype=self.dtype, device=self.device))


def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    taken(self)
    if self.dim() < 2 or not self.is_contiguous():
        raise Declined("no matrices one after the other")
    out = own(torch.empty(self.shape, dtype=self.dtype, device=self.device))
    rows, columns = self.shape[-2:]
    if out.numel():
        sizes = out.numel(), rows, columns, diagonal, rows * columns, columns, 1
        plans.launch(band, (out, self), sizes, KEEP="above", BLOCK=BLOCK)
    return out


def embedded(x: Tensor, out: Tensor, offset: int) -> Tensor:
    """Fill matrices `out` with rows of `x` on a diagonal, which has that many elements."""
    if not x.numel():
        return pointwise.run(forms.FILL, {"value": 0}, out)
    if out.numel():
        flat = x.reshape(-1, x.shape[-1])
        sizes = out.numel(), out.shape[-2], out.shape[-1], offset, flat.stride(0), 0, flat.stride(1)
        plans.launch(band, (out, flat), sizes, KEEP="on", BLOCK=BLOCK)
    return out


def is_last_two(dim1: int, dim2: int, rank: int) -> bool:
    return dim1 in (-2, rank - 2) and dim2 in (-1, rank - 1)


def diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    taken(self)
    rank = self.dim() + 1
    if self.dim() < 1 or not is_last_two(dim1, dim2, rank) or not self.is_contiguous():
        raise Declined("other dimensions than the last two, or strides")
    size = self.shape[-1] + abs(offset)
    return embedded(
        self, own(torch.empty((*self.shape[:-1], size, size), dtype=self.dtype, device=self.device)), offset
    )


def diagonal_backward(grad_output: Tensor, input_sizes: list[int], offset: int, dim1: int, dim2: int) -> Tensor:
    taken(grad_output)
    rank = len(input_sizes)
    if not is_last_two(dim1, dim2, rank) or not grad_output.is_contiguous():
        raise Declined("other dimensions than the last two, or strides")
    out = own(torch.empty(input_sizes, dtype=grad_output.dtype, device=grad_output.device))
    return embedded(grad_output, out, offset)


def flip(self: Tensor, dims: list[int]) -> Tensor:
    taken(self)
    rank = self.dim()
    if any(not -rank <= d < rank for d in dims) or len({d % rank for d in dims}) != len(dims):
        raise Declined("dimensions that are refused")
    out = own(torch.empty_like(self))
    turned = {d % rank for d in dims}
    if not out.is_contiguous() or rank > LOOPS:
        raise Declined("a result with strides, or more loops than a launch takes")
    if not out.numel():
        return out
    # The first element of a turned dimension is its last, and strides go back from there
    strides = [-s if d in turned else s for d, s in enumerate(self.stride())]
    start = sum((self.shape[d] - 1) * self.stride(d) for d in turned)
    shape = list(self.shape)
    sizes = (
        out.numel(), start, *reversed_loops(shape, 1), *[0] * LOOPS, *reversed_loops(shape, 1), *[1] * LOOPS,
        *reversed_loops(strides, 0), *[0] * LOOPS,
    )  # fmt: skip
    plans.launch(patch, (out, self, None), sizes, (0,), COMPUTE=IN_TRITON[compute_dtype(self.dtype)], BLOCK=BLOCK)
    return out


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
        pointwise.run(forms.COPY, {"self": wide.as_strided(pairs, strides)}, out.view(pairs))
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
    if any(t.dtype != first.dtype for t in tensors) or any(not t.is_contiguous() for t in given):
        raise Declined("several dtypes, or strides that the result may take over")
    shape = list(first.shape)
    shape[d] = sum(t.shape[d] for t in given)
    out = own(torch.empty(shape, dtype=first.dtype, device=first.device))
    at = 0
    for t in given:
        if t.numel():
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
    if dtype not in TAKEN or (isinstance(value, float) and not dtype.is_floating_point) or isinstance(value, complex):
        raise Declined(f"a value that is no {str(dtype).removeprefix('torch.')}")
    out = own(torch.empty_like(self, dtype=dtype, memory_format=memory_format or torch.preserve_format))
    return pointwise.run(forms.FILL, {"value": value}, out)


def ramp_into(out: Tensor, size: int, start: Any, step: Any) -> Tensor:
    """Fill `out`, which is resized as aten does, counting in float64 or int64."""
    taken(out)
    if out.dtype == torch.bool or out.numel() not in (0, size) or not out.is_contiguous():
        raise Declined("bool, or a result that is resized or strided")
    if not out.is_floating_point() and (isinstance(start, float) or isinstance(step, float)):
        raise Declined("fractions of integers")
    compute = torch.float64 if out.is_floating_point() else torch.int64
    bits = bits_of(start, compute), bits_of(step, compute)
    if out.numel() != size:
        plans.only_now()
        out.resize_(size)
    if size:
        plans.launch(ramp, (out,), (size,), bits, COMPUTE=IN_TRITON[compute], BLOCK=BLOCK)
    return out


def arange_out(start: Any, end: Any, step: Any = 1, *, out: Tensor) -> Tensor:
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in (start, end, step)) or not step:
        raise Declined("numbers that are refused")
    if (end - start) * step < 0:
        raise Declined("an end on the other side")
    whole = all(isinstance(v, int) for v in (start, end, step))
    return ramp_into(out, -((start - end) // step) if whole else math.ceil((end - start) / step), start, step)


def linspace_out(start: Any, end: Any, steps: int, *, out: Tensor) -> Tensor:
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in (start, end)) or steps < 1:
        raise Declined("numbers that are refused, or none")
    if out.dtype != torch.float32:  # of float64 the last would not be `end` itself
        raise Declined("another dtype than fp32")
    return ramp_into(out, steps, start, (end - start) / max(1, steps - 1))


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
    "arange.start_out": arange_out, "linspace.out": linspace_out, "eye.out": eye_out, "eye.m_out": eye_out,
    "constant_pad_nd": constant_pad_nd, "slice_scatter": slice_scatter, "select_scatter": select_scatter, "triu": triu,
    "diag_embed": diag_embed, "diagonal_backward": diagonal_backward, "flip": flip, "repeat": repeat, "cat": cat,
    "full_like": full_like, "ones_like": like(1), "zeros_like": like(0),
}  # fmt: skip
