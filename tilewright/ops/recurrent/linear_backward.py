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
Two walks keep S and E of each chunk, and one kernel makes gradients of queries, keys, values and decays, a chunk and key head a
program: all of them want the same rows, and it is bytes that they wait for. Of the delta rule, others before it give z, and what
that gives keys, betas and decays.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.portable import heads_of, load_part, no_part, store_part
from ...core.tensor import power_of_two
from ...runtime.kernel import Arguments, kernel
from ..norm.rms_norm import sum_columns
from .linear import scale_of
from .linear_chunks import (
    Shape,
    blocks_of,
    chunk_of,
    decay_of,
    faded,
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

WIDEST = 128  # columns of keys and of values of a state that a program can load as a whole


# ---- parts of kernels ------------------------------------------------------------------------------------------------


@triton.jit
def along(x, y):
    """[n]: the products of rows."""
    return tl.sum(x.to(tl.float32) * y, 1)


@triton.jit
def decay_gradient(terms, CHUNK: tl.constexpr, PIECES: tl.constexpr):
    """[r]: of terms [t, s] of pairs those with t >= r > s."""
    i = tl.arange(0, CHUNK)
    across = times(no_part(CHUNK, CHUNK), terms, tl.where(i[:, None] < i[None, :], 1.0, 0.0), PIECES, 1)
    return tl.sum(lower(across, CHUNK, False), 0)


@triton.jit
def from_or_before(found, kept, CHUNK: tl.constexpr):
    """[r]: the sum of what tokens from r on read of the state that the chunk finds, and of what is kept of those before r."""
    i = tl.arange(0, CHUNK)
    return tl.sum(tl.where(i[:, None] >= i[None, :], found[:, None], kept[:, None]), 0)


@triton.jit
def state_products(H, E, slot, head, heads, SHAPE: tl.constexpr):
    """The sum of the products of a state's numbers with their gradients, as they lie in memory."""
    SIZE: tl.constexpr = SHAPE.D * SHAPE.V
    BLOCK: tl.constexpr = min(4096, SHAPE.BLOCK_D * SHAPE.BLOCK_V)
    first = (slot * heads + head) * SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = None if start + BLOCK <= SIZE else i < SIZE
        s = tl.load(H + first + i, inside, None if inside is None else 0.0)
        e = tl.load(E + first + i, inside, None if inside is None else 0.0)
        total += s.to(tl.float32) * e.to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def store_gate(G, unit, batch, head, token, live, value):
    """Numbers of a chunk's tokens; where G is of units, which are chunks, their sum."""
    at = G.data + head.to(tl.int64) * G.stride_h
    if G.stride_t is None:
        tl.store(at + unit.to(tl.int64) * G.stride_b, tl.sum(value, 0))
    else:
        at += batch.to(tl.int64) * G.stride_b + token.to(tl.int64) * G.stride_t
        tl.store(at, value.to(G.data.dtype.element_ty), live)


@triton.jit
def kept_values(k, e, rk, decay, SHAPE: tl.constexpr):
    """[CHUNK, BLOCK_V]: what values are given by the state after their chunk, of whose gradient e these are columns."""
    dv = times(no_part(SHAPE.CHUNK, SHAPE.BLOCK_V), k, e, SHAPE.RAW, SHAPE.MADE)
    return dv * (to_end(decay) * rk)[:, None]


# ---- walks -----------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (a.SEQUENCES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "COUNT", "SEQUENCES", "TILES"),
    default=lambda a: walking(a, 2),
)  # fmt: skip
def linear_attention_states_backward(
    Q, K, DO, DECAY, BETA, T, LOCAL, DFINAL, DSTATE, E, Z, DV, MARKS, L, HEADS, GROUP, COUNT, SEQUENCES, TILES, BLOCKS, scale,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Walk through the chunks of a sequence from the last: E [slots, heads, D, V] is the gradient of the state after each, DSTATE
    that of the first state; None where it is not wanted. Of the delta rule, Z is that of what its inverse is given, DV that of
    values, and LOCAL what its new values get from outputs of their own chunk. A program has some columns of values of one head."""
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
        # Taken up after these, whose tiles leave no registers for it; copied, like the others, a chunk ahead
        do = load_columns(DO, batch, head, token, live, first_v, SHAPE)
        read = do.to(tl.float32) * (lengths_of(q, SHAPE) * found * scale)[:, None]
        e = plus_product(e * throughout(decay), own, tl.trans(q), read, SHAPE.RAW, SHAPE.MADE)
    if DSTATE.data is not None:
        at, inside = given_state(DSTATE, sequence, head, first_v, SHAPE)
        tl.store(at, e, inside)


# ---- chunks side by side ---------------------------------------------------------------------------------------------


def one_chunk(default: Callable[[Arguments], dict[str, int]]) -> dict[str, Any]:
    """A program of a kernel has a chunk of a key head."""
    tokens = ("L", "KEY_HEADS", "BATCH", "TILES")
    return {"grid": lambda a: (a.BATCH * a.TILES * a.KEY_HEADS,), "tokens": tokens, "default": default}


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.HEADS * a.BLOCKS,), tokens=("L", "HEADS", "GROUP", "BATCH", "TILES"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def linear_attention_gradients_local(
    Q, K, DO, DECAY, LOCAL, DV, LENGTHS, L, HEADS, GROUP, BATCH, TILES, BLOCKS, scale, SHAPE: tl.constexpr
):
    """Of the delta rule: what the new values of a chunk and head get from its own outputs, some columns of them, and 0 for the
    gradients DV of values that are in no sequence."""
    first_v = (tl.program_id(0) % BLOCKS) * SHAPE.BLOCK_V
    batch, head, index, tile = unit_of(LENGTHS, tl.program_id(0) // BLOCKS, HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE)
        k = load_rows(K, batch, head // GROUP, c.token, c.known, SHAPE)
        decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
        a = scores_of(q, k, lengths_of(q, SHAPE), lengths_of(k, SHAPE), DECAY, decay, SHAPE) * scale
        do = load_columns(DO, batch, head, c.token, c.known, first_v, SHAPE)
        dv = times(no_part(SHAPE.CHUNK, SHAPE.BLOCK_V), tl.trans(a), do, SHAPE.MADE, SHAPE.RAW)
        store_columns(LOCAL, batch, head, c.token, c.live, dv, first_v, SHAPE)
        store_columns(DV, batch, head, c.token, c.live & (tile.sequence < 0), dv * 0.0, first_v, SHAPE)


@kernel(**one_chunk(lambda a: {"num_warps": 8}))
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
    BATCH,
    TILES,
    GROUP: tl.constexpr,
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
        for i in range(GROUP):
            head = key_head * GROUP + i
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
                dg = decay_gradient(terms * b[:, None], SHAPE.CHUNK, SHAPE.KEPT)
                dg -= from_or_before(seen * b, seen * 0.0, SHAPE.CHUNK)
                tl.store(DGATE + at, dg, c.live)
        store_part(PART, batch, key_head, c.token, c.live, dk, SHAPE.D, 0, SHAPE.BLOCK_D)


def chunk_warps(a: Arguments) -> dict[str, int]:
    """Four, whose rows are those of a chunk of 64 tokens, where a program has all columns of values: with 98 KB of shared memory an
    SM has two such programs (Triton 3.6, sm_90, 128 columns)."""
    return {"num_warps": 4 if a.SHAPE.V <= a.SHAPE.BLOCK_V else 8, "num_stages": 1}


@triton.jit
def rounded(x, PIECES: tl.constexpr):
    """x as a factor of one piece, if it has no more: half the registers."""
    return x.to(tl.bfloat16) if PIECES == 1 else x


@triton.jit
def store_rows(DX, X, batch, key_head, c, dx, r, SHAPE: tl.constexpr):
    """The gradient of rows of X, of which dx is that before they were multiplied by r, 1 over their lengths."""
    if SHAPE.NORMALIZE:
        x = load_rows(X, batch, key_head, c.token, c.known, SHAPE).to(tl.float32)
        dx -= x * (along(x, dx) * r * r)[:, None]
    store_part(DX, batch, key_head, c.token, c.live, dx, SHAPE.D, 0, SHAPE.BLOCK_D)


@triton.jit
def columns_again(x, X, batch, head, c, first_v, SHAPE: tl.constexpr):
    """Columns of values from `first_v` on: where the first block is all of them, that, which is x."""
    if SHAPE.V <= SHAPE.BLOCK_V:
        return x
    else:
        return load_columns(X, batch, head, c.token, c.known, first_v, SHAPE)


@kernel(**one_chunk(chunk_warps))
def linear_attention_gradients(
    Q, K, NEW, DO, DECAY, H, E, PART, DGATE, DQ, DK, DV, DDECAY, LENGTHS, L, KEY_HEADS, BATCH, TILES, scale, GROUP: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's queries and keys of a key head, over the heads that share it, and of their values and decays, if these
    are wanted: DDECAY is of tokens, or of chunks, whose sums they are. PART and DGATE are what the delta rule gives, or None. One
    after the other, so that registers hold one at a time."""
    unit = tl.program_id(0) // KEY_HEADS
    batch, key_head, index, tile = unit_of(LENGTHS, tl.program_id(0), KEY_HEADS, L, TILES, SHAPE.CHUNK)
    if tile.start < tile.count_q:
        c = chunk_of(LENGTHS, tile, index, batch, TILES, SHAPE.CHUNK)
        heads = KEY_HEADS * GROUP
        q = load_rows(Q, batch, key_head, c.token, c.known, SHAPE)
        k = load_rows(K, batch, key_head, c.token, c.known, SHAPE)
        rq = lengths_of(q, SHAPE)
        rk = lengths_of(k, SHAPE)
        dq = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
        dk = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
        if PART.data is not None:
            dk = load_part(PART, batch, key_head, c.token, c.live, SHAPE.D, 0, SHAPE.BLOCK_D)
        for i in range(GROUP):  # of one, no loop: what is summed over heads takes no registers then
            head = key_head * GROUP + i
            decay = decay_of(DECAY, batch, head, c.token, c.there, SHAPE.CHUNK)
            do = load_columns(DO, batch, head, c.token, c.known, 0, SHAPE)
            new = load_columns(NEW, batch, head, c.token, c.known, 0, SHAPE)
            pairs = no_part(SHAPE.CHUNK, SHAPE.CHUNK)
            for first_v in range(0, SHAPE.V, SHAPE.BLOCK_V):
                to = columns_again(do, DO, batch, head, c, first_v, SHAPE)
                of = columns_again(new, NEW, batch, head, c, first_v, SHAPE)
                pairs = times(pairs, to, tl.trans(of), SHAPE.RAW, SHAPE.MADE)
            pairs = faded(pairs * (rq * scale)[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, False)
            if (DV.data is not None) or (DDECAY.data is not None):
                scores = times(no_part(SHAPE.CHUNK, SHAPE.CHUNK), q, tl.trans(k), SHAPE.RAW, SHAPE.RAW)
            if DDECAY.data is not None:
                dg = decay_gradient(pairs * scores, SHAPE.CHUNK, SHAPE.KEPT)
            pairs = rounded(pairs, SHAPE.MADE)
            if DV.data is not None:
                a = faded(scores * (rq * scale)[:, None] * rk[None, :], DECAY, decay, SHAPE.CHUNK, False)
                a = rounded(a, SHAPE.MADE)
            kept = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
            for first_v in range(0, SHAPE.V, SHAPE.BLOCK_V):
                e = kept_state(E, c, tile.sequence, head, heads, first_v, SHAPE)
                if DV.data is not None:
                    to = columns_again(do, DO, batch, head, c, first_v, SHAPE)
                    dv = times(kept_values(k, e, rk, decay, SHAPE), tl.trans(a), to, SHAPE.MADE, SHAPE.RAW)
                    store_columns(DV, batch, head, c.token, c.live, dv, first_v, SHAPE)
                of = columns_again(new, NEW, batch, head, c, first_v, SHAPE)
                kept = times(kept, of, tl.trans(e), SHAPE.MADE, SHAPE.MADE)
            kept = kept * (to_end(decay) * rk)[:, None]
            if DDECAY.data is not None:
                left = along(load_rows(K, batch, key_head, c.token, c.known, SHAPE), kept)
            dk = times(dk + kept, tl.trans(pairs), q, SHAPE.MADE, SHAPE.RAW)
            if GROUP == 1:
                store_rows(DK, K, batch, key_head, c, dk, rk, SHAPE)
            if DDECAY.data is not None:
                dg += state_products(H, E, c.slot, head, heads, SHAPE) * throughout(decay)
            read = no_part(SHAPE.CHUNK, SHAPE.BLOCK_D)
            for first_v in range(0, SHAPE.V, SHAPE.BLOCK_V):
                to = columns_again(do, DO, batch, head, c, first_v, SHAPE)
                s = kept_state(H, c, tile.sequence, head, heads, first_v, SHAPE)
                read = times(read, to, tl.trans(s), SHAPE.RAW, SHAPE.MADE)
            read = read * (scale * from_start(decay) * rq)[:, None]
            if DDECAY.data is not None:
                found = along(load_rows(Q, batch, key_head, c.token, c.known, SHAPE), read)
                dg += from_or_before(found, left, SHAPE.CHUNK)
                if DGATE is not None:
                    dg += tl.load(DGATE + (batch.to(tl.int64) * L + c.token) * heads + head, c.live, 0.0)
                store_gate(DDECAY, unit, batch, head, c.token, c.live, tl.where(c.known, dg, 0.0))
            dq = times(dq + read, pairs, k, SHAPE.MADE, SHAPE.RAW)
            if GROUP == 1:
                store_rows(DQ, Q, batch, key_head, c, dq, rq, SHAPE)
        if GROUP > 1:
            store_rows(DK, K, batch, key_head, c, dk, rk, SHAPE)
            store_rows(DQ, Q, batch, key_head, c, dq, rq, SHAPE)
    elif DDECAY.data is not None:
        if DDECAY.stride_t is None:  # of packed sequences, more units than chunks
            for i in range(GROUP):
                none = tl.zeros([1], tl.float32)
                store_gate(DDECAY, unit, batch, key_head * GROUP + i, none, none, none)


# ---- host ------------------------------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Where gradients are stored."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    ddecay: Tensor | None
    dbeta: Tensor | None
    dstate: Tensor | None


def gradient_shape(shape: Shape, alone: bool) -> Shape:
    """With all columns of values, so that each is loaded once, where registers hold them: in bf16, and where nothing comes from
    other heads or from the delta rule."""
    whole = power_of_two(shape.V)
    fits = alone and shape.RAW == 1 and max(shape.BLOCK_D, whole) <= WIDEST
    return shape._replace(BLOCK_V=max(shape.BLOCK_V, whole)) if fits else shape


def fill(a: SimpleNamespace, do: Tensor, dfinal: Tensor | None, made: Gradients, scale: float, shape: Shape) -> None:
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
    # Of the delta rule what a walk rounds comes back through the keys of every chunk before: with all that it multiplies in one
    # piece, gradients of keys of length 1 whose state hardly decays were up to 6e-3 off
    walked = shape if beta is None else shape._replace(MADE=shape.KEPT)
    if z is not None and v.numel():
        local = torch.empty(v.shape, **single)
        linear_attention_gradients_local(
            Q,
            K,
            DO,
            DECAY,
            heads_of(local),
            DV,
            at.how,
            length,
            heads,
            group,
            batch,
            at.tiles,
            blocks,
            scale,
            SHAPE=walked,
        )
    # Without tokens the gradients of states go through as they are
    inverse = None if local is None else found.inverse
    linear_attention_states_backward(
        Q, K, DO, DECAY, BETA, inverse, heads_or_none(local), heads_or_none(dfinal), heads_or_none(made.dstate), e,
        heads_or_none(z), NONE if beta is None else DV, at.marks, length, heads, group, at.count, at.many, at.tiles, blocks, scale,
        SHAPE=walked,
    )  # fmt: skip
    if not v.numel():
        return
    gates = made.ddecay
    if gates is not None and gates.dim() == 1:  # a sum of each chunk, then of all
        gates = torch.empty(batch * at.tiles, heads, **single)
    new = V if found.new is None else heads_of(found.new)
    sizes = (at.how, length, key_heads)
    part = more = None
    if beta is not None:
        part = torch.empty(k.shape, **single)
        more = None if gates is None else torch.empty(batch, length, heads, **single)
        linear_attention_gradients_delta(
            K, V, new, DECAY, BETA, found.states, heads_of(z), heads_of(part), made.dbeta, more, *sizes, batch, at.tiles,
            GROUP=group, SHAPE=shape,
        )  # fmt: skip
    linear_attention_gradients(
        Q, K, new, DO, DECAY, found.states, e, heads_or_none(part), more, heads_of(made.dq), DK, NONE if beta is not None else DV,
        gates_of(gates), *sizes, batch, at.tiles, scale, GROUP=group,
        SHAPE=gradient_shape(shape, beta is None and group == 1),
    )  # fmt: skip
    if gates is not made.ddecay:
        sum_columns(gates, made.ddecay, *gates.shape)


def backward(saved: SimpleNamespace, do: Tensor | None, dfinal: Tensor | None) -> tuple:
    a, needs = saved, saved.needs
    q, v = a.q, a.v
    scale = scale_of(q) if a.scale is None else float(a.scale)
    if do is None:
        do = torch.zeros(1, dtype=q.dtype, device=q.device).expand(v.shape)

    def like(t: Tensor | None, wanted: bool = True) -> Tensor | None:
        return torch.empty(t.shape, dtype=t.dtype, device=t.device) if wanted and t is not None else None

    ddecay = like(a.log_decay, "log_decay" in needs)
    made = Gradients(like(q), like(a.k), like(v), ddecay, like(a.beta), like(a.state, "state" in needs))
    if v.numel() or (made.dstate is not None and made.dstate.numel()):
        fill(a, do, dfinal, made, scale, shape_of(q, v, a.normalize))
    if not v.numel():
        for t in (made.dq, made.dk, ddecay):
            if t is not None:
                t.zero_()
    named = {"q": made.dq, "k": made.dk, "v": made.dv, "log_decay": ddecay, "beta": made.dbeta, "state": made.dstate}
    return tuple(t if n in needs else None for n, t in named.items())
