"""The decoder layer of the examples, by kernels: near torch's own operators, in the memory that it was given, step after step."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from examples.decode_layer import TINY, build, error, plain


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_a_layer_by_kernels(fp8):
    step = build(TINY, 3, 40, fp8, "cpu")
    for _ in range(2):
        wanted = plain(step)
        update, stream = step()
        assert update is step.made["down"] and stream is step.streams[1], "another memory than what was given"
        assert error(update, wanted.update) < (0.1 if fp8 else 1e-2)
        assert error(stream, wanted.stream) < (0.03 if fp8 else 5e-3)
        step.advance()


def test_what_a_step_reads_may_change():
    """Scales, lengths and slots are read where they lie: nothing of them is kept by the plans."""
    step, other = (build(TINY, 2, 40, True, "cpu") for _ in range(2))
    before = step()[0].clone()
    for scale in step.scales.values():
        scale.mul_(1.5)
    step.advance()
    assert not torch.equal(step()[0], before)
    for scale in other.scales.values():
        scale.mul_(1.5)
    other()  # writes its token with other scales, as the first step did with the old ones
    other.advance()
    for mine, theirs in zip((step.cache.keys, step.cache.values), (other.cache.keys, other.cache.values)):
        theirs.view(torch.uint8).copy_(mine.view(torch.uint8))
    assert torch.equal(other()[0], step()[0])
