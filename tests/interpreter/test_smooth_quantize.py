"""Smoothed quantisation: its bit contract, and the scales that data suggest."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.oracle import same_bits


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("fmt", [tw.fp8("row"), tw.fp8("1x128", ways="both", pow2=False, rule="exact")], ids=str)
def test_the_codes_of_the_smoothed_value(fmt, reverse):
    """Bit for bit those that `quantize` gives of z in fp32, groups with a row of `smooth` each."""
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(40, 136, generator=g) * 2.0 ** torch.randint(-30, 30, (40, 1), generator=g)).to(torch.bfloat16)
    smooth = torch.rand(3, 136, generator=g) * 2.0 ** torch.randint(-20, 20, (3, 136), generator=g)
    smooth[1, 7] = 0.0
    offsets = torch.tensor([9, 9, 40], dtype=torch.int32)
    each = smooth[[0] * 9 + [2] * 31]
    z = x.float() * each if reverse else x.float() / each.clamp(min=1e-30)
    with tw.force("triton"):
        found = tw.smooth_quantize(x, smooth, fmt, reverse=reverse, offsets=offsets)
        wanted = tw.quantize(z, fmt, offsets=offsets)
    for name, a, b in zip(fmt.tensor_names, found.tensors(), wanted.tensors()):
        a, b = (t[:2] if name == "scale_t" else t for t in (a, b))  # the blocks that there are
        same_bits(name, a, b)


def test_calibrated_columns_are_equally_large():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(64, 48, generator=g) * torch.logspace(-2, 2, 48)
    w = torch.randn(32, 48, generator=g)
    with tw.force("triton"):
        a, b = tw.column_amax(x), tw.column_amax(w)
    assert torch.equal(a, x.abs().amax(0, keepdim=True))
    s = tw.smooth_scale(a, b)
    torch.testing.assert_close((x / s).abs().amax(0), (w * s).abs().amax(0))
    torch.testing.assert_close(tw.smooth_scale(a, coef=0.25), a**0.25)
    up = tw.smooth_scale(a, b, power_of_two=True)
    assert bool((torch.frexp(up).mantissa == 0.5).all() and (up >= s).all() and (up < 2 * s).all())
    exact = torch.tensor([0.25, 4.0])
    assert torch.equal(tw.smooth_scale(exact, coef=1.0, power_of_two=True), exact)
    with pytest.raises(ValueError, match="coef"):
        tw.smooth_scale(a, coef=1.5)


def test_a_row_per_group_or_one_for_all():
    with pytest.raises(ValueError, match="smooth is .*but has one row"):
        tw.smooth_quantize(torch.zeros(4, 8), torch.ones(2, 8), tw.fp8("row"))
