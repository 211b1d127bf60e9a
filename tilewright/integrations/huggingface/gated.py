"""Gated feed-forward layers: down(act(gate(x)) * up(x)), by `glu_linear`, `glu_linear_fp8` or `glu`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ...nn.glu_linear_fp8 import glu_linear_fp8
from ...ops.activation.glu import glu
from ...ops.activation.glu_linear import glu_linear
from .linear import Fp8Linear
from .probe import PRODUCTS, UNRUN, Source, activation, device_of, twin
from .projections import autocast_dtype, plain_linear, projected
from .roles import TRAINING, Count, Found, Skip, alike, argument, bound, cast, compared_in_modes, ignore, taking

ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")


def gated(name: str, module: nn.Module) -> Found | Skip | None:
    """gate_proj, up_proj and down_proj, or gate_up_proj and down_proj, with an activation."""
    held = {n for n, m in module._modules.items() if m is not None} - {*ACTIVATIONS}
    if module._parameters or held not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}):
        return None
    function = next((getattr(module, a) for a in ACTIVATIONS if hasattr(module, a)), None)
    act, x = activation(function), argument(type(module).forward)
    if act is None or x is None:
        return Skip(
            f"no activation of glu's: {type(function).__name__}" if act is None else "its forward takes more than x"
        )
    fused = "gate_up_proj" in held

    def computing(count: Count) -> Callable:
        def compute(self: nn.Module, x: Tensor) -> Tensor:
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
