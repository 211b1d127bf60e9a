"""Of matmul's kernels what the properties do not draw: fp16 sums, every kind in every layout, sums over many steps, few rows."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

import tilewright as tw
from tilewright.check.oracle import same_bits
from tilewright.gemm import library
from tilewright.gemm.matmul import matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {
    "bf16": (torch.bfloat16,) * 2,
    "fp16": (torch.float16,) * 2,
    "fp32": (torch.float32,) * 2,
    "fp8": (E5M2, E4M3),
    "int8": (torch.int8,) * 2,
}


def factors(kind: str, M: int, N: int, K: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(M + N + K)
    shapes = (M, K), (K, N)
    if kind == "int8":
        return [torch.randint(-128, 128, shape, generator=source, dtype=torch.int8) for shape in shapes]
    return [torch.randn(shape, generator=source).to(dtype) for shape, dtype in zip(shapes, DTYPES[kind])]


@pytest.mark.parametrize("kind", DTYPES)
def test_every_storage_order_gives_the_same(kind):
    a, b = factors(kind, 130, 40, 150)
    exact = a.double() @ b.double()
    with tw.force("triton"):
        wide = None if kind == "int8" else "float32"
        plain = matmul(a, b, out_dtype=wide)
        for first, second in ((a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
            assert torch.equal(matmul(first, second, out_dtype=wide), plain)
    error = (plain.double() - exact).norm() / exact.norm()
    assert error <= (0 if kind == "int8" else 1e-6)


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
def test_sums_in_fp16(kind):
    """Less precise than in fp32, by about what 11 bits say, and infinite where fp16 is."""
    a, b = factors(kind, 17, 40, 300)
    exact = a.double() @ b.double()
    with tw.force("triton"):
        half = matmul(a, b, acc_dtype="float16", out_dtype="float32")
        large = (200 * a.float().abs()).to(a.dtype), torch.full((300, 1), 200.0).to(b.dtype)
        infinite = matmul(*large, acc_dtype="float16", out_dtype="float32")
    error = (half.double() - exact).norm() / exact.norm()
    assert 1e-5 < error < 2e-3
    assert infinite.isinf().all()


def test_gradients_of_mixed_dtypes():
    """bf16 factors with an fp32 result: its gradient is multiplied as it is."""
    a, b = (t.requires_grad_() for t in factors("bf16", 20, 33, 40))
    dy = torch.randn(20, 33, generator=torch.Generator().manual_seed(3))
    with tw.force("triton"):
        matmul(a, b, out_dtype="float32").backward(dy)
    for got, exact in (
        (a.grad, dy.double() @ b.detach().double().t()),
        (b.grad, a.detach().double().t() @ dy.double()),
    ):
        assert got.dtype == torch.bfloat16 and torch.equal(got, exact.to(torch.bfloat16))


@pytest.mark.parametrize("backend", ["few", "portable"])
def test_what_follows_the_sums_is_rounded_once(backend):
    """Few rows, also where parts of a long sum are added up later; c may be given as out, over strides that are not 1."""
    a, b = factors("bf16", 3, 256, 4096)
    b = b.t().contiguous().t()
    bias, c = torch.randn(256, 2)[:, 0], torch.randn(256, 3).t()
    exact = torch.nn.functional.silu(a.double() @ b.double() + bias.double() - 0.5 * c.double())
    with tw.force("triton"):
        y = matmul(a, b, bias=bias, act="silu", c=c, beta=-0.5, out_dtype="float32", out=c, backend=backend)
    assert y is c and (y.double() - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_long_sums_go_on_in_fp32(kind, monkeypatch):
    """Part by part of the inner dimension, the last of which need not be whole; what follows comes once."""
    monkeypatch.setattr(importlib.import_module("tilewright.gemm.matmul"), "LONG", 64)
    a, b = factors(kind, 19, 33, 150)
    bias, c = torch.randn(33), torch.randn(19, 33)
    exact = torch.relu(a.double() @ b.double() + bias.double() + 0.5 * c.double())
    with tw.force("triton"):
        y = matmul(a, b, bias=bias, act="relu", c=c, beta=0.5, out_dtype="float32")
    assert (y.double() - exact).norm() / exact.norm() < 1e-6


def test_gradients_are_those_of_what_was_activated():
    """FP8 factors have no gradient, but what is added to their product has; nothing of the product is kept."""
    a, b = factors("fp8", 5, 33, 40)
    bias, c = torch.randn(33, requires_grad=True), torch.randn(5, 33, requires_grad=True)
    dy = torch.randn(5, 33, generator=torch.Generator().manual_seed(3))
    z = (a.double() @ b.double() + bias.detach().double() + 2.0 * c.detach().double()).requires_grad_()
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(z), z, dy.double())
    with tw.force("triton"):
        matmul(a, b, bias=bias, act="gelu_erf", c=c, beta=2.0, out_dtype="float32").backward(dy)
    for got, exact in ((bias.grad, slope.sum(0)), (c.grad, 2.0 * slope)):
        assert (got.double() - exact).norm() / exact.norm() < 1e-6


def test_threads_leave_cublas_s_setting_as_it_was():
    """The last that leaves restores it, whichever came first."""
    settings, name = torch.backends.cuda.matmul, library.Whole.NAMES[0]
    before = getattr(settings, name)
    one, other = contextlib.ExitStack(), contextlib.ExitStack()
    for stack in (one, other):
        stack.enter_context(library.whole_sums)
    one.close()
    assert not getattr(settings, name)
    other.close()
    assert getattr(settings, name) == before


@pytest.mark.parametrize("how", ["reference", "triton"])
def test_autocast_lowers_nothing(how):
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 64, generator=source), torch.randn(32, 32, generator=source)
    calls = {"matmul": lambda: tw.matmul(x[:, :32], weight), "glu_linear": lambda: tw.glu_linear(x, weight)}
    for name, call in calls.items():
        with tw.force(how):
            wanted = call()
            with torch.autocast("cpu", torch.bfloat16):
                same_bits(name, call(), wanted)
