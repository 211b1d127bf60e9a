"""The quickened interpreter is the same interpreter: the same types, shapes, errors and language."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.language.core as core
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic
from triton.runtime.errors import InterpreterError

from tilewright.toolchain import emulate, quicken


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


# ---- operators: the same as Triton's own code makes of the same operands ---------------------------------------------


DTYPES = (
    tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float8e4nv, tl.float16, tl.bfloat16,
    tl.float32, tl.float64,
)  # fmt: skip
SHAPES = ((), (4,), (4, 2), (1, 2), (4, 1), (2, 4, 2))
NUMBERS = (
    0,
    3,
    -1,
    2**31,
    2**40,
    2**70,
    0.5,
    -0.0,
    1e300,
    float("nan"),
    True,
    core.constexpr(3),
    core.constexpr(0.5),
    None,
)
OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.and_, operator.or_,
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
)  # fmt: skip


@contextmanager
def language(own: bool, monkeypatch) -> Iterator[None]:
    """The language as it is inside a launch: quickened, or Triton's own."""
    outer(4, 4)  # the first launch of a process finds it
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        if own:
            for name in ("cast", "where"):
                patch.setattr(TritonSemantic, name, getattr(quicken, f"_STOCK_{name.upper()}"))
            patch.setattr(core, "_unwrap_if_constexpr", quicken._STOCK_UNWRAP)
            patch.setattr(stock.TensorHandle, "__init__", quicken._STOCK_HANDLE)
        scope = (stock._patch_lang.patch if own else stock._patch_lang)(outer)
        try:
            yield
        finally:
            scope.restore()


def filled(dtype: core.dtype, shape: tuple[int, ...]) -> core.tensor:
    """Small and large numbers, of either sign, none, and what is no number, in the bits of this type."""
    numbers = np.array([1.5, -2.0, 0.0, 3e38, np.nan, -np.inf, 7.0, 1e-40, -0.0, 5.0, 2.0, 1.0, 4.0, -1.0, 0.25, 9.0])
    numbers = numbers[: max(1, int(np.prod(shape)))]
    kind = stock._get_np_dtype(dtype)
    if dtype.name in emulate.SMALL:
        data = emulate._encode(numbers, emulate.SMALL[dtype.name])
    elif kind.kind in "ui":
        data = (np.nan_to_num(numbers, nan=6.0, posinf=8.0, neginf=-8.0) % 2**31).astype(np.int64).astype(kind)
    else:
        with np.errstate(all="ignore"):
            data = numbers.astype(kind)
    handle = stock.TensorHandle(data.reshape(shape or (1,)), dtype)
    return core.tensor(handle, core.block_type(dtype, list(shape)) if shape else dtype)


def said(call: Callable[[], Any]) -> Any:
    """Type, shape and bits of what a call gives, or what it raises."""
    try:
        made = call()
    except Exception as error:
        return type(error).__name__
    if not isinstance(made, core.tensor):
        return made
    data = made.handle.data
    kinds = str(made.type), type(made.type).__name__, str(made.dtype), str(made.handle.dtype), data.dtype, data.shape
    return (*kinds, [int(n) for n in made.shape], int(made.numel), data.tobytes())


def compared(monkeypatch, calls: dict[Any, Callable[[], Any]]) -> None:
    found = []
    for own in (False, True):
        with language(own, monkeypatch):
            found.append({name: said(call) for name, call in calls.items()})
    wrong = [name for name in calls if found[0][name] != found[1][name]]
    assert not wrong, f"{len(wrong)} of {len(calls)}: {wrong[0]}: {found[0][wrong[0]]}, Triton: {found[1][wrong[0]]}"
    assert any(not isinstance(made, str) for made in found[0].values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compute", OPERATORS, ids=lambda f: f.__name__)
def test_operators_are_triton_s(compute, monkeypatch):
    calls = {}
    turns = itertools.cycle(itertools.product(SHAPES, SHAPES))
    for a, b in itertools.product(DTYPES, DTYPES):
        pairs = itertools.product(SHAPES, SHAPES) if a is b or {a, b} == {tl.int32, tl.int64} else [next(turns)]
        for left, right in pairs:
            both = filled(a, left), filled(b, right)
            calls[str(a), left, str(b), right] = lambda both=both: compute(*both)
    for dtype, shape, number in itertools.product(DTYPES, ((), (4, 2)), NUMBERS):
        t = filled(dtype, shape)
        calls[str(dtype), shape, repr(number)] = lambda t=t, number=number: compute(t, number)
        if not isinstance(number, core.constexpr):  # which has operators of its own
            calls[repr(number), str(dtype), shape] = lambda t=t, number=number: compute(number, t)
    compared(monkeypatch, calls)


def test_addresses_are_triton_s(monkeypatch):
    calls = {}
    for element, dtype in itertools.product((tl.int1, tl.bfloat16, tl.float32, tl.int64), DTYPES):
        for left, right in itertools.product(SHAPES, SHAPES):
            pointer, offset = filled(tl.uint64, left), filled(dtype, right)
            kind = core.pointer_type(element)
            pointer = core.tensor(
                stock.TensorHandle(pointer.handle.data, kind), core.block_type(kind, list(left)) if left else kind
            )
            both = pointer, offset
            calls[str(element), left, str(dtype), right] = lambda both=both: both[0] + both[1]
    for element, left, number in itertools.product((tl.int1, tl.bfloat16, tl.int64), SHAPES, NUMBERS):
        kind = core.pointer_type(element)
        handle = stock.TensorHandle(filled(tl.uint64, left).handle.data, kind)
        pointer = core.tensor(handle, core.block_type(kind, list(left)) if left else kind)
        calls[str(element), left, repr(number)] = lambda pointer=pointer, number=number: pointer + number
    compared(monkeypatch, calls)


@pytest.mark.filterwarnings("ignore")
def test_casts_choices_and_axes_are_triton_s(monkeypatch):
    calls = {}
    for a, b, shape in itertools.product(DTYPES, DTYPES, ((), (4, 2))):
        t = filled(a, shape)
        calls["to", str(a), str(b), shape] = lambda t=t, b=b: t.to(b)
        calls["to a constant", str(a), str(b), shape] = lambda t=t, b=b: t.to(core.constexpr(b))
        calls["bits", str(a), str(b), shape] = lambda t=t, b=b: t.to(b, bitcast=True)
        calls["toward zero", str(a), str(b), shape] = lambda t=t, b=b: t.to(b, fp_downcast_rounding="rtz")
    turns = itertools.cycle(itertools.product(SHAPES, SHAPES, SHAPES))
    for a, b in itertools.product(DTYPES, DTYPES):
        for shapes in itertools.product(SHAPES, SHAPES, SHAPES) if a is b is tl.float32 else [next(turns)]:
            three = [filled(dtype, shape) for dtype, shape in zip((tl.int1, a, b), shapes)]
            calls["where", str(a), str(b), shapes] = lambda three=three: tl.where(*three)
    for dtype, number, shape in itertools.product(DTYPES, NUMBERS, ((), (4, 2))):
        c, t = filled(tl.int1, (4, 1)), filled(dtype, shape)
        calls["where", str(dtype), repr(number), shape] = lambda c=c, t=t, n=number: tl.where(c, t, n)
        calls["where", repr(number), str(dtype), shape] = lambda c=c, t=t, n=number: tl.where(c, n, t)
        calls["where is", str(dtype), repr(number), shape] = lambda t=t, n=number: tl.where(t, t, n)
    for shape, count in itertools.product(SHAPES, range(1, 4)):
        for slices in itertools.product((None, slice(None), core.constexpr(None), 0, slice(0, 2)), repeat=count):
            t = filled(tl.float32, shape)
            calls["axes", shape, str(slices)] = lambda t=t, slices=slices: t[slices]
    compared(monkeypatch, calls)


def test_memory_that_does_not_fit_a_type_is_refused():
    with pytest.raises(ValueError, match="exceeds"):
        stock.TensorHandle(np.zeros(2, np.int64), tl.int32)
    for dtype, kind in ((tl.int1, np.bool_), (core.pointer_type(tl.int8), np.uint64), (tl.bfloat16, np.uint16)):
        handle = stock.TensorHandle(np.zeros(2, kind), dtype)
        assert handle.attr == {} and handle.dtype is dtype


def test_bf16_codes_of_fp32_are_those_of_fp64():
    """A short way for fp32: at every exponent and sign, where digits are cut, at ties and beside them."""
    high = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    bits = (high | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    with np.errstate(all="ignore"):
        assert np.array_equal(
            emulate._encode(bits, emulate.SMALL["bf16"]),
            emulate._encode(bits.astype(np.float64), emulate.SMALL["bf16"]),
        )
