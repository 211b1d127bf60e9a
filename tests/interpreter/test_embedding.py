"""The embedding's kernels: runs over many slices, the order of sums, and what they add to a buffer."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.memory import Gaps, guarded_allocations
from tilewright.ops.embedding import embedding as source

KINDS = (torch.float32, torch.bfloat16, torch.float16)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(ids: Tensor, dy: Tensor, rows: int, length: int = source.SLICE, counted: int = source.COUNTED) -> Tensor:
    """The kernels' gradient of a table of so many rows, with slices of this length."""
    weight = torch.zeros(rows, dy.shape[-1], dtype=dy.dtype, requires_grad=True)
    tw.embedding.op.backward_plans.clear()
    with tw.force("triton"), mock.patch.multiple(source, SLICE=length, COUNTED=counted):
        y = tw.embedding(ids, weight)
        (found,) = torch.autograd.grad(y, weight, dy)
    tw.embedding.op.backward_plans.clear()
    return found


def sequential(ids: Tensor, dy: Tensor, rows: int, length: int) -> Tensor:
    """Equal ids one after the other, cut where a slice of the sorted ids ends; then the pieces one after the other."""
    order = ids.sort(stable=True).indices.tolist()
    total = torch.zeros(rows, dy.shape[1])
    pieces: list[tuple[int, int, Tensor]] = []
    for place, token in enumerate(order):
        key = int(ids[token]), place // length
        if pieces and pieces[-1][:2] == key:
            pieces[-1] = *key, pieces[-1][2] + dy[token]
        else:
            pieces.append((*key, dy[token]))
    for id, _, piece in pieces:
        total[id] = total[id] + piece
    return total


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(37, dtype=torch.int64),  # one id over ten slices of four, so that their count takes three steps
        torch.arange(37) % 3,
        torch.tensor([2] * 4 + [0] * 3 + [1] * 9 + [3]),  # runs that end where a slice does, and one that begins there
        torch.arange(23).flip(0),
    ],
    ids=["one", "three", "edges", "all"],
)
def test_sums_in_the_order_of_the_tokens(ids):
    """Bit for bit: numbers of such different size that any other order shows."""
    dy = drawn(len(ids), 5) * torch.exp2(torch.arange(len(ids)) * 7 % 23)[:, None]
    expected = sequential(ids, dy, 40, 4)
    for counted in (source.COUNTED, 0):  # sorted by counting, and by torch
        assert torch.equal(gradient(ids, dy, 40, 4, counted), expected)
    assert not torch.equal(sequential(ids.flip(0), dy.flip(0), 40, 4), expected) or len(ids) == 23


@pytest.mark.parametrize("dtype, layout", list(zip(KINDS, ("columns", "whole", "turned"))))
def test_a_buffer_is_added_to(dtype, layout):
    """In any layout, with wild ids among others: touched rows as float64 has them, not a bit elsewhere."""
    shape = {"whole": (9, 21), "columns": (9, 24), "turned": (21, 9)}[layout]
    room = drawn(*shape, seed=1, dtype=dtype)
    main_grad = {"whole": room, "columns": room[:, 2:23], "turned": room.t()}[layout]
    ids = torch.tensor([4, 0, -1, 4, 9, 7, 2**40, 4] * 10)
    dy, before, gaps = drawn(80, 21, seed=2, dtype=torch.bfloat16), main_grad.clone(), Gaps(main_grad)
    dy[2::8] = float("nan")
    weight = torch.zeros(9, 21, dtype=torch.bfloat16, requires_grad=True)
    with tw.force("triton"), mock.patch.object(source, "SLICE", 16), guarded_allocations(0xFF) as guards:
        tw.embedding_main_grad(ids, weight, main_grad, padding_idx=0).backward(dy)
    gaps.check("main_grad")
    for guard in guards:
        guard.check("an allocation")
    others = [0, 1, 2, 3, 5, 6, 8]
    assert torch.equal(main_grad[others], before[others])
    exact = before.double().index_add(
        0, torch.tensor([4, 4, 7, 4] * 10), dy.view(10, 8, 21)[:, [0, 3, 5, 7]].flatten(0, 1).double()
    )
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    torch.testing.assert_close(main_grad.double(), exact, rtol=tolerance, atol=1e-5)


def test_wrong_numbers_are_named_when_asked(monkeypatch):
    weight = torch.zeros(9, 21)
    with tw.force("triton"):
        assert tw.embedding(torch.tensor([9]), weight).isnan().all()
        monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
        with pytest.raises(ValueError, match="ids must be in"):
            tw.embedding(torch.tensor([2, 9]), weight)
