"""Causal convolutions: where a sequence is cut, or stepped through, must not matter."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.interpreter.sequences import drawn


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_convolution_may_be_cut_anywhere(size):
    x, weight, bias = drawn(2, 20, 5, seed=0), drawn(5, 4, seed=1), drawn(5, seed=2)
    with tw.force("triton"):
        whole, last = tw.causal_conv1d(x, weight, bias, act="silu")
        state, made, pool = None, [], None
        for first in range(0, 20, size):
            y, state = tw.causal_conv1d(x[:, first : first + size], weight, bias, act="silu", state=state)
            made.append(y)
        assert torch.equal(torch.cat(made, 1), whole) and torch.equal(state, last)
        _, pool = tw.causal_conv1d(x[:, :13], weight, bias, act="silu")
        steps = [tw.causal_conv1d_step(x[:, t], weight, bias, pool, act="silu") for t in range(13, 20)]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 13:], rtol=1e-6, atol=1e-6)
    assert torch.equal(pool, last)


@pytest.mark.parametrize("columns", [5, 1030])
def test_packed_sequences_are_apart(columns):
    """One is empty and keeps its state; tokens in none may hold anything, and give 0. By tiles, and by rows."""
    x, weight, states = drawn(1, 20, columns, seed=0), drawn(columns, 4, seed=1), drawn(3, columns, 3, seed=3)
    marks = [2, 4, 4, 17]
    x[:, :2], x[:, 17:] = float("nan"), float("nan")
    with tw.force("triton"):
        y, last = tw.causal_conv1d(x, weight, None, act="silu", state=states, cu_seqlens=torch.tensor(marks))
        for s, (first, end) in enumerate(zip(marks, marks[1:])):
            own, after = tw.causal_conv1d(x[:, first:end], weight, None, act="silu", state=states[s : s + 1])
            assert torch.equal(own, y[:, first:end]) and torch.equal(after, last[s : s + 1])
    assert torch.equal(last[1], states[1]) and not bool(y[:, :2].any()) and not bool(y[:, 17:].any())
