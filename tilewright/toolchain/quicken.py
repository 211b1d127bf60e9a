"""The interpreter's bookkeeping, done once for what comes again: the same results from half the CPU time.

Each operation of an interpreted kernel makes types of blocks, shapes of tensors and pairs of operands anew, each launch finds and
replaces every function of the language. All of that depends on shapes and element types alone, of which a kernel has a dozen.
`install()` remembers it. What was made first is made by Triton's own code, so its checks and errors stay as they are.
"""

from __future__ import annotations

import functools
import gc
from typing import Any, NamedTuple

import triton.language.core as core
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic

__all__ = ["install"]

_STOCK_BLOCK = core.block_type.__init__
_STOCK_TENSOR = core.tensor.__init__
_STOCK_BROADCAST = TritonSemantic.broadcast_impl_value
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


# ---- the language ----------------------------------------------------------------------------------------------------


class _Change(NamedTuple):
    """One attribute of the language: as it is outside of launches, and inside."""

    owner: Any
    name: str
    outside: Any
    inside: Any


def _put(owner: Any, name: str, value: Any) -> None:
    delattr(owner, name) if value is _MISSING else setattr(owner, name, value)


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
            self.changes = [_Change(*one, getattr(*one[:2])) for one in first.values()]
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
        TritonSemantic.broadcast_impl_value = _broadcast
        stock._patch_lang = _Language(stock._patch_lang)
