"""What gated_group_norm promises beyond the properties of every op: eps of 0, gates that saturate, tiles across batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.compare import check
from tilewright.check.oracle import outcome
from tilewright.ops.norm.gated_group_norm import gated_group_norm as op
from tilewright.ops.norm.gated_group_norm import split_columns


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hold(label: str, *args: Tensor, **options) -> None:
    """A call and its backward against float64."""
    values = op.signature.bind(args, options)
    check(op, label, values, outcome(op, values))


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("fmt", [None, tw.fp8("1x128", ways="row")])
def test_no_eps(groups, fmt):
    """What lies past the last row and the last group is zero, and its rstd without eps infinite: neither may show."""
    args = drawn(1, 5, 24), drawn(5, 1, 24, seed=1), drawn(24, seed=2)
    hold(f"groups={groups}, {fmt}", *args, eps=0.0, groups=groups, out_format=fmt)


@pytest.mark.parametrize("scale", [1e4, 0.0])
@pytest.mark.parametrize("act", ["sigmoid", "silu"])
def test_gates_far_out_and_at_zero(scale, act):
    args = drawn(2, 3, 32), drawn(3, 2, 32, seed=1) * scale, drawn(8, seed=2)
    hold(f"gate times {scale}", *args, groups=4, act=act)


@pytest.mark.parametrize("batch, length", [(1, 140), (2, 67), (3, 47), (7, 19), (131, 1), (47, 3)])
@pytest.mark.parametrize("hidden, groups", [(32, 2), (48, 2), (136, 1)])
def test_tiles_find_their_rows(batch, length, hidden, groups):
    """More rows than a tile has: rows of the result run over batches, rows of x over positions."""
    x, gate = drawn(batch, length, hidden), drawn(length, batch, hidden, seed=1)
    values = op.signature.bind((x, gate, drawn(hidden // groups, seed=2)), {"groups": groups})
    values["out_format"] = tw.fp8("1x128", ways="both")
    with torch.no_grad():
        check(op, f"batch {batch}", values, outcome(op, values))


@pytest.mark.parametrize("width", [72, 136, 288])
@pytest.mark.parametrize("shared", [False, True])
def test_groups_in_pieces(width, shared):
    """Groups that are a tuple of tiles, the last of them short or not; more rows than a program has."""
    args = drawn(3, 5, 2 * width), drawn(5, 3, 2 * width, seed=1), drawn(width if shared else 2 * width, seed=2)
    assert split_columns(width)[1] > 1
    hold(f"groups of {width}", *args, groups=2)


def test_gate_in_another_precision():
    for x, gate in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        hold(f"{x}, {gate}", drawn(2, 3, 16, dtype=x), drawn(3, 2, 16, seed=1, dtype=gate), drawn(16, seed=2), groups=2)


def test_the_gate_s_gradient_does_not_cancel_where_the_gate_is_saturated():
    """Numbers of 1e4, gates to 80: the slope s * (1 - s) of a sigmoid near 1 loses all its digits where 1 - s is taken, as torch
    does; the kernel multiplies by sigmoid(-gate). So it is torch's gradient whose elements near zero are rounding."""
    source = torch.Generator().manual_seed(0)
    x, dy = (1e4 * torch.randn(1, 16, 128, generator=source) for _ in range(2))
    gate = torch.linspace(-80.0, 80.0, x.numel()).reshape(x.shape)
    wide = x.double()
    slope = torch.sigmoid(gate.double()) * torch.sigmoid(-gate.double())
    exact = dy.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * slope

    def error(call) -> torch.Tensor:
        leaf = gate.clone().requires_grad_()
        return ((torch.autograd.grad(call(leaf), leaf, dy)[0].double() - exact) / exact).abs()

    ours = error(lambda g: tw.gated_group_norm(x, g, None, 1e-6, transposed=False))
    torch_s = error(lambda g: torch.nn.functional.rms_norm(x, (128,), None, 1e-6) * torch.sigmoid(g))
    assert ours.max() < 4e-6
    assert torch_s[gate > 20.0].min() > 0.99 and torch_s[gate < 0.0].max() < 4e-6
