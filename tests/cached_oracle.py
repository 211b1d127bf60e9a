"""Calls of attention over caches that a chip's own kernels take, at sizes that a CPU plays too, and how near to float64 they must
come."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.attention_oracle import ints
from tilewright.attention.cached import reference, seen_in_cache
from tilewright.check.oracle import rms, weighty

LOWEST = torch.iinfo(torch.int32).min
PLAIN = {
    "value_dim": None, "k_rope": None, "k_scale": None, "v_scale": None, "cu_seqlens_q": None, "scale": None, "causal": True,
    "left": None, "softcap": 0.0, "sink": None, "slopes": None, "tree": None, "split": None,
}  # fmt: skip


def call(
    *kv_len: int, length=200, room=None, page: int | None = 64, heads=2, kv_heads=1, D=64, V=None, dtype=torch.bfloat16, strays=(),
    **options,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call over sequences of these many keys, with `room` for as many; the same for the same sizes.

    Pages lie in any order; without `page` each sequence has one. There is NaN in every key and value that no query sees and in
    every query that sees no key, and no page in entries of the table for keys that nobody sees. `strays`: (sequence, entry, number)
    that are put into the table.
    """
    source = torch.Generator().manual_seed(0)
    a = {**PLAIN, **options}
    many, marks = len(kv_len), a["cu_seqlens_q"]
    room = max(kv_len) if room is None else room
    size = page or room
    most = -(-room // size)
    shapes = ((many if marks is None else 1, length, heads, D), (many, most * size, kv_heads, D))
    q, k, v = (
        torch.randn(*shape, generator=source).to(dtype) for shape in (*shapes, (*shapes[1][:3], V or D))
    )  # fmt: skip
    order = torch.randperm(many * most + 1, generator=source)[: many * most].int().reshape(many, most)
    table = order.clone() if page else None
    lengths = ints(*kv_len)
    place = seen_in_cache(q, table, size, lengths, marks, a["causal"], a["left"], a["tree"])
    lonely, unseen = ~place.visible.any(2), ~place.visible.any(1).reshape(many, -1)
    q = q.masked_fill(lonely[..., None, None], math.nan)
    caches = [t.masked_fill(unseen[..., None, None], math.nan) for t in (k, v)]
    if page:
        pages = [torch.full((many * most + 1, size, *t.shape[2:]), math.nan, dtype=dtype) for t in caches]
        for cache, t in zip(pages, caches):
            cache[order.flatten().long()] = t.reshape(many * most, size, *t.shape[2:])
        caches = pages
        table[unseen.reshape(many, most, size).all(2)] = LOWEST
        for sequence, entry, number in strays:
            table[sequence, entry] = number
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "block_table": table, "kv_len": lengths, **a}


def coded(a: dict[str, Any], kind: torch.dtype, scales: tuple[str | None, str | None]) -> dict[str, Any]:
    """The same call over codes of a kind. `scales` of keys and of values: "all" have one, or "heads", or there is none, and then
    codes are small. What was NaN is e4m3's code of NaN, or the least of int8."""
    made = dict(a)
    for name, scale, by in (("k_cache", "k_scale", scales[0]), ("v_cache", "v_scale", scales[1])):
        t = a[name].float()
        each = torch.linspace(0.02, 0.03, t.shape[2] if by == "heads" else 1).reshape(1, 1, -1, 1)
        codes = t if by is None else t / each
        if kind == torch.int8:
            codes = codes.nan_to_num(nan=-128.0).round().clamp(-128, 127)
        made[name], made[scale] = codes.to(kind), None if by is None else each
    return made


def moved(a: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same call with pages that lie elsewhere in the caches. Entries of the table that are no page's stay what they are."""
    table, count = a["block_table"], a["k_cache"].shape[0]
    where = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(table.dtype)
    known = (table >= 0) & (table < count)
    there = {"block_table": torch.where(known, where[table.clamp(0, count - 1).long()], table)}
    for name in ("k_cache", "v_cache", "k_rope"):
        if a[name] is not None:
            there[name] = torch.empty_like(a[name])
            there[name][where.long()] = a[name]
    return {**a, **there}


def agrees(a: dict[str, Any], o: Tensor, lse: Tensor) -> None:
    """Hold results to the reference in float64 on the same arguments, by the bars of class I."""
    wide = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in a.items()}
    wanted_o, wanted_lse = reference(**wide)
    bar = 2.4e-3 / (8 if o.dtype == torch.float16 else 1)
    for got, wanted, most in ((o.double(), wanted_o, bar), (lse.double(), wanted_lse, 2e-5)):
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got == -math.inf, wanted == -math.inf)
        live = wanted.isfinite()
        if live.any():
            most *= (
                1 + 16 / weighty(wanted[live]) ** 0.5
            )  # of few rows the error has its own spread, as in `check/oracle.py`
            assert rms((got - wanted)[live]) <= most * max(rms(wanted[live]), 1e-3)


CHUNKS = {
    "a chunk": {"of": (300, 233), "length": 150},
    "pages of 16": {"of": (300, 233), "length": 150, "page": 16},
    "pages of 48": {"of": (300, 233), "length": 150, "page": 48, "D": 128},
    "pages of 128": {"of": (300,), "length": 150, "page": 128},
    "pages of 320": {"of": (300, 310), "length": 140, "page": 320},
    "one page each": {"of": (300, 233), "length": 150, "page": None, "room": 333},
    "few keys": {"of": (0, 1, 70, 129), "length": 140, "room": 140},
    "more than there is room for": {"of": (257, 256, -3), "length": 30, "room": 256},
    "no such page": {
        "of": (300, 300, 300), "length": 200, "strays": ((0, 2, 16), (1, 0, -1), (2, 4, 2**31 - 1)), "kv_heads": 2,
    },  # fmt: skip
    "no such page before a window": {"of": (500,), "length": 30, "left": 100, "strays": ((0, 1, 99),), "page": 32},
    "no such page, and softcap": {
        "of": (300,), "length": 200, "softcap": 1.5, "strays": ((0, 3, -7),), "D": 192, "V": 128,
    },  # fmt: skip
    "windowed": {"of": (400, 390), "length": 200, "left": 37},
    "far window": {"of": (200,), "length": 140, "left": 10**12},
    "not causal": {"of": (300, 77), "length": 130, "causal": False},
    "everything": {
        "of": (310, 200), "length": 250, "left": 150, "softcap": 1.5, "sink": torch.tensor([0.7, -math.inf]),
        "slopes": torch.tensor([0.01, 0.1]), "scale": 0.3,
    },  # fmt: skip
    "packed": {"of": (200, 90, 0, 150), "length": 420, "cu_seqlens_q": ints(3, 140, 290, 291, 400), "page": 32},
    "packed, one page each": {
        "of": (200, 0, 150), "length": 300, "room": 200, "cu_seqlens_q": ints(0, 140, 130, 299), "page": None,
        "sink": torch.tensor([0.3, 1.0]), "strays": (),
    },  # fmt: skip
    "heads share keys": {"of": (210, 140), "length": 129, "heads": 6, "kv_heads": 2},
    "128 columns": {"of": (390,), "length": 260, "D": 128},
    "256 columns": {"of": (210,), "D": 256, "left": 100},
    "192 and 128": {"of": (290,), "D": 192, "V": 128},
    "72 and 40": {"of": (290,), "D": 72, "V": 40, "page": 16, "strays": ((0, 3, -1),)},
    "8 columns": {"of": (210,), "D": 8},
    "fp16": {"of": (290,), "D": 128, "V": 64, "dtype": torch.float16},
}  # fmt: skip


def chunk(name: str, **sizes: Any) -> dict[str, Any]:
    """A call by its name, with other sizes where these are given."""
    given = {**CHUNKS[name], **sizes}
    return call(*given.pop("of"), **given)
