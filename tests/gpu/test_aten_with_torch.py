"""Replaced operators beside the rest of torch, on a GPU: the tests of `tests/aten/test_with_torch.py` with CUDA tensors, and
functions that Inductor compiles."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.test_with_torch import (  # noqa: F401
    decompositions,
    gradients,
    layer,
    test_a_library_after_ours_has_the_calls,
    test_a_library_before_ours_is_what_we_fall_back_to,
    test_an_operator_of_another_library_that_calls_ours,
    test_autocast_chooses_the_dtypes,
    test_compiled_functions_call_ours_where_they_call_aten,
    test_derivatives_forward_and_of_second_order,
    test_enabled_between_forward_and_backward,
    test_enabled_in_the_middle_of_training,
    test_export_sees_what_it_saw_before,
    test_fake_tensors_do_not_reach_ours,
    test_functions_of_functions,
    test_gradients_of_gradients,
    test_inference_mode,
)

pytestmark = pytest.mark.gpu


def test_inductors_kernels_are_its_own():
    """And give the same with replacements in force, whose products may be ours."""
    model, x = layer()
    wanted = gradients(model, x)
    with tw.aten.use("all"):
        compiled = torch.compile(model)
        found = gradients(compiled, x)[:2]
        said = tw.aten.report()
    assert not said["native_layer_norm"]["taken"] and not said["_softmax"]["taken"]  # which Inductor has fused
    torch.testing.assert_close(found, wanted[:2], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="Inductor takes a compiler of C")
def test_what_inductor_leaves_to_aten_is_ours():
    """Products and `topk`, of which it has no kernels; a scan is its own or ours, as its version has it."""

    def call(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x @ w).exp(), *x.topk(5), x.cumsum(1)

    torch.manual_seed(0)
    x, w = torch.randn(64, 128, device="cuda"), torch.randn(128, 96, device="cuda") / 16
    wanted = call(x, w)
    with tw.aten.use("all"):
        made = torch.compile(call, backend="inductor")(x, w)
        said = tw.aten.report()
    torch._dynamo.reset()
    assert said["topk"]["taken"] and said["mm.out"]["taken"] + said["mm"]["taken"] and not said["exp"]["taken"]
    assert torch.equal(made[1], wanted[1]) and torch.equal(made[2], wanted[2])
    torch.testing.assert_close([made[0], made[3]], [wanted[0], wanted[3]], rtol=1e-4, atol=1e-5)
