"""Scales of small blocks in the order that Blackwell's tensor cores read them: tiles of 128 rows by 4 blocks.

Within a tile, 512 bytes, the scale of row r and block c is at (r % 32) * 16 + (r // 32) * 4 + c; tiles follow one another along the
blocks, then down the rows. torch calls this SWIZZLE_32_4_4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.tensor import cdiv

ROWS, BLOCKS = 128, 4


def tiled_size(rows: int, blocks: int) -> int:
    """How many elements the tiles of a scale [rows, blocks] have, with padding."""
    return cdiv(rows, ROWS) * ROWS * padded_blocks(blocks)


def padded_blocks(blocks: int) -> int:
    """The number of a row's blocks, filled up to whole tiles."""
    return cdiv(blocks, BLOCKS) * BLOCKS


def swizzle_scale(scale: Tensor) -> Tensor:
    """A scale [rows, blocks] of one byte each as flat tiles, padded with 0."""
    rows, blocks = scale.shape
    codes = F.pad(scale.view(torch.uint8), (0, -blocks % BLOCKS, 0, -rows % ROWS))
    tiles = codes.reshape(cdiv(rows, ROWS), 4, 32, cdiv(blocks, BLOCKS), BLOCKS)  # [down, r // 32, r % 32, across, c]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzle_scale(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """The scale [rows, blocks] that flat tiles hold: the inverse of `swizzle_scale`."""
    down, across, size = cdiv(rows, ROWS), cdiv(blocks, BLOCKS), tiled_size(rows, blocks)
    if scale.numel() != size:
        raise ValueError(f"scale: {rows} by {blocks} scales in tiles are {size} elements, got {scale.numel()}")
    tiles = scale.reshape(-1).view(torch.uint8).reshape(down, across, 32, 4, BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * ROWS, across * BLOCKS)[:rows, :blocks].view(scale.dtype)
