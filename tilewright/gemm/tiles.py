"""What the products share: tiles of groups of rows, their order, how many steps are in shared memory at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_ends
from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.blocks import find_block
from ..device.matrices import Matrices, Matrix
from ..runtime.kernel import kernel

ROWS = 128  # of a tile, and of the blocks that FP8 scales are for
BAND = 8  # tiles of rows that programs take together, so that both operands come from the L2


@triton.jit
def tile_of(t, down, across, BAND: tl.constexpr):
    """(tile of rows, tile of columns) number t: BAND tiles of rows go over all columns before the next do."""
    first = t // (BAND * across) * BAND
    rows = tl.minimum(down - first, BAND)
    rest = t % (BAND * across)
    return first + rest % rows, rest // rows


@triton.jit
def group_range(e, OFFSETS, T, STEP: tl.constexpr):
    """(first, end) of group e of T tokens, in whole steps. Offsets are device data: whatever they hold, it lies within [0, T]."""
    end = tl.minimum(tl.maximum(tl.load(OFFSETS + e).to(tl.int64), 0), T)
    start = tl.minimum(tl.maximum(tl.load(OFFSETS + e - 1, e > 0, 0).to(tl.int64), 0), T)
    start = tl.cdiv(start, STEP) * STEP
    return tl.minimum(start, T).to(tl.int32), tl.minimum(tl.cdiv(end, STEP) * STEP, T).to(tl.int32)


@kernel(grid=lambda a: (a.count,), tokens=("M", "E", "count"), default=lambda a: {"num_warps": 1})
def list_tiles(OFFSETS, TILES, M, E, count, BLOCK_E: tl.constexpr):
    """TILES[t] = (group, first row, rows from there to the group's end) of the t-th 128 rows; no rows past the last."""
    t = tl.program_id(0)
    group, row0, rows = find_block(t, OFFSETS, E, M, BLOCK_E)
    tl.store(TILES + 4 * t, group.to(tl.int32))
    tl.store(TILES + 4 * t + 1, row0.to(tl.int32))
    tl.store(TILES + 4 * t + 2, rows.to(tl.int32))


@triton.jit
def tile_entry(TILES, tile):
    """(group, first row, rows from there to the group's end), as `list_tiles` wrote them."""
    at = TILES + 4 * tile
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


def tile_list(offsets: Tensor, rows: int) -> Tensor:
    """The list that `list_tiles` makes, [most tiles that there can be, 4].

    Each group begins a tile of its own, so that there may be one tile more for every group than the rows alone would take.
    """
    check_ends("grouped_mm_rows", "offsets", offsets, rows)
    E = offsets.shape[0]
    tiles = torch.empty(cdiv(rows, ROWS) + E, 4, dtype=torch.int32, device=offsets.device)
    list_tiles(offsets.contiguous(), tiles, rows, E, tiles.shape[0], BLOCK_E=power_of_two(E))
    return tiles


def matrix(t: Tensor | None) -> Matrix:
    """A matrix, or none, as kernels take it."""
    return Matrix() if t is None else Matrix(t, *t.stride())


def matrices(t: Tensor | None) -> Matrices:
    """A matrix for each expert, or none, as kernels take them."""
    return Matrices() if t is None else Matrices(t, *t.stride())


def stages(device: torch.device, bytes_a_step: int, most: int = 4) -> int:
    """How many steps of both operands shared memory holds at a time, `most` at the most."""
    return max(1, min(most, Target.at(device).shared_memory // bytes_a_step))


def operands_for_kernel(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, dict]:
    """FP8 operands as the portable kernels take them, with the constants that say so: as bytes where the chip has no FP8."""
    native = Target.at(a.device).fp8
    how = {"NATIVE": native, "E5M2_A": a.dtype == torch.float8_e5m2, "E5M2_B": b.dtype == torch.float8_e5m2}
    return (a, b, how) if native else (a.view(torch.uint8), b.view(torch.uint8), how)


def rounded_ends(ends: Tensor, rows: int, step: int) -> Tensor:
    """End rows, each rounded up to a multiple of `step` but to no more than `rows`; for references."""
    return ((ends.to(torch.int64) + step - 1) // step * step).clamp(max=rows)


def group_of(ends: Tensor, rows: int) -> Tensor:
    """The group of each row; rows past the last group have `len(ends)`. For references."""
    return (ends.to(torch.int64)[None, :] <= torch.arange(rows, device=ends.device)[:, None]).sum(1)
