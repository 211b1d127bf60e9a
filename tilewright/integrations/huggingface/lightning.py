"""Lightning attention, as MiniMax has it: out(sigmoid(gate(x)) * norm(linear attention of act(qkv(x)))), with a decay of each head,
by `linear_attention` and `linear_attention_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.recurrent.linear_attention import linear_attention
from ...ops.recurrent.linear_attention_step import linear_attention_step
from .probe import PRODUCTS, UNRUN, Source, device_of, twin
from .roles import TRAINING, Count, Found, Skip, bound, compared_in_modes, ignore

HELD = {"norm", "qkv_proj", "out_proj", "output_gate"}


class Kept:
    """A cache for a probe: one state, or none yet."""

    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    def get_linear_cache(self, layer: int) -> Tensor | None:
        return self.state

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self.state = state


def attending(count: Count) -> Callable:
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **named: Any,
    ) -> tuple[Tensor, Tensor]:
        batch, length, _ = hidden_states.shape
        mixed = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            mixed = (mixed * attention_mask[:, :, None]).to(mixed.dtype)
        mixed = mixed.reshape(batch, length, self.num_attention_heads, 3 * self.head_dim)
        q, k, v = torch.split(mixed, self.head_dim, dim=3)
        state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
        decay = -self.slope_rate.float().flatten()
        if state is not None and length == 1 and not torch.is_grad_enabled():
            count("linear_attention_step")
            state = state.float().clone()  # the cache's own is also a result of the call before
            o = linear_attention_step.function(q[:, 0], k[:, 0], v[:, 0], state, decay, scale=1.0)[:, None]
        else:
            count("linear_attention")
            state = None if state is None else state.float()
            o, state = linear_attention.function(q, k, v, decay, state=state, scale=1.0)
        o = self.norm(o.reshape(batch, length, -1))
        o = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * o)
        if past_key_values is not None:
            past_key_values.set_linear_cache(self.layer_idx, state)
        return o, state

    return forward


def lightning(name: str, module: nn.Module) -> Found | Skip | None:
    held = {n for n, m in module._modules.items() if m is not None} - {"act_fn"}
    if held != HELD or "slope_rate" not in module._buffers:
        return None
    draw, hidden, width, heads = Source(device_of(module)), 16, 4, module.num_attention_heads
    sizes = {
        "qkv_proj": (hidden, 3 * heads * width),
        "out_proj": (heads * width, hidden),
        "output_gate": (hidden, heads * width),
    }
    children = {
        n: draw.linear(*size, getattr(module._modules[n], "bias", None) is not None) for n, size in sizes.items()
    }
    children["norm"] = twin(module.norm, {"weight": draw.tensor(heads * width)}, {})
    children |= {n: m for n, m in module._modules.items() if n == "act_fn"}
    made, tokens = twin(module, {}, children, head_dim=width), draw.tensor(2, 5, hidden)
    mask = torch.ones(2, 5, device=tokens.device)
    mask[0, :2] = 0
    state = draw.tensor(2, heads, width, width)

    def calling(forward: Callable) -> Callable:
        def call(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
            whole, first = forward(self, x, None, mask, None), Kept(None)
            began = forward(self, x, None, None, first)
            kept = Kept(state.clone())
            step = forward(self, x[:, :1], None, None, kept)
            return (*whole, *began, first.state, *step, kept.state)

        return call

    words = compared_in_modes(calling(attending(ignore)), calling(type(module).forward), PRODUCTS, made, tokens)
    if words is not None:
        return Skip(f"not lightning attention: {words}", failed=not words.startswith((UNRUN, TRAINING)))
    return Found("linear_attention", lambda count: [bound(module, attending(count))])
