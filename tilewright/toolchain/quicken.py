"""The interpreter's bookkeeping, done once for what comes again: the same results from a third of the CPU time.

Each operation of an interpreted kernel makes types of blocks, shapes of tensors and pairs of operands anew, each launch finds and
replaces every function of the language. All of that depends on shapes and element types alone, of which a kernel has a dozen.
`install()` remembers it. What was made first is made by Triton's own code, so its checks and errors stay as they are.

Operators are most of what a kernel does. Where both operands are of one plain element type, or one is a number that fits it, there
is nothing to promote: NumPy is called at once. All else goes to Triton's own code, as do all operands that it refuses.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language.core as core
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic

__all__ = ["install"]

_STOCK_BLOCK = core.block_type.__init__
_STOCK_TENSOR = core.tensor.__init__
_STOCK_BROADCAST = TritonSemantic.broadcast_impl_value
_STOCK_CAST = TritonSemantic.cast
_STOCK_WHERE = TritonSemantic.where
_STOCK_UNWRAP = core._unwrap_if_constexpr
_STOCK_HANDLE = stock.TensorHandle.__init__
_MISSING = object()


# ---- types -----------------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """What a tensor says of the shape of its type."""

    sizes: tuple[int, ...]
    shape: core.tuple
    numel: core.constexpr


_blocks: dict[tuple, dict[str, Any]] = {}  # the attributes of each type of blocks that was made
_SCALAR = _Shape((), core.tuple([]), core.constexpr(1))


def _block(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    """A type like one that was made before shares its attributes, which nothing changes."""
    values = shape.values if isinstance(shape, core.tuple) else shape
    sizes = tuple([n.value if isinstance(n, core.constexpr) else n for n in values])
    key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
    known = _blocks.get(key) if type(self) is core.block_type else None
    if known is not None:
        self.__dict__ = known
        return
    _STOCK_BLOCK(self, element_ty, shape)
    if type(self) is core.block_type:
        self._known = _Shape(sizes, core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(self.numel))
        _blocks[key] = self.__dict__


def _tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    known = type.__dict__.get("_known") if type.is_block() else _SCALAR
    if known is None:  # no plain block: a type of Gluon's
        _STOCK_TENSOR(self, handle, type)
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known.shape, known.numel


@functools.cache
def _joint(left: tuple[int, ...], right: tuple[int, ...]) -> list[int] | None:
    """The shape that blocks of one rank have in common; None where they have none, or where ranks differ."""
    fits = len(left) == len(right) and all(1 in pair or pair[0] == pair[1] for pair in zip(left, right))
    return [max(pair) for pair in zip(left, right)] if fits else None


def _broadcast(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
    left, right = (t.type.__dict__.get("_known") for t in (lhs, rhs))
    if left is None or right is None:
        return _STOCK_BROADCAST(self, lhs, rhs)
    if left.sizes == right.sizes:
        return lhs, rhs
    both = _joint(left.sizes, right.sizes)
    if both is None:
        return _STOCK_BROADCAST(self, lhs, rhs)
    lhs, rhs = (t if [*t.type._known.sizes] == both else _spread(self, t, both) for t in (lhs, rhs))
    return lhs, rhs


def _spread(semantic: TritonSemantic, t: core.tensor, sizes: list[int]) -> core.tensor:
    return core.tensor(semantic.builder.create_broadcast(t.handle, sizes), core.block_type(t.dtype, sizes))


# ---- operators -------------------------------------------------------------------------------------------------------

# Element types that NumPy computes in as a GPU does. int1 is none for arithmetic, where NumPy's saturates, and so are the floats
# that NumPy lacks
_PLAIN: dict[str, np.dtype] = {
    "fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64), "int32": np.dtype(np.int32), "int64": np.dtype(np.int64),
}  # fmt: skip
_WHOLE_NUMBERS = {name: _PLAIN[name] for name in ("int32", "int64")}
_BITS = {**_WHOLE_NUMBERS, "int1": np.dtype(np.bool_)}
_FLOATS = {name: _PLAIN[name] for name in ("fp32", "fp64")}
_WIDER = {("int32", "int64"): core.int64, ("int64", "int32"): core.int64}  # where NumPy promotes as Triton does
_SMALL_INTEGERS = range(-(2**31), 2**31)  # larger ones are of other types


def _fits(number: Any, kind: str) -> bool:
    """Whether a number is taken for one of this element type. -0.0 is left to Triton, which makes 0.0 of it before 3.7."""
    if type(number) is float:
        return kind in _FLOATS and (number != 0.0 or math.copysign(1.0, number) > 0.0)
    return type(number) is int and kind in _PLAIN and number in _SMALL_INTEGERS


_types: dict[tuple, core.block_type] = {}


def _type(element_ty: core.dtype, sizes: tuple[int, ...]) -> core.block_type:
    """The type of blocks of this size."""
    key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
    found = _types.get(key)
    if found is None:
        found = _types[key] = core.block_type(element_ty, list(sizes))
    return found


def _common(left: core.dtype, right: core.dtype) -> core.dtype | None:
    """The type of a result of operands of these types, which have one element type; None where Triton's own code has to say."""
    if left is right:
        return left
    if type(left) is core.dtype:
        return right if type(right) in (core.block_type, core.dtype) else None
    if type(left) is not core.block_type:
        return None
    if type(right) is core.dtype:
        return left
    if type(right) is not core.block_type:
        return None
    first, second = left._known.sizes, right._known.sizes
    if first == second:
        return left
    both = _joint(first, second)
    return None if both is None else _type(left.element_ty, tuple(both))


def _quotient(left: Any, right: Any) -> Any:
    """Toward zero, by the stock interpreter's own formula."""
    return (left - np.fmod(left, right)) // right


def _operator(compute: Callable, own: Callable, kinds: dict[str, np.dtype], truth: bool, swapped: bool) -> Callable:
    """An operator of tensors: `compute` where types are alike and among `kinds`, else Triton's `own`. `truth`: the result is."""

    def method(self: core.tensor, other: Any, **named: Any) -> core.tensor:
        given = other.value if type(other) is core.constexpr else other
        kind = self.dtype.name
        if kind in kinds:
            made = element = None
            if type(given) is core.tensor:
                element = self.dtype if given.dtype.name == kind else _WIDER.get((kind, given.dtype.name))
                if element is not None:
                    made, right = _common(self.type, given.type), given.handle.data
            elif _fits(given, kind):
                made, element, right = self.type, self.dtype, kinds[kind].type(given)
            if made is not None:
                left = self.handle.data
                data = compute(right, left) if swapped else compute(left, right)
                element = core.int1 if truth else element
                if truth or data.dtype == kinds[element.name]:
                    if made.scalar is not element:
                        made = element if type(made) is core.dtype else _type(element, made._known.sizes)
                    return core.tensor(stock.TensorHandle(data, element), made)
        return own(self, other, **named)

    return method


def _addresses(own: Callable) -> Callable:
    """`pointer + offsets`, offsets signed, or one number."""

    def method(self: core.tensor, other: Any, **named: Any) -> core.tensor:
        pointer = self.dtype
        if type(pointer) is core.pointer_type and type(other) is int and other in _SMALL_INTEGERS:
            step = max(1, pointer.element_ty.primitive_bitwidth // 8) * other
            return core.tensor(
                stock.TensorHandle(self.handle.data + np.uint64(step % 2**64), self.handle.dtype), self.type
            )
        if type(pointer) is core.pointer_type and type(other) is core.tensor and other.dtype.name in ("int32", "int64"):
            kind, offset = self.type, other.type
            if type(kind) is core.pointer_type:  # one address
                made = pointer if type(offset) is core.dtype else None
                made = _type(pointer, offset._known.sizes) if type(offset) is core.block_type else made
            elif type(kind) is core.block_type and type(offset) in (core.dtype, core.block_type):
                made = _common(kind, offset)
                made = kind if made is offset else made
            else:
                made = None
            if made is not None:
                wide = np.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))
                data = self.handle.data + wide * other.handle.data.astype(np.uint64)
                return core.tensor(stock.TensorHandle(data, self.handle.dtype), made)
        return own(self, other, **named)

    return method


def _to(own: Callable) -> Callable:
    def method(self: core.tensor, dtype: Any, *args: Any, **named: Any) -> core.tensor:
        target = dtype.value if type(dtype) is core.constexpr else dtype
        if args or named or type(target) is not core.dtype:
            return own(self, dtype, *args, **named)
        return stock.interpreter_semantic.cast(self, target)

    return method


_WHOLE = slice(None)


def _index(own: Callable) -> Callable:
    """`x[:, None]` with all dimensions named: an axis of one element for each None."""

    def method(self: core.tensor, slices: Any, **named: Any) -> core.tensor:
        kind = self.type
        plain = type(kind) is core.block_type and type(slices) is tuple
        if not plain or any(one is not None and one != _WHOLE for one in slices):
            return own(self, slices, **named)
        sizes = iter(kind._known.sizes)
        found = tuple([1 if one is None else next(sizes, 0) for one in slices])
        if 0 in found or next(sizes, 0):
            return own(self, slices, **named)
        return core.tensor(
            stock.TensorHandle(self.handle.data[slices], self.handle.dtype.scalar), _type(kind.element_ty, found)
        )

    return method


_OPERATORS: dict[
    str, tuple
] = {  # what NumPy calls it, for which types, whether the result is a truth, whether operands come swapped
    "__add__": (np.add, _PLAIN, False, False),
    "__radd__": (np.add, _PLAIN, False, True),
    "__sub__": (np.subtract, _PLAIN, False, False),
    "__rsub__": (np.subtract, _PLAIN, False, True),
    "__mul__": (np.multiply, _PLAIN, False, False),
    "__rmul__": (np.multiply, _PLAIN, False, True),
    "__truediv__": (np.divide, _FLOATS, False, False),
    "__rtruediv__": (np.divide, _FLOATS, False, True),
    "__floordiv__": (_quotient, _WHOLE_NUMBERS, False, False),
    "__rfloordiv__": (_quotient, _WHOLE_NUMBERS, False, True),
    "__mod__": (np.fmod, _WHOLE_NUMBERS, False, False),
    "__rmod__": (np.fmod, _WHOLE_NUMBERS, False, True),
    "__and__": (np.bitwise_and, _BITS, False, False),
    "__or__": (np.bitwise_or, _BITS, False, False),
    "__lt__": (np.less, _PLAIN, True, False),
    "__le__": (np.less_equal, _PLAIN, True, False),
    "__gt__": (np.greater, _PLAIN, True, False),
    "__ge__": (np.greater_equal, _PLAIN, True, False),
    "__eq__": (np.equal, _PLAIN, True, False),
    "__ne__": (np.not_equal, _PLAIN, True, False),
}


_METHODS = {"to": _to, "__getitem__": _index}


_LEAVES = (core.tensor, int, float, bool, str, type(None), core.dtype, core.block_type)  # that hold no constexpr


def _unwrap(o: Any) -> Any:
    kind = type(o)
    if kind is core.constexpr:
        return o.value
    return o if kind in _LEAVES else _STOCK_UNWRAP(o)


def _cast(
    self: TritonSemantic, input: core.tensor, dst_ty: core.dtype, fp_downcast_rounding: str | None = None
) -> core.tensor:
    """Between element types whose names say all: the builder's own cast, which every way through Triton's code ends in."""
    target = dst_ty.scalar
    source = input.dtype
    if source is target:
        return input
    pair = (source.name, target.name)
    if fp_downcast_rounding is not None or pair not in _CASTS or type(self.builder) is not stock.InterpreterBuilder:
        return _STOCK_CAST(self, input, dst_ty, fp_downcast_rounding)
    kind = input.type
    if type(kind) is core.block_type:
        made = _type(target, kind._known.sizes)
    elif type(kind) is core.dtype:
        made = target
    else:
        return _STOCK_CAST(self, input, dst_ty, fp_downcast_rounding)
    return core.tensor(self.builder.cast_impl(input.handle, target), made)


def _where(self: TritonSemantic, condition: core.tensor, x: Any, y: Any) -> core.tensor:
    """Between tensors of one element type, or one and a number that fits it."""
    element = x.dtype if type(x) is core.tensor else getattr(y, "dtype", None)
    if element is not None and condition.dtype.name == "int1" and type(self.builder) is stock.InterpreterBuilder:
        made, kind, data = condition.type, element.name, []
        for one in (x, y):
            if type(one) is core.tensor and one.dtype.name == kind and type(element) is core.dtype:
                made = made and _common(made, one.type)
                data.append(one.handle.data)
            elif _fits(one, kind):
                data.append(_PLAIN[kind].type(one))
        if made is not None and len(data) == 2:
            made = element if type(made) is core.dtype else _type(element, made._known.sizes)
            return core.tensor(stock.TensorHandle(np.where(condition.handle.data, *data), element), made)
    return _STOCK_WHERE(self, condition, x, y)


# int1 only as the source: to it, Triton compares with 0
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_CASTS = {
    *((a, b) for a in ("int1", *_INTEGERS) for b in _INTEGERS if a != b),
    *((a, "fp32") for a in ("int1", "fp16", "bf16", "fp64", *_INTEGERS)),
    *(("fp32", b) for b in ("fp16", "bf16", "fp64", *_INTEGERS)),
}


_BYTES = {
    **{
        kind.name: kind.primitive_bitwidth // 8
        for kind in vars(core).values()
        if type(kind) is core.dtype and kind.name != "void"
    },
    "int1": 1,
}


def _handle(self: stock.TensorHandle, data: np.ndarray, dtype: core.dtype, attr: dict | None = None) -> None:
    if data.itemsize > _BYTES.get(dtype.name, 8):
        _STOCK_HANDLE(self, data, dtype)  # which says what is wrong
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


# ---- the language ----------------------------------------------------------------------------------------------------


class _Change(NamedTuple):
    """One attribute of the language: as it is outside of launches, and inside."""

    owner: Any
    name: str
    outside: Any
    inside: Any


def _put(owner: Any, name: str, value: Any) -> None:
    delattr(owner, name) if value is _MISSING else setattr(owner, name, value)


def _quick(change: _Change) -> _Change:
    """The same attribute, from inside a launch on at less cost."""
    inside = change.inside
    builtin = (getattr(inside, "__kwdefaults__", None) or {}).get("member")
    if builtin is None or builtin is not change.outside:
        return change
    function = getattr(builtin, "__wrapped__", builtin)
    semantic = stock.interpreter_semantic

    def called(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    if change.owner is core.tensor and change.name in _OPERATORS:
        called = _operator(_OPERATORS[change.name][0], called, *_OPERATORS[change.name][1:])
        if change.name == "__add__":
            called = _addresses(called)
    elif change.owner is core.tensor and change.name in _METHODS:
        called = _METHODS[change.name](called)
    return change._replace(inside=called)


class _Language:
    """What the stock interpreter replaces for a launch, found at the first one."""

    def __init__(self, patch: Any) -> None:
        self.patch, self.changes = patch, None

    def __call__(self, fn: Any) -> Any:
        """Replace it; the result's `restore()` puts it back. If anything is not as it was outside of the first launch, because
        something else has replaced it, Triton's own code looks anew."""
        # A launch has just left a circle of references to the memory of its arguments. The collector used to come by hundreds of
        # times in each launch; now it may not come for a while, and tests count what memory is still held
        gc.collect(0)
        if self.changes is None:
            scope = self.patch(fn)
            first: dict[tuple[int, str], tuple] = {}
            for owner, name, before in scope._changes:  # some twice: what was there before the first counts
                first.setdefault((id(owner), name), (owner, name, _MISSING if before is stock._MISSING else before))
            self.changes = [_quick(_Change(*one, getattr(*one[:2]))) for one in first.values()]
            return scope
        if any(getattr(c.owner, c.name, _MISSING) is not c.outside for c in self.changes):
            return self.patch(fn)
        for c in self.changes:
            setattr(c.owner, c.name, c.inside)
        return self

    def restore(self) -> None:
        for c in self.changes:
            _put(c.owner, c.name, c.outside)


def install() -> None:
    """Make the interpreter of this process remember, once; after `interpret.install`, whose language it keeps."""
    if not isinstance(stock._patch_lang, _Language):
        core.block_type.__init__, core.tensor.__init__ = _block, _tensor
        stock.TensorHandle.__init__, core._unwrap_if_constexpr = _handle, _unwrap
        TritonSemantic.broadcast_impl_value, TritonSemantic.cast, TritonSemantic.where = _broadcast, _cast, _where
        stock._patch_lang = _Language(stock._patch_lang)
