"""Toy op, complete in one file: layer norm, y = (x - mean) * rstd * (weight + offset), or without the mean.

It belongs to no catalogue until it is imported. Tests declare it, see everything appear, and break it in many ways.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.core.draw import Draw
from tilewright.core.signature import at_least
from tilewright.core.tensor import cdiv, power_of_two, rows
from tilewright.op import Bars, Gradient, Op, Triton, upcast
from tilewright.runtime.kernel import kernel


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    kind: Literal["centred", "plain"] = "centred",
) -> tuple[Tensor, Tensor, Tensor]:
    """Give each row of `x` mean 0 (unless `kind` is "plain") and unit variance, then scale it by `weight + offset`."""
    v = upcast(x)
    mean = v.mean(-1, keepdim=True) if kind == "centred" else torch.zeros_like(v[..., :1])
    rstd = torch.rsqrt((v - mean).square().mean(-1, keepdim=True) + eps)
    y = (v - mean) * rstd
    if weight is not None:
        y = y * (upcast(weight) + offset)
    return y.to(x.dtype), mean.squeeze(-1).detach(), rstd.squeeze(-1).detach()


def inputs(draw: Draw) -> dict:
    return dict(
        x=draw.tensor("tokens", "hidden", shift=0.5),
        weight=draw.maybe("weight", lambda: draw.tensor("hidden", scale=0.5)),
        eps=draw.option("eps", 1e-5, 0.25),
        offset=draw.option("offset", 0.0, 1.0),
        kind=draw.option("kind", "centred", "plain"),
    )


@triton.jit
def load_rows(X, row, col, inside, stride_m, stride_n):
    return tl.load(X + row * stride_m + col.to(tl.int64) * stride_n, inside, 0.0).to(tl.float32)


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), default=lambda a: dict(ROWS=4, num_warps=4))
def toy_norm_forward(
    X, W, Y, MEAN, RSTD, M, N, stride_xm, stride_xn, stride_w, stride_ym, stride_yn, eps, offset,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = row < M
    inside = live & (col < N)
    x = load_rows(X, row, col, inside, stride_xm, stride_xn)
    mean = tl.zeros([ROWS, 1], tl.float32)
    if CENTRED:
        mean = tl.div_rn(tl.sum(x, axis=1)[:, None], N.to(tl.float32))
    centred = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(centred * centred, axis=1)[:, None], N.to(tl.float32)) + eps)
    y = centred * rstd
    if W is not None:
        w = tl.load(W + col.to(tl.int64) * stride_w, col < N, 0.0).to(tl.float32) + offset
        y = y * w
    tl.store(Y + row * stride_ym + col.to(tl.int64) * stride_yn, y.to(Y.dtype.element_ty), inside)
    tl.store(MEAN + row, mean, live)
    tl.store(RSTD + row, rstd, live)


@kernel(grid=lambda a: (a.PROGRAMS,), tokens=("M",), default=lambda a: dict(ROWS=2, num_warps=4))
def toy_norm_backward(
    X, W, MEAN, RSTD, DY, DX, DW, M, N, stride_xm, stride_xn, stride_w, stride_ym, stride_yn, offset,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), PROGRAMS):
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < M
        inside = live & (col < N)
        rstd = tl.load(RSTD + row, live, 0.0)
        xhat = load_rows(X, row, col, inside, stride_xm, stride_xn) - tl.load(MEAN + row, live, 0.0)
        xhat = tl.where(inside, xhat, 0.0) * rstd
        g = load_rows(DY, row, col, inside, stride_ym, stride_yn)
        dw += g * xhat
        if W is not None:
            g = g * (tl.load(W + col.to(tl.int64) * stride_w, col < N, 0.0).to(tl.float32) + offset)
        dx = g - xhat * tl.div_rn(tl.sum(xhat * g, axis=1)[:, None], N.to(tl.float32))
        if CENTRED:
            dx = dx - tl.div_rn(tl.sum(g, axis=1)[:, None], N.to(tl.float32))
        tl.store(DX + row * N + col, (dx * rstd).to(DX.dtype.element_ty), inside)
    if DW is not None:
        n = tl.arange(0, BLOCK)
        tl.store(DW + tl.program_id(0).to(tl.int64) * N + n, tl.sum(dw, axis=0), n < N)


@kernel(grid=lambda a: (1,), default=lambda a: dict(num_warps=4))
def toy_norm_sum(P, OUT, COUNT, N, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, COUNT):
        total += tl.load(P + i.to(tl.int64) * N + n, n < N, 0.0)
    tl.store(OUT + n, total.to(OUT.dtype.element_ty), n < N)


def weight_stride(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.stride(0)


def forward(x, weight, eps, *, offset, kind) -> tuple[Tensor, Tensor, Tensor]:
    flat = rows(x)
    M, N = flat.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    y2 = y if y.dim() == 2 else y.view(M, N)
    toy_norm_forward(
        flat, weight, y2, mean, rstd, M, N, *flat.stride(), weight_stride(weight), *y2.stride(), eps, offset,
        BLOCK=power_of_two(N), CENTRED=kind == "centred",
    )  # fmt: skip
    return y, mean, rstd


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    x, g = rows(saved.x), rows(dy)
    M, N = x.shape
    programs = max(1, min(3, cdiv(M, 2)))
    dx = torch.empty_like(saved.x, memory_format=torch.contiguous_format)
    wanted = "weight" in saved.needs
    part = torch.empty(programs, N, dtype=torch.float32, device=x.device) if wanted else None
    toy_norm_backward(
        x, saved.weight, saved.mean, saved.rstd, g, dx, part, M, N, *x.stride(), weight_stride(saved.weight), *g.stride(),
        saved.offset, BLOCK=power_of_two(N), CENTRED=saved.kind == "centred", PROGRAMS=programs,
    )  # fmt: skip
    dweight = torch.empty(N, dtype=saved.weight.dtype, device=x.device) if wanted else None
    if wanted:
        toy_norm_sum(part, dweight, programs, N, BLOCK=power_of_two(N))
    return dx, dweight


toy_norm = Op(
    "toy_norm", reference, inputs, Triton(forward, backward, name="toy"),
    where={"x": "float[... hidden]", "weight": "float[hidden]", "eps": at_least(0.0)},
    results={"y": "x[... hidden]"}, hidden=("mean", "rstd"),
    gradient=Gradient(of=("x", "weight"), saves=("x", "weight", "mean", "rstd")), bars=Bars("B"),
)  # fmt: skip
