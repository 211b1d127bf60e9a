"""Modules that an op can stand for, by what they hold, and the forwards that take their place.

Each role is a function of (name, module) that returns None for a module that has nothing to do with it, a `Skip` for one that stays
as it is, or a `Found` for one that was probed and computes what the op does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.expert_codes import KeptCodes
from ..nn.experts import moe_feed_forward
from ..nn.linear import Linear
from ..ops.glu import glu
from ..ops.rms_norm import rms_norm
from ..ops.rope import rope
from .probe import EXACT, NAMES, PRODUCTS, UNRUN, Source, activation, compared, device_of, twin

Count = Callable[[str], None]  # told the name of an op that is called


@dataclass
class Skip:
    """A module that stays as it is. `failed`: it should have been one of ours, but computes something else."""

    reason: str
    failed: bool = False


@dataclass
class Found:
    """The op, and what instances are to have for it: (module, attribute, value) each."""

    op: str
    changes: Callable[[Count], list[tuple[nn.Module, str, Any]]]


def ignore(op: str) -> None:
    """The `Count` of a probe."""


def argument(forward: Callable) -> str | None:
    """The name of a forward's only argument beside self."""
    names = [*inspect.signature(forward).parameters]
    return names[1] if len(names) == 2 else None


def taking(name: str, compute: Callable[[nn.Module, Tensor], Tensor]) -> Callable:
    """A forward of one argument of this name."""

    def forward(self: nn.Module, *given: Tensor, **named: Tensor) -> Tensor:
        return compute(self, given[0] if given else named[name])

    return forward


def bound(module: nn.Module, forward: Callable) -> tuple[nn.Module, str, Any]:
    """As a method, so that a copy of the module has one that is bound to the copy."""
    return module, "forward", MethodType(functools.update_wrapper(forward, type(module).forward), module)


# ---- norm --------------------------------------------------------------------------------------------------------------

EPSILONS = ("variance_epsilon", "eps", "epsilon")
OFFSETS = (0.0, 1.0)  # what is added to the weight


def norm(name: str, module: nn.Module) -> Found | Skip | None:
    """One weight, one epsilon, nothing else."""
    if set(module._parameters) != {"weight"} or module._modules or module._buffers:
        return None
    eps = next((e for e in EPSILONS if isinstance(getattr(module, e, None), float)), None)
    x = argument(type(module).forward)
    if module.weight is None or module.weight.dim() != 1 or eps is None or x is None:
        return None
    draw, width = Source(device_of(module)), module.weight.shape[0]
    made, tokens = twin(module, {"weight": draw.tensor(width)}, {}), draw.tokens(4, width)

    def computing(offset: float, count: Count) -> Callable:
        def compute(self: nn.Module, x: Tensor) -> Tensor:
            count("rms_norm")
            return rms_norm.function(x, self.weight, getattr(self, eps), weight_offset=offset)

        return compute

    words = [compared(computing(o, ignore), type(module).forward, EXACT, made, tokens) for o in OFFSETS]
    if None not in words:
        return Skip(f"not rms_norm: {words[0]}", failed="rms" in type(module).__name__.lower())
    offset = OFFSETS[words.index(None)]
    return Found("rms_norm", lambda count: [bound(module, taking(x, computing(offset, count)))])


# ---- gated feed-forward ------------------------------------------------------------------------------------------------

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
            count("glu")
            if fused:
                return self.down_proj(glu.function(self.gate_up_proj(x), act=act))
            return self.down_proj(glu.function(self.gate_proj(x), self.up_proj(x), act=act))

        return compute

    draw, hidden, ffn = Source(device_of(module)), 16, 24
    shapes = {"gate_up_proj": (hidden, 2 * ffn), "down_proj": (ffn, hidden)}
    biases = {n: getattr(module._modules[n], "bias", None) is not None for n in sorted(held)}
    children = {n: draw.linear(*shapes.get(n, (hidden, ffn)), bias) for n, bias in biases.items()}
    children |= {n: m for n, m in module._modules.items() if n in ACTIVATIONS}
    made, tokens = twin(module, {}, children), draw.tokens(4, hidden)
    words = compared(computing(ignore), type(module).forward, PRODUCTS, made, tokens)
    if words is not None:
        return Skip(f"not down(glu(gate, up)): {words}", failed=not words.startswith(UNRUN))
    return Found("glu", lambda count: [bound(module, taking(x, computing(count)))])


# ---- rotary embedding ---------------------------------------------------------------------------------------------------

ROTARY = "apply_rotary_pos_emb"
ARGUMENTS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
LAYOUTS = {1: "bhsd", 2: "bshd"}  # by where the heads are
# (pairing, how often the tables have each angle): what the functions of this name do.
TURNS = (("half", 2), ("interleaved", 2), ("half", 1))


def turning(original: Callable, pairing: str, times: int, count: Count) -> Callable:
    """`apply_rotary_pos_emb` over `rope`. Tables that have the angles twice have them in two halves, whatever the pairs are. What
    has no batch or no heads goes to the original."""

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim not in LAYOUTS or q.dim() != 4 or cos.dim() != 3:
            return original(q, k, cos, sin, unsqueeze_dim)
        count("rope")
        pairs = cos.shape[-1] // times
        given = {"layout": LAYOUTS[unsqueeze_dim], "rotary_dim": 2 * pairs, "pairing": pairing}
        return rope.function(q, k, cos[..., :pairs], sin[..., :pairs], **given)

    return turn


def same_turn(function: Callable, pairing: str, times: int, device: torch.device) -> str | None:
    """Why a function is not this turn, or None. One that knows no heads wider than what is turned fails on those."""
    draw, pairs, words = Source(device), 4, None
    angles = torch.cat([draw.tensor(2, 3, pairs)] * times, -1)
    for width in (2 * pairs, 3 * pairs):
        given = draw.tensor(2, 2, 3, width), draw.tensor(2, 1, 3, width), angles.cos(), angles.sin()
        words = compared(turning(function, pairing, times, ignore), function, EXACT, *given)
        if words is not None:
            return None if width > 2 * pairs and words.startswith(UNRUN) else words
    return None


def turn_of(function: Callable, device: torch.device) -> tuple[str, int] | str:
    """Which of `TURNS` a function is, or why none."""
    if [*inspect.signature(function).parameters] != ARGUMENTS:
        return f"{ROTARY} takes other arguments than {', '.join(ARGUMENTS)}"
    words = [same_turn(function, *turn, device) for turn in TURNS]
    return TURNS[words.index(None)] if None in words else f"{ROTARY} turns otherwise: {words[0]}"


def rotary(name: str, module: nn.Module) -> Found | Skip | None:
    """A forward that calls a global function of that name gets a copy of itself that sees ours under the name."""
    forward = type(module).forward
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType):
        return None
    called = [n for n in plain.__code__.co_names if n.startswith(ROTARY)]
    if not called:
        return None
    if called != [ROTARY]:
        return Skip(f"it calls {', '.join(called)}, of which rope has only {ROTARY}")
    if forward is not plain:
        return Skip("its forward is decorated")
    original = plain.__globals__[ROTARY]
    turn = turn_of(original, device_of(module))
    if isinstance(turn, str):
        return Skip(turn)

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        # Without a __name__ torch.compile takes globals from this scope and not from the module of that name
        scope = {k: v for k, v in plain.__globals__.items() if k != "__name__"} | {
            ROTARY: turning(original, *turn, count)
        }
        made = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
        made.__kwdefaults__ = plain.__kwdefaults__
        return [bound(module, made)]

    return Found("rope", changes)


# ---- experts -------------------------------------------------------------------------------------------------------------

# Flags of `use_experts_implementation` and what they must be.
FLAGS = {"has_gate": True, "has_bias": False, "is_concatenated": True, "has_post_expert_norm": False}


def unsupported(module: nn.Module) -> str | None:
    """Why `moe_feed_forward` cannot be these experts."""
    wrong = [
        f"{flag}={getattr(module, flag)}" for flag, value in FLAGS.items() if getattr(module, flag, value) != value
    ]
    if wrong:
        return f"moe_feed_forward has no {', '.join(wrong)}"
    if getattr(type(module)._apply_gate, "__name__", "") != "_default_apply_gate":
        return "it gates in its own way"
    act = type(getattr(module, "act_fn", None)).__name__
    return None if act in NAMES else f"no activation of glu's: {act}"


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts of transformers by `moe_feed_forward`: `experts_implementation="tilewright"`."""
    reason = unsupported(self)
    if reason is not None:
        raise ValueError(f"experts_implementation='tilewright': {type(self).__name__}: {reason}")
    gate_up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    x, gate_up, down = alike(hidden_states, gate_up, down)
    learns = torch.is_grad_enabled()
    y = moe_feed_forward.function(
        x, gate_up, down, top_k_index, top_k_weights, act=NAMES[type(self.act_fn).__name__],
        keep="all" if learns else "input",
    )  # fmt: skip
    return y.to(hidden_states.dtype)


def alike(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """In the dtype of the first weight or, under autocast, of that: as a linear layer would have them."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights[0].dtype
    return tuple(t.to(dtype) for t in (x, *weights))


def experts(name: str, module: nn.Module) -> Found | Skip | None:
    """What `use_experts_implementation` decorated."""
    if not all(hasattr(module, flag) for flag in (*FLAGS, "is_transposed", "_apply_gate")):
        return None
    reason = unsupported(module)
    if reason is None and activation(module.act_fn) is None:
        reason = f"no activation of glu's: {type(module.act_fn).__name__}"
    if reason is not None:
        return Skip(reason)

    draw, E, hidden, ffn = Source(device_of(module)), 4, 16, 8
    gate_up, down = draw.tensor(E, 2 * ffn, hidden, scale=0.25), draw.tensor(E, hidden, ffn, scale=0.3)
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    eager = SimpleNamespace(_experts_implementation="eager")
    made = twin(module, {"gate_up_proj": gate_up, "down_proj": down}, module._modules, num_experts=E, config=eager)
    chosen = torch.tensor([[0, 2], [3, 1], [2, 3], [0, 1], [1, 2]], device=draw.device)
    given = draw.tokens(5, hidden)[0], chosen, draw.tensor(5, 2).softmax(-1)
    words = compared(experts_forward, type(module).forward, PRODUCTS, made, *given)
    if words is not None:
        return Skip(f"not moe_feed_forward: {words}", failed=True)

    def counted(count: Count) -> Callable:
        def forward(self: nn.Module, *given: Tensor, **named: Tensor) -> Tensor:
            count("moe_feed_forward")
            return experts_forward(self, *given, **named)

        return forward

    return Found("moe_feed_forward", lambda count: [bound(module, counted(count))])


# ---- linear layers in FP8 --------------------------------------------------------------------------------------------------

LEAST, MULTIPLE = 1024, 128  # sizes from which FP8 products gain more than the casts cost, and the block of a scale
OUTSIDE = ("lm_head", "embed_out", "score", "classifier", "router", "gate")  # too sensitive, or too narrow


class Fp8Linear(Linear):
    """A `torch.nn.Linear` whose class was changed to this one."""

    def forward(self, x: Tensor) -> Tensor:
        self.count("linear_fp8")
        return super().forward(x)


def linear(name: str, module: nn.Module) -> Found | Skip | None:
    """A plain linear layer of the middle of the model, large enough in both directions."""
    if not isinstance(module, nn.Linear):
        return None
    if type(module) is not nn.Linear:
        return Skip(f"it is a {type(module).__name__}")
    if name.rpartition(".")[2] in OUTSIDE:
        return Skip("the head and routers stay as they are")
    sizes = module.out_features, module.in_features
    if min(sizes) < LEAST or any(size % MULTIPLE for size in sizes):
        return Skip(f"sizes are not both multiples of {MULTIPLE} from {LEAST} on")
    attributes = {"__class__": Fp8Linear, "keep": "codes", "main_grad": False}

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        given = {**attributes, "codes": KeptCodes(), "count": count}
        return [(module, attribute, value) for attribute, value in given.items()]

    return Found("linear_fp8", changes)
