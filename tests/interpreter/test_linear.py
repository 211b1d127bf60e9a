"""`linear_fp8`, its kernels run by the interpreter, where the properties do not look: against its definition, what is kept for the
backward, and gradients that are added to a buffer."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from tests.linear_oracle import drawn, layer, off, outcome
from tilewright.nn.expert_codes import quantize_weight


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def made(dtype: torch.dtype = torch.bfloat16) -> tuple:
    """Two blocks in every dimension, of which one is not whole."""
    return (
        drawn(134, 144, dtype=dtype), drawn(130, 144, seed=1, dtype=dtype, scale=0.1), drawn(130, seed=2, dtype=dtype),
        drawn(134, 130, seed=3, dtype=dtype),
    )  # fmt: skip


def same(found: dict, wanted: dict) -> bool:
    return all(torch.equal(t, wanted[n]) for n, t in found.items())


@pytest.mark.smoke
def test_products_are_of_codes_whatever_is_kept():
    values = made()
    usual = outcome(tw.linear_fp8, *values)
    errors = off(usual, layer(*values))
    assert all(error < 1.8e-3 for error in errors.values()), errors
    assert same(outcome(tw.linear_fp8, *values, keep="input"), usual)
    q = quantize_weight(values[1])
    given = {"weight_codes": q.data, "weight_scale": q.scale, "weight_codes_t": q.data_t}
    assert same(outcome(tw.linear_fp8, *values, **given), usual)


def test_what_is_saved():
    """A byte an element of the input, or the input; nothing for a frozen weight."""
    x, weight, bias, _ = made()
    sizes = {}
    for keep, learns in (("codes", True), ("input", True), ("codes", False)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            tw.linear_fp8(x.requires_grad_(), weight.requires_grad_(learns), bias, keep=keep)
        sizes[keep, learns] = sum(t.numel() for t in saved if t.dtype == torch.uint8)
    assert sizes == {("codes", True): x.numel(), ("input", True): 0, ("codes", False): 0}


def test_layers_after_inference_mode_and_checkpoints():
    torch.manual_seed(0)
    one, x = tw.nn.Linear(40, 24, dtype=torch.bfloat16), drawn(9, 40).requires_grad_()
    with torch.inference_mode():
        first = one(x)
    y = one(x)
    assert torch.equal(first, y)
    wanted = torch.autograd.grad(y.float().square().sum(), [x, *one.parameters()])
    checkpoint(one, x, use_reentrant=False).float().square().sum().backward()
    assert all(torch.equal(there, here.grad) for there, here in zip(wanted, (x, *one.parameters())))


def test_micro_batches_add_up_in_place():
    """Into a buffer that is every second column of another, whose other columns keep their bits."""
    x, weight, bias, dy = made()
    room = drawn(130, 288, seed=5, dtype=torch.float32)
    main_grad, before, leaf = room[:, ::2], room.clone(), torch.nn.Parameter(weight)
    known, x = layer(x, weight, bias, dy), x.requires_grad_()
    calls = [tw.linear_fp8_main_grad(x, leaf, main_grad, bias) for _ in range(2)]
    for y in calls:
        y.backward(dy)
    exact = before[:, ::2].double() + 2 * known["weight"]
    assert leaf.grad is None and off({"weight": main_grad}, {"weight": exact})["weight"] < 1e-6
    assert torch.equal(room[:, 1::2], before[:, 1::2])
    assert off({"x": x.grad / 2}, known)["x"] < 1.8e-3


def test_calls_become_plans_of_all_their_launches():
    """Forward and backward, replayed with other numbers; with a bias the backward sums by torch and is not watched again."""
    op = tw.linear_fp8.op
    x, weight, bias, dy = made()
    for plans in (op.plans, op.backward_plans, op.unplannable):
        plans.clear()
    usual = [outcome(lambda *t: tw.linear_fp8(*t[:2]) + 0 * t[2].sum(), v * x, weight, bias, dy) for v in (1, 2, 1)]
    assert len(op.plans) == len(op.backward_plans) == 1 and not op.unplannable
    assert same(usual[0], usual[2]) and not torch.equal(usual[0]["y"], usual[1]["y"])
    for plans in (op.plans, op.backward_plans):
        plans.clear()
    assert same(outcome(lambda *t: tw.linear_fp8(*t[:2]) + 0 * t[2].sum(), 2 * x, weight, bias, dy), usual[1])
    for _ in range(2):
        found = outcome(tw.linear_fp8, x, weight, bias, dy)
    assert len(op.unplannable) == 1 and same({"x": found["x"], "weight": found["weight"]}, usual[0])
