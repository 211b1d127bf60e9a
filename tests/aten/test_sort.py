"""The sort engine beyond torch's samples: ties, both NaNs, infinities, zeros of both signs, lines of every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import differences
from tests.aten.test_beyond import both
from tilewright.aten import order, sort

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)


def ours(call: Callable[[], Any]) -> Any:
    """The result of a call that must be ours."""
    with tw.aten.use("all", include=["sort"]):
        made = call()
        said = tw.aten.report()
    assert any(one["taken"] for one in said.values()) and not any(one["declined"] for one in said.values()), said
    return made


def special(n: int, dtype: torch.dtype) -> Tensor:
    """Numbers with ties and, of floats, NaNs of both signs, infinities and zeros of both signs."""
    torch.manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(n) < 0.5
    x = torch.randint(0 if dtype == torch.uint8 else -20, 100, (n,)).to(dtype)
    if dtype.is_floating_point:
        negative = torch.tensor([-0.0]).to(dtype).copysign(torch.tensor(-1.0)) * NAN
        for at, value in enumerate((NAN, float(negative), -NAN, INF, -INF, -0.0, 0.0)):
            x[at % n :: 11] = value
        x[4 % n] = torch.tensor(NAN).copysign(torch.tensor(-1.0)).to(dtype)
    return x


def reference(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """A stable sort of one line by what numbers are, a NaN of either sign last."""
    numbers = x.tolist()
    key = lambda i: (numbers[i] != numbers[i], 0 if numbers[i] != numbers[i] else numbers[i])  # noqa: E731
    places = sorted(range(len(numbers)), key=key) if not descending else None
    if descending:  # equal ones stay as they are
        ranks = [key(i) for i in range(len(numbers))]
        places = sorted(range(len(numbers)), key=lambda i: (not ranks[i][0], -ranks[i][1]))
    index = torch.tensor(places, dtype=torch.int64)
    return x[index], index


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("n", [1, 7, 64, 130])
def test_sorts_are_stable_and_nans_last(dtype, descending, n):
    x = special(n, dtype)
    expected = reference(x, descending)
    for made in (ours(lambda: x.sort(stable=True, descending=descending)), ours(lambda: x.sort(descending=descending))):
        assert torch.equal(made[1], expected[1])
        assert not differences(made[0], expected[0])
        if dtype.is_floating_point:  # zeros and NaNs keep their signs
            assert torch.equal(made[0].signbit(), expected[0].signbit())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64], ids=lambda d: str(d).removeprefix("torch.")
)
def test_long_lines_are_sorted_by_digits(dtype, monkeypatch):
    monkeypatch.setattr(order, "COUNTED", 0)
    monkeypatch.setattr(sort, "WIDTHS", (0,))
    x = special(1100, dtype).view(1, -1) if dtype == torch.bfloat16 else special(90, dtype).view(2, 45)
    if dtype == torch.int64:  # as many equal ones as a warp of threads has keys, and more
        x = (torch.arange(600) % 299 == 0).to(dtype).view(1, -1)
    made = ours(lambda: x.sort(stable=True))
    for line in range(x.shape[0]):
        assert torch.equal(made[1][line], reference(x[line], False)[1])


@pytest.mark.parametrize("shape", [(3, 5, 4), (7,), (), (0, 3), (3, 0)])
def test_every_dimension_and_layout(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    for dim in range(x.dim()) if x.dim() else (0, -1):
        for own in (
            x,
            x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x,
            torch.randn((*shape, 2))[..., 1],
        ):
            for call in (
                lambda own=own, dim=dim: own.sort(dim),
                lambda own=own, dim=dim: own.topk(min(2, own.shape[dim] if own.dim() else 1), dim),
            ):
                assert not differences(ours(call), call())


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [0, 1, 5, 64, 65])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.uint8], ids=lambda d: str(d).removeprefix("torch.")
)
def test_the_first_of_parts(k, largest, dtype, monkeypatch):
    """Lines in parts of 64, of which the first of the first are taken; where there are too few to choose from, a whole sort. Of 5,
    more are equal than groups have room for."""
    part = 64 if dtype != torch.int64 else 128
    few = (("FEW", {8: 8}), ("FEW_PART", 32), ("THREADS", (32, 32)))
    for name, value in (("WIDTHS", (0,)), ("PART", part), ("SMALL_PART", 32), *few):
        monkeypatch.setattr(sort, name, value)
    x = special(150, dtype)
    if k > 5:
        x = x[:65] if dtype != torch.uint8 else x[:70]
    expected = reference(x, largest)
    made = ours(lambda: x.topk(k, largest=largest))
    assert torch.equal(made[1], expected[1][:k])
    assert not differences(made[0], expected[0][:k])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("n", [0, 1, 40, 150])
def test_what_is_left_of_equals(dtype, n):
    x = special(n, dtype) if n else torch.empty(0, dtype=dtype)
    for arguments in ({}, {"return_inverse": True, "return_counts": True}):
        aten, made, _ = both(lambda a=arguments: torch.unique(x.view(-1, 2) if n > 1 else x, **a))
        if dtype.is_floating_point:  # aten has NaNs in an order of its own
            assert len(made) == len(aten) if arguments else made.shape == aten.shape
            values, other = (made[0], aten[0]) if arguments else (made, aten)
            assert not differences(values[~values.isnan()], other[~other.isnan()])
            assert not arguments or (
                torch.equal(values[made[1]].nan_to_num(7), x.view(made[1].shape).nan_to_num(7)) and made[2].sum() == n
            )
        else:
            assert not differences(made, aten)


def test_all_equal_and_all_different():
    for x in (torch.zeros(100), torch.arange(100.0).flip(0)):
        aten, made, _ = both(
            lambda x=x: (torch.unique(x, return_counts=True, return_inverse=True), x.sort(stable=True), x.topk(3)[0])
        )
        assert not differences(made, aten)
