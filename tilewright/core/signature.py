"""What an op's arguments may be, read once from its reference's signature and its `where` rows.

A row is `dtype[dims]` for a tensor, `"float[... hidden]"` say: dims are names that must agree between arguments, integers,
or a leading `...` (any leading dimensions, equal wherever it appears); one whose name ends in `+` is at least 1. The dtype is a
class (`float`, `int`, `codes`, `any`), a torch dtype's name, or another argument's name (the same dtype). The row of a
`list[Tensor]` holds for each of its tensors, which need not agree with one another; one whose dtype is another list's name is
like that list, tensor by tensor. For a number it is `at_least(0)`, `above(0)`, `between(0, 1)` or `one_of(1, 2)`.
Everything here depends on types, shapes and dtypes alone, so a call whose key was seen before need not be checked again.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .format import Format, Quantized
from .tensor import name_of

DTYPES = {
    "float": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "int": (torch.int32, torch.int64),
    "int_or_bool": (torch.int32, torch.int64, torch.bool),
    "codes": (torch.float8_e4m3fn, torch.float8_e5m2),
    # What low-precision products take: codes, two 4-bit codes a byte, or plain numbers; and what scales codes
    "operand": (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bfloat16, torch.float16),
    "scale": (torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn),
    "any": None,
}
SCHEMA_TYPES = {float: "float", int: "int", bool: "bool", str: "str", Tensor: "Tensor", Format: "str", list: "Tensor[]"}


@dataclass(frozen=True)
class Range:
    """A predicate on a number, with the words for its error message."""

    words: str
    holds: Callable[[float], bool]
    finite: bool = True  # an infinity is refused whatever `holds` says


def at_least(low: float) -> Range:
    return Range(f">= {low:g}", lambda v: v >= low)


def above(low: float) -> Range:
    return Range(f"> {low:g}", lambda v: v > low)


def between(low: float, high: float) -> Range:
    return Range(f"in [{low:g}, {high:g}]", lambda v: low <= v <= high)


def one_of(*numbers: float) -> Range:
    return Range(f"one of {', '.join(f'{n:g}' for n in numbers)}", lambda v: v in numbers, finite=False)


@dataclass(frozen=True)
class Row:
    """A parsed `dtype[dims]`; `many`: of each tensor in a list."""

    dtype: str
    dims: tuple[str, ...]
    leading: bool
    filled: frozenset[str] = frozenset()  # dimensions that are never 0
    many: bool = False

    @staticmethod
    def parse(text: str) -> Row:
        match = re.fullmatch(r"(\w+)\[([^\]]*)\]", text)
        if match is None:
            raise ValueError(f"where: {text!r} is not of the form 'dtype[dims]'")
        dims = match[2].replace(",", " ").split()
        leading = bool(dims) and dims[0] == "..."
        dims = dims[1:] if leading else dims
        filled = frozenset(name[:-1] for name in dims if name.endswith("+"))
        return Row(match[1], tuple(name.removesuffix("+") for name in dims), leading, filled)


@dataclass(frozen=True)
class Parameter:
    """One argument: its Python type, whether None is allowed, its default and its rule."""

    name: str
    kind: type
    optional: bool
    default: Any
    choices: tuple | None
    rule: Row | Range | None

    def schema(self) -> str:
        text = SCHEMA_TYPES[self.kind] + ("?" if self.optional else "") + " " + self.name
        if self.default is inspect.Parameter.empty:
            return text
        value = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        return f"{text}={value}"


def _unwrap(annotation: Any) -> tuple[type, bool, tuple | None]:
    """(Python type, None allowed, choices) of an annotation."""
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
        optional = type(None) in members
        rest = [m for m in members if m is not type(None)]
        if Tensor in rest:  # `Tensor | Quantized` is a tensor to the registered op
            rest = [Tensor]
        if len(rest) != 1:
            raise TypeError(f"an op's argument has one type, not {annotation}")
        annotation = rest[0]
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), optional, choices
    if annotation == list[Tensor]:
        return list, optional, None
    if annotation is list or annotation not in SCHEMA_TYPES:
        raise TypeError(f"an op's argument cannot be of type {annotation}")
    return annotation, optional, None


def _layout(tensor: Tensor) -> tuple:
    """Sizes, and the strides of dimensions that have more than one element."""
    return tensor.shape, [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def _shape_words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass
class Signature:
    """The checked signature of one op."""

    op: str
    parameters: tuple[Parameter, ...]
    python: inspect.Signature
    check: Callable[..., None] | None = None
    listed: bool = False  # the result is a list of tensors
    groups: str | None = None  # the argument that holds the end rows of groups
    tensors: tuple[str, ...] = field(init=False)
    scalars: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = tuple(p.name for p in self.parameters if p.kind in (Tensor, list) and p.name != "out")
        self.scalars = tuple(p.name for p in self.parameters if p.kind not in (Tensor, Format, list))
        self.lists = any(p.kind is list for p in self.parameters)
        self.names = tuple(p.name for p in self.parameters)
        self.defaults = {p.name: p.default for p in self.parameters}
        keyword = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in self.python.parameters.values()]
        self.positional = keyword.index(True) if True in keyword else len(keyword)

    @staticmethod
    def of(
        op: str,
        reference: Callable,
        where: Mapping[str, str | Range],
        check: Callable | None = None,
        groups: str | None = None,
    ) -> Signature:
        python = inspect.signature(reference)
        hints = typing.get_type_hints(reference)
        unknown = set(where) - set(python.parameters)
        if unknown:
            raise ValueError(f"{op}: where names {sorted(unknown)}, which the reference does not take")
        rows = []
        for p in python.parameters.values():
            kind, optional, choices = _unwrap(hints[p.name])
            rule = where.get(p.name)
            if kind in (Tensor, list) and rule is None:
                raise ValueError(f"{op}: tensor argument {p.name} needs a row in where")
            rule = replace(Row.parse(rule), many=kind is list) if isinstance(rule, str) else rule
            rows.append(Parameter(p.name, kind, optional, p.default, choices, rule))
        return Signature(op, tuple(rows), python, check, hints.get("return") == list[Tensor], groups)

    @property
    def filled(self) -> frozenset[str]:
        """The names of dimensions that are never 0."""
        return frozenset().union(*(p.rule.filled for p in self.parameters if isinstance(p.rule, Row)))

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument by name, defaults filled in. Plain loops, so that torch.compile can trace them."""
        if len(args) > self.positional:
            raise TypeError(f"{self.op}() takes {self.positional} positional arguments, got {len(args)}")
        values = dict(zip(self.names, args))
        for name in kwargs:
            if name in values:
                raise TypeError(f"{self.op}() got argument {name} twice")
            if name not in self.defaults:
                near = difflib.get_close_matches(name, self.names, n=1)
                meant = f" (did you mean {near[0]}?)" if near else ""
                raise TypeError(f"{self.op}() has no argument {name}{meant}; it takes {', '.join(self.names)}")
        for name, default in self.defaults.items():
            if name not in values:
                value = kwargs.get(name, default)
                if value is inspect.Parameter.empty:
                    raise TypeError(f"{self.op}() needs argument {name}")
                values[name] = value
        return {name: values[name] for name in self.names}

    def validate(self, values: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError naming the first argument that is not what it should be."""
        dims: dict[str, tuple[int, str]] = {}
        leading: tuple[torch.Size, str] | None = None
        device: tuple[torch.device, str] | None = None
        for p in self.parameters:
            value = values[p.name]
            if value is None:
                if not p.optional:
                    raise TypeError(f"{self.op}: {p.name} must be given, got None")
                continue
            if p.kind is list:
                device = self._list(p, value, values, device)
            elif p.kind is not Tensor:
                self._number(p, value)
            else:
                self._tensor(p, value, values)
                device = self._device(p.name, value, device)
                leading = self._shape(p, value, dims, leading)
        if values.get("out") is not None:
            self._out(values["out"], values.get("out_format"), values.get(self.groups))
        if self.check is not None:
            self.check(**values)

    def _device(self, name: str, value: Tensor, known: tuple | None) -> tuple[torch.device, str]:
        if known is not None and value.device != known[0]:
            raise ValueError(f"{self.op}: {name} is on {value.device}, {known[1]} on {known[0]}: move one of them")
        return known or (value.device, name)

    def _list(self, p: Parameter, value: Any, values: Mapping[str, Any], device: tuple | None) -> tuple | None:
        """A list of tensors, each as the row says. Tensors of one kind are checked once: there may be thousands."""
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{self.op}: {p.name} must be a list of Tensors, got {type(value).__name__}")
        like = values.get(p.rule.dtype)
        if like is value:
            return device  # the arguments themselves, written over
        if like is not None and len(like) != len(value):
            raise ValueError(f"{self.op}: {p.name} has {len(value)} tensors, {p.rule.dtype} has {len(like)}")
        row = replace(p.rule, dtype="any") if like is not None else p.rule
        seen = set()
        for i, tensor in enumerate(value):
            if isinstance(tensor, Tensor):
                kind = type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.is_neg(), tensor.is_conj()
                if kind not in seen or row.dims:
                    seen.add(kind)
                    one = replace(p, name=f"{p.name}[{i}]", rule=row)
                    self._tensor(one, tensor, values)
                    device = self._device(one.name, tensor, device)
                    self._shape(one, tensor, {}, None)
                if like is None or (tensor.dtype, tensor.shape) == (like[i].dtype, like[i].shape):
                    continue
                wanted = f"{_shape_words(like[i])} as {p.rule.dtype}[{i}] is"
                raise ValueError(f"{self.op}: {p.name}[{i}] is {_shape_words(tensor)}, but must be {wanted}")
            raise TypeError(f"{self.op}: {p.name}[{i}] must be a Tensor, got {type(tensor).__name__}")
        return device

    def _out(self, out: Tensor, wanted: Format | None, ends: Tensor | None) -> None:
        """`out` is in out_format, and laid out as that lays out its memory: kernels write where the format says. `ends`: the end
        rows of groups."""
        given = out.format if isinstance(out, Quantized) else None
        if (wanted and wanted.key) != (given and given.key):
            raise ValueError(f"{self.op}: out is {given or 'a plain tensor'}, but out_format is {wanted}")
        if wanted is None:
            return
        like = wanted.empty(out.shape, out.dtype, "meta", 0 if ends is None else ends.shape[0])
        for name, has, should in zip(wanted.tensor_names, out.tensors(), like.tensors()):
            if (has.dtype, _layout(has)) != (should.dtype, _layout(should)):
                raise ValueError(
                    f"{self.op}: out.{name} is {_shape_words(has)} of strides {list(has.stride())}, but out_format has"
                    f" {_shape_words(should)} of strides {list(should.stride())}"
                )

    def _number(self, p: Parameter, value: Any) -> None:
        accepted = (int, float) if p.kind is float else (p.kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and p.kind is not bool):
            raise TypeError(f"{self.op}: {p.name} must be {p.kind.__name__}, got {type(value).__name__}")
        if p.choices is not None and value not in p.choices:
            raise ValueError(f"{self.op}: {p.name} must be one of {list(p.choices)}, got {value!r}")
        bounded = not isinstance(p.rule, Range) or p.rule.finite
        if p.kind is float and not math.isfinite(value) and bounded:
            raise ValueError(f"{self.op}: {p.name} must be finite, got {value}")
        if isinstance(p.rule, Range) and not p.rule.holds(value):
            raise ValueError(f"{self.op}: {p.name} must be {p.rule.words}, got {value}")

    def _tensor(self, p: Parameter, value: Any, values: Mapping[str, Any]) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.op}: {p.name} must be a Tensor, got {type(value).__name__}")
        if value.layout is not torch.strided:
            raise TypeError(f"{self.op}: {p.name} must be a strided tensor, got {value.layout}")
        if value.is_neg() or value.is_conj():
            raise ValueError(
                f"{self.op}: {p.name} is a lazily negated or conjugated view: call {p.name}.resolve_neg() first"
            )
        if isinstance(value, Quantized):
            if p.name != "out":
                raise TypeError(f"{self.op}: {p.name} is Quantized: call {p.name}.dequantize() first")
            return
        wanted = p.rule.dtype
        if wanted in values:
            allowed = (values[wanted].dtype,)
        elif wanted in DTYPES:
            allowed = DTYPES[wanted]
        else:
            allowed = (getattr(torch, wanted),)
        if allowed is not None and value.dtype not in allowed:
            words = " or ".join(name_of(d) for d in allowed)
            raise TypeError(f"{self.op}: {p.name} must be {words}, got {str(value.dtype).removeprefix('torch.')}")

    def _shape(self, p: Parameter, value: Tensor, dims: dict, leading: tuple | None) -> tuple | None:
        row: Row = p.rule
        count = len(row.dims)
        if value.dim() < count or (not row.leading and value.dim() != count):
            want = f"at least {count}" if row.leading else str(count)
            raise ValueError(f"{self.op}: {p.name} must have {want} dimensions, got {_shape_words(value)}")
        head, tail = value.shape[: value.dim() - count], value.shape[value.dim() - count :]
        if row.leading:
            if leading is None:
                leading = head, p.name
            elif head != leading[0]:
                raise ValueError(
                    f"{self.op}: {p.name} is {_shape_words(value)}, but its leading dimensions must be"
                    f" {list(leading[0])} as in {leading[1]}"
                )
        for name, size in zip(row.dims, tail):
            if name in row.filled and size == 0:
                raise ValueError(f"{self.op}: {p.name} is {_shape_words(value)}, but {name} must be at least 1")
            if name.isdigit():
                known, source = int(name), None
            else:
                known, source = dims.setdefault(name, (size, p.name))
            if size != known:
                because = f", as in {source}" if source else ""
                raise ValueError(f"{self.op}: {p.name} is {_shape_words(value)}, but {name} must be {known}{because}")
        return leading


def _span(t: Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first element to its last."""
    if t.is_contiguous():
        return t.data_ptr(), t.data_ptr() + t.nbytes
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def overlapping(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes spanned by two dense tensors can meet (spans, so a false alarm is possible, a miss is not)."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same elements at the same addresses."""
    return a is b or (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def clashing(written: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
    """Whether the span of a written tensor meets that of a read one, or of another written one where neither has gaps (the
    columns of one matrix, written one by one, have spans that meet and no element in common)."""
    writes = [(*_span(t), t.is_contiguous()) for t in written if t.numel()]
    dense, reads = sorted(w for w in writes if w[2]), sorted(_span(t) for t in read if t.numel())
    if any(a[1] > b[0] for a, b in zip(dense, dense[1:])):
        return True
    gaps = sorted(w[:2] for w in writes if not w[2])
    if any(a[0] == b[0] for a, b in zip(gaps, gaps[1:])):
        return True
    spans = sorted([(start, end, True) for start, end, _ in writes] + [(start, end, False) for start, end in reads])
    reach = {True: 0, False: 0}  # how far written and read spans that began before have come
    for start, end, writing in spans:
        if start < reach[not writing]:
            return True
        reach[writing] = max(reach[writing], end)
    return False


def self_overlapping(t: Tensor) -> bool:
    """Whether two elements of a tensor can share memory (an expanded output, say)."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride()) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
