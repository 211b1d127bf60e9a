"""`grouped_mm_inner_fp8` on Hopper, in Gluon: a warp that copies, two warpgroups that multiply, one program to an SM.

A tile is 256 rows by 128 columns, of which each warpgroup has 128 rows. Columns have scales of their own: a warpgroup keeps
those of a step in shared memory, from which they come back spread over its accumulator as they are needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..core.debug import check_ends
from ..core.kernel import kernel
from ..core.target import Target
from ..core.tensor import cdiv
from ..device.turns import PART, advance, await_turn, give_turn, store_part
from .hopper_rows import box_of, copies_in_bulk
from .tiles import BAND, group_range, tile_of

OUT = {
    "float32": (torch.float32, gl.float32), "bfloat16": (torch.bfloat16, gl.bfloat16), "float16": (torch.float16, gl.float16),
}  # fmt: skip
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def copy_operands(
    A, B, OFFSETS, a_ring, b_ring, full, empty, down, across, T, E, PROGRAMS, BAND: gl.constexpr, STAGES: gl.constexpr
):
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), down * across * E, PROGRAMS):
        start, end = group_range(t // (down * across), OFFSETS, T, 128)
        row, column = tile_of(t % (down * across), down, across, BAND)
        for k in range(start, end, 128):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, 3 * 128 * 128)
            tma.async_copy_global_to_shared(A, [row * 256, k], ready, a_ring.index(2 * stage))
            tma.async_copy_global_to_shared(A, [row * 256 + 128, k], ready, a_ring.index(2 * stage + 1))
            tma.async_copy_global_to_shared(B, [column * 128, k], ready, b_ring.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def multiply_tiles(
    C, SA, SB, OFFSETS, a_ring, b_ring, c_box, line_box, full, empty, down, across, T, M, N, E, stride_sa, stride_sb, PROGRAMS,
    BAND: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W."""
    stage = 0
    phase = 0
    part = gl.zeros([64, 128], gl.float32, PART)
    box = c_box.index(W)
    line = line_box.index(W)
    if W == 1:
        give_turn(W)
    lane = gl.arange(0, 64, gl.SliceLayout(1, PART))
    place = gl.arange(0, 128, LINE)
    for t in range(gl.program_id(0), down * across * E, PROGRAMS):
        e = t // (down * across)
        start, end = group_range(e, OFFSETS, T, 128)
        tile, column = tile_of(t % (down * across), down, across, BAND)
        row0 = tile * 256 + W * 128
        col0 = column * 128
        sap = SA + (start // 128).to(gl.int64) * stride_sa + row0 + lane
        sbp = SB + (start // 128).to(gl.int64) * stride_sb + col0 + place
        more = start < end
        columns = gl.load(sbp, (col0 + place < N) & more, 0.0)
        upper = gl.load(sap, (row0 + lane < M) & more, 0.0)
        lower = gl.load(sap + 64, (row0 + 64 + lane < M) & more, 0.0)
        sum0 = gl.zeros([64, 128], gl.float32, PART)
        sum1 = gl.zeros([64, 128], gl.float32, PART)
        for k in range(start, end, 128):
            scale0 = upper
            scale1 = lower
            mbarrier.wait(full.index(stage), phase)
            a = a_ring.index(2 * stage + W)
            b = b_ring.index(stage).permute((1, 0))
            await_turn(W)
            part = warpgroup_mma(a.slice(0, 64, 0), b, part, use_acc=False, is_async=True)
            give_turn(W)
            line.store(columns)
            more = k + 128 < end
            sap += stride_sa
            sbp += stride_sb
            columns = gl.load(sbp, (col0 + place < N) & more, 0.0)
            upper = gl.load(sap, (row0 + lane < M) & more, 0.0)
            lower = gl.load(sap + 64, (row0 + 64 + lane < M) & more, 0.0)
            part = warpgroup_mma_wait(0, deps=(part,))
            sb = line.load(gl.SliceLayout(0, PART))
            sum0 += (part * gl.expand_dims(scale0, 1)) * gl.expand_dims(sb, 0)
            # Keeps these additions before the next product, which takes the temporary's registers: after it they would spill
            sum0 = warpgroup_mma_wait(0, deps=(sum0,))
            await_turn(W)
            part = warpgroup_mma(a.slice(64, 64, 0), b, part, use_acc=False, is_async=True)
            give_turn(W)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage), count=1)
            sb = line.load(gl.SliceLayout(0, PART))
            sum1 += (part * gl.expand_dims(scale1, 1)) * gl.expand_dims(sb, 0)
            stage, phase = advance(stage, phase, STAGES)
        store_part(sum0, box, C, [e, row0, col0])
        store_part(sum1, box, C, [e, row0 + 64, col0])
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("T", "E", "stride_sa", "stride_sb", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def grouped_inner_hopper(
    A, B, C, SA, SB, OFFSETS, T, M, N, E, stride_sa, stride_sb, PROGRAMS, BAND: gl.constexpr, STAGES: gl.constexpr
):
    a_ring = gl.allocate_shared_memory(A.dtype, [2 * STAGES, 128, 128], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [STAGES, 128, 128], B.layout)
    c_box = gl.allocate_shared_memory(C.dtype, [2, 1, 64, 128], C.layout)
    line_box = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    down = gl.cdiv(M, 256)
    across = gl.cdiv(N, 128)
    gl.warp_specialize([
        (multiply_tiles, (C, SA, SB, OFFSETS, a_ring, b_ring, c_box, line_box, full, empty, down, across, T, M, N, E, stride_sa,
                          stride_sb, PROGRAMS, BAND, STAGES, 0)),
        (multiply_tiles, (C, SA, SB, OFFSETS, a_ring, b_ring, c_box, line_box, full, empty, down, across, T, M, N, E, stride_sa,
                          stride_sb, PROGRAMS, BAND, STAGES, 1)),
        (copy_operands, (A, B, OFFSETS, a_ring, b_ring, full, empty, down, across, T, E, PROGRAMS, BAND, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


def fits(target: Target, a: SimpleNamespace) -> bool:
    """e4m3 codes whose tokens are contiguous, and results whose rows begin at multiples of 16 bytes."""
    if not (target.arch == "sm_90" and target.tma and target.gluon) or 0 in a.a.shape or 0 in a.b.shape:
        return False
    if a.a.dtype != torch.float8_e4m3fn or a.b.dtype != torch.float8_e4m3fn:
        return False
    scales = all(s.stride(1) == 1 or s.shape[1] == 1 for s in (a.scale_a, a.scale_b))
    return scales and a.b.shape[1] % (4 if a.out_dtype == "float32" else 8) == 0 and copies_in_bulk(a.a, a.b.t())


def forward(a, scale_a, b, scale_b, offsets, *, out_dtype) -> Tensor:
    (M, T), N, E = a.shape, b.shape[1], offsets.shape[0]
    check_ends("grouped_mm_inner_fp8", "offsets", offsets, T)
    dtype, out = OUT[out_dtype]
    y = torch.empty(E, M, N, dtype=dtype, device=a.device)
    PROGRAMS = min(Target.at(a.device).sms, E * cdiv(M, 256) * cdiv(N, 128))
    grouped_inner_hopper(
        box_of(a, [128, 128], gl.float8e4nv), box_of(b.t(), [128, 128], gl.float8e4nv), box_of(y, [1, 64, 128], out),
        scale_a, scale_b, offsets.contiguous(), T, M, N, E, scale_a.stride(0), scale_b.stride(0), PROGRAMS, BAND=BAND,
        STAGES=3 if out_dtype == "float32" else 4,
    )  # fmt: skip
    return y
