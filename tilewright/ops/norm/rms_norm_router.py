"""RMS norm and the router's product of what it gives: y = x * rstd * weight, rstd = 1 / sqrt(mean(x**2) + eps), and
logits[m, e] = sum over k of y[m, k] * router[e, k] in fp32, of y rounded to x's dtype: `rms_norm`, then `router_linear`.

Backward, with the gradient g = dy + dlogits @ router of y: dx and dweight are those of `rms_norm` for g, drouter is
dlogits.T @ y. y is computed again from x and rstd: a quantised one is not what was multiplied, and a plain one, kept, would
cost its memory until the backward.

One launch for both was slower at every size (docs/measured.md): its programs go over x for rstd before the product can begin, and
those of few rows do so one step after the other.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...core.draw import Draw
from ...core.format import Format, store
from ...core.signature import at_least
from ...core.target import Target
from ...core.tensor import rows, vector
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ..moe.router_linear import backward as product_backward
from ..moe.router_linear import forward as product
from ..moe.router_linear import fused_backward, fuses
from .rms_norm import gradients, launch_rows, normalised, quantised


def reference(
    x: Tensor, weight: Tensor | None, router: Tensor, eps: float = 1e-6, *, out_format: Format | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, logits): `rms_norm(x, weight, eps)`, and the fp32 logits `y @ router.T` from exact products of `y` in x's dtype.

    These are the logits of the layers one by one, `router_linear(rms_norm(x, weight, eps), router)`, where y is rounded between
    the two; a product of the fp32 y would not be. `out_format` gives a `Quantized` y; the logits are those of the plain one. The
    gradient of the logits enters the products of the backward as the nearest sum of two bf16 numbers, and the gradient of y is
    rounded to x's dtype once.
    """
    wide = upcast(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y * upcast(weight)
    logits = upcast(y.to(x.dtype)) @ upcast(router).t()
    return store(y, out_format, x.dtype), logits, rstd.squeeze(-1).detach()


def inputs(draw: Draw) -> dict:
    draw.dim("experts", (1, 7, 33, 257))
    return {
        "x": draw.tensor("tokens", "hidden"),
        "weight": draw.maybe("weight", lambda: draw.tensor("hidden", scale=0.5, shift=1.0)),
        "router": draw.tensor("experts", "hidden", scale=0.05),
    }


def forward(x, weight, router, eps, *, out_format) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels of `rms_norm` and `router_linear` one after the other. Beside codes a plain y is made for the product."""
    logits = torch.empty(*x.shape[:-1], router.shape[0], dtype=torch.float32, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    y = normalised(x, None, weight, None, None, rstd, eps, 0.0, out_format, None, quantised)
    plain = y if out_format is None else normed_by(rstd, x, weight, eps)
    return y, product(plain, router, None, precision="high", out=logits), rstd


def normed_by(rstd: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The plain y, from an rstd that is known."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_rows(rows(x), None, vector(weight), vector(rstd), y, None, None, eps, 0.0)
    return y


def backward(saved: SimpleNamespace, dy: Tensor | None, dlogits: Tensor | None) -> tuple:
    x, weight, router, needs = saved.x, saved.weight, saved.router, saved.needs
    wanted = {"x"} if needs & {"x", "weight"} else set()
    g, drouter = dy, None
    if dlogits is not None:
        wanted |= {"weight"} if "router" in needs else set()
        y = normed_by(saved.rstd, x, weight, saved.eps) if "weight" in wanted else x
        inner = SimpleNamespace(x=y, weight=router, bias=None, precision="high", needs=frozenset(wanted))
        way = fused_backward if fuses(Target.at(x.device), inner) else product_backward
        g, drouter, _ = way(inner, dlogits, add=dy)
    if not wanted & {"x"}:
        return None, None, drouter
    return *gradients(x, weight, saved.rstd, g, None, saved.eps, 0.0, needs), drouter


rms_norm_router = Op(
    "rms_norm_router", reference, inputs, Triton(forward, backward, single),
    where={
        "x": "float[... hidden]", "weight": "float[hidden]", "router": "float[experts+ hidden]", "eps": at_least(0.0),
    },
    results={"y": "x[... hidden]", "logits": "wide(x)[... experts]"}, hidden=("rstd",), out=Out(contiguous=("y", "logits")),
    gradient=Gradient(
        of=("x", "weight", "router"), through=("y", "logits"), saves=("x", "weight", "router", "rstd")
    ),
    sharding=Sharding(), bars=Bars("E", gradient="F", rounds=("logits",)),
)  # fmt: skip
