"""Calls of attention of few queries over caches that Hopper's own kernel takes, at sizes that a CPU plays too."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.cached_oracle import call, coded


def bits(batch: int, length: int, hidden: tuple[int, ...] = ()) -> torch.Tensor:
    """A tree: each query sees its own draft and about half of those before it, but none of the `hidden`."""
    drafts = torch.randint(2**62, (batch, length), generator=torch.Generator().manual_seed(1))
    own = torch.ones((), dtype=torch.int64) << torch.arange(length)
    return (drafts & (own - 1) | own) & ~sum(1 << t if t < 63 else -(2**63) for t in hidden)


GROUP = {"heads": 8, "kv_heads": 2, "D": 128}
DECODES = {
    "uneven": {"of": (130, 0, 64, 65, 1, 63), "room": 200},
    "more than there is room for": {"of": (257, 256, -3), "room": 256},
    "one page each": {"of": (300, 233), "page": None, "room": 333},
    "whole pages": {"of": (333, 333), "page": None},
    "pages of 16": {"of": (300, 17), "page": 16},
    "pages of 32": {"of": (300, 33), "page": 32},
    "pages of 48": {"of": (300, 49), "page": 48},
    "pages of 320": {"of": (300, 310), "page": 320},
    "no such page": {"of": (300, 300, 300), "strays": ((0, 2, 16), (1, 0, -1), (2, 4, 2**31 - 1)), "length": 2},
    "no such page, not seen by all": {"of": (130, 130), "page": 16, "length": 3, "strays": ((0, 8, -1),)},
    "no such page before a window": {"of": (500,), "left": 100, "strays": ((0, 1, 99),), "page": 32},
    "drafts": {"of": (190, 70, 2), "length": 4},
    "more queries than keys": {"of": (3, 70), "length": 16, "heads": 4, "kv_heads": 1},
    "windowed": {"of": (400, 390), "length": 3, "left": 37},
    "a window of a block": {"of": (400, 65), "left": 63, "split": 64},
    "far window": {"of": (200,), "left": 10**12},
    "not causal": {"of": (300, 77), "length": 2, "causal": False},
    "sinks": {"of": (310, 0, 200), "sink": torch.linspace(-1, 1, 8), "split": 128},
    "everything": {
        "of": (310, 200), "length": 4, "left": 150, "softcap": 1.5, "sink": torch.tensor([0.7, -math.inf] * 4),
        "slopes": torch.linspace(0.01, 0.1, 8), "scale": 0.3, "split": 128,
    },  # fmt: skip
    "parts": {"of": (500, 129, 60), "split": 128},
    "parts of pages of 16": {"of": (500, 64, 0), "split": 64, "page": 16, "length": 3},
    "a head of its own": {"of": (210, 140), "heads": 2, "kv_heads": 2},
    "three heads share keys": {"of": (210, 140), "heads": 6, "kv_heads": 2, "length": 3},
    "64 rows": {"of": (210, 140), "heads": 16, "kv_heads": 2, "length": 8},
    "64 columns": {"of": (300, 70), "D": 64},
    "128 and 64": {"of": (300, 70), "D": 128, "V": 64},
    "72 and 40": {"of": (290, 70), "D": 72, "V": 40, "page": 16, "strays": ((0, 3, -1),)},
    "40 and 128": {"of": (290, 70), "D": 40, "V": 128},
    "8 columns": {"of": (210, 64), "D": 8},
    "a tree": {"of": (200, 70, 66, 2, 0), "length": 8, "tree": bits(5, 8)},
    "a tree of 16 over pages of 16": {"of": (200, 70, 16, 135), "length": 16, "tree": bits(4, 16, (3, 15)), "page": 16},
    "a tree of 64": {
        "of": (300, 64, 100, 30, 65), "length": 64, "heads": 2, "kv_heads": 2, "tree": bits(5, 64, (0, 1, 40, 63)),
    },
    "drafts of a tree that nobody sees": {
        "of": (199, 150, 257), "length": 60, "heads": 1, "kv_heads": 1, "tree": bits(3, 60, tuple(range(59))),
    },
    "a tree of parts, and everything": {
        "of": (300, 129, 190, 5), "length": 15, "tree": bits(4, 15, (0, 7)), "split": 64, "softcap": 1.5, "scale": 0.3,
        "sink": torch.tensor([0.7, -math.inf] * 4), "page": 16, "strays": ((0, 3, -1), (1, 7, 99), (2, 11, 2**30)),
    },
    "fp16": {"of": (290, 70), "dtype": torch.float16},
    "pages of 1": {"of": (130, 0, 64, 65, 1, 63), "room": 200, "page": 1},
    "pages of 3": {"of": (300, 17), "page": 3, "length": 3},
    "pages of 8": {"of": (300, 33), "page": 8, "split": 128},
    "pages of 24": {"of": (300, 49), "page": 24},
    "more than there is room for, in pages of 1": {"of": (257, 256, -3), "room": 256, "page": 1},
    "no such page of 1": {
        "of": (300, 300, 300), "page": 1, "length": 2, "strays": ((0, 150, 10**6), (1, 0, -1), (2, 299, 2**31 - 1)),
    },
    "no such page of 3, not seen by all": {"of": (130, 129), "page": 3, "length": 3, "strays": ((0, 43, -1), (1, 42, 999))},
    "no such page of 8 before a window": {"of": (500,), "left": 100, "strays": ((0, 10, 999),), "page": 8, "length": 2},
    "a window over pages of 1": {"of": (400, 65), "left": 63, "page": 1, "length": 3, "split": 64},
    "everything in pages of 1": {
        "of": (310, 200), "length": 4, "left": 150, "softcap": 1.5, "sink": torch.tensor([0.7, -math.inf] * 4), "page": 1,
        "slopes": torch.linspace(0.01, 0.1, 8), "scale": 0.3, "split": 128, "strays": ((0, 250, -1), (1, 199, 10**6)),
    },
    "64 rows over pages of 1": {"of": (210, 140), "heads": 16, "kv_heads": 2, "length": 8, "page": 1},
    "72 and 40 in pages of 8": {"of": (290, 70), "D": 72, "V": 40, "page": 8, "strays": ((0, 3, -1),)},
    "40 and 128 in pages of 1": {"of": (290, 70), "D": 40, "V": 128, "page": 1},
    "8 columns in pages of 3": {"of": (210, 64), "D": 8, "page": 3, "dtype": torch.float16},
}  # fmt: skip

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
CODED = {
    "codes": {"of": (130, 0, 64, 65, 1, 63), "room": 200},
    "one page of codes each": {"of": (300, 233), "page": None, "room": 333, "codes": INT8},
    "codes in pages of 16": {"of": (600, 17), "page": 16},
    "integers in pages of 48": {"of": (300, 49), "page": 48, "codes": INT8, "scales": ("all", "heads")},
    "codes without scales": {"of": (290, 70), "scales": (None, None), "dtype": torch.float16},
    "codes, values alone with a scale": {"of": (290, 70), "scales": (None, "heads"), "scale": -0.05},
    "more codes than there is room for": {"of": (257, 256, -3), "room": 256},
    "no such page of codes": {
        "of": (300, 300, 300), "strays": ((0, 2, 16), (1, 0, -1), (2, 4, 2**31 - 1)), "length": 2,
    },
    "drafts over codes": {"of": (190, 70, 2), "length": 4, "codes": INT8},
    "a window over codes": {"of": (400, 65, 390), "left": 63, "split": 64, "length": 3},
    "codes and everything": {
        "of": (310, 200), "length": 3, "left": 150, "softcap": 1.5, "sink": torch.tensor([0.7, -math.inf] * 4),
        "slopes": torch.linspace(0.01, 0.1, 8), "scale": 0.3, "split": 128,
    },
    "a tree over codes": {"of": (200, 70, 8, 133), "length": 8, "tree": bits(4, 8, (3, 7)), "page": 16},
    "a tree of 32 over codes": {
        "of": (300, 84, 100, 30, 65), "length": 32, "heads": 2, "kv_heads": 2, "tree": bits(5, 32, (0, 1, 20, 31)),
    },
    "64 columns of codes": {"of": (300, 70), "D": 64, "V": 32, "causal": False},
    "codes for 12 rows": {"of": (210, 140), "heads": 6, "kv_heads": 2, "length": 4, "sink": torch.linspace(-1, 1, 6)},
}  # fmt: skip


def decode(name: str, **sizes: Any) -> dict[str, Any]:
    """A call by its name, with other sizes where these are given."""
    given = {"length": 1, **GROUP, **(DECODES | CODED)[name], **sizes}
    kind, scales = given.pop("codes", E4M3), given.pop("scales", ("heads", "heads"))
    a = call(*given.pop("of"), **given)
    return coded(a, kind, scales) if name in CODED else a
