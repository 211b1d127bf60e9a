"""Hopper's attention over pages, compiled: into memory that there is, products are not serialised, and little is spilled: between
tiles, as of dense sequences with lengths, and by the copying warp, not in the loops over blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

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


# Bytes a thread. By Triton 3.6, and by 3.9.
@pytest.mark.parametrize(("D", "V", "page", "most"), [(128, 128, 64, (140, 180)), (192, 128, 64, (140, 404))])
def test_compiled(D, V, page, most):
    caches = (blank(512, page, 8, n) for n in (D, V))
    values = (blank(4, 2048, 32, D), *caches, blank(4, 128, dtype=torch.int32), blank(4, dtype=torch.int32))
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind(values, {"backend": "hopper_chunks"}))
    one = variant(found[-1])
    assert one.kernel.name == "attention_chunks_hopper"
    compiled = one.compile()
    assert compiled.shared_is_there and not compiled.serialised
    assert not wrong_code(one.kernel.name, compiled)
    assert compiled.spills <= most[not triton.__version__.startswith("3.6.")]
