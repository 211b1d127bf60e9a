"""Every engine of torch's operators once past 2^31 elements: in the whole tensor, and in an index that is a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat

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
    "added": ("index_add", lambda x: x.index_add(0, torch.tensor([N - 3, 5, N - 3], device=x.device), x[:3])),
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


TALL = SIDE + 99  # rows of so many columns that some lie past 2^31 elements
NEAR = (slice(0, 3), slice(-3, None))  # lines that are compared with float64, the last of which lie there
LINES: dict[str, tuple[str, int, Callable[[Tensor], Tensor]]] = {
    "softmax": ("_softmax", 0, lambda x: x.softmax(1)),
    "softmax of columns": ("_softmax", 1, lambda x: x.softmax(0)),
    "norm": ("native_layer_norm", 0, lambda x: F.layer_norm(x, x.shape[1:])),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_past_32_bits(name):
    """The last ones are as exact as the first, and all are near aten's."""
    overload, dim, call = LINES[name]
    torch.manual_seed(0)
    x = torch.randn(TALL, SIDE, dtype=torch.bfloat16, device="cuda")
    aten = call(x)
    with tw.aten.use("all", include=[overload]):
        ours = call(x)
        assert tw.aten.report()[overload] == {"taken": 1, "declined": {}}
    for part in NEAR:
        lines = (part,) if dim == 0 else (slice(None), part)
        assert not differences(ours[lines].contiguous(), aten[lines].contiguous(), call(x[lines].double()), 2.0**-6)
    assert float(aten.sub_(ours).abs_().max()) <= 2.0**-7 * float(ours.max())


# Columns of the first matrix, whose products are one of the gemm folder, and one by tiles; and by a vector
PRODUCTS = {"large": (64, 128), "by tiles": (72, 96), "vector": (72, None)}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_past_32_bits(name):
    K, columns = PRODUCTS[name]
    torch.manual_seed(0)
    a = torch.randn(2**31 // 64 + 99, K, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(K, columns or 1, dtype=torch.bfloat16, device="cuda")
    b, overload = (b, "mm") if columns else (b[:, 0].contiguous(), "mv")
    aten = a @ b
    with tw.aten.use("all", include=[overload]):
        ours = a @ b
        assert tw.aten.report()[overload] == {"taken": 1, "declined": {}}
    for part in (slice(0, 300), slice(-300, None)):
        assert not differences(ours[part], aten[part], as_double(a[part]) @ as_double(b), 1.0)
    assert float(aten.sub_(ours).abs_().max()) <= 2.0**-6 * float(ours.max())


def test_sorted_lines_past_32_bits():
    """Of short lines so many: each is in order, and its indices say where its numbers were, the first of equals first."""
    torch.manual_seed(0)
    x = torch.randint(-100, 100, (2**31 // 64 + 99, 64), dtype=torch.int8, device="cuda")
    with tw.aten.use("all", include=["sort"]):
        values, indices = x.sort(1)
        assert tw.aten.report()["sort"]["taken"] == 1
    step = len(x) // 8 + 1
    for first in range(0, len(x), step):  # in parts, for the sake of the memory
        own, at = values[first : first + step], indices[first : first + step]
        assert torch.equal(x[first : first + step].gather(1, at), own)
        later = own[:, 1:] > own[:, :-1]
        assert bool((later | (own[:, 1:] == own[:, :-1]) & (at[:, 1:] > at[:, :-1])).all())
