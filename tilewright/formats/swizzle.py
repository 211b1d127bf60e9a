"""Scales of small blocks in the order that Blackwell's tensor cores read them: tiles of 128 rows by 4 blocks.

Within a tile, 512 bytes, the scale of row r and block c is at (r % 32) * 16 + (r // 32) * 4 + c; tiles follow one another along the
blocks, then down the rows. torch calls this SWIZZLE_32_4_4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, BLOCKS = 128, 4


def swizzle_scale(scale: Tensor) -> Tensor:
    """A scale [rows, blocks] of one byte each as flat tiles, padded with 0."""
    rows, blocks = scale.shape
    codes = F.pad(scale.view(torch.uint8), (0, -blocks % BLOCKS, 0, -rows % ROWS))
    tiles = codes.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, BLOCKS))  # [down, r // 32, r % 32, across, c]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzle_scale(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """The scale [rows, blocks] that flat tiles hold: the inverse of `swizzle_scale`."""
    down, across = -(-rows // ROWS), -(-blocks // BLOCKS)
    if scale.numel() != down * across * ROWS * BLOCKS:
        raise ValueError(
            f"scale: {rows} by {blocks} scales in tiles are {down * across * ROWS * BLOCKS} elements, got {scale.numel()}"
        )
    tiles = scale.reshape(-1).view(torch.uint8).reshape(down, across, 32, 4, BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * ROWS, across * BLOCKS)[:rows, :blocks].view(scale.dtype)
