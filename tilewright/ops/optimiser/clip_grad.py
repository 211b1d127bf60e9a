"""Norms over gradients that are spread over processes, and clipping by them.

    total = (sum over all shards of |g|^p)^(1/p), or the largest |g|;   g <- g * min(1, max_norm / (total + 1e-6))

A DTensor counts once: its shards are summed over the mesh dimensions it is sharded on, copies along the others are not.
`group` is for shards that are plain tensors: the ranks of the group hold different parts of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .multi_tensor import multi_tensor_count_zeros, multi_tensor_norm, multi_tensor_scale

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group: Any = None,
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their norm together is at most `max_norm`; gives the norm before.

    As `torch.nn.utils.clip_grad_norm_`, for norms 1, 2 and inf, with gradients of any dtypes on one device. The norm is fp32,
    stays on the device and is that of the whole gradients: over the shards of DTensors, and over the ranks of `group` if
    one is given. Nothing waits for the device but `error_if_nonfinite=True`, which raises RuntimeError if the norm is
    infinite or NaN; otherwise such a norm makes the gradients 0 or NaN.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"clip_grad_norm_: {name} must be float, got {type(value).__name__}")
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be >= 0, got {max_norm}")
    if norm_type not in (1, 2, math.inf):
        raise ValueError(f"clip_grad_norm_: norm_type must be 1, 2 or inf, got {norm_type}")
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads and group is not None and parameters:
        grads = [
            torch.empty(0, device=parameters[0].device)
        ]  # this rank has nothing to add, but the others wait for it
    total = global_norm(grads, float(norm_type), group=group)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the {norm_type:g}-norm of the gradients is {float(total)}; error_if_nonfinite=False"
            " clips by it all the same"
        )
    if grads:
        here = [local(g) for g in grads]
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        multi_tensor_scale(here, by=factor, out=here)
    return total


@torch.no_grad()
def global_norm(tensors: list[Tensor], ord: float = 2.0, *, group: Any = None) -> Tensor:
    """`multi_tensor_norm` of whole tensors, of which each rank of `group`, or of a DTensor's mesh, holds a part."""
    if group is None and not any(is_sharded(t) for t in tensors):
        return multi_tensor_norm(tensors, ord)
    norms = [(multi_tensor_norm(shards, ord), groups) for groups, shards in _by_groups(tensors)]
    dtype = norms[0][0].dtype if norms else torch.float32
    dtype = torch.float64 if any(n.dtype == torch.float64 for n, _ in norms) else dtype
    if ord == math.inf:  # the bits of norms are in their order, with NaN last; a maximum of floats may drop it
        parts = [_reduced(n.to(dtype).view(INTEGERS[dtype]), groups, "MAX") for n, groups in norms]
        return _reduced(torch.stack(parts).amax(), [group], "MAX").view(dtype)
    parts = [_reduced(n.double() ** ord, groups, "SUM") for n, groups in norms]
    return (_reduced(torch.stack(parts).sum(), [group], "SUM") ** (1 / ord)).to(dtype)


@torch.no_grad()
def global_zeros(tensors: list[Tensor]) -> Tensor:
    """`multi_tensor_count_zeros` of whole tensors."""
    parts = [_reduced(multi_tensor_count_zeros(shards), groups, "SUM") for groups, shards in _by_groups(tensors)]
    return torch.stack(parts).sum()


@torch.no_grad()
def scaled_shards(tensors: list[Tensor], scale: float, by: Tensor | None, out: list[Tensor] | None) -> list[Tensor]:
    """`multi_tensor_scale` of DTensors: every rank scales what it holds."""
    here = [local(t) for t in tensors]
    there = here if out is tensors else out and [local(t) for t in out]
    made = multi_tensor_scale(here, scale, by=None if by is None else local(by), out=there)
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
