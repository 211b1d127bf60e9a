"""Modules that an op can stand for, by what they hold, and the forwards that take their place.

Each role is a function of (name, module) that returns None for a module that has nothing to do with it, a `Skip` for one that stays
as it is, or a `Found` for one that was probed and computes what the op does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...nn.expert_codes import KeptCodes
from ...nn.glu_linear_fp8 import glu_linear_fp8
from ...nn.linear import Linear
from ...ops.activation.glu import glu
from ...ops.activation.glu_linear import glu_linear
from ...ops.norm.rms_norm import rms_norm
from ...ops.rotary.rope import rope
from .probe import EXACT, PRODUCTS, UNRUN, Source, activation, compared, device_of, twin
from .projections import autocast_dtype, plain_linear, projected

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
    less: str | None = None  # why it is not all that was asked for


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
    """As a method, so that a copy of the module has one that is bound to the copy. It has the original's signature but no
    `__wrapped__`: accelerate follows that to take its own wrapper off, and would take this one off too."""
    original = type(module).forward
    functools.update_wrapper(forward, original)
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(original)
    return module, "forward", MethodType(forward, module)


def alike(x: Tensor, weight: Tensor, *more: Tensor | None) -> tuple[Tensor | None, ...]:
    """In the dtype of the weight or, under autocast, of that: as a linear layer would have them."""
    return cast(autocast_dtype(x) or weight.dtype, x, weight, *more)


def cast(dtype: torch.dtype, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(t if t is None else t.to(dtype) for t in given)


# ---- norm --------------------------------------------------------------------------------------------------------------

EPSILONS = ("variance_epsilon", "eps", "epsilon")
OFFSETS = (0.0, 1.0)  # what is added to the weight


def norm_of(module: nn.Module) -> tuple[str, float] | Skip | None:
    """The name of a norm's epsilon and what is added to its weight. One weight, one epsilon, nothing else."""
    if set(module._parameters) != {"weight"} or module._modules or module._buffers:
        return None
    eps = next((e for e in EPSILONS if isinstance(getattr(module, e, None), float)), None)
    if module.weight is None or module.weight.dim() != 1 or eps is None or argument(type(module).forward) is None:
        return None
    draw, width = Source(device_of(module)), module.weight.shape[0]
    made, tokens = twin(module, {"weight": draw.tensor(width)}, {}), draw.tokens(4, width)
    words = [compared(normed(eps, o, ignore), type(module).forward, EXACT, made, tokens) for o in OFFSETS]
    if None not in words:
        return Skip(f"not rms_norm: {words[0]}", failed="rms" in type(module).__name__.lower())
    return eps, OFFSETS[words.index(None)]


def normed(eps: str, offset: float, count: Count) -> Callable[[nn.Module, Tensor], Tensor]:
    def compute(self: nn.Module, x: Tensor) -> Tensor:
        count("rms_norm")
        return rms_norm.function(x, self.weight, getattr(self, eps), weight_offset=offset)

    return compute


def norm(name: str, module: nn.Module) -> Found | Skip | None:
    found = norm_of(module)
    if not isinstance(found, tuple):
        return found
    x = argument(type(module).forward)
    return Found("rms_norm", lambda count: [bound(module, taking(x, normed(*found, count)))])


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
    words = compared(computing(ignore), type(module).forward, PRODUCTS, made, tokens)
    if words is not None:
        return Skip(f"not down(glu(gate, up)): {words}", failed=not words.startswith(UNRUN))
    op = {nn.Linear: "glu_linear", Fp8Linear: "glu_linear_fp8"}.get(type(module.down_proj), "glu")
    return Found(op, lambda count: [bound(module, taking(x, computing(count)))])


# ---- rotary embedding ---------------------------------------------------------------------------------------------------

ROTARY = "apply_rotary_pos_emb"  # and names that begin so
ARGUMENTS = ("q", "k", "cos", "sin")
MORE = (("unsqueeze_dim",), ("position_ids", "unsqueeze_dim"))
LAYOUTS = {1: "bhsd", 2: "bshd"}  # by where the heads are


class Turn(NamedTuple):
    """How a function turns: which columns are pairs, how often tables have each angle, and whether pairs leave as halves."""

    pairing: str
    times: int
    split: bool = False


TURNS = (Turn("half", 2), Turn("interleaved", 2), Turn("half", 1), Turn("interleaved", 2, split=True))


def halves(x: Tensor) -> Tensor:
    """Columns (2k, 2k + 1) at k and k + n / 2."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def turning(original: Callable, kind: Turn, count: Count) -> Callable:
    """A function like `apply_rotary_pos_emb` over `rope`. Tables that have the angles twice have them in two halves, whatever the
    pairs are. What has no batch or no heads goes to the original."""
    more = [*inspect.signature(original).parameters][len(ARGUMENTS) :]

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        given = {**dict(zip(more, rest)), **named}
        heads = given.get("unsqueeze_dim", 1)
        if heads not in LAYOUTS or q.dim() != 4 or cos.dim() != 3 or given.get("position_ids") is not None:
            return original(q, k, cos, sin, *rest, **named)
        count("rope")
        pairs = cos.shape[-1] // kind.times
        # Heads seen before the sequence lie after it in memory, and results should too: attention's result is laid out as its
        # queries are, and in another order would be copied, and kept, for the next layer
        swapped = heads == 1 and q.stride(1) < q.stride(2)
        if swapped:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        options = {"layout": LAYOUTS[2 if swapped else heads], "rotary_dim": 2 * pairs, "pairing": kind.pairing}
        made = rope.function(q, k, cos[..., :pairs], sin[..., :pairs], **options)
        made = (halves(t) for t in made) if kind.split else made
        return tuple(t.transpose(1, 2) if swapped else t for t in made)

    return turn


def same_turn(function: Callable, kind: Turn, device: torch.device) -> str | None:
    """Why a function is not this turn, or None. One that knows no heads wider than what is turned fails on those."""
    draw, pairs, words = Source(device), 4, None
    angles = torch.cat([draw.tensor(2, 3, pairs)] * kind.times, -1)
    for width in (2 * pairs, 3 * pairs):
        given = draw.tensor(2, 2, 3, width), draw.tensor(2, 1, 3, width), angles.cos(), angles.sin()
        words = compared(turning(function, kind, ignore), function, EXACT, *given)
        if words is not None:
            return None if width > 2 * pairs and words.startswith(UNRUN) else words
    return None


def turn_of(name: str, function: Callable, device: torch.device) -> Turn | str:
    """Which of `TURNS` a function is, or why none."""
    taken = inspect.signature(function).parameters
    if [*taken] not in ([*ARGUMENTS, *more] for more in MORE) or taken["unsqueeze_dim"].default != 1:
        return f"{name} takes other arguments than {', '.join(ARGUMENTS)}, unsqueeze_dim=1"
    words = [same_turn(function, turn, device) for turn in TURNS]
    return TURNS[words.index(None)] if None in words else f"{name} turns otherwise: {words[0]}"


def rotary(name: str, module: nn.Module) -> Found | Skip | None:
    """A forward that calls global functions of such names gets a copy of itself that sees ours under the names."""
    forward = type(module).forward
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType):
        return None
    called = [n for n in plain.__code__.co_names if n.startswith(ROTARY)]
    if not called:
        return None
    if forward is not plain:
        return Skip("its forward is decorated")
    originals = {n: plain.__globals__[n] for n in called}
    turns = {n: turn_of(n, original, device_of(module)) for n, original in originals.items()}
    for turn in turns.values():
        if isinstance(turn, str):
            return Skip(turn)

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        ours = {n: turning(original, turns[n], count) for n, original in originals.items()}
        # Without a __name__ torch.compile takes globals from this scope and not from the module of that name
        scope = {k: v for k, v in plain.__globals__.items() if k != "__name__"} | ours
        made = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
        made.__kwdefaults__ = plain.__kwdefaults__
        return [bound(module, made)]

    return Found("rope", changes)


# ---- linear layers in FP8 --------------------------------------------------------------------------------------------------

LEAST, MULTIPLE = 1024, 128  # sizes from which FP8 products gain more than the casts cost, and the block of a scale
OUTSIDE = ("lm_head", "embed_out", "score", "classifier", "router", "gate")  # too sensitive, or too narrow


class Fp8Linear(Linear):
    """A `torch.nn.Linear` whose class was changed to this one."""

    def forward(self, x: Tensor) -> Tensor:
        self.count("linear_fp8")
        return super().forward(x.to(autocast_dtype(x) or x.dtype))  # the weight keeps its dtype, and so its codes


def linear(name: str, module: nn.Module) -> Found | Skip | None:
    """A plain linear layer of the middle of the model, large enough in both directions."""
    if not isinstance(module, nn.Linear):
        return None
    if type(module) is not nn.Linear:
        return Skip(f"it is a {type(module).__name__}")
    if name.removesuffix(".base_layer").rpartition(".")[2] in OUTSIDE:  # adapters keep what they adapt under that name
        return Skip("the head and routers stay as they are")
    sizes = module.out_features, module.in_features
    if min(sizes) < LEAST or any(size % MULTIPLE for size in sizes):
        return Skip(f"sizes are not both multiples of {MULTIPLE} from {LEAST} on")
    # The input lies there anyway: projections of attention share theirs, and attention keeps its result. Codes of each are more
    attributes = {"__class__": Fp8Linear, "keep": "input", "main_grad": False}

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        given = {**attributes, "codes": KeptCodes(), "count": count}
        return [(module, attribute, value) for attribute, value in given.items()]

    return Found("linear_fp8", changes)
