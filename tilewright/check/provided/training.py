"""The calls behind the rows of the training lists, but for norms, gates and losses over whole rows (`provided.py`).

Truth is the published formula written out in float64, head by head or row by row where that is plainest, never the op's
reference; gradients are autograd's through that formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

from ..agreement import BF16, FP16, agrees, end_rows, forms, normal

EPS = 1e-6
FP32 = torch.float32
TINY = 1e-20  # beside the sum of a row's sigmoids, as routers have it


def holds(
    call: Callable[..., Any],
    truth: Callable[..., Any],
    leaves: Sequence[Tensor],
    bars: str,
    gradient_bars: str | None = None,
    noise: float = 0.0,
) -> None:
    """`call` gives what `truth` gives of float64 copies of `leaves`; with `gradient_bars`, one for each of them, its gradients
    too, for upstream gradients drawn here. A scalar counts as one row."""
    ours = [t.detach().clone().requires_grad_(gradient_bars is not None) for t in leaves]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    made, exact = ([y] if isinstance(y, Tensor) else list(y) for y in (call(*ours), truth(*wide)))
    for i, (y, there) in enumerate(zip(made, exact, strict=True)):
        agrees(f"result {i}", at_least_1d(y), at_least_1d(there), bars, noise=noise)
    if gradient_bars is None:
        return
    dy = [normal(str(y.device), *y.shape, dtype=y.dtype, seed=50 + i) for i, y in enumerate(made)]
    found = torch.autograd.grad(made, ours, dy)
    there = torch.autograd.grad(exact, wide, [g.double() for g in dy])
    for i, bar in enumerate(gradient_bars):
        agrees(f"gradient {i}", found[i], there[i], bar, noise=noise)


def at_least_1d(t: Tensor) -> Tensor:
    return t.detach().reshape(t.shape or (1,))


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def turned(x: Tensor, angle: Tensor, interleaved: bool = False) -> Tensor:
    """Leading columns of x as complex numbers times e^(i angle), back as halves; the other columns as they are."""
    n = angle.shape[-1]
    a, b = (x[..., : 2 * n : 2], x[..., 1 : 2 * n : 2]) if interleaved else (x[..., :n], x[..., n : 2 * n])
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag, x[..., 2 * n :]], -1)


def zigzag(lengths: Sequence[int], ranks: int, rank: int) -> list[int]:
    """Positions, in their own sequences, of the tokens that a rank of a context-parallel group has: of every sequence's
    2 * ranks chunks the one of its number, and the one as far from the end."""
    found: list[int] = []
    for length in lengths:
        chunks = torch.arange(length).chunk(2 * ranks)
        found += chunks[rank].tolist() + chunks[2 * ranks - 1 - rank].tolist()
    return found


def qkv(device: str, gradient: bool = False) -> None:
    """Grouped packing, [length, batch, width] in: per key head its query heads, the key, the value."""
    length, batch, heads, kv_heads, dim, turn = 3, 2, 4, 2, 128, 64
    x = normal(device, length, batch, (heads + 2 * kv_heads) * dim)
    weights = [1 + 0.5 * normal(device, dim, seed=seed) for seed in (1, 2)]
    freqs = normal(device, length, turn // 2, dtype=FP32, seed=3, scale=3.0)

    def call(x: Tensor, qw: Tensor, kw: Tensor) -> Any:
        return tw.qkv_split(x, heads, kv_heads, dim, qw, kw, freqs, rotary_dim=turn, transposed=True)

    def truth(x: Tensor, qw: Tensor, kw: Tensor) -> tuple[Tensor, ...]:
        columns = x.transpose(0, 1).split(dim, -1)  # of [batch, length, head_dim]
        group = heads // kv_heads + 2
        parts: tuple[list[Tensor], ...] = ([], [], [])
        for i, head in enumerate(columns):
            kind = max(0, i % group - (group - 3))  # 0 query, 1 key, 2 value
            if kind < 2:
                head = turned(F.rms_norm(head, (dim,), (qw, kw)[kind], EPS), freqs.double())
            parts[kind].append(head)
        return tuple(torch.stack(part, 2) for part in parts)

    holds(call, truth, [x, *weights], "B", "HCC" if gradient else None)


def rope_packed(device: str) -> None:
    """Packed sequences, shared by two context-parallel ranks."""
    lengths, turn = (8, 20), 16
    for rank in range(2):
        place = zigzag(lengths, 2, rank)
        q, k = normal(device, len(place), 1, 3, 24), normal(device, len(place), 1, 1, 24, seed=1)
        freqs = normal(device, 1, max(lengths), turn // 2, dtype=FP32, seed=2, scale=3.0)
        ends = end_rows(device, [0, lengths[0], sum(lengths)])
        options = {"layout": "sbhd", "rotary_dim": turn, "cu_seqlens": ends, "cp_size": 2, "cp_rank": rank}
        angle = freqs.double()[0, place][:, None, None]
        holds(
            lambda q, k, f=freqs, o=options: tw.rope(q, k, freqs=f, **o),
            lambda q, k, a=angle: (turned(q, a), turned(k, a)),
            [q, k], "A", "HH",
        )  # fmt: skip


def latent_attention(device: str) -> None:
    """Keys of 192 columns and values of 128, two packed sequences."""
    lengths, heads = (5, 9), 2
    ends = end_rows(device, [0, lengths[0], sum(lengths)])
    leaves = [normal(device, 1, sum(lengths), heads, width, seed=seed) for seed, width in enumerate((192, 192, 128))]

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = []
        for first, count in ((0, lengths[0]), (lengths[0], lengths[1])):
            own = (t[:, first : first + count] for t in (q, k, v))
            q1, k1, v1 = own
            scores = torch.einsum("blhd,bmhd->bhlm", q1, k1) / math.sqrt(192)
            later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
            made.append(torch.einsum("bhlm,bmhd->blhd", scores.masked_fill(later, -math.inf).softmax(-1), v1))
        return torch.cat(made, 1)

    holds(
        lambda *three: tw.attention(*three, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends), truth, leaves, "I", "JJJ"
    )  # fmt: skip


def lightning_attention(device: str) -> None:
    """Each head forgets at its own rate; a state comes in and goes out."""
    length, heads, width = 70, 2, 16
    rate = torch.tensor([-0.05, -0.7], dtype=FP32, device=device)
    leaves = [normal(device, 1, length, heads, width, seed=seed) for seed in range(3)]
    leaves.append(normal(device, 1, heads, width, width, dtype=FP32, seed=3))

    def truth(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.arange(length, dtype=torch.float64, device=q.device)
        apart = (t[:, None] - t[None, :]) * rate.double()[:, None, None]
        weights = torch.exp(apart).tril() * torch.einsum("blhd,bmhd->bhlm", q, k)
        first = torch.exp((t + 1)[:, None] * rate.double())[None, :, :, None]
        o = torch.einsum("bhlm,bmhd->blhd", weights, v) + first * torch.einsum("blhd,bhde->blhe", q, state)
        left = torch.exp((length - 1 - t)[:, None] * rate.double())[None, :, :, None]
        kept = torch.einsum("blhd,blhe->bhde", left * k, v)
        return o / math.sqrt(width), kept + torch.exp(length * rate.double())[None, :, None, None] * state

    holds(lambda q, k, v, s: tw.linear_attention(q, k, v, rate, state=s), truth, leaves, "I", "JJJJ", noise=2e-3)


def mla_rope(device: str) -> None:
    """A head is 24 plain columns and 16 that are turned; the key's turned ones are the same for all heads."""
    lengths, plain, turn, value, heads = (8, 12), 24, 16, 20, 3
    place = zigzag(lengths, 2, 1)
    freqs = normal(device, max(lengths), turn // 2, dtype=FP32, seed=3, scale=3.0)
    ends = end_rows(device, [0, lengths[0], sum(lengths)])
    angle = freqs.double()[place][:, None, None]
    shapes = (heads, plain + turn), (heads, plain + value), (1, turn)
    leaves = [normal(device, len(place), 1, *shape, seed=seed) for seed, shape in enumerate(shapes)]

    def truth(q: Tensor, kv: Tensor, k_pos: Tensor) -> tuple[Tensor, ...]:
        q = torch.cat([q[..., :plain], turned(q[..., plain:], angle, interleaved=True)], -1)
        shared = turned(k_pos, angle, interleaved=True).expand(-1, -1, heads, -1)
        return q, torch.cat([kv[..., :plain], shared], -1), kv[..., plain:]

    holds(
        lambda *three: tw.mla_rope(*three, freqs=freqs, cu_seqlens=ends, cp_size=2, cp_rank=1), truth, leaves, "A", "HHH"
    )  # fmt: skip


# ---- mixture of experts ----------------------------------------------------------------------------------------------


def router_linear(device: str, gradient: bool = False) -> None:
    leaves = [normal(device, 19, 200), normal(device, 33, 200, seed=1, scale=0.05)]
    holds(tw.router_linear, lambda x, w: x @ w.t(), leaves, "E", "FF" if gradient else None)


def routed(device: str, tokens: int, experts: int, slots: int) -> Tensor:
    """Different experts for each token, [tokens, slots]; the last of all has no token."""
    return normal(device, tokens, experts - 1, dtype=FP32, seed=7).topk(slots).indices


def rows_by_expert(
    pairs: list[tuple[int, int]], experts: int, align: int
) -> tuple[list[tuple[int, int] | None], list[int]]:
    """(the pair of token and expert of each row or None for padding, end rows of the experts)."""
    rows: list[tuple[int, int] | None] = []
    ends = []
    for expert in range(experts):
        rows += sorted(pair for pair in pairs if pair[1] == expert)
        rows += [None] * (-len(rows) % align)
        ends.append(len(rows))
    return rows, ends


def permute(device: str, quantised: bool = False) -> None:
    tokens, experts, slots = 11, 6, 3
    chosen = routed(device, tokens, experts, slots)
    pairs = [(t, e) for t, row in enumerate(chosen.tolist()) for e in row]
    rows, ends = rows_by_expert(pairs, experts, 16)
    x = normal(device, tokens, 200)
    probs = normal(device, tokens, experts, dtype=FP32, seed=1).abs()  # of every pair
    if quantised:
        made = tw.moe_permute(x, chosen, probs.gather(1, chosen), experts=experts, out_format=forms(device)["blocks"])
    else:
        flags = torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen, True)
        leaves = x.requires_grad_(), probs.requires_grad_()
        made = tw.moe_permute(x, flags, probs, align=16)
    exact = torch.zeros(made[0].shape[0], 200, dtype=torch.float64, device=device)
    weight = torch.zeros_like(exact[:, 0])
    places: list[list[int]] = [[] for _ in range(tokens)]
    for i, pair in enumerate(rows):
        if pair is not None:
            exact[i], weight[i] = x[pair[0]].detach().double(), probs[pair].detach().double()
            places[pair[0]].append(i)
    agrees("rows", made[0].detach(), exact, "G", ends)
    agrees("row_probs", made[1].detach(), weight, "G", ends)
    assert made[4].tolist() == ends and int(made[5]) == 0
    assert made[3][: ends[-1]].tolist() == [-1 if pair is None else pair[0] for pair in rows]
    assert [[r for r in row if r >= 0] for row in made[2].tolist()] == places
    if quantised:
        return
    drows, dweight = normal(device, *exact.shape, seed=2), normal(device, *weight.shape, dtype=FP32, seed=3)
    dx, dprobs = torch.autograd.grad(made[:2], leaves, (drows, dweight))
    agrees("dx", dx, torch.stack([drows[place].double().sum(0) for place in places]), "B")
    wanted = torch.zeros_like(probs, dtype=torch.float64)
    for i, pair in enumerate(rows):
        if pair is not None:
            wanted[pair] = dweight[i].double()
    agrees("dprobs", dprobs, wanted, "G")


def unpermute(device: str) -> None:
    """Rows of padding and of no token hold NaN: nothing may take them in."""
    tokens, experts, slots = 11, 6, 3
    pairs = [(t, e) for t, row in enumerate(routed(device, tokens, experts, slots).tolist()) for e in row]
    owners, _ = rows_by_expert(pairs, experts, 16)
    places = torch.tensor([[i for i, pair in enumerate(owners) if pair and pair[0] == t] for t in range(tokens)])
    used = torch.tensor([pair is not None for pair in owners], device=device)
    rows = normal(device, len(owners), 200).masked_fill(~used[:, None], math.nan)
    probs = normal(device, len(owners), dtype=FP32, seed=1).abs().masked_fill(~used, math.nan)
    row_map = F.pad(places.to(torch.int32), (0, 1), value=-1).to(device)
    at = places.to(device)

    def total(rows: Tensor, probs: Tensor | None = None) -> Tensor:
        return (rows[at] if probs is None else rows[at] * probs[at][..., None]).sum(1)

    holds(lambda rows, probs: tw.moe_unpermute(rows, row_map, probs), total, [rows, probs], "B", "HH")
    holds(lambda rows: tw.moe_unpermute(rows, row_map), total, [rows], "B", "H")


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def routing(device: str) -> None:
    """Softmax over all; sigmoids with bias, limited to the two best of four groups; a choice given again."""
    experts, k, groups, kept = 16, 4, 4, 2
    logits = normal(device, 9, experts, dtype=FP32, scale=2.0)
    bias = normal(device, experts, dtype=FP32, seed=1, scale=0.1)
    probs, chosen, counts = tw.topk_routing(logits, k)
    wanted = [best(row, k) for row in logits.tolist()]
    assert chosen.tolist() == wanted
    assert counts.tolist() == [sum(row.count(e) for row in wanted) for e in range(experts)]
    at = torch.tensor(wanted, device=device)

    def normalised(z: Tensor, at: Tensor, score: Callable[[Tensor], Tensor], scaling: float = 1.0) -> Tensor:
        s = score(z).gather(-1, at)
        return scaling * s / (s.sum(-1, keepdim=True) + TINY)

    def softmax(z: Tensor) -> Tensor:
        return torch.softmax(z, -1)

    holds(lambda z: tw.topk_routing(z, k)[0], lambda z: normalised(z, at, softmax), [logits], "B", "H")

    limited = {"score": "sigmoid", "bias": bias, "groups": groups, "group_topk": kept, "scaling": 2.5}
    decides = torch.sigmoid(logits.double()) + bias.double()
    wanted, size = [], experts // groups
    for row in decides.tolist():
        sums = [sum(sorted(row[g * size : (g + 1) * size])[-(k // kept) :]) for g in range(groups)]
        inside = best(sums, kept)
        wanted.append(best([v if e // size in inside else -math.inf for e, v in enumerate(row)], k))
    probs, chosen, _ = tw.topk_routing(logits, k, **limited)
    assert chosen.tolist() == wanted
    there = torch.tensor(wanted, device=device)
    holds(
        lambda z: tw.topk_routing(z, k, **limited)[0], lambda z: normalised(z, there, torch.sigmoid, 2.5), [logits], "B", "H"
    )  # fmt: skip

    given = torch.arange(9, device=device)[:, None] + 3 * torch.arange(k, device=device)
    given = given % experts
    holds(
        lambda z: tw.topk_routing(z, k, indices=given)[0], lambda z: normalised(z, given, softmax), [logits], "B", "H"
    )  # fmt: skip

    def dense(p: Tensor) -> Tensor:
        return torch.zeros(9, experts, dtype=p.dtype, device=device).scatter(1, there, p)

    agrees("the map", tw.routing_map(chosen, probs, experts=experts)[1], dense(torch.ones_like(probs)), "G")
    holds(lambda p: tw.routing_map(chosen, p, experts=experts)[0], dense, [probs], "G", "G")


def router_losses(device: str) -> None:
    logits = normal(device, 19, 33, scale=2.0)
    counts = torch.arange(33, device=device, dtype=torch.int32)
    share = counts.double() / counts.sum()

    def balance(p: Tensor) -> Tensor:
        return 0.01 * 33 * (share * p.mean(0)).sum()

    def shares(z: Tensor) -> Tensor:
        s = torch.sigmoid(z)
        return s / (s.sum(-1, keepdim=True) + TINY)

    holds(
        lambda z: tw.router_z_loss(z, 0.001), lambda z: 0.001 * z.exp().sum(-1).log().square().mean(), [logits], "D", "H"
    )  # fmt: skip
    holds(
        lambda z: tw.load_balancing_loss(z, counts, 0.01), lambda z: balance(torch.softmax(z, -1)), [logits], "D", "H"
    )  # fmt: skip
    holds(
        lambda z: tw.load_balancing_loss(z, counts, 0.01, score="sigmoid"), lambda z: balance(shares(z)), [logits], "D", "H"
    )  # fmt: skip


# ---- the rest of a step ----------------------------------------------------------------------------------------------


def gated_norm(device: str, gradient: bool = False) -> None:
    """x is [batch, length, hidden], gate and result are [length, batch, hidden]."""
    leaves = [normal(device, 2, 5, 256), normal(device, 5, 2, 256, seed=1), 1 + 0.5 * normal(device, 256, seed=2)]

    def truth(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        parts = [F.rms_norm(part, (64,), None, EPS) for part in x.split(64, -1)]
        return torch.cat(parts, -1).transpose(0, 1) * weight * torch.sigmoid(gate)

    holds(
        lambda x, gate, weight: tw.gated_group_norm(x, gate, weight, groups=4), truth, leaves, "B", "HHC" if gradient else None
    )  # fmt: skip


def linear_loss(device: str) -> None:
    """The gradients go on from the softmax rounded to the dtype of the factors, as far as it was kept."""
    hidden, weight = normal(device, 9, 40), normal(device, 1003, 40, seed=1, scale=0.3)
    bias = normal(device, 1003, seed=2)
    labels = torch.arange(9, device=device) * 100
    labels[2] = -100
    noise = torch.finfo(BF16).eps / 6

    def smooth(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        z = 30.0 * torch.tanh((h @ w.t() + b) / 30.0)
        lse = torch.logsumexp(z, -1)[labels != -100]
        return F.cross_entropy(z, labels, label_smoothing=0.1) + 0.001 * lse.square().mean()

    def call(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return tw.linear_cross_entropy(h, w, labels, b, label_smoothing=0.1, softcap=30.0, z_loss=0.001)

    def plain(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(h @ w.t(), labels)

    two, three = [hidden, weight], [hidden, weight, bias]
    holds(lambda h, w: tw.linear_cross_entropy(h, w, labels), plain, two, "D")
    holds(lambda h, w: tw.linear_cross_entropy(h, w, labels), plain, two, "E", "EE", noise)
    holds(call, smooth, three, "D")
    holds(call, smooth, three, "E", "EEE", noise)


# ---- many tensors ----------------------------------------------------------------------------------------------------


def several(device: str) -> list[Tensor]:
    """Tensors of several dtypes and shapes, an empty, a transposed one and zeros of both signs among them."""
    dtypes, shapes = (BF16, FP32, FP16), ((7, 33), (5,), (), (0, 4), (3, 2, 9), (1030,))
    made = [normal(device, *shape, dtype=dtypes[i % 3], seed=i) for i, shape in enumerate(shapes)]
    made = [t.masked_fill(t.abs() < 0.3, -0.0 if i % 2 else 0.0) for i, t in enumerate(made)]
    return [*made, made[0].t()]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def norms(device: str, *orders: float) -> None:
    tensors = several(device)
    x = flat(tensors).abs()
    exact = {1.0: x.sum(), 2.0: x.square().sum().sqrt(), math.inf: x.max()}
    for order in orders:
        agrees(f"norm {order}", tw.multi_tensor_norm(tensors, order)[None], exact[order][None], "B")


def zeros(device: str) -> None:
    tensors = several(device)
    count = flat(tensors).tolist().count(0.0)
    assert count and int(tw.multi_tensor_count_zeros(tensors)) == count


def scaled(device: str) -> None:
    tensors, by = several(device), torch.tensor(0.7, device=device)
    for label, options, factor in (("scale", {}, 0.37), ("by", {"by": by}, 0.37 * by.double())):
        for t, y in zip(tensors, tw.multi_tensor_scale(tensors, 0.37, **options), strict=True):
            agrees(label, at_least_1d(y), at_least_1d(t.double() * factor), "A")


def clamped(device: str) -> None:
    tensors = several(device)
    for t, y in zip(tensors, tw.multi_tensor_scale(tensors, limit=0.5), strict=True):
        agrees("clamped", at_least_1d(y), at_least_1d(t.double().clamp(-0.5, 0.5)), "G")


def clipped(device: str) -> None:
    for bound in (1.0, 1e6):
        grads = several(device)
        holders = [torch.zeros_like(g).requires_grad_() for g in grads]
        for holder, g in zip(holders, grads):
            holder.grad = g.clone()
        total = flat(grads).square().sum().sqrt()
        agrees("the norm", tw.clip_grad_norm_(holders, bound)[None], total[None], "B")
        factor = (bound / (total + 1e-6)).clamp(max=1.0)
        for holder, g in zip(holders, grads):
            agrees("a gradient", at_least_1d(holder.grad), at_least_1d(g.double() * factor), "A")


def many(device: str) -> None:
    norms(device, 1.0, 2.0, math.inf)
    zeros(device)
    scaled(device)
    clipped(device)
