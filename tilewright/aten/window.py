"""The engine `window`: a result element from a window of a plane, by gathering, so that gradients need no atomics.

Average and max pooling with their gradients, nearest and antialiased bicubic resampling. Tensors are [N, C, H, W] of any strides.
A tile's columns go along whichever dimension of the result lies side by side: its width or, of channels last, its channels. Its
rows are all the others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv, power_of_two
from ..runtime.kernel import kernel
from . import plans
from .functions import divide, is_nan
from .layout import lies
from .plans import bits_of, own
from .pointwise import IN_TRITON, SMALL, WORDS, number, stored
from .row import Declined, compute_dtype, taken

PLANES = ("C", "H", "W", "OH", "OW", "ROWS")
TILE, SMALL_TILE = 1024, (32, 32)
UNROLLED = 16  # elements of a window at most whose sizes are compiled in
CUBIC = tl.constexpr(-0.5)  # of the bicubic kernel, where it is antialiased


def strides(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_{dim}" for name in names for dim in "nchw")


def programs(a) -> tuple[int]:
    return (cdiv(a.ROWS, a.BLOCK_P) * cdiv(a.C if a.LAST else a.OW, a.BLOCK_Q),)


def programs_back(a) -> tuple[int]:
    return (cdiv(a.ROWS, a.BLOCK_P) * cdiv(a.C if a.LAST else a.W, a.BLOCK_Q),)


def four_warps(a) -> dict[str, int]:
    return {"num_warps": 4}


# ---- kernels ---------------------------------------------------------------------------------------------------------
#
# UNIT: elements of a row lie side by side, in all tensors. WORD divides sizes and strides of what lies side by side, so that the
# compiler moves words of so many elements. KNOWN: the window's sizes where they are compiled in, else None; a kernel names them by
# itself, as what a function returns is no constant.
# PAIRS: windows are 2 columns apart, known and UNIT: what is read of (forward) or written to (back) a row goes by pairs of columns.


@triton.jit
def multiple(n, WORD: tl.constexpr):
    """A number, in a form by which the compiler knows that WORD divides it."""
    return n // WORD * WORD


@triton.jit
def divided(n, d):
    """Quotient and remainder of numbers that are not negative, which takes half the instructions of any numbers."""
    quotient = (n.to(tl.uint32) // d.to(tl.uint32)).to(tl.int32)
    return quotient, n - quotient * d


@triton.jit
def tile_across(columns, BLOCK_Q: tl.constexpr):
    """Which of the tiles that lie side by side is this program's."""
    return tl.program_id(0) % tl.cdiv(columns, BLOCK_Q)


@triton.jit
def coordinates(C, H, W, ROWS, LAST: tl.constexpr, WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr):
    """(n, c, h, w) of a tile's elements, [BLOCK_P, 1] or [1, BLOCK_Q], of a tensor of this size; which rows, and columns, exist."""
    if LAST:
        columns = multiple(C, WORD)
    else:
        columns = multiple(W, WORD)
    p = (tl.program_id(0) // tl.cdiv(columns, BLOCK_Q) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    q = (tile_across(columns, BLOCK_Q) * BLOCK_Q + tl.arange(0, BLOCK_Q))[None, :]
    if LAST:
        nh, w = divided(p, W)
        n, h = divided(nh, H)
        return n, q, h, w, p < ROWS, q < columns
    else:
        nc, h = divided(p, H)
        n, c = divided(nc, C)
        return n, c, h, q, p < ROWS, q < columns


@triton.jit
def plane_at(n, c, s_n, s_c, LAST: tl.constexpr, WORD: tl.constexpr):
    """Where planes begin. Channels that are last lie side by side."""
    if LAST:
        return n.to(tl.int64) * multiple(s_n, WORD) + c
    else:
        return n.to(tl.int64) * multiple(s_n, WORD) + c.to(tl.int64) * multiple(s_c, WORD)


@triton.jit
def at_point(h, w, s_h, s_w, UNIT: tl.constexpr, WORD: tl.constexpr):
    """Where a point of a plane lies."""
    if UNIT:
        return h.to(tl.int64) * multiple(s_h, WORD) + w
    else:
        return h.to(tl.int64) * multiple(s_h, WORD) + w.to(tl.int64) * multiple(s_w, WORD)


@triton.jit
def load_one(
    X, at, h, w, J, OW, H, W, s_h, s_w, PW, ok_p, ok_q, OUTSIDE: tl.constexpr, UNIT: tl.constexpr, PAIRS: tl.constexpr,
    WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The elements at (h, w), which are the J-th columns of their windows, or what is OUTSIDE of a plane."""
    there = ok_p & (h >= 0) & (h < H)
    if PAIRS:
        # A window's columns J at even and odd distance are halves of the same pairs, of which a thread reads several at once;
        # the compiler sees that the load is the same
        pair_of: tl.constexpr = (J - PW) // 2
        start = tile_across(multiple(OW, WORD), BLOCK_Q) * 2 * BLOCK_Q
        columns = (start + 2 * pair_of + tl.arange(0, 2 * BLOCK_Q))[None, :]
        there = there & (columns < multiple(W, WORD))
        if pair_of < 0:
            there = there & (columns >= 0)
        both = tl.load(X + at + at_point(h, columns, s_h, s_w, UNIT, WORD), there, OUTSIDE)
        even, odd = tl.split(tl.reshape(both, [BLOCK_P, BLOCK_Q, 2]))
        if (J - PW) % 2 == 0:
            return even
        else:
            return odd
    else:
        there = there & ok_q & (w >= 0) & (w < W)
        return tl.load(X + at + at_point(h, w, s_h, s_w, UNIT, WORD), there, OUTSIDE)


@triton.jit
def side_counted(o, K, S, P, size, PADDED):
    """How many elements the o-th window of a side counts: those of the plane, and of the padding if that is counted too."""
    start = o * S - P
    inside = tl.maximum(tl.minimum(start + K, size) - tl.maximum(start, 0), 1)
    return tl.where(PADDED != 0, tl.minimum(start + K, size + P) - start, inside)


@triton.jit
def averaged(total, oh, ow, KH, KW, SH, SW, PH, PW, H, W, PADDED, DIVISOR, EACH: tl.constexpr):
    """A window's sum by the DIVISOR, unless that is 0, or how many elements it counts; by EACH, if that is the same for all."""
    if EACH > 0 and (EACH & (EACH - 1)) == 0:
        return total * (1.0 / EACH)  # which is exact as far as the quotient is
    elif EACH > 0:
        return divide(total, tl.full(total.shape, EACH, total.dtype))
    else:
        count = side_counted(oh, KH, SH, PH, H, PADDED) * side_counted(ow, KW, SW, PW, W, PADDED)
        count = tl.where(DIVISOR != 0, DIVISOR, count)
        return divide(total, tl.broadcast_to(count, total.shape).to(total.dtype))


@kernel(
    grid=programs,
    tokens=(*PLANES, *strides("x", "y"), "kh", "kw", "sh", "sw", "ph", "pw", "PADDED", "DIVISOR"),
    default=four_warps,
)
def average_pool(
    X, Y, C, H, W, OH, OW, ROWS, x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w, kh, kw, sh, sw, ph, pw, PADDED,
    DIVISOR, COMPUTE: tl.constexpr, KNOWN: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    PAIRS: tl.constexpr, WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Sums of windows by how many elements they count, those of padding too if PADDED is not 0, or by the DIVISOR."""
    if KNOWN is None:
        KH, KW, SH, SW, PH, PW = kh, kw, sh, sw, ph, pw
    else:
        KH: tl.constexpr = KNOWN[0]
        KW: tl.constexpr = KNOWN[1]
        SH: tl.constexpr = KNOWN[2]
        SW: tl.constexpr = KNOWN[3]
        PH: tl.constexpr = KNOWN[4]
        PW: tl.constexpr = KNOWN[5]
    n, c, oh, ow, ok_p, ok_q = coordinates(C, OH, OW, ROWS, LAST, WORD, BLOCK_P, BLOCK_Q)
    at = plane_at(n, c, x_n, x_c, LAST, WORD)
    total = tl.zeros([BLOCK_P, BLOCK_Q], COMPUTE)
    for i in (tl.range if KNOWN is None else tl.static_range)(0, KH):
        h = oh * SH - PH + i
        for j in (tl.range if KNOWN is None else tl.static_range)(0, KW):
            w = ow * SW - PW + j
            total += load_one(
                X, at, h, w, j, OW, H, W, x_h, x_w, PW, ok_p, ok_q, 0, UNIT, PAIRS, WORD, BLOCK_P, BLOCK_Q
            ).to(COMPUTE)
    total = averaged(total, oh, ow, KH, KW, SH, SW, PH, PW, H, W, PADDED, DIVISOR, EACH)
    at = plane_at(n, c, y_n, y_c, LAST, WORD) + at_point(oh, ow, y_h, y_w, UNIT, WORD)
    tl.store(Y + at, stored(total, Y), ok_p & ok_q)


@triton.jit
def coordinates_back(
    C, H, W, ROWS, PH, PW, SH, SW, KNOWN: tl.constexpr, LAST: tl.constexpr, PAIRS: tl.constexpr, WORD: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """(n, c, oh, ow, h, w, ok_p, ok_q): elements, and the last windows that have them. Of a window that is KNOWN a program takes
    all SH rows that share these, of which h is the first. Of PAIRS, ow is the number of a pair."""
    if KNOWN is None:
        n, c, h, w, ok_p, ok_q = coordinates(C, H, W, ROWS, LAST, WORD, BLOCK_P, BLOCK_Q)
        return n, c, (h + PH) // SH, (w + PW) // SW, h, w, ok_p, ok_q
    else:
        n, c, oh, w, ok_p, ok_q = coordinates(C, (H + PH + SH - 1) // SH, W, ROWS, LAST, WORD, BLOCK_P, BLOCK_Q)
        if PAIRS:
            ow = (tile_across(multiple(W, WORD), BLOCK_Q) * (BLOCK_Q // 2) + tl.arange(0, BLOCK_Q // 2))[None, :]
        else:
            ow = (w + PW) // SW
        return n, c, oh, ow, oh * SH - PH, w, ok_p, ok_q


@triton.jit
def averages_of(
    DY, y_n, y_c, y_h, y_w, H, W, OH, KH, KW, SH, SW, PH, PW, PADDED, DIVISOR, COMPUTE: tl.constexpr, KNOWN: tl.constexpr,
    EACH: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr, n, c, own_index, first_h, rest_h, first_w,
    rest_w, ok, OW, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Of elements that are the `rest`-th of the `first` windows, the gradients of these and of the windows before."""
    at = plane_at(n, c, y_n, y_c, LAST, WORD)
    total = tl.zeros([BLOCK_P, BLOCK_Q], COMPUTE)
    for i in (tl.range if KNOWN is None else tl.static_range)(0, (KH + SH - 1) // SH):
        oh = first_h - i
        for j in (tl.range if KNOWN is None else tl.static_range)(0, (KW + SW - 1) // SW):
            ow = first_w - j
            there = ok & (oh >= 0) & (oh < OH) & (i * SH + rest_h < KH)
            there = there & (ow >= 0) & (ow < OW) & (j * SW + rest_w < KW)
            dy = tl.load(DY + at + at_point(oh, ow, y_h, y_w, UNIT, WORD), there, 0).to(COMPUTE)
            dy = averaged(dy, oh, ow, KH, KW, SH, SW, PH, PW, H, W, PADDED, DIVISOR, EACH)
            total += tl.where(there, dy, 0.0)
    return total


@triton.jit
def side_by_side(even, odd):
    """[P, Q] each, as [P, 2 Q]."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def write_back(
    DX, OF: tl.constexpr, given, C, H, W, OW, ROWS, x_n, x_c, x_h, x_w, SH, SW, PH, PW, KNOWN: tl.constexpr, LAST: tl.constexpr,
    UNIT: tl.constexpr, PAIRS: tl.constexpr, WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Write each element's gradient, which OF finds from what it is `given`, the element's plane, its index there, and the windows
    that have it: the last of these, how far the element is from its start, whether there are any, how many windows a row has."""
    n, c, oh, ow, h, w, ok_p, ok_q = coordinates_back(
        C, H, W, ROWS, PH, PW, SH, SW, KNOWN, LAST, PAIRS, WORD, BLOCK_P, BLOCK_Q
    )
    totals = ()  # all before the first store, which would keep rows from sharing what they read
    for r in tl.static_range(1 if KNOWN is None else SH):
        if PAIRS:
            # The first of a pair is the (PW % 2)-th column of its last window, PW // 2 windows from the pair's number
            index = (h + r) * W + 2 * ow
            wide = multiple(OW, WORD)
            total = side_by_side(
                OF(*given, n, c, index, oh, r, ow + PW // 2, PW % 2, ok_p, wide, BLOCK_P, BLOCK_Q // 2),
                OF(*given, n, c, index + 1, oh, r, ow + (PW + 1) // 2, (PW + 1) % 2, ok_p, wide, BLOCK_P, BLOCK_Q // 2),
            )
        else:
            total = OF(
                *given, n, c, (h + r) * W + w, oh, h + PH - oh * SH if KNOWN is None else r, ow, w + PW - ow * SW, ok_p & ok_q, OW,
                BLOCK_P, BLOCK_Q,
            )  # fmt: skip
        totals = totals + (total,)
    at = plane_at(n, c, x_n, x_c, LAST, WORD)
    for r in tl.static_range(1 if KNOWN is None else SH):
        there = ok_p & ok_q & (h + r >= 0) & (h + r < H)
        tl.store(DX + at + at_point(h + r, w, x_h, x_w, UNIT, WORD), stored(totals[r], DX), there)


@kernel(
    grid=programs_back,
    tokens=(*PLANES, *strides("y", "x"), "kh", "kw", "sh", "sw", "ph", "pw", "PADDED", "DIVISOR"),
    default=four_warps,
)
def average_pool_backward(
    DY, DX, C, H, W, OH, OW, ROWS, y_n, y_c, y_h, y_w, x_n, x_c, x_h, x_w, kh, kw, sh, sw, ph, pw, PADDED,
    DIVISOR, COMPUTE: tl.constexpr, KNOWN: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    PAIRS: tl.constexpr, WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Of each element, the gradients of all windows that have it."""
    if KNOWN is None:
        KH, KW, SH, SW, PH, PW = kh, kw, sh, sw, ph, pw
    else:
        KH: tl.constexpr = KNOWN[0]
        KW: tl.constexpr = KNOWN[1]
        SH: tl.constexpr = KNOWN[2]
        SW: tl.constexpr = KNOWN[3]
        PH: tl.constexpr = KNOWN[4]
        PW: tl.constexpr = KNOWN[5]
    write_back(
        DX, averages_of,
        (DY, y_n, y_c, y_h, y_w, H, W, OH, KH, KW, SH, SW, PH, PW, PADDED, DIVISOR, COMPUTE, KNOWN, EACH, LAST, UNIT, WORD),
        C, H, W, OW, ROWS, x_n, x_c, x_h, x_w, SH, SW, PH, PW, KNOWN, LAST, UNIT, PAIRS, WORD, BLOCK_P, BLOCK_Q,
    )  # fmt: skip


@triton.jit
def skipped(start, D):
    """How far from the start of a window along a side its first element that is not before the plane is."""
    return (tl.maximum(-start, 0) + D - 1) // D * D


@kernel(
    grid=programs,
    tokens=(*PLANES, *strides("x", "y"), "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw"),
    default=four_warps,
)
def largest_pool(
    X, Y, INDICES, C, H, W, OH, OW, ROWS, x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w, kh, kw, sh, sw, ph, pw, dh, dw,
    COMPUTE: tl.constexpr, KNOWN: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    PAIRS: tl.constexpr, WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The largest of each window, the first of equals or the last NaN, and where in its plane it is."""
    if KNOWN is None:
        KH, KW, SH, SW, PH, PW, DH, DW = kh, kw, sh, sw, ph, pw, dh, dw
    else:
        KH: tl.constexpr = KNOWN[0]
        KW: tl.constexpr = KNOWN[1]
        SH: tl.constexpr = KNOWN[2]
        SW: tl.constexpr = KNOWN[3]
        PH: tl.constexpr = KNOWN[4]
        PW: tl.constexpr = KNOWN[5]
        DH: tl.constexpr = KNOWN[6]
        DW: tl.constexpr = KNOWN[7]
    n, c, oh, ow, ok_p, ok_q = coordinates(C, OH, OW, ROWS, LAST, WORD, BLOCK_P, BLOCK_Q)
    at = plane_at(n, c, x_n, x_c, LAST, WORD)
    best = tl.full([BLOCK_P, BLOCK_Q], float("-inf"), COMPUTE)
    # From where a window begins. The first that is in the plane, if none is larger than what is outside
    index = tl.broadcast_to(skipped(oh * SH - PH, DH) * W + skipped(ow * SW - PW, DW), [BLOCK_P, BLOCK_Q])
    for i in (tl.range if KNOWN is None else tl.static_range)(0, KH):
        h = oh * SH - PH + i * DH
        for j in (tl.range if KNOWN is None else tl.static_range)(0, KW):
            w = ow * SW - PW + j * DW
            x = load_one(
                X, at, h, w, j * DW, OW, H, W, x_h, x_w, PW, ok_p, ok_q, float("-inf"), UNIT, PAIRS, WORD, BLOCK_P, BLOCK_Q
            ).to(COMPUTE)  # fmt: skip
            better = (x > best) | is_nan(x)
            best = tl.where(better, x, best)
            index = tl.where(better, i * DH * W + j * DW, index)
    index += (oh * SH - PH) * W + ow * SW - PW
    at = plane_at(n, c, y_n, y_c, LAST, WORD) + at_point(oh, ow, y_h, y_w, UNIT, WORD)
    tl.store(Y + at, stored(best, Y), ok_p & ok_q)
    tl.store(INDICES + at, index.to(tl.int64), ok_p & ok_q)


@triton.jit
def gradients_of(
    DY, INDICES, y_n, y_c, y_h, y_w, i_n, i_c, i_h, i_w, OH, KH, KW, SH, SW, DH, DW, COMPUTE: tl.constexpr, KNOWN: tl.constexpr,
    LAST: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr, n, c, own_index, first_h, rest_h, first_w, rest_w, ok, OW,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Of elements of this index, the gradients of the `first` windows and of those before that hold it for the largest."""
    at_y = plane_at(n, c, y_n, y_c, LAST, WORD)
    at_i = plane_at(n, c, i_n, i_c, LAST, WORD)
    total = tl.zeros([BLOCK_P, BLOCK_Q], COMPUTE)
    for i in (tl.range if KNOWN is None else tl.static_range)(0, (KH - 1) * DH // SH + 1):
        oh = first_h - i
        for j in (tl.range if KNOWN is None else tl.static_range)(0, (KW - 1) * DW // SW + 1):
            ow = first_w - j
            there = ok & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW)
            index = tl.load(INDICES + at_i + at_point(oh, ow, i_h, i_w, UNIT, WORD), there, -1)
            dy = tl.load(DY + at_y + at_point(oh, ow, y_h, y_w, UNIT, WORD), there, 0).to(COMPUTE)
            total += tl.where(index == own_index, dy, 0.0)
    return total


@kernel(
    grid=programs_back,
    tokens=(*PLANES, *strides("y", "i", "x"), "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw"),
    default=four_warps,
)
def largest_pool_backward(
    DY, INDICES, DX, C, H, W, OH, OW, ROWS, y_n, y_c, y_h, y_w, i_n, i_c, i_h, i_w, x_n, x_c, x_h, x_w, kh, kw, sh, sw, ph, pw,
    dh, dw, COMPUTE: tl.constexpr, KNOWN: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, PAIRS: tl.constexpr,
    WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Of each element, the gradients of all windows that it is the largest of: an index is compared, never followed."""
    if KNOWN is None:
        KH, KW, SH, SW, PH, PW, DH, DW = kh, kw, sh, sw, ph, pw, dh, dw
    else:
        KH: tl.constexpr = KNOWN[0]
        KW: tl.constexpr = KNOWN[1]
        SH: tl.constexpr = KNOWN[2]
        SW: tl.constexpr = KNOWN[3]
        PH: tl.constexpr = KNOWN[4]
        PW: tl.constexpr = KNOWN[5]
        DH: tl.constexpr = KNOWN[6]
        DW: tl.constexpr = KNOWN[7]
    write_back(
        DX, gradients_of,
        (DY, INDICES, y_n, y_c, y_h, y_w, i_n, i_c, i_h, i_w, OH, KH, KW, SH, SW, DH, DW, COMPUTE, KNOWN, LAST, UNIT, WORD),
        C, H, W, OW, ROWS, x_n, x_c, x_h, x_w, SH, SW, PH, PW, KNOWN, LAST, UNIT, PAIRS, WORD, BLOCK_P, BLOCK_Q,
    )  # fmt: skip


@kernel(grid=programs, tokens=(*PLANES, *strides("x", "y"), "SCALE_H", "SCALE_W"), default=four_warps)
def nearest(
    X, Y, C, H, W, OH, OW, ROWS, x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w, SCALE_H: tl.int64, SCALE_W: tl.int64,
    LAST: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """SCALE: elements of the operand for one of the result."""
    n, c, oh, ow, ok_p, ok_q = coordinates(C, OH, OW, ROWS, LAST, WORD, BLOCK_P, BLOCK_Q)
    h = tl.minimum((oh.to(tl.float32) * number(SCALE_H, tl.float32)).to(tl.int32), H - 1)
    w = tl.minimum((ow.to(tl.float32) * number(SCALE_W, tl.float32)).to(tl.int32), W - 1)
    ok = ok_p & ok_q
    x = tl.load(X + plane_at(n, c, x_n, x_c, LAST, WORD) + at_point(h, w, x_h, x_w, UNIT, WORD), ok, 0)
    tl.store(Y + plane_at(n, c, y_n, y_c, LAST, WORD) + at_point(oh, ow, y_h, y_w, UNIT, WORD), x, ok)


@triton.jit
def cubic(x):
    """The bicubic kernel at a distance."""
    x = tl.abs(x)
    near = ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * CUBIC
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def taps(o, size, scale, COMPUTE: tl.constexpr):
    """(the first element under the kernel around the o-th, how many there are, where the first is from the kernel's middle)."""
    support = 2.0 * tl.maximum(scale, 1.0)
    center = scale * (o.to(COMPUTE) + 0.5)
    first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    count = tl.minimum((center + support + 0.5).to(tl.int32), size) - first
    return first, count, first.to(COMPUTE) - center + 0.5


@triton.jit
def weight(i, count, start, scale):
    """The kernel at the i-th element under it, which is as wide as the scale where that shrinks."""
    return tl.where(i < count, cubic((start + i) * divide(start * 0 + 1.0, start * 0 + tl.maximum(scale, 1.0))), 0.0)


@kernel(
    grid=programs, tokens=(*PLANES, *strides("x", "y"), "TAPS_H", "TAPS_W", "SCALE_H", "SCALE_W"), default=four_warps
)
def bicubic(
    X, Y, C, H, W, OH, OW, ROWS, x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w, TAPS_H, TAPS_W, SCALE_H: tl.int64, SCALE_W: tl.int64,
    COMPUTE: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """TAPS: the most elements under a kernel, along each side. Weights are brought to a sum of 1."""
    n, c, oh, ow, ok_p, ok_q = coordinates(C, OH, OW, ROWS, LAST, WORD, BLOCK_P, BLOCK_Q)
    scale_h = number(SCALE_H, COMPUTE)
    scale_w = number(SCALE_W, COMPUTE)
    first_h, count_h, start_h = taps(oh, H, scale_h, COMPUTE)
    first_w, count_w, start_w = taps(ow, W, scale_w, COMPUTE)
    sum_h = start_h * 0
    for i in range(0, TAPS_H):
        sum_h += weight(i, count_h, start_h, scale_h)
    sum_w = start_w * 0
    for j in range(0, TAPS_W):
        sum_w += weight(j, count_w, start_w, scale_w)
    at = plane_at(n, c, x_n, x_c, LAST, WORD)
    total = tl.zeros([BLOCK_P, BLOCK_Q], COMPUTE)
    for i in range(0, TAPS_H):
        line = tl.zeros([BLOCK_P, BLOCK_Q], COMPUTE)
        for j in range(0, TAPS_W):
            there = ok_p & ok_q & (i < count_h) & (j < count_w)
            x = tl.load(X + at + at_point(first_h + i, first_w + j, x_h, x_w, UNIT, WORD), there, 0).to(COMPUTE)
            line += x * divide(weight(j, count_w, start_w, scale_w), sum_w)
        total += line * divide(weight(i, count_h, start_h, scale_h), sum_h)
    at = plane_at(n, c, y_n, y_c, LAST, WORD) + at_point(oh, ow, y_h, y_w, UNIT, WORD)
    tl.store(Y + at, stored(total, Y), ok_p & ok_q)


# ---- host ------------------------------------------------------------------------------------------------------------


def pair(value: Any, default: Any = None) -> tuple[int, int]:
    """Two numbers, of one or two; or of none, where there is a default."""
    given = (value,) * 2 if isinstance(value, int) else tuple(value)
    if not given and default is not None:
        return default
    if len(given) not in (1, 2):
        raise Declined("sizes that are refused")
    return (given[0], given[-1])


def pooled(size: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    """How many windows a side has."""
    if k < 1 or s < 1 or d < 1 or p < 0 or p > ((k - 1) * d + 1) // 2:
        raise Declined("windows that are refused")
    made = (size + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil else 0)) // s + 1
    made -= ceil and (made - 1) * s >= size + p
    if made < 1:
        raise Declined("a result of no elements")
    return made


def planes(*tensors: Tensor) -> list[Tensor]:
    """Tensors [N, C, H, W]; of three dimensions N is 1."""
    taken(*tensors)
    if not all(t.is_floating_point() or t.dtype == torch.int64 for t in tensors):
        raise Declined("no floats")
    if tensors[0].dim() not in (3, 4) or not all(t.dim() == tensors[0].dim() and t.numel() for t in tensors):
        raise Declined("no planes, or no elements")
    if max(t.numel() for t in tensors) >= 2**31:
        raise Declined("more elements than 32 bits count")
    return [t if t.dim() == 4 else t[None] for t in tensors]


def made_like(x: Tensor, height: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for planes of another size, which lie as those of x do."""
    form = lies(x) if x.dim() == 4 else torch.contiguous_format
    if form is None:
        raise Declined("strides almost like channels last")
    shape = (*x.shape[:-2], height, width)
    return own(torch.empty(shape, dtype=dtype or x.dtype, device=x.device, memory_format=form))


def launch(
    kernel_: Any, tensors: list[Tensor], x: Tensor, y: Tensor, sizes: tuple[int, ...], numbers: Any = (), back: bool = False,
    apart: int | None = None, **constants: Any,
) -> None:  # fmt: skip
    """Of planes x and y of its windows; `tensors` are what a kernel takes, of which the first `apart`, or all, have strides of
    their own. What is made lies as y does or, on the way `back`, as x."""
    n, c, h, w = x.shape
    made = x if back else y
    last = made.stride(1) == 1 and c > 1 and made.stride(3) != 1
    total = n * c * made.shape[2] * made.shape[3]
    steps = tensors[: apart or len(tensors)]
    last = last and all(t.stride(1) == 1 for t in steps)
    columns = c if last else made.shape[3]
    unit, word = False, 1
    if total < SMALL:
        block_p, block_q = SMALL_TILE
    else:
        block_q = max(8, min(128, power_of_two(columns)))
        block_p = TILE // block_q
        unit = not last and all(t.stride(3) == 1 for t in steps)
        if last:
            word = math.gcd(WORDS, c, *(t.stride(d) for t in steps for d in (0, 2, 3)))
        elif unit:
            word = math.gcd(WORDS, w, y.shape[3], *(t.stride(d) for t in steps for d in (0, 1, 2)))
    rows = made.shape[2]
    if "KNOWN" in constants:
        window = constants["KNOWN"]
        constants["PAIRS"] = unit and window is not None and window[3] == 2
        if back and window is not None:
            rows = cdiv(h + window[4], window[2])  # of windows, each with the rows of elements up to the next
    rows *= n * made.shape[3] if last else n * c
    if rows >= 2**31 - TILE:
        raise Declined("more rows than 32 bits count")
    every = [s for t in steps for s in t.stride()]
    plans.launch(
        kernel_, tensors, (c, h, w, *y.shape[2:], rows, *every, *sizes), numbers, LAST=last, UNIT=unit, WORD=word,
        BLOCK_P=block_p, BLOCK_Q=block_q, **constants,
    )  # fmt: skip


def known(window: tuple[int, ...], made: Tensor) -> tuple[int, ...] | None:
    """A window's sizes, if they are to be compiled in: of a large call and a small window."""
    kh, kw, sh, _, _, _, dh, dw = (*window, 1, 1)[:8]
    small = ((kh - 1) * dh + 1) * ((kw - 1) * dw + 1) <= UNROLLED and sh <= UNROLLED // 4
    return window if small and made.numel() >= SMALL else None


def inside(window: tuple[int, ...], x: Tensor, y: Tensor, padded: bool) -> bool:
    """Whether all windows are whole: of the plane or, `padded`, of it and its padding."""
    kh, kw, sh, sw, ph, pw = window
    sides = zip(x.shape[2:], y.shape[2:], (kh, kw), (sh, sw), (ph, pw))
    return all((m - 1) * s + k <= n + 2 * p and (padded or p == 0) for n, m, k, s, p in sides)


def in_triton(t: Tensor) -> Any:
    return IN_TRITON[compute_dtype(t.dtype)]


def average_sizes(
    x: Tensor, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, padded: bool, divisor: int | None
) -> tuple:
    kernel_size, padding = pair(kernel_size), pair(padding)
    stride = pair(stride, kernel_size)
    if divisor == 0:
        raise Declined("a divisor of 0")
    made = [pooled(n, k, s, p, 1, ceil_mode) for n, k, s, p in zip(x.shape[-2:], kernel_size, stride, padding)]
    return (*made, (*kernel_size, *stride, *padding, int(padded), divisor or 0))


def average_constants(sizes: tuple[int, ...], x: Tensor, y: Tensor, made: Tensor) -> dict[str, Any]:
    window, padded, divisor, each = known(sizes[:6], made), sizes[6] != 0, sizes[7], 0
    if window is not None and x.is_floating_point():
        each = max(divisor, 0) if divisor else window[0] * window[1] * inside(window, x, y, padded)
    return {"COMPUTE": in_triton(x), "KNOWN": window, "EACH": each}


def avg_pool2d(
    self: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    (x,) = planes(self)
    height, width, sizes = average_sizes(
        self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    out = made_like(self, height, width)
    y = out if out.dim() == 4 else out[None]
    launch(average_pool, [x, y], x, y, sizes, **average_constants(sizes, x, y, y))
    return out


def avg_pool2d_backward(
    grad_output: Tensor, self: Tensor, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:  # fmt: skip
    dy, x = planes(grad_output, self)
    height, width, sizes = average_sizes(
        self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    if tuple(grad_output.shape) != (*self.shape[:-2], height, width) or grad_output.dtype != self.dtype:
        raise Declined("a gradient that is not like the result")
    out = made_like(self, *self.shape[-2:])
    dx = out if out.dim() == 4 else out[None]
    launch(average_pool_backward, [dy, dx], dx, dy, sizes, back=True, **average_constants(sizes, dx, dy, dx))
    return out


def largest_sizes(x: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> tuple:
    kernel_size, padding, dilation = pair(kernel_size), pair(padding), pair(dilation)
    stride = pair(stride, kernel_size)
    if any(p > k // 2 for p, k in zip(padding, kernel_size)):
        raise Declined("windows that are refused")
    sides = zip(x.shape[-2:], kernel_size, stride, padding, dilation)
    return (*(pooled(*side, ceil_mode) for side in sides), (*kernel_size, *stride, *padding, *dilation))


def max_pool2d(
    self: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Tensor, Tensor]:
    (x,) = planes(self)
    if not self.is_floating_point():
        raise Declined("no floats")
    height, width, sizes = largest_sizes(self, kernel_size, stride, padding, dilation, ceil_mode)
    out, indices = made_like(self, height, width), made_like(self, height, width, torch.int64)
    y, index = (t if t.dim() == 4 else t[None] for t in (out, indices))
    launch(largest_pool, [x, y, index], x, y, sizes, apart=2, COMPUTE=in_triton(x), KNOWN=known(sizes, y))
    return out, indices


def max_pool2d_with_indices_backward(
    grad_output: Tensor, self: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Tensor,
) -> Tensor:  # fmt: skip
    dy, x, index = planes(grad_output, self, indices)
    height, width, sizes = largest_sizes(self, kernel_size, stride, padding, dilation, ceil_mode)
    shape = *self.shape[:-2], height, width
    if tuple(grad_output.shape) != shape or tuple(indices.shape) != shape or grad_output.dtype != self.dtype:
        raise Declined("a gradient that is not like the result")
    if indices.dtype != torch.int64 or not self.is_floating_point():
        raise Declined("no floats, or no indices")
    out = made_like(self, *self.shape[-2:])
    dx = out if out.dim() == 4 else out[None]
    constants = {"COMPUTE": in_triton(x), "KNOWN": known(sizes, dx)}
    launch(largest_pool_backward, [dy, index, dx], dx, dy, sizes, back=True, **constants)
    return out


def max_pool2d_backward(
    grad_output: Tensor, self: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """The same from the operand alone: where the largest are is found anew."""
    _, indices = max_pool2d(self, kernel_size, stride, padding, dilation, ceil_mode)
    return max_pool2d_with_indices_backward(
        grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices
    )


def resampled(x: Tensor, output_size: Any) -> Tensor:
    if len(output_size) != 2 or x.dim() != 4 or not x.numel() or min(output_size) < 1:
        raise Declined("sizes that are refused")
    if max(x.numel(), x.shape[0] * x.shape[1] * output_size[0] * output_size[1]) >= 2**31:
        raise Declined("more elements than 32 bits count")
    return made_like(x, *output_size)


def upsample_nearest2d(
    self: Tensor, output_size: Any, scales_h: float | None = None, scales_w: float | None = None
) -> Tensor:
    taken(self)
    if not self.is_floating_point() and self.dtype != torch.uint8:
        raise Declined("no floats")
    out, numbers = resampled(self, output_size), []
    for n, m, s in zip(self.shape[2:], output_size, (scales_h, scales_w)):
        # aten goes by sizes alone where they are equal; on a processor, where they are twice as many too
        by_size = s is None or s <= 0 or m == n or (not self.is_cuda and m == 2 * n)
        numbers.append(fp32_bits(n / m if by_size else 1 / s))
    launch(nearest, [self, out], self, out, (), numbers)
    return out


def fp32_bits(value: float) -> int:
    """A number rounded to fp32, as the 64 bits that a kernel takes."""
    return bits_of(torch.tensor(value, dtype=torch.float32).item(), torch.float64)


def upsample_bicubic2d_aa(
    self: Tensor, output_size: Any, align_corners: bool, scales_h: float | None = None, scales_w: float | None = None
) -> Tensor:
    taken(self)
    if not self.is_floating_point():
        raise Declined("no floats")
    out = resampled(self, output_size)
    scales = []
    for n, m, s in zip(self.shape[2:], output_size, (scales_h, scales_w)):
        if align_corners:
            scales.append((n - 1) / (m - 1) if m > 1 else 0.0)
        else:
            scales.append(1 / s if s is not None and s > 0 else n / m)
    most = [2 * cdiv(round(2e6 * max(1.0, s)), 10**6) + 1 for s in scales]
    compute = compute_dtype(self.dtype)
    numbers = [bits_of(s, torch.float64) if compute == torch.float64 else fp32_bits(s) for s in scales]
    launch(bicubic, [self, out], self, out, tuple(most), numbers, COMPUTE=IN_TRITON[compute])
    return out


FORMS = {
    "avg_pool2d": avg_pool2d, "avg_pool2d_backward": avg_pool2d_backward, "max_pool2d_with_indices": max_pool2d,
    "max_pool2d_with_indices_backward": max_pool2d_with_indices_backward, "max_pool2d_backward": max_pool2d_backward,
    "upsample_nearest2d": upsample_nearest2d, "_upsample_bicubic2d_aa": upsample_bicubic2d_aa,
}  # fmt: skip
