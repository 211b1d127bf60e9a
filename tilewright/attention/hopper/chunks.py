"""Attention of many queries over a cache in pages, on Hopper: chunks of prompts, by the warpgroups of `forward.py`.

What a warpgroup does, `attend_tiles`, is what it does over dense sequences with a number of keys each: query i of n stands at
position kv_len - n + i in both. Where keys lie is the affair of the copying warp alone, and that is what stands here. It brings a
block of keys in boxes of rows that lie in one page: as many as the largest power of two that divides pages, and a block's at most.
A box is 64 columns wide, or all if there are fewer: so lie the pieces of a block in shared memory, and each box is one. Without a
table a sequence has a page of its own, and a box a block's rows.

Who may write where, and when, is said in `forward.py`. Here a stage's `full` waits for the bytes of several boxes. It is told of
all of them before the first is copied, so that it cannot be done between two; who it lets on may read the whole block. The
table is read before the wait for `empty`, so that its answer comes meanwhile: nobody writes it while the kernel runs.

What is not there. A box past a sequence's keys, whose entry of the table may be anything, is copied from past the last page, which
brings 0 and reads nothing; nobody sees these keys. Of a page that there is not, values are 0 in the same way, and keys are NaN,
copied from a box that holds nothing else: rows that see one have a score of NaN and with it sums of NaN. Of rows that do not see
it the score is hidden, and a weight of 0 multiplied with a value of 0.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.target import Target
from ...core.triton_versions import async_load, gl, gluon, mbarrier, reinterpret
from ...device.warpgroups import advance
from ...gemm.hopper.boxes import box_of, copies_in_bulk
from ...op import single
from ...runtime.kernel import kernel
from ..cache_parts import finished, results_of
from ..cache_read import bending_of, capacity_of, check_keys, keys_together, table_of, window_of
from ..portable import heads_of, sizes_of
from ..preference import FAR, busy, wanted_of_cache
from ..tiles import lengths
from .forward import (
    ALONE,
    KINDS,
    LONGEST,
    MOST_PROGRAMS,
    NUMBERS,
    WIDEST,
    Rings,
    Stages,
    Turns,
    attend_tiles,
    boxes_of,
    copy_box,
    expect_boxes,
    make_barriers,
    make_boxes,
    tiles_of,
)
from .schedule import HALF, ROWS, plan_for, work_of

NAME = "hopper_chunks"
WIDE = 64  # columns of a box: 128 bytes, as far as rows are swizzled
LEAST = 16  # rows of a box: a block is then of eight at most, whose pages a warp of 24 registers holds at a time


class Whose(NamedTuple):
    """Whose keys are copied: those of a head of a sequence, and how many it has."""

    sequence: Any
    head: Any
    count: Any


# ---- the copying warp ------------------------------------------------------------------------------------------------


@gluon.jit
def page_at(TABLE, PAGES, whose, key, PAGE: gl.constexpr):
    """The page of a sequence's keys from `key` on: past the last of all where it has none, -1 where the table says a number that is
    no page's."""
    if PAGE == 0:
        return whose.sequence
    else:
        there = key < whose.count
        at = whose.sequence.to(gl.int64) * TABLE.stride_s + (key // PAGE).to(gl.int64) * TABLE.stride_m
        page = gl.load(TABLE.data + at, there, 0).to(gl.int64)
        page = gl.where((page >= 0) & (page < PAGES), page, -1).to(gl.int32)
        return gl.where(there, page, PAGES)


@gluon.jit
def copy_part(BOX, boxes, ready, stage, i, page, head, row, FROM: gl.constexpr, STEP: gl.constexpr):
    """Begin to copy rows of a page, box after box from column FROM on, by STEP, to where the i-th rows of a stage lie."""
    HIGH: gl.constexpr = boxes.shape[3] // BOX.block_type.shape[2]
    ACROSS: gl.constexpr = boxes.shape[4] // BOX.block_type.shape[3]
    pieces = reinterpret(boxes, boxes.dtype, [boxes.shape[0] * ACROSS * HIGH] + BOX.block_type.shape, BOX.layout)
    for c in gl.static_range(ACROSS):
        async_load(BOX, [page, head, row, FROM + c * STEP], ready, pieces.index((stage * ACROSS + c) * HIGH + i))


@gluon.jit
def copy_rows(FIRST, SECOND, ring, stage, i, page, head, row, ALIKE: gl.constexpr):
    """The same of both parts of the columns. ALIKE: all columns are those of the first box."""
    ready = ring.full.index(stage)
    copy_part(FIRST, ring.first, ready, stage, i, page, head, row, 0, 0 if ALIKE else FIRST.block_type.shape[3])
    if SECOND is not None:
        FROM: gl.constexpr = 0 if ALIKE else ring.first.shape[4]
        STEP: gl.constexpr = 0 if ALIKE else SECOND.block_type.shape[3]
        copy_part(SECOND, ring.second, ready, stage, i, page, head, row, FROM, STEP)


@gluon.jit
def copy_block(FIRST, SECOND, N0, N1, ring, stage, phase, TABLE, PAGES, whose, key, PAGE: gl.constexpr):
    """Copy the keys of a sequence from `key` on, or values, into a stage when it is empty. Where the table is wrong: what boxes N0
    and N1 hold, or 0 without them."""
    HIGH: gl.constexpr = FIRST.block_type.shape[2]
    BOXES: gl.constexpr = ring.first.shape[3] // HIGH
    COLUMNS: gl.constexpr = ring.first.shape[4] + (0 if SECOND is None else ring.second.shape[4])
    pages = ()
    for i in gl.static_range(BOXES):
        pages = pages + (page_at(TABLE, PAGES, whose, key + i * HIGH, PAGE),)
    mbarrier.wait(ring.empty.index(stage), phase)
    mbarrier.expect(ring.full.index(stage), 2 * BOXES * HIGH * COLUMNS)
    for i in gl.static_range(BOXES):
        page = pages[i]
        row = key + i * HIGH
        if PAGE > 0:
            row = row % PAGE
        if N0 is None:
            if PAGE > 0:
                page = gl.where(page < 0, PAGES, page)
            copy_rows(FIRST, SECOND, ring, stage, i, page, whose.head, row, False)
        else:
            if page >= 0:
                copy_rows(FIRST, SECOND, ring, stage, i, page, whose.head, row, False)
            else:
                copy_rows(N0, N1, ring, stage, i, 0, 0, 0, True)


@gluon.jit
def copy_chunks(
    boxes, N0, N1, TABLE, PAGES, rings, turns, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, PROGRAMS, PLAN: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """`copy_tiles` of `forward.py`, from pages."""
    BLOCK: gl.constexpr = PLAN.block
    STAGES: gl.constexpr = PLAN.stages
    Q0, Q1, K0, K1, V0, V1 = boxes
    stage_q = 0
    phase_q = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    stage = 0
    phase = 1
    slot = 0
    phase_n = 1
    number = gl.program_id(0)
    while number < TILES * HEADS * BATCH:
        work = work_of(number, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, PLAN)
        if work.high > work.low:
            tile = work.tile
            expect_boxes(Q0, Q1, rings.q, stage_q, phase_q, 2)
            for w in gl.static_range(2):
                row = tile.first_q + tile.start + w * HALF
                copy_box(Q0, Q1, rings.q, stage_q, 2 * stage_q + w, work.batch, work.head, row)
            stage_q, phase_q = advance(stage_q, phase_q, PLAN.queries)
            # In the order in which they are needed: the scores of a block come before the values of the one before
            whose = Whose(tile.sequence, work.head // GROUP, work.count)
            key = (work.high - 1) * BLOCK
            copy_block(K0, K1, N0, N1, rings.k, stage, phase, TABLE, PAGES, whose, key, PAGE)
            for _ in range(work.high - work.low - 1):
                following, its_phase = advance(stage, phase, STAGES)
                copy_block(K0, K1, N0, N1, rings.k, following, its_phase, TABLE, PAGES, whose, key - BLOCK, PAGE)
                copy_block(V0, V1, None, None, rings.v, stage, phase, TABLE, PAGES, whose, key, PAGE)
                stage = following
                phase = its_phase
                key -= BLOCK
            copy_block(V0, V1, None, None, rings.v, stage, phase, TABLE, PAGES, whose, key, PAGE)
            stage, phase = advance(stage, phase, STAGES)
        # The counter takes its time to answer, while the last copies are on their way
        number = gl.atomic_add(turns.counter, 1, sem="relaxed") + PROGRAMS
        mbarrier.wait(turns.empty.index(slot), phase_n)
        turns.numbers.index(slot).store(gl.full([1], number, gl.int32, ALONE))
        mbarrier.arrive(turns.full.index(slot), count=1)
        slot, phase_n = advance(slot, phase_n, NUMBERS)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def block_layout(columns):
    """How a block of keys lies: pieces of 64 columns one after the other, or all columns if there are fewer."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=4)


@gluon.jit
def make_blocks(BOX, COUNT: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(BOX.dtype, [COUNT, 1, 1, BLOCK, COLUMNS], block_layout(COLUMNS))


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("PAGES", "L", "KEYS", "TILES", "BATCH", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def attention_chunks_hopper(
    Q0, Q1, K0, K1, V0, V1, N0, N1, TABLE, PAGES, O, LSE, SINK, COUNTER, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH,
    TILES, PROGRAMS, SIZES: gl.constexpr, PLAN: gl.constexpr, CLEARS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """`attention_forward_hopper` of keys in pages of PAGE, or, if that is 0, in one page a sequence, which has room for KEYS."""
    STAGES: gl.constexpr = PLAN.stages
    QUERIES: gl.constexpr = PLAN.queries
    BLOCK: gl.constexpr = PLAN.block
    boxes = (Q0, Q1, K0, K1, V0, V1)
    q0 = make_boxes(Q0, 2 * QUERIES)
    k0 = make_blocks(K0, STAGES, BLOCK, SIZES.D0)
    v0 = make_blocks(V0, STAGES, BLOCK, SIZES.V0)
    q1 = Q1  # None, or else:
    k1 = K1
    v1 = V1
    if Q1 is not None:
        q1 = make_boxes(Q1, 2 * QUERIES)
        k1 = make_blocks(K1, STAGES, BLOCK, SIZES.D1)
    if V1 is not None:
        v1 = make_blocks(V1, STAGES, BLOCK, SIZES.V1)
    q_full, q_empty = make_barriers(QUERIES)
    k_full, k_empty = make_barriers(STAGES)
    v_full, v_empty = make_barriers(STAGES)
    rings = Rings(
        Stages(q0, q1, q_full, q_empty), Stages(k0, k1, k_full, k_empty), Stages(v0, v1, v_full, v_empty)
    )  # fmt: skip
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    n_full, n_empty = make_barriers(NUMBERS)
    turns = Turns(COUNTER, numbers, n_full, n_empty)
    gl.warp_specialize([
        (attend_tiles, (O, LSE, SINK, rings, turns, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, PROGRAMS,
                        SIZES, PLAN, CLEARS, 0)),
        (attend_tiles, (O, LSE, SINK, rings, turns, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, PROGRAMS,
                        SIZES, PLAN, CLEARS, 1)),
        (copy_chunks, (boxes, N0, N1, TABLE, PAGES, rings, turns, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES,
                       PROGRAMS, PLAN, PAGE)),
    ], [4, 1], [240, 24])  # fmt: skip


@kernel(
    grid=lambda a: (1,), tokens=("MARKS", "KEYS"), default=lambda a: {"BLOCK": 1024, "num_warps": 4},
)  # fmt: skip
def attention_chunks_begin(COUNTER, NOTHING, OWN, MARKS, KEYS, CELLS: tl.constexpr, BLOCK: tl.constexpr):
    """COUNTER 0, NOTHING [CELLS] NaN, and OWN [MARKS], which marks as many keys for each packed sequence as it has room for."""
    tl.store(COUNTER, 0)
    if NOTHING is not None:
        for first in range(0, CELLS, BLOCK):
            tl.store(NOTHING + first + tl.arange(0, BLOCK), float("nan"))
    if OWN is not None:
        for first in range(0, MARKS, BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(OWN + i, i * KEYS, i < MARKS)


# ---- host ------------------------------------------------------------------------------------------------------------


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether queries and caches are 16-bit, of widths that are multiples of 8 up to 256, in rows that begin at multiples of 16
    bytes; pages hold whole boxes; nothing is empty, nothing but windows and lengths of sequences says what is seen, the largest
    product is the largest score, and no split is asked for: keys are taken in one part."""
    q, k, v = a.q, a.k_cache, a.v_cache
    if not target.hopper_gluon or q.dtype not in KINDS or not single(target, a):
        return False
    if v is None or any(t is not None for t in (a.k_rope, a.k_scale, a.v_scale, a.tree, a.split)):
        return False
    if k.dtype != q.dtype or v.dtype != q.dtype or (a.scale is not None and a.scale <= 0):
        return False
    if any(t.shape[-1] % 8 or t.shape[-1] > WIDEST for t in (q, v)) or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    keys = capacity_of(a)
    many = q.shape[0] if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0] - 1
    if not keys or (a.block_table is not None and k.shape[1] % LEAST):
        return False
    if q.shape[1] + keys >= LONGEST or many * keys >= 2**31 or tiles_of(a) >= 2**31 - MOST_PROGRAMS:
        return False
    if plan_for(sizes_of(q, v), target.shared_memory) is None:
        return False
    return copies_in_bulk(*(t.transpose(1, 2) for t in (q, k, v)))


def fits_call(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes the arguments and is the faster, by measurement, or was asked for. A tile is of one head's queries: of few
    of them, what holds for many is not known."""
    far = math.inf if a.q.shape[1] >= ROWS.value and busy(target, a) else FAR
    return fits(target, a) and wanted_of_cache(NAME, target, a, far=far)


def page_boxes(t: Tensor, rows: int, first: int, second: int) -> tuple[Any, Any]:
    """Descriptors of both parts of the columns of a cache, by pages and heads; past the last column they bring 0."""
    by_head, kind = t.transpose(1, 2), KINDS[t.dtype]
    return tuple(box_of(by_head, [1, 1, rows, min(WIDE, n)], kind) if n else None for n in (first, second))


def forward(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    (batch, length, heads, _), (pages, page, kv_heads, _), keys = q.shape, k_cache.shape, capacity_of(a)
    results = results_of(a, v_cache.shape[-1], 1)
    check_keys(a)
    sizes, target = sizes_of(q, v_cache), Target.at(q.device)
    plan = plan_for(sizes, target.shared_memory)
    page = 0 if a.block_table is None else page
    rows = keys_together(page, plan.block)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    cells, nothing, own = None, (None, None), None
    if page:
        cells = torch.empty(1, rows, 1, WIDE, dtype=q.dtype, device=q.device)
        nothing = page_boxes(cells, rows, sizes.D0, sizes.D1)
    if a.cu_seqlens_q is not None:
        own = torch.empty(a.cu_seqlens_q.shape[0], dtype=torch.int32, device=q.device)
    marks = 0 if own is None else own.shape[0]
    attention_chunks_begin(counter, cells, own, marks, keys, CELLS=rows * WIDE if page else 0)
    how, tiles = lengths(a.cu_seqlens_q, own, length, max(marks - 1, 0) * keys, a.kv_len, ROWS.value, False)
    window = window_of(a)
    attention_chunks_hopper(
        *boxes_of(q, HALF.value, sizes.D0, sizes.D1), *page_boxes(k_cache, rows, sizes.D0, sizes.D1),
        *page_boxes(v_cache, rows, sizes.V0, sizes.V1), *nothing, table_of(a), pages, heads_of(results.whole), results.lse,
        None if a.sink is None else a.sink.contiguous(), counter, bending_of(a), window, how, length, keys, heads,
        heads // kv_heads, batch, tiles, min(target.sms, tiles * heads * batch), SIZES=sizes, PLAN=plan,
        CLEARS=a.cu_seqlens_q is not None or a.kv_len is not None or window.left is not None, PAGE=page,
    )  # fmt: skip
    return finished(results)
