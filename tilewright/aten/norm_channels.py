"""Group and batch norm and their gradients: channels come after images, or last."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import norm
from .layout import CHANNELS_LAST
from .norm import Cells, add, backward, dense, floats, forward, parameters, parted, scratch, sum_columns
from .plans import own
from .row import Declined, compute_dtype, of_numbers

# ---- group norm ------------------------------------------------------------------------------------------------------


def kept_format(x: Tensor) -> torch.memory_format:
    """How aten lays a result of channels. A processor keeps channels last."""
    last = CHANNELS_LAST.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return last
    return torch.contiguous_format


def groups_of(x: Tensor, n: int, c: int, area: int, group: int, last: bool) -> Cells:
    """Cells of groups, a stretch of each channel."""
    width = c // group
    strides = (width, c * area, c, 1) if last else (width * area, c * area, 1, area)
    return Cells(n * group, area, width, group, strides, width, "stretch")


def check_groups(x: Tensor, n: int, c: int, area: int, group: int) -> bool:
    """Whether channels are last; leave to aten what it refuses."""
    if (
        group < 1
        or c % group
        or x.numel() != n * c * area
        or not x.numel()
        or x.dim() < 2
        or tuple(x.shape[:2]) != (n, c)
    ):
        raise Declined("no elements, or groups that are refused")
    last = kept_format(x) != torch.contiguous_format
    if (last and x.is_cuda) or not (last or x.is_contiguous()):
        raise Declined("gaps, or channels last")
    return last


@of_numbers("eps")
def group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    floats(input, weight, bias)
    last = check_groups(input, N, C, HxW, group)
    mixed = parameters(input, (C,), weight, bias, alike=input.is_cuda)
    weight, bias = dense(weight, bias)
    y = own(torch.empty_like(input))
    kind = torch.float32 if mixed else input.dtype
    mean, rstd = (own(torch.empty((N, group), dtype=kind, device=input.device)) for _ in range(2))
    cells = groups_of(input, N, C, HxW, group, last)
    seen = None if last else (input.view(N, group, -1), (2,))
    forward("moments", input, y, cells, seen, weight, bias, mean, rstd, eps)
    return y, mean, rstd


def group_norm_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, N: int, C: int, HxW: int, group: int,
    output_mask: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    floats(grad_out, input, mean, rstd, weight)
    last = check_groups(input, N, C, HxW, group)
    parameters(input, (C,), weight, alike=input.is_cuda)
    (weight,) = dense(weight)
    alike = grad_out.shape == input.shape and grad_out.dtype == input.dtype and grad_out.stride() == input.stride()
    if not alike or mean.numel() != N * group or rstd.numel() != N * group:
        raise Declined("a gradient that is not like the result, or moments that are refused")
    if not (mean.is_contiguous() and rstd.is_contiguous()):
        raise Declined("moments with gaps")
    cells = groups_of(input, N, C, HxW, group, last)
    dx = own(torch.empty_like(input)) if output_mask[0] else None
    kind = input.dtype if weight is None else weight.dtype
    dw, db = (own(torch.empty((C,), dtype=kind, device=input.device)) if asked else None for asked in output_mask[1:])
    if any(output_mask):
        made = [None if t is None else scratch(input, N, C) for t in (dw, db)]
        backward("moments", grad_out, input, weight, mean, rstd, dx, *made, cells)
        if dw is not None or db is not None:
            add(made, dw, db, N, C, input)
    return dx, dw, db


# ---- batch norm ------------------------------------------------------------------------------------------------------


def channels_of(x: Tensor) -> Cells:
    """A cell of each channel [N, C, ...], over all of N and the rest."""
    n, c, area = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if x.is_contiguous() and area > 1:
        return Cells(c, area, n, c, (area, 0, 1, c * area), 1, "cell")
    return Cells(c, n * area, 1, c, (1, 0, c, 0), 1, "cell")


def check_channels(x: Tensor) -> None:
    if x.dim() < 2 or not x.numel() or (kept_format(x) == torch.contiguous_format and not x.is_contiguous()):
        raise Declined("no elements, no channels, or gaps")


@of_numbers("momentum", "eps")
def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    floats(input, weight, bias, running_mean, running_var)
    check_channels(input)
    c = input.shape[1]
    parameters(input, (c,), *(t for t in (weight, bias, running_mean, running_var)))
    if (running_mean is None) != (running_var is None) or (not training and running_mean is None):
        raise Declined("running moments that are not there")
    if running_mean is not None and not (running_mean.is_contiguous() and running_var.is_contiguous()):
        raise Declined("running moments with gaps")
    weight, bias = dense(weight, bias)
    there = [t.dtype for t in (weight, bias, running_mean, running_var) if t is not None]
    kind = compute_dtype(input.dtype) if input.is_cuda else (there or [input.dtype])[0]
    y, cells = own(torch.empty_like(input)), channels_of(input)
    count = c if training or input.is_cuda else 0
    mean, rstd = (own(torch.empty((count,), dtype=kind, device=input.device)) for _ in range(2))
    kept = (mean, rstd) if count else (None, None)
    if training:
        seen = input, tuple(d for d in range(input.dim()) if d != 1)
        running = running_mean, running_var
        forward("moments", input, y, cells, seen, weight, bias, *kept, eps, running=running, momentum=momentum)
    else:
        forward(
            "moments", input, y, cells, None, weight, bias, *kept, eps, (running_mean, running_var), momentum=momentum
        )
    return y, mean, rstd


@of_numbers("eps")
def batch_norm_backward(
    grad_out: Tensor, input: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    mean, rstd = (save_mean, save_invstd) if train else (running_mean, running_var)
    floats(grad_out, input, weight, mean, rstd)
    check_channels(input)
    c = input.shape[1]
    parameters(input, (c,), weight)
    (weight,) = dense(weight)
    alike = grad_out.shape == input.shape and grad_out.dtype == input.dtype and grad_out.stride() == input.stride()
    if not alike or mean is None or rstd is None or mean.numel() != c or rstd.numel() != c:
        raise Declined("a gradient that is not like the result, or moments that are refused")
    if not (mean.is_contiguous() and rstd.is_contiguous()):
        raise Declined("moments with gaps")
    if output_mask[0] and not train and input.is_cuda and kept_format(input) != torch.contiguous_format:
        raise Declined("channels last and moments that were given, whose gradient aten lays out by rows")
    cells = channels_of(input)
    dx = own(torch.empty_like(input)) if output_mask[0] else None
    kind = input.dtype if weight is None else weight.dtype
    dw, db = (own(torch.empty((c,), dtype=kind, device=input.device)) if asked else None for asked in output_mask[1:])
    across = cells.tiles(norm.LONGEST_OF_TWO)
    split = parted(cells, across, input.device) if across["FORM"] == "across" and train else None
    if not any(output_mask):
        return dx, dw, db
    if split is None:
        backward("moments", grad_out, input, weight, mean, rstd, dx, dw, db, cells, eps, train)
        return dx, dw, db
    wide = (scratch(input, c), scratch(input, c)) if dx is not None else (None, None)
    if dx is not None or dw is not None or db is not None:
        sum_columns(grad_out, input, mean, rstd, dw, db, cells.r0, c, "column", wide=wide)
    if dx is not None:
        backward("moments", grad_out, input, weight, mean, rstd, dx, None, None, cells, eps, train, wide[::-1], split)
    return dx, dw, db


FORMS = {
    "native_group_norm": group_norm, "native_group_norm_backward": group_norm_backward, "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
}  # fmt: skip
