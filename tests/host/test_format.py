"""Formats on a CPU: FP8's reference against the oracle, layouts, canonical strings, `Quantized`, gradients, converters."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import fp8_oracle as oracle
from tests.fp8_oracle import SOME, amaxes, bits, codes, every, matrix, ties
from tilewright.core.format import Format, Quantized, pack, store, unpack
from tilewright.formats.fp8 import CODES, GRANULARITIES, RULES, WAYS, Fp8, fp8
from tilewright.formats.interchange import from_scaled_mm, from_te_blockwise, to_scaled_mm, to_te_blockwise
from tilewright.formats.nvfp4 import nvfp4

FORMS = list(itertools.product(CODES, (True, False), RULES))
TINY = 1e-5


@pytest.mark.parametrize("code", CODES)
def test_every_16_bit_value_and_every_tie(code):
    for x in (every(torch.bfloat16), every(torch.float16), ties(code)):
        q = fp8("tensor", code, scale="unit").quantize(x.reshape(1, -1))
        assert (codes(q.data)[0] == oracle.encode(torch.where(x.isfinite(), x, torch.nan).numpy(), code)).all()
        assert q.scale.tolist() == [1.0]


@pytest.mark.parametrize("code", CODES)
def test_codes_decode_to_their_values(code):
    every_code = torch.arange(256, dtype=torch.uint8).view(CODES[code].dtype).reshape(2, 128)
    q = Quantized.from_tensors(fp8("tensor", code, scale="unit"), torch.float32, (2, 128), (every_code, torch.ones(1)))
    table = oracle.decode_table(code).reshape(2, 128)
    assert (bits(q.dequantize()) == bits(table)).all()


@pytest.mark.parametrize(("code", "pow2", "rule"), FORMS)
def test_a_static_scale_of_0_spoils_zeros_and_saturates_the_rest(code, pow2, rule):
    """The rule of docs/contracts.md, and that the least scale which a calibration writes does neither."""
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0, 1e-30, -torch.inf, torch.nan]])
    least, tiny = torch.tensor([1e-12]), torch.tensor([2.0**-128])
    largest = codes(torch.tensor([[CODES[code].max]]).to(CODES[code].dtype)).item()
    spoilt = [0x7F, 0x7F, largest, largest | 0x80, largest, 0x7F, 0x7F]
    found = [
        codes(fp8("tensor", code, pow2=pow2, rule=rule, scale=s).quantize(x).data)[0].tolist()
        for s in (0 * tiny, tiny, least)
    ]
    assert found[0] == spoilt and (found[1] == spoilt) == (rule == "te")
    assert found[2] == [0, 0x80, largest, largest | 0x80, 0, 0x7F, 0x7F]


@pytest.mark.parametrize(("code", "pow2", "rule"), FORMS)
def test_scales_of_every_magnitude(code, pow2, rule):
    amax = amaxes(code)
    q = fp8("row", code, pow2=pow2, rule=rule).quantize(torch.from_numpy(amax).reshape(-1, 1))
    scale, _ = oracle.scales(amax, code, pow2, rule)
    assert (bits(q.scale) == bits(scale)).all()
    usual = np.isfinite(amax) & (amax > 1e-25)
    reach = amax[usual].astype(np.float64) / scale[usual]
    assert (reach <= oracle.MAX[code] * (1 + 2.0**-22)).all()
    assert (2 * reach > oracle.MAX[code]).all() if pow2 else (reach > oracle.MAX[code] * (1 - 2.0**-22)).all()
    if pow2:
        assert (bits(q.scale)[np.isfinite(scale)] & 0x7FFFFF == 0).all()


@pytest.mark.parametrize(("code", "pow2", "rule"), FORMS)
def test_every_bf16_value_as_a_member_of_a_block(code, pow2, rule):
    x = every(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() > 0)]
    x = x[torch.argsort(x.abs(), stable=True)][: x.numel() // 128 * 128].reshape(
        -1, 128
    )  # each block a scale of its own
    q = fp8("1x128", code, pow2=pow2, rule=rule).quantize(x)
    for r in range(0, x.shape[0], 7):
        data, scale = oracle.quantize_block(x[r].numpy(), code, pow2, rule)
        assert (codes(q.data)[r] == data).all()
        assert bits(q.scale[:, r]) == bits(np.array([scale]))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("ends", [None, [0, 37, 37, 150], [128, 130]], ids=["whole", "uneven", "aligned"])
def test_every_granularity_and_direction(granularity, ends):
    x = matrix(150, 140)
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    for code, pow2, rule in SOME:
        expected = oracle.quantize(x.numpy(), granularity, code, pow2, rule, ends)
        for ways in WAYS if pow2 else ("both",):
            q = fp8(granularity, code, ways=ways, pow2=pow2, rule=rule).quantize(x, torch.bfloat16, offsets)
            assert q.shape == x.shape and q.dtype == torch.bfloat16
            for name, t in zip(q.format.tensor_names, q.tensors()):
                label = f"{q.format} {name}"
                if name.startswith("data"):
                    live = 150 if ends is None else ends[-1]
                    axis = int(name == "data_t")
                    found, wanted = (np.take(a, range(live), axis) for a in (codes(t), expected[name]))
                    assert (found == wanted).all(), label
                else:
                    wanted = bits(expected[name])
                    flat = t[: wanted.size].reshape(wanted.shape) if t.dim() == 1 else t
                    found = bits(flat[: wanted.shape[0], : wanted.shape[1]])
                    assert (found == wanted).all(), label


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [0.0371, 2.0**-4, 3e-39, 1e30])
def test_static_scale(rule, value):
    x = torch.cat([ties("e4m3"), torch.tensor([float("inf"), -float("inf")])]).reshape(1, -1)
    scale = torch.tensor([value])
    q = fp8("tensor", rule=rule, ways="both", scale=scale).quantize(x)
    s = np.float32(value)
    with np.errstate(over="ignore", invalid="ignore"):
        v = x.numpy() * (np.float32(1) / s) if rule == "te" else x.numpy() / s
    v = np.where(np.isfinite(x.numpy()), v, np.nan)
    assert (codes(q.data) == oracle.encode(v, "e4m3")).all()
    assert (codes(q.data_t) == codes(q.data).T).all()
    assert q.scale.item() == s and q.scale_t.item() == s


def test_a_bad_value_poisons_its_own_block_alone():
    x = torch.randn(256, 256)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for granularity, row, col in (
            ("1x128", (7, slice(128, 256)), (slice(0, 128), 200)),
            ("row", (7,), (slice(None), 200)),
        ):
            clean = fp8(granularity, ways="both").quantize(x).dequantize()
            y = x.clone()
            y[7, 200] = bad
            q = fp8(granularity, ways="both").quantize(y)
            seen = torch.zeros(256, 256, dtype=torch.bool)
            seen[row] = True
            assert torch.equal(q.data.float().isnan(), seen) and torch.equal(q.dequantize().isnan(), seen)
            assert torch.equal(q.dequantize()[~seen], clean[~seen])
            seen_t = torch.zeros(256, 256, dtype=torch.bool)
            seen_t[col] = True
            assert torch.equal(q.data_t.t().float().isnan(), seen_t)


# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(150, 300), (2, 75, 130), (1,), (5,), (0, 7), (7, 0), (3, 1), (2, 0, 3)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_layout(granularity, shape):
    M, N = int(np.prod(shape[:-1])), shape[-1]
    rows, cols = -(-M // 128), -(-N // 128)
    wanted = {
        "tensor": ((1,), (1,)), "row": ((M,), (N,)), "1x128": ((cols, M), (rows, N)),
        "128x128": ((rows, cols), (cols, rows)),
    }[granularity]  # fmt: skip
    fmt = fp8(granularity, ways="both")
    q, e = fmt.quantize(torch.ones(shape)), fmt.empty(shape, torch.float32, "cpu")
    assert q.data.shape == shape and q.data_t.shape == (N, M)
    assert (q.scale.shape, q.scale_t.shape) == wanted
    for a, b in zip(q.tensors(), e.tensors()):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    for s in (q.scale, q.scale_t):
        assert s.dim() == 1 or s.numel() == 0 or (s.stride(1) == 1 and s.stride(0) == -(-s.shape[1] // 4) * 4)
    assert torch.equal(q.dequantize(), torch.ones(shape))


def test_grouped_layout():
    offsets = torch.tensor([100, 100, 140])
    for granularity, scale, scale_t in (
        ("1x128", (2, 150), (5, 130)), ("128x128", (5, 2), (2, 5)), ("row", (150,), (3, 130)), ("tensor", (1,), (1,)),
    ):  # fmt: skip
        fmt = fp8(granularity, ways="both")
        q = fmt.quantize(torch.randn(150, 130), offsets=offsets)
        assert (q.scale.shape, q.scale_t.shape) == (scale, scale_t) and q.offsets is offsets
        for a, b in zip(q.tensors(), fmt.empty((150, 130), torch.float32, "cpu", groups=3).tensors()):
            assert (a.shape, a.stride()) == (b.shape, b.stride())


def test_rows_past_the_last_group_have_no_effect():
    x = torch.randn(150, 130)
    dirty = x.clone()
    dirty[140:] = float("nan")
    for granularity in GRANULARITIES:
        fmt, offsets = fp8(granularity, ways="both"), torch.tensor([100, 140])
        a, b = (fmt.quantize(t, offsets=offsets) for t in (x, dirty))
        assert torch.equal(a.dequantize()[:140], b.dequantize()[:140])


def test_canonical_string():
    assert str(fp8(ways="both")) == "fp8:e4m3:1x128:both:pow2:te"
    assert str(fp8("128x1")) == str(fp8("1x128", ways="col"))
    scale = torch.tensor(0.5)
    for granularity, code, ways, pow2, rule in itertools.product(GRANULARITIES, CODES, WAYS, (True, False), RULES):
        for source in (None, "unit", scale) if granularity == "tensor" else (None,):
            fmt = fp8(granularity, code, ways=ways, pow2=pow2, rule=rule, scale=source)
            assert Format.parse(str(fmt)) == fmt == fmt.bare() and hash(fmt) == hash(fmt.bare())
    static = fp8("tensor", scale=scale)
    assert str(static).endswith(":static") and Format.parse(str(static), scale).tensor is scale


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: fp8("64x64"), "granularity"),
        (lambda: fp8(dtype="e3m4"), "dtype"),
        (lambda: fp8(ways="rows"), "ways"),
        (lambda: fp8("128x1", ways="both"), "ways"),
        (lambda: fp8(rule="other"), "rule"),
        (lambda: fp8("row", scale="unit"), "scale"),
        (lambda: fp8("tensor", scale="one"), "scale"),
        (lambda: fp8("tensor", scale=torch.ones(2)), "scale"),
        (lambda: fp8("tensor", scale=torch.ones(1, dtype=torch.float64)), "scale"),
        (lambda: fp8("row").with_scale(torch.ones(1)), "scale"),
        (lambda: Format.parse("fp8:e4m3:tensor:row:pow2:te:static").quantize(torch.ones(2, 2)), "scale"),
        (lambda: Format.parse("int3:a"), "format"),
        (lambda: Format.parse("fp8:e4m3:1x128"), "format"),
        (lambda: Format.parse("fp8:e4m3:1x128:row:pow3:te"), "scales"),
        (lambda: fp8().quantize(torch.tensor(1.0)), "y"),
        (lambda: Quantized.from_tensors(fp8(), torch.float32, (2, 2), ()), "tensors"),
    ],
)
def test_wrong_arguments_are_named(make, word):
    with pytest.raises(ValueError, match=rf"^{word}:"):
        make()


# ---- Quantized -------------------------------------------------------------------------------------------------------


def test_round_trip_through_flat_tensors():
    q = fp8("1x128", ways="both").quantize(torch.randn(130, 200).bfloat16())
    again = Quantized.from_tensors(q.format, q.dtype, q.shape, q.tensors())
    assert all(a is b for a, b in zip(again.tensors(), q.tensors()))
    carrier, tensors = unpack(q)
    assert carrier.shape == q.shape and carrier.stride() == (0, 0) and carrier.dtype == q.dtype
    assert torch.equal(pack(carrier, tensors, q.format).dequantize(), q.dequantize())
    names, context = q.__tensor_flatten__()
    flat = Quantized.__tensor_unflatten__({n: getattr(q, n) for n in names}, context, q.shape, q.stride())
    assert flat.format == q.format and torch.equal(flat.dequantize(), q.dequantize())


@pytest.mark.parametrize("format", [fp8("1x128"), fp8("1x128", ways="both"), nvfp4()], ids=str)  # of 2, 4 and 3 tensors
@pytest.mark.parametrize("offsets", [None, torch.tensor([7, 150])])
def test_a_maker_makes_values_of_a_kind(format, offsets):
    """What plans make results by: as the value itself, but of other tensors, each value of its own, with none of the first kept."""
    q = format.quantize(torch.randn(150, 256).bfloat16(), offsets=offsets)
    make, tensors = q.maker(), [t.clone() for t in q.tensors()]
    made, other = make((*tensors, offsets)), make((*q.tensors(), None))
    assert type(made) is Quantized and made.format is q.format and made.key == q.key
    assert (made.shape, made.stride(), made.dtype, made.device) == (q.shape, q.stride(), q.dtype, q.device)
    assert [id(t) for t in made.tensors()] == [id(t) for t in tensors] and made.offsets is offsets
    assert other.offsets is None and other.data is q.data and torch.equal(made.dequantize(), q.dequantize())
    with pytest.raises(TypeError, match="dequantize"):
        torch.relu(made)
    kept = weakref.ref(tensors[0])
    del made, tensors
    assert kept() is None


def test_copies_keep_bits_and_layout():
    offsets = torch.tensor([7, 150])
    q = fp8("1x128", ways="both").quantize(torch.randn(150, 131).bfloat16(), offsets=offsets)
    for made in (q.clone(), q.to("cpu", copy=True), q.detach(), q.to(torch.float32)):
        assert isinstance(made, Quantized) and torch.equal(made.offsets, offsets) and made.format == q.format
        for a, b in zip(made.tensors(), q.tensors()):
            assert a.stride() == b.stride() and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert q.to(torch.float32).dtype == torch.float32 and q.to("meta").device.type == "meta"
    assert q.clone().data_t.data_ptr() != q.data_t.data_ptr() == q.detach().data_t.data_ptr()


def test_sums_are_plain():
    x = torch.randn(3, 130)
    q = fp8().quantize(x)
    for made in (q + x, x + q, torch.add(q, 1.0)):
        assert type(made) is Tensor
    assert torch.equal(q + x, q.dequantize() + x)


@pytest.mark.parametrize(
    "use",
    [
        lambda q: q * 2, lambda q: 2 - q, lambda q: q @ q.dequantize().t(), lambda q: q.view(-1), lambda q: q.sum(),
        lambda q: torch.exp(q), lambda q: q[0], lambda q: -q, lambda q: q.add_(1), lambda q: q == q, lambda q: q / q,
    ],
)  # fmt: skip
def test_other_uses_say_what_to_do(use):
    with pytest.raises(TypeError, match=r"call \.dequantize\(\) first"):
        use(fp8().quantize(torch.randn(3, 130)))


def test_store():
    y = torch.randn(4, 130, dtype=torch.float64)
    assert torch.equal(store(y, None, torch.bfloat16), y.bfloat16())
    q, single = store(y, fp8(), torch.bfloat16), fp8().quantize(y.float())
    assert q.dtype == torch.bfloat16 and torch.equal(q.data.view(torch.uint8), single.data.view(torch.uint8))


def test_fake_tensors():
    real = fp8("128x128", ways="both").quantize(torch.randn(150, 130).bfloat16(), offsets=torch.tensor([3, 150]))
    with FakeTensorMode() as mode:
        x, offsets = torch.empty(150, 130, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int64)
        fake = fp8("128x128", ways="both").quantize(x, offsets=offsets)
        assert isinstance(mode.from_tensor(real), Quantized)
        assert fake.dequantize().shape == (150, 130)
    for a, b in zip(fake.tensors(), real.tensors()):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


# ---- gradients -------------------------------------------------------------------------------------------------------

EDGES = {
    "inside": (lambda x: fp8(ways="both").quantize(x).dequantize(), None),
    "result": (lambda x: fp8(ways="both").quantize(x), lambda q: q.dequantize()),
    "argument": (None, lambda q: q.dequantize()),
    "unpacked": (lambda x: fp8().quantize(x), lambda q: pack(*unpack(q), fp8()).dequantize()),
    "summed": (lambda x: fp8("row").quantize(x), lambda q: q + q.detach()),
}


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
@pytest.mark.parametrize("edge", EDGES)
def test_a_small_gradient_survives_a_quantised_edge(edge, backend):
    """1e-5 is below half the smallest e4m3 value: as an fp8 gradient it would be 0."""
    torch._dynamo.reset()
    first, second = EDGES[edge]
    if backend != "none":
        compiled = [f and torch.compile(f, fullgraph=True, backend=backend) for f in (first, second)]
        first, second = compiled
    x = torch.randn(4, 130, dtype=torch.bfloat16, requires_grad=True)
    y = first(x) if first else fp8().quantize(x)
    y = second(y) if second else y
    expected = (fp8("row") if edge == "summed" else fp8()).quantize(x).dequantize()
    assert torch.equal(y, expected * (2 if edge == "summed" else 1))
    y.backward(torch.full_like(y, TINY))
    assert type(x.grad) is Tensor and torch.equal(x.grad, torch.full_like(x, TINY))


def test_gradients_of_a_quantised_leaf_accumulate():
    leaf = fp8().quantize(torch.randn(4, 130).bfloat16()).requires_grad_()
    for _ in range(2):
        leaf.dequantize(torch.float32).backward(torch.full((4, 130), TINY))
    assert type(leaf.grad) is Tensor and leaf.grad.dtype == torch.bfloat16
    assert torch.equal(leaf.grad, torch.full((4, 130), 2 * TINY, dtype=torch.bfloat16))


# ---- other libraries -------------------------------------------------------------------------------------------------


def same(a: Quantized, b: Quantized) -> None:
    assert a.format == b.format and a.shape == b.shape and a.dtype == b.dtype
    for x, y in zip(a.tensors(), b.tensors()):
        assert x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [(256, 512), (150, 300), (3, 5), (130, 640), (128, 1)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scaled_mm_round_trip(granularity, shape):
    q = fp8(granularity, ways="both", pow2=False, rule="exact").quantize(torch.randn(shape).bfloat16())
    for side in "ab":
        row, col = to_scaled_mm(q, side, "row"), to_scaled_mm(q, side, "col")
        same(from_scaled_mm(row, col, side=side, pow2=False, rule="exact"), q)
        for way, operand in (("row", row), ("col", col)):
            made = from_scaled_mm(**{way: operand}, side=side, pow2=False, rule="exact")
            assert made.shape == q.shape and made.format.ways == way
            for a, b in zip(to_scaled_mm(made, side, way)[:2], operand[:2]):
                assert a.shape == b.shape and a.stride() == b.stride()
                assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_scaled_mm_gives_the_product(granularity):
    x, w = torch.randn(32, 512).bfloat16(), torch.randn(64, 512).bfloat16()
    qx, qw = (fp8(granularity).quantize(t) for t in (x, w))
    a, b = to_scaled_mm(qx, "a"), to_scaled_mm(qw, "b")
    y = F.scaled_mm(a.mat, b.mat, a.scale, a.recipe, b.scale, b.recipe, output_dtype=torch.float32)
    exact = qx.dequantize(torch.float64) @ qw.dequantize(torch.float64).t()
    assert (y - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("sizes", [(256, 512, 384), (64, 1152, 128), (160, 128, 256)])
@pytest.mark.parametrize("pair", [("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128"), ("row", "row")])
def test_scaled_mm_takes_these_operands(pair, sizes):
    """torch's own checks of shapes and strides, on fake tensors: the CPU has no blockwise product."""
    (M, K, N), (left, right) = sizes, pair
    if "128x128" in left and M % 128:
        return
    with FakeTensorMode():
        a = to_scaled_mm(fp8(left).quantize(torch.empty(M, K)), "a")
        b = to_scaled_mm(fp8(right).quantize(torch.empty(N, K)), "b")
        y = F.scaled_mm(a.mat, b.mat, a.scale, a.recipe, b.scale, b.recipe, output_dtype=torch.bfloat16)
        assert y.shape == (M, N)


@pytest.mark.parametrize("shape", [(256, 512), (2, 75, 300), (5, 3), (130, 640)])
@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
@pytest.mark.parametrize("ways", WAYS)
def test_transformer_engine_round_trip(granularity, shape, ways):
    q = fp8(granularity, "e5m2", ways=ways).quantize(torch.randn(shape).bfloat16())
    fields = to_te_blockwise(q)
    same(from_te_blockwise(fields), q)
    M, N = int(np.prod(shape[:-1])), shape[-1]
    rows, cols = -(-M // 128), -(-N // 128)
    round4 = lambda n: -(-n // 4) * 4  # noqa: E731
    if ways != "col":
        wanted = (cols, round4(M)) if granularity == "1x128" else (rows, round4(cols))
        assert fields["rowwise_data"].shape == shape and fields["rowwise_scale_inv"].shape == wanted
        assert fields["rowwise_data"].data_ptr() == q.data.data_ptr()
        assert fields["rowwise_scale_inv"].data_ptr() == q.scale.data_ptr()
    if ways != "row":
        wanted = (rows, round4(N)) if granularity == "1x128" else (cols, round4(rows))
        assert fields["columnwise_data"].shape == (N, *shape[:-1]) and fields["columnwise_scale_inv"].shape == wanted
    assert fields["fp8_dtype"] == "kFloat8E5M2" and fields["is_2D_scaled"] == (granularity == "128x128")
    assert all(t is None or t.is_contiguous() for t in fields.values() if not isinstance(t, (str, bool)))


def test_converters_refuse_what_they_cannot_hold():
    q = fp8("row").quantize(torch.randn(8, 8))
    with pytest.raises(ValueError, match="^q:"):
        to_te_blockwise(q)
    with pytest.raises(ValueError, match="^way:"):
        to_scaled_mm(q, way="col")
    with pytest.raises(ValueError, match="^side:"):
        to_scaled_mm(q, side="c")
    with pytest.raises(ValueError, match="^q:"):
        to_scaled_mm(fp8().quantize(torch.randn(8, 8), offsets=torch.tensor([8])))
    with pytest.raises(ValueError, match="^row, col:"):
        from_scaled_mm()
    assert isinstance(Format.parse(q.format.key), Fp8)
