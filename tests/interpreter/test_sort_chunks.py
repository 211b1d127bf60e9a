"""What `sort_chunks` promises beyond the properties of every op: whole chunks of any bytes, and what bad sizes and orders do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.oracle import same_bits


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def chunks_in_order(x: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """By walking through the chunks; what `x` has not is cut off, what is left of the result is 0."""
    at, parts = 0, []
    for size in sizes:
        parts.append(x[at : at + max(0, size)])
        at += max(0, size)
    seen: list[int] = []
    for c in order:
        if 0 <= c < len(sizes) and c not in seen:
            seen.append(c)
    made = torch.cat([x[:0], *(parts[c] for c in seen)])
    return torch.cat([made, torch.zeros_like(x[: x.shape[0] - made.shape[0]])])


DTYPES = (torch.float8_e4m3fn, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_every_size(dtype):
    """NaN, -0 and subnormals too are moved as they are."""
    width = 5 * dtype.itemsize
    x = torch.randint(256, (23, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    x = (x % 2 if dtype == torch.bool else x).view(dtype)
    sizes, order = [4, 0, 9, 3], [2, 3, 1, 0]
    made, ones = tw.sort_chunks(x, torch.tensor(sizes), torch.tensor(order))
    assert made.dtype == dtype
    wanted = chunks_in_order(x.view(torch.uint8), sizes, order)
    same_bits(str(dtype), made.view(torch.uint8), wanted)
    assert ones.tolist() == [1.0] * 16 + [0.0] * 7
    with tw.force("reference"):
        same_bits("reference", tw.sort_chunks(x, torch.tensor(sizes), torch.tensor(order))[0].view(torch.uint8), wanted)


BAD = {
    "negative size": ([3, -7, 2, 4], [3, 2, 1, 0]),
    "sizes above the rows": ([9, 5, 2**40, 4], [1, 2, 3, 0]),
    "all too large": ([2**62] * 4, [1, 0, 2, 3]),
    "order outside": ([4, 3, 2, 1], [2, -1, 4, 0]),
    "order far outside": ([4, 3, 2, 1], [2**40, 1, -(2**63), 0]),
    "a chunk named twice": ([4, 3, 2, 1], [1, 3, 1, 1]),
    "no chunks": ([], []),
}


@pytest.mark.parametrize("sizes, order", BAD.values(), ids=list(BAD))
def test_bad_sizes_and_orders_have_a_meaning(sizes, order):
    """That of the docstring, forward and backward; a NaN goes with its own row."""
    x = torch.randn(13, 6, generator=torch.Generator().manual_seed(1))
    x[2, 3] = float("nan")
    probs = torch.rand(13, generator=torch.Generator().manual_seed(2))
    given = torch.tensor(sizes, dtype=torch.int64), torch.tensor(order, dtype=torch.int64)
    dy, dprob = torch.randn(13, 6, generator=torch.Generator().manual_seed(3)), torch.arange(13.0)

    def all_of(x: Tensor, probs: Tensor) -> list[Tensor]:
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        made = tw.sort_chunks(leaves[0], *given, leaves[1])
        return [t.detach() for t in (*made, *torch.autograd.grad(made, leaves, (dy, dprob)))]

    found = all_of(x, probs)
    same_bits("rows", found[0], chunks_in_order(x, sizes, order))
    same_bits("row_probs", found[1], chunks_in_order(probs, sizes, order))
    with tw.force("reference"):
        for name, mine, there in zip(("rows", "row_probs", "d_x", "d_probs"), found, all_of(x, probs)):
            same_bits(name, mine, there)


def test_more_chunks_than_one_step_of_the_table_has():
    source = torch.Generator().manual_seed(4)
    sizes = torch.randint(2, (2500,), generator=source, dtype=torch.int32)
    order = torch.randperm(2500, generator=source).to(torch.int32)
    x = torch.arange(1300, dtype=torch.int64)[:, None]
    made, _ = tw.sort_chunks(x, sizes, order)
    same_bits("rows", made, chunks_in_order(x, sizes.tolist(), order.tolist()))


def test_debugging_names_what_is_wrong(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    x = torch.zeros(5, 2)
    tw.sort_chunks(x, torch.tensor([2, 3]), torch.tensor([1, 0]))
    for sizes, order, name in (([2, -1], [1, 0], "sizes"), ([3, 3], [1, 0], "sizes"), ([2, 3], [1, 1], "order")):
        with pytest.raises(ValueError, match=f"sort_chunks: {name}"):
            tw.sort_chunks(x, torch.tensor(sizes), torch.tensor(order))
