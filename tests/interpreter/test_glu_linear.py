"""What is peculiar to `glu_linear` and `glu_linear_fp8`: what they keep, where the unit's value is made again, which gradients are
made at all, and of what the products in FP8 are."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import tilewright as tw
from tests import linear_oracle
from tilewright.check.compare import check
from tilewright.check.oracle import outcome
from tilewright.nn.expert_codes import quantize_weight
from tilewright.op import OPS
from tilewright.ops.activation import glu_linear as module

OP = OPS["glu_linear"]


def drawn(merged: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 3, 80 if merged else 40), "weight": (24, 40), "bias": (24,)}
    shapes |= {} if merged else {"up": (2, 3, 40)}
    return {n: torch.randn(shape, generator=source).to(dtype) for n, shape in shapes.items()}


@pytest.mark.parametrize("merged", [True, False])
def test_the_value_is_not_kept_and_is_made_again_over_its_gradient(merged):
    values = {n: t.requires_grad_() for n, t in drawn(merged).items()}
    kept, multiplied = [], []

    def product(a, b, out, add=False):
        module_product(a, b, out, add)
        multiplied.append((b, out))

    module_product = module.product
    with tw.force("triton"), mock.patch.object(module, "product", product):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = tw.glu_linear(**values)
        whole = {t.data_ptr() for n, t in values.items() if n != "bias"}
        assert {t.data_ptr() for t in kept if t.untyped_storage().nbytes() > t.element_size()} == whole
        y.sum().backward()
        h = tw.glu(values["x"].detach(), None if merged else values["up"].detach()).view(6, 40)
    (_, _), (_, dh), (again, _) = multiplied
    assert again.data_ptr() == dh.data_ptr() and torch.equal(again, h)


@pytest.mark.parametrize("merged", [True, False])
def test_only_what_is_wanted_is_made(merged):
    values = drawn(merged)
    whole = outcome_of(values)
    for name in values:
        leaf = values[name].clone().requires_grad_()
        with tw.force("triton"):
            y = tw.glu_linear(**{**values, name: leaf})
            with mock.patch.object(module, "product", wraps=module.product) as products:
                (found,) = torch.autograd.grad(y, leaf, whole.grads[0])
        assert torch.equal(found, whole[f"d_{name}"]), name
        assert products.call_count == (name != "bias")
    names = [n for n in ("x", "up") if n in values]
    leaves = [values[n].clone().requires_grad_() for n in names]
    with tw.force("triton"):
        found = torch.autograd.grad(tw.glu_linear(**{**values, **dict(zip(names, leaves))}), leaves, whole.grads[0])
    assert all(torch.equal(g, whole[f"d_{n}"]) for n, g in zip(names, found))


def outcome_of(values: dict[str, torch.Tensor]):
    bound = OP.signature.bind((), values)
    with tw.force("triton"):
        made = outcome(OP, bound)
    check(OP, f"{sorted(values)}", bound, made)
    return made


# ---- in FP8 ----------------------------------------------------------------------------------------------------------


def made_fp8() -> tuple:
    """Two blocks in every dimension, of which one is not whole; gate and up in one tensor."""
    drawn = linear_oracle.drawn
    return drawn(134, 288), drawn(130, 144, seed=1, scale=0.1), drawn(130, seed=2), drawn(134, 130, seed=3)


def fp8(x, weight, bias, **given):
    with tw.force("triton"):
        return tw.glu_linear_fp8(x, weight, bias, **given)


def same(found: dict, wanted: dict) -> bool:
    return all(torch.equal(t, wanted[n]) for n, t in found.items())


def test_products_are_of_codes_of_the_unrounded_value():
    x, weight, bias, dy = made_fp8()
    found = linear_oracle.outcome(fp8, x, weight, bias, dy)
    wide = x.double().requires_grad_()
    h = tw.glu.op.reference(wide)
    exact = linear_oracle.layer(h, weight, bias, dy)
    (exact["x"],) = torch.autograd.grad(h, wide, exact["x"])
    errors = linear_oracle.off(found, exact)
    assert errors.pop("x") < 2.5e-3  # the gradient of the value is rounded before
    assert all(error < 1.8e-3 for error in errors.values()), errors
    q = quantize_weight(weight)
    codes = {"weight_codes": q.data, "weight_scale": q.scale, "weight_codes_t": q.data_t}
    assert same(linear_oracle.outcome(fp8, x, weight, bias, dy, **codes), found)
    gate, up = (t.contiguous().requires_grad_() for t in x.chunk(2, 1))
    y = fp8(gate, weight, bias, up=up)
    assert torch.equal(y, found["y"]) and torch.equal(torch.cat(torch.autograd.grad(y, (gate, up), dy), 1), found["x"])


def test_nothing_of_the_value_is_kept_in_fp8():
    x, weight, bias, _ = (t.requires_grad_() for t in made_fp8())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8(x, weight, bias)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, weight, bias)}


def test_a_call_in_fp8_is_one_plan_and_makes_what_is_wanted():
    op = OPS["glu_linear_fp8"]
    for plans in (op.plans, op.backward_plans, op.unplannable):
        plans.clear()
    x, weight, _, dy = (t[:17] for t in made_fp8())
    dy = dy[:, :17]
    for times in (1, 2, 1):
        leaves = [(times * x).requires_grad_(), weight.clone().requires_grad_()]
        y = fp8(*leaves, None)
        whole = torch.autograd.grad(y, leaves, dy)
    assert len(op.plans) == len(op.backward_plans) == 1 and not op.unplannable
    for at in range(2):
        given = [x, weight]
        given[at] = leaf = given[at].clone().requires_grad_()
        again = fp8(*given, None)
        assert torch.equal(again, y) and torch.equal(torch.autograd.grad(again, leaf, dy)[0], whole[at])
    # dy quantised; the weight quantised, dh and the unit's gradients; the value's codes and dweight
    assert sorted(plan.launches for plan, _ in op.backward_plans.values()) == [1 + 2, 1 + 3, 1 + 3 + 2]
