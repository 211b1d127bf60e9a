"""A stand-in for torch's attention by cuDNN, where there is no GPU: its arguments, its layouts, its causal mask, in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Nine results, as torch's has: o in the order in which q lies, lse [batch, heads, length, 1]."""
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0 and not return_debug_mask
    group = query.shape[1] // key.shape[1]
    wide_k, wide_v = (t.double().repeat_interleave(group, 1) for t in (key, value))
    s = query.double() @ wide_k.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:  # from the upper left
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    lse = s.logsumexp(-1, keepdim=True)
    made = (torch.exp(s - lse) @ wide_v).to(query.dtype)
    order = sorted(range(4), key=lambda dim: query.stride(dim), reverse=True)
    o = made.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    state = torch.empty((), dtype=torch.long)
    return o, lse.float(), None, None, query.shape[2], key.shape[2], state, state, None


class Watched:
    """The stand-in, and what it was called with."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> tuple[Any, ...]:
        self.calls.append(SimpleNamespace(query=query, key=key, value=value))
        return cudnn_attention(query, key, value, *others, **named)
