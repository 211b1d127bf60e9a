"""Attention of few queries over a cache on Hopper, in Gluon: decoding, and short drafts. A warp that copies, and a warpgroup; two
programs to an SM.

A program takes the queries that share a key head, tokens times heads, at most 64 rows, over one part of its sequence's keys, in
blocks of 64 from the last that any row sees down to the first. All that counts is that keys and values come without a pause: they
lie in one ring, a block's keys before the values of the one before, of as many stages as half of an SM's shared memory holds.
Queries stay in registers. Heads of a part are neighbours, whose keys lie side by side. Parts are merged by `attention_parts_merge`.

Keys come in boxes of rows that lie in one page, as many as the largest power of two that divides pages, 64 at most; where that is
less than 16, four warps bring them key by key, and what differs then is said in `decode_gather.py`. The table is
read before a stage is waited for: nobody writes it while the kernel runs. A box that nobody sees, or that has no
page, is copied from past the last page, which brings 0 and reads nothing. What has no page, the copying warp says beside the keys.

Who may write where in shared memory, and when. A stage has two barriers, at each of which one arrives a phase. The copying warp
waits for `empty`, stores in `missing` which boxes have no page, arrives at `full`, and begins to copy: `full` is complete with the
last byte. The warpgroup waits for `full` of every stage, reads it by products, and `missing` if it holds keys, and arrives at
`empty` when these are waited for. A parity is enough, for `full` of a stage completes again after `empty`, at which arrives who
waits for `full`. Nobody waits in a circle: copies are begun, and stages emptied, in the order of the ring, and at
once are needed but two stages, or three where the first values are cleared, of four or more. A part of no blocks has no barriers.

Keys that no row sees may hold NaN, and 0 times NaN is NaN. Their scores are hidden; their values, in the first and the last block
that is walked over, the warpgroup clears, shows by a fence what it wrote, and has its warps wait for each other. Drafts of a tree
are the last 64 keys at most, in the first block or the first two: those that no row sees are cleared like keys past the end.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...device.dependent import ask_l2, await_last, let_next_begin
from ...device.softmax import LN2, LOG2E
from ...device.warpgroups import advance
from ...gemm.hopper.boxes import box_of, copies_in_bulk
from ...op import single
from ...runtime.kernel import kernel
from ..cache_parts import finished, results_of
from ..cache_read import bending_of, capacity_of, check_keys, keys_together, lengths_of, table_of, window_of
from ..portable import Scores, bend, heads_of
from ..preference import wanted_of_cache
from ..tiles import Tile, either, is_drawn, keys_of, keys_seen
from .decode_gather import gather_part, make_full, make_stages, room_for_nothing, words_of
from .forward import ALONE, CLEARED, KINDS, LONGEST, Rows, make_boxes, scaled_rows, scaled_where_moved, sums_of, weigh
from .latent import find_boxes, make_barriers, matrices, missing_of, rounded, spoilt
from .schedule import whole_blocks

NAME = "hopper_decode"
ROWS = tl.constexpr(64)  # of a product
BLOCK = tl.constexpr(64)  # keys
WIDE = tl.constexpr(64)  # columns of a box: 128 bytes, which bulk copies swizzle
LINES = gl.constexpr(4)  # of a table, 128 bytes: pages of 16 of most parts
LAZY = gl.constexpr(True)  # sums are multiplied where a row's largest score has grown by much alone
# 64 numbers, which each warp has: none waits for another's
TOGETHER = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


class Plan(NamedTuple):
    """Columns of a stage, which keys and values are widened to; columns of a box, 128 bytes, and its keys, which lie in one page,
    or 0 where threads copy key by key; how many stages."""

    columns: int
    wide: int
    box: int
    stages: int


class Tree(NamedTuple):
    """Bits of a batch's queries, int64 [batch, length]."""

    data: Any
    stride_b: Any
    stride_t: Any


class Span(NamedTuple):
    """What a program does: a part of the keys of a sequence for one key head; how many keys the sequence has, and whether it says
    more than there is room for; blocks from `low` to before `high`, of which keys from `start` to before `stop` are seen."""

    batch: Any
    head: Any
    part: Any
    count: Any
    wrong: Any
    low: Any
    high: Any
    start: Any
    stop: Any


class Memory(NamedTuple):
    """Shared memory: stages of boxes, which of them have no page, and barriers."""

    boxes: Any
    missing: Any
    full: Any
    empty: Any


# ---- what a program does ---------------------------------------------------------------------------------------------


@triton.jit
def numbered(KV_HEADS, PARTS):
    """(sequence, head, part). Heads of one part are neighbours: their keys lie side by side in memory."""
    number = tl.program_id(0)
    return number // KV_HEADS // PARTS, number % KV_HEADS, number // KV_HEADS % PARTS


@triton.jit
def span_of(WINDOW, LENGTHS, L, CAPACITY, KV_HEADS, PARTS, SPLIT):
    batch, head, part = numbered(KV_HEADS, PARTS)
    count, wrong = keys_of(LENGTHS, Tile(batch, 0, L, 0, CAPACITY, 0))
    start, stop, _, _ = keys_seen(WINDOW, count - L, count, 0, L - 1)
    begin = part * SPLIT
    stop = tl.minimum(stop, begin + tl.minimum(SPLIT, CAPACITY - begin))
    low = tl.maximum(start, begin) // BLOCK
    high = tl.where(stop > tl.maximum(start, begin), tl.cdiv(stop, BLOCK), low)
    return Span(batch, head, part, count, wrong, low, high, start, stop)


@gluon.jit
def ask_early(TABLE, LENGTHS, CAPACITY, KV_HEADS, PARTS, SPLIT, PAGE: gl.constexpr):
    """Ask the L2 for what a part waits for before it reads a key: these loads come one after the other, and memory is far."""
    batch, _, part = numbered(KV_HEADS, PARTS)
    if LENGTHS.kv_len is not None:
        ask_l2(LENGTHS.kv_len + batch.to(gl.int64) * LENGTHS.stride_b, batch >= 0)
    if TABLE is not None:
        LINE: gl.constexpr = 1024 // TABLE.data.dtype.element_ty.primitive_bitwidth
        begin = part * SPLIT
        end = gl.cdiv(begin + gl.minimum(SPLIT, CAPACITY - begin), PAGE)
        for i in gl.static_range(LINES):
            entry = begin // PAGE + i * LINE
            at = batch.to(gl.int64) * TABLE.stride_s + entry.to(gl.int64) * TABLE.stride_m
            ask_l2(TABLE.data + at, entry < end)


@gluon.jit
def places_of(X, stride_p, span, r, GROUP):
    """Where rows r of a tile are: a token's heads, and then those of the next."""
    at = span.batch.to(gl.int64) * X.stride_b + span.part.to(gl.int64) * stride_p
    return at + (r // GROUP).to(gl.int64) * X.stride_t + (span.head * GROUP + r % GROUP).to(gl.int64) * X.stride_h


# ---- trees -----------------------------------------------------------------------------------------------------------


@gluon.jit
def bits_of(TREE, span, token, live):
    """Bits of tokens, which say what drafts they see; none where they are not live."""
    at = span.batch.to(gl.int64) * TREE.stride_b + token.to(gl.int64) * TREE.stride_t
    return gl.load(TREE.data + at, live, 0)


@gluon.jit
def drafts_of(TREE, span, L):
    """Bits of the drafts that any token sees."""
    token = gl.arange(0, ROWS, TOGETHER)
    return gl.reduce(bits_of(TREE, span, token, token < L), 0, either)


@gluon.jit
def weigh_edge(s, top, total, SCORES, WINDOW, rows, bits, key, LAZILY: gl.constexpr):
    """`weigh` where some rows do not see all keys of the block: what hides a draft hides a score that is bent already."""
    if bits is None:
        return weigh(s, top, total, SCORES, WINDOW, rows, key, True, LAZILY)
    else:
        s, _ = bend(SCORES, s)
        j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)) + (key - rows.position)
        s = gl.where(is_drawn(gl.expand_dims(bits, 1), gl.expand_dims(j, 0)), s, float("-inf"))
        BENT: gl.constexpr = Scores(LN2, None, None, None, None, None, None, None)  # which is a factor of 1
        return weigh(s, top, total, BENT, WINDOW, rows, key, True, LAZILY)


# ---- the copying warp ------------------------------------------------------------------------------------------------


@gluon.jit
def copy_block(BOX, memory, stage, phase, head, found, missing, TELLS: gl.constexpr, PLAN: gl.constexpr):
    """Copy the boxes of a block into a stage when it is empty. TELLS: with `missing`, bits of those that have no page."""
    SLABS: gl.constexpr = PLAN.columns // PLAN.wide
    COUNT: gl.constexpr = BLOCK // PLAN.box
    ready = memory.full.index(stage)
    mbarrier.wait(memory.empty.index(stage), phase)
    if TELLS:
        memory.missing.index(stage).store(gl.full([1], missing, gl.int32, ALONE))
        barrier()  # `expect` arrives: the number must be there
    mbarrier.expect(ready, SLABS * COUNT * BOX.block_type.nbytes)
    for i in gl.static_range(COUNT):
        page, place = found[i]
        for slab in gl.static_range(SLABS):  # of the same rows one after the other: they lie side by side in memory
            into = memory.boxes.index((stage * SLABS + slab) * COUNT + i)
            async_load(BOX, [page, head, place, slab * PLAN.wide], ready, into)


@gluon.jit
def copy_part(
    K, V, TABLE, memory, span, PAGES, PAGE: gl.constexpr, PLAN: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    await_last(DEPENDENT)
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    key = (span.high - 1) * BLOCK
    found, missing = find_boxes(TABLE, span, key, PAGES, PAGE, PLAN)
    copy_block(K, memory, stage, phase, span.head, found, missing, TABLE is not None, PLAN)
    stage, phase = advance(stage, phase, PLAN.stages)
    # In the order in which they are needed: the scores of a block come before the values of the one before
    for _ in range(span.high - span.low - 1):
        key -= BLOCK
        following, missing = find_boxes(TABLE, span, key, PAGES, PAGE, PLAN)
        copy_block(K, memory, stage, phase, span.head, following, missing, TABLE is not None, PLAN)
        stage, phase = advance(stage, phase, PLAN.stages)
        copy_block(V, memory, stage, phase, span.head, found, 0, False, PLAN)
        stage, phase = advance(stage, phase, PLAN.stages)
        found = following
    copy_block(V, memory, stage, phase, span.head, found, 0, False, PLAN)


# ---- the warpgroup ---------------------------------------------------------------------------------------------------


@gluon.jit
def load_queries(Q, span, L, GROUP, DIM: gl.constexpr, COLUMNS: gl.constexpr):
    """[64, COLUMNS]: the rows of a tile, as products take them from registers; 0 past the last row and the last of DIM columns."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(BLOCK), k_width=2)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, OPERAND))
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, OPERAND))
    at = places_of(Q, 0, span, r, GROUP)
    at = gl.expand_dims(at, 1) + gl.expand_dims(c.to(gl.int64) * Q.stride_d, 0)
    inside = gl.expand_dims(r < L * GROUP, 1) & gl.expand_dims(c < DIM, 0)
    return gl.load(Q.data + at, inside, 0.0)


@gluon.jit
def issue_scores(q, memory, stage, into, PLAN: gl.constexpr):
    """Begin q @ k.T of a stage; `into` is what it is made of, whatever it held."""
    if PLAN.box == 0:
        fence_async_shared()  # threads wrote them
    k = matrices(memory.boxes, PLAN.stages, PLAN.columns).index(stage).permute((1, 0))
    return warpgroup_mma(q, k, into, use_acc=False, is_async=True)


@gluon.jit
def issue_values(o, weights, memory, stage, PLAN: gl.constexpr):
    """Begin o += weights @ v of a stage."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(PLAN.columns), k_width=2)
    if PLAN.box == 0:
        fence_async_shared()  # threads wrote them
    v = matrices(memory.boxes, PLAN.stages, PLAN.columns).index(stage)
    return warpgroup_mma(gl.convert_layout(weights, OPERAND), v, o, is_async=True)


@gluon.jit
def clear_unseen(memory, stage, start, stop, drafts, shift, PLAN: gl.constexpr):
    """Make the values of a stage outside of [start, stop) 0, and those of drafts, from `shift` on, that no row sees."""
    SLABS: gl.constexpr = PLAN.columns // WIDE
    slabs = matrices(memory.boxes, PLAN.stages * SLABS, WIDE)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, CLEARED))
    live = (row >= start) & (row < stop)
    if drafts is not None:
        live &= is_drawn(drafts, row - shift)
    live = gl.expand_dims(live, 1)
    for i in gl.static_range(SLABS):
        slab = slabs.index(stage * SLABS + i)
        slab.store(gl.where(live, slab.load(CLEARED), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def clear_second(memory, stage, phase, key, span, drafts, shift, PLAN: gl.constexpr):
    """The same of the block at `key`, whose values come next: in `stage`, or behind the next block's keys."""
    at, its_phase = advance(stage, phase, PLAN.stages)
    if key <= span.low * BLOCK:
        at = stage
        its_phase = phase
    mbarrier.wait(memory.full.index(at), its_phase)
    clear_unseen(memory, at, span.start - key, span.stop - key, drafts, shift - key, PLAN)


@gluon.jit
def walk(state, q, TABLE, memory, high, low, SCORES, WINDOW, rows, bits, PLAN: gl.constexpr, EDGE: gl.constexpr):
    """Take in the blocks from before `high` down to `low`, after one whose weights are in `state`. The stage of that is the next
    block's keys', before those of the values. Before and after a step no product is under way. In it, the scores of a block are
    issued, then the values of the one before, which go on while scores become weights. EDGE: some rows do not see all keys, nor,
    with `bits`, all drafts."""
    o, p, weights, top, total, lost, stage, phase = state
    for i in range(high - low):
        key = (high - 1 - i) * BLOCK
        at, its_phase = advance(stage, phase, PLAN.stages)  # of values
        mbarrier.wait(memory.full.index(stage), phase)
        s = issue_scores(q, memory, stage, p, PLAN)
        mbarrier.wait(memory.full.index(at), its_phase)
        o = issue_values(o, weights, memory, at, PLAN)
        missing = missing_of(TABLE, memory, stage)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(memory.empty.index(stage), count=1)
        if EDGE:
            s = spoilt(TABLE, s, missing, PLAN)
            p, top, total, fade = weigh_edge(s, top, total, SCORES, WINDOW, rows, bits, key, LAZY)
        else:  # which all rows see
            lost |= missing
            p, top, total, fade = weigh(s, top, total, SCORES, WINDOW, rows, key, False, LAZY)
        # The assembler moves a wait up over what it does not need, but not over a branch, which a wait of a passed barrier is
        p = warpgroup_mma_wait(1, deps=(p,))
        mbarrier.wait(memory.full.index(at), its_phase)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(memory.empty.index(at), count=1)
        weights = rounded(p, memory.boxes)
        o = scaled_where_moved(o, fade)
        # For no product: so that sums are multiplied here, and not after the next product is issued
        o = warpgroup_mma_wait(0, deps=(o,))
        stage, phase = advance(at, its_phase, PLAN.stages)
    return o, p, weights, top, total, lost, stage, phase


@gluon.jit
def attend_part(
    Q, O, stride_op, LSE, stride_lp, SINK, TABLE, TREE, memory, span, SCORES, WINDOW, L, GROUP, DIM: gl.constexpr,
    COLUMNS: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = PLAN.columns
    BY_ROW: gl.constexpr = gl.SliceLayout(1, sums_of(BLOCK))
    r = gl.arange(0, ROWS, BY_ROW)
    head = span.head * GROUP + r % GROUP
    live = r < L * GROUP
    q = load_queries(Q, span, L, GROUP, DIM, WIDTH)
    top = gl.full([ROWS], float("-inf"), gl.float32, BY_ROW)
    total = gl.zeros([ROWS, 8], gl.float32, sums_of(8))
    if SINK is not None:  # one more key of the first part, whose value is 0
        top = gl.load(SINK + head, live & (span.part == 0), float("-inf")).to(gl.float32) * LOG2E
        total = scaled_rows(total + 0.125, gl.where(top == float("-inf"), 0.0, 1.0))  # in eight parts
    slope = 0.0
    if SCORES.slopes is not None:
        slope = gl.expand_dims(gl.load(SCORES.slopes + head, live, 0.0).to(gl.float32) * LOG2E, 1)
    shift = span.count - L
    rows = Rows(r // GROUP, shift, span.count, slope)
    bits = None
    drafts = None
    if TREE is not None:
        bits = bits_of(TREE, span, r // GROUP, live)
        drafts = drafts_of(TREE, span, L)
    # All rows see what is before the drafts
    whole = span.count if TREE is None else shift
    lower, upper = whole_blocks(WINDOW, shift, whole, 0, L - 1, span.low, span.high, BLOCK)
    o = gl.zeros([ROWS, WIDTH], gl.float32, sums_of(WIDTH))
    key = (span.high - 1) * BLOCK
    mbarrier.wait(memory.full.index(0), 0)
    s = issue_scores(q, memory, 0, gl.zeros([ROWS, BLOCK], gl.float32, sums_of(BLOCK)), PLAN)
    missing = missing_of(TABLE, memory, 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(memory.empty.index(0), count=1)
    s = spoilt(TABLE, s, missing, PLAN)
    p, top, total, _ = weigh_edge(s, top, total, SCORES, WINDOW, rows, bits, key, False)
    weights = rounded(p, memory.boxes)
    if (key < span.start) | (key + BLOCK > (span.stop if TREE is None else shift)):
        at = gl.where(span.high - span.low > 1, 2, 1)  # behind the next block's keys
        mbarrier.wait(memory.full.index(at), 0)
        clear_unseen(memory, at, span.start - key, span.stop - key, drafts, shift - key, PLAN)
    state = (o, p, weights, top, total, 0, 1, 0)
    state = walk(state, q, TABLE, memory, span.high - 1, upper, SCORES, WINDOW, rows, bits, PLAN, True)
    if TREE is not None:
        if upper < span.high - 1:  # a second block with drafts
            clear_second(memory, state[6], state[7], upper * BLOCK, span, drafts, shift, PLAN)
    state = walk(state, q, TABLE, memory, upper, lower, SCORES, WINDOW, rows, None, PLAN, False)
    if WINDOW.left is not None:
        state = walk(state, q, TABLE, memory, lower, span.low, SCORES, WINDOW, rows, None, PLAN, True)
    o, p, weights, top, total, lost, stage, phase = state
    mbarrier.wait(memory.full.index(stage), phase)
    if WINDOW.left is not None:
        key = span.low * BLOCK
        if (key < span.start) & (span.high - span.low > 1):
            clear_unseen(memory, stage, span.start - key, span.stop - key, None, 0, PLAN)
    o = issue_values(o, weights, memory, stage, PLAN)
    o = warpgroup_mma_wait(0, deps=(o,))
    whole = gl.convert_layout(gl.sum(total, 1), BY_ROW)
    empty = whole == 0.0
    bad = gl.where(lost != 0, float("nan"), 0.0)
    share = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, whole)) + bad
    lse = gl.where(empty, float("-inf"), top * LN2 + gl.log(gl.where(empty, 1.0, whole))) + bad
    gl.store(LSE.data + places_of(LSE, stride_lp, span, r, GROUP), lse, live)
    store_rows(scaled_rows(o, share), O, stride_op, span, L, GROUP, COLUMNS)


@gluon.jit
def store_rows(o, O, stride_op, span, L, GROUP, COLUMNS: gl.constexpr):
    """The rows of a tile, and of their columns those that there are."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, o.type.layout))
    c = gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
    at = gl.expand_dims(places_of(O, stride_op, span, r, GROUP), 1) + gl.expand_dims(c, 0)
    inside = gl.expand_dims(r < L * GROUP, 1)
    if o.shape[1] > COLUMNS:
        inside &= gl.expand_dims(c < COLUMNS, 0)
    gl.store(O.data + at, o.to(O.data.dtype.element_ty), inside)


@gluon.jit
def store_nothing(O, stride_op, LSE, stride_lp, SINK, span, L, GROUP, COLUMNS: gl.constexpr, PLAN: gl.constexpr):
    """What a part that sees nothing says: by its lse alone, but for the first, which may have a sink."""
    WIDTH: gl.constexpr = PLAN.columns
    SHAPED: gl.constexpr = sums_of(WIDTH)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SHAPED))
    live = r < L * GROUP
    bad = gl.where(span.wrong, float("nan"), 0.0)  # more keys than there is room for
    lse = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SHAPED))
    if SINK is not None:
        head = span.head * GROUP + r % GROUP
        lse = gl.load(SINK + head, live & (span.part == 0), float("-inf")).to(gl.float32)
    gl.store(LSE.data + places_of(LSE, stride_lp, span, r, GROUP), lse + bad, live)
    if span.part == 0:
        o = gl.zeros([ROWS, WIDTH], gl.float32, SHAPED) + bad
        store_rows(o, O, stride_op, span, L, GROUP, COLUMNS)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "CAPACITY", "PAGES", "PARTS", "SPLIT", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 128}, dependent=True,
)  # fmt: skip
def attention_decode_hopper(
    Q, K, V, TABLE, TREE, O, stride_op, LSE, stride_lp, SINK, SCORES, WINDOW, LENGTHS, L, CAPACITY, PAGES, KV_HEADS, GROUP, PARTS,
    SPLIT, PROGRAMS, DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE: gl.constexpr, PLAN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """O and LSE of one part of the keys for the rows of one key head. Most of 256 threads' registers go to the warpgroup."""
    let_next_begin(DEPENDENT)
    if DEPENDENT:
        ask_early(TABLE, LENGTHS, CAPACITY, KV_HEADS, PARTS, SPLIT, PAGE)
    await_last(DEPENDENT)
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, KV_HEADS, PARTS, SPLIT)
    if span.high > span.low:
        if PLAN.box > 0:
            memory = Memory(
                make_boxes(K, PLAN.stages * (PLAN.columns // WIDE) * (BLOCK // PLAN.box)),
                gl.allocate_shared_memory(gl.int32, [PLAN.stages, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
                make_barriers(PLAN.stages),
                make_barriers(PLAN.stages),
            )
            gl.warp_specialize([
                (attend_part, (Q, O, stride_op, LSE, stride_lp, SINK, TABLE, TREE, memory, span, SCORES, WINDOW, L, GROUP, DIM,
                               COLUMNS, PLAN)),
                (copy_part, (K, V, TABLE, memory, span, PAGES, PAGE, PLAN, DEPENDENT)),
            ], [1], [32])  # fmt: skip
        else:  # keys without a page are NaN: who multiplies with them needs no table
            memory = Memory(make_stages(K, PLAN), None, make_full(PLAN.stages), make_barriers(PLAN.stages))
            gl.warp_specialize([
                (attend_part, (Q, O, stride_op, LSE, stride_lp, SINK, None, TREE, memory, span, SCORES, WINDOW, L, GROUP, DIM,
                               COLUMNS, PLAN)),
                (gather_part, (K, V, TABLE, memory, span, PAGES, DIM, COLUMNS, PAGE, PLAN, DEPENDENT)),
            ], [4], [48])  # fmt: skip
    else:
        store_nothing(O, stride_op, LSE, stride_lp, SINK, span, L, GROUP, COLUMNS, PLAN)


# ---- host ------------------------------------------------------------------------------------------------------------


WIDEST = 128  # columns of keys or values
RESIDENT = 2  # programs that an SM holds
SPARE = 1024  # bytes of a program's shared memory for barriers and what its warps are started with; as many an SM keeps for itself
BESIDE = 2  # blocks that a part's beginning and its end take as long as, and a merge
LEAST_BOX = 16  # keys: a block is then of four boxes, whose pages a warp of few registers holds twice; or else threads copy keys
# Blocks of a part, where sequences may be far shorter than there is room for and lie beside long ones: where parts wait for others
# to end, a long one that begins late ends alone; where all begin at once, the chip is full until few are left, and parts may be
# AT_ONCE times as long
LONGEST_PART, AT_ONCE = 32, 4


def plan_for(columns: int, box: int, memory: int) -> Plan | None:
    """As many stages as half of an SM takes; None where that is not four."""
    wide = WIDE.value * cdiv(columns, WIDE.value)
    stages = ((memory + SPARE) // RESIDENT - 2 * SPARE) // (2 * BLOCK.value * wide)
    return Plan(wide, WIDE.value, box, stages) if stages >= 4 else None


def box_rows(page: int) -> int:
    """The largest power of two that divides pages, or 0 where that is too few; a block's rows at most, and without a table."""
    rows = keys_together(page, BLOCK.value)
    return rows if rows >= LEAST_BOX else 0


def split_for(
    capacity: int, units: int, rows: int, at_a_time: int, even: bool, beside: int = BESIDE, longest: int = LONGEST_PART
) -> int:
    """Keys of a part, of as many parts, each of so many `units`, as end soonest where some programs run `at_a_time`. What the
    device alone knows has no say: unless sequences are `even`, parts are short, or all begin at once. A part's sums, written and
    read in fp32, are at most a quarter of its keys and values of as many columns: of 64 rows it has eight blocks."""
    blocks = cdiv(capacity, BLOCK.value)
    most = max(1, blocks // cdiv(rows, 8))
    fewest = min(most, cdiv(blocks, longest))

    def time(parts: int) -> int:
        return cdiv(units * parts, at_a_time) * (cdiv(blocks, parts) + beside) + beside * (parts > 1)

    def is_short(parts: int) -> bool:
        return cdiv(blocks, parts) <= longest * (AT_ONCE if units * parts <= at_a_time else 1)

    among = range(1, max(fewest, min(most, cdiv(4 * at_a_time, units))) + 1)
    return cdiv(blocks, min((n for n in among if even or n == fewest or is_short(n)), key=time)) * BLOCK.value


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether queries and caches are 16-bit, of widths that are multiples of 8 up to 128, caches in rows that begin at multiples
    of 16 bytes; a sequence has up to 64 queries for each head of its keys; a split holds whole blocks, and a page what it may;
    nothing is empty, nothing but windows, trees and lengths says what is seen, and the largest product is the largest score."""
    q, k, v = a.q, a.k_cache, a.v_cache
    if not target.hopper_gluon or q.dtype not in KINDS or not single(target, a):
        return False
    if v is None or any(t is not None for t in (a.k_rope, a.k_scale, a.v_scale, a.cu_seqlens_q)):
        return False
    if k.dtype != q.dtype or v.dtype != q.dtype or (a.scale is not None and a.scale <= 0):
        return False
    if any(t.shape[-1] % 8 or t.shape[-1] > WIDEST for t in (q, v)) or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    (batch, length, heads, _), (_, _, kv_heads, _), capacity = q.shape, k.shape, capacity_of(a)
    if length * (heads // kv_heads) > ROWS.value or (a.split or 0) % BLOCK.value:
        return False
    if not 0 < capacity < LONGEST or batch * kv_heads * cdiv(capacity, BLOCK.value) >= 2**31:
        return False
    if plan_for(max(q.shape[-1], v.shape[-1]), BLOCK.value, target.shared_memory) is None:
        return False
    return copies_in_bulk(*(t.transpose(1, 2) for t in (k, v)))


def fits_call(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes the arguments and is the faster, by measurement, or was asked for."""
    return fits(target, a) and wanted_of_cache(NAME, target, a)


def forward(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    (batch, length, heads, width), (pages, page, kv_heads, _) = q.shape, k_cache.shape
    values, capacity, group = v_cache.shape[-1], capacity_of(a), heads // kv_heads
    check_keys(a)
    target, kind = Target.at(q.device), KINDS[q.dtype]
    page = 0 if a.block_table is None else page
    plan = plan_for(max(width, values), box_rows(page), target.shared_memory)
    units = batch * kv_heads
    split = a.split or split_for(capacity, units, group * length, RESIDENT * target.sms, a.kv_len is None)
    parts = cdiv(capacity, split)
    results = results_of(a, values, parts)
    if plan.box:
        block = [1, 1, plan.box, WIDE.value]
        caches = tuple(box_of(t.transpose(1, 2), block, kind) for t in (k_cache, v_cache))
    else:
        caches = words_of(k_cache, room_for_nothing(k_cache, parts * units, plan.columns)), words_of(v_cache)
    attention_decode_hopper(
        heads_of(q), *caches, table_of(a), tree_of(a), *results.made, None if a.sink is None else a.sink.contiguous(),
        bending_of(a), window_of(a), lengths_of(a), length, capacity, pages, kv_heads, group, parts, split, parts * units,
        DIM=width, COLUMNS=values, PAGE=page, PLAN=plan,
    )  # fmt: skip
    return finished(results)


def tree_of(a: SimpleNamespace) -> Tree | None:
    return None if a.tree is None else Tree(a.tree, *a.tree.stride())
