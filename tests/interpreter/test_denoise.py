"""The denoise loop of the examples, by kernels: near torch's own operators, in the memory that it was given, whatever it reads."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from examples.denoise import TINY, build, error, plain


@pytest.mark.parametrize(("norm", "fp8"), [("layer", True), ("rms", False)])
def test_a_loop_by_kernels(norm, fp8):
    loop = build(TINY._replace(norm=norm, blocks=1, steps=2, tokens=6, context=5, ffn=96), 2, fp8, "cpu")
    with tw.force("triton"):
        first = loop()
        assert first is loop.state, "another memory than what was given"
        assert error(loop, first, plain(loop).sample) < (0.06 if fp8 else 1e-2)
        kept = first.clone()
        loop.schedule(torch.linspace(1, 0, 3) ** 2)
        for scale in loop.scales[0].values():
            scale.mul_(1.1)
        assert error(loop, loop(), plain(loop).sample) < (0.06 if fp8 else 1e-2)
    assert not torch.equal(loop.state, kept), "a schedule that the plans kept"
