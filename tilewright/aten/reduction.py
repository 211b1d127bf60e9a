"""The reduction engine: a value, and perhaps an index or a second value, from all elements along some dimensions.

A row has four functions. `map` turns an element into a state of one to three numbers, `combine` makes one state of two, in any
order of elements, `identity` is the state of nothing, `finish` gives the results. Dimensions that are kept and dimensions that are
reduced are each brought to the fewest loops. A program keeps a tile of states, kept x reduced, takes in the reduced elements, and
combines the tile's columns in the end. Where there are few results, parts of the reduced elements are programs of their own, and a
second launch combines their states in order: the same bits every time, and no atomics.

`combine` knows nothing of its states: which index is lower, how many elements each is of. A state of the tile meets elements in
turn, their indices ascending, and all states have met as many; a row that gains by it says so (`InTurn`).
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
from ..core.target import INTERPRETING, Target
from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import plans
from .layout import Ints
from .plans import bits_of, own
from .pointwise import IN_TRITON, SMALL, WORDS, number, over, promoted_value, stored, text_of, whole_words
from .row import Declined, compute_dtype, taken, taken_as

LOOPS = 3
TOKENS = (
    "KEPT", "REDUCED", "PER", "PARTS", "K0", "K1", "R0", "R1", *(f"{t}{i}" for t in ("k", "r", "p", "q") for i in range(LOOPS)),
    "S0", "S1",
)  # fmt: skip
MOST_DIMS = 64
# Kept and reduced elements of a tile, where there are few in all: of short rows, and of others. Where all make one state, it is of
# elements with gaps, or of such as lie side by side: 8 KB of 16 bits, which 16 warps have on their way to them at once
SMALL_TILES, SMALL_WHOLES = ((64, 32), (4, 512)), (2048, 4096)
MOST_WHOLE = 4  # such tiles that one program takes: each is a wait of some 0.4 us, a second launch is one of 1 (H200)
LOADS = 8  # of 16 bytes, that a thread has on their way to it at a time, where elements lie side by side
# Warps for each SM, at most, that parts of the reduced elements make where there are fewer than half of them without. A warp has 2
# to 4 KB on their way to it, and memory is busy with 30 to 40 KB for each SM
BUSY = 32
HELD = 65536 // (32 * BUSY)  # registers of a thread, if an SM holds them all
NEITHER, REDUCED_ONES, KEPT_ONES = 0, 1, 2  # which elements lie side by side
MOST_TURNS = 1 << 16  # that a number of 16 bits counts
LEAST = 16  # elements that lie side by side, for tiles to be cut along them


class InTurn(NamedTuple):
    """How states of two numbers meet elements one after the other. `begin(x, ok)` is the state after a first element, or of nothing
    where that is not ok; `take(a, b, x, n)` the one after element x, if n came before it; `settle(a, b, first, step, count)` the
    row's own state of `count` elements, of which the n-th has the index first + n * step. `several(a, b, xs, n)`, where that takes
    less, is the one after as many elements as xs has. `pairs`: two elements of 16 bits may be met at once, as they are, where chips
    have instructions for that; turns are then counted in 16 bits too."""

    begin: Any
    take: Any
    settle: Any
    several: Any = None
    pairs: bool = False

    @property
    def cache_key(self) -> str:
        return text_of(self)


@dataclass(frozen=True)
class Row:
    """One kind of reduction; see the module. `results` are the dtypes that `finish` gives, in terms of the promoted one: "common",
    "int64" or "bool". `numbers` count those that map and finish take. `across` combines the columns of a tile of states at once,
    where that takes less than two at a time. `later`, for a scan of values with indices: of two values the one that holds, if the
    second comes later."""

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
    wide: bool = False  # fp32 elements are combined in float64: sums of them that cancel are then as exact as others
    in_turn: InTurn | None = None
    across: Any = None
    later: Any = None

    @property
    def indexed(self) -> bool:
        """Whether a state is a value and its index."""
        return self.states == 2


@dataclass(frozen=True)
class How:
    """What a kernel is compiled for. No tuple: newer versions of Triton make one of constants of it, and `tl.reduce` does not take
    a constant for a function."""

    MAP: Any
    COMBINE: Any
    IDENTITY: Any
    FINISH: Any
    IN_TURN: Any
    ACROSS: Any
    LATER: Any
    STATES: int
    NUMBERS: int
    RESULTS: int
    COMMON: Any
    COMPUTE: Any

    @property
    def cache_key(self) -> str:
        return text_of(vars(self).values())


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
def offset(i, count, N0, N1, s0, s1, s2):
    """Where the i-th of `count` elements in up to three loops lies. One loop, as there mostly is, asks for no division."""
    at = i.to(tl.int64) * s0
    if count > N0:
        row, place = over(i, N0, count)
        outer, inner = over(row, N1, count)
        at = place.to(tl.int64) * s0 + inner.to(tl.int64) * s1 + outer.to(tl.int64) * s2
    return at


@triton.jit
def offset_of_tile(i, N1, s1, s2, EVEN: tl.constexpr):
    """Where the i-th run of elements along the innermost loop begins."""
    return whole_words((i % N1).to(tl.int64) * s1 + (i // N1).to(tl.int64) * s2, EVEN)


@triton.jit
def kept_tile(KEPT, K0, ALONG: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """(the numbers of a program's kept elements, which of them are there, their run, where in it they are). If there are no runs,
    those that are not there are in the last one's place."""
    if ALONG == 2:
        tiles = tl.cdiv(K0, BLOCK_K)
        run = tl.program_id(0) // tiles
        place = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        return run.to(tl.int64) * K0 + place, place < whole_words(K0, EVEN), run, place
    else:
        k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        return k, k < KEPT, 0, tl.minimum(k, KEPT - 1)


@triton.jit
def kept_at(run, place, KEPT, K0, K1, s0, s1, s2, ALONG: tl.constexpr, ONE_K: tl.constexpr, EVEN: tl.constexpr):
    """Where they lie [n, 1], by an operand's strides."""
    if ALONG == 2:
        return (offset_of_tile(run, K1, s1, s2, EVEN) + place)[:, None]
    else:
        return whole_words(place * s0 if ONE_K else offset(place, KEPT, K0, K1, s0, s1, s2), EVEN)[:, None]


def tiles_of(a: Any) -> int:
    """How many tiles of kept elements there are."""
    if a.ALONG == KEPT_ONES:
        return cdiv(a.K0, a.BLOCK_K) * (a.KEPT // a.K0)
    return cdiv(a.KEPT, a.BLOCK_K)


@triton.jit
def elements(
    X, at, r, ok, none, REDUCED, R0, R1, r0, r1, r2, ALONG: tl.constexpr, ONE_R: tl.constexpr, EVEN: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """A tile of elements, promoted; `none` for those that are not `ok`. Both are None where all are."""
    at = at + along(r, REDUCED, R0, R1, r0, r1, r2, ALONG, ONE_R, EVEN)[None, :]
    return promoted_value(tl.load(X + at, ok, none), HOW)


@triton.jit
def taken_in(state, none, x, other, ok, S0, S1, MASKED: tl.constexpr, HOW: tl.constexpr):
    """States, and elements with indices or a second operand's; if MASKED, those that are `ok`, and `none` in the others' place."""
    MAP: tl.constexpr = HOW.MAP
    mapped = MAP(x, other, *given_numbers(S0, S1, HOW))
    if HOW.STATES == 1:
        return combined(state, (tl.where(ok, mapped, none[0]) if MASKED else mapped,), HOW)
    elif HOW.STATES == 2:
        return combined(state, (tl.where(ok, mapped[0], none[0]), tl.where(ok, mapped[1], none[1])), HOW)
    else:
        return combined(
            state,
            (tl.where(ok, mapped[0], none[0]), tl.where(ok, mapped[1], none[1]), tl.where(ok, mapped[2], none[2])),
            HOW,
        )


@triton.jit
def taken_in_turn(state, xs, n, HOW: tl.constexpr):
    """States that have met elements in turn, before which n came."""
    if HOW.IN_TURN.several is not None:
        state = HOW.IN_TURN.several(*state, xs, n)
    else:
        for i in tl.static_range(len(xs)):
            state = HOW.IN_TURN.take(*state, xs[i], n + i)
    return state


def warps_of(BLOCK_R: int, UNROLL: int) -> int:
    """Of a program. One that has long rows to itself takes them in fewer and longer strides; one that has all there is, few
    elements, takes them at once."""
    return 16 if SMALL_WHOLES[True] == BLOCK_R else 8 if BLOCK_R == 2048 and UNROLL > 1 else 4


def options_of(a: Any) -> dict[str, int]:
    """Parts are as many as all SMs hold at once: with a few registers more they are two rounds of programs, the second of a few (71
    for 64: 61 us for 41 of moments down 8192 columns, H200). Numbers of 64 bits do not fit."""
    held = a.PARTS > 1 and a.EVEN and a.UNROLL > 1 and a.X.element_size() < 8
    return {"num_warps": warps_of(a.BLOCK_R, a.UNROLL), **({"maxnreg": HELD} if held else {})}


@kernel(grid=lambda a: (tiles_of(a), a.PARTS), tokens=TOKENS, default=options_of)
def reduce_tiles(
    X, Y, OUT0, OUT1, SCRATCH, KEPT, REDUCED, PER, PARTS, K0, K1, R0, R1, k0, k1, k2, r0, r1, r2, p0, p1, p2, q0, q1, q2,
    S0: tl.int64, S1: tl.int64, HOW: tl.constexpr, ALONG: tl.constexpr, ONE_K: tl.constexpr, ONE_R: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Strides k, r of X and p, q of Y along kept and reduced loops. Each of PARTS programs takes PER reduced elements, whole tiles;
    SCRATCH [STATES, PARTS, KEPT] holds their states, if there is more than one. PDL: the launch that combines them may begin, and
    waits by itself.

    To divide an element's number by the sizes of loops takes a hundred instructions, and hides which elements lie side by side. So
    ONE_K, ONE_R say that there is one loop. ALONG says which elements lie side by side, 1 for reduced and 2 for kept ones: a tile
    then ends where their loop does, and only the tile's number is divided. EVEN: all runs are whole words and begin at them.

    UNROLL tiles are on their way at a time, where they are whole; those that are left come one by one. Of several runs all are so
    many whole tiles, if UNROLL is more than 1. States of kept elements that are not there are those of others or of zeros."""
    SPLIT: tl.constexpr = ALONG > 0 and not ONE_R
    IN_TURN: tl.constexpr = None if SPLIT and UNROLL == 1 else HOW.IN_TURN
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k, inside_k, run, place = kept_tile(KEPT, K0, ALONG, EVEN, BLOCK_K)
    at_x = kept_at(run, place, KEPT, K0, K1, k0, k1, k2, ALONG, ONE_K, EVEN)
    at_y = at_x
    if Y is not None:
        at_y = kept_at(run, place, KEPT, K0, K1, p0, p1, p2, ALONG, ONE_K, EVEN)
    part = tl.program_id(1).to(tl.int64)
    across_r = tl.cdiv(R0, BLOCK_R)
    tiles = across_r * (REDUCED // R0) if SPLIT else tl.cdiv(REDUCED, BLOCK_R)
    length = whole_words(R0 if SPLIT else REDUCED, EVEN and ALONG == 1)
    start = part * (PER // BLOCK_R)
    stop = tl.minimum(start + PER // BLOCK_R, tiles)
    left = start
    if IN_TURN is None:
        state = nothing(BLOCK_K, BLOCK_R, HOW)
        none = state
    elif UNROLL > 1:
        state = IN_TURN.begin(tl.zeros([BLOCK_K, BLOCK_R], HOW.COMPUTE), tl.zeros([BLOCK_K, BLOCK_R], tl.int1))
    else:
        r = start * BLOCK_R + tl.arange(0, BLOCK_R)
        ok = inside_k[:, None] & (r < length)[None, :]
        state = IN_TURN.begin(elements(X, at_x, r, ok, 0, REDUCED, R0, R1, r0, r1, r2, ALONG, ONE_R, EVEN, HOW), ok)
        left += 1
    if UNROLL > 1:
        left += (tl.minimum(stop, REDUCED // BLOCK_R) - start) // UNROLL * UNROLL
        inside, outside = (inside_k[:, None], 0) if ALONG == 2 else (None, None)
        for first in tl.range(start, left, UNROLL):
            from_x, from_y, tile_r = at_x, at_y, first
            if SPLIT:
                run_r = tl.cast(first, tl.int32) // across_r
                tile_r = (tl.cast(first, tl.int32) % across_r).to(tl.int64)
                from_x = at_x + offset_of_tile(run_r, R1, r1, r2, EVEN)
                if Y is not None:
                    from_y = at_y + offset_of_tile(run_r, R1, q1, q2, EVEN)
            in_turn = ()
            for ahead in tl.static_range(UNROLL):
                r = (tile_r + ahead) * BLOCK_R + tl.arange(0, BLOCK_R)
                x = elements(X, from_x, r, inside, outside, REDUCED, R0, R1, r0, r1, r2, ALONG, ONE_R, EVEN, HOW)
                if IN_TURN is not None:
                    in_turn = in_turn + (x,)
                elif Y is not None:
                    y = elements(Y, from_y, r, inside, outside, REDUCED, R0, R1, q0, q1, q2, ALONG, ONE_R, EVEN, HOW)
                    state = taken_in(state, none, x, y, inside, S0, S1, False, HOW)
                else:  # a row that asks for indices meets elements in turn
                    state = taken_in(state, none, x, None, inside, S0, S1, False, HOW)
            if IN_TURN is not None:
                state = taken_in_turn(state, in_turn, (first - start).to(tl.int32), HOW)
    for tile in tl.range(left, stop):
        from_x, from_y = at_x, at_y
        if SPLIT:
            run_r = tl.cast(tile, tl.int32) // across_r
            r = (tl.cast(tile, tl.int32) % across_r).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
            index = run_r.to(tl.int64) * R0 + r
            from_x = at_x + offset_of_tile(run_r, R1, r1, r2, EVEN)
            if Y is not None:
                from_y = at_y + offset_of_tile(run_r, R1, q1, q2, EVEN)
        else:
            r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
            index = r
        ok = inside_k[:, None] & (r < length)[None, :]
        x = elements(X, from_x, r, ok, 0, REDUCED, R0, R1, r0, r1, r2, ALONG, ONE_R, EVEN, HOW)
        if IN_TURN is not None:
            new = IN_TURN.take(*state, x, (tile - start).to(tl.int32))
            state = (tl.where(ok, new[0], state[0]), tl.where(ok, new[1], state[1]))
        elif Y is not None:
            y = elements(Y, from_y, r, ok, 0, REDUCED, R0, R1, q0, q1, q2, ALONG, ONE_R, EVEN, HOW)
            state = taken_in(state, none, x, y, ok, S0, S1, True, HOW)
        else:
            index = tl.broadcast_to(index[None, :], [BLOCK_K, BLOCK_R])
            state = taken_in(state, none, x, index, ok, S0, S1, True, HOW)
    if IN_TURN is None:
        total = across(state, None, HOW)
    else:
        met = tl.minimum(stop * BLOCK_R, REDUCED) - start * BLOCK_R
        column = tl.broadcast_to(tl.arange(0, BLOCK_R)[None, :], [BLOCK_K, BLOCK_R])
        count = (met // BLOCK_R).to(tl.int32) + (column < (met % BLOCK_R).to(tl.int32)).to(tl.int32)
        total = across(IN_TURN.settle(*state, column.to(PER.dtype), PER * 0 + BLOCK_R, count), met, HOW)
        if HOW.STATES == 2:  # indices within the part, which seldom need 64 bits
            total = total[0], total[1].to(tl.int64) + start * BLOCK_R
    if SCRATCH is None:
        finish_and_store(total, OUT0, OUT1, k, inside_k, REDUCED, S0, S1, HOW)
    else:
        STATES: tl.constexpr = HOW.STATES
        for i in tl.static_range(STATES):
            tl.store(SCRATCH + (i * PARTS + part) * KEPT + k, total[i].to(SCRATCH.dtype.element_ty), inside_k)


@triton.jit
def along(r, REDUCED, R0, R1, r0, r1, r2, ALONG: tl.constexpr, ONE_R: tl.constexpr, EVEN: tl.constexpr):
    """How far reduced elements lie from their run's first; see the kernel."""
    if ALONG == 1:
        return r
    elif ALONG == 2 or ONE_R:
        return r * whole_words(r0, EVEN)
    else:
        return offset(r, REDUCED, R0, R1, r0, r1, r2)


@triton.jit
def across(state, count, HOW: tl.constexpr):
    """One state of each row of a tile of them; `count`: how many elements each is of, if all are of as many."""
    if HOW.ACROSS is not None:
        return HOW.ACROSS(*state, count)
    elif HOW.STATES == 1:
        return (tl.reduce(state[0], 1, HOW.COMBINE),)
    else:
        return tl.reduce(state, 1, HOW.COMBINE)


@kernel(grid=lambda a: (cdiv(a.KEPT, a.BLOCK_K),), tokens=("KEPT", "REDUCED", "PARTS", "S0", "S1"),
        default=lambda a: {"num_warps": 4, **({"launch_pdl": True} if a.PDL else {})})  # fmt: skip
def reduce_parts(
    OUT0, OUT1, SCRATCH, KEPT, REDUCED, PARTS, S0: tl.int64, S1: tl.int64, HOW: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the states of parts, always in the same order. PDL: started before the launch that makes them has ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < KEPT
    state = load_states(SCRATCH, 0, PARTS, PARTS, KEPT, k, inside, BLOCK_K, BLOCK_P, HOW)
    for first in range(BLOCK_P, PARTS, BLOCK_P):
        state = combined(state, load_states(SCRATCH, first, PARTS, PARTS, KEPT, k, inside, BLOCK_K, BLOCK_P, HOW), HOW)
    finish_and_store(across(state, None, HOW), OUT0, OUT1, k, inside, REDUCED, S0, S1, HOW)


@triton.jit
def load_states(
    SCRATCH, first, stop, PARTS, KEPT, k, inside, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """The states [BLOCK_K, BLOCK_P] of the parts from `first` to `stop`, or of nothing; in float64, where that holds indices."""
    part = first + tl.arange(0, BLOCK_P)
    ok = inside[:, None] & (part < stop)[None, :]
    at = SCRATCH + part.to(tl.int64)[None, :] * KEPT + k[:, None]
    none = nothing(BLOCK_K, BLOCK_P, HOW)
    if HOW.STATES == 1:
        return (load_number(at, ok, none[0]),)
    elif HOW.STATES == 2:
        return (load_number(at, ok, none[0]), load_number(at + PARTS * KEPT, ok, none[1]))
    else:
        return (
            load_number(at, ok, none[0]),
            load_number(at + PARTS * KEPT, ok, none[1]),
            load_number(at + 2 * PARTS * KEPT, ok, none[2]),
        )


@triton.jit
def load_number(at, ok, none):
    return tl.load(at, ok, none.to(at.dtype.element_ty))


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
    """At most three loops, see `merged`."""
    sizes, steps = merged(shape, strides, ordered)
    if len(sizes) > LOOPS:
        raise Declined("more loops than a launch takes")
    return [*sizes, *[1] * (LOOPS - len(sizes))], [[*own, *[0] * (LOOPS - len(own))] for own in steps]


def merged(shape: Ints, strides: list[Ints], ordered: bool = True) -> tuple[list[int], list[list[int]]]:
    """The fewest loops: in the order of the dimensions, for kept ones number the results, reduced ones the indices; or, where no
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
    return sizes, steps


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


class Pace(NamedTuple):
    """`ahead`: elements of each operand that a thread has on their way to it at a time; `short`: those of a tile of short rows;
    `whole`: those of a tile where all elements make one state."""

    ahead: int
    short: int
    whole: int = 2048


class Form(NamedTuple):
    """How a launch goes through elements; see the kernel."""

    along: int
    one_k: bool
    one_r: bool
    even: bool
    block_k: int
    block_r: int
    unroll: int = 1
    small: bool = False  # one of those that few elements take

    @property
    def constants(self) -> dict[str, int]:
        return {"ALONG": self.along, "ONE_K": self.one_k, "ONE_R": self.one_r, "EVEN": self.even, "BLOCK_K": self.block_k,
                "BLOCK_R": self.block_r, "UNROLL": self.unroll}  # fmt: skip


def form_of(
    sizes_k: list[int], steps_k: list[list[int]], sizes_r: list[int], steps_r: list[list[int]], pace: Pace
) -> Form:
    """The form for loops of these sizes, of which each operand has its steps. Tiles lie along whichever elements lie side by side;
    rows that are short are taken many at a time."""
    kept, reduced = math.prod(sizes_k), math.prod(sizes_r)
    if kept * reduced < SMALL:
        return small_form(kept, reduced, sizes_r, steps_r)
    one_k, one_r = sizes_k[1:] == [1, 1], sizes_r[1:] == [1, 1]
    along_r = steps_r[0][0] if sizes_r[0] > 1 else 1 << 62
    along_k = steps_k[0][0] or 1 << 62
    if along_r <= along_k:
        along = REDUCED_ONES if all(own[0] == 1 for own in steps_r) and (one_r or sizes_r[0] >= LEAST) else NEITHER
    else:
        near = all(own[0] == 1 for own in steps_k) and (one_k or sizes_k[0] >= 64)
        along = KEPT_ONES if near and (one_r or sizes_r[0] >= LEAST) else NEITHER
    even = along != NEITHER and in_words(along, sizes_k, steps_k, sizes_r, steps_r)
    if not even:  # an element has an address of its own, which takes registers
        pace = pace._replace(short=2048)
    if along == KEPT_ONES:
        tile = column_tile(sizes_k[0], sizes_r[0], pace, one_r)
    elif along == REDUCED_ONES:
        tile = row_tile(kept, sizes_r[0], pace, one_r)
    elif along_r <= along_k:
        tile = row_tile(kept, reduced, pace._replace(ahead=8), one_r)
    else:
        tile = 128, 16, 1
    return Form(along, one_k and along != KEPT_ONES, one_r, even, *tile)


def small_form(kept: int, reduced: int, sizes_r: list[int], steps_r: list[list[int]]) -> Form:
    """The form of few elements, whose time is the launch's: these are few, for each is compiled."""
    if kept == 1:
        beside = sizes_r[1:] == [1, 1] and all(own[0] == 1 for own in steps_r) and reduced % WORDS == 0
        return Form(REDUCED_ONES if beside else NEITHER, beside, beside, beside, 1, SMALL_WHOLES[beside], small=True)
    return Form(NEITHER, False, False, False, *SMALL_TILES[reduced > SMALL_TILES[0][1]], small=True)


def row_tile(kept: int, length: int, pace: Pace, one: bool) -> tuple[int, int, int]:
    """(BLOCK_K, BLOCK_R, UNROLL) of reduced elements in runs of some length, or in one. Of a tile of 1024 a thread has 8."""
    if length <= 64:
        return (pace.short // 16, 16, 1) if length <= 16 else (pace.short // 32, 32, 1)
    if length <= 512 and kept > 1:
        return 8, 256, 1
    if kept == 1:
        return 1, pace.whole, at_a_time(pace.whole, length, pace.ahead // 8, one)
    unroll = at_a_time(1024, length, pace.ahead // 8, one)
    if unroll == pace.ahead // 8 > 1:
        return 1, 1024, unroll
    return 2, 1024, max(1, unroll // 2)


def column_tile(width: int, length: int, pace: Pace, one: bool) -> tuple[int, int, int]:
    """The same of kept elements that lie side by side, in runs of some width. Narrow and tall, by which there are fewer parts."""
    block_k = tile_width(width, 64)
    unroll = at_a_time(1024 // block_k, length, pace.ahead // 8, one)
    return block_k, (1024 if unroll > 1 else 2048) // block_k, unroll


def at_a_time(block: int, length: int, most: int, one: bool) -> int:
    """How many blocks are on their way at a time: no more than a run has, and where there are several runs a divisor of it."""
    while most > 1 and (block * most > length or not (one or length % (block * most) == 0)):
        most //= 2
    return most


def tile_width(width: int, most: int) -> int:
    """Of a tile along runs of some width."""
    return min(most, max(16, triton.next_power_of_2(width)))


def pace_of(row: Row, operands: list[Tensor]) -> Pace:
    """Of rows that compute for long (a power, or several states that do not meet elements in turn), a thread has no more than 8
    elements on their way to it."""
    if row.in_turn is None and (row.states > 1 or row.numbers):
        return Pace(8, 2048)
    ahead = min(64, max(8, LOADS * 16 // operands[0].element_size() // len(operands)))
    if row.states > 1:
        return Pace(ahead, 2048, 2048 if row.states == 2 else 1024)
    return Pace(ahead, 4096 if len(operands) == 1 and ahead >= 32 else 2048)


def in_words(
    along: int, sizes_k: list[int], steps_k: list[list[int]], sizes_r: list[int], steps_r: list[list[int]]
) -> bool:
    """Whether all runs of elements that lie side by side are whole words and begin at one."""
    inner, outer = ((sizes_r, steps_r), (sizes_k, steps_k))[:: 1 if along == REDUCED_ONES else -1]
    return (
        inner[0][0] % WORDS == 0
        and all(s % WORDS == 0 for own in inner[1] for s in own[1:])
        and all(s % WORDS == 0 for own in outer[1] for s in own)
    )


def compute_of(row: Row, common: torch.dtype) -> torch.dtype:
    """What states are computed in. Of 16-bit floats fp32 is wide; a conversion and a sum in float64 of each fp32 element take a
    third of the time that an H100's memory takes to bring it."""
    return torch.float64 if row.wide and common == torch.float32 else compute_dtype(common)


@functools.cache
def how_of(row: Row, common: torch.dtype, pairs: bool = False) -> How:
    """`pairs`: elements of 16 bits are met as they are; see `InTurn`."""
    return How(
        row.map, row.combine, row.identity, row.finish, row.in_turn, row.across, row.later, row.states, row.numbers,
        len(row.results), IN_TRITON[common], IN_TRITON[common if pairs else compute_of(row, common)],
    )  # fmt: skip


def in_pairs(row: Row, common: torch.dtype, form: Form, per: int, device: torch.device) -> bool:
    """Whether a launch meets elements two at a time. The interpreter has no such instructions."""
    target = Target.at(device)
    wanted = row.in_turn is not None and row.in_turn.pairs and common in (torch.bfloat16, torch.float16)
    able = target.nvidia and target.number >= 90 and target.stands_for is None and not INTERPRETING
    return wanted and able and form.unroll > 1 and per // form.block_r <= MOST_TURNS


def launch(row, x, other, kept, reduced, dims, outs, common, numbers) -> None:
    operands = [x] if other is None else [x, other]
    strides = [split(t.stride(), dims) for t in operands]
    sizes_k, steps_k = loops_of(kept, [own[0] for own in strides])
    sizes_r, steps_r = loops_of(reduced, [own[1] for own in strides], ordered=row.indexed)
    compute = compute_of(row, common)
    KEPT, REDUCED = math.prod(kept), math.prod(reduced)
    form = form_of(sizes_k, steps_k, sizes_r, steps_r, pace_of(row, operands))
    if form.small and KEPT == 1:
        parts, per = parts_of_few(REDUCED, form.block_r)
    else:
        busy = BUSY // warps_of(form.block_r, form.unroll)
        programs = programs_of(form, sizes_k)
        parts, per = parts_of(programs, padded(form, sizes_r), form.block_r, form.unroll, busy, x.device)
    how = how_of(row, common)
    slots = [*(bits_of(n, compute) for n in numbers), 0, 0][:2]
    second = outs[1] if len(outs) > 1 else None
    scratch = None
    if parts > 1:
        scratch = states_of(row, parts, KEPT, compute, x.device)
    extra = [0] * (2 * LOOPS) if other is None else [*steps_k[1], *steps_r[1]]
    sizes = KEPT, REDUCED, per, parts, sizes_k[0], sizes_k[1], sizes_r[0], sizes_r[1], *steps_k[0], *steps_r[0], *extra
    early = scratch is not None and Target.at(x.device).early_launch
    tensors = x, other, outs[0], second, scratch
    how_tiles = how_of(row, common, in_pairs(row, common, form, per, x.device))
    plans.launch(reduce_tiles, tensors, sizes, slots, how_tiles, **form.constants, PDL=early)
    if scratch is not None:
        # Narrow and tall: a program that is wide waits for one part after the other
        block_k, block_p = (32, 32) if KEPT > 16 else (1, 1024) if KEPT == 1 else (4, 256)
        numbers, tile = (KEPT, REDUCED, parts), {"BLOCK_K": block_k, "BLOCK_P": block_p}
        plans.launch(reduce_parts, (outs[0], second, scratch), numbers, slots, how, **tile, PDL=early)


def programs_of(form: Form, sizes_k: list[int]) -> int:
    """How many tiles of kept elements a form has."""
    if form.along == KEPT_ONES:
        return cdiv(sizes_k[0], form.block_k) * math.prod(sizes_k[1:])
    return cdiv(math.prod(sizes_k), form.block_k)


def padded(form: Form, sizes_r: list[int]) -> int:
    """How many reduced elements there are in whole tiles, where each run of them begins one."""
    if form.along == NEITHER or form.one_r:
        return math.prod(sizes_r)
    return cdiv(sizes_r[0], form.block_r) * form.block_r * math.prod(sizes_r[1:])


def states_of(row: Row, parts: int, kept: int, compute: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the states of parts. float64 holds every index and every count that there can be."""
    exact = compute == torch.int64 or (row.states == 1 and "int64" not in row.results)
    return own(torch.empty(row.states, parts, kept, dtype=compute if exact else torch.float64, device=device))


def totals(row: Row, x: Tensor, form: Form, sizes_k, steps_k, step: int, common, parts: int, per: int) -> Tensor:
    """The states of parts [states, parts, kept], each of `per` elements along one loop, whole tiles of a form."""
    kept, reduced = math.prod(sizes_k), x.numel() // math.prod(sizes_k)
    scratch = states_of(row, parts, kept, compute_of(row, common), x.device)
    sizes = kept, reduced, per, parts, sizes_k[0], sizes_k[1], reduced, 1, *steps_k, step, 0, 0, *[0] * (2 * LOOPS)
    tensors = x, None, scratch, None, scratch
    plans.launch(reduce_tiles, tensors, sizes, (0, 0), how_of(row, common), **form.constants, PDL=False)
    return scratch


def parts_of(programs: int, reduced: int, block: int, unroll: int, busy: int, device: torch.device) -> tuple[int, int]:
    """(how many parts the reduced elements are cut into, how many each has), for so many programs to be busy on each SM: whole
    blocks, as many as are on their way at a time, and four of them at least."""
    wanted, together = busy * Target.at(device).sms, block * unroll
    parts = max(1, min(wanted // max(1, programs), reduced // max(together, 4 * block), 1024))
    per = cdiv(cdiv(max(reduced, 1), parts), together) * together
    return cdiv(max(reduced, 1), per), per


def parts_of_few(reduced: int, block: int) -> tuple[int, int]:
    """The same of few elements that make one state: one part, or one for each tile."""
    tiles = max(1, cdiv(reduced, block))
    return (1, tiles * block) if tiles <= MOST_WHOLE else (tiles, block)
