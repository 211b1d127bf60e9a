"""The router of a mixture of experts: logits, and the weights and indices of the experts that they choose.

What the weights are is read from attributes, `OPTIONS`, and probed. Logits stay as the model makes them, in the dtype of its
activations or in fp32: whoever is trained with rounded ones chooses by rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.moe.moe_router import topk_routing
from ...ops.moe.router_linear import router_linear
from .probe import PRODUCTS, UNRUN, Source, device_of, twin
from .roles import Count, Found, Skip, argument, bound, compared_in_modes, ignore, in_mode, taking

BIAS = "e_score_correction_bias"  # a buffer of routers that score by sigmoids
# An option of `topk_routing`, the attribute that says it, and what it is without one.
OPTIONS = (
    ("groups", "num_group", 1), ("group_topk", "topk_group", 1), ("normalize", "norm_topk_prob", True),
    ("scaling", "routed_scaling_factor", 1.0),
)  # fmt: skip


def routing(wide: bool, dtype: torch.dtype | None, count: Count) -> Callable:
    """The forward: with fp32 logits if `wide`, and with weights of `dtype` or that of the logits."""

    def compute(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, plus = x.reshape(-1, x.shape[-1]), getattr(self, "bias", None)  # of a replica no parameter
        if wide:
            count("router_linear")
            logits = router_linear.function(x, self.weight, plus)
        else:
            logits = F.linear(x, self.weight, plus)
        count("topk_routing")
        bias = self._buffers.get(BIAS)
        probs, chosen, _ = topk_routing.function(
            logits, self.top_k, score="softmax" if bias is None else "sigmoid", bias=bias, **options(self)
        )
        return logits, probs.to(dtype or logits.dtype), chosen

    return compute


def options(module: nn.Module) -> dict[str, Any]:
    return {option: getattr(module, attribute, default) for option, attribute, default in OPTIONS}


def router(name: str, module: nn.Module) -> Found | Skip | None:
    """`weight` [experts, hidden], `top_k`, and a forward that returns three things."""
    held = {n for n, p in module._parameters.items() if p is not None}
    numbers = all(isinstance(getattr(module, n, None), int) for n in ("top_k", "num_experts"))
    if held not in ({"weight"}, {"weight", "bias"}) or module._modules or not numbers or module.weight.dim() != 2:
        return None
    x = argument(type(module).forward)
    if x is None or not {*module._buffers} <= {BIAS}:
        return Skip("its forward takes more than x, or it has other buffers")
    given = options(module)
    if given["groups"] > 1 and module.top_k != 2 * given["group_topk"]:
        return Skip("its groups count by their best two, topk_routing's by as many as are chosen of each")
    made, probe = probe_of(module, torch.bfloat16)
    try:
        with torch.no_grad():
            logits, probs, _ = type(module).forward(in_mode(made, False), probe)
    except Exception as error:
        return Skip(f"{UNRUN}: {type(error).__name__}: {error}")
    wide = logits.dtype == torch.float32
    dtype = None if probs.dtype == logits.dtype else probs.dtype
    made, probe = probe_of(module, torch.float32)
    ours = routing(wide, dtype, ignore)
    words = compared_in_modes(dense(ours), dense(type(module).forward), PRODUCTS, made, probe)
    if words is not None:
        return Skip(f"not topk_routing: {words}")
    return Found("topk_routing", lambda count: [bound(module, taking(x, routing(wide, dtype, count)))])


def probe_of(module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    draw, width, experts = Source(device_of(module), dtype), 16, module.weight.shape[0]
    parameters = {"weight": draw.tensor(experts, width, scale=0.5)}
    if module._parameters.get("bias") is not None:
        parameters["bias"] = draw.tensor(experts)
    made = twin(module, parameters, {}, hidden_dim=width)
    made.__dict__["_buffers"] = {n: draw.tensor(experts, scale=0.1).float() for n in module._buffers}
    return made, draw.tensor(7, width)


def dense(forward: Callable) -> Callable:
    """Logits, and the weights where their experts are: in which order they come is no matter."""

    def made(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, probs, chosen = forward(module, x)
        return logits, torch.zeros_like(logits, dtype=probs.dtype).scatter(-1, chosen, probs)

    return made
