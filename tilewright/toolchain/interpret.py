"""Triton's interpreter, put right and made strict.

`install()` corrects what the installed Triton computes differently from a GPU (`emulate.py`). Each correction has a
probe and is applied only where the probe fails, so a Triton that mends a fault keeps its own code.

It also makes the interpreter stricter, for the stock one hides faults that a GPU shows: a load or store outside the
memory of every tensor argument raises, lanes masked off without `other` hold NaN (integers: a wild value), float
arguments are float32 scalars, loop variables are tensors, `and`/`or`/`not` work element by element. And it is made to
remember what it makes again and again (`quicken.py`).
`reversed_programs()` runs the grid backwards, so an answer that depends on the order of programs changes.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.runtime.interpreter import TensorHandle

from . import emulate, library, quicken

__all__ = ["install", "reversed_programs"]


# ---- the language --------------------------------------------------------------------------------------------------


def _loop_range(*bounds: Any, **options: Any) -> Iterator[tl.tensor]:
    """`range` whose variable is a scalar tensor, as in a compiled kernel; scheduling options mean nothing here."""
    bounds += tuple(options[name] for name in ("arg2", "step") if options.get(name) is not None)
    bounds = tuple(b.value if isinstance(b, tl.constexpr) else b for b in bounds)
    wide = any(isinstance(b, tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    dtype = tl.int64 if wide else tl.int32
    for i in range(*bounds):
        yield tl.tensor(TensorHandle(np.array([i], dtype=stock._get_np_dtype(dtype)), dtype), dtype)


def _logical(method: str, *terms: Callable[[], Any]) -> Any:
    """`and`/`or` as the compiler has them: constants cut the chain short, tensors combine element by element."""
    tensors: list[tl.tensor] = []
    value: Any = None
    for term in terms:
        value = term()
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) == (method == "logical_or"):
            return value
    if not tensors:
        return value
    out = tensors[0]
    for other in tensors[1:]:
        out = getattr(out, method)(other)
    return out


def _negation(value: Any) -> Any:
    return value.__not__() if isinstance(value, tl.tensor) else not value


class _Rewrite(stock.ASTTransformer):
    """Turns a kernel's Python into calls that follow Triton's semantics for tensors."""

    @staticmethod
    def _call(name: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(arguments), keywords=[])

    def visit_For(self, node: ast.For) -> ast.For:
        if isinstance(node.iter, ast.Call):
            function = node.iter.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if name == "range":
                node.iter.func = ast.Name(id="_loop_range", ctx=ast.Load())
        self.generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        method = ast.Constant(value="logical_and" if isinstance(node.op, ast.And) else "logical_or")
        terms = [ast.Lambda(args=empty, body=value) for value in node.values]
        return ast.copy_location(self._call("_logical", method, *terms), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(self._call("_negation", node.operand), node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if len(node.targets) > 1:
            raise ValueError("a kernel may not assign to several names at once")
        self.generic_visit(node)
        node.value = self._call("_as_tensor", node.value)
        return node


def _as_tensor(value: Any) -> Any:
    return stock.interpreter_semantic.to_tensor(value, False)


_STOCK_PATCH_LANG = stock._patch_lang
_STOCK_PATCH_TENSOR = stock._patch_lang_tensor
_STOCK_IMPLICIT = stock._implicit_cvt
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def _patch_lang(fn: Any) -> Any:
    # All of the language, whatever the kernel's module happens to import: functions it calls may use more of it.
    return _STOCK_PATCH_LANG(_LANGUAGE)


def _patch_tensor(tensor: type, scope: Any) -> None:
    _STOCK_PATCH_TENSOR(tensor, scope)
    # int() of a one-element array is an error from numpy 2.4 on; item() is not.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _implicit(argument: Any) -> Any:
    """A launch argument as the kernel sees it."""
    if isinstance(argument, bool):
        return tl.tensor(TensorHandle(np.array([argument]), tl.int1), tl.int1)
    if isinstance(argument, float):
        return tl.tensor(TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
    return _STOCK_IMPLICIT(argument)


def _device_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    # The launch has patched the language already; the stock interpreter patches it again here, 1 ms a call.
    if not _launch.active:
        raise RuntimeError(f"{self.fn.__name__} is a device function: it runs only inside a kernel launch")
    return self.rewrite()(*args, **kwargs)


# ---- one launch ----------------------------------------------------------------------------------------------------


class _Launch(threading.local):
    """What the running launch may touch."""

    active = False
    reverse = False
    unchecked = False
    names: list[str] = []
    starts = np.zeros(0, np.uint64)
    ends = np.zeros(1, np.uint64)  # and a 0 at last, which index -1 picks: nothing lies below the first start
    own_ends = np.zeros(0, np.uint64)
    one_start: list[int] = []  # the same as lists, for a single address
    one_end: list[int] = [0]


_launch = _Launch()
_LOCK = threading.RLock()  # the stock interpreter keeps the running program's index in one global
_STOCK_CALL = stock.GridExecutor.__call__
_STOCK_INIT_ARGS = stock.GridExecutor._init_args_hst
_STOCK_RESTORE = stock.GridExecutor._restore_args_dev
_STOCK_GRID_INDEX = stock.InterpreterBuilder.set_grid_idx


@contextlib.contextmanager
def reversed_programs() -> Iterator[None]:
    """Run the programs of every launch inside from the last to the first."""
    before, _launch.reverse = _launch.reverse, True
    try:
        yield
    finally:
        _launch.reverse = before


def _grid_index(self: Any, x: int, y: int, z: int) -> None:
    if _launch.reverse:
        x, y, z = (n - 1 - i for n, i in zip(self.grid_dim, (x, y, z)))
    _STOCK_GRID_INDEX(self, x, y, z)


def _call(self: Any, *args: Any, **kwargs: Any) -> None:
    with _LOCK, np.errstate(all="ignore"):
        _launch.active, _launch.unchecked = True, False
        try:
            _STOCK_CALL(self, *args, **kwargs)
        finally:
            _launch.active = False


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)
    elif isinstance(value, stock.TensorDescriptor):
        yield from _tensors(name, value.base)
    elif hasattr(value, "data_ptr"):
        yield name, stock._unwrap_tensor(value)


def _init_args(self: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    host_args, host_kwargs = _STOCK_INIT_ARGS(self, args, kwargs)
    spans = []
    for name, value in [*zip(self.arg_names, host_args), *host_kwargs.items()]:
        for label, tensor in _tensors(name, value):
            if tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), label))
    spans.sort()
    _launch.names = [label for _, _, label in spans]
    _launch.starts = np.array([start for start, _, _ in spans], np.uint64)
    _launch.own_ends = np.array([end for _, end, _ in spans], np.uint64)
    _launch.ends = np.append(np.maximum.accumulate(_launch.own_ends), np.uint64(0))
    _launch.one_start, _launch.one_end = _launch.starts.tolist(), _launch.ends.tolist()
    return host_args, host_kwargs


def _restore_args(self: Any, args: Any, host_args: Any, kwargs: dict[str, Any], host_kwargs: dict[str, Any]) -> None:
    # CPU tensors are worked on in place; the stock copy of a storage onto itself would commit a wide, sparse one.
    pairs = [*zip(self.arg_names, args), *kwargs.items()]
    if any(tensor.device.type != "cpu" for name, value in pairs for _, tensor in _tensors(name, value)):
        _STOCK_RESTORE(self, args, host_args, kwargs, host_kwargs)


def _check(pointers: TensorHandle, mask: np.ndarray | None, verb: str) -> None:
    """Raise if an active lane touches memory that belongs to no tensor argument."""
    if _launch.unchecked:
        return
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    if mask is None and pointers.data.size == 1:  # of which kernels load many, and for which NumPy is slow
        only = pointers.data.item()
        if only + size <= _launch.one_end[bisect.bisect_right(_launch.one_start, only) - 1]:
            return
    address = pointers.data if mask is None else pointers.data[np.broadcast_to(mask, pointers.data.shape)]
    if not address.size:
        return
    size = np.uint64(size)
    owner = np.searchsorted(_launch.starts, address, side="right") - 1
    wrong = address + size > _launch.ends[owner]
    if not wrong.any():
        return
    first = int(address[wrong].reshape(-1)[0])
    text = f"{verb} outside every tensor argument ({int(wrong.sum())} of {address.size} lanes, {int(size)} bytes each)"
    if _launch.names:
        distance = [
            max(int(start) - first, first + int(size) - int(end))
            for start, end in zip(_launch.starts, _launch.own_ends)
        ]
        nearest = int(np.argmin(distance))
        side = "before the start" if first < int(_launch.starts[nearest]) else "past the end"
        text += f"; the first is {distance[nearest]} bytes {side} of {_launch.names[nearest]}"
    raise IndexError(f"{text}, in program {stock.interpreter_builder.grid_idx}")


def _poison(shape: tuple[int, ...], dtype: tl.dtype) -> np.ndarray:
    """What a lane masked off without `other` holds: a GPU promises nothing."""
    fmt = emulate.SMALL.get(dtype.name) if not dtype.is_ptr() else None
    target = stock._get_np_dtype(dtype)
    if fmt is not None:
        return np.full(shape, fmt.nan, target)
    if target.kind == "f":
        return np.full(shape, np.nan, target)
    return (
        np.full(int(np.prod(shape)) * target.itemsize, 0xA5 if target.kind != "b" else 1, np.uint8)
        .view(target)
        .reshape(shape)
    )


def _load(
    self: Any, pointers: TensorHandle, mask: Any, other: TensorHandle | None, *policy: Any, **named: Any
) -> TensorHandle:
    dtype = pointers.get_element_ty()
    active = np.ascontiguousarray(mask.data)
    _check(pointers, active, "load")
    fill = _poison(pointers.data.shape, dtype) if other is None else np.ascontiguousarray(other.data)
    data = stock._interpreter.load(np.ascontiguousarray(pointers.data), active, fill, stock._get_np_dtype(dtype))
    return TensorHandle(data, dtype)


def _whole_load(self: Any, pointers: TensorHandle, *policy: Any) -> TensorHandle:
    """Without a mask: there is no lane that holds anything else."""
    _check(pointers, None, "load")
    dtype, addresses = pointers.get_element_ty(), np.ascontiguousarray(pointers.data)
    kind = stock._get_np_dtype(dtype)
    every = np.ones(addresses.shape, np.bool_)
    return TensorHandle(stock._interpreter.load(addresses, every, np.empty(addresses.shape, kind), kind), dtype)


def _store(self: Any, pointers: TensorHandle, value: TensorHandle, mask: Any, *policy: Any, **named: Any) -> None:
    active = np.ascontiguousarray(mask.data)
    _check(pointers, active, "store")
    stock._interpreter.store(np.ascontiguousarray(pointers.data), np.ascontiguousarray(value.data), active)


_STOCK_RMW = stock.InterpreterBuilder.create_atomic_rmw
_STOCK_CAS = stock.InterpreterBuilder.create_atomic_cas
_STOCK_INT_TO_PTR = stock.InterpreterBuilder.create_int_to_ptr


def _atomic_rmw(self: Any, op: Any, pointers: TensorHandle, value: TensorHandle, mask: Any, *rest: Any) -> TensorHandle:
    _check(pointers, np.asarray(mask.data), "atomic")
    return _STOCK_RMW(self, op, pointers, value, mask, *rest)


def _atomic_cas(self: Any, pointers: TensorHandle, *rest: Any) -> TensorHandle:
    _check(pointers, None, "atomic")
    return _STOCK_CAS(self, pointers, *rest)


def _int_to_ptr(self: Any, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    # An address kept in memory may name a tensor that is no argument: from here on this launch goes unchecked.
    _launch.unchecked = True
    return _STOCK_INT_TO_PTR(self, src, dst_type)


# ---- installing ----------------------------------------------------------------------------------------------------


_STRICT = {
    "create_load": _whole_load,
    "create_masked_load": _load,
    "create_masked_store": _store,
    "create_atomic_rmw": _atomic_rmw,
    "create_atomic_cas": _atomic_cas,
    "create_int_to_ptr": _int_to_ptr,
    "set_grid_idx": _grid_index,
}
_applied: tuple[str, ...] | None = None


def _remembered(of_dtype: Callable) -> Callable:
    """The stock table of NumPy's types, which is made anew for each of millions of calls, made once."""
    known = functools.cache(of_dtype)
    pointer = np.dtype(np.uint64)

    def remembered(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        return pointer if isinstance(scalar, tl.pointer_type) else known(scalar)

    return remembered


def install() -> tuple[str, ...]:
    """Correct the interpreter of this process, once; returns the names of the corrections the stock one needed."""
    global _applied
    with _LOCK:
        if _applied is not None:
            return _applied
        applied = emulate.correct()
        for method, function in _STRICT.items():
            setattr(stock.InterpreterBuilder, method, function)
        # Overflow checks end in an assertion that debug mode alone acts on: off, they cost nothing and say nothing.
        builder = stock.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        stock.FunctionRewriter.ast_transformer = _Rewrite()
        # The rewriter makes this module's names visible to the kernels it rewrites.
        for function in (_loop_range, _logical, _negation, _as_tensor):
            setattr(stock, function.__name__, function)
        stock._get_np_dtype = _remembered(stock._get_np_dtype)
        stock._patch_lang, stock._patch_lang_tensor, stock._implicit_cvt = _patch_lang, _patch_tensor, _implicit
        stock.InterpretedFunction.__call__ = _device_call
        stock.GridExecutor.__call__ = _call
        stock.GridExecutor._init_args_hst, stock.GridExecutor._restore_args_dev = _init_args, _restore_args
        library.install()
        quicken.install()
        _applied = applied
        return applied
