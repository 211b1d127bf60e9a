"""`grouped_mm_inner` of bf16 and fp16 on Hopper, in Gluon, built as `grouped_rows.py` is: tiles of 128 rows by 256 columns of
each group's result, summed over its tokens.

Groups begin and end anywhere. Tokens in a group's last step that are the next group's are cleared in shared memory.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...core.debug import check_ends
from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import async_load, barrier, gl, gluon, mbarrier, tma
from ...device.warpgroups import advance
from ...runtime.kernel import kernel
from ..operands import DTYPES
from ..tiles import group_range, tile_of
from .boxes import box_of, copies_in_bulk
from .grouped_rows import (
    COLUMNS,
    KINDS,
    RING,
    STEP,
    SUMS,
    box_of_result,
    make_ring,
    quarter_of,
    store_quarter,
    sum_products,
    takes_factors,
)
from .plain import HALF


@gluon.jit
def copy_tokens(A, B, ring, work, BAND: gl.constexpr, STAGES: gl.constexpr):
    a_ring, b_ring, full, empty = ring
    OFFSETS, T, down, across, E, PROGRAMS = work
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), down * across * E, PROGRAMS):
        start, end = group_range(t // (down * across), OFFSETS, T, 1)
        tile, column = tile_of(t % (down * across), down, across, BAND)
        for k in range(start, end, 64):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, (128 + 256) * 64 * 2)
            for i in gl.static_range(2):
                async_load(A, [k, tile * 128 + i * 64], ready, a_ring.index(2 * stage + i))
            async_load(B, [k, column * 256], ready, b_ring.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def multiply_tokens(
    result, added, M, N, ring, work, BOXES: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr
):
    """Warpgroup W."""
    OFFSETS, T, down, across, E, PROGRAMS = work
    ADD, beta, stride_ce, stride_cm = added
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), down * across * E, PROGRAMS):
        e = t // (down * across)
        start, end = group_range(e, OFFSETS, T, 1)
        tile, column = tile_of(t % (down * across), down, across, BAND)
        row0 = tile * 128 + W * 64
        total = gl.zeros([64, 256], gl.float32, SUMS)
        if start < end:
            total, stage, phase = sum_products(total, ring, stage, phase, start, end, True, False, STAGES, W)
        for i in gl.static_range(4):
            y = quarter_of(total, i)
            col0 = column * 256 + i * 64
            if ADD is not None:
                barrier()  # else loads are moved up to where their registers are not free yet
                r = gl.arange(0, 64, gl.SliceLayout(1, HALF))
                c = gl.arange(0, 64, gl.SliceLayout(0, HALF))
                first = ADD + e.to(gl.int64) * stride_ce + row0.to(gl.int64) * stride_cm + col0
                at = first + gl.expand_dims(r.to(gl.int64) * stride_cm, 1) + gl.expand_dims(c, 0)
                inside = gl.expand_dims(r < M - row0, 1) & gl.expand_dims(c < N - col0, 0)
                y += gl.load(at, inside, 0.0).to(gl.float32) * beta
            store_quarter(y, result, (e, row0, col0), M - row0, N, True, W * BOXES + i % BOXES, BOXES)
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("T", "E", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def grouped_tokens_hopper(
    A, B, C, Y, ADD, beta, OFFSETS, T, M, N, E, stride_ye, stride_ym, stride_ce, stride_cm, PROGRAMS,
    BOXES: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ring = make_ring(A, B, STAGES)
    result = (C, C, Y, stride_ye, stride_ym)
    if C is not None:
        result = (C, gl.allocate_shared_memory(C.dtype, [2 * BOXES, 1, 64, 64], C.layout), Y, stride_ye, stride_ym)
    added = (ADD, beta, stride_ce, stride_cm)
    work = (OFFSETS, T, gl.cdiv(M, 128), gl.cdiv(N, 256), E, PROGRAMS)
    gl.warp_specialize([
        (multiply_tokens, (result, added, M, N, ring, work, BOXES, BAND, STAGES, 0)),
        (multiply_tokens, (result, added, M, N, ring, work, BOXES, BAND, STAGES, 1)),
        (copy_tokens, (A, B, ring, work, BAND, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether both factors lie token by token, each token at a multiple of 16 bytes, and columns of the result side by side."""
    if not takes_factors(target, a, a.b.shape[1]) or not 64 < a.a.shape[0] < 2**31 - 128:
        return False
    there = all(t is None or t.stride(2) == 1 for t in (a.c, a.out))
    return there and copies_in_bulk(a.a.t(), a.b)


def forward(a, b, offsets, *, c=None, beta=0.0, out_dtype=None, out=None) -> Tensor:
    (M, T), N, E, kind = a.shape, b.shape[1], offsets.shape[0], KINDS[a.dtype]
    check_ends("grouped_mm_inner", "offsets", offsets, T)
    y = out
    if y is None:
        y = torch.empty(E, M, N, dtype=a.dtype if out_dtype is None else DTYPES[out_dtype], device=a.device)
    add = None if beta == 0.0 else c
    grouped_tokens_hopper(
        box_of(a.t(), [STEP, 64], kind), box_of(b, [STEP, COLUMNS], kind), box_of_result(y), y, add, beta,
        offsets.contiguous(), T, M, N, E, *y.stride()[:2], *((0, 0) if add is None else add.stride()[:2]),
        min(Target.at(a.device).sms, E * cdiv(M, 128) * cdiv(N, COLUMNS)), **RING,
    )  # fmt: skip
    return y
