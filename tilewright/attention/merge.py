"""Parts of attention over parts of the keys, merged: the weight of part i is w_i = exp(lse_i - lse), lse = log(sum exp(lse_i)).

    o = sum w_i * o_i;  backward: do_i = w_i * do,  dlse_i = w_i * (do . (o_i - o) + dlse)

A part that saw nothing, (0, -inf), changes nothing; where all are empty, so is the result.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.tensor import cdiv, power_of_two
from ..device.softmax import LN2, LOG2E
from ..op import Bars, Gradient, Op, Sharding, Triton, single, upcast
from ..runtime.kernel import kernel
from .portable import Heads, heads_of


def reference(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of all keys, of parts `o` [parts, batch, length, heads, value_dim] and `lse` [parts, batch, heads, length].

    The parts are what `attention_lse` gives for parts of the keys, in any order; without a sink, or with it in one of them alone.
    A part with an lse of -inf saw nothing, and its o may hold anything. Where all saw nothing the result is 0 and -inf. lse is
    fp32, and sums are too, in the order of the parts.
    """
    top = lse.detach().amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)
    weight = torch.exp(lse - top)
    total = weight.sum(0)
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    share = (weight / total).transpose(2, 3).unsqueeze(-1)  # [parts, batch, length, heads, 1]
    value = upcast(o).masked_fill((lse == -math.inf).transpose(2, 3).unsqueeze(-1), 0.0)
    merged = (share * value).sum(0)
    return merged.to(o.dtype), (top + torch.log(total)).masked_fill(empty, -math.inf)


def inputs(draw: Draw) -> dict:
    parts, batch, length, heads = (
        draw.dim("parts", (2, 1, 3, 5)),
        draw.dim("batch"),
        draw.dim("length"),
        draw.dim("heads"),
    )
    lse = draw.tensor(parts, batch, heads, length, dtype=torch.float32, scale=3.0)
    if draw.option("empty", True, False):
        lse = lse.masked_fill(draw.uniform(*lse.shape, dtype=torch.float32) < 0.4, -math.inf)
    return {"o": draw.tensor(parts, batch, length, heads, draw.dim("head_dim", (64, 40, 17, 192))), "lse": lse}


# ---- kernels ---------------------------------------------------------------------------------------------------------


MERGE = {
    "grid": lambda a: (cdiv(a.ROWS, a.BLOCK_R),),
    "tokens": ("ROWS", "L", "PARTS"),
    "default": lambda a: {"BLOCK_R": max(1, 2048 // a.BLOCK), "num_warps": 4},
}


@triton.jit
def places(row, L, HEADS):
    """(batch, token, head) of rows, which go through [batch, length, heads]."""
    head = row % HEADS
    token = row // HEADS
    return token // L, token % L, head


@triton.jit
def at_row(X, batch, token, head):
    return batch.to(tl.int64) * X.stride_b + token.to(tl.int64) * X.stride_t + head.to(tl.int64) * X.stride_h


@triton.jit
def merged_lse(LSE, stride_p, at, inside, PARTS):
    """(the largest lse that can be subtracted, the sum of the weights relative to it) of rows."""
    top = tl.full([at.shape[0]], float("-inf"), tl.float32)
    lost = tl.zeros([at.shape[0]], tl.float32)
    for i in range(PARTS):
        one = tl.load(LSE + i.to(tl.int64) * stride_p + at, inside, float("-inf")).to(tl.float32)
        lost += tl.where(one == one, 0.0, one)  # a NaN, which a maximum loses
        top = tl.maximum(top, one)
    base = tl.where(top == float("-inf"), 0.0, top) + lost
    total = tl.zeros([at.shape[0]], tl.float32)
    for i in range(PARTS):
        one = tl.load(LSE + i.to(tl.int64) * stride_p + at, inside, float("-inf")).to(tl.float32)
        total += tl.exp2((one - base) * LOG2E)
    return base, total


@kernel(**MERGE)
def attention_merge_forward(
    P, stride_p, LSE, stride_lp, LSE_AT, O, OUT, ROWS, L, HEADS, PARTS, V, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
):
    """O and OUT of rows of the parts P; LSE_AT and OUT have the strides of their lse's [batch, length, heads]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < ROWS
    batch, token, head = places(row, L, HEADS)
    at_lse = at_row(LSE_AT, batch, token, head)
    base, total = merged_lse(LSE, stride_lp, at_lse, inside, PARTS)
    empty = total == 0.0
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    column = tl.arange(0, BLOCK)
    whole = inside[:, None] & (column < V)[None, :]
    at = at_row(P, batch, token, head)[:, None] + column.to(tl.int64)[None, :] * P.stride_d
    sums = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    for i in range(PARTS):
        one = tl.load(LSE + i.to(tl.int64) * stride_lp + at_lse, inside, float("-inf")).to(tl.float32)
        weight = tl.exp2((one - base) * LOG2E) * share
        seen = whole & (one != float("-inf"))[:, None]
        sums += weight[:, None] * tl.load(P.data + i.to(tl.int64) * stride_p + at, seen, 0.0).to(tl.float32)
    at = at_row(O, batch, token, head)[:, None] + column.to(tl.int64)[None, :] * O.stride_d
    tl.store(O.data + at, sums.to(O.data.dtype.element_ty), whole)
    lse = tl.where(empty, float("-inf"), base + LN2 * tl.log2(tl.where(empty, 1.0, total)))
    tl.store(OUT.data + at_row(OUT, batch, token, head), lse, inside)


@kernel(**MERGE)
def attention_merge_backward(
    P, stride_p, LSE, stride_lp, LSE_AT, O, OUT, DO, DLSE, DP, DPLSE, ROWS, L, HEADS, PARTS, V, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """DP and DPLSE, contiguous, of the parts P."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < ROWS
    batch, token, head = places(row, L, HEADS)
    at_lse = at_row(LSE_AT, batch, token, head)
    column = tl.arange(0, BLOCK)
    whole = inside[:, None] & (column < V)[None, :]
    lse = tl.load(OUT.data + at_row(OUT, batch, token, head), inside, float("-inf")).to(tl.float32)
    do = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    merged = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    if DO is not None:
        at = at_row(DO, batch, token, head)[:, None] + column.to(tl.int64)[None, :] * DO.stride_d
        do = tl.load(DO.data + at, whole, 0.0).to(tl.float32)
        at = at_row(O, batch, token, head)[:, None] + column.to(tl.int64)[None, :] * O.stride_d
        merged = tl.load(O.data + at, whole, 0.0).to(tl.float32)
    dlse = tl.zeros([BLOCK_R], tl.float32)
    if DLSE is not None:
        dlse = tl.load(DLSE.data + at_row(DLSE, batch, token, head), inside, 0.0).to(tl.float32)
    at = at_row(P, batch, token, head)[:, None] + column.to(tl.int64)[None, :] * P.stride_d
    for i in range(PARTS):
        part = i.to(tl.int64)
        one = tl.load(LSE + part * stride_lp + at_lse, inside, float("-inf")).to(tl.float32)
        seen = one != float("-inf")
        weight = tl.where(seen, tl.exp2((one - lse) * LOG2E), 0.0)
        own = tl.load(P.data + part * stride_p + at, whole & seen[:, None], 0.0).to(tl.float32)
        if DP is not None:
            grad = tl.where(seen[:, None], weight[:, None] * do, 0.0)
            tl.store(DP + (part * ROWS + row)[:, None] * V + column[None, :], grad.to(DP.dtype.element_ty), whole)
        if DPLSE is not None:
            grad = tl.where(seen, weight * (tl.sum(do * (own - merged), 1) + dlse), 0.0)
            # [parts, batch, heads, length]
            tl.store(DPLSE + ((part * (ROWS // (L * HEADS)) + batch) * HEADS + head) * L + token, grad, inside)


# ---- host ------------------------------------------------------------------------------------------------------------


def by_token(lse: Tensor | None) -> Heads | None:
    """An lse [batch, heads, length] with the strides of [batch, length, heads, 1]."""
    return None if lse is None else heads_of(lse.transpose(1, 2).unsqueeze(-1))


def launched(o: Tensor, lse: Tensor) -> tuple[tuple, tuple, dict]:
    """What both kernels take first, and last."""
    parts, batch, length, heads, width = o.shape
    s, t = o.stride(), lse.stride()
    # An lse goes by [batch, length, heads] too
    first = (Heads(o, *s[1:]), s[0], lse, t[0], Heads(lse, t[1], t[3], t[2], 0))
    return first, (batch * length * heads, length, heads, parts, width), {"BLOCK": power_of_two(width)}


def forward(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    merged = torch.empty(o.shape[1:], dtype=o.dtype, device=o.device)
    total = torch.empty(lse.shape[1:], dtype=torch.float32, device=o.device)
    if total.numel():
        first, last, constants = launched(o, lse)
        attention_merge_forward(*first, heads_of(merged), by_token(total), *last, **constants)
    return merged, total


def backward(saved: SimpleNamespace, do: Tensor | None, dlse: Tensor | None) -> tuple:
    o, lse, needs = saved.o, saved.lse, saved.needs
    dp, dplse = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if n in needs else None
        for n, t in (("o", o), ("lse", lse))
    )
    if saved.merged_lse.numel():
        first, last, constants = launched(o, lse)
        attention_merge_backward(
            *first, heads_of(saved.merged), by_token(saved.merged_lse), None if do is None else heads_of(do), by_token(dlse),
            dp, dplse, *last, **constants,
        )  # fmt: skip
    return dp, dplse


attention_merge = Op(
    "attention_merge", reference, inputs, Triton(forward, backward, single),
    where={"o": "float[parts+ batch length heads head_dim+]", "lse": "float32|float64[parts batch heads length]"},
    results={"merged": "o[batch length heads head_dim]", "merged_lse": "lse[batch heads length]"},
    gradient=Gradient(of=("o", "lse"), through=("merged", "merged_lse"), saves=("o", "lse", "merged", "merged_lse")),
    sharding=Sharding(("batch", "length", "heads")), bars=Bars("B", gradient="H"),
)  # fmt: skip
