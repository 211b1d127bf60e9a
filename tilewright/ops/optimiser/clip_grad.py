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
from torch import Tensor

from .multi_tensor import multi_tensor_count_zeros, multi_tensor_norm, multi_tensor_scale
from .shards import is_sharded, local, norm_of_whole, zeros_of_whole


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


def global_norm(tensors: list[Tensor], ord: float = 2.0, *, group: Any = None) -> Tensor:
    """`multi_tensor_norm` of whole tensors, of which each rank of `group`, or of a DTensor's mesh, holds a part."""
    if group is None and not any(is_sharded(t) for t in tensors):
        with torch.no_grad():
            return multi_tensor_norm(tensors, ord)
    return norm_of_whole(multi_tensor_norm, tensors, ord, group)


def global_zeros(tensors: list[Tensor]) -> Tensor:
    """`multi_tensor_count_zeros` of whole tensors."""
    return zeros_of_whole(multi_tensor_count_zeros, tensors)
