"""`tilewright.jax` on JAX's CPU: codes equal to torch's, products and gradients near the truth, what is lowered for a GPU, errors.

jax-triton is stood in for by a module that notes what it is asked to launch."""

from __future__ import annotations

import math
import re
import sys
import types

import pytest
import torch

import tilewright as tw

jax = pytest.importorskip("jax", reason="jax is not installed: pip install jax")

import jax.numpy as jnp  # noqa: E402

from tests.fp8_oracle import decode_table  # noqa: E402
from tilewright.jax import fp8, gemm_fp8, quantize_fp8  # noqa: E402

K, N = 96, 64


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def array(t: torch.Tensor) -> jax.Array:
    wide = jnp.asarray(t.float().numpy())
    return wide.astype(str(t.dtype).removeprefix("torch."))


def tensor(a: jax.Array) -> torch.Tensor:
    return torch.tensor(a.astype("float32").tolist(), dtype=torch.float64)


def codes_of(a: jax.Array) -> list[int]:
    assert a.dtype == jnp.float8_e4m3fn
    return jax.lax.bitcast_convert_type(a, jnp.uint8).reshape(-1).tolist()


def torch_codes(t: torch.Tensor, scale: float) -> list[int]:
    return tw.quantize(t, tw.fp8("tensor", scale=torch.tensor([scale]))).data.view(torch.uint8).reshape(-1).tolist()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def edges() -> torch.Tensor:
    """Half-way between codes and next to that, what saturates, what is not finite, both signs of it all."""
    there = torch.tensor(decode_table("e4m3")[:127], dtype=torch.float32)
    half = (there[1:] + there[:-1]) / 2
    far = torch.tensor([math.inf])
    rest = torch.tensor([448.0, 464.0, 464.1, 480.0, 1e30, math.inf, math.nan, 0.0, 2.0**-10, 2.0**-11, 1e-30])
    some = torch.cat([half, torch.nextafter(half, far), torch.nextafter(half, -far), rest])
    return torch.cat([some, -some])


# ---- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.0137, 3.7, 2.0**-9, 448.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_codes_are_those_of_torch(dtype, scale):
    x = (torch.cat([edges(), drawn(4000, dtype=torch.float32) * 50.0]) * scale).to(dtype)
    assert codes_of(jax.jit(quantize_fp8)(array(x), scale)) == torch_codes(x, scale)
    assert codes_of(quantize_fp8(array(x).reshape(-1, 2), jnp.float32([scale]))) == torch_codes(x, scale)


@pytest.mark.parametrize("off", [-3, -1, 0, 2, 3])
def test_a_reciprocal_that_a_division_gets_wrong_is_mended(off):
    source = torch.Generator().manual_seed(0)
    bits = torch.randint(0x00800000, 0x7E800000, (1 << 14,), generator=source, dtype=torch.int32)
    hard = [0x3F800001, 0x3FFFFFFF, 0x3FFFFFFE, 0x3F800000, 0x00800000, 0x7E7FFFFF, 0x3FC00000]
    scale = torch.cat([bits, torch.tensor(hard, dtype=torch.int32)]).view(torch.float32)
    exact = (1.0 / scale.double()).float()
    guess = (exact.view(torch.int32) + off).view(torch.float32)
    found = fp8.mended(array(scale), array(guess))
    assert found.tolist() == exact.tolist()
    assert fp8.mended(array(-scale[:64]), array(-guess[:64])).tolist() == (-exact[:64]).tolist()


def test_what_has_no_normal_reciprocal_is_left_to_the_division():
    for scale in (0.0, math.inf, 2.0**127):
        found = float(fp8.reciprocal(jnp.float32(scale)))
        assert found == pytest.approx(1.0 / scale if scale else math.inf)
    assert math.isnan(float(fp8.reciprocal(jnp.float32(math.nan))))
    assert codes_of(quantize_fp8(jnp.float32([0.0, 1.0, -1.0]), 0.0)) == torch_codes(
        torch.tensor([0.0, 1.0, -1.0]), 0.0
    )


# ---- products --------------------------------------------------------------------------------------------------------


def truth(x: torch.Tensor, w: torch.Tensor, scale_x: float, scale_w: float) -> torch.Tensor:
    a, b = (
        torch.tensor(torch_codes(t, s), dtype=torch.uint8).view(torch.float8_e4m3fn).view(t.shape).double() * s
        for t, s in ((x, float(torch.tensor(scale_x))), (w, float(torch.tensor(scale_w))))
    )
    return a @ b


def off(found: jax.Array, exact: torch.Tensor) -> float:
    found = tensor(found)
    assert found.shape == exact.shape
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.bfloat16, 1.8e-3), (torch.float16, 1.8e-3 / 8), (torch.float32, 5e-4)], ids=str
)
@pytest.mark.parametrize("leading", [(), (5,), (3, 40)], ids=str)
def test_products_are_within_class_f(dtype, bar, leading):
    x, w = drawn(*leading, K, dtype=dtype), drawn(K, N, seed=1, dtype=dtype)
    for function in (gemm_fp8, jax.jit(gemm_fp8)):
        y = function(array(x), array(w), 0.0113, jnp.float32(0.0087))
        assert y.shape == (*leading, N) and y.dtype == array(x).dtype
        assert off(y, truth(x, w, 0.0113, 0.0087)) < bar * (1 + 4 / math.sqrt(y.size))


@pytest.mark.parametrize("shapes", [((0, K), (K, N)), ((2, 0), (0, 3)), ((4, K), (K, 0)), ((0, 3, K), (K, N))], ids=str)
def test_empty_factors(shapes, launched):
    x, w = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
    y = gemm_fp8(x, w, 1.0, 1.0)
    assert y.shape == (*shapes[0][:-1], shapes[1][1]) and (y == 0).all()


def test_codes_may_be_given():
    x, w = drawn(7, K), drawn(K, N, seed=1)
    a, b = quantize_fp8(array(x), 0.0113), quantize_fp8(array(w), 0.0087)
    wanted = gemm_fp8(array(x), array(w), 0.0113, 0.0087)
    for given in ((a, array(w)), (array(x), b), (a, b)):
        assert (gemm_fp8(*given, 0.0113, 0.0087) == wanted).all()


def test_gradients_are_those_of_a_product_in_bf16():
    x, w, dy = drawn(3, 8, K), drawn(K, N, seed=1), drawn(3, 8, N, seed=2)

    def loss(x, w):
        return (gemm_fp8(x, w, 0.0113, 0.0087).astype(jnp.float32) * array(dy).astype(jnp.float32)).sum()

    for step in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        dx, dw = step(array(x), array(w))
        assert dx.dtype == dw.dtype == jnp.bfloat16
        assert off(dx, dy.double() @ w.double().t()) < 1.75e-3 * 1.1
        assert off(dw, x.double().flatten(0, 1).t() @ dy.double().flatten(0, 1)) < 1.75e-3 * 1.1


def test_scales_and_codes_have_no_gradients():
    x, w = array(drawn(4, K)), array(drawn(K, N, seed=1))
    found = jax.grad(lambda s: gemm_fp8(x, w, s, 0.0087).astype(jnp.float32).sum())(jnp.float32(0.0113))
    assert found == 0.0
    by_codes = jax.grad(lambda w: gemm_fp8(quantize_fp8(x, 0.0113), w, 0.0113, 0.0087).astype(jnp.float32).sum())(w)
    assert by_codes.shape == w.shape and (by_codes != 0).any()
    assert (jax.grad(lambda x: quantize_fp8(x, 0.0113).astype(jnp.float32).sum())(x) == 0).all()


def test_a_batch_of_products():
    x, w = array(drawn(3, 5, K)), array(drawn(K, N, seed=1))
    together = jax.vmap(gemm_fp8, (0, None, None, None))(x, w, 0.0113, 0.0087)
    assert (together == gemm_fp8(x, w, 0.0113, 0.0087)).all()


def lowered_for_cuda(x: object, w: object) -> dict[str, str]:
    """Operations in StableHLO by the names of their results."""
    text = jax.jit(gemm_fp8).trace(x, w, 0.0113, 0.0087).lower(lowering_platforms=("cuda",)).as_text()
    return {found[1]: found[2] for found in re.finditer(r"(%\S+) = (.*)", text)}


@pytest.mark.parametrize(
    ("size", "stored"), [((1, 3, 5), "f32"), ((17, K, 2 * N), "f32"), ((2048, K, 2048), "bf16")], ids=str
)
def test_xla_gets_a_product_of_codes_that_it_knows(size, stored):
    """What it leaves to cuBLASLt: codes by an algorithm of FP8, sizes that are multiples of 16, one number as the scale."""
    m, k, n = size
    x, w = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    lines = lowered_for_cuda(x, w)
    ((name, product),) = ((name, line) for name, line in lines.items() if "dot_general" in line)
    m, k, n = (-(-size // 16) * 16 for size in (m, k, n))
    assert f"(tensor<{m}x{k}xf8E4M3FN>, tensor<{n}x{k}xf8E4M3FN>) -> tensor<{m}x{n}x{stored}>" in product
    assert "accumulation_type = f32" in product and "allow_imprecise_accumulation = false" in product
    (scaled,) = (line for line in lines.values() if f"{name}," in line)
    scale = lines[re.findall(r"%\w+", scaled)[1]]
    assert scaled.startswith("stablehlo.multiply") and "broadcast_in_dim" in scale and f"tensor<{stored}>" in scale
    hidden = lines[re.findall(r"%\w+", scale)[0]]  # of a bf16 product it is rounded, as far as is written
    hidden = lines[re.findall(r"%\w+", hidden)[0]] if stored == "bf16" else hidden
    assert "optimization_barrier" in hidden, "a constant would be folded into bf16"


def test_a_cpu_multiplies_in_fp32():
    x, w = array(drawn(16, K)), array(drawn(K, N, seed=1))
    plain = jax.jit(gemm_fp8).lower(x, w, 0.0113, 0.0087).as_text()
    assert f"(tensor<16x{K}xf32>, tensor<{N}x{K}xf32>)" in plain


@pytest.mark.parametrize("size", [(1, 5, 3), (33, K, N)], ids=str)
def test_what_is_lowered_for_a_gpu_gives_the_product(size, monkeypatch):
    """The same operations on a CPU, which multiplies codes in fp32 whatever algorithm is named."""
    m, k, n = size
    monkeypatch.setattr(fp8, "IN_FP32", None)
    x, w = drawn(m, k), drawn(k, n, seed=1)
    codes = quantize_fp8(array(x), 0.0113), fp8.codes_of(array(w), jnp.float32(0.0087), transposed=True)
    y = fp8.by_cublaslt(*codes, jnp.float32(0.0113) * jnp.float32(0.0087), jnp.dtype(jnp.bfloat16))
    assert y.shape == (m, n) and (y == gemm_fp8(array(x), array(w), 0.0113, 0.0087)).all()


# ---- errors, and what is not installed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, w: quantize_fp8(jnp.int32([1]), 1.0), "quantize_fp8: x must be"),
        (lambda x, w: quantize_fp8(x, jnp.ones(2)), "quantize_fp8: scale must be one float32 number"),
        (lambda x, w: quantize_fp8(x, jnp.int32(1)), "quantize_fp8: scale must be"),
        (lambda x, w: gemm_fp8(x, w.T, 1.0, 1.0), "gemm_fp8: w must be"),
        (lambda x, w: gemm_fp8(x, w[0], 1.0, 1.0), "gemm_fp8: w must be"),
        (lambda x, w: gemm_fp8(jnp.float32(1.0), w, 1.0, 1.0), "gemm_fp8: x must be"),
        (lambda x, w: gemm_fp8(x, w.astype(jnp.int8), 1.0, 1.0), "gemm_fp8: w must be bfloat16"),
        (lambda x, w: gemm_fp8(x, w, 1.0, jnp.ones((1, 2))), "gemm_fp8: scale_w must be one"),
    ],
)
def test_bad_arguments_are_named(call, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        call(array(drawn(4, K)), array(drawn(K, N)))
    assert "\n" not in str(error.value)


def test_without_jax_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tilewright.jax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(tw), "jax", raising=False)
    monkeypatch.setitem(sys.modules, "jax", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'pip install "tilewright\[jax\]"'):
        _ = tw.jax


# ---- jax-triton ------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """A jax-triton whose launches are noted, and whose results are XLA's."""
    calls = []

    def triton_call(x, scale, rows, columns, *, kernel, out_shape, grid, num_warps, **constants):
        calls.append({"rows": rows, "columns": columns, "kernel": kernel, "grid": grid, **constants})
        codes = fp8.codes_by_xla(x, scale[0])
        codes = codes.reshape(rows, columns).T if constants["TRANSPOSED"] else codes
        assert codes.shape == out_shape.shape and out_shape.dtype == jnp.float8_e4m3fn
        return codes

    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
    monkeypatch.setattr(fp8, "launches_triton", lambda: True)
    return calls


def test_our_kernel_is_launched_where_jax_triton_fits(launched):
    x, w = array(drawn(3, 40, K)), array(drawn(K, N, seed=1))
    jax.jit(lambda x, w: gemm_fp8(x, w, 0.0113, 0.0087)).trace(x, w).lower(lowering_platforms=("cuda",))
    first, second = launched
    assert (first["rows"], first["columns"], first["TRANSPOSED"]) == (120, K, False)
    assert (second["rows"], second["columns"], second["TRANSPOSED"]) == (K, N, True)
    assert first["grid"] == (-(-120 // first["ROWS"]) * -(-K // first["COLS"]),)
    assert first["FORMAT"] == "e4m3:static:fp32:te:fast"
    names = fp8.given_codes.names  # pointers and sizes in jax-triton's order, results after them, then constants
    assert names[:5] == ["X", "SCALE", "M", "N", "CODES"] and set(names[5:]) == set(first) & set(names[5:])


def test_a_batch_with_one_scale_is_one_launch(launched):
    x = drawn(3, 11, K)  # of a size that no other test has, for a traced call is not traced again
    scales = jnp.float32([0.0113, 0.02, 0.3])
    together, each = jax.jit(jax.vmap(quantize_fp8, (0, None))), jax.jit(jax.vmap(quantize_fp8))
    together.trace(array(x), scales[0]).lower(lowering_platforms=("cuda",))
    assert 33 in [call["rows"] for call in launched]
    launched.clear()
    each.trace(array(x), scales).lower(lowering_platforms=("cuda",))
    assert 33 not in [call["rows"] for call in launched]
    assert codes_of(together(array(x), scales[0])) == torch_codes(x, 0.0113)
    assert codes_of(each(array(x), scales)[1]) == torch_codes(x[1], 0.02)


def test_a_batch_of_weights_is_left_to_xla(launched):
    x, w = array(drawn(3, 5, K)), array(drawn(3, K, N, seed=1))
    function = jax.jit(jax.vmap(gemm_fp8, (0, 0, None, None)))
    function.trace(x, w, 0.0113, 0.0087).lower(lowering_platforms=("cuda",))
    found = function(x, w, 0.0113, 0.0087)
    assert all((found[i] == gemm_fp8(x[i], w[i], 0.0113, 0.0087)).all() for i in range(3))


@pytest.mark.parametrize(
    ("asks", "here", "fits"),
    [("triton>=3.6", "3.6.0", True), ("triton>=3.7", "3.6.0", False), ("triton>=3.6", "3.7.1", False), ("absl-py", "3.6.0", False)],
)  # fmt: skip
def test_jax_triton_fits_the_triton_that_it_asks_for(monkeypatch, asks, here, fits):
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(fp8.importlib.metadata, "requires", lambda name: ["absl-py>=1.4.0", asks])
    monkeypatch.setattr(fp8.triton, "__version__", here)
    fp8.launches_triton.cache_clear()
    assert fp8.launches_triton() is fits
    fp8.launches_triton.cache_clear()
