"""The losses of a router: one number from its logits [tokens, experts].

    z-loss          coef * mean over tokens of lse**2,  lse = log(sum_e exp(z_e));  dz_e = 2 * coef / tokens * lse * p_e
    load balancing  coef * experts * sum_e f_e * P_e,  f_e = counts_e / sum(counts),  P_e = mean over tokens of p_e
                    w_e = coef * experts / tokens * f_e;  softmax: dz_e = p_e * (w_e - sum_j p_j w_j)
                    sigmoid: p_e = s_e / S,  dz_e = s_e * (1 - s_e) / S * (w_e - sum_j p_j w_j)

Both are sums over tokens of a number per row, so that a row is read once and no column is ever summed. Rows are added in one
order: a few of a program in fp32, the programs' in float64.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.signature import at_least
from ...core.tensor import cdiv, power_of_two, rows
from ...device.softmax import LN2, LOG2E, finite_or_zero
from ...op import Bars, Gradient, Op, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .moe_router import MOST, TINY, rows_of, sigmoids, softmax_parts

Score = Literal["softmax", "sigmoid", "given"]


def reference(logits: Tensor, coef: float) -> Tensor:
    """`coef` times the mean over tokens of the squared logsumexp of their logits [..., experts]; fp32."""
    return coef * torch.logsumexp(upcast(logits), -1).square().mean()


def reference_balance(logits: Tensor, counts: Tensor, coef: float, *, score: Score = "softmax") -> Tensor:
    """`coef * experts * sum_e f_e * P_e`, fp32: `f_e` is the share of the choices that expert e has, `P_e` its mean score.

    `counts` [experts] are how often each expert was chosen (`topk_routing`'s; a sum over ranks serves as well): the loss is
    `coef` if choices or scores are even. Scores are the softmax of `logits` [..., experts], their sigmoids divided by the
    row's sum, or with `score="given"` the numbers themselves. Only they have a gradient.
    """
    p = upcast(logits)
    if score == "softmax":
        p = torch.softmax(p, -1)
    elif score == "sigmoid":
        p = torch.sigmoid(p)
        p = p / (p.sum(-1, keepdim=True) + TINY)
    share = counts.to(p.dtype) / counts.sum()
    tokens = math.prod(logits.shape[:-1])
    return coef * logits.shape[-1] * (share * p.reshape(tokens, logits.shape[-1]).mean(0)).sum()


def draw_logits(draw: Draw) -> Tensor:
    draw.dim("tokens")
    draw.dim("experts", (1, 3, 8, 33, 64, 160))
    return draw.tensor("tokens", "experts", scale=draw.option("logits_scale", 1.0, 4.0))


def inputs(draw: Draw) -> dict:
    return {"logits": draw_logits(draw), "coef": draw.option("coef", 1e-3, 1.0)}


def inputs_balance(draw: Draw) -> dict:
    score = draw.option("score", "softmax", "sigmoid", "given")
    logits, index = draw_logits(draw), draw.option("index", torch.int32, torch.int64)
    counts = draw.integers("experts", low=1, high=100, dtype=index)
    return {"logits": logits, "counts": counts, "coef": draw.option("coef", 1e-2, 1.0), "score": score}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def read_rows(X, row, e, M, E, stride_xt, stride_xe, MODE: tl.constexpr):
    """Rows of logits; what lies beyond a row changes no sum of its scores."""
    inside = (row < M) & (e < E)
    at = X + row.to(tl.int64) * stride_xt + e.to(tl.int64) * stride_xe
    z = tl.load(at, inside, 0.0).to(tl.float32)
    return z if MODE == "given" else tl.where(inside, z, -float("inf"))


@triton.jit
def shares(C, e, E, stride_c):
    """The share of each expert in all choices."""
    c = tl.load(C + e.to(tl.int64) * stride_c, e < E, 0).to(tl.float32)
    return tl.div_rn(c, tl.broadcast_to(tl.sum(c, 1, keep_dims=True), c.shape))


@triton.jit
def exponentials(z):
    """(exp(z - base), their sum [rows, 1], base): base is the largest of a row, 0 where that is infinite."""
    base = finite_or_zero(tl.max(z, 1, keep_dims=True))
    p = tl.exp2((z - base) * LOG2E)
    return p, tl.sum(p, 1, keep_dims=True), base


@triton.jit
def scores(z, MODE: tl.constexpr):
    """(scores, what a gradient of them is multiplied with for that of z once their mean gradient is taken off)."""
    if MODE == "given":
        return z, z
    elif MODE == "softmax":
        largest, share = softmax_parts(z)
        p = tl.exp2((z - largest) * LOG2E) * share
        return p, p
    else:
        s, rest = sigmoids(z)
        total = tl.sum(s, 1, keep_dims=True) + 1e-20
        p = s * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
        return p, p * rest


def _rows(a) -> dict:
    return {"ROWS": rows_of(a.BLOCK_E), "num_warps": max(1, a.BLOCK_E // 1024)}


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), default=_rows)
def router_loss_forward(
    X, C, PART, M, E, stride_xt, stride_xe, stride_c, MODE: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """PART has for each program the sum of its rows: of the scores weighted by the shares of C or, without C, of lse**2."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    z = read_rows(X, row, e, M, E, stride_xt, stride_xe, MODE)
    if C is None:
        _, total, base = exponentials(z)
        lse = base + tl.log2(total) * LN2
        one = lse * lse
    else:
        p, _ = scores(z, MODE)
        one = tl.sum(tl.where(e < E, p * shares(C, e, E, stride_c), 0.0), 1, keep_dims=True)
    one = tl.where(row < M, one, 0.0)
    tl.store(PART + tl.program_id(0), tl.sum(tl.sum(one, 1), 0))


@kernel(grid=lambda a: (1,), tokens=("COUNT",), default=lambda a: {"BLOCK": 4096, "num_warps": 16})
def router_loss_sum(PART, LOSS, COUNT, scale, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(PART + at, at < COUNT, 0.0).to(tl.float64)
    tl.store(LOSS, (tl.sum(total, 0) * scale).to(tl.float32))


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), default=_rows)
def router_loss_backward(
    X, C, G, DX, M, E, stride_xt, stride_xe, stride_c, scale, MODE: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    z = read_rows(X, row, e, M, E, stride_xt, stride_xe, MODE)
    g = tl.load(G).to(tl.float32) * scale
    if C is None:
        p, total, base = exponentials(z)
        lse = base + tl.log2(total) * LN2
        d = p * tl.div_rn(2.0 * g * lse, total)
    else:
        w = g * shares(C, e, E, stride_c)
        p, slope = scores(z, MODE)
        if MODE == "given":
            d = tl.broadcast_to(w, z.shape)
        else:
            d = slope * (w - tl.sum(tl.where(e < E, p * w, 0.0), 1, keep_dims=True))
    tl.store(DX + row.to(tl.int64) * E + e, d.to(DX.dtype.element_ty), (row < M) & (e < E))


# ---- host ------------------------------------------------------------------------------------------------------------


def loss(logits: Tensor, counts: Tensor | None, coef: float, mode: str) -> Tensor:
    x, E = rows(logits), logits.shape[-1]
    M, BLOCK_E = x.shape[0], power_of_two(E)
    parts = cdiv(M, rows_of(BLOCK_E))
    part = torch.empty(parts, dtype=torch.float32, device=x.device)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    stride_c = 0 if counts is None else counts.stride(0)
    router_loss_forward(x, counts, part, M, E, *x.stride(), stride_c, MODE=mode, BLOCK_E=BLOCK_E)
    router_loss_sum(part, out, parts, scale_of(M, E, counts, coef))
    return out


def gradient(logits: Tensor, counts: Tensor | None, coef: float, mode: str, dloss: Tensor) -> Tensor:
    x, E = rows(logits), logits.shape[-1]
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=x.device)
    router_loss_backward(
        x, counts, dloss, dx, x.shape[0], E, *x.stride(), 0 if counts is None else counts.stride(0),
        scale_of(x.shape[0], E, counts, coef), MODE=mode, BLOCK_E=power_of_two(E),
    )  # fmt: skip
    return dx


def scale_of(tokens: int, experts: int, counts: Tensor | None, coef: float) -> float:
    """What the sum over tokens is multiplied with; the mean of none is NaN."""
    return coef * (1 if counts is None else experts) / tokens if tokens else math.nan


def forward(logits, coef) -> Tensor:
    return loss(logits, None, coef, "softmax")


def backward(saved: SimpleNamespace, dloss: Tensor) -> tuple[Tensor]:
    return (gradient(saved.logits, None, saved.coef, "softmax", dloss),)


def check(logits: Tensor, coef: float) -> None:
    check_experts("router_z_loss", logits)


def check_experts(op: str, logits: Tensor) -> None:
    if logits.shape[-1] > MOST:
        raise ValueError(f"{op}: logits must have at most {MOST} experts, got {logits.shape[-1]}")


router_z_loss = Op(
    "router_z_loss", reference, inputs, Triton(forward, backward, single),
    where={"logits": "float[... experts+]", "coef": at_least(0.0)}, results={"out": "wide(logits)[]"},
    gradient=Gradient(of=("logits",)), check=check, sharding=Sharding(mean="logits"), bars=Bars("D"),
)  # fmt: skip


def forward_balance(logits, counts, coef, *, score) -> Tensor:
    return loss(logits, counts, coef, score)


def backward_balance(saved: SimpleNamespace, dloss: Tensor) -> tuple[Tensor]:
    return (gradient(saved.logits, saved.counts, saved.coef, saved.score, dloss),)


def check_balance(logits, counts, coef, *, score) -> None:
    check_experts("load_balancing_loss", logits)


load_balancing_loss = Op(
    "load_balancing_loss", reference_balance, inputs_balance, Triton(forward_balance, backward_balance, single),
    where={"logits": "float[... experts+]", "counts": "int[experts+]", "coef": at_least(0.0)},
    results={"out": "wide(logits)[]"}, check=check_balance, bars=Bars("D"),
    sharding=Sharding(mean="logits", summed=("counts",)),
    gradient=Gradient(of=("logits",), shape_only=lambda values: ("logits",) if values["score"] == "given" else ()),
)  # fmt: skip
