"""Rows side by side, elements in turn, and repeats: widths around a block's, counts that are no whole words, formats, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.aten.compare import differences
from tests.aten.samples import DEVICE
from tilewright.aten import copies, table

TAKEN = (torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr(copies, "SMALL", 1)
    monkeypatch.setattr(copies, "FEWEST", 1)
    monkeypatch.setattr(copies, "BLOCK", 1024)


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
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, device=DEVICE).to(dtype)


# Rows, and columns of each tensor of four bytes: narrow, one more or less than a block, several blocks, very unlike sizes, 3 and
# 5 tensors
BESIDE = {
    (1000, (33, 33)), (48, (33, 33)), (37, (1023, 1025)), (16, (1024, 1)), (21, (1, 2700)), (64, (1, 2, 3)),
    (33, (5, 16, 16, 1, 1100)), (50, (15,)), (2048, (1, 1, 1)), (96, (16, 7)), (96, (17, 17)), (600, (3, 1)),
}  # fmt: skip
# Of two tensors: the widest, the narrowest, those that fill 3/4 or all, less than a program has, a last program with one row
GATHERED = {
    (48, (31, 31)), (33, (32, 31)), (1000, (15, 15)), (96, (16, 8)), (600, (1, 2)), (257, (2, 1)), (2048, (2, 2)), (17, (14, 13)),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "sizes"), sorted(BESIDE | GATHERED))
def test_rows_side_by_side(rows, sizes, launched):
    given = [drawn(rows, size) for size in sizes]
    assert not differences(table.FORMS["cat"](given, 1), torch.cat(given, 1))
    gathered = (rows, sizes) in GATHERED
    assert launched == (["rows_gathered"] if gathered else ["rows_beside"] * ((len(sizes) + 1) // 2))


@pytest.mark.parametrize("dtype", TAKEN)
@pytest.mark.parametrize("count", [2560, 2561])
def test_every_dtype(dtype, count, launched):
    for sizes, kernel in (((1, 1), "in_turn"), ((7, 7), "rows_gathered"), ((7, 1), "rows_beside")):
        given = [drawn(count, size, dtype=dtype) for size in sizes]
        assert not differences(table.FORMS["cat"](given, -1), torch.cat(given, -1))
        assert launched.pop() == kernel and not launched


def test_other_ways_to_lie():
    """In the middle, as channels that come last, beside nothing, a part of memory; and what is left to copies of any strides: gaps,
    another order, other dtypes, whole words."""
    x, y = drawn(20, 3, 7), drawn(20, 5, 7)
    last = [drawn(4, c, 5, 6).to(memory_format=torch.channels_last) for c in (3, 2)]
    for given, dim in (
        ([x, y], 1), ([x, x[:0]], 0), ([x[:, :0], y], 1), ([torch.empty(0, device=DEVICE), x, y], 1),
        ([x[1:], y[1:]], 1), ([x[:, :, ::2]] * 2, 2),
        ([x.permute(2, 1, 0), y.permute(2, 1, 0)], 1), ([x, y.to(torch.bfloat16)], 1),
        ([drawn(20, 32), drawn(20, 16)], 1), (last, 1), ([t.repeat_interleave(2, 2) for t in last], 1),
        ([last[0]] * 2, 2), ([last[0], last[0].contiguous()], 3),
    ):  # fmt: skip
        assert not differences(table.FORMS["cat"](given, dim), torch.cat(given, dim))


# What is repeated how often, and the kernel that does it: elements side by side, of counts that are whole words or not; rows within
# and beside one another, that fill a tile or not, or are parts of longer ones; what is left to copies of any strides
REPEATS = {
    "each twice": (drawn(1600, 1), (1, 2), "in_turn"),
    "each of an odd count twice": (drawn(21, 77, 1), (1, 1, 2), "in_turn"),
    "each three times": (drawn(160, 1), (1, 3), "several_times"),
    "each of an odd count often": (drawn(161, 1), (1, 64), "several_times"),
    "rows and columns": (drawn(21, 1040), (2, 3), "tiles_again"),
    "short rows": (drawn(21, 48), (1, 2), "tiles_again"),
    "all": (drawn(1040), (3,), "tiles_again"),
    "with a dimension more": (drawn(7, 32), (2, 3, 1), "tiles_again"),
    "parts of rows": (drawn(9, 64)[:, :32], (2, 2), "tiles_again"),
    "odd rows": (drawn(9, 33), (2, 2), None),
    "columns": (drawn(32, 16).t(), (2, 2), None),
    "elements too often": (drawn(9, 1), (1, 65), None),
    "both": (drawn(32, 1), (2, 3), None),
}


@pytest.mark.parametrize("what", REPEATS)
def test_repeats(what, launched):
    x, repeats, kernel = REPEATS[what]
    for given in (x, x.to(torch.bfloat16), x > 50):
        launched.clear()
        assert not differences(table.FORMS["repeat"](given, list(repeats)), given.repeat(repeats))
        assert launched == ([kernel] if kernel else ["pointwise_tiles"])


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((3, 40, 32, 2), "in_turn"), ((3, 40, 32, 5), "several_times"), ((3, 40, 3, 32), "tiles_again")],
)
def test_clones_of_what_is_expanded(shape, kernel, launched):
    """As `repeat_interleave` makes them."""
    x = drawn(3, 40, 32)
    x = (x[..., None] if shape[2] == 32 else x[:, :, None]).expand(shape)
    assert not differences(table.FORMS["clone"](x, memory_format=torch.contiguous_format), x.contiguous())
    assert launched == [kernel]
