"""A captured decoder layer: replayed with other inputs, positions, lengths and scales it gives the bits of eager calls, and neither
way takes more memory with time."""

from __future__ import annotations

import pytest
import torch

from examples.decode_layer import QWEN3_8B, TINY, build, error, plain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("batch", [1, 32])
def test_it_is_right_at_the_sizes_of_a_model(batch, fp8):
    step = build(QWEN3_8B, batch, 300, fp8, "cuda")
    wanted = plain(step)
    update, stream = step.captured()()
    assert error(update, wanted.update) < (0.1 if fp8 else 1e-2)
    assert error(stream, wanted.stream) < (0.03 if fp8 else 5e-3)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("sizes", [TINY, QWEN3_8B], ids=["tiny", "model"])
def test_a_replay_has_the_bits_of_eager_calls(sizes, fp8):
    step, other = (build(sizes, 3, 100, fp8, "cuda") for _ in range(2))
    replay = step.captured()  # which calls it once
    other()
    for number in range(4):
        for one in (step, other):
            one.update.copy_(torch.randn(one.update.shape, generator=torch.Generator().manual_seed(number)))
            for scale in one.scales.values():
                scale.mul_(1.1)
            one.advance()
        assert all(torch.equal(a, b) for a, b in zip(replay(), other()))
        for mine, theirs in ((step.cache.keys, other.cache.keys), (step.cache.values, other.cache.values)):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_a_thousand_steps_take_no_memory(fp8):
    step = build(TINY, 3, 100, fp8, "cuda")
    for run in (step.captured(), step):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(1000):
            run()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
