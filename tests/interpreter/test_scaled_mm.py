"""What is peculiar to `scaled_mm`: every pair of formats, exactness of what is widened, and the ends of ranges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests import product_oracle as oracle
from tests.product_oracle import VIEWS, encoded, ones
from tilewright.core.draw import Draw
from tilewright.core.target import TARGETS
from tilewright.gemm import portable
from tilewright.gemm.operands import E2M1, values
from tilewright.gemm.scaled_mm import ACTS, PAIRS, draw_operand, product

MIXES = {
    "tensor with row": ("e4m3", "e4m3", "TensorWise", "RowWise"),
    "block with row": ("e4m3", "e5m2", "BlockWise1x128", "RowWise"),
    "int8 both blocks": ("int8", "int8", "BlockWise1x128", "BlockWise1x128"),
    "int8 with int4": ("int8", "int4", "RowWise", "BlockWise1x128"),
    "fp8 weight": ("float", "e4m3", None, "BlockWise128x128"),
    "int8 weight": ("float", "int8", None, "RowWise"),
    "mxfp4 weight": ("float", "e2m1", None, "BlockWise1x32"),
    "mxfp8 with mxfp4": ("e5m2", "e2m1", "BlockWise1x32", "BlockWise1x32"),
    "mxfp8 with block": ("e4m3", "e4m3", "BlockWise1x32", "BlockWise128x128"),
    "mxint8 with nvint8": ("int8", "int8", "BlockWise1x32", "BlockWise1x16"),
}


def run(a: Tensor, b: Tensor, scales: tuple, recipes: tuple, **rest) -> Tensor:
    """The kernel's product of a [M, K] and b [N, K] in fp32."""
    with tw.force("portable"):
        return product.function(a, b.t(), *scales, *recipes, **{"out_dtype": "float32", **rest})


ALL = {**PAIRS, **MIXES}


@pytest.mark.parametrize(
    ("name", "half"), [(n, False) for n in ALL] + [(n, True) for n, pair in ALL.items() if "float" in pair]
)
def test_every_pair(name, half):
    kind_a, kind_b, recipe_a, recipe_b = ALL[name]
    draw = Draw(3, dtype=torch.float16 if half else torch.bfloat16)
    a, scale_a = draw_operand(draw, kind_a, recipe_a, 19, 204)
    b, scale_b = draw_operand(draw, kind_b, recipe_b, 150, 204)
    zero = draw.integers(*scale_b.shape, low=-8, high=8).float() if name == "int4_weight" else None
    wide_a, wide_b = values(a, scale_a, recipe_a).double(), values(b, scale_b, recipe_b, None, zero).double()
    reach = wide_a.abs() @ wide_b.abs().t()  # of which sums of terms of such a size may lose a share
    for stored, accumulate in ((b, "full"), (b.t().contiguous().t(), "fast")):
        y = run(a, stored, (scale_a, scale_b), (recipe_a, recipe_b), zero_b=zero, accumulate=accumulate)
        assert ((y.double() - wide_a @ wide_b.t()).abs() <= 2e-6 * reach).all()


def agrees(exact: oracle.Exact) -> None:
    with tw.force("portable"):
        assert torch.equal(product.function(**exact.arguments(), out_dtype="float32"), exact.wanted.float())


@pytest.mark.parametrize("pair", PAIRS)
def test_one_hot_rows_give_dequantised_values(pair):
    agrees(oracle.one_hot_rows(pair, 128, 4, 128))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_block_counts_for_itself_alone(pair):
    agrees(oracle.larger_block(pair, 5, 7, 256))


@pytest.mark.parametrize("sign", [0, 8])
def test_scales_of_every_exponent(sign):
    """Powers of two down to 2**-127 and up to 2**127 come through bf16 as they are; 255 is NaN, in its row alone."""
    b = torch.full((256, 16), (2 | sign) * 17, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e8m0fnu)
    y = run(encoded(torch.eye(32), "e4m3"), b, (ones("BlockWise1x32", 32, 32), scale), ("BlockWise1x32",) * 2)
    wanted = (2.0 ** torch.arange(-127, 128, dtype=torch.float64)).float() * (-1 if sign else 1)
    assert torch.equal(y[:, :255], wanted.expand(32, 255))
    assert y[:, 255].isnan().all()


def test_products_of_e2m1_and_every_e4m3_scale():
    b = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).expand(256, 8).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    y = run(encoded(torch.eye(16), "e2m1"), b, (ones("BlockWise1x16", 16, 16), scale), ("BlockWise1x16",) * 2)
    magnitudes = torch.tensor(E2M1)
    wanted = torch.cat([magnitudes, -magnitudes])[:, None] * scale.float().t()
    known = ~wanted.isnan()
    assert torch.equal(y[known], wanted[known])
    assert torch.equal(y.isnan(), wanted.isnan())


@pytest.mark.parametrize("most", [portable.EXACT, 0])
@pytest.mark.parametrize("kinds", [("int8", "int8"), ("int4", "int4"), ("int8", "int4"), ("int4", "int8")])
def test_integers_are_exact(kinds, most, monkeypatch):
    monkeypatch.setattr(portable, "EXACT", most)
    product.plans.clear()  # plans are kept by arguments alone
    agrees(oracle.integers(kinds, 6, 7, 300))
    product.plans.clear()


def test_sums_leave_the_tensor_cores_where_they_must():
    target = TARGETS["sm_90"]

    def promoted(kind: str, recipe: str, K: int, accumulate: str = "full") -> bool:
        t = torch.empty(1, K, dtype=VIEWS[kind], device="meta")
        return portable.settings(target, t, t, recipe, recipe, None, accumulate)["PROMOTE"]

    assert 128 * 128 * portable.EXACT < 2**31 <= 128 * 128 * (portable.EXACT + 1)
    assert not promoted("int8", "RowWise", portable.EXACT)
    assert promoted("int8", "RowWise", portable.EXACT + 1)
    assert promoted("int8", "BlockWise1x128", 128)
    assert promoted("e4m3", "RowWise", 128)
    assert not promoted("e4m3", "RowWise", 128, "fast")
    assert promoted("e4m3", "BlockWise1x128", 128, "fast")


def test_nothing_to_multiply():
    a, b = torch.empty(3, 0, dtype=torch.int8), torch.empty(5, 0, dtype=torch.int8)
    bias, c = torch.randn(5), torch.randn(3, 5)
    nan = torch.full((5, 1), torch.nan)
    rest = {"bias": bias, "c": c, "beta": -2.0, "act": "silu"}
    y = run(a, b, (nan[:3], nan), ("RowWise", "RowWise"), **rest)
    torch.testing.assert_close(y, ACTS["silu"](bias - 2 * c))
    none = run(a, b, (torch.empty(3, 0), torch.empty(1, 0)), ("BlockWise1x128", "BlockWise128x128"))
    assert torch.equal(none, torch.zeros(3, 5))
    few = torch.ones(0, 16, dtype=torch.int8)
    assert run(few, few, (nan[:0], nan[:0]), ("RowWise", "RowWise")).shape == (0, 0)


def test_the_result_over_what_is_added():
    draw = Draw(7)
    a, scale_a = draw_operand(draw, "int8", "RowWise", 20, 48)
    b, scale_b = draw_operand(draw, "int8", "RowWise", 70, 48)
    c = torch.randn(70, 20).t()
    wanted = run(a, b, (scale_a, scale_b), ("RowWise", "RowWise"), c=c.clone(), beta=1.0)
    assert run(a, b, (scale_a, scale_b), ("RowWise", "RowWise"), c=c, beta=1.0, out=c) is c
    assert torch.equal(c, wanted)
