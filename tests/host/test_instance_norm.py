"""The reference of instance_norm against torch's own, and what a call refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(2, 3, 7), (2, 3, 4, 5), (1, 4, 2, 3, 5), (2, 1, 2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_torchs_instance_norm_agrees(shape, affine):
    leaves = [drawn(*shape) + 3, *([drawn(shape[1], seed=1), drawn(shape[1], seed=2)] if affine else [])]
    dy, made = drawn(*shape, seed=3), []
    for call in (
        lambda x, w=None, b=None: tw.instance_norm(x, w, b, 1e-3),
        lambda x, w=None, b=None: torchs(x, w, b, 1e-3),
    ):
        own = [t.clone().requires_grad_() for t in leaves]
        y = call(*own)
        made.append([y, *torch.autograd.grad(y, own, dy)])
    for found, wanted in zip(*made):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def torchs(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Which has no more than three dimensions after the channels."""
    return F.instance_norm(x.flatten(2), weight=weight, bias=bias, eps=eps).view(x.shape)


def test_out_has_the_shape_of_x():
    x = drawn(2, 3, 4, 5)
    out = torch.empty_like(x)
    assert tw.instance_norm(x, out=out) is out and torch.equal(out, tw.instance_norm(x))
    for wrong in (torch.empty(2, 3, 20, dtype=x.dtype), torch.empty(2, 3, 5, 4, dtype=x.dtype).transpose(2, 3)):
        with pytest.raises(ValueError, match=r"instance_norm: out must be contiguous, of shape \[2, 3, 4, 5\]"):
            tw.instance_norm(x, out=wrong)


def test_malformed_calls_are_refused():
    with pytest.raises(ValueError, match="instance_norm: x"):
        tw.instance_norm(drawn(3, 4))
    with pytest.raises(ValueError, match="instance_norm: weight"):
        tw.instance_norm(drawn(2, 3, 4, 5), drawn(4))
    with pytest.raises(ValueError, match="instance_norm: x has 4294967296 planes"):
        tw.instance_norm(torch.empty(1).expand(2**16, 2**16, 1))
