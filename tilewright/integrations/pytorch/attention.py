"""`torch.nn.functional.scaled_dot_product_attention` by `attention`: the same arguments, meaning and shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.attention import attention

NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query @ key.T + attn_mask) @ value of `query` [..., heads, length, head_dim], as torch's function.

    Leading dimensions, and heads, broadcast; with `enable_gqa` query heads share those of keys evenly. Heads that lie after the
    sequence in memory, as projections make them, are read there. `is_causal` is aligned to the upper left: query i sees keys 0 to
    i, however many there are. `attn_mask` is bool, True for what is seen, or numbers; it gets no gradient. There is no dropout.
    """
    if dropout_p:
        raise ValueError(f"{NAME}: there is no dropout: dropout_p must be 0, got {dropout_p}")
    if is_causal and attn_mask is not None:
        raise ValueError(f"{NAME}: is_causal and attn_mask are not given together")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(f"{NAME}: query, key and value must have 2 dimensions at least")
    queries, keys = query.shape[-2], key.shape[-2]
    if is_causal and keys > queries:  # which no query sees, and the last query then stands at the last key
        keys = queries
        key, value = key[..., :keys, :], value[..., :keys, :]
    leading = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    q, k, v = (by_heads(t, leading) for t in (query, key, value))
    if not enable_gqa:
        q, k, v = same_heads(q, k, v)
    heads = q.shape[1]
    mask = None
    if attn_mask is not None:
        mask = by_heads(attn_mask, leading if attn_mask.dim() > 4 else (), attn_mask.dim() <= 4)
    o = attention.function(
        *(t.transpose(1, 2) for t in (q, k, v)), scale=scale, mask=mask, right=queries - keys if is_causal else None
    ).transpose(1, 2)  # fmt: skip
    rank = max(query.dim(), key.dim(), value.dim())
    return o.reshape(*leading, heads, *o.shape[2:]) if rank > 2 else o[0, 0]


def by_heads(t: Tensor, leading: tuple[int, ...], loose: bool = False) -> Tensor:
    """[batch, heads, rows, columns], of these leading dimensions or, `loose`, of those that there are."""
    t = t[(None,) * (4 - t.dim())]
    return t if loose or not leading else t.expand(*leading, *t.shape[-3:]).flatten(0, -4)


def same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of which there is one are there for all; one head of keys and values is read as such."""
    (heads,) = torch.broadcast_shapes(*(t.shape[1:2] for t in (q, k, v)))
    q = q.expand(-1, heads, -1, -1)
    if k.shape[1] != v.shape[1]:
        k, v = (t.expand(-1, heads, -1, -1) for t in (k, v))
    return q, k, v
