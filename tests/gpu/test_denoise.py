"""A captured denoise loop: replayed with another schedule, noise, context and scales it gives the bits of eager calls, and neither
way takes more memory with time."""

from __future__ import annotations

import pytest
import torch

from examples.denoise import DIT, TINY, Loop, build, error, plain

pytestmark = pytest.mark.gpu
both_precisions = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
both_norms = pytest.mark.parametrize("norm", ["layer", "rms"])


@both_precisions
@both_norms
def test_it_is_right_at_the_sizes_of_a_model(norm, fp8):
    loop = build(DIT._replace(norm=norm, steps=2), 1, fp8, "cuda")
    assert error(loop, loop.captured()(), plain(loop).sample) < (0.1 if fp8 else 2e-2)


def changed(loop: Loop, number: int) -> None:
    """Other numbers in all that a graph reads."""
    source = torch.Generator().manual_seed(number)
    for given in (loop.noise, loop.context):
        given.copy_(torch.randn(given.shape, generator=source))
    loop.schedule(torch.linspace(1, 0, loop.model.sizes.steps + 1, device="cuda") ** (1 + number))
    for scales in loop.scales:
        for scale in scales.values():
            scale.mul_(1.1)


@both_precisions
@pytest.mark.parametrize(
    "sizes", [TINY, TINY._replace(norm="rms"), DIT._replace(blocks=2, steps=3)], ids=["tiny", "rms", "model"]
)
def test_a_replay_has_the_bits_of_eager_calls(sizes, fp8):
    loop, other = (build(sizes, 2, fp8, "cuda") for _ in range(2))
    replay, before = loop.captured(), None
    for number in range(3):
        for one in (loop, other):
            changed(one, number)
        found = replay()
        assert torch.equal(found, other()) and bool(found.isfinite().all())
        assert before is None or not torch.equal(found, before)
        before = found.clone()


@both_precisions
def test_a_thousand_loops_take_no_memory(fp8):
    loop = build(TINY, 2, fp8, "cuda")
    for run in (loop.captured(), loop):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(1000):
            run()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
