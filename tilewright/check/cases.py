"""Calls to try an op with, drawn from the op's own `inputs`, and the net that they are tried in."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tilewright as tw

from ..core.draw import Draw
from ..core.signature import Row
from ..op import Op
from .oracle import ROW_DIMS, row_shaped

SMALL = {
    "tokens": 5,
    "batch": 2,
    "length": 3,
    "hidden": 33,
    "vocab": 37,
    "heads": 2,
    "head_dim": 16,
    "experts": 3,
    "columns": 33,
    "rows": 5,
}
# The interpreter takes milliseconds for each program, and many ops have one per row.
FEW_ROWS = (1, 2, 3, 7, 15, 17, 31, 33)
FEW = {"batch": 3}  # of them, where rows are the product of two dimensions
SEEDS = 24  # tried for a call that has a tensor argument which is drawn seldom
# Rows and columns of results that are stored in 128x128 tiles: one tile or more each way, none of them whole, all, or some, and
# rows of codes that begin anywhere, at words and at 16 bytes. Formats with two codes a byte take the even ones.
TILED = ((130, 136), (6, 258), (7, 129), (132, 48), (128, 128))


@dataclass(frozen=True)
class Net:
    """Where kernels run, how many random cases a property draws, and how many elements a case may have."""

    device: str = "cpu"
    cases: int = int(os.environ.get("TILEWRIGHT_CASES", "14"))
    largest: int = 4096
    interpreter: bool = False

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Kernels, not the reference, inside: a CPU needs to be told."""
        with tw.force("triton") if self.interpreter else contextlib.nullcontext():
            yield


@dataclass(frozen=True)
class Case:
    """One drawn call."""

    label: str
    values: dict[str, Any]
    dims: dict[str, int]
    options: dict[str, Any]


@functools.cache
def dims_of(op: Op) -> tuple[str, ...]:
    """The names of the dimensions that an op draws."""
    found: dict[str, int] = {}
    for seed in range(8):  # which ones it draws may depend on the options
        source = Draw(seed, largest=64)
        op.inputs(source)
        found.update(source.dims)
    return tuple(found)


def draw(
    op: Op,
    net: Net,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    dims: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    full: bool = False,
) -> Case:
    """Arguments from the op's own `inputs`; `full` asks for every optional tensor."""
    wanted = dict.fromkeys(op.signature.tensors, True) if full else {}
    known = {n: size for n, size in (dims or {}).items() if n in dims_of(op)}
    if net.interpreter:
        known = {
            **{n: FEW_ROWS[(seed + i) % FEW.get(n, len(FEW_ROWS))] for i, n in enumerate(ROW_DIMS) if n in dims_of(op)},
            **known,
        }
    source = Draw(seed, known, {**wanted, **(options or {})}, dtype=dtype, device=net.device, largest=net.largest)
    values = op.signature.bind((), op.inputs(source))
    chosen = {k: v for k, v in source.options.items() if k in op.signature.names}
    label = f"{op.name}(seed={seed}, {str(dtype).removeprefix('torch.')}, dims={source.dims}, options={chosen})"
    return Case(label, values, source.dims, source.options)


def draw_each_tensor(
    op: Op, net: Net, seed: int, dtype: torch.dtype, dims: Mapping[str, int], options: Mapping[str, Any]
) -> list[Case]:
    """Calls that have, each, tensor arguments that those before have not: of some, one excludes another. The first has all that go
    together at this seed."""
    found: list[Case] = []
    missing = set(op.signature.tensors)
    for full, other in itertools.product((True, False), range(SEEDS)):
        case = draw(op, net, seed + other, dtype, dims, options, full=full)
        has = {n.partition("[")[0] for n in tensors(op, case.values)}
        if not found or has & missing:
            found.append(case)
            missing -= has
        if not missing:
            break
    return found


def tensors(op: Op, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor argument by name; those of a list are `name[0]`, `name[1]` …"""
    found = {}
    for n in op.signature.tensors:
        if isinstance(values[n], (list, tuple)):
            found.update({f"{n}[{i}]": t for i, t in enumerate(values[n])})
        elif isinstance(values[n], Tensor):
            found[n] = values[n]
    return found


def put(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with other tensors, named as `tensors` names them."""
    made = {n: list(v) if isinstance(v, (list, tuple)) else v for n, v in values.items()}
    for name, t in given.items():
        base, _, index = name.rstrip("]").partition("[")
        if index:
            made[base][int(index)] = t
        else:
            made[base] = t
    return made


def rule_of(op: Op, name: str) -> Any:
    """The rule of an argument, or of the list that a tensor is in."""
    return next(p.rule for p in op.signature.parameters if p.name == name.partition("[")[0])


def row_arguments(op: Op, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arguments with one row per token."""
    return {n: t for n, t in tensors(op, values).items() if row_shaped(rule_of(op, n))}


def formats(op: Op, device: str) -> list[Any]:
    """Formats that the op's result can be asked in: every granularity, direction, rule and kind of code, not every product. Calls
    of models are kept by the places that formats have here: a new one goes last."""
    if "out_format" not in op.signature.names:
        return []
    static = torch.tensor([0.37], device=device)
    return [
        tw.fp8("1x128", ways="both"),
        tw.fp8("1x128", ways="row", pow2=False),
        tw.fp8("1x128", "e5m2", ways="col", rule="exact", pow2=False),
        tw.fp8("128x128", ways="both"),
        tw.fp8("128x128", ways="col", rule="linghe", pow2=False),
        tw.fp8("row", ways="both"),
        tw.fp8("row", "e5m2", ways="row", rule="exact"),
        tw.fp8("tensor", ways="both"),
        tw.fp8("tensor", ways="row", scale=static),
        tw.fp8("tensor", "e5m2", ways="both", scale="unit"),
        tw.int8("1x128", ways="both"),
        tw.mx("e4m3"),
        tw.nvfp4(ways="both"),
        tw.nvfp4(),
        tw.mx("e2m1", ways="both"),
        tw.int4("1x128", zero=True, ways="both"),
        tw.int8("row"),
    ]


def kinds(op: Op, device: str) -> list[Any]:
    """Of `formats` one of each kind that an op's own code can tell apart: by how much of a value decides a scale, whether blocks
    are small, and whether there is a row-wise operand."""
    found: dict[tuple, Any] = {}
    for fmt in formats(op, device):
        found.setdefault((fmt.reach, fmt.small, "data" in fmt.tensor_names), fmt)
    return list(found.values())


def holds(op: Op, fmt: Any, values: Mapping[str, Any]) -> bool:
    """Whether the op's result for these arguments can be had in a format."""
    try:
        op.check_format(fmt, op.signature.bind((), dict(values)))
    except ValueError:
        return False
    return True


def draw_in(op: Op, net: Net, fmt: Any, seed: int, dtype: torch.dtype) -> Case | None:
    """A call that asks for a format, at the first shape of `TILED` from that of the seed on that the format goes with, without
    groups of rows if it has none; None if it goes with no call of the op."""
    for at in range(len(TILED)):
        rows, columns = TILED[(seed + at) % len(TILED)]
        dims = {**SMALL, "tokens": rows, "batch": 1, "length": rows, "hidden": columns, "columns": columns}
        for options in ({}, ungrouped(op)):
            case = draw(op, net, seed, dtype, dims, {"out_format": fmt, **options})
            if holds(op, fmt, case.values):
                return replace(case, label=f"{case.label} in {fmt}", values={**case.values, "out_format": fmt})
    return None


def ungrouped(op: Op) -> dict[str, bool]:
    """The option by which an op's `inputs` draw no groups of rows, of an op that draws any."""
    return {op.groups: False} if op.groups in op.signature.names else {}


def unpacked(op: Op) -> dict[str, bool]:
    """The options by which an op's `inputs` draw a batch of several rows, not sequences packed into one."""
    marks = [p.name for p in op.signature.parameters if isinstance(p.rule, Row) and "marks" in p.rule.dims]
    return {**dict.fromkeys(marks, False), "batch_drawn": 2} if marks else {}


def choices(op: Op, device: str) -> list[Any]:
    """`formats`, and None for a plain result where the op has one."""
    needed = any(p.name == "out_format" and not p.optional for p in op.signature.parameters)
    return [*([] if needed else [None]), *formats(op, device)]
