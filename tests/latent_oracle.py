"""Calls of attention over caches of latents that Hopper's own kernel takes, at sizes that a CPU plays too."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.core.tensor import cdiv

PLAIN = {
    "k_rope": None, "k_scale": None, "v_scale": None, "cu_seqlens_q": None, "scale": None, "causal": True, "left": None,
    "softcap": 0.0, "sink": None, "slopes": None, "tree": None, "split": None,
}  # fmt: skip
NOWHERE = torch.iinfo(torch.int32).min  # what tables hold past the last page that is seen


def call(
    lengths: tuple[int, ...] = (130,), room: int | None = None, tokens: int = 1, heads: int = 16, values: int = 512, rope: int = 64,
    page: int = 0, apart: bool = False, dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call over sequences that say so many keys, of `room` each; the same for the same sizes. All that no key is in
    holds NaN, and all that no page is in is no number of a page. Pages, if any, lie in random order."""
    source = torch.Generator().manual_seed(0)
    batch, room = len(lengths), room or max(1, *lengths)
    most = cdiv(room, page) if page else 1
    q = torch.randn(batch, tokens, heads, values + rope, generator=source).to(dtype)
    keys = torch.randn(batch, most * (page or room), values + rope, generator=source)
    for b, count in enumerate(lengths):
        keys[b, max(count, 0) :] = math.nan
    cache, table = keys.to(dtype), None
    if page:
        order = torch.randperm(batch * most, generator=source)
        cache = torch.empty(batch * most, page, values + rope, dtype=dtype)
        cache[order] = keys.to(dtype).view(batch * most, page, -1)
        table = order.view(batch, most).to(torch.int32)
        for b, count in enumerate(lengths):
            table[b, cdiv(max(count, 0), page) :] = NOWHERE
    cache = cache.unsqueeze(2)
    parts = {"k_cache": cache}
    if apart:
        parts = {"k_cache": cache[..., :values].contiguous(), "k_rope": cache[..., values:].contiguous()}
    return {
        "q": q, "v_cache": None, "block_table": table, "kv_len": torch.tensor(lengths, dtype=torch.int32), "value_dim": values,
        **PLAIN, **parts, **options,
    }  # fmt: skip


def without_a_page(a: dict[str, Any], sequence: int, at: int, instead: int) -> dict[str, Any]:
    """The same with another number in a sequence's table."""
    a["block_table"][sequence, at] = instead
    return a


# Functions, for a call is changed where it lies
CALLS = {
    "uneven": lambda: call((130, 0, 64, 65, 1, 63), room=200),
    "more than there is room for": lambda: call((70, 201, -3), room=200),
    "several tiles": lambda: call((200, 130), heads=128),
    "a row of heads that ends in a tile": lambda: call((140,), heads=72, tokens=2),
    "one head": lambda: call((100, 7), heads=1),
    "several queries": lambda: call((190, 70, 2), heads=16, tokens=5),
    "more queries than keys": lambda: call((3,), heads=1, tokens=70, room=90),
    "not causal": lambda: call((150, 65), tokens=3, causal=False, softcap=1.5, scale=0.11),
    "pages": lambda: call((300, 64, 65, 0), page=64),
    "larger pages": lambda: call((300, 129), page=128, heads=72),
    "small pages": lambda: call((17, 150), page=16),
    "pages of 32": lambda: call((90, 33), page=32, apart=True),
    "no such page": lambda: without_a_page(call((300, 300, 300), page=64, tokens=2), 1, 2, 999),
    "no such page, not seen by all": lambda: without_a_page(call((130, 130), page=16, tokens=3, heads=2), 0, 8, -1),
    "parts": lambda: call((500, 129, 60), split=128, heads=16, tokens=2),
    "parts of pages": lambda: call((300, 64, 0), page=64, split=64, heads=66),
    "narrow": lambda: call((300, 70), values=256, rope=32, tokens=2, heads=40),
    "fp16": lambda: call((140, 64), dtype=torch.float16),
    "few queries": lambda: call((190, 70, 2, 0), heads=6, tokens=5),
    "few rows of larger pages": lambda: call((300, 129), page=128, heads=24),
    "few rows, narrow": lambda: call((300, 70), values=256, rope=32, tokens=2, heads=10),
    "few rows, parts of pages": lambda: call((300, 64, 0), page=64, split=64, heads=32),
}
# Of no more rows than `hopper_latent_few` takes
FEW = [name for name, made in CALLS.items() if math.prod(made()["q"].shape[1:3]) <= 32]
