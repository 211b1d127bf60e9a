"""What linear attention is, token by token, and what all its forms ask of their arguments."""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from ...op import upcast
from .places import places, sequence_count

EPS = tl.constexpr(1e-6)  # beside the sum of squares of a row that is normalised
WIDEST = 256  # columns of keys: a program holds all rows of a state


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, bonus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(o, the new state) of a token: state [..., heads, key_dim, value_dim], rows [..., heads, columns], decay [..., heads, 1 or
    key_dim], beta [..., heads], bonus [heads, key_dim]."""
    before = state
    if decay is not None:
        state = decay[..., None] * state
    if beta is not None:
        v = beta[..., None] * (v - torch.einsum("...hk,...hkv->...hv", k, state))
    state = state + k[..., None] * v[..., None, :]
    if bonus is None:
        return torch.einsum("...hk,...hkv->...hv", q, state), state
    own = (q * bonus * k).sum(-1, keepdim=True) * v
    return torch.einsum("...hk,...hkv->...hv", q, before) + own, state


def run(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, bonus: Tensor | None, state: Tensor | None,
    scale: float | None, normalize: bool, marks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, the last states) of all sequences, token by token. Of tensors without memory one token stands for all."""
    (batch, length, heads, values), width = v.shape, q.shape[-1]
    at = places(batch, length, marks, q.device)
    spread = heads // max(1, k.shape[2])
    rows = (unit_rows(finite_or_nan(t)) if normalize else finite_or_nan(t) for t in (q, k))
    wide_q, wide_k = (t.repeat_interleave(spread, 2) for t in rows)
    wide_v, b = (None if t is None else finite_or_nan(t) for t in (v, beta))
    extra, decay = None if bonus is None else upcast(bonus), None
    if log_decay is not None:
        decay = torch.exp(upcast(log_decay))
        decay = decay if by_column(log_decay) else decay[..., None].expand(batch, length, heads, 1)
    many = sequence_count(batch, marks)
    first = wide_v.new_zeros(many, heads, width, values) if state is None else upcast(state)
    last, current, made = first, first if marks is None else wide_v.new_zeros(1, heads, width, values), []
    sized = q.is_meta or hasattr(q, "fake_mode")
    for t in range(min(length, 1) if sized else length):
        if marks is not None and many:
            current = torch.where(at.index[t] == 0, first.index_select(0, at.whose[t : t + 1].clamp(min=0)), current)
        gates = (None if g is None else g[:, t] for g in (decay, b))
        o, current = step(current, wide_q[:, t], wide_k[:, t], wide_v[:, t], *gates, extra)
        made.append(torch.where(at.whose[t] >= 0, o, 0.0))
        if marks is None:
            last = current
        else:
            ends = (at.count > 0) & (at.begin + at.count - 1 == t)
            last = torch.where(ends[:, None, None, None], current, last)
    o = torch.stack(made * (length if sized else 1), 1) if made else wide_v * wide_q.sum()
    return (o * (scale_of(q) if scale is None else scale)).to(q.dtype), last.to(first.dtype)


def finite_or_nan(x: Tensor) -> Tensor:
    """x, NaN where it is infinite: sums over chunks cannot tell whether infinities cancel."""
    wide = upcast(x)
    return wide + (wide - wide)


def unit_rows(x: Tensor) -> Tensor:
    """Rows divided by their lengths."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS.value)


def scale_of(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def by_column(log_decay: Tensor | None) -> bool:
    """Whether each column of a key has a decay, in a call over sequences."""
    return log_decay is not None and log_decay.dim() == 4


def check_bonus(op: str, log_decay: Tensor | None, beta: Tensor | None, bonus: Tensor | None, dims: int) -> None:
    """Raise where a bonus has not the decays that go with it; those of columns have so many dimensions."""
    if bonus is not None and (beta is not None or log_decay is None or log_decay.dim() != dims):
        raise ValueError(f"{op}: bonus goes with a log_decay for each column, and not with beta")


def check_heads(
    op: str, k: Tensor, v: Tensor, log_decay: Tensor | None, tokens: torch.Size, columns: bool = False
) -> None:
    """Raise where heads do not share key heads evenly, or decays are of none of the sizes that they may be of; `tokens` are the
    dimensions before heads, and `columns` says that each column of a key may have a decay."""
    heads, (key_heads, width) = v.shape[-2], k.shape[-2:]
    if key_heads == 0 and heads or key_heads and heads % key_heads:
        raise ValueError(f"{op}: v has {heads} heads, which the {key_heads} of k do not divide")
    if not 1 <= width <= WIDEST:
        raise ValueError(f"{op}: k must have 1 to {WIDEST} columns, got {width}")
    if v.shape[-1] < 1:
        raise ValueError(f"{op}: v must have columns, got none")
    if log_decay is not None:
        sizes = ([heads], [*tokens, heads], *([[*tokens, heads, width]] if columns else []))
        if list(log_decay.shape) not in sizes:
            said = ", ".join(map(str, sizes))
            raise ValueError(f"{op}: log_decay must be one of {said}, got {list(log_decay.shape)}")
