"""The forward of `attention` on Hopper, in Gluon: a warp that copies, two warpgroups of 64 queries each, one program to an SM that
goes from tile to tile.

A warpgroup issues the scores of the next block of keys, then the sum of the values of the one before, and makes weights of those
scores while the sum is added up. The two issue by turns, so that one's exponentials run beside the other's products. Weights go
from registers to the tensor cores. Tiles, blocks and plans are those of `schedule.py`.

Who may write where in shared memory, and when. Queries, keys and values each have a ring of stages, and a stage two barriers,
`full` and `empty`. The copying warp fills a stage after both warpgroups have arrived at its `empty`, and its bytes arrive at
`full`. A warpgroup waits for `full` of every stage of every block, reads it by products alone, and arrives at `empty` once, after
the last of these is waited for. So a barrier is at most one phase ahead of who waits for it, and its parity is enough to tell.
The one exception to reading by products: values that no query of the sequence sees are cleared, for 0 times NaN is NaN. Both
warpgroups do that between `full` and their products, wait for each other, and arrive at `empty` after.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import (
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...device.softmax import LN2, LOG2E
from ...device.warpgroups import advance, await_turn, give_turn
from ...gemm.hopper.boxes import box_of, copies_in_bulk
from ...op import single
from ...runtime.kernel import kernel
from ..portable import bend, in_words, scores_of, sizes_of, window_of
from ..preference import wanted
from ..tiles import check_lengths, keys_seen, lengths
from .backward import fits_backward
from .meeting import meet
from .schedule import HALF, ROWS, clear_counter, plan_for, row_ends, whole_blocks, work_of

KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
LONGEST = 2**30  # queries and keys together: positions, with a window added, are 32-bit
MOST_PROGRAMS = 1024  # in the last turn some count past the last tile
WIDEST = 256  # columns of queries or values: sums of more do not stay in a warpgroup's registers
# Sums as they are stored: a thread has 16 bytes of a row, and a warp the 16 rows that its products have
STORED = gl.constexpr(gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0]))
CLEARED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ALONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # a number, of the copying warp
SHOWN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # and of a warpgroup
WORD = gl.constexpr(8)  # results in 16 bytes
NUMBERS = gl.constexpr(2)  # in their ring: the copying warp may be a tile ahead of both warpgroups
LAG = gl.constexpr(8.0)  # weights are then up to 256: far from the largest of fp16, whose small ones gain
# Whether any factor of a warp's rows, two to a thread, is not 1
MOVED = gl.constexpr(
    "{ .reg .pred moved; setp.neu.f32 moved, $2, 0f3F800000; setp.neu.or.f32 moved, $3, 0f3F800000, moved;"
    " vote.sync.any.pred moved, moved, 0xffffffff; selp.b32 $0, 1, 0, moved; mov.b32 $1, $0; }"
)
PACK = gl.constexpr(("cvt.rn.bf16x2.f32 $0, $2, $1;", "cvt.rn.f16x2.f32 $0, $2, $1;"))


class Stages(NamedTuple):
    """A ring: boxes of the columns' first part and of their second, which may be None, and a pair of barriers for each stage."""

    first: Any
    second: Any
    full: Any
    empty: Any


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any


class Turns(NamedTuple):
    """How a program comes to its next tile: by a counter of all programs, which the copying warp asks, and a ring of numbers,
    through which it tells the warpgroups; or, without one, every PROGRAMS-th is its own."""

    counter: Any
    numbers: Any
    full: Any
    empty: Any


class Rows(NamedTuple):
    """Of a warpgroup's 64 rows: how far each is below the first, that one's position among the keys, how many keys there are; the
    slope of the head in base 2, or 0."""

    below: Any
    position: Any
    count: Any
    slope: Any


# ---- products --------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def sums_of(columns):
    """The layout of 64 rows of a warpgroup's sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@triton.constexpr_function
def multiply_if(count):
    """Assembly: so many numbers times a factor each, unless an integer, the first of as many that are the same, is 0."""
    kept = "".join(f"mov.b32 ${i}, ${count + i}; " for i in range(count))
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i}; " for i in range(count))
    return f"{{ .reg .pred none; setp.eq.b32 none, ${3 * count}, 0; {kept}@none bra past; {products}past: }}"


@triton.constexpr_function
def operands_of(count):
    return ",".join(["=f"] * count + ["f"] * (2 * count) + ["r"] * count)


@triton.constexpr_function
def rows_of(columns):
    """The layout of rows of a box in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


@gluon.jit
def matrix_at(boxes, at):
    """A box of a ring as products take it: [rows, columns]."""
    return reinterpret(boxes.index(at), boxes.dtype, [boxes.shape[3], boxes.shape[4]], rows_of(boxes.shape[4]))


@gluon.jit
def issue_scores(q, k, at_q, at_k, into):
    """Begin q @ k.T of a stage each; `into` is what it is made of, whatever it held: registers that nobody needs any more."""
    s = warpgroup_mma(
        matrix_at(q.first, at_q), matrix_at(k.first, at_k).permute((1, 0)), into, use_acc=False, is_async=True
    )
    if q.second is not None:
        s = warpgroup_mma(matrix_at(q.second, at_q), matrix_at(k.second, at_k).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def issue_values(o0, o1, p0, p1, v, at):
    """Begin o += p @ v of a stage."""
    o0 = warpgroup_mma(p0, matrix_at(v.first, at), o0, is_async=True)
    if v.second is not None:
        o1 = warpgroup_mma(p1, matrix_at(v.second, at), o1, is_async=True)
    return o0, o1


@gluon.jit
def await_values(o0, o1, SECOND: gl.constexpr):
    """The sums when all products are done."""
    if SECOND:
        o0, o1 = warpgroup_mma_wait(0, deps=(o0, o1))
    else:
        o0 = warpgroup_mma_wait(0, deps=(o0,))
    return o0, o1


@gluon.jit
def as_operands(p, v):
    """Weights, rounded, as the products with both parts of the values take them. One packed conversion a pair, which stays where it
    is written: after the products that still read the weights before."""
    FIRST: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(v.first.shape[4]), k_width=2)
    packed = gl.inline_asm_elementwise(PACK[v.first.dtype == gl.float16], "=r,r,r", [p], v.first.dtype, False, 2)
    p0 = gl.convert_layout(packed, FIRST)
    if v.second is None:
        return p0, 0.0
    else:
        SECOND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(v.second.shape[4]), k_width=2)
        return p0, gl.convert_layout(packed, SECOND)


@gluon.jit
def scaled_rows(o, by):
    """o [64, n] times a number for each row."""
    return o * gl.expand_dims(gl.convert_layout(by, gl.SliceLayout(1, o.type.layout)), 1)


@gluon.jit
def scaled_where_moved(o, by):
    """The same where a factor of the warp's rows is not 1: else a warp goes past the multiplications."""
    COUNT: gl.constexpr = o.shape[0] * o.shape[1] // 128  # numbers of a thread
    by = gl.convert_layout(by, gl.SliceLayout(1, o.type.layout))
    moved = gl.inline_asm_elementwise(MOVED, "=r,=r,f,f", [by], gl.int32, False, 2)
    moved = gl.expand_dims(moved, 1)
    return gl.inline_asm_elementwise(
        multiply_if(COUNT), operands_of(COUNT), [o, gl.expand_dims(by, 1), moved], gl.float32, False, COUNT
    )


# ---- softmax ---------------------------------------------------------------------------------------------------------


@gluon.jit
def row_max(s):
    """Of 16 columns at a time first: short chains of comparisons, of which several go on at once."""
    parts = gl.max(s.reshape([s.shape[0], s.shape[1] // 16, 16]), 1)
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def part_sums(s):
    """[64, 8]: sums of every eighth column, which a thread has by itself; threads add theirs up when a tile is done."""
    return gl.convert_layout(gl.sum(s.reshape([s.shape[0], s.shape[1] // 8, 8]), 1), sums_of(8))


@gluon.jit
def hidden_out(s, WINDOW, rows, key):
    """Scores of the block that begins at `key`, with -inf where a query does not see a key."""
    start, stop = row_ends(WINDOW, rows.position + rows.below, rows.count)
    j = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    ok = j < gl.expand_dims(stop - key, 1)
    if WINDOW.left is not None:
        ok &= j >= gl.expand_dims(start - key, 1)
    return gl.where(ok, s, float("-inf"))


@gluon.jit
def bent(s, SCORES, rows, key):
    """Scores in base 2 of products q . k, capped, and less for keys that are further away."""
    s, _ = bend(SCORES, s)
    if SCORES.slopes is not None:
        j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)).to(gl.float32)
        away = (rows.below + (rows.position - key)).to(gl.float32)
        s -= rows.slope * gl.abs(gl.expand_dims(away, 1) - gl.expand_dims(j, 0))
    return s


@gluon.jit
def weigh(s, top, total, SCORES, WINDOW, rows, key, EDGE: gl.constexpr, LAZY: gl.constexpr):
    """(weights, the score whose weight is 1, the sums of all weights so far, what those before are to be multiplied with) of
    products q . k with the block of keys that begins at `key`. In base 2. EDGE: some queries do not see all of its keys.

    That score is the largest so far, or, LAZY, less than it by up to LAG: it stays while it can, so that nothing before need be
    multiplied. Sums and weights are as exact, for both are relative to it, and neither they nor 2^LAG times as much overflow.
    """
    PLAIN: gl.constexpr = SCORES.softcap is None and SCORES.slopes is None
    if not PLAIN:
        s = bent(s, SCORES, rows, key)
    if EDGE:
        s = hidden_out(s, WINDOW, rows, key)
    factor = SCORES.scale * LOG2E if PLAIN else 1.0  # above 0, so that the largest product is the largest score
    largest = row_max(s) * factor
    if LAZY:
        new = gl.where(largest > top + LAG, largest, top)
    else:
        new = gl.maximum(top, largest)
    base = new
    if EDGE:
        base = gl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
    p = gl.exp2(s * factor - gl.expand_dims(base, 1))
    fade = gl.exp2(top - base)
    return p, new, scaled_rows(total, fade) + part_sums(p), fade


# ---- the copying warp ------------------------------------------------------------------------------------------------


@gluon.jit
def copy_box(FIRST, SECOND, ring, stage, at, batch, head, row):
    """Begin to copy the rows of a head from `row` on into boxes number `at` of a ring, to arrive at a stage's barrier."""
    ready = ring.full.index(stage)
    async_load(FIRST, [batch, head, row, 0], ready, ring.first.index(at))
    if SECOND is not None:
        async_load(SECOND, [batch, head, row, FIRST.block_type.shape[3]], ready, ring.second.index(at))


@gluon.jit
def expect_boxes(FIRST, SECOND, ring, stage, phase, BOXES: gl.constexpr):
    """Wait until a stage is empty, and have its barrier wait for so many boxes."""
    SIZE: gl.constexpr = FIRST.block_type.nbytes + (0 if SECOND is None else SECOND.block_type.nbytes)
    mbarrier.wait(ring.empty.index(stage), phase)
    mbarrier.expect(ring.full.index(stage), BOXES * SIZE)


@gluon.jit
def copy_tiles(
    boxes, rings, turns, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, PROGRAMS, PLAN: gl.constexpr
):  # fmt: skip
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
            kv_head = work.head // GROUP
            key = tile.first_k + (work.high - 1) * BLOCK
            expect_boxes(K0, K1, rings.k, stage, phase, 1)
            copy_box(K0, K1, rings.k, stage, stage, work.batch, kv_head, key)
            for _ in range(work.high - work.low - 1):
                following, its_phase = advance(stage, phase, STAGES)
                expect_boxes(K0, K1, rings.k, following, its_phase, 1)
                copy_box(K0, K1, rings.k, following, following, work.batch, kv_head, key - BLOCK)
                expect_boxes(V0, V1, rings.v, stage, phase, 1)
                copy_box(V0, V1, rings.v, stage, stage, work.batch, kv_head, key)
                stage = following
                phase = its_phase
                key -= BLOCK
            expect_boxes(V0, V1, rings.v, stage, phase, 1)
            copy_box(V0, V1, rings.v, stage, stage, work.batch, kv_head, key)
            stage, phase = advance(stage, phase, STAGES)
        number += PROGRAMS
        if turns.counter is not None:  # which takes its time to answer, while the last copies are on their way
            number = gl.atomic_add(turns.counter, 1, sem="relaxed") + PROGRAMS
            mbarrier.wait(turns.empty.index(slot), phase_n)
            turns.numbers.index(slot).store(gl.full([1], number, gl.int32, ALONE))
            mbarrier.arrive(turns.full.index(slot), count=1)
            slot, phase_n = advance(slot, phase_n, NUMBERS)


# ---- the warpgroups --------------------------------------------------------------------------------------------------


@gluon.jit
def clear_part(boxes, stage, start, stop, W: gl.constexpr):
    """Make the rows of a box outside of [start, stop) 0. A box lies as pieces of 64 columns, or of all if it has fewer, and 64
    rows, of which each warpgroup clears every other one."""
    HIGH: gl.constexpr = boxes.shape[3] // 64
    WIDE: gl.constexpr = boxes.shape[4] if boxes.shape[4] < 64 else 64
    PIECES: gl.constexpr = HIGH * (boxes.shape[4] // WIDE)
    pieces = reinterpret(boxes, boxes.dtype, [boxes.shape[0] * PIECES, 64, WIDE], rows_of(WIDE))
    for i in gl.static_range(W, PIECES, 2):
        piece = pieces.index(stage * PIECES + i)
        row = i % HIGH * 64 + gl.arange(0, 64, gl.SliceLayout(1, CLEARED))
        live = gl.expand_dims((row >= start) & (row < stop), 1)
        piece.store(gl.where(live, piece.load(CLEARED), 0.0))


@gluon.jit
def clear_unseen(v, stage, phase, start, stop, W: gl.constexpr):
    """Make the values of a stage outside of [start, stop) 0, for both warpgroups. Each clears its part after the copy has arrived,
    shows by the fence what it wrote to the products to come, and goes on when both have."""
    mbarrier.wait(v.full.index(stage), phase)
    clear_part(v.first, stage, start, stop, W)
    if v.second is not None:
        clear_part(v.second, stage, start, stop, W)
    fence_async_shared()
    meet()


@gluon.jit
def walk(state, rings, at_q, high, low, SCORES, WINDOW, rows, PLAN: gl.constexpr, EDGE: gl.constexpr, W: gl.constexpr):
    """Take in the blocks from before `high` down to `low`, after one whose weights are in `state` and whose values are in its
    stage.

    Before and after a step no product is under way. In it, the scores of a block are issued, then the values of the block before,
    which go on while scores become weights. Products end in the order in which they were issued.
    """
    o0, o1, p, p0, p1, top, total, stage, phase = state
    SECOND: gl.constexpr = rings.v.second is not None
    for i in range(high - low):
        key = (high - 1 - i) * PLAN.block
        following, its_phase = advance(stage, phase, PLAN.stages)
        mbarrier.wait(rings.k.full.index(following), its_phase)
        await_turn(W)
        s = issue_scores(rings.q, rings.k, at_q, following, p)
        mbarrier.wait(rings.v.full.index(stage), phase)
        o0, o1 = issue_values(o0, o1, p0, p1, rings.v, stage)
        give_turn(W)
        s = warpgroup_mma_wait(2 if SECOND else 1, deps=(s,))
        mbarrier.arrive(rings.k.empty.index(following), count=1)
        p, top, total, fade = weigh(s, top, total, SCORES, WINDOW, rows, key, EDGE, PLAN.lazy)
        if PLAN.lazy:
            # The assembler moves a wait up over what it does not need, but not over a branch, which a wait of a passed barrier is
            p = warpgroup_mma_wait(2 if SECOND else 1, deps=(p,))
            mbarrier.wait(rings.v.full.index(stage), phase)
        o0, o1 = await_values(o0, o1, SECOND)
        mbarrier.arrive(rings.v.empty.index(stage), count=1)
        p0, p1 = as_operands(p, rings.v)
        if PLAN.lazy:
            o0 = scaled_where_moved(o0, fade)
            if SECOND:
                o1 = scaled_where_moved(o1, fade)
        else:
            o0 = scaled_rows(o0, fade)
            if SECOND:
                o1 = scaled_rows(o1, fade)
        # For no product: so that sums are multiplied here, and not after the next product is issued
        o0, o1 = await_values(o0, o1, SECOND)
        stage = following
        phase = its_phase
    return o0, o1, p, p0, p1, top, total, stage, phase


@gluon.jit
def store_sums(o, O, token0, rows, batch, head, FROM: gl.constexpr, COLUMNS: gl.constexpr):
    """The first `rows` of [64, n] sums, columns FROM on of a head; not those past its COLUMNS."""
    y = gl.convert_layout(o.to(O.data.dtype.element_ty), STORED)
    r = gl.arange(0, 64, gl.SliceLayout(1, STORED))
    c = FROM + gl.arange(0, o.shape[1], gl.SliceLayout(0, STORED))
    first = batch.to(gl.int64) * O.stride_b + head.to(gl.int64) * O.stride_h + token0.to(gl.int64) * O.stride_t
    below = r.to(gl.int64) * O.stride_t
    if O.stride_d is None:  # strides count words
        first = first * WORD
        below = below * WORD
    inside = gl.expand_dims(r < rows, 1)
    if FROM + o.shape[1] > COLUMNS:
        inside = inside & gl.expand_dims(c < COLUMNS, 0)
    gl.store(O.data + first + gl.expand_dims(below, 1) + gl.expand_dims(c, 0), y, inside)


@gluon.jit
def attend_tiles(
    O, LSE, SINK, rings, turns, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, PROGRAMS, SIZES: gl.constexpr,
    PLAN: gl.constexpr, CLEARS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W."""
    BLOCK: gl.constexpr = PLAN.block
    STAGES: gl.constexpr = PLAN.stages
    V0: gl.constexpr = SIZES.V0
    V1: gl.constexpr = SIZES.V1
    SHAPED: gl.constexpr = sums_of(BLOCK)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SHAPED)
    stage_q = 0
    phase_q = 0
    stage = 0
    phase = 0
    below = gl.arange(0, 64, BY_ROW)
    slot = 0
    phase_n = 0
    if W == 1:
        give_turn(W)
    number = gl.program_id(0)
    while number < TILES * HEADS * BATCH:
        work = work_of(number, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, PLAN)
        tile = work.tile
        first = tile.start + W * HALF
        left = work.rows - W * HALF  # of this warpgroup's; none are left in some tiles, which it goes over all the same
        top = gl.full([64], float("-inf"), gl.float32, BY_ROW)
        total = gl.zeros([64, 8], gl.float32, sums_of(8))
        if SINK is not None:  # one more key, whose value is 0
            sink = gl.load(SINK + work.head).to(gl.float32) * LOG2E
            top = gl.zeros([64], gl.float32, BY_ROW) + sink
            total += gl.where(sink == float("-inf"), 0.0, 0.125)  # in eight parts
        o0 = gl.zeros([64, V0], gl.float32, sums_of(V0))
        o1 = 0.0
        if V1 > 0:
            o1 = gl.zeros([64, V1], gl.float32, sums_of(V1))
        if work.high > work.low:
            shift = work.count - tile.count_q
            slope = 0.0
            if SCORES.slopes is not None:
                slope = gl.load(SCORES.slopes + work.head).to(gl.float32) * LOG2E
            rows = Rows(below, first + shift, work.count, slope)
            lower, upper = whole_blocks(
                WINDOW, shift, work.count, first, first + gl.minimum(left, HALF) - 1, work.low, work.high, BLOCK
            )
            at_q = 2 * stage_q + W
            key = (work.high - 1) * BLOCK
            mbarrier.wait(rings.q.full.index(stage_q), phase_q)
            mbarrier.wait(rings.k.full.index(stage), phase)
            s = issue_scores(rings.q, rings.k, at_q, stage, gl.zeros([64, BLOCK], gl.float32, SHAPED))
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(rings.k.empty.index(stage), count=1)
            p, top, total, _ = weigh(s, top, total, SCORES, WINDOW, rows, key, True, False)
            p0, p1 = as_operands(p, rings.v)
            if CLEARS:
                # Of the blocks that are walked over, the last alone can reach past what a sequence's queries see, and the first
                # alone begin before it. Both warpgroups find the same of the same block.
                start, stop, _, _ = keys_seen(WINDOW, shift, work.count, 0, tile.count_q - 1)
                if (key < start) | (key + BLOCK > stop):
                    clear_unseen(rings.v, stage, phase, start - key, stop - key, W)
            state = (o0, o1, p, p0, p1, top, total, stage, phase)
            state = walk(state, rings, at_q, work.high - 1, upper, SCORES, WINDOW, rows, PLAN, True, W)
            state = walk(state, rings, at_q, upper, lower, SCORES, WINDOW, rows, PLAN, False, W)
            if WINDOW.left is not None:
                state = walk(state, rings, at_q, lower, work.low, SCORES, WINDOW, rows, PLAN, True, W)
            o0, o1, p, p0, p1, top, total, stage, phase = state
            mbarrier.arrive(rings.q.empty.index(stage_q), count=1)
            stage_q, phase_q = advance(stage_q, phase_q, PLAN.queries)
            mbarrier.wait(rings.v.full.index(stage), phase)
            if CLEARS:
                key = work.low * BLOCK
                if (key < start) & (work.high - work.low > 1):
                    clear_unseen(rings.v, stage, phase, start - key, stop - key, W)
            o0, o1 = issue_values(o0, o1, p0, p1, rings.v, stage)
            o0, o1 = await_values(o0, o1, V1 > 0)
            mbarrier.arrive(rings.v.empty.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
        whole = gl.convert_layout(gl.sum(total, 1), BY_ROW)
        empty = whole == 0.0
        share = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, whole))
        lse = gl.where(empty, float("-inf"), top * LN2 + gl.log(gl.where(empty, 1.0, whole)))
        if LENGTHS.kv_len is not None:  # more keys than there is room for: none were walked over
            lse += gl.where(work.wrong, float("nan"), 0.0)
            share += gl.where(work.wrong, float("nan"), 0.0)
        token = tile.first_q + first
        at = (work.batch.to(gl.int64) * HEADS + work.head) * L + token
        gl.store(LSE + at + below, lse, below < left)
        store_sums(scaled_rows(o0, share), O, token, left, work.batch, work.head, 0, SIZES.V)
        if V1 > 0:
            store_sums(scaled_rows(o1, share), O, token, left, work.batch, work.head, V0, SIZES.V)
        number += PROGRAMS
        if turns.counter is not None:
            mbarrier.wait(turns.full.index(slot), phase_n)
            number = gl.sum(turns.numbers.index(slot).load(SHOWN), 0)
            mbarrier.arrive(turns.empty.index(slot), count=1)
            slot, phase_n = advance(slot, phase_n, NUMBERS)


@gluon.jit
def make_boxes(BOX, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(BOX.dtype, [COUNT] + BOX.block_type.shape, BOX.layout)


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """`full`, at which the copying warp arrives, and `empty`, at which both warpgroups do."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return full, empty


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "KEYS", "TILES", "BATCH", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def attention_forward_hopper(
    Q0, Q1, K0, K1, V0, V1, O, LSE, SINK, COUNTER, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, PROGRAMS,
    SIZES: gl.constexpr, PLAN: gl.constexpr, CLEARS: gl.constexpr,
):  # fmt: skip
    """CLEARS: blocks may hold keys that no query of their sequence sees. COUNTER: 0, or None."""
    STAGES: gl.constexpr = PLAN.stages
    QUERIES: gl.constexpr = PLAN.queries
    boxes = (Q0, Q1, K0, K1, V0, V1)
    q0 = make_boxes(Q0, 2 * QUERIES)
    k0 = make_boxes(K0, STAGES)
    v0 = make_boxes(V0, STAGES)
    q1 = Q1  # None, or else:
    k1 = K1
    v1 = V1
    if Q1 is not None:
        q1 = make_boxes(Q1, 2 * QUERIES)
        k1 = make_boxes(K1, STAGES)
    if V1 is not None:
        v1 = make_boxes(V1, STAGES)
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
        (copy_tiles, (boxes, rings, turns, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, PROGRAMS, PLAN)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether heads are 16-bit, of widths that are multiples of 8 up to 256, in rows that begin at multiples of 16 bytes; nothing
    is empty, nothing but windows and lengths of sequences says what is seen, and the largest product is the largest score."""
    q, k, v = a.q, a.k, a.v
    if not target.hopper_gluon or q.dtype not in KINDS or not single(target, a):
        return False
    if a.mask is not None or (a.kv_len is not None and a.kv_len.dim() == 2) or (a.scale is not None and a.scale <= 0):
        return False
    if any(t.shape[-1] % 8 or t.shape[-1] > WIDEST for t in (q, v)) or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if q.shape[1] + k.shape[1] >= LONGEST or tiles_of(a) >= 2**31 - MOST_PROGRAMS:
        return False
    if plan_for(sizes_of(q, v), target.shared_memory) is None:
        return False
    return copies_in_bulk(*(t.transpose(1, 2) for t in (q, k, v)))


def fits_call(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes the arguments and is the faster, by measurement, or was asked for. Who asks for it by name has it both ways:
    not where a gradient is wanted that it has none for."""
    graded = a.backend == "hopper" and torch.is_grad_enabled() and any(t.requires_grad for t in (a.q, a.k, a.v))
    return fits(target, a) and wanted("hopper", "forward", target, a) and (not graded or fits_backward(target, a))


def tiles_of(a: SimpleNamespace) -> int:
    """How many tiles of all heads there are at most."""
    more = 0 if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0] + 1
    return (cdiv(a.q.shape[1], ROWS.value) + more) * a.q.shape[2] * a.q.shape[0]


def boxes_of(t: Tensor, rows: int, first: int, second: int) -> tuple[Any, Any]:
    """Descriptors of both parts of the columns of [batch, tokens, heads, columns]; past the last column they bring 0."""
    by_head, kind = t.transpose(1, 2), KINDS[t.dtype]
    return tuple(box_of(by_head, [1, 1, rows, width], kind) if width else None for width in (first, second))


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k=k, v=v, **options)
    batch, length, heads, _ = q.shape
    o = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    # The caller's memory for o may have any strides; the kernel writes whole columns
    whole = o if o.stride(-1) == 1 else torch.empty(o.shape, dtype=o.dtype, device=o.device)
    check_lengths("attention", q, k, a.kv_len, a.cu_seqlens_q, a.cu_seqlens_k)
    sizes, window, target = sizes_of(q, v), window_of(a), Target.at(q.device)
    plan = plan_for(sizes, target.shared_memory)
    how, tiles = lengths(a.cu_seqlens_q, a.cu_seqlens_k, length, k.shape[1], a.kv_len, ROWS.value, False)
    programs, counter = min(target.sms, tiles * heads * batch), None
    # Where tiles differ in length, a program takes the next one when it is done, for the price of a launch before. The busiest then
    # has 1.00 to 1.03 of its share of causal blocks; with every PROGRAMS-th tile it would have 1.03 to 1.46, counted on 132 SMs.
    even = window.right is None and a.cu_seqlens_q is None and a.kv_len is None
    if not even and tiles * heads * batch > programs:
        counter = torch.empty(1, dtype=torch.int32, device=q.device)
        clear_counter(counter)
    attention_forward_hopper(
        *boxes_of(q, HALF.value, sizes.D0, sizes.D1), *boxes_of(k, plan.block, sizes.D0, sizes.D1),
        *boxes_of(v, plan.block, sizes.V0, sizes.V1), in_words(whole), lse, None if a.sink is None else a.sink.contiguous(),
        counter, scores_of(a), window, how, length, k.shape[1], heads, heads // k.shape[2], batch, tiles, programs, SIZES=sizes,
        PLAN=plan, CLEARS=a.cu_seqlens_q is not None or a.kv_len is not None or window.left is not None,
    )  # fmt: skip
    if whole is not o:
        o.copy_(whole)
    return o, lse
