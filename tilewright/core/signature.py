"""What an op's arguments may be, read once from its reference's signature (`argument.py`) and its `where` rows (`rule.py`).

The row of a `list[Tensor]` holds for each of its tensors, which need not agree with one another; one whose dtype is another list's
name is like that list, tensor by tensor. Everything here depends on types, shapes, dtypes and numbers alone, so a call whose key
was seen before need not be checked again.
"""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .argument import SCALAR, Numbers, Parameter, kind_name, kind_of
from .format import Format, Quantized
from .rule import Range, Row, above, at_least, between, dtypes_of, one_of
from .tensor import name_of

__all__ = ["Parameter", "Range", "Row", "Signature", "above", "at_least", "between", "one_of", "shape_words"]


def _head(tensor: Tensor, row: Row) -> torch.Size:
    """The leading dimensions of a tensor with this row."""
    return tensor.shape[: tensor.dim() - len(row.dims)]


def shape_words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass
class Signature:
    """The checked signature of one op."""

    op: str
    parameters: tuple[Parameter, ...]
    python: inspect.Signature
    check: Callable[..., None] | None = None
    listed: bool = False  # the result is a list of tensors
    tensors: tuple[str, ...] = field(init=False)
    scalars: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = tuple(p.name for p in self.parameters if p.kind in (Tensor, list))
        self.scalars = tuple(p.name for p in self.parameters if p.kind not in (Tensor, Format, list))
        self.lists = any(p.kind is list for p in self.parameters)
        self.names = tuple(p.name for p in self.parameters)
        self.several = {p.name: p.kind for p in self.parameters if isinstance(p.kind, Numbers)}
        self.dtypes = tuple(p.name for p in self.parameters if p.kind is torch.dtype)
        self.generators = any(p.kind is torch.Generator for p in self.parameters)
        self.spread = tuple(p for p in self.parameters if isinstance(p.rule, Row) and p.rule.spread)
        self.defaults = {p.name: p.default for p in self.parameters}
        keyword = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in self.python.parameters.values()]
        self.positional = keyword.index(True) if True in keyword else len(keyword)

    @staticmethod
    def of(
        op: str,
        reference: Callable,
        where: Mapping[str, str | Range],
        check: Callable | None = None,
    ) -> Signature:
        python = inspect.signature(reference)
        hints = typing.get_type_hints(reference)
        unknown = set(where) - set(python.parameters)
        if unknown:
            raise ValueError(f"{op}: where names {sorted(unknown)}, which the reference does not take")
        rows = []
        for p in python.parameters.values():
            kind, optional, choices = kind_of(hints[p.name])
            rule = where.get(p.name)
            if kind in (Tensor, list) and rule is None:
                raise ValueError(f"{op}: tensor argument {p.name} needs a row in where")
            if isinstance(rule, str):
                rule = replace(Row.parse(rule), many=kind is list)
                if rule.dtype not in python.parameters:
                    dtypes_of(rule.dtype)  # which raises where there is none
                if rule.many and rule.broadcasts:
                    raise ValueError(f"{op}: {p.name} is a list, whose tensors broadcast to nothing: {rule.words}")
            rows.append(Parameter(p.name, kind, optional, p.default, choices, rule))
        return Signature(op, tuple(rows), python, check, hints.get("return") == list[Tensor])

    @property
    def filled(self) -> frozenset[str]:
        """The names of dimensions that are never 0."""
        return frozenset().union(*(p.rule.filled for p in self.parameters if isinstance(p.rule, Row)))

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument by name, defaults filled in, and `out`. Plain loops, so that torch.compile can trace them."""
        if len(args) > self.positional:
            raise TypeError(f"{self.op}() takes {self.positional} positional arguments, got {len(args)}")
        values = dict(zip(self.names, args))
        for name in kwargs:
            if name in values:
                raise TypeError(f"{self.op}() got argument {name} twice")
            if name not in self.defaults and name != "out":
                near = difflib.get_close_matches(name, self.names, n=1)
                meant = f" (did you mean {near[0]}?)" if near else ""
                raise TypeError(f"{self.op}() has no argument {name}{meant}; it takes {', '.join(self.names)}, out")
        for name, default in self.defaults.items():
            if name not in values:
                value = kwargs.get(name, default)
                if value is inspect.Parameter.empty:
                    raise TypeError(f"{self.op}() needs argument {name}")
                values[name] = value
        made = {name: values[name] for name in self.names}
        made["out"] = kwargs.get("out")
        return self.settle(made) if self.several else made

    def settle(self, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments with several numbers as the reference takes them: in a list or a tuple that no caller can change."""
        for name, kind in self.several.items():
            values[name] = kind.own(values[name])
        return values

    def schemas(self) -> dict[str, str]:
        """What torch's schema has of each argument. Before a default that it cannot have it has none at all, as torch wants it:
        there callers of the registered op give every argument."""
        bare = max((at for at, p in enumerate(self.parameters) if not p.writable), default=-1)
        return {p.name: p.schema(default=at > bare) for at, p in enumerate(self.parameters)}

    def dims(self, values: Mapping[str, Any]) -> tuple[dict[str, int], torch.Size]:
        """(the sizes of the dimensions that rows name, the leading dimensions) of validated arguments, all broadcast."""
        sizes: dict[str, int] = {}
        leading = None
        for p in self.parameters:
            value = values[p.name]
            if p.kind is Tensor and value is not None:
                count = len(p.rule.dims)
                tail = value.shape[value.dim() - count :]
                if p.rule.loose:
                    for at, (name, size) in enumerate(zip(p.rule.dims, tail)):
                        sizes[name] = sizes.get(name, 1) if at in p.rule.loose and size == 1 else size
                else:
                    sizes.update(zip(p.rule.dims, tail))
                leading = value.shape[: value.dim() - count] if p.rule.leading else leading
        if leading is None:
            heads = [_head(values[p.name], p.rule) for p in self.spread if values[p.name] is not None]
            leading = torch.broadcast_shapes(*heads) if heads else torch.Size()
        return sizes, leading

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
            elif p.name in self.several:
                self._numbers(p, value)
            elif p.kind is not Tensor:
                self._number(p, value)
            else:
                self._tensor(p, value, values)
                device = self._device(p.name, value, device)
                leading = self._shape(p, value, dims, leading)
        if self.spread:
            self._broadcast(values, leading)
        if self.check is not None:
            self.check(**{n: values[n] for n in self.names})

    def _device(self, name: str, value: Tensor, known: tuple | None) -> tuple[torch.device, str]:
        if known is not None and value.device != known[0]:
            raise ValueError(f"{self.op}: {name} is on {value.device}, {known[1]} on {known[0]}: move one of them")
        return known or (value.device, name)

    def _list(self, p: Parameter, value: Any, values: Mapping[str, Any], device: tuple | None) -> tuple | None:
        """A list of tensors, each as the row says. Tensors of one kind are checked once: there may be thousands."""
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{self.op}: {p.name} must be a list of Tensors, got {type(value).__name__}")
        like = values.get(p.rule.dtype)
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
                wanted = f"{shape_words(like[i])} as {p.rule.dtype}[{i}] is"
                raise ValueError(f"{self.op}: {p.name}[{i}] is {shape_words(tensor)}, but must be {wanted}")
            raise TypeError(f"{self.op}: {p.name}[{i}] must be a Tensor, got {type(tensor).__name__}")
        return device

    def _numbers(self, p: Parameter, value: Any) -> None:
        """Several numbers, each as a lone one would be."""
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{self.op}: {p.name} must be {p.kind.words}, got {type(value).__name__}")
        if p.kind.count not in (None, len(value)):
            raise ValueError(f"{self.op}: {p.name} must be {p.kind.words}, got {len(value)}")
        for i, one in enumerate(value):
            self._number(replace(p, name=f"{p.name}[{i}]", kind=p.kind.of), one)

    def _number(self, p: Parameter, value: Any) -> None:
        accepted = SCALAR if p.kind is float else p.kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and p.kind is not bool):
            raise TypeError(f"{self.op}: {p.name} must be {kind_name(p.kind)}, got {type(value).__name__}")
        if p.choices is not None and value not in p.choices:
            raise ValueError(f"{self.op}: {p.name} must be one of {list(p.choices)}, got {value!r}")
        bounded = not isinstance(p.rule, Range) or p.rule.finite
        if isinstance(value, float) and not math.isfinite(value) and bounded:
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
            raise TypeError(f"{self.op}: {p.name} is Quantized: call {p.name}.dequantize() first")
        allowed = p.rule.dtypes(values)
        if allowed is not None and value.dtype not in allowed:
            words = " or ".join(name_of(d) for d in allowed)
            raise TypeError(f"{self.op}: {p.name} must be {words}, got {str(value.dtype).removeprefix('torch.')}")

    def _shape(self, p: Parameter, value: Tensor, dims: dict, leading: tuple | None) -> tuple | None:
        row: Row = p.rule
        count = len(row.dims)
        leads = row.leading or row.spread
        if value.dim() < count or (not leads and value.dim() != count):
            want = f"at least {count}" if leads else str(count)
            raise ValueError(f"{self.op}: {p.name} must have {want} dimensions, got {shape_words(value)}")
        head, tail = value.shape[: value.dim() - count], value.shape[value.dim() - count :]
        if row.leading:
            if leading is None:
                leading = head, p.name
            elif head != leading[0]:
                raise ValueError(
                    f"{self.op}: {p.name} is {shape_words(value)}, but its leading dimensions must be"
                    f" {list(leading[0])} as in {leading[1]}"
                )
        for at, (name, size) in enumerate(zip(row.dims, tail)):
            if at in row.loose and size == 1:
                continue
            if name in row.filled and size == 0:
                raise ValueError(f"{self.op}: {p.name} is {shape_words(value)}, but {name} must be at least 1")
            if name.isdigit():
                known, source = int(name), None
            else:
                known, source = dims.setdefault(name, (size, p.name))
            if size != known:
                because = f", as in {source}" if source else ""
                known = f"{known} or 1" if at in row.loose else known
                raise ValueError(f"{self.op}: {p.name} is {shape_words(value)}, but {name} must be {known}{because}")
        return leading

    def _broadcast(self, values: Mapping[str, Any], leading: tuple | None) -> None:
        """Leading dimensions that broadcast: to the plain ones, or where there are none, with one another."""
        known, source = leading or (torch.Size(), "")
        for p in self.spread:
            value = values[p.name]
            if value is None:
                continue
            head = _head(value, p.rule)
            pairs = [*zip(reversed(head), reversed(known))]
            if leading is None:
                fits = all(a == b or a == 1 or b == 1 for a, b in pairs)
            else:
                fits = len(head) <= len(known) and all(a == b or a == 1 for a, b in pairs)
            if not fits:
                raise ValueError(
                    f"{self.op}: {p.name} is {shape_words(value)}, but its leading dimensions must broadcast"
                    f" {'with' if leading is None else 'to'} {list(known)} as in {source}"
                )
            if leading is None:
                known, source = torch.broadcast_shapes(head, known), f"{source} and {p.name}" if source else p.name
