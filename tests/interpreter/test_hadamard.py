"""Hadamard rotations: along tokens, blocks of 256, rows that hold NaN, and products that need no inverse."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.cases import Net, draw
from tilewright.check.compare import check
from tilewright.check.oracle import outcome

NET = Net(interpreter=True)


def sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h / size**0.5


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize(("block", "dtype"), [(16, torch.float32), (32, torch.bfloat16), (256, torch.float16)])
def test_the_matrix_written_out(block, dim, dtype):
    shape = (3, 2 * block) if dim else (2 * block, 3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(block)).to(dtype).requires_grad_()
    h = torch.block_diag(sylvester(block), sylvester(block))
    exact = x.detach().double() @ h if dim else h @ x.detach().double()
    with tw.force("triton"):
        y = tw.hadamard(x, block=block, dim=dim)
        (back,) = torch.autograd.grad(y, x, y.detach())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(back.double(), x.detach().double(), rtol=4 * tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("granularity", ["1x128", "row", "tensor"])
def test_along_the_tokens_in_codes(block, granularity):
    fmt = tw.fp8(granularity, ways="both")
    case = draw(tw.hadamard.op, NET, block, torch.bfloat16, {"tokens": 130, "hidden": 17}, {"dim": 0, "block": block})
    values = {**case.values, "out_format": fmt}
    with tw.force("triton"):
        check(tw.hadamard.op, case.label, values, outcome(tw.hadamard.op, values))


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_nan_stays_in_its_block_of_tokens(block, poison):
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    x[3, 5] = poison
    with tw.force("triton"):
        q = tw.hadamard(x, block=block, dim=0, out_format=tw.fp8("tensor", scale="unit"))
    lost = q.dequantize().isnan()
    assert bool(lost[:block, 5].all()) and int(lost.sum()) == block


def test_two_rotated_factors_need_no_inverse():
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(64, 128, generator=g), torch.randn(32, 128, generator=g)
    dy = torch.randn(64, 32, generator=g)
    fmt = tw.fp8("row", ways="both")
    with tw.force("triton"):
        qx, qdy = tw.hadamard_quantize(x, fmt, block=32), tw.hadamard_quantize(dy, fmt, block=32)
        qw = tw.hadamard_quantize(w, fmt, block=32)
    y = (qx.data.float() * qx.scale[:, None]) @ (qw.data.float() * qw.scale[:, None]).t()
    dw = (qdy.data_t.float() * qdy.scale_t[:, None]) @ (qx.data_t.float() * qx.scale_t[:, None]).t()
    for found, exact in ((y, x @ w.t()), (dw, dy.t() @ x)):
        assert float((found - exact).norm() / exact.norm()) < 0.06  # each factor's codes are off by 2.6 % (RMS)


def test_what_it_refuses():
    x = torch.zeros(48, 64)
    with pytest.raises(ValueError, match=r"hadamard: x is \[48, 64\], but block 32 must divide .* rows, 48"):
        tw.hadamard(x, block=32, dim=0)
    with pytest.raises(ValueError, match="hadamard_quantize: x .* rows, 48"):
        tw.hadamard_quantize(x, tw.fp8("row", ways="both"), block=64)
    assert tw.hadamard_quantize(x, tw.fp8("row"), block=64).shape == x.shape
    with pytest.raises(ValueError, match="block must be at most 128"):
        tw.hadamard(torch.zeros(4, 256), block=256, out_format=tw.fp8("row"))
