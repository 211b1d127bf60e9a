"""The language under the corrected interpreter: what kernels here lean on, and what it refuses to let pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.interpreter.values import BF16, E4M3, E5M2, F16, F32, same
from tilewright.toolchain import interpret

interpret.install()
pytestmark = pytest.mark.smoke


@triton.jit
def shape_kernel(X, TURNED, PAIRS, LEFT, RIGHT, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(X + m[:, None] * N + n[None, :], cache_modifier=".cg", eviction_policy="evict_first")
    tl.store(TURNED + n[:, None] * M + m[None, :], tl.trans(x), eviction_policy="evict_last")
    tl.store(TURNED + n[:, None] * M + m[None, :], x.T, cache_modifier=".cs")
    left, right = tl.split(tl.reshape(x, (M, N // 2, 2)))
    half = m[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :]
    tl.store(LEFT + half, left)
    tl.store(RIGHT + half, right)
    pairs = tl.join(right, left).reshape(M, N)
    tl.store(PAIRS + m[:, None] * N + n[None, :], pairs)


@pytest.mark.parametrize("dtype", [F32, BF16, E4M3], ids=str)
def test_shapes(dtype):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(7)).to(dtype)
    turned, pairs = torch.empty(32, 16, dtype=dtype), torch.empty(16, 32, dtype=dtype)
    left, right = torch.empty(16, 16, dtype=dtype), torch.empty(16, 16, dtype=dtype)
    shape_kernel[(1,)](x, turned, pairs, left, right, M=16, N=32)
    same(turned, x.T.contiguous())
    same(left, x[:, ::2].contiguous())
    same(right, x[:, 1::2].contiguous())
    same(pairs, torch.stack([x[:, 1::2].view(torch.uint8), x[:, ::2].view(torch.uint8)], -1).reshape(16, 32).view(dtype)
         if dtype == E4M3 else torch.stack([x[:, 1::2], x[:, ::2]], -1).reshape(16, 32))  # fmt: skip


@triton.jit
def atomic_kernel(X, INDEX, MAX, SUM, FLAG, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(INDEX + at)
    tl.atomic_max(MAX + index, tl.load(X + at), mask=at % 7 != 0)
    tl.atomic_add(SUM + index, tl.load(X + at).to(tl.float32), sem="relaxed")
    tl.atomic_cas(FLAG, 0, tl.program_id(0) + 1)


def test_atomics():
    g = torch.Generator().manual_seed(8)
    x = torch.randint(-1000, 1000, (256,), generator=g, dtype=torch.int32)
    index = torch.randint(0, 8, (256,), generator=g)
    biggest, total, flag = (
        torch.full((8,), -(2**31), dtype=torch.int32),
        torch.zeros(8),
        torch.zeros(1, dtype=torch.int32),
    )
    atomic_kernel[(4,)](x, index, biggest, total, flag, BLOCK=64)
    kept = torch.arange(256) % 7 != 0
    expected = torch.full((8,), -(2**31), dtype=torch.int32).scatter_reduce(0, index[kept], x[kept], "amax")
    assert torch.equal(biggest, expected)
    assert torch.equal(total, torch.zeros(8).scatter_add(0, index, x.float()))
    assert flag.item() == 1


@triton.jit
def square(x):
    return x * x


@triton.jit
def twice(x, INNER: tl.constexpr):
    return INNER(x) + INNER(x)


@triton.jit
def scaled(parts, factor):
    first, second = parts
    return (first * factor, second + parts[0])


@triton.jit
def feature_kernel(X, W, OUT, N, eps, flag, ACT: tl.constexpr, OUTER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(X + at, mask=inside, other=0.0)
    w = None
    if W is not None:
        w = tl.load(W + at, mask=inside, other=0.0)
    pair = (ACT(x), x)
    first, second = scaled(pair, 3.0)
    y = OUTER(first, ACT) + second + eps
    if w is not None and N > 2:
        y = y * w
    if not flag:
        y = y + 1.0
    tl.store(OUT + at, y, mask=inside)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_injected_functions_tuples_and_optional_pointers(weight, flag):
    g = torch.Generator().manual_seed(9)
    x, w = torch.randn(13, generator=g), torch.randn(13, generator=g) if weight else None
    out = torch.empty(13)
    feature_kernel[(1,)](x, w, out, 13, 0.25, flag, ACT=square, OUTER=twice, BLOCK=16)
    first = x * x * 3
    expected = first * first + first * first + (x + x * x) + 0.25
    expected = expected * w if weight else expected
    assert torch.equal(out, expected if flag else expected + 1)


@triton.jit
def loop_kernel(X, OUT, N, STEPS, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    count = 0
    for i in range(0, tl.cdiv(N, BLOCK)):
        at = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(X + at, mask=at < N, other=0.0)
        count += 1
    for start in tl.range(0, N, BLOCK, num_stages=2, flatten=True):
        count += (start >= 0).to(tl.int32)
    for j in tl.static_range(2):
        count += j
    k = tl.load(STEPS)
    while k > 0:
        k -= 1
        count += 100
    for _ in range(tl.load(STEPS)):
        count += 1000
    tl.store(OUT, tl.sum(total, 0) + count)


def test_loops_over_runtime_bounds():
    x, out = torch.ones(37), torch.empty(1)
    loop_kernel[(1,)](x, out, 37, torch.tensor([3], dtype=torch.int64), BLOCK=16)
    assert out.item() == 37 + 3 + 3 + 1 + 300 + 3000


@triton.jit
def row_kernel(X, OUT, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    at = tl.arange(0, BLOCK)
    tl.store(OUT + row * BLOCK + at, tl.load(X + row * stride + at))


def test_offsets_past_32_bits():
    stride = 2**30 + 8
    x = torch.empty(3 * stride, dtype=torch.int8).as_strided((3, 8), (stride, 1))
    x.copy_(torch.arange(24).reshape(3, 8))
    out = torch.zeros(3, 8, dtype=torch.int8)
    row_kernel[(3,)](x, out, stride, BLOCK=8, WIDE=True)
    assert torch.equal(out, x)
    with pytest.raises(InterpreterError, match="outside every tensor argument"):
        row_kernel[(3,)](x, out, stride, BLOCK=8, WIDE=False)


@triton.jit
def copy_kernel(X, OUT, N, BLOCK: tl.constexpr, MASK_LOAD: tl.constexpr, MASK_STORE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N) if MASK_LOAD else tl.load(X + at)
    tl.store(OUT + at, x, mask=at < N) if MASK_STORE else tl.store(OUT + at, x)


def test_access_outside_the_arguments_raises():
    # both lie inside a larger storage, so that nothing but the view's own extent can tell
    x, out = torch.arange(64.0)[8:18], torch.full((64,), -1.0)[8:18]
    copy_kernel[(1,)](x, out, 10, BLOCK=16, MASK_LOAD=True, MASK_STORE=True)
    assert torch.equal(out, x)
    for mask_load in (True, False):
        with pytest.raises(InterpreterError, match="past the end of") as error:
            copy_kernel[(1,)](x, out, 10, BLOCK=16, MASK_LOAD=mask_load, MASK_STORE=False)
        assert ("store" if mask_load else "load") in str(error.value)
    assert torch.equal(out._base[18:], torch.full((46,), -1.0))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, E5M2, torch.int32, torch.int64], ids=str)
def test_masked_lanes_without_other_are_poisoned(dtype):
    out = torch.zeros(16, dtype=dtype)
    copy_kernel[(1,)](torch.ones(10).to(dtype), out, 10, BLOCK=16, MASK_LOAD=True, MASK_STORE=False)
    assert (out[:10].float() == 1).all()
    if dtype.is_floating_point:
        assert out[10:].float().isnan().all()
    else:
        assert (out[10:] < -(2**16)).all()


@triton.jit
def scalar_kernel(X, OUT, eps, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, (tl.load(X + at) * eps).to(tl.float64))


def test_float_arguments_are_float32():
    x = torch.full((16,), 3.0, dtype=F16)
    out = torch.empty(16, dtype=torch.float64)
    scalar_kernel[(1,)](x, out, 0.1, BLOCK=16)
    assert (out == float(np.float32(3.0) * np.float32(0.1))).all()


@triton.jit
def order_kernel(COUNTER, OUT):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(OUT + program, tl.atomic_add(COUNTER, 1))


def test_reversed_programs():
    out = torch.empty(6, dtype=torch.int32)
    order_kernel[(2, 3)](torch.zeros(1, dtype=torch.int32), out)
    assert out.tolist() == [0, 1, 2, 3, 4, 5]
    with interpret.reversed_programs():
        order_kernel[(2, 3)](torch.zeros(1, dtype=torch.int32), out)
    assert out.tolist() == [5, 4, 3, 2, 1, 0]


@triton.jit
def misc_kernel(X, HIST, SORTED, ONES, LOGIC, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at)
    tl.store(HIST + tl.arange(0, 4), tl.histogram(x, 4))
    tl.store(SORTED + at, tl.sort(x))
    tl.store(ONES + at, tl.full((BLOCK,), 1.5, ONES.dtype.element_ty))
    tl.store(LOGIC + at, (x > 0 and x < 3) or not (x < 4))


def test_histogram_sort_constants_and_logic():
    x = torch.tensor([0, 5, 1, 1, 3, 2, 2, 2], dtype=torch.int32)
    hist, ordered = torch.empty(4, dtype=torch.int32), torch.empty_like(x)
    ones, logic = torch.empty(8, dtype=BF16), torch.empty(8, dtype=torch.bool)
    misc_kernel[(1,)](x, hist, ordered, ones, logic, BLOCK=8)
    assert hist.tolist() == [1, 2, 3, 1]
    assert torch.equal(ordered, x.sort().values)
    assert (ones == 1.5).all()
    assert torch.equal(logic, ((x > 0) & (x < 3)) | (x >= 4))


def test_the_language_is_restored_after_a_launch_and_after_a_failure():
    before = tl.load
    with pytest.raises(InterpreterError):
        copy_kernel[(1,)](torch.ones(4), torch.ones(4), 4, BLOCK=16, MASK_LOAD=False, MASK_STORE=False)
    assert tl.load is before
    with pytest.raises(RuntimeError, match="square is a device function"):
        square(2)
