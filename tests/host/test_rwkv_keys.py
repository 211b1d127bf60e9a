"""The reference of rwkv_keys against RWKV-7's own lines, head by head, and its errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_torch_agrees(heads):
    """A loop over heads, and each gradient through all three results."""
    given = [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(2, 5, 24), (24,), (2, 5, 24), (24,)])]
    k, kk, a, ka = given
    unit = torch.cat([F.normalize(part, dim=-1) for part in (k * kk).chunk(heads, -1)], -1)
    expected = k * (1 + (a - 1) * ka), unit, unit * a
    made = tw.rwkv_keys(k, kk, a, ka, heads=heads)
    upstream = [drawn(2, 5, 24, seed=9 + i) for i in range(3)]
    for found, wanted in zip(made, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(*(torch.autograd.grad(r, given, upstream) for r in (made, expected)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_sizes_that_do_not_agree():
    with pytest.raises(ValueError, match="heads must divide the 24 columns"):
        tw.rwkv_keys(drawn(2, 24), drawn(24), drawn(2, 24), drawn(24), heads=5)
    with pytest.raises(ValueError, match="kk"):
        tw.rwkv_keys(drawn(2, 24), drawn(12), drawn(2, 24), drawn(24), heads=2)
    wide = torch.empty(2**15, 2**15 + 1, 0)
    with pytest.raises(ValueError, match="k has .* rows"):
        tw.rwkv_keys(wide, drawn(0), wide, drawn(0), heads=1)
