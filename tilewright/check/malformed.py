"""Calls that must be refused, made from an op's signature: each is a good call with one thing wrong, and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewright as tw

from ..core.argument import SCALAR, Numbers
from ..core.flat import as_tuple
from ..core.format import Format, Quantized
from ..core.signature import Parameter, Range, Row
from ..op import Op
from .oracle import fresh

BAD_NUMBERS = (-1e30, -1.0, -1e-3, 0.0, 1.5, 2.0, 1e30)


class Bad(NamedTuple):
    """A call that must raise TypeError or ValueError with one of `names` in its message."""

    what: str
    names: tuple[str, ...]
    args: tuple
    kwargs: dict[str, Any]


def calls(op: Op, values: Mapping[str, Any]) -> Iterator[Bad]:
    """Every malformed call that the signature suggests, from a good one."""

    def change(what: str, name: str, value: Any, *also: str) -> Bad:
        return Bad(f"{name}: {what}", (name, *also), (), {**values, name: value})

    for p in op.signature.parameters:
        if p.kind is Tensor and isinstance(values[p.name], Tensor):
            yield from (change(*row) for row in _tensors(op, p, values))
        elif p.kind is list:
            yield from (change(*row) for row in _lists(op, p, values))
        elif p.kind is Format:
            for value in ("fp8", 8, 1.0, True, torch.float8_e4m3fn, [tw.fp8()]):
                yield change(f"{value!r} for a format", p.name, value)
        elif isinstance(p.kind, Numbers):
            yield from (change(*row) for row in _several(p, values[p.name]))
        elif p.kind in (torch.dtype, torch.Generator):
            yield from (change(*row) for row in _objects(p))
        elif p.kind not in (Tensor, list):
            yield from (change(*row) for row in _numbers(p))
    if op.result_rows:
        yield from (_list_outs if op.signature.listed else _outs)(op, values)
    yield from _written(op, values)
    yield from _shapes_of_calls(op, values)


def _tensors(op: Op, p: Parameter, values: Mapping[str, Any]) -> Iterator[tuple]:
    good, rule = values[p.name], p.rule
    if not p.optional:
        yield "None", p.name, None
    for value in (good.tolist(), "tensor", 1.5, True, good.detach().cpu().float().numpy(), object()):
        yield f"a {type(value).__name__}", p.name, value
    allowed = rule.dtypes(values)
    if allowed is None:
        yield "complex of 16 bytes", p.name, good.to(torch.complex128)
    else:
        other = {"codes": torch.bfloat16, "operand": torch.float32}.get(rule.dtype, torch.float8_e4m3fn)
        wrong = {"floats": torch.float32, "int8": torch.int8}
        if good.is_floating_point():
            wrong = {"integers": torch.int64, "complex": torch.complex64, str(other): other}
        for what, dtype in {**wrong, "booleans": torch.bool}.items():
            if dtype not in allowed:
                yield what, p.name, good.to(dtype)
    codes = good.is_floating_point() and good.element_size() == 1  # of which torch makes no sparse tensor
    yield "sparse", p.name, (good.float() if codes else good).to_sparse()
    if good.is_floating_point() and good.dim() > 0 and op.name != "dequantize":
        yield "Quantized", p.name, tw.fp8("row").quantize(good)
    if rule.dims:
        yield "no dimension", p.name, good.new_zeros(())
    if not (rule.leading or rule.spread):
        yield "one dimension more", p.name, good.unsqueeze(0)
    others = [n for n in op.signature.tensors if n != p.name and isinstance(values[n], Tensor)]
    if others:
        yield "on another device", p.name, good.to("meta"), *others
    yield from _sizes(op, p, values, others)
    if good.is_floating_point() and p.name not in op.differentiable:
        yield "requiring a gradient", p.name, good.detach().clone().requires_grad_()


def _lists(op: Op, p: Parameter, values: Mapping[str, Any]) -> Iterator[tuple]:
    good = values[p.name]
    if not p.optional:
        yield "None", p.name, None
    for value in (good[0], "tensors", 1.5, True, dict(enumerate(good)), (t for t in good), object()):
        yield f"a {type(value).__name__}", p.name, value
    for at in (0, len(good) - 1):
        t = good[at]
        wrong = {
            "None": None, "a list": [t], "a string": "tensor", "a number": 1.5, "an array": t.float().cpu().numpy(),
            "integers": t.to(torch.int64), "complex": t.to(torch.complex64), "float8": t.to(torch.float8_e4m3fn),
            "booleans": t.bool(), "sparse": t.to_sparse(), "negated": torch.complex(t.float(), t.float()).conj().imag,
            "on another device": t.to("meta"),
        }  # fmt: skip
        if p.name not in op.differentiable:
            wrong["requiring a gradient"] = t.detach().clone().requires_grad_()
        if t.dim():
            wrong["Quantized"] = tw.fp8("row").quantize(t)
        for what, value in wrong.items():
            yield f"{what} at {at}", p.name, [*good[:at], value, *good[at + 1 :]]


def _sizes(op: Op, p: Parameter, values: Mapping[str, Any], others: list[str]) -> Iterator[tuple]:
    good, rules = values[p.name], {q.name: q.rule for q in op.signature.parameters}
    same = [n for n in others if rules[n].leading]
    if p.rule.leading and same and good.dim() > len(p.rule.dims):
        yield "more rows", p.name, torch.cat([good, good[:1]]), *same
        yield "leading dimensions in another shape", p.name, good.unsqueeze(0), *same
    yield from _broadcasting(p, values, {n: rules[n] for n in others})
    for at, dim in enumerate(p.rule.dims):
        sharing = [n for n in others if dim in rules[n].dims]
        axis = at - len(p.rule.dims)
        if at in p.rule.loose or any(_is_loose(rules[n], dim) for n in sharing):
            continue
        if dim in p.rule.filled and not sharing:
            yield f"no {dim}", p.name, good.narrow(axis, 0, 0)
        if sharing or dim.isdigit():
            yield f"one {dim} more", p.name, torch.cat([good, good.narrow(axis, 0, 1)], axis), *sharing
            yield f"no {dim}", p.name, good.narrow(axis, 0, 0), *sharing


def _is_loose(rule: Row, dim: str) -> bool:
    return any(rule.dims[at] == dim for at in rule.loose)


def _broadcasting(p: Parameter, values: Mapping[str, Any], others: Mapping[str, Row]) -> Iterator[tuple]:
    """Sizes that are neither 1 nor what the other arguments say."""
    good, count = values[p.name], len(p.rule.dims)
    head, tail = good.shape[: good.dim() - count], good.shape[good.dim() - count :]
    for at, dim in enumerate(p.rule.dims):
        said = {
            n: values[n].shape[i - len(r.dims)] for n, r in others.items() for i, d in enumerate(r.dims) if d == dim
        }
        said = {n: size for n, size in said.items() if size != 1 or not _is_loose(others[n], dim)}
        if not (at in p.rule.loose or any(_is_loose(others[n], dim) for n in said)):
            continue
        known = {int(dim)} if dim.isdigit() else {*said.values()}
        for size in (0, *(n + 1 for n in known), 13) if known else ():
            if size not in known and (size != 1 or at not in p.rule.loose):
                yield f"{size} {dim}", p.name, good.new_zeros((*head, *tail[:at], size, *tail[at + 1 :])), *said
    if p.rule.spread:
        leading = {n: values[n].shape[: values[n].dim() - len(r.dims)] for n, r in others.items() if r.leading}
        for known in {*leading.values()}:
            yield "a leading dimension more", p.name, good.new_zeros((1, *known, *tail)), *leading
            if known:
                size = known[-1] + (1 if known[-1] else 2)
                yield "leading dimensions that do not broadcast", p.name, good.new_zeros((size, *tail)), *leading


def _several(p: Parameter, good: Any) -> Iterator[tuple]:
    """Several numbers of which one is wrong, or which are too many or too few."""
    kind = p.kind
    good = [kind.of(1)] * (kind.count or 1) if good is None else [*good]
    if not p.optional:
        yield "None", p.name, None
    for value in (kind.of(1), "12", torch.ones(len(good)), dict(enumerate(good)), {*good}, (v for v in good), object()):
        yield f"a {type(value).__name__}", p.name, value
    if kind.count is not None:
        for what, value in (("none", []), ("one fewer", good[:-1]), ("one more", [*good, kind.of(1)])):
            if len(value) != kind.count:
                yield what, p.name, value
    one = Parameter(p.name, kind.of, False, p.default, None, p.rule)
    for at in {0, len(good) - 1} if good else ():
        for what, _, value in _numbers(one):
            yield f"{what} at {at}", p.name, [*good[:at], value, *good[at + 1 :]]


def _objects(p: Parameter) -> Iterator[tuple]:
    """What is no dtype, or no generator."""
    if not p.optional:
        yield "None", p.name, None
    for value in ("float32", 6, 1.5, True, float, torch.strided, torch.zeros(()), [torch.float32], object()):
        yield f"{value!r}"[:40], p.name, value
    yield ("a generator", p.name, torch.Generator()) if p.kind is torch.dtype else ("a dtype", p.name, torch.float32)


def _numbers(p: Parameter) -> Iterator[tuple]:
    if not p.optional:
        yield "None", p.name, None
    yield "a list", p.name, [1]
    yield "a tensor", p.name, torch.zeros(())
    if p.kind is not bool:
        yield "a truth value", p.name, True
    if p.kind is not str:
        yield "a string", p.name, "1.0"
    if p.kind in (float, SCALAR):
        allowed = isinstance(p.rule, Range) and not p.rule.finite
        for value in (float("nan"), float("inf"), float("-inf"), 1j):
            if allowed and p.rule.holds(value):
                continue
            yield str(value), p.name, value
    if p.kind is int:
        yield "a fraction", p.name, 1.5
    if p.kind is bool:
        yield "a number", p.name, 1
    if p.choices is not None:
        yield "no such choice", p.name, "no such choice"
        yield "another case", p.name, str(p.choices[0]).upper()
    if isinstance(p.rule, Range):
        tried = BAD_NUMBERS if p.kind == SCALAR else [p.kind(v) for v in BAD_NUMBERS]
        wrong = [v for v in tried if not p.rule.holds(v)]
        assert wrong, f"{p.name}: none of {BAD_NUMBERS} is refused by '{p.rule.words}'"
        for value in wrong:
            yield str(value), p.name, value


def _written(op: Op, values: Mapping[str, Any]) -> Iterator[Bad]:
    """Arguments that are written, in memory that they share with themselves or with another argument."""
    for name in op.writes:
        good = values[name]
        if not isinstance(good, Tensor) or good.numel() < 2:
            continue
        yield Bad(
            f"{name}: one element for all", (name,), (), {**values, name: good.reshape(-1)[:1].expand(good.shape)}
        )
        for other in op.signature.tensors:
            t = values[other]
            if other != name and isinstance(t, Tensor) and t.numel() and t.dtype == good.dtype:
                both = torch.zeros(good.numel() + t.numel() - 1, dtype=t.dtype, device=t.device)
                shared = {name: both[: good.numel()].view(good.shape), other: both[good.numel() - 1 :].view(t.shape)}
                yield Bad(f"{name}: in the memory of {other}", (name,), (), {**values, **shared})


def _outs(op: Op, values: Mapping[str, Any]) -> Iterator[Bad]:
    with torch.no_grad():
        results = as_tuple(op.function(**{**fresh(op, values), "out": None}))
    several = len(results) > 1
    if several:
        for what, given in (("a tensor", results[0]), ("one fewer", results[:-1]), ("one more", (*results, None))):
            yield Bad(f"out: {what}", ("out",), (), {**values, "out": given})
    for at, good in enumerate(results):

        def change(what: str, out: Any, at: int = at, **also: Any) -> Bad:
            outs = tuple(out if i == at else None for i in range(len(results))) if several else out
            return Bad(f"out: {what}", ("out",), (), {**values, **also, "out": outs})

        yield from _bad_outs(op, values, op.results[at], good, change)
    if several and results[0].shape == results[1].shape and results[0].dtype == results[1].dtype:
        both = torch.empty_like(results[0])
        outs = (both, both, *(None for _ in results[2:]))
        yield Bad("out: one memory for two results", ("out",), (), {**values, "out": outs})


def _bad_outs(op: Op, values: Mapping[str, Any], name: str, good: Tensor, change: Callable[..., Bad]) -> Iterator[Bad]:
    if isinstance(good, Quantized):
        fmt, like = good.format, {"dtype": good.dtype, "device": good.device}
        yield change("a plain tensor", torch.zeros(good.shape, **like))
        yield change("a list", [good])
        yield change("one row more", fmt.empty((good.shape[0] + 1, *good.shape[1:]), good.dtype, good.device))
        other = tw.fp8("row" if fmt.granularity == "tensor" else "tensor")
        yield change("in another format", other.empty(good.shape, good.dtype, good.device))
        return
    yield change("a list", good.tolist())
    yield change("one more", torch.cat([good.reshape(-1), good.reshape(-1)[:1]]) if good.numel() else good.new_empty(1))
    if good.dim() > 0:
        yield change("one row more", good.new_zeros((good.shape[0] + 1, *good.shape[1:])))
        yield change("one column more", good.new_zeros((*good.shape[:-1], good.shape[-1] + 1)))
    yield change("one dimension more", good.unsqueeze(0))
    yield change("another dtype", good.to(torch.float64 if good.dtype != torch.float64 else torch.float32))
    yield change("on another device", good.to("meta"))
    if good.dim() > 0 and good.numel() > 1 and good.shape[0] > 1:
        yield change("expanded", good[:1].clone().expand(good.shape))
    if sum(size > 1 for size in good.shape) > 1:
        wide = torch.zeros(good.numel() + 8, dtype=good.dtype, device=good.device)
        yield change("overlapping itself", wide.as_strided(good.shape, (1,) * good.dim()))
    if good.is_floating_point() and good.dim() > 0 and good.element_size() > 1:
        yield change("Quantized", tw.fp8("row").quantize(good))
    if name in op.out.contiguous and good.dim() > 1 and min(good.shape) > 1:
        yield change("of other strides", good.transpose(-1, -2).contiguous().transpose(-1, -2))
    for n in op.signature.tensors:
        t = values[n]
        if isinstance(t, Tensor) and t.shape == good.shape and t.dtype == good.dtype and t.numel():
            if n not in op.out.lies_on.get(name, ()):
                yield change(f"the memory of {n}", t)
    named = next(
        (n for n in op.differentiable if isinstance(values[n], Tensor) and values[n].is_floating_point()), None
    )
    if named is not None:
        yield change(
            "with a gradient wanted", torch.empty_like(good), **{named: values[named].clone().requires_grad_()}
        )
    if "out_format" in op.signature.names and name == op.results[0]:
        fmt = tw.fp8("row")
        yield change("a plain tensor for a quantised result", good.clone(), out_format=fmt)
        other = tw.fp8("tensor").quantize(good)
        yield change("in another format", other, out_format=fmt)


def _list_outs(op: Op, values: Mapping[str, Any]) -> Iterator[Bad]:
    with torch.no_grad():
        good = op.function(**{**values, "out": None})
    source = next(n for n in op.signature.tensors if isinstance(values[n], list))

    def change(what: str, out: Any, **also: Any) -> Bad:
        return Bad(f"out: {what}", ("out",), (), {**values, **also, "out": out})

    yield change("a tensor", good[0])
    yield change("one fewer", good[:-1])
    yield change("one more", [*good, good[0].clone()])
    for what, first in (
        ("None", None),
        ("one row more", torch.cat([good[0], good[0][:1]])),
        ("flat", good[0].reshape(-1)),
        ("another dtype", good[0].double()),
        ("on another device", good[0].to("meta")),
        ("expanded", good[0][:1].clone().expand(good[0].shape)),
        ("Quantized", tw.fp8("row").quantize(good[0])),
    ):
        yield change(f"{what} at 0", [first, *good[1:]])
    first = values[source][0]
    yield change("one tensor twice", [good[0], good[0]], **{source: [first, first.clone()]})
    yield change("over another argument", [good[0], first], **{source: [first, first.clone()]})


def _shapes_of_calls(op: Op, values: Mapping[str, Any]) -> Iterator[Bad]:
    yield Bad("an unknown keyword", ("no_such_argument",), (), {**values, "no_such_argument": 1})
    first = op.signature.names[0]
    yield Bad("an argument twice", (first,), (values[first],), dict(values))
    many = tuple(values[n] for n in op.signature.names) + (None,) * 2
    yield Bad("too many arguments", (op.name,), many, {})
    for p in op.signature.parameters:
        if p.default is Ellipsis or (p.kind in (Tensor, list) and not p.optional):
            yield Bad(f"no {p.name}", (p.name,), (), {n: v for n, v in values.items() if n != p.name})
