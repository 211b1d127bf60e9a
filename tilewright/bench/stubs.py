"""`tilewright/__init__.pyi`: what a type checker and an editor see of the public names, which the package itself loads late.

An op's signature is its reference's with `out`, memory for its results. Where it takes an `out_format`, its first result is
`Quantized` with one and a plain tensor without, and so is the memory for it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.argument import kind_name
from ..names import NAMES
from ..op import Op

STUB = Path("tilewright/__init__.pyi")
HEAD = '''"""Signatures of the public names. Generated: edit a declaration or `names.py`, then run `tilewright docs`."""
'''
LONGEST = 116  # what a formatter leaves in one line, beside the margin and the comma
TAIL = '''
__version__: str

def declaration(name: str) -> Op:
    """The declaration of one op, from its module alone."""

def catalogue() -> dict[str, Op]:
    """Every declared op by name."""
'''


def stub(ops: Mapping[str, Op]) -> str:
    """The whole file; a name that is both an op and a function over it is the function."""
    made = [line for name, op in sorted(ops.items()) if name not in NAMES for line in ("", *_declarations(op))]
    lines = [
        HEAD.rstrip(), "", "from typing import Literal, overload", "",
        *(["import torch"] if any(": torch." in line for line in made) else []), "from torch import Tensor", "",
        "from . import aten as aten",
        "from . import nn as nn",
        *sorted((f"from .{module} import {name} as {name}" for name, module in NAMES.items()), key=str.casefold),
    ]  # fmt: skip
    return "\n".join([*lines, *TAIL.rstrip().splitlines(), *made]) + "\n"


def _declarations(op: Op) -> Iterator[str]:
    hints = typing.get_type_hints(op.reference)
    result = _result(op, hints["return"])
    wanted = op.signature.python.parameters.get("out_format")
    if wanted is None:
        yield from _function(op, hints, result, "Tensor")
        return
    coded = result.replace("Tensor", "Quantized", 1)
    if wanted.default is inspect.Parameter.empty:
        yield from _function(op, hints, coded, "Quantized")
        return
    yield "@overload"
    yield from _function(op, hints, result, "Tensor", "out_format: None = None")
    yield from ("", "@overload")
    yield from _function(op, hints, coded, "Quantized", "out_format: Format")


def _function(op: Op, hints: Mapping[str, Any], result: str, first: str, out_format: str = "") -> Iterator[str]:
    """One signature; `first`: what the first result is."""
    parts = [_parameter(p, hints[p.name]) for p in op.signature.python.parameters.values()]
    if out_format:
        parts[op.signature.names.index("out_format")] = out_format
    if op.result_rows:
        out = inspect.signature(op.function).parameters["out"].annotation
        out = f"out: {out.replace('Tensor | Quantized', first, 1)} = None"
        parts.append(out if len(out) < LONGEST else out.removesuffix(" | None = None") + "\n    | None = None")
    if op.signature.positional < len(parts):
        parts.insert(op.signature.positional, "*")
    yield f"def {op.name}("
    yield from (f"    {part}," for part in parts)
    yield f") -> {result}:"
    summary = inspect.cleandoc(op.__doc__ or "").partition("\n")[0]
    yield '    """' + summary.replace("\\", "\\\\").replace('"', '\\"') + '"""'


def _parameter(p: inspect.Parameter, hint: Any) -> str:
    made = f"{p.name}: {_words(hint)}" + ("" if p.default is p.empty else f" = {_quoted(p.default)}")
    before, many, rest = made.partition("Literal[")
    if len(made) < LONGEST or not many:
        return made
    names, _, after = rest.partition("]")  # on a line of their own, or on one each
    if len(names) > LONGEST - 4:
        names = names.replace(", ", ",\n        ") + ","
    return f"{before}{many}\n        {names}\n    ]{after}"


def _result(op: Op, hint: Any) -> str:
    """What a call hands out; the reference also gives what the backward keeps, and what written arguments become."""
    return inspect.signature(op.function).return_annotation if op.hidden or op.writes else _words(hint)


def _words(hint: Any) -> str:
    """A type as source text."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(_quoted, inner))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_words, inner))
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if one is ... else _words(one) for one in inner)}]"
    return "None" if hint is type(None) else kind_name(hint)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
