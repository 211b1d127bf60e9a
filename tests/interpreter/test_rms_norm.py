"""What is peculiar to rms_norm's kernels."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_without_eps_the_rows_past_the_end_do_not_count(rows):
    """A block of rows that is not full has rows of zeros behind it, whose rstd is infinite when eps is 0."""
    source = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=source).requires_grad_()
    weight = torch.randn(64, generator=source).requires_grad_()
    dy = torch.randn(rows, 64, generator=source)
    with tw.force("triton"):
        found = torch.autograd.grad(tw.rms_norm(x, weight, 0.0), [x, weight], dy)
    wanted = torch.autograd.grad(torch.nn.functional.rms_norm(x, (64,), weight, 0.0), [x, weight], dy)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
