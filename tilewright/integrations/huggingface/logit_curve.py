"""What a model's own code does between its head and its loss, found by running it.

The model's forward runs on a twin whose body hands out given hidden states and whose loss function only looks. What the head
returned beside what reached the loss, from a thousandth to thousands and of both signs, is the curve.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .probe import EXACT, UNRUN, Source, device_of, twin

HEAD, WIDTH = "lm_head", 8
MAGNITUDES = (1e-3, 1e-2, 1.0, 30.0, 300.0, 3e3, 3e4, 3e5)  # of hidden states: some below and some above any softcap
OWN_LOSS = "its forward does not call its loss_function"


class Curve(NamedTuple):
    """softcap * tanh(scale * z / softcap) of a head's result z; scale * z without a softcap."""

    scale: float
    softcap: float | None

    def of(self, z: Tensor) -> Tensor:
        return z * self.scale if self.softcap is None else self.softcap * torch.tanh(z * (self.scale / self.softcap))


class Answer(tuple):
    """The output of a body: hidden states first, and None for every field that someone may ask for."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


class StandIn(nn.Module):
    """In place of a child: called, it gives the answer; asked for anything else, it gives what the child has."""

    def __init__(self, child: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        self.__dict__.update(child=child, hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["child"], name)
        return StandIn(found, self.__dict__["hidden"]) if isinstance(found, nn.Module) else found

    def forward(self, *_: Any, **__: Any) -> Answer:
        return Answer([self.__dict__["hidden"]])


def with_answers(model: nn.Module, head: nn.Module, hidden: Tensor, **more: Any) -> nn.Module:
    """A twin of a model with this head, whose other children all answer with these hidden states."""
    children = {n: m if m is None else StandIn(m, hidden) for n, m in model._modules.items()}
    return twin(model, {}, {**children, HEAD: head}, **more)


def arguments(model: nn.Module, labels: Tensor) -> dict[str, Any]:
    """Of a call for the loss alone, as far as the model's forward takes them."""
    taken = inspect.signature(type(model).forward).parameters
    given = {"input_ids": labels.clamp(min=0), "labels": labels, "num_items_in_batch": 5}
    given |= {"output_router_logits": False, "use_cache": False}
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return given
    return {name: value for name, value in given.items() if name in taken}


def vocabulary(model: nn.Module) -> int:
    return model._modules[HEAD].out_features


def seen(model: nn.Module, forward: Callable, training: bool) -> tuple[Tensor, Tensor] | str:
    """What the head returned and what reached the loss, or why nothing did."""
    draw = Source(device_of(model))
    vocab = vocabulary(model)
    hidden, labels = draw.tensor(2, len(MAGNITUDES) // 2, WIDTH), draw.integers(2, len(MAGNITUDES) // 2, high=vocab)
    hidden *= torch.tensor(MAGNITUDES, device=hidden.device).view(2, -1, 1)
    head, made, reached = draw.linear(WIDTH, vocab, model._modules[HEAD].bias is not None), [], []
    if head.bias is not None:
        head.bias.data *= MAGNITUDES[0]
    head.register_forward_hook(lambda module, given, result: made.append(result.clone()))  # it may be written to

    def look(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        reached.append(logits)
        return logits.new_zeros(())

    copy = with_answers(model, head, hidden, training=training, _loss_function=look)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        try:
            forward(copy, **arguments(model, labels))
        except Exception as error:
            return f"{UNRUN}: {type(error).__name__}: {error}"
    if not reached:
        return OWN_LOSS
    if len(made) != 1 or len(reached) != 1:
        return f"its forward calls its head {len(made)} and its loss_function {len(reached)} times"
    if made[0].shape != reached[0].shape:
        return f"of logits {list(made[0].shape)} it hands {list(reached[0].shape)} to the loss"
    return made[0], reached[0].to(made[0].dtype)


def curve_of(model: nn.Module, forward: Callable) -> Curve | str:
    """The curve, or in words why there is none."""
    found = None
    for training in (True, False):
        points = seen(model, forward, training)
        if isinstance(points, str):
            return points
        z, logits = (t.reshape(len(MAGNITUDES), -1) for t in points)
        if found is None:
            found = fitted(z, logits)
        # Row by row, for the magnitudes lie far apart
        error = (found.of(z) - logits).abs().amax(1) / logits.abs().amax(1)
        if not (error < 10 * EXACT).all():
            mode = "training" if training else "evaluation"
            return f"between head and loss, in {mode}, its logits are more than scaled and softcapped"
    return found


def fitted(z: Tensor, logits: Tensor) -> Curve:
    """The slope at 0, and what large values come to if that is less than the slope says."""
    slope = (logits[0] / z[0]).median().item()
    if math.isclose(slope, float(f"{slope:.3g}"), rel_tol=2e-7):  # fp32's last digit is noise
        slope = float(f"{slope:.3g}")
    most, straight = logits[-1].abs().max().item(), abs(slope) * z[-1].abs().max().item()
    return Curve(slope, None if most > straight / 2 else most)
