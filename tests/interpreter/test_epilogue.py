"""What is peculiar to `epilogue`: operands that lie in any order, and gradients of those that were broadcast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.activation.epilogue import loops


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_patches_of_an_image_are_four_loops():
    image = drawn(2, 28, 42, 3)
    patches = image.unflatten(2, (-1, 14)).unflatten(1, (-1, 14)).permute(0, 1, 3, 2, 4, 5)
    found = loops(patches.shape, [patches, torch.empty(patches.shape)])
    assert (found.rows, found.columns, found.sizes) == (4 * 3 * 14, 14 * 3, (14, 3, 1))
    tw.epilogue.op.plans.clear()
    torch.testing.assert_close(tw.epilogue(patches, act="relu"), patches.relu(), rtol=0, atol=0)
    assert len(tw.epilogue.op.plans) == 1, "a copy was made"


@pytest.mark.parametrize("over", [False, True], ids=["allocated", "out"])
def test_six_dimensions_in_any_order(over):
    """One more than a launch goes through: operands are copied, and so is a result in memory that lies like them."""
    x = drawn(2, 3, 2, 3, 2, 5).permute(5, 3, 1, 4, 2, 0)
    gate = drawn(3, 1, 2, 1, 2)
    out = torch.empty(2, 3, 2, 3, 2, 5).permute(5, 3, 1, 4, 2, 0) if over else None
    y = tw.epilogue(x, gate=gate, alpha=0.5, out=out)
    assert over == (y is out)
    torch.testing.assert_close(y, x * gate * 0.5)


# Sums over the outer, the inner and the middle dimensions, over several runs of them, over all, and of more than one chunk
SPANS = [(4, 7), (3, 1, 1), (1, 4, 1), (3, 1, 7), (1,), (3, 4, 7), (1, 4, 7)]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_gradients_of_what_was_broadcast(span):
    x, dy = drawn(3, 4, 7), drawn(3, 4, 7, seed=1)
    operands = {n: drawn(*span, seed=i).requires_grad_() for i, n in enumerate(("bias", "add", "gate"), 2)}
    found = torch.autograd.grad(tw.epilogue(x, act="silu", **operands), list(operands.values()), dy)
    a = x + operands["bias"] + operands["add"]
    wanted = torch.autograd.grad(torch.nn.functional.silu(a) * operands["gate"], list(operands.values()), dy)
    for name, one, other in zip(operands, found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("span", [(130,), (1,)], ids=str)
def test_long_sums_take_several_launches(span):
    x, dy, gate = drawn(300, 130), drawn(300, 130, seed=1), drawn(*span, seed=2).requires_grad_()
    (found,) = torch.autograd.grad(tw.epilogue(x, gate=gate), [gate], dy)
    wanted = (x.double() * dy).sum_to_size(span)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


def test_a_slice_of_the_residual_is_updated_and_nothing_beside_it():
    stream = drawn(5, 3, 40)
    kept, x, gate = stream.clone(), drawn(5, 40, seed=1), drawn(5, 1, seed=2)
    part = stream[:, 1]
    assert tw.epilogue(x, gate=gate, residual=part, out=part) is part
    torch.testing.assert_close(part, kept[:, 1] + gate * x)
    assert torch.equal(stream[:, ::2], kept[:, ::2])


def test_a_step_size_on_the_device_is_read_at_every_call():
    state, velocity, dt = drawn(6, 11), drawn(6, 11, seed=1).half(), torch.tensor([0.5])
    for step in (0.5, -0.25, 0.0):
        before = state.clone()
        dt.fill_(step)
        tw.epilogue(velocity, gate=dt, residual=state, out=state)
        torch.testing.assert_close(state, before + step * velocity.float())
