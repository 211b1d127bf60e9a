"""What is peculiar to `rms_norm_router`: whose logits they are, and that either result may be used alone."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.compare import check
from tilewright.check.oracle import outcome


def arguments(tokens: int, experts: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(4)
    x, weight, router = (torch.randn(n, 258, generator=source) for n in (tokens, 1, experts))
    return x.bfloat16(), (1 + 0.5 * weight[0]).bfloat16(), (0.05 * router).bfloat16()


@pytest.mark.parametrize("ways", [None, "both"])
def test_logits_are_those_of_the_rounded_rows(ways):
    x, weight, router = arguments(130, 130)
    fmt = None if ways is None else tw.fp8("1x128", ways=ways)
    with tw.force("triton"), torch.no_grad():
        y, logits = tw.rms_norm_router(x, weight, router, out_format=fmt)
        plain, alone = tw.rms_norm(x, weight), tw.rms_norm(x, weight, out_format=fmt)
    exact = plain.double() @ router.double().t()
    assert (logits - exact).abs().max() < 1e-6 * exact.abs().max()
    for one, other in zip(*(t.tensors() if fmt else (t,) for t in (y, alone)), strict=True):
        assert torch.equal(one.float(), other.float())


def test_more_experts_than_a_program_takes():
    op = tw.catalogue()["rms_norm_router"]
    values = op.signature.bind(arguments(5, 513), {})
    with tw.force("triton"):
        check(op, "513 experts", values, outcome(op, values))


@pytest.mark.parametrize("used", ["y", "logits"])
def test_a_result_that_is_not_used_has_no_gradient(used):
    x, weight, router = arguments(7, 20)
    leaves = [t.clone().requires_grad_() for t in (x, weight, router)]
    wide = [t.double().requires_grad_() for t in (x, weight, router)]
    at = ("y", "logits").index(used)
    with tw.force("triton"):
        made = tw.rms_norm_router(*leaves)[at]
        dy = torch.randn(made.shape, generator=torch.Generator().manual_seed(5)).to(made.dtype)
        found = torch.autograd.grad(made, leaves, dy, allow_unused=True)
    exact = torch.autograd.grad(tw.rms_norm_router(*wide)[at], wide, dy.double(), allow_unused=True)
    for grad, there in zip(found, exact, strict=True):
        assert (grad is None) == (there is None)
        if there is not None:
            assert (grad.double() - there).norm() < 4e-3 * there.norm()


def test_the_reference_equals_the_layers_one_by_one():
    """Not those of an fp32 y, which a model that was trained unfused has never seen."""
    x, weight, router = arguments(20, 33)
    with tw.force("reference"), torch.no_grad():
        y, logits = tw.rms_norm_router(x, weight, router)
        apart = tw.rms_norm(x, weight)
        assert torch.equal(y, apart) and torch.equal(logits, tw.router_linear(apart, router))
        exact, _ = tw.rms_norm_router(x.float(), weight, router)
    assert (exact @ router.float().t() - logits).abs().max() > 1e-4
