"""The router's references against the published formulas, and the calls that it refuses."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw


def logits(tokens: int = 13, experts: int = 24) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_before_the_choice(normalize):
    """Mixtral's and Qwen's router."""
    z = logits()
    probs, chosen, counts = tw.topk_routing(z, 4, normalize=normalize)
    values, indices = torch.softmax(z, -1).topk(4)
    wanted = values / values.sum(-1, keepdim=True) if normalize else values
    torch.testing.assert_close(probs, wanted)
    assert torch.equal(chosen, indices) and counts.sum() == 13 * 4


def test_softmax_after_the_choice():
    """Megatron's without pre-softmax, and gpt-oss's."""
    z = logits()
    probs, chosen, _ = tw.topk_routing(z, 4, order="topk_first", scaling=0.5)
    values, indices = z.topk(4)
    torch.testing.assert_close(probs, 0.5 * torch.softmax(values, -1))
    assert torch.equal(chosen, indices)


def test_bias_chooses_and_does_not_weigh():
    z, bias = logits(), torch.linspace(-1, 1, 24)
    probs, chosen, _ = tw.topk_routing(z, 4, score="sigmoid", bias=bias, normalize=False)
    assert torch.equal(chosen, (torch.sigmoid(z) + bias).topk(4).indices)
    torch.testing.assert_close(probs, torch.sigmoid(z).gather(1, chosen))


def test_indices_that_name_no_expert_weigh_nothing():
    given = torch.tensor([[0, -1], [24, 5], [-7, 99]])
    for options in ({}, {"score": "sigmoid"}, {"normalize": False}):
        leaf = logits(3).requires_grad_()
        probs, chosen, counts = tw.topk_routing(leaf, 2, indices=given, **options)
        assert chosen.tolist() == [[0, -1], [-1, 5], [-1, -1]]
        assert (probs != 0).tolist() == [[True, False], [False, True], [False, False]]
        assert counts.sum() == 2 and counts[0] == counts[5] == 1
        probs.sum().backward()
        assert bool(leaf.grad.isfinite().all()) and not bool(leaf.grad[2].any())


@pytest.mark.parametrize(
    "options, word",
    [
        ({"k": 25}, "k"), ({"k": 4, "groups": 5}, "groups"), ({"k": 4, "groups": 4, "group_topk": 5}, "group_topk"),
        ({"k": 5, "groups": 4, "group_topk": 2}, "k"), ({"k": 8, "groups": 4, "group_topk": 1}, "k"),
        ({"k": 2, "score": "sigmoid", "order": "topk_first"}, "order"),
        ({"k": 2, "indices": torch.zeros(13, 3, dtype=torch.int64)}, "indices"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, word):
    with pytest.raises(ValueError, match=rf"topk_routing: {word} must"):
        tw.topk_routing(logits(), **options)


def test_z_loss():
    z = logits().requires_grad_()
    loss = tw.router_z_loss(z, 1e-3)
    torch.testing.assert_close(loss, 1e-3 * z.exp().sum(-1).log().square().mean())


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "given"])
def test_load_balancing_loss(score):
    """Megatron's formula: sum(probs per expert * tokens per expert) * experts * coef / (k * tokens**2)."""
    z, k = logits().abs(), 4
    counts = torch.bincount(z.topk(k).indices.flatten(), minlength=24)
    probs = {"softmax": torch.softmax(z, -1), "sigmoid": torch.sigmoid(z), "given": z}[score]
    probs = probs / probs.sum(-1, keepdim=True) if score == "sigmoid" else probs
    wanted = (probs.sum(0) * counts).sum() * (24 * 0.01 / (k * 13 * 13))
    torch.testing.assert_close(tw.load_balancing_loss(z, counts, 0.01, score=score), wanted)


def test_an_even_load_costs_the_coefficient():
    counts = torch.full((24,), 7)
    torch.testing.assert_close(tw.load_balancing_loss(logits(), counts, 0.25), torch.tensor(0.25, dtype=torch.float64))
