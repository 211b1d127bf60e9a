"""Kernels of cross_entropy where the general properties do not look: long rows in parts, labels outside the vocabulary,
infinities, and the gradient written over the logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright.check import memory
from tilewright.ops.loss import cross_entropy as module

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(tokens: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(tokens * 1000 + vocab)
    logits = 3 * torch.randn(tokens, vocab, generator=source)
    return logits.to(dtype), torch.randint(vocab, (tokens,), generator=source)


def uneven(shape: torch.Size) -> torch.Tensor:
    return torch.linspace(-1, 2, shape.numel()).reshape(shape)


def loss_and_gradient(function, logits: torch.Tensor, labels: torch.Tensor, **options) -> tuple:
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf, labels, reduction="none", **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, uneven(loss.shape).to(loss.dtype))[0]


def near_truth(logits: torch.Tensor, labels: torch.Tensor, **options) -> None:
    loss, gradient = loss_and_gradient(tw.cross_entropy, logits, labels, **options)
    exact, exact_gradient = loss_and_gradient(F.cross_entropy, logits.double(), labels, **options)
    assert bool(((loss - exact).abs() <= 3e-5 + 2e-6 * exact.abs()).all()), (loss - exact).abs().max()
    error = (gradient - exact_gradient).square().sum(-1).sqrt()
    lost = 3e-7 * uneven(loss.shape).abs()  # p near 1 has no more digits left for p - 1
    assert bool((error <= 2e-6 * exact_gradient.square().sum(-1).sqrt() + lost).all())


@pytest.mark.parametrize(
    "vocab, scale, shift",
    [(157_184, 1, 0), (157_184, 1e4, 0), (9000, 0, 0), (9000, 100, 0), (9000, 1, 1e4), (9000, 1, -1e30)],
)
def test_a_model_s_vocabulary(vocab, scale, shift):
    """The label's logit the largest in one row, so that nothing hides an error in the sum."""
    logits, labels = drawn(2, vocab)
    labels[0] = logits[0].argmax()
    near_truth(logits * scale + shift, labels)


def test_smoothing_far_from_zero():
    logits, labels = drawn(2, 20_000)
    near_truth(logits + 3e3, labels, label_smoothing=0.1)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "softcap": 4.0, "z_loss": 0.1}], ids=str)
def test_rows_in_parts_are_rows(options, monkeypatch):
    logits, labels = drawn(3, 40_001, torch.bfloat16)
    labels[1] = -100
    launched = []
    record = module.cross_entropy_forward.grid
    monkeypatch.setattr(module.cross_entropy_forward, "grid", lambda a: launched.append(a.SPLITS) or record(a))
    made = []
    for per_sm in (0, 8):
        monkeypatch.setattr(module, "PER_SM", per_sm)
        tw.cross_entropy_lse.op.plans.clear()
        made.append(tw.cross_entropy_lse(logits, labels, reduction="none", **options))
    assert launched == [1, 8]
    for whole, parts in zip(*made):
        torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("vocab", [37, 2500])
def test_a_label_outside_the_vocabulary_reads_nothing(vocab, kind):
    """The interpreter refuses every access outside a tensor, of the logits or of the weights."""
    wild = [vocab, -1, vocab + 1, 2**31 - 1, -(2**31), *([2**40, -(2**63)] if kind == torch.int64 else [])]
    logits, labels = drawn(len(wild) + 3, vocab)
    wrong, right = labels.to(kind, copy=True), labels.to(kind, copy=True)
    wrong[2:-1], right[2:-1] = torch.tensor(wild, dtype=kind), -100
    weight = torch.rand(vocab)
    for reduction in ("none", "mean"):
        leaves = [logits.clone().requires_grad_() for _ in range(2)]
        losses = [tw.cross_entropy(x, y, reduction=reduction, weight=weight) for x, y in zip(leaves, (wrong, right))]
        grads = [torch.autograd.grad(loss, x, uneven(loss.shape))[0] for x, loss in zip(leaves, losses)]
        assert torch.equal(*grads)
        assert not grads[0][2:-1].any() and grads[0][[0, 1, -1]].any(-1).all()
        if reduction == "none":
            assert losses[0].isnan().tolist() == [False, False, *[True] * len(wild), False]
        else:
            assert losses[0].isnan() and losses[1].isfinite()


@pytest.mark.parametrize("row", [[-INF] * 3, [INF, 0.0, 1.0], [-1e30] * 3, [-INF, 0.0, 1.0], [NAN, 0.0, 1.0]], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinities_as_in_torch(row, smoothing):
    logits = torch.tensor([row, [1.0, 2.0, 3.0], row])
    for label in range(3):
        labels = torch.tensor([label, 1, -100])
        ours, torchs = (
            loss_and_gradient(f, logits, labels, label_smoothing=smoothing) for f in (tw.cross_entropy, F.cross_entropy)
        )
        torchs[1][2] = 0.0  # torch lets a NaN of an ignored row through
        for a, b in zip(ours, torchs):
            torch.testing.assert_close(a, b, equal_nan=True)
        loss, lse = tw.cross_entropy_lse(logits, labels, reduction="none", label_smoothing=smoothing, z_loss=0.1)
        torch.testing.assert_close(lse, torch.logsumexp(logits, -1), equal_nan=True)
        assert torch.equal(loss.isnan(), torchs[0].isnan())


def test_upstream_gradients_of_every_layout():
    logits, labels = drawn(6, 40)
    logits, labels = logits.reshape(2, 3, 40), labels.reshape(2, 3)
    for g in (torch.full((), 0.7).expand(2, 3), uneven(torch.Size((3, 2))).t(), uneven(torch.Size((2, 6)))[:, ::2]):
        leaf, copy = logits.clone().requires_grad_(), logits.double().requires_grad_()
        (made,) = torch.autograd.grad(tw.cross_entropy(leaf, labels, reduction="none"), leaf, g)
        exact = F.cross_entropy(copy.reshape(6, 40), labels.reshape(6), reduction="none").reshape(2, 3)
        (exact,) = torch.autograd.grad(exact, copy, g.double())
        torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- the gradient over the logits


def test_in_place_gives_the_same_gradient_in_the_logits_memory():
    logits, labels = drawn(9, 70, torch.bfloat16)
    labels[2], labels[5] = -100, 999
    logits[2, 3] = NAN
    for reduction in ("mean", "none", "sum"):
        leaf = logits.clone().requires_grad_()
        loss = tw.cross_entropy(leaf, labels, reduction=reduction)
        (expected,) = torch.autograd.grad(loss, leaf, uneven(loss.shape))
        assert not expected[[2, 5]].any() and expected[[0, 1]].all()
        source = logits.clone().requires_grad_()
        hidden = source.clone()
        loss = tw.cross_entropy(hidden, labels, reduction=reduction, inplace_backward=True)
        (made,) = torch.autograd.grad(loss, hidden, uneven(loss.shape), retain_graph=True)
        assert torch.equal(made, expected)
        assert made.data_ptr() == hidden.data_ptr() and torch.equal(hidden, expected)
        assert not made.requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, hidden, uneven(loss.shape))


def test_in_place_reaches_the_weights_and_leaves_other_users_right():
    inputs, labels = drawn(8, 16)[0], drawn(8, 33)[1]
    made = []
    for inplace in (False, True):
        weight = drawn(33, 16)[0].requires_grad_()
        logits = F.linear(inputs, weight)
        loss = tw.cross_entropy(logits, labels, inplace_backward=inplace)
        (loss + 0.1 * logits.sum()).backward()
        made.append(weight.grad)
    torch.testing.assert_close(made[0], made[1])
    logits = torch.exp(inputs.clone().requires_grad_())  # the derivative of exp is what exp gave
    loss = tw.cross_entropy(logits, labels % 16, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, :-1],
        lambda t: t.transpose(0, 1),
        lambda t: t[:, :, ::2],
        lambda t: t.permute(2, 0, 1),
        lambda t: t.reshape(2, 2, 5, 12).permute(1, 0, 2, 3).reshape(2, 2, 5, 2, 6).transpose(1, 3),
    ],
)
def test_in_place_in_any_layout_touches_nothing_else(view):
    whole = torch.randn(4, 5, 12)
    shape = view(whole).shape
    labels = torch.arange(shape[:-1].numel()).reshape(shape[:-1]) % shape[-1]
    leaf = view(whole).clone().requires_grad_()
    tw.cross_entropy(leaf, labels).backward()
    hidden = whole.clone().requires_grad_().clone()
    written = view(hidden)
    gaps = memory.Gaps(written.detach())
    loss = tw.cross_entropy(written, labels, inplace_backward=True)
    (made,) = torch.autograd.grad(loss, written)
    gaps.check("logits")
    assert torch.equal(made, leaf.grad)
    assert torch.equal(written.detach(), leaf.grad)


def test_in_place_takes_no_memory_for_the_gradient():
    """Beside the logits: the loss, two numbers a row and a few single ones."""
    logits, labels = drawn(64, 4096, torch.bfloat16)
    hidden = logits.requires_grad_().clone()
    with memory.guarded_allocations(0xFF) as guards:
        tw.cross_entropy(hidden, labels, inplace_backward=True).backward()
    assert 64 * 8 <= sum(guard.inside for guard in guards) <= 64 * 16
