"""What rwkv_keys promises beyond the properties of every op: heads of no length, heads wider than a program, results not used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.compare import check
from tilewright.check.oracle import outcome
from tilewright.ops.recurrent.rwkv_keys import WIDEST
from tilewright.ops.recurrent.rwkv_keys import rwkv_keys as op


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(tokens, hidden), (hidden,)] * 2)]


def hold(label: str, args: list[Tensor], heads: int) -> None:
    """A call and its backward against float64."""
    values = op.signature.bind(args, {"heads": heads})
    check(op, label, values, outcome(op, values))


@pytest.mark.parametrize("width, heads", [(64, 8), (64, 5), (24, 4), (100, 2)])
def test_heads_of_models_and_others(width, heads):
    """More rows than a program of the forward has, and than all bands of the backward have in one turn."""
    hold(f"{heads} heads of {width}", operands(37, heads * width), heads)


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_wider_than_a_program(heads):
    hold(f"{heads} heads, wide", operands(3, heads * (WIDEST + 40)), heads)


@pytest.mark.parametrize("size", [0.0, 1e-15, 1e-14])
def test_heads_of_no_length(size):
    """A head shorter than 1e-12 is divided by that, and its gradient has no part along it; its neighbours are as ever."""
    k, kk, a, ka = operands(4, 32)
    k[1, 8:16] *= size
    k[2] *= size
    given = [t.requires_grad_() for t in (k, kk, a, ka)]
    upstream = [drawn(4, 32, seed=9 + i) for i in range(3)]
    made = tw.rwkv_keys(*given, heads=4)
    found = [*made, *torch.autograd.grad(made, given, upstream)]
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = op.reference(*wide, heads=4)
    wanted = [*exact, *torch.autograd.grad(exact, wide, [g.double() for g in upstream])]
    assert all(t.isfinite().all() for t in found)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("width", [16, WIDEST + 8])
def test_results_that_are_not_used(used, width):
    given = [t.requires_grad_() for t in operands(3, width)]
    made = tw.rwkv_keys(*given, heads=1)
    upstream = [drawn(3, width, seed=9 + i) for i in used]
    found = torch.autograd.grad([made[i] for i in used], given, upstream, allow_unused=True)
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = op.reference(*wide, heads=1)
    wanted = torch.autograd.grad([exact[i] for i in used], wide, [g.double() for g in upstream], allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        other = torch.zeros_like(one).double() if other is None else other
        assert (one.double() - other).norm() <= 2e-6 * other.norm()


def test_arguments_in_other_precisions():
    k, kk, a, ka = operands(5, 48)
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        hold(f"{dtypes}", [k.to(dtypes[0]), kk, a.to(dtypes[1]), ka.to(dtypes[0])], 3)
