"""Gradients of linear attention, by chunks of tokens; the states that chunks find, and the values of the delta rule, are made anew.

Of a chunk with the state S, of whose successor the gradient is E, and with v' the values (those of the delta rule, if it is one):

    dv'[s] = scale * sum over t >= s of e**(G[t] - G[s]) (q[t] . k[s]) do[t] + e**(G[C] - G[s]) k[s] E
    dq[t]  = scale * (e**G[t] do[t] S^T + sum over s <= t of e**(G[t] - G[s]) (do[t] . v'[s]) k[s])
    dk[s]  = scale * sum over t >= s of e**(G[t] - G[s]) (do[t] . v'[s]) q[t] + e**(G[C] - G[s]) v'[s] E^T
    dS     = e**G[C] E + scale * sum over t of e**G[t] q[t] do[t]^T

Of the delta rule, z = T^T dv' is the gradient of beta * (v - e**G k S), so that dv = beta * z, and -z v'^T below the diagonal that
of L; both give k, beta and S their parts. The gradient of log decay r is the sum of all terms that it is a factor of: pairs
t >= r > s, what is read of S from r on, what is kept of tokens before r, and all that is kept of S. Nothing is subtracted, so that
nothing cancels.
Where walkers crowd the chip, walks make all of it: one, with S at hand, the gradients of queries, and two from the last chunk, with
E at hand, those of keys and decays and those of values; one for both would spill registers. No E is stored then, and S only where
decays have gradients. Elsewhere, of the delta rule and where heads share key heads, walks keep S and E, and other kernels make
gradients of all chunks side by side: of queries, of values or of what the delta rule is given, and of keys, each for a key head
from head to head.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.portable import heads_of, load_part, no_part, store_part
from ...core.tensor import power_of_two
from ...runtime.kernel import kernel
from ..norm.rms_norm import sum_columns
from .linear import scale_of
from .linear_chunks import (
    Gates,
    Shape,
    blocks_of,
    chunk_of,
    crowded,
    decay_of,
    faded,
    fill_rest,
    from_start,
    gate_at,
    gates_of,
    given_state,
    heads_or_none,
    kept_dtype,
    kept_state,
    lengths_of,
    load_columns,
    load_rows,
    lower,
    placed,
    plus_product,
    scores_of,
    shape_of,
    square_at,
    state_at,
    store_columns,
    throughout,
    times,
    to_end,
    unit_of,
    walk,
    walker_of,
    walking,
)

WIDEST_WALK = (
    128  # columns of keys and of values of a state that eight warps have registers for, beside a chunk's products
)


# ---- parts of kernels ------------------------------------------------------------------------------------------------


@triton.jit
def along(x, y):
    """[n]: the products of rows."""
    return tl.sum(x.to(tl.float32) * y, 1)


@triton.jit
def decay_gradient(terms, read, CHUNK: tl.constexpr, PIECES: tl.constexpr):
    """[r]: of terms [t, s] of pairs those with t >= r > s, and of what is read [t] of the state all from r on."""
    i = tl.arange(0, CHUNK)
    across = times(no_part(CHUNK, CHUNK), terms, tl.where(i[:, None] < i[None, :], 1.0, 0.0), PIECES, 1)
    return tl.sum(lower(across + read[:, None], CHUNK, False), 0)


@triton.jit
def kept_before(kept, CHUNK: tl.constexpr):
    """[r]: the sum over all tokens before r of what is kept of each."""
    i = tl.arange(0, CHUNK)
    return tl.sum(tl.where(i[:, None] < i[None, :], kept[:, None], 0.0), 0)


@triton.jit
def store_gate(G, batch, head, token, live, value):
    at = batch.to(tl.int64) * G.stride_b + token.to(tl.int64) * G.stride_t + head.to(tl.int64) * G.stride_h
    tl.store(G.data + at, value.to(G.data.dtype.element_ty), live)


@triton.jit
def kept_values(k, e, rk, decay, SHAPE: tl.constexpr):
    """[CHUNK, BLOCK_V]: what values are given by the state after their chunk, of whose gradient e these are columns."""
    dv = times(no_part(SHAPE.CHUNK, SHAPE.BLOCK_V), k, e, SHAPE.RAW, SHAPE.MADE)
    return dv * (to_end(decay) * rk)[:, None]


# ---- walks -----------------------------------------------------------------------------------------------------------


def backward_walking(a: Any) -> dict[str, int]:
    """With two stages a walker of values takes 90 KB of shared memory, so that an SM has two. One of keys has an SM to itself, and
    spills (Triton 3.6, sm_90) 530 bytes with three stages where it makes gradients of decays, 800 with two."""
    made = a.T is None and not (a.DK.data is None and a.DV.data is None)
    return {**walking(a, 2), **({"num_stages": 2 if a.H is None else 3} if made else {})}


@kernel(
    grid=lambda a: (a.SEQUENCES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "COUNT", "SEQUENCES", "TILES"),
    default=backward_walking,
)  # fmt: skip
def linear_attention_states_backward(
    Q, K, V, DO, DECAY, BETA, T, LOCAL, H, FOUND, DFINAL, DSTATE, E, Z, DK, DV, DDECAY, MARKS, L, HEADS, GROUP, COUNT, SEQUENCES,
    TILES, BLOCKS, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """Walk through the chunks of a sequence from the last: E [slots, heads, D, V] is the gradient of the state after each, DV that
    of values, DSTATE that of the first state; each None where it is not wanted. Of the delta rule, Z is that of what its inverse is
    given, and LOCAL what its new values get from outputs of their own chunk. A walker that makes DK, the gradient of keys, and with
    H and FOUND that of decays, has all columns of values, and a key head of its own."""
    sequence, head, first_v, batch, first, count, slot = walker_of(
        MARKS, tl.program_id(0), L, HEADS, COUNT, TILES, BLOCKS, SHAPE
    )
    e = no_part(SHAPE.BLOCK_D, SHAPE.BLOCK_V)
    if DFINAL.data is not None:
        at, inside = given_state(DFINAL, sequence, head, first_v, SHAPE)
        e = tl.load(at, inside, 0.0)
    chunks = tl.cdiv(count, SHAPE.CHUNK)
    slot += chunks
    for i in range(chunks):
        slot -= 1
        start = (chunks - 1 - i) * SHAPE.CHUNK
        row = start + tl.arange(0, SHAPE.CHUNK)
        live = row < count
        token = first + row
        if E is not None:
            kept_at, kept = state_at(E, slot, head, HEADS, first_v, SHAPE)
            tl.store(kept_at, e.to(E.dtype.element_ty), kept)
        q = load_rows(Q, batch, head // GROUP, token, live, SHAPE)
        rq = lengths_of(q, SHAPE)
        decay = decay_of(DECAY, batch, head, token, count - start, SHAPE.CHUNK)
        found = from_start(decay)
        own = no_part(SHAPE.BLOCK_D, SHAPE.BLOCK_V)
        if T is not None:
            k = load_rows(K, batch, head // GROUP, token, live, SHAPE)
            rk = lengths_of(k, SHAPE)
            none = no_part(SHAPE.CHUNK, SHAPE.BLOCK_V)
            dv = kept_values(k, e, rk, decay, SHAPE)
            dv += load_columns(LOCAL, batch, head, token, live, first_v, SHAPE)
            inverse = tl.load(square_at(T, slot, head, HEADS, SHAPE.CHUNK))
            z = times(none, tl.trans(inverse), dv, SHAPE.KEPT, SHAPE.MADE)
            b = gate_at(BETA, batch, head, token, live)
            store_columns(Z, batch, head, token, live, z, first_v, SHAPE)
            store_columns(DV, batch, head, token, live, b[:, None] * z, first_v, SHAPE)
            own = times(own, tl.trans(k), (b * rk * found * -1.0)[:, None] * z, SHAPE.RAW, SHAPE.MADE)
        elif DV.data is not None:
            k = load_rows(K, batch, head // GROUP, token, live, SHAPE)
            rk = lengths_of(k, SHAPE)
            a = scores_of(q, k, rq, rk, DECAY, decay, SHAPE) * scale
            dv = kept_values(k, e, rk, decay, SHAPE)
        # Taken up after these, whose tiles leave no registers for it; copied, like the others, a chunk ahead
        do = load_columns(DO, batch, head, token, live, first_v, SHAPE)
        if (T is None) and (DV.data is not None):
            dv = times(dv, tl.trans(a), do, SHAPE.MADE, SHAPE.RAW)
            store_columns(DV, batch, head, token, live, dv, first_v, SHAPE)
        if DK.data is not None:
            if DDECAY.data is not None:
                found_at, inside = state_at(H, slot, head, HEADS, first_v, SHAPE)
                s = tl.load(found_at, inside, 0.0)
                through = tl.sum(along(s, e), 0) * throughout(decay)
            v = load_columns(V, batch, head, token, live, first_v, SHAPE)
            rk = tl.full([SHAPE.CHUNK], 1.0, tl.float32)
            if SHAPE.NORMALIZE or DDECAY.data is not None:
                k = load_rows(K, batch, head, token, live, SHAPE)
                rk = lengths_of(k, SHAPE)
            # Turned, so that eight warps have rows of their own: chunks have too few
            dk = times(no_part(SHAPE.BLOCK_D, SHAPE.CHUNK), e, tl.trans(v), SHAPE.MADE, SHAPE.RAW)
            dk = dk * (to_end(decay) * rk)[None, :]
            if DDECAY.data is not None:
                kept = tl.sum(tl.trans(k).to(tl.float32) * dk, 0)
            pairs = times(no_part(SHAPE.CHUNK, SHAPE.CHUNK), do, tl.trans(v), SHAPE.RAW, SHAPE.RAW)
            pairs = faded(pairs * (rq * scale)[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, False)
            dk = tl.trans(times(dk, tl.trans(q), pairs, SHAPE.RAW, SHAPE.MADE))
            if SHAPE.NORMALIZE:
                dk -= k.to(tl.float32) * (along(k, dk) * rk * rk)[:, None]
            store_part(DK, batch, head, token, live, dk, SHAPE.D, 0, SHAPE.BLOCK_D)
            if DDECAY.data is not None:
                terms = pairs * times(no_part(SHAPE.CHUNK, SHAPE.CHUNK), q, tl.trans(k), SHAPE.RAW, SHAPE.RAW)
                read = gate_at(FOUND, batch, head, token, live)
                dg = decay_gradient(terms, read, SHAPE.CHUNK, SHAPE.KEPT)
                dg += kept_before(kept, SHAPE.CHUNK) + through
                store_gate(DDECAY, batch, head, token, live, dg)
        read = do.to(tl.float32) * (rq * found * scale)[:, None]
        e = plus_product(e * throughout(decay), own, tl.trans(q), read, SHAPE.RAW, SHAPE.MADE)
    if DSTATE.data is not None:
        at, inside = given_state(DSTATE, sequence, head, first_v, SHAPE)
        tl.store(at, e, inside)


@kernel(
    grid=lambda a: (a.SEQUENCES * a.HEADS,), tokens=("L", "HEADS", "COUNT", "SEQUENCES", "TILES"),
    default=lambda a: {"num_warps": 4 if a.SHAPE.BLOCK_D * a.SHAPE.BLOCK_V <= 8192 else 8, "num_stages": 2 if a.H is None else 3},
)  # fmt: skip
def linear_attention_queries_backward(
    Q, K, V, DO, DECAY, STATE, H, DQ, FOUND, MARKS, L, HEADS, COUNT, SEQUENCES, TILES, scale, SHAPE: tl.constexpr
):
    """Walk through the chunks of a sequence: the gradient of queries from the state that each chunk finds. H [slots, heads, D, V]
    are those states, and FOUND is as in `linear_attention_gradients_queries`, each None where it is not wanted. A walker has all
    columns of values, and a key head of its own."""
    sequence, head, first_v, batch, first, count, slot = walker_of(
        MARKS, tl.program_id(0), L, HEADS, COUNT, TILES, 1, SHAPE
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
        do = load_columns(DO, batch, head, token, live, first_v, SHAPE)
        decay = decay_of(DECAY, batch, head, token, count - start, SHAPE.CHUNK)
        rq = tl.full([SHAPE.CHUNK], 1.0, tl.float32)
        if SHAPE.NORMALIZE or FOUND.data is not None:
            q = load_rows(Q, batch, head, token, live, SHAPE)
            rq = lengths_of(q, SHAPE)
        # Turned, as the gradient of keys is
        dq = times(no_part(SHAPE.BLOCK_D, SHAPE.CHUNK), s, tl.trans(do), SHAPE.MADE, SHAPE.RAW)
        dq = dq * (scale * from_start(decay) * rq)[None, :]
        if FOUND.data is not None:
            store_gate(FOUND, batch, head, token, live, tl.sum(tl.trans(q).to(tl.float32) * dq, 0))
        k = load_rows(K, batch, head, token, live, SHAPE)
        rk = lengths_of(k, SHAPE)
        v = load_columns(V, batch, head, token, live, first_v, SHAPE)
        pairs = times(no_part(SHAPE.CHUNK, SHAPE.CHUNK), do, tl.trans(v), SHAPE.RAW, SHAPE.RAW)
        pairs = faded(pairs * (scale * rq)[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, False)
        dq = tl.trans(times(dq, tl.trans(k), tl.trans(pairs), SHAPE.RAW, SHAPE.MADE))
        if SHAPE.NORMALIZE:
            dq -= q.to(tl.float32) * (along(q, dq) * rq * rq)[:, None]
        store_part(DQ, batch, head, token, live, dq, SHAPE.D, 0, SHAPE.BLOCK_D)
        left = v.to(tl.float32) * (rk * to_end(decay))[:, None]
        own = no_part(SHAPE.BLOCK_D, SHAPE.BLOCK_V)
        s = plus_product(s * throughout(decay), own, tl.trans(k), left, SHAPE.RAW, SHAPE.MADE)
        slot += 1


# ---- chunks side by side ---------------------------------------------------------------------------------------------

ONE_CHUNK = {
    "grid": lambda a: (a.BATCH * a.TILES * a.KEY_HEADS,),
    "tokens": ("L", "KEY_HEADS", "GROUP", "BATCH", "TILES"),
    "default": lambda a: {"num_warps": 8},
}


@kernel(**ONE_CHUNK)
def linear_attention_gradients_queries(
    Q, K, NEW, DO, DECAY, H, DQ, FOUND, LENGTHS, L, KEY_HEADS, GROUP, BATCH, TILES, scale, SHAPE: tl.constexpr
):
    """The gradient of a chunk's queries of a key head, over the heads that share it. FOUND, if it is wanted, [batch, length,
    heads]: what each token reads of the state that the chunk finds, times its gradient."""
    batch, key_head, index, tile = unit_of(LENGTHS, tl.program_id(0), KEY_HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        heads = KEY_HEADS * GROUP
        q = load_rows(Q, batch, key_head, c.token, c.known, SHAPE)
        k = load_rows(K, batch, key_head, c.token, c.known, SHAPE)
        rq = lengths_of(q, SHAPE)
        rk = lengths_of(k, SHAPE)
        dq = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
        for head in range(key_head * GROUP, key_head * GROUP + GROUP):
            pairs = no_part(SHAPE.CHUNK, SHAPE.CHUNK)
            read = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
            for first_v in range(0, SHAPE.V, SHAPE.BLOCK_V):
                do = load_columns(DO, batch, head, c.token, c.known, first_v, SHAPE)
                new = load_columns(NEW, batch, head, c.token, c.known, first_v, SHAPE)
                s = kept_state(H, c, tile.sequence, head, heads, first_v, SHAPE)
                pairs = times(pairs, do, tl.trans(new), SHAPE.RAW, SHAPE.MADE)
                read = times(read, do, tl.trans(s), SHAPE.RAW, SHAPE.MADE)
            decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
            read = read * (scale * from_start(decay) * rq)[:, None]
            if FOUND is not None:
                tl.store(FOUND + (batch.to(tl.int64) * L + c.token) * heads + head, along(q, read), c.live)
            pairs = faded(pairs * (scale * rq)[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, False)
            dq = times(dq + read, pairs, k, SHAPE.MADE, SHAPE.RAW)
        if SHAPE.NORMALIZE:
            dq -= q.to(tl.float32) * (along(q, dq) * rq * rq)[:, None]
        store_part(DQ, batch, key_head, c.token, c.live, dq, SHAPE.D, 0, SHAPE.BLOCK_D)


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "BATCH", "TILES"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def linear_attention_gradients_values(
    Q, K, DO, DECAY, E, DV, REST, LENGTHS, L, HEADS, GROUP, BATCH, TILES, BLOCKS, scale, SHAPE: tl.constexpr
):
    """The gradient of a chunk's values of a head, some columns of them; without E what the chunk's own outputs
    give them, and REST, the gradient itself, is then 0 where tokens are in no sequence."""
    first_v = (tl.program_id(0) % BLOCKS) * SHAPE.BLOCK_V
    batch, head, index, tile = unit_of(LENGTHS, tl.program_id(0) // BLOCKS, HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE)
        k = load_rows(K, batch, head // GROUP, c.token, c.known, SHAPE)
        rk = lengths_of(k, SHAPE)
        decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
        a = scores_of(q, k, lengths_of(q, SHAPE), rk, DECAY, decay, SHAPE) * scale
        do = load_columns(DO, batch, head, c.token, c.known, first_v, SHAPE)
        dv = no_part(SHAPE.CHUNK, SHAPE.BLOCK_V)
        if E is not None:
            dv = kept_values(k, kept_state(E, c, tile.sequence, head, HEADS, first_v, SHAPE), rk, decay, SHAPE)
        dv = times(dv, tl.trans(a), do, SHAPE.MADE, SHAPE.RAW)
        store_columns(DV, batch, head, c.token, c.live, dv, first_v, SHAPE)
        if REST.data is not None:
            store_columns(REST, batch, head, c.token, c.live & (tile.sequence < 0), dv * 0.0, first_v, SHAPE)


@kernel(**ONE_CHUNK)
def linear_attention_gradients_delta(
    K,
    V,
    NEW,
    DECAY,
    BETA,
    H,
    Z,
    PART,
    DBETA,
    DGATE,
    LENGTHS,
    L,
    KEY_HEADS,
    GROUP,
    BATCH,
    TILES,
    SHAPE: tl.constexpr,
):
    """What the delta rule's inverse gives: PART [batch, length, key_heads, D] of the gradient of keys, that of betas and, if it is
    wanted, DGATE [batch, length, heads] of that of decays."""
    batch, key_head, index, tile = unit_of(LENGTHS, tl.program_id(0), KEY_HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        heads = KEY_HEADS * GROUP
        k = load_rows(K, batch, key_head, c.token, c.known, SHAPE)
        rk = lengths_of(k, SHAPE)
        dk = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
        for head in range(key_head * GROUP, key_head * GROUP + GROUP):
            pairs = no_part(SHAPE.CHUNK, SHAPE.CHUNK)
            read = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
            own = rk * 0.0
            for first_v in range(0, SHAPE.V, SHAPE.BLOCK_V):  # apart from the products, which leave no registers for it
                z = load_columns(Z, batch, head, c.token, c.known, first_v, SHAPE)
                v = load_columns(V, batch, head, c.token, c.known, first_v, SHAPE)
                own += along(z, v.to(tl.float32))
            for first_v in range(0, SHAPE.V, SHAPE.BLOCK_V):
                z = load_columns(Z, batch, head, c.token, c.known, first_v, SHAPE)
                new = load_columns(NEW, batch, head, c.token, c.known, first_v, SHAPE)
                s = kept_state(H, c, tile.sequence, head, heads, first_v, SHAPE)
                pairs = times(pairs, z, tl.trans(new), SHAPE.MADE, SHAPE.MADE)
                read = times(read, z, tl.trans(s), SHAPE.MADE, SHAPE.MADE)
            b = gate_at(BETA, batch, head, c.token, c.known)
            decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
            read = read * (from_start(decay) * rk)[:, None]
            seen = along(k, read)
            pairs = faded(pairs * -rk[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, True)
            terms = pairs * times(no_part(SHAPE.CHUNK, SHAPE.CHUNK), k, tl.trans(k), SHAPE.RAW, SHAPE.RAW)
            dbeta = own - seen + tl.sum(terms, 1)
            at = (batch.to(tl.int64) * L + c.token) * heads + head
            tl.store(DBETA + at, tl.where(c.known, dbeta, 0.0).to(DBETA.dtype.element_ty), c.live)
            pairs = pairs * b[:, None]
            dk = times(dk - read * b[:, None], pairs, k, SHAPE.MADE, SHAPE.RAW)
            dk = times(dk, tl.trans(pairs), k, SHAPE.MADE, SHAPE.RAW)
            if DGATE is not None:
                dg = decay_gradient(terms * b[:, None], -(seen * b), SHAPE.CHUNK, SHAPE.KEPT)
                tl.store(DGATE + at, dg, c.live)
        store_part(PART, batch, key_head, c.token, c.live, dk, SHAPE.D, 0, SHAPE.BLOCK_D)


@kernel(**ONE_CHUNK)
def linear_attention_gradients_keys(
    Q, K, NEW, DO, DECAY, H, E, FOUND, PART, DGATE, DK, DDECAY, LENGTHS, L, KEY_HEADS, GROUP, BATCH, TILES, scale,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk's keys of a key head, over the heads that share it, and of its decays. PART and DGATE are what the
    delta rule gives, or None."""
    batch, key_head, index, tile = unit_of(LENGTHS, tl.program_id(0), KEY_HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        heads = KEY_HEADS * GROUP
        q = load_rows(Q, batch, key_head, c.token, c.known, SHAPE)
        k = load_rows(K, batch, key_head, c.token, c.known, SHAPE)
        rk = lengths_of(k, SHAPE)
        dk = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
        if PART.data is not None:
            dk = load_part(PART, batch, key_head, c.token, c.live, SHAPE.D, 0, SHAPE.BLOCK_D)
        for head in range(key_head * GROUP, key_head * GROUP + GROUP):
            pairs = no_part(SHAPE.CHUNK, SHAPE.CHUNK)
            kept = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
            through = 0.0
            for first_v in range(0, SHAPE.V, SHAPE.BLOCK_V):
                do = load_columns(DO, batch, head, c.token, c.known, first_v, SHAPE)
                new = load_columns(NEW, batch, head, c.token, c.known, first_v, SHAPE)
                e = kept_state(E, c, tile.sequence, head, heads, first_v, SHAPE)
                pairs = times(pairs, do, tl.trans(new), SHAPE.RAW, SHAPE.MADE)
                kept = times(kept, new, tl.trans(e), SHAPE.MADE, SHAPE.MADE)
                if DDECAY.data is not None:
                    s = kept_state(H, c, tile.sequence, head, heads, first_v, SHAPE)
                    through += tl.sum(along(s, e.to(tl.float32)), 0)
            decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
            pairs = pairs * (lengths_of(q, SHAPE) * scale)[:, None] * rk[None, :]
            pairs = faded(pairs, DECAY, decay, SHAPE.CHUNK, False)
            kept = kept * (to_end(decay) * rk)[:, None]
            if DDECAY.data is not None:
                at = (batch.to(tl.int64) * L + c.token) * heads + head
                terms = pairs * times(no_part(SHAPE.CHUNK, SHAPE.CHUNK), q, tl.trans(k), SHAPE.RAW, SHAPE.RAW)
                dg = decay_gradient(terms, tl.load(FOUND + at, c.live, 0.0), SHAPE.CHUNK, SHAPE.KEPT)
                dg += kept_before(along(k, kept), SHAPE.CHUNK) + through * throughout(decay)
                if DGATE is not None:
                    dg += tl.load(DGATE + at, c.live, 0.0)
                store_gate(DDECAY, batch, head, c.token, c.live, tl.where(c.known, dg, 0.0))
            dk = times(dk + kept, tl.trans(pairs), q, SHAPE.MADE, SHAPE.RAW)
        if SHAPE.NORMALIZE:
            dk -= k.to(tl.float32) * (along(k, dk) * rk * rk)[:, None]
        store_part(DK, batch, key_head, c.token, c.live, dk, SHAPE.D, 0, SHAPE.BLOCK_D)


# ---- host ------------------------------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Where gradients are stored; those of decays by token, in `gates`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    gates: Tensor | None
    dbeta: Tensor | None
    dstate: Tensor | None


def whole_shape(shape: Shape) -> Shape:
    """A walker that has all columns of values: what is summed over them is then its own."""
    return shape._replace(BLOCK_V=max(shape.BLOCK_V, power_of_two(shape.V)))


def fits_walks(a: SimpleNamespace, shape: Shape) -> bool:
    """Whether walks make all gradients: a state with all columns of values has to fit into registers, as it does in bf16 up to 128
    of them, and a walker's sums have to be its own, which those of a key head that several heads share are not."""
    small = shape.RAW == 1 and max(shape.BLOCK_D, whole_shape(shape).BLOCK_V) <= WIDEST_WALK
    own = a.beta is None and a.v.shape[2] == a.k.shape[2]
    return small and own and crowded(a.q, a.v, None, a.cu_seqlens, shape)


def by_walks(
    a: SimpleNamespace, do: Tensor, dfinal: Tensor | None, made: Gradients, scale: float, shape: Shape
) -> None:
    """No gradient of a state is stored but the first's; states are, if decays have gradients."""
    (batch, length, heads, _), single = a.v.shape, {"dtype": torch.float32, "device": a.q.device}
    parts, shape = shape, whole_shape(shape)
    at = placed(a.v, a.cu_seqlens, shape.CHUNK)
    states = found = None
    if made.gates is not None:
        states = torch.empty(batch * at.tiles, heads, shape.D, shape.V, dtype=kept_dtype(a.q), device=a.q.device)
        found = torch.empty(batch, length, heads, **single)
    Q, K, V, DO, DECAY, FOUND = (*map(heads_of, (a.q, a.k, a.v, do)), gates_of(a.log_decay), gates_of(found))
    linear_attention_queries_backward(
        Q, K, V, DO, DECAY, heads_or_none(a.state), states, heads_of(made.dq), FOUND, at.marks, length, heads, at.count, at.many,
        at.tiles, scale, SHAPE=shape,
    )  # fmt: skip
    NONE = heads_or_none(None)
    linear_attention_states_backward(
        Q, K, V, DO, DECAY, Gates(), None, NONE, states, FOUND, heads_or_none(dfinal), heads_or_none(made.dstate), None, NONE,
        heads_of(made.dk), NONE, gates_of(made.gates), at.marks, length, heads, 1, at.count, at.many, at.tiles, 1, scale,
        SHAPE=shape,
    )  # fmt: skip
    linear_attention_states_backward(
        Q, K, V, DO, DECAY, Gates(), None, NONE, None, Gates(), heads_or_none(dfinal), NONE, None, NONE, NONE, heads_of(made.dv),
        Gates(), at.marks, length, heads, 1, at.count, at.many, at.tiles, blocks_of(parts), scale, SHAPE=parts,
    )  # fmt: skip
    rest = (made.dq, made.dk, made.dv, *(() if made.gates is None else (made.gates[..., None],)))
    fill_rest(at, shape.CHUNK, *rest)


def by_chunks(
    a: SimpleNamespace, do: Tensor, dfinal: Tensor | None, made: Gradients, scale: float, shape: Shape
) -> None:
    """Two walks keep states and their gradients, and all chunks are side by side."""
    q, k, v, beta = a.q, a.k, a.v, a.beta
    (batch, length, heads, _), key_heads = v.shape, k.shape[2]
    kept, single = {"dtype": kept_dtype(q), "device": q.device}, {"dtype": torch.float32, "device": q.device}
    at = placed(v, a.cu_seqlens, shape.CHUNK)
    found = walk(q, k, v, a.log_decay, beta, a.state, None, at, shape, kept["dtype"] if v.numel() else None)
    e = torch.empty(batch * at.tiles, heads, shape.D, shape.V, **kept) if v.numel() else None
    z = torch.empty(v.shape, **kept) if beta is not None else None
    group = heads // key_heads
    Q, K, V, DO, DECAY, BETA = (*map(heads_of, (q, k, v, do)), gates_of(a.log_decay), gates_of(beta))
    DK, DV, NONE = heads_of(made.dk), heads_of(made.dv), heads_or_none(None)
    blocks, local = blocks_of(shape), None
    of_values = (at.how, length, heads, group, batch, at.tiles, blocks, scale)
    if z is not None and v.numel():
        local = torch.empty(v.shape, **single)
        linear_attention_gradients_values(Q, K, DO, DECAY, None, heads_of(local), DV, *of_values, SHAPE=shape)
    # Without tokens the gradients of states go through as they are
    inverse = None if local is None else found.inverse
    linear_attention_states_backward(
        Q, K, V, DO, DECAY, BETA, inverse, heads_or_none(local), None, Gates(), heads_or_none(dfinal), heads_or_none(made.dstate),
        e, heads_or_none(z), NONE, NONE if beta is None else DV, Gates(), at.marks, length, heads, group, at.count, at.many,
        at.tiles, blocks, scale, SHAPE=shape,
    )  # fmt: skip
    if not v.numel():
        return
    new = V if found.new is None else heads_of(found.new)
    sizes = (at.how, length, key_heads, group, batch, at.tiles)
    read = None if made.gates is None else torch.empty(batch, length, heads, **single)
    part = more = None
    linear_attention_gradients_queries(
        Q, K, new, DO, DECAY, found.states, heads_of(made.dq), read, *sizes, scale, SHAPE=shape
    )
    if beta is None:
        linear_attention_gradients_values(Q, K, DO, DECAY, e, DV, NONE, *of_values, SHAPE=shape)
    else:
        part, more = torch.empty(k.shape, **single), None if read is None else torch.empty(read.shape, **single)
        linear_attention_gradients_delta(
            K, V, new, DECAY, BETA, found.states, heads_of(z), heads_of(part), made.dbeta, more, *sizes, SHAPE=shape
        )
    linear_attention_gradients_keys(
        Q, K, new, DO, DECAY, found.states, e, read, heads_or_none(part), more, DK, gates_of(made.gates), *sizes, scale,
        SHAPE=shape,
    )  # fmt: skip


def backward(saved: SimpleNamespace, do: Tensor | None, dfinal: Tensor | None) -> tuple:
    a, needs = saved, saved.needs
    q, v, log_decay = a.q, a.v, a.log_decay
    batch, length, heads, _ = v.shape
    scale = scale_of(q) if a.scale is None else float(a.scale)
    if do is None:
        do = torch.zeros(1, dtype=q.dtype, device=q.device).expand(v.shape)

    def like(t: Tensor | None, wanted: bool = True) -> Tensor | None:
        return torch.empty(t.shape, dtype=t.dtype, device=t.device) if wanted and t is not None else None

    of_heads = log_decay is not None and log_decay.dim() == 1
    ddecay = gates = like(log_decay, "log_decay" in needs)
    if of_heads and gates is not None:
        gates = torch.empty(batch, length, heads, dtype=torch.float32, device=q.device)
    made = Gradients(like(q), like(a.k), like(v), gates, like(a.beta), like(a.state, "state" in needs))
    if v.numel() or (made.dstate is not None and made.dstate.numel()):
        shape = shape_of(q, v, a.normalize)
        make = by_walks if v.numel() and fits_walks(a, shape) else by_chunks
        make(a, do, dfinal, made, scale, shape)
    if not v.numel():
        for t in (made.dq, made.dk, ddecay):
            if t is not None:
                t.zero_()
    elif ddecay is not None and of_heads:
        sum_columns(gates, ddecay, batch * length, heads)
    named = {"q": made.dq, "k": made.dk, "v": made.dv, "log_decay": ddecay, "beta": made.dbeta, "state": made.dstate}
    return tuple(t if n in needs else None for n, t in named.items())
