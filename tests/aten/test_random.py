"""The random engine: torch's counters, against a Philox written out here; moments and distributions; what a seed reproduces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.aten import random

MASK = 0xFFFFFFFF


def philox(seed: int, call: int, thread: int) -> tuple[int, int, int, int]:
    """Four words of Philox 4x32 with ten rounds."""
    c = [call & MASK, call >> 32 & MASK, thread & MASK, thread >> 32]
    k = [seed & MASK, seed >> 32 & MASK]
    for _ in range(10):
        one, two = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [two >> 32 ^ c[1] ^ k[0], two & MASK, one >> 32 ^ c[3] ^ k[1], one & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    return tuple(c)


def unit(word: int) -> Tensor:
    """As curand has it: an fp32 number in (0, 1]."""
    return torch.tensor(float(word), dtype=torch.float64).float() * 2.0**-32 + 2.0**-33


def word_of(i: int, threads: int, each: int) -> tuple[int, int, int]:
    """(call, thread, which word) of an element: torch's threads have four, so far apart."""
    return i // (threads * each), i % threads, i % (threads * each) // threads


@pytest.fixture
def seeded(monkeypatch):
    """Seed and offset of every draw, as a test sets them."""

    def put(seed: int, offset: int, threads: int = 256) -> None:
        monkeypatch.setattr(random, "advance", lambda *_: (seed, offset))
        monkeypatch.setattr(random, "threads_of", lambda *_: threads)

    return put


def ours(call: Callable[[], Any]) -> Any:
    with tw.aten.use("all", include=["random"]):
        made = call()
        said = tw.aten.report()
    assert any(one["taken"] for one in said.values()) and not any(one["declined"] for one in said.values()), said
    return made


def test_the_philox_here_is_the_published_one():
    """Known answers of Random123: of nothing, and of all ones."""
    assert philox(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 2**64 - 1
    assert philox(ones, ones, ones) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (42, 8), (2**63 - 1, 2**32 - 4), (-5, 4 * (2**32 - 1)), (7, 2**40)]
)
def test_uniform_numbers_are_the_words(seed, offset, seeded):
    seeded(seed, offset)
    made = ours(lambda: torch.empty(1300).uniform_())
    for i in (0, 1, 255, 256, 700, 1023, 1024, 1299):
        call, thread, word = word_of(i, 256, 4)
        number = unit(philox(seed % 2**64, offset // 4 + call, thread)[word])
        assert made[i] == (0.0 if number == 1 else number), i


def test_uniform_numbers_of_53_bits(seeded):
    seeded(3, 4)
    made = ours(lambda: torch.empty(600, dtype=torch.float64).uniform_(-2, 5))
    for i in (0, 255, 256, 511, 512, 599):
        call, thread, word = word_of(i, 256, 2)
        words = philox(3, 1 + call, thread)
        number = (words[2 * word] ^ words[2 * word + 1] << 21) * 2.0**-53 + 2.0**-54
        assert math.isclose(float(made[i]), number * 7 - 2, rel_tol=1e-15, abs_tol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_normal_numbers_by_box_and_muller(dtype, seeded):
    seeded(11, 0)
    made = ours(lambda: torch.empty(700, dtype=dtype).normal_(3.0, 0.5))
    for i in (0, 1, 256, 300, 512, 699):
        if dtype == torch.float64:
            call, thread, word = word_of(i, 256, 2)
            w = philox(11, call, thread)
            u, v = ((w[2 * k] ^ w[2 * k + 1] << 21) * 2.0**-53 + 2.0**-54 for k in range(2))
        else:
            call, thread, word = word_of(i, 256, 4)
            w = philox(11, call, thread)
            u, v = (float(unit(w[word // 2 * 2 + k])) for k in range(2))
        exact = math.sqrt(-2 * math.log(u)) * (math.cos if word % 2 else math.sin)(2 * math.pi * v) * 0.5 + 3.0
        torch.testing.assert_close(
            float(made[i]), exact, rtol=torch.finfo(dtype).eps * 4, atol=2e-7 if dtype == torch.float32 else 1e-12
        )


def test_exponential_numbers(seeded):
    seeded(5, 0)
    made = ours(lambda: torch.empty(300).exponential_(2.0))
    for i in (0, 255, 256, 299):
        call, thread, word = word_of(i, 256, 4)
        torch.testing.assert_close(
            float(made[i]), -math.log(float(unit(philox(5, call, thread)[word]))) / 2, rtol=1e-6, atol=1e-7
        )
    assert float(made.min()) > 0


@pytest.mark.parametrize(("dtype", "shape", "vector"), [
    (torch.float32, (33, 40), 4), (torch.bfloat16, (40, 40), 8), (torch.bfloat16, (5, 2), 2), (torch.float64, (40, 30), 2),
    (torch.float32, (37, 41), 1),
])  # fmt: skip
def test_dropout_masks_are_the_words(dtype, shape, vector, seeded):
    """torch's threads take 16 bytes at once, where they can."""
    seeded(9, 16)
    x = torch.randn(shape).to(dtype)
    y, mask = ours(lambda: torch.ops.aten.native_dropout(x, 0.25, True))
    assert random.vector_of(x) == vector
    calls = max(1, vector // 4)
    for i in range(0, x.numel(), 23):
        if vector == 1:
            call, thread, word = word_of(i, 256, 4)
        else:
            turn, rest = divmod(i, 256 * vector)
            thread, e = divmod(rest, vector)
            call, word = turn * calls + e // 4, e % 4
        assert bool(mask.flatten()[i]) == bool(unit(philox(9, 4 + call, thread)[word]) < 0.75), i
    torch.testing.assert_close(y, (x.double() * mask / 0.75).to(dtype))


def test_dropout_of_none_of_all_and_of_nothing():
    x = torch.randn(6, 10).t()
    for arguments in ((0.5, False), (1.0, True), (0.0, True)):
        y, mask = ours(lambda a=arguments: torch.ops.aten.native_dropout(x, *a))
        assert (
            torch.equal(y, x * mask)
            and y.stride() == mask.stride() == x.stride()
            and bool(mask.all()) == (arguments[0] != 1)
        )
    y, mask = ours(lambda: torch.ops.aten.native_dropout(torch.empty(0, 3), 0.5, True))
    assert y.shape == mask.shape == (0, 3)


# ---- distributions ---------------------------------------------------------------------------------------------------


def distance(sample: Tensor, cumulative: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov and Smirnov's, times the root of how many there are: above 2.0 once in 1,500 times."""
    x = sample.double().flatten().sort()[0]
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    p = cumulative(x)
    return float(torch.maximum((p - steps[:-1]).abs().max(), (p - steps[1:]).abs().max())) * math.sqrt(n)


DISTRIBUTIONS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(4000), lambda x: x, 0.5, 1 / 12),
    "rand_like": (lambda: torch.rand_like(torch.empty(60, 70)), lambda x: x, 0.5, 1 / 12),
    "randn": (lambda: torch.randn(4000), lambda x: torch.special.ndtr(x), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(torch.empty(60, 70)), lambda x: torch.special.ndtr(x), 0.0, 1.0),
    "uniform": (lambda: torch.empty(4000).uniform_(-3, 5), lambda x: (x + 3) / 8, 1.0, 64 / 12),
    "normal": (
        lambda: torch.normal(torch.full((4000,), 2.0), 3.0),
        lambda x: torch.special.ndtr((x - 2) / 3),
        2.0,
        9.0,
    ),
    "normal of tensors": (
        lambda: torch.normal(torch.ones(4000), torch.full((4000,), 2.0)),
        lambda x: torch.special.ndtr((x - 1) / 2),
        1.0,
        4.0,
    ),
    "normal of deviations": (
        lambda: torch.normal(1.0, torch.full((4000,), 2.0)),
        lambda x: torch.special.ndtr((x - 1) / 2),
        1.0,
        4.0,
    ),
    "exponential": (lambda: torch.empty(4000).exponential_(0.5), lambda x: 1 - torch.exp(-x / 2), 2.0, 4.0),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    call, cumulative, mean, variance = DISTRIBUTIONS[name]
    torch.manual_seed(0)
    x = ours(call)
    assert distance(x, cumulative) < 2.0
    assert abs(float(x.mean()) - mean) < 4 * math.sqrt(variance / x.numel())
    assert abs(float(x.var()) - variance) < 0.2 * variance
    assert abs(float(torch.corrcoef(torch.stack((x.flatten()[:-1], x.flatten()[1:])))[0, 1])) < 0.1


def test_draws_without_replacement():
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(400, 4)
    one = ours(lambda: torch.multinomial(weights, 1)).flatten()
    shares = torch.bincount(one, minlength=4) / 400
    torch.testing.assert_close(shares, torch.tensor([0.0, 1 / 8, 2 / 8, 5 / 8]), atol=0.08, rtol=0)
    three = ours(lambda: torch.multinomial(weights[:20], 3))
    assert torch.equal(three.sort(1)[0], torch.tensor([1, 2, 3]).expand(20, 3))


def test_weights_that_are_no_probabilities_are_refused():
    """On a CPU: on a GPU it is an assertion of aten's on the device, after which the process can do nothing more there."""
    with tw.aten.use("all", include=["random"]):
        for wrong in (torch.tensor([1.0, -1.0]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, float("nan")])):
            with pytest.raises(RuntimeError, match="prob"):
                torch.multinomial(wrong, 1)


@pytest.mark.parametrize("n", [0, 1, 2, 300])
def test_permutations(n):
    torch.manual_seed(0)
    first, second = ours(lambda: (torch.randperm(n), torch.randperm(n, dtype=torch.int32)))
    assert torch.equal(first.sort()[0], torch.arange(n)) and second.dtype == torch.int32
    assert n < 300 or not torch.equal(first, second.long())


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.uint8, 256), (torch.int8, 128), (torch.float16, 2049), (torch.bfloat16, 257)]
)
def test_permutations_in_narrow_dtypes(dtype, most):
    """Up to where all numbers are one of the dtype's; more are aten's to refuse, or to round."""
    with tw.aten.use("all", include=["randperm"]):
        made = torch.randperm(most, dtype=dtype)
        with contextlib.suppress(RuntimeError):
            torch.randperm(most + 1, dtype=dtype)
        assert tw.aten.report()["randperm.generator_out"]["taken"] == 1
    assert torch.equal(made.long().sort()[0], torch.arange(most))


# ---- generators ------------------------------------------------------------------------------------------------------


def test_a_seed_reproduces_and_a_generator_is_asked():
    def draws() -> list[Tensor]:
        own = torch.Generator().manual_seed(3)
        return [
            torch.rand(9),
            torch.randn(9),
            torch.rand(9, generator=own),
            torch.rand(9, generator=own),
            torch.randperm(9),
        ]

    torch.manual_seed(1)
    first = ours(draws)
    torch.manual_seed(1)
    second = ours(draws)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[0], first[2]) and not torch.equal(first[2], first[3])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_dropout_reproduces_its_mask(reentrant):
    """The forward is made again in the backward, by ours both times, from where the generator stood."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(20, 10, requires_grad=True)
    with tw.aten.use("all"):
        torch.manual_seed(0)
        y = checkpoint(lambda t: torch.native_dropout(t.sin(), 0.5, True)[0], x, use_reentrant=reentrant)
        torch.rand(5, device=x.device)  # moves the generator on
        y.sum().backward()
        assert tw.aten.report()["native_dropout"]["taken"] == 2
    kept = y.detach() != 0
    assert 50 < int(kept.sum()) < 150
    torch.testing.assert_close(x.grad, 2 * x.detach().cos() * kept)


def test_strided_results_are_filled_in_the_order_of_memory(seeded):
    seeded(1, 0)
    flat = ours(lambda: torch.empty(60).uniform_())
    assert torch.equal(ours(lambda: torch.empty(6, 10).t().uniform_()).t().flatten(), flat)
    wide = torch.zeros(6, 20)
    ours(lambda: wide[:, ::2].uniform_())
    assert torch.equal(wide[:, ::2].flatten(), flat) and not wide[:, 1::2].any()


def test_what_is_refused_is_refused_alike():
    for call in (
        lambda: torch.empty(3).uniform_(2, 1), lambda: torch.empty(3).normal_(0, -1), lambda: torch.empty(3).exponential_(0),
        lambda: torch.normal(torch.zeros(2), torch.tensor([1.0, -1.0])), lambda: torch.empty(3, dtype=torch.int64).uniform_(),
        lambda: torch.multinomial(torch.ones(3), 4),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as plain:
            call()
        with tw.aten.use("all"), pytest.raises(RuntimeError) as other:
            call()
        assert str(plain.value) == str(other.value)
