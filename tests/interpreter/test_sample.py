"""What `sample` promises beyond the properties of every op: whose token a row draws, how often, and what ties do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.mutants import Mutant, declared
from tilewright.ops.sampling import sample as module


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def logits(rows: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def seeds(rows: int) -> Tensor:
    return torch.arange(rows) * 0x9E3779B97F4A7C1 - 5


def test_philox_is_the_published_one():
    """The known answers of Random123 for Philox 4x32-10 with the counter 0."""
    a, b = module.philox(torch.tensor([0]))
    assert (int(a), int(b)) == (0x6627E8D5, 0xE169C58D)


@pytest.mark.parametrize(
    ("word", "other", "total"), [(MAX := 2**32 - 1, MAX, 2**63 - 1), (MAX, 7, 2**40), (5, MAX, 2**61 + 3)]
)
def test_the_upper_half_of_a_product(word, other, total):
    found = module.high_half(*(torch.tensor(n) for n in (word, other, total)))
    assert int(found) == ((word << 32) + other) * total >> 64


# Few groups, which a program holds; more, which it reads in several steps, limited and not
@pytest.mark.parametrize("vocab", [5, 700, 9001])
@pytest.mark.parametrize(
    "limits", [{}, {"top_k": torch.tensor([3])}, {"top_p": torch.tensor(0.9)}], ids=["", "top_k", "top_p"]
)
def test_it_draws_what_torch_draws(vocab, limits):
    z, t = logits(3, vocab, dtype=torch.float16), torch.tensor([0.7, 1.0, 30.0])
    found = tw.sample(z, seeds(3), t, **limits)
    with tw.force("reference"):
        assert torch.equal(found, tw.sample(z, seeds(3), t, **limits))


def test_a_row_is_alone():
    """Its token is the same in any batch and at any place."""
    z, s, t = logits(6, 90), seeds(6), torch.full((6,), 0.9)
    together = tw.sample(z, s, t, torch.tensor(20))
    order = torch.tensor([4, 2, 5, 0])
    assert torch.equal(tw.sample(z[order], s[order], t[order], torch.tensor(20)), together[order])


def test_tokens_come_as_often_as_their_probabilities():
    """Among 4000 draws each token's count is within five standard deviations of what its probability says, limits included."""
    z = torch.tensor([[2.0, 1.0, 0.5, 0.5, -1.0, -2.0, -9.0]])
    draws, t = 4000, 0.8
    p = torch.softmax(z[0] / t, -1)
    p[4:] = 0.0  # the five largest are four after top_p
    with tw.force("reference"):  # whose draws are those of kernels
        found = tw.sample(z.expand(draws, -1), seeds(draws), torch.tensor(t), torch.tensor(5), torch.tensor(0.95))
    p /= p.sum()
    counts = torch.bincount(found, minlength=7)
    off = (counts - draws * p).abs()
    assert bool((off <= 5 * (draws * p * (1 - p)).sqrt()).all()), counts.tolist()
    assert int(counts[4:].sum()) == 0


def test_equal_logits_stay_or_go_together():
    z = torch.tensor([1.0, 5.0, 3.0, 3.0, 3.0, 0.0]).repeat(2000, 1)
    for limits, allowed in (
        ({"top_k": torch.tensor(2)}, {1, 2, 3, 4}),
        ({"top_k": torch.tensor(1)}, {1}),
        ({"top_p": torch.tensor(0.0)}, {1}),
        ({"min_p": torch.tensor(2.0)}, {1}),
        ({"min_p": torch.tensor(0.9 * math.exp(-2.0))}, {1, 2, 3, 4}),
        # the first holds 0.7 of the probability, those after it the rest but for little
        ({"top_p": torch.tensor(0.75)}, {1, 2, 3, 4}),
        ({"top_k": torch.tensor(0), "top_p": torch.tensor(1.0)}, {0, 1, 2, 3, 4, 5}),
    ):
        with tw.force("reference"):
            found = {*tw.sample(z, seeds(2000), torch.tensor(1.0), **limits).tolist()}
        assert found == allowed, f"{limits}: {found}"
        few = tw.sample(z[:9], seeds(9), torch.tensor(1.0), **limits)
        assert {*few.tolist()} <= allowed, f"{limits}: {few}"


def test_temperature_0_is_the_first_largest():
    z = logits(4, 300)
    z[0, [7, 200]], z[1, 299], z[2] = 50.0, math.inf, -3.0
    z[3, [10, 40]] = torch.tensor([-0.0, 0.0]).bfloat16()
    z[3, z[3] > 0] = -1.0
    found = tw.sample(z, seeds(4), torch.zeros(()), torch.tensor(3), torch.tensor(0.1))
    assert found.tolist()[:3] == [7, 299, 0]
    assert found[3] == int((z[3] == z[3].max()).nonzero()[0])


def test_what_cannot_be_drawn_from_is_minus_one():
    z = logits(6, 40)
    z[0, 3], z[1], z[2, 5] = math.nan, -math.inf, math.inf
    t = torch.tensor([1.0, 1.0, 1.0, -0.1, math.nan, 1.0])
    found = tw.sample(z, seeds(6), t).tolist()
    assert [found[i] for i in (0, 1, 3, 4)] == [-1] * 4
    assert found[2] == 5 and 0 <= found[5] < 40


@pytest.mark.parametrize("t", [1e-44, 1e-20, 1e20, math.inf])
def test_extreme_temperatures(t):
    """Nearly 0 takes the largest; without end all are alike, but for those that are masked."""
    z = logits(3, 65)
    z[:, ::2] = -math.inf
    found = tw.sample(z, seeds(3), torch.full((3,), t))
    if t < 1:
        assert torch.equal(found, z.argmax(-1))
    else:
        assert bool((found % 2 == 1).all())


def draws(sample: Callable[..., Tensor]) -> int:
    """How many different results four calls have whose seeds change where they lie."""
    z, s, t = torch.zeros(2, 500), seeds(2), torch.ones(())
    drawn = []
    for _ in range(4):
        drawn.append(tuple(sample(z, s, t).tolist()))
        s += 1
    return len({*drawn})


def test_the_seed_is_read_at_every_call():
    assert draws(tw.sample) == 4


def test_a_seed_that_the_first_call_froze_would_show(tmp_path):
    old = "    given = [strides(t, lead) for t in (seed,"
    frozen = f'    seed = forward.__dict__.setdefault("seed", seed.clone())\n{old}'
    file = "tilewright/ops/sampling/sample.py"
    with declared(Mutant("a frozen seed", old, frozen, "", "", file, "sample"), tmp_path) as (op, _):
        assert draws(op.function) == 1


def test_limits_that_say_nothing_are_none():
    """A `min_p` of NaN, as a `top_p` of NaN; an infinite logit at a temperature so high that what is below it is not known."""
    x, none = logits(4, 300), torch.full((4,), float("nan"))
    given = x, seeds(4), torch.ones(4)
    wanted = tw.sample(*given)
    assert torch.equal(tw.sample(*given, min_p=none), wanted) and torch.equal(tw.sample(*given, top_p=none), wanted)
    x[:, 7] = float("inf")
    for hot in (1e37, 3e38, float("inf")):
        assert torch.equal(tw.sample(x, seeds(4), torch.full((4,), hot)), torch.full((4,), 7))
