"""`grouped_mm_rows_fp8` on Hopper, in Gluon: a warp that copies, two warpgroups that multiply, one program to an SM.

A tile is 128 rows by 256 columns, of which each warpgroup has 128, so that one 128x128 scale serves all its columns. A
warpgroup's 128x128 sums are two accumulators of 64 rows; both are fed from one temporary, for a second would spill.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.kernel import kernel
from ..core.target import Target
from ..core.tensor import cdiv
from ..device.turns import PART, advance, await_turn, codes_at, give_turn, store_part
from .tiles import BAND, ROWS, tile_list, tile_of

COLUMNS = 256
OUT = {"bfloat16": (torch.bfloat16, gl.bfloat16), "float16": (torch.float16, gl.float16)}


@gluon.jit
def copy_operands(
    A, B, TILES, a_ring, b_ring, full, empty, count, across, KB, PROGRAMS, BAND: gl.constexpr, STAGES: gl.constexpr
):
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    for t in range(gl.program_id(0), count * across, PROGRAMS):
        tile, column = tile_of(t, count, across, BAND)
        group = gl.load(TILES + 4 * tile)
        row0 = gl.load(TILES + 4 * tile + 1)
        rows = gl.load(TILES + 4 * tile + 2)
        if rows > 0:
            for k in range(KB):
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(ready, 3 * 128 * 128)
                tma.async_copy_global_to_shared(A, [row0, k * 128], ready, a_ring.index(stage))
                tma.async_copy_global_to_shared(B, [group, column * 256, k * 128], ready, b_ring.index(2 * stage))
                tma.async_copy_global_to_shared(
                    B, [group, column * 256 + 128, k * 128], ready, b_ring.index(2 * stage + 1)
                )
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def store_rows(acc, box, C, Y, row0, rows, col0, N, AT: gl.constexpr):
    """64 rows from row AT of a tile: by a bulk copy, or one by one where the group ends within them."""
    if rows >= AT + 64:
        store_part(acc, box, C, [row0 + AT, col0])
    elif rows > AT:
        r = AT + gl.arange(0, 64, gl.SliceLayout(1, PART))
        c = col0 + gl.arange(0, 128, gl.SliceLayout(0, PART))
        at = Y + gl.expand_dims((row0 + r).to(gl.int64) * N, 1) + gl.expand_dims(c, 0)
        gl.store(at, acc.to(Y.dtype.element_ty), gl.expand_dims(r < rows, 1) & gl.expand_dims(c < N, 0))


@gluon.jit
def multiply_tiles(
    C, Y, SA, SB, TILES, a_ring, b_ring, c_box, full, empty, count, across, N, KB, stride_sa, stride_se, stride_sn, stride_sk,
    PROGRAMS, BAND: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W. Scales are loaded a step ahead, while the tensor cores work."""
    stage = 0
    phase = 0
    part = gl.zeros([64, 128], gl.float32, PART)
    box = c_box.index(W)
    if W == 1:
        give_turn(W)
    lane = gl.arange(0, 64, gl.SliceLayout(1, PART))
    for t in range(gl.program_id(0), count * across, PROGRAMS):
        tile, column = tile_of(t, count, across, BAND)
        group = gl.load(TILES + 4 * tile)
        row0 = gl.load(TILES + 4 * tile + 1)
        rows = gl.load(TILES + 4 * tile + 2)
        if rows > 0:
            col0 = column * 256 + W * 128
            # Half a tile may lie past the last column; its product is not stored
            block = gl.minimum(col0, N - 1) // 128
            sap = SA + row0 + lane
            sbp = SB + group.to(gl.int64) * stride_se + block * stride_sn
            sb = gl.load(sbp)
            upper = gl.load(sap, lane < rows, 0.0)
            lower = gl.load(sap + 64, lane + 64 < rows, 0.0)
            sum0 = gl.zeros([64, 128], gl.float32, PART)
            sum1 = gl.zeros([64, 128], gl.float32, PART)
            for k in range(KB):
                scale0 = upper * sb
                scale1 = lower * sb
                mbarrier.wait(full.index(stage), phase)
                a = a_ring.index(stage)
                b = codes_at(b_ring, 2 * stage + W).permute((1, 0))
                await_turn(W)
                part = warpgroup_mma(a.slice(0, 64, 0), b, part, use_acc=False, is_async=True)
                give_turn(W)
                more = k + 1 < KB
                sap += stride_sa
                sbp += stride_sk
                sb = gl.load(sbp, more, 0.0)
                upper = gl.load(sap, (lane < rows) & more, 0.0)
                lower = gl.load(sap + 64, (lane + 64 < rows) & more, 0.0)
                part = warpgroup_mma_wait(0, deps=(part,))
                sum0 += part * gl.expand_dims(scale0, 1)
                # Keeps these additions before the next product, which takes the temporary's registers: after it they would spill
                sum0 = warpgroup_mma_wait(0, deps=(sum0,))
                await_turn(W)
                part = warpgroup_mma(a.slice(64, 64, 0), b, part, use_acc=False, is_async=True)
                give_turn(W)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                sum1 += part * gl.expand_dims(scale1, 1)
                stage, phase = advance(stage, phase, STAGES)
            store_rows(sum0, box, C, Y, row0, rows, col0, N, 0)
            store_rows(sum1, box, C, Y, row0, rows, col0, N, 64)
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("count", "KB", "stride_sa", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def grouped_rows_hopper(
    A, B, C, Y, SA, SB, TILES, count, N, KB, stride_sa, stride_se, stride_sn, stride_sk, PROGRAMS, BAND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(A.dtype, [STAGES, 128, 128], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [2 * STAGES, 1, 128, 128], B.layout)
    c_box = gl.allocate_shared_memory(C.dtype, [2, 64, 128], C.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    across = gl.cdiv(N, 256)
    gl.warp_specialize([
        (multiply_tiles, (C, Y, SA, SB, TILES, a_ring, b_ring, c_box, full, empty, count, across, N, KB, stride_sa, stride_se,
                          stride_sn, stride_sk, PROGRAMS, BAND, STAGES, 0)),
        (multiply_tiles, (C, Y, SA, SB, TILES, a_ring, b_ring, c_box, full, empty, count, across, N, KB, stride_sa, stride_se,
                          stride_sn, stride_sk, PROGRAMS, BAND, STAGES, 1)),
        (copy_operands, (A, B, TILES, a_ring, b_ring, full, empty, count, across, KB, PROGRAMS, BAND, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


def copies_in_bulk(*tensors: Tensor) -> bool:
    """Whether bulk copies take these: rows and matrices begin at multiples of 16 bytes, and columns lie side by side."""
    for t in tensors:
        strides = [s * t.element_size() % 16 for s, size in zip(t.stride()[:-1], t.shape) if size > 1]
        if t.data_ptr() % 16 or t.stride(-1) != 1 or any(strides):
            return False
    return True


def box_of(t: Tensor, block: list[int], dtype) -> TensorDescriptor:
    # Of a dimension of one element any stride will do, but a descriptor wants a multiple of 16 bytes
    strides = [s if size > 1 else 16 * cdiv(t.shape[-1], 16) for s, size in zip(t.stride()[:-1], t.shape)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def fits(target: Target, a: SimpleNamespace) -> bool:
    """e4m3 codes whose inner dimension is contiguous, results in 16 bits, and work for tensor cores."""
    if not (target.arch == "sm_90" and target.tma and target.gluon) or a.out_dtype not in OUT:
        return False
    if a.a.dtype != torch.float8_e4m3fn or a.b.dtype != torch.float8_e4m3fn or 0 in a.a.shape or 0 in a.b.shape:
        return False
    scales = a.scale_a.stride(1) == 1 or a.scale_a.shape[1] == 1
    return scales and a.b.shape[2] % 8 == 0 and copies_in_bulk(a.a, a.b.transpose(1, 2))


def forward(a, scale_a, b, scale_b, offsets, *, out_dtype) -> Tensor:
    (M, K), N = a.shape, b.shape[2]
    dtype, out = OUT[out_dtype]
    y = torch.empty(M, N, dtype=dtype, device=a.device)
    tiles = tile_list(offsets, M)
    PROGRAMS = min(Target.at(a.device).sms, tiles.shape[0] * cdiv(N, COLUMNS))
    A, B = box_of(a, [ROWS, 128], gl.float8e4nv), box_of(b.transpose(1, 2), [1, 128, 128], gl.float8e4nv)
    grouped_rows_hopper(
        A, B, box_of(y, [64, 128], out), y, scale_a, scale_b, tiles, tiles.shape[0], N, cdiv(K, 128), scale_a.stride(0),
        *scale_b.stride(), PROGRAMS, BAND=BAND, STAGES=4,
    )  # fmt: skip
    return y
