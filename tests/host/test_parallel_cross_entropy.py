"""Cross entropy over two processes that share the vocabulary, against torch's own of the whole logits in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

ROWS, VOCAB = (2, 4), 30
EVEN, UNEVEN, ALL_IN_ONE = [15, 15], [23, 7], [30, 0]


def whole(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits, and labels of both ranks; one row is ignored and one has a label of no class."""
    source = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(*ROWS, VOCAB, generator=source, dtype=torch.float64)).to(dtype)
    labels = torch.tensor([[0, 14, 15, 22], [-100, 29, VOCAB, 7]])
    return logits, labels


def expected(logits: Tensor, labels: Tensor, softcap: float | None, z_loss: float, smoothing: float) -> tuple:
    """(loss, gradient by an uneven upstream one)."""
    leaf = logits.detach().double().requires_grad_()
    z = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
    known = labels.masked_fill(labels == VOCAB, -100)
    loss = F.cross_entropy(z.flatten(0, 1), known.flatten(), reduction="none", label_smoothing=smoothing)
    loss = (loss + z_loss * z.logsumexp(-1).square().flatten() * (known.flatten() >= 0)).view(labels.shape)
    gradient = torch.autograd.grad(loss, leaf, upstream(loss))[0]
    return loss.detach().masked_fill(labels == VOCAB, float("nan")), gradient


def upstream(loss: Tensor) -> Tensor:
    return torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)


def columns_of(t: Tensor, rank: int, sizes: list[int]) -> Tensor:
    return t.split(sizes, -1)[rank]


def same_on_both(loss: Tensor) -> None:
    both = [torch.empty_like(loss) for _ in range(2)]
    dist.all_gather(both, loss)
    assert torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8))


def on_two_ranks(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        for group in (None, dist.new_group([1, 0])):
            against_torch(rank, group)
        refused(rank)
        compiled(rank)
    finally:
        dist.destroy_process_group()


def against_torch(rank: int, group: dist.ProcessGroup | None) -> None:
    at = dist.get_rank(group)
    for dtype, sizes, inplace, softcap, z_loss, smoothing in (
        (torch.float64, EVEN, False, None, 0.0, 0.0),
        (torch.float64, UNEVEN, True, 5.0, 0.01, 0.1),
        (torch.float64, ALL_IN_ONE, False, None, 0.01, 0.1),
        (torch.float32, UNEVEN, False, None, 0.0, 0.1),
        (torch.bfloat16, EVEN, True, None, 0.0, 0.0),
    ):
        logits, labels = whole(dtype)
        leaf = columns_of(logits, at, sizes).clone().requires_grad_()
        own = (leaf * 1.0).transpose(0, 1).contiguous().transpose(0, 1)
        loss = tw.parallel_cross_entropy(
            own, labels, group=group, vocab_sizes=None if sizes is EVEN else sizes, softcap=softcap, z_loss=z_loss,
            label_smoothing=smoothing, inplace_backward=inplace,
        )  # fmt: skip
        same_on_both(loss.detach())
        gradient = torch.autograd.grad(loss, leaf, upstream(loss))[0]
        exact, exact_gradient = expected(logits, labels, softcap, z_loss, smoothing)
        wide = dtype == torch.float64
        assert loss.dtype == (torch.float64 if wide else torch.float32) and gradient.dtype == dtype
        near = {"rtol": 1e-12, "atol": 1e-12} if wide else {"rtol": 2e-6, "atol": 2e-6}
        torch.testing.assert_close(loss.double(), exact, equal_nan=True, **near)
        near = {"rtol": 2**-8, "atol": 1e-6} if dtype == torch.bfloat16 else near
        torch.testing.assert_close(gradient.double(), columns_of(exact_gradient, at, sizes), **near)
        assert not gradient[1, [0, 2]].any()


def refused(rank: int) -> None:
    logits, labels = whole()
    own = columns_of(logits, rank, UNEVEN)
    for sizes in ([30], [15, 15], [23, 7, 0]):
        with pytest.raises(ValueError, match="vocab_sizes"):
            tw.parallel_cross_entropy(own, labels, vocab_sizes=sizes)
    leaf = own.clone().requires_grad_()
    with pytest.raises(ValueError, match="inplace_backward"):
        tw.parallel_cross_entropy(leaf, labels, vocab_sizes=UNEVEN, inplace_backward=True)
    with pytest.raises(ValueError, match="label_smoothing"):
        tw.parallel_cross_entropy(own, labels, vocab_sizes=UNEVEN, label_smoothing=2.0)


def compiled(rank: int) -> None:
    """In one graph, the collective included, with the bits of eager."""
    logits, labels = whole(torch.float32)
    group = dist.group.WORLD

    def call(x: Tensor) -> Tensor:
        return tw.parallel_cross_entropy(x, labels, group=group, label_smoothing=0.1, z_loss=0.01)

    made = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaf = columns_of(logits, rank, EVEN).clone().requires_grad_()
        loss = function(leaf)
        made.append((loss.detach(), torch.autograd.grad(loss, leaf, upstream(loss))[0]))
    for eager, traced in zip(*made):
        torch.testing.assert_close(traced, eager, rtol=0, atol=0, equal_nan=True)


def test_two_ranks(tmp_path):
    # Both ranks from one process that has imported everything: importing takes longer than the test
    mp.get_context("forkserver").set_forkserver_preload(["tilewright.ops.loss.parallel_cross_entropy", "torch._dynamo"])
    mp.start_processes(on_two_ranks, (str(tmp_path / "meeting"),), nprocs=2, start_method="forkserver")


def test_one_process_without_a_group():
    logits, labels = whole()
    loss = tw.parallel_cross_entropy(logits, labels, label_smoothing=0.1, z_loss=0.01, softcap=7.0)
    exact = tw.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1, z_loss=0.01, softcap=7.0)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12, equal_nan=True)
