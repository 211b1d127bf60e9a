"""The corrected interpreter against torch: every bf16 and fp16 value through every cast, bf16 arithmetic, reductions,
and the language features that kernels here lean on."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tilewright.core import emulate, interpret

NAMES = interpret.install()
pytestmark = pytest.mark.smoke

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = [BF16, F16, F32, E4M3, E5M2]
TOP = {E4M3: 448.0, E5M2: 57344.0}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a type of up to 16 bits; of float32, every bf16 value with its neighbours and every FP8 tie."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    high = torch.arange(65536, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] + low).reshape(-1)
    codes = torch.cat([every_value(t).float() for t in (E4M3, E5M2)])
    codes = codes[codes.isfinite()].sort().values
    ties = ((codes[1:].double() + codes[:-1].double()) / 2).float()
    near = torch.cat([torch.nextafter(ties, torch.tensor(s)) for s in (float("inf"), float("-inf"))])
    return torch.cat([torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(F32), ties, near])


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, except that any NaN stands for any other."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.dtype.is_floating_point:
        nan = expected.float().isnan()
        assert torch.equal(actual.float().isnan(), nan)
        view = BITS[expected.dtype.itemsize]
        actual, expected = actual.view(view)[~nan], expected.view(view)[~nan]
    assert torch.equal(actual, expected)


def as_gpu(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's cast, with FP8 saturating as the hardware's does."""
    if dtype in TOP and dtype != x.dtype:
        x = x.float()
        x = torch.where(x.isnan(), x, x.clamp(-TOP[dtype], TOP[dtype]))
    return x.to(dtype)


@triton.jit
def cast_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(Y + at, x.to(Y.dtype.element_ty), mask=at < N)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(triton.cdiv(x.numel(), 65536),)](x, out, x.numel(), BLOCK=65536)
    return out


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_cast_of_every_value(source, target):
    x = every_value(source)
    same(cast(x, target), as_gpu(x, target))


def test_cast_between_floats_and_integers():
    whole = torch.arange(-70000, 70000, dtype=torch.int32)
    same(cast(whole, BF16), whole.to(F32).to(BF16))
    big = [2**31 - 1, -(2**31), 2**24 + 1, 2**24 + 2**16, 2**24 + 2**16 + 1]  # the last: a tie only after float32
    same(cast(torch.tensor(big, dtype=torch.int32), BF16), torch.tensor(round_to(big, 8)).to(BF16))
    same(cast(whole, F32), whole.to(F32))
    same(cast(whole > 0, BF16), (whole > 0).to(BF16))
    x = torch.tensor([0.0, -0.9, 1.9, -7.5, 2147483520.0, 3e9, -3e9, float("inf"), float("-inf"), float("nan")])
    limit = 2**31
    expected = [0, 0, 1, -7, 2147483520, limit - 1, -limit, limit - 1, -limit, 0]
    same(cast(x, torch.int32), torch.tensor(expected, dtype=torch.int32))
    big = torch.tensor([1e30, -1e30, 2.0**62, float("nan")])
    same(cast(big, torch.int64), torch.tensor([2**63 - 1, -(2**63), 2**62, 0]))


@triton.jit
def cast_toward_zero(X, Y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at).to(Y.dtype.element_ty, fp_downcast_rounding="rtz"))


def test_cast_toward_zero():
    x = every_value(F32)[:262144]
    out = torch.empty(x.shape, dtype=BF16)
    cast_toward_zero[(1,)](x, out, BLOCK=262144)
    kept = (x.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    same(out, torch.where(x.isnan(), x, kept.float()).to(BF16))


BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x.float() / y.float(),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "both": lambda x, y: ((x < y) & (x > -1)) | (y != y),
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
}


@triton.jit
def binary_kernel(X, Y, OUT, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(X + at), tl.load(Y + at)
    if OP == "add":
        out = x + y
    elif OP == "sub":
        out = x - y
    elif OP == "mul":
        out = x * y
    elif OP == "div":
        out = x / y
    elif OP == "lt":
        out = x < y
    elif OP == "le":
        out = x <= y
    elif OP == "gt":
        out = x > y
    elif OP == "ge":
        out = x >= y
    elif OP == "eq":
        out = x == y
    elif OP == "ne":
        out = x != y
    elif OP == "both":
        out = ((x < y) & (x > -1)) | (y != y)
    elif OP == "neg":
        # written out: triton 3.6 gives 0 - x for -x, and so +0 for 0
        out = x * -1.0
    else:
        out = tl.abs(x)
    tl.store(OUT + at, out)


@pytest.mark.parametrize("name", BINARY)
def test_bf16_binary_over_every_value(name):
    x = every_value(BF16)
    special = torch.tensor([0.0, -0.0, 1.0, -3.0, 1e-40, 3e38, float("inf"), float("nan")], dtype=BF16)
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(1))
    y = torch.cat([special.repeat_interleave(65536), x[order]])
    x = x.repeat(len(special) + 1)
    expected = BINARY[name](x, y)
    out = torch.empty(expected.shape, dtype=expected.dtype)
    binary_kernel[(len(special) + 1,)](x, y, out, OP=name, BLOCK=65536)
    same(out, expected)


@triton.jit
def exact_kernel(X, Y, OUT, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(X + at), tl.load(Y + at)
    if OP == "div_rn":
        out = tl.div_rn(x, y)
    elif OP == "sqrt_rn":
        out = tl.sqrt_rn(x)
    elif OP == "maximum":
        out = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "fmax":
        out = tl.maximum(x, y)
    elif OP == "minimum":
        out = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "fmin":
        out = tl.minimum(x, y)
    elif OP == "clamp":
        out = tl.clamp(x, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        out = tl.clamp(x, -1.0, 1.0)
    tl.store(OUT + at, out)


EXACT = {
    "div_rn": lambda x, y: x / y,
    "sqrt_rn": lambda x, y: x.sqrt(),
    "maximum": torch.maximum,
    "fmax": torch.fmax,
    "minimum": torch.minimum,
    "fmin": torch.fmin,
    "clamp": lambda x, y: x.clamp(-1, 1),
    "clamp_number": lambda x, y: torch.where(x.isnan(), torch.full_like(x, -1.0), x.clamp(-1, 1)),
}


@pytest.mark.parametrize("name", EXACT)
def test_float32_operations(name):
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(2))
    x = every_value(BF16).float() * 1.2345
    y = x[order]
    y[::97] = float("nan")
    out = torch.empty_like(x)
    exact_kernel[(1,)](x, y, out, OP=name, BLOCK=65536)
    expected = EXACT[name](x, y)
    zero = (expected == 0) & (out == 0)  # which of +0 and -0 is the greater is left open
    same(torch.where(zero, 0.0, out), torch.where(zero, 0.0, expected))


def round_to(values: list, bits: int) -> list[float]:
    """Each rational rounded to `bits` significant bits, ties to even, in integers alone."""
    out = []
    for value in map(Fraction, values):
        numerator, denominator = abs(value.numerator), value.denominator
        shift = numerator.bit_length() - denominator.bit_length() - bits
        while Fraction(numerator, denominator) >= Fraction(2) ** (shift + bits):
            shift += 1
        scaled = Fraction(numerator, denominator) / Fraction(2) ** shift
        whole, rest = divmod(scaled.numerator, scaled.denominator)
        whole += 2 * rest > scaled.denominator or (2 * rest == scaled.denominator and whole % 2)
        out.append(float((-1 if value < 0 else 1) * whole * Fraction(2) ** shift) if numerator else 0.0)
    return out


@triton.jit
def fma_kernel(X, Y, Z, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.fma(tl.load(X + at), tl.load(Y + at), tl.load(Z + at)))


@pytest.mark.parametrize("dtype, bits", [(F32, 24), (F16, 11), (BF16, 8)], ids=str)
def test_fma_rounds_once(dtype, bits):
    g = torch.Generator().manual_seed(3)
    x, y = (torch.rand(4096, generator=g) + 0.5 for _ in range(2))
    # z cancels the product, or is a hair beside a tie of it, or neither
    z = torch.cat([-(x * y)[:2048], (torch.rand(1024, generator=g) - 0.5) * 2.0**-20, torch.randn(1024, generator=g)])
    x[2048], y[2048], z[2048] = 1 + 2.0 ** (1 - bits), 1.5, 2.0**-24  # an exact tie, and a nudge
    x, y, z = x.to(dtype), y.to(dtype), z.to(dtype)
    out = torch.empty_like(x)
    fma_kernel[(1,)](x, y, z, out, BLOCK=4096)
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x.tolist(), y.tolist(), z.tolist())]
    expected = torch.tensor(round_to(exact, bits), dtype=torch.float64)
    normal = (expected.abs() >= torch.finfo(dtype).tiny) | (expected == 0)
    assert torch.equal(out.double()[normal], expected[normal])
    assert normal.sum() > 3000
    separate = (x * y + z).double()
    assert (separate[normal] != expected[normal]).any()  # the cases do tell one rounding from two


@triton.jit
def dot_kernel(A, B, C, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * N + n[None, :])
    tl.store(C + m[:, None] * N + n[None, :], tl.dot(a, b, out_dtype=C.dtype.element_ty))


@pytest.mark.parametrize("dtype", [BF16, F16, F32, E4M3, E5M2, torch.int8], ids=str)
def test_dot(dtype):
    g = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-8, 9, shape, generator=g).float().to(dtype) for shape in ((16, 64), (64, 32)))
    out = torch.empty(16, 32, dtype=torch.int32 if dtype == torch.int8 else F32)
    dot_kernel[(1,)](a, b, out, M=16, N=32, K=64)
    assert torch.equal(out.double(), a.double() @ b.double())


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def later_larger(value, index, other_value, other_index):
    take = (other_value > value) or (other_value == value and other_index > index)
    return tl.where(take, other_value, value), tl.where(take, other_index, index)


@triton.jit
def reduce_kernel(
    X, OUT, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr, COMBINE: tl.constexpr
):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    out = tl.reduce(tl.load(X + m * N + n), AXIS, COMBINE, keep_dims=KEEP)
    if KEEP:
        tl.store(OUT + m * 0 + n * 0, out) if AXIS is None else tl.store(OUT + (n if AXIS == 0 else m), out)
    elif AXIS is None:
        tl.store(OUT, out)
    else:
        tl.store(OUT + tl.arange(0, N if AXIS == 0 else M), out)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_reduce_with_own_function(dtype, axis, keep):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    x[3, 5] = float("nan")
    # triton 3.6 lifts the result of tl.maximum to float32, and a combining function must keep its type
    for combine in (nan_max if dtype == F32 else larger, add):
        data = x if combine is not add else torch.arange(2048).reshape(32, 64).remainder(3).to(dtype)
        if axis is None:
            expected = data.amax().reshape(1) if combine is not add else data.float().sum().reshape(1).to(dtype)
        else:
            expected = data.amax(axis) if combine is not add else data.float().sum(axis).to(dtype)
        if combine is add and dtype == BF16 and axis is None:
            continue  # 2048 terms do not sum exactly in bf16, whatever the order
        out = torch.zeros(expected.shape, dtype=dtype)
        reduce_kernel[(1,)](data, out, M=32, N=64, AXIS=axis, KEEP=keep, COMBINE=combine)
        same(out, expected)


@triton.jit
def standard_reductions(X, MAX, SUM, ARG, LAST, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(X + m[:, None] * N + n[None, :])
    tl.store(MAX + m, tl.max(x, axis=1).to(tl.float32))
    tl.store(SUM + m, tl.sum(x, axis=1).to(tl.float32))
    tl.store(ARG + m, tl.argmax(x.to(tl.float32), axis=1))
    index = tl.broadcast_to(n[None, :], (M, N))
    _, last = tl.reduce((x.to(tl.float32), index), 1, later_larger)
    tl.store(LAST + m, last)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_standard_reductions(dtype):
    x = torch.arange(-512, 512).reshape(16, 64).remainder(5).sub(3).to(dtype)
    biggest, total = torch.empty(16), torch.empty(16)
    first, last = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    standard_reductions[(1,)](x, biggest, total, first, last, M=16, N=64)
    assert torch.equal(biggest, x.float().amax(1))
    assert torch.equal(total, x.float().sum(1))
    assert torch.equal(first, x.float().argmax(1).int())
    assert torch.equal(last, 63 - x.float().flip(1).argmax(1).int())


@triton.jit
def compose(decay, value, other_decay, other_value):
    return decay * other_decay, value * other_decay + other_value


@triton.jit
def scan_kernel(X, SUM, BACK, STATE, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(X + at)
    tl.store(SUM + at, tl.cumsum(x, axis=1).to(SUM.dtype.element_ty))
    tl.store(BACK + at, tl.cumsum(x, axis=0, reverse=True).to(BACK.dtype.element_ty))
    half = tl.full((M, N), 0.5, tl.float32)
    _, state = tl.associative_scan((half, x.to(tl.float32)), 1, compose)
    tl.store(STATE + at, state)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int32], ids=str)
def test_scan(dtype):
    x = torch.randint(-3, 4, (8, 16), generator=torch.Generator().manual_seed(6)).to(dtype)
    forward, back, state = torch.empty_like(x), torch.empty_like(x), torch.empty(8, 16)
    scan_kernel[(1,)](x, forward, back, state, M=8, N=16)
    assert torch.equal(forward, x.cumsum(1).to(dtype))
    assert torch.equal(back, x.flip(0).cumsum(0).flip(0).to(dtype))
    expected, row = [], torch.zeros(8)
    for column in x.float().unbind(1):
        row = row * 0.5 + column
        expected.append(row)
    assert torch.equal(state, torch.stack(expected, 1))


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


def test_install_is_idempotent_and_leaves_nothing_wrong():
    assert interpret.install() is NAMES
    with np.errstate(all="ignore"):
        wrong = [
            n for n, c in emulate.CORRECTIONS.items() if not c.right(triton.runtime.interpreter.interpreter_builder)
        ]
    assert not wrong


def test_the_language_is_restored_after_a_launch_and_after_a_failure():
    before = tl.load
    with pytest.raises(InterpreterError):
        copy_kernel[(1,)](torch.ones(4), torch.ones(4), 4, BLOCK=16, MASK_LOAD=False, MASK_STORE=False)
    assert tl.load is before
    with pytest.raises(RuntimeError, match="square is a device function"):
        square(2)
