"""A pool of states, of which each token of a step has one: that of its slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw


def known_slots(pool: Tensor, slots: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """Which tokens have a slot of the pool, [tokens]."""
    if slots is None:
        return torch.ones(tokens, dtype=torch.bool, device=device)
    return (slots >= 0) & (slots < pool.shape[0])


def take_slots(pool: Tensor, slots: Tensor | None, known: Tensor) -> Tensor:
    """The states of tokens, 0 of those that have no slot."""
    if slots is None:
        return pool[: known.shape[0]]
    if not pool.shape[0]:
        return pool.new_zeros(known.shape[0], *pool.shape[1:])
    taken = pool[torch.where(known, slots, 0).long()]
    return torch.where(known.reshape(-1, *(1 for _ in pool.shape[1:])), taken, 0.0)


def put_slots(pool: Tensor, slots: Tensor | None, known: Tensor, states: Tensor) -> Tensor:
    """The pool with these states in the slots of their tokens."""
    if slots is None:
        return torch.cat([states, pool[known.shape[0] :]])
    spare = pool.new_zeros(1, *pool.shape[1:])
    at = torch.where(known, slots, pool.shape[0]).long()
    return torch.cat([pool, spare]).index_copy(0, at, states)[:-1]


def draw_slots(draw: Draw, tokens: int, pool: int) -> Tensor:
    """Slots of which none is named twice, and some are none."""
    order = draw.uniform(pool, dtype=torch.float32).argsort()[:tokens]
    skipped = draw.uniform(tokens, dtype=torch.float32) < 0.2
    return torch.where(skipped, -1, order).to(draw.option("index", torch.int64, torch.int32))


@triton.jit
def slot_of(SLOTS, token, stride, POOL):
    """(the slot of a token, whether it has one): its own number without SLOTS; 0 where it has none."""
    if SLOTS is None:
        return token, token >= 0
    else:
        slot = tl.load(SLOTS + token * stride).to(tl.int64)
        known = (slot >= 0) & (slot < POOL)
        return tl.where(known, slot, 0), known
