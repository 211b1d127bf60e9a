"""The scan engine: of each element, the state of all up to it along one dimension.

A program keeps a few lines and goes along them, carrying the state. Where there are few lines, parts of them are programs of their
own: a launch before finds the state of each part (`reduction.py`), and a part begins with those before it, combined.

A value and its index are not scanned as pairs, which takes a dozen instructions for each step of each element. Values are scanned
by themselves; an element sets the running value if it is equal to it; the largest place of such an element so far is the index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import forms, plans, pointwise
from .functions import is_nan
from .plans import own
from .pointwise import promoted_value, stored, whole_words
from .reduction import (
    KEPT_ONES,
    LOOPS,
    NEITHER,
    REDUCED_ONES,
    Form,
    Row,
    check_out,
    combined,
    compute_of,
    form_of,
    how_of,
    kept_at,
    kept_tile,
    load_states,
    loops_of,
    merged,
    nothing,
    pace_of,
    parts_of,
    programs_of,
    tile_width,
    tiles_of,
    totals,
)
from .reduction_rows import as_it_is, highest, lowest, plus, value_and_index, with_index, zero
from .reduction_rows import itself as element
from .row import Declined, taken, taken_as

TOKENS = (
    "KEPT",
    "N",
    "PER",
    "PARTS",
    "K0",
    "K1",
    "stride_x",
    "stride_o",
    *(f"{t}{i}" for t in "ko" for i in range(LOOPS)),
)
# Elements of a program's tile, of 32 bits each, for what lies side by side and the numbers of a state
TILE = {(REDUCED_ONES, 1): 4096, (REDUCED_ONES, 2): 256, (KEPT_ONES, 1): 2048, (KEPT_ONES, 2): 512}
# Lines, and elements of each, of a tile where there are few in all: of lines up to a length, of which a warp has some to itself; of
# one that is longer and alone; and of others
SMALL_TILES = {32: (64, 32), 128: (8, 128)}
ALONE, SEVERAL = (1, 2048), (4, 512)
# Programs for each SM, at most, that parts make, as in `reduction.py`, and bytes of tiles that they have on their way to them
BUSY, IN_FLIGHT = 16, 64 << 10


# ---- kernel ----------------------------------------------------------------------------------------------------------


def warps_of(along: int, states: int) -> int:
    """Of a program. Long rows of one number have 4, and wait at barriers once in 4096 elements; all else that lies side by side is
    scanned by one warp without."""
    return 4 if along == NEITHER or (along == REDUCED_ONES and states == 1) else 1


@kernel(grid=lambda a: (tiles_of(a), a.PARTS), tokens=TOKENS,
        default=lambda a: {"num_warps": warps_of(a.ALONG, a.HOW.STATES)})  # fmt: skip
def scan_tiles(
    X, OUT0, OUT1, TOTALS, KEPT, N, PER, PARTS, K0, K1, k0, k1, k2, o0, o1, o2, stride_x, stride_o, HOW: tl.constexpr,
    ALONG: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Lines of N elements; strides k, o of X and of results from line to line. TOTALS [states, PARTS, KEPT]: states of parts.
    ALONG and EVEN as in `reduce_tiles`. The launch that makes TOTALS ends first: whoever waits for it takes up its room."""
    MAP: tl.constexpr = HOW.MAP
    PASSING: tl.constexpr = "" if TOTALS is None else ".cs"  # results leave what is still to be read in the cache
    k, inside_k, run, place = kept_tile(KEPT, K0, ALONG, EVEN, BLOCK_K)
    at_x = kept_at(run, place, KEPT, K0, K1, k0, k1, k2, ALONG, False, EVEN)
    at_o = kept_at(run, place, KEPT, K0, K1, o0, o1, o2, ALONG, False, EVEN)
    step_x = 1 if ALONG == 1 else whole_words(stride_x, EVEN)
    step_o = 1 if ALONG == 1 else whole_words(stride_o, EVEN)
    part = tl.program_id(1).to(tl.int64)
    carry = nothing(BLOCK_K, 1, HOW)
    if TOTALS is not None:
        part = PARTS - 1 - part  # what the launch before read last is still in the cache
        carry = states_before(TOTALS, part, PARTS, KEPT, k, inside_k, BLOCK_K, BLOCK_R, HOW)
    none = nothing(BLOCK_K, BLOCK_R, HOW)
    length = whole_words(N, EVEN and ALONG == 1)
    start = part * (PER // BLOCK_R)
    stop = tl.minimum(start + PER // BLOCK_R, tl.cdiv(N, BLOCK_R))
    column = tl.arange(0, BLOCK_R)[None, :]
    last = column == BLOCK_R - 1
    for tile in tl.range(start, stop):
        r = tile * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        ok = inside_k[:, None] & (r < length)
        x = promoted_value(tl.load(X + at_x + r * step_x, ok, 0), HOW)
        at = at_o + r * step_o
        if HOW.STATES == 1:
            here = tl.associative_scan(tl.where(ok, MAP(x, r), none[0]), 1, HOW.COMBINE)
            value = combined(carry, (here,), HOW)[0]
            carry = (last_of(value, last),)
        else:
            value = HOW.LATER(carry[0], tl.associative_scan(tl.where(ok, x, none[0]), 1, HOW.LATER))
            setter = tl.associative_scan(tl.where(ok & sets_it(x, value), column, -1), 1, larger_place)
            index = tl.where(setter >= 0, tile * BLOCK_R + setter, carry[1])
            carry = (last_of(value, last), last_of(index, last))
            tl.store(OUT1 + at, index, ok, cache_modifier=PASSING)
        tl.store(OUT0 + at, stored(value, OUT0), ok, cache_modifier=PASSING)


@triton.jit
def states_before(
    TOTALS, part, PARTS, KEPT, k, inside, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """The state [BLOCK_K, 1] of all parts before one."""
    state = load_states(TOTALS, 0, part, PARTS, KEPT, k, inside, BLOCK_K, BLOCK_P, HOW)
    for first in tl.range(BLOCK_P, part, BLOCK_P):
        state = combined(state, load_states(TOTALS, first, part, PARTS, KEPT, k, inside, BLOCK_K, BLOCK_P, HOW), HOW)
    if HOW.STATES == 1:
        return (tl.reduce(state[0], 1, HOW.COMBINE, keep_dims=True).to(HOW.COMPUTE),)
    else:
        total = tl.reduce(state, 1, HOW.COMBINE, keep_dims=True)
        return (total[0].to(HOW.COMPUTE), total[1].to(tl.int64))


@triton.jit
def last_of(t, last):
    """The last column [n, 1] of a tile. Its bits are added to zeros: a sum of floats would make -0 of it 0."""
    if t.dtype == tl.float32:
        return last_of(t.to(tl.int32, bitcast=True), last).to(tl.float32, bitcast=True)
    elif t.dtype == tl.float64:
        return last_of(t.to(tl.int64, bitcast=True), last).to(tl.float64, bitcast=True)
    else:
        return tl.sum(tl.where(last, t, 0), 1, keep_dims=True)


@triton.jit
def sets_it(x, running):
    """Whether an element sets the value that runs up to it, or sets it again: of equals, and of NaNs, the last counts."""
    return (x == running) | is_nan(x)


@triton.jit
def larger_place(i, j):
    return tl.maximum(i, j)


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit
def later(a, i, b, j, better):
    """Whether the second takes the place of the first: it is a NaN, or better and no NaN is there; of equals, the later. It goes
    by the index, not by which comes first, for a reduction combines in any order."""
    equal = (a == b) | (is_nan(a) & is_nan(b))
    return tl.where(equal, j > i, is_nan(b) | (better & ~is_nan(a)))


@triton.jit
def last_largest(a, i, b, j):
    right = later(a, i, b, j, b > a)
    return tl.where(right, b, a), tl.where(right, j, i)


@triton.jit
def last_smallest(a, i, b, j):
    right = later(a, i, b, j, b < a)
    return tl.where(right, b, a), tl.where(right, j, i)


@triton.jit
def lowest_before(t):
    """Before every element, so that one which is as low takes its place."""
    return lowest(t), t.to(tl.int64) - 1


@triton.jit
def highest_before(t):
    return highest(t), t.to(tl.int64) - 1


@triton.jit
def larger_or_nan(a, b):
    return tl.where((b >= a) | is_nan(b), b, a)


@triton.jit
def smaller_or_nan(a, b):
    return tl.where((b <= a) | is_nan(b), b, a)


BOTH = ("common", "int64")
SUM = Row("cumsum", element, plus, zero, as_it_is, dtypes=("float", "integer"))
MAX = Row("cummax", with_index, last_largest, lowest_before, value_and_index, 2, results=BOTH, later=larger_or_nan)
MIN = Row("cummin", with_index, last_smallest, highest_before, value_and_index, 2, results=BOTH, later=smaller_or_nan)


# ---- host ------------------------------------------------------------------------------------------------------------


def run(row: Row, x: Tensor, dim: int, dtype: torch.dtype, out: Tensor | None = None) -> tuple[Tensor, ...]:
    width = max(1, x.dim())
    if not -width <= dim < width:
        raise Declined("a dimension that is not there")
    taken(x, *(() if out is None else (out,)))
    taken_as(dtype, row.dtypes)
    if out is not None:
        check_out(out, x.shape, dtype, x)
    made = [own(torch.empty(x.shape, dtype=dtype, device=x.device)) if out is None else out]
    if len(row.results) == 2:
        made.append(own(torch.empty(x.shape, dtype=torch.int64, device=x.device)))
    if x.numel():
        launch(row, x.reshape(1) if x.dim() == 0 else x, dim % width, made, dtype)
    return tuple(made)


def tile_of(form: Form, width: int, N: int, row: Row, compute: torch.dtype) -> tuple[int, int]:
    """(BLOCK_K, BLOCK_R): as few elements past the ends as can be, and so many for each thread as its registers hold. Half of those
    hold addresses, where there are no whole words."""
    elements = TILE[form.along, row.states] // (compute.itemsize // 4) // (1 if form.even else 2)
    if form.along == KEPT_ONES:
        block_k = tile_width(width, 128)
        return block_k, elements // block_k
    block_r = min(elements, max(16, triton.next_power_of_2(N)))
    return elements // block_r, block_r


def small_form(lines: int, N: int) -> Form:
    """Of few elements, which share these for all ways to lie."""
    tile = next((SMALL_TILES[most] for most in SMALL_TILES if most >= N), ALONE if lines == 1 else SEVERAL)
    return Form(NEITHER, False, False, False, *tile, small=True)


def lines_of(tensors: Sequence[Tensor], dim: int) -> list[tuple[int, ...]]:
    """Strides from line to line along a dimension."""
    return [tuple(s for d, s in enumerate(t.stride()) if d != dim) for t in tensors]


def launch(row: Row, x: Tensor, dim: int, made: list[Tensor], common: torch.dtype) -> None:
    result = made[0].reshape(x.shape) if made[0].dim() != x.dim() else made[0]
    kept = tuple(n for d, n in enumerate(x.shape) if d != dim)
    if len(merged(kept, lines_of((x, result), dim))[0]) > LOOPS:  # aten copies whatever has gaps
        whole = own(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        x = pointwise.run(forms.COPY, {"self": x}, whole)
    strides = lines_of((x, result), dim)
    sizes, steps = loops_of(kept, strides)
    lines, N, step = math.prod(kept), x.shape[dim], [x.stride(dim), result.stride(dim)]
    pace = pace_of(row, [x])
    form = form_of(sizes, steps, [N, 1, 1], [[n, 0, 0] for n in step], pace)
    if form.small:
        form = small_form(lines, N)
    elif form.along != NEITHER:
        block_k, block_r = tile_of(form, sizes[0], N, row, compute_of(row, common))
        form = form._replace(block_k=block_k, block_r=block_r)
    before = None
    form_before = form_of(sizes, steps[:1], [N, 1, 1], [[step[0], 0, 0]], pace)
    unroll = cdiv(form_before.block_r * form_before.unroll, form.block_r)
    busy = min(BUSY, IN_FLIGHT // (form.block_k * form.block_r * compute_of(row, common).itemsize))
    parts, per = parts_of(programs_of(form, sizes), N, form.block_r, unroll, busy, x.device)
    if parts > 1:
        before = totals(row, x, form_before, sizes, steps[0], step[0], common, parts, per)
    tensors = x, made[0], made[1] if len(made) > 1 else None, before
    numbers = lines, N, per, parts, sizes[0], sizes[1], *steps[0], *steps[1], *step
    constants = {"ALONG": form.along, "EVEN": form.even, "BLOCK_K": form.block_k, "BLOCK_R": form.block_r}
    plans.launch(scan_tiles, tensors, numbers, how=how_of(row, common), **constants)


def cumsum(self: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    wide = self.dtype if self.is_floating_point() else torch.int64
    return run(SUM, self, dim, dtype or (wide if out is None else out.dtype), out)[0]


def cummax(self: Tensor, dim: int) -> tuple[Tensor, ...]:
    return run(MAX, self, dim, self.dtype)


def cummin(self: Tensor, dim: int) -> tuple[Tensor, ...]:
    return run(MIN, self, dim, self.dtype)


FORMS = {"cumsum": cumsum, "cumsum.out": cumsum, "cummax": cummax, "cummin": cummin}
