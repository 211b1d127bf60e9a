"""`scaled_mm` on Hopper where scales do not change along the inner dimension and sums stay in the tensor cores: INT8, and FP8 with
fast accumulation. In Gluon: a warp that copies, two warpgroups that multiply, one program to an SM.

Both warpgroups have halves of one tile, 128 rows and 128 columns each, which takes the fewest bytes for a product; or each has a
tile of its own, of 192 or 128 rows and 128 columns, and one multiplies while the other stores. `tile_for` says which.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import (
    async_load,
    async_store,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from ...device.activation import activate
from ...device.matrices import Added, Matrix
from ...device.warpgroups import PART, advance, await_turn, give_turn
from ...runtime.kernel import kernel
from ..operands import DTYPES, ONCE
from ..tiles import BAND, tile_of
from .boxes import box_of, copies_in_bulk, stores_in_bulk

CODES = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
HALVES = {"bfloat16": gl.bfloat16, "float16": gl.float16}  # results that go out by bulk copies, 64 columns at a time
LONGEST = 2**17 - 1  # sums of more products of -128 may pass 2**31
HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class Tile(NamedTuple):
    """A tile has, in this order: the rows and columns that are multiplied at a time; whether each warpgroup has its `own` ones; how
    many steps are in shared memory at a time; how many boxes a warpgroup's results leave through; how well tensor cores are fed
    while they multiply, and how long they wait `between` tiles."""

    rows: int
    columns: int
    own: bool
    stages: int
    boxes: int
    rate: float
    between: dict[torch.dtype, int]


# Rates and the time between a program's tiles, in which no tensor core works, counted in sums of 128 products: fitted to the six
# shapes of the bench on an H200, November 2026. FP8 draws more power, and loses more to the burst of stores.
SHARED = Tile(128, 256, False, 4, 2, 1.0, {torch.int8: 72_000, torch.float8_e4m3fn: 130_000})
OWN = Tile(192, 128, True, 5, 1, 0.955, {torch.int8: 60_000, torch.float8_e4m3fn: 60_000})
SMALL = Tile(128, 128, True, 6, 2, 0.92, {torch.int8: 35_000, torch.float8_e4m3fn: 35_000})  # leaves registers for more


def tile_for(M: int, N: int, K: int, sms: int, dtype: torch.dtype) -> Tile:
    """The tile that takes least time: programs go over their tiles in rounds, of which the last may be nearly empty."""
    kind = torch.int8 if dtype == torch.int8 else torch.float8_e4m3fn

    def time(tile: Tile) -> float:
        rounds = cdiv(cdiv(M, tile.rows) * cdiv(N, tile.columns), sms)
        return rounds * (tile.rows * tile.columns * cdiv(K, 128) / tile.rate + tile.between[kind])

    return min(SHARED, OWN, SMALL, key=time)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_operands(
    A, B, ring, down, across, KB, PROGRAMS, CHUNKS: gl.constexpr, OWN: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, full, empty = ring
    ACROSS: gl.constexpr = 1 if OWN else 2
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    for t in range(gl.program_id(0), down * across, PROGRAMS):
        tile, column = tile_of(t, down, across, BAND)
        for k in range(KB):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, (CHUNKS * 64 + ACROSS * 128) * 128)
            for i in gl.static_range(CHUNKS):
                box = a_ring.index(CHUNKS * stage + i)
                async_load(A, [(tile * CHUNKS + i) * 64, k * 128], ready, box)
            for i in gl.static_range(ACROSS):
                box = b_ring.index(ACROSS * stage + i)
                async_load(B, [(column * ACROSS + i) * 128, k * 128], ready, box)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def sum_products(
    sum0, sum1, sum2, ring, stage, phase, KB, CHUNKS: gl.constexpr, OWN: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """(sums of KB steps from a stage of the ring, the stage after them and its phase); what the sums were is of no meaning."""
    a_ring, b_ring, full, empty = ring
    ACROSS: gl.constexpr = 1 if OWN else 2
    sum1 = warpgroup_mma_init(sum1)
    if CHUNKS == 3:
        sum2 = warpgroup_mma_init(sum2)
    before = stage + 0  # a value of its own, which the loop carries: as an alias of `stage` it would not be
    for k in range(KB):
        mbarrier.wait(full.index(stage), phase)
        b = b_ring.index(ACROSS * stage + (0 if OWN else W)).permute((1, 0))
        sum0 = warpgroup_mma(a_ring.index(CHUNKS * stage), b, sum0, use_acc=k > 0, is_async=True)
        # For all but the product just issued: the step before is done with
        if CHUNKS == 3:
            sum0, sum1, sum2 = warpgroup_mma_wait(1, deps=(sum0, sum1, sum2))
        else:
            sum0, sum1 = warpgroup_mma_wait(1, deps=(sum0, sum1))
        sum1 = warpgroup_mma(a_ring.index(CHUNKS * stage + 1), b, sum1, use_acc=k > 0, is_async=True)
        if CHUNKS == 3:
            sum2 = warpgroup_mma(a_ring.index(CHUNKS * stage + 2), b, sum2, use_acc=k > 0, is_async=True)
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        before = stage + 0
        stage, phase = advance(stage, phase, STAGES)
    if OWN:
        give_turn(W)
    if CHUNKS == 3:
        sum0, sum1, sum2 = warpgroup_mma_wait(0, deps=(sum0, sum1, sum2))
    else:
        sum0, sum1 = warpgroup_mma_wait(0, deps=(sum0, sum1))
    mbarrier.arrive(empty.index(before), count=1)
    return sum0, sum1, sum2, stage, phase


@gluon.jit
def finish(acc, scale, columns, bias, added, row, col, inside, ACT: gl.constexpr):
    """act(acc * scales + bias + beta * c) of 64 rows and 64 columns."""
    y = acc.to(gl.float32) * gl.expand_dims(scale, 1) * gl.expand_dims(columns.load(gl.SliceLayout(0, HALF)), 0)
    if added.bias is not None:
        y += gl.expand_dims(bias.load(gl.SliceLayout(0, HALF)), 0)
    C = added.c
    if C.data is not None:
        at = C.data + gl.expand_dims(row.to(gl.int64) * C.stride_r, 1)
        at = at + gl.expand_dims(col.to(gl.int64) * C.stride_c, 0)
        y += gl.load(at, inside, 0.0).to(gl.float32) * added.beta
    if ACT is not None:
        y = activate(y, 1.0, ACT)
    return y


@gluon.jit
def store_chunk(
    acc, scale, lines, result, added, row0, col0, M, N, BOXES: gl.constexpr, ACT: gl.constexpr, W: gl.constexpr
):
    """64 rows and 128 columns, finished: half of the columns at a time by a bulk copy through a box, which a copy before may still
    be leaving; or one by one where there are no boxes."""
    C, boxes, Y, stride_ym, stride_yn = result
    parts = gl.split(acc.reshape([64, 2, 64]).permute((0, 2, 1)))
    row = row0 + gl.arange(0, 64, gl.SliceLayout(1, HALF))
    for i in gl.static_range(2):
        col = col0 + i * 64 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
        inside = gl.expand_dims(row < M, 1) & gl.expand_dims(col < N, 0)
        part = gl.convert_layout(parts[i], HALF, assert_trivial=True)
        columns = lines.index(2 * W).slice(i * 64, 64, 0)
        bias = lines.index(2 * W + 1).slice(i * 64, 64, 0)
        y = finish(part, scale, columns, bias, added, row, col, inside, ACT)
        if C is None:
            at = Y + gl.expand_dims(row.to(gl.int64) * stride_ym, 1) + gl.expand_dims(col.to(gl.int64) * stride_yn, 0)
            gl.store(at, y.to(Y.dtype.element_ty), inside)
        else:
            box = boxes.index(W * BOXES + i % BOXES)
            tma.store_wait(BOXES - 1)
            box.store(y.to(C.dtype))
            fence_async_shared()
            async_store(C, [row0, col0 + i * 64], box)


@gluon.jit
def multiply_tiles(
    result, scales, added, ring, lines, M, N, down, across, KB, PROGRAMS, ACC: gl.constexpr, ACT: gl.constexpr,
    CHUNKS: gl.constexpr, OWN: gl.constexpr, BOXES: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W. What a tile is scaled with is loaded before its products and needed after them."""
    a_ring, b_ring, full, empty = ring
    SA, SB, stride_sa, stride_sb = scales
    BIAS = added.bias
    stage = 0
    phase = 0
    if OWN:
        # The other warpgroup's tile is KB steps of the ring, in which this one has no part
        skipped = KB % STAGES
        flipped = (KB // STAGES) & 1
        if W == 1:
            stage += skipped
            phase ^= flipped
            give_turn(W)
    place = gl.arange(0, 128, LINE)
    sum0 = gl.zeros([64, 128], ACC, PART)
    sum1 = gl.zeros([64, 128], ACC, PART)
    sum2 = gl.zeros([64, 128], ACC, PART)
    first = gl.program_id(0) + (W * PROGRAMS if OWN else 0)
    step = PROGRAMS * (2 if OWN else 1)
    for t in range(first, down * across, step):
        tile, column = tile_of(t, down, across, BAND)
        row0 = tile * (CHUNKS * 64)
        col0 = column * 128 if OWN else (2 * column + W) * 128
        row = row0 + gl.arange(0, 64, gl.SliceLayout(1, HALF))
        col = col0 + place
        columns = gl.load(SB + col.to(gl.int64) * stride_sb, col < N, 0.0)
        scale0 = gl.load(SA + row.to(gl.int64) * stride_sa, row < M, 0.0)
        scale1 = gl.load(SA + (row + 64).to(gl.int64) * stride_sa, row + 64 < M, 0.0)
        if CHUNKS == 3:
            scale2 = gl.load(SA + (row + 128).to(gl.int64) * stride_sa, row + 128 < M, 0.0)
        if BIAS is not None:
            bias = gl.load(BIAS + col, col < N, 0.0)
        if OWN:
            # New ones, so that the sums before hold no registers while they are stored; it is the other's time
            sum0 = gl.zeros([64, 128], ACC, PART)
            sum1 = gl.zeros([64, 128], ACC, PART)
            sum2 = gl.zeros([64, 128], ACC, PART)
            # Until all steps before this tile's have come, the phase of a barrier is ambiguous
            await_turn(W)
        sum0, sum1, sum2, stage, phase = sum_products(sum0, sum1, sum2, ring, stage, phase, KB, CHUNKS, OWN, STAGES, W)
        lines.index(2 * W).store(columns)
        if BIAS is not None:
            lines.index(2 * W + 1).store(bias.to(gl.float32))
        store_chunk(sum0, scale0, lines, result, added, row0, col0, M, N, BOXES, ACT, W)
        store_chunk(sum1, scale1, lines, result, added, row0 + 64, col0, M, N, BOXES, ACT, W)
        if CHUNKS == 3:
            store_chunk(sum2, scale2, lines, result, added, row0 + 128, col0, M, N, BOXES, ACT, W)
        if OWN:
            stage += skipped
            phase ^= flipped
            if stage >= STAGES:
                stage -= STAGES
                phase ^= 1
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("M", "KB", "stride_sa", "stride_sb", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def plain_hopper(
    A, B, C, Y, SA, SB, BIAS, ADD, M, N, KB, stride_sa, stride_sb, stride_ym, stride_yn, stride_cm, stride_cn, beta, PROGRAMS,
    ACT: gl.constexpr, CHUNKS: gl.constexpr, OWN: gl.constexpr, BOXES: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    ACROSS: gl.constexpr = 1 if OWN else 2
    ACC: gl.constexpr = gl.int32 if A.dtype == gl.int8 else gl.float32
    a_ring = gl.allocate_shared_memory(A.dtype, [CHUNKS * STAGES, 64, 128], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [ACROSS * STAGES, 128, 128], B.layout)
    if C is None:
        result = (C, C, Y, stride_ym, stride_yn)
    else:
        result = (C, gl.allocate_shared_memory(C.dtype, [2 * BOXES, 64, 64], C.layout), Y, stride_ym, stride_yn)
    lines = gl.allocate_shared_memory(gl.float32, [4, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ACROSS)
    down = gl.cdiv(M, CHUNKS * 64)
    across = gl.cdiv(N, ACROSS * 128)
    ring = (a_ring, b_ring, full, empty)
    scales = (SA, SB, stride_sa, stride_sb)
    added = Added(BIAS, Matrix(ADD, stride_cm, stride_cn), beta)
    gl.warp_specialize([
        (multiply_tiles, (result, scales, added, ring, lines, M, N, down, across, KB, PROGRAMS, ACC, ACT, CHUNKS, OWN,
                          BOXES, BAND, STAGES, 0)),
        (multiply_tiles, (result, scales, added, ring, lines, M, N, down, across, KB, PROGRAMS, ACC, ACT, CHUNKS, OWN,
                          BOXES, BAND, STAGES, 1)),
        (copy_operands, (A, B, ring, down, across, KB, PROGRAMS, CHUNKS, OWN, BAND, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether both factors are 8-bit codes, not empty, whose inner dimension is contiguous in rows that begin at multiples of 16
    bytes."""
    if not target.hopper_gluon or a.out_format is not None:
        return False
    integers = [t.dtype == torch.int8 for t in (a.a, a.b)]
    if a.a.dtype not in CODES or a.b.dtype not in CODES or a.recipe_a not in ONCE or a.recipe_b not in ONCE:
        return False
    if any(integers) and not all(integers) or not any(integers) and a.accumulate != "fast":
        return False
    sizes = (*a.a.shape, a.b.shape[1])
    if min(sizes) == 0 or max(sizes) >= 2**31 - 256 or (any(integers) and a.a.shape[1] > LONGEST):
        return False
    return copies_in_bulk(a.a, a.b.t())


def forward(a, b, scale_a, scale_b, *, bias, act, c, beta, out_dtype, out, tile: Tile | None = None, **_) -> Tensor:
    """The product. `tile` is an argument for comparisons; without it the best one is taken."""
    (M, K), N, sms = a.shape, b.shape[1], Target.at(a.device).sms
    y = torch.empty(M, N, dtype=DTYPES[out_dtype], device=a.device) if out is None else out
    add = None if beta == 0.0 else c
    # fp32 goes straight from registers, of which a warp's fill whole sectors
    C = box_of(y, [64, 64], HALVES[out_dtype]) if out_dtype in HALVES and stores_in_bulk(y) else None
    if tile is None:
        tile = SMALL if C is None or add is not None else tile_for(M, N, K, sms, a.dtype)
    strides = (s.stride(0) if s.shape[0] > 1 else 0 for s in (scale_a, scale_b))
    plain_hopper(
        box_of(a, [64, 128], CODES[a.dtype]), box_of(b.t(), [128, 128], CODES[b.dtype]), C, y, scale_a, scale_b,
        None if bias is None else bias.contiguous(), add, M, N, cdiv(K, 128), *strides, *y.stride(),
        *((0, 0) if add is None else add.stride()), beta, min(sms, cdiv(M, tile.rows) * cdiv(N, tile.columns)),
        ACT=act, CHUNKS=tile.rows // 64, OWN=tile.own, BOXES=tile.boxes, BAND=BAND, STAGES=tile.stages,
    )  # fmt: skip
    return y
