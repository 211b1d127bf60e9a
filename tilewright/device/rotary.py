"""Rotary embedding on the device: angles to cosines and sines, pairs of columns in and out, the rotation between.

Tiles are [TOKENS, HEADS, columns]; cosines and sines are [TOKENS, pairs], computed once for all heads. The k-th pair of
columns is (k, k + PAIRS), or (2k, 2k + 1) if it is interleaved.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Heads(NamedTuple):
    """Heads of tokens, [batch, length, heads, columns] in any order: a pointer and four strides; `Heads()` are none."""

    data: Any = None
    stride_b: Any = None
    stride_l: Any = None
    stride_h: Any = None
    stride_d: Any = None


class Rows(NamedTuple):
    """Rows of tokens, [batch, length, columns] in any order: a pointer and three strides."""

    data: Any
    stride_b: Any
    stride_l: Any
    stride_n: Any


class QKV(NamedTuple):
    """What there is of queries, of keys and of values."""

    q: Any
    k: Any
    v: Any


class Columns(NamedTuple):
    """How tiles hold the columns of a head: the first ones as PAIRS pairs, in HALF lanes, which are rotated; the others as pairs as
    well, in REST lanes, 0 if there are none; all together in LANES. INTERLEAVED says which columns are a pair."""

    PAIRS: int
    HALF: int
    REST: int
    LANES: int
    INTERLEAVED: bool


class Indices(NamedTuple):
    """A number for each token, [batch, length]: a pointer, and strides."""

    data: Any
    stride_b: Any
    stride_l: Any


class Angles(NamedTuple):
    """What tokens are rotated by: pointers, None for what there is not, strides, and a factor.

    Angles are `freqs`, or `cos` and `sin` of them, [batch, position, pair]; `stride_b` is None where all batches have the same.
    `positions` has the position of each token, None where that is its index: [length], or [batch, length] with strides. `mscale`
    multiplies cosines and sines, None for 1. All is flat: of a tuple within a tuple Triton 3.6 may forget numbers that are 1.
    """

    freqs: Any
    cos: Any
    sin: Any
    positions: Any
    stride_b: Any
    stride_l: Any
    stride_pair: Any
    mscale: Any
    placed_b: Any = None
    placed_l: Any = None


@triton.jit
def cos_sin(x):
    """(cos x, sin x) of fp32 angles in radians: 1e-7 off at most up to 1e6 in magnitude, 4e-7 up to 6e6, 8e-6 up to 1.6e7.

    Two steps take quarter turns off; each product but the last two is exact in an fma. The library's functions, made for
    all of fp32, take a branch and a stack.
    """
    QUARTERS: tl.constexpr = 0.6366197723675814
    k = tl.floor(x * QUARTERS + 0.5)
    r = tl.fma(-k, 1.57079637050628662109375, x)
    j = tl.floor(r * QUARTERS + 0.5)  # a large x * QUARTERS is rounded, and k then one off
    r = tl.fma(-j, 1.57079637050628662109375, r)
    k += j
    r = tl.fma(-k, -4.371139000186241e-08, r)
    r = tl.fma(-k, -1.7151245100058819e-15, r)
    z = r * r
    s = tl.fma(r * z, -0.166666641831398 + z * (0.008332704193890095 - z * 0.00019578507635742426), r)
    c = 0.04166658967733383 + z * (2.3966393200680614e-05 * z - 0.00138836819678545)
    c = tl.fma(z * z, c, 1.0 - 0.5 * z)
    q = k.to(tl.int32)
    odd = (q & 1) != 0
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    return tl.where(((q + 1) & 2) != 0, -cos, cos), tl.where((q & 2) != 0, -sin, sin)


@triton.jit
def locate(row, B, L, P, ANGLES, BATCH_INNER: tl.constexpr):
    """(batch, index in the sequence, position, or -1 if that is none of the P with angles) of tokens, all 64-bit. B * L < 2^31."""
    live = row < B * L
    if BATCH_INNER:
        batch = (row % B).to(tl.int64)
        index = (row // B).to(tl.int64)
    else:
        batch = (row // L).to(tl.int64)
        index = (row % L).to(tl.int64)
    if ANGLES.positions is None:
        return batch, index, index
    else:
        at = index
        if ANGLES.placed_l is not None:
            at = batch * ANGLES.placed_b + index * ANGLES.placed_l
        position = tl.load(ANGLES.positions + at, live, 0).to(tl.int64)
        return batch, index, tl.where((position >= 0) & (position < P), position, -1)


@triton.jit
def load_angles(ANGLES, at, position, live, PAIRS: tl.constexpr, HALF: tl.constexpr):
    """(cos, sin) [TOKENS, HALF] times mscale of tokens whose angles begin at offsets `at` [TOKENS]; NaN at live tokens of no
    position, and nothing of consequence at others."""
    i = tl.arange(0, HALF)[None, :]
    at = at[:, None] + i.to(tl.int64) * ANGLES.stride_pair
    inside = (live & (position >= 0))[:, None] & (i < PAIRS)
    if ANGLES.freqs is not None:
        c, s = cos_sin(tl.load(ANGLES.freqs + at, inside, 0.0).to(tl.float32))
    else:
        c = tl.load(ANGLES.cos + at, inside, 0.0).to(tl.float32)
        s = tl.load(ANGLES.sin + at, inside, 0.0).to(tl.float32)
    factor = tl.where(live & (position < 0), float("nan"), 1.0)[:, None]
    if ANGLES.mscale is not None:
        factor *= ANGLES.mscale
    return c * factor, s * factor


@triton.jit
def load_pairs(
    X, at, inside, stride, FIRST: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """COUNT columns from FIRST on in fp32 as pairs, (first, second), [TOKENS, HEADS, HALF] each; heads begin at offsets
    `at`. The last of an odd COUNT is without its second."""
    PAIRS: tl.constexpr = (COUNT + 1) // 2
    if INTERLEAVED:
        i = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.load(X + at + (FIRST + i).to(tl.int64) * stride, inside & (i < COUNT), 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], HALF, 2]))
    else:
        i = tl.arange(0, HALF)[None, None, :]
        P = X + at
        a = tl.load(P + (FIRST + i).to(tl.int64) * stride, inside & (i < PAIRS), 0.0).to(tl.float32)
        b = tl.load(P + (FIRST + PAIRS + i).to(tl.int64) * stride, inside & (i < COUNT - PAIRS), 0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(Y, a, b, at, inside, COUNT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The reverse, to columns one apart, rounded once."""
    PAIRS: tl.constexpr = (COUNT + 1) // 2
    if INTERLEAVED:
        i = tl.arange(0, 2 * HALF)[None, None, :]
        y = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * HALF])
        tl.store(Y + at + i, y.to(Y.dtype.element_ty), inside & (i < COUNT))
    else:
        i = tl.arange(0, HALF)[None, None, :]
        tl.store(Y + at + i, a.to(Y.dtype.element_ty), inside & (i < PAIRS))
        tl.store(Y + at + PAIRS + i, b.to(Y.dtype.element_ty), inside & (i < COUNT - PAIRS))


@triton.jit
def pair_columns(COUNT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(columns of firsts, of seconds, whether there is a first, a second) [HALF]."""
    i = tl.arange(0, HALF)
    PAIRS: tl.constexpr = (COUNT + 1) // 2
    if INTERLEAVED:
        return 2 * i, 2 * i + 1, i < PAIRS, i < COUNT - PAIRS
    else:
        return i, PAIRS + i, i < PAIRS, i < COUNT - PAIRS


@triton.jit
def load_vector_pairs(W, COUNT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The same of one vector for all heads: a pair of [1, 1, HALF]."""
    first, second, has_first, has_second = pair_columns(COUNT, HALF, INTERLEAVED)
    a = tl.load(W + first, has_first, 0.0).to(tl.float32)
    b = tl.load(W + second, has_second, 0.0).to(tl.float32)
    return a[None, None, :], b[None, None, :]


@triton.jit
def rotate(a, b, c, s):
    """Pairs [TOKENS, HEADS, HALF] rotated by the angles of c and s [TOKENS, HALF]; by -s back."""
    c = c[:, None, :]
    s = s[:, None, :]
    return a * c - b * s, b * c + a * s


@triton.jit
def rotate_back(a, b, c, s):
    """The transpose of `rotate`: what a gradient goes through."""
    c = c[:, None, :]
    s = s[:, None, :]
    return a * c + b * s, b * c - a * s


@triton.constexpr_function
def head_layout(part, H, KV, GROUPED):
    """(first, per group, heads in a group): head h begins at head-row (h // heads) * per group + first + h % heads."""
    share = H // KV
    if part == "q":
        return (0, share + 2, share) if GROUPED else (0, H, H)
    if GROUPED:
        return (share + (part == "v"), share + 2, 1)
    return (H + KV * (part == "v"), KV, KV)


@triton.jit
def column_of(head, part: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUPED: tl.constexpr):
    """Where in a row heads of a part begin."""
    LAYOUT: tl.constexpr = head_layout(part, H, KV, GROUPED)
    return ((head // LAYOUT[2] * LAYOUT[1] + LAYOUT[0] + head % LAYOUT[2]) * D).to(tl.int64)
