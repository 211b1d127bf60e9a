"""TRL's fused head over `linear_cross_entropy`.

TRL's SFT trainer puts a forward of its own over the model's as it is made. Called with `fused_lm_head=True`, that runs the model's
body and returns log-probabilities of the labels and, for what it logs, the entropy of the logits and whether the label is the
likeliest. Ours comes over it while training runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .causal_loss import head_forward, heard
from .logit_curve import HEAD, Curve, curve_of
from .report import PatchReport, Replaced, Skipped, changed
from .roles import Count

ASKED = "fused_lm_head"
LOGITS = 1 << 26  # how many are looked at together


def asks(module: nn.Module) -> bool:
    """Whether TRL's forward is on a module, under accelerate's or not."""
    forward = module.__dict__.get("forward")
    while forward is not None:
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None and ASKED in code.co_varnames:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def watched(head: nn.Module, x: Tensor, labels: Tensor, curve: Curve) -> tuple[Tensor, Tensor]:
    """Of each row of `x`, the entropy of its logits and whether the label is the likeliest, some rows at a time."""
    entropy, top = torch.zeros(labels.shape, device=x.device), torch.zeros_like(labels, dtype=torch.bool)
    rows = max(1, LOGITS // head.weight.shape[0])
    with torch.no_grad():
        for at in range(0, len(labels), rows):
            part = slice(at, at + rows)
            z = curve.of(head(x[part]).float())
            logs = z.log_softmax(-1)
            entropy[part] = -(logs.exp() * logs).sum(-1)
            top[part] = z.argmax(-1) == labels[part]
    counted = labels != -100
    return entropy * counted, top & counted


def balance(model: nn.Module, routed: Any, mask: Tensor | None) -> Tensor:
    """The load-balancing loss that every mixture of experts in transformers has, as TRL computes it."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    return load_balancing_loss_func(routed, config.num_experts, config.num_experts_per_tok, mask)


def token_forward(below: Callable, curve: Curve, count: Count, precision: torch.dtype | None) -> Callable:
    """A forward for calls with `fused_lm_head=True`; others go `below`. Accelerate's autocast, in `precision`, is below too."""
    from trl.trainer.utils import FusedCausalLMOutput

    def forward(
        self: nn.Module, *given: Any, fused_lm_head: bool = False, labels: Tensor | None = None,
        shift_labels: Tensor | None = None, num_items_in_batch: Tensor | int | None = None, **named: Any,
    ) -> Any:  # fmt: skip
        if not fused_lm_head:
            asked = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return below(*given, **{k: v for k, v in asked.items() if v is not None}, **named)
        head = self._modules[HEAD]
        if heard(head):  # what it returns would be losses
            asked = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return below(*given, fused_lm_head=True, **asked, **named)
        config, device = self.config.get_text_config(), head.weight.device
        if getattr(config, "output_router_logits", False):
            named.setdefault("output_router_logits", True)
        router = named.get("output_router_logits", False)
        with nullcontext() if precision is None else torch.autocast(device.type, precision):
            out = self.base_model(*given, **{**named, "use_cache": False})
            hidden, y = out.last_hidden_state.to(device), shift_labels
            if y is None:
                hidden, y = hidden[:, :-1], labels[:, 1:]
            y = y.to(device)
            x, flat = hidden.reshape(-1, hidden.shape[-1]), y.reshape(-1)
            count("linear_cross_entropy")
            scaled = x if curve.scale == 1 else x * curve.scale
            losses = head(scaled, labels=flat, reduction="none", softcap=curve.softcap)
            entropy, top = watched(head, x.detach(), flat, curve)
        loss = losses.sum() / ((flat != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        aux = balance(self, out.router_logits, named.get("attention_mask")) if router else None
        if router:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux
        return FusedCausalLMOutput(
            loss=loss, log_probs=-losses.view(y.shape), entropy=entropy.view(y.shape), is_top1=top.view(y.shape),
            label_mask=y != -100, aux_loss=aux,
        )  # fmt: skip

    return forward


def reach(model: nn.Module, report: PatchReport, count: Count, precision: torch.dtype | None) -> None:
    """Put our forward over TRL's, as a part of the patch, where the head is one that the op can stand for."""
    for name, module in model.named_modules():
        if not asks(module):
            continue
        head = module._modules.get(HEAD)
        if type(head) is nn.Linear and not changed(head):
            curve = curve_of(module, type(module).forward)
        else:
            curve = f"its head is not a plain linear layer but {type(head).__name__}"
        if isinstance(curve, Curve) and curve.scale != 1 and head.bias is not None:
            curve = "its logits are scaled after a bias"
        if isinstance(curve, str):
            report.skipped.append(Skipped("loss", name, f"TRL's own: {curve}"))
            continue
        forward = token_forward(module.__dict__["forward"], curve, count, precision)
        report.set(head, "forward", MethodType(head_forward, head))
        report.set(module, "forward", MethodType(forward, module))
        report.replaced.append(Replaced("loss", name, "linear_cross_entropy"))
