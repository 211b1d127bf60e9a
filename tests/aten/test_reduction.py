"""The reduction engine's forms: which elements lie side by side, in one loop or several, in whole words or not, in parts or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aten.compare import as_double, differences
from tests.aten.samples import DEVICE
from tests.aten.test_beyond import both
from tilewright.aten import reduction
from tilewright.core.tensor import cdiv

# What is made, the dimensions that are reduced, and the form: which lie side by side, kept and reduced ones of one loop, in words
SHAPES: dict[str, tuple[Callable[[torch.dtype], Tensor], Any, tuple[int, bool, bool, bool]]] = {
    "rows": (lambda t: torch.randn(5, 1152, dtype=t), 1, (1, True, True, True)),
    "odd rows": (lambda t: torch.randn(5, 1111, dtype=t), 1, (1, True, True, False)),
    "rows with gaps": (lambda t: torch.randn(5, 1152, dtype=t)[:, :1136], 1, (1, True, True, True)),
    "rows of several loops": (lambda t: torch.randn(3, 2, 5, 80, dtype=t)[:, :, 1:], 3, (1, False, True, True)),
    "long rows": (lambda t: torch.randn(2, 8208, dtype=t), 1, (1, True, True, True)),
    "short rows": (lambda t: torch.randn(70, 48, dtype=t), 1, (1, True, True, True)),
    "rows between": (lambda t: torch.randn(9, 300, dtype=t), 1, (1, True, True, False)),
    "every second": (lambda t: torch.randn(5, 400, dtype=t)[:, ::2], 1, (0, True, True, False)),
    "columns": (lambda t: torch.randn(150, 144, dtype=t), 0, (2, False, True, True)),
    "odd columns": (lambda t: torch.randn(37, 131, dtype=t), 0, (2, False, True, False)),
    "the middle": (lambda t: torch.randn(3, 40, 144, dtype=t), 1, (2, False, True, True)),
    "the middle, few columns": (lambda t: torch.randn(3, 40, 7, dtype=t), 1, (0, False, True, False)),
    "columns of two loops": (lambda t: torch.randn(3, 4, 20, 144, dtype=t), (0, 2), (2, False, False, True)),
    "columns of short loops": (lambda t: torch.randn(3, 4, 6, 144, dtype=t), (0, 2), (0, False, False, False)),
    "channels": (lambda t: torch.randn(3, 4, 11, 16, dtype=t), (0, 2, 3), (1, True, False, True)),
    "odd channels": (lambda t: torch.randn(3, 4, 9, 7, dtype=t), (0, 2, 3), (1, True, False, False)),
    "channels of whole tiles": (lambda t: torch.randn(2, 2, 4096, dtype=t), (0, 2), (1, True, False, True)),
    "columns of whole tiles": (lambda t: torch.randn(2, 2, 32, 144, dtype=t), (0, 2), (2, False, False, True)),
    "channels of two loops": (lambda t: torch.randn(2, 3, 4, 5, 80, dtype=t)[:, :, ::2], (1, 4), (1, False, False, True)),
    "all": (lambda t: torch.randn(5000, dtype=t), None, (1, True, True, False)),
    "all, turned": (lambda t: torch.randn(60, 80, dtype=t).t(), None, (1, True, True, True)),
}  # fmt: skip
ROWS: dict[str, Callable[[Tensor, Any], Any]] = {
    "sum": lambda x, d: x.sum(d),
    "amax": lambda x, d: x.amax(() if d is None else d),
    "var_mean": lambda x, d: torch.var_mean(x, d),
    "count_nonzero": lambda x, d: torch.count_nonzero(x, d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "max": lambda x, d: x.max(d) if isinstance(d, int) else x.amax(() if d is None else d),
    "argmin": lambda x, d: x.argmin(d) if isinstance(d, int) or d is None else x.amin(d),
}
LARGEST = 4.0  # of the variances: a mean is as exact as the elements about it
if DEVICE != "cpu":  # which compiles for each: one, three and two states
    ROWS = {name: ROWS[name] for name in ("sum", "var_mean", "argmin")}


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("what", SHAPES)
def test_every_form(what, dtype, parts, monkeypatch):
    make, dim, expected = SHAPES[what]
    monkeypatch.setattr(reduction, "SMALL", 0)
    monkeypatch.setattr(reduction, "BUSY", 0)
    if parts:  # of these few elements, every tile
        monkeypatch.setattr(reduction, "parts_of", lambda _, reduced, block, *rest: (cdiv(reduced, block), block))
    seen, form_of = [], reduction.form_of
    monkeypatch.setattr(reduction, "form_of", lambda *a: seen.append(form_of(*a)) or seen[-1])
    torch.manual_seed(0)
    x = make(dtype)
    for name, call in ROWS.items():
        aten, made, ran = both(lambda call=call: call(x, dim))
        exact = as_double(call(x.double(), dim))
        # A GPU adds in another order than aten, to sums as large as a norm on the way, of which little may be left
        scale = LARGEST if name == "var_mean" else float(x.double().norm()) if DEVICE != "cpu" else 0.0
        assert ran and not differences(made, aten, exact, scale), name
    assert seen[0][:4] == expected


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("n", [48, 1000])
def test_two_operands(n, turned, monkeypatch):
    """Of which the second lies as the first does, or otherwise."""
    monkeypatch.setattr(reduction, "SMALL", 0)
    torch.manual_seed(0)
    x, y = torch.randn(20, n), torch.randn(n, 20).t() if turned else torch.randn(20, n)
    call = torch.nn.functional.mse_loss
    aten, made, ran = both(lambda: call(x, y))
    assert ran and not differences(made, aten, call(x.double(), y.double()), 10.0)


@pytest.mark.parametrize("n", [5, 1030])
def test_moments_of_nan_and_of_large_numbers(n, monkeypatch):
    """In tiles that are not whole: columns that met nothing, far from the mean, add nothing."""
    monkeypatch.setattr(reduction, "SMALL", 0)
    x = torch.full((4, n), 3e38)
    x[1] = 1e20
    x[2, n // 2] = float("nan")
    aten, made, ran = both(lambda: torch.var_mean(x, 1))
    assert ran and torch.equal(made[0].isnan(), aten[0].isnan()) and torch.equal(made[1].isnan(), aten[1].isnan())
    assert not made[0][[0, 1, 3]].any() and torch.allclose(made[1][[0, 1, 3]], x[[0, 1, 3], 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("shape", "dim"), [((3, 8208), 1), ((300, 144), 0)], ids=["rows", "columns"])
def test_the_first_of_equals_and_of_nans(shape, dim, dtype, monkeypatch):
    """With infinities and zeros of both signs. A GPU meets such elements two at a time."""
    monkeypatch.setattr(reduction, "SMALL", 0)
    torch.manual_seed(0)
    x = torch.randn(shape).round().to(dtype)
    lines = x.movedim(dim, -1)
    lines[0] = -lines[0].abs()
    lines[0, ::7], lines[0, 3] = 0.0, -0.0
    lines[1, 50:], lines[2] = float("nan"), float("inf")
    for call in (torch.max, torch.min):
        aten, made, ran = both(lambda call=call: call(x, dim))
        assert ran and not differences(made, aten)
        assert torch.equal(made[0].signbit(), aten[0].signbit())
    for call in (torch.argmax, torch.argmin):
        aten, made, ran = both(lambda call=call: call(x, dim))
        assert ran and torch.equal(made[0], aten[0])
