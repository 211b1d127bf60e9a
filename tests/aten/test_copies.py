"""Rows side by side, and elements in turn: widths around a block's, counts that are no whole words, formats, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.aten.compare import differences
from tilewright.aten import copies, table

TAKEN = (torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr(copies, "SMALL", 1)
    monkeypatch.setattr(copies, "BLOCK", 256)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of kernels that are launched here."""
    names: list[str] = []
    launch = copies.plans.launch

    def heard(kernel, *args, **constants):
        names.append(kernel.name)
        launch(kernel, *args, **constants)

    monkeypatch.setattr(copies.plans, "launch", heard)
    return names


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


# Rows, and columns of each tensor: narrow, one more or less than a block, several blocks, of very unlike sizes, 3 and 5 tensors
ROWS = {
    (1000, (33, 33)), (48, (33, 33)), (37, (255, 257)), (16, (256, 1)), (21, (1, 700)), (64, (1, 2, 3)), (33, (5, 16, 16, 1, 300)),
    (50, (15,)), (512, (1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "sizes"), sorted(ROWS))
def test_rows_side_by_side(rows, sizes, launched):
    given = [drawn(rows, size) for size in sizes]
    assert not differences(table.FORMS["cat"](given, 1), torch.cat(given, 1))
    assert launched == ["rows_beside"] * ((len(sizes) + 1) // 2)


@pytest.mark.parametrize("dtype", TAKEN)
@pytest.mark.parametrize("count", [640, 641])
def test_elements_in_turn(dtype, count, launched):
    given = [drawn(count, 1, dtype=dtype) for _ in range(2)]
    assert not differences(table.FORMS["cat"](given, 1), torch.cat(given, 1))
    assert launched == ["in_turn"]
    wide = [drawn(count, 7, dtype=dtype) for _ in range(2)]
    assert not differences(table.FORMS["cat"](wide, -1), torch.cat(wide, -1))


def test_other_ways_to_lie():
    """In the middle, as channels that come last, beside nothing, a part of memory; and what is left to copies of any strides: gaps,
    another order, other dtypes, whole words."""
    x, y = drawn(20, 3, 7), drawn(20, 5, 7)
    last = [drawn(4, c, 5, 6).to(memory_format=torch.channels_last) for c in (3, 2)]
    for given, dim in (
        ([x, y], 1), ([x, x[:0]], 0), ([x[:, :0], y], 1), ([torch.empty(0), x, y], 1), ([x[1:], y[1:]], 1), ([x[:, :, ::2]] * 2, 2),
        ([x.permute(2, 1, 0), y.permute(2, 1, 0)], 1), ([x, y.to(torch.bfloat16)], 1),
        ([drawn(20, 32), drawn(20, 16)], 1), (last, 1), ([t.repeat_interleave(2, 2) for t in last], 1),
        ([last[0]] * 2, 2), ([last[0], last[0].contiguous()], 3),
    ):  # fmt: skip
        assert not differences(table.FORMS["cat"](given, dim), torch.cat(given, dim))
