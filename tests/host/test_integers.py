"""INT8 and INT4 formats on CPU tensors, bit for bit against the oracle; their layouts; weights of AWQ and GPTQ checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import integer_oracle as oracle
from tilewright.core.format import Format
from tilewright.formats.fp8 import GRANULARITIES, WAYS
from tilewright.formats.integers import int4, int8, unpack_nibbles
from tilewright.formats.weights import from_awq, from_gptq, high_first
from tilewright.gemm.operands import scale_shape, values

SIZES = {"tensor": (0, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128)}
INT4 = [int4(ways="both"), int4("1x128", ways="both"), int4("1x128", zero=True, ways="both")]


def assert_same(found: torch.Tensor, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(found.numpy(), wanted)


def assert_same_scale(fmt, stored: torch.Tensor, wanted: np.ndarray, shape: tuple[int, int]) -> None:
    """A stored scale, or zero point, is this one, where an empty value has any at all."""
    found, recipe = fmt.recipe(stored)
    down, across = scale_shape(recipe, *shape)
    assert found.shape == (down, across) and (stored.dim() == 1 or stored.numel() == 0 or stored.stride(0) % 4 == 0)
    assert_same(found, wanted[:down, :across])


@pytest.mark.parametrize("shape", [(130, 258), (7, 2), (1, 1), (3, 0), (0, 5)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_int8_bits(granularity, shape):
    for x in (oracle.matrix(*shape), oracle.matrix(*shape, seed=1)[::-1].copy()):
        q = int8(granularity, ways="both").quantize(torch.from_numpy(x))
        down, across = SIZES[granularity]
        for data, scale, y in ((q.data, q.scale, x), (q.data_t, q.scale_t, x.T)):
            codes, scales, _ = oracle.blocks(y, down, across, 127)
            assert data.dtype == torch.int8 and data.is_contiguous()
            assert_same(data, codes)
            assert_same_scale(q.format, scale, scales, y.shape)


@pytest.mark.parametrize("shape", [(130, 258), (8, 2), (4, 0), (0, 6)])
@pytest.mark.parametrize("fmt", INT4, ids=str)
def test_int4_bits(fmt, shape):
    x = oracle.matrix(*shape)
    q = fmt.quantize(torch.from_numpy(x))
    across = 128 if fmt.granularity == "1x128" else 0
    for data, scale, zero, y in ((q.data, q.scale, q.zero, x), (q.data_t, q.scale_t, q.zero_t, x.T)):
        codes, scales, points = oracle.blocks(y, 1, across, 7, fmt.zero)
        assert data.dtype == torch.uint8 and data.shape == (y.shape[0], y.shape[1] // 2) and data.is_contiguous()
        low, high = data.numpy() & 15, data.numpy() >> 4
        assert (low == codes[:, 0::2].astype(int) % 16).all() and (high == codes[:, 1::2].astype(int) % 16).all()
        assert_same_scale(fmt, scale, scales, y.shape)
        if fmt.zero:
            assert_same_scale(fmt, zero, points, y.shape)


@pytest.mark.parametrize(
    "fmt", [int8("row"), int8("1x128"), int4("row"), int4("1x128"), int4("1x128", zero=True)], ids=str
)
def test_ties_are_even(fmt):
    largest = 127 if fmt.name == "int8" else 7
    x = oracle.ties(largest, 64)
    q = fmt.quantize(torch.from_numpy(x))
    across = 128 if fmt.granularity == "1x128" else 0
    codes, _, _ = oracle.blocks(x, 1, across, largest, getattr(fmt, "zero", False))
    assert_same(q.data if fmt.name == "int8" else unpack_nibbles(q.data), codes)


def test_an_element_is_half_a_step_off_at_most():
    x = torch.from_numpy(oracle.matrix(40, 300, seed=2))[6:]
    for fmt in (int8("1x128"), int8("128x128"), int4("1x128"), int4("1x128", zero=True), int4("row", ways="col")):
        q = fmt.quantize(x)
        scale, recipe = fmt.recipe(q.scale if q.scale is not None else q.scale_t)
        step = values(torch.ones(x.shape if q.scale is not None else x.shape[::-1], dtype=torch.int8), scale, recipe)
        step = step if q.scale is not None else step.t()
        off = (q.dequantize(torch.float64) - x.double()).abs() / step
        bound = 1.0 if getattr(fmt, "zero", False) else 0.5  # a zero point may cost the largest value another half
        assert off.max() <= bound * (1 + 1e-5) and off.max() > 0.4


@pytest.mark.parametrize("fmt", [int8(g, ways="both") for g in GRANULARITIES] + INT4, ids=str)
def test_products_take_what_the_value_is(fmt):
    x = torch.from_numpy(oracle.matrix(140, 260, seed=3))
    q = fmt.quantize(x)
    assert Format.parse(fmt.key) == fmt and fmt.transposed().transposed() == fmt
    row = values(q.data, *fmt.recipe(q.scale), *fmt.extras(q, "row"))
    twin = values(q.data_t, *fmt.recipe(q.scale_t), *fmt.extras(q, "col"))
    torch.testing.assert_close(row.float(), q.dequantize(torch.float32), rtol=2e-7, atol=0, equal_nan=True)
    back = q.t()
    assert back.shape == (260, 140)
    torch.testing.assert_close(twin.float(), back.dequantize(torch.float32), rtol=2e-7, atol=0, equal_nan=True)
    again = q.clone()
    assert [t.stride() for t in again.tensors()] == [t.stride() for t in q.tensors()]
    assert all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(again.tensors(), q.tensors()))


@pytest.mark.parametrize("ways", WAYS)
def test_storage_is_that_of_the_reference(ways):
    for fmt in (int8("1x128", ways=ways), int8("row", ways=ways), int4(ways=ways), int4("1x128", zero=True, ways=ways)):
        q = fmt.quantize(torch.randn(3, 2, 6))
        like = fmt.empty((3, 2, 6), torch.float32, "meta")
        assert [(t.shape, t.stride(), t.dtype) for t in q.tensors()] == [
            (t.shape, t.stride(), t.dtype) for t in like.tensors()
        ]
        assert q.dequantize().shape == (3, 2, 6)


def test_gradients_pass():
    x = torch.randn(4, 6, requires_grad=True)
    int4("1x128", zero=True).quantize(x).dequantize().backward(torch.full((4, 6), 0.25))
    assert (x.grad == 0.25).all()


def test_refusals():
    with pytest.raises(ValueError, match="even number of elements in a row, not 5"):
        int4().quantize(torch.randn(4, 5))
    with pytest.raises(ValueError, match="even number of rows, not 3"):
        int4(ways="col").empty((3, 4), torch.float32, "cpu")
    with pytest.raises(ValueError, match="has no groups"):
        int4().quantize(torch.randn(4, 4), offsets=torch.tensor([2, 4]))
    with pytest.raises(ValueError, match="has no groups"):
        int4().empty((4, 4), torch.float32, "cpu", 2)
    with pytest.raises(ValueError, match="only granularity '1x128' has zero points"):
        int4(zero=True)
    with pytest.raises(ValueError, match="granularity: must be one of row, 1x128"):
        int4("128x128")
    with pytest.raises(ValueError, match="is not granularity:ways"):
        Format.parse("int8:row")
    with pytest.raises(ValueError, match="is not granularity:ways"):
        Format.parse("int4:row:row:point")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def weight(K: int, N: int, group: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned codes [K, N], zero points and scales [groups, N]."""
    rng = np.random.default_rng(seed)
    groups = -(-K // group)
    return (
        rng.integers(0, 16, (K, N)),
        rng.integers(0, 16, (groups, N)),
        rng.uniform(0.01, 0.1, (groups, N)).astype(np.float16),
    )


def words(codes: np.ndarray, order: tuple[int, ...]) -> torch.Tensor:
    """Eight codes along a row in an int32, the lowest nibble holding the first that `order` names."""
    made = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(made.shape[1]):
        for nibble, which in enumerate(order):
            made[:, word] |= (codes[:, 8 * word + which].astype(np.uint32)) << np.uint32(4 * nibble)
    return torch.from_numpy(made.view(np.int32).copy())


def true_weight(u, z, s, group_of: np.ndarray) -> np.ndarray:
    return ((u - z[group_of]) * s.astype(np.float64)[group_of]).T


AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN = tuple(range(8))


@pytest.mark.parametrize("K,group", [(384, 128), (512, 256), (200, -1)])
def test_awq(K, group):
    size = K if group == -1 else group
    u, z, s = weight(K, 16, size)
    q = from_awq(words(u, AWQ), words(z, AWQ), torch.from_numpy(s), group)
    assert q.shape == (16, K) and q.dtype == torch.float16 and q.format == int4("1x128", zero=True)
    assert_same(q.dequantize(torch.float32), true_weight(u, z, s, np.arange(K) // size).astype(np.float32))
    like = q.format.empty(q.shape, q.dtype, "meta")
    assert [(t.shape, t.stride()) for t in q.tensors()] == [(t.shape, t.stride()) for t in like.tensors()]


@pytest.mark.parametrize("version", [1, 2])
def test_gptq(version):
    K, N = 256, 24
    u, z, s = weight(K, N, 128)
    stored = words((z - 1) % 16 if version == 1 else z, PLAIN)
    packed = words(u.T, PLAIN).t().contiguous()
    runs = torch.arange(K, dtype=torch.int32) // 128
    for g_idx in (None, runs):
        q = from_gptq(packed, stored, torch.from_numpy(s), g_idx, version=version, dtype=torch.bfloat16)
        assert q.dtype == torch.bfloat16
        assert_same(q.dequantize(torch.float32), true_weight(u, z, s, np.arange(K) // 128).astype(np.float32))


def test_gptq_in_act_order():
    K, N = 256, 8
    u, z, s = weight(K, N, 128, seed=1)
    group_of = np.random.default_rng(2).permutation(np.arange(K) // 128)
    arguments = words(u.T, PLAIN).t(), words((z - 1) % 16, PLAIN), torch.from_numpy(s), torch.from_numpy(group_of)
    with pytest.raises(ValueError, match="reorder=True"):
        from_gptq(*arguments)
    order = arguments[-1].argsort(stable=True)
    wanted = true_weight(u, z, s, group_of)[:, order.numpy()].astype(np.float32)
    assert_same(from_gptq(*arguments, reorder=True).dequantize(torch.float32), wanted)
    with pytest.raises(ValueError, match="every group must have 128 inputs"):
        from_gptq(*arguments[:3], torch.zeros(K), reorder=True)


def test_checkpoint_refusals():
    u, z, s = weight(256, 16, 128)
    with pytest.raises(ValueError, match="group: must be a multiple of 128"):
        from_awq(words(u, AWQ), words(z, AWQ), torch.from_numpy(s), 64)
    with pytest.raises(ValueError, match="scales: must be"):
        from_awq(words(u, AWQ), words(z, AWQ), torch.from_numpy(s[:1]))
    with pytest.raises(ValueError, match="qweight: must be an int32 matrix"):
        from_awq(words(u, AWQ).long(), words(z, AWQ), torch.from_numpy(s))
    with pytest.raises(ValueError, match="version: must be 1 or 2"):
        from_gptq(words(u.T, PLAIN).t(), words(z, PLAIN), torch.from_numpy(s), version=3)


def test_the_other_order_of_nibbles():
    codes = torch.arange(256, dtype=torch.uint8)
    assert [int(c) for c in high_first(codes)] == [(c % 16) * 16 + c // 16 for c in range(256)]
    assert torch.equal(high_first(high_first(codes.view(torch.int8))), codes.view(torch.int8))
    with pytest.raises(TypeError, match="two codes a byte"):
        high_first(codes.float())
