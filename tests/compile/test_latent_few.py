"""Hopper's attention of few rows over caches of latents, of every kind: it is compiled into memory that there is, products are not
serialised, and nothing is spilled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

import tilewright as tw
from tests.compile.table import too_early, wrong_code
from tilewright.check.variants import variant
from tilewright.core.target import TARGETS, pretend
from tilewright.core.triton_versions import release
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
CACHED = tw.catalogue()["cached_attention"]
pytestmark = pytest.mark.skipif(
    not TARGETS["sm_90"].hopper_gluon, reason="this Triton's Gluon is not the one that kernels are written in"
)


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("heads", "tokens", "values", "page", "dtype", "options"),
    [
        (16, 1, 512, 64, torch.bfloat16, {}),
        (16, 1, 512, None, torch.float16, {}),
        (16, 2, 512, 16, torch.bfloat16, {"softcap": 30.0}),
        (16, 2, 256, 64, torch.bfloat16, {"causal": False}),
    ],
)
def test_compiled(heads, tokens, values, page, dtype, options):
    width, batch, room = values + 64, 64, 4096
    cache = blank(batch * room // (page or room), page or room, 1, width, dtype=dtype)
    table = None if page is None else blank(batch, room // page, dtype=torch.int32)
    given = (blank(batch, tokens, heads, width, dtype=dtype), cache, None, table, blank(batch, dtype=torch.int32))
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind(given, {"value_dim": values, "backend": "hopper_latent_few", **options}))
    one = variant(found[0])
    assert one.kernel.name == "attention_latent_few_hopper"
    compiled = one.compile()
    # Newer releases keep a number in memory from before the loops to after, of 32 rows in small pages
    most = 0 if release(triton.__version__) == "3.6" else 24
    assert compiled.shared_is_there and not compiled.serialised and compiled.spills <= most
    assert not wrong_code(one.kernel.name, compiled)
    assert not too_early(one, compiled)
    # Both loops read scores from rows of keys, and values turned, of 64 keys and columns at a time
    slabs = values // 64
    assert compiled.text.count("wgmma.mma_async") == 2 * 4 * (2 * slabs + 1)
