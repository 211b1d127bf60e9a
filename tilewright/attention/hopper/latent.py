"""Attention over caches of latents on Hopper, in Gluon: values are the first columns of the keys, and all heads share them
(absorbed MLA, 512 + 64 columns). A warp that copies, and two warpgroups, one of which makes weights that both multiply with their
half of the values: sums of 64 rows and 512 columns are more than one warpgroup's registers hold.

A program takes 64 rows of one sequence, tokens times heads, over one part of its keys, in blocks of 64 from the last that any row
sees down to the first. Its queries stay in shared memory, beside two blocks of keys or more. Parts are merged by
`attention_parts_merge`. A page holds whole blocks, or a block is several pages.

The left warpgroup makes the scores of a block and its weights, and adds up the left half of the values; the right one adds up the
right half, of weights that it finds in shared memory with what its sums before are to be multiplied with. Keys are values, so that
a block stays until its last product, and copies are not far ahead of products: the L2 is asked for a block before there is room
for it. When the right warpgroup begins is the plan's. At once, its columns are given back sooner, and copies are further ahead.
`late`, when the scores of the next block are all but done, its products run while these become weights, and tensor cores that had
nothing to do then have something. Late is for rows of several tiles, which share keys that are read from memory once: products
then take longer than copies.

Who may write where in shared memory, and when:

- *queries* are copied once: `queries` has one phase.
- *left* columns of a stage: the copying warp waits for `left.empty` and fills them, and their bytes arrive at `left.full`. The left
  warpgroup waits for that, reads them as keys and then as values, and arrives at `left.empty` when both products are waited for.
- *right* columns of a stage, those after the values with them, and `missing`, which says what pages of the block there are not:
  the copying warp waits for `right.empty`, stores the number, arrives at `right.full` and begins to copy. Both warpgroups wait for
  that, the left one to make scores, the right one to read values. The right one alone arrives at `right.empty`, when its product
  is waited for: it was told weights, and the left one tells them after it has waited for the scores and read the number.
- *weights* and *factors*, one of each: the left warpgroup waits for `taken`, stores them, shows them to products by a fence and
  arrives at `told`; the right one waits for that, reads both, and arrives at `taken` when its product is waited for. The last
  message is factors alone, what sums are multiplied with at the end, and nobody waits for it to be taken.

A barrier's parity is enough, for none is more than a phase ahead of who waits for it: `full` of a stage completes again after
`empty`, at which the last arrives who waits for `full`, or who knows of that; `told` after `taken`, and `taken` after `told`.
Nobody waits in a circle: a copy waits for products of the block that was in its stage; left products wait for copies of their own
block alone; right products wait for weights, which are told at the latest when the scores of the next block are made; and what
waits for weights to be taken waits for those before.

Keys past the last that is seen may hold NaN, and 0 times NaN is NaN. Only the block that is walked over first has any. Their scores
are hidden; their values are cleared by each warpgroup in its own columns, after the scores that read all columns are done: the left
one has waited for them, and the right one for weights made of them. Each is alone with its columns then, shows by a fence what it
wrote, and has its warps wait for each other.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import (
    async_load,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...device.dependent import await_last, let_next_begin
from ...device.softmax import LN2
from ...device.warpgroups import advance
from ...gemm.hopper.boxes import box_of, copies_in_bulk
from ...op import single
from ...runtime.kernel import kernel
from ..cache_parts import LEAST, finished, results_of
from ..cache_read import bending_of, capacity_of, check_keys, lengths_of, table_of, value_columns, window_of
from ..portable import heads_of
from ..preference import wanted_of_cache
from ..tiles import Tile, keys_of, keys_seen
from .backward import unknown_zero
from .forward import (
    ALONE,
    CLEARED,
    KINDS,
    LONGEST,
    PACK,
    SHOWN,
    Rows,
    make_boxes,
    rows_of,
    scaled_rows,
    scaled_where_moved,
    sums_of,
    weigh,
)
from .schedule import whole_blocks

NAME = "hopper_latent"
ROWS = tl.constexpr(64)  # of a tile
BLOCK = tl.constexpr(64)  # keys
WIDE = tl.constexpr(64)  # columns of a box: 128 bytes, which bulk copies swizzle
AWAY = gl.constexpr(2)  # blocks from one that is copied to one that the L2 is asked for
LAZY = gl.constexpr(True)  # sums are multiplied where a row's largest score has grown by much alone


class Plan(NamedTuple):
    """Columns of values; keys in a box, which lies in one page; how many blocks shared memory holds; whether right products begin
    late; bytes of a box that the L2 is asked for before it is copied, or 0 where its rows do not lie side by side."""

    columns: int
    box: int
    stages: int
    late: bool
    ahead: int


class Span(NamedTuple):
    """What a program does: rows from `row` on, `rows` of them, of tokens `first` to `last`; how many keys their sequence has, and
    whether it says more than there is room for; blocks from `low` to before `high` of its part, of which keys before `stop` are
    seen."""

    batch: Any
    part: Any
    row: Any
    rows: Any
    first: Any
    last: Any
    count: Any
    wrong: Any
    low: Any
    high: Any
    stop: Any


class Pair(NamedTuple):
    """Barriers of a ring's stages."""

    full: Any
    empty: Any


class Memory(NamedTuple):
    """Shared memory. Queries and keys are boxes of 64 columns, halves of the values' columns and those after them apart."""

    q_left: Any
    q_right: Any
    q_rope: Any
    k_left: Any
    k_right: Any
    k_rope: Any
    missing: Any
    weights: Any
    factors: Any
    queries: Any
    left: Any
    right: Any
    told: Any
    taken: Any


# ---- what a program does ---------------------------------------------------------------------------------------------


@triton.jit
def span_of(WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT):
    """Tiles of one part are neighbours: they read the same keys."""
    number = tl.program_id(0)
    part = number // TILES % PARTS
    batch = number // TILES // PARTS
    row = number % TILES * ROWS
    rows = tl.minimum(L * HEADS - row, ROWS)
    first = row // HEADS
    last = (row + rows - 1) // HEADS
    count, wrong = keys_of(LENGTHS, Tile(batch, 0, L, 0, CAPACITY, first))
    _, stop, _, _ = keys_seen(WINDOW, count - L, count, first, last)
    begin = part * SPLIT
    stop = tl.minimum(stop, begin + tl.minimum(SPLIT, CAPACITY - begin))
    low = begin // BLOCK
    high = tl.where(stop > begin, tl.cdiv(stop, BLOCK), low)
    return Span(batch, part, row, rows, first, last, count, wrong, low, high, stop)


# ---- the copying warp ------------------------------------------------------------------------------------------------


@gluon.jit
def find_boxes(TABLE, span, key, PAGES, PAGE: gl.constexpr, PLAN: gl.constexpr):
    """((page, place in it) of each box of the block that begins at `key`, bits of those for which there is no page). Where there is
    none, or nobody sees it, the page is one past the last, of which bulk copies read nothing and bring 0."""
    found = ()
    missing = 0
    for n in gl.static_range(BLOCK // PLAN.box):
        first = key + n * PLAN.box
        if TABLE is None:
            found = found + ((span.batch, first),)
        else:
            seen = (first >= span.low * BLOCK) & (first < span.stop)
            at = span.batch.to(gl.int64) * TABLE.stride_s + (first // PAGE).to(gl.int64) * TABLE.stride_m
            page = gl.load(TABLE.data + at, seen, 0).to(gl.int64)
            known = (page >= 0) & (page < PAGES)
            found = found + ((gl.where(seen & known, page, PAGES).to(gl.int32), first % PAGE),)
            missing |= gl.where(known, 0, 1 << n)
    return found, missing


@triton.constexpr_function
def fetch(size):
    """Assembly: ask for so many bytes of memory."""
    return f"cp.async.bulk.prefetch.L2.global [$1], {size}; mov.u32 $0, 0;"


@gluon.jit
def ask_for(KEYS, page, place, SIZE: gl.constexpr):
    """Have the L2 read SIZE bytes from a place of a page on: shared memory has no room for them yet, and they are then not far."""
    at = page.to(gl.int64) * KEYS.stride_b + place.to(gl.int64) * KEYS.stride_t
    gl.inline_asm_elementwise(fetch(SIZE), "=r,l", [KEYS.data + at], gl.int32, False, 1)


@gluon.jit
def copy_columns(FROM, boxes, stage, ready, found, column, SLABS: gl.constexpr):
    """Begin to copy SLABS times 64 columns, from `column` on, of the boxes of a block into a stage of a ring. Columns that a tensor
    does not have are 0."""
    COUNT: gl.constexpr = len(found)
    for slab in gl.static_range(SLABS):
        for i in gl.static_range(COUNT):
            page, place = found[i]
            into = boxes.index((stage * SLABS + slab) * COUNT + i)
            async_load(FROM, [page, place, column + slab * WIDE], ready, into)


@gluon.jit
def copy_part(
    Q, K, ROPE, rope_at, KEYS, TABLE, memory, WINDOW, LENGTHS, L, CAPACITY, PAGES, HEADS, TILES, PARTS, SPLIT, PAGE: gl.constexpr,
    PLAN: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    await_last(DEPENDENT)
    SLABS: gl.constexpr = PLAN.columns // 2 // WIDE
    COUNT: gl.constexpr = BLOCK // PLAN.box
    SIZE: gl.constexpr = COUNT * K.block_type.nbytes  # of a slab of keys
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT)
    if span.high > span.low:
        mbarrier.expect(memory.queries, (2 * SLABS + 1) * Q.block_type.nbytes)
        rows = ((span.batch, span.row),)
        copy_columns(Q, memory.q_left, 0, memory.queries, rows, 0, SLABS)
        copy_columns(Q, memory.q_right, 0, memory.queries, rows, SLABS * WIDE, SLABS)
        copy_columns(Q, memory.q_rope, 0, memory.queries, rows, 2 * SLABS * WIDE, 1)
        stage = 0
        phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
        for i in range(span.high - span.low):
            key = (span.high - 1 - i) * BLOCK
            # Pages are looked up before anything is waited for, and those of a block to come beside them
            found, missing = find_boxes(TABLE, span, key, PAGES, PAGE, PLAN)
            far, _ = find_boxes(TABLE, span, key - AWAY * BLOCK, PAGES, PAGE, PLAN)
            left = memory.left.full.index(stage)
            mbarrier.wait(memory.left.empty.index(stage), phase)
            mbarrier.expect(left, SLABS * SIZE)
            copy_columns(K, memory.k_left, stage, left, found, 0, SLABS)
            right = memory.right.full.index(stage)
            mbarrier.wait(memory.right.empty.index(stage), phase)
            if TABLE is not None:
                memory.missing.index(stage).store(gl.full([1], missing, gl.int32, ALONE))
                barrier()  # `expect` arrives: the number must be there
            mbarrier.expect(right, (SLABS + 1) * SIZE)
            copy_columns(K, memory.k_right, stage, right, found, SLABS * WIDE, SLABS)
            copy_columns(ROPE, memory.k_rope, stage, right, found, rope_at, 1)
            if PLAN.ahead > 0:
                if key >= (span.low + AWAY) * BLOCK:
                    for n in gl.static_range(COUNT):
                        page, place = far[n]
                        ask_for(KEYS, gl.minimum(page, PAGES - 1), place, PLAN.ahead)
            stage, phase = advance(stage, phase, PLAN.stages)


# ---- the warpgroups --------------------------------------------------------------------------------------------------


@gluon.jit
def matrices(boxes, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Boxes as products take them: COUNT times [64, COLUMNS]."""
    return reinterpret(boxes, boxes.dtype, [COUNT, 64, COLUMNS], rows_of(COLUMNS))


@gluon.jit
def clear_unseen(boxes, live, COUNT: gl.constexpr):
    """Make the keys from the `live`-th on 0 in the first stage, COUNT slabs of 64 columns, of a ring; for the warpgroup alone."""
    slabs = matrices(boxes, boxes.shape[0] * boxes.shape[2] // BLOCK, WIDE)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, CLEARED))
    for i in gl.static_range(COUNT):
        slab = slabs.index(i)
        slab.store(gl.where(gl.expand_dims(row < live, 1), slab.load(CLEARED), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def issue_scores(memory, stage, phase, into, PLAN: gl.constexpr):
    """Begin q @ k.T of a stage, in three products, when its columns are there. `into` is what it is made of, whatever it held."""
    HALF: gl.constexpr = PLAN.columns // 2
    STAGES: gl.constexpr = PLAN.stages
    only = unknown_zero()  # addresses of queries would stay in registers, of which there are none left
    mbarrier.wait(memory.left.full.index(stage), phase)
    k = matrices(memory.k_left, STAGES, HALF).index(stage).permute((1, 0))
    s = warpgroup_mma(matrices(memory.q_left, 1, HALF).index(only), k, into, use_acc=False, is_async=True)
    mbarrier.wait(memory.right.full.index(stage), phase)
    k = matrices(memory.k_right, STAGES, HALF).index(stage).permute((1, 0))
    s = warpgroup_mma(matrices(memory.q_right, 1, HALF).index(only), k, s, is_async=True)
    k = matrices(memory.k_rope, STAGES, WIDE).index(stage).permute((1, 0))
    return warpgroup_mma(matrices(memory.q_rope, 1, WIDE).index(only), k, s, is_async=True)


@gluon.jit
def rounded(p, like):
    """Weights as products take them. One packed conversion a pair, which stays where it is written: after the products that still
    read the weights before."""
    return gl.inline_asm_elementwise(PACK[like.dtype == gl.float16], "=r,r,r", [p], like.dtype, False, 2)


@gluon.jit
def issue_left(o, weights, memory, stage, PLAN: gl.constexpr):
    """Begin o += weights @ v of the left columns of a stage."""
    HALF: gl.constexpr = PLAN.columns // 2
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(HALF), k_width=2)
    v = matrices(memory.k_left, PLAN.stages, HALF).index(stage)
    return warpgroup_mma(gl.convert_layout(weights, OPERAND), v, o, is_async=True)


@gluon.jit
def show(weights, fade, memory, turn):
    """Store weights and factors for the right warpgroup, when it has taken those before."""
    mbarrier.wait(memory.taken, turn)
    memory.weights.store(weights)
    memory.factors.store(fade)
    fence_async_shared()


@gluon.jit
def missing_of(TABLE, memory, stage):
    """Bits of the boxes of a stage for which there is no page."""
    if TABLE is None:
        return 0
    else:
        return gl.sum(memory.missing.index(stage).load(SHOWN), 0)


@gluon.jit
def spoilt(TABLE, s, missing, PLAN: gl.constexpr):
    """Scores with NaN for keys that have no page."""
    if TABLE is None:
        return s
    else:
        j = gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
        lost = ((missing >> (j // PLAN.box)) & 1) != 0
        return gl.where(gl.expand_dims(lost, 0), float("nan"), s)


@gluon.jit
def walk(state, TABLE, memory, high, low, SCORES, WINDOW, rows, PLAN: gl.constexpr, EDGE: gl.constexpr):
    """Take in the blocks from before `high` down to `low`, after one whose weights are in `state` and whose left values are in its
    stage. Before and after a step none of the left warpgroup's products is under way. EDGE: some rows do not see all keys."""
    o, p, weights, top, total, fade, lost, stage, phase, turn = state
    for i in range(high - low):
        key = (high - 1 - i) * BLOCK
        following, its_phase = advance(stage, phase, PLAN.stages)
        o = issue_left(o, weights, memory, stage, PLAN)
        if not PLAN.late:
            show(weights, fade, memory, turn)
            mbarrier.arrive(memory.told, count=1)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(memory.left.empty.index(stage), count=1)
        s = issue_scores(memory, following, its_phase, p, PLAN)
        if PLAN.late:
            show(weights, fade, memory, turn)
            o = warpgroup_mma_wait(3, deps=(o,))
            mbarrier.arrive(memory.left.empty.index(stage), count=1)
            # The last of the scores' products, a ninth of them, is under way while the other warpgroup wakes
            o = warpgroup_mma_wait(1, deps=(o,))
            mbarrier.arrive(memory.told, count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
        missing = missing_of(TABLE, memory, following)
        if EDGE:
            s = spoilt(TABLE, s, missing, PLAN)
        else:  # which all rows see
            lost |= missing
        p, top, total, fade = weigh(s, top, total, SCORES, WINDOW, rows, key, EDGE, LAZY)
        weights = rounded(p, memory.weights)
        o = scaled_where_moved(o, fade)
        # For no product: so that sums are multiplied here, and not after the next product is issued
        o = warpgroup_mma_wait(0, deps=(o,))
        stage = following
        phase = its_phase
        turn ^= 1
    return o, p, weights, top, total, fade, lost, stage, phase, turn


@gluon.jit
def store_half(o, share, O, stride_op, span, HEADS, FROM: gl.constexpr):
    """Sums times what each row is to be multiplied with, columns FROM on, of rows that are there. A part that saw nothing says so
    by its lse alone, but for the first."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    row = span.row + gl.arange(0, ROWS, BY_ROW)
    live = (row < span.row + span.rows) & ((span.high > span.low) | (span.part == 0))
    at = (row // HEADS).to(gl.int64) * O.stride_t + (row % HEADS).to(gl.int64) * O.stride_h
    to = O.data + (span.batch.to(gl.int64) * O.stride_b + span.part.to(gl.int64) * stride_op + FROM)
    c = gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
    y = scaled_rows(o, share).to(O.data.dtype.element_ty)
    gl.store(to + gl.expand_dims(at, 1) + gl.expand_dims(c, 0), y, gl.expand_dims(live, 1))


@gluon.jit
def attend_left(
    O, stride_op, LSE, stride_lp, TABLE, memory, SCORES, WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT,
    PLAN: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    await_last(DEPENDENT)
    HALF: gl.constexpr = PLAN.columns // 2
    SHAPED: gl.constexpr = sums_of(64)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SHAPED)
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT)
    row = span.row + gl.arange(0, ROWS, BY_ROW)
    top = gl.full([64], float("-inf"), gl.float32, BY_ROW)
    total = gl.zeros([64, 8], gl.float32, sums_of(8))
    o = gl.zeros([64, HALF], gl.float32, sums_of(HALF))
    lost = 0
    turn = 1
    if span.high > span.low:
        shift = span.count - L
        rows = Rows(row // HEADS - span.first, span.first + shift, span.count, 0.0)
        _, upper = whole_blocks(WINDOW, shift, span.count, span.first, span.last, span.low, span.high, BLOCK)
        key = (span.high - 1) * BLOCK
        mbarrier.wait(memory.queries, 0)
        s = issue_scores(memory, 0, 0, gl.zeros([64, 64], gl.float32, SHAPED), PLAN)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = spoilt(TABLE, s, missing_of(TABLE, memory, 0), PLAN)
        p, top, total, fade = weigh(s, top, total, SCORES, WINDOW, rows, key, True, False)
        weights = rounded(p, memory.weights)
        if key + BLOCK > span.stop:
            clear_unseen(memory.k_left, span.stop - key, HALF // WIDE)
        state = (o, p, weights, top, total, fade, lost, 0, 0, turn)
        state = walk(state, TABLE, memory, span.high - 1, upper, SCORES, WINDOW, rows, PLAN, True)
        state = walk(state, TABLE, memory, upper, span.low, SCORES, WINDOW, rows, PLAN, False)
        o, p, weights, top, total, fade, lost, stage, phase, turn = state
        o = issue_left(o, weights, memory, stage, PLAN)
        show(weights, fade, memory, turn)
        mbarrier.arrive(memory.told, count=1)
        o = warpgroup_mma_wait(0, deps=(o,))
        turn ^= 1
    whole = gl.convert_layout(gl.sum(total, 1), BY_ROW)
    empty = whole == 0.0
    bad = gl.where(lost != 0, float("nan"), 0.0)
    if LENGTHS.kv_len is not None:  # more keys than there is room for: none were walked over
        bad += gl.where(span.wrong, float("nan"), 0.0)
    share = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, whole)) + bad
    lse = gl.where(empty, float("-inf"), top * LN2 + gl.log(gl.where(empty, 1.0, whole))) + bad
    mbarrier.wait(memory.taken, turn)
    memory.factors.store(share)
    mbarrier.arrive(memory.told, count=1)
    at = (row // HEADS).to(gl.int64) * LSE.stride_t + (row % HEADS).to(gl.int64) * LSE.stride_h
    to = LSE.data + (span.batch.to(gl.int64) * LSE.stride_b + span.part.to(gl.int64) * stride_lp)
    gl.store(to + at, lse, row < span.row + span.rows)
    store_half(o, share, O, stride_op, span, HEADS, 0)


@gluon.jit
def attend_right(
    O, stride_op, memory, WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT, PLAN: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    await_last(DEPENDENT)
    HALF: gl.constexpr = PLAN.columns // 2
    BY_ROW: gl.constexpr = gl.SliceLayout(1, sums_of(HALF))
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT)
    o = gl.zeros([64, HALF], gl.float32, sums_of(HALF))
    v = matrices(memory.k_right, PLAN.stages, HALF)
    unseen = (span.high > span.low) & (span.high * BLOCK > span.stop)
    stage = 0
    phase = 0
    turn = 0
    for i in range(span.high - span.low):
        mbarrier.wait(memory.right.full.index(stage), phase)
        mbarrier.wait(memory.told, turn)
        if unseen & (i == 0):
            clear_unseen(memory.k_right, span.stop - (span.high - 1) * BLOCK, HALF // WIDE)
        o = scaled_where_moved(o, memory.factors.load(BY_ROW))
        o = warpgroup_mma(memory.weights, v.index(stage), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(memory.taken, count=1)
        mbarrier.arrive(memory.right.empty.index(stage), count=1)
        stage, phase = advance(stage, phase, PLAN.stages)
        turn ^= 1
    mbarrier.wait(memory.told, turn)
    store_half(o, memory.factors.load(BY_ROW), O, stride_op, span, HEADS, HALF)


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    """At each of which one arrives a phase."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "CAPACITY", "PAGES", "TILES", "PARTS", "SPLIT", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168}, dependent=True,
)  # fmt: skip
def attention_latent_hopper(
    Q, K, ROPE, rope_at, KEYS, TABLE, O, stride_op, LSE, stride_lp, SCORES, WINDOW, LENGTHS, L, CAPACITY, PAGES, HEADS, TILES,
    PARTS, SPLIT, PROGRAMS, PAGE: gl.constexpr, PLAN: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """O and LSE of one part of the keys for a tile of rows. ROPE has the last columns of the keys, from `rope_at` on. KEYS is what
    K copies."""
    let_next_begin(DEPENDENT)
    SLABS: gl.constexpr = PLAN.columns // 2 // WIDE
    COUNT: gl.constexpr = PLAN.stages * (BLOCK // PLAN.box)
    memory = Memory(
        make_boxes(Q, SLABS),
        make_boxes(Q, SLABS),
        make_boxes(Q, 1),
        make_boxes(K, SLABS * COUNT),
        make_boxes(K, SLABS * COUNT),
        make_boxes(ROPE, COUNT),
        gl.allocate_shared_memory(gl.int32, [PLAN.stages, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(Q.dtype, [64, 64], rows_of(64)),
        gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        make_barriers(1).index(0),
        Pair(make_barriers(PLAN.stages), make_barriers(PLAN.stages)),
        Pair(make_barriers(PLAN.stages), make_barriers(PLAN.stages)),
        make_barriers(1).index(0),
        make_barriers(1).index(0),
    )
    gl.warp_specialize([
        (attend_left, (O, stride_op, LSE, stride_lp, TABLE, memory, SCORES, WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS,
                       SPLIT, PLAN, DEPENDENT)),
        (attend_right, (O, stride_op, memory, WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT, PLAN, DEPENDENT)),
        (copy_part, (Q, K, ROPE, rope_at, KEYS, TABLE, memory, WINDOW, LENGTHS, L, CAPACITY, PAGES, HEADS, TILES, PARTS, SPLIT,
                     PAGE, PLAN, DEPENDENT)),
    ], [4, 1], [208, 56])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


WIDTHS = (512, 256)  # of values: the sums of half of them are a warpgroup's
SPARE = 2048  # bytes of shared memory for barriers, factors, and what warps are started with
BESIDE = 2  # blocks that a part's beginning and its end take as long as


def plan_for(values: int, box: int, tiles: int, ahead: int, memory: int) -> Plan | None:
    """The most blocks that shared memory takes beside the queries and a block's weights; None where it takes no two."""
    block = 2 * BLOCK.value * (values + WIDE.value)
    most = (memory - SPARE - block - 2 * ROWS.value * BLOCK.value) // block
    return Plan(values, box, min(4, most), tiles > 1, ahead) if most >= 2 else None


def dense_bytes(k_cache: Tensor, box: int) -> int:
    """Of the keys of a box, if they lie side by side; or else 0."""
    return box * k_cache.shape[3] * k_cache.element_size() if k_cache.stride(1) == k_cache.shape[3] else 0


def box_rows(a: SimpleNamespace) -> int | None:
    """Keys that lie in one page wherever a block begins; None where these are not whole swizzled rows of a block."""
    page = a.k_cache.shape[1]
    if a.block_table is None or page % BLOCK.value == 0:
        return BLOCK.value
    return page if page in (32, 16) else None


def split_for(capacity: int, units: int, sms: int) -> int:
    """Keys of a part, of as many parts as end soonest with a program to an SM; what the device alone knows has no say."""
    blocks = cdiv(capacity, BLOCK.value)

    def time(parts: int) -> int:
        return cdiv(units * parts, sms) * (cdiv(blocks, parts) + BESIDE)

    most = max(1, min(capacity // LEAST, cdiv(4 * sms, units)))
    return cdiv(blocks, min(range(1, most + 1), key=time)) * BLOCK.value


def lies_in_rows(q: Tensor) -> bool:
    """Whether the heads of all tokens of a sequence are rows at one distance."""
    return q.shape[1] == 1 or q.shape[2] == 1 or q.stride(1) == q.shape[2] * q.stride(2)


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether caches are 16-bit, of one head, and values the first 512 or 256 columns of the keys, of which there are up to 64
    more, there or in `k_rope`; pages, if any, hold whole blocks of 64 keys, or 32 or 16 keys; a split is whole blocks too. Rows
    begin at multiples of 16 bytes, and those of q lie at one distance. Nothing is empty, nothing but lengths and causality says
    what is seen, and the largest product is the largest score."""
    q, k = a.q, a.k_cache
    if not target.hopper_gluon or q.dtype not in KINDS or k.dtype != q.dtype or not single(target, a):
        return False
    others = (a.v_cache, a.k_scale, a.v_scale, a.cu_seqlens_q, a.left, a.sink, a.slopes, a.tree)
    if any(given is not None for given in others) or (a.scale is not None and a.scale <= 0):
        return False
    apart = [] if a.k_rope is None else [a.k_rope]
    if k.shape[2] != 1 or any(0 in t.shape for t in (q, k, *apart)):
        return False
    values = value_columns(None, k, a.value_dim)
    if values not in WIDTHS or not 0 < q.shape[3] - values <= WIDE.value or (apart and k.shape[3] != values):
        return False
    box, capacity = box_rows(a), capacity_of(a)
    if box is None or (a.split or 0) % BLOCK.value:
        return False
    rows = q.shape[1] * q.shape[2]
    if not 0 < capacity < LONGEST or max(rows, k.shape[0]) >= LONGEST or not lies_in_rows(q):
        return False
    if cdiv(rows, ROWS.value) * q.shape[0] * cdiv(capacity, a.split or LEAST) >= 2**31:
        return False
    if plan_for(values, box, 1, 0, target.shared_memory) is None:
        return False
    return copies_in_bulk(q.flatten(1, 2), *(t.select(2, 0) for t in (k, *apart)))


def fits_call(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes the arguments and is the faster, by measurement, or was asked for."""
    return fits(target, a) and wanted_of_cache(NAME, target, a)


def forward(q: Tensor, k_cache: Tensor, v_cache: None, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    (batch, length, heads, _), values, capacity = q.shape, value_columns(None, k_cache, a.value_dim), capacity_of(a)
    check_keys(a)
    target, box = Target.at(q.device), box_rows(a)
    tiles = cdiv(length * heads, ROWS.value)
    plan = plan_for(values, box, tiles, dense_bytes(k_cache, box), target.shared_memory)
    split = a.split or split_for(capacity, tiles * batch, target.sms)
    parts = cdiv(capacity, split)
    results = results_of(a, values, parts)
    attention_latent_hopper(
        *boxes_of(a, ROWS.value, box), heads_of(k_cache), table_of(a), *results.made, bending_of(a), window_of(a), lengths_of(a),
        length, capacity, k_cache.shape[0], heads, tiles, parts, split, parts * tiles * batch,
        PAGE=0 if a.block_table is None else k_cache.shape[1], PLAN=plan,
    )  # fmt: skip
    return finished(results)


def boxes_of(a: SimpleNamespace, rows: int, box: int) -> tuple[Any, Any, Any, int]:
    """Descriptors of rows of queries, of keys, and of what has their last columns; from which column on it has them."""
    kind, values = KINDS[a.q.dtype], value_columns(None, a.k_cache, a.value_dim)
    queries = box_of(a.q.flatten(1, 2), [1, rows, WIDE.value], kind)
    keys, *apart = (box_of(t.select(2, 0), [1, box, WIDE.value], kind) for t in (a.k_cache, a.k_rope) if t is not None)
    return (queries, keys, apart[0], 0) if apart else (queries, keys, keys, values)
