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
from tilewright.aten import reduction, reduction_rows
from tilewright.core.target import TARGETS, pretend
from tilewright.core.tensor import cdiv
from tilewright.runtime.kernel import collect

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
    "argmin": lambda x, d: x.argmin(d) if isinstance(d, int) or d is None else x.amax(d),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_losses_that_are_not_added_up(dtype):
    """One for each element, in aten's layout; of two shapes and two dtypes too."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 20).to(dtype), torch.randn(20, 9).to(dtype).t()
    for one, other in ((x, y), (y, y.clone()), (x[:, ::3], x[:, 1:20:3]), (x, y[:1]), (x, y[0, 0]), (x, y.double())):

        def call(a: Any = one, b: Any = other) -> Any:
            return torch.ops.aten.mse_loss(a, b, 0)

        aten, made, ran = both(call)
        assert ran and not differences(made, aten, call(one.double(), other.double()))


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


# ---- few elements ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dim", "expected"),
    [
        ((16, 128), None, (1, 4096, 16, 1, 1)),  # 4 KB of 16 bits: one tile of 16 warps
        ((2049,), None, (0, 2048, 4, 1, 1)),  # no whole words
        ((16384,), None, (1, 4096, 16, 1, 1)),  # one program takes four tiles rather than a second launch
        ((16400,), None, (1, 4096, 16, 1, 5)),
        ((65520,), None, (1, 4096, 16, 1, 16)),
        ((16, 128), 1, (0, 512, 4, 4, 1)),
        ((16, 128), 0, (0, 32, 4, 2, 1)),
        ((1 << 22,), None, (1, 2048, 8, 1, 256)),
    ],
)
def test_how_few_elements_are_taken(shape, dim, expected):
    """(which lie side by side, reduced elements of a tile, warps, programs, parts), on a chip of 132 SMs."""
    with pretend(TARGETS["sm_90"]), collect() as wanted:
        reduction_rows.sum_(torch.empty(shape, dtype=torch.bfloat16), dim)
    one = wanted[0]
    a = dict(zip(one.kernel.names, one.ordered))
    programs = cdiv(a["KEPT"], a["BLOCK_K"])
    assert (a["ALONG"], a["BLOCK_R"], one.options["num_warps"], programs, a["PARTS"]) == expected
    assert len(wanted) == (1 if a["PARTS"] == 1 else 2) and a["PARTS"] * a["PER"] >= a["REDUCED"]


@pytest.mark.parametrize("apart", [False, True], ids=["beside", "apart"])
@pytest.mark.parametrize("n", [1, 17, 4096, 4097, 16384, 20000, 65535])
def test_few_elements_that_make_one_result(n, apart):
    """One tile and several, one part and several; in whole words, in others, and with gaps."""
    torch.manual_seed(0)
    x = torch.randn(2 * n)[::2] if apart else torch.randn(n)
    x[n // 2] = 9.0
    calls = [
        torch.sum,
        torch.amax,
        torch.argmax,
        torch.count_nonzero,
        lambda t: torch.nn.functional.mse_loss(t, t.flip(0)),
    ]
    if n > 1:
        calls.append(torch.var_mean)
    for call in calls:
        aten, made, ran = both(lambda call=call: call(x))
        assert ran and not differences(made, aten, as_double(call(x.double())), LARGEST)


@pytest.mark.parametrize("shape", [(70, 40), (130, 33), (3, 5, 7)])
def test_few_elements_of_several_loops(shape):
    """Kept or reduced, of which each is divided by the sizes of others."""
    torch.manual_seed(0)
    x, dims = torch.randn(*shape, 6).movedim(0, -1)[..., ::2], tuple(range(1, len(shape) + 1))
    for dim in (dims, dims[:1], (0, *dims[1:]), None):
        for call in (torch.sum, lambda t, d: t.amax(() if d is None else d), torch.var_mean):
            aten, made, ran = both(lambda call=call, dim=dim: call(x, dim))
            assert ran and not differences(made, aten, as_double(call(x.double(), dim)), LARGEST)
