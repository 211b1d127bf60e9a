"""Which bits an element's number is divided in: as many as the count of elements needs, on both sides of 2**31."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from tilewright.aten import index_add, pointwise, reduction
from tilewright.runtime.kernel import kernel

COUNTS = (6, 2**31 - 1, 2**31, 2**31 + 6, 2**33)
SIZES = ("first", "count", "n0", "n1", "n2", "s0", "s1", "s2")


@kernel(grid=lambda a: (1,), tokens=SIZES)
def offsets(OUT, first, count, n0, n1, n2, s0, s1, s2, BLOCK: tl.constexpr):
    i = first.to(tl.int64) + tl.arange(0, BLOCK)
    tl.store(OUT + tl.arange(0, BLOCK), reduction.offset(i, count, n0, n1, s0, s1, s2))


@kernel(grid=lambda a: (1,), tokens=SIZES)
def coordinates(OUT, first, count, n0, n1, n2, s0, s1, s2, BLOCK: tl.constexpr):
    i = first.to(tl.int64) + tl.arange(0, BLOCK)
    l0, l1, l2, l3 = index_add.coordinates(i, count, n0, n1, n2)
    tl.store(OUT + tl.arange(0, BLOCK), l0 * s0 + l1 * s1 + l2 * s2 + l3 * (s0 + s1 + s2))


@kernel(grid=lambda a: (1,), tokens=("first", "count", "n"))
def quotients(OUT, first, count, n, BLOCK: tl.constexpr):
    i = first.to(tl.int64) + tl.arange(0, BLOCK)
    times, left = pointwise.over(i, n, count)
    tl.store(OUT + tl.arange(0, BLOCK), times.to(tl.int64) * 16 + left)
    tl.store(OUT + BLOCK + tl.arange(0, BLOCK), tl.full([BLOCK], times.dtype.primitive_bitwidth, tl.int64))


@pytest.mark.parametrize("count", COUNTS)
def test_quotients_have_as_many_bits_as_the_count_takes(count):
    out = torch.empty(8, dtype=torch.int64)
    quotients(out, count - 4, count, 7, BLOCK=4)
    assert out.tolist() == [i // 7 * 16 + i % 7 for i in range(count - 4, count)] + [32 if count < 2**31 else 64] * 4


def at(i: int, sizes: tuple[int, ...], steps: tuple[int, ...]) -> int:
    found = 0
    for size, step in zip(sizes, steps):
        i, place = divmod(i, size)
        found += place * step
    return found + i * steps[len(sizes)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("loops", ["one", "several"])
def test_where_the_last_elements_lie(count, loops):
    """Of one loop and of several, with strides that take a product past 32 bits."""
    n0, n1, n2 = (count, 1, 1) if loops == "one" else (3, 2, 5)
    s0, s1, s2 = 7, 2**33, 2**20 + 1
    first, out = count - 4, torch.empty(4, dtype=torch.int64)
    offsets(out, first, count, n0, n1, n2, s0, s1, s2, BLOCK=4)
    assert out.tolist() == [at(first + i, (n0, n1), (s0, s1, s2)) for i in range(4)]
    coordinates(out, first, count, n0, n1, n2, s0, s1, s2, BLOCK=4)
    assert out.tolist() == [at(first + i, (n0, n1, n2), (s0, s1, s2, s0 + s1 + s2)) for i in range(4)]
