"""Softmax cross entropy over the last dimension, from logits in any precision; between load and store all is fp32.

    z = logits, or softcap * tanh(logits / softcap);  lse = log(sum_j exp(z_j));  s = label_smoothing;  y the label
    loss = (1 - s) * w_y * (lse - z_y) + s / vocab * sum_j w_j * (lse - z_j) + z_loss * lse**2,  w = weight, or ones
    dz_j = p_j * ((1 - s) * w_y + s / vocab * sum(w) + 2 * z_loss * lse) - [j = y] * (1 - s) * w_y - s / vocab * w_j
    p_j = exp(z_j - lse);  dlogits = dloss * dz * (1 - tanh(logits / softcap)**2)

The forward reads each row once, the backward reads and writes it once. For the backward lse is kept in two parts,
`stats`: a row's largest z, and log2 of sum_j exp(z_j - largest). One number would cost p digits where logits are large.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_labels
from ...core.draw import Draw
from ...core.memory import self_overlapping
from ...core.signature import above, at_least, between
from ...core.target import Target
from ...core.tensor import cdiv, fold, fold_like, power_of_two
from ...device.labels import load_if, offset_of, read_label
from ...device.softmax import LN2, LOG2E, cap, extend, finite_or_zero, merge, tanh
from ...op import Bars, Gradient, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel
from .sharding import of_rows


def reference(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weight: Tensor | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The fp32 loss that `torch.nn.functional.cross_entropy` gives for fp32 logits, classes in the last dimension.

    `softcap` first squeezes the logits into [-softcap, softcap]; `z_loss` adds `z_loss * logsumexp(logits)**2` to every
    row that counts. A row counts if its label is in the vocabulary and is not `ignore_index`. "mean" divides the sum by
    the weights of those rows' labels (1 each without `weight`), so it is NaN if no row counts. An ignored row has loss 0;
    a row whose label is outside the vocabulary has loss NaN and is left out of that divisor. The gradients of both are
    exactly 0, and their logits are not read.

    `inplace_backward` writes the gradient over the logits, so that it takes no memory. It is for eager calls on a GPU (on
    a CPU it changes nothing), and it is an in-place operation on `logits` at the time of the backward: whatever needs
    their values after that, a second backward through this loss included, raises. Logits whose elements share memory, or
    which are a leaf that requires a gradient, are refused.
    """
    return losses(logits, labels, ignore_index, reduction, label_smoothing, softcap, z_loss, weight)


def reference_lse(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(`cross_entropy`, the fp32 logsumexp of every row of softcap(logits) whatever its label). Both have gradients."""
    loss, _, denominator = losses(logits, labels, ignore_index, reduction, label_smoothing, softcap, z_loss, weight)
    lse, stats = log_sum_exp(capped(upcast(logits), softcap))
    return loss, lse, stats, denominator


def capped(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def log_sum_exp(z: Tensor) -> tuple[Tensor, Tensor]:
    """(logsumexp, the two parts in which it is kept)."""
    lse = torch.logsumexp(z, -1)
    largest = z.amax(-1) if z.shape[-1] else z.sum(-1)
    return lse, torch.stack([largest, (lse - largest) / math.log(2)]).detach()


def losses(
    logits, labels, ignore_index, reduction, label_smoothing, softcap, z_loss, weight
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, stats, denominator)."""
    vocab = logits.shape[-1]
    hit = labels.unsqueeze(-1) == torch.arange(vocab, device=labels.device)
    ignored = labels == ignore_index
    counts = hit.any(-1) & ~ignored
    z = capped(upcast(logits).masked_fill(~counts.unsqueeze(-1), 0.0), softcap)
    w = z.new_ones(vocab) if weight is None else upcast(weight).to(z.dtype)
    own = torch.where(hit, w, 0.0).sum(-1)
    below = -torch.log_softmax(z, -1)
    rows = own * torch.where(hit, below, 0.0).sum(-1)
    if label_smoothing > 0:
        rows = (1 - label_smoothing) * rows + label_smoothing / max(vocab, 1) * (w * below).sum(-1)
    lse, stats = log_sum_exp(z)
    rows = (rows + z_loss * lse * lse).masked_fill(~counts, 0.0).masked_fill(~counts & ~ignored, math.nan)
    stats = stats.masked_fill(~counts, 0.0)
    if reduction == "mean":
        denominator = torch.where(counts, own, 0.0).sum()
        return rows.sum() / denominator, stats, denominator
    return rows.sum() if reduction == "sum" else rows, stats, z.new_empty(0)


def inputs(draw: Draw) -> dict:
    tokens, vocab = draw.dim("tokens"), draw.dim("vocab")
    ignore_index = draw.option("ignore_index", -100, 0)
    labels = draw.integers(tokens, high=vocab)
    ignored = draw.uniform(tokens, dtype=torch.float32) < draw.option("ignored", 0.25, 0.0, 1.0)
    return {
        "logits": draw.tensor(tokens, vocab, scale=draw.option("logits_scale", 1.0, 6.0)),
        "labels": torch.where(ignored, ignore_index, labels).to(draw.option("index", torch.int64, torch.int32)),
        "ignore_index": ignore_index,
        "reduction": draw.option("reduction", "none", "mean", "sum"),
        "label_smoothing": draw.option("label_smoothing", 0.0, 0.1),
        "softcap": draw.option("softcap", None, 5.0),
        "z_loss": draw.option("z_loss", 0.0, 1e-2),
        "weight": draw.maybe("weight", lambda: draw.uniform(vocab, low=0.5, high=1.5, dtype=torch.float32)),
    }


# ---------------------------------------------------------------- on the device


class Logits(NamedTuple):
    """Rows of logits, or of their gradient, as kernels take them: a pointer, and how far apart outer rows, inner rows (`fold`) and
    columns are."""

    data: Any
    stride_o: Any
    stride_i: Any
    stride_n: Any


class Weights(NamedTuple):
    """The weights of classes as kernels take them: a pointer, None for ones, their stride, and a pointer to their sum, None where
    nothing needs it."""

    data: Any = None
    stride: Any = None
    sum: Any = None


class Terms(NamedTuple):
    """The numbers in a loss: how much the label counts, and every class, None for not at all; softcap, None for none; z_loss."""

    label_share: Any
    class_share: Any
    softcap: Any
    z_loss: Any


@triton.jit
def read_row(X, Y, W, row, M, INNER, N, stride_yo, stride_yi, stride_xn, stride_w, ignore_index, softcap):
    """(z of the label, its weight, whether the row counts, whether it is ignored)."""
    y, counts, ignored = read_label(Y, row, M, INNER, N, stride_yo, stride_yi, ignore_index)
    own = 1.0
    if W is not None:
        own = load_if(W + y * stride_w, counts)
    return cap(load_if(X + y * stride_xn, counts), softcap), own, counts, ignored


@triton.jit
def take_in(
    X, W, m, s, d, start, stop, col, reads, anchor, stride_xn, stride_w, class_share, softcap, MASKED: tl.constexpr
):
    """Columns start + col of the rows X, [DEPTH, ROWS, LANES], into each lane's own sums: until the row's end nothing
    crosses threads. d sums w * (z - anchor); the anchor is the label's z, near which large logits lose no digits."""
    c = start + col
    P = X + start.to(tl.int64) * stride_xn + col.to(tl.int64) * stride_xn
    inside = (c < stop) & reads
    if MASKED:
        z = cap(tl.load(P, inside, -float("inf")).to(tl.float32), softcap)
        if softcap is not None:
            z = tl.where(inside, z, -float("inf"))
    else:
        z = cap(tl.load(P).to(tl.float32), softcap)
    if class_share is not None:
        e = z - anchor
        if W is not None:
            e *= tl.load(W + c.to(tl.int64) * stride_w, c < stop, 0.0).to(tl.float32)
        if MASKED:
            e = tl.where(inside, e, 0.0)
        d += tl.sum(e, 0)
    m, s = extend(m, s, z)
    return m, s, d


@triton.jit
def store_row(largest, s, d, z, own, WSUM, LOSS, LSE, STATS, row, counts, ignored, M, N, TERMS):
    """The loss of a row from its sums, and what the backward needs of it."""
    spread = tl.log2(s)
    base = finite_or_zero(largest)
    lse = base + spread * LN2
    loss = TERMS.label_share * own * ((base - z) + spread * LN2) + TERMS.z_loss * lse * lse
    if TERMS.class_share is not None:
        weights = N * 1.0
        if WSUM is not None:
            weights = tl.load(WSUM)
        loss += TERMS.class_share * (weights * ((base - finite_or_zero(z)) + spread * LN2) - d)
    # log_softmax makes all of a row with an infinite logit NaN, and so does the backward that meets a NaN `largest`
    loss = tl.where(lse == float("inf"), float("nan"), loss)
    largest = tl.where(largest == float("inf"), float("nan"), largest)
    at = row.to(tl.int64)
    tl.store(LOSS + at, tl.where(counts, loss, tl.where(ignored, 0.0, float("nan"))), row < M)
    if LSE is not None:
        tl.store(LSE + at, lse, row < M)
    else:
        largest = tl.where(counts, largest, 0.0)
        spread = tl.where(counts, spread, 0.0)
    tl.store(STATS + at, largest, row < M)
    tl.store(STATS + M + at, spread, row < M)


def simple(N: int, stride_n: int, class_share: float | None, softcap: float | None) -> bool:
    """Whether loads are of 16 bytes and nothing but the loss itself is computed, so that registers allow many at once."""
    return class_share is None and softcap is None and stride_n == 1 and N % 16 == 0


def _simple(a) -> bool:
    return simple(a.N, a.X.stride_n, a.TERMS.class_share, a.TERMS.softcap)


def _lanes(a) -> dict:
    # Simple bf16: 8 loads of 16 bytes a thread in 72 registers, seven programs keep 112 KiB of loads in flight on an SM.
    LANES = min(1024, max(16, power_of_two(a.N)))
    deepest = 16 // a.X.data.element_size() if _simple(a) else 2 if a.X.stride_n == 1 else 1
    depth = min(deepest, power_of_two(cdiv(a.N, LANES)))
    return {"ROWS": 1024 // LANES, "LANES": LANES, "DEPTH": depth, "num_warps": 4}


def _lane_candidates(a) -> list[dict]:
    tried = [{"ROWS": 1, "LANES": 256 * w, "DEPTH": d, "num_warps": w} for w in (2, 4, 8, 16) for d in (2, 4, 8)]
    return [_lanes(a), *(t for t in tried if _simple(a) and t["LANES"] <= a.N)]


TOKENS = ("M", "INNER", "stride_yo", "stride_yi", "ignore_index")


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS), a.SPLITS),
    tokens=TOKENS,
    tune_by=("N",),
    default=_lanes,
    candidates=_lane_candidates,
)
def cross_entropy_forward(
    X, Y, WEIGHTS, LOSS, LSE, STATS, PART, M, INNER, N, stride_yo, stride_yi, ignore_index, TERMS, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """ROWS short rows, or one row, or one of SPLITS parts of it, whose sums then go to PART [3, M, SPLITS]."""
    BLOCK: tl.constexpr = LANES * DEPTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x = X.data + offset_of(row, INNER, X.stride_o, X.stride_i)
    z, own, counts, ignored = read_row(
        x, Y, WEIGHTS.data, row, M, INNER, N, stride_yo, stride_yi, X.stride_n, WEIGHTS.stride, ignore_index, TERMS.softcap
    )  # fmt: skip
    reads = counts if LSE is None else row < M
    span = (N + (SPLITS * BLOCK - 1)) // (SPLITS * BLOCK) * BLOCK
    start = tl.program_id(1) * span
    stop = tl.where(tl.max(tl.max(reads.to(tl.int32), 1), 0) > 0, tl.minimum(start + span, N), start)
    whole = start
    if ROWS == 1:
        whole += tl.maximum(stop - start, 0) // BLOCK * BLOCK
    col = tl.arange(0, DEPTH)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    anchor = finite_or_zero(z)
    m = tl.full([ROWS, LANES], -float("inf"), tl.float32)
    s = tl.zeros([ROWS, LANES], tl.float32)
    d = tl.zeros([ROWS, LANES], tl.float32)
    for at in range(start, whole, BLOCK):
        m, s, d = take_in(
            x, WEIGHTS.data, m, s, d, at, stop, col, reads, anchor, X.stride_n, WEIGHTS.stride, TERMS.class_share,
            TERMS.softcap, False,
        )  # fmt: skip
    for at in range(whole, stop, BLOCK):
        m, s, d = take_in(
            x, WEIGHTS.data, m, s, d, at, stop, col, reads, anchor, X.stride_n, WEIGHTS.stride, TERMS.class_share,
            TERMS.softcap, True,
        )  # fmt: skip
    largest, total = merge(m, s)
    d = tl.sum(d, 1, keep_dims=True)
    if SPLITS == 1:
        store_row(largest, total, d, z, own, WEIGHTS.sum, LOSS, LSE, STATS, row, counts, ignored, M, N, TERMS)
    else:
        P = PART + row.to(tl.int64) * SPLITS + tl.program_id(1)
        tl.store(P, largest, row < M)
        tl.store(P + M.to(tl.int64) * SPLITS, total, row < M)
        tl.store(P + M.to(tl.int64) * (2 * SPLITS), d, row < M)


@kernel(grid=lambda a: (a.M,), tokens=TOKENS, default=lambda a: {"num_warps": 1})
def cross_entropy_merge(
    X, Y, WEIGHTS, LOSS, LSE, STATS, PART, M, INNER, N, stride_yo, stride_yi, ignore_index, TERMS, SPLITS: tl.constexpr
):  # fmt: skip
    """A row from its parts."""
    row = tl.program_id(0) + tl.arange(0, 1)[:, None]
    x = X.data + offset_of(row, INNER, X.stride_o, X.stride_i)
    z, own, counts, ignored = read_row(
        x, Y, WEIGHTS.data, row, M, INNER, N, stride_yo, stride_yi, X.stride_n, WEIGHTS.stride, ignore_index, TERMS.softcap
    )  # fmt: skip
    P = PART + row.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)[None, :]
    largest, total = merge(tl.load(P), tl.load(P + M.to(tl.int64) * SPLITS))
    d = tl.sum(tl.load(P + M.to(tl.int64) * (2 * SPLITS)), 1, keep_dims=True)
    store_row(largest, total, d, z, own, WEIGHTS.sum, LOSS, LSE, STATS, row, counts, ignored, M, N, TERMS)


@kernel(grid=lambda a: (1,), tokens=TOKENS, default=lambda a: {"BLOCK": 4096, "num_warps": 16})
def cross_entropy_reduce(
    ROWS, Y, W, LOSS, DENOMINATOR, M, INNER, N, stride_yo, stride_yi, stride_w, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum of the rows' losses, or their mean and its denominator. One program, float64: one order, all digits."""
    loss = tl.zeros([BLOCK], tl.float64)
    weights = tl.zeros([BLOCK], tl.float64)
    for start in range(0, M, BLOCK):
        row = start + tl.arange(0, BLOCK)
        loss += tl.load(ROWS + row, row < M, 0.0).to(tl.float64)
        if DENOMINATOR is not None:
            y, counts, _ = read_label(Y, row, M, INNER, N, stride_yo, stride_yi, ignore_index)
            if W is not None:
                weights += tl.load(W + y * stride_w, counts, 0.0).to(tl.float64)
            else:
                weights += tl.where(counts, 1.0, 0.0).to(tl.float64)
    out = tl.sum(loss, 0).to(tl.float32)
    if DENOMINATOR is not None:
        denominator = tl.sum(weights, 0).to(tl.float32)
        tl.store(DENOMINATOR, denominator)
        out = tl.div_rn(out, denominator)
    tl.store(LOSS, out)


@kernel(grid=lambda a: (1,), default=lambda a: {"BLOCK": 8192, "num_warps": 16})
def cross_entropy_sum_weights(W, WSUM, N, stride_w, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = start.to(tl.int64) + tl.arange(0, BLOCK)
        total += tl.load(W + c * stride_w, c < N, 0.0).to(tl.float32)
    tl.store(WSUM, tl.sum(total, 0))


def tile(N: int, simple: bool) -> dict:
    COLS = min(4096 if simple else 2048, max(16, power_of_two(N)))
    return {"ROWS": max(1, 1024 // COLS), "COLS": COLS, "num_warps": 4}


def tile_candidates(N: int, simple: bool) -> list[dict]:
    tried = [{"ROWS": 1, "COLS": cols, "num_warps": w} for cols in (2048, 4096, 8192, 16384) for w in (4, 8, 16)]
    return [tile(N, simple), *(t for t in tried if simple and t["COLS"] <= N)]


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.N, a.COLS),),
    tokens=(*TOKENS, "stride_go", "stride_gi", "stride_ho", "stride_hi"),
    tune_by=("N",),
    default=lambda a: tile(a.N, _simple(a)),
    candidates=lambda a: tile_candidates(a.N, _simple(a)),
)
def cross_entropy_backward(
    X, Y, WEIGHTS, STATS, DENOMINATOR, G, H, DX, M, INNER, N, stride_yo, stride_yi, stride_go, stride_gi, stride_ho,
    stride_hi, ignore_index, TERMS, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One tile; G and H are the gradients of loss and lse. DX may be X: an element is read by no other than its writer."""
    softcap = TERMS.softcap
    tiles = (N + (COLS - 1)) // COLS
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)[None, :]
    y, counts, _ = read_label(Y, row, M, INNER, N, stride_yo, stride_yi, ignore_index)
    reads = counts if H is None else row < M
    c = col.to(tl.int64)
    P = X.data + offset_of(row, INNER, X.stride_o, X.stride_i) + c * X.stride_n
    x = tl.load(P, (col < N) & reads, 0.0).to(tl.float32)
    largest = load_if(STATS + row.to(tl.int64), reads)
    spread = load_if(STATS + M + row.to(tl.int64), reads)
    g = 0.0
    if G is not None:
        g = load_if(G + offset_of(row, INNER, stride_go, stride_gi), counts)
        if DENOMINATOR is not None:
            g = tl.where(counts, tl.div_rn(g, tl.zeros_like(g) + tl.load(DENOMINATOR)), 0.0)
    own = g * TERMS.label_share
    if WEIGHTS.data is not None:
        own *= load_if(WEIGHTS.data + y * WEIGHTS.stride, counts)
    rest = g * (2.0 * TERMS.z_loss) * (largest + spread * LN2)
    if H is not None:
        rest += load_if(H + offset_of(row, INNER, stride_ho, stride_hi), row < M)
    t = x
    if softcap is not None:
        t = tanh(x * (1.0 / softcap))
        x = softcap * t
    p = tl.exp2((x - largest) * LOG2E - spread)
    dz = own * tl.where(col == y.to(tl.int32), p - 1.0, p) + rest * p
    if TERMS.class_share is not None:
        if WEIGHTS.data is not None:
            share = g * TERMS.class_share
            expected = p * tl.load(WEIGHTS.sum)
            dz += share * (expected - tl.load(WEIGHTS.data + c * WEIGHTS.stride, col < N, 0.0).to(tl.float32))
        else:
            dz += g * TERMS.class_share * (p * N - 1.0)
    if softcap is not None:
        dz *= 1.0 - t * t
    D = DX.data + offset_of(row, INNER, DX.stride_o, DX.stride_i) + c * DX.stride_n
    tl.store(D, dz.to(DX.data.dtype.element_ty), (row < M) & (col < N))


# ---------------------------------------------------------------- on the host

PER_SM = 8  # programs per SM for which rows are split when they are few
NARROWEST = 8192  # columns of a part, at least


def splits(M: int, N: int, sms: int) -> int:
    """How many parts a row is split into: enough to fill the chip when rows are few.

    Rows are not split to even out the last wave of many of them: two parts cost 8 % at 4096 x 32000 and gain 1 % at 4096 x 151936
    (H200, November 2026).
    """
    few = PER_SM * sms // max(M, 1)
    return power_of_two(min(few, cdiv(N, NARROWEST))) if few > 1 else 1


def terms_of(a: SimpleNamespace, vocab: int) -> Terms:
    class_share = a.label_smoothing / max(vocab, 1) if a.label_smoothing > 0 else None
    return Terms(1.0 - a.label_smoothing, class_share, None if a.softcap is None else float(a.softcap), float(a.z_loss))


def weights_of(weight: Tensor | None, terms: Terms) -> Weights:
    """The weights, and their sum where smoothing needs it."""
    if weight is None:
        return Weights()
    if terms.class_share is None:
        return Weights(weight, weight.stride(0))
    total = torch.empty(1, dtype=torch.float32, device=weight.device)
    cross_entropy_sum_weights(weight, total, weight.shape[0], weight.stride(0))
    return Weights(weight, weight.stride(0), total)


def launch_forward(logits: Tensor, labels: Tensor, lse: Tensor | None, **options) -> tuple[Tensor, Tensor, Tensor]:
    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    a = SimpleNamespace(**options)
    x, inner, strides = fold(logits)
    y, steps = fold_like(labels, inner)
    M, N = labels.numel(), logits.shape[-1]
    check_labels("cross_entropy", labels, N, a.ignore_index)
    terms, stride_w = terms_of(a, N), 0 if a.weight is None else a.weight.stride(0)
    stats, rows = fp32(2, *labels.shape), fp32(*labels.shape)
    SPLITS = splits(M, N, Target.at(logits.device).sms)
    part = fp32(3, M, SPLITS) if SPLITS > 1 else None
    weights = weights_of(a.weight, terms)
    operands = (Logits(x, *strides), y, weights, rows, lse, stats, part, M, inner, N, *steps, a.ignore_index, terms)
    cross_entropy_forward(*operands, SPLITS=SPLITS)
    if SPLITS > 1:
        cross_entropy_merge(*operands, SPLITS=SPLITS)
    if a.reduction == "none":
        return rows, stats, fp32(0)
    loss, denominator = fp32(), fp32() if a.reduction == "mean" else None
    cross_entropy_reduce(rows, y, a.weight, loss, denominator, M, inner, N, *steps, stride_w, a.ignore_index)
    return loss, stats, fp32(0) if denominator is None else denominator


def forward(logits, labels, **options) -> tuple[Tensor, Tensor, Tensor]:
    return launch_forward(logits, labels, None, **options)


def forward_lse(logits, labels, **options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    loss, stats, denominator = launch_forward(logits, labels, lse, **options)
    return loss, lse, stats, denominator


def backward(saved: SimpleNamespace, dloss: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor]:
    logits, weight = saved.logits, saved.weight
    x, inner, strides = fold(logits)
    y, steps = fold_like(saved.labels, inner)
    M, N = saved.labels.numel(), logits.shape[-1]
    terms = terms_of(saved, N)
    out, places = x, strides
    if not saved.inplace_backward:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        places = (inner * N if inner < M else 0, N, 1)
    g, h, g_steps, h_steps = dloss, dlse, (0, 0), (0, 0)
    if g is not None and saved.reduction == "none":
        g, g_steps = fold_like(g, inner)
    if h is not None:
        h, h_steps = fold_like(h, inner)
    denominator = saved.denominator if saved.reduction == "mean" else None
    cross_entropy_backward(
        Logits(x, *strides), y, weights_of(weight, terms), saved.stats, denominator, g, h, Logits(out, *places), M, inner, N,
        *steps, *g_steps, *h_steps, saved.ignore_index, terms,
    )  # fmt: skip
    if not saved.inplace_backward:
        return (out,)
    if out is not logits:
        logits.copy_(out)
    torch.autograd.graph.increment_version(logits)
    return (logits.detach(),)


def check(logits: Tensor, inplace_backward: bool, *, op: str = "cross_entropy", **_) -> None:
    if not inplace_backward:
        return
    if self_overlapping(logits):
        raise ValueError(f"{op}: inplace_backward would write logits, whose elements share memory")
    if torch.is_grad_enabled() and logits.requires_grad and logits.is_leaf:
        raise ValueError(f"{op}: inplace_backward would overwrite logits, a leaf that requires a gradient")


WHERE = {
    "logits": "float[... vocab]", "labels": "int[...]", "weight": "float[vocab]", "label_smoothing": between(0.0, 1.0),
    "softcap": above(0.0), "z_loss": at_least(0.0),
}  # fmt: skip
GRADIENT = Gradient(
    of=("logits",), saves=("logits", "labels", "weight", "stats", "denominator"), overwrites="inplace_backward"
)  # fmt: skip
HIDDEN = ("stats", "denominator")


def loss_row(a: SimpleNamespace) -> str:
    """The loss of every row, or one number."""
    kind = "wide(hidden)" if hasattr(a, "hidden") else "wide(logits)"
    return f"{kind}[...]" if a.reduction == "none" else f"{kind}[]"


cross_entropy_lse = Op(
    "cross_entropy_lse", reference_lse, inputs, Triton(forward_lse, backward, single), where=WHERE, sibling="cross_entropy",
    results={"loss": loss_row, "lse": "wide(logits)[...]"}, hidden=HIDDEN, gradient=replace(GRADIENT, through=("loss", "lse")),
    out=Out(contiguous=("loss", "lse")), check=check, sharding=of_rows, bars=Bars("D"),
)  # fmt: skip
cross_entropy = Op(
    "cross_entropy", reference, inputs, Triton(forward, backward, single), where=WHERE, results={"loss": loss_row},
    hidden=HIDDEN, gradient=GRADIENT, out=Out(contiguous=("loss",)), check=check, sharding=of_rows, bars=Bars("D"),
)  # fmt: skip
