"""linear_cross_entropy where the general properties do not look: several chunks, more tokens than hidden dimensions, groups of
tokens, and the memory that the codes and the gradient of the weight share."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check import memory
from tilewright.check.compare import check
from tilewright.check.oracle import outcome, same_outcome
from tilewright.ops.loss import linear_cross_entropy_chunks as module

OP = tw.linear_cross_entropy.op


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of one block, and little memory for codes that are not kept in a gradient's."""
    for name, value in {"FEWEST": 512, "MOST": 512, "MOST_CODES": 2**20}.items():
        monkeypatch.setattr(module, name, value)


def drawn(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, **options) -> dict:
    source = torch.Generator().manual_seed(tokens * 1000 + vocab)
    labels = torch.randint(vocab, (tokens,), generator=source)
    labels[1], labels[2], labels[-1] = -100, vocab + 3, vocab - 1
    return OP.signature.bind((), {
        "hidden": torch.randn(tokens, hidden, generator=source).to(dtype),
        "weight": (0.3 * torch.randn(vocab, hidden, generator=source)).to(dtype),
        "labels": labels, "bias": torch.randn(vocab, generator=source), "reduction": "none", **options,
    })  # fmt: skip


@pytest.mark.parametrize("tokens, hidden", [(20, 40), (45, 24), (150, 24)])  # kept whole, in part and not at all
@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {}),
        (torch.bfloat16, {"label_smoothing": 0.1, "z_loss": 0.01}),
        (torch.bfloat16, {"softcap": 4.0, "label_smoothing": 0.1}),
    ],
    ids=str,
)
def test_chunks_codes_and_groups(tokens, hidden, dtype, options, small_chunks):
    values = drawn(tokens, hidden, 1100, dtype, **options)
    values["labels"][3:7] = torch.tensor([511, 512, 1023, 1024])
    made = outcome(OP, values)
    check(OP, f"{tokens} tokens, hidden {hidden}", values, made)
    assert made["loss"][2].isnan() and made["loss"][1] == 0 and not made["d_hidden"][1:3].any()
    same_outcome("through the registered op", outcome(OP, values, registered=True), made)
    leaf = values["hidden"].detach().requires_grad_()
    loss = tw.linear_cross_entropy(**{**values, "hidden": leaf})
    (made["d_hidden"],) = torch.autograd.grad(loss, leaf, made.grads[0])
    check(OP, f"{tokens} tokens, hidden {hidden}, only hidden", values, made)


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {"reduction": "sum"}),
        (torch.bfloat16, {"reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.01}),
    ],
    ids=str,
)
def test_groups_of_tokens(dtype, options, small_chunks, monkeypatch):
    """Groups of 128 and 22 tokens: gradients are there after the forward, and no logits are computed again."""
    monkeypatch.setattr(module, "MOST_CODES", 2**16)
    values = drawn(150, 24, 600, dtype, **options)
    whole = outcome(OP, values, registered=True)  # its backward makes the gradients
    check(OP, "groups", values, whole)
    for needed in (OP.differentiable, *((name,) for name in OP.differentiable)):
        leaves = {n: values[n].clone().requires_grad_() for n in needed}
        loss = tw.linear_cross_entropy(**{**values, **leaves})
        with monkeypatch.context() as without:
            without.delattr(module.Tokens, "logits")
            first, last = (
                torch.autograd.grad(loss, [*leaves.values()], whole.grads[0], retain_graph=r) for r in (1, 0)
            )
        for name, a, b in zip(needed, first, last):
            assert torch.equal(a, b) and torch.equal(a, whole[f"d_{name}"]), name


def test_a_weight_too_large_for_gradients_ahead(small_chunks, monkeypatch):
    monkeypatch.setattr(module, "AHEAD", 600 * (4 * 24 + 2 * 128) - 1)
    values = drawn(100, 24, 600, torch.bfloat16, reduction="mean")
    check(OP, "twice", values, outcome(OP, values))
    loss = tw.linear_cross_entropy(**{**values, "weight": values["weight"].clone().requires_grad_()})
    kept = {t.dtype for t in loss.grad_fn.saved_tensors if t is not None and t.shape == (600, 24)}
    assert kept == {torch.bfloat16}  # the weight, and codes in the memory of its gradient


def test_ignored_tokens_have_no_part_in_an_infinite_gradient(small_chunks):
    values = drawn(40, 8, 20, torch.float32, reduction="mean")
    values["labels"][2] = 3
    hidden = values["hidden"].requires_grad_()
    tw.linear_cross_entropy(**values).backward(torch.tensor(torch.inf))
    assert not hidden.grad[1].any() and not hidden.grad[3:].isfinite().any()
    values["labels"].fill_(-100)
    hidden.grad = None
    tw.linear_cross_entropy(**values).backward()
    assert not hidden.grad.any()


def test_what_was_kept_is_used_and_written_over_in_the_end(small_chunks, monkeypatch):
    """The weight's gradient lies where the codes were, unless another backward may come; no logits are computed again."""
    values = drawn(32, 32, 1200, torch.float32, reduction="mean")
    leaves = {n: values[n].clone().requires_grad_() for n in OP.differentiable}
    loss = tw.linear_cross_entropy(**{**values, **leaves})
    monkeypatch.delattr(module.Tokens, "logits")
    _, codes = (t for t in loss.grad_fn.saved_tensors if t is not None and t.shape == values["weight"].shape)
    kept = codes.clone()
    first, again = (torch.autograd.grad(loss, list(leaves.values()), retain_graph=True) for _ in range(2))
    assert torch.equal(codes, kept) and all(torch.equal(a, b) for a, b in zip(first, again))
    last = torch.autograd.grad(loss, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, last))
    assert last[1].data_ptr() == codes.data_ptr() != first[1].data_ptr()


def test_memory_beside_the_gradients(small_chunks):
    """One chunk of fp32 logits, a few numbers per block and token; in the backward a chunk of the logits' gradient."""
    tokens, hidden, vocab = 64, 64, 8192
    values = drawn(tokens, hidden, vocab, torch.bfloat16, reduction="mean")
    leaves = {n: values[n].clone().requires_grad_() for n in ("hidden", "weight")}
    with memory.guarded_allocations(0xFF) as guards:
        tw.linear_cross_entropy(**{**values, **leaves}).backward()
    gradients = 2 * hidden * (vocab + tokens)
    chunk, sums = 512 * tokens * (4 + 2), 4 * tokens * (2 * vocab // 512 + 8)
    assert gradients <= sum(guard.inside for guard in guards) <= gradients + chunk + sums


def test_gradients_add_up_over_micro_batches_and_uses():
    """A weight that is tied to something else, and two micro-batches."""
    values = drawn(12, 16, 50, torch.float32)
    weight = values["weight"].requires_grad_()
    extra = torch.randn(50, 16)
    parts = []
    for start in (0, 6):
        given = {n: values[n][start : start + 6] for n in ("hidden", "labels")}
        loss = tw.linear_cross_entropy(given["hidden"], weight, given["labels"], reduction="sum")
        parts.append(torch.autograd.grad(loss, weight, retain_graph=True)[0])
        (2 * loss + (weight * extra).sum()).backward()
    torch.testing.assert_close(weight.grad, 2 * (parts[0] + parts[1]) + 2 * extra)


def test_a_sure_token_s_gradient_keeps_its_digits():
    """p of the label is 1 - 1e-4: a code of p in bf16 would leave nothing of p - 1."""
    weight = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, -2.0]]).bfloat16()
    hidden = torch.tensor([[4.5, 0.0], [1.0, 0.5], [0.0, 4.75]]).bfloat16()
    labels = torch.tensor([0, 0, 1])
    values = OP.signature.bind((hidden, weight, labels), {"reduction": "none"})
    made = outcome(OP, values, grads=[torch.ones(3)])
    exact = hidden.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact @ weight.double().t(), labels, reduction="none")
    (wanted,) = torch.autograd.grad(loss.sum(), exact)
    assert float(wanted[0].abs().max()) < 5e-4
    torch.testing.assert_close(made["d_hidden"].double(), wanted, rtol=2e-2, atol=0.0)
