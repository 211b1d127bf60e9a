"""FP8 products whose sums leave the tensor cores every 128 elements, on Hopper, in Gluon: `scaled_mm` with full
accumulation (1x128 by 128x128 blocks, and scales of rows or whole tensors), and the kernel of `grouped_mm_rows_fp8`. A warp copies,
warpgroups multiply, one program to an SM goes from tile to tile. Which of two tiles is faster depends on how many are left for the
last round: see `tile_for`.

| warpgroups | tile    | of which each has |
|------------|---------|-------------------|
| 2          | 128x256 | 128 columns       |
| 3          | 192x128 | 64 rows           |

So one scale of a 128x128 block serves all columns of a warpgroup. 128x128 sums are two accumulators of 64 rows, both fed from one
temporary, for a second would spill.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import async_load, barrier, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from ...device.activation import activate
from ...device.matrices import Added
from ...device.warpgroups import PART, advance, await_turn, codes_at, give_turn, store_in_format, store_part
from ...runtime.kernel import kernel
from ..destination import destination
from ..operands import DTYPES, ONCE
from ..tiles import BAND, matrix, tile_entry, tile_of
from .boxes import box_of, copies_in_bulk, stores_in_bulk

OUT = {"bfloat16": (torch.bfloat16, gl.bfloat16), "float16": (torch.float16, gl.float16)}
CODES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
BLOCKWISE = ("BlockWise1x128", "BlockWise128x128")
BULK = {**dict(OUT.values()), **CODES, torch.int8: gl.int8, torch.uint8: gl.uint8}  # results of at most 16 bits
COLUMNS = 128  # of a warpgroup
STORED = range(
    32, COLUMNS + 1
)  # blocks whose codes it stores itself: scales of smaller ones would spill beside the sums


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
                    async_load(A, [row0 + i * HEIGHT, k * 128], ready, box)
                for i in gl.static_range(ACROSS):
                    box = b_ring.index(ACROSS * stage + i)
                    async_load(B, [group, (column * ACROSS + i) * 128, k * 128], ready, box)
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
    acc, result, added, row0, rows, col0, N, CLIPS: gl.constexpr, ACT: gl.constexpr, FORMAT: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """act(acc + beta * c) of 64 rows, with FORMAT as codes: by a bulk copy, which CLIPS where the matrix ends; or one by one where
    no bulk copy can be, or a group ends."""
    C, c_box, Y, stride_ym, ROW, stride_s = result
    r = gl.arange(0, 64, gl.SliceLayout(1, PART))
    col = col0 + gl.arange(0, 128, gl.SliceLayout(0, PART))
    row = row0 + r
    inside = gl.expand_dims(r < rows, 1) & gl.expand_dims(col < N, 0)
    if added.c.data is not None:
        barrier()  # else loads are moved up to where their registers are not free yet
        at = added.c.data + gl.expand_dims(row.to(gl.int64) * added.c.stride_r, 1) + gl.expand_dims(col, 0)
        acc += gl.load(at, inside, 0.0).to(gl.float32) * added.beta
    if ACT is not None:
        acc = activate(acc, 1.0, ACT)
    if FORMAT is not None:
        if col0 + 128 > N:
            acc = gl.where(gl.expand_dims(col < N, 0), acc, 0.0)  # not every activation of 0 is 0
        store_in_format(acc, ROW, c_box if C is None else c_box.index(W), C, row0, rows, col0, N, stride_s, FORMAT)
    elif C is None:
        store_masked(acc, Y, stride_ym, row, col, inside)
    elif CLIPS or rows >= 64:
        store_part(acc, c_box.index(W), C, [row0, col0])
    elif rows > 0:
        store_masked(acc, Y, stride_ym, row, col, inside)


@gluon.jit
def multiply_tiles(
    result, scales, added, N, ring, work, ACT: gl.constexpr, FORMAT: gl.constexpr, BLOCKS: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W. Scales are loaded a step ahead, while the tensor cores work."""
    a_ring, b_ring, full, empty = ring
    TILES, M, count, across, KB, PROGRAMS = work
    SA, SB, stride_sam, stride_sak, stride_se, stride_sbn, stride_sbk = scales
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
            sum0 = scale_sums(sum0, scales, added.bias, group, row0, rows, col0, N, BLOCKS)
            if WIDE:
                sum1 = scale_sums(sum1, scales, added.bias, group, row0 + 64, rows - 64, col0, N, BLOCKS)
            store_rows(sum0, result, added, row0, rows, col0, N, CLIPS, ACT, FORMAT, W)
            if WIDE:
                store_rows(sum1, result, added, row0 + 64, rows - 64, col0, N, CLIPS, ACT, FORMAT, W)
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit,
    tokens=("M", "count", "KB", "stride_sam", "stride_sak", "stride_se", "stride_sbn", "stride_sbk", "stride_s", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168 if a.WARPGROUPS == 2 else 128},
)  # fmt: skip
def promoted_rows_hopper(
    A, B, C, Y, ROW, SA, SB, ADDED, TILES, M, count, N, KB, stride_sam, stride_sak, stride_se, stride_sbn, stride_sbk, stride_ym,
    stride_s, PROGRAMS, ACT: gl.constexpr, FORMAT: gl.constexpr, BLOCKS: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Tiles of Y or, with FORMAT, of its codes in ROW; C is the box that either goes by, None where no bulk copy can be."""
    DOWN: gl.constexpr = 1 if WARPGROUPS == 2 else 3
    ACROSS: gl.constexpr = 2 if WARPGROUPS == 2 else 1
    a_ring = gl.allocate_shared_memory(A.dtype, [DOWN * STAGES, 128 if WARPGROUPS == 2 else 64, 128], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [ACROSS * STAGES, 1, 128, 128], B.layout)
    result = (C, C, Y, stride_ym, ROW, stride_s)
    if C is not None:
        c_box = gl.allocate_shared_memory(C.dtype, [WARPGROUPS, 64, C.block_shape[1]], C.layout)
        result = (C, c_box, Y, stride_ym, ROW, stride_s)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    ring = (a_ring, b_ring, full, empty)
    work = (TILES, M, count, gl.cdiv(N, 128 * ACROSS), KB, PROGRAMS)
    scales = (SA, SB, stride_sam, stride_sak, stride_se, stride_sbn, stride_sbk)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (multiply_tiles, (result, scales, ADDED, N, ring, work, ACT, FORMAT, BLOCKS, BAND, STAGES, 2, 0)),
            (multiply_tiles, (result, scales, ADDED, N, ring, work, ACT, FORMAT, BLOCKS, BAND, STAGES, 2, 1)),
            (copy_operands, (A, B, ring, work, BAND, STAGES, 2)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply_tiles, (result, scales, ADDED, N, ring, work, ACT, FORMAT, BLOCKS, BAND, STAGES, 3, 0)),
            (multiply_tiles, (result, scales, ADDED, N, ring, work, ACT, FORMAT, BLOCKS, BAND, STAGES, 3, 1)),
            (multiply_tiles, (result, scales, ADDED, N, ring, work, ACT, FORMAT, BLOCKS, BAND, STAGES, 3, 2)),
            (copy_operands, (A, B, ring, work, BAND, STAGES, 3)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


class Tile(NamedTuple):
    """Rows and columns that a program multiplies at a time, by how many warpgroups, and how well these fill the tensor cores."""

    rows: int
    columns: int
    warpgroups: int
    rate: float


# Rates relative to each other where the number of tiles does not matter: 4096x24576x1536 on an H200, November 2026
TILES = (Tile(128, 256, 2, 1.0), Tile(192, 128, 3, 0.95))


def tile_for(M: int, N: int, sms: int) -> Tile:
    """The tile that takes least time for M by N results: programs go over their tiles in rounds, of which the last may be
    nearly empty."""

    def time(tile: Tile) -> float:
        rounds = cdiv(cdiv(M, tile.rows) * cdiv(N, tile.columns), sms)
        return rounds * tile.rows * tile.columns / tile.rate

    return min(TILES, key=time)


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether both factors are FP8 codes, not empty, whose inner dimension is contiguous in rows that begin at multiples of 16
    bytes."""
    if not target.hopper_gluon:
        return False
    once = a.recipe_a in ONCE and a.recipe_b in ONCE and a.accumulate == "full"
    if a.a.dtype not in CODES or a.b.dtype not in CODES or not (once or (a.recipe_a, a.recipe_b) == BLOCKWISE):
        return False
    if any(isinstance(t, Tensor) and t.stride(1) != 1 for t in (a.c, a.out if a.out_format is None else None)):
        return False
    sizes = (*a.a.shape, a.b.shape[1])
    return min(sizes) > 0 and max(sizes) < 2**31 - 256 and copies_in_bulk(a.a, a.b.t())


def forward(
    a, b, scale_a, scale_b, recipe_a, recipe_b, *, bias, act, c, beta, out_dtype, out_format, out, tile: Tile | None = None, **_
) -> Tensor:  # fmt: skip
    """The product. `tile` is an argument for comparisons; without it the better one is taken."""
    (M, K), N, sms = a.shape, b.shape[1], Target.at(a.device).sms
    tile = tile or tile_for(M, N, sms)
    to = destination(out, out_format, (M, N), DTYPES[out_dtype], a.device, STORED)
    add = None if beta == 0.0 else c
    # A bulk copy wants rows of the result at multiples of 16 bytes. fp32 goes straight from registers: a warp writes whole sectors,
    # and what it would be staged in is a quarter of the operands' ring
    y = to.y if to.FORMAT is None else to.row.codes
    C = box_of(y, [64, COLUMNS * y.shape[1] // N], BULK[y.dtype]) if y.dtype in BULK and stores_in_bulk(y) else None
    strides_a, strides_b = ((s.stride(0) * (s.shape[0] > 1), s.stride(1)) for s in (scale_a, scale_b))
    down = cdiv(M, tile.rows)
    promoted_rows_hopper(
        box_of(a, [128 if tile.warpgroups == 2 else 64, 128], CODES[a.dtype]),
        box_of(b.t().unsqueeze(0), [1, 128, 128], CODES[b.dtype]),
        C, to.y, to.row, scale_a, scale_b, Added(None if bias is None else bias.contiguous(), matrix(add), float(beta)), None, M,
        down, N, cdiv(K, 128), *strides_a, 0, *strides_b, y.stride(0), to.stride_s, min(sms, down * cdiv(N, tile.columns)),
        ACT=act, FORMAT=to.FORMAT, BLOCKS=recipe_a == BLOCKWISE[0], BAND=BAND, STAGES=4, WARPGROUPS=tile.warpgroups,
    )  # fmt: skip
    return to.result()
