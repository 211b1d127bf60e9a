"""MX and NVFP4 as formats: every rule against the definitions written out in numpy, layouts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests import mx_oracle as oracle
from tilewright.core.format import Format
from tilewright.formats.mx import CODES, RULES, encode_e2m1, mx, wide_scale, widen_nibbles
from tilewright.formats.nvfp4 import nvfp4
from tilewright.formats.swizzle import swizzle_scale, unswizzle_scale

KINDS = [(kind, rule) for kind in CODES for rule in RULES]
EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def neighbours(width: int, spread: int) -> torch.Tensor:
    """Every finite bf16 value, in rows of neighbours led by a number that is 2^spread times the largest."""
    finite = EVERY[EVERY.isfinite()].float()
    finite = torch.cat((finite, finite.new_zeros(-len(finite) % (width - 1)))).reshape(-1, width - 1)
    lead = finite.abs().amax(1, keepdim=True) * 2.0**spread
    return torch.cat((torch.where(lead.isfinite(), lead, 0.0), finite), 1)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("spread", "rule"), [(0, "floor"), (0, "rceil"), (2, "even")])
def test_every_bf16_value_gets_the_code_of_the_definition(kind, spread, rule):
    x = neighbours(32, spread)
    assert not oracle.differences(mx(kind, scale_rule=rule).quantize(x), x)


@pytest.mark.parametrize(("spread", "scales"), [(0, (None, 1e-3, 0.0)), (1, (2.0**-75, 2.0**60)), (3, (float("inf"),))])
def test_every_bf16_value_in_nvfp4(spread, scales):
    x = neighbours(16, spread)
    for g in scales:
        scale = None if g is None else torch.tensor([g])
        assert not oracle.differences(nvfp4(scale=scale).quantize(x), x, g), g


@pytest.mark.parametrize(("kind", "rule"), KINDS)
def test_scales_turn_where_the_rule_says(kind, rule):
    """Powers of two, the largest code, and the tie of `even` times every power of two, each with its neighbours in fp32."""
    bits = CODES[kind].mantissa
    marks = torch.tensor([1.0, oracle.BIG[kind] / 2 ** oracle.EMAX[kind], 2 - 2.0 ** -(bits + 1)])
    marks = (marks[:, None] * 2.0 ** torch.arange(-126, 128)).reshape(-1)
    near = (marks.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])).reshape(-1).view(torch.float32)
    tiny = torch.tensor([0.0, 2.0**-149, 2.0**-127, 3.4e38])
    x = torch.cat((near, tiny))[:, None]
    x = torch.cat((x, -x / 4), 1)
    assert not oracle.differences(mx(kind, scale_rule=rule).quantize(x), x)


FORMATS = st.one_of(
    st.builds(
        mx,
        st.sampled_from(list(CODES)),
        scale_rule=st.sampled_from(RULES),
        ways=st.sampled_from(["row", "col", "both"]),
    ),
    st.builds(nvfp4, ways=st.sampled_from(["row", "both"])),
)


@settings(max_examples=60, deadline=None)
@given(FORMATS, st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 60), st.booleans())
def test_any_bits_get_the_codes_of_the_definition(format, rows, pairs, seed, spread, bad):
    """Random mantissas; exponents in a window of random place and width; now and then a NaN or Inf."""
    random = np.random.default_rng(seed)
    low = random.integers(0, 255 - spread)
    exponents = random.integers(low, low + spread + 1, (2 * rows, 2 * pairs), np.int64)
    bits = (
        random.integers(0, 2**23, exponents.shape) | (exponents << 23) | (random.integers(0, 2, exponents.shape) << 31)
    )
    x = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    if bad:
        x[0, -1] = float("nan")
        x[-1, 0] = -float("inf")
    assert not oracle.differences(format.quantize(x), x)


def test_zeros_keep_their_sign_and_midpoints_go_to_the_even_code():
    v = torch.tensor([0.0, -0.0, 0.25, -0.75, 1.25, 1.75, 2.5, 3.5, -5.0, 5.0001, 100.0, float("nan")])
    assert encode_e2m1(v).tolist() == [0, 8, 0, 10, 2, 4, 4, 6, 14, 7, 7, 0]
    for format in (mx("e4m3"), mx("e2m1"), nvfp4()):
        q = format.quantize(torch.tensor([[0.0, -0.0]]))
        assert q.dequantize().signbit().tolist() == [[False, format.name == "mx"]], "a zero scale of NVFP4 has codes 0"


def test_back():
    assert widen_nibbles(torch.tensor([[0x10, 0xF7]], dtype=torch.uint8)).tolist() == [[0.0, 0.5, 6.0, -6.0]]
    e = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(wide_scale(e.view(torch.float8_e8m0fnu)).double(), 2.0 ** (torch.arange(255).double() - 127))
    assert wide_scale(torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu)).isnan().all()
    x = torch.tensor([[1.0, 2.0, -3.0, 6.0] * 8] * 2)
    for format in (mx("e4m3"), mx("e5m2", ways="col"), mx("e2m1", ways="both")):
        assert torch.equal(format.quantize(x).dequantize(), x), format
    torch.testing.assert_close(nvfp4(ways="col").quantize(x).dequantize(), x, rtol=0.1, atol=0)


def test_one_bad_number_spoils_its_block_alone():
    x = torch.ones(2, 64)
    x[0, 3] = float("inf")
    for format in (mx("e4m3"), mx("e2m1"), nvfp4()):
        bad = format.quantize(x).dequantize().isnan()
        assert bad[0, : format.block].all() and bad.sum() == format.block, format


def test_layouts():
    x = torch.randn(2, 3, 70, dtype=torch.bfloat16)
    q = mx("e2m1", ways="both").quantize(x)
    assert [tuple(t.shape) for t in q.tensors()] == [(2, 3, 35), (6, 3), (70, 3), (70, 1)]
    assert (q.data.dtype, q.scale.dtype) == (torch.uint8, torch.float8_e8m0fnu)
    q = nvfp4(ways="both").quantize(x)
    assert [tuple(t.shape) for t in q.tensors()] == [(2, 3, 35), (6, 5), (1,), (70, 3), (70, 1), (1,)]
    made = q.format.empty(x.shape, x.dtype, "cpu")
    assert [(t.shape, t.dtype, t.stride()) for t in made.tensors()] == [
        (t.shape, t.dtype, t.stride()) for t in q.tensors()
    ]
    assert torch.equal(q.clone().data_t, q.data_t) and torch.equal(q.dequantize(), q.detach().dequantize())


@pytest.mark.parametrize("format", [mx("e4m3"), mx("e2m1", ways="col"), nvfp4(), nvfp4(ways="both")], ids=str)
def test_products_find_what_they_need(format):
    assert Format.parse(format.key) == format
    q = format.quantize(torch.randn(4, 96))
    turned = q.t()
    assert turned.shape == (96, 4) and turned.format == format.transposed() and turned.format.transposed() == format
    way = "col" if format.ways == "col" else "row"
    scale, name = format.recipe(q.scale_t if way == "col" else q.scale)
    assert name == f"BlockWise1x{format.block}" and scale.dim() == 2
    shared, zero = format.extras(q, way)
    assert (shared is not None) == (format.name == "nvfp4") and zero is None
    assert torch.equal(unswizzle_scale(swizzle_scale(scale), *scale.shape).view(torch.uint8), scale.view(torch.uint8))
    if format.ways != "both":
        assert torch.equal(turned.dequantize(), q.dequantize().t())


def test_groups_are_for_rows():
    x, ends = torch.randn(6, 32), torch.tensor([2, 4])
    x[5] = 1e9
    q = nvfp4().quantize(x, offsets=ends)
    assert torch.equal(q.shared, nvfp4().quantize(x[:4]).shared)
    with pytest.raises(ValueError, match="ways='row' alone"):
        mx("e4m3", ways="both").quantize(x, offsets=ends)


def test_refusals():
    for make, message in (
        (lambda: mx("e3m2"), "dtype: must be one of"),
        (lambda: mx("e4m3", scale_rule="round"), "scale_rule: must be one of"),
        (lambda: mx("e4m3", ways="none"), "ways: must be one of"),
        (lambda: nvfp4(scale=torch.ones(2)), "scale: must be one element"),
        (lambda: Format.parse("mx:e4m3:row"), "is not dtype:ways:rule"),
        (lambda: Format.parse("nvfp4:row"), "is not ways:source"),
        (lambda: Format.parse("nvfp4:row:static").quantize(torch.ones(2, 2)), "needs its static scale"),
        (lambda: tw.quantize(torch.ones(2, 5), mx("e2m1")), "last dimension must be even, got 5"),
        (lambda: tw.quantize(torch.ones(3, 4), nvfp4(ways="col")), "number of rows must be even, got 3"),
        (lambda: tw.quantize(torch.tensor(1.0), mx("e4m3")), "dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_compiled_and_differentiable():
    format = nvfp4(ways="both")
    x = torch.randn(4, 64, requires_grad=True)
    eager = tw.quantize(x, format)
    compiled = torch.compile(lambda x: tw.quantize(x, format), backend="aot_eager", fullgraph=True)(x)
    for a, b in zip(eager.tensors(), compiled.tensors()):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    compiled.dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 64))
