"""Calls of attention that a chip's own kernels take, at sizes that a CPU plays too, and how near to float64 they must come."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.attention.attention import reference_lse
from tilewright.attention.seen import seen

PLAIN = {
    "scale": None, "causal": False, "left": None, "right": None, "softcap": 0.0, "sink": None, "slopes": None, "mask": None,
    "kv_len": None, "cu_seqlens_q": None, "cu_seqlens_k": None,
}  # fmt: skip


def call(
    batch=1, length=200, keys=200, heads=2, kv_heads=1, D=64, V=None, dtype=torch.bfloat16, **options
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call; the same for the same sizes."""
    source = torch.Generator().manual_seed(0)
    shapes = ((length, heads, D), (keys, kv_heads, D), (keys, kv_heads, V or D))
    q, k, v = (torch.randn(batch, *shape, generator=source).to(dtype) for shape in shapes)
    return {"q": q, "k": k, "v": v, **PLAIN, **options}


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def poisoned(a: dict[str, Any]) -> dict[str, Any]:
    """The same with NaN in every key and value that no query sees, and in every query that sees no key."""
    place = seen(*(a[n] for n in ("q", "k", "causal", "left", "right", "kv_len", "cu_seqlens_q", "cu_seqlens_k")))
    lonely, unseen = ~place.visible.any(2), ~place.visible.any(1)
    q, k, v = (
        t.masked_fill(hidden[..., None, None], math.nan)
        for t, hidden in ((a["q"], lonely), (a["k"], unseen), (a["v"], unseen))
    )
    return {**a, "q": q, "k": k, "v": v}


def agrees(a: dict[str, Any], o: Tensor, lse: Tensor) -> None:
    """Hold results to the reference in float64 on the same arguments."""
    wide = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in a.items()}
    wanted_o, wanted_lse = reference_lse(**wide)
    bar = 2.4e-3 / (8 if o.dtype == torch.float16 else 1)
    for got, wanted, most in ((o.double(), wanted_o, bar), (lse.double(), wanted_lse, 2e-5)):
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got == -math.inf, wanted == -math.inf)
        live = wanted.isfinite()
        size = wanted[live].square().mean().sqrt() if live.any() else 1.0
        assert live.logical_not().all() or (got - wanted)[live].square().mean().sqrt() <= most * max(size, 1e-3)


CALLS = {
    "causal": {"causal": True},
    "full": {"length": 130, "keys": 333},
    "heads share keys": {"batch": 2, "heads": 6, "kv_heads": 2, "causal": True, "length": 129, "keys": 129},
    "one query": {"length": 1, "keys": 300, "causal": True},
    "more keys": {"length": 100, "keys": 387, "causal": True, "left": 70},
    "fewer keys": {"length": 300, "keys": 90, "causal": True, "sink": torch.tensor([0.5, -math.inf])},
    "windowed": {"length": 400, "keys": 400, "left": 37, "right": 65},
    "narrow": {"length": 300, "keys": 300, "left": 0, "right": 0},
    "far windows": {"length": 140, "keys": 140, "left": 10**12, "right": 10**12},
    "everything": {
        "length": 300, "keys": 310, "causal": True, "left": 150, "softcap": 1.5, "sink": torch.tensor([0.7, -2.0]),
        "slopes": torch.tensor([0.01, 0.1]), "scale": 0.3,
    },  # fmt: skip
    "lengths": {"batch": 5, "length": 140, "keys": 260, "kv_len": ints(260, 261, 0, -1, 131), "causal": True},
    "lengths and a sink": {"batch": 2, "length": 9, "keys": 20, "kv_len": ints(21, 0), "sink": torch.tensor([0.3, 1.0])},
    "packed": {
        "length": 420, "keys": 500, "causal": True, "cu_seqlens_q": ints(3, 3, 140, 290, 291, 400),
        "cu_seqlens_k": ints(0, 50, 200, 200, 330, 481),
    },  # fmt: skip
    "packed, windows, lengths": {
        "length": 300, "keys": 400, "left": 40, "right": 20, "cu_seqlens_q": ints(0, 100, 130, 300), "kv_len": ints(77, 31, 201),
        "cu_seqlens_k": ints(20, 120, 150, 390),
    },  # fmt: skip
    "marks that fall": {
        "length": 150, "keys": 150, "cu_seqlens_q": ints(0, 100, 40, 150), "cu_seqlens_k": ints(0, 60, 90, 150),
    },  # fmt: skip
    "128 columns": {"D": 128, "causal": True, "length": 300, "keys": 300},
    "256 columns": {"D": 256, "causal": True, "left": 100},
    "192 and 128": {"D": 192, "V": 128, "causal": True},
    "96 columns": {"D": 96, "left": 50, "keys": 250},
    "72 and 40": {"D": 72, "V": 40, "kv_len": ints(150)},
    "8 columns": {"D": 8, "causal": True},
    "160 and 224": {"D": 160, "V": 224, "length": 70, "kv_len": ints(190), "left": 20},
    "fp16": {"D": 128, "V": 64, "causal": True, "dtype": torch.float16},
}  # fmt: skip
