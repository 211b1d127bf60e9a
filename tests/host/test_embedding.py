"""The embedding against torch's own, and a gradient that is added to a buffer instead of being handed to autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


def parameter(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(drawn(11, 6, dtype=dtype))


@pytest.mark.parametrize("padding_idx", [None, 0, 4])
def test_torch_agrees(padding_idx):
    ids, weight, dy = numbers(3, 20), drawn(11, 6).requires_grad_(), drawn(3, 20, 6, seed=1)
    ours, theirs = tw.embedding(ids, weight, padding_idx=padding_idx), F.embedding(ids, weight, padding_idx)
    assert torch.equal(ours, theirs)
    found, wanted = (torch.autograd.grad(y, weight, dy)[0] for y in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_a_number_outside_the_table_gives_nan_and_no_gradient():
    ids, weight = torch.tensor([3, -1, 11, 3, -(2**62)]), drawn(11, 6).requires_grad_()
    y = tw.embedding(ids, weight)
    assert y.isnan().all(1).tolist() == [False, True, True, False, True]
    y.nan_to_num().sum().backward()
    assert torch.equal(weight.grad, F.one_hot(torch.tensor(3), 11)[:, None] * 2.0 * torch.ones(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up(dtype):
    """Two of them, the second with two lookups: the sum of all their gradients and of what was there before."""
    weight, main_grad = parameter(), drawn(11, 6, seed=5, dtype=dtype)
    before, wide = main_grad.double(), weight.detach().double().requires_grad_()
    for at, count in enumerate((1, 2)):
        ids, dy = numbers(count, 30, seed=at), drawn(count, 30, 6, seed=at, dtype=torch.bfloat16)
        kept = main_grad.data_ptr(), main_grad._version
        losses = [(tw.embedding_main_grad(i, weight, main_grad) * g).sum() for i, g in zip(ids, dy)]
        sum(losses).backward()
        (F.embedding(ids, wide) * dy.double()).sum().backward()
        assert weight.grad is None and main_grad.data_ptr() == kept[0] and main_grad._version > kept[1]
    step = 4e-7 if dtype == torch.float32 else 3 * 2.0**-8  # three additions to the buffer, each rounded once
    torch.testing.assert_close(main_grad.double(), before + wide.grad, rtol=step, atol=8 * step)


def test_rows_that_were_not_looked_up_keep_their_bits():
    weight, main_grad = parameter(), drawn(11, 6, dtype=torch.float32)
    main_grad[7] = float("nan")
    before = main_grad.clone()
    tw.embedding_main_grad(torch.tensor([2, 5, 2, -1, 9]), weight, main_grad, padding_idx=9).nansum().backward()
    touched = [2, 5]
    others = [i for i in range(11) if i not in touched]
    assert torch.equal(main_grad[others].view(torch.int32), before[others].view(torch.int32))
    assert torch.equal(main_grad[touched], before[touched] + torch.tensor([[2.0], [1.0]]))


@pytest.mark.parametrize("zeros", [False, True])
def test_parameters_as_megatron_has_them(zeros):
    """Its hook runs when a gradient arrives, even one that only stands for another, and looks at the flag."""
    weight, main_grad, seen = parameter(), torch.zeros(11, 6), []
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeros
    weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad_added_to_main_grad, p.grad)))
    tw.embedding_main_grad(numbers(9), weight, main_grad).sum().backward()
    [(flag, grad)] = seen
    assert flag and grad.shape == weight.shape and grad.dtype == weight.dtype and (not zeros or not grad.any())
    assert torch.equal(main_grad, torch.bincount(numbers(9), minlength=11)[:, None].expand(11, 6).float())


def test_tied_weights():
    """The output layer's gradient comes by autograd, the embedding's is in the buffer."""
    weight, main_grad, x = parameter(torch.float32), torch.zeros(11, 6), drawn(4, 6, dtype=torch.float32)
    loss = tw.embedding_main_grad(numbers(9), weight, main_grad).sum() + (x @ weight.t()).sum()
    loss.backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(11, 6))
    assert float(main_grad.sum()) == 9 * 6


def test_compiled_calls_add_up_too():
    weight, main_grad, ids = parameter(), drawn(11, 6, dtype=torch.float32), numbers(2, 30)

    def loss(ids: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        return tw.embedding_main_grad(ids, weight, main_grad).float().square().sum()

    expected = main_grad.clone()
    loss(ids, weight, expected).backward()
    loss(ids, weight, expected).backward()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    both = [compiled(ids, weight, main_grad.data) for _ in range(2)]  # forwards first, as a pipeline has them
    for one in both:
        one.backward()
    assert weight.grad is None and torch.equal(main_grad, expected)


def test_torch_checks_what_is_registered():
    weight, main_grad, ids = parameter(torch.float32), torch.zeros(11, 6), numbers(2, 5)
    ops, kinds = torch.ops.tilewright, ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.embedding_main_grad.default, (ids, weight, main_grad, None), test_utils=kinds)
    torch.library.opcheck(ops.embedding_accumulate.default, (ids, torch.ones(2, 5, 6), main_grad), test_utils=kinds)


@pytest.mark.parametrize(
    "main_grad, error, words",
    [
        (None, TypeError, "main_grad must be a Tensor"),
        (torch.zeros(11, 6, dtype=torch.int32), TypeError, "main_grad must be float32 or"),
        (torch.zeros(11, 6).to(torch.float8_e5m2), TypeError, "main_grad must be float32 or"),
        (torch.zeros(11, 7), ValueError, "main_grad is .*weight is"),
        (torch.zeros(6), ValueError, "main_grad is .*weight is"),
        (torch.zeros(11, 6, device="meta"), ValueError, "main_grad is .*weight is"),
        (torch.zeros(6).expand(11, 6), ValueError, "share memory"),
        (torch.zeros(11, 6).requires_grad_(), ValueError, "main_grad requires a gradient"),
    ],
)
def test_buffers_that_are_refused(main_grad, error, words):
    with pytest.raises(error, match=words):
        tw.embedding_main_grad(numbers(9), parameter(), main_grad)


def test_other_refusals():
    weight = parameter()
    with pytest.raises(ValueError, match="shares memory with weight"):
        tw.embedding_main_grad(numbers(9), weight, weight.data)
    for padding_idx in (-1, 11):
        with pytest.raises(ValueError, match="padding_idx"):
            tw.embedding(numbers(9), weight, padding_idx=padding_idx)
    with pytest.raises(ValueError, match="main_grad is .* as in dy"):
        torch.ops.tilewright.embedding_accumulate(numbers(9), torch.ones(9, 5), torch.zeros(11, 6))
