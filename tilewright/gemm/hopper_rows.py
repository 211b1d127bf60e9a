"""FP8 products whose sums leave the tensor cores every 128 elements, on Hopper, in Gluon: dense (`hopper_dense.py`), and
`grouped_mm_rows_fp8`. A warp copies, warpgroups multiply, one program to an SM goes from tile to tile.

| warpgroups | tile    | of which each has |
|------------|---------|-------------------|
| 2          | 128x256 | 128 columns       |
| 3          | 192x128 | 64 rows           |

So one scale of a 128x128 block serves all columns of a warpgroup. 128x128 sums are two accumulators of 64 rows, both fed from one
temporary, for a second would spill.
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
from ..device.activation import activate
from ..device.turns import PART, advance, await_turn, codes_at, give_turn, store_part
from .tiles import BAND, ROWS, tile_entry, tile_list, tile_of

COLUMNS = 256
OUT = {"bfloat16": (torch.bfloat16, gl.bfloat16), "float16": (torch.float16, gl.float16)}
CODES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


@gluon.jit
def rows_of(TILES, tile, M, HEIGHT: gl.constexpr):
    """(group, first row, rows from there) of a tile; there is one group where there is no list of tiles."""
    if TILES is None:
        return tile * 0, tile * HEIGHT, M - tile * HEIGHT
    else:
        return tile_entry(TILES, tile)


@gluon.jit
def copy_operands(A, B, ring, work, BAND: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):
    a_ring, b_ring, full, empty = ring
    TILES, M, count, across, KB, PROGRAMS = work
    DOWN: gl.constexpr = 1 if WARPGROUPS == 2 else 3  # boxes of A in a tile
    ACROSS: gl.constexpr = 2 if WARPGROUPS == 2 else 1  # boxes of B
    HEIGHT: gl.constexpr = a_ring.shape[1]
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    for t in range(gl.program_id(0), count * across, PROGRAMS):
        tile, column = tile_of(t, count, across, BAND)
        group, row0, rows = rows_of(TILES, tile, M, DOWN * HEIGHT)
        if rows > 0:
            for k in range(KB):
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(ready, (DOWN * HEIGHT + ACROSS * 128) * 128)
                for i in gl.static_range(DOWN):
                    box = a_ring.index(DOWN * stage + i)
                    tma.async_copy_global_to_shared(A, [row0 + i * HEIGHT, k * 128], ready, box)
                for i in gl.static_range(ACROSS):
                    box = b_ring.index(ACROSS * stage + i)
                    tma.async_copy_global_to_shared(B, [group, (column * ACROSS + i) * 128, k * 128], ready, box)
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def scale_sums(acc, scales, BIAS, group, row0, rows, col0, N, BLOCKS: gl.constexpr):
    """acc * scales + bias of 64 rows and 128 columns; scales of blocks are in the sums already."""
    SA, SB, stride_sam, stride_sak, stride_se, stride_sbn, stride_sbk = scales
    col = col0 + gl.arange(0, 128, gl.SliceLayout(0, PART))
    if not BLOCKS:
        r = gl.arange(0, 64, gl.SliceLayout(1, PART))
        sa = gl.load(SA + (row0 + r).to(gl.int64) * stride_sam, r < rows, 0.0)
        sb = gl.load(SB + group.to(gl.int64) * stride_se + col.to(gl.int64) * stride_sbn, col < N, 0.0)
        acc = acc * gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0)
    if BIAS is not None:
        bias = gl.load(BIAS + group.to(gl.int64) * N + col, col < N, 0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 0)
    return acc


@gluon.jit
def store_masked(acc, Y, stride_ym, row, col, inside):
    at = Y + gl.expand_dims(row.to(gl.int64) * stride_ym, 1) + gl.expand_dims(col, 0)
    gl.store(at, acc.to(Y.dtype.element_ty), inside)


@gluon.jit
def store_rows(
    acc, result, ADD, stride_cm, beta, row0, rows, col0, N, CLIPS: gl.constexpr, ACT: gl.constexpr, W: gl.constexpr
):
    """act(acc + beta * c) of 64 rows: by a bulk copy, which CLIPS where the matrix ends; or one by one where no bulk copy can
    be, or a group ends."""
    C, c_box, Y, stride_ym = result
    r = gl.arange(0, 64, gl.SliceLayout(1, PART))
    col = col0 + gl.arange(0, 128, gl.SliceLayout(0, PART))
    row = row0 + r
    inside = gl.expand_dims(r < rows, 1) & gl.expand_dims(col < N, 0)
    if ADD is not None:
        gl.thread_barrier()  # else loads are moved up to where their registers are not free yet
        at = ADD + gl.expand_dims(row.to(gl.int64) * stride_cm, 1) + gl.expand_dims(col, 0)
        acc += gl.load(at, inside, 0.0).to(gl.float32) * beta
    if ACT is not None:
        acc = activate(acc, 1.0, ACT)
    if C is None:
        store_masked(acc, Y, stride_ym, row, col, inside)
    elif CLIPS or rows >= 64:
        store_part(acc, c_box.index(W), C, [row0, col0])
    elif rows > 0:
        store_masked(acc, Y, stride_ym, row, col, inside)


@gluon.jit
def multiply_tiles(
    result, scales, after, N, ring, work, ACT: gl.constexpr, BLOCKS: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W. Scales are loaded a step ahead, while the tensor cores work."""
    a_ring, b_ring, full, empty = ring
    TILES, M, count, across, KB, PROGRAMS = work
    SA, SB, stride_sam, stride_sak, stride_se, stride_sbn, stride_sbk = scales
    BIAS, ADD, stride_cm, beta = after
    WIDE: gl.constexpr = WARPGROUPS == 2
    CLIPS: gl.constexpr = TILES is None
    stage = 0
    phase = 0
    if W == WARPGROUPS - 1:
        give_turn(W, WARPGROUPS)
    lane = gl.arange(0, 64, gl.SliceLayout(1, PART))
    for t in range(gl.program_id(0), count * across, PROGRAMS):
        tile, column = tile_of(t, count, across, BAND)
        group, row0, rows = rows_of(TILES, tile, M, 128 if WIDE else 192)
        if rows > 0:
            col0 = column * 256 + W * 128 if WIDE else column * 128
            if not WIDE:
                row0 += W * 64
                rows -= W * 64
            # A part of the tile may lie past the last row or column: it may be scaled by anything, for it is not stored
            block = gl.minimum(col0, N - 1) // 128
            sap0 = SA + (row0 + gl.minimum(lane, rows - 1)).to(gl.int64) * stride_sam
            sap1 = SA + (row0 + gl.minimum(lane + 64, rows - 1)).to(gl.int64) * stride_sam
            sbp = SB + group.to(gl.int64) * stride_se + block.to(gl.int64) * stride_sbn
            if BLOCKS:
                sb = gl.load(sbp)
                upper = gl.load(sap0)
                lower = gl.load(sap1) if WIDE else upper
            part = gl.zeros([64, 128], gl.float32, PART)
            sum0 = gl.zeros([64, 128], gl.float32, PART)
            sum1 = gl.zeros([64, 128], gl.float32, PART)
            for k in range(KB):
                if BLOCKS:
                    scale0 = gl.expand_dims(upper * sb, 1)
                    scale1 = gl.expand_dims(lower * sb, 1)
                mbarrier.wait(full.index(stage), phase)
                a = a_ring.index(stage if WIDE else 3 * stage + W)
                b = codes_at(b_ring, 2 * stage + W if WIDE else stage).permute((1, 0))
                await_turn(W)
                part = warpgroup_mma(a.slice(0, 64, 0), b, part, use_acc=False, is_async=True)
                give_turn(W, WARPGROUPS)
                if BLOCKS:
                    more = k + 1 < KB
                    sap0 += stride_sak
                    sap1 += stride_sak
                    sbp += stride_sbk
                    sb = gl.load(sbp, more, 0.0)
                    upper = gl.load(sap0, more, 0.0)
                    lower = gl.load(sap1, more, 0.0) if WIDE else upper
                part = warpgroup_mma_wait(0, deps=(part,))
                if not WIDE:
                    mbarrier.arrive(empty.index(stage), count=1)
                sum0 += part * scale0 if BLOCKS else part
                if WIDE:
                    # Keeps these additions before the next product, which takes the temporary's registers: else they spill
                    sum0 = warpgroup_mma_wait(0, deps=(sum0,))
                    await_turn(W)
                    part = warpgroup_mma(a.slice(64, 64, 0), b, part, use_acc=False, is_async=True)
                    give_turn(W, WARPGROUPS)
                    part = warpgroup_mma_wait(0, deps=(part,))
                    mbarrier.arrive(empty.index(stage), count=1)
                    sum1 += part * scale1 if BLOCKS else part
                stage, phase = advance(stage, phase, STAGES)
            # Both halves before either is stored: what is loaded for the columns then leaves the registers
            sum0 = scale_sums(sum0, scales, BIAS, group, row0, rows, col0, N, BLOCKS)
            if WIDE:
                sum1 = scale_sums(sum1, scales, BIAS, group, row0 + 64, rows - 64, col0, N, BLOCKS)
            store_rows(sum0, result, ADD, stride_cm, beta, row0, rows, col0, N, CLIPS, ACT, W)
            if WIDE:
                store_rows(sum1, result, ADD, stride_cm, beta, row0 + 64, rows - 64, col0, N, CLIPS, ACT, W)
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit,
    tokens=("M", "count", "KB", "stride_sam", "stride_sak", "stride_se", "stride_sbn", "stride_sbk", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168 if a.WARPGROUPS == 2 else 128},
)  # fmt: skip
def promoted_rows_hopper(
    A, B, C, Y, SA, SB, BIAS, ADD, TILES, M, count, N, KB, stride_sam, stride_sak, stride_se, stride_sbn, stride_sbk,
    stride_ym, stride_cm, beta, PROGRAMS, ACT: gl.constexpr, BLOCKS: gl.constexpr,
    BAND: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    DOWN: gl.constexpr = 1 if WARPGROUPS == 2 else 3
    ACROSS: gl.constexpr = 2 if WARPGROUPS == 2 else 1
    a_ring = gl.allocate_shared_memory(A.dtype, [DOWN * STAGES, 128 if WARPGROUPS == 2 else 64, 128], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [ACROSS * STAGES, 1, 128, 128], B.layout)
    result = (C, C, Y, stride_ym)
    if C is not None:
        c_box = gl.allocate_shared_memory(C.dtype, [WARPGROUPS, 64, 128], C.layout)
        result = (C, c_box, Y, stride_ym)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    ring = (a_ring, b_ring, full, empty)
    work = (TILES, M, count, gl.cdiv(N, 128 * ACROSS), KB, PROGRAMS)
    scales = (SA, SB, stride_sam, stride_sak, stride_se, stride_sbn, stride_sbk)
    after = (BIAS, ADD, stride_cm, beta)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (multiply_tiles, (result, scales, after, N, ring, work, ACT, BLOCKS, BAND, STAGES, 2, 0)),
            (multiply_tiles, (result, scales, after, N, ring, work, ACT, BLOCKS, BAND, STAGES, 2, 1)),
            (copy_operands, (A, B, ring, work, BAND, STAGES, 2)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply_tiles, (result, scales, after, N, ring, work, ACT, BLOCKS, BAND, STAGES, 3, 0)),
            (multiply_tiles, (result, scales, after, N, ring, work, ACT, BLOCKS, BAND, STAGES, 3, 1)),
            (multiply_tiles, (result, scales, after, N, ring, work, ACT, BLOCKS, BAND, STAGES, 3, 2)),
            (copy_operands, (A, B, ring, work, BAND, STAGES, 3)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def copies_in_bulk(*tensors: Tensor) -> bool:
    """Whether bulk copies take these: rows and matrices begin at multiples of 16 bytes, and columns lie side by side."""
    for t in tensors:
        strides = [s for s, size in zip(t.stride()[:-1], t.shape) if size > 1]
        if t.data_ptr() % 16 or t.stride(-1) != 1 or any(s == 0 or s * t.element_size() % 16 for s in strides):
            return False
    return True


def stores_in_bulk(t: Tensor) -> bool:
    """Whether bulk copies may write a result: not where its rows are no multiples of 16 bytes. A result of one bf16 number was
    seen to change what lay beside it (H200, November 2026); why was not looked into."""
    return copies_in_bulk(t) and t.shape[-1] * t.element_size() % 16 == 0


def box_of(t: Tensor, block: list[int], dtype) -> TensorDescriptor:
    # Of a dimension of one element any stride will do, but a descriptor wants a multiple of 16 bytes
    fine = [size > 1 or (s > 0 and s % 16 == 0) for s, size in zip(t.stride(), t.shape)]
    strides = [s if is_fine else 16 * cdiv(t.shape[-1], 16) for s, is_fine in zip(t.stride()[:-1], fine)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def fits(target: Target, a: SimpleNamespace) -> bool:
    """FP8 codes whose inner dimension is contiguous, results in 16 bits, and work for tensor cores."""
    if not (target.arch == "sm_90" and target.tma and target.gluon) or a.out_dtype not in OUT:
        return False
    if a.a.dtype not in CODES or a.b.dtype not in CODES or 0 in a.a.shape or 0 in a.b.shape:
        return False
    return a.b.shape[2] % 8 == 0 and copies_in_bulk(a.a, a.b.transpose(1, 2))


def forward(a, scale_a, b, scale_b, offsets, *, out_dtype, bias=None, act=None) -> Tensor:
    (M, K), N = a.shape, b.shape[2]
    dtype, out = OUT[out_dtype]
    y = torch.empty(M, N, dtype=dtype, device=a.device)
    tiles = tile_list(offsets, M)
    PROGRAMS = min(Target.at(a.device).sms, tiles.shape[0] * cdiv(N, COLUMNS))
    A, B = box_of(a, [ROWS, 128], CODES[a.dtype]), box_of(b.transpose(1, 2), [1, 128, 128], CODES[b.dtype])
    BLOCKS = scale_a.shape[0] == cdiv(K, 128) and scale_b.shape[1] == cdiv(N, 128)
    promoted_rows_hopper(
        A, B, box_of(y, [64, 128], out), y, scale_a, scale_b, None if bias is None else bias.contiguous(), None, tiles, M,
        tiles.shape[0], N, cdiv(K, 128), scale_a.stride(1), scale_a.stride(0), *scale_b.stride(), N, 0, 0.0, PROGRAMS,
        ACT=act, BLOCKS=BLOCKS, BAND=BAND, STAGES=4, WARPGROUPS=2,
    )  # fmt: skip
    return y
