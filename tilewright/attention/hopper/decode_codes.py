"""Attention of few queries over a cache of codes, e4m3 or int8, on Hopper, in Gluon: `decode.py` with keys and values of one byte.

    S.T = k @ q.T        o.T = v.T @ softmax(S).T

Codes are not what products here take: a warpgroup widens them to fp16, which holds each of them. What memory brings in a byte
would pass through shared memory four more times if it were widened there; so the warpgroup widens in registers, from which products
take their first factor alone. Keys and values are that factor: products are turned, 64 keys or 128 columns by as many queries as
there are, 8 at least, which is also as many scores as there must be weights of. The second factor, queries and weights, lies in
shared memory.

A sum has one order in both of its factors, and any will do. A thread loads words of four codes where they do not collide in shared
memory, takes two words apart at once, and what it then has is columns of keys in another order, which queries are stored in, and
columns of values in another order, in which results are stored. Nothing moves between threads.

Products are of fp16 numbers: queries are multiplied with a power of two each (`cached_portable.in_half`), weights with LIFT. Scales
of codes are of all or of heads: those of keys go onto scores, those of values onto results.

Who may write where in shared memory, and when. Of the ring and the copying warp all is as in `decode.py`. The warpgroup gives two
stages back at once, keys and the values of the block before, when all of its warps have loaded both. Weights have two buffers:
those of a block are stored while products read those of the block before, shown by a fence, and read when all warps have met. They
meet once in a block, after each has waited for its products: so nobody stores weights that another still reads. What no row sees of
values is cleared in registers: a step at the edge does it to those of the block before.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import (
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
from ...gemm.hopper.boxes import box_of, copies_in_bulk
from ...op import single
from ...runtime.kernel import kernel
from ..cache_parts import finished, results_of
from ..cache_read import (
    LIFT,
    bending_of,
    capacity_of,
    check_keys,
    lengths_of,
    load_scale,
    scales_of,
    table_of,
    window_of,
)
from ..portable import bend, heads_of
from ..preference import wanted_of_cache
from ..tiles import is_drawn, is_seen
from .decode import (
    BLOCK,
    LEAST_BOX,
    LONGEST_PART,
    NAME,
    RESIDENT,
    SPARE,
    WIDEST,
    Plan,
    ask_early,
    bits_of,
    box_rows,
    copy_part,
    drafts_of,
    places_of,
    span_of,
    split_for,
    store_nothing,
    tree_of,
)
from .forward import KINDS, LONGEST, Rows, make_boxes, rows_of, sums_of
from .latent import make_barriers, missing_of
from .schedule import whole_blocks

CODES = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}
COLUMNS = gl.constexpr(128)  # of a box; those that a cache does not have are 0
# Blocks, as `decode.BESIDE`: one is over sooner, and queries take longer to be stored for products
BESIDE_CODES = 6
MOST = 32  # rows: of more, keys, values, scores and sums do not stay in registers
# Words of four codes, as they lie in shared memory
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
# A thread's words of keys: 16 bytes side by side twice, of two rows; neighbours first, for two are taken apart at a time
KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )
)
# And of values: one word of 16 rows, neighbours first. A warp's 32 bytes of four pairs of rows are all of shared memory's banks
VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [64, 32]
    )
)
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# Of two words: the first codes of both, the second of both, the third and the fourth, in fp16
APART = "prmt.b32 t, $4, $5, 0x5140; prmt.b32 u, $4, $5, 0x7362; "
WIDEN_E4M3 = gl.constexpr(
    "{ .reg .b32 t, u; .reg .b16 a, b, c, d; "
    + APART
    + "mov.b32 {a, b}, t; mov.b32 {c, d}, u; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;"
    " cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }"
)
# The digits of 1152 + x, as `cache_read.numbers` has it
WIDEN_INT8 = gl.constexpr(
    "{ .reg .b32 t, u, n; mov.b32 n, 0x64806480; "
    + APART
    + "xor.b32 t, t, 0x80808080; xor.b32 u, u, 0x80808080;"
    + "".join(
        f" prmt.b32 ${i}, {word}, 0x64646464, {bytes}; sub.rn.f16x2 ${i}, ${i}, n;"
        for i, (word, bytes) in enumerate((("t", "0x4140"), ("t", "0x4342"), ("u", "0x4140"), ("u", "0x4342")))
    )
    + " }"
)


class Memory(NamedTuple):
    """Shared memory: that of `decode.Memory`, queries, and weights of two blocks."""

    boxes: Any
    missing: Any
    full: Any
    empty: Any
    queries: Any
    weights: Any


# ---- codes -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_words(memory, stage, LAYOUT: gl.constexpr, PLAN: gl.constexpr):
    """A stage, [64, 32] words of four codes."""
    return reinterpret(memory.boxes, gl.int32, [PLAN.stages, BLOCK, 32], WORDS).index(stage).load(LAYOUT)


@gluon.jit
def widened(words, KIND: gl.constexpr):
    """The first codes of words in fp16, the second, the third and the fourth, which four tensors hold."""
    return gl.inline_asm_elementwise(
        WIDEN_INT8 if gl.int8 == KIND else WIDEN_E4M3, "=&r,=&r,=&r,=&r,r,r", [words],
        (gl.float16, gl.float16, gl.float16, gl.float16), True, 2,
    )  # fmt: skip


@gluon.jit
def side_by_side(x):
    """[64, 32, 2, 2] of four: bit 0 of which, and bit 1."""
    return gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3]))


@gluon.jit
def keys_of(words, KIND: gl.constexpr, N: gl.constexpr):
    """[64, 128]: keys as products with N queries take them from registers, columns in the order of `column_of`."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(N), k_width=2)
    x = side_by_side(widened(words, KIND)).reshape([64, 4, 4, 2, 2, 2])
    return gl.convert_layout(x.permute((0, 2, 5, 4, 1, 3)).reshape([64, 128]), OPERAND, assert_trivial=True)


@gluon.jit
def column_of(k):
    """Which column of a cache is the k-th of `keys_of`."""
    return (k >> 1) % 4 * 32 + (k >> 5) * 8 + k % 2 * 4 + (k >> 4) % 2 * 2 + (k >> 3) % 2


@gluon.jit
def values_of(words, KIND: gl.constexpr, N: gl.constexpr):
    """[128, 64]: values, turned, as products with weights of N queries take them; rows in the order of `value_column_of`."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_of(N), k_width=2)
    x = side_by_side(widened(words, KIND)).reshape([64, 4, 8, 2, 2])
    return gl.convert_layout(x.permute((4, 1, 3, 2, 0)).reshape([128, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def value_column_of(m):
    """Which column of a cache is the m-th of `values_of`."""
    return (m >> 4) % 4 * 32 + m % 8 * 4 + (m >> 6) * 2 + (m >> 3) % 2


@gluon.jit
def without_unseen(words, key, span, drafts, shift):
    """Values of the block at `key`, 0 where no row sees a key: codes of NaN are no worse there than others."""
    j = key + gl.arange(0, BLOCK, gl.SliceLayout(1, VALUES))
    live = (j >= span.start) & (j < span.stop)
    if drafts is not None:
        live &= is_drawn(drafts, j - shift)
    return gl.where(gl.expand_dims(live, 1), words, 0)


# ---- queries and weights ---------------------------------------------------------------------------------------------


@gluon.jit
def load_queries(Q, span, L, GROUP, DIM: gl.constexpr, N: gl.constexpr):
    """([N, 128] queries in fp16, times a power of two each as `in_half` has it; what takes it back). 0 past the last row, and past
    DIM columns."""
    r = gl.arange(0, N, gl.SliceLayout(1, QUERIES))
    c = column_of(gl.arange(0, COLUMNS, gl.SliceLayout(0, QUERIES)))
    at = gl.expand_dims(places_of(Q, 0, span, r, GROUP), 1) + gl.expand_dims(c.to(gl.int64) * Q.stride_d, 0)
    inside = gl.expand_dims(r < L * GROUP, 1) & gl.expand_dims(c < DIM, 0)
    q = gl.load(Q.data + at, inside, 0.0)
    back = gl.full([N], 1.0, gl.float32, gl.SliceLayout(1, QUERIES))
    if q.dtype != gl.float16:
        wide = q.to(gl.float32)
        exponent = gl.maximum((gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True) >> 23) - 14, 1)
        back = (exponent << 23).to(gl.float32, bitcast=True)
        power = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        q = (wide * gl.expand_dims(power, 1)).to(gl.float16)
    return q, back


@gluon.jit
def weigh(s, top, total, back, missing, TABLE, SCORES, WINDOW, rows, bits, key, EDGE: gl.constexpr, PLAN: gl.constexpr):
    """(weights, largest scores so far, sums of weights, what those before are to be multiplied with) of products [64, N] of the
    block of keys at `key`; `back` times them is meant. In base 2. Sums are those of each place in a block. EDGE: some rows do not
    see all of its keys, nor, with `bits`, all drafts."""
    s, _ = bend(SCORES, s * gl.expand_dims(back, 0))
    place = gl.arange(0, BLOCK, gl.SliceLayout(1, s.type.layout))
    j = gl.expand_dims(key + place, 1)
    position = gl.expand_dims(rows.position + rows.below, 0)
    if SCORES.slopes is not None:
        s -= gl.expand_dims(rows.slope, 0) * gl.abs((position - j).to(gl.float32))
    if EDGE:
        if TABLE is not None:
            s = gl.where(gl.expand_dims(((missing >> (place // PLAN.box)) & 1) != 0, 1), float("nan"), s)
        ok = is_seen(WINDOW, position, j, rows.count)
        if bits is not None:
            ok &= is_drawn(gl.expand_dims(bits, 0), j - rows.position)
        s = gl.where(ok, s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 0))
    base = new
    if EDGE:
        base = gl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
    p = gl.exp2(s - gl.expand_dims(base, 0))
    fade = gl.exp2(top - base)
    return p, new, total * gl.expand_dims(fade, 0) + p, fade


@gluon.jit
def show(p, memory, turn):
    """Store weights where products find them, [N, 64]; until the warps have met, for this warp alone."""
    memory.weights.index(turn).store((p * LIFT).to(gl.float16).permute((1, 0)))
    fence_async_shared()


# ---- the warpgroup ---------------------------------------------------------------------------------------------------


@gluon.jit
def issue_scores(words, memory, KIND: gl.constexpr, N: gl.constexpr):
    """Begin k @ q.T."""
    none = gl.zeros([BLOCK, N], gl.float32, sums_of(N))
    q = memory.queries.index(0).permute((1, 0))
    return warpgroup_mma(keys_of(words, KIND, N), q, none, use_acc=False, is_async=True)


@gluon.jit
def issue_values(o, words, memory, turn, KIND: gl.constexpr, N: gl.constexpr):
    """Begin o += v.T @ weights."""
    weights = memory.weights.index(turn).permute((1, 0))
    return warpgroup_mma(values_of(words, KIND, N), weights, o, is_async=True)


@gluon.jit
def walk(
    state, back, TABLE, memory, span, high, low, SCORES, WINDOW, rows, bits, drafts, KIND: gl.constexpr, N: gl.constexpr,
    PLAN: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Take in the blocks from before `high` down to `low`, after one whose weights are shown. The next stage is the next block's
    keys', before those of the values. Before and after a step no product is under way."""
    o, top, total, lost, stage, phase, turn = state
    for i in range(high - low):
        key = (high - 1 - i) * BLOCK
        at, its_phase = advance(stage, phase, PLAN.stages)  # of values
        mbarrier.wait(memory.full.index(stage), phase)
        missing = missing_of(TABLE, memory, stage)
        s = issue_scores(load_words(memory, stage, KEYS, PLAN), memory, KIND, N)
        mbarrier.wait(memory.full.index(at), its_phase)
        words = load_words(memory, at, VALUES, PLAN)
        if EDGE:
            words = without_unseen(words, key + BLOCK, span, drafts, rows.position)
        else:  # which all rows see
            lost |= missing
        o = issue_values(o, words, memory, turn, KIND, N)
        s = warpgroup_mma_wait(1, deps=(s,))
        p, top, total, fade = weigh(s, top, total, back, missing, TABLE, SCORES, WINDOW, rows, bits, key, EDGE, PLAN)
        turn ^= 1
        show(p, memory, turn)
        o = warpgroup_mma_wait(0, deps=(o,))
        barrier()
        mbarrier.arrive(memory.empty.index(stage), count=1)
        mbarrier.arrive(memory.empty.index(at), count=1)
        o = o * gl.expand_dims(fade, 0)
        stage, phase = advance(at, its_phase, PLAN.stages)
    return o, top, total, lost, stage, phase, turn


@gluon.jit
def attend_part(
    Q, KS, VS, O, stride_op, LSE, stride_lp, SINK, TABLE, TREE, memory, span, SCORES, WINDOW, L, GROUP, KIND: gl.constexpr,
    N: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    BY_ROW: gl.constexpr = gl.SliceLayout(0, sums_of(N))
    r = gl.arange(0, N, BY_ROW)
    head = span.head * GROUP + r % GROUP
    live = r < L * GROUP
    q, back = load_queries(Q, span, L, GROUP, DIM, N)
    memory.queries.index(0).store(q)
    fence_async_shared()
    barrier()
    back = gl.convert_layout(back, BY_ROW)
    if KS.data is not None:
        back = back * load_scale(KS, 0, 0, span.head, True, 0)
    smaller = 1.0 / LIFT
    if VS.data is not None:
        smaller = smaller * load_scale(VS, 0, 0, span.head, True, 0)
    top = gl.full([N], float("-inf"), gl.float32, BY_ROW)
    total = gl.zeros([BLOCK, N], gl.float32, sums_of(N))
    if SINK is not None:  # one more key of the first part, whose value is 0
        top = gl.load(SINK + head, live & (span.part == 0), float("-inf")).to(gl.float32) * LOG2E
        once = gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(1, sums_of(N))) == 0, 1)
        total = gl.where(once & gl.expand_dims(top != float("-inf"), 0), 1.0, total)
    slope = 0.0
    if SCORES.slopes is not None:
        slope = gl.load(SCORES.slopes + head, live, 0.0).to(gl.float32) * LOG2E
    shift = span.count - L
    rows = Rows(r // GROUP, shift, span.count, slope)
    bits = None
    drafts = None
    if TREE is not None:
        bits = bits_of(TREE, span, r // GROUP, live)
        drafts = drafts_of(TREE, span, L)
    whole = span.count if TREE is None else shift
    lower, upper = whole_blocks(WINDOW, shift, whole, 0, L - 1, span.low, span.high, BLOCK)
    # A step multiplies the values of the block before, which is to be cleared: so the edge is a block longer
    upper = gl.maximum(upper - 1, span.low)
    lower = gl.minimum(lower, upper)
    o = gl.zeros([COLUMNS, N], gl.float32, sums_of(N))
    key = (span.high - 1) * BLOCK
    mbarrier.wait(memory.full.index(0), 0)
    missing = missing_of(TABLE, memory, 0)
    s = issue_scores(load_words(memory, 0, KEYS, PLAN), memory, KIND, N)
    s = warpgroup_mma_wait(0, deps=(s,))
    p, top, total, _ = weigh(s, top, total, back, missing, TABLE, SCORES, WINDOW, rows, bits, key, True, PLAN)
    show(p, memory, 0)
    barrier()
    mbarrier.arrive(memory.empty.index(0), count=1)
    state = (o, top, total, 0, 1, 0, 0)
    state = walk(
        state, back, TABLE, memory, span, span.high - 1, upper, SCORES, WINDOW, rows, bits, drafts, KIND, N, PLAN, True
    )
    state = walk(state, back, TABLE, memory, span, upper, lower, SCORES, WINDOW, rows, None, None, KIND, N, PLAN, False)
    if WINDOW.left is not None:
        state = walk(
            state, back, TABLE, memory, span, lower, span.low, SCORES, WINDOW, rows, None, None, KIND, N, PLAN, True
        )
    o, top, total, lost, stage, phase, turn = state
    mbarrier.wait(memory.full.index(stage), phase)
    words = load_words(memory, stage, VALUES, PLAN)
    words = without_unseen(words, span.low * BLOCK, span, drafts, shift)
    o = issue_values(o, words, memory, turn, KIND, N)
    o = warpgroup_mma_wait(0, deps=(o,))
    whole = gl.sum(total, 0)
    empty = whole == 0.0
    bad = gl.where(lost != 0, float("nan"), 0.0)
    share = gl.where(empty, 0.0, smaller / gl.where(empty, 1.0, whole)) + bad
    lse = gl.where(empty, float("-inf"), top * LN2 + gl.log(gl.where(empty, 1.0, whole))) + bad
    gl.store(LSE.data + places_of(LSE, stride_lp, span, r, GROUP), lse, live)
    c = value_column_of(gl.arange(0, COLUMNS, gl.SliceLayout(1, sums_of(N))))
    at = gl.expand_dims(places_of(O, stride_op, span, r, GROUP), 0) + gl.expand_dims(c, 1)
    inside = gl.expand_dims(live, 0) & gl.expand_dims(c < WIDTH, 1)
    gl.store(O.data + at, (o * gl.expand_dims(share, 0)).to(O.data.dtype.element_ty), inside)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("L", "CAPACITY", "PAGES", "PARTS", "SPLIT", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": registers_for(a.N)}, dependent=True,
)  # fmt: skip
def attention_decode_codes_hopper(
    Q, K, V, KS, VS, TABLE, TREE, O, stride_op, LSE, stride_lp, SINK, SCORES, WINDOW, LENGTHS, L, CAPACITY, PAGES, KV_HEADS, GROUP,
    PARTS, SPLIT, PROGRAMS, N: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, PLAN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """O and LSE of one part of the keys for the rows of one key head, of which products have N. Most of 256 threads' registers go
    to the warpgroup."""
    let_next_begin(DEPENDENT)
    if DEPENDENT:
        ask_early(TABLE, LENGTHS, CAPACITY, KV_HEADS, PARTS, SPLIT, PAGE)
    await_last(DEPENDENT)
    span = span_of(WINDOW, LENGTHS, L, CAPACITY, KV_HEADS, PARTS, SPLIT)
    if span.high > span.low:
        memory = Memory(
            make_boxes(K, PLAN.stages * (BLOCK // PLAN.box)),
            gl.allocate_shared_memory(gl.int32, [PLAN.stages, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
            make_barriers(PLAN.stages),
            make_barriers(PLAN.stages),
            gl.allocate_shared_memory(gl.float16, [1, N, COLUMNS], rows_of(COLUMNS)),
            gl.allocate_shared_memory(gl.float16, [2, N, BLOCK], rows_of(BLOCK)),
        )
        gl.warp_specialize([
            (attend_part, (Q, KS, VS, O, stride_op, LSE, stride_lp, SINK, TABLE, TREE, memory, span, SCORES, WINDOW, L, GROUP,
                           K.dtype, N, DIM, WIDTH, PLAN)),
            (copy_part, (K, V, TABLE, memory, span, PAGES, PAGE, PLAN, DEPENDENT)),
        ], [1], [32])  # fmt: skip
    else:
        store_nothing(O, stride_op, LSE, stride_lp, SINK, span, L, GROUP, WIDTH, PLAN)


# ---- host ------------------------------------------------------------------------------------------------------------


def rows_for(rows: int, sloped: bool) -> int:
    """Queries of a product. Of 16, and of 8 with slopes, the assembler of Triton 3.6 ends with a fault of its own at some calls."""
    return 8 if rows <= 8 and not sloped else MOST


def resident_for(rows: int) -> int:
    """Programs that an SM holds: while one takes codes apart and weighs scores, others' products and copies go on."""
    return 3 if rows == 8 else RESIDENT


def registers_for(rows: int) -> int:
    """Of a thread, as many as programs of 256 leave each other, in eights."""
    return 65536 // 256 // resident_for(rows) // 8 * 8


def plan_for(rows: int, box: int, memory: int) -> Plan:
    """As many stages as a program's share of an SM takes beside that many queries and their weights."""
    wide = COLUMNS.value
    left = (memory + SPARE) // resident_for(rows) - 2 * SPARE - 2 * rows * (wide + 2 * BLOCK.value)
    return Plan(wide, wide, box, (left - SPARE) // (BLOCK.value * wide))


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether queries are 16-bit and caches codes of one kind, of widths that are multiples of 16 up to 128, in rows that begin at
    multiples of 16 bytes, with scales of all or of heads or none; a sequence has up to 32 queries for each head of its keys; pages
    hold whole boxes, and a split whole blocks; nothing is empty, nothing but windows, trees and lengths says what is seen."""
    q, k, v = a.q, a.k_cache, a.v_cache
    if not target.hopper_gluon or q.dtype not in KINDS or not single(target, a):
        return False
    if v is None or a.k_rope is not None or a.cu_seqlens_q is not None or k.dtype not in CODES or v.dtype != k.dtype:
        return False
    if any(scales_of(t).stride_p is not None for t in (a.k_scale, a.v_scale)):
        return False
    if any(t.shape[-1] % 16 or t.shape[-1] > WIDEST for t in (q, v)) or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    (batch, length, heads, _), (_, page, kv_heads, _), capacity = q.shape, k.shape, capacity_of(a)
    if length * (heads // kv_heads) > MOST or (a.split or 0) % BLOCK.value:
        return False
    if a.block_table is not None and box_rows(page) < LEAST_BOX:
        return False
    if not 0 < capacity < LONGEST or batch * kv_heads * cdiv(capacity, BLOCK.value) >= 2**31:
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
    target, kind, rows = Target.at(q.device), CODES[k_cache.dtype], group * length
    page = 0 if a.block_table is None else page
    many = rows_for(rows, a.slopes is not None)
    plan = plan_for(many, box_rows(page), target.shared_memory)
    units = batch * kv_heads
    at_a_time = resident_for(many) * target.sms
    # A block of codes is half as many bytes, and sums are as many
    split = a.split or split_for(capacity, units, 2 * rows, at_a_time, a.kv_len is None, BESIDE_CODES, 2 * LONGEST_PART)
    parts = cdiv(capacity, split)
    results = results_of(a, values, parts)
    block = [1, 1, plan.box, plan.wide]
    attention_decode_codes_hopper(
        heads_of(q), box_of(k_cache.transpose(1, 2), block, kind), box_of(v_cache.transpose(1, 2), block, kind),
        scales_of(a.k_scale), scales_of(a.v_scale), table_of(a), tree_of(a), *results.made,
        None if a.sink is None else a.sink.contiguous(), bending_of(a), window_of(a), lengths_of(a), length, capacity, pages,
        kv_heads, group, parts, split, parts * units, N=many, DIM=width, WIDTH=values, PAGE=page, PLAN=plan,
    )  # fmt: skip
    return finished(results)
