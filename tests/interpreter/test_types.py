"""Plans of calls with lists and tuples of numbers, dtypes and generators among their arguments."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.interpreter.toy import Counted, launch, pair
from tilewright.op import OPS, Op, Triton

_count = itertools.count()


def reference(
    x: Tensor,
    sizes: list[int],
    flags: list[bool] | None = None,
    window: tuple[float, float] = (0.0, 1.0),
    dtype: torch.dtype | None = None,
    alpha: int | float = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """x times a number that every argument is part of."""
    return x * factor(sizes, flags, window, dtype, alpha, generator)


def factor(sizes, flags, window, dtype, alpha, generator) -> float:
    number = sum((i + 1) * size for i, size in enumerate(sizes)) + 100 * len(flags or ()) + sum(flags or ())
    number += window[0] + 2 * window[1] + (0 if dtype is None else dtype.itemsize)
    number += alpha if type(alpha) is int else 1000 * alpha
    return number + (0 if generator is None else float(torch.rand((), generator=generator)))


def forward(x, **rest):
    y = torch.empty_like(x)
    launch(x, None, y, factor(**rest))
    return y


@pytest.fixture
def toy():
    counted = Counted(forward)
    where = {"x": "float32[m n]"}
    op = Op(
        f"types_plan_toy{next(_count)}", reference, dict, Triton(counted), where=where, results={"y": "float32[m n]"}
    )
    with tw.force("triton"):
        yield op, counted
    del OPS[op.name]


CALLS = [
    {"sizes": [1, 2]}, {"sizes": [2, 1]}, {"sizes": [1, 2, 0]}, {"sizes": []}, {"sizes": [], "flags": []},
    {"sizes": [1, 2], "flags": [True]}, {"sizes": [1, 2], "flags": [False]}, {"sizes": [1, 2], "window": (0.0, 2.0)},
    {"sizes": [1, 2], "window": (2.0, 0.0)}, {"sizes": [1, 2], "dtype": torch.float32},
    {"sizes": [1, 2], "dtype": torch.float16}, {"sizes": [1, 2], "alpha": 1}, {"sizes": [1, 2], "alpha": 1.0},
]  # fmt: skip


def test_plans_are_keyed_by_every_number(toy):
    op, host = toy
    for face in (op.function, op.overloads["default"]):
        op.plans.clear()
        host.runs = 0
        for count in range(3):
            for call in CALLS:
                x, _ = pair(seed=count)
                torch.testing.assert_close(face(x, **call), reference(x, **call))
        # A call that leaves alpha out is, to the registered op, the call with its default
        assert host.runs == len(op.plans) == len(CALLS) - (face is not op.function)


def test_lists_and_tuples_of_equal_numbers_share_a_plan(toy):
    op, host = toy
    x, _ = pair()
    for sizes in ([5, 7], (5, 7), x.shape):
        torch.testing.assert_close(op(x, sizes), reference(x, [5, 7]))
    assert host.runs == 1
    with pytest.raises(TypeError, match=r"sizes\[0\] must be int, got bool"):
        op(x, [True, 7])
    op(x, [1, 7])
    with pytest.raises(TypeError, match=r"sizes\[0\] must be int, got bool"):
        op(x, [True, 7])  # which is equal to a list that has a plan
    with pytest.raises(TypeError, match=r"sizes\[0\] must be int, got float"):
        op(x, [1.0, 7])


def test_a_list_that_changes_is_another_call(toy):
    op, host = toy
    x, _ = pair()
    sizes = [1, 2]
    first = op(x, sizes)
    sizes[0] = 9
    torch.testing.assert_close(op(x, sizes), reference(x, [9, 2]))
    sizes[0] = 1
    torch.testing.assert_close(op(x, sizes), first)
    assert host.runs == 2


def test_a_generator_makes_no_plan(toy):
    op, host = toy
    x, _ = pair()
    source, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for face in (op.function, op.overloads["default"]):
        for _ in range(2):
            torch.testing.assert_close(face(x, [1], generator=source), reference(x, [1], generator=other))
    assert host.runs == 4 and not op.plans
    out = torch.empty_like(x)
    op(x, [1], generator=source, out=out)
    torch.testing.assert_close(out, reference(x, [1], generator=other))
    assert host.runs == 5 and not op.plans
