"""Attention over keys in codes on Hopper, in Gluon: `forward.py`'s program, whose scores are products of 8-bit codes, at twice the
rate. Values and weights are 16-bit as there, or codes too: `coded_values.py`.

    s = (code_q . code_k) * scale_k * (scale_q * scale) + q . mean * scale

A warpgroup quantises its 64 queries when it comes to a tile, where they have arrived as numbers, and keeps their codes in
registers, a quarter of what its sums take: its products read keys alone from shared memory. The scale of a key comes with it, in
the same stage: a box of as many numbers as a block has keys. What is of a row, its scale and the product with the mean, costs
nothing in the loop: it is part of the factor and of the base of the exponential. So is what is of a block: where that has one
scale, threads read it from memory when they come to the block, long before they need it, and no box of scales is copied.

Who may write where is as `forward.py` has it, but that threads read scales. A stage is given back after a barrier of the
warpgroup's threads, which have read it then: so nobody reads what is copied anew. Scales of keys are read before the turn, whose
barrier it is. Where values are codes they are read while scores are made; where values are numbers, that leaves too few registers.
Read after scores have come, the assembler of Triton 3.6 waits for each pair of them in turn. Scales of values are read among the
exponentials, and their stage is given back in the next step, after the barrier of the turn.

What bounds it is instructions that a scheduler issues, of two warps, more than products. So where values are codes, sums stay in
the tensor cores for a few blocks, and are multiplied only where their exponent moves: 579 instructions for 64 queries and 128 keys
with a scale for each key, where adding each block's sums to others in registers took 700, and waited for them with nothing else to
do. With one scale for a block they are 444.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import (
    async_load,
    barrier,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...device.quantize import amax
from ...device.softmax import LN2, LOG2E
from ...device.warpgroups import advance, await_turn, give_turn
from ...gemm.hopper.boxes import box_of, copies_in_bulk
from ...op import single
from ...runtime.kernel import kernel
from ..cache_write import codes_of, own_scale
from ..coded_rows import SCALED
from ..portable import Sizes, heads_of, parts_of, scores_of, window_of
from ..preference import wanted_of_codes
from ..tiles import check_lengths, keys_seen, lengths
from .coded_values import (
    ASIDE,
    MOST_EMPTY,
    blocks_of,
    codes_of_words,
    copy_turned,
    divided_at,
    first_block,
    log_divisor_at,
    next_exponent,
    set_aside,
    turned,
    weights_as_words,
    with_aside,
)
from .forward import (
    ALONE,
    KINDS,
    LAG,
    LONGEST,
    MOST_PROGRAMS,
    NUMBERS,
    SHOWN,
    Rings,
    Rows,
    Stages,
    Turns,
    as_operands,
    bent,
    boxes_of,
    clear_unseen,
    copy_box,
    expect_boxes,
    hidden_out,
    issue_values,
    make_barriers,
    make_boxes,
    matrix_at,
    part_sums,
    row_max,
    scaled_rows,
    scaled_where_moved,
    store_sums,
    sums_of,
    tiles_of,
)
from .schedule import HALF, ROWS, SPARE, clear_counter, row_ends, whole_blocks, work_of

CODES = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}
WIDTHS = (64, 128)  # columns of queries and of values: a box then is one part, of rows that are swizzled whole
LEAST = gl.constexpr(2.0**-126)  # of a factor of scores: 0 times -inf, what a key that is not seen has, would be NaN
TOGETHER = 8  # blocks of keys: `coded_values.py`
GATHERED = 256  # keys whose scales a program puts side by side


class Plan(NamedTuple):
    """`Plan` of `schedule.py`; `lazy`: sums are multiplied only where the largest score has moved by more than a few powers of two;
    `together`: of how many blocks tensor cores add up products of values in codes by themselves."""

    block: int
    stages: int
    queries: int
    lazy: bool
    together: int


class Scales(NamedTuple):
    """Boxes of scales of keys and of values, in the stages of these, and both warpgroups' room for sums that are set aside; `v` and
    `aside` are None where values are numbers. Where a block has one scale: scales of keys, and logarithms of those of values, in
    memory."""

    k: Any
    v: Any
    aside: Any


class Place(NamedTuple):
    """Of a tile's keys: their batch and head, the first token of their sequence, and its first block."""

    batch: Any
    head: Any
    first: Any
    block: Any


# ---- products --------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def scores_in(block):
    """The layout of 64 rows of products of codes."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 32])


@triton.constexpr_function
def codes_in(columns):
    """The layout of rows of codes in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=columns, element_bitwidth=8, rank=2)


@gluon.jit
def keys_at(boxes, at):
    """A box of codes as products take it: [columns, keys]."""
    codes = reinterpret(boxes.index(at), boxes.dtype, [boxes.shape[3], boxes.shape[4]], codes_in(boxes.shape[4]))
    return codes.permute((1, 0))


@gluon.jit
def scales_at(boxes, at, SHAPED: gl.constexpr):
    """The scales of a block of keys, [1, keys]."""
    flat = reinterpret(boxes.index(at), gl.float32, [boxes.shape[4]], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.expand_dims(flat.load(gl.SliceLayout(0, SHAPED)), 0)


@gluon.jit
def number_of_head(S, place, token):
    at = place.batch.to(gl.int64) * S.stride_b + place.head.to(gl.int64) * S.stride_h + token.to(gl.int64) * S.stride_t
    return gl.load(S.data + at)


@gluon.jit
def scales_of_block(scales, place, key, BLOCK: gl.constexpr):
    """(the scale of keys, NaN if it is not finite, which is that of no codes; the logarithm of that of values, 0 where they are
    numbers) of the block that begins at a key of its sequence."""
    by_key = number_of_head(scales.k, place, place.first + key)
    log_by = 0.0
    if scales.v is not None:
        log_by = number_of_head(scales.v, place, place.block + key // BLOCK)
    return by_key + by_key * 0.0, log_by


@gluon.jit
def factor_of(by_row):
    """Factors of scores, none of them 0."""
    return gl.where(by_row < LEAST, LEAST, by_row)


@gluon.jit
def query_codes(y, same, FORMAT: gl.constexpr):
    """(codes of rows, laid out as `same`, which has the same numbers, and their scales as y has rows). Rows are reduced in y, the
    layout of a product's sums: in that of its operands Triton before 3.7 is not known to (`toolchain/reductions.py`)."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, same.type.layout)
    s, mult = own_scale(amax(y, 1), FORMAT)
    spread = gl.expand_dims(gl.convert_layout(s, BY_ROW), 1)
    return codes_of(same, spread, gl.expand_dims(gl.convert_layout(mult, BY_ROW), 1), FORMAT), s


@gluon.jit
def issue_codes(codes, k, at, into):
    """Begin codes @ k.T of a stage; `into` is what it is made of, whatever it held: registers that nobody needs any more."""
    if k.first.dtype == gl.int8:
        into = into.to(gl.int32, bitcast=True)
    return warpgroup_mma(codes, keys_at(k.first, at), into, use_acc=False, is_async=True)


# ---- softmax ---------------------------------------------------------------------------------------------------------


@gluon.jit
def scores_of_codes(
    s, by_key, by_row, shift, SCORES, WINDOW, rows, key, BY_BLOCK: gl.constexpr, EDGE: gl.constexpr
):  # fmt: skip
    """(scores, the factor and the shift that they still lack, the largest of each row) of products of codes, in base 2. `by_key`:
    scales of keys, [1, keys], or one for all."""
    LAID: gl.constexpr = by_row.type.layout
    s = s.to(gl.float32)
    if BY_BLOCK:
        by_row = factor_of(by_row * by_key)
    else:
        s *= by_key
    if SCORES.softcap is not None or SCORES.slopes is not None:
        s = bent(s * gl.expand_dims(by_row, 1) + gl.expand_dims(shift, 1), SCORES, rows, key)
        by_row = gl.full([64], 1.0, gl.float32, LAID)
        shift = gl.zeros([64], gl.float32, LAID)
    if EDGE:
        s = hidden_out(s, WINDOW, rows, key)
    return s, by_row, shift, row_max(s) * by_row + shift  # by_row is above 0: the largest product is the largest score


@gluon.jit
def weigh_codes(
    s, by_key, by_row, shift, top, total, SCORES, WINDOW, rows, key, BY_BLOCK: gl.constexpr, EDGE: gl.constexpr,
    LAZY: gl.constexpr,
):  # fmt: skip
    """`weigh` of products of codes."""
    s, by_row, shift, largest = scores_of_codes(s, by_key, by_row, shift, SCORES, WINDOW, rows, key, BY_BLOCK, EDGE)
    if LAZY:
        new = gl.where(largest > top + LAG, largest, top)
    else:
        new = gl.maximum(top, largest)
    base = new
    if EDGE:
        base = gl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
    p = gl.exp2(s * gl.expand_dims(by_row, 1) - gl.expand_dims(base - shift, 1))
    fade = gl.exp2(top - base)
    return p, new, scaled_rows(total, fade) + part_sums(p), fade


@gluon.jit
def weigh_below(
    s, by_row, shift, largest, down, top, total, scales, stage, SUMS: gl.constexpr, BY_BLOCK: gl.constexpr, EDGE: gl.constexpr
):  # fmt: skip
    """(weights of scores, of which the largest is 2^-down, times the scales of their values as words of codes, the largest score so
    far, the sums of all weights relative to it). Weights go around the loop as registers alone."""
    base = largest + down
    new = gl.maximum(top, largest)
    known = new
    if EDGE:
        base = gl.where(largest == float("-inf"), 0.0, base)  # of rows that see nothing of the block
        known = gl.where(new == float("-inf"), 0.0, new)  # and of those that have seen nothing yet
    p = gl.exp2(s * gl.expand_dims(by_row, 1) - gl.expand_dims(base - shift, 1))
    if BY_BLOCK:
        words = weights_as_words(p, SUMS)
        # What is added up is a copy, which takes no instruction: the assembler of Triton 3.6 takes one more for each word of codes
        # of what is added up itself, where else the second conversion packs it
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [p], gl.float32, False, 1)
    else:
        SHAPED: gl.constexpr = s.type.layout
        words = weights_as_words(p * divided_at(scales.v, stage, SHAPED), SUMS)
    share = gl.exp2(base - known)
    if EDGE:
        share = gl.where(largest == float("-inf"), 0.0, share)
    return p, words, new, scaled_rows(total, gl.exp2(top - known)) + scaled_rows(part_sums(p), share)


# ---- the copying warp ------------------------------------------------------------------------------------------------


@gluon.jit
def copy_keys(K, S, ring, scales, stage, phase, batch, head, key, BY_BLOCK: gl.constexpr):
    """Copy a block of codes and their scales, if each has one, into a stage when it is empty."""
    mbarrier.wait(ring.empty.index(stage), phase)
    ready = ring.full.index(stage)
    if BY_BLOCK:
        mbarrier.expect(ready, K.block_type.nbytes)
    else:
        mbarrier.expect(ready, K.block_type.nbytes + S.block_type.nbytes)
        # A copy begins at a multiple of 16 bytes, keys of a packed sequence anywhere: row c has scales moved down by c
        async_load(S, [batch, head, key % 4, key - key % 4], ready, scales.index(stage))
    async_load(K, [batch, head, key, 0], ready, ring.first.index(stage))


@gluon.jit
def copy_values(V, VS, rings, scales, stage, phase, batch, head, key, moved, BY_BLOCK: gl.constexpr):
    """Copy a block of values into a stage when it is empty. Of turned ones: from `moved` further on than its first key is."""
    if VS is None:
        expect_boxes(V, None, rings.v, stage, phase, 1)
        copy_box(V, None, rings.v, stage, stage, batch, head, key)
    else:
        copy_turned(V, VS, rings.v, scales.v, stage, phase, batch, head, key + moved, BY_BLOCK)


@gluon.jit
def copy_coded_tiles(
    Q, K, V, KS, VS, rings, scales, turns, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, PROGRAMS, PLAN: gl.constexpr,
    BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """`copy_tiles` of `forward.py`, with scales of keys."""
    BLOCK: gl.constexpr = PLAN.block
    STAGES: gl.constexpr = PLAN.stages
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
            expect_boxes(Q, None, rings.q, stage_q, phase_q, 2)
            for w in gl.static_range(2):
                row = tile.first_q + tile.start + w * HALF
                copy_box(Q, None, rings.q, stage_q, 2 * stage_q + w, work.batch, work.head, row)
            stage_q, phase_q = advance(stage_q, phase_q, PLAN.queries)
            # In the order in which they are needed: the scores of a block come before the values of the one before
            kv_head = work.head // GROUP
            key = tile.first_k + (work.high - 1) * BLOCK
            moved = 0
            if VS is not None:
                moved = first_block(LENGTHS, tile, BLOCK) * BLOCK - tile.first_k
            copy_keys(K, KS, rings.k, scales.k, stage, phase, work.batch, kv_head, key, BY_BLOCK)
            for _ in range(work.high - work.low - 1):
                following, its_phase = advance(stage, phase, STAGES)
                copy_keys(K, KS, rings.k, scales.k, following, its_phase, work.batch, kv_head, key - BLOCK, BY_BLOCK)
                copy_values(V, VS, rings, scales, stage, phase, work.batch, kv_head, key, moved, BY_BLOCK)
                stage = following
                phase = its_phase
                key -= BLOCK
            copy_values(V, VS, rings, scales, stage, phase, work.batch, kv_head, key, moved, BY_BLOCK)
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
def await_values_after(rings, stage, phase):
    """Wait for the values of a stage, here: the assembler takes no wait for products ahead of a loop that waits for something else,
    and without one it has the sums of values awaited as soon as the scores, before the largest of these is looked for."""
    mbarrier.wait(rings.v.full.index(stage), phase)


@gluon.jit
def walk_codes(
    state, codes, by_row, shift, rings, scales, place, high, low, SCORES, WINDOW, rows, PLAN: gl.constexpr,
    BY_BLOCK: gl.constexpr, EDGE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """`walk` of `forward.py` over keys in codes, from before `high` down to `low`."""
    o, p, p0, exponent, highest, top, total, stage, phase = state
    SHAPED: gl.constexpr = scores_in(PLAN.block)
    CODED: gl.constexpr = scales.v is not None
    SUMS: gl.constexpr = o.type.layout
    for i in range(high - low):
        key = (high - 1 - i) * PLAN.block
        following, its_phase = advance(stage, phase, PLAN.stages)
        if BY_BLOCK:
            by_key, log_by = scales_of_block(scales, place, key, PLAN.block)
        mbarrier.wait(rings.k.full.index(following), its_phase)
        if not CODED and not BY_BLOCK:
            by_key = scales_at(scales.k, following, SHAPED)
        await_turn(W)  # all of the warpgroup have read the scales
        s = issue_codes(codes, rings.k, following, p)
        if CODED:
            o = warpgroup_mma(codes_of_words(p0), keys_at(rings.v.first, stage), o, is_async=True)
        else:
            mbarrier.wait(rings.v.full.index(stage), phase)
            o, _ = issue_values(o, 0.0, p0, 0.0, rings.v, stage)
        give_turn(W)
        if CODED and not BY_BLOCK:
            by_key = scales_at(scales.k, following, SHAPED)
            mbarrier.wait(rings.v.full.index(following), its_phase)
            log_by = log_divisor_at(scales.v, following, SHAPED)
        s = warpgroup_mma_wait(1, deps=(s,))
        if CODED and not BY_BLOCK:
            barrier()  # and now these
        mbarrier.arrive(rings.k.empty.index(following), count=1)
        if CODED:
            s, factor, added, largest = scores_of_codes(
                s, by_key, by_row, shift, SCORES, WINDOW, rows, key, BY_BLOCK, EDGE
            )  # fmt: skip
            exponent, fade, highest, down = next_exponent(largest, log_by, exponent, highest, PLAN.lazy)
            if BY_BLOCK:
                await_values_after(rings, following, its_phase)
            # Which are done by now. So factors are multiplied with, and weights become codes, among the exponentials
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(rings.v.empty.index(stage), count=1)
            if PLAN.lazy:
                o = scaled_where_moved(o, fade)
            else:
                o = scaled_rows(o, fade)
            p, p0, top, total = weigh_below(
                s, factor, added, largest, down, top, total, scales, following, SUMS, BY_BLOCK, EDGE
            )  # fmt: skip
        else:
            p, top, total, fade = weigh_codes(
                s, by_key, by_row, shift, top, total, SCORES, WINDOW, rows, key, BY_BLOCK, EDGE, PLAN.lazy
            )  # fmt: skip
            if BY_BLOCK:
                await_values_after(rings, following, its_phase)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(rings.v.empty.index(stage), count=1)
            p0, _ = as_operands(p, rings.v)
            if PLAN.lazy:
                o = scaled_where_moved(o, fade)
            else:
                o = scaled_rows(o, fade)
        # For no product: so that sums are multiplied here, and not after the next product is issued
        o = warpgroup_mma_wait(0, deps=(o,))
        stage = following
        phase = its_phase
    return o, p, p0, exponent, highest, top, total, stage, phase


@gluon.jit
def queries_at(boxes, at, MEAN, SCORES, unit, FORMAT: gl.constexpr, BLOCK: gl.constexpr):
    """Of 64 queries in a box: their codes as products take them, and the factor and the shift of their scores."""
    COLUMNS: gl.constexpr = boxes.shape[4]
    TAKEN: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_in(BLOCK), k_width=4)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, scores_in(BLOCK))
    READ: gl.constexpr = sums_of(COLUMNS)
    y = matrix_at(boxes, at).load(READ).to(gl.float32)
    codes, by_row = query_codes(y, matrix_at(boxes, at).load(TAKEN).to(gl.float32), FORMAT)
    by_row = gl.convert_layout(by_row, BY_ROW)
    shift = gl.zeros([64], gl.float32, BY_ROW)
    if MEAN is not None:
        mean = gl.load(MEAN + unit.to(gl.int64) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ)))
        shift = gl.convert_layout(gl.sum(y * gl.expand_dims(mean, 0), 1), BY_ROW)
    if SCORES.softcap is None and SCORES.slopes is None:
        by_row *= SCORES.scale * LOG2E
        shift *= SCORES.scale * LOG2E
    return codes, factor_of(by_row), shift


@gluon.jit
def attend_coded_tiles(
    O, LSE, SINK, MEAN, rings, scales, turns, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, PROGRAMS,
    SIZES: gl.constexpr, PLAN: gl.constexpr, FORMAT: gl.constexpr, CLEARS: gl.constexpr, BY_BLOCK: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: `attend_tiles` of `forward.py` over keys in codes."""
    BLOCK: gl.constexpr = PLAN.block
    STAGES: gl.constexpr = PLAN.stages
    COLUMNS: gl.constexpr = SIZES.V0
    CODED: gl.constexpr = scales.v is not None
    SHAPED: gl.constexpr = scores_in(BLOCK)
    SUMS: gl.constexpr = scores_in(COLUMNS) if CODED else sums_of(COLUMNS)
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
        o = gl.zeros([64, COLUMNS], gl.float32, SUMS)
        if work.high > work.low:
            shift_k = work.count - tile.count_q
            slope = 0.0
            if SCORES.slopes is not None:
                slope = gl.load(SCORES.slopes + work.head).to(gl.float32) * LOG2E
            rows = Rows(below, first + shift_k, work.count, slope)
            lower, upper = whole_blocks(
                WINDOW, shift_k, work.count, first, first + gl.minimum(left, HALF) - 1, work.low, work.high, BLOCK
            )
            key = (work.high - 1) * BLOCK
            mbarrier.wait(rings.q.full.index(stage_q), phase_q)
            kv_head = work.head // GROUP
            unit = work.batch * (HEADS // GROUP) + kv_head
            place = Place(work.batch, kv_head, tile.first_k, first_block(LENGTHS, tile, BLOCK))
            if BY_BLOCK:
                by_key, log_by = scales_of_block(scales, place, key, BLOCK)
            codes, by_row, shift = queries_at(
                rings.q.first, 2 * stage_q + W, MEAN, SCORES, unit, FORMAT, BLOCK
            )  # fmt: skip
            # A query that sees nothing may hold NaN, which must not reach the -inf of its scores
            begin, end = row_ends(WINDOW, rows.position + below, work.count)
            by_row = gl.where(begin < end, by_row, 1.0)
            shift = gl.where(begin < end, shift, 0.0)
            mbarrier.wait(rings.k.full.index(stage), phase)
            if not BY_BLOCK:
                by_key = scales_at(scales.k, stage, SHAPED)
            barrier()  # all of the warpgroup have read the queries and the scales
            mbarrier.arrive(rings.q.empty.index(stage_q), count=1)
            stage_q, phase_q = advance(stage_q, phase_q, PLAN.queries)
            s = issue_codes(codes, rings.k, stage, gl.zeros([64, BLOCK], gl.float32, SHAPED))
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(rings.k.empty.index(stage), count=1)
            exponent = 0.0
            highest = 0.0
            if CODED:
                mbarrier.wait(rings.v.full.index(stage), phase)
                if not BY_BLOCK:
                    log_by = log_divisor_at(scales.v, stage, SHAPED)
                nothing = gl.full([64], float("-inf"), gl.float32, BY_ROW)
                s, factor, added, largest = scores_of_codes(
                    s, by_key, by_row, shift, SCORES, WINDOW, rows, key, BY_BLOCK, True
                )  # fmt: skip
                exponent, _, highest, down = next_exponent(largest, log_by, nothing, nothing, PLAN.lazy)
                p, p0, top, total = weigh_below(
                    s, factor, added, largest, down, top, total, scales, stage, SUMS, BY_BLOCK, True
                )  # fmt: skip
            else:
                p, top, total, _ = weigh_codes(
                    s, by_key, by_row, shift, top, total, SCORES, WINDOW, rows, key, BY_BLOCK, True, False
                )  # fmt: skip
                p0, _ = as_operands(p, rings.v)
            if CLEARS:
                # Of the blocks that are walked over, the last alone can reach past what a sequence's queries see, and the first
                # alone begin before it. Both warpgroups find the same of the same block.
                start, stop, _, _ = keys_seen(WINDOW, shift_k, work.count, 0, tile.count_q - 1)
                if (key < start) | (key + BLOCK > stop):
                    clear_unseen(rings.v, stage, phase, start - key, stop - key, W)
            state = (o, p, p0, exponent, highest, top, total, stage, phase)
            state = walk_codes(
                state, codes, by_row, shift, rings, scales, place, work.high - 1, upper, SCORES, WINDOW, rows, PLAN, BY_BLOCK,
                True, W,
            )  # fmt: skip
            if CODED:
                # In parts: what the tensor cores have added up in one is set aside, and they begin anew
                aside = scales.aside.index(W)
                was = gl.full([64], float("-inf"), gl.float32, BY_ROW)
                set_aside(gl.zeros([64, COLUMNS], gl.float32, SUMS), aside)
                for part in range((upper - lower + PLAN.together - 1) // PLAN.together):
                    high = upper - part * PLAN.together
                    low = gl.maximum(high - PLAN.together, lower)
                    state = walk_codes(
                        state, codes, by_row, shift, rings, scales, place, high, low, SCORES, WINDOW, rows, PLAN, BY_BLOCK, False, W
                    )  # fmt: skip
                    o, p, p0, exponent, highest, top, total, stage, phase = state
                    set_aside(with_aside(o, aside, was, exponent), aside)
                    was = exponent
                    o = gl.zeros([64, COLUMNS], gl.float32, SUMS)
                    state = (o, p, p0, exponent, highest, top, total, stage, phase)
            else:
                state = walk_codes(
                    state, codes, by_row, shift, rings, scales, place, upper, lower, SCORES, WINDOW, rows, PLAN, BY_BLOCK, False, W
                )  # fmt: skip
            if WINDOW.left is not None:
                state = walk_codes(
                    state, codes, by_row, shift, rings, scales, place, lower, work.low, SCORES, WINDOW, rows, PLAN, BY_BLOCK,
                    True, W,
                )  # fmt: skip
            o, p, p0, exponent, highest, top, total, stage, phase = state
            if CODED:
                if not BY_BLOCK:
                    barrier()  # all of the warpgroup have read the scales of the last values
                o = warpgroup_mma(codes_of_words(p0), keys_at(rings.v.first, stage), o, is_async=True)
                o = with_aside(warpgroup_mma_wait(0, deps=(o,)), aside, was, exponent)
                saw = exponent > float("-inf")
                o = scaled_rows(o, gl.where(saw, gl.exp2(exponent - top), 0.0))
                mbarrier.arrive(rings.v.empty.index(stage), count=1)
            else:
                mbarrier.wait(rings.v.full.index(stage), phase)
                if CLEARS:
                    key = work.low * BLOCK
                    if (key < start) & (work.high - work.low > 1):
                        clear_unseen(rings.v, stage, phase, start - key, stop - key, W)
                o, _ = issue_values(o, 0.0, p0, 0.0, rings.v, stage)
                o = warpgroup_mma_wait(0, deps=(o,))
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
        store_sums(scaled_rows(o, share), O, token, left, work.batch, work.head, 0, SIZES.V)
        number += PROGRAMS
        if turns.counter is not None:
            mbarrier.wait(turns.full.index(slot), phase_n)
            number = gl.sum(turns.numbers.index(slot).load(SHOWN), 0)
            mbarrier.arrive(turns.empty.index(slot), count=1)
            slot, phase_n = advance(slot, phase_n, NUMBERS)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "KEYS", "TILES", "BATCH", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def attention_codes_hopper(
    Q, K, V, KS, VS, MEAN, O, LSE, SINK, COUNTER, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, PROGRAMS,
    SIZES: gl.constexpr, PLAN: gl.constexpr, FORMAT: gl.constexpr, CLEARS: gl.constexpr, BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """`attention_forward_hopper` of keys in codes; KS: their scales, keys side by side; MEAN None: keys are whole. VS: those of
    values in codes, which are turned; None: values are numbers. BY_BLOCK: KS and VS have one number for a block of keys."""
    STAGES: gl.constexpr = PLAN.stages
    QUERIES: gl.constexpr = PLAN.queries
    q = make_boxes(Q, 2 * QUERIES)
    k = make_boxes(K, STAGES)
    v = make_boxes(V, STAGES)
    ks = KS
    vs = VS  # None, or else:
    aside = VS
    if not BY_BLOCK:
        ks = make_boxes(KS, STAGES)
    if VS is not None:
        if not BY_BLOCK:
            vs = make_boxes(VS, STAGES)
        aside = gl.allocate_shared_memory(gl.float32, [2, HALF, SIZES.V0], ASIDE)
    scales = Scales(ks, vs, aside)
    q_full, q_empty = make_barriers(QUERIES)
    k_full, k_empty = make_barriers(STAGES)
    v_full, v_empty = make_barriers(STAGES)
    rings = Rings(Stages(q, None, q_full, q_empty), Stages(k, None, k_full, k_empty), Stages(v, None, v_full, v_empty))
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    n_full, n_empty = make_barriers(NUMBERS)
    turns = Turns(COUNTER, numbers, n_full, n_empty)
    gl.warp_specialize([
        (attend_coded_tiles, (O, LSE, SINK, MEAN, rings, scales, turns, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH,
                              TILES, PROGRAMS, SIZES, PLAN, FORMAT, CLEARS, BY_BLOCK, 0)),
        (attend_coded_tiles, (O, LSE, SINK, MEAN, rings, scales, turns, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH,
                              TILES, PROGRAMS, SIZES, PLAN, FORMAT, CLEARS, BY_BLOCK, 1)),
        (copy_coded_tiles, (Q, K, V, KS, VS, rings, scales, turns, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES,
                            PROGRAMS, PLAN, BY_BLOCK)),
    ], [4, 1], [240, 24])  # fmt: skip


@kernel(
    grid=lambda a: (cdiv(a.KEYS + a.SHIFTS - 1, a.BLOCK), a.HEADS, a.BATCH), tokens=("KEYS", "HEADS", "BATCH"),
    default=lambda a: {"BLOCK": GATHERED, "num_warps": 4},
)  # fmt: skip
def attention_scales_by_head(S, T, KEYS, HEADS, BATCH, ROOM, SHIFTS: tl.constexpr, BLOCK: tl.constexpr):
    """T [batch, HEADS, SHIFTS, ROOM]: scales of keys side by side, in row c from key c on, and 0 past the last; NaN where one is
    not finite, which is that of no codes."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    at = batch * S.stride_b + head * S.stride_h + key.to(tl.int64) * S.stride_t
    s = tl.load(S.data + at, key < KEYS, 0.0).to(tl.float32)
    for c in tl.static_range(SHIFTS):
        at = ((batch * HEADS + head) * SHIFTS + c) * ROOM + key - c
        tl.store(T + at, s + s * 0.0, (key >= c) & (key < KEYS + c))


# ---- host ------------------------------------------------------------------------------------------------------------


def bytes_of(sizes: Sizes, plan: Plan, coded: bool) -> int:
    """Shared memory of 16-bit queries, of keys in codes with fp32 scales, and of 16-bit values, or `coded` ones with theirs and
    with sums that are set aside."""
    values, sums = (sizes.V0 + 8, 4 * ROWS.value * sizes.V0) if coded else (2 * sizes.V0, 0)
    return 2 * plan.queries * ROWS.value * sizes.D0 + plan.stages * plan.block * (sizes.D0 + 4 + values) + sums


def plan_for(sizes: Sizes, memory: int, coded: bool) -> Plan | None:
    """Blocks of 128 keys and the queries of two tiles, with as many stages as there is room for, four at most. Where values are
    codes, room for the queries of one tile: they are in registers as soon as it begins, and the next ones may come."""
    queries, together = (1, TOGETHER) if coded else (2, 0)
    plans = (Plan(SCALED.value, stages, queries, coded, together) for stages in (4, 3, 2))
    return next((plan for plan in plans if bytes_of(sizes, plan, coded) + SPARE <= memory), None)


def sizes_of(q: Tensor, v: Tensor) -> Sizes:
    return Sizes(q.shape[-1], *parts_of(q.shape[-1]), v.shape[-1], *parts_of(v.shape[-1]))


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether queries and values are numbers of 16 bits, of 64 or 128 columns, in rows that begin at multiples of 16 bytes, as keys
    do, or values codes in e4m3; nothing is empty, nothing but windows and lengths of sequences says what is seen, and the largest
    product is the largest score."""
    q, k, v = a.q, a.k, a.v
    if not target.hopper_gluon or q.dtype not in KINDS or k.dtype not in CODES:
        return False
    if v.dtype != (q.dtype if a.v_scale is None else torch.float8_e4m3fn):
        return False
    scales = (a.k_scale, a.v_scale, a.k_mean)
    if any(t is not None and t.dtype != torch.float32 for t in scales) or not single(
        target, SimpleNamespace(q=q, k=k, v=v)
    ):
        return False
    if a.mask is not None or (a.kv_len is not None and a.kv_len.dim() == 2) or (a.scale is not None and a.scale <= 0):
        return False
    if any(t.shape[-1] not in WIDTHS for t in (q, v)) or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if q.shape[1] + k.shape[1] >= LONGEST or tiles_of(a) >= 2**31 - MOST_PROGRAMS:
        return False
    plan = plan_for(sizes_of(q, v), target.shared_memory, a.v_scale is not None)
    if plan is None:
        return False
    if a.v_scale is None:
        return copies_in_bulk(*(t.transpose(1, 2) for t in (q, k, v)))
    # Values are turned first, whatever their strides: but not of sequences so short that most of the room would be empty
    room = blocks_of(k.shape[1], a.cu_seqlens_k, plan.block) * plan.block
    return room <= min(LONGEST, 2 * k.shape[1] + MOST_EMPTY) and copies_in_bulk(*(t.transpose(1, 2) for t in (q, k)))


def fits_call(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes the arguments and is the faster, by measurement, or was asked for."""
    return fits(target, a) and wanted_of_codes("hopper", target, a)


def scales_by_head(scale: Tensor, packed: bool) -> Tensor:
    """[batch, keys, heads] as [batch, heads, shifts, keys], in rows that begin at multiples of 16 bytes. Where sequences are packed
    there are four shifts, so that a copy of scales may begin at any key; blocks of others begin at multiples of their size."""
    batch, keys, heads = scale.shape
    room, shifts = 4 * cdiv(keys, 4), 4 if packed else 1
    made = torch.empty(batch, heads, shifts, room, dtype=torch.float32, device=scale.device)
    attention_scales_by_head(heads_of(scale.unsqueeze(-1)), made, keys, heads, batch, room, SHIFTS=shifts)
    return made[..., :keys]


def row_box(scales: Tensor, count: int) -> Any:
    """A descriptor of so many scales at a time, of [..., 1, many]: side by side in shared memory, as threads read them."""
    row = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    return replace(box_of(scales, [1, 1, 1, count], gl.float32), layout=row)


def forward(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k=k, v=v, **options)
    batch, length, heads, _ = q.shape
    o = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    # The caller's memory for o may have any strides; the kernel writes whole columns
    whole = o if o.stride(-1) == 1 else torch.empty(o.shape, dtype=o.dtype, device=o.device)
    check_lengths("attention", q, k, a.kv_len, a.cu_seqlens_q, a.cu_seqlens_k)
    sizes, window, target = sizes_of(q, v), window_of(a), Target.at(q.device)
    plan = plan_for(sizes, target.shared_memory, a.v_scale is not None)
    how, tiles = lengths(a.cu_seqlens_q, a.cu_seqlens_k, length, k.shape[1], a.kv_len, ROWS.value, False)
    programs, counter = min(target.sms, tiles * heads * batch), None
    # As in `forward.py`: where tiles differ in length, a program takes the next one when it is done
    even = window.right is None and a.cu_seqlens_q is None and a.kv_len is None
    if not even and tiles * heads * batch > programs:
        counter = torch.empty(1, dtype=torch.int32, device=q.device)
        clear_counter(counter)
    by_block = a.scaled == "block"
    if by_block:
        by_key = heads_of(k_scale.unsqueeze(-1))
    else:
        by_key = row_box(scales_by_head(k_scale, a.cu_seqlens_k is not None), plan.block)
    clears = a.cu_seqlens_q is not None or a.kv_len is not None or window.left is not None
    if a.v_scale is None:
        values, by_value = boxes_of(v, plan.block, sizes.V0, 0)
    else:  # where what nobody sees is 0 already
        codes, divided = turned(
            v, a.v_scale, window, length, a.kv_len, a.cu_seqlens_q, a.cu_seqlens_k, plan.block, by_block
        )
        values, clears = box_of(codes, [1, 1, sizes.V0, plan.block], CODES[v.dtype]), False
        by_value = heads_of(divided.permute(0, 3, 1, 2)) if by_block else row_box(divided, 2 * plan.block)
    attention_codes_hopper(
        boxes_of(q, HALF.value, sizes.D0, 0)[0],
        box_of(k.transpose(1, 2), [1, 1, plan.block, sizes.D0], CODES[k.dtype]), values, by_key, by_value,
        None if a.k_mean is None else a.k_mean.contiguous(), heads_of(whole), lse,
        None if a.sink is None else a.sink.contiguous(), counter, scores_of(a), window, how, length, k.shape[1], heads,
        heads // k.shape[2], batch, tiles, programs, SIZES=sizes, PLAN=plan,
        FORMAT=("int8" if k.dtype == torch.int8 else "e4m3") + ":row:fp32:exact:fast", CLEARS=clears, BY_BLOCK=by_block,
    )  # fmt: skip
    if whole is not o:
        o.copy_(whole)
    return o, lse
