"""A small mixture-of-experts language model over bytes, written once and run with the operations it is given.

    y, h = add_rms_norm(attention(y), h);  y, h = add_rms_norm(experts(y), h)        once per layer
    experts(x) = sum over the chosen experts e of p_e * W2_e (silu(gate) * up),  gate and up the halves of W1_e x

`plain`, `tilewright` and `tilewright_fp8` are the operations to choose from; nothing else differs between them. Parameters
are fp32 and are rounded to the dtype of the activations where they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright as tw

from . import fp8

BYTES = 256
Wrap = Callable[[Callable], Callable]


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
class Ops:
    """What the model is made of beside torch's attention and dense products."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    glu: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    linear: Callable[[Tensor, Tensor, Tensor], Tensor]  # rows sorted by expert, a weight per expert, their end rows
    align: int = 1  # every expert's rows begin at a multiple of this


def plain() -> Ops:
    """PyTorch as one writes it without a library of kernels."""

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps=1e-6)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return rms_norm(h, weight), h

    def glu(x: Tensor, *, scale: Tensor, offsets: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * scale[:, None].to(x.dtype)

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    return Ops(rms_norm, add_rms_norm, glu, cross_entropy, grouped_linear)


def tilewright(wrap: Wrap = lambda function: function) -> Ops:
    """tilewright's operations; `wrap` goes around each of them."""
    return Ops(wrap(tw.rms_norm), wrap(tw.add_rms_norm), wrap(tw.glu), wrap(tw.cross_entropy), grouped_linear)


def tilewright_fp8(wrap: Wrap = lambda function: function) -> Ops:
    """The same with the experts' products in FP8: `glu` hands over codes instead of bf16."""
    return Ops(
        wrap(tw.rms_norm),
        wrap(tw.add_rms_norm),
        functools.partial(wrap(tw.glu), out_format=fp8.ACTIVATIONS),
        wrap(tw.cross_entropy),
        functools.partial(fp8.linear, quantize=wrap(tw.quantize)),
        align=fp8.BLOCK,
    )


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its weight: [rows, in], [experts, out, in] -> [rows, out]."""
    multiply = getattr(F, "grouped_mm", torch._grouped_mm)  # the public name is younger than the oldest torch we take
    return multiply(x, weight.transpose(1, 2), offs=ends)


def sorted_places(expert: Tensor, experts: int, align: int) -> tuple[Tensor, Tensor]:
    """(the row that each choice takes when they are sorted by expert, the end row of each expert), both on the device."""
    order = torch.argsort(expert, stable=True)
    counts = (expert[:, None] == torch.arange(experts, device=expert.device)).sum(0)
    room = (counts + align - 1) // align * align
    moved = (room.cumsum(0) - room) - (counts.cumsum(0) - counts)  # how far the rows before have pushed each expert
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=expert.device) + moved[expert[order]]
    return row, room.cumsum(0).int()


class Experts(nn.Module):
    """Each token's chosen experts, weighted by the router's probabilities."""

    def __init__(self, sizes: Sizes, ops: Ops) -> None:
        super().__init__()
        self.sizes, self.ops = sizes, ops
        E, H, N = sizes.experts, sizes.hidden, sizes.expert_hidden
        self.router = matrix(E, H)
        self.into = matrix(E, 2 * N, H)
        self.out = matrix(E, H, N, depth=sizes.layers)

    def forward(self, x: Tensor) -> Tensor:
        ops, E, k = self.ops, self.sizes.experts, self.sizes.chosen
        shape, x = x.shape, x.flatten(0, -2)
        probability, expert = torch.softmax(F.linear(x, self.router.to(x.dtype)).float(), -1).topk(k)
        probability = probability / probability.sum(-1, keepdim=True)
        row, ends = sorted_places(expert.flatten(), E, ops.align)
        rows = len(row) if ops.align == 1 else int(ends[-1])
        # Rows that only fill up an expert's last block are copies of token 0 with probability 0
        token = row.new_zeros(rows).index_copy(0, row, torch.arange(len(row), device=x.device) // k)
        scale = probability.new_zeros(rows).index_copy(0, row, probability.flatten())
        y = ops.linear(x.index_select(0, token), self.into.to(x.dtype), ends)
        y = ops.glu(y, scale=scale, offsets=ends)
        y = ops.linear(y, self.out.to(x.dtype), ends)
        return y.index_select(0, row).view(-1, k, x.shape[-1]).sum(1).view(shape)


class Attention(nn.Module):
    """Causal self-attention, torch's own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = matrix(3 * sizes.hidden, sizes.hidden)
        self.out = matrix(sizes.hidden, sizes.hidden, depth=sizes.layers)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = F.linear(x, self.qkv.to(x.dtype)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(batch, length, hidden), self.out.to(x.dtype))


class Layer(nn.Module):
    """Attention and experts; each hands its result to the norm that adds it to the residual `h`."""

    def __init__(self, sizes: Sizes, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.attention, self.experts = Attention(sizes), Experts(sizes, ops)
        self.middle, self.last = (nn.Parameter(torch.ones(sizes.hidden)) for _ in range(2))

    def forward(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.ops.add_rms_norm(self.attention(y), h, self.middle.to(h.dtype))
        return self.ops.add_rms_norm(self.experts(y), h, self.last.to(h.dtype))


class LanguageModel(nn.Module):
    """Bytes in, loss out."""

    def __init__(self, sizes: Sizes, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.ops, self.dtype = ops, dtype
        self.embedding, self.position = (nn.Embedding(n, sizes.hidden) for n in (BYTES, sizes.length))
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.first = nn.Parameter(torch.ones(sizes.hidden))
        self.layers = nn.ModuleList(Layer(sizes, ops) for _ in range(sizes.layers))

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of predicting each byte of `text` [batch, length + 1] from those before it."""
        tokens, labels = text[:, :-1], text[:, 1:]
        h = (self.embedding(tokens) + self.position.weight[: tokens.shape[1]]).to(self.dtype)
        y = self.ops.rms_norm(h, self.first.to(h.dtype))
        for layer in self.layers:
            y, h = layer(y, h)
        logits = F.linear(y, self.embedding.weight.to(h.dtype))
        return self.ops.cross_entropy(logits.flatten(0, 1), labels.flatten())


def matrix(*sizes: int, depth: int | None = None) -> nn.Parameter:
    """A random matrix that keeps the size of what it multiplies; smaller where `depth` layers add up their results."""
    std = sizes[-1] ** -0.5 * (1.0 if depth is None else (2 * depth) ** -0.5)
    return nn.Parameter(torch.randn(sizes) * std)
