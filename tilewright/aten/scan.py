"""The scan engine: of each element, the state of all up to it along one dimension.

A program keeps a few lines and goes along them, carrying the state. Where there are few lines, parts of them are programs of their
own: a launch before finds the state of each part (`reduction.py`), and a part begins with those before it, combined in order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import plans
from .functions import is_nan
from .plans import own
from .pointwise import SMALL, promoted_value, stored
from .reduction import LOOPS, SMALL_TILE, Row, check_out, combined, how_of, loops_of, nothing, offset, parts_of, totals
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


@kernel(grid=lambda a: (cdiv(a.KEPT, a.BLOCK_K), a.PARTS), tokens=TOKENS, default=lambda a: {"num_warps": 4})
def scan_tiles(
    X, OUT0, OUT1, TOTALS, KEPT, N, PER, PARTS, K0, K1, k0, k1, k2, o0, o1, o2, stride_x, stride_o, HOW: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Lines of N elements; strides k, o of X and of results from line to line. TOTALS [STATES, PARTS, KEPT]: states of parts."""
    MAP: tl.constexpr = HOW.MAP
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    part = tl.program_id(1).to(tl.int64)
    inside_k = k < KEPT
    at_x = offset(k, K0, K1, k0, k1, k2)[:, None]
    at_o = offset(k, K0, K1, o0, o1, o2)[:, None]
    none = nothing(BLOCK_K, BLOCK_R, HOW)
    carry = nothing(BLOCK_K, 1, HOW)
    if TOTALS is not None:
        for before in range(0, part):
            at = TOTALS + before * KEPT + k[:, None]
            if HOW.STATES == 1:
                own = (tl.load(at, inside_k[:, None], 0).to(HOW.COMPUTE),)
            else:
                index = tl.load(at + PARTS * KEPT, inside_k[:, None], 0).to(tl.int64)
                own = (tl.load(at, inside_k[:, None], 0).to(HOW.COMPUTE), index)
            carry = combined(carry, own, HOW)
    start = part * PER
    stop = tl.minimum(start + PER, N)
    last = tl.arange(0, BLOCK_R)[None, :] == BLOCK_R - 1
    for first in tl.range(start, stop, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        ok = inside_k[:, None] & (r < stop)[None, :]
        x = promoted_value(tl.load(X + at_x + r[None, :] * stride_x, ok, 0), HOW)
        mapped = MAP(x, tl.broadcast_to(r[None, :], [BLOCK_K, BLOCK_R]))
        if HOW.STATES == 1:
            here = (tl.associative_scan(tl.where(ok, mapped, none[0]), 1, HOW.COMBINE),)
            state = combined((tl.broadcast_to(carry[0], [BLOCK_K, BLOCK_R]),), here, HOW)
            carry = (tl.expand_dims(last_of(state[0], last), 1),)
        else:
            here = tl.associative_scan(
                (tl.where(ok, mapped[0], none[0]), tl.where(ok, mapped[1], none[1])), 1, HOW.COMBINE
            )
            wide = (tl.broadcast_to(carry[0], [BLOCK_K, BLOCK_R]), tl.broadcast_to(carry[1], [BLOCK_K, BLOCK_R]))
            state = combined(wide, here, HOW)
            carry = (tl.expand_dims(last_of(state[0], last), 1), tl.expand_dims(last_of(state[1], last), 1))
        at = at_o + r[None, :] * stride_o
        tl.store(OUT0 + at, stored(state[0], OUT0), ok)
        if HOW.RESULTS == 2:
            tl.store(OUT1 + at, stored(state[1], OUT1), ok)


@triton.jit
def last_of(t, last):
    """The last column of a tile: all others are 0 in the sum, whatever they hold."""
    return tl.sum(tl.where(last, t, 0), 1)


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


SUM = Row("cumsum", element, plus, zero, as_it_is)
MAX = Row("cummax", with_index, last_largest, lowest_before, value_and_index, 2, results=("common", "int64"))
MIN = Row("cummin", with_index, last_smallest, highest_before, value_and_index, 2, results=("common", "int64"))


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


def launch(row: Row, x: Tensor, dim: int, made: list[Tensor], common: torch.dtype) -> None:
    result = made[0].reshape(x.shape) if made[0].dim() != x.dim() else made[0]
    kept = tuple(n for d, n in enumerate(x.shape) if d != dim)
    strides = [tuple(s for d, s in enumerate(t.stride()) if d != dim) for t in (x, result)]
    sizes, steps = loops_of(kept, strides)
    lines, N = math.prod(kept), x.shape[dim]
    along = x.stride(dim) == 1 or N == 1 or steps[0][0] != 1
    block_k, block_r = ((2, 1024) if N > 64 else (64, 32)) if along else (128, 16)
    if x.numel() < SMALL:
        block_k, block_r = SMALL_TILE
    parts, per = parts_of(cdiv(lines, block_k), N, block_r, x.device)
    before = None
    if parts > 1:
        step = [x.stride(dim), 0, 0]
        before = totals(row, x, sizes, steps[0], step, common, parts, per, lines, N)
    tensors = x, made[0], made[1] if len(made) > 1 else None, before
    numbers = lines, N, per, parts, sizes[0], sizes[1], *steps[0], *steps[1], x.stride(dim), result.stride(dim)
    plans.launch(scan_tiles, tensors, numbers, how=how_of(row, common), BLOCK_K=block_k, BLOCK_R=block_r)


def cumsum(self: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    wide = self.dtype if self.is_floating_point() else torch.int64
    return run(SUM, self, dim, dtype or (wide if out is None else out.dtype), out)[0]


def cummax(self: Tensor, dim: int) -> tuple[Tensor, ...]:
    return run(MAX, self, dim, self.dtype)


def cummin(self: Tensor, dim: int) -> tuple[Tensor, ...]:
    return run(MIN, self, dim, self.dtype)


FORMS = {"cumsum": cumsum, "cumsum.out": cumsum, "cummax": cummax, "cummin": cummin}
