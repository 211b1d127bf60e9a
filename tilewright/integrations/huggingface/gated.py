"""Gated feed-forward layers: down(act(gate(x)) * up(x)), by `glu_linear`, `glu_linear_fp8` or `glu`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...nn.glu_linear_fp8 import glu_linear_fp8
from ...ops.activation.glu import glu
from ...ops.activation.glu_linear import glu_linear
from .linear import Fp8Linear
from .probe import PRODUCTS, UNRUN, Source, activation, device_of, twin
from .projections import autocast_dtype, plain_linear, projected, unhooked
from .report import changed
from .roles import TRAINING, Count, Found, Skip, alike, argument, bound, cast, compared_in_modes, ignore, taking

ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
COMMON = {*nn.Module().__dict__}  # what every module has


def same(value: Any, other: Any) -> bool:
    """Of attributes of activations: a deep copy has other partial functions."""
    if value is other or type(value) is not type(other):
        return value is other
    if type(value) is partial:
        return (value.func, value.args, value.keywords) == (other.func, other.args, other.keywords)
    return type(value) in (bool, int, float, str) and value == other


def known(function: Any) -> Callable[[Any], bool]:
    """Tells whether an activation is this one, or a copy of it, and calling it does no more than its forward. It may have been
    replaced, changed or hooked since it was probed."""
    if not isinstance(function, nn.Module):
        return lambda now: now is function
    kind = type(function)
    kept = [
        (n, v) for n, v in function.__dict__.items() if n not in COMMON and not n.startswith("_") and n != "forward"
    ]

    def asked(now: Any) -> bool:
        if type(now) is not kind or now._modules or changed(now) or not unhooked(now):
            return False
        return all(same(now.__dict__.get(n), v) for n, v in kept)

    return asked


def gated(name: str, module: nn.Module) -> Found | Skip | None:
    """gate_proj, up_proj and down_proj, or gate_up_proj and down_proj, with an activation."""
    held = {n for n, m in module._modules.items() if m is not None} - {*ACTIVATIONS}
    if module._parameters or held not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}):
        return None
    place = next((a for a in ACTIVATIONS if hasattr(module, a)), ACTIVATIONS[0])
    function = getattr(module, place, None)
    act, x = activation(function), argument(type(module).forward)
    if act is None or x is None:
        return Skip(
            f"no activation of glu's: {type(function).__name__}" if act is None else "its forward takes more than x"
        )
    fused, ours = "gate_up_proj" in held, known(function)

    def computing(count: Count) -> Callable:
        def compute(self: nn.Module, x: Tensor) -> Tensor:
            if not ours(getattr(self, place)):
                return type(self).forward(self, x)
            gate, up = (self.gate_up_proj(x), None) if fused else projected(x, self.gate_proj, self.up_proj)
            down = self.down_proj
            if plain_linear(down):  # asked at each call: adapters come and go, and FSDP gathers weights for it
                count("glu_linear")
                return glu_linear.function(*alike(gate, down.weight, down.bias, up), act=act)
            if plain_linear(down, Fp8Linear) and not down.main_grad:
                count("glu_linear_fp8")
                gate, up = cast(autocast_dtype(gate) or gate.dtype, gate, up)
                codes = down.codes_of("weight", down.weight, hold=False)
                return glu_linear_fp8.function(gate, down.weight, down.bias, up, *codes, act=act)
            count("glu")
            return down(glu.function(gate, up, act=act))

        return compute

    draw, hidden, ffn = Source(device_of(module)), 16, 24
    shapes = {"gate_up_proj": (hidden, 2 * ffn), "down_proj": (ffn, hidden)}
    biases = {n: getattr(module._modules[n], "bias", None) is not None for n in sorted(held)}
    children = {n: draw.linear(*shapes.get(n, (hidden, ffn)), bias) for n, bias in biases.items()}
    children |= {n: m for n, m in module._modules.items() if n in ACTIVATIONS}
    made, tokens = twin(module, {}, children), draw.tokens(4, hidden)
    words = compared_in_modes(computing(ignore), type(module).forward, PRODUCTS, made, tokens)
    if words is not None:
        return Skip(f"not down(glu(gate, up)): {words}", failed=not words.startswith((UNRUN, TRAINING)))
    op = {nn.Linear: "glu_linear", Fp8Linear: "glu_linear_fp8"}.get(type(module.down_proj), "glu")
    return Found(op, lambda count: [bound(module, taking(x, computing(count)))])
