"""The loss of a causal language model without its logits.

The model's own forward runs on a shadow of it: an instance of the same class with the same attributes and children, but for the
head, which passes hidden states through, and the loss function, which takes them for what they are. So auxiliary losses, scalings
of logits and outputs stay the model's own. Of a softcap, which is not linear, the shadow's head knows the curve, and keeps hidden
states aside for the loss: what the model makes of those that passed through is of no use then.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.loss.cross_entropy import cross_entropy
from ...ops.loss.linear_cross_entropy import linear_cross_entropy
from .logit_curve import HEAD, OWN_LOSS, WIDTH, Curve, arguments, curve_of, vocabulary, with_answers
from .probe import PRODUCTS, UNRUN, Source, compared, device_of, shallow
from .report import RESTS, changed, rests
from .roles import Count, Found, Skip, alike, bound, ignore

SHADOW = "_tilewright_shadow"
LOSSES = ("linear_cross_entropy", "cross_entropy")


def shifted(labels: Tensor, shift_labels: Tensor | None, ignore_index: int, device: torch.device) -> Tensor:
    """The label that each position is to predict, in one row."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1).to(device)


def averaged(loss: Tensor, items: Tensor | int | None) -> Tensor:
    """A sum over the labels of one micro-batch, divided by those of all."""
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def head_loss(head: nn.Module, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
    x, weight = alike(hidden.reshape(-1, hidden.shape[-1]), head.weight)
    return linear_cross_entropy.function(x, weight, labels, head.bias, **options)


def head_forward(self: nn.Module, x: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
    """The head's own forward; with labels the loss. It is called as a module, for the sake of what gathers its weight then."""
    return F.linear(x, self.weight, self.bias) if labels is None else head_loss(self, x, labels, **options)


class Passing(nn.Module):
    """The head of a shadow, with the attributes of the model's. With a softcap it keeps what it passes on until the loss takes
    it."""

    def __init__(self, model: nn.Module, curve: Curve) -> None:
        super().__init__()
        self.__dict__["model"] = model  # which is no child
        self.curve = curve
        self.kept: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        if "model" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.__dict__["model"]._modules[HEAD], name)

    def forward(self, x: Tensor) -> Tensor:
        if self.curve.softcap is not None:
            self.kept[:] = [x]
        return x

    def taken(self, passed: Tensor) -> Tensor:
        """The hidden states, scaled as the logits are, from what the loss function was given."""
        if self.curve.softcap is None:
            return passed
        x = self.kept.pop()
        return x if self.curve.scale == 1 else x * self.curve.scale


def hidden_loss(count: Count) -> Callable:
    """Like transformers' `ForCausalLMLoss`, of hidden states."""

    def loss(
        self: nn.Module, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        count("linear_cross_entropy")
        head, passing = self._modules[HEAD], self.__dict__[SHADOW]._modules[HEAD]
        hidden, y = passing.taken(logits), shifted(labels, shift_labels, ignore_index, logits.device)
        options = {
            "ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum",
            "softcap": passing.curve.softcap,
        }  # fmt: skip
        if "forward" in head.__dict__:
            made = head(hidden, labels=y, **options)
        elif type(head).forward is nn.Linear.forward:  # resize_token_embeddings makes a new one, which knows no labels
            made = head_loss(head, hidden, y, **options)
        else:
            raise ValueError(
                f"patch: the head became a {type(head).__name__} after the patch: unpatch, and patch again"
            )
        return averaged(made, num_items_in_batch)

    return loss


def logits_loss(count: Count) -> Callable:
    """transformers' `ForCausalLMLoss` over `cross_entropy`."""

    def loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        count("cross_entropy")
        y = shifted(labels, shift_labels, ignore_index, logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        made = cross_entropy.function(logits.reshape(-1, vocab_size), y, ignore_index=ignore_index, reduction=reduction)
        return averaged(made, num_items_in_batch)

    return loss


def shadow_of(model: nn.Module, curve: Curve, count: Count) -> nn.Module:
    made = shallow(model)
    made.__dict__["_modules"] = {**model._modules, HEAD: Passing(model, curve)}
    made.__dict__["_loss_function"] = MethodType(hidden_loss(count), model)
    return made


def without_logits(output: Any) -> Any:
    """An output whose logits are None; in a tuple, where they are the first tensor that is no number, None in their place."""
    if not isinstance(output, tuple):
        if "logits" not in output:  # under another name they would be handed out
            raise ValueError(f"patch: a {type(output).__name__} has no logits")
        return type(output)(**{k: v for k, v in output.items() if k != "logits"})
    at = next(i for i, part in enumerate(output) if isinstance(part, Tensor) and part.dim() > 1)
    return *output[:at], None, *output[at + 1 :]


def causal_forward(original: Callable) -> Callable:
    """The forward of a model: with labels, in training, that of its shadow, as long as it has one."""
    place = [*inspect.signature(original).parameters].index("labels") - 1

    def forward(self: nn.Module, *given: Any, return_logits: bool = False, **named: Any) -> Any:
        labels = given[place] if len(given) > place else named.get("labels")
        shadow = self.__dict__.get(SHADOW)
        if labels is None or return_logits or not self.training or shadow is None:
            return original(self, *given, **named)
        return without_logits(original(shadow, *given, **named))

    setattr(forward, RESTS, True)
    return forward


def loss(name: str, module: nn.Module, kind: str) -> Found | Skip | None:
    """A model with a linear head whose loss function is transformers' for causal language models."""
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    original = type(module).forward
    if not isinstance(module, PreTrainedModel) or HEAD not in module._modules:
        return None
    if "labels" not in inspect.signature(original).parameters:
        return None
    if module.loss_function is not ForCausalLMLoss:
        return Skip("its loss function is not ForCausalLMLoss")
    head = module._modules[HEAD]
    if getattr(type(head), "forward", None) is not nn.Linear.forward or changed(head):
        return Skip(f"its head is not a plain linear layer but {type(head).__name__}")
    curve = curve_of(module, original)
    if curve == OWN_LOSS:
        return Skip(curve)
    if kind == "cross_entropy":
        return Found(kind, lambda count: [(module, "_loss_function", logits_loss(count))])
    words = curve if isinstance(curve, str) else probed(module, original, curve)
    if words is not None:
        causal = type(module).__name__.endswith("ForCausalLM")
        return Skip(f"not linear_cross_entropy: {words}", failed=causal or not words.startswith(UNRUN))

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        made = [(module, SHADOW, shadow_of(module, curve, count)), (head, "forward", MethodType(head_forward, head))]
        return made if rests(module) else [*made, bound(module, causal_forward(original))]

    return Found(kind, changes)


def probed(module: nn.Module, original: Callable, curve: Curve) -> str | None:
    """Why the loss by a shadow, or a gradient of it, is not the model's own: of a few tokens and a narrow head, with logits of
    about 1 and of hundreds, in both modes."""
    draw, vocab = Source(device_of(module)), vocabulary(module)
    labels = draw.integers(2, 4, high=vocab)
    labels[0, 2] = -100
    for training, size in itertools.product((True, False), (1, 64)):
        # Small integers, whose products no GPU rounds: of large logits a rounded one would be another loss
        hidden = (draw.integers(2, 4, WIDTH, high=7).float() - 3).requires_grad_()
        head = draw.linear(WIDTH, vocab, module._modules[HEAD].bias is not None)
        head.weight = nn.Parameter((draw.integers(vocab, WIDTH, high=9).float() - 4) * (size / 8))
        made = with_answers(module, head, hidden, training=training)
        made.__dict__[SHADOW] = shadow_of(made, curve, ignore)
        run = partial(loss_and_gradients, made, arguments(module, labels), [hidden, *head.parameters()])
        words = compared(partial(run, causal_forward(original)), partial(run, original), PRODUCTS)
        if words is not None:
            return words
    return None


def loss_and_gradients(model: nn.Module, named: dict, wanted: list[Tensor], forward: Callable) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        loss = forward(model, **named)[0]
        return loss.detach(), *torch.autograd.grad(loss, wanted)
