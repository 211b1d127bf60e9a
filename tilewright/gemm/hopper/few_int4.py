"""`scaled_mm` of up to 64 rows of bf16 or fp16 with int4 codes in groups of 128, on Hopper, in Gluon.

It is instructions that bound this, not memory: codes go from shared memory into the registers that a product takes them from, and
are widened there, two by one instruction. A word of eight codes becomes the pairs (0, 4), (2, 6) and (1, 5), (3, 7); which column
of `a` meets a code is settled by permuting those of `a` alike. A warp has all 64 columns of a tile for a group, so that what it
does to `a` is done for many codes; three warpgroups take turns at steps of four groups, and their sums are added up at the end.
Two more warps copy, one the codes and one `a`: rows are back in their ring as soon as they are in registers.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...core.triton_versions import async_load, barrier, gl, gluon, mbarrier, mma_v2
from ...device.activation import activate
from ...device.matrices import Added, Matrix
from ...device.warpgroups import advance
from ...runtime.kernel import kernel
from ..few import DTYPES, MOST, add_parts, splits_for
from .boxes import box_of, copies_in_bulk

COLUMNS = 64
GROUP = 128
LEAST = 4  # steps of four groups that a part of the inner dimension has
CHUNK = 16  # rows of a tile: more would not fit in registers
RING = 176 * 1024  # bytes of both rings
ROWS_DEPTH = 1  # steps of each warpgroup that the ring of `a` holds
WIDE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
SCALES = gl.constexpr(gl.SliceLayout(2, SUMS.value))
CODES = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 8))
ROWS_TWICE = gl.constexpr(gl.DotOperandLayout(1, SUMS.value, 16))
ROWS_ONCE = gl.constexpr(gl.DotOperandLayout(1, SUMS.value, 8))
# A thread has all four groups' sums of four rows
TAKEN = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 8, 4], [1, 4, 1], [2, 1, 0]))
# 128 (1024 in fp16) + 8 has a mantissa whose last bits a code, its sign bit flipped, replaces: a code is that less 136 (1032)
WIDEN = gl.constexpr("""{
    .reg .b32 odd, high, both, magic;
    mov.b32 magic, MAGIC;
    shr.u32 odd, $4, 8;
    shr.u32 high, $4, 4;
    shr.u32 both, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, magic, 0x6A;
    lop3.b32 $1, odd, 0x000F000F, magic, 0x6A;
    lop3.b32 $2, high, 0x000F000F, magic, 0x6A;
    lop3.b32 $3, both, 0x000F000F, magic, 0x6A;
    sub.TYPEx2 $0, $0, magic;
    sub.TYPEx2 $1, $1, magic;
    sub.TYPEx2 $2, $2, magic;
    sub.TYPEx2 $3, $3, magic;
}""")
WIDEN_BF16 = gl.constexpr(WIDEN.value.replace("MAGIC", "0x43084308").replace("TYPE", "bf16"))
WIDEN_FP16 = gl.constexpr(WIDEN.value.replace("MAGIC", "0x64086408").replace("TYPE", "f16"))

REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,r")


@gluon.jit
def widen_nibbles(x, DTYPE: gl.constexpr):
    """(low, high) nibbles of bytes as numbers. Of four bytes the second and third change places."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(WIDEN_BF16, REGISTERS, [x], (gl.bfloat16, gl.bfloat16), True, 4)
    else:
        return gl.inline_asm_elementwise(WIDEN_FP16, REGISTERS, [x], (gl.float16, gl.float16), True, 4)


@gluon.jit
def columns_alike(a):
    """(even, odd) of 128 columns of `a`, [groups, columns, rows], in the order of `widen_nibbles`."""
    ROWS: gl.constexpr = a.shape[2]
    even, odd = gl.split(a.reshape([4, 16, 2, 2, 2, ROWS]).permute((0, 1, 3, 2, 5, 4)))
    even = gl.convert_layout(even.reshape([4, 64, ROWS]), ROWS_ONCE)
    return even, gl.convert_layout(odd.reshape([4, 64, ROWS]), ROWS_ONCE)


@gluon.jit
def await_launch_before():
    """Until the launch before is over and all that it has written can be read.

    A program begins while that launch is ending. It may have written anything: `a`, but codes and scales as well, where weights
    have just been quantised. It may still read what is our result's memory by now. So every warp waits before it reads or writes
    any global memory; until then there are shared memory and its barriers alone. As every program waits, this launch ends after
    the one before: whoever waits for this one has waited for both. Launches that do not ask to begin early begin after it anyway.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def let_next_launch_begin():
    """As soon as all programs have come here, and there is room."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def place_of(t, sizes, EACH: gl.constexpr):
    """(first row, first column, first group) of a tile. Tiles of other rows are next to each other: they read the same codes at
    the same time."""
    M, N, steps, groups, tiles, PROGRAMS = sizes
    down = gl.cdiv(M, EACH)
    across = gl.cdiv(N, 64)
    return (t % down) * EACH, t // down % across * 64, t // down // across * steps * 4


@gluon.jit
def copy_steps(D, ring, sizes, EACH: gl.constexpr, DEPTH: gl.constexpr, IS_B: gl.constexpr):
    """One warp: all steps of all tiles of a program, of the codes or of `a`, into a ring of them."""
    boxes, full, empty = ring
    M, N, steps, groups, tiles, PROGRAMS = sizes
    await_launch_before()
    for t in range(gl.program_id(0), tiles, PROGRAMS):
        row0, col0, first = place_of(t, sizes, EACH)
        start = col0 if IS_B else row0
        for s in range(steps):
            # Of warpgroup s % 3 this is step j: each has slots of its own, or one that is ahead could take a phase for the next
            j = t // PROGRAMS * ((steps + 2 - s % 3) // 3) + s // 3
            slot = j % DEPTH * 3 + s % 3
            mbarrier.wait(empty.index(slot), j // DEPTH & 1 ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, D.block_type.nbytes)
            async_load(D, [first + 4 * s, start, 0], ready, boxes.index(slot))


@gluon.jit
def take_rows(ring, slot, phase):
    """(even, odd) columns of `a` of a step, whose place in the ring is free then."""
    boxes, full, empty = ring
    mbarrier.wait(full.index(slot), phase)
    a = boxes.index(slot).permute((0, 2, 1)).load(ROWS_TWICE)
    barrier()  # all of the warpgroup have read what the copy writes over
    mbarrier.arrive(empty.index(slot), count=1)
    return columns_alike(a)


@gluon.jit
def multiply_step(totals, rows, ring, slot, phase, scales, zeros, ZEROS: gl.constexpr):
    """`totals`, of 32 columns each, and the products of the four groups of a step."""
    boxes, full, empty = ring
    even, odd = rows
    zero = gl.zeros([4, 32, even.shape[2]], gl.float32, SUMS)
    if ZEROS:
        ones = gl.full([4, 32, 64], 1.0, even.dtype, CODES)
        sums = mma_v2(ones, odd, mma_v2(ones, even, zero))
    mbarrier.wait(full.index(slot), phase)
    first = boxes.index(slot).slice(0, 32, 1).load(CODES)
    second = boxes.index(slot).slice(32, 32, 1).load(CODES)
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    out = ()
    for i in gl.static_range(2):
        low, high = widen_nibbles(first if i == 0 else second, even.dtype)
        part = mma_v2(high, odd, mma_v2(low, even, zero))
        if ZEROS:
            part -= sums * gl.expand_dims(zeros[i], 2)
        out = out + (totals[i] + part * gl.expand_dims(scales[i], 2),)
    return out


@gluon.jit
def load_columns(P, at, inside, more):
    return gl.load(P + at[0], inside[0] & more, 0.0), gl.load(P + at[1], inside[1] & more, 0.0)


@gluon.jit
def store_columns(y, Y, added, row0, col0, split, M, N, ACT: gl.constexpr):
    """act(y + bias + beta * c) of sums [columns, rows]."""
    LAYOUT: gl.constexpr = y.type.layout
    col = col0 + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    row = (row0 + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))).to(gl.int64)
    inside = gl.expand_dims(col < N, 1) & gl.expand_dims(row < M, 0)
    if added.bias is not None:
        y += gl.expand_dims(gl.load(added.bias + col, col < N, 0.0).to(gl.float32), 1)
    C = added.c
    if C.data is not None:
        at = C.data + gl.expand_dims(row * C.stride_r, 0) + gl.expand_dims(col.to(gl.int64) * C.stride_c, 1)
        y += gl.load(at, inside, 0.0).to(gl.float32) * added.beta
    if ACT is not None:
        y = activate(y, 1.0, ACT)
    to = Y.data + split.to(gl.int64) * M * N
    at = to + gl.expand_dims(row * Y.stride_r, 0) + gl.expand_dims(col.to(gl.int64) * Y.stride_c, 1)
    gl.store(at, y.to(Y.data.dtype.element_ty), inside)


@gluon.jit
def finish_tile(totals, boxes, phase, Y, added, row0, col0, split, M, N, ACT: gl.constexpr, W: gl.constexpr):
    """The sums of all warps and warpgroups, always in the same order, stored by warpgroup 0."""
    box, made, taken = boxes
    if W > 0:
        mbarrier.wait(taken, phase ^ 1)
    for i in gl.static_range(2):
        box.index(W * 2 + i).store(totals[i])
    barrier()  # an arrival is one thread's
    if W > 0:
        mbarrier.arrive(made, count=1)
    else:
        mbarrier.wait(made, phase)
        for i in gl.static_range(2):
            y = gl.sum(box.index(i).load(TAKEN), 0)
            for w in gl.static_range(1, 3):
                y += gl.sum(box.index(w * 2 + i).load(TAKEN), 0)
            store_columns(y, Y, added, row0, col0 + i * 32, split, M, N, ACT)
        barrier()
        mbarrier.arrive(taken, count=1)


@gluon.jit
def multiply_tiles(
    Y, scales, added, a_ring, b_ring, boxes, sizes, EACH: gl.constexpr, ACT: gl.constexpr, A_DEPTH: gl.constexpr,
    B_DEPTH: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W of three, which has every third step."""
    M, N, steps, groups, tiles, PROGRAMS = sizes
    SB, ZERO, stride_sn, stride_sk = scales
    g = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, SCALES)), 1)
    n = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, SCALES)), 0)
    await_launch_before()
    a_slot = 0
    a_phase = 0
    b_slot = 0
    b_phase = 0
    phase = 0  # of the box's barriers
    for t in range(gl.program_id(0), tiles, PROGRAMS):
        row0, col0, first = place_of(t, sizes, EACH)
        inside = (col0 + n < N, col0 + 32 + n < N)
        # 32 bits, and the same for zeros, for registers are short
        column = ((col0 + n) * stride_sn, (col0 + 32 + n) * stride_sn)
        totals = (gl.zeros([4, 32, EACH], gl.float32, SUMS), gl.zeros([4, 32, EACH], gl.float32, SUMS))
        scale = (gl.zeros([4, 32], gl.float32, SCALES), gl.zeros([4, 32], gl.float32, SCALES))
        if ZERO is None:
            k = first + 4 * W + g
            at = (column[0] + k * stride_sk, column[1] + k * stride_sk)
            scale = load_columns(SB, at, inside, (k < groups) & (steps > W))
        for s in range(W, steps, 3):
            # A step ahead, for a load takes longer than a step, but zeros leave no registers for that
            ahead = s + (3 if ZERO is None else 0)
            k = first + 4 * ahead + g
            at = (column[0] + k * stride_sk, column[1] + k * stride_sk)
            scale_next = load_columns(SB, at, inside, (k < groups) & (ahead < steps))
            zero = scale
            if ZERO is not None:
                scale = scale_next
                zero = load_columns(ZERO, at, inside, k < groups)
            rows = take_rows(a_ring, a_slot * 3 + W, a_phase)
            totals = multiply_step(totals, rows, b_ring, b_slot * 3 + W, b_phase, scale, zero, ZERO is not None)
            a_slot, a_phase = advance(a_slot, a_phase, A_DEPTH)
            b_slot, b_phase = advance(b_slot, b_phase, B_DEPTH)
            scale = scale_next
        finish_tile(totals, boxes, phase, Y, added, row0, col0, first // (4 * steps), M, N, ACT, W)
        phase ^= 1


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit,
    tokens=("M", "steps", "groups", "splits", "stride_sn", "stride_sk", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 128, "launch_pdl": True},
)  # fmt: skip
def small_int4_hopper(
    A, B, Y, SB, ZERO, BIAS, ADD, M, N, steps, groups, splits, stride_sn, stride_sk, stride_ym, stride_yn,
    stride_cm, stride_cn, beta, PROGRAMS, ACT: gl.constexpr, A_DEPTH: gl.constexpr, B_DEPTH: gl.constexpr,
):  # fmt: skip
    """Y = A @ B.T, both by groups of 128: of `splits` parts of the inner dimension, `steps` steps of four groups each, one after
    the other."""
    EACH: gl.constexpr = A.block_type.shape[1]
    let_next_launch_begin()
    a_boxes = gl.allocate_shared_memory(A.dtype, [3 * A_DEPTH, 4, EACH, 128], A.layout)
    b_boxes = gl.allocate_shared_memory(B.dtype, [3 * B_DEPTH, 4, 64, 64], B.layout)
    box = gl.allocate_shared_memory(gl.float32, [3 * 2, 4, 32, EACH], gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0]))
    a_full = gl.allocate_shared_memory(gl.int64, [3 * A_DEPTH, 1], mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [3 * A_DEPTH, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [3 * B_DEPTH, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [3 * B_DEPTH, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3 * A_DEPTH):
        mbarrier.init(a_full.index(i), count=1)
        mbarrier.init(a_empty.index(i), count=1)
    for i in gl.static_range(3 * B_DEPTH):
        mbarrier.init(b_full.index(i), count=1)
        mbarrier.init(b_empty.index(i), count=1)
    mbarrier.init(made, count=2)
    mbarrier.init(taken, count=1)
    a_ring = (a_boxes, a_full, a_empty)
    b_ring = (b_boxes, b_full, b_empty)
    boxes = (box, made, taken)
    result = Matrix(Y, stride_ym, stride_yn)
    scales = (SB, ZERO, stride_sn, stride_sk)
    added = Added(BIAS, Matrix(ADD, stride_cm, stride_cn), beta)
    sizes = (M, N, steps, groups, gl.cdiv(M, EACH) * gl.cdiv(N, 64) * splits, PROGRAMS)
    gl.warp_specialize([
        (multiply_tiles, (result, scales, added, a_ring, b_ring, boxes, sizes, EACH, ACT, A_DEPTH, B_DEPTH, 0)),
        (multiply_tiles, (result, scales, added, a_ring, b_ring, boxes, sizes, EACH, ACT, A_DEPTH, B_DEPTH, 1)),
        (multiply_tiles, (result, scales, added, a_ring, b_ring, boxes, sizes, EACH, ACT, A_DEPTH, B_DEPTH, 2)),
        (copy_steps, (B, b_ring, sizes, EACH, B_DEPTH, True)),
        (copy_steps, (A, a_ring, sizes, EACH, A_DEPTH, False)),
    ], [4, 4, 1, 1], [160, 160, 24, 24])  # fmt: skip


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether there are up to 64 rows of bf16 or fp16, and int4 codes with a scale for each 128. The inner dimension of both must
    be contiguous, in rows that begin at multiples of 16 bytes."""
    if not target.hopper_gluon or a.out_format is not None:
        return False
    if a.a.dtype not in WIDE or a.b.dtype != torch.uint8 or a.recipe_b != "BlockWise1x128" or a.a.shape[0] > MOST:
        return False
    if a.zero_b is not None and a.zero_b.stride() != a.scale_b.stride():
        return False
    reach = sum((size + 64) * abs(stride) for size, stride in zip(a.scale_b.shape, a.scale_b.stride()))
    sizes = (*a.a.shape, *a.b.shape, reach)
    return min(sizes) > 0 and max(sizes) < 2**31 - 4096 and a.a.shape[1] % 128 == 0 and copies_in_bulk(a.a, a.b.t())


def groups_first(t: Tensor, each: int) -> Tensor:
    """A view of t [rows, groups * each] as [groups, rows, each]."""
    return t.as_strided((t.shape[1] // each, t.shape[0], each), (each, t.stride(0), 1))


def forward(a, b, scale_a, scale_b, recipe_a, recipe_b, *, zero_b, bias, act, c, beta, out_dtype, out, **_) -> Tensor:
    (M, K), N, sms = a.shape, b.shape[1], Target.at(a.device).sms
    y = torch.empty(M, N, dtype=DTYPES[out_dtype], device=a.device) if out is None else out
    rows = max(8, min(CHUNK, power_of_two(M)))
    steps, add, tiles = cdiv(K, 4 * GROUP), None if beta == 0.0 else c, cdiv(M, rows) * cdiv(N, COLUMNS)
    # Groups past the last are zeros that nothing is read for
    per = cdiv(steps, splits_for(tiles, steps, sms, LEAST))
    parts = cdiv(steps, per)
    later = parts > 1
    target = torch.empty(parts, M, N, dtype=torch.float32, device=a.device) if later else y
    small_int4_hopper(
        box_of(groups_first(a, GROUP), [4, rows, GROUP], WIDE[a.dtype]),
        box_of(groups_first(b.t(), GROUP // 2), [4, COLUMNS, GROUP // 2], gl.uint8), target, scale_b, zero_b,
        None if bias is None or later else bias.contiguous(), None if later else add, M, N, per, K // GROUP, parts,
        *scale_b.stride(), *target.stride()[-2:],
        *((0, 0) if later or add is None else add.stride()), beta, min(sms, parts * tiles),
        ACT=None if later else act, A_DEPTH=ROWS_DEPTH,
        B_DEPTH=(RING - 3 * ROWS_DEPTH * 4 * rows * 2 * GROUP) // (3 * 4 * COLUMNS * GROUP // 2),
    )  # fmt: skip
    if later:
        add_parts(target, y, bias, add, beta, act)
    return y
