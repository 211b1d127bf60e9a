"""How the row of a result reads on a page: as it is declared or, where it is a function of the arguments, what that gives by
default and which arguments give something else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.argument import Parameter
from ..core.rule import Row, dtypes_of
from ..core.tensor import name_of
from ..op import Op
from .markdown import code

FLOATS = torch.bfloat16, torch.float16, torch.float32, torch.float64
CODES = torch.int8, torch.float8_e4m3fn  # what arguments of any dtype may be as well


def row_words(op: Op, name: str) -> str:
    """Shape and dtype of a result."""
    row = op.result_rows[name]
    if isinstance(row, str):
        return ("list of " if op.signature.listed else "") + code(Row.parse(row).words)
    return "; ".join([*_of_dtypes(op, row), *_of_options(op, row)])


def _of_dtypes(op: Op, row: Any) -> Iterator[str]:
    """What a row gives by default, then what it gives for arguments of another dtype."""
    first = next(p for p in op.signature.parameters if p.kind in (Tensor, list))
    kinds = (*FLOATS, *CODES) if first.rule.dtype == "any" else FLOATS
    made = {name_of(kind): _given(row, _defaults(op, kind)) for kind in kinds}
    default = made[name_of(FLOATS[0])]
    like = all(made[name_of(kind)].dtype == name_of(kind) for kind in FLOATS)  # as the first argument
    yield f"{code((replace(default, dtype=first.name) if like else default).words)} by default"
    for kind, one in made.items():
        if one.dtype != kind if like else one != default:
            yield f"{code(one.words)} for {kind}"


def _of_options(op: Op, row: Any) -> Iterator[str]:
    """What a row gives where one argument is not its default."""
    values = _defaults(op, FLOATS[0])
    default = _given(row, values)
    for p in op.signature.parameters:
        if p.choices is not None:
            made = {one: _given(row, {**values, p.name: one}) for one in p.choices}
            if all(row.dtype == one for one, row in made.items()):
                yield f"of the dtype that {code(p.name)} names" + (", if any" if p.optional else "")
                continue
            changed = {one: given for one, given in made.items() if given != default}
            yield from (f"{code(given.words)} with {code(f'{p.name}={one!r}')}" for one, given in changed.items())
        elif p.kind is Tensor and p.optional:
            given = _given(row, {**values, p.name: _tensor(op, p, FLOATS[0])})
            if given != default:
                yield f"{code(given.words)} with {code(p.name)}"


def _given(row: Any, values: Mapping[str, Any]) -> Row:
    return Row.parse(row(SimpleNamespace(**values)))


def _defaults(op: Op, kind: torch.dtype) -> dict[str, Any]:
    """Arguments for a row: tensors without memory, of this dtype where the caller chooses it, and everything else by default."""
    return {p.name: _default(op, p, kind) for p in op.signature.parameters}


def _default(op: Op, p: Parameter, kind: torch.dtype) -> Any:
    if p.default is not inspect.Parameter.empty:
        return p.default
    if p.kind in (Tensor, list):
        return [_tensor(op, p, kind)] if p.kind is list else _tensor(op, p, kind)
    if p.kind is torch.dtype:
        return kind
    plain = p.kind in (bool, int, float, str)
    return p.choices[0] if p.choices is not None else p.kind() if plain else None


def _tensor(op: Op, p: Parameter, kind: torch.dtype) -> Tensor:
    return torch.empty((1,) * len(p.rule.dims), dtype=_dtype(op, p.rule.dtype, kind), device="meta")


def _dtype(op: Op, word: str, kind: torch.dtype) -> torch.dtype:
    """What a word of a row stands for where this dtype may be chosen."""
    like = {p.name: p for p in op.signature.parameters}.get(word)
    if like is not None:
        return _dtype(op, like.rule.dtype, kind)
    allowed = dtypes_of(word)
    return kind if allowed is None or kind in allowed else allowed[0]
