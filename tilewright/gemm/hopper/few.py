"""Products of few rows on Hopper, in Gluon, of FP8 codes with full accumulation: `scaled_mm`, and `grouped_mm_masked` of experts.

Few rows are bound by reading `b`. Its columns are the M operand of the tensor cores, y.T = b.T @ a.T, so that up to 64 rows of
`a` are padded to 8, 16, 32 or 64 alone. A warp copies both operands into a ring; a warpgroup multiplies. Programs go over tiles
of columns, and the ring goes on from one tile to the next: memory is read all the time.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...core.triton_versions import async_load, gl, gluon, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from ...device.activation import activate
from ...device.dependent import await_last, let_next_begin
from ...device.matrices import Added, Matrices, Matrix
from ...device.warpgroups import CODES, advance
from ...runtime.kernel import kernel
from ..few import add_parts, splits_for
from ..operands import DTYPES, ONCE
from ..tiles import matrices, matrix
from .boxes import box_of, copies_in_bulk

KINDS = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
MOST = 64  # rows of a tile
# Rows that are copied at a time: of the rows of a tile only those are read that there are, and up to 15 more
PIECE = 16
CHUNK = 4  # blocks whose scales are loaded at a time, one chunk ahead
RING = 96 * 1024  # bytes: two programs to an SM
EXPERTS = 1024  # that a warp finds a tile among


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def find_rows(t, COUNTS, E, R, HEIGHT: gl.constexpr, BLOCK_E: gl.constexpr, WARPS: gl.constexpr):
    """(expert, first row, rows from there, tiles of rows that there are) of tile t of up to HEIGHT rows: empty ones are none."""
    if COUNTS is None:
        return t * 0, t * 0, R, 1
    else:
        LANES: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_E // 32)], [32], [WARPS], [0])  # all of them in each warp
        e = gl.arange(0, BLOCK_E, LANES)
        count = gl.load(COUNTS + e, e < E, 0).to(gl.int64)
        count = gl.minimum(gl.maximum(count, 0), R).to(gl.int32)  # device data: whatever it holds
        tiles = (count + HEIGHT - 1) // HEIGHT
        last = gl.associative_scan(tiles, 0, add)
        here = (last > t) & (last - tiles <= t)
        expert = gl.sum(gl.where(here, e, 0), 0)
        row0 = gl.sum(gl.where(here, (t - last + tiles) * HEIGHT, 0), 0)
        rows = gl.sum(gl.where(here, count, 0), 0)
        return expert, row0, rows - row0, gl.sum(tiles, 0)


@gluon.jit
def copy_operands(
    A,
    B,
    COUNTS,
    ring,
    E,
    R,
    across,
    KB,
    per,
    splits,
    PROGRAMS,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_E: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    a_ring, b_ring, full, empty = ring
    COLUMNS: gl.constexpr = b_ring.shape[2]
    EACH: gl.constexpr = a_ring.shape[2]
    PIECES: gl.constexpr = ROWS // EACH
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    await_last(DEPENDENT)
    _, _, _, tiles = find_rows(0, COUNTS, E, R, ROWS, BLOCK_E, 1)
    for t in range(gl.program_id(0), tiles * splits * across, PROGRAMS):
        split = (t // across) % splits
        expert, row0, rows, _ = find_rows(t // across // splits, COUNTS, E, R, ROWS, BLOCK_E, 1)
        col0 = (t % across) * COLUMNS
        first = split * per
        for k in range(first, gl.minimum(first + per, KB)):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, (COLUMNS + ROWS) * 128)
            async_load(B, [expert, col0, k * 128], ready, b_ring.index(stage))
            for i in gl.static_range(PIECES):
                # A box past the last row is zeros that nothing was read for
                row = gl.where(i * EACH < rows, row0 + i * EACH, R)
                async_load(A, [expert, row, k * 128], ready, a_ring.index(PIECES * stage + i))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def load_scales(SA, SB, k, end, r, rows, stride_sam, stride_sak, stride_sbk):
    """Both scales of blocks k, a column, and rows r, multiplied; 0 past `end` blocks and `rows` rows."""
    inside = k < end
    sa = gl.load(SA + r.to(gl.int64) * stride_sam + k.to(gl.int64) * stride_sak, inside & (r < rows), 0.0)
    return sa * gl.load(SB + k.to(gl.int64) * stride_sbk, inside, 0.0)


@gluon.jit
def store_columns(
    acc, Y, scales, added, expert, row0, rows, split, col0, N, R, BLOCKS: gl.constexpr, ACT: gl.constexpr
):
    """act(acc * scales + bias + beta * c) of sums [columns, rows]; scales of blocks are in the sums already."""
    SA, SB, stride_sae, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk = scales
    LAYOUT: gl.constexpr = acc.type.layout
    col = col0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    row = (row0 + r).to(gl.int64)
    inside = gl.expand_dims(col < N, 1) & gl.expand_dims(r < rows, 0)
    if not BLOCKS:
        sa = gl.load(SA + expert.to(gl.int64) * stride_sae + row * stride_sam, r < rows, 0.0)
        sb = gl.load(SB + expert.to(gl.int64) * stride_sbe + col.to(gl.int64) * stride_sbn, col < N, 0.0)
        acc = acc * gl.expand_dims(sa, 0) * gl.expand_dims(sb, 1)
    if added.bias is not None:
        acc += gl.expand_dims(gl.load(added.bias + col, col < N, 0.0).to(gl.float32), 1)
    C = added.c
    if C.data is not None:
        at = C.data + gl.expand_dims(row * C.stride_r, 0) + gl.expand_dims(col.to(gl.int64) * C.stride_c, 1)
        acc += gl.load(at, inside, 0.0).to(gl.float32) * added.beta
    if ACT is not None:
        acc = activate(acc, 1.0, ACT)
    to = Y.data + (expert.to(gl.int64) * Y.stride_e + split.to(gl.int64) * R * N)
    at = to + gl.expand_dims(row * Y.stride_r, 0) + gl.expand_dims(col.to(gl.int64) * Y.stride_c, 1)
    gl.store(at, acc.to(Y.data.dtype.element_ty), inside)


@gluon.jit
def multiply_tiles(
    Y, scales, added, COUNTS, ring, line, E, R, across, N, KB, per, splits, PROGRAMS, ROWS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_E: gl.constexpr, BLOCKS: gl.constexpr, ACT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, full, empty = ring
    SA, SB, stride_sae, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk = scales
    COLUMNS: gl.constexpr = b_ring.shape[2]
    CHUNK: gl.constexpr = line.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    lines = reinterpret(line, gl.float32, [CHUNK, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stage = 0
    phase = 0
    part = gl.zeros([COLUMNS, ROWS], gl.float32, LAYOUT)
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LINES)), 0)
    step = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, LINES)), 1)
    await_last(DEPENDENT)
    _, _, _, tiles = find_rows(0, COUNTS, E, R, ROWS, BLOCK_E, 4)
    for t in range(gl.program_id(0), tiles * splits * across, PROGRAMS):
        split = (t // across) % splits
        expert, row0, rows, _ = find_rows(t // across // splits, COUNTS, E, R, ROWS, BLOCK_E, 4)
        col0 = (t % across) * COLUMNS
        first = split * per
        end = gl.minimum(first + per, KB)
        sap = SA + expert.to(gl.int64) * stride_sae + row0.to(gl.int64) * stride_sam
        sbp = SB + expert.to(gl.int64) * stride_sbe + (col0 // 128).to(gl.int64) * stride_sbn
        if BLOCKS:
            scale = load_scales(sap, sbp, first + step, end, r, rows, stride_sam, stride_sak, stride_sbk)
        total = gl.zeros([COLUMNS, ROWS], gl.float32, LAYOUT)
        for chunk in range(first, end, CHUNK):
            if BLOCKS:
                line.store(scale)
                scale = load_scales(sap, sbp, chunk + CHUNK + step, end, r, rows, stride_sam, stride_sak, stride_sbk)
            for k in range(chunk, gl.minimum(chunk + CHUNK, end)):
                mbarrier.wait(full.index(stage), phase)
                a = reinterpret(a_ring, a_ring.dtype, [STAGES, ROWS, 128], CODES).index(stage)  # of all its pieces
                b = reinterpret(b_ring.index(stage), b_ring.dtype, [COLUMNS, 128], CODES)
                part = warpgroup_mma(b, a.permute((1, 0)), part, use_acc=False, is_async=True)
                if BLOCKS:
                    s = gl.expand_dims(lines.index(k - chunk).load(gl.SliceLayout(0, LAYOUT)), 0)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                total += part * s if BLOCKS else part
                stage, phase = advance(stage, phase, STAGES)
        store_columns(total, Y, scales, added, expert, row0, rows, split, col0, N, R, BLOCKS, ACT)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit,
    tokens=("E", "R", "KB", "per", "splits", "stride_sae", "stride_sam", "stride_sak", "stride_sbe", "stride_sbn", "stride_sbk",
            "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 128}, dependent=True,
)  # fmt: skip
def small_rows_hopper(
    A, B, Y, SCALES, ADDED, COUNTS, E, R, N, KB, per, splits, stride_sae, stride_sam, stride_sak, stride_sbe,
    stride_sbn, stride_sbk, PROGRAMS, ACT: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr, BLOCK_E: gl.constexpr,
    STAGES: gl.constexpr, CHUNK: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Y[e] = A[e] @ B[e].T for the first COUNTS[e] of R rows; of `splits` parts of the inner dimension, `per` blocks each, one
    after the other."""
    let_next_begin(DEPENDENT)
    COLUMNS: gl.constexpr = B.block_type.shape[1]
    EACH: gl.constexpr = A.block_type.shape[1]
    a_ring = gl.allocate_shared_memory(A.dtype, [STAGES * (ROWS // EACH), 1, EACH, 128], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [STAGES, 1, COLUMNS, 128], B.layout)
    line = gl.allocate_shared_memory(gl.float32, [CHUNK, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    across = gl.cdiv(N, COLUMNS)
    ring = (a_ring, b_ring, full, empty)
    SA, SB = SCALES
    scales = (SA, SB, stride_sae, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk)
    gl.warp_specialize([
        (multiply_tiles, (Y, scales, ADDED, COUNTS, ring, line, E, R, across, N, KB, per, splits, PROGRAMS, ROWS, STAGES,
                          BLOCK_E, BLOCKS, ACT, DEPENDENT)),
        (copy_operands, (A, B, COUNTS, ring, E, R, across, KB, per, splits, PROGRAMS, ROWS, STAGES, BLOCK_E, DEPENDENT)),
    ], [1], [24])  # fmt: skip


def shape_of(rows: int, columns: int, tiles: int, sms: int) -> tuple[int, int, int]:
    """(rows of a tile, its columns, stages). Wide tiles read `a` less often; they are taken if there are enough of them."""
    height = max(8, min(MOST, power_of_two(rows)))
    width = 128 if height >= 32 and tiles * cdiv(columns, 128) >= 2 * sms else 64
    return height, width, RING // (128 * (height + width))


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether there are up to 64 rows of FP8 codes whose inner dimension is contiguous, in rows that begin at multiples of 16
    bytes."""
    if not target.hopper_gluon or a.out_format is not None:
        return False
    once = a.recipe_a in ONCE and a.recipe_b in ONCE and a.accumulate == "full"
    if not (once or (a.recipe_a, a.recipe_b) == ("BlockWise1x128", "BlockWise128x128")):
        return False
    if a.a.dtype not in KINDS or a.b.dtype not in KINDS or a.a.shape[0] > MOST:
        return False
    sizes = (*a.a.shape, a.b.shape[1])
    return min(sizes) > 0 and max(sizes) < 2**31 - 256 and copies_in_bulk(a.a, a.b.t())


def forward(a, b, scale_a, scale_b, recipe_a, recipe_b, *, bias, act, c, beta, out_dtype, out, **_) -> Tensor:
    (M, K), N, sms = a.shape, b.shape[1], Target.at(a.device).sms
    KB, blocks = cdiv(K, 128), recipe_a not in ONCE
    height, width, stages = shape_of(M, N, 1, sms)
    y = torch.empty(M, N, dtype=DTYPES[out_dtype], device=a.device) if out is None else out
    parts = splits_for(cdiv(N, width), KB, sms)
    per = cdiv(KB, parts)
    target = y if parts == 1 else torch.empty(parts, M, N, dtype=torch.float32, device=a.device)
    add = None if beta == 0.0 else c
    later = parts > 1
    strides_a, strides_b = ((s.stride(0) if s.shape[0] > 1 else 0, s.stride(1)) for s in (scale_a, scale_b))
    small_rows_hopper(
        box_of(a.unsqueeze(0), [1, min(PIECE, height), 128], KINDS[a.dtype]),
        box_of(b.t().unsqueeze(0), [1, width, 128], KINDS[b.dtype]),
        Matrices(target, 0, *target.stride()[-2:]), (scale_a, scale_b),
        Added(None if bias is None or later else bias.contiguous(), matrix(None if later else add), beta), None, 1, M, N, KB, per,
        parts, 0, *strides_a, 0, *strides_b, min(2 * sms, parts * cdiv(N, width)),
        ACT=None if later else act, BLOCKS=blocks, ROWS=height, BLOCK_E=1, STAGES=stages, CHUNK=CHUNK,
    )  # fmt: skip
    if later:
        add_parts(target, y, bias, add, beta, act)
    return y


def multiply_masked(a: Tensor, b: Tensor, counts: Tensor, scale_a: Tensor, scale_b: Tensor, y: Tensor) -> None:
    """y[e] = a[e] @ b[e] for the first counts[e] rows of a [experts, rows, inner]; scales are those of blocks."""
    (E, R, K), N, sms = a.shape, b.shape[2], Target.at(a.device).sms
    height, width, stages = shape_of(R, N, E, sms)
    small_rows_hopper(
        box_of(a, [1, min(PIECE, height), 128], KINDS[a.dtype]),
        box_of(b.transpose(1, 2), [1, width, 128], KINDS[b.dtype]),
        matrices(y), (scale_a, scale_b), Added(None, Matrix(), None), counts, E, R, N, cdiv(K, 128), cdiv(K, 128), 1,
        *scale_a.stride(), *scale_b.stride(), min(2 * sms, E * cdiv(R, height) * cdiv(N, width)),
        ACT=None, BLOCKS=True, ROWS=height, BLOCK_E=power_of_two(E), STAGES=stages, CHUNK=CHUNK,
    )  # fmt: skip
