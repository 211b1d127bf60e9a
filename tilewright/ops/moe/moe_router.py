"""Routing of tokens to experts: the k largest scores of each row of logits, and the weights that they give.

    s = softmax(z) or sigmoid(z);  chosen = the k largest of s + bias, in the best groups if there are several
    p_i = scaling * s_i, or scaling * s_i / sum of s over the chosen (of softmax: the softmax of the chosen z alone)
    softmax of the chosen:  dz_i = p_i * (g_i - sum_j g_j p_j / scaling)
    softmax of all:         dz_e = s_e * (ds_e - sum_j ds_j s_j),  ds_i = scaling * g_i, 0 for those not chosen
    sigmoid:                dz_i = s_i * (1 - s_i) * ds_i,  normalised: ds_i = scaling / S * (g_i - sum_j g_j s_j / S)

One warp holds whole rows: choosing is k rounds of an integer maximum, and nothing leaves the warp.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_indices
from ...core.draw import Draw
from ...core.signature import above, at_least
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, rows
from ...device.softmax import LOG2E
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .choice import OUT, choose, keep_groups, key_of, spread

TINY = 1e-20  # beside the sum of sigmoids, which may all be 0
MOST = 8192  # experts
PART = 4  # places of a part where the choice is made in two steps: one load of fp32 a thread


def reference(
    logits: Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    group_topk: int = 1,
    normalize: bool = True,
    scaling: float = 1.0,
    order: Literal["score_first", "topk_first"] = "score_first",
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(probs fp32 [..., k], chosen [..., k], counts int32 [experts]): the `k` experts of each token and their weights.

    Chosen are the largest of `score(logits) + bias`, in falling order, ties to the lower expert; weights come from the scores
    without `bias`, which has no gradient. `order="topk_first"` chooses by the logits (plus `bias`) and takes the softmax of
    those chosen. `groups` splits the experts into equal runs: only the `group_topk` groups with the largest sums of their
    `k / group_topk` best count. `normalize` divides the weights by their sum, `scaling` multiplies them.

    `indices` [..., k] replays a choice: weights and gradients are those of the given experts, and bias and groups mean
    nothing. An index outside [0, experts) is none: its weight is 0, and `chosen` has -1 for it. `chosen` is int64, or as
    `indices`; `counts` has how often each expert stands in it. A NaN counts as the largest and stays in its row.
    """
    z, experts = upcast(logits), logits.shape[-1]
    scores = torch.sigmoid(z) if score == "sigmoid" else torch.softmax(z, -1)
    if indices is None:
        by_logit = order == "topk_first" or (bias is None and groups == 1)
        decides = (z if by_logit else scores).detach()
        decides = decides if bias is None else decides + upcast(bias)
        chosen = largest(decides, k, groups, group_topk)
    else:
        chosen = indices
    named = (chosen >= 0) & (chosen < experts)
    at = torch.where(named, chosen, 0).to(torch.int64)
    if over_chosen(score, normalize, order):
        p = torch.softmax(z.gather(-1, at).masked_fill(~named, -torch.inf), -1).masked_fill(~named, 0.0)
    else:
        p = scores.gather(-1, at).masked_fill(~named, 0.0)
        p = p / (p.sum(-1, keepdim=True) + TINY) if normalize else p
    place = torch.where(named, chosen, experts).to(torch.int64).reshape(-1)
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=z.device)
    counts = counts.scatter_add(0, place, torch.ones_like(place, dtype=torch.int32))[:experts]
    return scaling * p, torch.where(named, chosen, -1), counts


def over_chosen(score: str, normalize: bool, order: str) -> bool:
    """Whether the weights are the softmax of the chosen logits: what normalised softmax scores are, without underflow."""
    return score == "softmax" and (normalize or order == "topk_first")


def largest(v: Tensor, k: int, groups: int, group_topk: int) -> Tensor:
    """Indices of the `k` largest of the best groups, in falling order; equal ones in rising order of index."""
    by_size = v.sort(dim=-1, descending=True, stable=True).indices
    if groups > 1:
        parts = v.unflatten(-1, (groups, -1))
        sums = parts.sort(dim=-1, descending=True).values[..., : k // group_topk].sum(-1)
        best = sums.sort(dim=-1, descending=True, stable=True).indices[..., :group_topk]
        out = torch.ones_like(sums, dtype=torch.int8).scatter(-1, best, 0)
        out = out.unsqueeze(-1).expand(parts.shape).flatten(-2).gather(-1, by_size)
        by_size = by_size.gather(-1, out.sort(dim=-1, stable=True).indices)
    return by_size[..., :k]


def inputs(draw: Draw) -> dict:
    tokens, experts = draw.dim("tokens"), draw.dim("experts", (1, 3, 8, 33, 64, 160))
    k, groups, group_topk = min(draw.option("most", 8, 2, 1), experts), 1, 1
    if draw.option("limited", False, True):
        groups = next((n for n in range(2, experts + 1) if experts % n == 0), 1)
        group_topk = max(1, groups - 1)
        k = group_topk * min(experts // groups, draw.option("of_each", 1, 2))
    score = draw.option("score", "softmax", "sigmoid")
    first = draw.option("order", "score_first", "topk_first") == "score_first" or score == "sigmoid"
    index = draw.option("index", torch.int64, torch.int32)
    return {
        "logits": draw.tensor(tokens, experts, scale=draw.option("logits_scale", 1.0, 4.0)),
        "k": k,
        "score": score,
        "bias": draw.maybe("bias", lambda: draw.tensor(experts, dtype=torch.float32)),
        "groups": groups,
        "group_topk": group_topk,
        "normalize": draw.option("normalize", True, False),
        "scaling": draw.option("scaling", 1.0, 2.5),
        "order": "score_first" if first else "topk_first",
        "indices": draw.maybe("indices", lambda: draw.integers(tokens, k, low=-1, high=experts, dtype=index)),
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def sigmoids(z):
    """(sigmoid(z), sigmoid(-z)), each to full relative precision."""
    t = tl.exp2(tl.abs(z) * -LOG2E)
    r = tl.div_rn(tl.full(z.shape, 1.0, tl.float32), 1.0 + t)
    return tl.where(z < 0.0, t * r, r), tl.where(z < 0.0, r, t * r)


@triton.jit
def softmax_parts(z):
    """(largest, 1 / sum of exp(z - largest)) along the last dimension, which is kept. An infinite largest makes all NaN, as in
    torch."""
    AXIS: tl.constexpr = len(z.shape) - 1
    largest = tl.max(z, AXIS, keep_dims=True)
    total = tl.sum(tl.exp2((z - largest) * LOG2E), AXIS, keep_dims=True)
    return largest, tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)


@triton.jit
def read_logits(X, row, e, inside, stride_xt, stride_xe):
    at = X + row.to(tl.int64) * stride_xt + e.to(tl.int64) * stride_xe
    return tl.load(at, inside, -float("inf")).to(tl.float32)


@triton.jit
def read_choice(I, row, col, M, E, stride_it, stride_ik, K: tl.constexpr):
    """Given indices, -1 for none: device data, of which nothing outside [0, E) is kept."""
    at = I + row.to(tl.int64) * stride_it + col.to(tl.int64) * stride_ik
    c = tl.load(at, (row < M) & (col < K), -1).to(tl.int64)
    return tl.where((c >= 0) & (c < E), c, -1).to(tl.int32)


@triton.jit
def decide(z, B, e, there, stride_b, BY: tl.constexpr):
    """What the choice goes by."""
    if BY == "sigmoid":
        z, _ = sigmoids(z)
    elif BY == "softmax":
        largest, share = softmax_parts(z)
        z = tl.exp2((z - largest) * LOG2E) * share
    if B is not None:
        z += tl.load(B + e.to(tl.int64) * stride_b, there, 0.0).to(tl.float32)
    return z


@triton.jit
def weights(z, named, largest, share, MODE: tl.constexpr):
    """Weights of the chosen logits z, before scaling. MODE: softmax of "all", whose parts are given, of the "chosen" alone,
    "sigmoid", or that "normalized"."""
    if MODE == "all":
        p = tl.exp2((z - largest) * LOG2E) * share
    elif MODE == "chosen":
        largest, share = softmax_parts(z)
        p = tl.exp2((z - largest) * LOG2E) * share
    else:
        p, _ = sigmoids(z)
    p = tl.where(named, p, 0.0)
    if MODE == "normalized":
        p = tl.div_rn(p, tl.broadcast_to(tl.sum(p, 1, keep_dims=True) + 1e-20, p.shape))
    return p


def rows_of(block: int) -> int:
    """Rows of `block` numbers that one program holds: 32 numbers a thread, and no more rows than threads."""
    return min(32, max(1, 1024 // block))


def _rows(a) -> dict:
    block = a.BLOCK_E if "BLOCK_E" in a else a.BLOCK_G * a.BLOCK_S
    return {"ROWS": rows_of(block), "num_warps": max(1, block // 1024)}  # a row that fits into a warp stays in it


def _programs(a) -> int:
    """Eight programs on every SM at most: each adds its counts once, and rows in flight are 4 KiB of fp32 a program."""
    return min(cdiv(a.M, a.ROWS), 8 * Target.at(a.X.device).sms)


@triton.jit
def choose_in_parts(
    key, X, B, row, M, E, stride_xt, stride_xe, stride_b, SIZE: tl.constexpr, PLACES: tl.constexpr, K: tl.constexpr,
    BY: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`choose` in two steps. The K largest lie in the K parts of PART places with the largest heads, for otherwise K heads would
    come before one of them. So choose those, read them again and choose there: a fifth of the comparisons."""
    ROWS: tl.constexpr = key.shape[0]
    PARTS: tl.constexpr = key.shape[2] // PART
    heads = tl.max(tl.reshape(key, [ROWS, PARTS, PART]), 2)
    part = choose(tl.reshape(heads, [ROWS, 1, PARTS]), tl.arange(0, PARTS)[None, None, :], K, COLUMNS)
    at = part[:, :, None] * PART + tl.arange(0, PART)[None, None, :]
    at = tl.reshape(at, [ROWS, 1, COLUMNS * PART])
    e = at // PLACES * SIZE + at % PLACES
    there = (at >= 0) & (at % PLACES < SIZE) & (e < E)
    z = read_logits(X, row[:, :, None], e, there & (row[:, :, None] < M), stride_xt, stride_xe)
    key = tl.where(there, key_of(decide(z, B, e, there, stride_b, BY)), OUT)
    return choose(key, e, K, COLUMNS)


@kernel(grid=lambda a: (_programs(a),), tokens=("M",), default=_rows)
def topk_routing_forward(
    X, B, I, PROBS, CHOSEN, COUNTS, M, E, stride_xt, stride_xe, stride_b, stride_it, stride_ik, scaling,
    K: tl.constexpr, BY: tl.constexpr, MODE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Columns are GROUPS of SIZE experts, each group BLOCK_S wide. COUNTS is zeroed before; integers are added in any order."""
    place = tl.arange(0, BLOCK_G * BLOCK_S)[None, None, :]
    e = place // BLOCK_S * SIZE + place % BLOCK_S
    there = (place % BLOCK_S < SIZE) & (e < E)
    col = tl.arange(0, BLOCK_K)[None, :]
    counts = tl.zeros([BINS], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        largest = tl.zeros([ROWS, 1], tl.float32)
        share = largest
        if I is None or MODE == "all":
            z = read_logits(X, row[:, :, None], e, there & (row[:, :, None] < M), stride_xt, stride_xe)
        if MODE == "all":
            m, r = softmax_parts(z)
            largest, share = tl.reshape(m, [ROWS, 1]), tl.reshape(r, [ROWS, 1])
        if I is not None:
            chosen = read_choice(I, row, col, M, E, stride_it, stride_ik, K)
        else:
            key = tl.where(there, key_of(decide(z, B, e, there, stride_b, BY)), OUT)
            if GROUPS > 1:
                key = keep_groups(key, BLOCK_S, GROUPS, KEPT, BEST)
            if PART > 1:
                chosen = choose_in_parts(
                    key, X, B, row, M, E, stride_xt, stride_xe, stride_b, SIZE, BLOCK_S, K, BY, PART, BLOCK_K
                )  # fmt: skip
            else:
                chosen = choose(key, e, K, BLOCK_K)
        named = (chosen >= 0) & (row < M)
        counts += tl.histogram(tl.reshape(chosen, [ROWS * BLOCK_K]), BINS, tl.reshape(named, [ROWS * BLOCK_K]))
        p = scaling * weights(read_logits(X, row, chosen, named, stride_xt, stride_xe), named, largest, share, MODE)
        at = row.to(tl.int64) * K + col
        tl.store(PROBS + at, p, (row < M) & (col < K))
        tl.store(CHOSEN + at, chosen.to(CHOSEN.dtype.element_ty), (row < M) & (col < K))
    tl.atomic_add(COUNTS + tl.arange(0, BINS), counts, counts > 0, sem="relaxed")


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), default=_rows)
def topk_routing_backward(
    X, CHOSEN, G, DX, M, E, stride_xt, stride_xe, stride_gt, stride_gk, scaling, K: tl.constexpr, MODE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_K)[None, :]
    e = tl.arange(0, BLOCK_E)[None, :]
    chosen = read_choice(CHOSEN, row, col, M, E, K, 1, K)
    named = (chosen >= 0) & (row < M)
    at = row.to(tl.int64) * stride_gt + col.to(tl.int64) * stride_gk
    d = scaling * tl.load(G + at, named, 0.0).to(tl.float32)
    z = read_logits(X, row, chosen, named, stride_xt, stride_xe)
    largest = tl.zeros([ROWS, 1], tl.float32)
    share = largest
    if MODE == "all":
        whole = read_logits(X, row, e, (row < M) & (e < E), stride_xt, stride_xe)
        largest, share = softmax_parts(whole)
    p = weights(z, named, largest, share, MODE)
    mean = tl.sum(d * p, 1, keep_dims=True)
    if MODE == "chosen":
        d = p * (d - mean)
    elif MODE != "all":
        s, rest = sigmoids(z)
        if MODE == "normalized":
            total = tl.sum(tl.where(named, s, 0.0), 1, keep_dims=True) + 1e-20
            d = tl.div_rn(d - mean, tl.broadcast_to(total, d.shape))
        d = d * s * rest
    d, _ = spread(chosen, tl.where(named, d, 0.0), col, e, K)
    if MODE == "all":
        d = tl.exp2((whole - largest) * LOG2E) * share * (d - mean)
    tl.store(DX + row.to(tl.int64) * E + e, d.to(DX.dtype.element_ty), (row < M) & (e < E))


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), default=_rows)
def routing_map_forward(
    I, P, DENSE, MAP, M, E, stride_it, stride_ik, stride_pt, stride_pk, K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_K)[None, :]
    e = tl.arange(0, BLOCK_E)[None, :]
    chosen = read_choice(I, row, col, M, E, stride_it, stride_ik, K)
    at = row.to(tl.int64) * stride_pt + col.to(tl.int64) * stride_pk
    p = tl.load(P + at, chosen >= 0, 0.0).to(tl.float32)
    dense, flags = spread(chosen, p, col, e, K)
    at = row.to(tl.int64) * E + e
    tl.store(MAP + at, flags.to(tl.uint8), (row < M) & (e < E))
    tl.store(DENSE + at, dense.to(DENSE.dtype.element_ty), (row < M) & (e < E))


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",),
    default=lambda a: {"ROWS": max(1, 1024 // a.BLOCK_K), "num_warps": 4},
)  # fmt: skip
def routing_map_backward(
    I, G, DP, M, E, stride_it, stride_ik, stride_gt, stride_ge, K: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_K)[None, :]
    chosen = read_choice(I, row, col, M, E, stride_it, stride_ik, K)
    at = row.to(tl.int64) * stride_gt + chosen.to(tl.int64) * stride_ge
    tl.store(DP + row.to(tl.int64) * K + col, tl.load(G + at, chosen >= 0, 0.0), (row < M) & (col < K))


# ---- topk_routing ----------------------------------------------------------------------------------------------------


def mode(score: str, normalize: bool, order: str) -> str:
    """`weights`' word for the arguments."""
    if score == "softmax":
        return "chosen" if over_chosen(score, normalize, order) else "all"
    return "normalized" if normalize else "sigmoid"


def forward(logits, k, *, score, bias, groups, group_topk, normalize, scaling, order, indices) -> tuple:
    E, lead = logits.shape[-1], logits.shape[:-1]
    x, given = rows(logits), None if indices is None else rows(indices)
    if given is not None:
        check_indices("topk_routing", "indices", indices, -1, E)
        bias, groups, group_topk = None, 1, 1
    by_logit = order == "topk_first" or (bias is None and groups == 1)
    by, size = "logit" if by_logit else score, E // groups
    BLOCK_G, BLOCK_S = power_of_two(groups), power_of_two(size)
    in_parts = by != "softmax" and BLOCK_S >= PART and 2 * PART * k <= E

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    probs, chosen = made(*lead, k), made(*lead, k, dtype=torch.int64 if given is None else given.dtype)
    counts = torch.zeros(E, dtype=torch.int32, device=x.device)
    topk_routing_forward(
        x, bias, given, probs, chosen, counts, x.shape[0], E, *x.stride(), 0 if bias is None else bias.stride(0),
        *((0, 0) if given is None else given.stride()), scaling, K=k, BY=by, MODE=mode(score, normalize, order),
        GROUPS=groups, KEPT=group_topk, BEST=k // group_topk, SIZE=size, PART=PART if in_parts else 1,
        BINS=power_of_two(E), BLOCK_G=BLOCK_G, BLOCK_S=BLOCK_S, BLOCK_K=power_of_two(k),
    )  # fmt: skip
    return probs, chosen, counts


def backward(saved: SimpleNamespace, dprobs: Tensor) -> tuple[Tensor]:
    logits, k = saved.logits, saved.k
    x, g, E = rows(logits), rows(dprobs), logits.shape[-1]
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=x.device)
    BLOCK_E = power_of_two(E)
    topk_routing_backward(
        x, saved.chosen, g, dx, x.shape[0], E, *x.stride(), *g.stride(), saved.scaling, K=k,
        MODE=mode(saved.score, saved.normalize, saved.order), BLOCK_E=BLOCK_E, BLOCK_K=power_of_two(k),
    )  # fmt: skip
    return (dx,)


def check(logits, k, *, score, bias, groups, group_topk, normalize, scaling, order, indices) -> None:
    experts = logits.shape[-1]
    if experts > MOST:
        raise ValueError(f"topk_routing: logits must have at most {MOST} experts, got {experts}")
    if k > experts:
        raise ValueError(f"topk_routing: k must be at most the number of experts, {experts}, got {k}")
    if score == "sigmoid" and order == "topk_first":
        raise ValueError('topk_routing: order must be "score_first" with sigmoid, which scores each logit by itself')
    if experts % groups:
        raise ValueError(f"topk_routing: groups must divide the {experts} experts, got {groups}")
    if group_topk > groups:
        raise ValueError(f"topk_routing: group_topk must be at most groups, {groups}, got {group_topk}")
    if k % group_topk or k > group_topk * (experts // groups):
        raise ValueError(
            f"topk_routing: k must be a multiple of group_topk, {group_topk}, and at most the"
            f" {group_topk * (experts // groups)} experts of that many groups, got {k}"
        )
    if indices is not None and indices.shape[-1] != k:
        raise ValueError(f"topk_routing: indices must have k = {k} columns, got {list(indices.shape)}")


def resume(saved: SimpleNamespace) -> dict:
    """The rest follows from the choice as it was made."""
    return {**vars(saved), "bias": None, "groups": 1, "group_topk": 1, "indices": saved.chosen}


def chosen_row(a: SimpleNamespace) -> str:
    return "int64[... k]" if a.indices is None else "indices[... k]"


topk_routing = Op(
    "topk_routing", reference, inputs, Triton(forward, backward, single),
    where={
        "logits": "float[... experts+]", "k": at_least(1), "bias": "float[experts+]", "groups": at_least(1),
        "group_topk": at_least(1), "scaling": above(0.0), "indices": "int[... slots]",
    },
    results={"probs": "wide(logits)[... k]", "chosen": chosen_row, "counts": "int32[experts]"},
    gradient=Gradient(of=("logits",), saves=("logits", "chosen"), resume=resume),
    out=Out(contiguous=("probs", "chosen", "counts")), check=check, sharding=Sharding(), bars=Bars("B"),
)  # fmt: skip


# ---- routing_map -----------------------------------------------------------------------------------------------------


def reference_map(indices: Tensor, probs: Tensor, *, experts: int) -> tuple[Tensor, Tensor]:
    """(dense probs [..., experts], map bool [..., experts]) of a choice of experts and its weights, both [..., k].

    The map is true where a token goes to an expert, and the dense weights have its weight there, 0 elsewhere. An index outside
    [0, experts) is none; the weights of one that is repeated are added.
    """
    named = (indices >= 0) & (indices < experts)
    at = torch.where(named, indices, experts).to(torch.int64)
    shape = *indices.shape[:-1], experts + 1
    dense = torch.zeros(shape, dtype=upcast(probs).dtype, device=probs.device).scatter_add(-1, at, upcast(probs))
    flags = torch.zeros(shape, dtype=torch.bool, device=probs.device).scatter(-1, at, True)
    return dense[..., :experts].to(probs.dtype), flags[..., :experts]


def inputs_map(draw: Draw) -> dict:
    tokens, experts = draw.dim("tokens"), draw.dim("experts", (1, 3, 8, 33, 160))
    k, index = draw.option("slots", 2, 8, 1), draw.option("index", torch.int64, torch.int32)
    indices = draw.integers(tokens, k, low=-1, high=experts, dtype=index)
    return {"indices": indices, "probs": draw.uniform(tokens, k, low=0.1), "experts": experts}


def forward_map(indices, probs, *, experts) -> tuple[Tensor, Tensor]:
    check_indices("routing_map", "indices", indices, -1, experts)
    i, p, k, shape = rows(indices), rows(probs), indices.shape[-1], (*indices.shape[:-1], experts)
    flags = torch.empty(shape, dtype=torch.bool, device=p.device)
    dense = torch.empty(shape, dtype=p.dtype, device=p.device)
    BLOCK_E = power_of_two(experts)
    routing_map_forward(
        i, p, dense, flags.view(torch.uint8), i.shape[0], experts, *i.stride(), *p.stride(), K=k, BLOCK_E=BLOCK_E,
        BLOCK_K=power_of_two(k),
    )  # fmt: skip
    return dense, flags


def backward_map(saved: SimpleNamespace, ddense: Tensor) -> tuple[Tensor]:
    i, g, k = rows(saved.indices), rows(ddense), saved.indices.shape[-1]
    dp = torch.empty(saved.indices.shape, dtype=g.dtype, device=g.device)
    routing_map_backward(i, g, dp, i.shape[0], saved.experts, *i.stride(), *g.stride(), K=k, BLOCK_K=power_of_two(k))
    return (dp,)


def check_map(indices, probs, *, experts) -> None:
    if experts > MOST or indices.shape[-1] > MOST:
        raise ValueError(
            f"routing_map: experts and the columns of indices must be at most {MOST}, got {experts} and"
            f" {list(indices.shape)}"
        )


routing_map = Op(
    "routing_map", reference_map, inputs_map, Triton(forward_map, backward_map, single),
    where={"indices": "int[... slots]", "probs": "float[... slots]", "experts": at_least(1)},
    results={"dense": "probs[... experts]", "map": "bool[... experts]"}, out=Out(contiguous=("dense", "map")),
    gradient=Gradient(of=("probs",), saves=("indices",), shape_only=lambda values: ("probs",)),
    check=check_map, sharding=Sharding(), bars=Bars("G", gradient="G"),
)  # fmt: skip
