"""The reduction engine: a value, and perhaps an index or a second value, from all elements along some dimensions.

A row has four functions. `map` turns an element into a state of one to three numbers, `combine` makes one state of two, in any
order of elements, `identity` is the state of nothing, `finish` gives the results. Dimensions that are kept and dimensions that are
reduced are each brought to the fewest loops. A program keeps a tile of states, kept x reduced, takes in the reduced elements, and
combines the tile's columns in the end. Where there are few results, parts of the reduced elements are programs of their own, and a
second launch combines their states in order: the same bits every time, and no atomics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.memory import overlapping
from ..core.target import Target
from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import plans
from .layout import Ints
from .plans import bits_of, own
from .pointwise import IN_TRITON, SMALL, number, promoted_value, stored, text_of
from .row import Declined, compute_dtype, taken, taken_as

LOOPS = 3
TOKENS = (
    "KEPT", "REDUCED", "PER", "PARTS", "K0", "K1", "R0", "R1", *(f"{t}{i}" for t in ("k", "r", "p", "q") for i in range(LOOPS)),
    "S0", "S1",
)  # fmt: skip
MOST_DIMS = 64
SMALL_TILE = 4, 512
BUSY = 2  # programs for each SM, below which parts of the reduced elements get programs of their own


@dataclass(frozen=True)
class Row:
    """One kind of reduction; see the module. `results` are the dtypes that `finish` gives, in terms of the promoted one: "common",
    "int64" or "bool". `numbers` count those that map and finish take."""

    name: str
    map: Any
    combine: Any
    identity: Any
    finish: Any
    states: int = 1
    numbers: int = 0
    results: tuple[str, ...] = ("common",)
    dtypes: tuple[str, ...] = ("float", "integer", "bool")
    empty: bool = True  # whether nothing has an answer
    wide: bool = (
        False  # whether fp32 elements are combined in float64: sums of them that cancel are then as exact as others
    )

    @property
    def indexed(self) -> bool:
        """Whether a state is a value and its index."""
        return self.states == 2


class How(NamedTuple):
    """What a kernel is compiled for."""

    MAP: Any
    COMBINE: Any
    IDENTITY: Any
    FINISH: Any
    STATES: int
    NUMBERS: int
    RESULTS: int
    COMMON: Any
    COMPUTE: Any

    @property
    def cache_key(self) -> str:
        return text_of(self)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def given_numbers(S0, S1, HOW: tl.constexpr):
    if HOW.NUMBERS == 0:
        return ()
    elif HOW.NUMBERS == 1:
        return (number(S0, HOW.COMPUTE),)
    else:
        return (number(S0, HOW.COMPUTE), number(S1, HOW.COMPUTE))


@triton.jit
def combined(a, b, HOW: tl.constexpr):
    """One state, a tuple, of two."""
    COMBINE: tl.constexpr = HOW.COMBINE
    if HOW.STATES == 1:
        return (COMBINE(*a, *b),)
    else:
        return COMBINE(*a, *b)


@triton.jit
def nothing(BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, HOW: tl.constexpr):
    """A tile of states of nothing."""
    IDENTITY: tl.constexpr = HOW.IDENTITY
    zero = tl.zeros([BLOCK_K, BLOCK_R], HOW.COMPUTE)
    if HOW.STATES == 1:
        return (IDENTITY(zero),)
    else:
        return IDENTITY(zero)


@triton.jit
def finish_and_store(state, OUT0, OUT1, k, inside, count, S0, S1, HOW: tl.constexpr):
    """Results of states [n], which lie one after the other."""
    FINISH: tl.constexpr = HOW.FINISH
    made = FINISH(*state, count, *given_numbers(S0, S1, HOW))
    if HOW.RESULTS == 1:
        tl.store(OUT0 + k, stored(made, OUT0), inside)
    else:
        tl.store(OUT0 + k, stored(made[0], OUT0), inside)
        tl.store(OUT1 + k, stored(made[1], OUT1), inside)


@triton.jit
def offset(i, N0, N1, s0, s1, s2):
    """Where the i-th element of up to three loops lies."""
    return (i % N0) * s0 + (i // N0 % N1) * s1 + (i // N0 // N1) * s2


@kernel(grid=lambda a: (cdiv(a.KEPT, a.BLOCK_K), a.PARTS), tokens=TOKENS, default=lambda a: {"num_warps": 4})
def reduce_tiles(
    X, Y, OUT0, OUT1, SCRATCH, KEPT, REDUCED, PER, PARTS, K0, K1, R0, R1, k0, k1, k2, r0, r1, r2, p0, p1, p2, q0, q1, q2,
    S0: tl.int64, S1: tl.int64, HOW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Strides k, r of X and p, q of Y along kept and reduced loops. Each of PARTS programs takes PER reduced elements; SCRATCH
    [STATES, PARTS, KEPT] holds their states, if there is more than one."""
    MAP: tl.constexpr = HOW.MAP
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    part = tl.program_id(1).to(tl.int64)
    inside_k = k < KEPT
    at_x = offset(k, K0, K1, k0, k1, k2)[:, None]
    at_y = at_x
    if Y is not None:
        at_y = offset(k, K0, K1, p0, p1, p2)[:, None]
    state = nothing(BLOCK_K, BLOCK_R, HOW)
    none = state
    start = part * PER
    stop = tl.minimum(start + PER, REDUCED)
    for first in tl.range(start, stop, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        ok = inside_k[:, None] & (r < stop)[None, :]
        x = promoted_value(tl.load(X + at_x + offset(r, R0, R1, r0, r1, r2)[None, :], ok, 0), HOW)
        index = tl.broadcast_to(r[None, :], [BLOCK_K, BLOCK_R])
        if Y is not None:
            y = promoted_value(tl.load(Y + at_y + offset(r, R0, R1, q0, q1, q2)[None, :], ok, 0), HOW)
            mapped = MAP(x, y, *given_numbers(S0, S1, HOW))
        else:
            mapped = MAP(x, index, *given_numbers(S0, S1, HOW))
        if HOW.STATES == 1:
            new = (tl.where(ok, mapped, none[0]),)
        elif HOW.STATES == 2:
            new = (tl.where(ok, mapped[0], none[0]), tl.where(ok, mapped[1], none[1]))
        else:
            new = (
                tl.where(ok, mapped[0], none[0]),
                tl.where(ok, mapped[1], none[1]),
                tl.where(ok, mapped[2], none[2]),
            )
        state = combined(state, new, HOW)
    if HOW.STATES == 1:
        total = (tl.reduce(state[0], 1, HOW.COMBINE),)
    else:
        total = tl.reduce(state, 1, HOW.COMBINE)
    if SCRATCH is None:
        finish_and_store(total, OUT0, OUT1, k, inside_k, REDUCED, S0, S1, HOW)
    else:
        STATES: tl.constexpr = HOW.STATES
        for i in tl.static_range(STATES):
            tl.store(SCRATCH + (i * PARTS + part) * KEPT + k, total[i].to(SCRATCH.dtype.element_ty), inside_k)


@kernel(grid=lambda a: (cdiv(a.KEPT, a.BLOCK_K),), tokens=("KEPT", "REDUCED", "PARTS", "S0", "S1"),
        default=lambda a: {"BLOCK_K": 128, "num_warps": 4})  # fmt: skip
def reduce_parts(
    OUT0, OUT1, SCRATCH, KEPT, REDUCED, PARTS, S0: tl.int64, S1: tl.int64, HOW: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Combine the states of parts, in their order."""
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < KEPT
    state = load_state(SCRATCH, 0, PARTS, KEPT, k, inside, HOW)
    for part in range(1, PARTS):
        state = combined(state, load_state(SCRATCH, part, PARTS, KEPT, k, inside, HOW), HOW)
    finish_and_store(state, OUT0, OUT1, k, inside, REDUCED, S0, S1, HOW)


@triton.jit
def load_state(SCRATCH, part, PARTS, KEPT, k, inside, HOW: tl.constexpr):
    """The states of one part. Indices are kept in the bits of what is computed in."""
    if HOW.STATES == 1:
        return (tl.load(SCRATCH + part * KEPT + k, inside, 0),)
    elif HOW.STATES == 2:
        at = SCRATCH + part * KEPT + k
        return (tl.load(at, inside, 0), tl.load(at + PARTS * KEPT, inside, 0))
    else:
        at = SCRATCH + part * KEPT + k
        return (
            tl.load(at, inside, 0),
            tl.load(at + PARTS * KEPT, inside, 0),
            tl.load(at + 2 * PARTS * KEPT, inside, 0),
        )


# ---- host ------------------------------------------------------------------------------------------------------------


def dims_of(dim: Any, rank: int) -> tuple[int, ...]:
    """The dimensions that are reduced, ascending; all, if none is named."""
    if rank > MOST_DIMS:
        raise Declined("more dimensions than torch reduces")
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(rank))
    named = [dim] if isinstance(dim, int) else list(dim)
    width = max(rank, 1)
    if any(not -width <= d < width for d in named):
        raise Declined("a dimension that is not there")
    found = sorted({d % width for d in named})
    if len(found) != len(named):
        raise Declined("a dimension named twice")
    return tuple(found) if rank else ()


def split(t: Sequence[int], dims: tuple[int, ...]) -> tuple[Ints, Ints]:
    """What belongs to kept dimensions, and to reduced ones."""
    return tuple(v for i, v in enumerate(t) if i not in dims), tuple(v for i, v in enumerate(t) if i in dims)


def loops_of(shape: Ints, strides: list[Ints], ordered: bool = True) -> tuple[list[int], list[list[int]]]:
    """At most three loops: in the order of the dimensions, for kept ones number the results, reduced ones the indices; or, where no
    index counts them, in the order of the first operand's memory, in which more of them are one."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    dims = list(reversed(range(len(shape))))
    if not ordered:
        dims.sort(key=lambda d: strides[0][d])
    for d in dims:
        if shape[d] == 1:
            continue
        if sizes and all(own[d] == made[-1] * sizes[-1] for own, made in zip(strides, steps)):
            sizes[-1] *= shape[d]
        else:
            sizes.append(shape[d])
            for own, made in zip(strides, steps):
                made.append(own[d])
    if len(sizes) > LOOPS:
        raise Declined("more loops than a launch takes")
    return [*sizes, *[1] * (LOOPS - len(sizes))], [[*own, *[0] * (LOOPS - len(own))] for own in steps]


def run(
    row: Row,
    x: Tensor,
    dim: Any,
    keepdim: bool,
    *,
    other: Tensor | None = None,
    dtype: torch.dtype | None = None,
    numbers: tuple[float, ...] = (),
    outs: tuple[Tensor, ...] | None = None,
    result: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The results of a row. `dtype`: what elements are cast to first; `result`: that of the first result, if it is another."""
    common = x.dtype if dtype is None else dtype
    taken(x, *(() if other is None else (other,)), *(outs or ()))
    taken_as(common, row.dtypes)
    dims = dims_of(dim, x.dim())
    kept, reduced = split(x.shape, dims)
    if math.prod(reduced) == 0 and not row.empty:
        raise Declined("nothing to reduce")
    shape = tuple(1 if i in dims else n for i, n in enumerate(x.shape)) if keepdim else kept
    kinds = {"common": result or common, "int64": torch.int64, "bool": torch.bool}
    made = outs
    if made is None:
        made = tuple([own(torch.empty(shape, dtype=kinds[kind], device=x.device)) for kind in row.results])
    for out, kind in zip(outs or (), row.results):
        check_out(out, shape, kinds[kind], x)
    if made[0].numel():
        launch(row, x, other, kept, reduced, dims, made, common, numbers)
    return made


def check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype, x: Tensor) -> None:
    """Leave to aten what it resizes, casts or refuses, and memory that others would still read."""
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or not out.is_contiguous():
        raise Declined("a result that is resized, cast or strided")
    if overlapping(out, x):
        raise Declined("a result that overlaps an operand", lasting=False)


def tile_of(kept: list[list[int]], reduced: list[list[int]], sizes_r: list[int], count: int) -> tuple[int, int]:
    """(BLOCK_K, BLOCK_R): along whichever lies side by side; rows that are short are taken many at a time. Where there are few
    elements, all take one form."""
    if count < SMALL:
        return SMALL_TILE
    along_r = reduced[0][0] if sizes_r[0] > 1 else 1 << 62
    along_k = kept[0][0] or 1 << 62
    if along_r <= along_k:
        return (2, 1024) if math.prod(sizes_r) > 64 else (64, 32)
    return 128, 16


def compute_of(row: Row, common: torch.dtype) -> torch.dtype:
    """What states are computed in. Of 16-bit floats fp32 is wide; a conversion and a sum in float64 of each fp32 element take a
    third of the time that an H100's memory takes to bring it."""
    return torch.float64 if row.wide and common == torch.float32 else compute_dtype(common)


@functools.cache
def how_of(row: Row, common: torch.dtype) -> How:
    return How(
        row.map, row.combine, row.identity, row.finish, row.states, row.numbers, len(row.results), IN_TRITON[common],
        IN_TRITON[compute_of(row, common)],
    )  # fmt: skip


def launch(row, x, other, kept, reduced, dims, outs, common, numbers) -> None:
    operands = [x] if other is None else [x, other]
    strides = [split(t.stride(), dims) for t in operands]
    sizes_k, steps_k = loops_of(kept, [own[0] for own in strides])
    sizes_r, steps_r = loops_of(reduced, [own[1] for own in strides], ordered=row.indexed)
    compute = compute_of(row, common)
    KEPT, REDUCED = math.prod(kept), math.prod(reduced)
    block_k, block_r = tile_of(steps_k, steps_r, sizes_r, x.numel())
    parts, per = parts_of(cdiv(KEPT, block_k), REDUCED, block_r, x.device)
    how = how_of(row, common)
    slots = [*(bits_of(n, compute) for n in numbers), 0, 0][:2]
    second = outs[1] if len(outs) > 1 else None
    scratch = None
    if parts > 1:
        scratch = states_of(row, parts, KEPT, compute, x.device)
    extra = [0] * (2 * LOOPS) if other is None else [*steps_k[1], *steps_r[1]]
    sizes = KEPT, REDUCED, per, parts, sizes_k[0], sizes_k[1], sizes_r[0], sizes_r[1], *steps_k[0], *steps_r[0], *extra
    plans.launch(
        reduce_tiles, (x, other, outs[0], second, scratch), sizes, slots, how, BLOCK_K=block_k, BLOCK_R=block_r
    )
    if scratch is not None:
        plans.launch(reduce_parts, (outs[0], second, scratch), (KEPT, REDUCED, parts), slots, how)


def states_of(row: Row, parts: int, kept: int, compute: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the states of parts. float64 holds every index and every count that there can be."""
    exact = compute == torch.int64 or (row.states == 1 and "int64" not in row.results)
    return own(torch.empty(row.states, parts, kept, dtype=compute if exact else torch.float64, device=device))


def totals(
    row: Row, x: Tensor, sizes_k, steps_k, steps_r, common, parts: int, per: int, kept: int, reduced: int
) -> Tensor:
    """The states of parts [states, parts, kept], each of `per` elements along one loop."""
    compute = compute_of(row, common)
    how = how_of(row, common)
    scratch = states_of(row, parts, kept, compute, x.device)
    sizes = kept, reduced, per, parts, sizes_k[0], sizes_k[1], reduced, 1, *steps_k, *steps_r, *[0] * (2 * LOOPS)
    block_k, block_r = (128, 16) if steps_k[0] == 1 else (2, 1024)
    if kept * reduced < SMALL:
        block_k, block_r = SMALL_TILE
    plans.launch(reduce_tiles, (x, None, scratch, None, scratch), sizes, (0, 0), how, BLOCK_K=block_k, BLOCK_R=block_r)
    return scratch


def parts_of(programs: int, reduced: int, block: int, device: torch.device) -> tuple[int, int]:
    """(how many parts the reduced elements are cut into, how many each has): whole blocks, and four of them at least."""
    wanted = cdiv(BUSY * Target.at(device).sms, max(1, programs))
    parts = max(1, min(wanted, reduced // (4 * block), 1024))
    per = cdiv(cdiv(max(reduced, 1), parts), block) * block
    return cdiv(max(reduced, 1), per), per
