"""Parts of attention over parts of the keys, merged: the weight of part i is w_i = exp(lse_i - lse), lse = log(sum exp(lse_i)).

    o = sum w_i * o_i;  backward: do_i = w_i * do,  dlse_i = w_i * (do . o_i - sum w_j * (do . o_j) + dlse)

A part that saw nothing, (0, -inf), changes nothing; where all are empty, so is the result.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.tensor import cdiv, power_of_two
from ..device.softmax import LN2, LOG2E
from ..op import Bars, Gradient, Op, Sharding, Triton, single, upcast
from ..runtime.kernel import kernel
from .portable import Heads


def reference(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of all keys, of parts `o` [parts, batch, length, heads, value_dim] and `lse` [parts, batch, heads, length].

    The parts are what `attention_lse` gives for parts of the keys, in any order; without a sink, or with it in one of them alone.
    A part with an lse of -inf saw nothing, and its o may hold anything. Where all saw nothing the result is 0 and -inf. lse is
    fp32, and sums are too, in the order of the parts.
    """
    lse = lse.flatten().view(lse.shape)  # so autograd's dlse is contiguous, as the kernels' is
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
    parts, batch, length = draw.dim("parts", (2, 1, 3, 5)), draw.dim("batch"), draw.dim("length")
    heads = draw.dim("heads")
    lse = draw.tensor(parts, batch, heads, length, dtype=torch.float32, scale=3.0)
    if draw.option("empty", True, False):
        lse = lse.masked_fill(draw.uniform(*lse.shape, dtype=torch.float32) < 0.4, -math.inf)
    return {"o": draw.tensor(parts, batch, length, heads, draw.dim("head_dim", (64, 40, 17, 192))), "lse": lse}


# ---- kernels ---------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """A tensor [parts, batch, tokens, heads, columns] of any strides."""

    data: Any
    stride_p: Any
    stride_b: Any
    stride_t: Any
    stride_h: Any
    stride_d: Any


MERGE = {
    "grid": lambda a: (cdiv(a.ROWS, a.BLOCK_R),),
    "tokens": ("ROWS", "L", "HEADS", "PARTS"),
    "default": lambda a: {"BLOCK_R": max(1, 2048 // a.BLOCK), "num_warps": 4},
}


@triton.jit
def at_row(X, row, L, HEADS):
    """Where rows [n] of [batch, tokens, heads] are in X."""
    token = row // HEADS
    return token // L * X.stride_b + token % L * X.stride_t + row % HEADS * X.stride_h


@triton.jit
def at_columns(X, row, column, L, HEADS):
    return at_row(X, row, L, HEADS)[:, None] + column.to(tl.int64)[None, :] * X.stride_d


@triton.jit
def lse_of(LSE, i, at, inside):
    return tl.load(LSE.data + i.to(tl.int64) * LSE.stride_p + at, inside, float("-inf")).to(tl.float32)


@triton.jit
def weights(LSE, at, inside, PARTS):
    """(base, total) of rows: a part weighs exp(lse - base) of their total, which is 0 where all are empty."""
    top = tl.full([at.shape[0]], float("-inf"), tl.float32)
    for i in range(PARTS):
        top = tl.maximum(top, lse_of(LSE, i, at, inside), propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([at.shape[0]], tl.float32)
    for i in range(PARTS):
        total += tl.exp2((lse_of(LSE, i, at, inside) - base) * LOG2E)
    return base, total


@triton.jit
def share_of(lse, base, total):
    """The weight of a part with this lse."""
    return tl.where(lse == float("-inf"), 0.0, tl.exp2((lse - base) * LOG2E) / total)


@kernel(**MERGE)
def attention_merge_forward(
    O, LSE, MERGED, MERGED_LSE, ROWS, L, HEADS, PARTS, V, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < ROWS
    column = tl.arange(0, BLOCK)
    whole = inside[:, None] & (column < V)[None, :]
    at_lse = at_row(LSE, row, L, HEADS)
    base, total = weights(LSE, at_lse, inside, PARTS)
    at = at_columns(O, row, column, L, HEADS)
    sums = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    for i in range(PARTS):
        lse = lse_of(LSE, i, at_lse, inside)
        seen = whole & (lse != float("-inf"))[:, None]  # what saw nothing may hold NaN
        o = tl.load(O.data + i.to(tl.int64) * O.stride_p + at, seen, 0.0).to(tl.float32)
        sums += share_of(lse, base, total)[:, None] * o
    tl.store(MERGED.data + at_columns(MERGED, row, column, L, HEADS), sums.to(MERGED.data.dtype.element_ty), whole)
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), base + LN2 * tl.log2(tl.where(empty, 1.0, total)))
    tl.store(MERGED_LSE.data + at_row(MERGED_LSE, row, L, HEADS), lse, inside)


@kernel(**MERGE)
def attention_merge_backward(
    O, LSE, DMERGED, DMERGED_LSE, DO, DLSE, ROWS, L, HEADS, PARTS, V, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
):
    """DO and DLSE of the parts: a first pass finds the mean of do . o_i over parts, from which each differs in the second."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < ROWS
    column = tl.arange(0, BLOCK)
    whole = inside[:, None] & (column < V)[None, :]
    at_lse = at_row(LSE, row, L, HEADS)
    base, total = weights(LSE, at_lse, inside, PARTS)
    at = at_columns(O, row, column, L, HEADS)
    grad = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    if DMERGED is not None:
        grad = tl.load(DMERGED.data + at_columns(DMERGED, row, column, L, HEADS), whole, 0.0).to(tl.float32)
    rest = tl.zeros([BLOCK_R], tl.float32)  # what every part's do . o_i is added to
    if DMERGED_LSE is not None:
        rest += tl.load(DMERGED_LSE.data + at_row(DMERGED_LSE, row, L, HEADS), inside, 0.0).to(tl.float32)
    if DLSE is not None and DMERGED is not None:
        for i in range(PARTS):
            lse = lse_of(LSE, i, at_lse, inside)
            seen = whole & (lse != float("-inf"))[:, None]
            o = tl.load(O.data + i.to(tl.int64) * O.stride_p + at, seen, 0.0).to(tl.float32)
            rest -= share_of(lse, base, total) * tl.sum(grad * o, 1)
    for i in range(PARTS):
        part = i.to(tl.int64)
        lse = lse_of(LSE, i, at_lse, inside)
        share = share_of(lse, base, total)
        seen = lse != float("-inf")
        if DO is not None:
            do = tl.where(seen[:, None], share[:, None] * grad, 0.0)
            tl.store(
                DO.data + part * DO.stride_p + at_columns(DO, row, column, L, HEADS),
                do.to(DO.data.dtype.element_ty),
                whole,
            )
        if DLSE is not None:
            o = tl.load(O.data + part * O.stride_p + at, whole & seen[:, None], 0.0).to(tl.float32)
            dlse = tl.where(seen, share * (tl.sum(grad * o, 1) + rest), 0.0)
            tl.store(DLSE.data + part * DLSE.stride_p + at_row(DLSE, row, L, HEADS), dlse, inside)


# ---- host ------------------------------------------------------------------------------------------------------------


def parts_of(t: Tensor | None) -> Parts | None:
    """Of o, or of an lse, which goes by [parts, batch, length, heads, 1] too."""
    if t is None:
        return None
    return Parts(t, *(t if t.dim() == 5 else t.transpose(2, 3).unsqueeze(-1)).stride())


def whole_of(t: Tensor | None) -> Heads | None:
    """The same of what has no parts."""
    if t is None:
        return None
    return Heads(t, *(t if t.dim() == 4 else t.transpose(1, 2).unsqueeze(-1)).stride())


def sizes_of(o: Tensor) -> dict[str, int]:
    parts, batch, length, heads, width = o.shape
    rows = {"ROWS": batch * length * heads, "L": length, "HEADS": heads, "PARTS": parts, "V": width}
    return {**rows, "BLOCK": power_of_two(width)}


def forward(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    merged = torch.empty(o.shape[1:], dtype=o.dtype, device=o.device)
    merged_lse = torch.empty(lse.shape[1:], dtype=torch.float32, device=o.device)
    if merged_lse.numel():
        attention_merge_forward(parts_of(o), parts_of(lse), whole_of(merged), whole_of(merged_lse), **sizes_of(o))
    return merged, merged_lse


def backward(saved: SimpleNamespace, dmerged: Tensor | None, dmerged_lse: Tensor | None) -> tuple:
    o, lse = saved.o, saved.lse
    do, dlse = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if n in saved.needs else None
        for n, t in (("o", o), ("lse", lse))
    )
    if lse.numel():
        given = (parts_of(o), parts_of(lse), whole_of(dmerged), whole_of(dmerged_lse), parts_of(do), parts_of(dlse))
        attention_merge_backward(*given, **sizes_of(o))
    return do, dlse


attention_merge = Op(
    "attention_merge", reference, inputs, Triton(forward, backward, single),
    where={"o": "float[parts+ batch length heads value_dim+]", "lse": "float32|float64[parts batch heads length]"},
    results={"merged": "o[batch length heads value_dim]", "merged_lse": "lse[batch heads length]"},
    gradient=Gradient(of=("o", "lse"), through=("merged", "merged_lse"), saves=("o", "lse")),
    sharding=Sharding(("batch", "length", "heads")), bars=Bars("B", gradient="H"),
)  # fmt: skip
