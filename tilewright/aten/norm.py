"""Norms and their gradients: layer, RMS, group, batch and weight norm, the second part of the engine `rows`.

All are one thing: a *cell* is what is normalised together, a row of layer norm, a group of one image, a channel of all images, a
vector of weight norm. Its elements are R1 stretches of R0. Programs take a few cells each. Where a tile holds a whole cell it is
read once; else a second pass goes back from its end, of which the cache still has the most. Moments are of tiles, in two steps
while a tile is in registers, and are combined in order. Where cells are few, their moments or sums are found by parts, and the
second pass is split among programs. Gradients of weights are sums over cells: programs sum their own, and a second launch adds
these in order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..ops.norm.modulated_norm import centre, columns_at, mean_of, modulate, pick, square_pieces, sum_pieces
from ..ops.norm.modulated_norm_backward import add_if, times_if
from ..ops.norm.row_pieces import (
    inside_piece,
    load_pieces,
    programs_per_sm,
    split_backward,
    split_plain,
    weight_pieces,
)
from ..runtime.kernel import kernel
from . import norm_cells, plans, reduction, reduction_rows
from .functions import divide, reciprocal_root, square_root
from .plans import bits_of, own
from .pointwise import IN_TRITON, SMALL, number, stored, whole_words
from .row import Declined, compute_dtype, of_numbers, taken
from .softmax import contiguous, warps

SIZES = ("KEPT", "R0", "R1", "K0", "k0", "k1", "r0", "r1", "c0", "STEPS")
SMALL_TILES = (64, 32), (4, 512)
LONGEST, LONGEST_OF_TWO = 16384, 8192  # elements that a tile holds of a cell
HELD = 1 << 16  # bytes of a row that a program's registers hold
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
def cell_start(k, K0, k0, k1, FORM: tl.constexpr, EVEN: tl.constexpr):
    """Where cells begin [BLOCK_K, 1]."""
    if FORM == "across":
        return k[:, None]
    else:
        return (k % K0 * whole_words(k0, EVEN) + k // K0 * whole_words(k1, EVEN))[:, None]


@triton.jit
def stretch_at(j, r, r0, r1, FORM: tl.constexpr, EVEN: tl.constexpr):
    """Where elements r of stretch j lie from a cell's beginning [1, BLOCK_R]."""
    if FORM == "along":
        return (j * whole_words(r1, EVEN) + r)[None, :]
    else:
        return (j * whole_words(r1, EVEN) + r * whole_words(r0, EVEN))[None, :]


@triton.jit
def of_channel(W, k, j, r, ok_k, ok_r, K0, c0, COMPUTE: tl.constexpr, CHANNEL: tl.constexpr, FORM: tl.constexpr):
    """A weight for each element. CHANNEL: which of its coordinates a channel goes by, a "cell", a "stretch" or an "element"; of
    elements that lie side by side, by nothing else."""
    if CHANNEL == "cell":
        return tl.load(W + (k % K0 * c0)[:, None], ok_k, 0).to(COMPUTE)
    elif CHANNEL == "stretch":
        return tl.load(W + (k % K0 * c0 + j)[:, None], ok_k, 0).to(COMPUTE)
    elif FORM == "along":
        return tl.load(W + r[None, :], ok_r, 0).to(COMPUTE)
    else:
        return tl.load(W + (k % K0 * c0)[:, None] + r[None, :], ok_k & ok_r, 0).to(COMPUTE)


@triton.jit
def cells_of(KEPT, BLOCK_K: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    if FORM == "across":
        return k, (k < whole_words(KEPT, EVEN))[:, None]
    else:
        return k, (k < KEPT)[:, None]


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
    k, inside = cells_of(KEPT, BLOCK_K, FORM, EVEN)
    part = tl.program_id(1)
    at_cell = cell_start(k, K0, k0, k1, FORM, EVEN)
    if FORM == "along":
        R0 = whole_words(R0, EVEN)
    lane = tl.arange(0, BLOCK_R).to(tl.int64)
    tiles = tl.cdiv(R0, BLOCK_R)
    steps = R1 * tiles
    one = tl.full([], 1.0, COMPUTE)
    elements = (R1.to(tl.int64) * R0).to(COMPUTE)
    mean = tl.zeros([BLOCK_K], COMPUTE)
    about = tl.zeros([BLOCK_K], COMPUTE)  # the sum of squares about the mean
    x = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
    if MEAN_IN is not None:
        mean = tl.load(MEAN_IN + k, k < KEPT, 0).to(COMPUTE)
        about = tl.load(VAR_IN + k, k < KEPT, 0).to(COMPUTE) * elements
    elif ONCE:
        ok = inside & (lane < R0)[None, :]
        x = tl.load(X + at_cell + stretch_at(0, lane, r0, r1, FORM, EVEN), ok, 0).to(COMPUTE)
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
        scale = divide(tl.load(W + k, k < KEPT, 0).to(COMPUTE), rstd)[:, None]
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
        if KIND != "norm":
            if W is not None:
                y = y * of_channel(W, k, j, r, inside, (r < R0)[None, :], K0, c0, COMPUTE, CHANNEL, FORM)
            if B is not None:
                y = y + of_channel(B, k, j, r, inside, (r < R0)[None, :], K0, c0, COMPUTE, CHANNEL, FORM)
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
    k, inside = cells_of(KEPT, BLOCK_K, FORM, EVEN)
    part = tl.program_id(1)
    at_cell = cell_start(k, K0, k0, k1, FORM, EVEN)
    if FORM == "along":
        R0 = whole_words(R0, EVEN)
    lane = tl.arange(0, BLOCK_R).to(tl.int64)
    tiles = tl.cdiv(R0, BLOCK_R)
    steps = R1 * tiles
    one = tl.full([], 1.0, COMPUTE)
    elements = (R1.to(tl.int64) * R0).to(COMPUTE)
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
    dy = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
    normed = dy
    if SUM is not None:
        total = tl.load(SUM + k, k < KEPT, 0).to(COMPUTE)
        total_x = tl.load(SUM_X + k, k < KEPT, 0).to(COMPUTE)
    elif ONCE:
        ok = inside & (lane < R0)[None, :]
        at = at_cell + stretch_at(0, lane, r0, r1, FORM, EVEN)
        dy = tl.load(DY + at, ok, 0).to(COMPUTE)
        normed = tl.where(ok, (tl.load(X + at, ok, 0).to(COMPUTE) - mean) * rstd, 0.0)
        if CHANNEL == "element":
            if W is not None:
                dy = dy * of_channel(W, k, 0, lane, inside, (lane < R0)[None, :], K0, c0, COMPUTE, CHANNEL, FORM)
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
                            W, k, stretch, r, inside, (r < R0)[None, :], K0, c0, COMPUTE, CHANNEL, FORM
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
                    w = tl.load(W + k % K0 * c0 + stretch, k < KEPT, 0).to(COMPUTE)
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
                        dy = dy * of_channel(W, k, j, r, inside, (r < R0)[None, :], K0, c0, COMPUTE, CHANNEL, FORM)
                if TRAINED:
                    normed = (tl.load(X + at, ok, 0, eviction_policy="evict_first").to(COMPUTE) - mean) * rstd
            dx = dy
            if TRAINED:
                dx = dy - normed * about
                if KIND == "moments":
                    dx = dx - level
            tl.store(DX + at, stored(dx * scale, DX), ok)


def rows_at_once(a) -> dict[str, int]:
    """As `ops/norm` takes rows, by what was measured there."""
    if a.PIECES > 1:
        return {"ROWS": 1, "num_warps": min(32, a.BLOCK // (128 if a.BLOCK <= 1024 else 256))}
    return {"ROWS": max(1, min(16, 2048 // a.BLOCK)), "num_warps": min(16, max(4, a.BLOCK // 512))}


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "N", "EPS", "INV_N"), default=rows_at_once)
def normalise_rows(
    X, Y, W, B, MEAN, RSTD, M, N, EPS: tl.int64, INV_N: tl.int64, EVEN: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A norm over rows [M, N], held as PIECES of BLOCK columns, in fp32. MEAN is None of an RMS norm. LATE: weights are loaded
    after the sums, for which a wide row leaves no registers."""
    N = whole_words(N, EVEN)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = r[:, None]
    live = row < M
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    xs = load_pieces(X, row, col, live, N, N, 1, "", BLOCK, PIECES)
    if not LATE:
        ws = weight_pieces(W, N, None, BLOCK, PIECES)  # before the sums, which everything after them waits for
        bs = weight_pieces(B, N, None, BLOCK, PIECES)
    inv_n = number(INV_N, tl.float32)
    mean = None
    if MEAN is not None:
        mean = mean_of(tl.sum(sum_pieces(xs, PIECES), 1), N, inv_n)[:, None]
        tl.store(MEAN + row, stored(mean, MEAN), live)
    about = tl.sum(square_pieces(xs, mean, col, N, BLOCK, PIECES), 1)
    rstd = reciprocal_root(mean_of(about, N, inv_n) + number(EPS, tl.float32))[:, None]
    tl.store(RSTD + row, stored(rstd, RSTD), live)
    for i in tl.static_range(PIECES):
        y = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
        if LATE:
            c = i * BLOCK + lane
            y = modulate(y, columns_at(W, c, c < N, None), columns_at(B, c, c < N, None), None, None)
        else:
            y = modulate(y, pick(ws, i), pick(bs, i), None, None)
        tl.store(Y + row * N + col + i * BLOCK, stored(y, Y), inside_piece(live, col, N, i, BLOCK, PIECES))


def rows_walked(a) -> dict[str, int]:
    """As many warps as a row needs, and three stages where shared memory has room for two blocks of both operands."""
    columns = a.BLOCK * a.PIECES
    held = 2 * 2 * a.ROWS * columns * a.X.element_size()
    stages = 3 if a.AHEAD and held + 1024 <= Target.at(a.X.device).shared_memory else 1
    return {"num_warps": 4 if columns <= 3584 else 8 if columns <= 5120 else 16, "STAGES": stages}


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@kernel(grid=lambda a: (a.PROGRAMS,), tokens=("M", "N", "PROGRAMS", "INV_N"), default=rows_walked)
def rows_backward(
    DY, X, W, MEAN, RSTD, DX, DW, DB, M, N, PROGRAMS, INV_N: tl.int64, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of a norm over rows [M, N], held as PIECES of BLOCK columns, in fp32. A program takes every PROGRAMS-th block
    of ROWS, and loads those AHEAD meanwhile. DW, DB [PROGRAMS, N]: sums over its rows. MEAN is None of an RMS norm."""
    N = whole_words(N, EVEN)
    share = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    inv_n = number(INV_N, tl.float32)
    ws = weight_pieces(W, N, None, BLOCK, PIECES)
    dws = ()
    dbs = ()
    for _ in tl.static_range(PIECES):
        dws = dws + (tl.zeros([ROWS, BLOCK], tl.float32),)
        dbs = dbs + (tl.zeros([ROWS, BLOCK], tl.float32),)
    for block in tl.range(share, tl.cdiv(M, ROWS), PROGRAMS, num_stages=STAGES):
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < M
        xs = load_pieces(X, row, col, live, N, N, 1, "", BLOCK, PIECES)
        dys = load_pieces(DY, row, col, live, N, N, 1, "", BLOCK, PIECES)
        rstd = tl.load(RSTD + row, live, 0.0).to(tl.float32)
        mean = None
        if MEAN is not None:
            mean = tl.load(MEAN + row, live, 0.0).to(tl.float32)
        if DX is not None:
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            cross = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(PIECES):
                g = times_if(dys[i].to(tl.float32), pick(ws, i))
                total += g
                cross += g * centre(xs[i], mean, col, N, i, BLOCK, PIECES)
            total, cross = tl.reduce((total, cross), 1, add_pairs)
            level = mean_of(total, N, inv_n)[:, None]
            about = mean_of(cross, N, inv_n)[:, None] * rstd
        more_w = ()
        more_b = ()
        for i in tl.static_range(PIECES):
            n = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
            dy = dys[i].to(tl.float32)
            more_w = more_w + (add_if(dws[i], dy * n, DW is not None),)
            more_b = more_b + (add_if(dbs[i], dy, DB is not None),)
            if DX is not None:
                dx = times_if(dy, pick(ws, i)) - n * about
                if MEAN is not None:
                    dx = dx - level
                inside = inside_piece(live, col, N, i, BLOCK, PIECES)
                tl.store(DX + row * N + col + i * BLOCK, stored(dx * rstd, DX), inside)
        dws = more_w
        dbs = more_b
    for i in tl.static_range(PIECES):
        c = i * BLOCK + lane
        at = share.to(tl.int64) * N + c
        if DW is not None:
            tl.store(DW + at, tl.sum(dws[i], 0), c < N)
        if DB is not None:
            tl.store(DB + at, tl.sum(dbs[i], 0), c < N)


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
            made = "any", False, False, *SMALL_TILES[self.r0 > 32]
        return dict(zip(("FORM", "EVEN", "ONCE", "BLOCK_K", "BLOCK_R"), made))

    def sizes(self, steps: int) -> tuple[int, ...]:
        return self.kept, self.r0, self.r1, self.repeat, *self.strides, self.step, steps


def rows(m: int, n: int) -> Cells:
    """A cell of each row [m, n], of which every element is a channel."""
    return Cells(m, n, 1, max(1, m), (n, 0, 1, 0), 0, "element")


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


# ---- layer and RMS norm ----------------------------------------------------------------------------------------------


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


def matrix(x: Tensor, normalized_shape: Any) -> tuple[int, int]:
    """(rows, elements of each)."""
    shape, kept = tuple(normalized_shape), x.dim() - len(normalized_shape)
    if not shape or kept < 0 or tuple(x.shape[kept:]) != shape:
        raise Declined("a shape that is refused")
    return math.prod(x.shape[:kept]), math.prod(shape)


def moments_like(x: Tensor, ones: int, dtype: torch.dtype) -> Tensor:
    """Memory for a number of each row, whose last dimensions are 1."""
    shape = (*x.shape[: x.dim() - ones], *(1,) * ones)
    return own(torch.empty(shape, dtype=dtype, device=x.device))


def empty_like(t: Tensor) -> Tensor:
    return own(torch.empty(t.shape, dtype=t.dtype, device=t.device))


@of_numbers("eps")
def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    floats(input, weight, bias)
    m, n = matrix(input, normalized_shape)
    mixed = parameters(input, tuple(normalized_shape), weight, bias, alike=input.is_cuda)
    weight, bias = dense(weight, bias)
    if not m or not n:
        raise Declined("no elements")
    # On a GPU moments are of the dtype that is computed in; on a processor, of the weights'
    kind = compute_dtype(input.dtype) if input.is_cuda else torch.float32 if mixed else input.dtype
    x = contiguous(input)
    y = empty_like(x)
    mean, rstd = (moments_like(x, len(normalized_shape), kind) for _ in range(2))
    if not normalise_matrix(x, y, weight, bias, mean, rstd, m, n, eps):
        forward("moments", x, y, rows(m, n), (x.view(m, n), (1,)), weight, bias, mean, rstd, eps)
    return y, mean, rstd


def normalise_matrix(x: Tensor, y: Tensor, w: Any, b: Any, mean: Any, rstd: Tensor, m: int, n: int, eps: Any) -> bool:
    """A norm over rows that programs hold; False where they do not, or where there is little to do."""
    if m * n < SMALL or n * x.element_size() > HELD or x.dtype == torch.float64:
        return False
    block, pieces = split_plain(n)
    numbers = bits_of(eps, torch.float64), bits_of(1.0 / n, torch.float64)
    plans.launch(
        normalise_rows, (x, y, w, b, mean, rstd), (m, n), numbers, EVEN=n % 16 == 0, LATE=block * pieces > 8192,
        BLOCK=block, PIECES=pieces,
    )  # fmt: skip
    return True


def rows_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    m: int,
    n: int,
    dx: Any,
    dw: Any,
    db: Any,
) -> None:
    """The gradients of a norm over rows. Where rows are longer than tiles, weights' are of a pass of their own."""
    if n <= LONGEST_OF_TWO and x.dtype != torch.float64:
        small = m * n < SMALL
        block, pieces = (512, 1) if small and n <= 512 else split_backward(n)
        tall = 8 if small else max(1, min(16, 4096 // (block * pieces)))
        parts = min(cdiv(m, tall), programs_per_sm(n) * Target.at(x.device).sms)
        made = [None if t is None else scratch(x, parts, n) for t in (dw, db)]
        plans.launch(
            rows_backward, (grad, x, weight, mean, rstd, dx, *made), (m, n, parts), (bits_of(1.0 / n, torch.float64),),
            EVEN=n % 16 == 0 and not small, AHEAD=not small, BLOCK=block, PIECES=pieces, ROWS=tall,
        )  # fmt: skip
        if dw is not None or db is not None:
            add(made, dw, db, parts, n, x)
        return
    if dx is not None:
        kind = "moments" if mean is not None else "mean"
        backward(kind, grad, x, weight, mean, rstd, dx, None, None, rows(m, n))
    if dw is not None or db is not None:
        sum_columns(grad, x, mean, rstd, dw, db, m, n, "row")


def layer_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Any, mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, output_mask: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    floats(grad_out, input, mean, rstd, weight, bias)
    m, n = matrix(input, normalized_shape)
    parameters(input, tuple(normalized_shape), weight, bias, alike=input.is_cuda)
    if not m or not n or grad_out.shape != input.shape or grad_out.dtype != input.dtype:
        raise Declined("no elements, or a gradient that is not like the result")
    if mean.numel() != m or rstd.numel() != m or mean.dtype != rstd.dtype:
        raise Declined("moments that are refused")
    if (output_mask[1] and weight is None) or (output_mask[2] and bias is None):
        raise Declined("gradients of weights that are not there")
    x, grad, mean, rstd = map(contiguous, (input, grad_out, mean, rstd))
    weight, bias = dense(weight, bias)
    dx, dw, db = (empty_like(t) if asked else None for t, asked in zip((x, weight, bias), output_mask))
    if any(output_mask):
        rows_gradients(grad, x, mean, rstd, weight, m, n, dx, dw, db)
    return dx, dw, db


@of_numbers("eps")
def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    floats(input, weight)
    m, n = matrix(input, normalized_shape)
    if parameters(input, tuple(normalized_shape), weight) or not m or not n:
        raise Declined("no elements, or weights of another dtype")
    if not input.is_contiguous() and not input.is_cuda:
        raise Declined("gaps, which a processor's result keeps")
    x, (weight,), wide = contiguous(input), dense(weight), compute_dtype(input.dtype)
    y, rstd = empty_like(x), moments_like(x, len(normalized_shape), wide)
    if eps is None and wide != input.dtype:
        raise Declined("no epsilon, of which there are two for 16 bits")
    eps = torch.finfo(wide).eps if eps is None else eps
    if not normalise_matrix(x, y, weight, None, None, rstd, m, n, eps):
        forward("mean", x, y, rows(m, n), None, weight, None, None, rstd, eps)
    return y, rstd


def rms_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Any, rstd: Tensor, weight: Tensor | None, output_mask: Any
) -> tuple[Tensor | None, ...]:
    floats(grad_out, input, rstd, weight)
    m, n = matrix(input, normalized_shape)
    if parameters(input, tuple(normalized_shape), weight) or not m or not n:
        raise Declined("no elements, or weights of another dtype")
    if grad_out.shape != input.shape or grad_out.dtype != input.dtype or rstd.numel() != m:
        raise Declined("a gradient that is not like the result")
    x, grad, rstd = map(contiguous, (input, grad_out, rstd))
    (weight,) = dense(weight)
    dx = empty_like(x) if output_mask[0] else None
    dw = empty_like(weight) if output_mask[1] and weight is not None else None
    if dx is not None or dw is not None:
        rows_gradients(grad, x, None, rstd, weight, m, n, dx, dw, None)
    return dx, dw


# ---- group norm ------------------------------------------------------------------------------------------------------


def lies(x: Tensor) -> torch.memory_format:
    """How aten lays a result of channels. A processor keeps channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return last
    return torch.contiguous_format


def groups_of(x: Tensor, n: int, c: int, area: int, group: int, last: bool) -> Cells:
    """Cells of groups, a stretch of each channel."""
    width = c // group
    strides = (width, c * area, c, 1) if last else (width * area, c * area, 1, area)
    return Cells(n * group, area, width, group, strides, width, "stretch")


def check_groups(x: Tensor, n: int, c: int, area: int, group: int) -> bool:
    """Whether channels are last; leave to aten what it refuses."""
    if (
        group < 1
        or c % group
        or x.numel() != n * c * area
        or not x.numel()
        or x.dim() < 2
        or tuple(x.shape[:2]) != (n, c)
    ):
        raise Declined("no elements, or groups that are refused")
    last = lies(x) != torch.contiguous_format
    if (last and x.is_cuda) or not (last or x.is_contiguous()):
        raise Declined("gaps, or channels last")
    return last


@of_numbers("eps")
def group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    floats(input, weight, bias)
    last = check_groups(input, N, C, HxW, group)
    mixed = parameters(input, (C,), weight, bias, alike=input.is_cuda)
    weight, bias = dense(weight, bias)
    y = own(torch.empty_like(input))
    kind = torch.float32 if mixed else input.dtype
    mean, rstd = (own(torch.empty((N, group), dtype=kind, device=input.device)) for _ in range(2))
    cells = groups_of(input, N, C, HxW, group, last)
    seen = None if last else (input.view(N, group, -1), (2,))
    forward("moments", input, y, cells, seen, weight, bias, mean, rstd, eps)
    return y, mean, rstd


def group_norm_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, N: int, C: int, HxW: int, group: int,
    output_mask: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    floats(grad_out, input, mean, rstd, weight)
    last = check_groups(input, N, C, HxW, group)
    parameters(input, (C,), weight, alike=input.is_cuda)
    (weight,) = dense(weight)
    alike = grad_out.shape == input.shape and grad_out.dtype == input.dtype and grad_out.stride() == input.stride()
    if not alike or mean.numel() != N * group or rstd.numel() != N * group:
        raise Declined("a gradient that is not like the result, or moments that are refused")
    if not (mean.is_contiguous() and rstd.is_contiguous()):
        raise Declined("moments with gaps")
    cells = groups_of(input, N, C, HxW, group, last)
    dx = own(torch.empty_like(input)) if output_mask[0] else None
    kind = input.dtype if weight is None else weight.dtype
    dw, db = (own(torch.empty((C,), dtype=kind, device=input.device)) if asked else None for asked in output_mask[1:])
    if any(output_mask):
        made = [None if t is None else scratch(input, N, C) for t in (dw, db)]
        backward("moments", grad_out, input, weight, mean, rstd, dx, *made, cells)
        if dw is not None or db is not None:
            add(made, dw, db, N, C, input)
    return dx, dw, db


# ---- batch norm ------------------------------------------------------------------------------------------------------


def channels_of(x: Tensor) -> Cells:
    """A cell of each channel [N, C, ...], over all of N and the rest."""
    n, c, area = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if x.is_contiguous() and area > 1:
        return Cells(c, area, n, c, (area, 0, 1, c * area), 1, "cell")
    return Cells(c, n * area, 1, c, (1, 0, c, 0), 1, "cell")


def check_channels(x: Tensor) -> None:
    if x.dim() < 2 or not x.numel() or (lies(x) == torch.contiguous_format and not x.is_contiguous()):
        raise Declined("no elements, no channels, or gaps")


@of_numbers("momentum", "eps")
def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    floats(input, weight, bias, running_mean, running_var)
    check_channels(input)
    c = input.shape[1]
    parameters(input, (c,), *(t for t in (weight, bias, running_mean, running_var)))
    if (running_mean is None) != (running_var is None) or (not training and running_mean is None):
        raise Declined("running moments that are not there")
    if running_mean is not None and not (running_mean.is_contiguous() and running_var.is_contiguous()):
        raise Declined("running moments with gaps")
    weight, bias = dense(weight, bias)
    there = [t.dtype for t in (weight, bias, running_mean, running_var) if t is not None]
    kind = compute_dtype(input.dtype) if input.is_cuda else (there or [input.dtype])[0]
    y, cells = own(torch.empty_like(input)), channels_of(input)
    count = c if training or input.is_cuda else 0
    mean, rstd = (own(torch.empty((count,), dtype=kind, device=input.device)) for _ in range(2))
    kept = (mean, rstd) if count else (None, None)
    if training:
        seen = input, tuple(d for d in range(input.dim()) if d != 1)
        running = running_mean, running_var
        forward("moments", input, y, cells, seen, weight, bias, *kept, eps, running=running, momentum=momentum)
    else:
        forward(
            "moments", input, y, cells, None, weight, bias, *kept, eps, (running_mean, running_var), momentum=momentum
        )
    return y, mean, rstd


@of_numbers("eps")
def batch_norm_backward(
    grad_out: Tensor, input: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    mean, rstd = (save_mean, save_invstd) if train else (running_mean, running_var)
    floats(grad_out, input, weight, mean, rstd)
    check_channels(input)
    c = input.shape[1]
    parameters(input, (c,), weight)
    (weight,) = dense(weight)
    alike = grad_out.shape == input.shape and grad_out.dtype == input.dtype and grad_out.stride() == input.stride()
    if not alike or mean is None or rstd is None or mean.numel() != c or rstd.numel() != c:
        raise Declined("a gradient that is not like the result, or moments that are refused")
    if not (mean.is_contiguous() and rstd.is_contiguous()):
        raise Declined("moments with gaps")
    if output_mask[0] and not train and input.is_cuda and lies(input) != torch.contiguous_format:
        raise Declined("channels last and moments that were given, whose gradient aten lays out by rows")
    cells = channels_of(input)
    dx = own(torch.empty_like(input)) if output_mask[0] else None
    kind = input.dtype if weight is None else weight.dtype
    dw, db = (own(torch.empty((c,), dtype=kind, device=input.device)) if asked else None for asked in output_mask[1:])
    across = cells.tiles(LONGEST_OF_TWO)
    split = parted(cells, across, input.device) if across["FORM"] == "across" and train else None
    if not any(output_mask):
        return dx, dw, db
    if split is None:
        backward("moments", grad_out, input, weight, mean, rstd, dx, dw, db, cells, eps, train)
        return dx, dw, db
    wide = (scratch(input, c), scratch(input, c)) if dx is not None else (None, None)
    if dx is not None or dw is not None or db is not None:
        sum_columns(grad_out, input, mean, rstd, dw, db, cells.r0, c, "column", wide=wide)
    if dx is not None:
        backward("moments", grad_out, input, weight, mean, rstd, dx, None, None, cells, eps, train, wide[::-1], split)
    return dx, dw, db


# ---- weight norm -----------------------------------------------------------------------------------------------------


def vectors_of(v: Tensor, dim: int) -> Cells:
    """A cell of each vector, along all dimensions but the first or the last."""
    if v.dim() < 2 or not v.numel() or dim not in (0, v.dim() - 1):
        raise Declined("no elements, or a dimension in the middle")
    kept = v.shape[dim]
    others = v.numel() // kept
    if dim == 0:
        return Cells(kept, others, 1, kept, (others, 0, 1, 0), 1, "cell")
    return Cells(kept, others, 1, kept, (1, 0, kept, 0), 1, "cell")


def check_weights(v: Tensor, g: Tensor, dim: int) -> None:
    if g.dtype != v.dtype or g.numel() != v.shape[dim] or not g.is_contiguous():
        raise Declined("lengths of another dtype, shape or with gaps")


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    floats(v, g)
    cells = vectors_of(v, dim)
    check_weights(v, g, dim)
    wide = torch.float32 if v.dtype in (torch.bfloat16, torch.float16) else v.dtype
    seen = contiguous(v)
    w, norms = empty_like(seen), own(torch.empty_strided(g.shape, g.stride(), dtype=wide, device=g.device))
    forward("norm", seen, w, cells, None, g, None, None, norms)
    return w, norms


def weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    floats(grad_w, saved_v, saved_g, saved_norms)
    cells = vectors_of(saved_v, dim)
    check_weights(saved_v, saved_g, dim)
    if grad_w.shape != saved_v.shape or grad_w.dtype != saved_v.dtype or saved_norms.numel() != saved_g.numel():
        raise Declined("a gradient that is not like the result")
    grad, v = contiguous(grad_w), contiguous(saved_v)
    dv, dg = (
        empty_like(v),
        own(torch.empty_strided(saved_g.shape, saved_g.stride(), dtype=saved_g.dtype, device=v.device)),
    )
    backward("norm", grad, v, saved_g, None, saved_norms, dv, dg, None, cells)
    return dv, dg


FORMS = {
    "native_layer_norm": layer_norm, "native_layer_norm_backward": layer_norm_backward, "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward, "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward, "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward, "_weight_norm_interface": weight_norm,
    "_weight_norm_interface_backward": weight_norm_backward,
}  # fmt: skip
