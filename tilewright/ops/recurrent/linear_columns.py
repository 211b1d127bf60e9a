"""Linear attention forward with a decay of each column of a key, by chunks. With g[t] a row of log decays, in a chunk of C tokens
that finds the state S, and all powers column by column:

    P(x, y)[t, s] = sum over columns of x[t] e**(g[s+1] + ... + g[t]) y[s]
    o[t] = scale * ((q[t] e**(g[1] + ... + g[t])) S + sum over s <= t of P(q, k)[t, s] v[s])
    S'   = e**(g[1] + ... + g[C]) S + sum over s of (k[s] e**(g[s+1] + ... + g[C])) v[s]^T

Of the delta rule, values become v' = T beta (v - (k e**(g[1] + ... + g[t])) S), with T the inverse of I + beta P(k, k) below the
diagonal. With a bonus u, q reads the state before its token: its sums end with g[t-1], and P(q, k)[t, t] is the sum of q u k.

No exponent is a difference, and none is positive where decays are not: nothing overflows, and large decays take no digits from
small ones. P of tokens in two blocks of 16 is a product of rows that have decayed since the later block's first token, and of rows
that decay until then. In one block it is summed up token by token. One kernel makes P and the inverse of all chunks side by side,
one walks through the chunks of a sequence and keeps the state that each finds, a third makes the outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.portable import heads_of, load_part, no_part
from ...attention.tiles import lengths
from ...device.softmax import LOG2E
from ...runtime.kernel import kernel
from .linear_chunks import (
    LEAST,
    SUB,
    chunk_of,
    gate_at,
    gates_of,
    given_state,
    heads_or_none,
    kept_state,
    lengths_of,
    load_columns,
    load_rows,
    lower,
    shape_of,
    square_at,
    state_at,
    store_columns,
    store_inverse,
    times,
    unit_of,
    walker_of,
)
from .places import sequence_count

# Tokens of a chunk: rows of decays beside those of keys leave no registers for 64 of them (Triton 3.6 for sm_90, keys of 128
# columns: 108 bytes of spills where pairs are made, 1,532 in the walk of the delta rule, which also spills 136 with 32)
LONGEST = 32

# ---- parts of kernels ------------------------------------------------------------------------------------------------


@triton.jit
def decays_at(DECAY, batch, head, token, live, SHAPE: tl.constexpr):
    """[n, BLOCK_D]: log decays of tokens in base 2, 0 where there is none."""
    g = load_part(DECAY, batch, head, token, live, SHAPE.D, 0, SHAPE.BLOCK_D).to(tl.float32) * LOG2E
    return tl.maximum(g, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def since(DECAY, batch, head, token, live, first, LATE: tl.constexpr, SHAPE: tl.constexpr):
    """[CHUNK, BLOCK_D]: how much is left at each row of what was there before row `first`: the decays from that one to the row's
    own or, if LATE, to the one before."""
    i = tl.arange(0, SHAPE.CHUNK) - LATE
    return tl.exp2(tl.cumsum(decays_at(DECAY, batch, head, token - LATE, live & (i >= first), SHAPE), 0))


@triton.jit
def until(DECAY, batch, head, token, live, end, SHAPE: tl.constexpr):
    """[CHUNK, BLOCK_D]: how much of each row is left before row `end`: the decays from the row after it on. `live` says which rows
    have a row after them."""
    i = tl.arange(0, SHAPE.CHUNK) + 1
    return tl.exp2(tl.cumsum(decays_at(DECAY, batch, head, token + 1, live & (i < end), SHAPE), 0, reverse=True))


@triton.jit
def after(live, CHUNK: tl.constexpr):
    """[n]: which rows of a chunk have a row after them that is there: all live rows but the last, since these come first."""
    return tl.arange(0, CHUNK) + 1 < tl.sum(live.to(tl.int32), 0)


@triton.jit
def unit_keys(K, batch, head, token, live, SHAPE: tl.constexpr):
    """Keys of a chunk in fp32, of length 1 if they are to be."""
    k = load_rows(K, batch, head, token, live, SHAPE).to(tl.float32)
    return k * lengths_of(k, SHAPE)[:, None]


@triton.jit
def in_blocks(x, K, DECAY, c, batch, head, key_head, LATE: tl.constexpr, SHAPE: tl.constexpr):
    """[t, s]: P of rows x and of keys, of tokens in one block of 16. Keys are taken from a block's last on: with each one decay
    more is added to the exponents of the rows behind it."""
    CHUNK: tl.constexpr = SHAPE.CHUNK
    i = tl.arange(0, CHUNK)
    place = i % SUB
    column = tl.arange(0, CHUNK)
    a = no_part(CHUNK, CHUNK)
    power = no_part(CHUNK, SHAPE.BLOCK_D)
    first = c.token - place
    count = tl.sum(c.known.to(tl.int32), 0)
    for back in range(SUB):
        j = SUB - 1 - back
        there = i - place + j < count
        power += decays_at(DECAY, batch, head, first + j + 1, c.known & (j + 1 <= place - LATE), SHAPE)
        k = load_rows(K, batch, key_head, first + j, there & (place >= j), SHAPE).to(tl.float32)
        term = tl.sum(x * k * tl.exp2(power), 1)
        a = tl.where(column[None, :] == (i - place + j)[:, None], term[:, None], a)
    return a


@triton.jit
def pairs_of(x, K, k, DECAY, c, batch, head, key_head, LATE: tl.constexpr, SHAPE: tl.constexpr):
    """[t, s]: P of rows x and of keys, both in fp32; 0 where s comes after t."""
    CHUNK: tl.constexpr = SHAPE.CHUNK
    i = tl.arange(0, CHUNK)
    a = in_blocks(x, K, DECAY, c, batch, head, key_head, LATE, SHAPE)
    later = after(c.known, CHUNK)
    for block in range(1, CHUNK // SUB):
        first = block * SUB
        own = (i >= first) & (i < first + SUB)
        read = x * since(DECAY, batch, head, c.token, c.known, first, LATE, SHAPE)
        left = k * until(DECAY, batch, head, c.token, later, first, SHAPE)
        read = tl.where(own[:, None], read, 0.0)
        left = tl.where((i < first)[:, None], left, 0.0)
        a = times(a, read, tl.trans(left), SHAPE.KEPT, SHAPE.KEPT)
    return lower(a, CHUNK, False)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.HEADS,), tokens=("L", "HEADS", "GROUP", "BATCH", "TILES"),
    default=lambda a: {"num_warps": 4, "num_stages": 1},
)  # fmt: skip
def linear_attention_columns_pairs(
    Q, K, DECAY, BETA, BONUS, A, T, LENGTHS, L, HEADS, GROUP, BATCH, TILES, SHAPE: tl.constexpr
):
    """A and T [slots, heads, chunk, chunk]: P(q, k) of a chunk and head, and the inverse of the delta rule; either None."""
    batch, head, index, tile = unit_of(LENGTHS, tl.program_id(0), HEADS, L, TILES, SHAPE.CHUNK)
    if (tile.start < tile.count_q) & (tile.sequence >= 0):
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        key_head = head // GROUP
        k = load_rows(K, batch, key_head, c.token, c.known, SHAPE).to(tl.float32)
        rk = lengths_of(k, SHAPE)
        if A is not None:
            q = load_rows(Q, batch, key_head, c.token, c.known, SHAPE).to(tl.float32)
            a = pairs_of(q, K, k, DECAY, c, batch, head, key_head, 0 if BONUS is None else 1, SHAPE)
            if BONUS is not None:
                d = tl.arange(0, SHAPE.BLOCK_D)
                i = tl.arange(0, SHAPE.CHUNK)
                u = tl.load(BONUS + head * SHAPE.D + d, d < SHAPE.D, 0.0).to(tl.float32)
                a = tl.where(i[:, None] == i[None, :], tl.sum(q * u[None, :] * k, 1)[:, None], a)
            a = a * lengths_of(q, SHAPE)[:, None] * rk[None, :]
            tl.store(square_at(A, c.slot, head, HEADS, SHAPE.CHUNK), a)
        if T is not None:
            by = gate_at(BETA, batch, head, c.token, c.known) * rk
            a = pairs_of(k, K, k, DECAY, c, batch, head, key_head, 0, SHAPE)
            a = lower(a * by[:, None] * rk[None, :], SHAPE.CHUNK, True)
            store_inverse(T, a, c.slot, head, HEADS, SHAPE.CHUNK, SHAPE.KEPT)


@kernel(
    grid=lambda a: (a.SEQUENCES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "COUNT", "SEQUENCES", "TILES"),
    default=lambda a: {"num_warps": 8, "num_stages": 1},
)  # fmt: skip
def linear_attention_columns_states(
    K,
    V,
    DECAY,
    BETA,
    T,
    STATE,
    FINAL,
    H,
    NEW,
    MARKS,
    L,
    HEADS,
    GROUP,
    COUNT,
    SEQUENCES,
    TILES,
    BLOCKS,
    SHAPE: tl.constexpr,
):
    """Walk through the chunks of a sequence: H [slots, heads, D, V] is the state that each finds, NEW the values of the delta rule,
    FINAL the state after the last; H and NEW are None where they are not wanted."""
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
            tl.store(kept_at, s, kept)
        none = no_part(SHAPE.CHUNK, SHAPE.BLOCK_V)
        if T is not None:
            # Keys are loaded for each use: beside decays and the state there are no registers to keep them
            read = unit_keys(K, batch, head // GROUP, token, live, SHAPE)
            read = times(none, read * since(DECAY, batch, head, token, live, 0, 0, SHAPE), s, SHAPE.KEPT, SHAPE.KEPT)
        wide = load_columns(V, batch, head, token, live, first_v, SHAPE).to(tl.float32)
        if T is not None:
            wide = gate_at(BETA, batch, head, token, live)[:, None] * (wide - read)
            inverse = tl.load(square_at(T, slot, head, HEADS, SHAPE.CHUNK))
            wide = times(none, inverse, wide, SHAPE.KEPT, SHAPE.KEPT)
            if NEW.data is not None:
                store_columns(NEW, batch, head, token, live, wide, first_v, SHAPE)
        whole = tl.exp2(tl.sum(decays_at(DECAY, batch, head, token, live, SHAPE), 0))
        left = unit_keys(K, batch, head // GROUP, token, live, SHAPE)
        left = left * until(DECAY, batch, head, token, row + 1 < count, SHAPE.CHUNK, SHAPE)
        # Added outside of the product, for tensor cores round sums toward 0: of a state that does not decay, the same way each time
        s = s * whole[:, None] + times(
            no_part(SHAPE.BLOCK_D, SHAPE.BLOCK_V), tl.trans(left), wide, SHAPE.KEPT, SHAPE.KEPT
        )
        slot += 1
    at, inside = given_state(FINAL, sequence, head, first_v, SHAPE)
    tl.store(at, s, inside)


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "BATCH", "TILES"),
    default=lambda a: {"num_warps": 8},
)  # fmt: skip
def linear_attention_columns_outputs(
    Q, V, O, DECAY, A, H, LENGTHS, L, HEADS, GROUP, BATCH, TILES, BLOCKS, scale, LATE: tl.constexpr, SHAPE: tl.constexpr
):
    """Outputs of a chunk of a head, some columns of them: V are the values, or those of the delta rule."""
    first_v = (tl.program_id(0) % BLOCKS) * SHAPE.BLOCK_V
    batch, head, index, tile = unit_of(LENGTHS, tl.program_id(0) // BLOCKS, HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE).to(tl.float32)
        read = q * lengths_of(q, SHAPE)[:, None] * since(DECAY, batch, head, c.token, c.known, 0, LATE, SHAPE)
        s = kept_state(H, c, tile.sequence, head, HEADS, first_v, SHAPE)
        o = times(no_part(SHAPE.CHUNK, SHAPE.BLOCK_V), read, s, SHAPE.KEPT, SHAPE.KEPT)
        i = tl.arange(0, SHAPE.CHUNK)
        seen = c.known[:, None] & (i[None, :] <= i[:, None])
        a = tl.load(square_at(A, c.slot, head, HEADS, SHAPE.CHUNK), seen, 0.0)
        v = load_columns(V, batch, head, c.token, c.known, first_v, SHAPE)
        o = times(o, a, v, SHAPE.KEPT, SHAPE.KEPT)
        store_columns(O, batch, head, c.token, c.live, o * scale, first_v, SHAPE)


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, *, bonus: Tensor | None, state: Tensor | None,
    scale: float, normalize: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (batch, length, heads, values), marks, group = v.shape, cu_seqlens, v.shape[2] // max(1, k.shape[2])
    many = sequence_count(batch, marks)
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    final = torch.empty(many, heads, q.shape[-1], values, dtype=torch.float32, device=q.device)
    if not (final.numel() or o.numel()):
        return o, final
    shape = shape_of(q, v, normalize)
    shape = shape._replace(CHUNK=min(shape.CHUNK, LONGEST if beta is None else SUB.value))
    how, tiles = lengths(marks, marks, length, length, None, shape.CHUNK, False)
    single, slots, blocks = {"dtype": torch.float32, "device": q.device}, batch * tiles, -(-values // shape.BLOCK_V)
    square = (slots, heads, shape.CHUNK, shape.CHUNK)
    states, pairs = (
        torch.empty(*size, **single) if o.numel() else None for size in ((slots, heads, shape.D, shape.V), square)
    )
    inverse = torch.empty(square, **single) if beta is not None else None
    new = torch.empty(v.shape, **single) if beta is not None and o.numel() else None
    K, DECAY, BETA, V = heads_of(k), heads_of(log_decay), gates_of(beta), heads_of(v)
    marks = None if marks is None else marks.contiguous()
    if pairs is not None or inverse is not None:
        linear_attention_columns_pairs(
            heads_of(q), K, DECAY, BETA, None if bonus is None else bonus.contiguous(), pairs, inverse, how, length, heads, group,
            batch, tiles, SHAPE=shape,
        )  # fmt: skip
    linear_attention_columns_states(
        K, V, DECAY, BETA, inverse, heads_or_none(state), heads_of(final), states, heads_or_none(new), marks, length, heads,
        group, 0 if marks is None else marks.shape[0], many, tiles, blocks, SHAPE=shape,
    )  # fmt: skip
    if pairs is not None:
        linear_attention_columns_outputs(
            heads_of(q), V if new is None else heads_of(new), heads_of(o), DECAY, pairs, states, how, length, heads, group, batch,
            tiles, blocks, scale, LATE=0 if bonus is None else 1, SHAPE=shape,
        )  # fmt: skip
    return o, final
