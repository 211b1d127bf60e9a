"""Toy op with all that a declaration can say: two results, one of them in any format, a dimension that broadcasts, an argument that
is written, a gradient, a rule for ranks. Tests import it, and see everything else appear."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import triton.language as tl
from torch import Tensor

from tilewright.core.draw import Draw
from tilewright.core.format import Format, Quantized, store
from tilewright.core.signature import at_least
from tilewright.core.tensor import power_of_two
from tilewright.op import OPS, Bars, Gradient, Op, Sharding, Triton, single, upcast
from tilewright.ops.quantise.quantize import quantize
from tilewright.runtime.kernel import kernel


def reference(
    x: Tensor, gain: Tensor, cache: Tensor, *, slot: int = 0, out_format: Format | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(x * gain, its sum over each row); the row `slot` of `cache` becomes the sum over all rows of `x`."""
    y = upcast(x) * upcast(gain)
    columns = upcast(x).reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0)
    at = torch.arange(cache.shape[0], device=cache.device)[:, None] == slot
    return store(y, out_format, x.dtype), y.sum(-1), torch.where(at, columns, upcast(cache)).to(cache.dtype)


def inputs(draw: Draw) -> dict:
    hidden = draw.dim("hidden", (1, 2, 16, 17, 33, 64, 65))
    return {
        "x": draw.tensor("tokens", "hidden"),
        "gain": draw.tensor(hidden if draw.option("wide", True, False) else 1),
        "cache": draw.tensor(3, "hidden", dtype=torch.float32),
        "slot": draw.option("slot", 0, 2),
    }


@kernel(grid=lambda a: (1,), tokens=("M",), default=lambda a: {"num_warps": 4})
def remember_forward(
    X, G, C, Y, S, M, N, slot, stride_xm, stride_xn, stride_g, stride_cm, stride_cn, stride_ym, stride_yn, stride_s,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for all rows: they are added up in their order."""
    col = tl.arange(0, BLOCK)
    inside = col < N
    g = tl.load(G + col.to(tl.int64) * stride_g, inside, 0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(M):
        x = tl.load(X + row.to(tl.int64) * stride_xm + col.to(tl.int64) * stride_xn, inside, 0.0).to(tl.float32)
        y = x * g
        total += x
        tl.store(Y + row.to(tl.int64) * stride_ym + col.to(tl.int64) * stride_yn, y.to(Y.dtype.element_ty), inside)
        tl.store(S + row.to(tl.int64) * stride_s, tl.sum(y, 0))
    tl.store(C + slot.to(tl.int64) * stride_cm + col.to(tl.int64) * stride_cn, total, inside)


@kernel(grid=lambda a: (a.M,), tokens=("M",), default=lambda a: {"num_warps": 4})
def remember_backward(DY, DS, G, DX, M, N, stride_m, stride_n, stride_s, stride_g, BLOCK: tl.constexpr):
    """DX = (DY + DS) * G, each of the first two perhaps None."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    d = tl.zeros([BLOCK], tl.float32)
    if DY is not None:
        d += tl.load(DY + row * stride_m + col.to(tl.int64) * stride_n, col < N, 0.0).to(tl.float32)
    if DS is not None:
        d += tl.load(DS + row * stride_s)
    d *= tl.load(G + col.to(tl.int64) * stride_g, col < N, 0.0).to(tl.float32)
    tl.store(DX + row * N + col, d.to(DX.dtype.element_ty), col < N)


def check(x, gain, cache, *, slot, out_format) -> None:
    if slot >= cache.shape[0]:
        raise ValueError(f"remember: slot must be below {cache.shape[0]}, the rows of cache, got {slot}")


def forward(x, gain, cache, *, slot, out_format) -> tuple[Tensor, Tensor]:
    M, N = math.prod(x.shape[:-1]), x.shape[-1]
    flat, wide = x.reshape(M, N), gain.expand(N)
    dtype = x.dtype if out_format is None else torch.float32  # rounded once, to codes
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    y2, s = y.view(M, N), total.view(M)
    remember_forward(
        flat, wide, cache, y2, s, M, N, slot, *flat.stride(), wide.stride(0), *cache.stride(), *y2.stride(), s.stride(0),
        BLOCK=power_of_two(N),
    )  # fmt: skip
    if out_format is None:
        return y, total
    q = quantize.run({"x": y, "out_format": out_format, "offsets": None})
    return Quantized.from_tensors(q.format, x.dtype, q.shape, q.tensors()), total


def backward(saved: SimpleNamespace, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor]:
    like = saved.x
    M, N = math.prod(like.shape[:-1]), like.shape[-1]
    flat, sums = None if dy is None else dy.reshape(M, N), None if dtotal is None else dtotal.reshape(M)
    dx = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    wide = saved.gain.expand(N)
    strides = (0, 0) if flat is None else flat.stride()
    remember_backward(
        flat,
        sums,
        wide,
        dx,
        M,
        N,
        *strides,
        0 if sums is None else sums.stride(0),
        wide.stride(0),
        BLOCK=power_of_two(N),
    )
    return (dx,)


remember = Op(
    "remember", reference, inputs, Triton(forward, backward, single, "toy"),
    where={"x": "float[... hidden+]", "gain": "float[hidden?]", "cache": "float32[slots+ hidden]", "slot": at_least(0)},
    results={"y": "x[... hidden]", "total": "wide(x)[...]"}, writes=("cache",), check=check,
    gradient=Gradient(of=("x",), through=("y", "total"), saves=("x", "gain"), shape_only=lambda values: ("x",)),
    bars=Bars("B"), sharding=Sharding(local=("...", "hidden")),
)  # fmt: skip
del OPS["remember"]  # other tests count the catalogue


@contextlib.contextmanager
def in_catalogue() -> Iterator[None]:
    """Have the op in the catalogue while a test needs it."""
    OPS["remember"] = remember
    try:
        yield
    finally:
        del OPS["remember"]
