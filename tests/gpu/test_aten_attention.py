"""aten's flash attention, replaced, on a GPU: the tests of `tests/aten/test_attention.py` with CUDA tensors, and what only a GPU
has: its own kernel to compare with, its backward of our results, captured graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewright as tw
from tests.aten.test_attention import (  # noqa: F401
    BF16,
    FP16,
    NAME,
    OP,
    operands,
    test_dense,
    test_packed,
    test_rows_that_see_nothing_are_noticed,
    test_what_is_left_to_aten,
)
from tests.aten.test_auto import attends_as_observed, rows  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


def drawn(length: int, heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of o."""
    torch.manual_seed(0)
    return [torch.randn(2, heads, length, width).to(dtype) for _ in range(4)]


def step(given: list[Tensor], causal: bool) -> list[Tensor]:
    """o and the gradients of q, k and v."""
    q, k, v = (t.clone().requires_grad_() for t in given[:3])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), given[3])]


def errors(made: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(made, truth)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("width", [40, 64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_atens_backward_takes_our_results(dtype, width, causal):
    """Errors of o and of every gradient, against float64, are no more than half as large again as aten's own."""
    given = drawn(300, 4, width, dtype)
    wide = [t.double().requires_grad_() for t in given[:3]]
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(*wide, is_causal=causal)
    truth = [o.detach(), *torch.autograd.grad(o, wide, given[3].double())]
    aten = step(given, causal)
    with tw.aten.use("all", include=NAME):
        ours = step(given, causal)
        assert tw.aten.report()[NAME] == {"taken": 1, "declined": {}}
    assert [t.stride() for t in ours] == [t.stride() for t in aten]
    for own, other in zip(errors(ours, truth), errors(aten, truth)):
        assert own <= 1.5 * other + 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_results_lie_as_atens(causal):
    q, k, v = operands(70, 90, 4, 2, 64, BF16, True)
    args = (q, k, v, None, None, 70, 90, 0.0, causal, False)
    aten = OP(*args)
    with tw.aten.use("all", include=NAME):
        ours = OP(*args)
    for own, other in zip(ours, aten, strict=True):
        assert (own.dtype, own.shape, own.stride()) == (other.dtype, other.shape, other.stride())
    # Each rounds weights to bf16 before they multiply values, and its result after
    torch.testing.assert_close(ours[0], aten[0], rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(ours[1], aten[1], rtol=1e-5, atol=1e-4)


def test_captured_and_replayed_with_other_numbers():
    q, k, v = operands(64, 64, 4, 2, 64, BF16, True)
    args, graph = (q, k, v, None, None, 64, 64, 0.0, True, False), torch.cuda.CUDAGraph()
    with tw.aten.use("all", include=NAME):
        OP(*args)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = OP(*args)
        assert tw.aten.report()[NAME] == {"taken": 2, "declined": {}}
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(made[:2], OP(*args)[:2]))


def test_what_torch_calls_inside_is_counted(rows):  # noqa: F811
    """By torch's own kernel, which hands the call on in C++."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attends_as_observed(F.scaled_dot_product_attention, rows)
