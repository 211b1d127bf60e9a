"""Attention over caches of latents on Hopper, in Gluon, for rows of several tiles, whose products take longer than memory: two
warpgroups that both make scores and weights, by turns, and a warp that copies.

A program takes 64 rows of one sequence over one part of its keys, as `latent.py` has them, and its host code is that file's.
Blocks of 64 keys come in pairs, from the last that any row sees down to the first: one for each of two stages, and warpgroup w
makes scores and weights of the block in stage w. Each adds up its half of the values' columns, w the half w, of all blocks. So a
warpgroup goes through a circle: it issues the product of the other's weights with its half of the other's block, and the scores of
its own next block, as its columns come; then it makes weights of these, tells them, and issues their product with its half of its
own block. While one makes weights, the other's products have the tensor cores. Sums are taken in by blocks in their order: the
largest score of a row goes from one warpgroup to the other and back, and weights are rounded once.

Where the number of blocks is odd, the last pair's second lies before the part: copies bring 0 for it, and nobody sees its keys.

A stage has three pieces: *near*, the half of the values' columns that its own warpgroup adds up; *far*, the other's half; *rope*,
the columns after the values, which scores alone read, so that the block's weights lie there afterwards. Near is given back when
its own warpgroup's product is done, and far and rope when the other's is: it read weights in the one and values in the other.
Copies are begun in that order, and far arrives at two barriers, so that few products are left when the last columns come.

Who may write where in shared memory, and when:

- *queries* are copied once: `queries` has one phase.
- *near* of stage w: the copying warp waits for `near.empty` and fills it, and its bytes arrive at `near.full`. Warpgroup w waits
  for that, reads it as keys and then as values, and arrives at `near.empty` when both products are waited for: once a pair.
- *far* and *rope* of stage w, and `missing`, which says what pages of the block there are not: the copying warp waits for
  `far.empty`, stores the number, and fills rope and the first of far, whose bytes arrive at `far.full`, and the rest, at `rest`.
  Warpgroup w waits for both and makes scores; when these are waited for, it stores weights in rope, shows them to products by a
  fence and arrives at `told`. The other one waits for `told`, `far.full` and `rest`, reads both by its product, and arrives at
  `far.empty` when that is waited for: once a pair.
- *tops* of w, the scores whose weights are 1: written with the weights. The other one reads them before it tells its own next
  weights, and those are waited for before w writes again. Nobody says more of it.
- *sums* of w: what its weights add up to, written once, when it has taken in all blocks; it arrives at `done` of w then, which has
  one phase, and waits for the other's.

`told` of w has a phase for each pair. A barrier's parity is enough, for none is more than a phase ahead of who waits for it: a
stage's `full` and `rest` complete again after its `empty`, at which the last arrives who waits for them; `told` of 0 after `told`
of 1, and that after the next of 0, each of which the other one has then waited for. The first phase of `empty` is not waited for,
and those of the last pair are waited for by nobody.

Nobody waits in a circle. Order blocks as they are taken in, 0 and 1 of the first pair, 0 of the second. Copies of a block wait for
products with the block two before, those wait for weights of that, and weights of a block wait for its copies and for the weights
of the block before: all that anything waits for is of the same block or an earlier one.

Keys past the last that is seen may hold NaN. Only the block that is taken in first has any: their scores are hidden, and their
values are cleared by each warpgroup in its own half, after the scores are done: the one has waited for them, the other for weights
made of them. Each is alone with its columns then, shows by a fence what it wrote, and has its warps wait for each other.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from ...core.target import Target
from ...core.triton_versions import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...device.softmax import LN2
from ...device.warpgroups import advance
from ...runtime.kernel import kernel
from ..preference import wanted_of_cache
from .backward import unknown_zero
from .forward import ALONE, LONGEST, Rows, make_boxes, scaled_rows, scaled_where_moved, sums_of, weigh
from .latent import (
    AWAY,
    BLOCK,
    LAZY,
    ROWS,
    SPARE,
    WIDE,
    Pair,
    Plan,
    ask_for,
    attend_by,
    clear_unseen,
    copy_columns,
    find_boxes,
    has_room,
    make_barriers,
    matrices,
    missing_of,
    rounded,
    span_of,
    store_half,
    takes,
)
from .schedule import whole_blocks

NAME = "hopper_latent_pairs"
STAGES = gl.constexpr(2)  # one for each warpgroup's blocks
LOWEST = gl.constexpr(-3.0e38)  # the largest score of rows that have seen nothing: its difference from itself is 0
UNSEEN = gl.constexpr(LONGEST)  # a key that no row sees


class Memory(NamedTuple):
    """Shared memory. Queries and keys are boxes of 64 columns; `near` of stage w is the half w of the values' columns, and `far`
    the other. `tops`, `sums`, `told` and `done` have one for each warpgroup."""

    q: Any
    q_rope: Any
    k_near: Any
    k_far: Any
    k_rope: Any
    missing: Any
    tops: Any
    sums: Any
    queries: Any
    near: Any
    far: Any
    rest: Any
    told: Any
    done: Any


# ---- the copying warp ------------------------------------------------------------------------------------------------


@gluon.jit
def find_in_part(TABLE, span, key, PAGES, PAGE: gl.constexpr, PLAN: gl.constexpr):
    """`find_boxes` of a block that may lie before the part: its page is then one past the last, of which copies bring 0."""
    found, missing = find_boxes(TABLE, span, key, PAGES, PAGE, PLAN)
    if TABLE is None:
        found = ((gl.where(key < span.low * BLOCK, PAGES, span.batch), gl.maximum(key, 0)),)
    return found, missing


@gluon.jit
def copy_part(
    Q, K, ROPE, rope_at, KEYS, TABLE, memory, WINDOW, LENGTHS, L, CAPACITY, PAGES, HEADS, TILES, PARTS, SPLIT, PAGE: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = PLAN.columns // 2
    SLABS: gl.constexpr = HALF // WIDE
    COUNT: gl.constexpr = BLOCK // PLAN.box
    SIZE: gl.constexpr = COUNT * K.block_type.nbytes  # of a slab of keys
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT)
    if span.high > span.low:
        mbarrier.expect(memory.queries, (2 * SLABS + 1) * Q.block_type.nbytes)
        rows = ((span.batch, span.row),)
        copy_columns(Q, memory.q, 0, memory.queries, rows, 0, 2 * SLABS)
        copy_columns(Q, memory.q_rope, 0, memory.queries, rows, 2 * HALF, 1)
        stage = 0
        phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
        for i in range((span.high - span.low + 1) // 2 * 2):
            key = (span.high - 1 - i) * BLOCK
            # Pages are looked up before anything is waited for, and those of a block to come beside them
            found, missing = find_in_part(TABLE, span, key, PAGES, PAGE, PLAN)
            far, _ = find_boxes(TABLE, span, key - AWAY * BLOCK, PAGES, PAGE, PLAN)
            column = stage * HALF
            full = memory.near.full.index(stage)
            mbarrier.wait(memory.near.empty.index(stage), phase)
            mbarrier.expect(full, SLABS * SIZE)
            copy_columns(K, memory.k_near, stage, full, found, column, SLABS)
            column = HALF - column
            full = memory.far.full.index(stage)
            mbarrier.wait(memory.far.empty.index(stage), phase)
            if TABLE is not None:
                memory.missing.index(stage).store(gl.full([1], missing, gl.int32, ALONE))
                barrier()  # `expect` arrives: the number must be there
            mbarrier.expect(full, (SLABS // 2 + 1) * SIZE)
            copy_columns(ROPE, memory.k_rope, stage, full, found, rope_at, 1)
            copy_columns(K, memory.k_far, 2 * stage, full, found, column, SLABS // 2)
            full = memory.rest.index(stage)
            mbarrier.expect(full, SLABS // 2 * SIZE)
            copy_columns(K, memory.k_far, 2 * stage + 1, full, found, column + HALF // 2, SLABS // 2)
            if PLAN.ahead > 0:
                if key >= (span.low + AWAY) * BLOCK:
                    for n in gl.static_range(COUNT):
                        page, place = far[n]
                        ask_for(KEYS, gl.minimum(page, PAGES - 1), place, PLAN.ahead)
            stage, phase = advance(stage, phase, STAGES)


# ---- the warpgroups --------------------------------------------------------------------------------------------------


@gluon.jit
def begin_scores(memory, phase, into, W: gl.constexpr, PLAN: gl.constexpr):
    """Begin q @ k.T of the near columns of the block in stage W when they are there. `into` is what it is made of, whatever it
    held."""
    HALF: gl.constexpr = PLAN.columns // 2
    own = unknown_zero() + W  # addresses of all operands would stay in registers, of which there are none left
    mbarrier.wait(memory.near.full.index(W), phase)
    k = matrices(memory.k_near, STAGES, HALF).index(own).permute((1, 0))
    return warpgroup_mma(matrices(memory.q, 2, HALF).index(own), k, into, use_acc=False, is_async=True)


@gluon.jit
def finish_scores(s, memory, phase, W: gl.constexpr, PLAN: gl.constexpr):
    """Begin the other products, each when its columns are there."""
    QUARTER: gl.constexpr = PLAN.columns // 4
    first = unknown_zero()
    own = first + W
    mbarrier.wait(memory.far.full.index(W), phase)
    k = matrices(memory.k_rope, STAGES, WIDE).index(own).permute((1, 0))
    s = warpgroup_mma(matrices(memory.q_rope, 1, WIDE).index(first), k, s, is_async=True)
    q = matrices(memory.q, 4, QUARTER)
    k = matrices(memory.k_far, 2 * STAGES, QUARTER)
    s = warpgroup_mma(q.index(first + 2 - 2 * W), k.index(first + 2 * W).permute((1, 0)), s, is_async=True)
    mbarrier.wait(memory.rest.index(W), phase)
    return warpgroup_mma(q.index(first + 3 - 2 * W), k.index(first + 2 * W + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def take_other(o, top, total, memory, phase, live, W: gl.constexpr, PLAN: gl.constexpr):
    """Begin to add up the half W of the other warpgroup's block, when its weights are told, and take over what they are relative
    to. Its values are cleared from the `live`-th key on."""
    HALF: gl.constexpr = PLAN.columns // 2
    mbarrier.wait(memory.told.index(1 - W), phase)
    mbarrier.wait(memory.far.full.index(1 - W), phase)
    mbarrier.wait(memory.rest.index(1 - W), phase)
    if W == 1:
        if live < BLOCK:
            clear_unseen(memory.k_far, live, HALF // WIDE)
    new = memory.tops.index(1 - W).load(gl.SliceLayout(1, sums_of(64)))
    fade = gl.exp2(top - new)
    o = scaled_where_moved(o, fade)
    other = unknown_zero() + 1 - W
    v = matrices(memory.k_far, STAGES, HALF).index(other)
    o = warpgroup_mma(matrices(memory.k_rope, STAGES, WIDE).index(other), v, o, is_async=True)
    return o, new, scaled_rows(total, fade)


@gluon.jit
def lost_keys(TABLE, s, missing, PLAN: gl.constexpr):
    """`spoilt`, whose columns are counted where it stands: counted ahead of the loop, they would take registers."""
    if TABLE is None:
        return s
    else:
        j = gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout)) + unknown_zero()
        lost = ((missing >> (j // PLAN.box)) & 1) != 0
        return gl.where(gl.expand_dims(lost, 0), float("nan"), s)


@gluon.jit
def take_own(
    o, s, top, total, lost, TABLE, memory, block, span, upper, SCORES, WINDOW, rows, W: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Make weights of scores, tell them, and add up the half W of the block. Nothing of the warpgroup's is under way before and
    after. Blocks from `upper` on some rows do not see whole, and those before the part no row sees."""
    HALF: gl.constexpr = PLAN.columns // 2
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(HALF), k_width=2)
    missing = missing_of(TABLE, memory, W)
    if (block >= upper) | (block < span.low):
        key = gl.where(block < span.low, UNSEEN, block * BLOCK)
        s = lost_keys(TABLE, s, missing, PLAN)
        p, top, total, fade = weigh(s, top, total, SCORES, WINDOW, rows, key, True, LAZY)
    else:  # which all rows see
        lost |= missing
        p, top, total, fade = weigh(s, top, total, SCORES, WINDOW, rows, block * BLOCK, False, LAZY)
    weights = rounded(p, memory.k_rope)
    matrices(memory.k_rope, STAGES, WIDE).index(W).store(weights)
    memory.tops.index(W).store(top)
    fence_async_shared()
    mbarrier.arrive(memory.told.index(W), count=1)
    if W == 0:
        if (block + 1) * BLOCK > span.stop:
            clear_unseen(memory.k_near, span.stop - block * BLOCK, HALF // WIDE)
    o = scaled_where_moved(o, fade)
    v = matrices(memory.k_near, STAGES, HALF).index(unknown_zero() + W)
    o = warpgroup_mma(gl.convert_layout(weights, OPERAND), v, o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(memory.near.empty.index(W), count=1)
    return o, p, top, total, lost


@gluon.jit
def attend_half(
    O, stride_op, LSE, stride_lp, TABLE, memory, SCORES, WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT,
    W: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = PLAN.columns // 2
    SHAPED: gl.constexpr = sums_of(64)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SHAPED)
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS, SPLIT)
    row = span.row + gl.arange(0, ROWS, BY_ROW)
    top = gl.full([64], LOWEST, gl.float32, BY_ROW)
    total = gl.zeros([64, 8], gl.float32, sums_of(8))
    o = gl.zeros([64, HALF], gl.float32, sums_of(HALF))
    lost = 0
    pairs = (span.high - span.low + 1) // 2
    if pairs > 0:
        shift = span.count - L
        rows = Rows(row // HEADS - span.first, span.first + shift, span.count, 0.0)
        _, upper = whole_blocks(WINDOW, shift, span.count, span.first, span.last, span.low, span.high, BLOCK)
        p = gl.zeros([64, 64], gl.float32, SHAPED)
        block = span.high - 1 - W
        phase = 0  # of the stage of its own
        behind = 0  # of the other's, which is a block before
        live = span.stop - (span.high - 1) * BLOCK  # keys of the first block that any row sees
        mbarrier.wait(memory.queries, 0)
        if W == 0:
            s = finish_scores(begin_scores(memory, 0, p, W, PLAN), memory, 0, W, PLAN)
            s = warpgroup_mma_wait(0, deps=(s,))
            o, p, top, total, lost = take_own(
                o, s, top, total, lost, TABLE, memory, block, span, upper, SCORES, WINDOW, rows, W, PLAN
            )
            block -= 2
            phase = 1
        for _ in range(pairs - (1 - W)):
            o, top, total = take_other(o, top, total, memory, behind, live, W, PLAN)
            s = begin_scores(memory, phase, p, W, PLAN)
            # Near comes first: the other columns may be on their way for long, and copies wait for those that are given back
            o = warpgroup_mma_wait(1, deps=(o,))
            mbarrier.arrive(memory.far.empty.index(1 - W), count=1)
            s = finish_scores(s, memory, phase, W, PLAN)
            s = warpgroup_mma_wait(0, deps=(s,))
            o, p, top, total, lost = take_own(
                o, s, top, total, lost, TABLE, memory, block, span, upper, SCORES, WINDOW, rows, W, PLAN
            )
            block -= 2
            phase ^= 1
            behind ^= 1
            live = gl.maximum(live, BLOCK)  # of later blocks all keys
        if W == 0:
            o, top, total = take_other(o, top, total, memory, behind, live, W, PLAN)
            o = warpgroup_mma_wait(0, deps=(o,))
    bad = gl.where(lost != 0, float("nan"), 0.0)
    whole = gl.convert_layout(gl.sum(total, 1), BY_ROW) + bad
    memory.sums.index(W).store(whole)
    mbarrier.arrive(memory.done.index(W), count=1)
    mbarrier.wait(memory.done.index(1 - W), 0)
    whole += memory.sums.index(1 - W).load(BY_ROW)
    empty = whole == 0.0
    if LENGTHS.kv_len is not None:  # more keys than there is room for: none were walked over
        bad += gl.where(span.wrong, float("nan"), 0.0)
    share = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, whole)) + bad
    if W == 0:
        lse = gl.where(empty, float("-inf"), top * LN2 + gl.log(gl.where(empty, 1.0, whole))) + bad
        at = (row // HEADS).to(gl.int64) * LSE.stride_t + (row % HEADS).to(gl.int64) * LSE.stride_h
        to = LSE.data + (span.batch.to(gl.int64) * LSE.stride_b + span.part.to(gl.int64) * stride_lp)
        gl.store(to + at, lse, row < span.row + span.rows)
    store_half(o, share, O, stride_op, span, HEADS, W * HALF)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "CAPACITY", "PAGES", "TILES", "PARTS", "SPLIT", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def attention_latent_pairs_hopper(
    Q, K, ROPE, rope_at, KEYS, TABLE, O, stride_op, LSE, stride_lp, SCORES, WINDOW, LENGTHS, L, CAPACITY, PAGES, HEADS, TILES,
    PARTS, SPLIT, PROGRAMS, PAGE: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """O and LSE of one part of the keys for a tile of rows, as `attention_latent_hopper` has them."""
    SLABS: gl.constexpr = PLAN.columns // 2 // WIDE
    COUNT: gl.constexpr = STAGES * (BLOCK // PLAN.box)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = Memory(
        make_boxes(Q, 2 * SLABS),
        make_boxes(Q, 1),
        make_boxes(K, SLABS * COUNT),
        make_boxes(K, SLABS * COUNT),
        make_boxes(ROPE, COUNT),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBERS),
        gl.allocate_shared_memory(gl.float32, [2, 64], NUMBERS),
        gl.allocate_shared_memory(gl.float32, [2, 64], NUMBERS),
        make_barriers(1).index(0),
        Pair(make_barriers(STAGES), make_barriers(STAGES)),
        Pair(make_barriers(STAGES), make_barriers(STAGES)),
        make_barriers(STAGES),
        make_barriers(2),
        make_barriers(2),
    )
    # 224 registers a thread for both warpgroups: what these two leave is the first one's
    gl.warp_specialize([
        (attend_half, (O, stride_op, LSE, stride_lp, TABLE, memory, SCORES, WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS,
                       SPLIT, 0, PLAN)),
        (attend_half, (O, stride_op, LSE, stride_lp, TABLE, memory, SCORES, WINDOW, LENGTHS, L, CAPACITY, HEADS, TILES, PARTS,
                       SPLIT, 1, PLAN)),
        (copy_part, (Q, K, ROPE, rope_at, KEYS, TABLE, memory, WINDOW, LENGTHS, L, CAPACITY, PAGES, HEADS, TILES, PARTS, SPLIT,
                     PAGE, PLAN)),
    ], [4, 1], [224, 56])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


def plan_for(values: int, box: int, tiles: int, ahead: int, memory: int) -> Plan | None:
    """Two blocks beside the queries, whose weights lie in what they leave; None where shared memory has no room for them."""
    used = 2 * (ROWS.value + STAGES.value * BLOCK.value) * (values + WIDE.value) + SPARE
    return Plan(values, box, STAGES.value, tiles > 1, ahead) if used <= memory else None


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes a call, which is any that `latent.py` takes, and shared memory has room."""
    return takes(target, a) and has_room(plan_for, target, a)


def fits_call(target: Target, a: SimpleNamespace) -> bool:
    """Whether it takes the arguments and is the fastest, by measurement, or was asked for."""
    return fits(target, a) and wanted_of_cache(NAME, target, a)


def forward(q: Tensor, k_cache: Tensor, v_cache: None, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    return attend_by(attention_latent_pairs_hopper, plan_for, a)
