"""The reference of glu against formulas from elsewhere, its errors, and which implementation takes which call."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright.core.target import TARGETS, pretend
from tilewright.ops.activation.glu import glu

FP8 = tw.fp8("1x128", ways="both")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    "act, formula",
    [
        ("silu", F.silu),
        ("gelu_tanh", lambda a: F.gelu(a, approximate="tanh")),
        ("gelu_erf", F.gelu),
        ("relu", F.relu),
        ("sigmoid", torch.sigmoid),
    ],
)
def test_torch_agrees(act, formula):
    x = drawn(5, 66).mul_(3).requires_grad_()
    gate, up = x.chunk(2, -1)
    expected = formula(gate) * up
    y = tw.glu(x, act=act)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tw.glu(gate, up, act=act), expected, rtol=1e-12, atol=1e-12)
    g = drawn(5, 33, seed=1)
    found, wanted = (torch.autograd.grad(r, x, g, retain_graph=True)[0] for r in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("act, a", [("gelu_erf", -12.0), ("gelu_tanh", -7.0)])
def test_small_results_are_not_lost(act, a):
    """Of 1 + erf and 1 + tanh nothing is left there, even in float64."""
    phi = math.erfc(12 / math.sqrt(2)) / 2
    u = math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
    expected = a * (phi if act == "gelu_erf" else 1 / (1 + math.exp(-2 * u)))
    found = tw.glu(torch.tensor([a, 1.0], dtype=torch.float64), act=act)
    assert abs(float(found) / expected - 1) < 1e-12


def test_clamped_silu_with_a_slope():
    """The clamped form with alpha = 1.702: gate * sigmoid(alpha * gate), gate at most 7, up within 7."""
    x = drawn(4, 64).mul_(8)
    gate, up = x.chunk(2, -1)
    gate, up = (
        torch.minimum(gate, torch.tensor(7.0)),
        torch.maximum(torch.minimum(up, torch.tensor(7.0)), torch.tensor(-7.0)),
    )
    expected = gate * torch.reciprocal(1 + torch.exp(-1.702 * gate)) * up
    torch.testing.assert_close(tw.glu(x, limit=7.0, alpha=1.702), expected, rtol=1e-13, atol=1e-13)


def test_scale_multiplies_rows_and_has_its_gradient():
    x, scale = drawn(2, 3, 20), drawn(2, 3, seed=2).requires_grad_()
    y = tw.glu(x, scale=scale)
    torch.testing.assert_close(y, tw.glu(x) * scale[..., None])
    g = drawn(2, 3, 10, seed=3)
    (found,) = torch.autograd.grad(y, scale, g)
    torch.testing.assert_close(found, (g * tw.glu(x)).sum(-1))


def test_blocks_begin_anew_at_each_group():
    x = drawn(300, 256, dtype=torch.bfloat16)
    ends = [0, 130, 130, 290]
    q = tw.glu(x, offsets=torch.tensor(ends), out_format=FP8)
    block = 0
    for start, end in zip([0, *ends], ends):
        alone = tw.glu(x[start:end], out_format=FP8)
        count = -(-(end - start) // 128)
        assert torch.equal(q.data[start:end].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(q.data_t[:, start:end].contiguous().view(torch.uint8), alone.data_t.view(torch.uint8))
        assert torch.equal(q.scale[:, start:end], alone.scale)
        assert torch.equal(q.scale_t[block : block + count], alone.scale_t)
        block += count
    assert block == 4


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("x .*even", {"x": torch.zeros(2, 7)}),
        ("alpha", {"x": torch.zeros(2, 8), "act": "relu", "alpha": 2.0}),
        ("act", {"x": torch.zeros(2, 8), "act": "tanh"}),
        ("limit", {"x": torch.zeros(2, 8), "limit": 0.0}),
        ("up", {"x": torch.zeros(2, 8), "up": torch.zeros(2, 4)}),
        ("up", {"x": torch.zeros(2, 8), "up": torch.zeros(2, 8, dtype=torch.float64)}),
        ("scale", {"x": torch.zeros(2, 8), "scale": torch.zeros(3)}),
        ("offsets", {"x": torch.zeros(2, 8), "offsets": torch.zeros(2)}),
        ("out", {"x": torch.zeros(2, 8), "out": torch.zeros(2, 8)}),
        ("out", {"x": torch.zeros(2, 8), "out": torch.zeros(2, 4), "out_format": FP8}),
        ("out", {"x": torch.zeros(2, 8), "out": FP8.empty((2, 4), torch.float32, "cpu")}),
        (
            "out",
            {
                "x": torch.zeros(2, 8),
                "out": FP8.empty((2, 4), torch.float32, "cpu"),
                "out_format": FP8,
                "offsets": torch.tensor([2]),
            },
        ),
    ],
)
def test_refused(words, arguments):
    with pytest.raises((ValueError, TypeError), match=f"glu: {words}"):
        tw.glu(**arguments)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("gluon", {}),
        ("gluon", {"scale": torch.ones(256), "offsets": torch.tensor([100, 200])}),
        ("gluon", {"out_format": tw.fp8("1x128", "e5m2", ways="both", rule="linghe")}),
        ("triton", {"out_format": None}),
        ("triton", {"out_format": tw.fp8("1x128", ways="row")}),
        ("triton", {"out_format": tw.fp8("1x128", ways="both", pow2=False)}),
        ("triton", {"out_format": tw.fp8("128x128", ways="both")}),
        ("triton", {"x": torch.zeros(256, 512, dtype=torch.float16)}),
        ("triton", {"x": torch.zeros(256, 500, dtype=torch.bfloat16)}),
        ("triton", {"x": torch.zeros(250, 512, dtype=torch.bfloat16)}),
        ("triton", {"x": torch.zeros(512, 256, dtype=torch.bfloat16).t()}),
        ("triton", {"up": torch.zeros(256, 512, dtype=torch.bfloat16)}),
        ("triton", {"x": torch.empty(1 << 19, 4096, dtype=torch.bfloat16, device="meta")}),
    ],
)
def test_choice_on_hopper(name, arguments):
    """The Gluon kernel takes few tiles of contiguous bf16 into blockwise FP8 both ways; everything else is Triton's."""
    given = {"x": torch.zeros(256, 512, dtype=torch.bfloat16), "out_format": FP8, **arguments}
    values = glu.signature.bind((), given)
    with pretend(replace(TARGETS["sm_90"], gluon=True)), tw.force("triton"):
        assert glu.implementation(values).name == name
    with pretend(TARGETS["sm_100"]), tw.force("triton"):
        assert glu.implementation(values).name == "triton"
