"""Linear attention forward, by chunks of tokens. In a chunk that finds the state S, with G[t] the sum of log decays up to t in it:

    o[t] = scale * (e**G[t] q[t] S + sum over s <= t of e**(G[t] - G[s]) (q[t] . k[s]) v[s])
    S'   = e**G[C] S + sum over s of e**(G[C] - G[s]) k[s] v[s]^T

Of the delta rule, values become v' = T beta (v - e**G k S), with T the inverse of I + L and L[t, s] = beta[t] e**(G[t] - G[s])
(k[t] . k[s]) for s < t. One kernel inverts. One walks through the chunks of a sequence: where walkers crowd the chip, it makes the
outputs as well and stores no state but the last. Where they are few, it keeps the state that each chunk finds, and a third kernel
makes the outputs of all chunks side by side. No exponent is positive where decays are not.

Factors of products are sums of bf16 pieces (`device/products.py`). Of bf16 inputs these are themselves; all that is made on the way
has two pieces at least, 17 bits, so that an output is rounded once, where it is stored. With scores or the state in one piece it
would be off by as much again: 2.35e-3 of its root mean square rather than 1.66e-3, and up to 2.5e-3 over 70 tokens. What only
gradients are made of is rounded once more before it is multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.portable import Heads, heads_of, load_part, narrowest, no_part, store_part
from ...attention.tiles import Lengths, lengths, tile_at
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...device.products import add_product
from ...device.softmax import LOG2E
from ...runtime.kernel import Arguments, kernel
from .linear import EPS
from .places import sequence_at, sequence_count

LEAST = tl.constexpr(-184.0)  # in base 2, e**-128: fp32 has no smaller decay, and sums of larger ones keep their digits
COARSE = tl.constexpr(1.5 * 2**13)  # a number plus this is rounded to a multiple of 2**-10
ROOMY = 160 * 1024  # bytes of shared memory that chunks of 64 tokens ask for, with keys of 128 columns
# Walkers an SM from which they make outputs themselves. The states that few of them leave for others are written and read, twice
# the bytes of q, k, v and o; against that, a chunk takes a walker about twice as long where it makes outputs too. With two walkers
# an SM, 616 us for 1,029 (H200, 128 heads of 8,192 tokens and 128 columns, a decay of each head)
CROWD = 0.5
# The same of the delta rule, whose walk spills 450 to 1,000 bytes where it makes outputs; where not, 0 to 40 without decays of
# tokens, 260 to 560 with them (Triton 3.6, sm_90, keys and values of 128 columns). With two walkers an SM, 2,484 us for 2,940
DELTA_CROWD = 1.5
SUB = tl.constexpr(16)  # rows of the blocks that are inverted row by row


class Gates(NamedTuple):
    """A number for each token and head, [batch, length, heads] of any strides, for each head alone, without strides of batch and
    tokens, for each unit of the work and head, without a stride of tokens alone, or none."""

    data: Any = None
    stride_b: Any = None
    stride_t: Any = None
    stride_h: Any = None


class Shape(NamedTuple):
    """Constants of all kernels: columns of keys and of values, to which powers of two they are padded, tokens of a chunk; pieces of
    inputs, of what gradients and of what results are made of; whether rows of queries and keys are normalised."""

    D: int
    BLOCK_D: int
    V: int
    BLOCK_V: int
    CHUNK: int
    RAW: int
    MADE: int
    KEPT: int
    NORMALIZE: bool


# ---- parts of kernels ------------------------------------------------------------------------------------------------


@triton.jit
def halves(x, PIECES: tl.constexpr):
    """The first and, of two, the second bf16 piece of x; NaN of an infinity. Rounded as a whole number: what is converted to bf16
    and widened again is converted number by number, which takes a warp 8 cycles each (Triton 3.6, sm_90), and not in pairs."""
    if PIECES == 1:
        return x, x
    else:
        wide = x.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        top = ((bits + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return top.to(tl.bfloat16), (wide - top).to(tl.bfloat16)


@triton.jit
def times(total, a, b, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr):
    """total + a @ b of factors in so many bf16 pieces. Of two, an infinity comes out as NaN: `add_product` would keep it, with
    copies of both factors in registers, which walks have not."""
    if PIECES_A == 1:
        a = a.to(tl.bfloat16)
    if PIECES_B == 1:
        b = b.to(tl.bfloat16)
    if max(PIECES_A, PIECES_B) == 2:
        a0, a1 = halves(a, PIECES_A)
        b0, b1 = halves(b, PIECES_B)
        if PIECES_B == 2:
            total = tl.dot(a0, b1, total)
        if PIECES_A == 2:
            total = tl.dot(a1, b0, total)
        return tl.dot(a0, b0, total)
    else:
        return add_product(total, a, b, PIECES_A, PIECES_B)


@triton.jit
def plus_product(total, own, a, b, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr):
    """total + (own + a @ b): `total` goes on from chunk to chunk, `own` is of this one alone. The first addition rounds to nearest,
    outside of the product. Tensor cores cut off what they add: as their accumulator a total without decay would lose about 2**-24
    of itself with every 16 tokens."""
    if max(PIECES_A, PIECES_B) == 1:
        # Without a limit of inexact sums, which is about FP8 alone, Triton would make `total` the accumulator of this product
        return total + tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), own, max_num_imprecise_acc=1)
    else:
        return total + times(own, a, b, PIECES_A, PIECES_B)


@triton.jit
def gate_at(G, batch, head, token, live):
    """[n]: the numbers of tokens in fp32, 0 where there is none."""
    at = batch.to(tl.int64) * G.stride_b + head.to(tl.int64) * G.stride_h + token.to(tl.int64) * G.stride_t
    return tl.load(G.data + at, live, 0.0).to(tl.float32)


class Decay(NamedTuple):
    """Of the tokens of a chunk: sums of log decays in base 2 up to each, in multiples of 2**-10, and of what that leaves, and both
    of the whole chunk. Differences of sums in one number would lose the digits that many tokens of large decays take. Where all
    tokens decay alike, `each` is what they do, sums are its multiples, and nothing is left."""

    sums: Any
    rest: Any
    all_sums: Any
    all_rest: Any
    each: Any


@triton.jit
def bounded(log_decay):
    """Log decays in base 2."""
    return tl.maximum(log_decay.to(tl.float32) * LOG2E, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def decay_of(DECAY, batch, head, token, there, CHUNK: tl.constexpr):
    """Of a chunk whose first `there` tokens are in a sequence; the others do not decay."""
    i = tl.arange(0, CHUNK)
    if DECAY.data is None:
        return Decay(tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), 0.0, 0.0, 0.0)
    elif DECAY.stride_t is None:
        each = bounded(tl.load(DECAY.data + head.to(tl.int64) * DECAY.stride_h))
        there = tl.minimum(there, CHUNK)
        return Decay(tl.minimum(i + 1, there) * each, tl.zeros([CHUNK], tl.float32), there * each, 0.0, each)
    else:
        g = bounded(gate_at(DECAY, batch, head, token, i < there))
        coarse = (g + COARSE) - COARSE  # whose sums are exact: 64 of at most 184 have 24 bits
        rest = g - coarse
        return Decay(tl.cumsum(coarse, 0), tl.cumsum(rest, 0), tl.sum(coarse, 0), tl.sum(rest, 0), 0.0)


@triton.jit
def from_start(decay):
    """[n]: how much of the state that the chunk finds is left at each token."""
    return tl.exp2(decay.sums + decay.rest)


@triton.jit
def to_end(decay):
    """[n]: how much of each token is left at the chunk's end."""
    return tl.exp2((decay.all_sums - decay.sums) + (decay.all_rest - decay.rest))


@triton.jit
def throughout(decay):
    """How much of the state that the chunk finds is left at its end."""
    return tl.exp2(decay.all_sums + decay.all_rest)


@triton.jit
def lower(a, CHUNK: tl.constexpr, STRICT: tl.constexpr):
    """[t, s] with 0 where s comes after t or, if STRICT, is t, whatever stands there."""
    i = tl.arange(0, CHUNK)
    return tl.where((i[:, None] > i[None, :]) if STRICT else (i[:, None] >= i[None, :]), a, 0.0)


@triton.jit
def faded(a, DECAY, decay, CHUNK: tl.constexpr, STRICT: tl.constexpr):
    """[t, s]: a times how much of token s is left at token t; 0 where s comes after t or, if STRICT, is t, whatever is there, the
    infinities of exponents that are positive then among it."""
    if DECAY.data is None:
        return lower(a, CHUNK, STRICT)
    else:
        i = tl.arange(0, CHUNK).to(tl.float32)
        before = (i[:, None] > i[None, :]) if STRICT else (i[:, None] >= i[None, :])
        if DECAY.stride_t is None:
            # Multiples of each row and column take fewer registers than those of differences, which walks would keep from chunk to
            # chunk; what rounding them costs, 2**-18 of a decay, counts where next to nothing is left
            sums = i * decay.each
            apart = sums[:, None] - sums[None, :]
        else:
            # Sums are added to what comes of the product itself, each for itself: otherwise Triton makes exponents where sums lie,
            # with a register for each row of either sum, and moves them to the product through shared memory
            none = tl.where(a == a, 0.0, a)
            apart = (none + decay.sums[:, None]) - decay.sums[None, :]
            apart += (none + decay.rest[:, None]) - decay.rest[None, :]
        return tl.where(before, a * tl.exp2(apart), 0.0)


@triton.jit
def lengths_of(x, SHAPE: tl.constexpr):
    """[n]: what rows are multiplied by: 1 over their lengths if they are normalised."""
    if SHAPE.NORMALIZE:
        wide = x.to(tl.float32)
        return tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
    else:
        return tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit
def chunk_slot(LENGTHS, tile, index, batch, TILES, CHUNK: tl.constexpr):
    """Where what is kept of a chunk lies. Of packed sequences that is at most one more than tokens take, for each sequence."""
    if LENGTHS.table is None:
        return batch.to(tl.int64) * TILES + index
    else:
        return (tile.first_q // CHUNK + tile.sequence + tile.start // CHUNK).to(tl.int64)


@triton.jit
def unit_of(LENGTHS, pid, HEADS, L, TILES, CHUNK: tl.constexpr):
    """(row of the batch, head, the chunk's index in the row, its tile) of a program: the heads of a chunk are side by side."""
    unit = pid // HEADS
    batch = unit // TILES
    return batch, pid % HEADS, unit % TILES, tile_at(LENGTHS, unit % TILES, batch, L, L, CHUNK)


class Chunk(NamedTuple):
    """The tokens [CHUNK] of a program's chunk, which of them are there, which of those are in a sequence and how many, and where
    what is kept of the chunk lies."""

    token: Any
    live: Any
    known: Any
    there: Any
    slot: Any


@triton.jit
def chunk_of(LENGTHS, tile, index, batch, TILES, CHUNK: tl.constexpr):
    """Asked for where a chunk has tokens: made before, these vectors take registers that products want (Triton 3.6, sm_90)."""
    row = tile.start + tl.arange(0, CHUNK)
    live = row < tile.count_q
    slot = tl.maximum(chunk_slot(LENGTHS, tile, index, batch, TILES, CHUNK), 0)
    there = tl.where(tile.sequence >= 0, tile.count_q - tile.start, 0)
    return Chunk(tile.first_q + row, live, live & (tile.sequence >= 0), there, slot)


class Walker(NamedTuple):
    """The sequence and head of a program that walks through chunks, and the first of its columns of values: the sequence's row of
    the batch, first token and count of tokens, and where what is kept of its first chunk lies."""

    sequence: Any
    head: Any
    first_v: Any
    batch: Any
    first: Any
    count: Any
    slot: Any


@triton.jit
def walker_of(MARKS, pid, L, HEADS, COUNT, TILES, BLOCKS, SHAPE: tl.constexpr):
    """The columns of a head are side by side, and the heads of a sequence."""
    sequence = pid // BLOCKS // HEADS
    batch, first, count = sequence_at(MARKS, sequence, COUNT, L)
    slot = sequence.to(tl.int64) * TILES
    if MARKS is not None:
        slot = (first // SHAPE.CHUNK + sequence).to(tl.int64)
    return Walker(sequence, pid // BLOCKS % HEADS, (pid % BLOCKS) * SHAPE.BLOCK_V, batch, first, count, slot)


@triton.jit
def state_at(S, slot, head, HEADS, first, SHAPE: tl.constexpr):
    """(addresses, mask) [BLOCK_D, BLOCK_V] of a head's state in dense [slots, heads, D, V], from column `first` on."""
    d = tl.arange(0, SHAPE.BLOCK_D)
    e = first + tl.arange(0, SHAPE.BLOCK_V)
    at = (slot * HEADS + head) * (SHAPE.D * SHAPE.V) + d[:, None] * SHAPE.V + e[None, :]
    return S + at, (d < SHAPE.D)[:, None] & (e < SHAPE.V)[None, :]


@triton.jit
def kept_state(S, chunk, sequence, head, HEADS, first, SHAPE: tl.constexpr):
    """[BLOCK_D, BLOCK_V]: columns of what is kept of a head's state, 0 of a chunk in no sequence."""
    at, inside = state_at(S, chunk.slot, head, HEADS, first, SHAPE)
    return tl.load(at, inside & (sequence >= 0), 0.0)


@triton.jit
def given_state(S, sequence, head, first, SHAPE: tl.constexpr):
    """(addresses, mask) of the same in a tensor [sequences, heads, D, V] of any strides."""
    d = tl.arange(0, SHAPE.BLOCK_D)
    e = first + tl.arange(0, SHAPE.BLOCK_V)
    at = sequence.to(tl.int64) * S.stride_b + head.to(tl.int64) * S.stride_t
    at = at + d.to(tl.int64)[:, None] * S.stride_h + e.to(tl.int64)[None, :] * S.stride_d
    return S.data + at, (d < SHAPE.D)[:, None] & (e < SHAPE.V)[None, :]


@triton.jit
def finite_or_nan(x, SHAPE: tl.constexpr):
    """NaN for an infinity, whose products with keys of either sign would cancel to NaN later on, or not; in fp32 alone, whose tiles
    pass through registers anyway."""
    if SHAPE.RAW == 3:
        return tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    else:
        return x


@triton.jit
def load_rows(X, batch, head, token, live, SHAPE: tl.constexpr):
    """[n, BLOCK_D]: rows of queries or keys."""
    return finite_or_nan(load_part(X, batch, head, token, live, SHAPE.D, 0, SHAPE.BLOCK_D), SHAPE)


@triton.jit
def load_columns(X, batch, head, token, live, first, SHAPE: tl.constexpr):
    """[n, BLOCK_V]: columns of values from `first` on, of tokens [n]; 0 where there is none."""
    e = first + tl.arange(0, SHAPE.BLOCK_V)
    at = batch.to(tl.int64) * X.stride_b + head.to(tl.int64) * X.stride_h
    at = at + token.to(tl.int64)[:, None] * X.stride_t + e.to(tl.int64)[None, :] * X.stride_d
    return finite_or_nan(tl.load(X.data + at, live[:, None] & (e < SHAPE.V)[None, :], 0.0), SHAPE)


@triton.jit
def store_columns(X, batch, head, token, live, value, first, SHAPE: tl.constexpr):
    e = first + tl.arange(0, SHAPE.BLOCK_V)
    at = batch.to(tl.int64) * X.stride_b + head.to(tl.int64) * X.stride_h
    at = at + token.to(tl.int64)[:, None] * X.stride_t + e.to(tl.int64)[None, :] * X.stride_d
    tl.store(X.data + at, value.to(X.data.dtype.element_ty), live[:, None] & (e < SHAPE.V)[None, :])


@triton.jit
def square_at(T, slot, head, HEADS, CHUNK: tl.constexpr):
    """Addresses [CHUNK, CHUNK] of a matrix of each chunk and head."""
    i = tl.arange(0, CHUNK)
    return T + (slot * HEADS + head) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]


# ---- the inverse of the delta rule -----------------------------------------------------------------------------------


@triton.jit
def invert_blocks(square, CHUNK: tl.constexpr):
    """Invert I + a, in place, of each block of 16 on the diagonal of a strictly lower triangular a [CHUNK, CHUNK] at `square`. The
    columns of an inverse do not ask for each other, and each is a few lanes' own: its numbers, one after the other, are made
    without a barrier, from rows of a block that all its lanes load. From rows in registers, of which other warps have some, each
    took five barriers."""
    c = tl.arange(0, CHUNK)[:, None]
    r = tl.arange(0, SUB)[None, :]
    block = square + c // SUB * SUB * (CHUNK + 1)
    column = tl.where(c % SUB == r, 1.0, 0.0)
    tl.debug_barrier()  # rows are there, which other threads stored
    for i in tl.static_range(1, SUB):
        row = tl.load(block + i * CHUNK + r)
        column -= tl.where(r == i, tl.sum(row * column, 1)[:, None], 0.0)
    tl.debug_barrier()  # no thread wants rows any more
    tl.store(block + r * CHUNK + c % SUB, column)
    tl.debug_barrier()


@triton.jit
def store_inverse(T, a, slot, head, HEADS, CHUNK: tl.constexpr, PIECES: tl.constexpr):
    """In T, of a chunk and head, the inverse of I + a of a strictly lower triangular a. With D the inverses of its blocks of 16 on
    the diagonal and N = D (a without them), which four factors make 0, the whole is (I - N)(I + N**2) D."""
    at = square_at(T, slot, head, HEADS, CHUNK)
    tl.store(at, a)
    invert_blocks(T + (slot * HEADS + head) * (CHUNK * CHUNK), CHUNK)
    if CHUNK > SUB:
        i = tl.arange(0, CHUNK) // SUB
        on_diagonal = i[:, None] == i[None, :]
        diagonal = tl.load(at, on_diagonal, 0.0)
        none = tl.zeros([CHUNK, CHUNK], tl.float32)
        n = times(none, diagonal, tl.where(on_diagonal, 0.0, a), PIECES, PIECES)
        if CHUNK > 2 * SUB:
            square = times(none, n, n, PIECES, PIECES)
            n -= square - times(none, n, square, PIECES, PIECES)
        tl.debug_barrier()  # so that blocks are loaded again, and take no registers meanwhile
        diagonal = tl.load(at, on_diagonal, 0.0)
        whole = diagonal - times(none, n, diagonal, PIECES, PIECES)
        tl.debug_barrier()  # no thread wants blocks any more
        tl.store(at, whole)


def inverting(a: Arguments) -> dict[str, int]:
    """In bf16, registers for three programs an SM: numbers of a column, one after the other, keep one waiting much of its time."""
    return {"num_warps": 4, **({"maxnreg": 168} if a.SHAPE.RAW == 1 else {})}


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.HEADS,), tokens=("L", "HEADS", "GROUP", "BATCH", "TILES"),
    default=inverting,
)  # fmt: skip
def linear_attention_inverse(K, DECAY, BETA, T, LENGTHS, L, HEADS, GROUP, BATCH, TILES, SHAPE: tl.constexpr):
    """T [slots, heads, chunk, chunk]: the inverse of I + L, one chunk and head."""
    batch, head, index, tile = unit_of(LENGTHS, tl.program_id(0), HEADS, L, TILES, SHAPE.CHUNK)
    if (tile.start < tile.count_q) & (tile.sequence >= 0):
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        k = load_rows(K, batch, head // GROUP, c.token, c.live, SHAPE)
        rk = lengths_of(k, SHAPE)
        none = no_part(SHAPE.CHUNK, SHAPE.CHUNK)
        pairs = times(none, k, tl.trans(k), SHAPE.RAW, SHAPE.RAW)
        decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
        by = gate_at(BETA, batch, head, c.token, c.live) * rk
        pairs = faded(pairs * by[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, True)
        store_inverse(T, pairs, c.slot, head, HEADS, SHAPE.CHUNK, SHAPE.KEPT)


def walking(a: Arguments, stages: int) -> dict[str, int]:
    """Warps that have registers for a state, and of the delta rule as many stages of the walk as leave it enough: Triton 3.6 on
    sm_90 spills 200 to 600 bytes with eight warps, or one stage more (November 2026). Walkers that make outputs have two: they take
    104 KB of shared memory then, keys and values of 128 columns, so that an SM has two of them. Not those of the delta rule, which
    spill the more: 2,080 us for 1,883 with one (H200)."""
    warps = {"num_warps": 4 if a.SHAPE.BLOCK_D * a.SHAPE.BLOCK_V <= 8192 else 8}
    if "O" in a and a.O.data is not None:
        return {**warps, "num_stages": 2 if a.T is None else 1}
    return warps if a.T is None else {**warps, "num_stages": stages}


# ---- states ----------------------------------------------------------------------------------------------------------


@triton.jit
def new_values(k, v, s, rk, decay, b, T, slot, head, HEADS, SHAPE: tl.constexpr):
    """[CHUNK, BLOCK_V]: the values that the delta rule adds, in fp32."""
    seen = times(no_part(SHAPE.CHUNK, SHAPE.BLOCK_V), k, s, SHAPE.RAW, SHAPE.KEPT)
    missed = b[:, None] * (v.to(tl.float32) - (rk * from_start(decay))[:, None] * seen)
    inverse = tl.load(square_at(T, slot, head, HEADS, SHAPE.CHUNK))
    return times(no_part(SHAPE.CHUNK, SHAPE.BLOCK_V), inverse, missed, SHAPE.KEPT, SHAPE.KEPT)


@triton.jit
def scores_of(q, k, rq, rk, DECAY, decay, SHAPE: tl.constexpr):
    """[t, s]: (q[t] . k[s]) times how much of s is left at t, 0 where s comes after t."""
    a = times(no_part(SHAPE.CHUNK, SHAPE.CHUNK), q, tl.trans(k), SHAPE.RAW, SHAPE.RAW)
    return faded(a * rq[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, False)


@triton.jit
def found_of(q, s, rq, decay, SHAPE: tl.constexpr):
    """[CHUNK, BLOCK_V]: what queries read of the state s that their chunk finds."""
    o = times(no_part(SHAPE.CHUNK, SHAPE.BLOCK_V), q, s, SHAPE.RAW, SHAPE.KEPT)
    return o * (rq * from_start(decay))[:, None]


@kernel(
    grid=lambda a: (a.SEQUENCES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "COUNT", "SEQUENCES", "TILES"),
    default=lambda a: walking(a, 1),
)  # fmt: skip
def linear_attention_states(
    Q, K, V, O, DECAY, BETA, T, STATE, FINAL, H, NEW, MARKS, L, HEADS, GROUP, COUNT, SEQUENCES, TILES, BLOCKS, scale,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Walk through the chunks of a sequence: O are its outputs, H [slots, heads, D, V] the state that each chunk finds, NEW the
    values of the delta rule, FINAL the state after the last; each None where it is not wanted. A program has some columns of values
    of one head."""
    sequence, head, first_v, batch, first, count, slot = walker_of(
        MARKS, tl.program_id(0), L, HEADS, COUNT, TILES, BLOCKS, SHAPE
    )
    s = no_part(SHAPE.BLOCK_D, SHAPE.BLOCK_V)
    if STATE.data is not None:
        at, inside = given_state(STATE, sequence, head, first_v, SHAPE)
        s = tl.load(at, inside, 0.0)
    for start in range(0, count, SHAPE.CHUNK):
        row = start + tl.arange(0, SHAPE.CHUNK)
        live = row < count
        token = first + row
        if H is not None:
            kept_at, kept = state_at(H, slot, head, HEADS, first_v, SHAPE)
            tl.store(kept_at, s.to(H.dtype.element_ty), kept)
        k = load_rows(K, batch, head // GROUP, token, live, SHAPE)
        rk = lengths_of(k, SHAPE)
        decay = decay_of(DECAY, batch, head, token, count - start, SHAPE.CHUNK)
        if T is not None:
            v = load_columns(V, batch, head, token, live, first_v, SHAPE)
            b = gate_at(BETA, batch, head, token, live)
            wide = new_values(k, v, s, rk, decay, b, T, slot, head, HEADS, SHAPE)
            if NEW.data is not None:
                store_columns(NEW, batch, head, token, live, wide, first_v, SHAPE)
        if O.data is not None:
            q = load_rows(Q, batch, head // GROUP, token, live, SHAPE)
            rq = lengths_of(q, SHAPE)
            # First of all: beside scores there are no registers for the pieces of the state
            o = found_of(q, s, rq, decay, SHAPE)
            a = scores_of(q, k, rq, rk, DECAY, decay, SHAPE)
        if T is None:  # after the scores, beside which there are no registers for them
            v = load_columns(V, batch, head, token, live, first_v, SHAPE)
            wide = v.to(tl.float32)
        if O.data is not None:
            if T is None:
                o = times(o, a, v, SHAPE.KEPT, SHAPE.RAW)
            else:
                o = times(o, a, wide, SHAPE.KEPT, SHAPE.KEPT)
            store_columns(O, batch, head, token, live, o * scale, first_v, SHAPE)
        own = no_part(SHAPE.BLOCK_D, SHAPE.BLOCK_V)
        if (DECAY.data is None) and (T is None) and (not SHAPE.NORMALIZE):
            s = plus_product(s, own, tl.trans(k), v, SHAPE.RAW, SHAPE.RAW)
        else:
            left = wide * (rk * to_end(decay))[:, None]
            s = plus_product(s * throughout(decay), own, tl.trans(k), left, SHAPE.RAW, SHAPE.KEPT)
        slot += 1
    if FINAL.data is not None:
        at, inside = given_state(FINAL, sequence, head, first_v, SHAPE)
        tl.store(at, s, inside)


# ---- outputs ---------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "BATCH", "TILES"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def linear_attention_outputs(
    Q,
    K,
    V,
    O,
    DECAY,
    H,
    LENGTHS,
    L,
    HEADS,
    GROUP,
    BATCH,
    TILES,
    BLOCKS,
    scale,
    DELTA: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Outputs of a chunk of a head, some columns of them: V are the values, or, DELTA, those of the delta rule."""
    first_v = (tl.program_id(0) % BLOCKS) * SHAPE.BLOCK_V
    batch, head, index, tile = unit_of(LENGTHS, tl.program_id(0) // BLOCKS, HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE)
        k = load_rows(K, batch, head // GROUP, c.token, c.known, SHAPE)
        rq = lengths_of(q, SHAPE)
        decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
        a = scores_of(q, k, rq, lengths_of(k, SHAPE), DECAY, decay, SHAPE)
        s = kept_state(H, c, tile.sequence, head, HEADS, first_v, SHAPE)
        o = found_of(q, s, rq, decay, SHAPE)
        v = load_columns(V, batch, head, c.token, c.known, first_v, SHAPE)
        o = times(o, a, v, SHAPE.KEPT, SHAPE.KEPT if DELTA else SHAPE.RAW)
        store_columns(O, batch, head, c.token, c.live, o * scale, first_v, SHAPE)


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.HEADS,), tokens=("L", "HEADS", "BATCH", "TILES"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def linear_attention_rest(
    X, LENGTHS, L, HEADS, BATCH, TILES, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """0 for the tokens of X [batch, tokens, heads, columns] that are in no sequence."""
    batch, head, _, tile = unit_of(LENGTHS, tl.program_id(0), HEADS, L, TILES, CHUNK)
    if (tile.start < tile.count_q) & (tile.sequence < 0):
        row = tile.start + tl.arange(0, CHUNK)
        store_part(X, batch, head, tile.first_q + row, row < tile.count_q, no_part(CHUNK, WIDTH), COLUMNS, 0, WIDTH)


# ---- host ------------------------------------------------------------------------------------------------------------


def gates_of(t: Tensor | None) -> Gates:
    """Decays or betas, or gradients of them."""
    if t is None:
        return Gates()
    *above, stride_h = t.stride()
    stride_b, stride_t = (*above, None, None)[:2]
    return Gates(t, stride_b, stride_t, stride_h)


def heads_or_none(t: Tensor | None) -> Heads:
    return Heads(None, 0, 0, 0, 0) if t is None else heads_of(t)


def shape_of(q: Tensor, v: Tensor, normalize: bool) -> Shape:
    """Chunks of 64 tokens where a program's tiles fit into registers and shared memory: not in fp32, whose numbers are three."""
    raw = {torch.bfloat16: 1, torch.float16: 2}.get(q.dtype, 3)
    least = narrowest(q)
    block_d, block_v = (max(least, power_of_two(t.shape[-1])) for t in (q, v))
    wide = q.dtype != torch.bfloat16 or Target.at(q.device).shared_memory < ROOMY
    chunk = 16 if raw == 3 else 32 if wide or block_d > 128 else 64
    return Shape(
        q.shape[-1], block_d, v.shape[-1], min(block_v, 32 if wide else 64), chunk, raw, raw, max(2, raw), normalize
    )  # fmt: skip


def kept_dtype(q: Tensor) -> torch.dtype:
    """Of states and values that are kept for what gradients are made of; fp16 has not the range."""
    return q.dtype if q.dtype == torch.bfloat16 else torch.float32


def blocks_of(shape: Shape) -> int:
    """How many programs share the columns of a head's values."""
    return cdiv(shape.V, shape.BLOCK_V)


def crowded(q: Tensor, v: Tensor, beta: Tensor | None, marks: Tensor | None, shape: Shape) -> bool:
    """Whether the programs that walk through sequences are so many that they leave no chunks for others to work on side by side."""
    walkers = sequence_count(v.shape[0], marks) * v.shape[2] * blocks_of(shape)
    return walkers >= max(1, (CROWD if beta is None else DELTA_CROWD) * Target.at(q.device).sms)


class Placed(NamedTuple):
    """How chunks lie, how many at most in a row of the batch, marks and how many, and how many sequences."""

    how: Lengths
    tiles: int
    marks: Tensor | None
    count: int
    many: int


def placed(v: Tensor, marks: Tensor | None, chunk: int) -> Placed:
    batch, length = v.shape[:2]
    how, tiles = lengths(marks, marks, length, length, None, chunk, False)
    if marks is None:
        return Placed(how, tiles, None, 0, batch)
    return Placed(how, tiles, marks.contiguous(), marks.shape[0], sequence_count(batch, marks))


class Walk(NamedTuple):
    """What a walk through chunks leaves: the inverses, the states, and the values of the delta rule."""

    inverse: Tensor | None
    states: Tensor | None
    new: Tensor | None


def walk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None, final: Tensor | None,
    at: Placed, shape: Shape, keep: torch.dtype | None, o: Tensor | None = None, scale: float = 1.0,
) -> Walk:  # fmt: skip
    """Fill `final` and `o`, where these are wanted, and keep what each chunk finds, if a dtype says in what."""
    (batch, length, heads, _), group = v.shape, v.shape[2] // k.shape[2]
    slots = batch * at.tiles
    K, DECAY, BETA = heads_of(k), gates_of(log_decay), gates_of(beta)
    inverse = states = new = None
    kept = {"dtype": keep, "device": q.device}
    if keep is not None:
        states = torch.empty(slots, heads, shape.D, shape.V, **kept)
    if beta is not None:
        inverse = torch.empty(slots, heads, shape.CHUNK, shape.CHUNK, dtype=torch.float32, device=q.device)
        new = torch.empty(v.shape, **kept) if keep is not None else None
        linear_attention_inverse(K, DECAY, BETA, inverse, at.how, length, heads, group, batch, at.tiles, SHAPE=shape)
    linear_attention_states(
        heads_of(q), K, heads_of(v), heads_or_none(o), DECAY, BETA, inverse, heads_or_none(state), heads_or_none(final), states,
        heads_or_none(new), at.marks, length, heads, group, at.count, at.many, at.tiles, blocks_of(shape), scale, SHAPE=shape,
    )  # fmt: skip
    return Walk(inverse, states, new)


def fill_rest(at: Placed, chunk: int, *filled: Tensor) -> None:
    """0 for tokens in no sequence, which no walker reaches."""
    for t in filled if at.marks is not None else ():
        batch, length, heads, columns = t.shape
        sizes = {"COLUMNS": columns, "WIDTH": power_of_two(columns), "CHUNK": chunk}
        linear_attention_rest(heads_of(t), at.how, length, heads, batch, at.tiles, **sizes)


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *, state: Tensor | None,
    scale: float, normalize: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, heads, values = v.shape
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    many = sequence_count(batch, cu_seqlens)
    final = torch.empty(many, heads, q.shape[-1], values, dtype=torch.float32, device=q.device)
    if not (final.numel() or o.numel()):
        return o, final
    shape = shape_of(q, v, normalize)
    at = placed(v, cu_seqlens, shape.CHUNK)
    given = (q, k, v, log_decay, beta, state, final, at, shape)
    if not o.numel():
        walk(*given, None)
    elif crowded(q, v, beta, cu_seqlens, shape):
        walk(*given, None, o, scale)
        fill_rest(at, shape.CHUNK, o)
    else:
        found = walk(*given, torch.float32)
        linear_attention_outputs(
            heads_of(q), heads_of(k), heads_of(v if found.new is None else found.new), heads_of(o), gates_of(log_decay),
            found.states, at.how, length, heads, heads // k.shape[2], batch, at.tiles, blocks_of(shape), scale,
            DELTA=found.new is not None, SHAPE=shape,
        )  # fmt: skip
    return o, final
