"""Norms and their gradients over cells, the second part of the engine `rows`: what layer and RMS norm (`norm_rows.py`), group and
batch norm (`norm_channels.py`) and weight norm (`norm_weights.py`) have in common.

All are one thing: a *cell* is what is normalised together, a row of layer norm, a group of one image, a channel of all images, a
vector of weight norm. Its elements are R1 stretches of R0. Programs take a few cells each. Where a tile holds a whole cell it is
read once; else a second pass goes back from its end, of which the cache still has the most. Moments are of tiles, in two steps
while a tile is in registers, and are combined in order. Where cells are few, their moments or sums are found by parts, and the
second pass is split among programs. Gradients of weights are sums over cells: programs sum their own, and a second launch adds
these in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..runtime.kernel import kernel
from . import norm_cells, plans, reduction, reduction_rows
from .functions import divide, square_root
from .plans import bits_of, own
from .pointwise import IN_TRITON, SMALL, number, over, stored, whole_words
from .row import Declined, compute_dtype, taken
from .softmax import contiguous, warps

SIZES = ("KEPT", "R0", "R1", "K0", "k0", "k1", "r0", "r1", "c0", "STEPS")
SMALL_TILES = (64, 32), (4, 512)
LONGEST, LONGEST_OF_TWO = 16384, 8192  # elements that a tile holds of a cell
STRETCH = 4096  # elements of a tile, of cells that none holds
ACROSS = 32, 256  # the tile where cells lie side by side
FEWEST = 1 << 18  # elements, from which a cell's parts are worth programs of their own
BUSY = 2  # programs for each SM


def warps_of(a) -> dict[str, int]:
    """Of cells that are read twice, few at a time: the cache is to hold them until then."""
    if a.FORM == "along" and not a.ONCE:
        return {"num_warps": 4 if a.BLOCK_R < STRETCH else 16}
    return warps(a)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def cell_start(k, which, repeat, k0, k1, FORM: tl.constexpr, EVEN: tl.constexpr):
    """Where cells begin [BLOCK_K, 1]."""
    if FORM == "across":
        return k[:, None]
    else:
        return (which * whole_words(k0, EVEN) + repeat * whole_words(k1, EVEN))[:, None]


@triton.jit
def stretch_at(j, r, r0, r1, FORM: tl.constexpr, EVEN: tl.constexpr):
    """Where elements r of stretch j lie from a cell's beginning [1, BLOCK_R]."""
    if FORM == "along":
        return (j * whole_words(r1, EVEN) + r)[None, :]
    else:
        return (j * whole_words(r1, EVEN) + r * whole_words(r0, EVEN))[None, :]


@triton.jit
def of_channel(W, which, j, r, ok_k, ok_r, c0, COMPUTE: tl.constexpr, CHANNEL: tl.constexpr, FORM: tl.constexpr):
    """A weight for each element. CHANNEL: which of its coordinates a channel goes by, a "cell", a "stretch" or an "element"; of
    elements that lie side by side, by nothing else."""
    if CHANNEL == "cell":
        return tl.load(W + (which * c0)[:, None], ok_k, 0).to(COMPUTE)
    elif CHANNEL == "stretch":
        return tl.load(W + (which * c0 + j)[:, None], ok_k, 0).to(COMPUTE)
    elif FORM == "along":
        return tl.load(W + r[None, :], ok_r, 0).to(COMPUTE)
    else:
        return tl.load(W + (which * c0)[:, None] + r[None, :], ok_k & ok_r, 0).to(COMPUTE)


@triton.jit
def cells_of(KEPT, K0, BLOCK_K: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr):
    """(a program's cells, which of K0 each is, in which repeat of these, whether there is such a cell)."""
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    repeat, which = over(k, K0, KEPT)
    which = which.to(tl.int64)
    if FORM == "across":
        return k, which, repeat.to(tl.int64), (k < whole_words(KEPT, EVEN))[:, None]
    else:
        return k, which, repeat.to(tl.int64), (k < KEPT)[:, None]


@kernel(
    grid=lambda a: (cdiv(a.KEPT, a.BLOCK_K), cdiv(a.R1 * cdiv(a.R0, a.BLOCK_R), a.STEPS)),
    tokens=(*SIZES, "EPS", "MOMENTUM"),
    default=warps_of,
)
def normalise(
    X, Y, W, B, MEAN, RSTD, MEAN_IN, VAR_IN, RUNNING_MEAN, RUNNING_VAR, KEPT, R0, R1, K0, k0, k1, r0, r1, c0, STEPS,
    EPS: tl.int64, MOMENTUM: tl.int64, KIND: tl.constexpr, CHANNEL: tl.constexpr, COMPUTE: tl.constexpr, FORM: tl.constexpr,
    EVEN: tl.constexpr, ONCE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Strides k from cell to cell (K0 of them, then again), r along a cell, c0 of channels. KIND: "moments", the root "mean" of
    squares, or the "norm" itself. MEAN_IN, VAR_IN: moments that are known, where a program takes STEPS tiles of a cell. FORM:
    "along" where a stretch's elements lie side by side, "across" where cells do, "any". ONCE: a tile holds all of a cell."""
    # A tile of a long cell leaves no registers for weights
    EARLY: tl.constexpr = ONCE and FORM == "any" and KIND != "norm"
    k, which, repeat, inside = cells_of(KEPT, K0, BLOCK_K, FORM, EVEN)
    part = tl.program_id(1)
    at_cell = cell_start(k, which, repeat, k0, k1, FORM, EVEN)
    if FORM == "along":
        R0 = whole_words(R0, EVEN)
    lane = tl.arange(0, BLOCK_R).to(tl.int64)
    tiles = tl.cdiv(R0, BLOCK_R)
    steps = R1 * tiles
    one = tl.full([], 1.0, COMPUTE)
    elements = (R1.to(tl.int64) * R0).to(COMPUTE)
    if KIND == "norm":
        wanted = tl.load(W + k, k < KEPT, 0).to(COMPUTE)
    mean = tl.zeros([BLOCK_K], COMPUTE)
    about = tl.zeros([BLOCK_K], COMPUTE)  # the sum of squares about the mean
    x = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
    if MEAN_IN is not None:
        mean = tl.load(MEAN_IN + k, k < KEPT, 0).to(COMPUTE)
        about = tl.load(VAR_IN + k, k < KEPT, 0).to(COMPUTE) * elements
    elif ONCE:
        ok = inside & (lane < R0)[None, :]
        x = tl.load(X + at_cell + stretch_at(0, lane, r0, r1, FORM, EVEN), ok, 0).to(COMPUTE)
        if EARLY:  # before the sums, which everything after them waits for
            if W is not None:
                weight = of_channel(W, which, 0, lane, inside, (lane < R0)[None, :], c0, COMPUTE, CHANNEL, FORM)
            if B is not None:
                bias = of_channel(B, which, 0, lane, inside, (lane < R0)[None, :], c0, COMPUTE, CHANNEL, FORM)
        if KIND == "moments":
            mean = divide(tl.sum(x, 1), elements)
            apart = tl.where(ok, x - mean[:, None], 0.0)
            about = tl.sum(apart * apart, 1)
        else:
            about = tl.sum(x * x, 1)
    else:
        count = one * 0
        squares = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
        for step in tl.range(0, steps):
            first = step % tiles * BLOCK_R
            r = first + lane
            ok = inside & (r < R0)[None, :]
            at = stretch_at((step // tiles).to(tl.int64), r, r0, r1, FORM, EVEN)
            value = tl.load(X + at_cell + at, ok, 0).to(COMPUTE)
            if KIND == "moments":
                here = tl.minimum(R0 - first, BLOCK_R).to(COMPUTE)
                own = divide(tl.sum(value, 1), here)
                apart = tl.where(ok, value - own[:, None], 0.0)
                share = divide(here, count + here)
                shift = own - mean
                mean += shift * share
                about += tl.sum(apart * apart, 1) + shift * shift * (count * share)
                count += here
            else:
                squares += value * value
        if KIND != "moments":
            about = tl.sum(squares, 1)
    if KIND == "norm":
        rstd = square_root(about)
    else:
        rstd = divide(one, square_root(divide(about, elements) + number(EPS, COMPUTE)))
    at_stats = (k < KEPT) & (part == 0)
    if MEAN is not None:
        tl.store(MEAN + k, stored(mean, MEAN), at_stats)
    if RSTD is not None:
        tl.store(RSTD + k, stored(rstd, RSTD), at_stats)
    if RUNNING_MEAN is not None:
        keep = number(MOMENTUM, COMPUTE)
        before = tl.load(RUNNING_MEAN + k, at_stats, 0).to(COMPUTE)
        tl.store(RUNNING_MEAN + k, stored(mean * keep + before * (one - keep), RUNNING_MEAN), at_stats)
        before = tl.load(RUNNING_VAR + k, at_stats, 0).to(COMPUTE)
        unbiased = divide(about, elements - one)
        tl.store(RUNNING_VAR + k, stored(unbiased * keep + before * (one - keep), RUNNING_VAR), at_stats)
    scale = rstd[:, None]
    if KIND == "norm":
        scale = divide(wanted, rstd)[:, None]
    start = part * STEPS
    stop = tl.minimum(start + STEPS, steps)
    for back in tl.range(start, stop):
        step = start + stop - 1 - back
        j = (step // tiles).to(tl.int64)
        r = step % tiles * BLOCK_R + lane
        ok = inside & (r < R0)[None, :]
        at = at_cell + stretch_at(j, r, r0, r1, FORM, EVEN)
        if not ONCE:
            x = tl.load(X + at, ok, 0, eviction_policy="evict_first").to(COMPUTE)
        y = (x - mean[:, None]) * scale
        if EARLY:
            if W is not None:
                y = y * weight
            if B is not None:
                y = y + bias
        elif KIND != "norm":
            if W is not None:
                y = y * of_channel(W, which, j, r, inside, (r < R0)[None, :], c0, COMPUTE, CHANNEL, FORM)
            if B is not None:
                y = y + of_channel(B, which, j, r, inside, (r < R0)[None, :], c0, COMPUTE, CHANNEL, FORM)
        tl.store(Y + at, stored(y, Y), ok)


@kernel(
    grid=lambda a: (cdiv(a.KEPT, a.BLOCK_K), cdiv(a.R1 * cdiv(a.R0, a.BLOCK_R), a.STEPS)),
    tokens=(*SIZES, "EPS"),
    default=warps_of,
)
def normalise_backward(
    DY, X, W, MEAN, RSTD, SUM, SUM_X, DX, DW, DB, KEPT, R0, R1, K0, k0, k1, r0, r1, c0, STEPS, EPS: tl.int64,
    KIND: tl.constexpr, CHANNEL: tl.constexpr, TRAINED: tl.constexpr, COMPUTE: tl.constexpr, FORM: tl.constexpr,
    EVEN: tl.constexpr, ONCE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """SUM, SUM_X: sums of DY and of DY times the normalised X over cells, where they are known. DW, DB [KEPT] or, of channels that
    go by stretches, [KEPT, R1]: the same, as far as a cell goes. Where X was not normalised by moments of its own, TRAINED is not
    set, and RSTD is of a variance; of a norm, RSTD is the norm and W what it was brought to. Else as above."""
    k, which, repeat, inside = cells_of(KEPT, K0, BLOCK_K, FORM, EVEN)
    part = tl.program_id(1)
    at_cell = cell_start(k, which, repeat, k0, k1, FORM, EVEN)
    if FORM == "along":
        R0 = whole_words(R0, EVEN)
    lane = tl.arange(0, BLOCK_R).to(tl.int64)
    tiles = tl.cdiv(R0, BLOCK_R)
    steps = R1 * tiles
    one = tl.full([], 1.0, COMPUTE)
    elements = (R1.to(tl.int64) * R0).to(COMPUTE)
    if ONCE:  # before anything is divided: what comes after a call waits for it
        ok = inside & (lane < R0)[None, :]
        at = at_cell + stretch_at(0, lane, r0, r1, FORM, EVEN)
        dy = tl.load(DY + at, ok, 0).to(COMPUTE)
        x = tl.load(X + at, ok, 0).to(COMPUTE)
    else:
        dy = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
    rstd = tl.load(RSTD + k, k < KEPT, 1).to(COMPUTE)[:, None]
    if KIND == "norm":
        rstd = divide(one, rstd)
    elif not TRAINED:
        rstd = divide(one, square_root(rstd + number(EPS, COMPUTE)))
    mean = tl.zeros([BLOCK_K, 1], COMPUTE)
    if KIND == "moments":
        mean = tl.load(MEAN + k, k < KEPT, 0).to(COMPUTE)[:, None]
    total = tl.zeros([BLOCK_K], COMPUTE)
    total_x = tl.zeros([BLOCK_K], COMPUTE)
    normed = dy
    if SUM is not None:
        total = tl.load(SUM + k, k < KEPT, 0).to(COMPUTE)
        total_x = tl.load(SUM_X + k, k < KEPT, 0).to(COMPUTE)
    elif ONCE:
        normed = tl.where(ok, (x - mean) * rstd, 0.0)
        if CHANNEL == "element":
            if W is not None:
                dy = dy * of_channel(W, which, 0, lane, inside, (lane < R0)[None, :], c0, COMPUTE, CHANNEL, FORM)
        total = tl.sum(dy, 1)
        total_x = tl.sum(dy * normed, 1)
    else:
        for stretch in tl.range(0, R1):
            sums = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
            sums_x = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
            for first in tl.range(0, R0, BLOCK_R):
                r = first + lane
                ok = inside & (r < R0)[None, :]
                at = at_cell + stretch_at(stretch.to(tl.int64), r, r0, r1, FORM, EVEN)
                dy = tl.load(DY + at, ok, 0).to(COMPUTE)
                normed = tl.where(ok, (tl.load(X + at, ok, 0).to(COMPUTE) - mean) * rstd, 0.0)
                if CHANNEL == "element":
                    if W is not None:
                        dy = dy * of_channel(
                            W, which, stretch, r, inside, (r < R0)[None, :], c0, COMPUTE, CHANNEL, FORM
                        )
                sums += dy
                sums_x += dy * normed
            own = tl.sum(sums, 1)
            own_x = tl.sum(sums_x, 1)
            if CHANNEL == "stretch":
                if DW is not None:
                    tl.store(DW + k * R1 + stretch, stored(own_x, DW), k < KEPT)
                if DB is not None:
                    tl.store(DB + k * R1 + stretch, stored(own, DB), k < KEPT)
                if W is not None:
                    w = tl.load(W + which * c0 + stretch, k < KEPT, 0).to(COMPUTE)
                    own = own * w
                    own_x = own_x * w
            total += own
            total_x += own_x
    if CHANNEL == "cell":
        if DW is not None:
            tl.store(DW + k, stored(total_x, DW), (k < KEPT) & (part == 0))
        if DB is not None:
            tl.store(DB + k, stored(total, DB), (k < KEPT) & (part == 0))
    if DX is not None:
        about = divide(total_x, elements)[:, None]
        level = divide(total, elements)[:, None]
        if KIND == "norm":
            about = total_x[:, None]
        scale = rstd
        if CHANNEL == "cell":
            if W is not None:
                scale = rstd * tl.load(W + k, k < KEPT, 0).to(COMPUTE)[:, None]
        start = part * STEPS
        stop = tl.minimum(start + STEPS, steps)
        for back in tl.range(start, stop):
            step = start + stop - 1 - back
            j = (step // tiles).to(tl.int64)
            r = step % tiles * BLOCK_R + lane
            ok = inside & (r < R0)[None, :]
            at = at_cell + stretch_at(j, r, r0, r1, FORM, EVEN)
            if not ONCE:
                dy = tl.load(DY + at, ok, 0, eviction_policy="evict_first").to(COMPUTE)
                if CHANNEL != "cell":
                    if W is not None:
                        dy = dy * of_channel(W, which, j, r, inside, (r < R0)[None, :], c0, COMPUTE, CHANNEL, FORM)
                if TRAINED:
                    normed = (tl.load(X + at, ok, 0, eviction_policy="evict_first").to(COMPUTE) - mean) * rstd
            dx = dy
            if TRAINED:
                dx = dy - normed * about
                if KIND == "moments":
                    dx = dx - level
            tl.store(DX + at, stored(dx * scale, DX), ok)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK_N), cdiv(a.M, a.PER)),
    tokens=("M", "N", "PER"),
    default=lambda a: {"num_warps": 4},
)
def column_sums(
    DY, X, MEAN, RSTD, DW, DB, M, N, PER, BY: tl.constexpr, COMPUTE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DW, DB [parts, N]: sums over the PER rows of a part of DY times the normalised X, and of DY, both [M, N]. BY: moments are of
    a "row" or of a "column"."""
    N = whole_words(N, EVEN)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1).to(tl.int64)
    ok_n = (n < N)[None, :]
    dw = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    db = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    stop = tl.minimum((part + 1) * PER, M)
    for first in tl.range(part * PER, stop, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        ok = (m < stop)[:, None] & ok_n
        at = m[:, None] * N + n[None, :]
        dy = tl.load(DY + at, ok, 0).to(COMPUTE)
        if BY == "row":
            cell, there = m[:, None], (m < stop)[:, None]
        else:
            cell, there = n[None, :], ok_n
        x = tl.load(X + at, ok, 0).to(COMPUTE)
        if MEAN is not None:
            x -= tl.load(MEAN + cell, there, 0).to(COMPUTE)
        dw += tl.where(ok, dy * (x * tl.load(RSTD + cell, there, 0).to(COMPUTE)), 0.0)
        db += dy
    if DW is not None:
        tl.store(DW + part * N + n, stored(tl.sum(dw, 0), DW), n < N)
    if DB is not None:
        tl.store(DB + part * N + n, stored(tl.sum(db, 0), DB), n < N)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK_N),), tokens=("PARTS", "N"), default=lambda a: {"num_warps": 4})
def add_parts(
    FIRST,
    SECOND,
    OUT0,
    OUT1,
    WIDE0,
    WIDE1,
    PARTS,
    N,
    COMPUTE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums of parts [PARTS, N], in a fixed order; WIDE has them unrounded."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.zeros([BLOCK_P, BLOCK_N], COMPUTE)
    second = tl.zeros([BLOCK_P, BLOCK_N], COMPUTE)
    for part in tl.range(0, PARTS, BLOCK_P):
        p = part + tl.arange(0, BLOCK_P).to(tl.int64)
        ok = (p < PARTS)[:, None] & (n < N)[None, :]
        at = p[:, None] * N + n[None, :]
        if FIRST is not None:
            first += tl.load(FIRST + at, ok, 0).to(COMPUTE)
        if SECOND is not None:
            second += tl.load(SECOND + at, ok, 0).to(COMPUTE)
    if FIRST is not None:
        total = tl.sum(first, 0)
        if OUT0 is not None:
            tl.store(OUT0 + n, stored(total, OUT0), n < N)
        if WIDE0 is not None:
            tl.store(WIDE0 + n, stored(total, WIDE0), n < N)
    if SECOND is not None:
        total = tl.sum(second, 0)
        if OUT1 is not None:
            tl.store(OUT1 + n, stored(total, OUT1), n < N)
        if WIDE1 is not None:
            tl.store(WIDE1 + n, stored(total, WIDE1), n < N)


# ---- host ------------------------------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """How cells lie: how many, R0 elements of R1 stretches each, their strides, how channels go by them."""

    kept: int
    r0: int
    r1: int
    repeat: int  # cells after which strides and channels begin anew
    strides: tuple[
        int, int, int, int
    ]  # from cell to cell, from repeat to repeat, from element to element, of stretches
    step: int  # channels from cell to cell
    channel: str

    @property
    def elements(self) -> int:
        return self.kept * self.r0 * self.r1

    def tiles(self, longest: int) -> dict[str, Any]:
        """The constants of a launch that say how tiles lie."""
        (k0, k1, r0, r1), many = self.strides, self.elements >= SMALL
        even = not any(n % 16 for n in (k0, k1 if self.repeat < self.kept else 0, r1 if self.r1 > 1 else 0))
        if many and r0 == 1:
            once = self.r1 == 1 and self.r0 <= longest
            block = max(16, power_of_two(self.r0)) if self.r0 <= (longest if once else STRETCH) else STRETCH
            made = "along", even and self.r0 % 16 == 0, once, max(1, 2048 // block), block
        elif many and k0 == 1 and self.r1 == 1 and self.repeat == self.kept:
            made = "across", r0 % 16 == 0 and self.kept % 16 == 0, False, *ACROSS
        else:
            tile = SMALL_TILES[self.r0 > 32]
            made = "any", False, self.r1 == 1 and self.r0 <= tile[1], *tile
        return dict(zip(("FORM", "EVEN", "ONCE", "BLOCK_K", "BLOCK_R"), made))

    def sizes(self, steps: int) -> tuple[int, ...]:
        return self.kept, self.r0, self.r1, self.repeat, *self.strides, self.step, steps


def steps_of(cells: Cells, how: dict[str, Any]) -> int:
    """All tiles of a cell."""
    return max(1, cells.r1 * cdiv(cells.r0, how["BLOCK_R"]))


def parted(cells: Cells, how: dict[str, Any], device: torch.device) -> int | None:
    """How many tiles of a cell a program takes, where cells are too few for all SMs; else None."""
    programs, wanted = cdiv(cells.kept, how["BLOCK_K"]), BUSY * Target.at(device).sms
    steps = steps_of(cells, how)
    if cells.elements < FEWEST or 2 * programs > wanted or steps < 8:
        return None
    return cdiv(steps, min(steps, cdiv(wanted, programs)))


def in_triton(t: Tensor) -> Any:
    return IN_TRITON[compute_dtype(t.dtype)]


def scratch(t: Tensor, *shape: int) -> Tensor:
    """Memory for sums over elements of a tensor."""
    return own(torch.empty(shape, dtype=compute_dtype(t.dtype), device=t.device))


def forward(
    kind: str, x: Tensor, y: Tensor, cells: Cells, seen: tuple[Tensor, tuple[int, ...]] | None, w: Any, b: Any, mean: Any,
    rstd: Any, eps: Any = 0.0, known: tuple[Any, Any] = (None, None), running: tuple[Any, Any] = (None, None), momentum: Any = 0.0,
) -> None:  # fmt: skip
    """Launch `normalise`. `seen`: the tensor and the dimensions that a cell is, for moments that are found by parts."""
    how = cells.tiles(LONGEST)
    if (
        kind == "moments"
        and known[0] is None
        and how["FORM"] == "along"
        and not how["ONCE"]
        and norm_cells.takes(cells)
    ):
        norm_cells.forward(x, y, w, b, mean, rstd, running, cells, eps, momentum)
        return
    steps = steps_of(cells, how)
    if known[0] is not None:
        steps = parted(cells, how, x.device) or steps
        how["ONCE"] = False
    elif seen is not None and (split := parted(cells, how, x.device)) is not None:
        wide = compute_dtype(x.dtype)
        var, level = reduction.run(reduction_rows.VAR_MEAN, *seen, False, dtype=wide, numbers=(0,))
        known, steps = (level, var), split
        how["ONCE"] = False
    double = torch.float64
    plans.launch(
        normalise, (x, y, w, b, mean, rstd, *known, *running), cells.sizes(steps),
        (bits_of(eps, double), bits_of(momentum, double)), KIND=kind, CHANNEL=cells.channel, COMPUTE=in_triton(x), **how,
    )  # fmt: skip


def backward(
    kind: str, dy: Tensor, x: Tensor, w: Any, mean: Any, rstd: Tensor, dx: Any, dw: Any, db: Any, cells: Cells,
    eps: Any = 0.0, trained: bool = True, sums: tuple[Any, Any] = (None, None), steps: int | None = None,
) -> None:  # fmt: skip
    how = cells.tiles(LONGEST_OF_TWO)
    if sums[0] is not None or cells.channel == "stretch":
        how["ONCE"] = False
    if kind == "moments" and trained and how["FORM"] == "along" and not how["ONCE"] and sums[0] is None:
        if norm_cells.takes(cells):
            norm_cells.backward(dy, x, w, mean, rstd, dx, dw, db, cells)
            return
    steps = steps or steps_of(cells, how)
    plans.launch(
        normalise_backward, (dy, x, w, mean, rstd, *sums, dx, dw, db), cells.sizes(steps), (bits_of(eps, torch.float64),),
        KIND=kind, CHANNEL=cells.channel, TRAINED=trained, COMPUTE=in_triton(x), **how,
    )  # fmt: skip


def sum_columns(
    dy: Tensor, x: Tensor, mean: Any, rstd: Tensor, dw: Any, db: Any, m: int, n: int, by: str,
    wide: tuple[Any, Any] = (None, None),
) -> None:  # fmt: skip
    """Sums over the rows of a matrix, by parts."""
    tile = (16, 128) if m * n >= SMALL else (64, 32)
    wanted = cdiv(4 * Target.at(x.device).sms, cdiv(n, tile[1]))
    per = cdiv(cdiv(m, min(wanted, cdiv(m, 4 * tile[0]), 256)), tile[0]) * tile[0]
    parts = cdiv(m, per)
    made = [None if a is None and b is None else scratch(x, parts, n) for a, b in ((dw, wide[0]), (db, wide[1]))]
    plans.launch(
        column_sums, (dy, x, mean, rstd, *made), (m, n, per), BY=by, COMPUTE=in_triton(x),
        EVEN=n % 16 == 0 and m * n >= SMALL, BLOCK_M=tile[0], BLOCK_N=tile[1],
    )  # fmt: skip
    add(made, dw, db, parts, n, x, wide)


def add(made: list[Tensor | None], dw: Any, db: Any, parts: int, n: int, x: Tensor, wide: Any = (None, None)) -> None:
    """The gradients of weights from sums of parts."""
    tile = (1, 64) if parts == 1 else (16, 64) if parts <= 64 else (128, 16)
    plans.launch(add_parts, (*made, dw, db, *wide), (parts, n), COMPUTE=in_triton(x), BLOCK_P=tile[0], BLOCK_N=tile[1])


def floats(*tensors: Tensor | None) -> None:
    """Leave to aten what no norm takes."""
    there = [t for t in tensors if t is not None]
    taken(*there)
    if not all(t.is_floating_point() for t in there):
        raise Declined("no floats")


def parameters(x: Tensor, shape: tuple[int, ...], *tensors: Tensor | None, alike: bool = False) -> bool:
    """Whether weights are of fp32 beside 16 bits, which is for aten to refuse where they have to be `alike`; leave to it other
    shapes and dtypes."""
    there = [t for t in tensors if t is not None]
    kinds = {t.dtype for t in there}
    mixed = kinds == {torch.float32} and x.dtype in (torch.bfloat16, torch.float16)
    if any(tuple(t.shape) != shape for t in there) or (kinds and kinds != {x.dtype} and (alike or not mixed)):
        raise Declined("weights of another shape or dtype")
    return mixed


def dense(*tensors: Tensor | None) -> list[Tensor | None]:
    """Weights without gaps: copies of those that have some."""
    return [None if t is None else contiguous(t) for t in tensors]


def empty_like(t: Tensor) -> Tensor:
    return own(torch.empty(t.shape, dtype=t.dtype, device=t.device))
