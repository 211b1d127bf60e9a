"""Which dtypes are ours: of every overload a plain call with each dtype, and in no other than these is one left to aten."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat
from tests.aten.declined import GPU_ONLY, REFUSED_OF, declined
from tests.aten.samples import DEVICE
from tests.aten.test_opinfo import scale
from tilewright.aten import table
from tilewright.aten.row import TAKEN
from tilewright.aten.table import overload_of
from tilewright.bench import tried
from tilewright.check.provided.aten import aten_of, blank, call_as, copied, exact_of, written

DTYPES = sorted(TAKEN, key=str)
NAMES = sorted(table.FORMS)
FIRST = ("sort", "topk")  # of whose results the second may be the place of another of equals


def test_what_is_declined_is_in_the_table_and_nothing_else():
    """With the very reason."""
    assert {name: tried.declines(name) for name in NAMES} == {name: declined(name) for name in NAMES}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, least: int = 0) -> Tensor:
    """Small numbers, of which none is 0 but bools, if these may be."""
    if dtype.is_floating_point:
        return (torch.rand(shape, device=DEVICE) + 0.5).to(dtype)
    ends = (least, 2) if dtype == torch.bool else (1, 9)
    return torch.randint(*ends, shape, device=DEVICE).to(dtype)


def dtypes_of(name: str) -> list[torch.dtype]:
    """Every one, or on a GPU, which compiles for each, two in turn."""
    at = NAMES.index(name)
    return DTYPES if DEVICE == "cpu" else [DTYPES[(2 * at + turn) % len(DTYPES)] for turn in range(2)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What torch says of tensors of complex halves, and of `reduce`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_that_aten_takes(name):
    """Is ours and gives aten's numbers, but for those in the table, which are aten's."""
    wrong: list[str] = []
    alone = aten_of(name, DEVICE) is not overload_of(name)  # aten has no kernel that a call could be left to
    for dtype in dtypes_of(name):
        reason = declined(name).get(dtype)
        if reason is not None and alone:
            continue
        torch.manual_seed(0)
        args, kwargs = call_as(name, dtype, partial(drawn, least=int(name == "remainder.Scalar_Tensor")))
        try:
            expected = written(name, aten_of(name, DEVICE)(*copied(args), **copied(kwargs)))
        except (RuntimeError, NotImplementedError, ZeroDivisionError):
            if DEVICE == "cpu" and dtype not in {*declined(name), *GPU_ONLY.get(name, ())}:
                wrong.append(f"{dtype}: aten refuses it, and ours does not")
            continue
        if DEVICE == "cpu" and dtype in {*REFUSED_OF.get(name, ()), *GPU_ONLY.get(name, ())}:
            wrong.append(f"{dtype}: aten takes it, which the table does not know")
        own, named = copied(args), copied(kwargs)
        with tw.aten.use("all", include=[name]):
            made = written(name, overload_of(name)(*own, **named))
            said = tw.aten.report()[name]
        if said != ({"taken": 1, "declined": {}} if reason is None else {"taken": 0, "declined": {reason: 1}}):
            wrong.append(f"{dtype}: {said}, and the table has {reason!r}")
        if reason is None:
            found = unlike(name, made, expected, args, kwargs)
            wrong += [f"{dtype}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """What integers become where they become floats."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def unlike(name: str, made: Any, expected: Any, args: list[Any], kwargs: dict[str, Any]) -> list[str]:
    if table.ENGINE[name] in ("random", "attention"):  # whose values other tests are about; the latter has one dtype
        made, expected = blank(made), blank(expected)
    if name.partition(".")[0] in FIRST:
        made, expected = made[0], expected[0]
    truth = None
    if differences(made, expected):
        with contextlib.suppress(RuntimeError), in_float64():  # but of dtypes that no longer agree
            truth = written(name, exact_of(name, DEVICE)(*as_double(copied(args)), **as_double(copied(kwargs))))
            truth = truth[0] if name.partition(".")[0] in FIRST else truth
    packet = name.partition(".")[0].removesuffix("_")
    return differences(made, expected, truth, scale(packet, flat([*args, *kwargs.values()])))
