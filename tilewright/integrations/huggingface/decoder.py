"""Decoder layers: h = x + attention(norm(x)), y = h + mlp(norm(h)), whatever the family. The second norm adds the residual itself,
and in the backward its gradient to that of the residual; projections of attention are made together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.declaration import PLAIN
from ...ops.norm.rms_norm import add_rms_norm
from .norm import norm_of
from .probe import EXACT, UNRUN, Source, device_of, twin
from .projections import joined, unhooked
from .report import HOOKED, own_forward
from .roles import Count, Found, Skip, bound, compared_in_modes, ignore

FIRST, ATTENTION, SECOND, MLP = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
X = "hidden_states"


def known_by(module: nn.Module) -> tuple[type, Any]:
    """A norm's class and the forward of its own, if it has one: a wrapper or an adapter of it has others, a copy the same."""
    forward = own_forward(module)
    return type(module), getattr(forward, "__func__", forward)


def computing(module: nn.Module, eps: str, offset: float, count: Count) -> Callable:
    """A layer's forward, of the arguments of its own, which but for the first are for attention."""
    forward, known, kinds = type(module).forward, known_by(module._modules[SECOND]), inspect.Parameter
    taken = [p for p in inspect.signature(forward).parameters.values() if p.kind is kinds.POSITIONAL_OR_KEYWORD][2:]
    names, defaults = [p.name for p in taken], {p.name: p.default for p in taken if p.default is not kinds.empty}

    def layer(self: nn.Module, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        attention, second = getattr(self, ATTENTION), getattr(self, SECOND)
        x = getattr(self, FIRST)(hidden_states)
        with joined(attention, PROJECTIONS):
            x, *_ = attention(hidden_states=x, **{**defaults, **dict(zip(names, given)), **named})
        # Asked at each call: hooks and adapters come and go, and FSDP gathers weights for it. Under autocast dtypes may differ
        plain = known_by(second) == known and unhooked(second) and type(second.weight) in PLAIN
        if plain and x.dtype == hidden_states.dtype:
            count("add_rms_norm")
            x, h = add_rms_norm.function(x, hidden_states, second.weight, getattr(second, eps), weight_offset=offset)
        else:
            h = hidden_states + x
            x = second(h)
        x = getattr(self, MLP)(x)
        return h + (x[0] if isinstance(x, tuple) else x)  # some give their router's scores too

    return layer


class Attention(nn.Module):
    """Something in the place of attention, and what it was told beside x."""

    told: Any = None

    def forward(self, hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        self.told = named
        return hidden_states.sin(), None


class Bent(nn.Module):
    """Something in the place of a norm or an mlp."""

    def __init__(self, scores: bool = False) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: Tensor) -> Any:
        return (x.cos(), None) if self.scores else x.cos()


def same_layer(module: nn.Module, kind: tuple[str, float], scores: bool) -> str | None:
    """Why a layer is not this one, or None: sums around stand-ins, and what attention is told."""
    theirs, second = type(module).forward, module._modules[SECOND]
    draw, width = Source(device_of(module)), second.weight.shape[0]
    own = twin(second, {"weight": draw.tensor(width)}, {})
    for name in ("forward", HOOKED, "_hf_hook"):  # which would be those of the module itself
        own.__dict__.pop(name, None)
    children = {FIRST: Bent(), ATTENTION: Attention(), SECOND: own, MLP: Bent(scores)}
    made, told = twin(module, {}, children, gradient_checkpointing=False), []  # with it a layer leaves out its cache
    parameters = [*inspect.signature(theirs).parameters.values()][2:]
    named = {p.name: object() for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    if len(named) < len(parameters):
        named["more"] = object()

    def recorded(forward: Callable) -> Callable:
        def run(self: nn.Module, x: Tensor) -> Tensor:
            y = forward(self, x, **named)
            told.append(getattr(self, ATTENTION).told)
            return y

        return run

    ours = computing(made, *kind, ignore)
    words = compared_in_modes(recorded(ours), recorded(theirs), EXACT, made, draw.tokens(4, width))
    if words is None and told[::2] != told[1::2]:  # in either mode
        return "attention is told something else"
    return words


def decoder(name: str, module: nn.Module) -> Found | Skip | None:
    """Two norms, attention and an mlp."""
    held = {n for n, m in module._modules.items() if m is not None}
    if module._parameters or held != {FIRST, ATTENTION, SECOND, MLP}:
        return None
    taken = [*inspect.signature(type(module).forward).parameters]
    second = norm_of(module._modules[SECOND])
    if not isinstance(second, tuple) or taken[1:2] != [X]:
        return None
    words = [same_layer(module, second, scores) for scores in (False, True)]
    if None not in words:
        ran = [w for w in words if not w.startswith(UNRUN)]
        return Skip(f"not x + mlp(norm(x + attention(norm(x)))): {(ran or words)[0]}")
    return Found("add_rms_norm", lambda count: [bound(module, computing(module, *second, count))])
