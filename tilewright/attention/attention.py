"""Attention: o = softmax(scale * q @ k.T) @ v, for each head.

    s = scale * q . k,  then softcap * tanh(s / softcap),  then - slope * |i - j|,  then + mask;  p = exp(s - lse)

over the keys that a query sees, with lse the logarithm of the sum of exp(s), a sink's included. Backward, with delta the sum of
o * do over a row less the gradient of its lse:

    dv = p.T @ do,  ds = p * (do @ v.T - delta) * (1 - (s / softcap)**2),  dq = scale * ds @ k,  dk = scale * ds.T @ q

and dsink = - the sum of exp(sink - lse) * delta. Kernels stand in `portable.py` and `hopper/`; what a query sees, in `seen.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.draw import Draw
from ..core.signature import at_least
from ..op import Bars, Cost, Gradient, Op, Out, Part, Sharding, Triton, upcast
from . import library, portable
from .hopper import backward as hopper_backward
from .hopper import forward as hopper_forward
from .seen import room, seen

# "auto" is the faster of those that take the arguments, "triton" the faster of ours; others name one
Backend = Literal["auto", "triton", "cudnn", "hopper", "portable"]
WIDEST = 576  # head columns: those of absorbed latent attention


def reference_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(o, lse): `attention`, and the natural logarithm of the sum of what enters each softmax, [batch, heads, length] in fp32.

    A row that sees nothing has an lse of -inf, or its sink. Both results have gradients. Parts of the keys are merged by
    `attention_merge`, so that ring attention is these two under autograd.
    """
    place = seen(q, k, causal, left, right, kv_len, cu_seqlens_q, cu_seqlens_k)
    visible = place.visible.unsqueeze(1)  # [batch, heads, length, keys]
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    # What nobody sees may hold NaN, which times a weight of 0 would show
    lonely, unseen = (~visible.any(dim).any(1) for dim in (3, 2))
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    wide_q = upcast(q).masked_fill(lonely[..., None, None], 0.0)
    wide_k, wide_v = (upcast(t).masked_fill(unseen[..., None, None], 0.0).repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("blhd,bkhd->bhlk", wide_q, wide_k) * (scale_of(q) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        s = s - upcast(slopes)[:, None, None] * place.apart.unsqueeze(1).to(s.dtype)
    if mask is not None and mask.dtype != torch.bool:
        s = s + upcast(mask)
    s = s.masked_fill(~visible, -math.inf)
    # A sink is one more key, whose value is 0; without one, its logit is -inf
    extra = s.new_full((1,), -math.inf) if sink is None else upcast(sink).to(s.dtype)
    s = torch.cat([s, extra[:, None, None].expand(*s.shape[:3], 1)], -1)
    top = s.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    o = torch.einsum("bhlk,bkhd->blhd", (p / total)[..., :-1], wide_v)
    lse = (top + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)
    # Rows that ask for more keys than there is room for are NaN, and with them the sink's gradient, which has a term of every row
    wrong = place.wrong[..., None]
    poison = torch.where(wrong, math.nan, 1.0) * extra
    o = torch.where(wrong[..., None], poison[..., None], o)
    lse = torch.where(wrong.transpose(1, 2), poison.transpose(1, 2), lse)
    return o.to(q.dtype), lse


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of `q` [batch, length, heads, head_dim] over `k` [batch, keys, kv_heads, head_dim] and `v` [..., value_dim].

    Query heads share key heads evenly: head h takes `h // (heads // kv_heads)`. Any strides, any widths up to 576, v narrower or
    wider than k. `scale` is 1 / sqrt(head_dim) if not given.

    A query sees keys of its own sequence. Of n queries and m keys, query i stands at position p = i + m - n (the last query at
    the last key), and sees key j if p - left <= j <= p + right; `causal` is right = 0. `kv_len` says how many keys there are:
    [batch], of a sequence, whose positions then end there; [batch, length], of one row, whose position stays. More than there is
    room for makes rows NaN; less than 0 is 0. Packed sequences lie one after the other in a batch of 1, sequence s from
    `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`, its keys likewise; where marks fall there is no sequence. `kv_len` then is
    [sequences], or [1, length].

    Scores are capped by `softcap` if that is not 0, lowered by `slopes` [heads] times the distance (ALiBi), and `mask`, which
    broadcasts to [batch, heads, length, keys], is added to them or, bool, says which are seen. `sink` [heads] is the logit of one
    more key, whose value is 0. A row that sees nothing is 0. What no query sees may hold anything, NaN too; a NaN in a key or
    value that one query sees may show in others of its sequence.

    Gradients of q, k, v and sink, bitwise repeatable: everything is added up in a fixed order. `backend="auto"` takes the fastest
    implementation for the call (`tilewright explain` says which and why), "triton" the fastest of our own, any other name that one,
    or raises. "cudnn" is torch's forward by cuDNN, of 16-bit heads of up to 256 columns without masks, windows, sinks, slopes, soft
    caps or lengths, causal where there are as many keys as queries; its gradients are by our own kernels.

    `tilewright.attention` also takes `Quantized` operands, `math` ("int8", "fp8", "int8_pv", "fp8_pv": products of codes, forward
    only) and `smooth`: `attention/quantised.py`.
    """
    o, lse = reference_lse(
        q, k, v, scale=scale, causal=causal, left=left, right=right, softcap=softcap, sink=sink, slopes=slopes, mask=mask,
        kv_len=kv_len, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    return o, lse.detach()


def scale_of(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


WIDTHS = (64, 40, 17, 72, 8, 128)  # of one part and of two; models' others are tried as in models


def inputs(draw: Draw) -> dict[str, Any]:
    packed = draw.option("cu_seqlens_q", False, True)
    batch, length = 1 if packed else draw.dim("batch"), draw.dim("length")
    more = draw.option("more_keys", 0, 5, 0, 70, -1)  # than queries: 70 is more than a block
    more = more if length > 4 else min(more, 2)  # where others are few, properties of the machinery are tried
    keys, heads = max(0, length + more), draw.dim("heads", (1, 2, 4, 3))
    queries = math.gcd(heads, draw.option("queries_per_key", 2, 1, 3))
    kv_heads = draw.dims.get("kv_heads", heads // queries)
    width = draw.dim("head_dim", WIDTHS)
    values = draw.dims.get("value_dim", max(1, width // draw.option("narrower", 1, 1, 2)))
    causal = draw.option("causal", True, False)
    windowed = draw.option("windowed", False, True)
    made = {
        "q": draw.tensor(batch, length, heads, width),
        "k": draw.tensor(batch, keys, kv_heads, width),
        "v": draw.tensor(batch, keys, kv_heads, values),
        "scale": draw.option("scale", None, None, 0.3),
        "causal": causal,
        "left": draw.option("left", 2, 40) if windowed else None,
        "right": draw.option("right", 3, None) if windowed and not causal else None,
        "softcap": draw.option("softcap", 0.0, 0.0, 1.5),
        "sink": draw.maybe("sink", lambda: draw.tensor(heads)),
        "slopes": draw.maybe("slopes", lambda: draw.uniform(heads, low=0.01, high=0.1)),
    }
    if draw.option("mask", False, True):
        across = (draw.option("mask_batch", 1, batch), draw.option("mask_heads", 1, heads), length, keys)
        made["mask"] = draw.tensor(*across) if draw.option("added", True, False) else draw.uniform(*across) < 0.7
    sequences = batch
    if packed:
        marks = [draw_marks(draw, count) for count in (length, keys)]
        made |= {"cu_seqlens_q": marks[0], "cu_seqlens_k": marks[1]}
        sequences = marks[0].shape[0] - 1
    if draw.option("kv_len", False, True):
        by_row = draw.option("by_row", False, True)
        shape = (batch, length) if by_row else (sequences,)
        made["kv_len"] = draw.integers(*shape, low=-1, high=keys + 1, dtype=torch.int32)
        if packed:  # more than there is room for would make rows NaN
            made["kv_len"] = torch.minimum(made["kv_len"], room(length, keys, by_row, *marks))
    return made


def draw_marks(draw: Draw, count: int) -> Tensor:
    """Where a few sequences begin and end, which need not reach the first and the last token; or those of sizes that are named."""
    if "sequences" in draw.dims:
        sizes = draw.spread(draw.dims["sequences"], count, draw.dims["shortest"], draw.dims["longest"])
        return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=draw.device)
    return draw.integers(draw.dim("marks", (3, 2, 4)), high=count + 1, dtype=torch.int32).sort().values


def check(
    q, k, v, *, causal, right, mask, kv_len, cu_seqlens_q, cu_seqlens_k, backend: str = "auto", op: str = "attention", **others
) -> None:  # fmt: skip
    batch, length, heads, width = q.shape
    if k.shape[2] == 0 and heads or k.shape[2] and heads % k.shape[2]:
        raise ValueError(f"{op}: q has {heads} heads, which the {k.shape[2]} of k do not divide")
    for name, t in (("q", q), ("v", v)):
        if not 1 <= t.shape[-1] <= WIDEST:
            raise ValueError(f"{op}: {name} must have 1 to {WIDEST} columns, got {t.shape[-1]}")
    if causal and right:
        raise ValueError(f"{op}: causal means right=0, got right={right}")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError(f"{op}: cu_seqlens_q and cu_seqlens_k are given together or not at all")
    sequences = batch
    if cu_seqlens_q is not None:
        if batch != 1:
            raise ValueError(f"{op}: packed sequences lie in a batch of 1, got q with a batch of {batch}")
        sequences = cu_seqlens_q.shape[0] - 1
    if kv_len is not None and tuple(kv_len.shape) not in ((sequences,), (batch, length)):
        many = "sequences" if cu_seqlens_q is not None else "batch"
        raise ValueError(
            f"{op}: kv_len must be [{many}] = [{sequences}] or [batch, length] = [{batch}, {length}],"
            f" got {list(kv_len.shape)}"
        )
    if max(length, k.shape[1]) >= 2**31 - 1024:
        raise ValueError(f"{op}: q and k must be shorter than 2**31 - 1024, got {length} and {k.shape[1]}")
    if backend == "cudnn":
        given = {
            "right": right,
            "mask": mask,
            "kv_len": kv_len,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
        }
        why = library.refusal(SimpleNamespace(q=q, k=k, v=v, causal=causal, **given, **others))
        if why is not None:
            raise ValueError(f"{op}: backend cudnn: {why}")


def flops(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, left: int | None, right: int | None, cu_seqlens_q=None, cu_seqlens_k=None, **_
) -> int:  # fmt: skip
    """Multiplications and additions of both products, of the part that windows leave. Packed sequences whose marks have no memory
    count as one."""
    sizes = [(q.shape[1], k.shape[1])]
    if cu_seqlens_q is not None and not cu_seqlens_q.is_meta:
        sizes = list(zip(*(marks.diff().clamp(min=0).tolist() for marks in (cu_seqlens_q, cu_seqlens_k))))
    pairs = sum(pairs_of(n, m, left, 0 if causal else right) for n, m in sizes)
    return 2 * q.shape[0] * q.shape[2] * pairs * (q.shape[3] + v.shape[3])


def pairs_of(n: int, m: int, left: int | None, right: int | None) -> int:
    """How many pairs of n queries and m keys see one another."""
    position = torch.arange(n, dtype=torch.int64) + (m - n)
    last = torch.full_like(position, m - 1) if right is None else (position + right).clamp(max=m - 1)
    first = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
    return int((last - first + 1).clamp(min=0).sum())


BAND = 128  # queries of a part
MOST_PAIRS = 1 << 28  # of a part with gradients: 2 GiB for each of about ten matrices in float64


def parts(a: SimpleNamespace, gradients: bool) -> Iterator[Part]:
    """Of the first sequence the queries of its first key head, of the last those of its last. Without gradients the first, a middle
    and the last band of queries, with the keys that these may see; with gradients all queries, of sequences that are short enough,
    since gradients of keys are sums over queries. None of calls with a mask, with lengths beside the marks, or with a sink, whose
    gradient is a sum over sequences."""
    by_position = a.left is not None or a.right is not None or a.slopes is not None
    if a.mask is not None or a.kv_len is not None or a.sink is not None or (by_position and not a.causal):
        return
    (batch, length, heads, _), (_, keys, kv_heads, _) = a.q.shape, a.k.shape
    group = heads // kv_heads
    places = [(b, 0, length, 0, keys) for b in range(batch)]  # of sequences: batch, first query, end, first key, end
    if a.cu_seqlens_q is not None:
        begins = [marks.tolist() for marks in (a.cu_seqlens_q, a.cu_seqlens_k)]
        places = [(0, *one) for one in zip(begins[0], begins[0][1:], begins[1], begins[1][1:])]
        places = [one for one in places if one[2] > one[1]]
    if gradients:
        places = [one for one in places if group * (one[2] - one[1]) * (one[4] - one[3]) <= MOST_PAIRS]
    for (b, begin, end, first, last), head in zip([*places[:1], *places[-1:]], (0, kv_heads - 1)):
        bands = [(begin, end)]
        if not gradients:
            starts = sorted({begin, begin + (end - begin) // (2 * BAND) * BAND, max(begin, end - BAND)})
            bands = [(start, min(end, start + BAND)) for start in starts]
        for start, stop in bands:
            seen = max(first, min(last, last - (end - stop))) if a.causal else last
            one, own = slice(b, b + 1), slice(head * group, (head + 1) * group)
            of_q, of_k = (one, slice(start, stop), own), (one, slice(first, seen), slice(head, head + 1))
            at = {"q": of_q, "o": of_q, "lse": (one, own, slice(start, stop)), "k": of_k, "v": of_k}
            cut = {name: getattr(a, name)[at[name]] for name in ("q", "k", "v")}
            none = {"cu_seqlens_q": None, "cu_seqlens_k": None, "backend": "auto"}
            slopes = None if a.slopes is None else a.slopes[own]
            yield Part({**vars(a), **cut, **none, "slopes": slopes}, at)


def drift(values: Mapping[str, Any], grads: list, dtype: torch.dtype) -> dict[str, Tensor]:
    """How far rounding o, to `dtype`, and lse, to fp32, takes gradients. Delta is a sum over o: its error is that of a gradient of
    lse, and one number for each row, so that of thousands of rows some have next to none: each has at least what rounding makes of
    such a sum on average. An error of lse is a factor of all that a row gives."""
    inputs = {n: values[n].detach().requires_grad_() for n in GRADED if values[n] is not None}
    o, lse = reference_lse(**{**values, **inputs})
    do, dlse = (torch.zeros_like(t) if g is None else g.to(t) for t, g in zip((o, lse), (*grads, None)))
    off = (lse.float() - lse).detach().nan_to_num(0.0)
    delta = (o * do).sum(-1) - (o.to(dtype).float() * do.float()).sum(-1)
    usual = torch.finfo(dtype).eps / 4 * (o * do).square().sum(-1).sqrt()
    delta = torch.copysign(torch.maximum(delta.abs(), usual), delta)
    through = (off.transpose(1, 2).unsqueeze(-1) * do, off * dlse + delta.transpose(1, 2))
    found = torch.autograd.grad((o, lse), [*inputs.values()], through, allow_unused=True)
    return {f"d_{n}": g for n, g in zip(inputs, found) if g is not None}


def sensible(a: SimpleNamespace) -> dict[str, Tensor]:
    """Masks of at most 128: scores are fp32, so that where every key of a row has 2^20 added their differences are left to within
    1/16, and the weights to within 6 %."""
    if a.mask is None or not a.mask.is_floating_point():
        return {}
    return {"mask": a.mask.clamp(-128.0, 128.0)}


GRADED = ("q", "k", "v", "sink")
WHERE = {
    "q": "float[batch length heads head_dim]", "k": "q[batch keys kv_heads head_dim]", "v": "q[batch keys kv_heads value_dim]",
    "left": at_least(0), "right": at_least(0), "softcap": at_least(0.0), "sink": "float[heads]", "slopes": "float[heads]",
    "mask": "bool|float[batch? heads? length? keys?]", "kv_len": "int[...?]", "cu_seqlens_q": "int[marks+]",
    "cu_seqlens_k": "int[marks+]",
}  # fmt: skip
READ = ("q", "k", "v", "sink", "slopes", "mask", "kv_len", "cu_seqlens_q", "cu_seqlens_k", "o", "lse")
ROWS = {"o": "q[batch length heads value_dim]", "lse": "wide(q)[batch heads length]"}
BARS = Bars("I", gradient="J", rounds=True, felt=("length", "heads"), drift=drift, parts=parts, sensible=sensible)
# Backward, two products are made anew and three are the gradients'
COST = Cost(flops=flops, backward=2.5)


def implementations(on_hopper: Callable[..., tuple], elsewhere: Callable[..., tuple]) -> tuple[Triton, ...]:
    """By their backwards: of o and lse, or of o alone."""
    return (
        Triton(library.forward, on_hopper, library.fits, "cudnn", library=True, out=True),
        Triton(hopper_forward.forward, on_hopper, hopper_forward.fits_call, "hopper"),
        Triton(portable.forward, elsewhere, portable.fits, "portable"),
    )


def sharding(a: SimpleNamespace) -> Sharding:
    """Ranks may share heads, and the batch if no lengths are tied to it; a mask that broadcasts is not cut along."""
    local = () if a.mask is not None else ("heads",) if a.kv_len is not None else ("batch", "heads")
    return Sharding(local, {"heads": "heads/q", "kv_heads": "heads/k"})


attention_lse = Op(
    "attention_lse", reference_lse, inputs, *implementations(hopper_backward.backward, portable.backward),
    check=partial(check, op="attention_lse"),
    asks="backend", where=WHERE, results=ROWS, out=Out(contiguous=("lse",)),
    gradient=Gradient(of=GRADED, through=("o", "lse"), saves=READ),
    cost=COST, bars=BARS, sibling="attention", sharding=sharding,
)  # fmt: skip
attention = Op(
    "attention", reference, inputs, *implementations(hopper_backward.backward_of_o, portable.backward_of_o),
    check=check, asks="backend", where=WHERE,
    results={"o": ROWS["o"]}, hidden=("lse",), gradient=Gradient(of=GRADED, saves=READ),
    cost=COST, bars=BARS, sharding=sharding,
)  # fmt: skip
