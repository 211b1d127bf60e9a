"""The loss of a causal language model without its logits.

The model's own forward runs on a shadow of it: an instance of the same class with the same attributes and children, but for the
head, which passes hidden states through, and the loss function, which takes them for what they are. So auxiliary losses, scalings
of logits and outputs stay the model's own. Of a softcap, which is not linear, the shadow's head knows the curve, and keeps hidden
states aside for the loss: what the model makes of those that passed through is of no use then. Each call has a shadow of its own,
with what the model has at that time.
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
from torch.nn.modules import module as _module

from ...ops.loss.cross_entropy import cross_entropy
from ...ops.loss.linear_cross_entropy import linear_cross_entropy
from .logit_curve import HEAD, OWN_LOSS, WIDTH, Curve, arguments, curve_of, vocabulary, with_answers
from .probe import PRODUCTS, UNRUN, Source, compared, device_of, shallow
from .report import RESTS, changed, own_forward, rests
from .roles import Count, Found, Skip, alike, bound, ignore

SHADOW = "_tilewright_shadow"
LOSSES = ("linear_cross_entropy", "cross_entropy")
NUMBERS = (bool, int, float, str, type(None))  # types of attributes that no tensor of a call is in
STATES = 64  # of a model whose numbers change, as many as a schedule may come back to
KEEPS = "its forward keeps more than numbers in the model"


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
    """The head of a shadow, with the attributes of the model's, and its loss function. With a softcap it keeps what it passes on
    until the loss takes it."""

    def __init__(self, model: nn.Module, curve: Curve, count: Count) -> None:
        super().__init__()
        self.__dict__["model"] = model  # which is no child
        self.curve, self.count = curve, count
        self.kept: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
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

    def loss(
        self, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Like transformers' `ForCausalLMLoss`, of hidden states."""
        self.count("linear_cross_entropy")
        head = self.__dict__["model"]._modules[HEAD]
        hidden, y = self.taken(logits), shifted(labels, shift_labels, ignore_index, logits.device)
        options = {
            "ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum",
            "softcap": self.curve.softcap,
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


def gathers(hook: Any) -> bool:
    """Whether a hook is FSDP's, which is told the loss as well as logits."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


def heard(head: nn.Module) -> bool:
    """Whether someone else is told, or changes, what a head returns or the gradient of that, which must then be logits. Who looks
    at what it is given may do so."""
    if _module._global_forward_hooks or _module._global_backward_hooks or _module._global_backward_pre_hooks:
        return True
    own = own_forward(head)
    if own is not None and getattr(own, "__func__", None) is not head_forward:
        return True
    hooked = (head._forward_hooks, head._backward_hooks, head._backward_pre_hooks)
    return any(not gathers(hook) for hooks in hooked for hook in hooks.values())


def shadow_of(model: nn.Module, curve: Curve, count: Count) -> nn.Module:
    made, passing = shallow(model), Passing(model, curve, count)
    made.__dict__["_modules"] = {**model._modules, HEAD: passing}
    made.__dict__["_loss_function"] = passing.loss
    return made


class Shadows:
    """Makes the shadows of a model. A coefficient that was 0 at the patch may be set later, so that what becomes of logits is
    measured again when a number that the model's forward reads has another value."""

    def __init__(self, model: nn.Module, original: Callable, curve: Curve, count: Count) -> None:
        self.original, self.count, self.function = original, count, model.loss_function
        read = names_read(type(model)) - {"training"}
        self.own, self.configured = (
            tuple(n for n in sorted(read) if type(getattr(holder, n, ...)) in NUMBERS)
            for holder in (model, model.config)
        )
        self.known: dict[tuple, Curve | None] = {self.state(model): curve}

    def state(self, model: nn.Module) -> tuple:
        config = model.config
        values = [getattr(model, n, None) for n in self.own] + [getattr(config, n, None) for n in self.configured]
        return tuple(v if type(v) in NUMBERS else type(v).__name__ for v in values)

    def curve(self, model: nn.Module) -> Curve | None:
        """What becomes of the logits of a model as it is now, or None if they must be made."""
        if heard(model._modules[HEAD]) or model.loss_function is not self.function:
            return None
        state = self.state(model)
        if state not in self.known and not torch.compiler.is_compiling():
            self.keep(state, measured(model, self.original))
        return self.known.get(state)

    def keep(self, state: tuple, found: Curve | str) -> None:
        if len(self.known) >= STATES:
            self.known = {}
        self.known[state] = None if isinstance(found, str) else found

    def run(self, model: nn.Module, given: tuple, named: dict[str, Any]) -> Any:
        """What the model's forward returns, without logits where they need not be made."""
        curve = self.curve(model)
        if curve is None:
            return self.original(model, *given, **named)
        shadow = shadow_of(model, curve, self.count)
        before = {**shadow.__dict__}
        output = without_logits(self.original(shadow, *given, **named))
        written = {n: v for n, v in shadow.__dict__.items() if n not in before or before[n] is not v}
        if not all(type(value) in NUMBERS for value in written.values()):  # it may be of logits, which are not there
            self.keep(self.state(model), KEEPS)
            return self.original(model, *given, **named)
        model.__dict__.update(written)
        if any(n in written for n in self.own):  # what it counts itself says nothing of its logits
            self.own = tuple(n for n in self.own if n not in written)
            self.known = {self.state(model): curve}
        return output


def names_read(kind: type) -> set[str]:
    """Of attributes, among others, by the forward of a class and by those that it may call as its own."""
    forwards = (inspect.unwrap(base.__dict__["forward"]) for base in kind.__mro__ if "forward" in base.__dict__)
    return {name for forward in forwards for name in getattr(getattr(forward, "__code__", None), "co_names", ())}


def without_logits(output: Any) -> Any:
    """An output whose logits are None; in a tuple, where they are the first tensor that is no number, None in their place."""
    if not isinstance(output, tuple):
        if "logits" not in output:  # under another name they would be handed out
            raise ValueError(f"patch: a {type(output).__name__} has no logits")
        return type(output)(**{k: v for k, v in output.items() if k != "logits"})
    at = next(i for i, part in enumerate(output) if isinstance(part, Tensor) and part.dim() > 1)
    return *output[:at], None, *output[at + 1 :]


def causal_forward(original: Callable) -> Callable:
    """The forward of a model: with labels, in training, that of a shadow, as long as it has them."""
    place = [*inspect.signature(original).parameters].index("labels") - 1

    def forward(self: nn.Module, *given: Any, return_logits: bool = False, **named: Any) -> Any:
        labels = given[place] if len(given) > place else named.get("labels")
        shadows = self.__dict__.get(SHADOW)
        if labels is None or return_logits or not self.training or shadows is None:
            return original(self, *given, **named)
        return shadows.run(self, given, named)

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
    if kind == "cross_entropy":
        if curve_of(module, original) == OWN_LOSS:
            return Skip(OWN_LOSS)
        return Found(kind, lambda count: [(module, "_loss_function", logits_loss(count))])
    curve = measured(module, original)
    if curve == OWN_LOSS:
        return Skip(curve)
    if isinstance(curve, str):
        causal = type(module).__name__.endswith("ForCausalLM")
        return Skip(f"not linear_cross_entropy: {curve}", failed=causal or not curve.startswith(UNRUN))

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        shadows = Shadows(module, original, curve, count)
        made = [(module, SHADOW, shadows), (head, "forward", MethodType(head_forward, head))]
        return made if rests(module) else [*made, bound(module, causal_forward(original))]

    return Found(kind, changes)


def measured(module: nn.Module, original: Callable) -> Curve | str:
    """The curve of a model whose loss is that of its shadow, or in words why it is not."""
    with torch.inference_mode(False):  # whoever asks under it asks for no gradients, but a probe does
        curve = curve_of(module, original)
        words = None if isinstance(curve, str) else probed(module, original, curve)
    return curve if words is None else words


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
        shadows = made.__dict__[SHADOW] = Shadows(made, original, curve, ignore)
        run = partial(loss_and_gradients, made, arguments(module, labels), [hidden, *head.parameters()])
        words = compared(partial(run, causal_forward(original)), partial(run, original), PRODUCTS)
        if words is None and None in shadows.known.values():
            words = KEEPS
        if words is not None:
            return words
    return None


def loss_and_gradients(model: nn.Module, named: dict, wanted: list[Tensor], forward: Callable) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        loss = forward(shallow(model), **named)[0]  # which may count its calls
        return loss.detach(), *torch.autograd.grad(loss, wanted)
