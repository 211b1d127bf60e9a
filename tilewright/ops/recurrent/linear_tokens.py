"""Linear attention forward, token by token: a program holds some columns of a head's state in registers and takes token after token
into it. `linear_attention_step` takes one, over a pool of states; a short sequence is walked through by the same kernel.

By chunks, a sequence of one token takes as long as one of 64: products are padded, and there are two to four launches, not one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.portable import Heads, heads_of
from ...core.tensor import cdiv, power_of_two
from ...device.softmax import LOG2E
from ...runtime.kernel import kernel
from .linear import EPS
from .places import sequence_at, sequence_count
from .pool import slot_of

# Tokens up to which a sequence is walked through. As foretold for an H200 and 32 heads of 128 x 128, a small call takes 3 us and
# 0.35 us a token, of which none begins before the one before is taken; by chunks 8 us, 12 of the delta rule, for launches that wait
# for each other. Of a large batch a sequence takes 1 us, in which its states are read and written, and beyond 4 tokens 0.15 us for
# each; by chunks 1.3 us, 2.3 of the delta rule, however few its tokens
SHORT = 8
# The same of packed sequences on average, since only the device knows how long each is: one with the tokens of all takes 0.35 us
# for each, 1.4 us for every sequence, which is about what these take by chunks
SHORT_PACKED = 4
STATE_BLOCK = 4096  # numbers of a state that a program holds: 32 a thread


class Token(NamedTuple):
    """What a head of a token brings: columns of q and k [BLOCK_D] and of v [BLOCK_V], the log decay, a number or [BLOCK_D], and
    beta, as they are stored; 0 without decays or betas. Or the tensors that they are loaded from."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any


# ---- parts of the kernel ---------------------------------------------------------------------------------------------


@triton.jit
def row_of(X, batch, token, head, column, inside):
    """[n]: columns of a head of a token."""
    at = batch.to(tl.int64) * X.stride_b + token.to(tl.int64) * X.stride_t + head.to(tl.int64) * X.stride_h
    return tl.load(X.data + at + column.to(tl.int64) * X.stride_d, inside, 0.0)


@triton.jit
def number_of(X, batch, token, head, live):
    """The number of a head of a token."""
    if X.data is None:
        return tl.full([], 0.0, tl.float32)
    else:
        at = batch.to(tl.int64) * X.stride_b + token.to(tl.int64) * X.stride_t + head.to(tl.int64) * X.stride_h
        return tl.load(X.data + at, live, 0.0)


@triton.jit
def token_at(given, batch, token, head, key_head, live, d, e, D, VALUES):
    """A token of the tensors that are given; of one that is not live nothing is read."""
    q = row_of(given.q, batch, token, key_head, d, (d < D) & live)
    k = row_of(given.k, batch, token, key_head, d, (d < D) & live)
    v = row_of(given.v, batch, token, head, e, (e < VALUES) & live)
    if given.decay.stride_d is None:
        decay = number_of(given.decay, batch, token, head, live)
    else:
        decay = row_of(given.decay, batch, token, head, d, (d < D) & live)
    return Token(q, k, v, decay, number_of(given.beta, batch, token, head, live))


@triton.jit
def finite_or_nan(x):
    """NaN for an infinity; in fp32 alone, as by chunks."""
    if x.dtype == tl.float32:
        return tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    else:
        return x


@triton.jit
def finite_token(token):
    q, k, v, decay, beta = token
    return Token(finite_or_nan(q), finite_or_nan(k), finite_or_nan(v), decay, finite_or_nan(beta))


@triton.jit
def state_of(S, slot, head, d, e):
    """Addresses [BLOCK_D, BLOCK_V] of a head's state in a tensor [slots, heads, D, V] of any strides."""
    at = slot * S.stride_b + head.to(tl.int64) * S.stride_t
    return S.data + at + d.to(tl.int64)[:, None] * S.stride_h + e.to(tl.int64)[None, :] * S.stride_d


@triton.jit
def take_token(s, token, DECAY, BETA, BONUS, u, NORMALIZE: tl.constexpr):
    """(o [BLOCK_V] before it is scaled, the state [BLOCK_D, BLOCK_V] after) of a token that finds the state s."""
    q = token.q.to(tl.float32)
    k = token.k.to(tl.float32)
    v = token.v.to(tl.float32)
    if NORMALIZE:
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS)
        k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    o = v
    if BONUS is not None:
        o = tl.sum(q[:, None] * s, 0) + tl.sum(q * u * k, 0) * v
    if DECAY.data is not None:
        left = tl.exp2(token.decay.to(tl.float32) * LOG2E)
        if DECAY.stride_d is None:
            s *= left
        else:
            s *= left[:, None]
    if BETA.data is not None:
        v = token.beta.to(tl.float32) * (v - tl.sum(k[:, None] * s, 0))
    s += k[:, None] * v[None, :]
    if BONUS is None:
        o = tl.sum(q[:, None] * s, 0)
    return o, s


# ---- kernel ----------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (a.PLACES * a.HEADS * a.BLOCKS,), tokens=("L", "SEQUENCES", "COUNT", "PLACES", "POOL", "HEADS", "GROUP"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def linear_attention_tokens(
    Q, K, V, O, DECAY, BETA, BONUS, STATE, FINAL, SLOTS, stride_s, POOL, MARKS, L, SEQUENCES, COUNT, PLACES, HEADS, GROUP, BLOCKS,
    D, VALUES, scale, NORMALIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Some columns of values of one head of one sequence of L tokens, of one token without L: all rows of its state in these
    columns, found in STATE, or 0, and left in FINAL, at the sequence's own slot or that which SLOTS says. Tokens in no sequence are
    a place of their own before packed sequences, and another after them; they and those of no slot are not read, and give 0."""
    unit = tl.program_id(0) // BLOCKS
    head = unit % HEADS
    sequence = unit // HEADS
    if MARKS is not None:
        sequence -= 1
    none = tl.zeros_like(sequence)
    if L is None:
        batch, first, count = sequence, none, none + 1
    else:
        batch, first, count = sequence_at(MARKS, sequence, COUNT, L)
    slot, known = slot_of(SLOTS, sequence.to(tl.int64), stride_s, POOL)
    known = known & (sequence < SEQUENCES)
    d = tl.arange(0, BLOCK_D)
    e = (tl.program_id(0) % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < D)[:, None] & (e < VALUES)[None, :] & known
    s = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
    if STATE.data is not None:
        s = tl.load(state_of(STATE, slot, head, d, e), inside, 0.0)
    u = d
    if BONUS is not None:
        u = tl.load(BONUS + head * D + d, d < D, 0.0).to(tl.float32)
    given = Token(Q, K, V, DECAY, BETA)
    to = O.data + batch.to(tl.int64) * O.stride_b + head.to(tl.int64) * O.stride_h + e.to(tl.int64) * O.stride_d
    token = token_at(given, batch, none + first, head, head // GROUP, known & (count > 0), d, e, D, VALUES)
    if L is None:
        o, s = take_token(s, token, DECAY, BETA, BONUS, u, NORMALIZE)
        tl.store(to, tl.where(known, o * scale, 0.0).to(O.data.dtype.element_ty), e < VALUES)
    else:
        for i in range(count):
            # Loaded while the token before is taken
            live = known & (i + 1 < count)
            after = token_at(given, batch, none + (first + i + 1), head, head // GROUP, live, d, e, D, VALUES)
            o, s = take_token(s, finite_token(token), DECAY, BETA, BONUS, u, NORMALIZE)
            at = to + (none + (first + i)).to(tl.int64) * O.stride_t
            tl.store(at, tl.where(known, o * scale, 0.0).to(O.data.dtype.element_ty), e < VALUES)
            token = after
    tl.store(state_of(FINAL, slot, head, d, e), s, inside)


# ---- host ------------------------------------------------------------------------------------------------------------


def gates_of(t: Tensor | None) -> Heads:
    """Decays or betas, without a stride of columns where they have none: [heads], [batch, length, heads] or with columns."""
    if t is None:
        return Heads(None, 0, 0, 0, None)
    return Heads(t, *((0, 0, *t.stride(), None) if t.dim() == 1 else (*t.stride(), None)[:4]))


def walk_tokens(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_decay: Tensor | None, beta: Tensor | None, bonus: Tensor | None,
    state: Tensor | None, final: Tensor, slots: Tensor | None, marks: Tensor | None, length: int | None, scale: float,
    normalize: bool,
) -> None:  # fmt: skip
    """Fill `o` and `final`. Without a length there is one token in each row of the batch."""
    (batch, _, heads, values), (*_, key_heads, width) = v.shape, k.shape
    many = sequence_count(batch, marks)
    block_d = max(16, power_of_two(width))
    block_v = max(16, min(power_of_two(values), STATE_BLOCK // block_d))
    count = 0 if marks is None else marks.shape[0]
    linear_attention_tokens(
        heads_of(q), heads_of(k), heads_of(v), heads_of(o), gates_of(log_decay), gates_of(beta),
        None if bonus is None else bonus.contiguous(), Heads(None, 0, 0, 0, 0) if state is None else heads_of(state),
        heads_of(final), slots, 0 if slots is None else slots.stride(0), final.shape[0],
        None if marks is None else marks.contiguous(), length, many, count, many if marks is None else count + 1, heads,
        heads // key_heads, cdiv(values, block_v), width, values, scale, NORMALIZE=normalize, BLOCK_D=block_d, BLOCK_V=block_v,
    )  # fmt: skip


def is_short(v: Tensor, marks: Tensor | None) -> bool:
    """Whether sequences are walked through token by token."""
    least = 0 if marks is None else SHORT_PACKED * sequence_count(v.shape[0], marks)
    return v.shape[1] <= max(SHORT, least)


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *, bonus: Tensor | None, state: Tensor | None,
    scale: float, normalize: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, heads, values = v.shape
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    many = sequence_count(batch, cu_seqlens)
    final = torch.empty(many, heads, q.shape[-1], values, dtype=torch.float32, device=q.device)
    if final.numel() or o.numel():
        walk_tokens(q, k, v, o, log_decay, beta, bonus, state, final, None, cu_seqlens, length, scale, normalize)
    return o, final
