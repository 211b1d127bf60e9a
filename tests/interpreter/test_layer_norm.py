"""What is peculiar to layer_norm's kernels: how modulating operands lie, sums over the rows that share them, every width."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.ops.norm import modulated_norm as norm
from tilewright.ops.norm import modulated_norm_backward as backward
from tilewright.ops.norm import row_pieces

# 3 pieces of 512 of which the last is short; 5 of 512, in codes and backward 3 of 1024
WIDTHS = [65, 1290, 2500]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(call, leaves: list[Tensor], grads: list[Tensor]) -> list[list[Tensor]]:
    """What a call gives and its gradients, by the kernels and by the reference in float64."""
    made = []
    for name, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        own = [t.detach().to(dtype).requires_grad_() for t in leaves]
        with tw.force(name):
            results = call(*own)
            results = results if isinstance(results, tuple) else (results,)
            given = [g.to(dtype) for g in grads]
            made.append([*results, *torch.autograd.grad(results, own, given)])
    return made


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for at, (a, b) in enumerate(zip(found, wanted)):
        assert a.shape == b.shape, at
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-5, msg=lambda m, at=at: f"{at}: {m}")


SPANS = [
    ((7,), (7,)), ((7,), ()), ((7,), (1,)), ((2, 3), (2, 1)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3), (1, 3)),
    ((2, 2, 3), (2, 1, 3)), ((2, 2, 3), (2, 1, 1)), ((2, 2, 3), (2, 2, 1)), ((2, 2, 3), (2, 1)), ((3, 1), (3, 1)), ((1, 3), (1, 1)),
    ((), ()),
]  # fmt: skip


@pytest.mark.parametrize("lead, span", SPANS, ids=str)
def test_operands_broadcast_over_leading_dimensions(lead, span):
    x, residual, dy, dh = (normal(*lead, 33, seed=seed) for seed in range(4))
    weight, bias = normal(33, seed=4), normal(33, seed=5)
    scale, shift, gate = (normal(*span, 33, seed=seed) for seed in (6, 7, 8))

    def call(x, residual, weight, bias, scale, shift, gate):
        return tw.add_layer_norm(x, residual, weight, bias, scale=scale, shift=shift, gate=gate)

    close(*both(call, [x, residual, weight, bias, scale, shift, gate], [dy, dh]))


def test_operands_may_each_broadcast_otherwise():
    """One for each of a batch, one vector, one for the positions of all: a gradient by group, one by column, one summed after."""
    x, residual, dy, dh = (normal(2, 3, 40, seed=seed) for seed in range(4))
    scale, shift, gate = normal(2, 1, 40, seed=4), normal(40, seed=5), normal(3, 40, seed=6)

    def call(x, residual, scale, shift, gate):
        return tw.add_layer_norm(x, residual, scale=scale, shift=shift, gate=gate)

    close(*both(call, [x, residual, scale, shift, gate], [dy, dh]))
    # Groups of two lengths: the second is summed after
    x, dy = normal(2, 2, 3, 40, seed=7), normal(2, 2, 3, 40, seed=8)
    scale, shift = normal(2, 1, 1, 40, seed=9), normal(2, 2, 1, 40, seed=10)
    close(*both(lambda x, s, t: tw.layer_norm(x, scale=s, shift=t), [x, scale, shift], [dy]))


@pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
def test_thirds_of_a_style_are_read_as_they_lie(lead):
    """And the launch takes them: nothing is copied before."""
    x, residual, style = normal(*lead, 64), normal(*lead, 64, seed=1), normal(*lead, 192, seed=2)
    scale, shift, gate = style.split(64, -1)
    laid = norm.lay(x, (scale, shift, gate))
    assert [t.data.data_ptr() for t in laid.operands] == [t.data_ptr() for t in (scale, shift, gate)]
    with tw.force("triton"):
        found = tw.add_layer_norm(x, residual, scale=scale, shift=shift, gate=gate)
    h = residual.double() + gate.double() * x.double()
    close([*found], [F.layer_norm(h, (64,)) * (1 + scale.double()) + shift.double(), h])


def test_how_rows_share_an_operand():
    x = torch.empty(2, 3, 5, 8)
    cases = {
        (8,): ("all", 1), (1, 8): ("all", 1), (2, 3, 5, 8): ("each", 1), (2, 3, 1, 8): ("group", 5), (2, 1, 1, 8): ("group", 15),
        (3, 1, 8): ("mixed", 1), (5, 8): ("mixed", 1), (2, 1, 5, 8): ("mixed", 1),
    }  # fmt: skip
    for shape, wanted in cases.items():
        assert backward.sharing(torch.empty(shape), x) == wanted, shape
    assert backward.sharing(torch.empty(8), torch.empty(1, 8)).kind == "all"  # as of many rows


@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_in_pieces(columns):
    x, residual, dy, dh = (normal(5, columns, seed=seed) for seed in range(4))
    weight, bias, gate = (normal(columns, seed=seed) for seed in (4, 5, 6))

    def call(x, residual, weight, bias, gate):
        return tw.add_layer_norm(x, residual, weight, bias, gate=gate)

    close(*both(call, [x, residual, weight, bias, gate], [dy, dh]))


@pytest.mark.parametrize("modulated", [False, True])
def test_rows_that_one_program_does_not_hold(modulated, monkeypatch):
    """Forward they are read again for each sum, backward sums come from a pass of their own."""
    monkeypatch.setattr(row_pieces, "HELD", 0)
    monkeypatch.setattr(row_pieces, "split_plain", lambda N: (512, 2))
    for name in ("WIDEST_AFFINE", "WIDEST_MODULATED", "WIDEST_BOTH"):
        monkeypatch.setattr(backward, name, 0)
    # A width of its own: an op plays back what it launched for the same shapes
    x, residual, dy, dh = (normal(2, 3, 5001, seed=seed) for seed in range(4))
    weight, bias = normal(5001, seed=4), normal(5001, seed=5)
    more = [normal(2, 1, 5001, seed=seed) for seed in (6, 7, 8)] if modulated else []

    def call(x, residual, weight, bias, scale=None, shift=None, gate=None):
        return tw.add_layer_norm(x, residual, weight, bias, scale=scale, shift=shift, gate=gate)

    close(*both(call, [x, residual, weight, bias, *more], [dy, dh]))


def test_the_mean_is_taken_off_before_squares_are():
    """Of rows a thousand times as far from 0 as they are wide, E[x**2] - mean**2 would have no digit left in fp32."""
    x = normal(4, 300) + 1000.0
    with tw.force("triton"):
        y = tw.layer_norm(x)
    torch.testing.assert_close(y.double(), F.layer_norm(x.double(), (300,)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", [15, 1293, 1298])
def test_of_a_row_of_equal_numbers_the_bias_is_left(columns, monkeypatch):
    """All bits of it: these sums are exact in fp32, and so must the mean be. By fp32's 1 / columns it would be a bit off."""
    if columns == 1298:  # one program does not hold the row; a width of its own, as below
        monkeypatch.setattr(row_pieces, "HELD", 0)
        monkeypatch.setattr(row_pieces, "split_plain", lambda N: (512, 2))
        monkeypatch.setattr(backward, "WIDEST_AFFINE", 0)
    numbers = torch.tensor([0.75, 7.25, -3.0], dtype=torch.bfloat16)
    x = numbers[:, None].repeat(1, columns).requires_grad_()
    weight, bias, dy = (normal(*shape, columns, dtype=torch.bfloat16) for shape in ((), (), (3,)))
    weight.requires_grad_()
    with tw.force("triton"):
        y = tw.layer_norm(x, weight, bias, 1e-12)
        added, h = tw.add_layer_norm(x, x, weight, bias, 1e-12)
        (dweight,) = torch.autograd.grad(y, weight, dy)
        # An upstream gradient of equal numbers is one that a row's mean takes off
        (dx,) = torch.autograd.grad(tw.layer_norm(x, eps=1e-12), x, x.detach())
    assert torch.equal(h, 2 * x)
    assert torch.equal(y, bias.expand_as(y)) and torch.equal(added, bias.expand_as(y))
    assert not dweight.any() and not dx.any()


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_without_eps_the_rows_past_the_end_do_not_count(rows):
    x, weight, bias, dy = normal(rows, 64), normal(64, seed=1), normal(64, seed=2), normal(rows, 64, seed=3)
    close(*both(lambda x, w, b: tw.layer_norm(x, w, b, 0.0), [x, weight, bias], [dy]))


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("fmt", [None, tw.fp8("tensor", scale="unit")], ids=str)
def test_the_new_residual_may_lie_on_the_old(columns, fmt):
    x, residual, gate = (normal(5, columns, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    with tw.force("triton"):
        wanted, h = tw.add_layer_norm(x, residual, gate=gate, out_format=fmt)
        found = tw.add_layer_norm(x, residual, gate=gate, out_format=fmt, out=(None, residual))
    same = torch.equal(found[0], wanted) if fmt is None else torch.equal(found[0].dequantize(), wanted.dequantize())
    assert same and torch.equal(residual, h) and found[1] is residual


FORMATS = [tw.fp8("1x128", ways="both"), tw.fp8("tensor"), tw.fp8("128x128"), tw.int8("row"), tw.nvfp4(), tw.mx()]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_are_those_of_the_modulated_norm(fmt):
    """With exact statistics, all bits: of rows whose mean is 0 and whose variance is 1 in fp32."""
    x = torch.where(torch.arange(256) % 2 == 0, 1.0, -1.0).repeat(4, 1)
    scale, shift = normal(2, 1, 256, seed=1), normal(2, 1, 256, seed=2)
    with tw.force("triton"):
        found = tw.layer_norm(x.view(2, 2, 256), eps=0.0, scale=scale, shift=shift, out_format=fmt)
        plain = tw.layer_norm(x.view(2, 2, 256), eps=0.0, scale=scale, shift=shift)
    for what, a, b in zip(fmt.tensor_names, found.tensors(), fmt.quantize(plain).tensors()):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), what


def test_the_gate_has_gradients_where_only_h_is_used():
    x, residual, gate, dh = (
        normal(2, 3, 40),
        normal(2, 3, 40, seed=1),
        normal(2, 1, 40, seed=2),
        normal(2, 3, 40, seed=3),
    )
    close(*both(lambda x, r, g: tw.add_layer_norm(x, r, gate=g)[1], [x, residual, gate], [dh]))
