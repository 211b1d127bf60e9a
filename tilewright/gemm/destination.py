"""Where a product goes: numbers, or codes that its tiles store themselves, or numbers of which a launch of its own makes codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.format import Format, Quantized
from ..device.store import NOWHERE, Way
from ..formats.fill import fill_from, is_fast, row_way
from ..runtime.plan import Call


class Destination(NamedTuple):
    """What a kernel stores, `y` or, with FORMAT, the codes and scales of `row`; and what the call gives, `y` or `q`. `scale` is a
    static one, `stride_s` what the store takes (`Format.scale_stride`)."""

    y: Tensor | None
    q: Quantized | None = None
    scale: Tensor | None = None
    row: Way = NOWHERE
    stride_s: int = 0
    FORMAT: str | None = None

    def result(self) -> Tensor:
        """What the call gives, after the kernel."""
        if self.q is None:
            return self.y
        if self.y is not None:
            fill_from(self.q, self.y, self.scale)
        return self.q


def destination(
    out: Tensor | None,
    format: Format | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    blocks: range,
) -> Destination:
    """Where numbers of a shape and `dtype`, or in `format`, go: into `out` where that is given. `blocks` are told in
    `stores_codes`."""
    if format is None:
        return Destination(torch.empty(shape, dtype=dtype, device=device) if out is None else out)
    q = format.empty(shape, dtype, device) if out is None else out
    if 0 in shape or not stores_codes(format, blocks):
        flat = math.prod(shape[:-1]), shape[-1]
        return Destination(torch.empty(flat, dtype=torch.float32, device=device), q, format.tensor)
    row = row_way(q, format.tensor)
    return Destination(
        None, q, format.tensor, row, format.scale_stride(q, "row"), format.device_format(is_fast(q.data))
    )


def stores_codes(format: Format, blocks: range) -> bool:
    """Whether tiles have all that their codes need: row-wise, scales given or for blocks of so many numbers."""
    return format.ways == "row" and (format.reach == "given" or (format.reach == "block" and format.block in blocks))


def by_rows(y: Tensor, fill: Callable[[Tensor], object]) -> Tensor:
    """y [..., columns], which `fill` fills as [rows, columns]: through other memory where leading dimensions cannot be one."""
    if y.dim() == 2:
        fill(y)
        return y
    flat = math.prod(y.shape[:-1]), y.shape[-1]
    if viewable(y):
        fill(y.view(flat))
        return y
    between = torch.empty(flat, dtype=y.dtype, device=y.device)
    fill(between)
    Call.now(Tensor.copy_, y, between.view(y.shape))  # a step like a launch: making ready stores nothing
    return y


def viewable(y: Tensor) -> bool:
    """Whether the leading dimensions can be merged into one without a copy."""
    merged = [(n, s) for n, s in zip(y.shape[:-1], y.stride()) if n != 1]
    return all(s == n * t for (_, s), (n, t) in zip(merged, merged[1:]))
