"""Attention of few rows over caches of latents on Hopper, in Gluon: absorbed MLA decoding where a sequence has at most 32 rows,
tokens times heads. A warp that copies, and one warpgroup; a program to an SM.

A product has 64 rows at least, and those of `latent.py` would hold next to nothing here. So products are turned: scores are
keys @ q.T, and sums, of all columns of the values, values.T @ weights. Their rows are then keys, or columns of the values, and rows
of queries are their 16 or 32 columns: all sums are 64 or 128 registers of a thread, queries take little of shared memory, and the
rest of it is one ring of keys. Only largest scores pass between warps.

A program takes all rows of one sequence over one part of its keys, in blocks of 64 from the last that any row sees down to the
first. Keys are values, so that a block stays until its last product. All that counts is that copies go on meanwhile: a stage is a
piece of a block's columns, and each is given back when its own product is done. At 512 columns a block is three stages, of which
there are eight, or seven beside 32 rows: five are on their way while three are worked on. Scores, weights and sums of a block come
one after the other, for all of them take less time than its bytes. Parts are merged by `attention_parts_merge`.

Who may write where in shared memory, and when:

- *queries* are copied once: `queries` has one phase.
- A *stage* has two barriers, at each of which one arrives a phase. The copying warp waits for `empty`, arrives at `full`, and
  begins to copy: `full` is complete with the last byte. With the first piece of a block it stores in `missing`, before it arrives,
  which boxes of the block have no page. The warpgroup waits for `full` of every stage, reads it by the scores' product and then by
  the values', and `missing` after the scores, and arrives at `empty` when the values' product is waited for.
- *weights*, of one block, are the warpgroup's own. It stores them after the products that read those before are waited for, shows
  them by a fence, and has its warps wait for each other, for each reads what all have stored.

A parity is enough, for `full` of a stage completes again after `empty`, at which arrives who waits for `full`. Nobody waits in a
circle: copies are begun, and stages emptied, in the order of the ring, and at once are needed the stages of one block, of which the
ring has room for more than two. A part of no blocks waits for nothing.

Keys past the last that is seen may hold NaN, and 0 times NaN is NaN. Only the block that is walked over first has any. Their scores
are hidden. Their values the warpgroup clears when all of its warps have waited for the scores, which is when they have told each
other the largest. It shows what it wrote by the same fence as the weights, after which its warps wait for each other.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
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
from ...device.softmax import LN2, LOG2E
from ...device.warpgroups import advance
from ...runtime.kernel import kernel
from ..cache_parts import finished, results_of
from ..cache_read import bending_of, capacity_of, check_keys, lengths_of, table_of, value_columns, window_of
from ..preference import wanted_of_cache
from . import latent
from .backward import unknown_zero
from .decode import ask_early, places_of, span_of
from .forward import ALONE, CLEARED, LAG, Rows, bent, make_boxes, multiply_if, operands_of, rows_of, sums_of
from .latent import BLOCK, WIDE, box_rows, find_boxes, make_barriers, matrices, missing_of, rounded, split_for
from .schedule import row_ends, whole_blocks

NAME = "hopper_latent_few"


class Plan(NamedTuple):
    """Rows of queries, with those that are not there; slabs, of 64 columns, of the values; slabs of a stage, which divide those of
    the keys, one more; keys in a box, which lies in one page; how many stages."""

    rows: int
    slabs: int
    piece: int
    box: int
    stages: int


class Place(NamedTuple):
    """Whose results a program stores."""

    batch: Any
    head: Any
    part: Any


class Memory(NamedTuple):
    """Shared memory. Queries and keys are boxes of 64 columns; of which boxes of keys there are no pages; weights."""

    q: Any
    k: Any
    missing: Any
    weights: Any
    queries: Any
    full: Any
    empty: Any


# ---- the copying warp ------------------------------------------------------------------------------------------------


@gluon.jit
def copy_piece(K, ROPE, rope_at, memory, stage, found, piece: gl.constexpr, PLAN: gl.constexpr):
    """Begin to copy a piece of the boxes of a block into a stage. Columns that a tensor does not have are 0."""
    SLABS: gl.constexpr = PLAN.slabs
    PIECE: gl.constexpr = PLAN.piece
    COUNT: gl.constexpr = BLOCK // PLAN.box
    ready = memory.full.index(stage)
    mbarrier.expect(ready, PIECE * COUNT * K.block_type.nbytes)
    for n in gl.static_range(PIECE):
        for i in gl.static_range(COUNT):
            page, place = found[i]
            into = memory.k.index((stage * PIECE + n) * COUNT + i)
            if piece * PIECE + n < SLABS:
                async_load(K, [page, place, (piece * PIECE + n) * WIDE], ready, into)
            else:
                async_load(ROPE, [page, place, rope_at], ready, into)


@gluon.jit
def copy_part(
    Q, K, ROPE, rope_at, TABLE, memory, span, PAGES, PAGE: gl.constexpr, PLAN: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    await_last(DEPENDENT)
    SLABS: gl.constexpr = PLAN.slabs
    PIECE: gl.constexpr = PLAN.piece
    PIECES: gl.constexpr = (SLABS + 1) // PIECE
    if span.high > span.low:
        key = (span.high - 1) * BLOCK
        found, missing = find_boxes(TABLE, span, key, PAGES, PAGE, PLAN)
        mbarrier.expect(memory.queries, (SLABS + 1) * Q.block_type.nbytes)
        for slab in gl.static_range(SLABS + 1):
            async_load(Q, [span.batch, 0, slab * WIDE], memory.queries, memory.q.index(slab))
        stage = 0
        phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
        for _ in range(span.high - span.low):
            key -= BLOCK
            # Pages of the next block are looked up before this one's stages are waited for
            following, missing_then = find_boxes(TABLE, span, key, PAGES, PAGE, PLAN)
            for piece in gl.static_range(PIECES):
                mbarrier.wait(memory.empty.index(stage), phase)
                if piece == 0:
                    if TABLE is not None:
                        memory.missing.index(stage).store(gl.full([1], missing, gl.int32, ALONE))
                        barrier()  # `expect` arrives: the number must be there
                copy_piece(K, ROPE, rope_at, memory, stage, found, piece, PLAN)
                stage, phase = advance(stage, phase, PLAN.stages)
            found = following
            missing = missing_then


# ---- the warpgroup ---------------------------------------------------------------------------------------------------


@triton.constexpr_function
def any_moved(count):
    """Assembly: whether any of so many factors of a warp's threads is not 1, as often."""
    tests = f"setp.neu.f32 moved, ${count}, 0f3F800000; "
    tests += "".join(f"setp.neu.or.f32 moved, ${i}, 0f3F800000, moved; " for i in range(count + 1, 2 * count))
    told = "selp.b32 $0, 1, 0, moved; " + "".join(f"mov.b32 ${i}, $0; " for i in range(1, count))
    return f"{{ .reg .pred moved; {tests}vote.sync.any.pred moved, moved, 0xffffffff; {told}}}"


@triton.constexpr_function
def factors_of(count):
    return ",".join(["=r"] * count + ["f"] * count)


@gluon.jit
def factors_moved(by):
    """For each factor of a row whether any of all rows is not 1: every warp has them all."""
    COUNT: gl.constexpr = by.shape[0] // 4  # factors of a thread
    return gl.inline_asm_elementwise(any_moved(COUNT), factors_of(COUNT), [by], gl.int32, False, COUNT)


@gluon.jit
def scaled_where_any(o, by, moved):
    """o [64, n] times a factor for each column, unless none has moved: then a warp goes past the multiplications."""
    COUNT: gl.constexpr = o.shape[0] * o.shape[1] // 128  # numbers of a thread
    given = [o, gl.expand_dims(by, 0), gl.expand_dims(moved, 0)]
    return gl.inline_asm_elementwise(multiply_if(COUNT), operands_of(COUNT), given, gl.float32, False, COUNT)


@gluon.jit
def slab_of(memory, stage, n, PLAN: gl.constexpr):
    """The n-th slab of a stage: [64 keys, 64 columns]."""
    PIECE: gl.constexpr = PLAN.piece
    return matrices(memory.k, PLAN.stages * PIECE, WIDE).index(stage * PIECE + n)


@gluon.jit
def issue_scores(memory, piece: gl.constexpr, stage, into, PLAN: gl.constexpr):
    """Begin keys @ q.T of a piece in a stage, a slab at a time, for shapes are powers of two. `into` is what it is added to, or,
    for the first piece, what it is made of."""
    SLABS: gl.constexpr = PLAN.slabs
    PIECE: gl.constexpr = PLAN.piece
    ROWS: gl.constexpr = PLAN.rows
    q = reinterpret(memory.q, memory.q.dtype, [SLABS + 1, ROWS, WIDE], rows_of(WIDE))
    first = unknown_zero() + piece * PIECE  # addresses of queries would stay in registers
    s = into
    for n in gl.static_range(PIECE):
        k = slab_of(memory, stage, n, PLAN)
        columns = q.index(first + n).permute((1, 0))
        s = warpgroup_mma(k, columns, s, use_acc=piece + n > 0, is_async=True)
    return s


@gluon.jit
def spoilt_rows(TABLE, s, missing, PLAN: gl.constexpr):
    """Scores with NaN for keys, its rows, that have no page."""
    if TABLE is None:
        return s
    else:
        j = gl.arange(0, BLOCK, gl.SliceLayout(1, s.type.layout))
        lost = ((missing >> (j // PLAN.box)) & 1) != 0
        return gl.where(gl.expand_dims(lost, 1), float("nan"), s)


@gluon.jit
def hidden_rows(s, WINDOW, rows, key):
    """Scores with -inf where a query, its column, does not see a key."""
    _, stop = row_ends(WINDOW, rows.position + rows.below, rows.count)
    j = gl.arange(0, BLOCK, gl.SliceLayout(1, s.type.layout))
    return gl.where(gl.expand_dims(j, 1) < gl.expand_dims(stop - key, 0), s, float("-inf"))


@gluon.jit
def weigh_columns(s, top, total, SCORES, WINDOW, rows, key, EDGE: gl.constexpr):
    """`forward.weigh`, lazy, of scores whose columns are queries. `total` are sums that each thread has of its own keys: they are
    added up when all blocks are done, and largest scores alone pass between warps."""
    if SCORES.softcap is not None:
        s = bent(s, SCORES, rows, key)
    if EDGE:
        s = hidden_rows(s, WINDOW, rows, key)
    factor = (
        SCORES.scale * LOG2E if SCORES.softcap is None else 1.0
    )  # above 0: the largest product is the largest score
    largest = gl.max(s, 0) * factor
    new = gl.where(largest > top + LAG, largest, top)
    base = new
    if EDGE:
        base = gl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
    p = gl.exp2(s * factor - gl.expand_dims(base, 0))
    fade = gl.exp2(top - base)
    return p, new, total * gl.expand_dims(fade, 0) + p, fade


@gluon.jit
def clear_unseen(memory, stage, piece: gl.constexpr, live, PLAN: gl.constexpr):
    """Make the values from the `live`-th on 0 in a stage that holds a piece."""
    SLABS: gl.constexpr = PLAN.slabs
    PIECE: gl.constexpr = PLAN.piece
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, CLEARED))
    for n in gl.static_range(PIECE):
        if piece * PIECE + n < SLABS:
            slab = slab_of(memory, stage, n, PLAN)
            slab.store(gl.where(gl.expand_dims(row < live, 1), slab.load(CLEARED), 0.0))


@gluon.jit
def walk(state, TABLE, memory, span, high, low, SCORES, WINDOW, rows, PLAN: gl.constexpr, EDGE: gl.constexpr):
    """Take in the blocks from before `high` down to `low`. Before and after a step no product is under way. EDGE: some rows do not
    see all keys."""
    sums, top, total, lost, stage, phase = state
    ROWS: gl.constexpr = PLAN.rows
    SHAPED: gl.constexpr = sums_of(ROWS)
    SLABS: gl.constexpr = PLAN.slabs
    PIECE: gl.constexpr = PLAN.piece
    PIECES: gl.constexpr = (SLABS + 1) // PIECE
    for i in range(high - low):
        key = (high - 1 - i) * BLOCK
        s = gl.zeros([BLOCK, ROWS], gl.float32, SHAPED)
        at = stage
        stages = ()
        for piece in gl.static_range(PIECES):
            mbarrier.wait(memory.full.index(stage), phase)
            s = issue_scores(memory, piece, stage, s, PLAN)
            stages = stages + (stage,)
            stage, phase = advance(stage, phase, PLAN.stages)
        s = warpgroup_mma_wait(0, deps=(s,))
        missing = missing_of(TABLE, memory, at)
        if EDGE:
            s = spoilt_rows(TABLE, s, missing, PLAN)
        else:  # which all rows see
            lost |= missing
        p, top, total, fade = weigh_columns(s, top, total, SCORES, WINDOW, rows, key, EDGE)
        memory.weights.store(rounded(p, memory.weights))
        if EDGE:
            if key + BLOCK > span.stop:
                for piece in gl.static_range(PIECES):
                    clear_unseen(memory, stages[piece], piece, span.stop - key, PLAN)
        fence_async_shared()
        barrier()
        moved = factors_moved(fade)
        issued = ()
        for n in gl.static_range(SLABS):
            v = slab_of(memory, stages[n // PIECE], n % PIECE, PLAN).permute((1, 0))
            o = scaled_where_any(sums[n], fade, moved)
            issued = issued + (warpgroup_mma(v, memory.weights, o, is_async=True),)
        sums = ()
        for piece in gl.static_range(PIECES):
            for n in gl.static_range(PIECE):
                if piece * PIECE + n < SLABS:
                    o = warpgroup_mma_wait(SLABS - 1 - piece * PIECE - n, deps=(issued[piece * PIECE + n],))
                    sums = sums + (o,)
            mbarrier.arrive(memory.empty.index(stages[piece]), count=1)
    return sums, top, total, lost, stage, phase


@gluon.jit
def attend_part(
    O, stride_op, LSE, stride_lp, TABLE, memory, span, SCORES, WINDOW, L, HEADS, PARTS, PLAN: gl.constexpr
):  # fmt: skip
    SLABS: gl.constexpr = PLAN.slabs
    ROWS: gl.constexpr = PLAN.rows
    SHAPED: gl.constexpr = sums_of(ROWS)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SHAPED)
    r = gl.arange(0, ROWS, BY_ROW)
    top = gl.full([ROWS], float("-inf"), gl.float32, BY_ROW)
    total = gl.zeros([BLOCK, ROWS], gl.float32, SHAPED)
    sums = ()
    for _n in gl.static_range(SLABS):
        sums = sums + (gl.zeros([WIDE, ROWS], gl.float32, SHAPED),)
    lost = 0
    if span.high > span.low:
        shift = span.count - L
        rows = Rows(r // HEADS, shift, span.count, 0.0)
        _, upper = whole_blocks(WINDOW, shift, span.count, 0, L - 1, span.low, span.high, BLOCK)
        mbarrier.wait(memory.queries, 0)
        state = (sums, top, total, lost, 0, 0)
        state = walk(state, TABLE, memory, span, span.high, upper, SCORES, WINDOW, rows, PLAN, True)
        state = walk(state, TABLE, memory, span, upper, span.low, SCORES, WINDOW, rows, PLAN, False)
        sums, top, total, lost, stage, phase = state
    whole = gl.sum(total, 0)
    empty = whole == 0.0
    bad = gl.where(lost != 0, float("nan"), 0.0) + gl.where(span.wrong, float("nan"), 0.0)
    share = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, whole)) + bad
    lse = gl.where(empty, float("-inf"), top * LN2 + gl.log(gl.where(empty, 1.0, whole))) + bad
    live = r < L * HEADS
    number = gl.program_id(0) + unknown_zero()  # found anew: there are no registers to keep it in
    place = Place(number // PARTS, 0, number % PARTS)
    gl.store(LSE.data + places_of(LSE, stride_lp, place, r, HEADS), lse, live)
    # A part that saw nothing says so by its lse alone, but for the first
    live = gl.expand_dims(live & ((span.high > span.low) | (place.part == 0)), 0)
    at = gl.expand_dims(places_of(O, stride_op, place, r, HEADS), 0)
    c = gl.expand_dims(gl.arange(0, WIDE, gl.SliceLayout(1, SHAPED)), 1)
    for n in gl.static_range(SLABS):
        y = (sums[n] * gl.expand_dims(share, 0)).to(O.data.dtype.element_ty)
        gl.store(O.data + at + (c + n * WIDE), y, live)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "CAPACITY", "PAGES", "PARTS", "SPLIT", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 160}, dependent=True,
)  # fmt: skip
def attention_latent_few_hopper(
    Q, K, ROPE, rope_at, TABLE, O, stride_op, LSE, stride_lp, SCORES, WINDOW, LENGTHS, L, CAPACITY, PAGES, HEADS, PARTS, SPLIT,
    PROGRAMS, PAGE: gl.constexpr, PLAN: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """O and LSE of one part of the keys for all rows of a sequence. ROPE has the last columns of the keys, from `rope_at` on."""
    SLABS: gl.constexpr = PLAN.slabs
    PIECE: gl.constexpr = PLAN.piece
    ROWS: gl.constexpr = PLAN.rows
    let_next_begin(DEPENDENT)
    if DEPENDENT:
        ask_early(TABLE, LENGTHS, CAPACITY, 1, PARTS, SPLIT, PAGE)
    await_last(DEPENDENT)
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, 1, PARTS, SPLIT)
    memory = Memory(
        make_boxes(Q, SLABS + 1),
        make_boxes(K, PLAN.stages * PIECE * (BLOCK // PLAN.box)),
        gl.allocate_shared_memory(gl.int32, [PLAN.stages, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(Q.dtype, [BLOCK, ROWS], rows_of(ROWS)),
        make_barriers(1).index(0),
        make_barriers(PLAN.stages),
        make_barriers(PLAN.stages),
    )
    gl.warp_specialize([
        (attend_part, (O, stride_op, LSE, stride_lp, TABLE, memory, span, SCORES, WINDOW, L, HEADS, PARTS, PLAN)),
        (copy_part, (Q, K, ROPE, rope_at, TABLE, memory, span, PAGES, PAGE, PLAN, DEPENDENT)),
    ], [1], [64])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


MOST_ROWS = 32  # whose sums a warpgroup's registers hold
SPARE = 2048  # bytes of shared memory for barriers, largest scores, and what warps are started with
IN_STAGE = {512: 3, 256: 5}  # slabs, by columns of values


def plan_for(values: int, rows: int, box: int, memory: int) -> Plan | None:
    """As many stages as shared memory takes beside the queries and a block's weights; None where those are not two blocks."""
    wide, slabs, piece = 16 if rows <= 16 else MOST_ROWS, values // WIDE.value, IN_STAGE[values]
    beside = 2 * wide * (WIDE.value * (slabs + 1) + BLOCK.value)
    stages = (memory - SPARE - beside) // (2 * BLOCK.value * WIDE.value * piece)
    return Plan(wide, slabs, piece, box, stages) if stages * piece >= 2 * (slabs + 1) else None


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether `latent.fits`, and a sequence has at most 32 rows, tokens times heads."""
    if not latent.fits(target, a):
        return False
    rows, values = a.q.shape[1] * a.q.shape[2], value_columns(None, a.k_cache, a.value_dim)
    return rows <= MOST_ROWS and plan_for(values, rows, box_rows(a), target.shared_memory) is not None


def fits_call(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes the arguments and is the faster, by measurement, or was asked for."""
    return fits(target, a) and wanted_of_cache(NAME, target, a, (latent.NAME,))


def forward(q: Tensor, k_cache: Tensor, v_cache: None, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    (batch, length, heads, _), values, capacity = q.shape, value_columns(None, k_cache, a.value_dim), capacity_of(a)
    check_keys(a)
    target, box = Target.at(q.device), box_rows(a)
    plan = plan_for(values, length * heads, box, target.shared_memory)
    split = a.split or split_for(capacity, batch, target.sms)
    parts = cdiv(capacity, split)
    results = results_of(a, values, parts)
    attention_latent_few_hopper(
        *latent.boxes_of(a, plan.rows, box), table_of(a), *results.made, bending_of(a), window_of(a), lengths_of(a), length,
        capacity, k_cache.shape[0], heads, parts, split, parts * batch, PAGE=0 if a.block_table is None else k_cache.shape[1],
        PLAN=plan,
    )  # fmt: skip
    return finished(results)
