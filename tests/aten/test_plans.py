"""Calls that are like one before, made by its plan: what is a slot, what is told apart, and how many are kept."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat
from tests.aten.samples import DEVICE
from tilewright.aten import router, table
from tilewright.aten.table import overload_of
from tilewright.check.provided.aten import call_of, copied, drawn, exact_of, written

# Whose result is no tensor, of a size that is read, or drawn
UNPLANNED = {"allclose", "masked_select", "nonzero", "repeat_interleave.Tensor", "_unique2"}
UNPLANNED |= {name for name, engine in table.ENGINE.items() if engine in ("random", "attention")}
AGAIN = 4  # a run, one that makes a plan, one by its key, one by a guard


def plans(name: str) -> int:
    return sum(one.function is not None for one in router._active[name].outcomes.values())


def runs(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Has an element for each time that the form runs, not its plan."""
    seen: list[Any] = []
    form = table.FORMS[name]

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(None)
        return form(*args, **kwargs)

    counted.numbers, counted.asks = getattr(form, "numbers", ()), getattr(form, "asks", {})
    monkeypatch.setitem(table.FORMS, name, counted)
    return seen


def has_kernel(name: str) -> bool:
    """Whether aten has a kernel that ours can be compared with."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{name}", DEVICE.upper())


@pytest.mark.parametrize("name", sorted(filter(has_kernel, table.FORMS)))
def test_later_calls_are_atens_too(name, monkeypatch):
    """With other values and at other addresses; what is written into is compared too."""
    seen = runs(monkeypatch, name)
    calls = []
    for seed in range(AGAIN):
        torch.manual_seed(seed)
        args, kwargs = call_of(name, partial(drawn, device=DEVICE))
        # Numbers that are slots differ from call to call; 0.5 and 3 are what `call_of` gives
        numbers = getattr(table.FORMS[name], "numbers", ())
        names = [a.name for a in overload_of(name)._schema.arguments]
        args = [v * (seed + 1) if type(v) is float and n in numbers else v for n, v in zip(names, args)]
        kwargs = {n: v * (seed + 1) if type(v) is float and n in numbers else v for n, v in kwargs.items()}
        calls.append((args, kwargs))
    exact = exact_of(name, DEVICE)
    truths = [exact(*as_double(args), **as_double(kwargs)) for args, kwargs in copied(calls_of(calls))]
    expected = [(overload_of(name)(*args, **kwargs), args, kwargs) for args, kwargs in copied(calls_of(calls))]
    with tw.aten.use("all", include=[name]):
        made = [(overload_of(name)(*args, **kwargs), args, kwargs) for args, kwargs in calls]
        assert tw.aten.report()[name]["taken"] == AGAIN
    for own, other, truth in zip(made, expected, truths) if table.ENGINE[name] != "random" else ():
        made, wanted, truth = (written(name, one) for one in (own[0], other[0], truth))
        assert not differences(made, wanted, truth, 40.0)  # elements of a row: how exact sums are, others test
        for a, b in zip(flat([*own[1], *own[2].values()]), flat([*other[1], *other[2].values()])):
            if isinstance(a, Tensor) and not any(a is t for t in flat(own[0])):
                assert not differences(a, b, as_double(b), 40.0)
    assert len(seen) == (AGAIN if name in UNPLANNED else 2)


def calls_of(calls: list[tuple[list[Any], dict[str, Any]]]) -> list[list[Any]]:
    return [[args, kwargs] for args, kwargs in calls]


def test_a_thousand_numbers_make_one_plan(monkeypatch):
    seen = runs(monkeypatch, "mul.Tensor")
    x = torch.arange(3.0)
    with tw.aten.use("all", include="mul.Tensor"):
        for i in range(1000):
            assert torch.equal(x * (i / 8 - 50), torch.tensor([0.0, i / 8 - 50, i / 4 - 100]))
        assert plans("mul.Tensor") == 1 and len(router._active["mul.Tensor"].outcomes) == 1
    assert len(seen) == 2


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(router, "MOST_OUTCOMES", 5)
    with tw.aten.use("all", include="neg"):
        for _ in range(2):
            for n in range(1, 20):
                assert torch.equal(-torch.ones(n), torch.full((n,), -1.0))
        own = router._active["neg"]
        assert len(own.outcomes) <= 5 and len(own.recent) <= router.RECENT and len(own.flats) <= 5


CALLS = {
    "types of numbers": lambda x: [(x.int() + n).dtype for n in (1, True, 1.0, 2, False, 2.0)],
    "signs": lambda x: [raised(lambda n=n: x.int() ** n) for n in (2, 3, -1, 2, -1)],
    "a dimension": lambda x: [x.sum(d) for d in (0, 1, 0, 1)],
    "keepdim": lambda x: [x.sum(1, keepdim=k) for k in (True, False, True, False)],
    "dtypes": lambda x: [x.sum(1, dtype=d) for d in (None, torch.float64, None, torch.float64)],
    "one tensor twice, then two": lambda x: [x + x, x + x, x + x, x + x.clone(), x * 2 + x, x + x],
    "gradients": lambda x: [x.clone().requires_grad_(i % 2 == 0).exp().detach() for i in range(8)],
    "other strides": lambda x: [(x.t() if i % 2 else x).neg() for i in range(8)],
    "misaligned": lambda x: [torch.cat((x.flatten(), x.flatten()))[i % 3 : i % 3 + 12].neg() for i in range(9)],
    "no elements": lambda x: [x[:0].exp() for _ in range(AGAIN)],
    "a list": lambda x: [torch.cat([x, x[:i]]) for i in (1, 2, 1, 2, 1, 2)],
    "large integers": lambda x: [raised(lambda n=n: x.long() + n) for n in (1, 2, 2**62, -(2**63), 3)],
    "no number": lambda x: [
        x.clamp(*b) for b in ((0.0,), (0.0, 1.0), (None, 1.0), (0.5,), (0.5, 2.0), (None, 2.0)) * 2
    ],
    "in place": lambda x: [x.add_(1), x.add_(1), x.add_(1), x.add_(x), x.add_(1), x],
    "overlaps": lambda x: [raised(lambda i=i: x[1:].mul_(x[:-1] if i == 3 else x[:-1] * 1)) for i in range(6)],
    "default dtype": lambda x: [default(d, lambda: x.int().exp()) for d in (torch.float32, torch.float64) * 3],
}


def raised(call: Any) -> Any:
    try:
        return call()
    except RuntimeError as error:
        return str(error)


def default(dtype: torch.dtype, call: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return call()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_differ_are_told_apart(what):
    x = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0], [2.0, 2.5, 1.5], [7.0, 0.25, 9.0]])
    expected = CALLS[what](x.clone())
    with tw.aten.use("all"):
        made = CALLS[what](x.clone())
    assert not differences(made, expected, as_double(expected), 1.0)


def test_a_plan_keeps_no_tensor_alive():
    with tw.aten.use("all", include=["add.Tensor", "sum.dim_IntList", "cat"]):
        gone = []
        for _ in range(AGAIN):
            x, y = torch.ones(4, 5), torch.ones(4, 5)
            gone += [
                weakref.ref(x),
                weakref.ref(y),
                weakref.ref(x + y),
                weakref.ref(x.sum(1)),
                weakref.ref(torch.cat((x, y))),
            ]
        del x, y
        gc.collect()
        assert not any(one() is not None for one in gone)


def test_version_counters_of_plans():
    x = torch.ones(3)
    with tw.aten.use("all", include=["add_.Tensor", "exp_"]):
        for i in range(2 * AGAIN):
            assert (x.add_(1) if i % 2 else x.exp_()) is x and x._version == i + 1


def test_threads_share_plans():
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for i in range(20):
            x = torch.full((7,), float(seed), device=DEVICE)  # a default device is a thread's own
            if not torch.equal(x * i, torch.full((7,), float(seed * i), device=DEVICE)):
                wrong.append(i)

    with tw.aten.use("all", include="mul.Tensor"):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert plans("mul.Tensor") <= 1
    assert not wrong
