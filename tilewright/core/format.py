"""Number formats, and the tensor that holds one quantised value.

A `Format` says how values are stored and where their scales live. A `Quantized` is one stored value: its shape and dtype are
the logical ones, so autograd carries ordinary gradients (a raw float8 result would cast 1e-5 to 0 on the way back).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from .private import no_torch_function


class Format:
    """A number format. Subclasses are frozen dataclasses; `name` starts the canonical string `key`, which `str` gives.

    A subclass gives `key`, `tensor_names`, `quantize` (the reference, computed in fp32), `dequantize`, `empty`, `check`, what
    kernels ask (`granularity`, `reach`, `device_format`) and the class method `from_fields`, the inverse of `key`.
    """

    name: ClassVar[str] = ""
    known: ClassVar[dict[str, type[Format]]] = {}
    key: str  # canonical string, made once: all of the format but `tensor`
    tensor: Tensor | None = None  # a static scale on the device, where there is one
    tensor_names: tuple[str, ...]  # what a value stores: some of FIELDS, in that order
    granularity: str  # what a scale is for: "tensor", "row", "128x128" or a block of a row, "1x128", "1x32" or "1x16"
    source: str = "dynamic"  # whence the scale of the whole comes where there is one: "dynamic", "static" or "unit"

    @property
    def block(self) -> int:
        """How many numbers of a row share a scale, where blocks do; else 0."""
        return int(self.granularity[2:]) if self.granularity.startswith("1x") else 0

    @property
    def small(self) -> bool:
        """Whether there are several blocks to 128 numbers, whose scales are bytes."""
        return 0 < self.block < 128

    @property
    def reach(self) -> str:
        """What of a value decides a scale: a "block" of a row, a "row", a "tile", the whole "tensor", or nothing, "given"."""
        if self.granularity == "tensor":
            return "tensor" if self.source == "dynamic" else "given"
        return {"row": "row", "128x128": "tile"}.get(self.granularity, "block")

    def device_format(self, fast: bool) -> str:
        """The compile-time FORMAT of `device/store.py`; `fast` takes the chip's conversion instructions."""
        raise NotImplementedError(f"{type(self).__name__}.device_format")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            Format.known[cls.name] = cls

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(text: str, scale: Tensor | None = None) -> Format:
        """The format that `text` is the canonical string of; `scale` is the static scale that strings cannot hold."""
        format = _parse(text)
        return format if scale is None else format.with_scale(scale)

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> Format:
        """The format of the canonical string `name:fields[0]:fields[1]...`."""
        raise NotImplementedError(f"{cls.__name__}.from_fields")

    def with_scale(self, scale: Tensor) -> Format:
        """This format with a static scale, where it has one."""
        raise ValueError(f"scale: the format {self} takes no static scale")

    def bare(self) -> Format:
        """This format without device tensors, so that it compares, hashes and may be kept."""
        return self

    def quantize(self, y: Tensor, dtype: torch.dtype | None = None, offsets: Tensor | None = None) -> Quantized:
        """`y` in this format with logical dtype `dtype`; `offsets` are the end rows of groups, as `torch._grouped_mm` has them."""
        raise NotImplementedError(f"{type(self).__name__}.quantize")

    def dequantize(self, q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
        """The plain tensor of logical dtype (or `dtype`) that `q` stands for."""
        raise NotImplementedError(f"{type(self).__name__}.dequantize")

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        groups: int = 0,
        offsets: Tensor | None = None,
    ) -> Quantized:
        """Uninitialised storage for a value of this shape, split into `groups` groups of rows (0: not grouped)."""
        raise NotImplementedError(f"{type(self).__name__}.empty")

    def check(self, shape: Sequence[int], groups: int = 0) -> None:
        """Raise ValueError if a tensor of this shape, its rows in so many groups, cannot be held."""

    def transposed(self) -> Format:
        """The format of a matrix's transpose, whose row-wise operand is the matrix's column-wise twin and the other way round."""
        raise TypeError(f"a value in {self} cannot be transposed: quantise the transpose")

    def recipe(self, scale: Tensor) -> tuple[Tensor, str]:
        """A matrix's `scale` or `scale_t` as [rows or blocks of rows, blocks], but flat where it is stored in tiles, and torch's
        name of that (`ScalingType`)."""
        raise TypeError(f"products do not take the format {self}")

    def scale_stride(self, q: Quantized, way: str) -> int:
        """What `device/store.py` takes as the stride of `q.scale` or, where `way` is "col", of `q.scale_t`: the distance between
        rows of one with two dimensions, else 0."""
        scale = q.scale_t if way == "col" else q.scale
        return scale.stride(0) if scale is not None and scale.dim() == 2 else 0

    def extras(self, q: Quantized, way: str) -> tuple[Tensor | None, Tensor | None]:
        """(one scale for the whole beside those of blocks, zero points laid out as scales) of the row-wise operand or, where
        `way` is "col", of its twin: what products take beside codes and scales."""
        return None, None


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Format:
    name, *fields = text.split(":")
    if name not in Format.known:
        raise ValueError(f"format: {text!r} names no known format; known are {', '.join(sorted(Format.known))}")
    return Format.known[name].from_fields(fields)


REFUSAL = "is not defined on a Quantized tensor: call .dequantize() first"
# Operators whose TypeError torch turns into NotImplemented, and Python into a message without the remedy, or into False.
OPERATORS = ("sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FIELDS = ("data", "scale", "shared", "zero", "data_t", "scale_t", "shared_t", "zero_t", "offsets")


class Quantized(Tensor):
    """A value held in a `Format`; shape and dtype are the logical ones, and so are the gradients.

    `data` and `scale` are the row-wise operand, `data_t` and `scale_t` its column-wise twin (physically transposed, with its
    own scales); a way that the format does not have is None. `shared` is one more scale for the whole and `zero` the codes that
    stand for 0, where a format has them. `offsets` are the end rows of the groups, or None.

    `Quantized(carrier, format, offsets, *tensors)` is differentiable with respect to `carrier`, which gives shape and dtype
    and is never read: the gradient of the result flows to it unchanged. It may be one element expanded.
    """

    # For type checkers, which do not see FIELDS become properties below; Any, as most callers know that theirs is no None.
    format: Format
    data: Tensor | Any
    scale: Tensor | Any
    data_t: Tensor | Any
    scale_t: Tensor | Any
    shared: Tensor | Any
    zero: Tensor | Any
    shared_t: Tensor | Any
    zero_t: Tensor | Any
    offsets: Tensor | Any

    # Dynamo writes the constructor of a traceable subclass into the graph as it stands when all arguments are tensors or
    # literals: that is why the format may come as a string, and why the gradient edge is made here.
    @staticmethod
    def __new__(cls, carrier: Tensor, format: Format | str, offsets: Tensor | None, *tensors: Tensor) -> Quantized:
        if torch.is_grad_enabled() and carrier.requires_grad:
            return _Pack.apply(carrier, format if isinstance(format, str) else format.key, offsets, *tensors)
        return Quantized.from_tensors(format, carrier.dtype, carrier.shape, tensors, offsets)

    @staticmethod
    def from_tensors(
        format: Format | str,
        dtype: torch.dtype,
        shape: Sequence[int],
        tensors: Sequence[Tensor],
        offsets: Tensor | None = None,
    ) -> Quantized:
        """The inverse of `tensors()`: no copy, no gradient edge."""
        format = Format.parse(format) if isinstance(format, str) else format.bare()
        names = format.tensor_names
        if len(tensors) != len(names):
            raise ValueError(f"tensors: {format} has {len(names)} ({', '.join(names)}), got {len(tensors)}")
        inner = dict(zip(names, tensors))
        if offsets is not None:
            inner["offsets"] = offsets
        return _wrap(format, dtype, shape, None, inner)

    def maker(self) -> Callable[[Sequence[Tensor | None]], Quantized]:
        """A function that makes values of this one's kind, on its device, of `(*tensors(), offsets)`."""
        return _maker(self.format.bare(), self.dtype, self.shape, self.device)

    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors in the order of FIELDS, without those that the format does not have."""
        return tuple(self._inner[name] for name in self.format.tensor_names)

    def twin(self) -> Quantized:
        """The column-wise twin alone, where there are both ways."""
        names = [name for name in self.format.tensor_names if name.endswith("_t")]
        one = dataclasses.replace(self.format, ways="col")
        return Quantized.from_tensors(one, self.dtype, self.shape, [self._inner[n] for n in names], self.offsets)

    def in_groups(self, offsets: Tensor | None) -> None:
        """Say where the groups end that were stored here."""
        if offsets is not None:
            self._inner["offsets"] = offsets

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The plain tensor that this stands for; differentiable."""
        dtype = dtype or self.dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self.format.dequantize(self, dtype)

    def unpack(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """`(carrier, *tensors())`: `carrier` is one element expanded, never to be read; its gradient becomes this one's."""
        return _Unpack.apply(self, dtype or self.dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Quantized({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype]]:
        return [name for name in FIELDS if name in self._inner], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: tuple[Format, torch.dtype], size, stride) -> Quantized:
        format, dtype = context
        return _wrap(format, dtype, size, stride, dict(inner))

    def __coerce_tangent_metadata__(self) -> Tensor:
        """The gradient of a compiled region's quantised result is a plain tensor, not a `Quantized`."""
        plain = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        plain.__tensor_flatten__ = lambda: ([], None)  # AOTAutograd walks the inner tensors of what this returns: none
        return plain

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        handler = _HANDLERS.get(func)
        if handler is None:
            raise TypeError(f"{func} {REFUSAL}")
        return handler(func, args, kwargs or {})


def _field(name: str) -> property:
    return property(lambda self: self._inner.get(name), lambda self, tensor: self._inner.__setitem__(name, tensor))


def _refused(name: str) -> Any:
    def operator(self: Quantized, other: Any) -> Any:
        raise TypeError(f"{name} {REFUSAL}")

    return operator


for _name in FIELDS:
    setattr(Quantized, _name, _field(_name))
for _name in (*OPERATORS, *(f"r{o}" for o in OPERATORS), *COMPARISONS):
    setattr(Quantized, f"__{_name}__", _refused(_name))


_shell = Tensor._make_wrapper_subclass


def _maker(format: Format, dtype: torch.dtype, shape, device) -> Callable[[Sequence[Tensor | None]], Quantized]:
    """A function that makes dense values of `(*tensors(), offsets)`. All else is known before, for plans make many of one kind."""
    shell, names, key, strided = _shell, format.tensor_names, format.key, torch.strided
    # Most have two, or four both ways: to name these takes half as long as a loop over them
    first, second, third, fourth = (*names, None, None, None)[:4]

    # By position, which torch reads faster than names: dense values have no strides, offset and memory format to say
    how = (Quantized, shape, None, None, None, dtype, strided, device)

    def made(stored: Sequence[Tensor | None]) -> Quantized:
        inner = dict(zip(names, stored))
        if stored[-1] is not None:
            inner["offsets"] = stored[-1]
        q = shell(*how)
        q.__dict__ = {"format": format, "key": key, "_inner": inner}
        return q

    def made_of_two(stored: Sequence[Tensor | None]) -> Quantized:
        one, two, offsets = stored
        q = shell(*how)
        inner = {first: one, second: two} if offsets is None else {first: one, second: two, "offsets": offsets}
        q.__dict__ = {"format": format, "key": key, "_inner": inner}
        return q

    def made_of_four(stored: Sequence[Tensor | None]) -> Quantized:
        one, two, three, four, offsets = stored
        q = shell(*how)
        inner = {first: one, second: two, third: three, fourth: four}
        if offsets is not None:
            inner["offsets"] = offsets
        q.__dict__ = {"format": format, "key": key, "_inner": inner}
        return q

    return {2: made_of_two, 4: made_of_four}.get(len(names), made)


def _wrap(format: Format, dtype: torch.dtype, shape, stride, inner: dict[str, Tensor]) -> Quantized:
    device = next(iter(inner.values())).device
    q = _shell(Quantized, shape, strides=stride, dtype=dtype, device=device)
    q.format = format
    q.key = format.key  # for code under torch.compile, which can read a string off an intermediate value, but no format
    q._inner = inner
    return q


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carrier, text, offsets, *tensors):
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        return Quantized.from_tensors(text, carrier.dtype, carrier.shape, tensors, offsets)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, *(None,) * ctx.count


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, dtype):
        tensors = tuple(tensor.detach() for tensor in q.tensors())
        ctx.dtype = q.dtype
        ctx.mark_non_differentiable(*tensors)
        ctx.set_materialize_grads(False)
        return torch.empty(1, dtype=dtype, device=q.device).expand(q.shape), *tensors

    @staticmethod
    def backward(ctx, grad, *_):
        return None if grad is None else grad.to(ctx.dtype), None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, dtype):
        ctx.dtype = q.dtype
        return q.format.dequantize(q, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


def pack(carrier: Tensor, tensors: Sequence[Tensor], format: Format, offsets: Tensor | None = None) -> Quantized:
    """`Quantized(...)` from the tensors of a flat op; works eagerly and under `torch.compile(fullgraph=True)`."""
    return Quantized(carrier, format.key, offsets, *tensors)


def unpack(q: Quantized, dtype: torch.dtype | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A carrier of the gradient (of `dtype`, else the logical one) and the stored tensors; the inverse of `pack`."""
    carrier, *tensors = q.unpack(dtype)
    return carrier, tuple(tensors)


def store(y: Tensor, out_format: Format | None, dtype: torch.dtype, offsets: Tensor | None = None) -> Tensor:
    """The last line of every reference: `y` rounded once, to `dtype` or into `out_format`."""
    return y.to(dtype) if out_format is None else out_format.quantize(y, dtype, offsets)


def _share(func, args, kwargs):
    q = args[0]
    inner = {name: func(tensor) for name, tensor in q._inner.items()}
    out = _wrap(q.format, q.dtype, q.shape, q.stride(), inner)
    return return_and_correct_aliasing(func, args, kwargs, out)


@functools.lru_cache(maxsize=256)
def _turned(format: Format) -> Format:
    return format.transposed()


def _transpose(func, args, kwargs):
    q = args[0]
    if q.dim() != 2 or q.offsets is not None:
        raise TypeError(f"transposing is defined on a Quantized matrix that is not grouped, not on {q!r}")
    other = {name: name.removesuffix("_t") if name.endswith("_t") else f"{name}_t" for name in q._inner}
    inner = {other[name]: tensor.detach() for name, tensor in q._inner.items()}
    out = _wrap(_turned(q.format), q.dtype, q.shape[::-1], q.stride()[::-1], inner)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _copy(func, args, kwargs):
    q = args[0]
    # A format's empty() rather than clone(): the padding of the scales is part of the layout.
    device = kwargs.get("device") or q.device
    offsets = q.offsets
    if offsets is not None:
        offsets = offsets.to(device, copy=True)
    groups = 0 if offsets is None else offsets.shape[0]
    out = q.format.empty(q.shape, kwargs.get("dtype") or q.dtype, device, groups, offsets)
    for new, old in zip(out.tensors(), q.tensors()):
        new.copy_(old, non_blocking=bool(kwargs.get("non_blocking")))
    return out


def _plain(func, args, kwargs):
    return func(*(a.dequantize() if isinstance(a, Quantized) else a for a in args), **kwargs)


def _dequantize(func, args, kwargs):
    return args[0].format.dequantize(args[0], args[0].dtype)


_aten = torch.ops.aten
_HANDLERS = {
    _aten.detach.default: _share,
    _aten.alias.default: _share,
    _aten.t.default: _transpose,
    _aten.clone.default: _copy,
    _aten._to_copy.default: _copy,
    _aten.dequantize.self: _dequantize,
    _aten.add.Tensor: _plain,
}
