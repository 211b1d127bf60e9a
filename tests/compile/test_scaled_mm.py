"""Where a chip multiplies block-scaled codes itself, `scaled_mm` uses that instruction; elsewhere it says what it uses."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.variants import FORWARD, HOT, Call, drawn, launches, variant
from tilewright.core.draw import Draw
from tilewright.core.target import TARGETS, pretend
from tilewright.gemm.arithmetic import words_for
from tilewright.gemm.scaled_mm import PAIRS, draw_operand, product
from tilewright.runtime.kernel import collect

NATIVE = {
    ("sm_100", "mxfp8"): "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
    ("sm_100", "mxfp4"): "tcgen05.mma.cta_group::1.kind::mxf4.block_scale",
    ("sm_100", "nvfp4"): "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale",
    ("sm_120", "mxfp8"): "kind::mxf8f6f4.block_scale",
    ("sm_120", "nvfp4"): "kind::mxf4nvf4.block_scale.scale_vec::4X",
    ("gfx950", "mxfp4"): "v_mfma_scale_f32",
}


@pytest.mark.parametrize(("arch", "pair"), NATIVE)
def test_native_instructions(arch, pair):
    kind_a, kind_b, *recipes = PAIRS[pair]
    first, second = (draw_operand(Draw(0), kind, r, 256, 256) for kind, r in zip((kind_a, kind_b), recipes))
    a, scale_a, b, scale_b = (t.to("meta") for t in (*first, *second))
    with pretend(TARGETS[arch]), tw.force("portable"), torch.no_grad(), collect() as found:
        product.run(product.signature.bind((a, b.t(), scale_a, scale_b, *recipes), {}))
    assert NATIVE[arch, pair] in variant(found[0], arch).compile().text
    assert words_for((kind_a, kind_b), (recipes[0], recipes[1]), TARGETS[arch]) == "native"


SCALE = torch.empty(1, device="meta")
STORED = [
    tw.fp8("1x128"), tw.fp8("tensor", scale="unit"), tw.fp8("tensor", scale=SCALE), tw.int8("1x128"), tw.int4("1x128", zero=True),
    tw.mx("e2m1"), tw.mx("e4m3", swizzled=True),
]  # fmt: skip
LEFT = [tw.fp8("1x128", ways="both"), tw.fp8("row"), tw.fp8("tensor"), tw.int8("128x128"), tw.nvfp4(scale=SCALE)]


@pytest.mark.skipif(not TARGETS["sm_90"].hopper_gluon, reason="needs a Triton that offers what kernels in Gluon call")
@pytest.mark.parametrize(("fmt", "alone"), [(f, True) for f in STORED] + [(f, False) for f in LEFT], ids=str)
def test_products_on_hopper_quantise_what_they_can(fmt, alone):
    """In the launch that multiplies where a warpgroup's sums are all that scales need."""
    values = {**drawn(product, HOT[0]), "out_format": fmt, "backend": "hopper"}
    first, *rest = (wanted.kernel.name for wanted in launches(product, Call(values, FORWARD)))
    assert (first, rest == []) == ("promoted_rows_hopper", alone)
