"""Every engine of torch's operators once past 2^31 elements: in the whole tensor, and in an index that is a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import flat

pytestmark = pytest.mark.gpu
SIDE = 46_341  # of the smallest square matrix with more than 2^31 elements
N = SIDE**2 + 77  # elements, of one byte each
CALLS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "flat": ("neg", torch.neg),
    "rows": ("add.Tensor", lambda x: x[: SIDE**2].view(SIDE, SIDE) + x[:SIDE]),
    "turned": ("clone", lambda x: x[: SIDE**2].view(SIDE, SIDE).t().contiguous()),
    "triangle": ("triu", lambda x: x[: SIDE**2].view(SIDE, SIDE).triu()),
    "flip": ("flip", lambda x: x.flip(0)),
    "cat": ("cat", lambda x: torch.cat((x[: N // 2], x[N // 2 :], x[:9]))),
    "pad": ("constant_pad_nd", lambda x: torch.nn.functional.pad(x, (3, 5))),
    "sum": ("sum", torch.sum),
    "last": ("argmax", torch.argmax),
    "outer": ("sum.dim_IntList", lambda x: x[: SIDE**2].view(SIDE, SIDE).sum(0)),
    "scan": ("cumsum", lambda x: x.cumsum(0, dtype=torch.int8)),
    "taken": ("index_select", lambda x: x.index_select(0, torch.tensor([N - 3, 5, N - 1, N // 2], device=x.device))),
    "scan of columns": ("cumsum", lambda x: x[: SIDE**2].view(SIDE, SIDE).cumsum(0, dtype=torch.int8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_past_32_bits(name):
    overload, call = CALLS[name]
    torch.manual_seed(0)
    x = torch.randint(-100, 100, (N,), dtype=torch.int8, device="cuda")
    x[-3] = 101  # where an index needs more than 32 bits
    aten = flat(call(x))
    with tw.aten.use("all"):
        ours = flat(call(x))
        assert tw.aten.report()[overload]["taken"], tw.aten.report()[overload]
    for own, other in zip(ours, aten, strict=True):
        assert own.dtype == other.dtype and own.stride() == other.stride()
        assert torch.equal(own, other)


def test_a_row_of_many_and_its_largest():
    """Values and indices of a scan that are found past 2^31."""
    x = torch.zeros(N, dtype=torch.int8, device="cuda")
    x[-3] = 1
    with tw.aten.use("all", include=["cummax"]):
        values, indices = x.cummax(0)
        assert tw.aten.report()["cummax"]["taken"]
    assert values[-4:].tolist() == [0, 1, 1, 1] and indices[-4:].tolist() == [N - 4, N - 3, N - 3, N - 3]
    assert int(indices[2**31 - 9]) == 2**31 - 9  # of equals, the last


def test_what_is_selected_past_32_bits():
    """aten refuses some of it: places are known here."""
    x = torch.zeros(N, dtype=torch.int8, device="cuda")
    places = [0, 7, 2**31 - 1, 2**31, N - 1]
    x[places] = torch.arange(1, 6, dtype=torch.int8, device="cuda")
    with tw.aten.use("all", include=["index"]):
        assert x.nonzero().flatten().tolist() == places
        assert x.masked_select(x > 0).tolist() == [1, 2, 3, 4, 5]
        turned = x[: SIDE**2].view(SIDE, SIDE).t()  # of two loops, which elements' numbers are divided by
        assert turned.nonzero().tolist() == sorted([p % SIDE, p // SIDE] for p in places if p < SIDE**2)
        said = tw.aten.report()
    assert said["nonzero"]["taken"] == 2 and said["masked_select"]["taken"] == 1
