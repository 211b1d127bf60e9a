"""What is peculiar to `router_linear`: how exact its factors are, and that both backwards agree."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.compare import check
from tilewright.check.oracle import outcome
from tilewright.op import OPS

FINITE = torch.tensor([1.0, -1 / 3, 3.3e38, -1.0000001, 2.0**-100, 1 + 2.0**-23, 0.0, 12345.678])


def through(tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """dx of an identity weight: the gradient of the logits as the products see it."""
    x = torch.zeros_like(tensor, requires_grad=True)
    with tw.force("triton"):
        y = tw.router_linear(x, torch.eye(tensor.shape[1]), precision=precision)
        return torch.autograd.grad(y, x, tensor)[0]


def test_fp32_factors_are_multiplied_as_they_are():
    x = torch.cat([FINITE, torch.randn(56, generator=torch.Generator().manual_seed(1))]).reshape(4, 16)
    with tw.force("triton"):
        assert torch.equal(tw.router_linear(x, torch.eye(16)), x)
        assert torch.equal(tw.router_linear(torch.eye(16), x), x.t())


def test_precision_is_that_of_the_gradient():
    dy = torch.randn(33, 17, generator=torch.Generator().manual_seed(2))
    assert torch.equal(through(dy, "ieee"), dy)
    error = (through(dy, "high").double() - dy.double()).abs() / dy.abs()
    assert 0 < error.max() <= 2.0**-17


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinity_meets_a_factor_of_one_piece(value):
    """The lower pieces of 1 are 0, which an infinity would turn into NaN."""
    x = torch.zeros(2, 16)
    x[1, 3] = value
    for a, b in ((x, torch.full((3, 16), 1.0)), (torch.full((3, 16), 1.0), x)):
        with tw.force("triton"):
            y = tw.router_linear(a, b)
        assert torch.equal(y, a @ b.t())


@pytest.mark.parametrize("experts", [5, 64, 257])
@pytest.mark.parametrize("precision", ["high", "ieee"])
def test_both_backwards(experts, precision):
    source = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 70, generator=source).bfloat16() for n in (70, experts))
    op = OPS["router_linear"]
    values = op.signature.bind((x, weight, torch.randn(experts, generator=source)), {"precision": precision})
    for name in ("fused", "products") if experts <= 256 else ("products",):
        with tw.force(name):
            check(op, f"{name}, {experts} experts", values, outcome(op, values))
