"""The reference of linear_cross_entropy against torch's own linear layer and loss, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}], ids=str)
def test_it_is_torch_s_cross_entropy_of_its_linear(reduction, options):
    source = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=source).double() for shape in ((2, 5, 6), (9, 6), (9,)))
    labels = torch.randint(9, (2, 5), generator=source)
    labels[1, 2] = -100
    made = []
    for function in (tw.linear_cross_entropy, None):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        if function is None:
            logits = F.linear(leaves[0], leaves[1], leaves[2]).reshape(10, 9)
            loss = F.cross_entropy(logits, labels.reshape(10), reduction=reduction, **options)
            loss = loss.reshape(2, 5) if reduction == "none" else loss
        else:
            loss = function(leaves[0], leaves[1], labels, leaves[2], reduction=reduction, **options)
        upstream = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
        made.append((loss.detach(), *torch.autograd.grad(loss, leaves, upstream)))
    for ours, torchs in zip(*made):
        torch.testing.assert_close(ours, torchs, rtol=1e-11, atol=1e-13)


def test_logits_are_not_rounded():
    hidden, weight = torch.randn(8, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    labels = torch.arange(8)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), labels)
    loss = tw.linear_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)


def test_factors_of_two_precisions_are_refused():
    with pytest.raises(TypeError, match="weight must be bfloat16"):
        tw.linear_cross_entropy(torch.zeros(2, 3).bfloat16(), torch.zeros(4, 3), torch.tensor([0, 1]))


def on_hopper(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.bfloat16, **options
) -> tuple[str, list[str]]:
    """The implementation that a Hopper takes, and what its forward launches where all gradients are wanted."""
    op, chip = tw.linear_cross_entropy.op, replace(TARGETS["sm_90"], gluon=True)
    factors = (torch.empty(n, hidden, dtype=dtype, device="meta") for n in (tokens, vocab))
    values = op.signature.bind((*factors, torch.empty(tokens, dtype=torch.int64, device="meta")), options)
    with pretend(chip), collect() as launches:
        one = op.implementation(values, torch.device("cuda"))
        one.forward(**op.arguments(values), needs=frozenset(op.differentiable))
    return one.name, [wanted.kernel.name for wanted in launches]


def test_codes_of_a_group_of_tokens_are_one_launch_on_hopper():
    first = ["logits_hopper", "linear_cross_entropy_merge"]
    assert on_hopper(4096, 4096, 151936) == ("hopper", [*first, "cross_entropy_reduce"])
    name, launches = on_hopper(5003, 2880, 50257)
    assert name == "hopper" and launches[:6] == 2 * [*first, "linear_cross_entropy_backward"]
    assert on_hopper(3, 8, 1, torch.float16)[0] == "hopper"


@pytest.mark.parametrize("sizes", [(4, 20, 50), (0, 32, 50)], ids=str)
def test_rows_of_odd_sizes_and_no_tokens_are_not_for_bulk_copies(sizes):
    assert on_hopper(*sizes)[0] == "portable"


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"dtype": torch.float32}], ids=str)
def test_what_codes_cannot_tell_or_hold_goes_by_chunks(options):
    name, launches = on_hopper(64, 32, 1000, **options)
    assert name == "portable" and "linear_cross_entropy_encode" in launches
