"""What is peculiar to instance_norm's kernels: planes of every length, how images lie, and moments far from 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.norm import instance_norm as norm


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[list[Tensor]]:
    """The result and all gradients, by the kernels and by the reference in float64."""
    made = []
    for name, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        own = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
        with tw.force(name):
            y = tw.instance_norm(*own)
            made.append([y, *torch.autograd.grad(y, own, dy.to(dtype))])
    return made


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for at, (a, b) in enumerate(zip(found, wanted)):
        assert a.shape == b.shape, at
        assert (a.double() - b).norm() <= 2e-6 * b.norm(), f"{at}: off by {float((a.double() - b).norm() / b.norm())}"


# Of pieces, the last of which is short; as long as registers hold, and a little longer, first backward alone; of many blocks
LENGTHS = [1290, 16384, 16385, 32769, 65537]


@pytest.mark.parametrize("size", LENGTHS)
def test_planes_of_any_length(size):
    x, dy = drawn(2, 2, size) + 1, drawn(2, 2, size, seed=1)
    pieces = [norm.split_plane(x, operands)[1] for operands in (1, 2)]
    assert [n == 0 for n in pieces] == [size > 32768, size > 16384]
    close(*both(x, drawn(2, seed=2), drawn(2, seed=3), dy))


def lain(x: Tensor) -> dict[str, Tensor]:
    """The same image in several ways."""
    wide = torch.full((2, 3, 4, 12), math.nan)
    wide[..., 1::2] = x
    return {
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "batch last": x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        "every other column": wide[..., 1::2],
        "channels before the batch": x.transpose(0, 1).contiguous().transpose(0, 1),
    }


def test_images_lie_in_any_way():
    x, dy, weight, bias = (
        drawn(2, 3, 4, 6),
        drawn(2, 3, 4, 6, seed=1),
        drawn(6, seed=2)[::2],
        drawn(1, seed=3).expand(3),
    )
    plain = both(x, weight.contiguous(), bias.contiguous(), dy)[0]
    for (how, given), upstream in zip(lain(x).items(), lain(dy).values()):
        assert torch.equal(given, x)
        for a, b in zip(both(given, weight, bias, upstream)[0], plain):
            assert torch.equal(a, b) and a.is_contiguous(), how


def test_channels_before_the_batch_are_not_copied():
    x = drawn(2, 3, 64).transpose(0, 1)
    assert norm.near(x) is x and norm.near(x.transpose(0, 2)).is_contiguous()


def test_images_of_equal_numbers():
    """Nothing is left of numbers whose sum is exact: y is the bias, whatever rstd is."""
    with tw.force("triton"):
        y = tw.instance_norm(
            torch.full((2, 3, 7, 9), 1000.5), torch.full((3,), 1e3), torch.tensor([1.0, 2.0, 3.0]), 1e-12
        )
    assert torch.equal(y, torch.tensor([1.0, 2.0, 3.0])[:, None, None].expand(2, 3, 7, 9))


@pytest.mark.parametrize("size", [300, 33000])
def test_a_mean_far_from_0(size):
    """Of numbers a hundred thousand times as far from 0 as from one another, which fp32 has to two digits."""
    x = drawn(1, 2, size) + 1e5
    with tw.force("triton"):
        y = tw.instance_norm(x)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (y.double() - exact).abs().max() <= 1e-2


@pytest.mark.parametrize("size", [40, 33000])
def test_a_nan_shows_in_its_own_plane_alone(size):
    x = drawn(2, 2, size).requires_grad_()
    with torch.no_grad():
        x[1, 0, -1] = math.nan
    weight = torch.ones(2, requires_grad=True)
    with tw.force("triton"):
        y = tw.instance_norm(x, weight)
        dx, dweight = torch.autograd.grad(y, [x, weight], drawn(2, 2, size, seed=1))
    for t in (y, dx):
        assert bool(t[1, 0].isnan().all()) and not bool(t[0].isnan().any() or t[1, 1].isnan().any())
    assert dweight.isnan().tolist() == [True, False]
