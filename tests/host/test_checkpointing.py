"""Selective checkpointing: which results are kept, that products run once, and the same gradients, bit for bit."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewright as tw
from tilewright.integrations.pytorch.checkpointing import policy, save_products

WATCHED = ("rms_norm", "glu", "linear_fp8", "moe_feed_forward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(16))
        self.up = tw.nn.Linear(16, 64)
        self.down = nn.Linear(32, 16, bias=False)
        self.experts = tw.nn.MoEFeedForward(16, 32, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(tw.glu(self.up(tw.rms_norm(x, self.norm))))
        return tw.rms_norm(x + self.experts(y)[0], self.norm)


@pytest.fixture
def runs(monkeypatch):
    """How often each op ran, and torch's own linear layer."""
    counter = Counter()

    def counting(name, run, *args, **kwargs):
        counter[name] += 1
        return run(*args, **kwargs)

    for name in WATCHED:
        op = tw.catalogue()[name]
        monkeypatch.setattr(op, "run", partial(counting, name, op.run))
    return counter


def gradients(block: Block, x: Tensor, **options) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    if options:
        y = checkpoint(block, leaf, use_reentrant=False, **options)
    else:
        with FlopCounterMode(
            display=False
        ):  # registered ops, as in a checkpoint: sums of gradients have the same order
            y = block(leaf)
    y.square().sum().backward()
    found = [leaf.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    return found


def test_products_run_once_and_gradients_are_the_same(runs):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(6, 16)
    block(x)  # quantises the weight, which is then kept
    plain = gradients(block, x)
    runs.clear()
    found = gradients(block, x, context_fn=save_products)
    assert all(torch.equal(a, b) for a, b in zip(plain, found))
    assert runs["linear_fp8"] == runs["moe_feed_forward"] == 1
    assert runs["glu"] == 2 and runs["rms_norm"] >= 4


def test_torchs_own_products_run_once():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return tw.glu(F.relu(x @ w) @ w)

    counts = []
    for options in ({"context_fn": save_products}, {}):
        with FlopCounterMode(display=False) as flops:
            y = checkpoint(layer, x, use_reentrant=False, **options)
        before = flops.get_total_flops()
        with flops:  # counts from 0 again
            y.sum().backward()
        counts.append(flops.get_total_flops())
    assert counts[0] == 2 * before  # the gradients of both factors
    assert counts[1] > counts[0]


def test_policy_is_by_what_ops_declare():
    ours, aten = torch.ops.tilewright, torch.ops.aten
    saved = [
        ours.linear_fp8.default, ours.linear_fp8_main_grad.default, ours.linear_cross_entropy.default,
        ours.scaled_mm.default, ours.scaled_mm.quantized, aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
    ]  # fmt: skip
    again = [ours.rms_norm.default, ours.glu.quantized, ours.scaled_mm.out, aten.add.Tensor, aten.mm.out]
    for overload in (*saved, *again):
        wanted = CheckpointPolicy.MUST_SAVE if overload in saved else CheckpointPolicy.PREFER_RECOMPUTE
        assert policy(None, overload) is wanted, overload


def test_gradients_inside_a_dispatch_mode_are_those_outside():
    """A mode takes autograd away from what it calls, and the reference's backward is autograd's."""
    block, x = Block(), torch.randn(6, 16)
    plain = gradients(block, x)
    with FlopCounterMode(display=False):
        found = gradients(block, x)
    assert all(a.any() and torch.equal(a, b) for a, b in zip(plain, found))
