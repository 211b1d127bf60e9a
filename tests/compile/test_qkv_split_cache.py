"""`qkv_split_cache` with a scale for each 128 columns, which only heads of more columns have: no drawn call compiles it."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.compile import table
from tilewright.check.variants import FORWARD, Call, needed

HEADS, KV = 16, 2


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("head_dim, rotary_dim", [(256, 64), (192, 192)])
def test_blocks_of_a_head_compile(head_dim, rotary_dim, kind, pairing):
    op, tokens, pages = tw.catalogue()["qkv_split_cache"], 4096, (512, 16, KV)

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    given = {
        **{f"{n}_cache": made(*pages, head_dim, dtype=kind) for n in ("k", "v")},
        **{f"{n}_scale": made(*pages, -(-head_dim // 128), dtype=torch.float32) for n in ("k", "v")},
        "slots": made(1, tokens, dtype=torch.int64), "q_weight": made(head_dim), "k_weight": made(head_dim),
        "freqs": made(8192, rotary_dim // 2, dtype=torch.float32), "rotary_dim": rotary_dim, "pairing": pairing,
    }  # fmt: skip
    values = op.signature.bind((made(1, tokens, (HEADS + 2 * KV) * head_dim), HEADS, KV, head_dim), given)
    (one,) = needed(op, [Call(values, FORWARD)])
    compiled = one.compile()
    assert "1x128" in one.constants["K_FORMAT"] and one.constants["K_FORMAT"] == one.constants["V_FORMAT"]
    assert table.wrong_code(one.name, compiled) == [] and compiled.spills == 0
