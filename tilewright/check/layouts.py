"""The ways in which a tensor can lie in memory. Each function gives a tensor of the same shape and dtype, most with the same
values, or None where the layout does not apply; what lies between its elements is NaN (or a wild integer)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def larger(t: Tensor, *shape: int) -> Tensor:
    """Uninteresting memory of this shape that would show if it were read."""
    size, fill = torch.Size(shape).numel() * t.element_size(), 0xFF if t.is_floating_point() else 0x5A
    return torch.full((size,), fill, dtype=torch.uint8, device=t.device).view(t.dtype).reshape(shape)


def _filled(view: Tensor, t: Tensor) -> Tensor:
    return view.copy_(t)


def transposed(t: Tensor) -> Tensor | None:
    if t.dim() < 2:
        return None
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def every_other_column(t: Tensor) -> Tensor | None:
    if t.dim() < 1:
        return None
    return _filled(larger(t, *t.shape[:-1], 2 * t.shape[-1])[..., ::2], t)


def every_other_row(t: Tensor) -> Tensor | None:
    if t.dim() < 2:
        return None
    return _filled(larger(t, 2 * t.shape[0], *t.shape[1:])[::2], t)


def one_further(t: Tensor) -> Tensor:
    """Off the 16-byte boundary by one element."""
    return _filled(larger(t, t.numel() + 1)[1:].view(t.shape), t)


def padded_rows(t: Tensor) -> Tensor | None:
    if t.dim() < 2:
        return None
    return _filled(larger(t, *t.shape[:-1], t.shape[-1] + 3)[..., : t.shape[-1]], t)


def expanded_rows(t: Tensor) -> Tensor | None:
    """One row for all, stride 0."""
    if t.dim() < 2 or t.shape[0] < 2:
        return None
    return t[:1].clone().expand(t.shape)


def expanded_columns(t: Tensor) -> Tensor | None:
    if t.dim() < 1 or t.shape[-1] < 2:
        return None
    return t[..., :1].clone().expand(t.shape)


def expanded_whole(t: Tensor) -> Tensor | None:
    """One element for all: the gradient that `.sum()` sends."""
    if t.dim() < 1 or t.numel() < 2:
        return None
    return t.reshape(-1)[1].clone().expand(t.shape)


def size_one(t: Tensor) -> Tensor | None:
    """Odd strides where they mean nothing."""
    if 1 not in t.shape:
        return None
    stride = [7777 if n == 1 else s for n, s in zip(t.shape, t.stride())]
    return t.clone().as_strided(t.shape, stride)


LAYOUTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "transposed": transposed,
    "every other column": every_other_column,
    "every other row": every_other_row,
    "one element further": one_further,
    "padded rows": padded_rows,
    "expanded rows": expanded_rows,
    "expanded columns": expanded_columns,
    "expanded whole": expanded_whole,
    "size one": size_one,
}
EXPANDED = [name for name in LAYOUTS if "expanded" in name]  # which have other values
KEEPING = [name for name in LAYOUTS if name not in EXPANDED and name != "size one"]
