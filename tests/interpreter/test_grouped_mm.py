"""What grouped products' kernels do after the product where the properties do not look: plain rows, and sums in place."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.ops.moe.grouped_mm import grouped_mm

ENDS = torch.tensor([0, 5, 17], dtype=torch.int32)  # the last row of 18 is nobody's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [66, 22])
@pytest.mark.parametrize("ending", [{"act": "gelu_tanh"}, {"glu": "silu"}])
def test_ending_of_plain_rows(dtype, columns, ending):
    torch.manual_seed(0)
    a, b, bias = (torch.randn(*s, dtype=dtype) for s in ((18, 40), (3, columns, 40), (3, columns)))
    b = 0.2 * b.transpose(1, 2)
    exact = tw.catalogue()["grouped_mm_rows"].reference(a.double(), b.double(), ENDS, bias=bias.double(), **ending)[:17]
    with tw.force("triton"):
        y = grouped_mm(a, b, ENDS, bias=bias, **ending)[:17]
    assert y.dtype == dtype and y.shape == exact.shape
    assert (y.double() - exact).norm() <= (1e-5 if dtype == torch.float32 else 3e-3) * exact.norm()


def test_matrices_with_scales_of_rows():
    """A row's scale is that of each of its blocks, of stride 0; a column's comes after the sum."""
    torch.manual_seed(1)
    a, b = (torch.randn(*s).to(torch.float8_e4m3fn) for s in ((2, 5, 144), (2, 20, 144)))
    scale_a, scale_b, counts = torch.rand(2, 5) + 0.5, torch.rand(2, 20) + 0.5, torch.tensor([3, 5])
    named = {"recipe_a": "RowWise", "recipe_b": "RowWise", "transposed_b": True, "counts": counts}
    with tw.force("triton"):
        y = grouped_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32, **named)
    exact = (a.double() * scale_a.double()[..., None]) @ (b.double() * scale_b.double()[..., None]).mT
    for e, count in enumerate(counts.tolist()):
        assert (y[e, :count].double() - exact[e, :count]).norm() <= 1e-5 * exact[e, :count].norm()


def test_gradient_with_an_ending():
    """Of the pieces that have one: the same as the reference's in float64."""
    torch.manual_seed(0)
    a, b, bias = (torch.randn(*s) for s in ((17, 24), (3, 24, 20), (3, 20)))
    upstream = torch.randn(17, 10)
    found = []
    for force, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (a, b, bias)]
        with tw.force(force):
            grouped_mm(leaves[0], leaves[1], ENDS, bias=leaves[2], glu="gelu_erf").backward(upstream.to(dtype))
        found.append([t.grad for t in leaves])
    for got, exact in zip(*found):
        assert (got.double() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("coded", [False, True])
def test_sums_in_place(coded):
    torch.manual_seed(0)
    ends = torch.tensor([128, 128, 200])
    dy, x = torch.randn(200, 20), torch.randn(200, 24)
    if coded:
        dy, x = (tw.fp8("1x128", ways="col").quantize(t, offsets=ends) for t in (dy, x))
    main_grad = torch.randn(3, 20, 24)
    values = [t.dequantize() if coded else t for t in (dy, x)]
    exact = main_grad.double() * 0.5
    for e, (start, end) in enumerate(((0, 128), (128, 128), (128, 200))):
        exact[e] += values[0][start:end].double().t() @ values[1][start:end].double()
    with tw.force("triton"):
        made = grouped_mm(dy, x, ends, transposed_a=True, c=main_grad, beta=0.5, out=main_grad)
    assert made is main_grad
    assert (made.double() - exact).norm() <= 1e-5 * exact.norm()
