"""The experts of a mixture, what `use_experts_implementation` of transformers decorates.

Experts with the usual gate and no bias are `moe_feed_forward`, in FP8 too. Others keep their own gate, between products of groups.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...nn.expert_codes import KeepsCodes, KeptCodes
from ...nn.experts import moe_feed_forward
from ...ops.moe.grouped_mm import grouped_mm
from ...ops.moe.moe_permute import moe_permute, moe_unpermute
from .probe import NAMES, PRODUCTS, Source, activation, device_of, twin
from .roles import TRAINING, Count, Found, Skip, alike, bound, compared_in_modes

MARKS = ("has_bias", "is_transposed", "_apply_gate")  # what the decorator gives, in every version
FLAGS = {"has_gate": True, "has_post_expert_norm": False}  # what others of its flags must be
# From where on FP8 should pay. At 2048 by 1024, the smallest measured, a step takes 0.64 of the time that compiled bf16 does
# (H200, November 2026)
LEAST_HIDDEN, LEAST_FFN, MULTIPLE = 1024, 768, 128


def unsupported(module: nn.Module) -> str | None:
    wrong = [
        f"{flag}={getattr(module, flag)}" for flag, value in FLAGS.items() if getattr(module, flag, value) != value
    ]
    return f"no op for experts with {', '.join(wrong)}" if wrong else None


def usual(module: nn.Module) -> bool:
    """Whether `moe_feed_forward` is these experts."""
    gate = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    return gate and not module.has_bias and type(getattr(module, "act_fn", None)).__name__ in NAMES


def weights_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate_up [experts, 2 * ffn, hidden] and down [experts, hidden, ffn]."""
    x, gate_up, down = alike(x, module.gate_up_proj, module.down_proj)
    return (x, gate_up.transpose(1, 2), down.transpose(1, 2)) if module.is_transposed else (x, gate_up, down)


@cache
def keeping(kind: type[nn.Module]) -> type[nn.Module]:
    """Experts of this class that can keep the codes of their weights."""
    return type(f"Fp8{kind.__name__}", (KeepsCodes, kind), {})


def fed_forward(self: nn.Module, x: Tensor, chosen: Tensor, probs: Tensor) -> Tensor:
    """By `moe_feed_forward`, in FP8 if the module can keep codes."""
    wide, gate_up, down = weights_of(self, x)
    # Of the rows of all experts the first product alone: the rest is gathered and gated again in less time than it takes memory
    given: dict[str, Any] = {"keep": "product" if torch.is_grad_enabled() else "input"}
    if isinstance(self, KeepsCodes):
        given["precision"] = "fp8"
        # As the products' tiles take them: a cast within the op would keep it from being one plan
        probs = probs.float()
        for name, weight in (("gate_up", gate_up), ("down", down)):
            # What autocast makes anew in each call has no codes to keep
            if weight.dtype == getattr(self, f"{name}_proj").dtype:
                keys = f"{name}_codes", f"{name}_scale", f"{name}_codes_t"
                given |= dict(zip(keys, self.codes_of(f"{name}_proj", weight, hold=False)))
    act = NAMES[type(self.act_fn).__name__]
    return moe_feed_forward.function(wide, gate_up, down, chosen, probs, act=act, **given).to(x.dtype)


def composed(self: nn.Module, x: Tensor, chosen: Tensor, probs: Tensor) -> Tensor:
    """By `moe_permute`, `grouped_mm` and `moe_unpermute`, with the module's own gate between the products."""
    wide, gate_up, down = weights_of(self, x)
    rows, row_probs, row_map, _, offsets, _ = moe_permute.function(
        wide, chosen, probs, experts=gate_up.shape[0], align=1
    )
    place = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, place, right=True)

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = grouped_mm(rows, weight, offsets, transposed_b=True)
        # Rows of no expert, of which neither values nor gradients are specified, have a bias of their own
        return y if bias is None else y + F.pad(bias.to(y.dtype), (0, 0, 0, 1))[expert]

    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    y = product(self._apply_gate(product(rows, gate_up, biases[0])), down, biases[1])
    return moe_unpermute.function(y, row_map, row_probs).to(x.dtype)


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts of transformers by ops: `experts_implementation="tilewright"`."""
    reason = unsupported(self)
    if reason is not None:
        raise ValueError(f"experts_implementation='tilewright': {type(self).__name__}: {reason}")
    way = fed_forward if usual(self) else composed
    return way(self, hidden_states, top_k_index, top_k_weights)


def narrow(module: nn.Module) -> str | None:
    """Why experts stay out of FP8."""
    if not usual(module):
        return "only experts with the usual gate and no bias have FP8 products"
    sizes = module.down_proj.shape[1:]
    hidden, ffn = reversed(sizes) if module.is_transposed else sizes
    if hidden >= LEAST_HIDDEN and ffn >= LEAST_FFN and ffn % MULTIPLE == 0:
        return None
    return f"not in FP8: hidden is not {LEAST_HIDDEN} at least, or ffn no multiple of {MULTIPLE} from {LEAST_FFN} on"


def experts(name: str, module: nn.Module, fp8: bool) -> Found | Skip | None:
    """What the decorator marked."""
    if not all(hasattr(module, mark) for mark in MARKS):
        return None
    reason = unsupported(module)
    if reason is None and usual(module) and activation(module.act_fn) is None:
        reason = f"no activation of glu's: {type(module.act_fn).__name__}"
    if reason is not None:
        return Skip(reason)
    words = probed(module)
    if words is not None:
        op = "moe_feed_forward" if usual(module) else "grouped_mm"
        return Skip(f"not {op}: {words}", failed=not words.startswith(TRAINING))
    less = narrow(module) if fp8 else None
    coded, way = fp8 and less is None, fed_forward if usual(module) else composed
    op = "moe_feed_forward(fp8)" if coded else "moe_feed_forward" if usual(module) else "grouped_mm"
    names = [*inspect.signature(type(module).forward).parameters][1:]

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        def forward(self: nn.Module, *given: Tensor, **named: Tensor) -> Tensor:
            count(op)
            return way(self, *given, *(named[n] for n in names[len(given) :]))

        codes = KeptCodes(counted=False)
        kept = [(module, "__class__", keeping(type(module))), (module, "codes", codes)] if coded else []
        return [*kept, bound(module, forward)]

    return Found(op, changes, less)


def probed(module: nn.Module) -> str | None:
    """Why the ops are not these experts, on a few tokens and small weights."""
    draw, E, hidden, ffn = Source(device_of(module)), 4, 16, 8
    gate_up, down = draw.tensor(E, 2 * ffn, hidden, scale=0.25), draw.tensor(E, hidden, ffn, scale=0.3)
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    parameters = {"gate_up_proj": gate_up, "down_proj": down}
    if module.has_bias:
        parameters |= {"gate_up_proj_bias": draw.tensor(E, 2 * ffn), "down_proj_bias": draw.tensor(E, hidden)}
    eager = SimpleNamespace(_experts_implementation="eager")
    made = twin(module, parameters, module._modules, num_experts=E, config=eager)
    chosen = torch.tensor(
        [[0, 2], [3, 1], [2, 2], [2, 3], [0, 1], [1, 1]], device=draw.device
    )  # tables may repeat an expert
    given = draw.tokens(6, hidden)[0], chosen, draw.tensor(6, 2).softmax(-1)
    return compared_in_modes(experts_forward, type(module).forward, PRODUCTS, made, *given)
