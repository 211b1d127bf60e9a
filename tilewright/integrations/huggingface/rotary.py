"""Rotary embeddings: what attention calls under a name like `apply_rotary_pos_emb`, by `rope`."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.rotary.rope import rope
from .probe import EXACT, UNRUN, Source, compared, device_of
from .roles import Count, Found, Skip, bound, ignore

ROTARY = "apply_rotary_pos_emb"  # and names that begin so
ARGUMENTS = ("q", "k", "cos", "sin")
MORE = (("unsqueeze_dim",), ("position_ids", "unsqueeze_dim"))
LAYOUTS = {1: "bhsd", 2: "bshd"}  # by where the heads are
EMBEDDING = "RotaryEmbedding"  # in the names of classes that make cosines and sines of positions
AXES = ((), (2,), (3,), (4,))  # a token has one position, or one on each of these many: time, height, width


class Rotation(NamedTuple):
    """How a function rotates: which columns are pairs, how often tables have each angle, and whether pairs leave as halves."""

    pairing: str
    times: int
    split: bool = False


ROTATIONS = (
    Rotation("half", 2),
    Rotation("interleaved", 2),
    Rotation("half", 1),
    Rotation("interleaved", 2, split=True),
)


def halves(x: Tensor) -> Tensor:
    """Columns (2k, 2k + 1) at k and k + n / 2."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def rotating(original: Callable, kind: Rotation, count: Count) -> Callable:
    """A function like `apply_rotary_pos_emb` over `rope`. Tables that have the angles twice have them in two halves, whatever the
    pairs are. What has no batch or no heads goes to the original."""
    more = [*inspect.signature(original).parameters][len(ARGUMENTS) :]

    def rotate(
        q: Tensor,
        k: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *rest: Any,
        **named: Any,
    ):
        if k is None:  # some turn queries alone by the same function
            return original(q, k, cos, sin, *rest, **named)
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

    return rotate


def same_rotation(function: Callable, kind: Rotation, device: torch.device) -> str | None:
    """Why a function is not this rotation, or None. One that knows no heads wider than what is rotated fails on those."""
    draw, pairs, words = Source(device), 4, None
    angles = torch.cat([draw.tensor(2, 3, pairs)] * kind.times, -1)
    for width in (2 * pairs, 3 * pairs):
        given = draw.tensor(2, 2, 3, width), draw.tensor(2, 1, 3, width), angles.cos(), angles.sin()
        words = compared(rotating(function, kind, ignore), function, EXACT, *given)
        if words is not None:
            return None if width > 2 * pairs and words.startswith(UNRUN) else words
    return None


def tables_of(module: nn.Module, scope: dict[str, Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Cosines and sines of random positions as each class of rotary embeddings in the file of an attention makes them for its
    config, and the name of the class. What cannot be made so, or not of such positions, is left out."""
    draw, config = Source(torch.device("cpu")), getattr(module, "config", None)
    layers = sorted({*(getattr(config, "layer_types", None) or ())})
    for kind in [*scope.values()]:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module) and EMBEDDING in kind.__name__):
            continue
        typed = "layer_type" in inspect.signature(kind.forward).parameters  # which have tables for each type of layer
        for axes, more in itertools.product(AXES, [{"layer_type": t} for t in layers] if typed else [{}]):
            try:
                with draw.device, torch.no_grad():
                    made = kind(copy.deepcopy(config))(
                        draw.tensor(2, 5, 8), draw.integers(*axes, 2, 5, high=64), **more
                    )
            except Exception:
                continue
            # One that knows no axes may have made tables for each
            if isinstance(made, tuple) and len(made) == 2 and all(isinstance(t, Tensor) and t.dim() == 3 for t in made):
                yield kind.__name__, *made


def same_tables(function: Callable, kind: Rotation, module: nn.Module, scope: dict[str, Any]) -> str | None:
    """Why a function that is this rotation of tables which have each angle twice is not with those that it is given, or None.
    Embeddings of positions on several axes may take the two from different axes."""
    for name, cos, sin in tables_of(module, scope):
        draw, width = Source(cos.device), 2 * (cos.shape[-1] // kind.times)
        given = draw.tensor(2, 2, 5, width), draw.tensor(2, 1, 5, width), cos, sin
        words = compared(rotating(function, kind, ignore), function, EXACT, *given)
        if words is not None and not words.startswith(UNRUN):
            return f"rotates otherwise by tables of {name}: {words}"
    return None


def rotation_of(name: str, function: Callable, device: torch.device) -> Rotation | str:
    """Which of `ROTATIONS` a function is, or why none."""
    taken = inspect.signature(function).parameters
    if [*taken] not in ([*ARGUMENTS, *more] for more in MORE) or taken["unsqueeze_dim"].default != 1:
        return f"{name} takes other arguments than {', '.join(ARGUMENTS)}, unsqueeze_dim=1"
    words = [same_rotation(function, rotation, device) for rotation in ROTATIONS]
    return ROTATIONS[words.index(None)] if None in words else f"{name} rotates otherwise: {words[0]}"


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
    rotations = {n: rotation_of(n, original, device_of(module)) for n, original in originals.items()}
    for n, rotation in rotations.items():
        if isinstance(rotation, str):
            return Skip(rotation)
        words = same_tables(originals[n], rotation, module, plain.__globals__)
        if words is not None:
            return Skip(f"{n} {words}")

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        ours = {n: rotating(original, rotations[n], count) for n, original in originals.items()}
        # Without a __name__ torch.compile takes globals from this scope and not from the module of that name
        scope = {k: v for k, v in plain.__globals__.items() if k != "__name__"} | ours
        made = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
        made.__kwdefaults__ = plain.__kwdefaults__
        return [bound(module, made)]

    return Found("rope", changes)
