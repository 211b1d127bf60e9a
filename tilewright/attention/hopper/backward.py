"""The backward of attention on Hopper, in Gluon: dq, dk and dv in one pass, bitwise repeatable.

A unit of work is a tile of 128 keys of one key head. A program, one to an SM, goes through the blocks of queries that see the tile:
two warpgroups hold 64 keys each, with their dk and dv in registers, a warp copies blocks of q and do into a ring, and a warp keeps
turns. With keys as rows, of block i:

    s = k @ q.T,  p = exp2(s - lse),  dv += p @ do,  dp = v @ do.T,  ds = p * (dp - delta),  dk += ds @ q,  dq = ds.T @ k

p and ds are factors in registers where they are multiplied from the left; for dq both warpgroups put ds into shared memory, and
each takes a part of dq. That is done while the next block's scores are made, so that nobody waits for the other's ds.

**Turns.** dq of a block is a sum over tiles, which lies in fp32 in global memory. Tiles add to it in ascending order: a counter for
each block and head says how many have. The first one stores, so that nothing need be cleared. Adding is `red`, an addition in the
L2 of which nothing comes back; since nobody else adds meanwhile, its result does not depend on when it happens.

**No deadlock.** Units are taken by a counter, in an order in which earlier tiles of a sequence come first, and a unit waits for
earlier ones alone. A program goes through its units in the order it took them: of all units that are not done the earliest has
nothing to wait for, and a program that has taken it runs. This holds for any number of programs that run at a time.

**Little waiting.** All tiles go through blocks from the last to the first, the query heads of a key head within each. With `causal`
the first tile is the longest and comes to each block first; the others follow, a block apart, and end before it. When programs
have once waited for each other so far, they take later units as far apart.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
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
from ...device.hopper import widen
from ...device.softmax import LOG2E
from ...device.warpgroups import advance
from ...gemm.hopper.boxes import box_of, copies_in_bulk
from ...runtime.kernel import kernel
from .. import portable
from ..portable import (
    TOGETHER,
    attention_delta,
    attention_sink_gradient,
    bend,
    heads_of,
    scores_of,
    shape_scores,
    unit_of,
    weight,
    window_of,
)
from ..preference import wanted
from ..tiles import keys_of, keys_seen, lengths, queries_seeing, tile_at
from .meeting import meet

KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
KEYS = tl.constexpr(128)  # of a tile; 64 to a warpgroup
WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
# What the warp that copies notes of a block, beside its place: some of it is not seen, rows of it must be cleared, no tile has
# added to it
MASKED, CLEARED, FIRST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
NOTHING = gl.constexpr("mov.u32 $0, 0;")
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
TO_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
FROM_FP16 = gl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }")
ADD = gl.constexpr("red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;")
STORE = gl.constexpr("st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;")
AWAIT = gl.constexpr(
    "{ .reg .pred other; .reg .b32 done;"
    " again: ld.acquire.gpu.global.b32 done, [$1]; setp.ne.b32 other, done, $2; @other bra again; mov.u32 $0, 0; }"
)
# By one lane: a later one's store might come after that of the next tile
PASS = gl.constexpr(
    "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
    " @first st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0; }"
)


class Shape(NamedTuple):
    """How many columns of q and k, and of v, there are, each in two parts that are multiplied one after the other (the second may
    be 0); the queries of a block; the panels of its dq, which the warpgroups take by turns; the blocks in shared memory at a time;
    whether p is rounded before ds is made from it, which needs half the registers."""

    D: int
    D0: int
    D1: int
    V: int
    V0: int
    V1: int
    QUERIES: int
    PANELS: int
    STAGES: int
    ROUNDS: bool


@triton.constexpr_function
def sums_of(columns):
    """The layout of a warpgroup's sums, 64 rows of so many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@triton.constexpr_function
def bytes_of(shape, rows):
    """Of so many rows of both tensors that are copied together, q and do or k and v."""
    shape = Shape(*shape)  # which arrives as a plain tuple under Triton 3.6
    return rows * (shape.D0 + shape.D1 + shape.V0 + shape.V1) * 2


@triton.constexpr_function
def is_wide(shape):
    """Whether dk and dv of a warpgroup take more than half of its registers."""
    shape = Shape(*shape)
    return shape.D0 + shape.D1 + shape.V0 + shape.V1 > 256


@triton.constexpr_function
def size_of(shape):
    """How many numbers a block of dq is."""
    shape = Shape(*shape)
    return shape.QUERIES * (shape.D0 + shape.D1)


@triton.constexpr_function
def rows_before(shape, panel):
    """How many rows of dq lie before a panel. Of 128 queries each warpgroup takes half; of 64, some of the columns."""
    return 64 * panel if Shape(*shape).QUERIES == 128 else 0


@triton.constexpr_function
def columns_before(shape, panel):
    return 0 if Shape(*shape).QUERIES == 128 else 64 * panel


@triton.constexpr_function
def width_of(shape, panel):
    """How many columns a panel has."""
    shape = Shape(*shape)
    return min(64, shape.D0 + shape.D1 - (0 if shape.QUERIES == 128 else 64 * panel))


# ---- which blocks a tile goes through, and when it is its turn -------------------------------------------------------


@triton.jit
def blocks_of(WINDOW, tile, count, QUERIES: tl.constexpr):
    """(the first block of the queries that see a tile of keys, how many blocks)."""
    last = tl.minimum(tile.start + KEYS, count) - 1
    start, stop = queries_seeing(WINDOW, count - tile.count_q, tile.count_q, tile.start, last)
    some = (tile.start < tile.count_k) & (last >= tile.start) & (start < stop)
    first = start // QUERIES
    return first, tl.where(some, (stop + QUERIES - 1) // QUERIES - first, 0)


@triton.jit
def turn_of(WINDOW, tile, count, m, QUERIES: tl.constexpr):
    """How many tiles of keys add to the block of queries from m on before this one does: those before it that the block sees."""
    last = tl.minimum(m + QUERIES, tile.count_q) - 1
    start, _, _, _ = keys_seen(WINDOW, count - tile.count_q, count, m, last)
    return tile.start // KEYS - start // KEYS


@triton.jit
def slot_of(LENGTHS, tile, QUERIES: tl.constexpr):
    """Where a sequence's blocks begin among those of one head. Packed sequences begin anywhere: one more block for each of those
    before keeps them apart."""
    if LENGTHS.table is None:
        return 0
    else:
        return tile.first_q // QUERIES + tl.maximum(tile.sequence, 0)


@triton.jit
def is_whole(WINDOW, tile, count, m, QUERIES: tl.constexpr):
    """Whether every query of the block from m on sees every key of the tile."""
    shift = count - tile.count_q
    whole = (m + QUERIES <= tile.count_q) & (tile.start + KEYS <= count)
    if WINDOW.right is not None:
        whole &= tile.start + KEYS - 1 <= m + shift + WINDOW.right
    if WINDOW.left is not None:
        whole &= tile.start >= m + QUERIES - 1 + shift - WINDOW.left
    return whole


@triton.jit
def queries_alone(WINDOW, tile, count):
    """How many queries at the beginning of a sequence see nothing: there is no key at their positions yet."""
    if WINDOW.right is None:
        return 0
    else:
        return tl.maximum(tile.count_q - count - WINDOW.right, 0)


@triton.jit
def keys_alone(WINDOW, tile, count):
    """How many keys at the beginning of a sequence no query sees: the first query is past them."""
    if WINDOW.left is None:
        return 0
    else:
        return tl.maximum(count - tile.count_q - WINDOW.left, 0)


# ---- shared memory ---------------------------------------------------------------------------------------------------


@gluon.jit
def no_sums(COLUMNS: gl.constexpr):
    return gl.zeros([64, COLUMNS], gl.float32, sums_of(COLUMNS))


@gluon.jit
def rows_at(ring, i, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A box as a factor."""
    return reinterpret(ring.index(i), ring.dtype, [ROWS, COLUMNS], NARROW if COLUMNS == 32 else WIDE)


@gluon.jit
def panel_at(ring, i, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PANEL: gl.constexpr):
    """64 columns of a box, which lie together."""
    return reinterpret(ring.index(i), ring.dtype, [COLUMNS // 64, ROWS, 64], WIDE).index(PANEL)


@gluon.jit
def clear_box(box, keep):
    """Make the rows that are not kept 0."""
    box.store(gl.where(gl.expand_dims(keep, 1), box.load(WORDS), 0.0))


@gluon.jit
def clear_rows(ring, i, keep, ROWS: gl.constexpr, COLUMNS: gl.constexpr, FROM: gl.constexpr, STEP: gl.constexpr):
    """The same of panels FROM, FROM + STEP ... of a part of so many columns, which may be none."""
    if COLUMNS == 32:
        if FROM == 0:
            clear_box(rows_at(ring, i, ROWS, COLUMNS), keep)
    else:
        for c in gl.static_range(FROM, COLUMNS // 64, STEP):
            clear_box(panel_at(ring, i, ROWS, COLUMNS, c), keep)


@gluon.jit
def wait_for_both():
    """Make what both warpgroups wrote to shared memory a factor for both."""
    fence_async_shared()
    meet()


@gluon.jit
def number_at(slot, LAYOUT: gl.constexpr):
    """The one number that lies there."""
    return gl.max(slot.load(LAYOUT), 0)


@gluon.jit
def read_ticket(ticket, phase, LAYOUT: gl.constexpr):
    """The next unit, which the warp that copies has taken."""
    slot, full, empty = ticket
    mbarrier.wait(full, phase)
    unit = number_at(slot, LAYOUT)
    barrier()  # all of them have read it
    mbarrier.arrive(empty, count=1)
    return unit


# ---- the warp that copies --------------------------------------------------------------------------------------------


@gluon.jit
def copy_parts(X0, X1, at, b, h, t, ready, D0: gl.constexpr, rings):
    ring0, ring1 = rings
    async_load(X0, [b, h, t, 0], ready, ring0.index(at))
    if X1 is not None:
        async_load(X1, [b, h, t, D0], ready, ring1.index(at))


@gluon.jit
def copy_blocks(boxes, memory, bars, ticket, work, SHAPE: gl.constexpr, TOGETHER: gl.constexpr):
    Q, Q1, K, K1, V, V1, DO, DO1, LINES = boxes
    k, v, q, do, lines, notes, ds = memory
    full, empty, kv_full, kv_empty, ds_full, turn, added = bars
    slot, ticket_full, ticket_empty = ticket
    COUNTER, TURN, WINDOW, LENGTHS, L, KEYS_IN_ALL, KV_HEADS, GROUP, BATCH, TILES, SLOTS = work
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    kv_phase = 1
    ticket_phase = 1
    units = TILES * KV_HEADS * BATCH
    unit = units - units  # a value, which the loop carries
    while unit < units:
        unit = gl.atomic_add(COUNTER, 1, sem="relaxed")
        mbarrier.wait(ticket_empty, ticket_phase)
        ticket_phase ^= 1
        slot.store(gl.zeros([1], gl.int32, ONE_WARP) + unit)
        barrier()
        mbarrier.arrive(ticket_full, count=1)
        if unit < units:
            index, kv_head, batch = unit_of(unit, TILES, KV_HEADS, BATCH, TOGETHER, False)
            tile = tile_at(LENGTHS, index, batch, L, KEYS_IN_ALL, KEYS)
            count, _ = keys_of(LENGTHS, tile)
            first, blocks = blocks_of(WINDOW, tile, count, SHAPE.QUERIES)
            if blocks > 0:
                mbarrier.wait(kv_empty, kv_phase)
                kv_phase ^= 1
                mbarrier.expect(kv_full, bytes_of(SHAPE, KEYS))
                for half in gl.static_range(2):
                    at = tile.first_k + tile.start + half * 64
                    copy_parts(K, K1, half, batch, kv_head, at, kv_full, SHAPE.D0, k)
                    copy_parts(V, V1, half, batch, kv_head, at, kv_full, SHAPE.V0, v)
                place = (batch * KV_HEADS + kv_head) * GROUP * SLOTS + slot_of(LENGTHS, tile, SHAPE.QUERIES) + first
                alone = queries_alone(WINDOW, tile, count)
                for i in range(blocks):
                    block = blocks - 1 - i
                    m = (first + block) * SHAPE.QUERIES
                    flags = gl.where(is_whole(WINDOW, tile, count, m, SHAPE.QUERIES), 0, MASKED)
                    flags |= gl.where((m < alone) | (m + SHAPE.QUERIES > tile.count_q), CLEARED, 0)
                    flags |= gl.where(turn_of(WINDOW, tile, count, m, SHAPE.QUERIES) == 0, FIRST, 0)
                    for g in range(GROUP):
                        at = place + block + g * SLOTS
                        ready = full.index(stage)
                        mbarrier.wait(empty.index(stage), phase)
                        notes.index(stage).store(gl.zeros([1], gl.int32, ONE_WARP) + (at * 8 + flags))
                        barrier()  # `expect` arrives: the note must be there
                        mbarrier.expect(ready, bytes_of(SHAPE, SHAPE.QUERIES) + LINES.block_type.nbytes)
                        copy_parts(Q, Q1, stage, batch, kv_head * GROUP + g, tile.first_q + m, ready, SHAPE.D0, q)
                        async_load(LINES, [at, 0, 0], ready, lines.index(stage))
                        copy_parts(DO, DO1, stage, batch, kv_head * GROUP + g, tile.first_q + m, ready, SHAPE.V0, do)
                        stage, phase = advance(stage, phase, SHAPE.STAGES)


# ---- the warp that keeps turns ---------------------------------------------------------------------------------------


@gluon.jit
def await_count(at, count):
    """Wait until a counter in global memory says so many, and see what was written before it did."""
    gl.inline_asm_elementwise(AWAIT, "=r,l,r", [at, count], gl.int32, False, 1)


@gluon.jit
def tell_count(at, count):
    """Have it say so many, after all that this warp has seen to be written."""
    gl.inline_asm_elementwise(PASS, "=r,l,r", [at, count], gl.int32, False, 1)


@gluon.jit
def keep_turns(bars, ticket, work, SHAPE: gl.constexpr, TOGETHER: gl.constexpr):
    """Let both warpgroups add to a block when it is this tile's turn, and the next tile when both have.

    What another tile added is there when the counter says so: it was released after and is acquired before, at the scope of the
    GPU, and both pass through barriers of shared memory to and from those who add.
    """
    full, empty, kv_full, kv_empty, ds_full, turn, added = bars
    COUNTER, TURN, WINDOW, LENGTHS, L, KEYS_IN_ALL, KV_HEADS, GROUP, BATCH, TILES, SLOTS = work
    phase = 0
    ticket_phase = 0
    units = TILES * KV_HEADS * BATCH
    unit = units - units
    while unit < units:
        unit = read_ticket(ticket, ticket_phase, ONE_WARP)
        ticket_phase ^= 1
        if unit < units:
            index, kv_head, batch = unit_of(unit, TILES, KV_HEADS, BATCH, TOGETHER, False)
            tile = tile_at(LENGTHS, index, batch, L, KEYS_IN_ALL, KEYS)
            count, _ = keys_of(LENGTHS, tile)
            first, blocks = blocks_of(WINDOW, tile, count, SHAPE.QUERIES)
            place = (batch * KV_HEADS + kv_head) * GROUP * SLOTS + slot_of(LENGTHS, tile, SHAPE.QUERIES) + first
            for i in range(blocks):
                block = blocks - 1 - i
                mine = turn_of(WINDOW, tile, count, (first + block) * SHAPE.QUERIES, SHAPE.QUERIES)
                for g in range(GROUP):
                    at = TURN + (place + block + g * SLOTS)
                    await_count(at, mine)
                    mbarrier.arrive(turn, count=1)
                    mbarrier.wait(added, phase)
                    phase ^= 1
                    tell_count(at, mine + 1)


# ---- the warpgroups --------------------------------------------------------------------------------------------------


@gluon.jit
def unknown_zero():
    """0, which the compiler does not know. Addresses of what stays from block to block it would keep in registers, of which there
    are none left; with this they are computed for each block."""
    return gl.inline_asm_elementwise(NOTHING, "=r", [], gl.int32, False, 1)


@gluon.jit
def halve(x, DTYPE: gl.constexpr):
    """fp32 in bf16 or fp16, two in one instruction: the conversion that Triton makes takes apart again what a product in flight
    still holds."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return gl.inline_asm_elementwise(TO_BF16, "=r,r,r", [x], gl.bfloat16, False, 2)
    else:
        return gl.inline_asm_elementwise(TO_FP16, "=r,r,r", [x], gl.float16, False, 2)


@gluon.jit
def double(x, DTYPE: gl.constexpr):
    """The way back, of two at a time as well: one by one they would take a register each from when they were made."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return widen(x)
    else:
        return gl.inline_asm_elementwise(FROM_FP16, "=f,=f,r", [x], gl.float32, True, 2)


@gluon.jit
def add_to_block(y, TO, first, COLUMNS: gl.constexpr):
    """Add 64 rows of sums to a block, or store them if none did before. The block lies in the order in which threads hold it, four
    numbers of each side by side, which `attention_dq` undoes."""
    y = y.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([16 * COLUMNS, 2, 2])
    even, odd = gl.split(y)
    y0, y2 = gl.split(even)
    y1, y3 = gl.split(odd)
    at = (TO + gl.arange(0, 16 * COLUMNS, y0.type.layout) * 4).to(gl.int64)
    if first:
        gl.inline_asm_elementwise(STORE, "=r,l,f,f,f,f", [at, y0, y1, y2, y3], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise(ADD, "=r,l,f,f,f,f", [at, y0, y1, y2, y3], gl.int32, False, 1)


@gluon.jit
def multiply_ds(memory, buffer, SHAPE: gl.constexpr, PANEL: gl.constexpr):
    """Panel PANEL of a block's dq, in flight."""
    k, v, q, do, lines, notes, ds = memory
    COLUMNS: gl.constexpr = width_of(SHAPE, PANEL)
    BEFORE: gl.constexpr = columns_before(SHAPE, PANEL)
    dq = no_sums(COLUMNS)
    zero = unknown_zero()
    for half in gl.static_range(2):
        a = panel_at(ds, 2 * buffer + half, 64, SHAPE.QUERIES, rows_before(SHAPE, PANEL) // 64)
        if BEFORE < SHAPE.D0:
            b = panel_at(k[0], zero + half, 64, SHAPE.D0, BEFORE // 64)
        else:
            b = rows_at(k[1], zero + half, 64, SHAPE.D1)
        dq = warpgroup_mma(a.permute((1, 0)), b, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def product_of_rows(a, i, b, j, ROWS: gl.constexpr, C0: gl.constexpr, C1: gl.constexpr):
    """a @ b.T, in flight, of boxes of 64 and of ROWS rows, in two parts."""
    none = no_sums(ROWS)
    y = warpgroup_mma(
        rows_at(a[0], i, 64, C0), rows_at(b[0], j, ROWS, C0).permute((1, 0)), none, use_acc=False, is_async=True
    )
    if C1 > 0:
        y = warpgroup_mma(rows_at(a[1], i, 64, C1), rows_at(b[1], j, ROWS, C1).permute((1, 0)), y, is_async=True)
    return y


@gluon.jit
def add_product(sum0, sum1, x, b, j, ROWS: gl.constexpr, C0: gl.constexpr, C1: gl.constexpr):
    """Sums + x @ b of both parts, in flight; x [64, ROWS] in registers."""
    left = gl.convert_layout(x, gl.DotOperandLayout(0, sums_of(C0), 2))
    sum0 = warpgroup_mma(left, rows_at(b[0], j, ROWS, C0), sum0, is_async=True)
    if C1 > 0:
        left = gl.convert_layout(x, gl.DotOperandLayout(0, sums_of(C1), 2))
        sum1 = warpgroup_mma(left, rows_at(b[1], j, ROWS, C1), sum1, is_async=True)
    return sum0, sum1


@gluon.jit
def wait_for(pending: gl.constexpr, sum0, sum1, C1: gl.constexpr):
    """Both parts of sums, when all but `pending` products are done; the second part may be none."""
    if C1 > 0:
        sum0, sum1 = warpgroup_mma_wait(pending, deps=(sum0, sum1))
    else:
        sum0 = warpgroup_mma_wait(pending, deps=(sum0,))
    return sum0, sum1


@gluon.jit
def finish_dq(dq, memory, bars, DQ, note, step, SHAPE: gl.constexpr, W: gl.constexpr):
    """Add this warpgroup's part of dq of the block before, whose first panel is in flight, when it is the turn."""
    full, empty, kv_full, kv_empty, ds_full, turn, added = bars
    to = DQ + (note >> 3).to(gl.int64) * size_of(SHAPE)
    before = (step & 1) ^ 1
    if W < SHAPE.PANELS:
        dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.wait(turn, before)
    PANELS: gl.constexpr = SHAPE.PANELS
    for panel in gl.static_range(W, PANELS, 2):
        if panel > W:
            dq = multiply_ds(memory, before, SHAPE, panel)
            dq = warpgroup_mma_wait(0, deps=(dq,))
        add_to_block(dq, to + panel * 4096, (note & FIRST) != 0, width_of(SHAPE, panel))
    barrier()  # all of them have
    mbarrier.arrive(added, count=1)


@gluon.jit
def sees(lines, stage, j, WINDOW, S: gl.constexpr):
    """Whether the queries of a block see keys j: from their lines, since to compute it for every row holds registers."""
    ok = j <= gl.expand_dims(lines.index(4 * stage + 3).load(gl.SliceLayout(0, S)), 0).to(gl.int32, bitcast=True)
    if WINDOW.left is not None:
        at = gl.expand_dims(lines.index(4 * stage + 2).load(gl.SliceLayout(0, S)), 0).to(gl.int32, bitcast=True)
        ok &= j >= at - WINDOW.left
    return ok


@gluon.jit
def take_block(
    dk0, dk1, dv0, dv1, memory, bars, DQ, SCORES, WINDOW, start, HEADS, SLOTS, stage, phase, step, note,
    FOLLOWS: gl.constexpr, SHAPE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Add a block's part to dk and dv, and give its ds to both warpgroups. FOLLOWS: there is a block before, with this note, whose
    dq is still to be made; `step` counts blocks from the program's first. Gives the block's own note."""
    k, v, q, do, lines, notes, ds = memory
    full, empty, kv_full, kv_empty, ds_full, turn, added = bars
    DTYPE: gl.constexpr = ds.dtype
    S: gl.constexpr = sums_of(SHAPE.QUERIES)
    mine = W + unknown_zero()
    buffer = step & 1
    mbarrier.wait(full.index(stage), phase)
    before = note
    note = number_at(notes.index(stage), FOUR_WARPS)
    lines = reinterpret(lines, gl.float32, [4 * SHAPE.STAGES, SHAPE.QUERIES], PLAIN)
    if (note & CLEARED) != 0:
        # Rows of the next sequence, or that see nothing, may hold NaN, and a weight of 0 times that is no 0
        keep = lines.index(4 * stage + 3).load(gl.SliceLayout(1, WORDS)).to(gl.int32, bitcast=True) >= 0
        clear_rows(q[0], stage, keep, SHAPE.QUERIES, SHAPE.D0, W, 2)
        clear_rows(q[1], stage, keep, SHAPE.QUERIES, SHAPE.D1, W, 2)
        clear_rows(do[0], stage, keep, SHAPE.QUERIES, SHAPE.V0, W, 2)
        clear_rows(do[1], stage, keep, SHAPE.QUERIES, SHAPE.V1, W, 2)
        wait_for_both()
    x = product_of_rows(k, mine, q, stage, SHAPE.QUERIES, SHAPE.D0, SHAPE.D1)
    dq = None
    if FOLLOWS:
        # The other's ds of the block before. When it is there, the other is also done with reading what of ours is written next
        mbarrier.wait(ds_full.index(2 * (buffer ^ 1) + 1 - W), ((step - 1) >> 1) & 1)
    LATE: gl.constexpr = is_wide(SHAPE)  # there is no room for scores and dq at a time
    if FOLLOWS and W < SHAPE.PANELS and not LATE:
        dq = multiply_ds(memory, buffer ^ 1, SHAPE, W)
        x = warpgroup_mma_wait(2, deps=(x,))
    else:
        x = warpgroup_mma_wait(0, deps=(x,))
    lse = gl.expand_dims(lines.index(4 * stage).load(gl.SliceLayout(0, S)), 0)
    s, slope = bend(SCORES, x)
    j = gl.expand_dims(start + gl.arange(0, 64, gl.SliceLayout(1, S)), 1)
    if SCORES.slopes is not None:
        head = (note >> 3) // SLOTS % HEADS
        at = gl.expand_dims(lines.index(4 * stage + 2).load(gl.SliceLayout(0, S)), 0).to(gl.int32, bitcast=True)
        s, _ = shape_scores(SCORES, s, True, head, head, None, None, at, j, True)
    p = weight(s, lse)
    if (note & MASKED) != 0:
        p = gl.where(sees(lines, stage, j, WINDOW, S), p, 0.0)
    # What ds is made from: where registers are few, as rounded as what dv is
    w = p
    if SCORES.softcap is not None:
        w = p * slope
    EARLY: gl.constexpr = SHAPE.ROUNDS or SCORES.softcap is not None
    if EARLY:
        p = halve(p, DTYPE)
    if SHAPE.ROUNDS:
        if SCORES.softcap is None:
            w = p
        else:
            w = halve(w, DTYPE)
    if FOLLOWS:
        if W < SHAPE.PANELS and LATE:
            dq = multiply_ds(memory, buffer ^ 1, SHAPE, W)
        finish_dq(dq, memory, bars, DQ, before, step, SHAPE, W)
    dp = product_of_rows(v, mine, do, stage, SHAPE.QUERIES, SHAPE.V0, SHAPE.V1)
    if not EARLY:
        p = halve(p, DTYPE)
    dv0, dv1 = add_product(dv0, dv1, p, do, stage, SHAPE.QUERIES, SHAPE.V0, SHAPE.V1)
    delta = gl.expand_dims(lines.index(4 * stage + 1).load(gl.SliceLayout(0, S)), 0)
    dp = warpgroup_mma_wait(2 if SHAPE.V1 > 0 else 1, deps=(dp,))
    if SHAPE.ROUNDS:
        w = double(w, DTYPE)
    y = w * (dp - delta)
    if (note & MASKED) != 0:
        y = gl.where(sees(lines, stage, j, WINDOW, S), y, 0.0)
    y = halve(y, DTYPE)
    reinterpret(ds.index(2 * buffer + mine), DTYPE, [64, SHAPE.QUERIES], WIDE).store(y)
    fence_async_shared()
    dk0, dk1 = add_product(dk0, dk1, y, q, stage, SHAPE.QUERIES, SHAPE.D0, SHAPE.D1)
    barrier()  # all of this warpgroup's ds is there
    mbarrier.arrive(ds_full.index(2 * buffer + W), count=1)
    dv0, dv1 = wait_for(2 if SHAPE.D1 > 0 else 1, dv0, dv1, SHAPE.V1)
    dk0, dk1 = wait_for(0, dk0, dk1, SHAPE.D1)
    mbarrier.arrive(empty.index(stage), count=1)
    return dk0, dk1, dv0, dv1, note


@gluon.jit
def store_sums(y, X, batch, head, token, live, factor, FROM: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """64 rows of sums times a factor; a head has COLUMNS columns, of which these are WIDTH from FROM on."""
    LAYOUT: gl.constexpr = sums_of(WIDTH)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = FROM + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = batch.to(gl.int64) * X.stride_b + head.to(gl.int64) * X.stride_h + token.to(gl.int64) * X.stride_t
    at = gl.expand_dims(at + row.to(gl.int64) * X.stride_t, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(row < live, 1) & gl.expand_dims(column < COLUMNS, 0)
    gl.store(X.data + at, (y * factor).to(X.data.dtype.element_ty), inside)


@gluon.jit
def take_tiles(
    DQ, DK, DV, SCORES, memory, bars, ticket, work, SHAPE: gl.constexpr, TOGETHER: gl.constexpr, W: gl.constexpr
):
    """Warpgroup W."""
    k, v, q, do, lines, notes, ds = memory
    full, empty, kv_full, kv_empty, ds_full, turn, added = bars
    COUNTER, TURN, WINDOW, LENGTHS, L, KEYS_IN_ALL, KV_HEADS, GROUP, BATCH, TILES, SLOTS = work
    # A second part that is not there is narrow, and its zeros are nobody's
    WD: gl.constexpr = SHAPE.D1 if SHAPE.D1 > 0 else 32
    WV: gl.constexpr = SHAPE.V1 if SHAPE.V1 > 0 else 32
    stage = 0
    phase = 0
    kv_phase = 0
    ticket_phase = 0
    step = 0
    units = TILES * KV_HEADS * BATCH
    unit = units - units
    while unit < units:
        unit = read_ticket(ticket, ticket_phase, FOUR_WARPS)
        ticket_phase ^= 1
        if unit < units:
            index, kv_head, batch = unit_of(unit, TILES, KV_HEADS, BATCH, TOGETHER, False)
            tile = tile_at(LENGTHS, index, batch, L, KEYS_IN_ALL, KEYS)
            count, _ = keys_of(LENGTHS, tile)
            first, blocks = blocks_of(WINDOW, tile, count, SHAPE.QUERIES)
            dk0 = no_sums(SHAPE.D0)
            dk1 = no_sums(WD)
            dv0 = no_sums(SHAPE.V0)
            dv1 = no_sums(WV)
            if blocks > 0:
                mbarrier.wait(kv_full, kv_phase)
                kv_phase ^= 1
                # Keys that are not there or that nobody sees may hold NaN, which ds of 0 would bring into dq
                start = tile.start + W * 64
                low = keys_alone(WINDOW, tile, count)
                if (low > tile.start) | (count < tile.start + KEYS):
                    j = start + gl.arange(0, 64, gl.SliceLayout(1, WORDS))
                    clear_rows(k[0], W, (j >= low) & (j < count), 64, SHAPE.D0, 0, 1)
                    clear_rows(k[1], W, (j >= low) & (j < count), 64, SHAPE.D1, 0, 1)
                    wait_for_both()
                dk0, dk1, dv0, dv1, note = take_block(
                    dk0, dk1, dv0, dv1, memory, bars, DQ, SCORES, WINDOW, start, KV_HEADS * GROUP, SLOTS, stage, phase, step, step,
                    False, SHAPE, W,
                )  # fmt: skip
                stage, phase = advance(stage, phase, SHAPE.STAGES)
                step += 1
                for _block in range(1, blocks * GROUP):
                    dk0, dk1, dv0, dv1, note = take_block(
                        dk0, dk1, dv0, dv1, memory, bars, DQ, SCORES, WINDOW, start, KV_HEADS * GROUP, SLOTS, stage, phase, step,
                        note, True, SHAPE, W,
                    )  # fmt: skip
                    stage, phase = advance(stage, phase, SHAPE.STAGES)
                    step += 1
                last = (step & 1) ^ 1
                mbarrier.wait(ds_full.index(2 * last + 1 - W), ((step - 1) >> 1) & 1)
                dq = None
                if W < SHAPE.PANELS:
                    dq = multiply_ds(memory, last, SHAPE, W)
                finish_dq(dq, memory, bars, DQ, note, step, SHAPE, W)
                mbarrier.arrive(kv_empty, count=1)
            token = tile.first_k + tile.start + W * 64
            live = tile.count_k - tile.start - W * 64
            store_sums(dk0, DK, batch, kv_head, token, live, SCORES.scale, 0, SHAPE.D, SHAPE.D0)
            if SHAPE.D1 > 0:
                store_sums(dk1, DK, batch, kv_head, token, live, SCORES.scale, SHAPE.D0, SHAPE.D, SHAPE.D1)
            store_sums(dv0, DV, batch, kv_head, token, live, 1.0, 0, SHAPE.V, SHAPE.V0)
            if SHAPE.V1 > 0:
                store_sums(dv1, DV, batch, kv_head, token, live, 1.0, SHAPE.V0, SHAPE.V, SHAPE.V1)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@gluon.jit
def make_boxes(X, X1, COUNT: gl.constexpr):
    """Room for so many boxes of each part; of no second part, the first's."""
    first = gl.allocate_shared_memory(X.dtype, [COUNT] + X.block_type.shape, X.layout)
    if X1 is None:
        return first, first
    else:
        return first, gl.allocate_shared_memory(X1.dtype, [COUNT] + X1.block_type.shape, X1.layout)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "KEYS_IN_ALL", "BATCH", "TILES", "SLOTS", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def attention_backward_hopper(
    Q, Q1, K, K1, V, V1, DO, DO1, LINES, DQ, DK, DV, COUNTER, TURN, SCORES, WINDOW, LENGTHS, L, KEYS_IN_ALL, KV_HEADS, GROUP,
    BATCH, TILES, SLOTS, PROGRAMS, SHAPE: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """dk, dv, and DQ: blocks of dq in fp32, less the scale, as `attention_dq` reads them. K1 and the like are the second parts."""
    STAGES: gl.constexpr = SHAPE.STAGES
    k = make_boxes(K, K1, 2)
    v = make_boxes(V, V1, 2)
    q = make_boxes(Q, Q1, STAGES)
    do = make_boxes(DO, DO1, STAGES)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES] + LINES.block_type.shape, LINES.layout)
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 1], PLAIN)
    ds = gl.allocate_shared_memory(Q.dtype, [4, 64, SHAPE.QUERIES], WIDE)
    memory = (k, v, q, do, lines, notes, ds)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    ds_full = make_barriers(4, 1)
    once = make_barriers(4, 1)
    twice = make_barriers(2, 2)
    bars = (full, empty, once.index(0), twice.index(0), ds_full, once.index(1), twice.index(1))
    ticket_empty = make_barriers(1, 3)
    ticket = (gl.allocate_shared_memory(gl.int32, [1], PLAIN), once.index(2), ticket_empty.index(0))
    boxes = (Q, Q1, K, K1, V, V1, DO, DO1, LINES)
    work = (COUNTER, TURN, WINDOW, LENGTHS, L, KEYS_IN_ALL, KV_HEADS, GROUP, BATCH, TILES, SLOTS)
    gl.warp_specialize([
        (take_tiles, (DQ, DK, DV, SCORES, memory, bars, ticket, work, SHAPE, TOGETHER, 0)),
        (take_tiles, (DQ, DK, DV, SCORES, memory, bars, ticket, work, SHAPE, TOGETHER, 1)),
        (copy_blocks, (boxes, memory, bars, ticket, work, SHAPE, TOGETHER)),
        (keep_turns, (bars, ticket, work, SHAPE, TOGETHER)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@kernel(
    grid=lambda a: (a.TILES, a.HEADS, a.BATCH), tokens=("L", "KEYS_IN_ALL", "BATCH", "TILES", "SLOTS"),
    default=lambda a: {"num_warps": 1},
)  # fmt: skip
def attention_lines(
    LSE, DELTA, LINES, TURN, COUNTER, WINDOW, LENGTHS, L, KEYS_IN_ALL, HEADS, BATCH, TILES, SLOTS, QUERIES: tl.constexpr
):  # fmt: skip
    """LINES [blocks, 4, QUERIES] of each block, as one copy brings them: lse in base 2, inf where nothing has a weight; delta; and
    as integers the position and the last key that is seen, -1 if there is none. Nobody has taken a unit yet, nor added to a block.
    """
    index = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    if index + head + batch == 0:
        tl.store(COUNTER, 0)
    tile = tile_at(LENGTHS, index, batch, L, KEYS_IN_ALL, QUERIES)
    if (tile.sequence >= 0) & (tile.start < tile.count_q):  # tokens of no sequence have no blocks of their own
        row = tile.start + tl.arange(0, QUERIES)
        live = row < tile.count_q
        count, _ = keys_of(LENGTHS, tile)
        position = row + (count - tile.count_q)
        last = tl.zeros_like(row) + (count - 1)
        if WINDOW.right is not None:
            last = tl.minimum(last, position + WINDOW.right)
        unit = batch * HEADS + head
        lse = tl.load(LSE + unit.to(tl.int64) * L + tile.first_q + row, live, float("-inf"))
        delta = tl.load(DELTA + unit.to(tl.int64) * L + tile.first_q + row, live, 0.0)
        place = unit * SLOTS + slot_of(LENGTHS, tile, QUERIES) + tile.start // QUERIES
        at = LINES + place.to(tl.int64) * (4 * QUERIES) + tl.arange(0, QUERIES)
        tl.store(at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E))
        tl.store(at + QUERIES, delta)
        tl.store(at + 2 * QUERIES, position.to(tl.float32, bitcast=True))
        tl.store(at + 3 * QUERIES, tl.where(live, tl.maximum(last, -1), -1).to(tl.float32, bitcast=True))
        tl.store(TURN + place, 0)


@triton.jit
def store_panel(at, to, DQ, live, some, scale, SHAPE: tl.constexpr, PANEL: tl.constexpr):
    """64 rows and up to 64 columns of dq, of which `live` rows there are, in rows again."""
    COLUMNS: tl.constexpr = width_of(SHAPE, PANEL)
    x = tl.load(at + tl.arange(0, 64 * COLUMNS), some, 0.0)
    x = x.reshape([4, COLUMNS // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([64, COLUMNS])
    row = rows_before(SHAPE, PANEL) + tl.arange(0, 64)
    column = columns_before(SHAPE, PANEL) + tl.arange(0, COLUMNS)
    to = to + row.to(tl.int64)[:, None] * DQ.stride_t + column.to(tl.int64)[None, :] * DQ.stride_d
    tl.store(to, (x * scale).to(DQ.data.dtype.element_ty), (row < live)[:, None] & (column < SHAPE.D)[None, :])


@kernel(
    grid=lambda a: (a.TILES, a.HEADS, a.BATCH), tokens=("L", "KEYS_IN_ALL", "BATCH", "TILES", "SLOTS"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def attention_dq(BLOCKS, DQ, WINDOW, LENGTHS, scale, L, KEYS_IN_ALL, HEADS, BATCH, TILES, SLOTS, SHAPE: tl.constexpr):
    """dq: the blocks of BLOCKS times the scale; 0 of a block that sees no key, to which nobody has added."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    QUERIES: tl.constexpr = SHAPE.QUERIES
    tile = tile_at(LENGTHS, index, batch, L, KEYS_IN_ALL, QUERIES)
    if tile.start < tile.count_q:
        count, _ = keys_of(LENGTHS, tile)
        last = tl.minimum(tile.start + QUERIES, tile.count_q) - 1
        start, stop, _, _ = keys_seen(WINDOW, count - tile.count_q, count, tile.start, last)
        place = (batch * HEADS + head) * SLOTS + slot_of(LENGTHS, tile, QUERIES) + tile.start // QUERIES
        at = BLOCKS + place.to(tl.int64) * size_of(SHAPE)
        to = DQ.data + batch.to(tl.int64) * DQ.stride_b + head.to(tl.int64) * DQ.stride_h
        to = to + (tile.first_q + tile.start).to(tl.int64) * DQ.stride_t
        live = tile.count_q - tile.start
        PANELS: tl.constexpr = SHAPE.PANELS
        for panel in tl.static_range(PANELS):
            store_panel(at + panel * 4096, to, DQ, live, start < stop, scale, SHAPE, panel)


# ---- host ------------------------------------------------------------------------------------------------------------

PARTS = ((64, 0), (64, 32), (128, 0), (128, 64))
MEMORY = 232448 - 1024  # less barriers


def parts_of(width: int) -> tuple[int, int]:
    """The narrowest parts that hold so many columns; copies make the rest 0."""
    return next(parts for parts in PARTS if width <= sum(parts))


def shape_of(q: Tensor, v: Tensor) -> Shape:
    D, V = q.shape[-1], v.shape[-1]
    (D0, D1), (V0, V1) = parts_of(D), parts_of(V)
    columns = D0 + D1 + V0 + V1
    # Narrow heads leave registers for scores of more queries, which then share what is read of k and v
    queries = 128 if columns == 128 else 64
    held = KEYS.value * columns * 2 + 4 * 64 * queries * 2
    stages = min(3, (MEMORY - held) // (queries * (columns * 2 + 16)))
    panels = 2 if queries == 128 else D0 // 64 + (1 if D1 else 0)
    return Shape(D, D0, D1, V, V0, V1, queries, panels, stages, columns == 128 or columns > 256)


def fits_backward(target: Target, a: SimpleNamespace) -> bool:
    """Whether heads are bf16 or fp16 and narrow enough for dk and dv to stay in registers (192 columns, of v 128), bulk copies take
    them, and what a query sees is told by window and lengths alone."""
    q, k, v = a.q, a.k, a.v
    if not target.hopper_gluon or q.dtype not in KINDS or any(t.dtype != q.dtype for t in (k, v)):
        return False
    if a.mask is not None or (a.kv_len is not None and a.kv_len.dim() == 2):
        return False
    marks = 0 if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0]
    if q.shape[0] * q.shape[2] * (cdiv(q.shape[1], 64) + marks) >= 2**28:  # places that a note holds
        return False
    if 0 in (*q.shape, *k.shape, *v.shape) or q.shape[-1] > 192 or v.shape[-1] > 128 or (q.shape[-1] | v.shape[-1]) % 8:
        return False
    return copies_in_bulk(q, k, v)


def boxes_of(t: Tensor, rows: int, parts: tuple[int, int]) -> list:
    """The descriptors of both parts of heads, None of no second one."""
    by_head = t.permute(0, 2, 1, 3)
    return [box_of(by_head, [1, 1, rows, width], KINDS[t.dtype]) if width else None for width in parts]


def backward(saved: SimpleNamespace, do: Tensor | None, dlse: Tensor | None) -> tuple:
    """Gradients of q, k, v and sink. What `fits_backward` refuses, or was not measured to be faster, is the portable backward's,
    which is as repeatable; not of a call that asked for these kernels by name."""
    a, needs = saved, saved.needs
    q, k, v = a.q, a.k, a.v
    target = Target.at(q.device)
    wants, asked = {"q", "k", "v"} & set(needs), a.backend == "hopper"
    if wants and asked and not fits_backward(target, a):
        raise RuntimeError(
            f"attention: backend hopper has no backward for q {list(q.shape)} and v {list(v.shape)}; portable would do"
        )
    if do is None and asked:
        do = torch.zeros_like(a.o)
    if not wants or do is None or not fits_backward(target, a) or not wanted("hopper", "backward", target, a):
        return portable.backward(saved, do, dlse)
    batch, length, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    if not copies_in_bulk(do):
        do = do.clone(memory_format=torch.contiguous_format)
    delta = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    strides = (0, 0, 0) if dlse is None else dlse.stride()
    attention_delta(
        heads_of(a.o), heads_of(do), dlse, delta, length, heads, batch, *strides, v.shape[-1],
        BLOCK=max(16, power_of_two(v.shape[-1])),
    )  # fmt: skip
    dsink = None
    if "sink" in needs:
        dsink = torch.empty(heads, dtype=torch.float32, device=q.device)
        attention_sink_gradient(a.sink.contiguous(), a.lse, delta, dsink, length, heads, batch)
        dsink = dsink.to(a.sink.dtype)
    shape, scores, window = shape_of(q, v), scores_of(a), window_of(a)
    marks = 0 if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0]
    by_query, blocks = lengths(a.cu_seqlens_q, a.cu_seqlens_k, length, keys, a.kv_len, shape.QUERIES, False)
    by_key, tiles = lengths(a.cu_seqlens_k, a.cu_seqlens_q, keys, length, a.kv_len, KEYS.value, True)
    slots = cdiv(length, shape.QUERIES) + marks
    lines = torch.empty(batch * heads * slots, 4, shape.QUERIES, dtype=torch.float32, device=q.device)
    sums = torch.empty(lines.shape[0], shape.QUERIES * (shape.D0 + shape.D1), dtype=torch.float32, device=q.device)
    turn = torch.empty(lines.shape[0], dtype=torch.int32, device=q.device)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    attention_lines(
        a.lse, delta, lines, turn, counter, window, by_query, length, keys, heads, batch, blocks, slots, QUERIES=shape.QUERIES
    )  # fmt: skip
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    of_q, of_v = (shape.D0, shape.D1), (shape.V0, shape.V1)
    attention_backward_hopper(
        *boxes_of(q, shape.QUERIES, of_q), *boxes_of(k, 64, of_q), *boxes_of(v, 64, of_v), *boxes_of(do, shape.QUERIES, of_v),
        box_of(lines, [1, 4, shape.QUERIES], gl.float32), sums, heads_of(dk), heads_of(dv), counter, turn, scores, window, by_key,
        length, keys, kv_heads, heads // kv_heads, batch, tiles, slots, min(target.sms, tiles * kv_heads * batch), SHAPE=shape,
        TOGETHER=TOGETHER,
    )  # fmt: skip
    if "q" in needs:
        attention_dq(
            sums, heads_of(dq), window, by_query, scores.scale, length, keys, heads, batch, blocks, slots, SHAPE=shape
        )
    return *(t if name in needs else None for name, t in (("q", dq), ("k", dk), ("v", dv))), dsink


def backward_of_o(saved: SimpleNamespace, do: Tensor) -> tuple:
    return backward(saved, do, None)
