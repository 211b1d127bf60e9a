"""rms_norm with scale, shift and gate: by the kernels that layer_norm has, without the mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("lead, span", [((7,), (7,)), ((7,), ()), ((2, 3), (2, 1)), ((2, 3), (3,))], ids=str)
@pytest.mark.parametrize("columns", [33, 1290])
def test_gradients_are_those_of_the_reference(lead, span, columns):
    x, residual, dy, dh = (normal(*lead, columns, seed=seed) for seed in range(4))
    weight = normal(columns, seed=4)
    scale, shift, gate = (normal(*span, columns, seed=seed) for seed in (5, 6, 7))
    leaves = (x, residual, weight, scale, shift, gate)
    made = []
    for name, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        x, residual, weight, scale, shift, gate = own = [t.detach().to(dtype).requires_grad_() for t in leaves]
        with tw.force(name):
            y, h = tw.add_rms_norm(x, residual, weight, weight_offset=1.0, scale=scale, shift=shift, gate=gate)
            plain = tw.rms_norm(x, weight, weight_offset=1.0, scale=scale, shift=shift)
            grads = torch.autograd.grad([y, h, plain], own, [dy.to(dtype), dh.to(dtype), dy.to(dtype)])
            made.append([y, h, plain, *grads])
    for at, (a, b) in enumerate(zip(*made)):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5, msg=lambda m, at=at: f"{at}: {m}")


def test_only_modulated_calls_leave_the_kernels_of_before():
    """Chosen by what is given alone, so that a plain norm launches what it did."""
    from tilewright.runtime.kernel import collect

    x, vector = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    nothing = dict.fromkeys(("scale", "shift", "gate"))
    for name, rest in (("rms_norm", {"rstd": None}), ("add_rms_norm", {"residual": x, "gate": None})):
        op = tw.catalogue()[name]
        for given in ({}, {"scale": vector}, {"shift": vector}, *([{"gate": vector}] if "gate" in rest else [])):
            values = {
                "x": x,
                "weight": vector,
                "eps": 1e-6,
                "weight_offset": 0.0,
                **nothing,
                **rest,
                **given,
                "out_format": None,
            }
            values = {n: values[n] for n in op.signature.names} | {"out": None}
            with tw.force("triton"), collect() as found:
                op.run(values)
            wanted = "modulated_norm_forward" if given else "rms_norm_forward"
            assert [one.kernel.name for one in found] == [wanted], (name, given)


def test_a_residual_is_updated_in_place_and_its_norm_stored_as_codes():
    """A step of a diffusion transformer: scale, shift and gate are thirds of one tensor, the codes have a static scale."""
    x, residual, style = (normal(5, n, seed=n, dtype=torch.bfloat16) for n in (200, 201, 600))
    residual = residual[:, :200].contiguous()
    scale, shift, gate = style.split(200, -1)
    static = tw.fp8("tensor", scale=torch.tensor([0.013]))
    q = static.empty(x.shape, x.dtype, x.device)
    h = (residual.double() + gate.double() * x.double()).to(torch.bfloat16)
    with tw.force("triton"):
        made = tw.add_rms_norm(x, residual, scale=scale, shift=shift, gate=gate, out_format=static, out=(q, residual))
    assert made[0] is q and made[1] is residual and torch.equal(residual, h)
    exact = F.rms_norm(h.double(), (200,), None, 1e-6) * (1 + scale.double()) + shift.double()
    apart = q.data.view(torch.uint8).int() - static.quantize(exact.float()).data.view(torch.uint8).int()
    assert int(apart.abs().max()) <= 1 and int((apart != 0).sum()) <= 5


def test_a_given_rstd_is_used_in_both_passes():
    """Forward one that is not the row's own, so that it shows."""
    leaves, dy = (normal(3, 72), normal(72, seed=1), normal(72, seed=2), normal(72, seed=3)), normal(3, 72, seed=4)
    true = torch.rsqrt(leaves[0].square().mean(-1) + 1e-6)
    made = []
    for name in ("triton", "reference"):
        x, weight, scale, shift = own = [t.detach().requires_grad_() for t in leaves]
        with tw.force(name):
            y = tw.rms_norm(x, weight, rstd=true, scale=scale, shift=shift)
            other = tw.rms_norm(x, weight, rstd=2 * true, scale=scale, shift=shift)
            made.append([y, other, *torch.autograd.grad(y, own, dy)])
    for a, b in zip(*made):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(made[0][0], made[0][1])
