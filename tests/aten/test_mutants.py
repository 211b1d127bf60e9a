"""Deliberately broken replacements, each with the call whose comparison must notice. A net that lets one through is no net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

import tilewright as tw
from tests.aten.compare import differences
from tilewright.aten import (
    forms,
    index_add,
    index_move,
    layout,
    norm_rows,
    order,
    pointwise,
    random,
    reduction_rows,
    scan,
    table,
)
from tilewright.aten import functions as f
from tilewright.aten import sort as sorting


class Mutant(NamedTuple):
    """`name`, an attribute of `owner` or a key of it, becomes `value`; `call` is then told from aten's by something like `says`."""

    what: str
    owner: Any
    name: str
    value: Any
    call: Callable[[], Any]
    says: str


def flat_read(t: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    return layout.contiguous_strides(shape)


def crash_on_nothing(self: Tensor, *, dtype: Any = None) -> Tensor:
    return self.new_empty(()).fill_(sum(self.flatten().tolist()) / self.numel() * self.numel())


def one_further_on(x: Tensor) -> Tensor:
    """Which aten refuses: elements are read and written."""
    return x[1:].add_(x[:-1])


def all_gradients(*given: Any) -> Any:
    """Whichever are asked for."""
    return norm_rows.layer_norm_backward(*given[:-1], [True, True, True])


def of_a_sample(x: Tensor, shape: list[int], weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
    """A layer norm by the variance of a sample."""
    var, mean = torch.var_mean(x, -1, correction=1, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    return (x - mean) * rstd, mean, rstd


def layer_gradients() -> Any:
    x, rows, columns = torch.arange(12.0).view(3, 4), torch.ones(3, 1), torch.ones(4)
    return torch.ops.aten.native_layer_norm_backward(x, x, [4], rows, rows, columns, columns, [True, False, True])


def equals_turned(keys: Tensor, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Keys in order, equal ones in the other."""
    found, places = order.ordered(keys.flip(1).contiguous(), bits, signed)
    return found, keys.shape[1] - 1 - places


def without_the_last(x: Tensor, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> None:
    ADD_ROWS(x, keys[:, :-1].contiguous(), values[:-1], *rest, **named)


@triton.jit
def first_place(i, j):
    return tl.where(i < 0, j, i)


@triton.jit
def rounded_up(x):
    return libdevice.ceil(x).to(tl.int32)


ADD_ROWS = index_add.add_rows
LARGE = torch.tensor([2**40])
TIES = torch.tensor([3, 1, 3, 1, 2])
EQUALS = torch.tensor([1.0, 3.0, 3.0, 2.0])
HAS_NAN = torch.tensor([1.0, float("nan"), 2.0])
MUTANTS = [
    Mutant("an integer sum kept int32", reduction_rows, "widened", lambda self, dtype: dtype or self.dtype,
           lambda: torch.full((4,), 2**30, dtype=torch.int32).sum(), "dtype torch.int32"),
    Mutant("a flat read of a strided view", layout, "expanded", flat_read, lambda: -torch.arange(12.0)[::2],
           "values"),
    Mutant("a crash on nothing", table.FORMS, "sum", crash_on_nothing, lambda: torch.empty(0).sum(), "ZeroDivisionError"),
    Mutant("the first of equals", scan, "larger_place", first_place, lambda: EQUALS[1:].cummax(0), "values"),
    Mutant("the last of equals", reduction_rows, "MAX", replace(reduction_rows.MAX, combine=scan.last_largest),
           lambda: EQUALS.max(0), "values"),
    Mutant("a dropped NaN", reduction_rows, "AMAX", replace(reduction_rows.AMAX, combine=f.less_equal), lambda: HAS_NAN.amax(),
           "values"),
    Mutant("contiguous results", layout, "result_strides", lambda shape, *_: layout.contiguous_strides(shape),
           lambda: torch.ones(3, 4).t() + 1, "strides"),
    Mutant("a number cut to its whole part", pointwise, "bits_of", lambda value, compute: int(value), lambda: torch.ones(3) * 2.5,
           "values"),
    Mutant("an unstable sort", sorting, "ordered", equals_turned, lambda: TIES.sort(stable=True), "values"),
    Mutant("a row that is not added", index_add, "add_rows", without_the_last,
           lambda: torch.zeros(4, 2).index_add(0, TIES, torch.ones(5, 2)), "values"),
    Mutant("overlaps that are not seen", pointwise, "overlapping", lambda a, b: False, lambda: one_further_on(torch.arange(64.0)),
           "not 'RuntimeError'"),
    Mutant("a float that is rounded to an integer", f, "cut_to_int32", rounded_up, lambda: torch.tensor([2.7, -2.7]).int(),
           "values"),
    Mutant("a number that wraps around", pointwise, "cast_bits", lambda value, dtype: int(value),
           lambda: torch.zeros(2, dtype=torch.uint8).fill_(300), "not 'RuntimeError'"),
    Mutant("integers that are compared as floats", forms, "EQUAL", forms.CLOSE[False],
           lambda: torch.isclose(LARGE, LARGE + 1, 0, 0), "values"),
    Mutant("a dropped output mask", table.FORMS, "native_layer_norm_backward", all_gradients, layer_gradients, "not None"),
    Mutant("moments of a sample", table.FORMS, "native_layer_norm", of_a_sample,
           lambda: torch.native_layer_norm(torch.tensor([[0.0, 2.0, 4.0, 2.0]]), [4], None, None, 0.0)[1:], "values"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what.replace(" ", "-"))
def test_it_is_noticed(mutant, monkeypatch):
    def run() -> Any:
        try:
            return mutant.call()
        except (ZeroDivisionError, RuntimeError) as error:
            return type(error).__name__

    aten = run()
    with tw.aten.use("all"):
        assert not differences(run(), aten)
    put = monkeypatch.setitem if isinstance(mutant.owner, dict) else monkeypatch.setattr
    put(mutant.owner, mutant.name, mutant.value)
    with tw.aten.use("all"):
        found = differences(run(), aten)
    assert any(mutant.says in line for line in found), found


def test_offsets_of_32_bits_are_noticed(monkeypatch):
    """An offset that wraps lies before the memory, where the interpreter lets nobody read."""
    n = 2**31 + 5
    x = torch.empty(n, dtype=torch.uint8).as_strided((2, 3), (n - 5, 2)).fill_(1)
    own = layout.expanded

    def wrapped(t: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((s + 2**31) % 2**32 - 2**31 for s in own(t, shape))

    monkeypatch.setattr(layout, "expanded", wrapped)
    with tw.aten.use("all", include="neg"), pytest.raises(Exception, match="(?s)."):
        assert torch.equal(torch.neg(x), torch.full((2, 3), 255, dtype=torch.uint8))


def test_a_registered_composite_loses_its_gradient():
    """Which is why none is: what test_beyond asks of composites fails for one that is registered."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("tile", lambda self, dims: self.detach().repeat(dims), "CPU")
    try:
        x = torch.ones(2, requires_grad=True)
        made = torch.tile(x, (2,))
        with pytest.warns(UserWarning, match="autograd kernel"):
            made.sum().backward()
        assert x.grad is None
    finally:
        library._destroy()


@triton.jit
def unclamped(I, at, inside, n, WRAP: tl.constexpr):
    i = tl.load(I + at, inside, 0).to(tl.int64)
    return i == i, i


def test_an_index_that_is_not_clamped_is_noticed(monkeypatch):
    """The interpreter lets nobody read outside of a tensor."""
    monkeypatch.setattr(index_move, "known_index", unclamped)
    with tw.aten.use("all", include=["index_select"]), pytest.raises(Exception, match="(?s)."):
        torch.arange(12.0).view(3, 4).index_select(0, torch.tensor([2, 2**40, -7]))


def test_draws_of_another_order_are_noticed(monkeypatch):
    """Words of one call go to elements as far apart as there are threads."""
    monkeypatch.setattr(random, "advance", lambda *_: (0, 0))
    with tw.aten.use("all", include=["uniform_"]):
        right = torch.empty(2000).uniform_()
        monkeypatch.setattr(random, "threads_of", lambda *_: 256)
        assert not torch.equal(torch.empty(2000).uniform_(), right)
