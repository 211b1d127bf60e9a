"""Speculation of the examples, by kernels: token for token what decoding without drafts gives."""

from __future__ import annotations

import torch

import tilewright as tw
from examples import speculate


def test_drafts_change_no_token():
    prompt = torch.randint(speculate.VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    alone, steps = speculate.decode(speculate.Model(2, "cpu"), prompt, 12)
    with tw.force("triton"):
        drafted, fewer = speculate.speculate(speculate.Model(2, "cpu"), prompt, 12)
    assert torch.equal(drafted, alone) and fewer < steps
