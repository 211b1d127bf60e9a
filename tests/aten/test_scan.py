"""The scan engine's forms: which elements lie side by side, in whole words or not, in parts or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.aten.compare import differences
from tests.aten.test_beyond import both
from tilewright.aten import reduction, scan
from tilewright.core.tensor import cdiv


def whole(dtype: torch.dtype, *shape: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order, and among which there are equals."""
    return torch.randn(shape).round().to(dtype)


# What is made, the dimension that is scanned, and the form: which elements lie side by side, and whether in words
SHAPES: dict[str, tuple[Callable[[torch.dtype], Tensor], int, tuple[int, bool]]] = {
    "rows": (lambda t: whole(t, 3, 2064), 1, (1, True)),
    "odd rows": (lambda t: whole(t, 3, 1111), 1, (1, False)),
    "short rows": (lambda t: whole(t, 70, 20), 1, (1, False)),
    "rows of several loops": (lambda t: whole(t, 2, 3, 4, 80)[:, 1:, ::2], 3, (1, True)),
    "turned rows": (lambda t: whole(t, 150, 30).t(), 1, (0, False)),
    "columns": (lambda t: whole(t, 70, 144), 0, (2, True)),
    "odd columns": (lambda t: whole(t, 37, 131), 0, (2, False)),
    "few columns": (lambda t: whole(t, 300, 16), 0, (2, True)),
    "the middle": (lambda t: whole(t, 3, 40, 80), 1, (2, True)),
    "every second": (lambda t: whole(t, 40, 60)[:, ::2], 1, (0, False)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "parts"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.int32, True)],
    ids=["fp32", "bf16-parts", "int32-parts"],
)
@pytest.mark.parametrize("what", SHAPES)
def test_every_form(what, dtype, parts, monkeypatch):
    """With infinities, zeros of both signs and NaN."""
    make, dim, expected = SHAPES[what]
    monkeypatch.setattr(reduction, "SMALL", 0)
    monkeypatch.setattr(scan, "TILE", dict.fromkeys(scan.TILE, 512))
    if parts:  # of these few elements, every block
        cut = lambda _, n, block, unroll, *rest: (cdiv(n, block * unroll), block * unroll)  # noqa: E731
        monkeypatch.setattr(scan, "parts_of", cut)
    else:
        monkeypatch.setattr(scan, "BUSY", 0)
    seen, form_of = [], scan.form_of
    monkeypatch.setattr(scan, "form_of", lambda *a: seen.append(form_of(*a)) or seen[-1])
    torch.manual_seed(0)
    x = make(dtype)
    aten, made, ran = both(lambda: x.cumsum(dim))
    assert ran and not differences(made, aten)
    assert (seen[0].along, seen[0].even) == expected
    if dtype.is_floating_point:
        x[torch.rand(x.shape) < 0.002] = float("nan")
        x[0] = -float("inf")
        x.select(dim, 0).fill_(-0.0)
    for call in (torch.cummax, torch.cummin):
        aten, made, ran = both(lambda call=call: call(x, dim))
        assert ran and not differences(made, aten)
        assert torch.equal(made[0].signbit(), aten[0].signbit())  # of zeros too


@pytest.mark.parametrize(
    ("shape", "dim", "tile"),
    [
        ((16, 128), 1, (8, 128)),
        ((128, 16), 0, (8, 128)),
        ((300, 31), 1, (64, 32)),
        ((3, 129), 1, (4, 512)),
        ((5000,), 0, (1, 2048)),
        ((17,), 0, (64, 32)),
    ],
)
def test_tiles_of_few_elements(shape, dim, tile, monkeypatch):
    seen = []
    small_form = scan.small_form
    monkeypatch.setattr(scan, "small_form", lambda *a: seen.append(small_form(*a)) or seen[-1])
    torch.manual_seed(0)
    x = whole(torch.float32, *shape)
    for call in (torch.cumsum, torch.cummax):
        aten, made, ran = both(lambda call=call: call(x, dim))
        assert ran and not differences(made, aten)
    assert [(one.block_k, one.block_r) for one in seen] == [tile, tile]


def test_few_elements_by_parts():
    """Of one long line, of which a launch before finds the totals."""
    torch.manual_seed(0)
    x = whole(torch.float32, 60000)
    for call in (torch.cumsum, torch.cummin):
        aten, made, ran = both(lambda call=call: call(x, 0))
        assert ran and not differences(made, aten)
