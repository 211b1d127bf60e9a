"""The reference of cross_entropy against torch's own, what labels and infinities do, and what in-place refuses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright.core.target import TARGETS, pretend
from tilewright.core.tensor import fold, fold_like
from tilewright.runtime import kernel as kernels

INF, NAN = math.inf, math.nan


def drawn(tokens: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(tokens * 1000 + vocab)
    logits = 3 * torch.randn(tokens, vocab, generator=source, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(vocab, (tokens,), generator=source)


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """By an uneven upstream gradient."""
    upstream = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return torch.autograd.grad(loss, logits, upstream, retain_graph=True)[0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_torch_s_cross_entropy(reduction):
    logits, labels = drawn(11, 7)
    weights = torch.linspace(0.25, 2, 7, dtype=torch.float64)
    for smoothing, weight, ignore, kind in itertools.product(
        (0.0, 0.3, 1.0), (None, weights), (-100, 2, -1), (torch.int64, torch.int32)
    ):
        y = labels.clone()
        y[3] = y[8] = ignore
        options = {"ignore_index": ignore, "reduction": reduction, "label_smoothing": smoothing, "weight": weight}
        ours, torchs = tw.cross_entropy(logits, y.to(kind), **options), F.cross_entropy(logits, y, **options)
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient(ours, logits), gradient(torchs, logits), rtol=1e-11, atol=1e-13)


def test_any_leading_dimensions_and_low_precision():
    logits, labels = drawn(12, 9, torch.bfloat16)
    expected = F.cross_entropy(logits.float(), labels, reduction="none")
    for shape in ((3, 4), (2, 3, 2), (12,)):
        loss = tw.cross_entropy(logits.reshape(*shape, 9), labels.reshape(shape), reduction="none")
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected.reshape(shape), rtol=1e-6, atol=1e-6)
    one = tw.cross_entropy(logits[0], labels[0])
    torch.testing.assert_close(one, expected[0], rtol=1e-6, atol=1e-6)


def test_softcap_z_loss_and_lse_are_the_formulas():
    logits, labels = drawn(6, 5)
    z = 2.5 * torch.tanh(logits / 2.5)
    lse = torch.logsumexp(z, -1)
    expected = (lse - z.gather(-1, labels[:, None])[:, 0] + 0.1 * lse**2).mean()
    options = {"softcap": 2.5, "z_loss": 0.1}
    loss = tw.cross_entropy(logits, labels, **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))
    both = tw.cross_entropy_lse(logits, torch.where(labels == labels[0], -100, labels), **options)
    torch.testing.assert_close(both[1], lse)
    torch.testing.assert_close(gradient(both[1], logits), gradient(lse, logits))


def test_nothing_counts():
    for tokens, vocab in ((4, 6), (0, 6), (4, 0)):
        logits = torch.randn(tokens, vocab, requires_grad=True)
        labels = torch.full((tokens,), -100)
        for reduction, expected in (("mean", NAN), ("sum", 0.0)):
            loss = tw.cross_entropy(logits, labels, reduction=reduction)
            torch.testing.assert_close(loss, torch.tensor(expected), equal_nan=True)
            assert not gradient(loss, logits).any()


@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1, -(2**31)])
def test_a_label_outside_the_vocabulary_poisons_its_own_row(bad):
    logits, labels = drawn(6, 5)
    for kind, weight in ((torch.int64, None), (torch.int32, torch.rand(5, dtype=torch.float64))):
        wrong, ignored = labels.to(kind, copy=True), labels.to(kind, copy=True)
        wrong[2], ignored[2] = bad, -100
        for reduction in ("none", "mean", "sum"):
            loss = tw.cross_entropy(logits, wrong, reduction=reduction, weight=weight)
            without = tw.cross_entropy(logits, ignored, reduction=reduction, weight=weight)
            if reduction == "none":
                assert loss[2].isnan()
                assert torch.equal(loss[[0, 1, 3, 4, 5]], without[[0, 1, 3, 4, 5]])
            else:
                assert loss.isnan()
            assert torch.equal(gradient(loss, logits), gradient(without, logits))
            assert not gradient(loss, logits)[2].any()


@pytest.mark.parametrize("row", [[-INF] * 3, [INF, 0.0, 1.0], [-1e30] * 3, [-INF, 0.0, 1.0], [NAN, 0.0, 1.0]], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinities_as_in_torch(row, smoothing):
    logits = torch.tensor([row, [1.0, 2.0, 3.0]], requires_grad=True)
    for label in range(3):
        labels = torch.tensor([label, 1])
        made = [
            f(logits, labels, reduction="none", label_smoothing=smoothing) for f in (tw.cross_entropy, F.cross_entropy)
        ]
        torch.testing.assert_close(*made, equal_nan=True)
        torch.testing.assert_close(*(gradient(loss, logits) for loss in made), equal_nan=True)


def test_rows_that_do_not_count_have_no_gradient_whatever_they_hold():
    logits = torch.tensor([[NAN, 1.0], [INF, -INF], [1.0, 2.0]], requires_grad=True)
    loss = tw.cross_entropy(logits, torch.tensor([-100, 7, 0]), reduction="none", softcap=3.0)
    assert loss[0] == 0 and loss[1].isnan() and loss[2].isfinite()
    assert not gradient(loss, logits)[:2].any()


def test_in_place_refuses_what_it_would_spoil():
    labels = torch.zeros(4, dtype=torch.int64)
    leaf = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(ValueError, match="inplace_backward.*leaf"):
        tw.cross_entropy(leaf, labels, inplace_backward=True)
    with pytest.raises(ValueError, match="inplace_backward.*share memory"):
        tw.cross_entropy((2 * leaf)[:1].expand(4, 8), labels, inplace_backward=True)
    with torch.no_grad():
        tw.cross_entropy(leaf, labels, inplace_backward=True)


def test_in_place_is_eager_only():
    logits, labels = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="inplace_backward is for eager calls"):
        torch.ops.tilewright.cross_entropy(logits, labels, inplace_backward=True)
    compiled = torch.compile(tw.cross_entropy, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="inplace_backward is for eager calls"):
        compiled(2 * logits, labels, inplace_backward=True)


def test_a_batch_without_its_last_token_is_not_copied():
    whole = torch.randn(3, 5, 7)
    for view, inner, strides in (
        (whole[:, :-1], 4, (35, 7, 1)),
        (whole, 15, (0, 7, 1)),
        (whole[:, 2], 3, (0, 35, 1)),
        (whole.transpose(0, 1), 3, (7, 35, 1)),
        (whole.expand(2, 3, 5, 7), 15, (0, 7, 1)),
    ):
        folded = fold(view)
        assert folded == (view, inner, strides)
        row = torch.arange(view[..., 0].numel()).reshape(view.shape[:-1])
        at = view.storage_offset() + (row // inner) * strides[0] + (row % inner) * strides[1]
        assert torch.equal(view[..., 0], whole.flatten()[at])
        labels, steps = fold_like(row, inner)
        assert torch.equal(labels.flatten(), row.flatten()) and steps == labels.stride()
    twisted = torch.randn(2, 3, 4, 5).transpose(0, 2)
    copied, inner, _ = fold(twisted)
    assert copied is not twisted and inner == 24


def test_variants_do_not_follow_the_number_of_tokens():
    keys = set()
    with pretend(TARGETS["sm_90"]), tw.force("triton"), kernels.collect() as wanted, torch.no_grad():
        for tokens in (1, 2, 3, 16, 17, 64, 132, 500, 1056, 3000):
            tw.cross_entropy(
                torch.empty(tokens, 20000, device="meta"), torch.empty(tokens, dtype=torch.int64, device="meta")
            )
    keys = {(w.kernel.name, w.kernel.key(w.ordered, w.options, 0)) for w in wanted}
    count = {name: sum(n == name for n, _ in keys) for name, _ in keys}
    assert count["cross_entropy_reduce"] == 1
    assert count["cross_entropy_forward"] <= 3  # a row in 1, 2 or 4 parts
