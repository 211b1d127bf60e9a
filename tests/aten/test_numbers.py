"""Python's numbers in calls: how they promote where a call is declined, which values they have in integers, and which are refused;
and what else aten refuses or lays out by rules of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences
from tests.aten.samples import DEVICE
from tilewright.aten import router

INT8, UINT8, INT32 = torch.int8, torch.uint8, torch.int32
AGAIN = 4  # a run, one that makes a plan, one by its key, one by a guard


def said(call: Callable[[], Any]) -> Any:
    """What a call gives, or the exception and its message."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@contextmanager
def replaced(small: bool = False) -> Iterator[None]:
    """All that can be; with `small`, every call is one of too few bytes, which mode "auto" leaves to aten at once."""
    with tw.aten.use("all"):
        for one in router._active.values() if small else ():
            one.least = 1 << 40
        yield


def same(calls: list[Callable[[], Any]], small: bool = False) -> dict[int, Any]:
    """How ours differ from aten's, each call made several times; by its place."""
    expected = [said(call) for call in calls]
    with replaced(small):
        made = [[said(call) for _ in range(AGAIN)] for call in calls]
    # A GPU's aten may round a quotient or a power the other way
    near = [None if DEVICE == "cpu" else as_double(wanted) for wanted in expected]
    found = {at: [differences(one, expected[at], near[at]) for one in own] for at, own in enumerate(made)}
    return {at: own for at, own in found.items() if any(own)}


def taken() -> int:
    return sum(one["taken"] for one in tw.aten.report().values())


# ---- numbers of calls that are declined ------------------------------------------------------------------------------

NUMBERS = (True, 3, -2, 300, 2**31, 2**40, 2**63, 0.1, 2.5, 1e300, 2j)
DTYPES = (INT8, UINT8, INT32, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.float64, torch.complex64)
MADE: dict[str, Callable[[Tensor, Any], Any]] = {
    "add": lambda x, n: x + n,
    "mul": lambda x, n: n * x,
    "rsub": lambda x, n: n - x,
    "div": lambda x, n: x / n,
    "rdiv": lambda x, n: n / x,
    "div floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "div, not rounded": lambda x, n: torch.div(x, n, rounding_mode=None),
    "floor_divide": lambda x, n: x // n,
    "remainder": lambda x, n: x % n,
    "and": lambda x, n: x & n,
    "eq": lambda x, n: x == n,
    "isin": lambda x, n: torch.isin(x, n),
    "where": lambda x, n: torch.where(x != 0, x, n),
    "where of numbers": lambda x, n: torch.where(x != 0, n, 2.5),
    "where of two shapes": lambda x, n: torch.where(torch.tensor([True, False]), x.reshape(-1)[0], n),
    "mul_": lambda x, n: x.clone().mul_(n),
    "div_": lambda x, n: x.clone().div_(n),
    "floor_divide.out": lambda x, n: torch.floor_divide(x, n, out=torch.empty_like(x)),
    "floor_divide.out, resized": lambda x, n: torch.floor_divide(x, n, out=torch.empty(0, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_number_promotes_as_one_where_a_call_is_declined(name):
    """Beside tensors with dimensions and without: dtype, value, shape and message."""
    for dtype in DTYPES:
        for x in (torch.tensor([100, 3, 7]).to(dtype), torch.tensor(3).to(dtype)):
            calls = [lambda x=x, n=n: MADE[name](x, n) for n in NUMBERS]
            assert not same(calls, small=True), (dtype, x.dim())


def test_numbers_alone_promote_as_numbers():
    calls = [lambda a=a, b=b: torch.add(a, b) for a, b in ((3, 4), (3, 4.5), (2.5, 2j), (True, 2.5), (2.5, 1.5))]
    assert not same([*calls, lambda: torch.div(3, 4)], small=True)


def test_what_is_written_is_the_tensor_that_was_given():
    """Also where it had a dimension for the call."""
    x, out = torch.tensor(3, dtype=INT8), torch.tensor(0, dtype=INT8)
    with replaced(small=True):
        assert x.mul_(300) is x and x.shape == () and int(x) == -124
        assert torch.floor_divide(x, 5, out=out) is out and int(out) == -25
        assert (x * 2).shape == ()


# ---- numbers in integers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [INT8, UINT8, INT32], ids=str)
def test_divisors_wrap_around_to_the_dtype(dtype):
    x = torch.tensor([127, -84, 5, 9]).to(dtype)
    numbers = (3, -1, -2, 300, 2**31 + 7, 2**40 + 3)
    calls: list[Callable[[], Any]] = []
    for n in numbers:
        calls += [
            lambda n=n: x % n, lambda n=n: x.clone().remainder_(n), lambda n=n: torch.remainder(n, x), lambda n=n: x // n,
            lambda n=n: x.clone().floor_divide_(n), lambda n=n: torch.floor_divide(x, n, out=torch.empty(4)),
            lambda n=n: torch.div(x, n, rounding_mode="trunc"), lambda n=n: torch.div(n, x, rounding_mode="floor"),
        ]  # fmt: skip
    assert not same(calls)
    with replaced():
        assert isinstance(said(calls[0]), Tensor) and taken()


def test_integers_that_no_int64_is():
    i, x = torch.arange(3), torch.ones(3)
    calls = [lambda: i == 2**63, lambda: i * 2**63, lambda: x * 2**63, lambda: torch.isin(i, 2**63), lambda: x < 2**63]
    assert not same(calls)


# ---- numbers that are refused ----------------------------------------------------------------------------------------

CAST: dict[str, Callable[[Tensor, Any], Any]] = {
    "clamp": lambda x, n: x.clamp(min=n),
    "clamp_": lambda x, n: x.clone().clamp_(max=n),
    "clamp_min": lambda x, n: x.clamp_min(n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "alpha of sub": lambda x, n: torch.sub(x, x, alpha=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x, value=n),
    "pow": lambda x, n: x**n,
    "pow_": lambda x, n: x.clone().pow_(n),
    "lerp": lambda x, n: torch.lerp(x, x, n),
    "elu": lambda x, n: F.elu(x, n),
    "softplus": lambda x, n: F.softplus(x, 1, n),
}


@pytest.mark.parametrize("name", CAST)
def test_numbers_that_the_dtype_cannot_hold(name):
    """In integers negative ones wrap around; aten refuses others, and so do plans that were made with small ones."""
    for dtype in (INT8, UINT8, torch.float32, torch.bfloat16):
        x = torch.tensor([1, 0, 1]).to(dtype)
        numbers = (2, -1, 2, 300, 1e300, 3) if name != "pow" or dtype.is_floating_point else (2, 300, 1e300, 3)
        assert not same([lambda x=x, n=n: CAST[name](x, n) for n in numbers]), dtype


def test_complex_numbers_are_atens():
    x, i, h = torch.ones(3), torch.ones(3, dtype=INT8), torch.ones(3, dtype=torch.bfloat16)
    calls = [
        lambda: x / 2j, lambda: i / 2j, lambda: h / 2j, lambda: i**2j, lambda: x**2j, lambda: 2j**x, lambda: x.clone().div_(2j),
        lambda: F.threshold(x, 2j, 2), lambda: torch.addcmul(x, x, x, value=2j), lambda: torch.add(x, x, alpha=2j),
        lambda: F.elu(x, 2j), lambda: torch.ops.aten.elu_backward(x, 2j, 1, 1, True, x), lambda: x.clamp(2j),
    ]  # fmt: skip
    assert not same(calls)


def test_a_bool_scales_bools_alone():
    b, x = torch.tensor([True, False]), torch.ones(2)
    calls = [lambda f=f, y=y: f(y, y, alpha=True) for f in (torch.add, torch.sub) for y in (b, x, x.int())]
    calls += [
        lambda: torch.add(b, True, alpha=True),
        lambda: torch.add(b, 2, alpha=True),
        lambda: b.clone().add_(b, alpha=True),
    ]
    assert not same(calls)


# ---- operands that are refused ---------------------------------------------------------------------------------------


def test_a_negative_slope_in_place_has_no_gradient():
    """One plan is not taken for the other sign."""

    def back(alpha: float, in_place: bool) -> Tensor:
        a = torch.tensor([-1.0, 2.0, -0.5], requires_grad=True)
        F.elu(a * 1, alpha, in_place).sum().backward()
        return a.grad

    calls = [lambda a=a, p=p: back(a, p) for a in (1.0, -1.0, 0.0, 2.0, -0.5) for p in (True, False)]
    assert not same(calls)


def test_lerp_promotes_neither_end():
    x, d, h, i = torch.ones(3), torch.ones(3).double(), torch.ones(3).half(), torch.ones(3, dtype=INT8)
    lone = torch.tensor(0.3)
    calls: list[Callable[[], Any]] = [
        lambda: torch.lerp(x, d, 0.3), lambda: torch.lerp(h, x, 0.3), lambda: torch.lerp(i, i, 0.5), lambda: torch.lerp(x, x, d),
        lambda: torch.lerp(i, x, x), lambda: torch.lerp(x, i, 0.3), lambda: torch.lerp(x, x * 2, x / 4),
        lambda: torch.lerp(x, x * 2, 0.25), lambda: x.clone().lerp_(d, 0.3), lambda: torch.lerp(lone, lone, lone.double()),
        lambda: torch.lerp(x, x * 2, lone.double()), lambda: torch.lerp(lone, x, lone.double()), lambda: torch.lerp(i, i, lone),
    ]  # fmt: skip
    assert not same(calls)
    with replaced():
        torch.lerp(x, x, lone.half())
        assert tw.aten.report()["lerp.Tensor"]["taken"] == 1


# ---- strides ---------------------------------------------------------------------------------------------------------


def test_how_results_without_elements_lie():
    x, y = torch.empty(3, 0).as_strided((3, 0), (1, 3)), torch.empty(0, 3).as_strided((0, 3), (1, 0))
    calls: list[Callable[[], Any]] = []
    for t in (x, y, torch.empty(2, 0, 3).permute(2, 0, 1)):
        calls += [
            lambda t=t: 1 - t, lambda t=t: t.nan_to_num(), lambda t=t: t + t, lambda t=t: t * 2.5, lambda t=t: t.neg(),
            lambda t=t: torch.where(t > 0, t, 2.0), lambda t=t: t.double() - t, lambda t=t: t.clamp(min=1),
        ]  # fmt: skip
    assert not same(calls)
