"""What sparse_mm promises beyond the properties of every op: which rows it reads, and what those that it leaves out may hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.activation import sparse_mm as module
from tilewright.toolchain import interpret


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sparse(tokens: int, inner: int, share: float) -> Tensor:
    kept = torch.rand(tokens, inner, generator=torch.Generator().manual_seed(5)) < share
    return torch.where(kept, drawn(tokens, inner, seed=3), 0.0)


def near(y: Tensor, exact: Tensor) -> bool:
    return bool((y.double() - exact).norm() <= 1e-6 * exact.norm())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.04, 0.5, 1.0])
def test_rows_of_weight_0_are_not_read(tokens, share, monkeypatch):
    """Each load is looked at: none touches a row that no token wants, and none is of a token's row that it does not want itself,
    which would then be infinite times 0."""
    weights, rows = sparse(tokens, 2 * module.CHUNK + 37, share), drawn(2 * module.CHUNK + 37, 50, seed=1)
    exact, idle = weights.double() @ rows.double(), (weights == 0).all(0)
    rows[idle] = math.nan
    read: list[np.ndarray] = []
    check = interpret._check

    def seen(pointers, mask, verb) -> None:
        if verb == "load":
            every = np.ones(pointers.data.shape, bool) if mask is None else np.broadcast_to(mask, pointers.data.shape)
            read.append(pointers.data[every].reshape(-1))
        check(pointers, mask, verb)

    monkeypatch.setattr(interpret, "_check", seen)
    y = tw.sparse_mm(weights, rows)
    begin, end = rows.data_ptr(), rows.data_ptr() + rows.numel() * 4
    found = np.concatenate(read).astype(np.int64)
    found = np.unique((found[(found >= begin) & (found < end)] - begin) // (rows.stride(0) * 4))
    assert found.tolist() == (~idle).nonzero().flatten().tolist()
    assert near(y, exact)


def test_a_weight_of_0_leaves_out_what_other_tokens_read():
    """0 times infinity is 0: each token's result is that of a call of its own."""
    weights, rows = sparse(4, 300, 0.3), drawn(300, 20, seed=1)
    weights[1, 7], weights[2, 7], weights[3, 7] = 0.0, -0.0, 2.0
    rows[7] = math.inf
    y = tw.sparse_mm(weights, rows)
    finite = torch.where(rows.isfinite(), rows, 0.0)
    assert near(y[1:3], weights[1:3].double() @ finite.double()) and bool((y[3] == math.inf).all())


@pytest.mark.parametrize("on_sm, tokens", [(0, 2), (1, 22), (8, 2)])
def test_parts_are_added_up(on_sm, tokens, monkeypatch):
    """One part, three of two chunks each, and as many as there are chunks; any number of leading dimensions, none too."""
    monkeypatch.setattr(module, "ON_SM", on_sm)
    weights, rows = sparse(tokens, 5 * module.CHUNK + 1, 0.1), drawn(5 * module.CHUNK + 1, 300, seed=1)
    y, one, deep = (module.forward(given, rows) for given in (weights, weights[0], weights[None, :, None]))
    exact = weights.double() @ rows.double()
    assert near(y, exact) and near(one, exact[0]) and torch.equal(deep, y[None, :, None])


def test_there_is_no_gradient():
    with pytest.raises(ValueError, match="no gradient for a"):
        tw.sparse_mm(sparse(1, 64, 0.5).requires_grad_(), drawn(64, 8))
