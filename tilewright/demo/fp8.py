"""Products of the experts in FP8, forward and backward, each one call for all experts.

    y = x W^T: x in 1x128 blocks, W in 128x128;  dx = dy W: dy in 1x128, W^T;  dW = dy^T x: both in 128x1 blocks

One quantisation gives a tensor both ways: as it is, and transposed with scales of its own, which is what the third product
needs. Every expert's rows begin at a multiple of 128, and so do the blocks of the third product's inner dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

import tilewright as tw

BLOCK = 128
ACTIVATIONS = tw.fp8("1x128", ways="both")
WEIGHTS = tw.fp8("128x128", ways="both")


def linear(x: Tensor, weight: Tensor, ends: Tensor, *, quantize: Callable = tw.quantize) -> Tensor:
    """Each expert's rows times its weight: [rows, in], [experts, out, in] -> [rows, out]; `x` plain or in ACTIVATIONS."""
    q = x if isinstance(x, tw.Quantized) else quantize(x, ACTIVATIONS, offsets=ends)
    carrier, *tensors = q.unpack()
    return _Linear.apply(carrier, weight, ends, quantize, *tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carrier, weight, ends, quantize, *tensors):
        x = tw.Quantized.from_tensors(ACTIVATIONS, carrier.dtype, carrier.shape, tensors)
        w = quantize(weight, WEIGHTS)
        ctx.sizes, ctx.quantize, ctx.dtype = weight.shape, quantize, carrier.dtype
        ctx.save_for_backward(ends, *tensors, *w.tensors())
        return tw.grouped_mm(x, w, ends, transposed_b=True, out_dtype=ctx.dtype)

    @staticmethod
    def backward(ctx, dy):
        ends, *saved = ctx.saved_tensors
        x = tw.Quantized.from_tensors(ACTIVATIONS, ctx.dtype, (len(dy), ctx.sizes[2]), saved[:4])
        w = tw.Quantized.from_tensors(WEIGHTS, ctx.dtype, ctx.sizes, saved[4:])
        g = ctx.quantize(dy.contiguous(), ACTIVATIONS, offsets=ends)
        dx = tw.grouped_mm(g, w, ends, out_dtype=ctx.dtype)
        dw = tw.grouped_mm(g, x, ends, transposed_a=True, out_dtype=ctx.dtype)
        return dx, dw, None, None, *(None,) * 4


def why_not(device: torch.device) -> str | None:
    """Why FP8 products cannot be had on this machine, in one line; None if they can, tried on small ones."""
    draw = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(s, generator=draw).to(device, torch.bfloat16) for s in ((384, 512), (3, 1024, 512), (384, 1024))
    )
    ends = torch.tensor([128, 128, 384], device=device)
    try:
        found = _with_gradients(linear, x, w, ends, dy)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
        return str(error).strip().partition("\n")[0]
    truth = _with_gradients(_by_expert, x.float(), w.float(), ends, dy.float())
    for a, b in zip(found, truth):
        error = ((a.float() - b).norm() / b.norm()).item()
        # e4m3 rounds by 2.6 % on average, a product of two such by 3.7 %
        if not error < 0.06:
            return f"grouped_mm differs from the exact product by {error:.1%}"
    return None


def _with_gradients(multiply: Callable, x: Tensor, w: Tensor, ends: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    at = [t.detach().requires_grad_() for t in (x, w)]
    y = multiply(*at, ends)
    return y, *torch.autograd.grad(y, at, dy)


def _by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([x[a:b] @ weight[e].t() for e, (a, b) in enumerate(pairwise([0, *ends.tolist()]))])
