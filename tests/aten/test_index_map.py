"""Boxes and bands by tiles: what is known of rows, loops that are joined, edges that are no whole tiles, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.aten.compare import differences
from tests.aten.samples import DEVICE
from tilewright.aten import index_map, table


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr(index_map, "SMALL", 1)


@pytest.fixture
def known(monkeypatch) -> list[int]:
    """What launches here knew of rows."""
    found: list[int] = []
    launch = index_map.plans.launch

    def heard(kernel, *args, **constants):
        found.append(constants["NEAR"])
        launch(kernel, *args, **constants)

    monkeypatch.setattr(index_map.plans, "launch", heard)
    return found


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, device=DEVICE).to(dtype)


CALLS = {
    "pad all sides": (index_map.SIDE_BY_SIDE, "constant_pad_nd", lambda: (drawn(5, 70, 33), [1, 2, 3, 0, 0, 1], 7)),
    "pad in words": (index_map.IN_WORDS, "constant_pad_nd", lambda: (drawn(70, 64), [16, 32, 1, 2])),
    "pad what is turned": (index_map.EACH, "constant_pad_nd", lambda: (drawn(33, 70).t(), [1, 2])),
    "cut a side": (index_map.SIDE_BY_SIDE, "constant_pad_nd", lambda: (drawn(70, 33), [-3, 2, -1, -1])),
    "pad channels last": (
        index_map.SIDE_BY_SIDE, "constant_pad_nd", lambda: (drawn(2, 5, 6, 7).to(memory_format=torch.channels_last), [1, 1, 2, 0])
    ),
    "flip rows": (index_map.IN_WORDS, "flip", lambda: (drawn(70, 48), [0])),
    "flip odd rows": (index_map.SIDE_BY_SIDE, "flip", lambda: (drawn(3, 70, 49), [0])),
    "flip columns": (index_map.EACH, "flip", lambda: (drawn(3, 70, 49), [1, 2])),
    "flip many dimensions": (index_map.EACH, "flip", lambda: (drawn(2, 3, 2, 3, 2, 40), [0, 1, 2, 3, 4, 5])),
    "every other column": (index_map.ANY, "slice_scatter", lambda: (drawn(70, 49), drawn(70, 16), 1, 3, 35, 2)),
    "every other row": (index_map.IN_WORDS, "slice_scatter", lambda: (drawn(70, 64), drawn(16, 64), 0, 3, 35, 2)),
    "a matrix in the middle": (index_map.SIDE_BY_SIDE, "select_scatter", lambda: (drawn(3, 5, 33), drawn(3, 33), 1, 2)),
    "triangles": (index_map.IN_WORDS, "triu", lambda: (drawn(3, 70, 64), 5)),
    "odd triangles": (index_map.SIDE_BY_SIDE, "triu", lambda: (drawn(3, 70, 49), -5)),
    "triangles of what is turned": (index_map.EACH, "triu", lambda: (drawn(49, 70).t(),)),
    "a diagonal": (index_map.EACH, "diag_embed", lambda: (drawn(3, 70)[:, ::2], 2)),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_boxes_and_bands(what, known):
    near, name, make = CALLS[what]
    args = make()
    assert not differences(table.FORMS[name](*args), getattr(torch.ops.aten, name)(*args))
    assert known == [near]


@pytest.mark.parametrize("what", ["flip", "pad", "cut"])
def test_more_loops_than_a_launch_takes(what, known):
    """One for each index of the outer ones; those outside of a box have nothing of the operand."""
    x = drawn(3, 4, 3, 4, 3, 6)[..., ::2].permute(5, 0, 3, 1, 4, 2)
    name, args = {
        "flip": ("flip", (x.contiguous(), [0, 2, 4])),
        "pad": ("constant_pad_nd", (x, [1, 1] * 6, 3)),
        "cut": ("constant_pad_nd", (x, [-1, 1, 0, 1, 1, -1, 1, 1, 0, 1, -1, 2], 3)),
    }[what]
    made, aten = table.FORMS[name](*args), getattr(torch.ops.aten, name)(*args)
    assert not differences(made, aten) and 1 < len(known) <= index_map.pointwise.MOST_LAUNCHES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_every_width(dtype, known):
    x = drawn(37, 48, dtype=dtype)
    for name, args in (
        ("constant_pad_nd", (x, [1, 0, 0, 2], 1)),
        ("flip", (x, [0])),
        ("triu", (x,)),
        ("diag_embed", (x[0],)),
    ):
        assert not differences(table.FORMS[name](*args), getattr(torch.ops.aten, name)(*args)), name
    assert len(known) == 4


ODD = {
    "rows longer than a program": ("constant_pad_nd", lambda: (drawn(5, 2301), [1, 1, 1, 1], 3)),
    "one row": ("constant_pad_nd", lambda: (drawn(5000), [3, 0], 3)),
    "short rows, every loop": ("constant_pad_nd", lambda: (drawn(2, 3, 5, 40), [1, 2, 2, 0, 0, 1, 1, 0], 3)),
    "the shortest": ("constant_pad_nd", lambda: (drawn(300, 31), [1, 1, 1, 1], 3)),
    "rows from elsewhere": ("slice_scatter", lambda: (drawn(9, 7, 333), drawn(9, 2, 333), 1, 1, 6, 3)),
    "columns from elsewhere": ("slice_scatter", lambda: (drawn(9, 7, 333), drawn(9, 7, 101), 2, 1, 304, 3)),
    "backwards": ("flip", lambda: (drawn(3, 5, 451), [0, 2])),
}


@pytest.mark.parametrize("what", ODD)
def test_rows_that_are_no_whole_words(what, monkeypatch):
    launched, launch = [], index_map.plans.launch
    monkeypatch.setattr(index_map.plans, "launch", lambda k, *a, **c: (launched.append(k), launch(k, *a, **c)))
    name, make = ODD[what]
    args = make()
    assert not differences(table.FORMS[name](*args), getattr(torch.ops.aten, name)(*args))
    assert launched == [index_map.patch_odd]


def test_loops_that_go_on_are_one():
    Loop = index_map.Loop
    assert index_map.joined([Loop(4, 0, 4, 1, 1, 1), Loop(5, 0, 5, 1, 4, 4)]) == [Loop(20, 0, 20, 1, 1, 1)]
    for apart in (Loop(5, 0, 5, 1, 5, 4), Loop(5, 0, 5, 1, 4, 5), Loop(5, 1, 5, 1, 4, 4), Loop(5, 0, 5, 2, 4, 4)):
        assert len(index_map.joined([Loop(4, 0, 4, 1, 1, 1), apart])) == 2
