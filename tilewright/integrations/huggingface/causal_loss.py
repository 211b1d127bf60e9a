"""The loss of a causal language model without its logits.

The model's own forward runs on a shadow of it: an instance of the same class with the same attributes and children, but for the
head, which passes hidden states through, and the loss function, which takes them for what they are. So auxiliary losses, scalings
of logits and outputs stay the model's own; of a softcap, which is not linear, the shadow's config says none, and the loss knows it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.loss.cross_entropy import cross_entropy
from ...ops.loss.linear_cross_entropy import linear_cross_entropy
from .probe import PRODUCTS, UNRUN, Source, compared, device_of, shallow, twin
from .report import RESTS, changed, rests
from .roles import Count, Found, Skip, alike, bound, ignore

HEAD, SOFTCAP, SHADOW = "lm_head", "final_logit_softcapping", "_tilewright_shadow"
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


def hidden_loss(count: Count) -> Callable:
    """Like transformers' `ForCausalLMLoss`, of hidden states."""

    def loss(
        self: nn.Module, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        count("linear_cross_entropy")
        head, y = self._modules[HEAD], shifted(labels, shift_labels, ignore_index, logits.device)
        options = {
            "ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum",
            "softcap": getattr(self.config, SOFTCAP, None),
        }  # fmt: skip
        if "forward" in head.__dict__:
            made = head(logits, labels=y, **options)
        elif type(head).forward is nn.Linear.forward:  # resize_token_embeddings makes a new one, which knows no labels
            made = head_loss(head, logits, y, **options)
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


def shadow_of(model: nn.Module, count: Count) -> nn.Module:
    made = shallow(model)
    made.__dict__["_modules"] = {**model._modules, HEAD: nn.Identity()}
    made.__dict__["_loss_function"] = MethodType(hidden_loss(count), model)
    if getattr(model.config, SOFTCAP, None) is not None:
        made.__dict__["config"] = copy.copy(model.config)
        setattr(made.config, SOFTCAP, None)
    return made


def causal_forward(original: Callable) -> Callable:
    """The forward of a model: with labels, in training, that of its shadow, as long as it has one."""
    place = [*inspect.signature(original).parameters].index("labels") - 1

    def forward(self: nn.Module, *given: Any, return_logits: bool = False, **named: Any) -> Any:
        labels = given[place] if len(given) > place else named.get("labels")
        shadow = self.__dict__.get(SHADOW)
        if labels is None or return_logits or not self.training or shadow is None:
            return original(self, *given, **named)
        asked = named.pop("return_dict", None)
        output = original(shadow, *given, return_dict=True, **named)
        output = type(output)(**{k: v for k, v in output.items() if k != "logits"})
        return output if (self.config.return_dict if asked is None else asked) else output.to_tuple()

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
    if kind == "cross_entropy":
        return Found(kind, lambda count: [(module, "_loss_function", logits_loss(count))])
    head = module._modules[HEAD]
    if getattr(type(head), "forward", None) is not nn.Linear.forward or changed(head):
        return Skip(f"its head is not a plain linear layer but {type(head).__name__}")
    words = probed(module, original)
    if words is not None:
        causal = type(module).__name__.endswith("ForCausalLM")
        return Skip(f"not linear_cross_entropy: {words}", failed=causal or not words.startswith(UNRUN))

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        made = [(module, SHADOW, shadow_of(module, count)), (head, "forward", MethodType(head_forward, head))]
        return made if rests(module) else [*made, bound(module, causal_forward(original))]

    return Found(kind, changes)


def probed(module: nn.Module, original: Callable) -> str | None:
    """Why the loss by a shadow is not the model's own, on random hidden states of a few tokens and a narrow head."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    draw, width, vocab = Source(device_of(module)), 8, module.config.get_text_config().vocab_size
    hidden, labels = draw.tensor(2, 4, width), draw.integers(2, 4, high=vocab)
    labels[0, 2] = -100

    class Body(nn.Module):
        def forward(self, *given: Any, **named: Any) -> Any:
            return MoeModelOutputWithPast(last_hidden_state=hidden)

    head = draw.linear(width, vocab, module._modules[HEAD].bias is not None)
    made = twin(module, {}, {**module._modules, module.base_model_prefix: Body(), HEAD: head}, training=True)
    made.__dict__[SHADOW] = shadow_of(made, ignore)
    ours, named = causal_forward(original), {"labels": labels, "num_items_in_batch": 5}
    if "output_router_logits" in inspect.signature(original).parameters:
        named["output_router_logits"] = False
    return compared(lambda: ours(made, **named).loss, lambda: original(made, **named).loss, PRODUCTS)
