"""What is peculiar to outer's kernels: sums in one share and in many, and how vectors and gradients lie."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.activation import outer as module


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(x: Tensor, y: Tensor, dout: Tensor, *names: str) -> list[Tensor]:
    own = {"x": x.detach().requires_grad_("x" in names), "y": y.detach().requires_grad_("y" in names)}
    with tw.force("triton"):
        out = tw.outer(**own)
    assert torch.equal(out, torch.outer(x, y))
    return list(torch.autograd.grad(out, [own[n] for n in names], dout))


@pytest.mark.parametrize("on_sm", [0, 3])
@pytest.mark.parametrize("shape", [(1, 1), (16, 128), (17, 129), (700, 5), (3, 1000)], ids=str)
def test_shares_are_added_up(shape, on_sm, monkeypatch):
    """One share of each gradient, or some of either."""
    monkeypatch.setattr(module, "ON_SM", on_sm)
    x, y, dout = drawn(shape[0]), drawn(shape[1], seed=1), drawn(*shape, seed=2)
    wide = dout.double()
    for found, exact in zip(gradients(x, y, dout, "x", "y"), (wide @ y.double(), x.double() @ wide)):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_one_gradient_is_that_of_both():
    x, y, dout = drawn(40), drawn(300, seed=1), drawn(40, 300, seed=2)
    both = gradients(x, y, dout, "x", "y")
    assert torch.equal(gradients(x, y, dout, "x")[0], both[0]) and torch.equal(gradients(x, y, dout, "y")[0], both[1])


def test_vectors_and_gradients_lie_in_any_way():
    x, y, dout = drawn(80)[::2], drawn(1, seed=1).expand(150), drawn(150, 40, seed=2).t()
    plain = gradients(x.contiguous(), y.contiguous(), dout.contiguous(), "x", "y")
    for a, b in zip(gradients(x, y, dout, "x", "y"), plain):
        assert torch.equal(a, b)


def test_a_nan_of_the_gradient_shows_where_it_is_summed():
    dout = drawn(20, 200)
    dout[3, 150] = math.nan
    dx, dy = gradients(drawn(20), drawn(200, seed=1), dout, "x", "y")
    assert dx.isnan().nonzero().tolist() == [[3]] and dy.isnan().nonzero().tolist() == [[150]]
