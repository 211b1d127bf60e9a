"""MX and NVFP4 as every store gives them, with scales row by row and swizzled: bit for bit what the formats say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import SwizzleType

import tilewright as tw
from tilewright.core.format import Format, Quantized
from tilewright.formats.interchange import Operand, from_scaled_mm, to_scaled_mm
from tilewright.formats.swizzle import swizzle_scale, unswizzle_scale

SHAPES = [(70, 200), (130, 256), (6, 34)]  # rows, blocks or both end within a tile of scales
STATIC = torch.tensor([0.01])
MADE = [
    tw.mx("e4m3"),
    tw.mx("e5m2", ways="col", scale_rule="floor"),
    tw.mx("e4m3", ways="both", scale_rule="even"),
    tw.mx("e2m1", ways="both"),
    tw.nvfp4(),
    tw.nvfp4(ways="col"),
    tw.nvfp4(ways="both"),
    tw.nvfp4(scale=STATIC),
    tw.nvfp4(scale=STATIC, ways="both"),
]
FORMATS = [dataclasses.replace(fmt, swizzled=swizzled) for swizzled in (False, True) for fmt in MADE]
SWIZZLED = FORMATS[len(MADE) :]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
swizzled_formats = pytest.mark.parametrize("fmt", SWIZZLED, ids=str)
swizzled_rows = pytest.mark.parametrize("fmt", [fmt for fmt in SWIZZLED if fmt.ways == "row"], ids=str)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3.0


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def differing(q: Quantized, wanted: Quantized) -> list[str]:
    """The names of the tensors that differ in a bit, padding and all."""
    assert q.format == wanted.format and q.shape == wanted.shape
    pairs = zip(q.format.tensor_names, q.tensors(), wanted.tensors())
    return [n for n, a, b in pairs if a.shape != b.shape or not torch.equal(bits(a), bits(b))]


def linear(fmt: Format) -> Format:
    return dataclasses.replace(fmt, swizzled=False)


# ---- stores ----------------------------------------------------------------------------------------------------------


@every_format
def test_quantize(fmt):
    for shape in SHAPES:
        x = numbers(*shape)
        x[0, 3], x[shape[0] // 2, -1], x[-1, 1] = 0.0, float("nan"), float("-inf")
        turned, spread = x.t().contiguous().t(), torch.stack((x, x), -1).flatten(1)[:, ::2]
        for given in (x, turned, spread) if shape[0] == 6 else (x,):
            with tw.force("triton"):
                q = tw.quantize(given, fmt)
            assert not differing(q, fmt.quantize(x)), (shape, given.stride())


@every_format
def test_norm(fmt):
    for shape in SHAPES:
        x, weight = numbers(*shape), numbers(shape[1], seed=1)
        x[-1, 0] = float("nan")  # and so all of its row
        with tw.force("triton"):
            y, q = tw.rms_norm(x, weight), tw.rms_norm(x, weight, out_format=fmt)
        assert not differing(q, fmt.quantize(y)), shape


@pytest.mark.parametrize("fmt", [tw.mx("e2m1", swizzled=True), tw.nvfp4(scale=STATIC, swizzled=True)], ids=str)
def test_norm_of_rows_that_no_program_holds(fmt):
    x, weight = numbers(2, 16512), numbers(16512, seed=1)
    with tw.force("triton"):
        y, q = tw.rms_norm(x, weight), tw.rms_norm(x, weight, out_format=fmt)
    assert not differing(q, fmt.quantize(y))


@every_format
def test_glu(fmt):
    for rows, columns in SHAPES:
        x = numbers(rows, 2 * columns)
        x[1, 0], x[-1, 1] = float("inf"), float("nan")
        with tw.force("triton"):
            y, q = tw.glu(x), tw.glu(x, out_format=fmt)
        assert not differing(q, fmt.quantize(y)), (rows, columns)


@swizzled_formats
def test_other_stores(fmt):
    """Those that hold rows or tiles themselves."""
    x, gate = numbers(130, 64), numbers(130, 64, seed=1)
    for call in (
        lambda **out: tw.hadamard(x, block=16, **out),
        lambda **out: tw.gated_group_norm(x[None], gate[None], torch.ones(64), groups=2, transposed=False, **out),
    ):
        with tw.force("triton"):
            y, q = call(), call(out_format=fmt)
        assert not differing(q, fmt.quantize(y))


@every_format
def test_nothing_in_it(fmt):
    for shape in ((0, 64), (4, 0), (2, 0, 6), (0, 0)):
        x, pair = torch.empty(shape), torch.empty(*shape[:-1], 2 * shape[-1])
        with tw.force("triton"):
            made = {
                "quantize": tw.quantize(x, fmt),
                "rms_norm": tw.rms_norm(x, torch.ones(shape[-1]), out_format=fmt),
                "glu": tw.glu(pair, out_format=fmt),
            }
        for name, q in made.items():
            assert not differing(q, fmt.quantize(x)) and q.dequantize().shape == shape, (name, shape)


@swizzled_rows
def test_rows_past_the_last_group_are_not_read(fmt):
    x, ends = numbers(140, 80), torch.tensor([1, 131])
    q, wanted = fmt.quantize(x, offsets=ends), fmt.quantize(x[:131])
    with tw.force("triton"):
        found = tw.quantize(torch.where(torch.arange(140)[:, None] < 131, x, 1e30), fmt, offsets=ends)
    for made in (q, found):
        scale, there = (unswizzle_scale(v.scale, v.shape[0], -(-80 // fmt.block)) for v in (made, wanted))
        assert torch.equal(bits(scale[:131]), bits(there)) and torch.equal(bits(made.data[:131]), bits(wanted.data))
        assert fmt.name == "mx" or torch.equal(made.shared, wanted.shared)


@swizzled_formats
def test_memory_that_is_given(fmt):
    """What is stored there is all that belongs there; padding is left as it is."""
    x, out = numbers(6, 34), fmt.empty((6, 34), torch.float32, "cpu")
    with tw.force("triton"):
        tw.rms_norm(x, None, out=out, out_format=fmt)
        y = tw.rms_norm(x, None)
    assert not differing(out, fmt.quantize(y))


# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 11), (0, 3), (2, 0)], ids=str)
def test_order_of_the_tiles(shape):
    """Every scale is where the instructions that read it say: by the 16 bytes of a row of 32, by tiles, tile after tile."""
    rows, blocks = shape
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    flat = swizzle_scale(scale)
    wide, tall = -(-blocks // 4), -(-rows // 128)
    found = torch.zeros(wide * tall * 512, dtype=torch.uint8)
    for r in range(rows):
        for b in range(blocks):
            tile = r // 128 * wide + b // 4
            found[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4] = scale[r, b]
    assert torch.equal(flat, found) and torch.equal(unswizzle_scale(flat, *shape), scale)


@swizzled_formats
def test_a_value_is_that_of_its_linear_twin(fmt):
    x = numbers(2, 3, 70)
    q, plain = fmt.quantize(x), linear(fmt).quantize(x)
    assert torch.equal(q.dequantize(), plain.dequantize()) and torch.equal(tw.dequantize(q), plain.dequantize())
    with tw.force("triton"):
        assert torch.equal(tw.dequantize(q), plain.dequantize())
    assert not differing(q.clone(), q) and not differing(q.detach(), q)
    for suffix, sizes in (("", (6, 70)), ("_t", (70, 6))):
        flat, matrix = getattr(q, f"scale{suffix}"), getattr(plain, f"scale{suffix}")
        if matrix is not None:
            assert flat.shape == (512 * -(-matrix.shape[1] // 4),) and flat.dtype == matrix.dtype
            assert torch.equal(bits(unswizzle_scale(flat, sizes[0], matrix.shape[1])), bits(matrix))
    if fmt.ways == "both":
        twin = dataclasses.replace(fmt, ways="col")
        assert not differing(q.twin(), twin.quantize(x))


@swizzled_formats
def test_padding_is_zero_and_full_tiles_have_none(fmt):
    for shape in ((6, 34), (256, 256)):
        q = fmt.empty(shape, torch.bfloat16, "cpu")
        wanted = fmt.quantize(torch.zeros(shape))
        assert [(t.shape, t.dtype, t.stride()) for t in q.tensors()] == [
            (t.shape, t.dtype, t.stride()) for t in wanted.tensors()
        ]
    q = fmt.empty((6, 34), torch.bfloat16, "cpu")
    assert all(not bits(t).any() for n, t in zip(fmt.tensor_names, q.tensors()) if n.startswith("scale"))


@swizzled_formats
def test_names(fmt):
    bare = fmt.bare()
    assert (
        Format.parse(fmt.key) == bare
        and fmt.key.endswith(":swizzled")
        and fmt.tensor is Format.parse(fmt.key, fmt.tensor).tensor
    )
    assert Format.parse(fmt.key.removesuffix(":swizzled")) == linear(bare) != bare
    assert fmt.transposed().transposed() == fmt and fmt.transposed().swizzled
    assert fmt.device_format(False) == f"{linear(fmt).device_format(False)}:swizzled"
    q = fmt.quantize(numbers(6, 34))
    turned = q.t()
    assert turned.format == bare.transposed()
    if fmt.ways != "both":
        assert torch.equal(turned.dequantize(), q.dequantize().t())


def test_refusals():
    for make, error, message in (
        (lambda: tw.mx("e4m3", swizzled="yes"), TypeError, "^swizzled: must be True or False, not 'yes'$"),
        (lambda: tw.nvfp4(swizzled=1), TypeError, "^swizzled: must be True or False, not 1$"),
        (lambda: Format.parse("nvfp4:row:dynamic:swizzle"), ValueError, "is not ways:source or ways:source:swizzled$"),
        (lambda: Format.parse("mx:e4m3:row:swizzled"), ValueError, "'mx:e4m3:row:swizzled' is not dtype:ways:rule"),
        (lambda: Format.parse("mx:e4m3:row:rceil:swizzled:swizzled"), ValueError, "is not dtype:ways:rule"),
        (lambda: tw.nvfp4(ways="both", swizzled=True).quantize(torch.ones(2, 2), offsets=torch.tensor([1])), ValueError,
         "ways='row' alone"),
        (lambda: tw.quantize(torch.ones(2, 5), tw.nvfp4(swizzled=True)), ValueError, "must be even, got 5"),
        (lambda: tw.rms_norm(torch.ones(2, 4), None, out=tw.nvfp4().empty((2, 4), torch.float32, "cpu"),
                             out_format=tw.nvfp4(swizzled=True)), ValueError, "out_format is nvfp4:row:dynamic:swizzled"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            make()


def test_compiled():
    fmt, x = tw.nvfp4(ways="both", swizzled=True), numbers(4, 64).requires_grad_()
    compiled = torch.compile(lambda x: tw.quantize(x, fmt), backend="aot_eager", fullgraph=True)(x)
    assert not differing(compiled, fmt.quantize(x))
    compiled.dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 64))


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [tw.mx("e4m3"), tw.mx("e2m1"), tw.nvfp4()], ids=str)
def test_products(fmt):
    """The product of swizzled operands is that of linear ones, bit for bit, also where one is swizzled alone."""
    x, weight = numbers(6, 96), numbers(10, 96, seed=1)
    tiles = dataclasses.replace(fmt, swizzled=True)
    with tw.force("triton"):
        made = [
            tw.scaled_mm(a.quantize(x), b.quantize(weight).t(), out_dtype=torch.float32)
            for a in (fmt, tiles)
            for b in (fmt, tiles)
        ]
    assert all(torch.equal(y, made[0]) for y in made) and made[0].abs().max() > 1


@swizzled_formats
def test_operands_of_torch(fmt):
    """Those of a swizzled value share its memory, those of a linear one have the same bits; both come back."""
    x = numbers(150, 320)
    q, plain = fmt.quantize(x), linear(fmt).quantize(x)
    for side in "ab":
        there = {}
        for way in ("row", "col") if fmt.ways == "both" else (fmt.ways,):
            one, other = to_scaled_mm(q, side, way), to_scaled_mm(plain, side, way)
            there[way] = one
            assert one.recipe == other.recipe and one.swizzle == other.swizzle
            scales = [o.scale if isinstance(o.scale, list) else [o.scale] for o in (one, other)]
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*scales))
            assert scales[0][0].data_ptr() == (q.scale if way == "row" else q.scale_t).data_ptr()
        made = from_scaled_mm(**there, side=side, dtype=x.dtype, rule=getattr(fmt, "rule", None), source=fmt.source)
        assert not differing(made, q)


def test_operands_that_do_not_go_together():
    q = tw.mx("e4m3", ways="both", swizzled=True).quantize(numbers(32, 64))
    row, col = to_scaled_mm(q), to_scaled_mm(q, way="col")
    for operands, message in (
        ({"row": row, "col": col._replace(swizzle=SwizzleType.NO_SWIZZLE)}, "^row, col: both operands"),
        ({"row": row._replace(recipe=functional.ScalingType.BlockWise1x16)}, "^mat: BlockWise1x16 is of e2m1"),
        ({"row": row._replace(scale=[row.scale, torch.ones(1)])}, "^scale: .* has 1 for each operand, got 2"),
        ({"row": row._replace(scale=row.scale[:-1])}, "^scale: 32 by 64 codes .* have .512., got .511."),
    ):
        with pytest.raises(ValueError, match=message):
            from_scaled_mm(**operands)


@pytest.mark.parametrize("fmt", [tw.mx("e4m3", swizzled=True), tw.nvfp4(swizzled=True)], ids=str)
def test_torch_takes_these_operands(fmt):
    """Its own checks of sizes and dtypes, without data: a CPU has no such product."""
    a, b = (to_scaled_mm(fmt.empty((n, 96), torch.bfloat16, "meta"), side) for n, side in ((40, "a"), (48, "b")))
    assert isinstance(a, Operand)
    y = functional.scaled_mm(
        a.mat, b.mat, a.scale, a.recipe, b.scale, b.recipe, a.swizzle, b.swizzle, output_dtype=torch.bfloat16
    )
    assert y.shape == (40, 48)
