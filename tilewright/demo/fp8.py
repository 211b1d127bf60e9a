"""Products of the experts in FP8, forward and backward, each one call of torch's `scaled_mm` per expert.

    y = x W^T: x in 1x128 blocks, W in 128x128;  dx = dy W: dy in 1x128, W^T;  dW = dy^T x: both in 128x1 blocks

One quantisation gives a tensor both ways: as it is, and transposed with scales of its own, which is what the third product
needs. Every expert's rows begin at a multiple of 128, so that an expert's part is a slice of codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.formats.interchange import Operand, from_scaled_mm, to_scaled_mm

BLOCK = 128
ACTIVATIONS = tw.fp8("1x128", ways="both")
WEIGHTS = tw.fp8("128x128", ways="both")


def linear(x: Tensor, weight: Tensor, ends: Tensor, *, quantize: Callable = tw.quantize) -> Tensor:
    """Each expert's rows times its weight: [rows, in], [experts, out, in] -> [rows, out]; `x` plain or in ACTIVATIONS."""
    q = x if isinstance(x, tw.Quantized) else quantize(x, ACTIVATIONS)
    carrier, *tensors = q.unpack()
    return _Linear.apply(carrier, weight, ends.tolist(), quantize, *tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carrier, weight, ends, quantize, *tensors):
        x = tw.Quantized.from_tensors(ACTIVATIONS, carrier.dtype, carrier.shape, tensors)
        w = quantize(weight.flatten(0, 1), WEIGHTS)
        ctx.ends, ctx.sizes, ctx.quantize, ctx.dtype = ends, weight.shape, quantize, carrier.dtype
        ctx.save_for_backward(*tensors, *w.tensors())
        y = torch.empty(len(carrier), weight.shape[1], dtype=carrier.dtype, device=weight.device)
        for e, rows in spans(ends):
            y[rows] = product(to_scaled_mm(part(x, rows), "a"), to_scaled_mm(of_expert(w, e, weight.shape), "b"))
        return y

    @staticmethod
    def backward(ctx, dy):
        saved, (E, N, K) = ctx.saved_tensors, ctx.sizes
        x = tw.Quantized.from_tensors(ACTIVATIONS, ctx.dtype, (len(dy), K), saved[:4])
        w = tw.Quantized.from_tensors(WEIGHTS, ctx.dtype, (E * N, K), saved[4:])
        g = ctx.quantize(dy.contiguous(), ACTIVATIONS)
        dx = torch.empty(len(dy), K, dtype=ctx.dtype, device=dy.device)
        dw = torch.zeros(E, N, K, dtype=ctx.dtype, device=dy.device)
        for e, rows in spans(ctx.ends):
            here, there = part(g, rows), part(x, rows)
            dx[rows] = product(to_scaled_mm(here, "a"), to_scaled_mm(of_expert(w, e, ctx.sizes), "b", "col"))
            dw[e] = product(to_scaled_mm(here, "a", "col"), to_scaled_mm(there, "b", "col"))
        return dx, dw, None, None, *(None,) * 4


def spans(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of every expert that has rows."""
    for e, (start, end) in enumerate(pairwise([0, *ends])):
        if end > start:
            yield e, slice(start, end)


def of_expert(w: tw.Quantized, e: int, sizes: torch.Size) -> tw.Quantized:
    return part(w, slice(e * sizes[1], (e + 1) * sizes[1]))


def part(q: tw.Quantized, rows: slice) -> tw.Quantized:
    """Rows of a value, from a multiple of 128 to a multiple of 128: views of its codes and scales."""
    blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
    if q.format.granularity == "1x128":
        scale, scale_t = q.scale[:, rows], q.scale_t[blocks]
    else:
        scale, scale_t = q.scale[blocks], q.scale_t[:, blocks]
    shape = rows.stop - rows.start, q.shape[-1]
    return tw.Quantized.from_tensors(q.format, q.dtype, shape, (q.data[rows], scale, q.data_t[:, rows], scale_t))


def product(a: Operand, b: Operand) -> Tensor:
    """a @ b in bf16 on a GPU; elsewhere, where torch has no such product, that of the values they stand for."""
    if a.mat.is_cuda:
        return F.scaled_mm(a.mat, b.mat, a.scale, a.recipe, b.scale, b.recipe, output_dtype=torch.bfloat16)
    left, right = (from_scaled_mm(o, side=side).dequantize(torch.float32) for o, side in ((a, "a"), (b, "b")))
    return left @ right.t()


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
            return f"scaled_mm differs from the exact product by {error:.1%}"
    return None


def _with_gradients(multiply: Callable, x: Tensor, w: Tensor, ends: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    at = [t.detach().requires_grad_() for t in (x, w)]
    y = multiply(*at, ends)
    return y, *torch.autograd.grad(y, at, dy)


def _by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([x[rows] @ weight[e].t() for e, rows in spans(ends.tolist())])
