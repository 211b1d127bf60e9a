"""The kernels that hold rows of rms_norm in shared memory, played from their own source: no interpreter takes Gluon."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gluon_machine import play
from tilewright.core.target import TARGETS, pretend
from tilewright.ops.norm import rms_norm as norm
from tilewright.ops.norm import rms_norm_shared as shared
from tilewright.runtime.kernel import collect

HOPPER = TARGETS["sm_90"]
LOW, WIDE = torch.bfloat16, torch.float32
SHAPES = [
    (40, 8, 5),
    (37, 8, 5),
    (64, 64, 1),
    (130, 64, 3),
]  # columns, and pieces of so many; the last of some is short


def drawn(*shape: int, dtype: torch.dtype = LOW) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def played(seed: int, launch, *args, **settings) -> None:
    with pretend(HOPPER), collect() as found:
        launch(*args, **settings)
    for one in found:
        play(one, seed)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-2 if found.dtype == LOW else 1e-5, atol=1e-2)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4, 11])  # of some programs none, of some fewer than slots
@pytest.mark.parametrize("columns, block, pieces", SHAPES)
def test_forward(columns, block, pieces, rows, slots, monkeypatch):
    monkeypatch.setattr(shared, "programs_for", lambda *_: 3)
    x, w = drawn(rows, columns), drawn(columns)
    for weight, offset, given in ((w, 0.0, False), (w.float(), 1.0, False), (None, 0.0, True)):
        want, rstd = norm.normalise(x, weight, 1e-6, offset, None, None)
        y, made = torch.full_like(x, torch.nan), torch.full((rows,), torch.nan)
        shape = shared.Shape(block, pieces, slots, 1)
        played(
            slots,
            shared.launch_forward,
            shape,
            x,
            weight,
            rstd if given else None,
            y,
            None if given else made,
            1e-6,
            offset,
        )
        close(y, want)
        assert given or torch.allclose(made, rstd, rtol=1e-6)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("rows", [1, 4, 11])
@pytest.mark.parametrize("columns, block, pieces", SHAPES)
def test_backward(columns, block, pieces, rows, slots, monkeypatch):
    monkeypatch.setattr(shared, "programs_for", lambda *_: 3)
    x, dy, dh, w = drawn(rows, columns), drawn(rows, columns) + 1, drawn(rows, columns) * 2, drawn(columns)
    for weight, offset, residual, given in (
        (w, 0.0, None, False),
        (w.float(), 1.0, dh, True),
        (None, 0.0, None, False),
    ):
        leaves = [t.double().requires_grad_() for t in (x, weight) if t is not None]
        y, rstd = norm.normalise(leaves[0], leaves[1] if weight is not None else None, 1e-6, offset, None, None)
        wanted = torch.autograd.grad(y, leaves, dy.double())
        dx = torch.full_like(x, torch.nan)
        part = None if weight is None else torch.full((3, columns), torch.nan)
        played(
            slots, shared.launch_backward, shared.Shape(block, pieces, slots, 1), x, weight, rstd.float() if given else None, dy,
            residual, dx, part, 1e-6, offset, early=False,
        )  # fmt: skip
        close(dx, wanted[0] + (0 if residual is None else residual.double()))
        if part is not None:
            close(part.sum(0), wanted[1])


@pytest.mark.parametrize("columns", [16400, 17408, 20000, 24576, 32768, 36864])
@pytest.mark.parametrize("weight", [None, LOW, WIDE])
def test_what_is_taken_has_room(columns, weight):
    """Every column in a piece, shared memory that is there, no more pieces than registers hold; and who takes a call says so."""
    x = torch.empty(64, columns, dtype=LOW, device="meta")
    w = None if weight is None else torch.empty(columns, dtype=weight, device="meta")
    size = 0 if weight is None else w.element_size()
    for find, rows in ((shared.forward_shape, 1), (shared.backward_shape, 2)):
        shape = find(HOPPER, x, w)
        if shape is not None:
            columns_held = shape.BLOCK * shape.PIECES
            assert columns_held - shape.BLOCK < columns <= columns_held and shape.PIECES <= shared.MOST_PIECES
            taken = columns_held * (2 * rows * shape.SLOTS + size) + shared.RESERVED
            assert taken * shape.programs <= HOPPER.shared_memory


def test_other_widths_are_left_to_the_others():
    for columns in (4096, 8192, 8200, 12288, 16384, 20001, 65536):
        x = torch.empty(64, columns, dtype=LOW, device="meta")
        assert shared.backward_shape(HOPPER, x, None) is None and shared.forward_shape(HOPPER, x, None) is None
