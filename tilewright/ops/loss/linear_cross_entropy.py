"""Cross entropy of a linear layer's results, which are never held whole: x = hidden @ weight.T + bias, in fp32.

    z = x, or softcap * tanh(x / softcap);  loss and dx of z as in `cross_entropy`
    dhidden = dx @ weight;  dweight = dx.T @ hidden;  dbias = sum over tokens of dx

The products are torch's, but on Hopper that of the logits, which leave it as codes. The vocabulary goes by in chunks, as
`linear_cross_entropy_chunks.py` says, and what the forward computed is used again:

- No more tokens than hidden dimensions: their codes fit into the memory that dweight will have. The backward makes dx of them in
  place, dhidden of that, and then dweight chunk by chunk; nothing is rounded twice or held beside the gradients.
- More tokens, and one number as the loss: its gradients are made in the forward, a group of tokens at a time, in fp32, and the
  backward multiplies them by the loss's own. Beside them are the codes of one group. With several losses, a softcap, whose
  slope codes do not tell, or a weight so large that this would take more than AHEAD, logits are computed twice instead, but
  for those whose codes fit into the memory of dweight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from ...core.debug import check_labels
from ...core.draw import Draw
from ...core.private import last_backward
from ...core.signature import above, at_least, between
from ...core.tensor import cdiv, rows, vector
from ...gemm.hopper import logits as hopper_logits
from ...gemm.summed import product
from ...op import Bars, Cost, Gradient, Op, Triton, single, upcast
from ..norm.rms_norm import sum_columns
from .cross_entropy import cross_entropy_reduce, loss_row, losses, terms_of
from .linear_cross_entropy_chunks import (
    BLOCK_T,
    Tokens,
    affordable,
    chunks,
    codes_in,
    group_size,
    linear_cross_entropy_scale,
    padded_count,
    tokens_within,
    widened,
)
from .sharding import of_rows


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, ...]:
    """`cross_entropy(hidden @ weight.T + bias, labels)` without the memory of the logits; see there for the options.

    The logits are fp32, not rounded to the dtype of `hidden` and `weight`, which must be the same. The gradient of `weight`
    is summed over all tokens in fp32 and rounded once. If there are no more tokens than hidden dimensions it takes no memory
    beside its own, which an eager forward takes already and works in. Of more tokens an eager forward that ends in one number
    makes the gradients already, in fp32, if that takes 3.2 GB at most. Products of fp32 tensors follow
    `torch.set_float32_matmul_precision`.
    """
    logits = upcast(hidden) @ upcast(weight).t()
    if bias is not None:
        logits = logits + upcast(bias)
    loss, stats, denominator = losses(logits, labels, ignore_index, reduction, label_smoothing, softcap, z_loss, None)
    return loss, stats, denominator, hidden.new_empty(0), *(stats.new_empty(0) for _ in range(4))


def inputs(draw: Draw) -> dict:
    tokens, vocab = draw.dim("tokens"), draw.dim("vocab")
    ignore_index = draw.option("ignore_index", -100, 0)
    labels = draw.integers(tokens, high=vocab)
    ignored = draw.uniform(tokens, dtype=torch.float32) < draw.option("ignored", 0.25, 0.0, 1.0)
    return {
        "hidden": draw.tensor(tokens, "hidden"),
        "weight": draw.tensor(vocab, "hidden", scale=draw.option("weight_scale", 0.1, 0.5)),
        "labels": torch.where(ignored, ignore_index, labels).to(draw.option("index", torch.int64, torch.int32)),
        "bias": draw.maybe("bias", lambda: draw.tensor(vocab)),
        "ignore_index": ignore_index,
        "reduction": draw.option("reduction", "none", "mean", "sum"),
        "label_smoothing": draw.option("label_smoothing", 0.0, 0.1),
        "softcap": draw.option("softcap", None, 5.0),
        "z_loss": draw.option("z_loss", 0.0, 1e-2),
    }


# ---------------------------------------------------------------- on the host


def forward(hidden, weight, labels, bias, *, needs: frozenset, at_once: bool = False, **options) -> tuple[Tensor, ...]:
    a = SimpleNamespace(**options)
    stats = torch.empty(2, *labels.shape, dtype=torch.float32, device=hidden.device)
    M, N = labels.numel(), weight.shape[0]
    check_labels("linear_cross_entropy", labels, N, a.ignore_index)
    x, y = rows(hidden).contiguous(), vector(labels)
    tokens = Tokens(
        x, weight, vector(bias), y, stats.view(2, M), a.ignore_index, terms_of(a, N), wide=widened(x), at_once=at_once
    )  # fmt: skip
    loss, codes = tokens.empty(*labels.shape), tokens.empty(0, dtype=hidden.dtype)
    tops, none, *grads = (tokens.empty(0) for _ in range(5))
    if needs and in_groups(a, tokens):
        grads = losses_and_gradients(tokens, vector(loss), needs)
    elif "weight" in needs and a.softcap is None:
        codes = tokens.empty(*weight.shape, dtype=weight.dtype)
        tops = tokens.losses(loss, codes_in(codes, M))
    else:
        tokens.losses(loss, codes)
    if a.reduction == "none":
        return loss, stats, none, codes, tops, *grads
    reduced, denominator = tokens.empty(), tokens.empty() if a.reduction == "mean" else None
    cross_entropy_reduce(loss, y, None, reduced, denominator, M, max(M, 1), N, 0, 1, 0, a.ignore_index)
    return reduced, stats, none if denominator is None else denominator, codes, tops, *grads


def in_groups(a: SimpleNamespace, tokens: Tokens) -> bool:
    """Whether the forward makes gradients with the losses, one group of tokens after another."""
    (vocab, hidden), size = tokens.weight.shape, tokens.weight.element_size()
    if len(tokens) <= hidden or a.reduction == "none" or a.softcap is not None:
        return False
    return affordable(len(tokens), vocab, hidden, size)


def losses_and_gradients(tokens: Tokens, loss: Tensor, needs: frozenset) -> tuple[Tensor, Tensor, Tensor]:
    """Fill `loss`, and return the gradients of its sum, in fp32, empty where they are not needed."""
    weight, (count, width), M = tokens.weight, tokens.weight.shape, len(tokens)
    part = tokens.empty(cdiv(M, BLOCK_T), count) if "bias" in needs else None
    dhidden, dweight, dbias = (
        tokens.empty(*shape if name in needs else (0,))
        for name, shape in (("hidden", tokens.wide.shape), ("weight", weight.shape), ("bias", (count,)))
    )
    one = torch.ones((), dtype=torch.float32, device=weight.device)
    tokens = replace(tokens, grad=one, denominator=None, part=part)
    group = group_size(M, count, width, weight.element_size())
    memory = tokens.empty(count, padded_count(min(group, M)), dtype=weight.dtype)
    for start in range(0, M, group):
        some = tokens.some(start, min(start + group, M))
        some, stats = replace(some, stats=tokens.empty(2, len(some))), some.stats
        dx = memory[:, : len(some.wide)]
        tops = some.losses(loss[start : start + len(some)], dx)
        stats.copy_(some.stats)
        some.slopes(0, dx, tops, dx)
        if "hidden" in needs:
            product(dx.t(), weight, dhidden[start : start + len(some.wide)])
        if "weight" in needs:
            product(dx, some.wide, dweight, add=start > 0)
    if part is not None:
        sum_columns(part, dbias, part.shape[0], count)
    return dhidden, dweight, dbias


def weight_gradient(tokens: Tokens, codes: Tensor, tops: Tensor, dhidden: Tensor | None) -> Tensor:
    """Returns dweight, in the memory of the codes if there are any, and fills `dhidden` if it is given."""
    weight, count = tokens.weight, tokens.weight.shape[0]
    there = codes.numel() > 0
    dweight = codes if there else tokens.empty(*weight.shape, dtype=weight.dtype)
    first = codes_in(dweight, len(tokens))
    tokens.fill_first(first, tops if there else None)
    whole, total = first.shape[0] == count, dhidden
    if dhidden is not None:
        if not whole or len(tokens.wide) > len(tokens):
            total = tokens.empty(*tokens.wide.shape, dtype=dhidden.dtype if whole else torch.float32)
        product(first.t(), weight[: first.shape[0]], total)
    scratch = tokens.scratch(count, weight.dtype)
    for start, stop in chunks(len(tokens), 0, first.shape[0]):
        dx = scratch[: stop - start].copy_(first[start:stop])
        product(dx, tokens.wide, dweight[start:stop])
    for start, stop in chunks(len(tokens), first.shape[0], count):
        dx = scratch[: stop - start]
        tokens.fill(start, dx)
        if total is not None:
            product(dx.t(), weight[start:stop], total, add=True)
        product(dx, tokens.wide, dweight[start:stop])
    if total is not dhidden:
        dhidden.copy_(total[: len(tokens)])
    return dweight


def hidden_gradient(tokens: Tokens, dhidden: Tensor | None) -> None:
    """Fill `dhidden`, if it is given, and the bias's part for a weight that has no gradient.

    It goes by a few tokens at a time, so that each row of dhidden is one sum over the whole vocabulary.
    """
    weight, count = tokens.weight, tokens.weight.shape[0]
    group = tokens_within(count, weight.element_size())
    # Of few tokens the products are those that `weight_gradient` makes, strides included: then the bits are the same
    width = max(weight.shape[1], padded_count(len(tokens)))
    stride = width if width <= group else padded_count(min(group, len(tokens)))
    memory = tokens.empty(count, stride, dtype=weight.dtype)
    for start in range(0, len(tokens), group):
        some = tokens.some(start, min(start + group, len(tokens)))
        there = memory[:, : len(some.wide)]
        some.fill_first(there)
        if dhidden is not None:
            out = dhidden[start : start + len(some)]
            made = out if len(some.wide) == len(some) else some.empty(*some.wide.shape, dtype=out.dtype)
            product(there.t(), weight, made)
            if made is not out:
                out.copy_(made[: len(some)])


def scaled_gradient(made: Tensor, x: Tensor, tokens: Tokens) -> Tensor:
    """The gradient of x, made from the gradient `made` of the sum of all losses."""
    made = made.detach()
    out = made if made.dtype == x.dtype and last_backward() else torch.empty(made.shape, dtype=x.dtype, device=x.device)
    linear_cross_entropy_scale(made, tokens.grad, tokens.denominator, out, made.numel())
    return out.view(-1)[: x.numel()].view(x.shape)


def backward(saved: SimpleNamespace, dloss: Tensor, at_once: bool = False) -> tuple:
    hidden, weight, needs = saved.hidden, saved.weight, saved.needs
    M, N = saved.labels.numel(), weight.shape[0]
    x = rows(hidden).contiguous()
    tokens = Tokens(
        x, weight, vector(saved.bias), vector(saved.labels), saved.stats.reshape(2, M), saved.ignore_index,
        terms_of(saved, N), dloss if dloss.dim() == 0 else vector(dloss), saved.denominator if saved.reduction == "mean" else None,
        wide=widened(x), at_once=at_once,
    )  # fmt: skip
    if in_groups(saved, tokens):
        grads = saved.dhidden, saved.dweight, saved.dbias
        if not any(t.numel() for t in grads):  # a registered op's forward does not know what will be wanted
            grads = losses_and_gradients(replace(tokens, stats=tokens.empty(2, M)), tokens.empty(M), needs)
        inputs = ("hidden", hidden), ("weight", weight), ("bias", saved.bias)
        return tuple(
            scaled_gradient(made, x, tokens) if name in needs else None for (name, x), made in zip(inputs, grads)
        )
    part = dbias = dhidden = dweight = None
    if "bias" in needs:
        part = tokens.empty(cdiv(M, BLOCK_T), N)
        tokens = replace(tokens, part=part)
    if "hidden" in needs:
        dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    flat = None if dhidden is None else dhidden.view(M, hidden.shape[-1])
    if "weight" in needs:
        codes = saved.codes if last_backward() else saved.codes.clone()
        dweight = weight_gradient(tokens, codes.detach(), saved.tops, flat)
    else:
        hidden_gradient(tokens, flat)
    if part is not None:
        dbias = torch.empty(N, dtype=saved.bias.dtype, device=hidden.device)
        sum_columns(part, dbias, part.shape[0], N)
    return dhidden, dweight, dbias


KEPT = ("stats", "denominator", "codes", "tops", "dhidden", "dweight", "dbias")
linear_cross_entropy = Op(
    "linear_cross_entropy", reference, inputs,
    Triton(partial(forward, at_once=True), partial(backward, at_once=True), hopper_logits.fits, "hopper"),
    Triton(forward, backward, single, "portable"),
    cost=Cost(flops=lambda hidden, weight, **_: 2 * hidden.numel() * weight.shape[0]),
    where={
        "hidden": "float[... hidden]", "weight": "hidden[vocab hidden]", "labels": "int[...]", "bias": "float[vocab]",
        "label_smoothing": between(0.0, 1.0), "softcap": above(0.0), "z_loss": at_least(0.0),
    },
    results={"loss": loss_row}, hidden=KEPT,
    gradient=Gradient(of=("hidden", "weight", "bias"), saves=("hidden", "weight", "labels", "bias", *KEPT)),
    composite=True, sharding=of_rows, bars=Bars("E", gradient="E", rounds=True),
)  # fmt: skip
