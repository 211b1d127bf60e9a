"""`grouped_mm_inner_fp8` and products of 1x128 scales on both sides on Hopper, in Gluon: a warp that copies, two warpgroups that
multiply, one program to an SM.

A tile is 256 rows by 128 columns, of which each warpgroup has 128 rows as two accumulators of 64, fed from one temporary. Columns
have scales of their own: those of a step are copied beside its codes, and come from there spread over an accumulator.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...core.debug import check_ends
from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import (
    TensorDescriptor,
    async_load,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...device.warpgroups import PART, advance, await_turn, give_turn, store_part
from ...runtime.kernel import kernel
from ..tiles import BAND, group_range, tile_of
from .boxes import box_of, copies_in_bulk

OUT = {
    "float32": (torch.float32, gl.float32), "bfloat16": (torch.bfloat16, gl.bfloat16), "float16": (torch.float16, gl.float16),
}  # fmt: skip
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Rows. Three warpgroups of 64 were no faster: 0.95 to 0.97 of cuBLASLt, two of 128 0.99 to 1.03 (H200, November 2026)
TILE = gl.constexpr(256)


@gluon.jit
def span_of(e, OFFSETS, T):
    """The tokens of group e: all of them where there are no groups."""
    if OFFSETS is None:
        return e * 0, T
    else:
        return group_range(e, OFFSETS, T, 128)


@gluon.jit
def copy_operands(A, B, SB, OFFSETS, ring, sizes, BAND: gl.constexpr, STAGES: gl.constexpr):
    a_ring, b_ring, line_ring, full, empty = ring
    down, across, T, M, N, E, PROGRAMS = sizes
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), down * across * E, PROGRAMS):
        start, end = span_of(t // (down * across), OFFSETS, T)
        row, column = tile_of(t % (down * across), down, across, BAND)
        for k in range(start, end, 128):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, 3 * 128 * 128 + 128 * 4)
            async_load(A, [row * TILE, k], ready, a_ring.index(2 * stage))
            async_load(A, [row * TILE + 128, k], ready, a_ring.index(2 * stage + 1))
            async_load(B, [column * 128, k], ready, b_ring.index(stage))
            async_load(SB, [k // 128, column * 128], ready, line_ring.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def line_at(ring, at):
    return reinterpret(ring.index(at), gl.float32, [128], FLAT)


@gluon.jit
def begin_sum(before, e, row0, col0, M, N):
    """What the sums of 64 rows begin with: beta * D[e], or 0. Without beta nothing waits for it before the first addition."""
    D, beta, stride_de, stride_dm = before
    if D is None:
        return gl.zeros([64, 128], gl.float32, PART)
    else:
        row = row0 + gl.arange(0, 64, gl.SliceLayout(1, PART))
        col = col0 + gl.arange(0, 128, gl.SliceLayout(0, PART))
        at = D + e.to(gl.int64) * stride_de + gl.expand_dims(row.to(gl.int64) * stride_dm, 1) + gl.expand_dims(col, 0)
        found = gl.load(at, gl.expand_dims(row < M, 1) & gl.expand_dims(col < N, 0), 0.0).to(gl.float32)
        return found if beta is None else found * beta


@gluon.jit
def multiply_tiles(
    result,
    before,
    scales,
    OFFSETS,
    ring,
    sizes,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    KEEP: gl.constexpr,
    W: gl.constexpr,
):
    """Warpgroup W. KEEP: a step's column scales are loaded once, before its products are there, and stay in registers."""
    C, c_box = result
    SA, stride_sa = scales
    a_ring, b_ring, line_ring, full, empty = ring
    down, across, T, M, N, E, PROGRAMS = sizes
    stage = 0
    phase = 0
    part = gl.zeros([64, 128], gl.float32, PART)
    box = c_box.index(W)
    if W == 1:
        give_turn(W)
    lane = gl.arange(0, 64, gl.SliceLayout(1, PART))
    for t in range(gl.program_id(0), down * across * E, PROGRAMS):
        e = t // (down * across)
        start, end = span_of(e, OFFSETS, T)
        tile, column = tile_of(t % (down * across), down, across, BAND)
        row0 = tile * TILE + W * 128
        col0 = column * 128
        sap = SA + (start // 128).to(gl.int64) * stride_sa + row0 + lane
        more = start < end
        upper = gl.load(sap, (row0 + lane < M) & more, 0.0)
        sum0 = begin_sum(before, e, row0, col0, M, N)
        lower = gl.load(sap + 64, (row0 + 64 + lane < M) & more, 0.0)
        sum1 = begin_sum(before, e, row0 + 64, col0, M, N)
        for k in range(start, end, 128):
            scale0 = upper
            scale1 = lower
            mbarrier.wait(full.index(stage), phase)
            a = a_ring.index(2 * stage + W)
            b = b_ring.index(stage).permute((1, 0))
            await_turn(W)
            part = warpgroup_mma(a.slice(0, 64, 0), b, part, use_acc=False, is_async=True)
            give_turn(W)
            more = k + 128 < end
            sap += stride_sa
            upper = gl.load(sap, (row0 + lane < M) & more, 0.0)
            lower = gl.load(sap + 64, (row0 + 64 + lane < M) & more, 0.0)
            if KEEP:
                sb = line_at(line_ring, stage).load(gl.SliceLayout(0, PART))
            part = warpgroup_mma_wait(0, deps=(part,))
            if not KEEP:
                sb = line_at(line_ring, stage).load(gl.SliceLayout(0, PART))
            sum0 += (part * gl.expand_dims(scale0, 1)) * gl.expand_dims(sb, 0)
            # Keeps these additions before the next product, which takes the temporary's registers: after it they would spill
            sum0 = warpgroup_mma_wait(0, deps=(sum0,))
            await_turn(W)
            part = warpgroup_mma(a.slice(64, 64, 0), b, part, use_acc=False, is_async=True)
            give_turn(W)
            part = warpgroup_mma_wait(0, deps=(part,))
            if not KEEP:
                sb = line_at(line_ring, stage).load(gl.SliceLayout(0, PART))
            mbarrier.arrive(empty.index(stage), count=1)
            sum1 += (part * gl.expand_dims(scale1, 1)) * gl.expand_dims(sb, 0)
            stage, phase = advance(stage, phase, STAGES)
        store_part(sum0, box, C, [e, row0, col0])
        store_part(sum1, box, C, [e, row0 + 64, col0])
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("T", "E", "stride_sa", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def grouped_inner_hopper(
    A, B, C, D, beta, SA, SB, OFFSETS, T, M, N, E, stride_sa, stride_de, stride_dm, PROGRAMS, BAND: gl.constexpr,
    STAGES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(A.dtype, [2 * STAGES, 128, 128], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [STAGES, 128, 128], B.layout)
    c_box = gl.allocate_shared_memory(C.dtype, [2, 1, 64, 128], C.layout)
    line_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], SB.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    down = gl.cdiv(M, TILE)
    across = gl.cdiv(N, 128)
    ring = (a_ring, b_ring, line_ring, full, empty)
    result = (C, c_box)
    scales = (SA, stride_sa)
    before = (D, beta, stride_de, stride_dm)
    sizes = (down, across, T, M, N, E, PROGRAMS)
    gl.warp_specialize([
        (multiply_tiles, (result, before, scales, OFFSETS, ring, sizes, BAND, STAGES, KEEP, 0)),
        (multiply_tiles, (result, before, scales, OFFSETS, ring, sizes, BAND, STAGES, KEEP, 1)),
        (copy_operands, (A, B, SB, OFFSETS, ring, sizes, BAND, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


def line_of(scale: Tensor) -> TensorDescriptor:
    """The descriptor of scales [blocks, columns] by which a bulk copy takes 128 scales of one block."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    stride = scale.stride(0) if scale.shape[0] > 1 else 4 * cdiv(scale.shape[1], 4)
    return TensorDescriptor(scale, list(scale.shape), [stride, 1], [1, 128], layout)


def takes_operands(target: Target, a, scale_a, b, scale_b, c, out_dtype: str, out) -> bool:
    """Whether codes are e4m3 whose inner dimension is contiguous, scales of a block lie side by side ([blocks, rows] and
    [blocks, columns]), and rows of the result begin at multiples of 16 bytes."""
    if not target.hopper_gluon or 0 in a.shape or 0 in b.shape or out_dtype not in OUT:
        return False
    if (
        a.dtype != torch.float8_e4m3fn
        or b.dtype != torch.float8_e4m3fn
        or (scale_a.stride(1) != 1 and scale_a.shape[1] > 1)
    ):
        return False
    if (out is not None and not copies_in_bulk(out)) or (c is not None and c.stride(-1) != 1):
        return False
    return b.shape[1] % (4 if out_dtype == "float32" else 8) == 0 and copies_in_bulk(a, b.t(), scale_b)


def multiply(a, scale_a, b, scale_b, offsets, c, beta, out_dtype, out) -> Tensor:
    """The products [groups, rows, columns]; scales are [blocks, rows] and [blocks, columns]."""
    (M, T), N, E = a.shape, b.shape[1], 1 if offsets is None else offsets.shape[0]
    dtype, kind = OUT[out_dtype]
    y = torch.empty(E, M, N, dtype=dtype, device=a.device) if out is None else out
    D = None if c is None or beta == 0.0 else c
    OFFSETS = None if offsets is None else offsets.contiguous()
    wide = (
        out_dtype == "float32"
    )  # whose box leaves a ring of three steps; then what comes between products counts more
    PROGRAMS = min(Target.at(a.device).sms, E * cdiv(M, TILE.value) * cdiv(N, 128))
    grouped_inner_hopper(
        box_of(a, [128, 128], gl.float8e4nv), box_of(b.t(), [128, 128], gl.float8e4nv), box_of(y, [1, 64, 128], kind),
        D, None if D is None or beta == 1.0 else beta, scale_a, line_of(scale_b), OFFSETS, T, M, N, E, scale_a.stride(0),
        *((0, 0) if D is None else D.stride()[:2]), PROGRAMS, BAND=BAND,
        STAGES=3 if wide else 4, KEEP=wide,
    )  # fmt: skip
    return y


def fits(target: Target, a: SimpleNamespace) -> bool:
    return a.recipe == "BlockWise1x128" and takes_operands(
        target, a.a, a.scale_a, a.b, a.scale_b, a.c, a.out_dtype, a.out
    )


def forward(a, scale_a, b, scale_b, offsets, *, recipe, c, beta, out_dtype, out) -> Tensor:
    check_ends("grouped_mm_inner_fp8", "offsets", offsets, a.shape[1])
    return multiply(a, scale_a, b, scale_b, offsets, c, beta, out_dtype, out)


def fits_dense(target: Target, a: SimpleNamespace) -> bool:
    """Whether a `scaled_mm` has 1x128 scales on both sides, as weights' gradients do, and nothing after it but `beta * c`."""
    if a.recipe_a != "BlockWise1x128" or a.recipe_b != "BlockWise1x128" or a.out_format is not None:
        return False
    if a.bias is not None or a.act is not None:
        return False
    return takes_operands(target, a.a, a.scale_a.t(), a.b, a.scale_b.t(), a.c, a.out_dtype, a.out)


def forward_dense(a, b, scale_a, scale_b, *, c, beta, out_dtype, out, **_) -> Tensor:
    before, there = (t if t is None else t.unsqueeze(0) for t in (c, out))
    y = multiply(a, scale_a.t(), b, scale_b.t(), None, before, beta, out_dtype, there)
    return y.squeeze(0) if out is None else out
