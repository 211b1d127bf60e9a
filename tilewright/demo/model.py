"""A small mixture-of-experts language model over bytes, written once and made of the parts it is given.

    y, h = add_rms_norm(attention(y), h);  y, h = add_rms_norm(experts(y), h)        once per layer
    experts(x) = sum over the chosen experts e of p_e * down_e (silu(gate) * up),  gate and up the halves of gate_up_e x

`PARTS` has them by the name of their curve: plain PyTorch, and tilewright's in bf16 or with experts in FP8. Nothing else
differs, and parameters have the same names, so that one state dict is for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright as tw

BYTES = 256
PLAIN, OURS, FP8 = "plain PyTorch", "tilewright", "tilewright FP8"


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a model and of one step's text."""

    hidden: int
    layers: int
    heads: int
    experts: int
    expert_hidden: int
    length: int
    batch: int
    chosen: int = 2  # experts per token


@dataclass(frozen=True)
class Parts:
    """What the model is made of beside torch's embeddings, attention and dense products."""

    rms_norm: Callable[[Tensor, Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    experts: Callable[[Sizes], nn.Module]  # x -> (y, a loss of the router, here 0)
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    clip_grad_norm_: Callable[..., Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps=1e-6)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms_norm(h, weight), h


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


class Experts(nn.Module):
    """`tw.nn.MoEFeedForward` as one writes it in PyTorch: tokens sorted by expert, grouped products, no wait for the device."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.chosen = sizes.chosen
        E, H, N = sizes.experts, sizes.hidden, sizes.expert_hidden
        self.router = matrix(E, H)
        self.gate_up = matrix(E, 2 * N, H)
        self.down = matrix(E, H, N, depth=sizes.layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape, x = x.shape, x.flatten(0, -2)
        # In fp32, as ours is: experts chosen by logits of bf16 would be others, and curves part by that alone
        logits = F.linear(x.float(), self.router.float())
        probability, expert = torch.softmax(logits, -1).topk(self.chosen)
        probability = probability / probability.sum(-1, keepdim=True)
        ordered, order = expert.flatten().sort(stable=True)
        rows, experts = (torch.arange(n, device=x.device) for n in (len(order), len(self.router)))
        ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
        y = grouped_linear(x.index_select(0, order // self.chosen), self.gate_up, ends)
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up * probability.flatten().index_select(0, order)[:, None].to(x.dtype)
        y = grouped_linear(y, self.down, ends)
        back = torch.empty_like(order).scatter_(0, order, rows)
        y = y.index_select(0, back).unflatten(0, (-1, self.chosen)).sum(1)
        return y.view(shape), logits.new_zeros(())


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its weight: [rows, in], [experts, out, in] -> [rows, out]."""
    multiply = getattr(F, "grouped_mm", torch._grouped_mm)  # the public name is younger than the oldest torch we take
    return multiply(x, weight.transpose(1, 2), offs=ends)


def tilewright(precision: str) -> Parts:
    """tilewright's parts, the experts' products being of the activations' dtype ("input") or of "fp8" codes."""

    def experts(sizes: Sizes) -> nn.Module:
        return tw.nn.MoEFeedForward(
            sizes.hidden, sizes.expert_hidden, sizes.experts, sizes.chosen, norm=False, precision=precision
        )

    return Parts(tw.rms_norm, tw.add_rms_norm, experts, tw.cross_entropy, tw.clip_grad_norm_)


PARTS = {
    PLAIN: Parts(rms_norm, add_rms_norm, Experts, cross_entropy, nn.utils.clip_grad_norm_),
    OURS: tilewright("input"),
    FP8: tilewright("fp8"),
}


class Attention(nn.Module):
    """Causal self-attention, torch's own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = matrix(3 * sizes.hidden, sizes.hidden)
        self.out = matrix(sizes.hidden, sizes.hidden, depth=sizes.layers)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = F.linear(x, self.qkv).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(batch, length, hidden), self.out)


class Layer(nn.Module):
    """Attention and experts; each hands its result to the norm that adds it to the residual `h`."""

    def __init__(self, sizes: Sizes, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.attention, self.experts = Attention(sizes), parts.experts(sizes)
        self.middle, self.last = (nn.Parameter(torch.ones(sizes.hidden)) for _ in range(2))

    def forward(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.parts.add_rms_norm(self.attention(y), h, self.middle)
        y, _ = self.experts(y)
        return self.parts.add_rms_norm(y, h, self.last)


class LanguageModel(nn.Module):
    """A language model that takes bytes and gives their loss."""

    def __init__(self, sizes: Sizes, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.embedding, self.position = (nn.Embedding(n, sizes.hidden) for n in (BYTES, sizes.length))
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.first = nn.Parameter(torch.ones(sizes.hidden))
        self.layers = nn.ModuleList(Layer(sizes, parts) for _ in range(sizes.layers))

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of predicting each byte of `text` [batch, length + 1] from those before it."""
        tokens, labels = text[:, :-1], text[:, 1:]
        h = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        y = self.parts.rms_norm(h, self.first)
        for layer in self.layers:
            y, h = layer(y, h)
        logits = F.linear(y, self.embedding.weight)
        return self.parts.cross_entropy(logits.flatten(0, 1), labels.flatten())


def matrix(*sizes: int, depth: int | None = None) -> nn.Parameter:
    """A random matrix that keeps the size of what it multiplies; smaller where `depth` layers add up their results."""
    std = sizes[-1] ** -0.5 * (1.0 if depth is None else (2 * depth) ** -0.5)
    return nn.Parameter(torch.randn(sizes) * std)
