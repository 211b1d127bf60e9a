"""Hopper's attention over caches of latents, of every kind: it is compiled into memory that there is, products are not serialised,
and nothing is spilled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewright as tw
from tests.compile.table import wrong_code
from tilewright.check.variants import variant
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
CACHED = tw.catalogue()["cached_attention"]
pytestmark = pytest.mark.skipif(
    not TARGETS["sm_90"].hopper_gluon, reason="this Triton's Gluon is not the one that kernels are written in"
)


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("heads", "tokens", "values", "page", "options"),
    [
        (128, 1, 512, None, {}),
        (16, 1, 512, 64, {}),
        (16, 2, 512, 16, {"softcap": 30.0}),
        (64, 2, 256, 64, {"causal": False}),
    ],
)
def test_compiled(heads, tokens, values, page, options):
    width, batch, room = values + 64, 32, 8192
    cache = blank(batch * room // (page or room), page or room, 1, width)
    table = None if page is None else blank(batch, room // page, dtype=torch.int32)
    given = (blank(batch, tokens, heads, width), cache, None, table, blank(batch, dtype=torch.int32))
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind(given, {"value_dim": values, "backend": "hopper_latent", **options}))
    one = variant(found[0])
    assert one.kernel.name == "attention_latent_hopper"
    compiled = one.compile()
    assert compiled.shared_is_there and not compiled.serialised and not compiled.spills
    assert not wrong_code(one.kernel.name, compiled)
