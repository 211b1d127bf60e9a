"""DTensors as arguments: each rank computes its own part of the result, and nothing is sent.

An op's declaration names the dimensions of its arguments and results, and its `Sharding` says which may be sharded. On one
dimension of the mesh either all arguments are replicated, and all ranks do the same, or one dimension is sharded: then it is so
in every argument that has it, and the others are replicated. Results that have it are sharded on it; a result that has it not
is the sum of what the ranks have, `Partial`, and so is the gradient of an argument that has it not (a norm's weight, where tokens
are sharded). Every other placement raises: what has to be sent is for the caller to say, but for a few numbers of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from ... import catalogue
from ...core.declaration import namespace
from ...core.signature import Row
from ...op import Op, Sharding, upcast

Dims = tuple[str, ...]


def register() -> None:
    """Let the ops that declare a `sharding` take DTensors, and the others say that they do not, from now on and in the whole
    process."""
    for op in catalogue().values():
        if op.sharding is not None:
            op.sharded = taking(op)
        elif op.sharded is None:
            op.sharded = refusing(op)


def refusing(op: Op) -> Callable[..., Any]:
    def sharded(**values: Any) -> Any:
        raise NotImplementedError(
            f"{op.name}: there is no rule for DTensors: pass their to_local(), for what this rank has, or full_tensor()"
        )

    return sharded


def taking(op: Op) -> Callable[..., Any]:
    def sharded(**values: Any) -> Any:
        if not torch.compiler.is_compiling():  # there the local op's fake does
            op.signature.validate(values)
        said = op.sharding
        return run(op, said if isinstance(said, Sharding) else said(namespace(values)), values)

    return sharded


def run(op: Op, rule: Sharding, values: Mapping[str, Any]) -> Any:
    """The op of local tensors, its results as DTensors."""
    tensors = {n: values[n] for n in op.signature.tensors if values[n] is not None}
    mesh = mesh_of(op, tensors, values)
    tensors |= {n: reduced_over_ranks(tensors[n]) for n in rule.summed if n in tensors}
    dims, results = named(op, rule, values, tensors)
    split = [sharded_on(op, rule, tensors, dims, i) for i in range(mesh.ndim)]
    reduced = any(key is not None and not all(has(own, key) for own in results) for key in split)
    if reduced and any(n in tensors for n in rule.once):
        raise ValueError(f"{op.name}: {rule.once[0]} would be added on every rank: add it to the reduced result")

    for name in op.writes:  # ranks that saw other parts of the arguments would write other numbers
        alone = next((key for key in split if name in tensors and key is not None and not has(dims[name], key)), None)
        if alone is not None:
            raise ValueError(f"{op.name}: {name} is written, and has no dimension {alone} to be sharded on")

    local = {n: t.to_local(grad_placements=placements(dims[n], split)) for n, t in tensors.items()}
    total = None
    if reduced and rule.divisor is not None:
        total = over_ranks(rule.divisor(namespace({**values, **local})), mesh, split)
        local |= rule.summing
    whole = None if rule.mean is None or not reduced else tensors[rule.mean].numel()
    if whole and not local[rule.mean].numel():
        made = upcast(local[rule.mean]).sum()  # the mean of no rows would be NaN
    else:
        made = op.function(**{**values, **local})
    single = isinstance(made, Tensor)
    made = [made] if single else [*made]
    if total is not None:
        made[0] = made[0] / total
    if whole:
        made[0] = made[0] * (local[rule.mean].numel() / whole)
    shapes = [shape for shape, _ in op.expected(values).values()]
    found = [distributed(*one, mesh, split) for one in zip(made, shapes, results)]
    return found[0] if single else tuple(found)


def mesh_of(op: Op, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of all the tensors."""
    for name in ("out", "out_format"):
        if values.get(name) is not None:
            raise ValueError(f"{op.name}: {name} is not for DTensors: pass their to_local()")
    plain = next((n for n, t in tensors.items() if not isinstance(t, DTensor)), None)
    if plain is not None:
        raise TypeError(f"{op.name}: {plain} is a plain tensor beside DTensors: make it one with distribute_tensor")
    first, *others = tensors
    mesh = tensors[first].device_mesh
    other = next((n for n in others if tensors[n].device_mesh != mesh), None)
    if other is not None:
        raise ValueError(f"{op.name}: {other} is on another mesh than {first}")
    return mesh


def reduced_over_ranks(t: DTensor) -> DTensor:
    return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])


def named(
    op: Op, rule: Sharding, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Dims], list[Dims]]:
    """(the dimensions of each tensor, those of each result)."""
    sizes, leading = op.signature.dims(values)

    def dims(row: Row, head: int) -> Dims:
        """With so many leading dimensions, the last of them all."""
        return *(f"...{len(leading) - head + i}" for i in range(head)), *(rule.names.get(n, n) for n in row.dims)

    def given(row: Row, shape: torch.Size) -> Dims:
        """A dimension that broadcasts is none that the argument has."""
        head = len(shape) - len(row.dims)
        wholes = *leading[len(leading) - head :], *(sizes[n] for n in row.dims)
        loose = {*(range(head) if row.spread else ()), *(head + i for i in row.loose)}
        own = enumerate(zip(dims(row, head), shape, wholes))
        return tuple("1" if i in loose and size != whole else name for i, (name, size, whole) in own)

    rows = {p.name: p.rule for p in op.signature.parameters if p.name in tensors}
    results = [dims(row, len(leading) if row.leading else 0) for row in op.rows(values).values()]
    return {n: given(row, tensors[n].shape) for n, row in rows.items()}, results


def key_of(name: str) -> str:
    return name.partition("/")[0]


def has(dims: Dims, key: str) -> bool:
    return any(key_of(name) == key for name in dims)


def sharded_on(
    op: Op, rule: Sharding, tensors: Mapping[str, Tensor], dims: Mapping[str, Dims], axis: int
) -> str | None:
    """The dimension that is sharded on this axis of the mesh, None if none is."""
    found: dict[str, str] = {}
    for n, t in tensors.items():
        placement = t.placements[axis]
        if type(placement) is Shard:
            found[n] = key_of(dims[n][placement.dim])
        elif not placement.is_replicate():
            raise ValueError(f"{op.name}: {n} is {placement!r} on mesh dimension {axis}: redistribute it first")
    if not found:
        return None
    first, key = next(iter(found.items()))
    words = f"dimension {key[3:]}" if key.startswith("...") else key
    local = ("..." if key.startswith("...") else key) in rule.local
    if key in rule.units:
        local = local and rule.units[key] % ranks_along(tensors[first], tensors[first].placements[axis].dim) == 0
    if not local:
        advice = rule.advice.get(key, "redistribute it first")
        raise ValueError(f"{op.name}: {first} is sharded on {words}, of which each rank needs all: {advice}")
    for n, t in tensors.items():
        wanted = key if has(dims[n], key) else None
        if found.get(n) != wanted:
            should = "replicated" if wanted is None else f"sharded on {words} as {first} is"
            raise ValueError(f"{op.name}: {n} must be {should} on mesh dimension {axis}, is {t.placements[axis]!r}")
    return key


def ranks_along(t: DTensor, dim: int) -> int:
    """How many ranks share a dimension. A plain loop, so that torch.compile can trace it."""
    count = 1
    for axis, placement in enumerate(t.placements):
        if type(placement) is Shard and placement.dim == dim:
            count *= t.device_mesh.size(axis)
    return count


def placements(dims: Dims, split: list[str | None]) -> list[Placement]:
    """The placement of a result, or of a gradient, that has these dimensions."""
    keys = [key_of(name) for name in dims]
    return [Replicate() if key is None else Shard(keys.index(key)) if key in keys else Partial() for key in split]


def distributed(local: Tensor, shape: torch.Size, dims: Dims, mesh: DeviceMesh, split: list[str | None]) -> DTensor:
    placed = placements(dims, split)
    if not shape:  # from_local takes an empty shape for one that was not given, and finds the same
        return DTensor.from_local(local, mesh, placed, run_check=False)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=shape, stride=stride)


def over_ranks(own: Tensor, mesh: DeviceMesh, split: list[str | None]) -> Tensor:
    """What the ranks have together of a number: it is the one number that is sent."""
    return DTensor.from_local(own, mesh, placements((), split), run_check=False).full_tensor()
