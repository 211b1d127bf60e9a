"""Softmax cross entropy of logits whose columns are spread over the ranks of a process group.

Each rank reduces its columns of a row to five numbers, its `parts`, which are all that is exchanged; y is the label:

    base = floor(max_j z_j + 1/3);  total = sum_j exp(z_j - base);  own = z_y, or 0 if another rank has it;
    slant = sum_j (z_j - base);  count = columns;    z = logits, or softcap * tanh(logits / softcap)
    lse = log(sum over ranks of total * exp(base)),  loss as in `cross_entropy`

    dlogits_j = (dtotal * exp(z_j - base) + [j = y] * down + dslant) * (1 - tanh(logits_j / softcap)**2)

Where `base` lies does not matter but for digits. Being a whole number near the maximum it has no gradient, so that the
reference can be held against finite differences; a third, so that no usual softcap lies on a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor

from ...core.debug import check_labels
from ...core.draw import Draw
from ...core.signature import above, at_least, between
from ...core.tensor import cdiv, fold, fold_like, power_of_two, vector
from ...device.labels import load_if, offset_of, read_label
from ...device.softmax import LN2, LOG2E, cap, finite_or_zero, merge, tanh
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .cross_entropy import capped, simple, take_in, tile, tile_candidates
from .cross_entropy import check as check_overwriting
from .sharding import ADVICE

PARTS = tl.constexpr(5)


def reference_parts(
    logits: Tensor,
    labels: Tensor,
    *,
    start: int = 0,
    classes: int | None = None,
    ignore_index: int = -100,
    slant: bool = False,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """What `cross_entropy_join` needs of a row's columns `start` to `start + logits.shape[-1]`: fp32 `[..., 5]`.

    These are base, total, own, slant and count: sums over the columns here of exp(z - base) and, if `slant` asks for it, of
    z - base, with a whole number `base` near the largest z; z of the label, 0 if it is not among these columns; how many
    columns there are. Labels are those of all `classes` (`start` + the columns here, if not given). A row whose label is
    `ignore_index` or no class is not read: its parts and its gradient are 0.

    `inplace_backward` writes the gradient over the logits, as in `cross_entropy`.
    """
    columns = logits.shape[-1]
    counts, _ = standing(labels, start + columns if classes is None else classes, ignore_index)
    z = capped(upcast(logits).masked_fill(~counts.unsqueeze(-1), 0.0), softcap)
    known = z.detach().masked_fill(z.isnan(), -math.inf)
    top = known.amax(-1, keepdim=True) if columns else z.new_zeros(*z.shape[:-1], 1)
    # In fp32 whatever the logits are: past 2**20 a third is rounded, and every precision must step at the same place
    base = torch.floor(top.masked_fill(top.isinf(), 0.0).float() + 1 / 3).to(z.dtype)
    hit = (labels - start).unsqueeze(-1) == torch.arange(columns, device=labels.device)
    sums = [
        torch.exp(z - base).sum(-1),
        torch.where(hit, z, 0.0).sum(-1),
        (z - base if slant else torch.zeros_like(z)).sum(-1),
    ]
    made = torch.stack([base.squeeze(-1), *sums, torch.full_like(sums[0], columns)], -1)
    return torch.where(counts.unsqueeze(-1), made, 0.0)


def reference_join(
    parts: Tensor,
    gathered: Tensor,
    labels: Tensor,
    *,
    classes: int,
    rank: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of every row from the parts that `cross_entropy_parts` gave, each for some columns of it.

    `gathered` has the parts of all shards of the columns; in place of shard `rank` of them `parts` is read, which carries the
    gradient. Rows that do not count have the loss that they have in `cross_entropy`.
    """
    counts, ignored = standing(labels, classes, ignore_index)
    both = torch.cat([upcast(gathered)[:rank], upcast(parts)[None], upcast(gathered)[rank + 1 :]])
    both = both.masked_fill(~counts.unsqueeze(-1), 1.0)  # 0 times the gradient of a logarithm may be NaN
    base, total, own, slant, count = both.unbind(-1)
    live = total != 0  # the base of nothing means nothing
    top = torch.where(live, base, -math.inf).detach().amax(0)
    top = top.masked_fill(top.isinf(), 0.0)
    factor = torch.where(live, torch.exp(torch.where(live, base, 0.0) - top), 0.0)
    whole = (total * factor).sum(0)
    whole = whole * torch.where(whole == math.inf, math.nan, 1.0)  # as log_softmax has it
    rest = torch.log(whole)
    label_share, class_share, lse = 1 - label_smoothing, label_smoothing / max(classes, 1), top + rest
    rows = label_share * ((top - own.sum(0)) + rest) + z_loss * lse * lse
    slope, flat = label_share + 2 * z_loss * lse, torch.zeros_like(rows)
    away = (top - base[rank]) + rest
    if label_smoothing > 0:
        rows = rows + class_share * (count * ((top - base) + rest) - slant).sum(0)
        slope = slope + class_share * count.sum(0)
    rows = rows.masked_fill(~counts, 0.0).masked_fill(~counts & ~ignored, math.nan)
    steep = slope * factor[rank] / whole
    smooth = [flat - class_share, class_share * away] if label_smoothing > 0 else [flat, flat]
    pull = class_share * count[rank] if label_smoothing > 0 else flat
    slopes = torch.stack([steep * total[rank] - pull, steep, flat - label_share, *smooth], -1)
    return rows, torch.where(counts.unsqueeze(-1), slopes, 0.0).detach()


def standing(labels: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(which rows count, which are ignored)."""
    ignored = labels == ignore_index
    return (labels >= 0) & (labels < classes) & ~ignored, ignored


def inputs_parts(draw: Draw) -> dict:
    tokens, vocab = draw.dim("tokens"), draw.dim("vocab")
    start = draw.option("start", 0, 40)
    classes = start + vocab + draw.option("further", 0, 24)
    ignore_index = draw.option("ignore_index", -100, 0)
    ignored = draw.uniform(tokens, dtype=torch.float32) < draw.option("ignored", 0.25, 0.0)
    labels = draw.integers(tokens, high=classes, dtype=draw.option("index", torch.int64, torch.int32))
    return {
        "logits": draw.tensor(tokens, vocab, scale=draw.option("logits_scale", 1.0, 6.0)),
        "labels": labels.masked_fill(ignored, ignore_index),
        "start": start,
        "classes": classes,
        "ignore_index": ignore_index,
        "slant": draw.option("slant", False, True),
        "softcap": draw.option("softcap", None, 5.0),
    }


def inputs_join(draw: Draw) -> dict:
    tokens, shards = draw.dim("tokens"), draw.option("shards", 2, 1, 3)
    classes = 50 * shards
    labels = draw.integers(tokens, high=classes)
    labels = labels.masked_fill(draw.uniform(tokens, dtype=torch.float32) < 0.25, -100)
    single = {"dtype": torch.float32}
    columns = [
        draw.tensor(shards, tokens, scale=3.0, **single).floor(),
        draw.uniform(shards, tokens, low=0.5, high=30.0, **single),
        draw.tensor(shards, tokens, **single),
        draw.tensor(shards, tokens, scale=50.0, shift=-100.0, **single),
        draw.uniform(shards, tokens, low=50.0, high=50.0, **single),
    ]
    gathered = torch.stack(columns, -1)
    return {
        "parts": gathered[-1].clone(),
        "gathered": gathered,
        "labels": labels,
        "classes": classes,
        "rank": shards - 1,
        "label_smoothing": draw.option("label_smoothing", 0.0, 0.1),
        "z_loss": draw.option("z_loss", 0.0, 1e-2),
    }


# ---------------------------------------------------------------- on the device


def _simple(a) -> bool:
    return simple(a.N, a.stride_xn, a.class_share, a.softcap)


def _lanes(a) -> dict:
    # At least four blocks to a row where rows allow: the last, masked one costs as much as a whole one.
    LANES = min(1024, max(16, power_of_two(a.N)))
    deepest = 16 // a.X.element_size() if _simple(a) else 2 if a.stride_xn == 1 else 1
    depth = min(deepest, max(1, power_of_two(a.N // (4 * LANES) + 1) // 2))
    return {"ROWS": 1024 // LANES, "LANES": LANES, "DEPTH": depth, "num_warps": 4}


def _lane_candidates(a) -> list[dict]:
    tried = [{"ROWS": 1, "LANES": 256 * w, "DEPTH": d, "num_warps": w} for w in (4, 8) for d in (2, 4, 8)]
    return [_lanes(a), *(t for t in tried if _simple(a) and t["LANES"] <= a.N)]


ROW_SIZES = ("M", "INNER", "START", "CLASSES", "stride_yo", "stride_yi", "ignore_index")


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS),),
    tokens=ROW_SIZES,
    tune_by=("N",),
    default=_lanes,
    candidates=_lane_candidates,
)
def cross_entropy_parts_forward(
    X, Y, OUT, M, INNER, N, START, CLASSES, stride_xo, stride_xi, stride_xn, stride_yo, stride_yi, ignore_index, class_share,
    softcap, ROWS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """ROWS short rows, or one row. Slants are wanted unless `class_share` is None."""
    BLOCK: tl.constexpr = LANES * DEPTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    X += offset_of(row, INNER, stride_xo, stride_xi)
    y, counts, _ = read_label(Y, row, M, INNER, CLASSES, stride_yo, stride_yi, ignore_index)
    here = counts & (y >= START) & (y < START + N)
    z = cap(load_if(X + tl.where(here, y - START, 0) * stride_xn, here), softcap)
    anchor = 0.0
    if class_share is not None:  # near any number of the row large logits lose no digits
        anchor = finite_or_zero(cap(load_if(X, counts & (N > 0)), softcap))
    stop = tl.where(tl.max(tl.max(counts.to(tl.int32), 1), 0) > 0, N, 0)
    whole = 0
    if ROWS == 1:
        whole = stop // BLOCK * BLOCK
    col = tl.arange(0, DEPTH)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    m = tl.full([ROWS, LANES], -float("inf"), tl.float32)
    s = tl.zeros([ROWS, LANES], tl.float32)
    d = tl.zeros([ROWS, LANES], tl.float32)
    for at in range(0, whole, BLOCK):
        m, s, d = take_in(X, None, m, s, d, at, stop, col, counts, anchor, stride_xn, 0, class_share, softcap, False)
    for at in range(whole, stop, BLOCK):
        m, s, d = take_in(X, None, m, s, d, at, stop, col, counts, anchor, stride_xn, 0, class_share, softcap, True)
    largest, total = merge(m, s)
    top = finite_or_zero(largest)
    base = tl.floor(top + 1 / 3)
    total *= tl.exp2((top - base) * LOG2E)
    OUT += row.to(tl.int64) * PARTS
    tl.store(OUT, tl.where(counts, base, 0.0), row < M)
    tl.store(OUT + 1, tl.where(counts, total, 0.0), row < M)
    tl.store(OUT + 2, tl.where(here, z, 0.0), row < M)
    slant = tl.zeros_like(base)
    if class_share is not None:
        slant = tl.sum(d, 1, keep_dims=True) + N * (anchor - base)
    tl.store(OUT + 3, tl.where(counts, slant, 0.0), row < M)
    tl.store(OUT + 4, tl.where(counts, N * 1.0, 0.0), row < M)


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.N, a.COLS),),
    tokens=ROW_SIZES,
    tune_by=("N",),
    default=lambda a: tile(a.N, _simple(a)),
    candidates=lambda a: tile_candidates(a.N, _simple(a)),
)
def cross_entropy_parts_backward(
    X, Y, OUT, G, DX, M, INNER, N, START, CLASSES, stride_xo, stride_xi, stride_xn, stride_do, stride_di, stride_dn,
    stride_yo, stride_yi, ignore_index, class_share, softcap, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One tile; G is the gradient of OUT. DX may be X: an element is read by no other than its writer."""
    tiles = (N + (COLS - 1)) // COLS
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)[None, :]
    y, counts, _ = read_label(Y, row, M, INNER, CLASSES, stride_yo, stride_yi, ignore_index)
    c = col.to(tl.int64)
    P = X + offset_of(row, INNER, stride_xo, stride_xi) + c * stride_xn
    x = tl.load(P, (col < N) & counts, 0.0).to(tl.float32)
    at = row.to(tl.int64) * PARTS
    base = load_if(OUT + at, counts)
    steep = load_if(G + at + 1, counts)
    own = load_if(G + at + 2, counts)
    t = x
    if softcap is not None:
        t = tanh(x * (1.0 / softcap))
        x = softcap * t
    dz = steep * tl.exp2((x - base) * LOG2E)
    dz = tl.where(col == (y - START).to(tl.int32), dz + own, dz)
    if class_share is not None:
        dz += load_if(G + at + 3, counts)
    if softcap is not None:
        dz *= 1.0 - t * t
    D = DX + offset_of(row, INNER, stride_do, stride_di) + c * stride_dn
    tl.store(D, dz.to(DX.dtype.element_ty), (row < M) & (col < N))


@kernel(
    grid=lambda a: (cdiv(a.T, a.BLOCK),),
    tokens=("T", "SHARDS", "RANK", "CLASSES", "ignore_index"),
    default=lambda a: {"BLOCK": 128, "num_warps": 4},
)
def cross_entropy_join_forward(
    OWN, ALL, Y, LOSS, SLOPES, T, SHARDS, RANK, CLASSES, ignore_index, label_share, class_share, z_loss, BLOCK: tl.constexpr
):  # fmt: skip
    """A few rows: their losses, and the gradients of those for OWN. Every rank adds in the same order."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, counts, ignored = read_label(Y, t, T, T, CLASSES, 0, 1, ignore_index)
    at = t.to(tl.int64) * PARTS
    own_base = load_if(OWN + at, counts)
    own_total = load_if(OWN + at + 1, counts)
    top = tl.where(own_total != 0.0, own_base, -float("inf"))
    for r in range(0, SHARDS):
        P = ALL + r.to(tl.int64) * T * PARTS + at
        taken = counts & (r != RANK)
        live = taken & (load_if(P + 1, taken) != 0.0)
        top = tl.maximum(top, tl.where(live, load_if(P, taken), -float("inf")))
    top = finite_or_zero(top)
    whole = tl.zeros([BLOCK], tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    even = tl.zeros([BLOCK], tl.float32)
    for r in range(0, SHARDS):
        P = tl.where(r == RANK, OWN + at, ALL + r.to(tl.int64) * T * PARTS + at)
        base = load_if(P, counts)
        total = load_if(P + 1, counts)
        whole += tl.where(total != 0.0, total * tl.exp2((base - top) * LOG2E), 0.0)
        z += load_if(P + 2, counts)
        if class_share is not None:
            columns = load_if(P + 4, counts)
            count += columns
            even += columns * (top - base) - load_if(P + 3, counts)
    whole = tl.where(whole == float("inf"), float("nan"), whole)  # as log_softmax has it
    rest = tl.log2(whole) * LN2
    lse = top + rest
    loss = label_share * ((top - z) + rest) + z_loss * lse * lse
    slope = label_share + 2.0 * z_loss * lse
    near = tl.where(own_total != 0.0, tl.exp2((own_base - top) * LOG2E), 0.0)
    slant = tl.zeros([BLOCK], tl.float32)
    pull = tl.zeros([BLOCK], tl.float32)
    away = tl.zeros([BLOCK], tl.float32)
    if class_share is not None:
        loss += class_share * (even + count * rest)
        slope += class_share * count
        slant -= class_share
        pull = class_share * load_if(OWN + at + 4, counts)
        away = class_share * ((top - own_base) + rest)
    steep = slope * tl.div_rn(near, whole)
    tl.store(LOSS + t, tl.where(counts, loss, tl.where(ignored, 0.0, float("nan"))), t < T)
    tl.store(SLOPES + at, tl.where(counts, steep * own_total - pull, 0.0), t < T)
    tl.store(SLOPES + at + 1, tl.where(counts, steep, 0.0), t < T)
    tl.store(SLOPES + at + 2, tl.where(counts, 0.0 - label_share, 0.0), t < T)
    tl.store(SLOPES + at + 3, tl.where(counts, slant, 0.0), t < T)
    tl.store(SLOPES + at + 4, tl.where(counts, away, 0.0), t < T)


# ---------------------------------------------------------------- on the host


def sizes_of(a: SimpleNamespace) -> tuple:
    """What both passes are launched with: the logits, the labels, (M, INNER, N, START, CLASSES), strides of both, options."""
    x, inner, strides = fold(a.logits)
    y, steps = fold_like(a.labels, inner)
    columns = a.logits.shape[-1]
    classes = a.start + columns if a.classes is None else a.classes
    sizes = a.labels.numel(), inner, columns, a.start, classes
    options = a.ignore_index, 1.0 if a.slant else None, None if a.softcap is None else float(a.softcap)
    return x, y, sizes, strides, steps, options


def forward_parts(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    x, y, sizes, strides, steps, given = sizes_of(SimpleNamespace(logits=logits, labels=labels, **options))
    check_labels("cross_entropy_parts", labels, sizes[4], options["ignore_index"])
    parts = torch.empty((*labels.shape, PARTS.value), dtype=torch.float32, device=logits.device)
    cross_entropy_parts_forward(x, y, parts, *sizes, *strides, *steps, *given)
    return parts


def backward_parts(saved: SimpleNamespace, dparts: Tensor) -> tuple[Tensor]:
    x, y, sizes, strides, steps, given = sizes_of(saved)
    logits, out, places = saved.logits, x, strides
    if not saved.inplace_backward:
        M, inner, N = sizes[:3]
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        places = (inner * N if inner < M else 0, N, 1)
    cross_entropy_parts_backward(
        x, y, saved.parts, dparts.contiguous(), out, *sizes, *strides, *places, *steps, *given
    )  # fmt: skip
    if not saved.inplace_backward:
        return (out,)
    if out is not logits:
        logits.copy_(out)
    torch.autograd.graph.increment_version(logits)
    return (logits.detach(),)


def forward_join(parts: Tensor, gathered: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(**options)
    (tokens,) = labels.shape
    loss = torch.empty(tokens, dtype=torch.float32, device=parts.device)
    slopes = torch.empty((tokens, PARTS.value), dtype=torch.float32, device=parts.device)
    class_share = a.label_smoothing / max(a.classes, 1) if a.label_smoothing > 0 else None
    cross_entropy_join_forward(
        parts.contiguous(), gathered.contiguous(), vector(labels), loss, slopes, tokens, gathered.shape[0], a.rank,
        a.classes, a.ignore_index, 1.0 - a.label_smoothing, class_share, float(a.z_loss),
    )  # fmt: skip
    return loss, slopes


def backward_join(saved: SimpleNamespace, dloss: Tensor) -> tuple[Tensor]:
    return ((dloss.unsqueeze(-1) * saved.slopes).to(saved.parts.dtype),)


def check_parts(logits: Tensor, start: int, classes: int | None, inplace_backward: bool, **_: Any) -> None:
    end = start + logits.shape[-1]
    if start < 0 or end >= 2**31:
        raise ValueError(f"cross_entropy_parts: start must be at least 0, and the last column below 2**31, got {start}")
    if classes is not None and not end <= classes < 2**31:
        raise ValueError(
            f"cross_entropy_parts: classes must be from {end}, where logits end, to 2**31 - 1, got {classes}"
        )
    check_overwriting(logits, inplace_backward, op="cross_entropy_parts")


def check_join(gathered: Tensor, rank: int, classes: int, **_: Any) -> None:
    if not 0 <= rank < gathered.shape[0]:
        raise ValueError(f"cross_entropy_join: rank must be one of the {gathered.shape[0]} in gathered, got {rank}")
    if not 0 <= classes < 2**31:
        raise ValueError(f"cross_entropy_join: classes must be from 0 to 2**31 - 1, got {classes}")


cross_entropy_parts = Op(
    "cross_entropy_parts", reference_parts, inputs_parts, Triton(forward_parts, backward_parts, single),
    where={"logits": "float[... vocab]", "labels": "int[...]", "softcap": above(0.0)},
    results={"parts": "wide(logits)[... 5]"},
    gradient=Gradient(of=("logits",), saves=("logits", "labels", "parts"), overwrites="inplace_backward"),
    out=Out(contiguous=("parts",)), check=check_parts, sharding=Sharding(advice=ADVICE), bars=Bars("D"), internal=True,
)  # fmt: skip
cross_entropy_join = Op(
    "cross_entropy_join", reference_join, inputs_join, Triton(forward_join, backward_join, single),
    where={
        "parts": "float[tokens 5]", "gathered": "parts[shards tokens 5]", "labels": "int[tokens]", "z_loss": at_least(0.0),
        "label_smoothing": between(0.0, 1.0),
    },
    results={"loss": "parts[tokens]"}, hidden=("slopes",),
    gradient=Gradient(of=("parts",), saves=("parts", "gathered", "labels", "slopes")),
    out=Out(contiguous=("loss",)), check=check_join, sharding=Sharding(("tokens",)), bars=Bars("D"), internal=True,
)  # fmt: skip


# ---------------------------------------------------------------- several processes


def parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    vocab_sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """The fp32 loss of every row, `cross_entropy(..., reduction="none")`, of logits whose columns the ranks of `group` share.

    Every rank has the same rows and the same labels, which are those of the whole vocabulary. Rank r has columns
    `[r * V, (r + 1) * V)`; where ranks have different numbers of columns, `vocab_sizes` lists those of all of them, in order.
    `group` is torch's default group if it is None, or this process alone where torch.distributed was not initialised.

    Five fp32 numbers a row are exchanged, in one all-gather in the forward; the backward exchanges nothing. All ranks return
    the same bits, and each must send the same gradient back. The options are those of `cross_entropy`; all but
    `inplace_backward` must be the same on all ranks.
    """
    rank, world = place_in(group)
    sizes = [logits.shape[-1]] * world if vocab_sizes is None else [int(n) for n in vocab_sizes]
    if len(sizes) != world or sizes[rank] != logits.shape[-1]:
        raise ValueError(
            f"parallel_cross_entropy: vocab_sizes must list {world} ranks and have {logits.shape[-1]} for rank {rank},"
            f" as logits have, got {sizes}"
        )
    whose = {"classes": sum(sizes), "ignore_index": ignore_index}
    here = {"start": sum(sizes[:rank]), "slant": label_smoothing > 0, "softcap": softcap}
    parts = cross_entropy_parts(logits, labels, **whose, **here, inplace_backward=inplace_backward)
    parts = parts.reshape(-1, PARTS.value)
    loss = cross_entropy_join(
        parts, gather(parts.detach(), group, world), labels.reshape(-1), rank=rank, label_smoothing=label_smoothing,
        z_loss=z_loss, **whose,
    )  # fmt: skip
    return loss.reshape(labels.shape)


def place_in(group: Any) -> tuple[int, int]:
    """(rank, ranks) of this process."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(parts: Tensor, group: Any, world: int) -> Tensor:
    """The parts of all ranks, [ranks, tokens, 5]."""
    if world == 1:
        return parts.unsqueeze(0)
    made = torch.empty((world * parts.shape[0], parts.shape[1]), dtype=parts.dtype, device=parts.device)
    into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer torch's name for it
    into(made, parts.contiguous(), group=group)
    return made.view(world, *parts.shape)
