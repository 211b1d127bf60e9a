"""The reference of outer against torch's own, and what a call refuses."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw


def test_torchs_outer_agrees():
    source = torch.Generator().manual_seed(0)
    x, y, dout = (torch.randn(*s, generator=source, dtype=torch.float64) for s in ((5,), (7,), (5, 7)))
    made = []
    for call in (tw.outer, torch.outer):
        own = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        out = call(*own)
        made.append([out, *torch.autograd.grad(out, own, dout)])
    for found, wanted in zip(*made):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_malformed_calls_are_refused():
    with pytest.raises(ValueError, match="outer: x"):
        tw.outer(torch.ones(2, 3), torch.ones(4))
    with pytest.raises(TypeError, match="outer: y must be bfloat16, got float32"):
        tw.outer(torch.ones(2, dtype=torch.bfloat16), torch.ones(4))
