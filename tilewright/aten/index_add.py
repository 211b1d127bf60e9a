"""What is added to the places that indices name, or multiplied there.

It is ordered by where it goes (`order.py`), things for one place as they came, and each run of equal places is one sum. Runs are
cut where a slice ends, so that a place which is named often does not hold up the launch; a second launch adds up the pieces of such
runs, in their order. Sums are therefore the same bit for bit, however often they are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import forms, layout, plans, pointwise
from .index_move import LOOPS, MOST, check_index, check_written, dim_of, known_index, look_at_index
from .layout import Ints
from .order import ordered
from .plans import bits_of, own
from .pointwise import IN_TRITON, WORDS, number, over, stored, whole_words
from .row import Declined, compute_dtype, of_numbers, taken

SLICE = 64, 128  # of rows that are summed many at a time, or one by one (of longer ones fewer sums are in parts)


# ---- kernels ---------------------------------------------------------------------------------------------------------


PLACED = (
    "T", "LAST", *(f"{t}{i}" for t in "nijkm" for i in range(LOOPS)), *(f"{t}{i}" for t in ("dim", "step") for i in range(MOST)),
)  # fmt: skip


@triton.jit
def coordinates(i, count, n0, n1, n2):
    """The four of the i-th of `count`, of which n0 are innermost. One loop asks for no division."""
    l0 = i.to(tl.int64)
    l1 = l0 * 0
    l2 = l1
    l3 = l1
    if count > n0:
        rest, one = over(i, n0, count)
        rest, two = over(rest, n1, count)
        rest, three = over(rest, n2, count)
        l0, l1, l2, l3 = one.to(tl.int64), two.to(tl.int64), three.to(tl.int64), rest.to(tl.int64)
    return l0, l1, l2, l3


@kernel(grid=lambda a: (cdiv(a.T, a.BLOCK),), tokens=PLACED, default=lambda a: {"BLOCK": 512, "num_warps": 4})
def place_keys(
    KEYS, I, J, K, T, LAST, n0, n1, n2, n3, i0, i1, i2, i3, j0, j1, j2, j3, k0, k1, k2, k3, m0, m1, m2, m3, dim0, dim1,
    dim2, step0, step1, step2, WRAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The number of the place that each of T indices names: what loops n contribute, m each, and indices I, J, K, a step each. LAST
    stands for what names none."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = t < T
    l0, l1, l2, l3 = coordinates(t, T, n0, n1, n2)
    ok, i = known_index(I, l0 * i0 + l1 * i1 + l2 * i2 + l3 * i3, inside, dim0, WRAP)
    key = i * step0 + l0 * m0 + l1 * m1 + l2 * m2 + l3 * m3
    if J is not None:
        ok_j, j = known_index(J, l0 * j0 + l1 * j1 + l2 * j2 + l3 * j3, inside, dim1, WRAP)
        ok = ok & ok_j
        key += j * step1
    if K is not None:
        ok_k, k = known_index(K, l0 * k0 + l1 * k1 + l2 * k2 + l3 * k3, inside, dim2, WRAP)
        ok = ok & ok_k
        key += k * step2
    tl.store(KEYS + t, tl.where(ok, key, LAST).to(KEYS.dtype.element_ty), inside)


@triton.jit
def place_of(key, D1, D2, D3, s0, s1, s2, s3, DIMS: tl.constexpr):
    """Where the place of a number lies: of DIMS coordinates, the last the fastest. Divisions are of the key's own width."""
    if DIMS == 1:
        return key.to(tl.int64) * s3
    else:
        at = (key % D3).to(tl.int64) * s3
        key = key // D3
        at += (key % D2).to(tl.int64) * s2
        if DIMS > 2:
            key = key // D2
            at += (key % D1).to(tl.int64) * s1 + (key // D1).to(tl.int64) * s0
        else:
            at += (key // D2).to(tl.int64) * s1
        return at


@triton.jit
def column_of(col, C0, c0, c1, UNIT: tl.constexpr):
    return col if UNIT else (col % C0) * c0 + (col // C0) * c1


@triton.jit
def one_more(total, value, OP: tl.constexpr):
    return total * value if OP == "multiply" else total + value


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def widened(value, COMPUTE: tl.constexpr):
    if value.dtype == tl.int1:
        value = value.to(tl.int32)
    return value.to(COMPUTE)


ROW = ("D1", "D2", "D3", "s0", "s1", "s2", "s3", "C0", "c0", "c1")


@kernel(
    grid=lambda a: (cdiv(a.T, a.TOKENS) * cdiv(a.N, a.BLOCK),), tokens=("T", "N", "LAST", *ROW, "value_row", "value_col", "S0"),
    default=lambda a: {"num_warps": 8},
)  # fmt: skip
def sum_runs(
    X, VALUES, KEYS, ORDER, PARTS, T, N, LAST, D1, D2, D3, s0, s1, s2, s3, C0, c0, c1, value_row, value_col, S0: tl.int64,
    COMPUTE: tl.constexpr, OP: tl.constexpr, KEEP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, DIMS: tl.constexpr,
    LENGTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of T rows of N values, ordered by key, the first of a run, or of a run's part in a slice, sums it, times the number S0. A
    whole run goes to its place in X, with what is there if KEEP. Of the others a slice has at most two: PARTS has the one that it
    begins with, then the one it ends with."""
    N = whole_words(N, EVEN)
    across = tl.cdiv(N, BLOCK)
    p = (tl.program_id(0) // across) * TOKENS + tl.arange(0, TOKENS)
    col = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = p < T
    stop = tl.minimum((p // LENGTH + 1) * LENGTH, T)
    key = tl.load(KEYS + p, inside, 0)
    before = tl.load(KEYS + tl.maximum(p - 1, 0), inside, 0)
    after = tl.load(KEYS + tl.minimum(stop, T - 1), inside, 0)
    place = p[:, None] + tl.arange(0, LENGTH)[None, :]
    ahead = place < stop[:, None]
    end = p + tl.sum((ahead & (tl.load(KEYS + place, ahead, 0) == key[:, None])).to(tl.int32), 1)
    begins = (p == 0) | (before != key)
    whole = begins & ((end < stop) | (stop == T) | (after != key))
    live = inside & (key < LAST) & (begins | (p % LENGTH == 0))
    there = live[:, None] & (col < N)
    at = whole_words(place_of(key, D1, D2, D3, s0, s1, s2, s3, DIMS), EVEN)[:, None] + column_of(col, C0, c0, c1, UNIT)
    at = tl.where(there, at, 0)
    # A product begins with 1, a sum with 0
    total = tl.full([TOKENS, BLOCK], 1 if OP == "multiply" else 0, COMPUTE)
    if KEEP:
        kept = widened(tl.load(X + at, there & whole[:, None], 0), COMPUTE)
        total = tl.where(whole[:, None], kept, total)
    scale = number(S0, COMPUTE)
    for i in range(0, tl.max(tl.where(live, end - p, 0), 0), 4):
        for k in tl.static_range(4):  # so many rows are under way at once
            more = there & (p + i + k < end)[:, None]
            token = tl.load(ORDER + tl.minimum(p + i + k, T - 1)).to(tl.int64)[:, None]
            row = VALUES + token * whole_words(value_row, EVEN)
            value = tl.load(row + (col if UNIT else col * value_col), more, 0)
            total = tl.where(more, one_more(total, widened(value, COMPUTE) * scale, OP), total)
    tl.store(X + at, stored(total, X), there & whole[:, None])
    part = (p // LENGTH).to(tl.int64) * 2 + (p % LENGTH != 0).to(tl.int64)
    tl.store(PARTS + part[:, None] * N + col, total, there & ~whole[:, None])


@triton.jit
def row_at(VALUES, ORDER, p, stop, col, N, value_row, value_col, COMPUTE: tl.constexpr, UNIT: tl.constexpr):
    """The row that is p-th in order, as it is computed with."""
    token = tl.load(ORDER + tl.minimum(p, stop - 1)).to(tl.int64)
    value = tl.load(VALUES + token * value_row + (col if UNIT else col * value_col), (col < N) & (p < stop), 0)
    return widened(value, COMPUTE)


@kernel(
    grid=lambda a: (cdiv(a.T, a.LENGTH) * cdiv(a.N, a.BLOCK),),
    tokens=("T", "N", "LAST", *ROW, "value_row", "value_col", "S0"), default=lambda a: {"num_warps": a.BLOCK // 256},
)  # fmt: skip
def sum_slices(
    X, VALUES, KEYS, ORDER, PARTS, T, N, LAST, D1, D2, D3, s0, s1, s2, s3, C0, c0, c1, value_row, value_col, S0: tl.int64,
    COMPUTE: tl.constexpr, OP: tl.constexpr, KEEP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, DIMS: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `sum_runs`, of long rows: a program reads the rows of a slice one after another, eight under way at once, whatever runs
    they are of, and writes a sum wherever a run ends."""
    N = whole_words(N, EVEN)
    value_row = whole_words(value_row, EVEN)
    across = tl.cdiv(N, BLOCK)
    slice = tl.program_id(0) // across
    col = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = slice * LENGTH
    stop = tl.minimum(start + LENGTH, T)
    scale = number(S0, COMPUTE)
    nothing = tl.full([BLOCK], 1 if OP == "multiply" else 0, COMPUTE)
    total = nothing
    # Whether the slice begins with a run, not inside one; and whether a run is the slice's first, or a later one
    begins = (start == 0) | (tl.load(KEYS + tl.maximum(start - 1, 0)) != tl.load(KEYS + start))
    later = tl.full((), 0, tl.int32)
    for i in range(start, stop, 8):
        keys = (
            tl.load(KEYS + i), tl.load(KEYS + tl.minimum(i + 1, T - 1)), tl.load(KEYS + tl.minimum(i + 2, T - 1)),
            tl.load(KEYS + tl.minimum(i + 3, T - 1)), tl.load(KEYS + tl.minimum(i + 4, T - 1)),
            tl.load(KEYS + tl.minimum(i + 5, T - 1)), tl.load(KEYS + tl.minimum(i + 6, T - 1)),
            tl.load(KEYS + tl.minimum(i + 7, T - 1)), tl.load(KEYS + tl.minimum(i + 8, T - 1)),
        )  # fmt: skip
        rows = (
            row_at(VALUES, ORDER, i, stop, col, N, value_row, value_col, COMPUTE, UNIT),
            row_at(VALUES, ORDER, i + 1, stop, col, N, value_row, value_col, COMPUTE, UNIT),
            row_at(VALUES, ORDER, i + 2, stop, col, N, value_row, value_col, COMPUTE, UNIT),
            row_at(VALUES, ORDER, i + 3, stop, col, N, value_row, value_col, COMPUTE, UNIT),
            row_at(VALUES, ORDER, i + 4, stop, col, N, value_row, value_col, COMPUTE, UNIT),
            row_at(VALUES, ORDER, i + 5, stop, col, N, value_row, value_col, COMPUTE, UNIT),
            row_at(VALUES, ORDER, i + 6, stop, col, N, value_row, value_col, COMPUTE, UNIT),
            row_at(VALUES, ORDER, i + 7, stop, col, N, value_row, value_col, COMPUTE, UNIT),
        )
        for k in tl.static_range(8):
            p = i + k
            key = keys[k]
            done = (p + 1 == T) | (keys[k + 1] != key)
            if p < stop:
                total = one_more(total, rows[k] * scale, OP)
                if done | (p + 1 == stop):
                    if key < LAST:
                        if done & (begins | (later > 0)):
                            at = whole_words(place_of(key, D1, D2, D3, s0, s1, s2, s3, DIMS), EVEN)
                            at = at + column_of(col, C0, c0, c1, UNIT)
                            if KEEP:
                                total = one_more(widened(tl.load(X + at, col < N, 0), COMPUTE), total, OP)
                            tl.store(X + at, stored(total, X), col < N)
                        else:
                            tl.store(PARTS + (slice.to(tl.int64) * 2 + later) * N + col, total, col < N)
                    total = nothing
                    later = tl.full((), 1, tl.int32)


@kernel(
    grid=lambda a: (cdiv(a.T, a.LENGTH) * cdiv(a.N, a.BLOCK),), tokens=("T", "N", "LAST", *ROW),
    default=lambda a: {"num_warps": 8},
)  # fmt: skip
def sum_parts(
    X, KEYS, PARTS, T, N, LAST, D1, D2, D3, s0, s1, s2, s3, C0, c0, c1, OP: tl.constexpr, KEEP: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, DIMS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each slice sums the run that begins in it and goes on in the next, if there is one."""
    N = whole_words(N, EVEN)
    across = tl.cdiv(N, BLOCK)
    slice = tl.program_id(0) // across
    slices = tl.cdiv(T, LENGTH)
    col = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    if slice + 1 < slices:
        start = slice * LENGTH
        key = tl.load(KEYS + start + LENGTH)
        begins = (slice == 0) | (tl.load(KEYS + tl.maximum(start - 1, 0)) != key)
        # A slice that is of one run begins it, if the one before has another
        if (key < LAST) & (tl.load(KEYS + start + LENGTH - 1) == key) & (begins | (tl.load(KEYS + start) != key)):
            last = slice
            found = LENGTH
            while found == LENGTH:
                next = last + 1 + tl.arange(0, LENGTH)
                more = next < slices
                same = more & (tl.load(KEYS + next.to(tl.int64) * LENGTH, more, 0) == key)
                found = tl.sum(same.to(tl.int32), 0)
                last += found
            first = slice.to(tl.int64) * 2 + (tl.load(KEYS + start) != key).to(tl.int64)
            at = whole_words(place_of(key, D1, D2, D3, s0, s1, s2, s3, DIMS), EVEN) + column_of(col, C0, c0, c1, UNIT)
            nothing: tl.constexpr = 1 if OP == "multiply" else 0
            total = tl.full([16, BLOCK], nothing, PARTS.dtype.element_ty)
            for i in range(slice, last + 1, 16):
                one = i + tl.arange(0, 16)[:, None]
                part = tl.where(one == slice, first, one.to(tl.int64) * 2)
                total = one_more(total, tl.load(PARTS + part * N + col, (one <= last) & (col < N), nothing), OP)
            if OP == "multiply":
                total = tl.reduce(total, 0, product, keep_dims=True)
            else:
                total = tl.sum(total, 0, keep_dims=True)
            if KEEP:
                total = one_more(widened(tl.load(X + at, col < N, 0), PARTS.dtype.element_ty), total, OP)
            tl.store(X + at, stored(total, X), col < N)


@kernel(
    grid=lambda a: (cdiv(a.T, a.BLOCK),), tokens=("T", "key", "LAST"), default=lambda a: {"BLOCK": 512, "num_warps": 4}
)
def drop_key(KEYS, T, key, LAST, BLOCK: tl.constexpr):
    """Have a place named by nobody."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(KEYS + t, tl.full([BLOCK], LAST, KEYS.dtype.element_ty), (t < T) & (tl.load(KEYS + t, t < T, LAST) == key))


# ---- host ------------------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Sizes and strides of the dimensions that indices name coordinates of, and of those that are kept."""

    sizes: Ints
    steps: Ints
    kept: Ints
    strides: Ints

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


def keys_of(shape: Ints, named: list[tuple], wrap: bool, loops: Ints, places: Places) -> Tensor:
    """The number of the place that each index names, or else their count. `loops`: what each dimension of the shape contributes."""
    if len(named) > MOST or len(places.sizes) > LOOPS:
        raise Declined("more indices than a launch takes")
    strides = [layout.expanded(t, shape) if s is None else s for t, s, _, _ in named]
    merged = merge(shape, [*strides, loops or (0,) * len(shape)])
    T, last = math.prod(shape), places.count
    for tensor, _, size, _ in named:
        look_at_index(tensor, size, wrap)
    keys = own(torch.empty((1, T), dtype=torch.int32 if last < 2**31 - 1 else torch.int64, device=named[0][0].device))
    sizes, steps = merged
    absent = MOST - len(named)
    numbers = [T, last, *sizes, *[s for own in steps[:-1] for s in own], *[0] * (LOOPS * absent), *steps[-1]]
    numbers += [*[size for _, _, size, _ in named], *[1] * absent, *[step for _, _, _, step in named], *[0] * absent]
    tensors = keys, *[t for t, _, _, _ in named], *[None] * absent
    plans.launch(place_keys, tensors, numbers, WRAP=wrap)
    return keys


def merge(shape: Ints, strides: Sequence[Ints]) -> tuple[list[int], list[list[int]]]:
    """At most four loops in the order of the dimensions, the last the innermost; two are one where all strides allow it."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            continue
        if sizes and all(one[d] == made[-1] * sizes[-1] for one, made in zip(strides, steps)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for one, made in zip(strides, steps):
            made.append(one[d])
    if len(sizes) > LOOPS:
        raise Declined("more loops than a launch takes")
    missing = LOOPS - len(sizes)
    return [*sizes, *[1] * missing], [[*one, *[0] * missing] for one in steps]


def add_rows(
    x: Tensor, keys: Tensor, values: Tensor, places: Places, alpha: Any = 1, op: str = "add", keep: bool = True
) -> None:
    """Add rows of values [T, N], times a number, to the places of x that their keys name; or multiply by them."""
    (T, N), last = values.shape, places.count
    compute = compute_dtype(x.dtype)
    bits = bits_of(alpha, compute)
    if not T or not N:
        return
    if 2**31 - 2 * max(SLICE) < T:  # places in a slice past the end are numbers too
        raise Declined("more indices than an int32 counts")
    sizes, (steps,) = merge(places.kept, [places.strides])
    if sizes[2] != 1 or sizes[3] != 1:
        raise Declined("more loops than a launch takes")
    sorted_keys, order = ordered(keys, last.bit_length(), False)
    missing = LOOPS - len(places.sizes)
    row = [*[1] * missing, *places.sizes][1:], [*[0] * missing, *places.steps]
    # Of few values, whose time is the launches', all share one variant
    unit = even = False
    dims, tokens, block = 3, 16, 64
    if T * N >= pointwise.SMALL:
        unit = sizes[1] == 1 and (steps[0] == 1 or N == 1) and (values.stride(1) == 1 or N == 1)
        even = unit and not any(n % WORDS for n in (N, values.stride(0), *places.steps))
        dims = min(3, len(places.sizes))
        tokens, block = (1, 1024) if N > 256 else (16, 64) if N > 4 else (128, 4)
    length = SLICE[tokens == 1]
    parts = own(torch.empty(2 * cdiv(T, length), N, dtype=compute, device=x.device))
    numbers = T, N, last, *row[0], *row[1], sizes[0], steps[0], steps[1]
    constants = {"OP": op, "KEEP": keep, "UNIT": unit, "EVEN": even, "DIMS": dims, "LENGTH": length}
    # One token at a time, or many
    by_rows, shape = (sum_slices, {"BLOCK": block}) if tokens == 1 else (sum_runs, {"TOKENS": tokens, "BLOCK": block})
    plans.launch(
        by_rows, (x, values, sorted_keys, order, parts), (*numbers, *values.stride()), (bits,), COMPUTE=IN_TRITON[compute],
        **shape, **constants,
    )  # fmt: skip
    if length < T:
        plans.launch(sum_parts, (x, sorted_keys, parts), numbers, BLOCK=256 if N > 64 else 64, **constants)


def matrix(t: Tensor, rows: int) -> Tensor:
    """A tensor as so many rows, copied if it does not lie so."""
    columns = t.numel() // rows
    try:
        return t.view(rows, columns)
    except RuntimeError:
        made = own(torch.empty(t.shape, dtype=t.dtype, device=t.device))
        return pointwise.run(forms.COPY, {"self": t}, made).view(rows, columns)


def added(self: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any) -> tuple[int, Ints]:
    """(the dimension, the sizes of the others) of a sum along one that is not refused."""
    taken(self, index, source)
    check_index(index)
    d = dim_of(dim, self.dim())
    if self.dtype != source.dtype or index.dim() > 1 or self.dim() == 0 or source.dim() != self.dim():
        raise Declined("dtypes or ranks that are refused")
    kept = tuple(n for i, n in enumerate(self.shape) if i != d)
    if source.shape[d] != index.numel() or tuple(n for i, n in enumerate(source.shape) if i != d) != kept:
        raise Declined("a source of another shape")
    if not self.shape[d] and index.numel():
        raise Declined("nothing to add to")
    bits_of(alpha, compute_dtype(self.dtype))
    return d, kept


@of_numbers("alpha")
def index_add_(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    d, kept = added(self, dim, index, source, alpha)
    check_written(self, index, source)
    add_along(self, d, kept, index.reshape(-1), source, alpha)
    return self


@of_numbers("alpha")
def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    d, kept = added(self, dim, index, source, alpha)
    out = own(torch.empty(self.shape, dtype=self.dtype, device=self.device))
    pointwise.run(forms.COPY, {"self": self}, out)
    add_along(out, d, kept, index.reshape(-1), source, alpha)
    return out


def add_along(x: Tensor, d: int, kept: Ints, index: Tensor, source: Tensor, alpha: Any, op: str = "add") -> None:
    """Add slices of a source along one dimension to those that the index names."""
    if not source.numel():
        bits_of(alpha, compute_dtype(x.dtype))
        return
    strides = tuple(s for i, s in enumerate(x.stride()) if i != d)
    places = Places((x.shape[d],), (x.stride(d),), kept, strides)
    keys = keys_of(tuple(index.shape), [(index, index.stride(), x.shape[d], 1)], False, (), places)
    add_rows(x, keys, matrix(source.movedim(d, 0), index.shape[0]), places, alpha, op)


def embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    taken(grad_output, indices)
    check_index(indices)
    if scale_grad_by_freq or not grad_output.is_floating_point():
        raise Declined("gradients by frequency, or of integers")
    if tuple(grad_output.shape[:-1]) != tuple(indices.shape) or not grad_output.dim():
        raise Declined("a gradient of another shape")
    N, T = grad_output.shape[-1], indices.numel()
    out = own(torch.empty((num_weights, N), dtype=grad_output.dtype, device=grad_output.device))
    pointwise.run(forms.FILL, {"value": 0}, out)
    if T and N and num_weights:
        places = Places((num_weights,), (N,), (N,), (1,))
        shape = tuple(indices.shape)
        keys = keys_of(shape, [(indices, indices.stride(), num_weights, 1)], False, (), places)
        if 0 <= padding_idx < num_weights:  # such a row has no gradient
            plans.launch(drop_key, (keys,), (T, padding_idx, num_weights))
        add_rows(out, keys, matrix(grad_output, T), places, keep=False)
    return out


FORMS = {"index_add": index_add, "index_add_": index_add_, "embedding_dense_backward": embedding_dense_backward}
