"""The load of quantised numbers in the interpreter: values of every format, bit for bit those of `Format.dequantize`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton.language as tl
from torch import Tensor

import tilewright as tw
from tests.fp8_oracle import decode_table
from tests.mx_oracle import values
from tilewright.core.format import Format, Quantized
from tilewright.device.load import widen, widen_scale
from tilewright.device.products import widen_codes
from tilewright.device.store import codes_in_byte
from tilewright.formats.dequantize import load_tiles
from tilewright.formats.fp8 import GRANULARITIES
from tilewright.runtime.kernel import kernel

STATIC = torch.tensor([0.37])
FORMATS = [
    *(tw.fp8(g) for g in GRANULARITIES),
    tw.fp8("1x128", "e5m2", pow2=False),
    tw.fp8("tensor", scale=STATIC),
    tw.fp8("tensor", "e5m2", scale="unit"),
    *(tw.int8(g) for g in GRANULARITIES),
    tw.int4("row"),
    tw.int4("1x128"),
    tw.int4("1x128", zero=True),
    *(tw.mx(c, swizzled=s) for c in ("e4m3", "e5m2", "e2m1") for s in (False, True)),
    *(tw.nvfp4(swizzled=s) for s in (False, True)),
    tw.nvfp4(scale=STATIC),
]
# A tile that is full, one that is not in each direction, several of both, and next to nothing; each with another dtype
CASES = [
    ((128, 128), torch.float32), ((2, 2), torch.float16), ((131, 34), torch.bfloat16), ((5, 257), torch.float16),
    ((130, 140), torch.float32), ((0, 6), torch.bfloat16), ((6, 0), torch.float32),
]  # fmt: skip


def fitting(fmt: Format, size: tuple[int, int]) -> tuple[int, int]:
    """The size with an even number of codes along the rows of a way that has two in a byte."""
    per = codes_in_byte(fmt.device_format(False))
    return tuple(-(-n // per) * per if along else n for n, along in zip(size, (fmt.ways == "col", fmt.ways == "row")))


def anything(fmt: Format, size: tuple[int, ...], dtype: torch.dtype = torch.float32, offsets: Tensor | None = None):
    """A value whose codes and scales are any bytes, NaN and infinities among them, and whose scales in fp32 are of all sizes."""
    source = torch.Generator().manual_seed(sum(size))
    q = fmt.empty(size, dtype, "cpu", 0 if offsets is None else offsets.shape[0], offsets)
    for name, t in zip(fmt.tensor_names, q.tensors()):
        if t.dtype.itemsize == 1:
            t.view(torch.uint8).copy_(torch.randint(256, t.shape, generator=source))
        else:
            wide = 130 if name.startswith("scale") else 3
            power = torch.randint(-wide, wide, t.shape, generator=source).float()
            t.copy_(torch.randn(t.shape, generator=source) * torch.exp2(power))
    return q


def same(made: Tensor, wanted: Tensor, label: str) -> None:
    """Equal bits, NaN being NaN whatever its bits."""
    assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype), label
    bits = {2: torch.int16, 4: torch.int32}[made.dtype.itemsize]
    wrong = (made.contiguous().view(bits) != wanted.contiguous().view(bits)) & ~(made.isnan() & wanted.isnan())
    assert not wrong.any(), (
        f"{label}: {int(wrong.sum())} of {wrong.numel()} differ, first {wrong.nonzero()[0].tolist()}"
    )


def dequantized(q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    with tw.force("triton"):
        return tw.dequantize(q, dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("way", ["row", "col"])
def test_every_format_and_size(fmt, way):
    fmt = dataclasses.replace(fmt, ways=way)
    for size, dtype in CASES:
        q = anything(fmt, fitting(fmt, size))
        same(dequantized(q, dtype), fmt.dequantize(q, dtype), f"{fmt} {size} {dtype}")


@pytest.mark.smoke
@pytest.mark.parametrize("fmt", [tw.fp8(), tw.int4("1x128", zero=True), tw.mx("e2m1"), tw.nvfp4()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_quantised(fmt, dtype):
    x = torch.randn(2, 6, 34, generator=torch.Generator().manual_seed(0)) * 3
    x[1, 3, 5], x[0, 0, 0] = float("nan"), float("-inf")
    both = dataclasses.replace(fmt, ways="both")
    for one in (fmt, dataclasses.replace(fmt, ways="col"), both):
        q = one.quantize(x, dtype)
        assert dequantized(q).dtype == dtype
        same(dequantized(q), one.dequantize(q), str(one))
        same(dequantized(q, torch.float32), one.dequantize(q, torch.float32), str(one))


GROUPED = [
    *(tw.fp8(g, ways=way) for g in GRANULARITIES for way in ("row", "col")),
    *(tw.int8(g, ways=way) for g in GRANULARITIES for way in ("row", "col")),
    *(tw.mx(c, swizzled=s) for c in ("e4m3", "e2m1") for s in (False, True)),
    tw.nvfp4(),
]


@pytest.mark.parametrize("fmt", GROUPED, ids=str)
def test_groups(fmt):
    for size, ends in (((20, 34), [3, 20]), ((150, 130), [16, 16, 147, 148]), ((8, 8), [0])):
        offsets = torch.tensor(ends, dtype=torch.int32)
        q = anything(fmt, size, torch.bfloat16, offsets)
        y = torch.full(size, 7.0, dtype=torch.bfloat16)
        load_tiles(q, y)
        same(y[: ends[-1]], q.dequantize()[: ends[-1]], f"{fmt} {size} {ends}")
        assert (y[ends[-1] :] == 7.0).all(), "rows of no group were written"


def test_offsets_out_of_bounds_touch_nothing():
    """The strict interpreter raises on any access outside the arguments; what is written is unspecified."""
    for fmt in (tw.fp8(ways="col"), tw.fp8("128x128"), tw.int8("row", ways="col"), tw.mx("e2m1", swizzled=True)):
        for ends in ([-5, 1000], [30, 10, 2**31 - 1]):
            q = anything(fmt, (40, 40), torch.bfloat16, torch.tensor(ends, dtype=torch.int32))
            load_tiles(q, torch.empty(40, 40, dtype=torch.bfloat16))


# ---- one widening ----------------------------------------------------------------------------------------------------


@kernel(grid=lambda a: (1,))
def widen_kernel(X, Y, KIND: tl.constexpr, MATH: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(Y + i, widen(tl.load(X + i), None, KIND, MATH).to(tl.float32))


@kernel(grid=lambda a: (1,))
def bf16_kernel(X, Y, E5M2: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(Y + i, widen_codes(tl.load(X + i), E5M2))


@kernel(grid=lambda a: (1,))
def scale_kernel(X, Y, E8M0: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(Y + i, widen_scale(tl.load(X + i), E8M0))


EVERY = torch.arange(256, dtype=torch.uint8)


@pytest.mark.smoke
def test_every_code_is_widened_as_it_is_defined():
    integers = {"int8": EVERY.view(torch.int8).float(), "int4": (((EVERY & 15) ^ 8).view(torch.int8) - 8).float()}
    small = torch.from_numpy(values("e2m1")).float()
    sign = torch.where((EVERY & 8) > 0, -1.0, 1.0)
    wanted = {
        **{code: torch.from_numpy(decode_table(code)).float() for code in ("e4m3", "e5m2")},
        **integers, "e2m1": small[(EVERY & 7).long()] * sign,
    }  # fmt: skip
    for kind, expected in wanted.items():
        for math in ("f32", "bf16", *([] if kind == "e5m2" else ["fp16"])):
            y = torch.full((256,), 7.0)
            widen_kernel(EVERY.view(torch.int8) if kind == "int8" else EVERY, y, KIND=kind, MATH=math)
            same(y, expected, f"{kind} {math}")
    for code in ("e4m3", "e5m2"):
        y = torch.full((256,), 7.0, dtype=torch.bfloat16)
        bf16_kernel(EVERY, y, E5M2=code == "e5m2")
        same(y, wanted[code].bfloat16(), code)


def test_every_scale_is_widened_as_it_is_defined():
    for e8m0 in (True, False):
        y = torch.full((256,), 7.0)
        scale_kernel(EVERY, y, E8M0=e8m0)
        powers = torch.exp2(torch.arange(256).double() - 127).float()
        powers[255] = float("nan")
        same(y, powers if e8m0 else torch.from_numpy(decode_table("e4m3")).float(), f"e8m0 {e8m0}")


# ---- calls -----------------------------------------------------------------------------------------------------------

SOME = [
    tw.fp8("128x128", ways="col"), tw.fp8(ways="both"), tw.int4("1x128", zero=True, ways="col"), tw.int8("row"),
    tw.nvfp4(ways="both", swizzled=True), tw.mx("e2m1", ways="col"),
]  # fmt: skip


@pytest.mark.parametrize("fmt", SOME, ids=str)
def test_the_gradient_passes_unchanged(fmt):
    x = torch.randn(6, 34, requires_grad=True)
    weight = torch.randn(6, 34)
    with tw.force("triton"):
        q = tw.quantize(x, fmt)
        y = tw.dequantize(q)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    same(y.detach(), fmt.dequantize(q.detach()), str(fmt))


def test_compiled_calls():
    """One function for several formats, quantised inside or handed in: each is compiled as what it is."""

    def inside(x: Tensor, fmt: Format) -> Tensor:
        return tw.dequantize(tw.quantize(x, fmt), torch.float32) * 1.0

    def outside(q: Quantized) -> Tensor:
        return tw.dequantize(q, torch.float32) * 1.0

    compiled = [torch.compile(f, fullgraph=True, backend="aot_eager") for f in (inside, outside)]
    x = torch.randn(6, 34)
    with tw.force("triton"):
        for fmt in SOME[::2]:
            q = fmt.quantize(x)
            same(compiled[0](x, fmt), fmt.dequantize(q), f"inside {fmt}")
            same(compiled[1](q), fmt.dequantize(q), f"outside {fmt}")


def test_strided_arguments():
    q = tw.int4("1x128", zero=True).quantize(torch.randn(6, 260))
    wide = torch.zeros(2 * q.zero.shape[0], q.zero.shape[1])
    wide[::2] = q.zero
    apart = torch.zeros(*q.data.shape, 2, dtype=torch.uint8)
    apart[..., 0] = q.data
    with tw.force("triton"):
        for zero, scale in ((wide[::2], q.scale), (q.zero, q.scale.t().contiguous().t())):
            y = tw.dequantize_codes(apart[..., 0], scale, q.key, "row", "float32", zero=zero)
            same(y, q.dequantize(), "strided")


def test_what_does_not_fit_is_refused_by_name():
    fmt = tw.int4("1x128", zero=True)
    q, other = fmt.quantize(torch.randn(6, 260)), tw.nvfp4().quantize(torch.randn(6, 32))
    scale, bytes_ = other.scale.view(torch.uint8), other.data
    ends = torch.tensor([6], dtype=torch.int32)
    calls = {
        "zero must be given": lambda: tw.dequantize_codes(q.data, q.scale, q.key),
        "shared must be None": lambda: tw.dequantize_codes(q.data, q.scale, q.key, zero=q.zero, shared=other.shared),
        "shared must be given": lambda: tw.dequantize_codes(bytes_, scale, other.key),
        r"scale must be float32\[3, 6\]": lambda: tw.dequantize_codes(
            q.data, q.scale.to(torch.uint8), q.key, zero=q.zero
        ),
        r"scale must be uint8\[6, 2\]": lambda: tw.dequantize_codes(
            bytes_, scale[:, :1], other.key, shared=other.shared
        ),
        r"zero is float32\[2, 6\], but outer": lambda: tw.dequantize_codes(q.data, q.scale, q.key, zero=q.zero[:2]),
        "offsets: a value in int4:1x128:row:zero has no groups": lambda: tw.dequantize_codes(
            q.data, q.scale, q.key, zero=q.zero, offsets=ends
        ),
        "offsets: groups of rows are for ways='row' alone": lambda: tw.dequantize_codes(
            bytes_, scale, other.key, "col", shared=other.shared, offsets=ends
        ),
        "format: 'int3' names no known format": lambda: tw.dequantize_codes(q.data, q.scale, "int3"),
    }
    for words, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
