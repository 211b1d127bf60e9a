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


def test_cublaslt_multiplies_codes():
    """The whole program: XLA's FP8 product, scales given to it, and no product of anything else."""
    x, w = drawn(256, 512, seed=0), drawn(512, 384, seed=1)
    program = jax.jit(tw.jax.gemm_fp8).lower(x, w, 0.0113, 0.0087).compile().as_text()
    calls = [line for line in program.splitlines() if "custom-call(" in line and "matmul" in line]
    assert len(calls) == 1 and "__cublas$lt$matmul$f8" in calls[0], program
    assert "bf16[256,384]" in calls[0].split(" custom-call(")[0], "the result is rounded by the product itself"
    assert " dot(" not in program


def test_codes_of_fp32_numbers_are_those_of_torch():
    bits = torch.arange(0, 1 << 31, 4099, dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits, bits | -(1 << 31)]).view(torch.float32).cuda()
    for scale in (1.0, 0.0137, 1.7e-5, 233.0):
        there = tw.quantize(x, tw.fp8("tensor", scale=torch.tensor([scale], device="cuda"))).data.view(torch.uint8)
        given = jax.lax.bitcast_convert_type(jax.numpy.asarray(x.view(torch.int32).cpu().numpy()), "float32")
        found = jax.lax.bitcast_convert_type(jax.jit(tw.jax.quantize_fp8)(given, scale), "uint8")
        assert torch.equal(torch.from_dlpack(found).cpu(), there.cpu())


@pytest.mark.parametrize("size", [(4096, 4096, 4096), (100, 80, 48)], ids=str)
def test_products_are_within_class_f(size):
    m, k, n = size
    x, w = drawn(m, k, seed=0), drawn(k, n, seed=1)
    y = torch.from_dlpack(jax.jit(tw.jax.gemm_fp8)(x, w, 0.0113, 0.0087)).double()
    codes = [torch.from_dlpack(tw.jax.quantize_fp8(t, s).view("uint8")) for t, s in ((x, 0.0113), (w, 0.0087))]
    a, b = (c.view(torch.float8_e4m3fn).double() for c in codes)
    exact = a @ b * (float(torch.tensor(0.0113)) * float(torch.tensor(0.0087)))
    error = float((y - exact).norm() / exact.norm())
    assert error < 1.8e-3 * (1 + 2 / y.numel() ** 0.5), error
