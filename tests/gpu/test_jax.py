"""`tilewright.jax` on a GPU: what XLA makes of the product, and that codes and products are right there too, also those of our
own kernel where jax-triton launches it."""

from __future__ import annotations

import os
import re

import pytest
import torch

import tilewright as tw

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes three quarters of the memory
jax = pytest.importorskip("jax", reason="jax is not installed: pip install jax")

from tilewright.jax import fp8  # noqa: E402

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


def every_kind_of_number() -> torch.Tensor:
    """fp32 numbers of every exponent and both signs, infinities and NaN among them."""
    bits = torch.arange(0, 1 << 31, 4099, dtype=torch.int64).to(torch.int32)
    return torch.cat([bits, bits | -(1 << 31)]).view(torch.float32)


def array(x: torch.Tensor) -> jax.Array:
    """The same bits."""
    words = torch.int32 if x.dtype == torch.float32 else torch.int16
    return jax.lax.bitcast_convert_type(jax.numpy.asarray(x.view(words).numpy()), str(x.dtype).removeprefix("torch."))


def torch_codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Codes of the library's own op on the GPU."""
    given = tw.fp8("tensor", scale=torch.tensor([scale], device="cuda"))
    return tw.quantize(x.cuda(), given).data.view(torch.uint8).cpu()


def bytes_of(codes: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(jax.lax.bitcast_convert_type(codes, "uint8")).cpu()


def test_codes_of_fp32_numbers_are_those_of_torch():
    x = every_kind_of_number()
    for scale in (1.0, 0.0137, 1.7e-5, 233.0):
        assert torch.equal(bytes_of(jax.jit(tw.jax.quantize_fp8)(array(x), scale)), torch_codes(x, scale))


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


# ---- our own kernel --------------------------------------------------------------------------------------------------


@pytest.fixture
def by_our_kernel():
    if not fp8.launches_triton():
        here = fp8.triton.__version__
        pytest.skip(f"no jax-triton that takes Triton {here} is installed: pip install jax-triton (0.3.1 takes 3.6)")


def launches(function, *given) -> int:
    """How many Triton kernels the program of a function calls."""
    program = jax.jit(function).lower(*given).compile().as_text()
    return len(re.findall(r'custom_call_target="[^"]*triton[^"]*"', program))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(1 << 18,), (513, 129), (3, 5, 640), (1, 1), (7, 1)], ids=str)
def test_our_kernel_makes_the_codes_of_torch_and_of_xla(by_our_kernel, size, dtype):
    """As they lie and transposed, of numbers of every kind; the program launches it, and XLA's has no such call."""
    every = every_kind_of_number().to(dtype)
    count = torch.Size(size).numel()
    x = every[torch.arange(count) * 1009 % every.numel()].reshape(size)
    for scale in (1.0, 0.0137, 233.0):
        wanted = torch_codes(x, scale)
        one = jax.numpy.float32(scale)
        assert torch.equal(bytes_of(fp8.codes_by_triton(array(x), one)), wanted)
        assert torch.equal(bytes_of(fp8.codes_by_xla(array(x), one)), wanted)
        if x.dim() == 2:
            assert torch.equal(bytes_of(fp8.codes_by_triton(array(x), one, transposed=True)), wanted.t())
    assert [launches(f, array(x), jax.numpy.float32(1.0)) for f in (tw.jax.quantize_fp8, fp8.codes_by_xla)] == [1, 0]


def test_a_product_and_its_gradients_take_the_codes_of_our_kernel(by_our_kernel, monkeypatch):
    """Both factors', in one program; its bits are those of codes that XLA made."""
    x, w = drawn(200, 512, seed=0), drawn(512, 384, seed=1)

    def trained(x, w):
        y, back = jax.vjp(lambda x, w: tw.jax.gemm_fp8(x, w, 0.0113, 0.0087), x, w)
        return y, *back(y)

    assert launches(trained, x, w) == 2
    found = jax.jit(trained)(x, w)
    monkeypatch.setattr(fp8, "launches_triton", lambda: False)
    jax.clear_caches()
    for a, b in zip(found, jax.jit(trained)(x, w)):
        assert bool((a == b).all())


def test_a_batch_of_tensors_with_one_scale(by_our_kernel):
    x = every_kind_of_number()[: 6 * 1000].reshape(6, 1000)
    found = jax.jit(jax.vmap(tw.jax.quantize_fp8, (0, None)))(array(x), 0.0137)
    assert torch.equal(bytes_of(found), torch_codes(x, 0.0137))
