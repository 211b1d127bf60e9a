"""Values from codes: a kernel over 128x128 tiles, for every format and both ways."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ..core.format import Format, Quantized
from ..core.tensor import cdiv, power_of_two
from ..device.blocks import find_tile
from ..device.load import load_tile
from ..device.store import Way
from ..runtime.kernel import kernel
from .fill import column_way, is_fast, row_way, tile_grid
from .fp8 import flat_rows
from .swizzle import padded_blocks

# The words of FORMAT that loads read: values in formats that differ by others alone share a binary
READ = ("e4m3", "e5m2", "int8", "int4", "e2m1", "1x128", "1x32", "1x16", "128x128", "row", "swizzled")


@kernel(grid=tile_grid, tokens=("M", "stride_s"), default=lambda a: {"num_warps": 4})
def dequantize_tiles(
    WAY, Y, OFFSETS, M, N, E, stride_s, TWIN: tl.constexpr, FORMAT: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Y [M, N] is the value of WAY, the row-wise operand or where TWIN its column-wise twin, rounded to the dtype of Y."""
    block, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    if (rows_left <= 0) | (col0 >= N):
        return
    c = col0 + tl.arange(0, 128)
    for k in range(4):
        y = load_tile(WAY, 32 * k, row0, col0, block, group, rows_left, M, N, stride_s, FORMAT, TWIN, 32)
        r = 32 * k + tl.arange(0, 32)
        at = Y + (row0 + r)[:, None] * N + c[None, :]
        tl.store(at, y.to(Y.dtype.element_ty), (r[:, None] < rows_left) & (c[None, :] < N))


# ---- host ------------------------------------------------------------------------------------------------------------


def load_tiles(q: Quantized, y: Tensor) -> None:
    """Dequantise `q` into `y`, contiguous and of its shape: from the row-wise operand if it has one."""
    twin = q.data is None
    load_way(column_way(q) if twin else row_way(q), q.format, y.view(flat_rows(q.shape), q.shape[-1]), q.offsets, twin)


def load_way(way: Way, format: Format, y: Tensor, offsets: Tensor | None, twin: bool) -> None:
    """Dequantise one way, whose codes may be bytes, into a contiguous matrix `y`; its rows end in groups at `offsets`."""
    M, N = y.shape
    groups = 0 if offsets is None else offsets.shape[0]
    words = format.device_format(is_fast(way.codes)).split(":")
    read = [word for word in words if word in READ]
    if "fast" in words and read[0] in ("e4m3", "e5m2"):
        read.append("fast")
    if "swizzled" in read:
        stride = padded_blocks(cdiv(M if twin else N, format.block))
    else:
        stride = way.scale.stride(0) if way.scale.dim() == 2 else 0
    dequantize_tiles(
        way._replace(codes=way.codes.view(torch.uint8)), y, offsets, M, N, groups, stride, TWIN=twin, FORMAT=":".join(read),
        BLOCK_E=power_of_two(groups),
    )  # fmt: skip
