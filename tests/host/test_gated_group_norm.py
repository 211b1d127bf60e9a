"""The reference of gated_group_norm against torch's own norm, group by group, and its errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def group_by_group(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, transposed: bool, act) -> Tensor:
    """As a model would write it: a loop over groups, a transposition, a product."""
    width = x.shape[-1] // groups
    weights = weight.split(width) * (groups if len(weight) == width else 1)
    parts = [F.rms_norm(part, (width,), w, eps) for part, w in zip(x.split(width, -1), weights)]
    y = torch.cat(parts, -1)
    return (y.permute(1, 0, 2) if transposed else y) * act(gate)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("groups, shared", [(1, False), (4, False), (4, True), (3, True)])
@pytest.mark.parametrize("name, act", [("sigmoid", torch.sigmoid), ("silu", F.silu)])
def test_torch_agrees(groups, shared, transposed, name, act):
    x, gate = drawn(2, 5, 24), drawn(*((5, 2) if transposed else (2, 5)), 24, seed=1)
    weight = drawn(24 // groups if shared else 24, seed=2)
    given = [t.requires_grad_() for t in (x, gate, weight)]
    expected = group_by_group(*given, 1e-5, groups, transposed, act)
    y = tw.gated_group_norm(*given, 1e-5, groups=groups, transposed=transposed, act=name)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    g = drawn(*expected.shape, seed=3)
    for found, wanted in zip(*(torch.autograd.grad(r, given, g) for r in (y, expected))):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "names, gate, weight, options",
    [
        ("groups .*24", (5, 2, 24), None, {"groups": 5}),
        ("gate .*transposed=True", (2, 5, 24), None, {}),
        ("gate .*transposed=False", (5, 2, 24), None, {"transposed": False}),
        ("weight has 12 .*24 .*6", (5, 2, 24), 12, {"groups": 4}),
        ("weight has 6 .*24 .*24", (5, 2, 24), 6, {}),
    ],
)
def test_sizes_that_do_not_agree(names, gate, weight, options):
    w = None if weight is None else drawn(weight)
    with pytest.raises(ValueError, match=names):
        tw.gated_group_norm(drawn(2, 5, 24), drawn(*gate), w, **options)


def test_sizes_that_a_launch_does_not_take():
    """Row numbers are 32-bit in kernels."""
    x = torch.empty(2**16, 2**14 + 1, 0)
    with pytest.raises(ValueError, match="x has .* rows"):
        tw.gated_group_norm(x, x, transposed=False)
