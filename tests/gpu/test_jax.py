"""`tilewright.jax` on a GPU: what XLA makes of the product, and that codes and products are right there too."""

from __future__ import annotations

import os

import pytest
import torch

import tilewright as tw

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes three quarters of the memory
jax = pytest.importorskip("jax", reason="jax is not installed: pip install jax")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu():
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"jax has no GPU: {error}")
    with jax.default_device(device):
        yield


def drawn(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jax.numpy.bfloat16)


def products(program: str) -> list[str]:
    """The products of a compiled program: calls by their targets, and what XLA multiplies in kernels of its own."""
    text = [line.strip() for line in program.splitlines()]
    calls = [line for line in text if "custom_call_target=" in line and ("cublas" in line or "gemm" in line)]
    return [line.split(", metadata=")[0] for line in calls + [line for line in text if " dot(" in line]]


@pytest.mark.parametrize("scales", ["given", "constant"])
@pytest.mark.parametrize(
    ("size", "stored"), [((256, 512, 384), "f32["), ((1, 512, 100), "f32["), ((2048, 512, 2064), "bf16[2048,2064]")], ids=str
)  # fmt: skip
def test_cublaslt_multiplies_codes(size, stored, scales):
    """XLA's FP8 product and no other, which stores bf16 where results are many, and has the scale in fp32 then."""
    m, k, n = size
    x, w = drawn(m, k, seed=0), drawn(k, n, seed=1)
    if scales == "given":
        lowered = jax.jit(tw.jax.gemm_fp8).lower(x, w, 0.0113, 0.0087)
    else:
        lowered = jax.jit(lambda x, w: tw.jax.gemm_fp8(x, w, 0.0113, 0.0087)).lower(x, w)
    program = lowered.compile().as_text()
    found = products(program)
    said = f"jax {jax.__version__} multiplies by\n" + "\n".join(found or ["nothing that is known"])
    assert len(found) == 1 and 'custom_call_target="__cublas$lt$matmul$f8"' in found[0], said
    assert stored in found[0].split(" custom-call(")[0], said


def test_codes_of_fp32_numbers_are_those_of_torch():
    bits = torch.arange(0, 1 << 31, 4099, dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits, bits | -(1 << 31)]).view(torch.float32).cuda()
    for scale in (1.0, 0.0137, 1.7e-5, 233.0):
        there = tw.quantize(x, tw.fp8("tensor", scale=torch.tensor([scale], device="cuda"))).data.view(torch.uint8)
        given = jax.lax.bitcast_convert_type(jax.numpy.asarray(x.view(torch.int32).cpu().numpy()), "float32")
        found = jax.lax.bitcast_convert_type(jax.jit(tw.jax.quantize_fp8)(given, scale), "uint8")
        assert torch.equal(torch.from_dlpack(found).cpu(), there.cpu())


@pytest.mark.parametrize("size", [(4096, 4096, 4096), (256, 8192, 384), (100, 80, 48), (1, 4096, 96)], ids=str)
def test_products_are_within_class_f(size):
    m, k, n = size
    x, w = drawn(m, k, seed=0), drawn(k, n, seed=1)
    found = [jax.jit(tw.jax.gemm_fp8)(x, w, 0.0113, 0.0087)]
    found += [jax.jit(lambda x, w: tw.jax.gemm_fp8(x, w, 0.0113, 0.0087))(x, w)]  # scales that XLA sees
    codes = [torch.from_dlpack(tw.jax.quantize_fp8(t, s).view("uint8")) for t, s in ((x, 0.0113), (w, 0.0087))]
    a, b = (c.view(torch.float8_e4m3fn).double() for c in codes)
    exact = a @ b * (float(torch.tensor(0.0113)) * float(torch.tensor(0.0087)))
    for y in found:
        error = float((torch.from_dlpack(y).double() - exact).norm() / exact.norm())
        assert error < 1.8e-3 * (1 + 2 / exact.numel() ** 0.5), error
