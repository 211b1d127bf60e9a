"""Forward-mode differentiation: right or an error, never zero."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import tilewright as tw

X, W = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 1.5, 8)
ONES = torch.ones_like(X)


def norm(x: torch.Tensor) -> torch.Tensor:
    return tw.rms_norm(x, W)


def registered(x: torch.Tensor) -> torch.Tensor:
    tw.rms_norm  # noqa: B018  loading it registers it
    return torch.ops.tilewright.rms_norm(x, W)


def dual(function) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(X, ONES))).tangent


WAYS = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (ONES,))[1],
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "jacfwd twice": lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda x: f(x).sum()))(X),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum())(X),
    "jvp in vmap": lambda f: torch.func.vmap(lambda x: torch.func.jvp(f, (x,), (torch.ones(8),))[1])(X),
    "dual numbers": dual,
}


@pytest.mark.parametrize("way", WAYS)
def test_kernels_refuse_it(way):
    for function in (norm, registered) if way in ("jvp", "dual numbers") else (norm,):
        with pytest.raises(NotImplementedError, match=r"^rms_norm: .*force\('reference'\)$"):
            WAYS[way](function)


@pytest.mark.parametrize("way", WAYS)
def test_the_reference_does_it(way):
    with tw.force("reference"):
        found = WAYS[way](norm)
    exact = WAYS[way](lambda x: tw.rms_norm.op.reference(x, W))
    assert exact.abs().sum() > 1e-3
    torch.testing.assert_close(found, exact)


def test_constants_pass():
    """What is not differentiated is computed as ever, also where something else is."""

    def scaled(t: torch.Tensor) -> torch.Tensor:
        return t * tw.rms_norm(X, W)

    value, tangent = torch.func.jvp(scaled, (ONES,), (ONES,))
    torch.testing.assert_close(value, tw.rms_norm(X, W))
    torch.testing.assert_close(tangent, tw.rms_norm(X, W))


@pytest.mark.parametrize("op", ["glu", "quantize", "multi_tensor_scale", "moe_unpermute"])
def test_other_kinds_of_op(op):
    calls = {
        "glu": lambda x: tw.glu(x),
        "quantize": lambda x: tw.quantize(x, tw.fp8("row")).dequantize(),
        "multi_tensor_scale": lambda x: tw.multi_tensor_scale([x], 2.0)[0],
        "moe_unpermute": lambda x: tw.moe_unpermute(x, torch.arange(3, dtype=torch.int32)[:, None]),
    }
    with pytest.raises(NotImplementedError, match=f"^{op}: "):
        dual(calls[op])
