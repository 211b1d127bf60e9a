"""The reference of sparse_mm against a loop over weights, and what a call has to read."""

from __future__ import annotations

import math

import torch

import tilewright as tw
from tilewright.ops.activation.sparse_mm import moved


def test_a_loop_over_weights_agrees():
    source = torch.Generator().manual_seed(0)
    weights, rows = (torch.randn(*shape, generator=source, dtype=torch.float64) for shape in ((3, 9), (9, 4)))
    weights[weights.abs() < 0.5] = 0.0
    weights[1], weights[0, 2], weights[2, 2] = 0.0, 0.0, 1.0
    rows[2] = math.inf
    exact = torch.zeros(3, 4, dtype=torch.float64)
    for token, i in (weights != 0).nonzero().tolist():
        exact[token] += weights[token, i] * rows[i]
    y = tw.sparse_mm(weights, rows)
    torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
    assert bool((y[1] == 0).all()) and bool(y[0].isfinite().all()) and bool((y[2] == math.inf).all())


def test_bytes_are_those_of_rows_that_are_wanted():
    weights = torch.zeros(2, 9)
    weights[0, 3], weights[1, 3], weights[1, 8] = 1.0, 2.0, math.nan
    assert moved(weights, torch.ones(9, 5)) == (4 * (18 + 2 * 5), 4 * 2 * 5)
    assert moved(torch.zeros(0), torch.ones(0, 5)) == (0, 4 * 5)
