"""A linear layer of a gated unit's value, of which the backward keeps gate and up alone: y = h @ weight.T + bias, h = glu(x, up).

    dh = dy @ weight;  dgate and dup of dh as in `glu`;  dweight = dy.T @ h;  dbias = sum over rows of dy

The products are torch's. The pass over gate, up and dh that makes dgate and dup makes h again as well, in the memory of dh: one
more write in place of a matrix that a layer would keep from its forward to its backward.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.signature import above
from ...core.tensor import cdiv, rows
from ...device.activation import gated, gated_gradient
from ...gemm.summed import product
from ...op import Bars, Cost, Gradient, Op, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .glu import ACTIVATIONS, TILES, check_unit, glu, halves


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    up: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """`glu(x, up) @ weight.T + bias`, for whose backward x and up are kept, but not the unit's value; see `glu` for the options.

    The value is rounded to the dtype of `x`, which is that of all arguments; the product is summed in fp32 and rounded once.
    Products of fp32 tensors follow `torch.set_float32_matmul_precision`.
    """
    h = upcast(glu.reference(x, up, act=act, limit=limit, alpha=alpha))
    return F.linear(h, upcast(weight), None if bias is None else upcast(bias)).to(x.dtype)


def inputs(draw: Draw) -> dict:
    tokens, hidden, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    up = draw.maybe("up", lambda: draw.tensor(tokens, hidden))
    act = draw.option("act", *ACTIVATIONS)
    return {
        "x": draw.tensor(tokens, hidden if up is not None else 2 * hidden, scale=2.0),
        "weight": draw.tensor(columns, hidden, scale=0.1),
        "bias": draw.maybe("bias", lambda: draw.tensor(columns)),
        "up": up,
        "act": act,
        "limit": draw.option("limit", None, 3.0),
        "alpha": draw.option("alpha", 1.0, 1.702) if act == "silu" else 1.0,
    }


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.N, a.COLS),), **{**TILES, "tokens": ("M",)})
def glu_linear_backward(
    A, B, DH, DA, DB, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_dam, stride_dbm, limit, alpha,
    ACT: tl.constexpr, AGAIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dgate and dup where they are wanted, and if AGAIN the unit's value over DH, whose rows are N apart."""
    across = tl.cdiv(N, COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < M) & (col < N)
    a = tl.load(A + row * stride_am + col * stride_an, inside, 0.0)
    b = tl.load(B + row * stride_bm + col * stride_bn, inside, 0.0)
    at = DH + row * N + col
    dh = tl.load(at, inside, 0.0)
    da, db, _ = gated_gradient(a, b, dh, None, limit, alpha, ACT)
    if DA is not None:
        tl.store(DA + row * stride_dam + col, da.to(DA.dtype.element_ty), inside)
    if DB is not None:
        tl.store(DB + row * stride_dbm + col, db.to(DB.dtype.element_ty), inside)
    if AGAIN:
        tl.debug_barrier()  # a load may divide the tile among threads otherwise than a store does
        tl.store(at, gated(a, b, limit, alpha, ACT).to(DH.dtype.element_ty), inside)


def value(a: SimpleNamespace) -> Tensor:
    """The gated unit's value, as a matrix."""
    options = {"act": a.act, "limit": a.limit, "alpha": a.alpha}
    return rows(glu.run(glu.signature.bind((a.x, a.up), options)))


def forward(x, weight, bias, up, *, act, limit, alpha, needs: frozenset) -> Tensor:
    h = value(SimpleNamespace(x=x, up=up, act=act, limit=limit, alpha=alpha))
    y = torch.empty(h.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if bias is not None:
        y.copy_(bias.expand_as(y))
    product(h, weight.t(), y, add=bias is not None)
    return y.view(*x.shape[:-1], weight.shape[0])


def unit_backward(saved: SimpleNamespace, dh: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and up that are wanted. If the weight's is wanted too, the unit's value is left in `dh`."""
    x, up, needs = saved.x, saved.up, saved.needs
    A, B = halves(x, up)
    dx = DA = DB = dup = None
    if "up" in needs:
        DB = dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if "x" in needs:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        DA, DB = (dx, DB) if up is not None else halves(dx, None)
    width = x.shape[-1]  # the row stride of dgate and dup
    glu_linear_backward(
        A, B, dh, DA, DB, *A.shape, *A.stride(), *B.stride(), width, width, saved.limit, saved.alpha,
        ACT=saved.act, AGAIN="weight" in needs,
    )  # fmt: skip
    return dx, dup


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    weight, needs, flat = saved.weight, saved.needs, rows(dy)
    dx = dweight = dbias = dup = h = None
    if needs & {"x", "up"}:
        h = torch.empty(flat.shape[0], weight.shape[1], dtype=flat.dtype, device=flat.device)
        product(flat, weight, h)
        dx, dup = unit_backward(saved, h)
    if "weight" in needs:
        dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        product(flat.t(), value(saved) if h is None else h, dweight)
    if "bias" in needs:
        dbias = flat.sum(0, dtype=torch.float32).to(saved.bias.dtype)
    return dx, dweight, dbias, dup


def check(x, weight, bias, up, *, act, limit, alpha) -> None:
    check_layer("glu_linear", x, weight, up, act, alpha)


def check_layer(op: str, x: Tensor, weight: Tensor, up: Tensor | None, act: str, alpha: float) -> None:
    """Raise unless these arguments of `op` are those of a gated unit, and the weight that of a layer after it."""
    check_unit(op, x, up, act, alpha)
    hidden = x.shape[-1] // (2 if up is None else 1)
    if weight.shape[1] != hidden:
        raise ValueError(f"{op}: weight must be [columns, {hidden}], got {list(weight.shape)}")


def sharding(a: SimpleNamespace) -> Sharding:
    """Of a product of `glu`: with `up`, its inner dimension is as wide as x is, and may be sharded as x may."""
    if a.up is None:
        return Sharding(("...", "columns"))
    return Sharding(("...", "columns", "width"), {"hidden": "width"}, once=("bias",))


glu_linear = Op(
    "glu_linear", reference, inputs, Triton(forward, backward, single), composite=True,
    cost=Cost(flops=lambda x, weight, **_: 2 * math.prod(x.shape[:-1]) * weight.numel()),
    where={
        "x": "float[... width]", "weight": "x[columns hidden]", "bias": "x[columns]", "up": "x[... width]",
        "limit": above(0.0),
    },
    results={"y": "x[... columns]"}, check=check, bars=Bars("E", gradient="E", rounds=("y",)),
    gradient=Gradient(of=("x", "weight", "bias", "up"), shape_only=lambda values: ("bias",)),
    sharding=sharding,
)  # fmt: skip
