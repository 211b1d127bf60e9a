"""What the router promises beyond the properties of every op: the very experts, in order, whatever ties, groups and sizes."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.calls import gradients, paths, repeatable
from tilewright.check.cases import Net
from tilewright.check.properties import guarded_memory, isolation, leading, special_values, strides
from tilewright.ops.moe import moe_router

OP = tw.catalogue()["topk_routing"]


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def best(scores: list[float], among: list[int], k: int) -> list[int]:
    """Places of the k largest, NaN above all, equal ones from the left."""
    return sorted(among, key=lambda e: (not math.isnan(scores[e]), -scores[e] if scores[e] == scores[e] else 0.0, e))[
        :k
    ]


@pytest.mark.parametrize(
    "tokens, experts, k",
    [(9, 256, 8), (5, 160, 6), (3, 384, 8), (2, 1024, 8), (33, 8, 2), (7, 64, 6), (5, 1, 1), (4, 17, 17), (2, 200, 70)],
)
def test_chosen_are_the_largest_in_order(tokens, experts, k):
    logits = normal(tokens, experts, seed=experts)
    probs, chosen, counts = tw.topk_routing(logits, k)
    wanted = [best(row, list(range(experts)), k) for row in logits.tolist()]
    assert chosen.tolist() == wanted
    picked = torch.tensor(wanted).flatten()
    assert counts.dtype == torch.int32 and counts.tolist() == torch.bincount(picked, minlength=experts).tolist()
    exact = torch.softmax(logits.double().gather(1, chosen), 1)
    torch.testing.assert_close(probs.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "experts, groups, group_topk, k", [(256, 32, 4, 8), (256, 8, 4, 8), (160, 8, 3, 6), (40, 5, 2, 4)]
)
def test_groups_of_real_models(experts, groups, group_topk, k, biased, score):
    """32 groups without a bias were wrong on GPUs: `tests/compile/test_reductions.py` holds what the compiler makes of them."""
    logits = normal(6, experts, seed=groups)
    bias = normal(experts, seed=1).mul(0.1) if biased else None
    settings = {"score": score, "bias": bias, "groups": groups, "group_topk": group_topk, "scaling": 2.5}
    probs, chosen, counts = tw.topk_routing(logits, k, **settings)
    exact = moe_router.reference(logits.double(), k, **settings)
    assert torch.equal(chosen, exact[1]) and torch.equal(counts, exact[2])
    torch.testing.assert_close(probs.double(), exact[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("experts, k", [(128, 8), (40, 8), (256, 16)])
def test_ties_zeros_and_what_is_not_finite(experts, k):
    logits = normal(12, experts, dtype=torch.bfloat16).mul(2).round()  # a few distinct numbers, both zeros among them
    logits[1] = 0.0
    logits[2, ::2] = -0.0
    logits[3] = -math.inf
    logits[4, 5:] = -math.inf
    logits[5, 7] = math.inf
    logits[6, [3, 9]] = math.nan
    _, chosen, _ = tw.topk_routing(logits, k)
    assert chosen.tolist() == [best(row, list(range(experts)), k) for row in logits.tolist()]


@pytest.mark.parametrize(
    "experts, groups, kept, k", [(256, 8, 4, 8), (160, 8, 3, 6), (72, 3, 2, 4), (15, 5, 2, 6), (96, 4, 1, 3)]
)
def test_group_limited_choice(experts, groups, kept, k):
    """DeepSeek-V3's rule walked through token by token."""
    logits, bias = normal(6, experts, seed=1), normal(experts, seed=2).mul(0.3)
    options = {"score": "sigmoid", "bias": bias, "groups": groups, "group_topk": kept, "scaling": 2.5}
    probs, chosen, _ = tw.topk_routing(logits, k, **options)
    scores, size = torch.sigmoid(logits.double()), experts // groups
    for t, biased in enumerate((scores + bias.double()).tolist()):
        members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        sums = [sum(biased[e] for e in best(biased, m, k // kept)) for m in members]
        allowed = [e for g in best(sums, list(range(groups)), kept) for e in members[g]]
        wanted = best(biased, allowed, k)
        assert chosen[t].tolist() == wanted
        plain = scores[t, wanted]
        torch.testing.assert_close(probs[t].double(), 2.5 * plain / plain.sum(), rtol=1e-6, atol=1e-7)


def test_underflowing_scores_are_normalised_all_the_same():
    """Experts that the softmax of all gives 0 still share one token's weight as their logits say."""
    logits = torch.tensor([[300.0, 1.0, 0.0, -1.0]])
    probs, _, _ = tw.topk_routing(logits, 2, indices=torch.tensor([[1, 3]]))
    torch.testing.assert_close(probs, torch.softmax(torch.tensor([[1.0, -1.0]]), 1))


@pytest.mark.parametrize("programs", [1, 3])
def test_programs_that_take_several_tiles(programs):
    logits = normal(41, 160)
    wanted = tw.topk_routing(logits, 4)
    with mock.patch.object(moe_router, "_programs", lambda a: programs):
        OP.plans.clear()
        found = tw.topk_routing(logits, 4)
        OP.plans.clear()
    for a, b in zip(found, wanted):
        assert torch.equal(a, b)


def test_replay_gives_the_same_weights_and_gradients():
    logits = normal(11, 96)
    leaf, other = (logits.clone().requires_grad_() for _ in range(2))
    options = {"score": "sigmoid", "scaling": 2.5}
    probs, chosen, counts = tw.topk_routing(leaf, 6, bias=normal(96, seed=3), **options)
    again, same, counted = tw.topk_routing(other, 6, indices=chosen.int(), **options)
    assert torch.equal(probs, again) and torch.equal(chosen.int(), same) and torch.equal(counts, counted)
    upstream = normal(11, 6, seed=4)
    probs.backward(upstream)
    again.backward(upstream)
    assert torch.equal(leaf.grad, other.grad) and bool(leaf.grad.any())


CHOICE = (strides, leading, guarded_memory, repeatable, paths, gradients, isolation, special_values)


@pytest.mark.parametrize("prop", CHOICE, ids=lambda p: p.__name__)
def test_properties_where_the_choice_is_made(prop):
    """Those that ask for every optional tensor would have the choice given."""

    def inputs(draw):
        return {**moe_router.inputs(draw), "indices": None}

    with mock.patch.object(OP, "inputs", inputs):
        prop(OP, Net(interpreter=True, cases=6))


def test_a_map_and_indices_permute_alike():
    logits, x = normal(19, 12), normal(19, 8, seed=5)
    probs, chosen, _ = tw.topk_routing(logits, 3)
    dense, flags = tw.routing_map(chosen, probs, experts=12)
    by_index = tw.moe_permute(x, chosen, probs, experts=12, align=4)
    by_map = tw.moe_permute(x, flags, dense, topk=3, align=4, capacity=by_index[0].shape[0])
    end = int(by_index[4][-1])
    for a, b in zip(by_index[:2], by_map[:2]):
        assert torch.equal(a[:end], b[:end])
    assert torch.equal(by_index[2], by_map[2])
