"""The calls behind the rows of a chip's facts, of what other libraries have a context for, and of JAX."""

from __future__ import annotations

import contextlib
import os
import unittest
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import tilewright as tw

from ...core.target import TARGETS, Target, pretend
from ...op import force
from ...runtime.kernel import collect
from ..agreement import BF16, agrees, normal

EPS = 1e-6
SINCE_FP8, SINCE_FP4 = (8, 9), (10, 0)  # compute capabilities, by NVIDIA's tables


# ---- facts of a chip -------------------------------------------------------------------------------------------------


def chips(device: str) -> Iterator[tuple[tuple[int, int], Target]]:
    """Compute capability and target of NVIDIA's chips: of the one that is here or, without one, of all that are known."""
    if device != "cpu":
        yield torch.cuda.get_device_capability(0), Target.of(0)
        return
    for arch, target in TARGETS.items():
        if arch.startswith("sm_"):
            with pretend(target):
                yield divmod(int(arch[3:]), 10), Target.at(torch.device(device))


def number(device: str) -> None:
    for (major, minor), target in chips(device):
        assert target.number == 10 * major + minor and target.arch == f"sm_{major}{minor}"


def fp8_products(device: str) -> None:
    for capability, target in chips(device):
        assert target.fp8_products == (capability >= SINCE_FP8), target.arch


def fp4(device: str) -> None:
    """And then a product of NVFP4 is native, else emulated."""
    for capability, target in chips(device):
        assert target.fp4 == (capability >= SINCE_FP4), target.arch


def fused_attention(device: str) -> None:
    """Where there is such a kernel, attention launches it and nothing else, and its result is right."""
    q, k, v = (normal("cpu", 1, 40, heads, 64, seed=heads) for heads in (4, 2, 2))
    for _, target in chips(device):
        assert target.fused_attention
        with pretend(target), force("triton"), collect() as launched:
            tw.attention(*(t.to("meta") for t in (q, k, v)), backend="portable")
        assert [one.kernel.name for one in launched] == ["attention_forward"]
    o = tw.attention(*(t.to(device) for t in (q, k, v)))
    shared = (t.double().repeat_interleave(2, 2) for t in (k, v))
    exact = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q.double(), *shared))).transpose(1, 2)
    agrees("o", o, exact, "I")


# ---- a context -------------------------------------------------------------------------------------------------------


def ready_to_capture(device: str) -> None:
    """What a call needs is made before, launching nothing; the call itself may then be captured."""
    x, weight = normal(device, 5, 200), normal(device, 200, seed=1)
    y = torch.full_like(x, torch.nan)
    tw.warmup(tw.rms_norm, x, weight, out=y)
    assert y.isnan().all(), "a kernel was launched"
    graph = torch.cuda.CUDAGraph() if device != "cpu" else None
    with contextlib.nullcontext() if graph is None else torch.cuda.graph(graph):
        tw.rms_norm(x, weight, out=y)
    if graph is not None:
        assert y.isnan().all(), "captured, and run all the same"
        graph.replay()
    agrees("y", y, F.rms_norm(x.double(), (200,), weight.double(), EPS))


# ---- JAX -------------------------------------------------------------------------------------------------------------


def on(device: str) -> tuple[Any, Any]:
    """JAX and its device of this kind. Raises what tests take for a reason to skip."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes three quarters of a GPU's memory
    try:
        import jax
    except ImportError:
        raise unittest.SkipTest("jax is not installed: pip install jax") from None
    try:
        return jax, jax.devices("cpu" if device == "cpu" else "cuda")[0]
    except RuntimeError as error:
        raise unittest.SkipTest(f"jax has no {device}: {str(error).splitlines()[0]}") from None


def jax_codes(device: str) -> None:
    """Codes of every bf16 number are those of the torch operation, bit for bit, within a jitted function too."""
    jax, where = on(device)
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    with jax.default_device(where):
        x = jax.lax.bitcast_convert_type(jax.numpy.asarray(bits.numpy()), jax.numpy.bfloat16)
        for scale in (1.0, 0.0137, 2.0**-9):
            there = tw.quantize(
                bits.view(BF16).to(device), tw.fp8("tensor", scale=torch.tensor([scale], device=device))
            )
            for function in (tw.jax.quantize_fp8, jax.jit(tw.jax.quantize_fp8)):
                codes = jax.lax.bitcast_convert_type(function(x, scale), jax.numpy.uint8)
                assert codes.tolist() == there.data.view(torch.uint8).tolist(), f"codes differ at scale {scale}"


def jax_product(device: str) -> None:
    """Within the bar of FP8 products beside the same codes in float64; gradients beside x @ w in bf16."""
    jax, where = on(device)
    drawn = [normal("cpu", *shape, seed=seed) for seed, shape in enumerate(((3, 16, 64), (64, 48), (3, 16, 48)))]
    scales = [0.0113, 0.0087]
    with jax.default_device(where):
        x, w, dy = (jax.numpy.asarray(t.float().numpy()).astype(jax.numpy.bfloat16) for t in drawn)
        y, pull = jax.vjp(lambda x, w: tw.jax.gemm_fp8(x, w, *scales), x, w)
        found = [y, *pull(dy)]
    y, dx, dw = (torch.tensor(t.astype("float32").tolist()).to(BF16) for t in found)
    codes = [(t.float() * (torch.ones(()) / torch.tensor(s))).clamp(-448, 448) for t, s in zip(drawn, scales)]
    wide = [c.to(torch.float8_e4m3fn).double() * torch.tensor(s).double() for c, s in zip(codes, scales)]
    x, w, dy = (t.double() for t in drawn)
    agrees("y", y, wide[0] @ wide[1], "F")
    agrees("dx", dx, dy @ w.t(), "E")
    agrees("dw", dw, x.flatten(0, 1).t() @ dy.flatten(0, 1), "E")
