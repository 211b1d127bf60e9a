"""Speculation of the examples on a GPU: token for token what decoding gives there, its step captured once and replayed."""

from __future__ import annotations

import pytest
import torch

from examples import speculate

pytestmark = pytest.mark.gpu
COUNT = 40


def prompt() -> torch.Tensor:
    return torch.randint(speculate.VOCAB, (2, 7), generator=torch.Generator().manual_seed(1)).cuda()


def test_drafts_change_no_token():
    alone, steps = speculate.decode(speculate.Model(2, "cuda"), prompt(), COUNT)
    drafted, fewer = speculate.speculate(speculate.Model(2, "cuda"), prompt(), COUNT)
    assert torch.equal(drafted, alone) and fewer < 0.7 * steps


def test_a_captured_step_gives_the_same_tokens(monkeypatch):
    """The very step of the example, as a graph over two buffers: the last tokens and the lengths."""
    alone, _ = speculate.decode(speculate.Model(2, "cuda"), prompt(), COUNT)
    made = speculate.verified

    def captured(model, *about):
        step = made(model, *about)
        token, length = torch.zeros(2, device="cuda", dtype=torch.long), torch.full((2,), 70, device="cuda")
        step(token, length)  # compiles; what it writes lies past what any sequence has
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(token, length)

        def replay(last, count):
            token.copy_(last)
            length.copy_(count)
            graph.replay()
            return tuple(one.clone() for one in results)

        return replay

    monkeypatch.setattr(speculate, "verified", captured)
    drafted, _ = speculate.speculate(speculate.Model(2, "cuda"), prompt(), COUNT)
    assert torch.equal(drafted, alone)
