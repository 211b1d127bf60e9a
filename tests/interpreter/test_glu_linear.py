"""What is peculiar to `glu_linear`: what it keeps, where it makes the unit's value again, and which gradients it makes at all."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import tilewright as tw
from tilewright.check.oracle import check, outcome
from tilewright.core.op import OPS
from tilewright.ops import glu_linear as module

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
