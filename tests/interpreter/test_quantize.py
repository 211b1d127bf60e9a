"""The FP8 device functions and tile kernels in the interpreter, bit for bit against the oracle and the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests import fp8_oracle as oracle
from tests.fp8_oracle import SOME, amaxes, bits, codes, every, matrix, ties
from tilewright.device.quantize import amax, code_bits, decode, interleave4, pack4, quotient, scale_of
from tilewright.formats.dequantize import load_tiles
from tilewright.formats.fill import fill_from
from tilewright.formats.fp8 import CODES, GRANULARITIES, RULES, WAYS, fp8
from tilewright.runtime.kernel import kernel
from tilewright.toolchain.interpret import reversed_programs

BLOCK = 4096
FORMS = list(itertools.product(CODES, (True, False), RULES))


def over(a):
    return (triton.cdiv(a.N, BLOCK),)


@kernel(grid=over)
def code_kernel(X, Y, N, FORMAT: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(Y + i, code_bits(tl.load(X + i, i < N, 0.0), FORMAT).to(tl.uint8), i < N)


@kernel(grid=over)
def decode_kernel(X, Y, N, FORMAT: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(Y + i, decode(tl.load(X + i, i < N, 0), FORMAT), i < N)


@kernel(grid=over)
def scale_kernel(X, S, M, N, FORMAT: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    s, m = scale_of(tl.load(X + i, i < N, 0.0), FORMAT)
    tl.store(S + i, s, i < N)
    tl.store(M + i, m, i < N)


@kernel(grid=over)
def quotient_kernel(X, D, Y, N):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    d = tl.load(D + i, i < N, 1.0)
    tl.store(Y + i, quotient(tl.load(X + i, i < N, 0.0), d, tl.div_rn(1.0, d)), i < N)


@kernel(grid=lambda a: (1,))
def pack_kernel(X, P, S, A, FORMAT: tl.constexpr):
    i = tl.arange(0, 32)
    a = tl.load(X + 4 * i)
    b = tl.load(X + 4 * i + 1)
    c = tl.load(X + 4 * i + 2)
    d = tl.load(X + 4 * i + 3)
    tl.store(P + i, pack4(a, b, c, d, FORMAT))
    tl.store(S + tl.arange(0, 128), interleave4(a, b, c, d))
    tl.store(A, amax(tl.load(X + tl.arange(0, 128)), 0))


@pytest.mark.smoke
@pytest.mark.parametrize("code", CODES)
def test_codes_of_every_16_bit_value_and_every_tie(code):
    for x in (every(torch.bfloat16), every(torch.float16), ties(code)):
        y = torch.empty(x.numel(), dtype=torch.uint8)
        code_kernel(x, y, x.numel(), FORMAT=code)
        assert (y.numpy() == oracle.encode(x.numpy(), code)).all()


@pytest.mark.smoke
@pytest.mark.parametrize("code", CODES)
def test_decoding_every_code(code):
    y = torch.empty(256)
    decode_kernel(torch.arange(256, dtype=torch.uint8), y, 256, FORMAT=code)
    assert (bits(y) == bits(oracle.decode_table(code))).all()


@pytest.mark.parametrize(("code", "pow2", "rule"), FORMS)
def test_scales_of_every_magnitude(code, pow2, rule):
    amax = amaxes(code)
    s, m = torch.empty(amax.size), torch.empty(amax.size)
    scale_kernel(
        torch.from_numpy(amax), s, m, amax.size, FORMAT=fp8("row", code, pow2=pow2, rule=rule).device_format(False)
    )
    scale, _ = oracle.scales(amax, code, pow2, rule)
    assert (bits(s) == bits(scale)).all()
    finite = np.isfinite(amax) & (amax > 0)
    if pow2 or rule == "te":
        factor = oracle.scales(amax, code, pow2, "te" if pow2 and rule == "exact" else rule)[1]
        exact = 1.0 / scale.astype(np.float64) if pow2 else factor
        assert (m.numpy()[finite] == exact.astype(np.float32)[finite]).all()
    assert np.isnan(m.numpy()[~np.isfinite(amax)]).all()


@pytest.mark.smoke
def test_quotient_is_rounded_once():
    rng = np.random.default_rng(1)
    d = rng.integers(0x00800000, 0x78000000, 200_000).astype(np.int32).view(np.float32)
    x = (d.astype(np.float64) * rng.uniform(-500, 500, d.size)).astype(np.float32)
    x[:1000] = 0.0
    x[1000:2000] = -0.0
    keep = np.isfinite(x) & (np.abs(x) < 1e37) & ((np.abs(x) > 1e-30) | (x == 0))
    x, d = x[keep], d[keep]
    y = torch.empty(x.size)
    quotient_kernel(torch.from_numpy(x), torch.from_numpy(d), y, x.size)
    assert (bits(y) == bits(x / d)).all()


def test_packing():
    x = torch.randn(128) * 100
    p, s, a = torch.empty(32, dtype=torch.int32), torch.empty(128), torch.empty(1)
    for code in CODES:
        pack_kernel(x, p, s, a, FORMAT=code)
        assert (p.view(torch.uint8).numpy() == oracle.encode(x.numpy(), code)).all()
        assert torch.equal(s, x) and a == x.abs().max()
    x[5], x[9] = float("nan"), float("inf")
    pack_kernel(x, p, s, a, FORMAT="e4m3")
    assert a.isnan() and p.view(torch.uint8)[5] == 0x7F and p.view(torch.uint8)[9] == 0x7E


# ---- tiles -----------------------------------------------------------------------------------------------------------


def filled(fmt, x: Tensor, offsets: Tensor | None = None):
    """What the kernels make of x, in memory that held something else."""
    q = fmt.empty(x.shape, x.dtype, "cpu", 0 if offsets is None else offsets.shape[0], offsets)
    for t in q.tensors():
        t.view(torch.uint8).fill_(0x55) if t.dtype.itemsize == 1 else t.fill_(float("nan"))
    fill_from(q, x, fmt.tensor)
    return q


def compare(fmt, x: Tensor, ends: list[int] | None = None) -> None:
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    q, wanted = filled(fmt, x, offsets), fmt.quantize(x, offsets=offsets)
    live = x.shape[0] if ends is None else ends[-1]
    blocks = len(oracle.row_blocks(x.shape[0], ends))
    axis = {("1x128", "scale"): 1, ("1x128", "scale_t"): 0, ("128x128", "scale"): 0, ("128x128", "scale_t"): 1}
    for name, a, b in zip(fmt.tensor_names, q.tensors(), wanted.tensors()):
        if name.startswith("data"):
            cut = (slice(None),) * int(name == "data_t") + (slice(0, live),)
            assert (codes(a)[cut] == codes(b)[cut]).all(), f"{fmt} {name} {tuple(x.shape)} {ends}"
        else:
            size = live if (fmt.granularity, name) in (("1x128", "scale"), ("row", "scale")) else blocks
            along = axis.get((fmt.granularity, name), 0 if name == "scale" else None)
            cut = slice(None) if along is None else (slice(None),) * along + (slice(0, size),)
            assert (bits(a)[cut] == bits(b)[cut]).all(), f"{fmt} {name} {tuple(x.shape)} {ends}"
    y = torch.full(x.shape, 7.0, dtype=x.dtype)
    load_tiles(q, y)
    assert torch.equal(y[:live].nan_to_num(5.0), q.dequantize()[:live].nan_to_num(5.0)), f"{fmt} dequantised {ends}"


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("code", "pow2", "rule"), SOME)
def test_tiles_follow_the_rules(granularity, code, pow2, rule):
    x = matrix(141, 70)
    if granularity == "tensor":
        x = x.nan_to_num(1.0, 1.0, 1.0)  # one NaN and there is nothing else
    compare(fp8(granularity, code, ways="both", pow2=pow2, rule=rule), x)


# Sizes that are nothing, one, odd, multiples of 4 and of 16 but not of 128, and of 128: each its own path of the kernel
SIZES = [(0, 5), (5, 0), (1, 1), (3, 130), (132, 33), (129, 48), (128, 128)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("granularity", [pytest.param("1x128", marks=pytest.mark.smoke), "128x128", "row", "tensor"])
def test_tiles_of_any_size(granularity, size):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=source) * torch.exp2(torch.randint(-9, 9, (size[0], 1), generator=source).float())
    for ways in WAYS if size == (1, 1) else ("both",):
        compare(fp8(granularity, ways=ways), x.bfloat16())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("size", "ends"),
    [
        ((20, 33), [3, 20]),
        ((140, 128), [16, 16, 132, 136]),
        ((144, 144), [16, 144]),
        ((160, 40), [0, 0, 129]),
        ((8, 8), [0]),
    ],
    ids=str,
)
def test_groups(granularity, size, ends):
    x = matrix(*size) if size[0] > 140 else torch.randn(size)
    if ends[-1] < size[0]:
        x[ends[-1] :] = float("nan")
    if granularity == "tensor":
        x[: ends[-1]] = x[: ends[-1]].nan_to_num(1.0, 1.0, 1.0)
    compare(fp8(granularity, ways="both"), x.bfloat16(), ends)


def test_offsets_out_of_bounds_touch_nothing():
    """The strict interpreter raises on any access outside the arguments; what is written is unspecified."""
    x = torch.randn(40, 40)
    for ends in ([-5, 1000], [30, 10, 2**31 - 1], [-(2**31), 2**31 - 1]):
        filled(fp8(ways="both"), x, torch.tensor(ends, dtype=torch.int32))
        filled(fp8("row", ways="both"), x, torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("scale", ["unit", 0.0371, 2.0**-4])
@pytest.mark.parametrize("rule", RULES)
def test_static_scale(scale, rule):
    x = torch.cat([ties("e4m3"), torch.tensor([float("inf"), -float("inf")])])
    x = x[: x.numel() // 7 * 7].reshape(7, -1)
    source = scale if scale == "unit" else torch.tensor([scale])
    for code in CODES:
        compare(fp8("tensor", code, ways="both", rule=rule, scale=source), x)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_amax_does_not_depend_on_the_order_of_programs(granularity):
    x = matrix(141, 140)
    forward = filled(fp8(granularity, ways="both"), x)
    with reversed_programs():
        backward = filled(fp8(granularity, ways="both"), x)
    for a, b in zip(forward.tensors(), backward.tensors()):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_strided_input():
    wide = torch.randn(70, 300).bfloat16()
    for x in (wide[:, 3:133], wide.t()[:130, ::2], wide[:1].expand(20, 300)):
        compare(fp8(ways="both"), x)
