"""Kernels of cross entropy over a split vocabulary: what joins to the loss of the whole, and gradients over the logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

INF, NAN = math.inf, math.nan


def uneven(loss: Tensor) -> Tensor:
    return torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)


def in_shards(logits: Tensor, labels: Tensor, sizes: list[int], smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """(loss, gradient) as ranks with `sizes` columns each compute them; the loss must be the same bits on all."""
    leaves = [x.clone().requires_grad_() for x in logits.split(sizes, -1)]
    starts = itertools.accumulate(sizes, initial=0)
    classes = sum(sizes)
    with tw.force("triton"):
        parts = [
            tw.cross_entropy_parts(x, labels, start=start, classes=classes, slant=smoothing > 0)
            for x, start in zip(leaves, starts)
        ]
        gathered = torch.stack([p.detach() for p in parts])
        options = {"classes": classes, "label_smoothing": smoothing}
        losses = [tw.cross_entropy_join(p, gathered, labels, rank=r, **options) for r, p in enumerate(parts)]
        gradients = [torch.autograd.grad(loss, x, uneven(loss))[0] for loss, x in zip(losses, leaves)]
    for loss in losses:
        torch.testing.assert_close(loss, losses[0], rtol=0, atol=0, equal_nan=True)
    return losses[0].detach(), torch.cat(gradients, -1)


def by_torch(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(leaf, labels, reduction="none", label_smoothing=smoothing)
    return loss.detach(), torch.autograd.grad(loss, leaf, uneven(loss))[0]


@pytest.mark.parametrize(
    "scale, shift, smoothing", [(1, 0, 0.0), (1e4, 0, 0.0), (1, -1e30, 0.0), (0, 0, 0.1), (1, 1e4, 0.1)]
)
def test_large_and_far_logits(scale, shift, smoothing):
    """The label's logit the largest in one row, so that nothing hides an error in the sum; a shard far below the others."""
    source = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(3, 6000, generator=source) * scale + shift
    logits[2, :1000] -= 500.0
    labels = torch.tensor([int(logits[0].argmax()), 5, 4321])
    loss, gradient = in_shards(logits, labels, [1000, 4992, 8], smoothing)
    exact, exact_gradient = by_torch(logits.double(), labels, smoothing)
    assert bool(((loss - exact).abs() <= 3e-5 + 2e-6 * exact.abs()).all()), (loss - exact).abs().max()
    error = (gradient - exact_gradient).square().sum(-1).sqrt()
    lost = 3e-7 * uneven(loss).abs()  # p near 1 has no more digits left for p - 1
    assert bool((error <= 2e-6 * exact_gradient.square().sum(-1).sqrt() + lost).all()), error


ROWS = ([-INF] * 5, [-INF, -INF, 0.0, 1.0, 2.0], [INF, 0.0, 1.0, 2.0, 0.5], [0.0, 1.0, NAN, 2.0, 1.0], [-1e30] * 5)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinities_as_in_torch(row, smoothing):
    """Whichever shard has them, and beside a shard without columns."""
    logits = torch.tensor([row, [1.0, 2.0, 3.0, 0.0, -1.0]])
    for label in (0, 4):
        labels = torch.tensor([label, 1])
        made, exact = in_shards(logits, labels, [2, 0, 3], smoothing), by_torch(logits, labels, smoothing)
        for ours, torchs in zip(made, exact):
            torch.testing.assert_close(ours, torchs, equal_nan=True)


def in_place(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        source = torch.Generator().manual_seed(4)
        whole = 3 * torch.randn(6, 37, generator=source)
        labels = torch.tensor([0, 36, 20, -100, 37, 21])
        leaf = whole.split([21, 16], -1)[rank].clone().requires_grad_()
        logits = leaf * 1.0
        with tw.force("triton"):
            loss = tw.parallel_cross_entropy(logits, labels, vocab_sizes=[21, 16], inplace_backward=True)
            loss.backward(uneven(loss), retain_graph=True)
            memory = logits.detach()
            torch.testing.assert_close(memory, leaf.grad, rtol=0, atol=0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward(uneven(loss))
        exact, gradient = by_torch(whole.double(), labels.masked_fill(labels == 37, -100))
        torch.testing.assert_close(leaf.grad.double(), gradient.split([21, 16], -1)[rank], rtol=2e-6, atol=1e-6)
        exact[4] = NAN
        torch.testing.assert_close(loss.detach().double(), exact, rtol=2e-6, atol=2e-6, equal_nan=True)
        assert not leaf.grad[3:5].any()
    finally:
        dist.destroy_process_group()


def test_two_ranks_write_gradients_over_their_logits(tmp_path):
    mp.spawn(in_place, (str(tmp_path / "meeting"),), nprocs=2)
