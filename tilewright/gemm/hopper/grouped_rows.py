"""`grouped_mm_rows` of bf16 and fp16 on Hopper, in Gluon, and what it shares with `grouped_mm_inner` (`grouped_inner.py`): a
warp that copies, two warpgroups that multiply, one program to an SM goes from tile to tile.

A tile is 128 rows by 256 columns, of which each warpgroup has 64 rows: the widest product there is, which reads the fewest bytes
of shared memory. Rows past a group's end are not stored, and a warpgroup that has no others multiplies nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

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
    reinterpret,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...device.activation import activate
from ...device.warpgroups import advance, await_turn
from ...op import single
from ...runtime.kernel import kernel
from ..operands import DTYPES
from ..tiles import BAND, tile_entry, tile_list, tile_of
from .boxes import box_of, copies_in_bulk, stores_in_bulk
from .plain import HALF
from .scaled_mm import store_masked

KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
COLUMNS, STEP = 256, 64
RING = {"STAGES": 4, "BOXES": 2, "BAND": BAND}  # 192 KB of operands in shared memory, 32 of results
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
FLAT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@gluon.jit
def matrix_at(ring, stage, BY_COLUMNS: gl.constexpr):
    """64 by 256 numbers of the second factor, which lie column by column where BY_COLUMNS."""
    box = ring.index(stage)
    if BY_COLUMNS:
        return reinterpret(box, ring.dtype, [256, 64], FLAT).permute((1, 0))
    else:
        return reinterpret(box, ring.dtype, [64, 256], FLAT)


@gluon.jit
def clear_after(box, left):
    """Make the rows of a 64x64 box from `left` on 0."""
    row = gl.arange(0, 64, gl.SliceLayout(1, WORDS))
    box.store(gl.where(gl.expand_dims(row < left, 1), box.load(WORDS), 0.0))


@gluon.jit
def clear_tokens(ring, stage, left, W: gl.constexpr):
    """Leave `left` tokens of a step: 0 of both factors, for what lies there may be infinite. Each warpgroup has its own rows, and
    half of the columns, which both of them need."""
    a_ring, b_ring, full, empty = ring
    clear_after(a_ring.index(2 * stage + W), left)
    quarters = reinterpret(b_ring, b_ring.dtype, [4 * b_ring.shape[0], 64, 64], FLAT)
    clear_after(quarters.index(4 * stage + 2 * W), left)
    clear_after(quarters.index(4 * stage + 2 * W + 1), left)
    fence_async_shared()
    await_turn(0)  # both wait at the same barrier: for each other


@gluon.jit
def sum_products(
    total, ring, stage, phase, start, end, TOKENS: gl.constexpr, BY_COLUMNS: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """(sums of the inner dimension from `start` to `end`, which is more, in the ring from a stage on, the stage after them and its
    phase); what `total` was is of no meaning. TOKENS: both factors lie token by token."""
    a_ring, b_ring, full, empty = ring
    before = stage + 0  # a value of its own, which the loop carries: as an alias of `stage` it would not be
    for k in range(start, end, 64):
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(2 * stage + W)
        if TOKENS:
            if end - k < 64:
                clear_tokens(ring, stage, end - k, W)
            a = a.permute((1, 0))
        total = warpgroup_mma(a, matrix_at(b_ring, stage, BY_COLUMNS), total, use_acc=k > start, is_async=True)
        # For all but the product just issued: the step before is done with
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(empty.index(before), count=1, pred=k > start)
        before = stage + 0
        stage, phase = advance(stage, phase, STAGES)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index(before), count=1)
    return total, stage, phase


@gluon.jit
def pass_over(ring, stage, phase, K, STAGES: gl.constexpr):
    """Leave a tile to the other warpgroup."""
    a_ring, b_ring, full, empty = ring
    for _ in range(0, K, 64):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def quarter_of(total, i: gl.constexpr):
    """64 columns of the 256, as they are finished and stored."""
    half = gl.split(total.reshape([64, 2, 128]).permute((0, 2, 1)))[i // 2]
    quarter = gl.split(half.reshape([64, 2, 64]).permute((0, 2, 1)))[i % 2]
    return gl.convert_layout(quarter, HALF, assert_trivial=True)


@gluon.jit
def store_quarter(y, result, at, rows, N, CLIPS: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr):
    """64 rows and 64 columns by a bulk copy through a box, which a copy before may still be leaving; or one by one where there are
    no boxes, or rows end and it CLIPS them not."""
    C, boxes, Y, stride_ye, stride_ym = result
    e, row0, col0 = at
    r = gl.arange(0, 64, gl.SliceLayout(1, HALF))
    col = col0 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
    inside = gl.expand_dims(r < rows, 1) & gl.expand_dims(col < N, 0)
    if C is None:
        store_masked(y, Y + e.to(gl.int64) * stride_ye, stride_ym, row0 + r, col, inside)
    elif CLIPS or rows >= 64:
        box = boxes.index(BOX)
        tma.store_wait(BOXES - 1)
        box.store(y.to(C.dtype).reshape(box.shape))
        fence_async_shared()
        async_store(C, [e, row0, col0], box)
    else:
        store_masked(y, Y + e.to(gl.int64) * stride_ye, stride_ym, row0 + r, col, inside)


@gluon.jit
def make_ring(A, B, STAGES: gl.constexpr):
    """Shared memory of both factors, and its barriers."""
    a_ring = gl.allocate_shared_memory(A.dtype, [2 * STAGES] + A.block_type.shape, A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [STAGES] + B.block_type.shape, B.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return a_ring, b_ring, full, empty


@gluon.jit
def copy_rows(A, B, ring, work, BY_COLUMNS: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr):
    a_ring, b_ring, full, empty = ring
    TILES, count, across, K, PROGRAMS = work
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    for t in range(gl.program_id(0), count * across, PROGRAMS):
        tile, column = tile_of(t, count, across, BAND)
        group, row0, rows = tile_entry(TILES, tile)
        if rows > 0:
            for k in range(0, K, 64):
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(ready, (128 + 256) * 64 * 2)
                for i in gl.static_range(2):
                    async_load(A, [row0 + i * 64, k], ready, a_ring.index(2 * stage + i))
                at = [group, column * 256, k] if BY_COLUMNS else [group, k, column * 256]
                async_load(B, at, ready, b_ring.index(stage))
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def multiply_rows(
    result, BIAS, N, ring, work, ACT: gl.constexpr, BY_COLUMNS: gl.constexpr, BOXES: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W."""
    TILES, count, across, K, PROGRAMS = work
    stage = 0
    phase = 0
    total = gl.zeros([64, 256], gl.float32, SUMS)
    for t in range(gl.program_id(0), count * across, PROGRAMS):
        tile, column = tile_of(t, count, across, BAND)
        group, row0, rows = tile_entry(TILES, tile)
        if rows > W * 64:
            total, stage, phase = sum_products(total, ring, stage, phase, 0, K, False, BY_COLUMNS, STAGES, W)
            for i in gl.static_range(4):
                y = quarter_of(total, i)
                col0 = column * 256 + i * 64
                if BIAS is not None:
                    col = col0 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
                    bias = gl.load(BIAS + group.to(gl.int64) * N + col, col < N, 0.0)
                    y += gl.expand_dims(bias.to(gl.float32), 0)
                if ACT is not None:
                    y = activate(y, 1.0, ACT)
                at = (group * 0, row0 + W * 64, col0)
                store_quarter(y, result, at, rows - W * 64, N, False, W * BOXES + i % BOXES, BOXES)
        elif rows > 0:
            stage, phase = pass_over(ring, stage, phase, K, STAGES)
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("count", "K", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def grouped_rows_hopper(
    A, B, C, Y, BIAS, TILES, count, N, K, PROGRAMS, ACT: gl.constexpr, BY_COLUMNS: gl.constexpr, BOXES: gl.constexpr,
    BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """BY_COLUMNS: B lies as [experts, columns, inner], not as [experts, inner, columns]."""
    ring = make_ring(A, B, STAGES)
    result = (C, C, Y, 0, N)
    if C is not None:
        result = (C, gl.allocate_shared_memory(C.dtype, [2 * BOXES, 1, 64, 64], C.layout), Y, 0, N)
    work = (TILES, count, gl.cdiv(N, 256), K, PROGRAMS)
    gl.warp_specialize([
        (multiply_rows, (result, BIAS, N, ring, work, ACT, BY_COLUMNS, BOXES, BAND, STAGES, 0)),
        (multiply_rows, (result, BIAS, N, ring, work, ACT, BY_COLUMNS, BOXES, BAND, STAGES, 1)),
        (copy_rows, (A, B, ring, work, BY_COLUMNS, BAND, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


def takes_factors(target: Target, a: SimpleNamespace, columns: int) -> bool:
    """Whether both factors have one 16-bit dtype and neither is empty. 128 columns or fewer would leave half of every tile so."""
    chip = target.hopper_gluon
    kinds = a.a.dtype in KINDS and a.b.dtype == a.a.dtype and single(target, a)
    return chip and kinds and 0 not in (*a.a.shape, *a.b.shape) and 128 < columns < 2**31 - COLUMNS


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether rows begin at multiples of 16 bytes, and there is no gated unit, whose halves would lie in different tiles.
    Matrices may lie either way."""
    if (
        a.glu is not None
        or not takes_factors(target, a, a.b.shape[2])
        or a.a.shape[1] >= 2**31 - STEP
        or a.b.shape[2] % 8
    ):
        return False
    return copies_in_bulk(a.a) and (copies_in_bulk(a.b.transpose(1, 2)) or copies_in_bulk(a.b))


def forward(a, b, offsets, *, bias=None, act=None, glu=None, out_dtype=None) -> Tensor:
    (M, K), N, kind = a.shape, b.shape[2], KINDS[a.dtype]
    y = torch.empty(M, N, dtype=a.dtype if out_dtype is None else DTYPES[out_dtype], device=a.device)
    BY_COLUMNS = copies_in_bulk(b.transpose(1, 2))
    B = box_of(b.transpose(1, 2), [1, COLUMNS, STEP], kind) if BY_COLUMNS else box_of(b, [1, STEP, COLUMNS], kind)
    tiles = tile_list(offsets, M)
    grouped_rows_hopper(
        box_of(a, [64, STEP], kind), B, box_of_result(y.unsqueeze(0)), y, None if bias is None else bias.contiguous(), tiles,
        tiles.shape[0], N, K, min(Target.at(a.device).sms, tiles.shape[0] * cdiv(N, COLUMNS)), ACT=act, BY_COLUMNS=BY_COLUMNS,
        **RING,
    )  # fmt: skip
    return y


def box_of_result(y: Tensor):
    """The descriptor of a result that leaves by bulk copies, None where it does not: an fp32 result goes straight from registers,
    of which a warp's fill whole sectors."""
    return box_of(y, [1, 64, 64], KINDS[y.dtype]) if y.dtype in KINDS and stores_in_bulk(y) else None
