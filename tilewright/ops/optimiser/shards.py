"""Many tensors that are spread over processes: what a rank computes of its shards, and what the ranks then put together.

Each function is given the op that works on the shards of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@torch.no_grad()
def norm_of_whole(norm: Callable[..., Tensor], tensors: list[Tensor], ord: float, group: Any = None) -> Tensor:
    """`norm` of whole tensors, of which each rank of `group`, or of a DTensor's mesh, holds a part."""
    norms = [(norm(shards, ord), groups) for groups, shards in _by_groups(tensors)]
    dtype = norms[0][0].dtype if norms else torch.float32
    dtype = torch.float64 if any(n.dtype == torch.float64 for n, _ in norms) else dtype
    if ord == math.inf:  # the bits of norms are in their order, with NaN last; a maximum of floats may drop it
        parts = [_reduced(n.to(dtype).view(INTEGERS[dtype]), groups, "MAX") for n, groups in norms]
        return _reduced(torch.stack(parts).amax(), [group], "MAX").view(dtype)
    parts = [_reduced(n.double() ** ord, groups, "SUM") for n, groups in norms]
    return (_reduced(torch.stack(parts).sum(), [group], "SUM") ** (1 / ord)).to(dtype)


@torch.no_grad()
def zeros_of_whole(count_zeros: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
    """`count_zeros` of whole tensors."""
    parts = [_reduced(count_zeros(shards), groups, "SUM") for groups, shards in _by_groups(tensors)]
    return torch.stack(parts).sum()


@torch.no_grad()
def each_scaled(
    multiply: Callable[..., list[Tensor]],
    tensors: list[Tensor],
    by: Tensor | None,
    out: list[Tensor] | None,
    **given: Any,
) -> list[Tensor]:
    """`multiply` of DTensors: every rank scales what it holds."""
    here = [local(t) for t in tensors]
    there = here if out is tensors else out and [local(t) for t in out]
    made = multiply(here, by=None if by is None else local(by), out=there, **given)
    if out is not None:
        return out
    return [_like(t, y) for t, y in zip(tensors, made)]


def _like(t: Tensor, shard: Tensor) -> Tensor:
    """A DTensor of which this rank holds `shard`, placed as `t` is; `shard` itself if `t` is none."""
    if not is_sharded(t):
        return shard
    sizes = {"shape": t.shape, "stride": t.stride()}
    return type(t).from_local(shard, t.device_mesh, t.placements, run_check=False, **sizes)


def is_sharded(t: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    if not is_sharded(t):
        return t
    here = t.to_local()
    return here.wait() if hasattr(here, "wait") else here  # the result of a collective that may still be under way


def _by_groups(tensors: list[Tensor]) -> list[tuple[list, list[Tensor]]]:
    """Local shards, together with the groups that hold the rest of them: those of the mesh dimensions they are sharded on."""
    found: dict[Any, tuple[list, list[Tensor]]] = {}
    for t in tensors:
        key, groups = None, []
        if is_sharded(t):
            from torch.distributed.tensor import Replicate

            if any(p.is_partial() for p in t.placements):
                t = t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])
            mesh = t.device_mesh
            dims = [i for i, p in enumerate(t.placements) if not p.is_replicate()]
            key = mesh, tuple(dims)
            if key not in found and mesh.get_coordinate() is not None:
                groups = [mesh.get_group(i) for i in dims]
        found.setdefault(key, (groups, []))[1].append(local(t))
    return list(found.values()) or [([], [])]


def _reduced(value: Tensor, groups: list, operation: str) -> Tensor:
    for group in groups:
        if group is not None:
            value = value.contiguous().clone()
            dist.all_reduce(value, getattr(dist.ReduceOp, operation), group=group)
    return value
