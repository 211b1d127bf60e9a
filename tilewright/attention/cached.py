"""Attention over a cache of keys and values, in pages: decoding, chunked prefill, mixed batches and the verification of drafts.

    o = softmax(scale * q @ k.T) @ v of the keys that each query sees, with all that `attention` does to scores

The kernels stand in `cached_portable.py`; those on Hopper for many queries in `hopper/chunks.py`, for few in `hopper/decode.py`,
over codes in `hopper/decode_codes.py`, for latents in `hopper/latent.py` and, where there are few rows, `hopper/latent_few.py`.
How all of them read a cache stands in `cache_read.py`, how keys are cut into parts, and these merged, in `cache_parts.py`; what
writes caches, in `cache_write.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.cost import tensor_bytes
from ..core.draw import Draw
from ..core.signature import at_least
from ..core.tensor import cdiv
from ..op import Bars, Cost, Op, Part, Triton, single, upcast
from . import cached_portable
from .attention import WIDEST, pairs_of, scale_of
from .cache_read import SCALED, value_columns
from .hopper import chunks, decode, decode_codes, latent, latent_few
from .seen import sequences

Backend = Literal["auto", "hopper_chunks", "hopper_decode", "hopper_latent", "hopper_latent_few", "portable"]
DRAFTS = 64  # bits of a tree


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_len: Tensor | None = None,
    *,
    value_dim: int | None = None,
    k_rope: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    left: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    tree: Tensor | None = None,
    split: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(o, lse): attention of `q` [batch, length, heads, head_dim] over caches [pages, page, kv_heads, head_dim], forward only.

    Key j of sequence b is at place `j % page` of page `block_table[b, j // page]`; without a table, sequence b has page b. Pages of
    any size, caches of any strides. `kv_len` [batch] says how many keys there are, those of the queries' own tokens included:
    query i of n stands at position kv_len - n + i, and sees key j if position - left <= j <= position, or all there are if not
    `causal`. Without it a sequence fills its page. Packed sequences are a batch of 1, marked by `cu_seqlens_q`; then tables and
    lengths are [sequences, ...]. A table with one query a sequence and pages of 1 is attention over chosen tokens.

    Without `v_cache`, values are the first `value_dim` columns of `k_cache`, or all. `k_rope` [pages, page, kv_heads, n] holds the
    last n columns of the keys where they are stored apart. Caches may be codes, e4m3 or int8, whose scales broadcast to [pages,
    page, kv_heads, blocks of 128 columns]: one of all is [1, 1, 1, 1], of heads [1, 1, kv_heads, 1], of tokens [pages, page,
    kv_heads, 1]. `k_rope` is never scaled.

    `tree` [batch, length] holds bits, int64, in the place of `causal`: bit t says whether a query sees the t-th of its sequence's
    queries, of which there are up to 64; it sees all keys before them. `softcap`, `sink` and `slopes` are those of `attention`,
    and lse is that of `attention_lse`, [batch, heads, length] in fp32.

    Keys are taken in parts of `split`, which end at its multiples and are merged in order: with a split that is given, a sequence's
    bits do not depend on the batch around it; None takes what keeps the chip busy at these sizes. Tables, lengths and scales are
    read on the device. A `kv_len` past what there is room for makes a sequence's rows NaN, and a page that there is not the rows
    that see it; neither is read. Nor is what no query sees, which may hold anything: NaN past kv_len, a table's entries there.

    `backend="auto"` takes the fastest implementation for the call or, with a split that is given, the portable one, for the
    fastest depends on the batch; a name takes that one, or raises.
    """
    width = value_columns(v_cache, k_cache, value_dim)
    wide = upcast(q).dtype
    pages, known = pages_of(q, k_cache, block_table, cu_seqlens_q)
    keys = gathered(k_cache, k_scale, pages, wide)
    values = keys[..., :width] if v_cache is None else gathered(v_cache, v_scale, pages, wide)
    if k_rope is not None:
        keys = torch.cat([keys, gathered(k_rope, None, pages, wide)], -1)
    if cu_seqlens_q is not None:  # the keys of all sequences, one after the other
        keys, values, known = (t.flatten(0, 1).unsqueeze(0) for t in (keys, values, known))
    place = seen_in_cache(q, block_table, k_cache.shape[1], kv_len, cu_seqlens_q, causal, left, tree)
    visible = place.visible.unsqueeze(1)  # [batch, heads, length, keys]
    # What nobody sees may hold NaN, which times a weight of 0 would show, and so may what lies in the place of pages there are not
    lonely, unseen = ~place.visible.any(2), ~(place.visible.any(1) & known)
    group = q.shape[2] // k_cache.shape[2] if k_cache.shape[2] else 1
    queries = upcast(q).masked_fill(lonely[..., None, None], 0.0)
    keys, values = (t.masked_fill(unseen[..., None, None], 0.0).repeat_interleave(group, 2) for t in (keys, values))
    s = torch.einsum("blhd,bkhd->bhlk", queries, keys) * (scale_of(q) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        s = s - upcast(slopes)[:, None, None] * place.apart.unsqueeze(1).to(s.dtype)
    s = s.masked_fill(~visible, -math.inf)
    # A sink is one more key, whose value is 0; without one, its logit is -inf
    extra = s.new_full((1,), -math.inf) if sink is None else upcast(sink).to(s.dtype)
    s = torch.cat([s, extra[:, None, None].expand(*s.shape[:3], 1)], -1)
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    o = torch.einsum("bhlk,bkhd->blhd", (p / total)[..., :-1], values)
    lse = (top + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)
    wrong = place.wrong | (place.visible & ~known.unsqueeze(1)).any(2)
    return o.masked_fill(wrong[..., None, None], math.nan).to(q.dtype), lse.masked_fill(wrong[:, None], math.nan)


def pages_of(q: Tensor, k_cache: Tensor, table: Tensor | None, marks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the pages of each sequence, [sequences, most], and of each of its keys whether there is such a page)."""
    count, page = k_cache.shape[:2]
    if table is None:
        many = q.shape[0] if marks is None else marks.shape[0] - 1
        table = torch.arange(many, device=q.device).unsqueeze(1)
    known = (table >= 0) & (table < count)
    return torch.where(known, table, 0).long(), known.unsqueeze(2).expand(*known.shape, page).flatten(1)


def gathered(cache: Tensor, scale: Tensor | None, pages: Tensor, wide: torch.dtype) -> Tensor:
    """[sequences, keys, kv_heads, columns]: the keys or values of each sequence, as numbers."""
    if not cache.shape[0]:
        cache = F.pad(cache, (0, 0, 0, 0, 0, 0, 0, 1))
    x = cache.to(wide)[pages].flatten(1, 2)
    if scale is None:
        return x
    scale = scale.to(wide).expand(*cache.shape[:3], -1)[pages].flatten(1, 2)
    return x * (scale if scale.shape[3] == 1 else scale.repeat_interleave(SCALED, 3)[..., : x.shape[3]])


class Seen(NamedTuple):
    visible: Tensor  # bool [batch, length, keys]
    apart: Tensor  # |position - j|, int64 [batch, length, keys]
    wrong: Tensor  # bool [batch, length]: more keys were asked for than there is room for


def seen_in_cache(
    q: Tensor,
    table: Tensor | None,
    page: int,
    kv_len: Tensor | None,
    marks: Tensor | None,
    causal: bool,
    left: int | None,
    tree: Tensor | None,
) -> Seen:
    """What each query sees of its sequence's keys, or, where sequences are packed, of the keys of all, one after the other."""
    batch, length, device = q.shape[0], q.shape[1], q.device
    room = page if table is None else page * table.shape[1]
    j = torch.arange(room, device=device)
    many = batch if marks is None else marks.shape[0] - 1
    given = torch.full((many,), room, device=device) if kv_len is None else kv_len.clamp(min=0).long()
    whose, index, count = sequences(length, marks, device)
    if marks is None:
        given, own = given.unsqueeze(1).expand(batch, length), torch.ones((), dtype=torch.bool, device=device)
    else:  # sequences in between marks; before the first and after the last there are none
        given = F.pad(given, (1, 1))[whose].unsqueeze(0)
        owner = torch.arange(many, device=device).unsqueeze(1).expand(many, room).flatten()
        own, j = (whose.unsqueeze(1) == owner + 1).unsqueeze(0), j.unsqueeze(0).expand(many, room).flatten()
    wrong = given > room
    limit = given.masked_fill(wrong, 0).unsqueeze(2)
    position = limit + (index - count).unsqueeze(1)
    visible = own & (j < limit)
    if tree is not None:
        draft = j - limit + count.unsqueeze(1)
        bit = (tree.unsqueeze(2) >> draft.clamp(0, DRAFTS - 1)) & 1
        visible = visible & ((draft < 0) | ((draft < DRAFTS) & (bit != 0)))
    elif causal:
        visible = visible & (j <= position)
    if left is not None:
        visible = visible & (j >= position - left)
    return Seen(visible, (position - j).abs(), wrong)


WIDTHS = (64, 40, 72, 128, 192, 8, 17)


def inputs(draw: Draw) -> dict[str, Any]:
    if "context" in draw.dims:
        return in_use(draw)
    packed = draw.option("cu_seqlens_q", False, True)
    batch, length = 1 if packed else draw.dim("batch"), draw.dim("length")
    heads, width = draw.dim("heads", (1, 2, 4, 3)), draw.dim("head_dim", WIDTHS)
    kv_heads = heads // math.gcd(heads, draw.option("queries_per_key", 2, 1, 3))
    paged = draw.option("block_table", True, False)
    page = draw.option("page", 16, 1, 3, 64) if paged else draw.option("room", 40, 7, 80)
    most = draw.option("most", 3, 2, 5) if paged else 1
    if length <= 4:  # where others are few, properties of the machinery are tried
        page, most = min(page, 16), min(most, 2)
    marks = None
    if packed:  # they need not reach the first and the last token
        marks = draw.integers(draw.option("marks", 3, 2, 4), high=length + 1, dtype=torch.int32).sort().values
    many = batch if marks is None else marks.shape[0] - 1
    pages = draw.option("pages", 7, 5) if paged else many
    turned = min(max(0, width - 1), 8) if draw.option("k_rope", False, False, True) else 0
    kinds = [
        draw_codes(draw, name, (pages, page, kv_heads, n))
        for name, n in (("k", width - turned), ("v", max(1, width // 2)))
    ]
    tree = (packed or length <= DRAFTS) and draw.option("tree", False, False, True)
    own = draw.option("v_cache", True, False)
    return {
        "q": draw.tensor(batch, length, heads, width),
        "k_cache": kinds[0][0],
        "v_cache": kinds[1][0] if own else None,
        "block_table": draw.integers(many, most, low=-draw.option("strays", 0, 1), high=pages, dtype=torch.int32)
        if paged
        else None,
        "kv_len": draw.integers(many, low=0, high=page * most + 2, dtype=torch.int32)
        if paged or draw.option("kv_len", True, False)
        else None,
        "value_dim": None if own else draw.option("value_dim", None, 1),
        "k_rope": draw.tensor(pages, page, kv_heads, turned) if turned else None,
        "k_scale": kinds[0][1],
        "v_scale": kinds[1][1] if own else None,
        "cu_seqlens_q": marks,
        "scale": draw.option("scale", None, None, 0.3),
        "causal": draw.option("causal", True, False),
        "left": draw.option("left", None, 2, 40) if not tree else None,
        "softcap": draw.option("softcap", 0.0, 0.0, 1.5),
        "sink": draw.maybe("sink", lambda: draw.tensor(heads)),
        "slopes": None if tree else draw.maybe("slopes", lambda: draw.uniform(heads, low=0.01, high=0.1)),
        "tree": draw.integers(batch, length, low=-(2**62), high=2**62) if tree else None,
        "split": draw.option("split", None, 16, 50),
    }


def in_use(draw: Draw) -> dict[str, Any]:
    """Caches as a server holds them: each sequence has `context` keys, or `shortest` to `longest` with that mean, in pages of
    `page` that lie in any order, or in one page of its own. `latent`: values are columns of the keys. `fp8`: codes with a scale a
    head. `tree`: a draft sees some of those before it."""
    batch, length, heads, width, context = (draw.dims[n] for n in ("batch", "length", "heads", "head_dim", "context"))
    columns, room = draw.dims.get("value_dim", width), draw.dims.get("longest", context)
    sizes = [context] * batch
    if "longest" in draw.dims:
        sizes = draw.spread(batch, batch * context, draw.dims["shortest"], room)
    page = draw.dims.get("page", room)
    most = cdiv(room, page)
    shape = (batch * most, page, draw.dims.get("kv_heads", heads))
    fp8, latent, tree = (draw.options.get(n, False) for n in ("fp8", "latent", "tree"))

    def cache(n: int) -> Tensor:
        if not fp8:
            return draw.tensor(*shape, n)
        return draw.tensor(*shape, n, dtype=torch.float32, scale=50.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    def scale() -> Tensor | None:
        return draw.uniform(1, 1, shape[2], 1, low=0.005, high=0.03, dtype=torch.float32) if fp8 else None

    order = draw.uniform(batch * most, dtype=torch.float32).argsort() if "page" in draw.dims else None
    own = 1 << torch.arange(length, device=draw.device)
    return {
        "q": draw.tensor(batch, length, heads, width),
        "k_cache": cache(width),
        "v_cache": None if latent else cache(columns),
        "block_table": None if order is None else order.reshape(batch, most).to(torch.int32),
        "kv_len": torch.tensor(sizes, dtype=torch.int32, device=draw.device),
        "value_dim": columns if latent else None,
        "k_scale": scale(),
        "v_scale": None if latent else scale(),
        "tree": draw.integers(batch, length, high=2**62) & (own - 1) | own if tree else None,
    }


def draw_codes(draw: Draw, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """A cache: numbers without a scale, or codes with one of any kind."""
    if not draw.option(f"{name}_scale", False, False, True):
        return draw.tensor(*shape), None
    kind = draw.option(f"{name}_codes", torch.float8_e4m3fn, torch.int8)
    codes = draw.integers(*shape, low=-127, high=128, dtype=torch.int8)
    if kind != torch.int8:
        codes = draw.tensor(*shape, dtype=torch.float32, scale=50.0).clamp(-448.0, 448.0).to(kind)
    blocks = -(-shape[3] // SCALED)
    sizes = {
        "all": (1, 1, 1, 1),
        "heads": (1, 1, shape[2], 1),
        "tokens": (*shape[:3], 1),
        "blocks": (*shape[:3], blocks),
    }
    size = sizes[draw.option(f"{name}_scales", *sizes)]
    return codes, draw.uniform(*size, low=0.005, high=0.03, dtype=torch.float32)


def check(
    q, k_cache, v_cache, block_table, kv_len, *, value_dim, k_rope, k_scale, v_scale, cu_seqlens_q, left, slopes, tree, **_
) -> None:  # fmt: skip
    op, (batch, length, heads, width), (kv_heads, key_dim) = "cached_attention", q.shape, k_cache.shape[2:]
    if kv_heads == 0 and heads or kv_heads and heads % kv_heads:
        raise ValueError(f"{op}: q has {heads} heads, which the {kv_heads} of k_cache do not divide")
    turned = 0 if k_rope is None else k_rope.shape[-1]
    if k_rope is not None and not turned:
        raise ValueError(f"{op}: k_rope must have columns, got none")
    if width != key_dim + turned:
        raise ValueError(
            f"{op}: q has {width} columns, k_cache {key_dim}" + (f" and k_rope {turned}" if turned else "")
        )
    for name, n in (("q", width), ("v_cache", value_columns(v_cache, k_cache, value_dim))):
        if not 1 <= n <= WIDEST:
            raise ValueError(f"{op}: {name} must have 1 to {WIDEST} columns, got {n}")
    if value_dim is not None and (v_cache is not None or value_dim > key_dim):
        wide = "v_cache says how wide values are" if v_cache is not None else f"k_cache has {key_dim} columns"
        raise ValueError(f"{op}: value_dim is {value_dim}, but {wide}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is not None and cache.element_size() > 1 and cache.dtype != q.dtype:
            raise ValueError(f"{op}: {name} must be {q.dtype}, as q is, or codes, got {cache.dtype}")
    check_scale(op, "k_scale", k_scale, "k_cache", k_cache)
    check_scale(op, "v_scale", v_scale, "v_cache", v_cache)
    check_sequences(op, q, k_cache, block_table, kv_len, cu_seqlens_q)
    if tree is not None:
        if tuple(tree.shape) != (batch, length):
            raise ValueError(f"{op}: tree must be [batch, length] = [{batch}, {length}], got {list(tree.shape)}")
        if cu_seqlens_q is None and length > DRAFTS:
            raise ValueError(f"{op}: tree has bits for {DRAFTS} tokens, got {length}")
        for name, given in (("left", left), ("slopes", slopes)):
            if given is not None:  # positions in a tree are not those in the cache
                raise ValueError(f"{op}: {name} cannot be given with a tree")


def check_sequences(op: str, q: Tensor, k_cache: Tensor, block_table, kv_len, cu_seqlens_q) -> None:
    """Tables and lengths are those of as many sequences as there are."""
    (pages, page), many = k_cache.shape[:2], q.shape[0]
    if cu_seqlens_q is not None:
        if not cu_seqlens_q.numel():
            raise ValueError(f"{op}: cu_seqlens_q must have a mark, got none")
        if q.shape[0] != 1:
            raise ValueError(f"{op}: packed sequences lie in a batch of 1, got q with a batch of {q.shape[0]}")
        many = cu_seqlens_q.shape[0] - 1
    if block_table is not None and kv_len is None:
        raise ValueError(f"{op}: block_table needs kv_len, the lengths of its sequences")
    for name, t in (("block_table", block_table), ("kv_len", kv_len)):
        if t is not None and t.shape[0] != many:
            raise ValueError(f"{op}: {name} must have a row for each of {many} sequences, got {t.shape[0]}")
    if block_table is None and pages < many:
        raise ValueError(f"{op}: k_cache must have a page for each of {many} sequences, got {pages}")
    room = page if block_table is None else page * block_table.shape[1]
    for name, n in (("the tokens of q", q.shape[1]), ("the keys of k_cache", room), ("its pages", pages)):
        if n >= 2**31 - 1024:
            raise ValueError(f"{op}: {name} must be fewer than 2**31 - 1024, got {n}")


def check_scale(op: str, name: str, scale: Tensor | None, whose: str, cache: Tensor | None) -> None:
    """A scale is that of codes, and of all their columns or of blocks of them."""
    if scale is None:
        return
    if cache is None or cache.element_size() > 1:
        raise ValueError(f"{op}: {name} is for codes, but {whose} has none")
    blocks = -(-cache.shape[3] // SCALED)
    if scale.shape[3] not in (1, blocks):
        raise ValueError(f"{op}: {name} must have 1 or {blocks} for the columns of {whose}, got {list(scale.shape)}")


def sizes_of(q: Tensor, k_cache: Tensor, block_table, kv_len, cu_seqlens_q) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence; where lengths have no memory, as many as there is room for."""
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    queries = [q.shape[1]] * q.shape[0]
    if cu_seqlens_q is not None:
        unknown = [q.shape[1]] + [0] * (cu_seqlens_q.shape[0] - 2)
        queries = unknown if cu_seqlens_q.is_meta else cu_seqlens_q.diff().clamp(min=0).tolist()
    known = kv_len is not None and not kv_len.is_meta
    return list(zip(queries, kv_len.clamp(0, room).tolist() if known else [room] * len(queries)))


def flops(
    q: Tensor, k_cache: Tensor, v_cache, block_table, kv_len, *, value_dim, cu_seqlens_q, causal: bool, left: int | None, tree, **_
) -> int:  # fmt: skip
    """Multiplications and additions of both products over what queries see; drafts count as if they saw all others."""
    right = 0 if causal and tree is None else None
    pairs = sum(pairs_of(n, m, left, right) for n, m in sizes_of(q, k_cache, block_table, kv_len, cu_seqlens_q))
    return 2 * q.shape[2] * pairs * (q.shape[3] + value_columns(v_cache, k_cache, value_dim))


def moved(
    q: Tensor, k_cache: Tensor, v_cache, block_table, kv_len, *, value_dim, k_rope, k_scale, v_scale, cu_seqlens_q, left, sink,
    slopes, tree, **_,
) -> tuple[int, int]:  # fmt: skip
    """Bytes: of caches, and of scales of their tokens, those of the keys that a query sees, once; everything of all else."""
    sizes = sizes_of(q, k_cache, block_table, kv_len, cu_seqlens_q)
    seen = sum(m if left is None else min(m, n + left) for n, m in sizes if n)
    scales = [t for t in (k_scale, v_scale) if t is not None]
    of_all = [t for t in scales if t.shape[:2] == (1, 1)]
    by_token = [t for t in (k_cache, v_cache, k_rope) if t is not None] + [t for t in scales if t.shape[:2] != (1, 1)]
    whole = (q, block_table, kv_len, cu_seqlens_q, sink, slopes, tree, *of_all)
    each = sum(t.shape[2] * t.shape[3] * t.element_size() for t in by_token)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    written = rows * (value_columns(v_cache, k_cache, value_dim) * q.element_size() + 4)
    return sum(map(tensor_bytes, whole)) + seen * each, written


def parts(a: SimpleNamespace, gradients: bool) -> Iterator[Part]:
    """Of a few sequences, from the first to the last, the queries of one key head each. None where sequences are packed."""
    if a.cu_seqlens_q is not None:
        return
    batch, heads, (count, _, kv_heads, _) = a.q.shape[0], a.q.shape[2], a.k_cache.shape
    group = heads // kv_heads
    for i in range(4):  # decoding has few rows: those of one sequence would scatter
        b, head = i * (batch - 1) // 3, i * (kv_heads - 1) // 3
        one, own = slice(b, b + 1), slice(head * group, (head + 1) * group)
        pages, table = torch.tensor([b], device=a.q.device), None
        if a.block_table is not None:
            pages = a.block_table[b].long()
            known = (pages >= 0) & (pages < count)
            table = torch.where(known, torch.arange(pages.shape[0], device=pages.device), -1).unsqueeze(0)
            pages = torch.where(known, pages, 0)
        cut: dict[str, Tensor | None] = {"q": a.q[one, :, own], "block_table": table}
        for name in ("k_cache", "v_cache", "k_rope", "k_scale", "v_scale"):
            t = getattr(a, name)
            if t is not None:  # scales may be of all pages, or of all heads
                t = t[pages] if t.shape[0] == count else t
                cut[name] = t[:, :, head : head + 1] if t.shape[2] == kv_heads else t
        for name, at in (("kv_len", one), ("tree", one), ("sink", own), ("slopes", own)):
            if getattr(a, name) is not None:
                cut[name] = getattr(a, name)[at]
        yield Part({**vars(a), **cut, "backend": "auto"}, {"o": (one, slice(None), own), "lse": (one, own)})


CACHE = "float|float8_e4m3fn|int8"
cached_attention = Op(
    "cached_attention", reference, inputs, Triton(decode.forward, None, decode.fits_call, decode.NAME),
    Triton(decode_codes.forward, None, decode_codes.fits_call, decode.NAME),
    Triton(chunks.forward, None, chunks.fits_call, chunks.NAME),
    Triton(latent_few.forward, None, latent_few.fits_call, latent_few.NAME),
    Triton(latent.forward, None, latent.fits_call, latent.NAME),
    Triton(cached_portable.forward, None, single, "portable"), check=check, asks="backend",
    where={
        "q": "float[batch length heads head_dim]", "k_cache": f"{CACHE}[pages page kv_heads key_dim]",
        "v_cache": f"{CACHE}[pages page kv_heads value_columns]", "block_table": "int[sequences most]", "kv_len": "int[sequences]",
        "value_dim": at_least(1), "k_rope": "q[pages page kv_heads rope_dim]",
        "k_scale": "float32|float64[pages? page? kv_heads? key_blocks]",
        "v_scale": "float32|float64[pages? page? kv_heads? value_blocks]",
        "cu_seqlens_q": "int[marks]", "left": at_least(0), "softcap": at_least(0.0),
        "sink": "float[heads]", "slopes": "float[heads]", "tree": "int64[trees nodes]", "split": at_least(1),
    },
    results={"o": "q[batch length heads columns]", "lse": "wide(q)[batch heads length]"},
    sizes=lambda a: {"columns": value_columns(a.v_cache, a.k_cache, a.value_dim)}, cost=Cost(moved, flops),
    bars=Bars("I", parts=parts),
)  # fmt: skip
