"""`grouped_mm_rows_fp8` on Hopper: the kernel of `scaled_mm.py` over a list of tiles, each of one group."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...device.matrices import Added, Matrix
from ...device.store import NOWHERE
from ..tiles import BAND, ROWS, tile_list
from .boxes import box_of, copies_in_bulk, stores_in_bulk
from .scaled_mm import CODES, OUT, promoted_rows_hopper

COLUMNS = 256


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether factors are FP8 codes whose inner dimension is contiguous, the result has 16 bits, and nothing is empty."""
    if not target.hopper_gluon or a.out_dtype not in OUT:
        return False
    if a.a.dtype not in CODES or a.b.dtype not in CODES or 0 in a.a.shape or 0 in a.b.shape:
        return False
    return a.b.shape[2] % 8 == 0 and copies_in_bulk(a.a, a.b.transpose(1, 2))


def forward(a, scale_a, b, scale_b, offsets, *, out_dtype, bias=None, act=None) -> Tensor:
    (M, K), N = a.shape, b.shape[2]
    dtype, kind = OUT[out_dtype]
    y = torch.empty(M, N, dtype=dtype, device=a.device)
    tiles = tile_list(offsets, M)
    PROGRAMS = min(Target.at(a.device).sms, tiles.shape[0] * cdiv(N, COLUMNS))
    A, B = box_of(a, [ROWS, 128], CODES[a.dtype]), box_of(b.transpose(1, 2), [1, 128, 128], CODES[b.dtype])
    C = box_of(y, [64, 128], kind) if stores_in_bulk(y) else None  # a caller's memory may begin anywhere
    BLOCKS = scale_a.shape[0] == cdiv(K, 128) and scale_b.shape[1] == cdiv(N, 128)
    promoted_rows_hopper(
        A, B, C, y, NOWHERE, scale_a, scale_b, Added(None if bias is None else bias.contiguous(), Matrix(), None), tiles, M,
        tiles.shape[0], N, cdiv(K, 128), scale_a.stride(1), scale_a.stride(0), *scale_b.stride(), N, 0, PROGRAMS,
        ACT=act, FORMAT=None, BLOCKS=BLOCKS, BAND=BAND, STAGES=4, WARPGROUPS=2,
    )  # fmt: skip
    return y
