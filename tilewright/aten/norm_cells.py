"""Norms of large cells whose elements lie side by side, and their gradients, in the two passes of `passes.py`.

A group of images or a channel of all is a cell of R1 stretches of R0 elements. Its parts are tiles, BLOCK_J stretches of BLOCK_R
elements. What the first pass finds is found of each stretch of a tile, so that sums for a channel are there where a channel is a
stretch. Cells of fewer elements that a program's registers hold, of channels that are stretches, are read once instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import INTERPRETING, Target
from ..core.tensor import cdiv, power_of_two
from ..device.dependent import ask_l2
from ..device.quantize import quotient
from ..ops.norm.rms_norm import add_pairs
from ..runtime.kernel import kernel
from . import passes, plans
from .functions import divide, square_root
from .passes import is_last, release, task_of, wait_for
from .plans import bits_of, own
from .pointwise import number, stored, whole_words
from .row import compute_dtype

SIZES = ("KEPT", "R0", "R1", "K0", "k0", "k1", "r1", "c0", "PARTS", "AHEAD")
TILE, STRETCH = 8192, 4096  # elements of a tile, and of a stretch in it, at most
LINE = tl.constexpr(64)  # elements of 16 bits that the L2 is asked for at once
HOLDS, SHORTEST = 65536, 1024  # elements of 16 bits that a program's registers hold, and the shortest stretch of theirs


def programs(a) -> tuple[int]:
    return (passes.programs(a.KEPT, a.PARTS, a.AHEAD),)


def warps(a) -> dict[str, int]:
    """64 elements of 16 bits a thread, and no more registers than leave room for five programs on an SM; the compiler takes 72, for
    seven. Elements that are not whole words have addresses of their own, which take more."""
    if not a.EVEN:
        return passes.warps(8, a.X)
    return {**passes.warps(4, a.X), **({"maxnreg": 96} if a.X.element_size() == 2 else {})}


def warps_backward(a) -> dict[str, int]:
    """32 elements of 16 bits a thread, of each operand, and room for five programs as well: 160 KB. Weights of each element take
    more."""
    made = passes.warps(max(4, a.BLOCK_J * a.BLOCK_R // 1024), a.X)
    tight = a.EVEN and a.X.element_size() == 2 and a.CHANNEL != "element"
    return {**made, **({"maxnreg": 48} if tight else {})}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of(
    cell, part, R0, R1, K0, k0, k1, r1, EVEN: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """(stretches [BLOCK_J], elements [BLOCK_R], where these lie, which of them there are) of a part of a cell."""
    tiles = tl.cdiv(R0, BLOCK_R)
    j = (part // tiles).to(tl.int64) * BLOCK_J + tl.arange(0, BLOCK_J)
    r = (part % tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    within, beyond = (cell % K0).to(tl.int64), (cell // K0).to(tl.int64)
    first = within * whole_words(k0, EVEN) + beyond * whole_words(k1, EVEN)
    at = first + (j * whole_words(r1, EVEN))[:, None] + r[None, :]
    return j, r, at, (j < R1)[:, None] & (r < R0)[None, :]


@triton.jit
def weight_of(W, channel, j, r, R0, R1, COMPUTE: tl.constexpr, CHANNEL: tl.constexpr):
    """A weight for each element, `channel` being the first of a cell. CHANNEL: what it goes by, a "cell", a "stretch" or an
    "element"."""
    if CHANNEL == "cell":
        return tl.load(W + channel).to(COMPUTE)
    elif CHANNEL == "stretch":
        return tl.load(W + channel + j, j < R1, 0).to(COMPUTE)[:, None]
    else:
        return tl.load(W + r, r < R0, 0).to(COMPUTE)[None, :]


@triton.jit
def moments_of_cell(PART, cell, pieces, tiles, KEPT, R0, elements, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    """(mean, the sum of squares about it) of a cell, from those of its pieces, which are stretches as far as tiles go."""
    lane = tl.arange(0, BLOCK_P)
    level = tl.zeros([BLOCK_P], PART.dtype.element_ty)
    for first in tl.range(0, pieces, BLOCK_P):
        p = first + lane
        count = tl.minimum(R0 - p % tiles * BLOCK_R, BLOCK_R)
        level += tl.load(PART + cell * pieces + p, p < pieces, 0.0, cache_modifier=".cg") * count
    mean = divide(tl.sum(level, 0), elements)
    about = tl.zeros([BLOCK_P], PART.dtype.element_ty)
    for first in tl.range(0, pieces, BLOCK_P):
        p = first + lane
        count = tl.minimum(R0 - p % tiles * BLOCK_R, BLOCK_R)
        own = tl.load(PART + cell * pieces + p, p < pieces, mean, cache_modifier=".cg") - mean
        about += tl.load(PART + (KEPT + cell) * pieces + p, p < pieces, 0.0, cache_modifier=".cg") + own * own * count
    return mean, tl.sum(about, 0)


@triton.jit
def move_running(P, cell, value, keep):
    before = tl.load(P + cell).to(value.dtype)
    tl.store(P + cell, stored(value * keep + before * (1.0 - keep), P))


@kernel(grid=programs, tokens=(*SIZES, "EPS", "MOMENTUM"), default=warps)
def normalise_cells(
    X, Y, W, B, MEAN, RSTD, RUNNING_MEAN, RUNNING_VAR, PART, FOUND, DONE, KEPT, R0, R1, K0, k0, k1, r1, c0, PARTS, AHEAD,
    EPS: tl.int64, MOMENTUM: tl.int64, CHANNEL: tl.constexpr, EVEN: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Strides k from cell to cell (K0 of them, then again), r1 of stretches, c0 of channels. PART [2, KEPT, pieces]: means and sums
    of squares about them. FOUND [2, KEPT]: mean and rstd, unrounded."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    cell, part, again = task_of(PARTS, AHEAD)
    R0 = whole_words(R0, EVEN)
    j, r, at, ok = tile_of(cell, part, R0, R1, K0, k0, k1, r1, EVEN, BLOCK_J, BLOCK_R)
    channel = cell % K0 * c0
    cell = cell.to(tl.int64)
    if (cell >= 0) & (cell < KEPT):
        if again:
            x = tl.load(X + at, ok, 0, eviction_policy="evict_first")
            wait_for(DONE, cell, PARTS)
            mean = tl.load(FOUND + cell, cache_modifier=".cg")
            y = (x.to(COMPUTE) - mean) * tl.load(FOUND + KEPT + cell, cache_modifier=".cg")
            if W is not None:
                y = y * weight_of(W, channel, j, r, R0, R1, COMPUTE, CHANNEL)
            if B is not None:
                y = y + weight_of(B, channel, j, r, R0, R1, COMPUTE, CHANNEL)
            tl.store(Y + at, stored(y, Y), ok, eviction_policy="evict_first")
        else:
            one = tl.full([], 1.0, COMPUTE)
            tiles = tl.cdiv(R0, BLOCK_R)
            pieces = R1 * tiles
            count = tl.minimum(R0 - part % tiles * BLOCK_R, BLOCK_R).to(COMPUTE)
            x = tl.load(X + at, ok, 0)
            # Of -x, as below: elements of 16 bits stay two in a register
            level = -quotient(tl.sum((-x).to(COMPUTE), 1), count, divide(one, count))
            apart = tl.where(ok, x.to(COMPUTE) - level[:, None], 0.0)
            piece = cell * pieces + j * tiles + part % tiles
            tl.store(PART + piece, level, j < R1)
            tl.store(PART + KEPT.to(tl.int64) * pieces + piece, tl.sum(apart * apart, 1), j < R1)
            if is_last(DONE, cell, PARTS):
                elements = (R1.to(tl.int64) * R0).to(COMPUTE)
                middle, about = moments_of_cell(PART, cell, pieces, tiles, KEPT, R0, elements, BLOCK_R, BLOCK_P)
                rstd = divide(one, square_root(divide(about, elements) + number(EPS, COMPUTE)))
                tl.store(FOUND + cell, middle)
                tl.store(FOUND + KEPT + cell, rstd)
                release(DONE, cell)
                if MEAN is not None:
                    tl.store(MEAN + cell, stored(middle, MEAN))
                    tl.store(RSTD + cell, stored(rstd, RSTD))
                if RUNNING_MEAN is not None:
                    keep = number(MOMENTUM, COMPUTE)
                    move_running(RUNNING_MEAN, cell, middle, keep)
                    move_running(RUNNING_VAR, cell, divide(about, elements - one), keep)


def warps_held(R0: int) -> int:
    return max(1, min(32, R0 // 128))


@kernel(
    grid=lambda a: (a.KEPT,),
    tokens=("KEPT", "K0", "c0", "EPS"),
    default=lambda a: {"num_warps": warps_held(a.R0)},
)
def normalise_held(
    X, Y, W, B, MEAN, RSTD, KEPT, K0, c0, EPS: tl.int64, R0: tl.constexpr, R1: tl.constexpr, AHEAD: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Cells of 16 bits that lie one after the other, each held by a program, of which every stretch is a channel. The last cell is
    first: who made it has just written it, and the cache may have it still. AHEAD, if not 0: how many cells later the one is that
    this program asks the L2 for, in LINES or fewer, so that memory is read while programs that began together all add up or store.
    Else as above."""
    cell = KEPT - 1 - tl.program_id(0)
    at = cell.to(tl.int64) * (R0 * R1) + tl.arange(0, R0)
    xs = ()
    for j in tl.static_range(R1):
        xs = xs + (tl.load(X + at + j * R0),)
    if AHEAD > 0:
        line = tl.arange(0, LINES)
        later = (cell - AHEAD).to(tl.int64) * (R0 * R1) + line * LINE
        ask_l2(X + later, (line * LINE < R0 * R1) & (cell >= AHEAD))
    # Moments of elements that lie under each other, one stretch after the other. They are of -x, which the compiler takes for
    # another number: what it converts to fp32 here it does not keep until x is used again
    mean = (-xs[0]).to(tl.float32)
    about = tl.zeros([R0], tl.float32)
    for j in tl.static_range(1, R1):
        x = (-xs[j]).to(tl.float32)
        apart = x - mean
        mean += apart * (1.0 / (j + 1))
        about += apart * (x - mean)
    middle = -tl.sum(mean, 0) * (1.0 / R0)  # exact, for R0 is a power of two
    apart = mean + middle
    variance = divide(tl.sum(about + apart * apart * R1, 0), tl.full([], R0 * R1, tl.float32))
    rstd = divide(tl.full([], 1.0, tl.float32), square_root(variance + number(EPS, tl.float32)))
    tl.store(MEAN + cell, stored(middle, MEAN))
    tl.store(RSTD + cell, stored(rstd, RSTD))
    channel = cell % K0 * c0
    for j in tl.static_range(R1):
        y = (xs[j].to(tl.float32) - middle) * rstd
        if W is not None:
            y = y * tl.load(W + channel + j).to(tl.float32)
        if B is not None:
            y = y + tl.load(B + channel + j).to(tl.float32)
        tl.store(Y + at + j * R0, stored(y, Y))


@triton.jit
def gradient_sums(
    PART, W, DW, DB, cell, channel, tiles, KEPT, R1, CHANNEL: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """The two sums of a cell from those of its pieces; of channels that go by stretches, times their weights. Stores gradients of
    these."""
    total = tl.zeros([BLOCK_P], COMPUTE)
    total_x = tl.zeros([BLOCK_P], COMPUTE)
    for first in tl.range(0, R1, BLOCK_P):
        j = first + tl.arange(0, BLOCK_P)
        own = tl.zeros([BLOCK_P], COMPUTE)
        own_x = tl.zeros([BLOCK_P], COMPUTE)
        for tile in tl.range(0, tiles):
            own += tl.load(PART + (cell * R1 + j) * tiles + tile, j < R1, 0.0, cache_modifier=".cg")
            own_x += tl.load(PART + ((KEPT + cell) * R1 + j) * tiles + tile, j < R1, 0.0, cache_modifier=".cg")
        if CHANNEL == "stretch":
            if DW is not None:
                tl.store(DW + cell * R1 + j, stored(own_x, DW), j < R1)
            if DB is not None:
                tl.store(DB + cell * R1 + j, stored(own, DB), j < R1)
            if W is not None:
                w = tl.load(W + channel + j, j < R1, 0).to(COMPUTE)
                own = own * w
                own_x = own_x * w
        total += own
        total_x += own_x
    return tl.sum(total, 0), tl.sum(total_x, 0)


@kernel(grid=programs, tokens=SIZES, default=warps_backward)
def normalise_cells_backward(
    DY, X, W, MEAN, RSTD, DX, DW, DB, PART, FOUND, DONE, KEPT, R0, R1, K0, k0, k1, r1, c0, PARTS, AHEAD, CHANNEL: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """PART [2, KEPT, pieces]: sums of DY and of DY times the normalised X. FOUND [2, KEPT]: these of cells, by elements. DW, DB
    [KEPT] or, of channels that go by stretches, [KEPT, R1]: the same, as far as a cell goes."""
    COMPUTE: tl.constexpr = FOUND.dtype.element_ty
    cell, part, again = task_of(PARTS, AHEAD)
    R0 = whole_words(R0, EVEN)
    j, r, at, ok = tile_of(cell, part, R0, R1, K0, k0, k1, r1, EVEN, BLOCK_J, BLOCK_R)
    channel = cell % K0 * c0
    cell = cell.to(tl.int64)
    if (cell >= 0) & (cell < KEPT):
        mean = tl.load(MEAN + cell).to(COMPUTE)
        rstd = tl.load(RSTD + cell).to(COMPUTE)
        if again:
            if DX is not None:
                dy = tl.load(DY + at, ok, 0, eviction_policy="evict_first").to(COMPUTE)
                x = tl.load(X + at, ok, 0, eviction_policy="evict_first").to(COMPUTE)
                wait_for(DONE, cell, PARTS)
                level = tl.load(FOUND + cell, cache_modifier=".cg")
                about = tl.load(FOUND + KEPT + cell, cache_modifier=".cg")
                scale = rstd
                if W is not None:
                    w = weight_of(W, channel, j, r, R0, R1, COMPUTE, CHANNEL)
                    if CHANNEL == "cell":
                        scale = rstd * w
                    else:
                        dy = dy * w
                dx = (dy - (x - mean) * rstd * about) - level
                tl.store(DX + at, stored(dx * scale, DX), ok, eviction_policy="evict_first")
        else:
            dy = tl.load(DY + at, ok, 0).to(COMPUTE)
            normed = tl.where(ok, (tl.load(X + at, ok, 0).to(COMPUTE) - mean) * rstd, 0.0)
            if CHANNEL == "element":
                if W is not None:
                    dy = dy * weight_of(W, channel, j, r, R0, R1, COMPUTE, CHANNEL)
            own, own_x = tl.reduce((dy, dy * normed), 1, add_pairs)
            tiles = tl.cdiv(R0, BLOCK_R)
            piece = (cell * R1 + j) * tiles + part % tiles
            tl.store(PART + piece, own, j < R1)
            tl.store(PART + KEPT.to(tl.int64) * R1 * tiles + piece, own_x, j < R1)
            if is_last(DONE, cell, PARTS):
                total, total_x = gradient_sums(
                    PART, W, DW, DB, cell, channel, tiles, KEPT, R1, CHANNEL, COMPUTE, BLOCK_P
                )
                elements = (R1.to(tl.int64) * R0).to(COMPUTE)
                tl.store(FOUND + cell, divide(total, elements))
                tl.store(FOUND + KEPT + cell, divide(total_x, elements))
                release(DONE, cell)
                if CHANNEL == "cell":
                    if DW is not None:
                        tl.store(DW + cell, stored(total_x, DW))
                    if DB is not None:
                        tl.store(DB + cell, stored(total, DB))


# ---- host ------------------------------------------------------------------------------------------------------------


def takes(cells: Any) -> bool:
    """Whether elements lie side by side in cells that are tiles or more."""
    return cells.strides[2] == 1 and cells.r0 * cells.r1 >= TILE


def holds(x: Tensor, cells: Any) -> bool:
    """Whether programs hold cells, 8 elements of each stretch or more a thread, and there are as many cells as SMs. Stretches have
    powers of two, so that where they lie is no register's to hold."""
    size, (k0, k1, _, r1) = cells.r0 * cells.r1, cells.strides
    lies = r1 == cells.r0 == power_of_two(cells.r0) and k0 == size and k1 == cells.repeat * size
    fits = cells.r0 >= SHORTEST and cells.r1 * max(cells.r0, 4096) <= HOLDS
    many = cells.kept >= Target.at(x.device).sms
    return cells.channel == "stretch" and x.element_size() == 2 and lies and fits and many


def cells_ahead(r0: int, device: torch.device) -> int:
    """How many cells are held at once, 1024 threads on an SM: those that come next are asked for. 0 where a cache is asked nothing,
    in the interpreter and on chips of others."""
    target = Target.at(device)
    return target.sms * (32 // warps_held(r0)) if target.nvidia and not INTERPRETING else 0


def launch(kernel_: Any, read: list[Tensor], others: tuple, cells: Any, numbers: tuple[int, ...] = ()) -> None:
    """Tensors of cells that are `read`, and the `others` of the call; what passes leave for each other is allocated here."""
    x = read[0]
    block_r = max(16, min(STRETCH, power_of_two(cells.r0)))
    block_j = min(power_of_two(cells.r1), max(1, TILE // block_r))
    tiles = cdiv(cells.r0, block_r)
    parts = cdiv(cells.r1, block_j) * tiles
    k0, k1, _, r1 = cells.strides
    wide = compute_dtype(x.dtype)
    part = own(torch.empty((2, cells.kept, cells.r1 * tiles), dtype=wide, device=x.device))
    found = own(torch.empty((2, cells.kept), dtype=wide, device=x.device))
    done = passes.counters(cells.kept, x.device)
    ahead = passes.ahead_of(cells.kept, read)
    even = not any(n % 16 for n in (cells.r0, k0, k1 if cells.repeat < cells.kept else 0, r1 if cells.r1 > 1 else 0))
    plans.launch(
        kernel_, (*read, *others, part, found, done),
        (cells.kept, cells.r0, cells.r1, cells.repeat, k0, k1, r1, cells.step, parts, ahead), numbers, CHANNEL=cells.channel,
        EVEN=even, BLOCK_J=block_j, BLOCK_R=block_r, BLOCK_P=64,
    )  # fmt: skip


def forward(
    x: Tensor,
    y: Tensor,
    w: Any,
    b: Any,
    mean: Any,
    rstd: Any,
    running: tuple[Any, Any],
    cells: Any,
    eps: Any,
    momentum: Any,
) -> None:
    """Moments of cells, and cells that are normalised by them."""
    numbers = bits_of(eps, torch.float64), bits_of(momentum, torch.float64)
    if holds(x, cells):
        sizes = cells.kept, cells.repeat, cells.step
        plans.launch(
            normalise_held, (x, y, w, b, mean, rstd), sizes, numbers[:1], R0=cells.r0, R1=cells.r1,
            AHEAD=cells_ahead(cells.r0, x.device), LINES=power_of_two(cells.r0 * cells.r1 // LINE.value),
        )  # fmt: skip
        return
    launch(normalise_cells, [x], (y, w, b, mean, rstd, *running), cells, numbers)


def backward(dy: Tensor, x: Tensor, w: Any, mean: Tensor, rstd: Tensor, dx: Any, dw: Any, db: Any, cells: Any) -> None:
    launch(normalise_cells_backward, [dy, x], (w, mean, rstd, dx, dw, db), cells)
