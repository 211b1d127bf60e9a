"""The quickened interpreter is the same interpreter: the same types, shapes, errors and language."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
import triton.language.core as core
from triton.runtime.errors import InterpreterError

from tilewright.toolchain import quicken


@triton.jit
def add_outer(X, Y, OUT, M: tl.constexpr, N: tl.constexpr):
    row, col = tl.arange(0, M), tl.arange(0, N)
    tl.store(OUT + row[:, None] * N + col, tl.load(X + row)[:, None] + tl.load(Y + col))


@triton.jit
def add_unlike(X, OUT):
    tl.store(OUT + tl.arange(0, 4), tl.load(X + tl.arange(0, 4)) + tl.load(X + tl.arange(0, 2)))


def outer(M: int, N: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, y, out = torch.randn(M).to(dtype), torch.randn(N).to(dtype), torch.empty(M, N, dtype=dtype)
    add_outer[(1,)](x, y, out, M, N)
    assert torch.equal(out, x[:, None] + y)
    return out


def attributes() -> dict[tuple[str, str], object]:
    """The language as it is now."""
    owners = {"tl": tl, "core": core, "math": tl.math, "tensor": tl.tensor}
    return {
        (name, a): getattr(owner, a) for name, owner in owners.items() for a in dir(owner) if not a.startswith("__")
    }


def test_it_is_installed_once():
    quicken.install()
    found = core.block_type.__init__, core.tensor.__init__, triton.runtime.interpreter._patch_lang
    quicken.install()
    assert found == (core.block_type.__init__, core.tensor.__init__, triton.runtime.interpreter._patch_lang)
    assert found[0] is quicken._block


@pytest.mark.parametrize("turn", range(2))
def test_blocks_are_broadcast_in_every_turn(turn):
    for sizes in ((4, 8), (8, 4), (1, 8), (8, 1), (4, 4)):
        outer(*sizes)


def test_types_with_the_same_shape_differ_by_element():
    made = [core.block_type(t, [4, 2]) for t in (tl.float32, tl.int32, core.pointer_type(tl.float32), tl.float32)]
    shared = core.block_type(core.pointer_type(tl.float32, 3), [4, 2])
    assert made[0] == made[3] and len({str(t) for t in made}) == 3
    spaces = [t.element_ty.address_space for t in (shared, made[2])]
    assert spaces == [3, core.pointer_type(tl.float32).address_space]
    assert core.block_type(tl.float32, [2, 4]) != made[0] and made[0].numel == 8


def test_a_shape_that_may_not_be_is_refused_every_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            core.block_type(tl.float32, [3])
        with pytest.raises(TypeError, match="0d"):
            core.block_type(tl.float32, [])


def test_unlike_shapes_are_refused_every_time():
    for _ in range(2):
        with pytest.raises(InterpreterError, match="incompatible dimensions"):
            add_unlike[(1,)](torch.randn(4), torch.empty(4))


def test_the_language_is_put_back():
    outer(4, 4)
    before = attributes()
    outer(4, 4)
    with pytest.raises(InterpreterError):
        add_unlike[(1,)](torch.randn(4), torch.empty(4))
    after = attributes()
    assert [name for name in before if before[name] is not after[name]] == []


def test_what_another_put_into_the_language_is_used(monkeypatch):
    outer(4, 4)
    asked = []
    arange = tl.arange

    @core.builtin
    def spied(*args, _semantic=None, **kwargs):
        asked.append(args)
        return arange(*args, _semantic=_semantic, **kwargs)

    monkeypatch.setattr(tl, "arange", spied)
    outer(4, 2)
    assert len(asked) == 2
    monkeypatch.undo()
    outer(4, 2)
    assert len(asked) == 2
