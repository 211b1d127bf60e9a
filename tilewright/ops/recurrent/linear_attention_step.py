"""One token more for each of many linear attentions, whose states lie in a pool:

S = decay * S + k v^T,  o = scale * q S;   delta rule: v becomes beta * (v - k (decay * S)) first;
with a bonus: o = scale * (q S + (q . (bonus * k)) v) of the state before, and then S = decay * S + k v^T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core.debug import check_indices
from ...core.declaration import Part
from ...core.draw import Draw
from ...op import Bars, Cost, Op, Triton, single, upcast
from .linear import check_bonus, check_heads, scale_of, step, unit_rows
from .linear_tokens import walk_tokens
from .pool import draw_slots, known_slots, put_slots, take_slots


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Take a token `q`, `k` [tokens, key_heads, key_dim], `v` [tokens, heads, value_dim] into the state of its slot, and read it.

    `state` is [pool, heads, key_dim, value_dim], fp32 and written. `log_decay` is [heads], [tokens, heads] or
    [tokens, heads, key_dim], `beta` [tokens, heads], `bonus` [heads, key_dim]; they, `scale` and `normalize` mean what they do in
    `linear_attention`. A decay of each column is GLA's and, with beta, Kimi's delta attention; with a bonus, RWKV-6's, o is read of
    the state before: o = scale * (q S + (q . (bonus * k)) v). Token i has slot `slots[i]`, or i. No two tokens may have the same
    slot; one out of range, of which nothing is read or written, gives 0.
    """
    tokens, heads, _ = v.shape
    known = known_slots(state, slots, tokens, q.device)
    before = take_slots(state, slots, known)
    spread = heads // max(1, k.shape[1])
    rows = (unit_rows(upcast(t)) if normalize else upcast(t) for t in (q, k))
    wide_q, wide_k = (t.repeat_interleave(spread, 1) for t in rows)
    decay = None
    if log_decay is not None:
        decay = torch.exp(upcast(log_decay))
        decay = (decay if log_decay.dim() == 3 else decay[..., None]).expand(tokens, heads, -1)
    given = (upcast(beta) if beta is not None else None, upcast(bonus) if bonus is not None else None)
    o, after = step(before, wide_q, wide_k, upcast(v), decay, *given)
    o = torch.where(known[:, None, None], o * (scale_of(q) if scale is None else scale), 0.0)
    return o.to(q.dtype), put_slots(state, slots, known, after.to(state.dtype))


def inputs(draw: Draw) -> dict[str, Any]:
    tokens, heads, width = draw.dim("tokens", (2, 1, 5)), draw.dim("heads", (2, 1)), draw.dim("head_dim", (16, 32, 20))
    small = width == 16  # which nets ask for where rows and columns of a state lie so far apart that memory holds few
    width = 4 if small else width
    values = draw.dims.get("value_dim", max(1, width * (1 if small else draw.option("wider", 1, 2, 1))))
    shared = draw.option("shared", 1, 2)
    key_heads = math.gcd(heads, draw.dims.get("key_heads", heads // math.gcd(heads, shared) if heads else 0))
    pool, decay = tokens + draw.option("spare", 1, 0), draw.option("log_decay", "head", "token", "column", None)
    decay = "token" if decay is True else decay
    shape = {"head": (heads,), "token": (tokens, heads), "column": (tokens, heads, width)}.get(decay)
    with_bonus = decay == "column" and draw.option("with_bonus", False, True)
    return {
        "q": draw.tensor(tokens, key_heads, width),
        "k": draw.tensor(tokens, key_heads, width, scale=0.7 * max(1, width) ** -0.5),
        "v": draw.tensor(tokens, heads, values),
        "state": draw.tensor(pool, heads, width, values, dtype=torch.float32),
        "log_decay": None if shape is None else draw.uniform(*shape, low=-2.0, high=0.0),
        "beta": None if with_bonus else draw.maybe("beta", lambda: draw.uniform(tokens, heads)),
        "slots": draw.maybe("slots", lambda: draw_slots(draw, tokens, pool)),
        "bonus": draw.tensor(heads, width) if with_bonus else None,
        "scale": draw.option("scale", None, 1.0),
        "normalize": draw.option("normalize", False, True),
    }


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None, beta: Tensor | None, slots: Tensor | None, *,
    bonus: Tensor | None, scale: float | None, normalize: bool,
) -> Tensor:  # fmt: skip
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if slots is not None:
        check_indices("linear_attention_step", "slots", slots, -1, state.shape[0])
    if v.numel():
        # Sequences of one token each
        rows = [None if t is None else t if t.dim() == 1 else t.unsqueeze(1) for t in (q, k, v, o, log_decay, beta)]
        scale = scale_of(q) if scale is None else float(scale)
        walk_tokens(*rows, bonus, state, state, slots, None, None, scale, normalize)
    return o


def check(q, k, v, state, log_decay, beta, slots, *, bonus, **_) -> None:
    op = "linear_attention_step"
    check_heads(op, k, v, log_decay, v.shape[:1], columns=True)
    check_bonus(op, log_decay, beta, bonus, 3)
    if slots is None and state.shape[0] < q.shape[0]:
        raise ValueError(
            f"{op}: state has {state.shape[0]} slots, fewer than the {q.shape[0]} tokens of q, and no slots say which"
        )


def moved(q, k, v, state, log_decay, beta, slots, *, bonus, **_) -> tuple[int, int]:
    """Bytes read and written: of tokens and their states."""
    each = q.shape[0] * state[:1].numel() * 4
    given = sum(t.numel() * t.element_size() for t in (q, k, v, log_decay, beta, slots, bonus) if t is not None)
    return given + each, v.numel() * v.element_size() + each


def parts(a: SimpleNamespace, gradients: bool) -> Iterator[Part]:
    """The heads of the first key head and of the last: which rows a token's state has, only slots say."""
    group, every = a.v.shape[1] // max(1, a.k.shape[1]), slice(None)
    for head in {0, a.k.shape[1] - 1} if a.v.numel() else ():
        own = slice(head * group, (head + 1) * group)
        at = {"q": (every, slice(head, head + 1)), "v": (every, own), "bonus": (own,)}
        at |= {"k": at["q"], **dict.fromkeys(("state", "beta", "o"), at["v"])}
        at["log_decay"] = (own,) if a.log_decay is not None and a.log_decay.dim() == 1 else at["v"]
        cut = {name: t[at[name]] for name, t in vars(a).items() if name in at and t is not None}
        yield Part({**vars(a), **cut}, at)


linear_attention_step = Op(
    "linear_attention_step", reference, inputs, Triton(forward, None, single), check=check, writes=("state",),
    where={
        "q": "float[tokens key_heads key_dim]", "k": "q[tokens key_heads key_dim]", "v": "q[tokens heads value_dim]",
        "state": "float32|float64[pool heads key_dim value_dim]", "log_decay": "float[...?]", "beta": "float[tokens heads]",
        "slots": "int[tokens]", "bonus": "float[heads key_dim]",
    },
    results={"o": "q[tokens heads value_dim]"}, cost=Cost(moved), bars=Bars("B", parts=parts),
)  # fmt: skip
