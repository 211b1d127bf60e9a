"""rms_norm in FP8 both ways on Hopper, in Gluon: y = x * rstd * (weight + weight_offset), a 128x128 tile quantised both ways.

Two programs to an SM walk over the tiles, which come by bulk tensor copies while the tile before is quantised. rstd is given,
by the caller or by a launch over rows just before; the last rows go first, for their x is what that launch left in the L2.
"""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from ...core.format import Format, Quantized
from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import TensorDescriptor, async_load, barrier, gl, gluon, mbarrier
from ...device.hopper import TILE, store_tile, widen
from ...formats.fill import tiles_in_bulk
from ...op import single
from ...runtime.kernel import kernel

PER_SM = 2  # programs; 250 registers on four warps leave room for no more
BYTES = gl.constexpr(64 * 128 * 2)  # of half a tile


@gluon.jit
def wait_for_launch_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def load_rstd(RSTD, row0, rows_left, AT: gl.constexpr, MASK: gl.constexpr):
    """rstd of 64 rows from row AT of the tile. The launch before may still be writing others: not from the L1."""
    r = AT + gl.arange(0, 64, gl.SliceLayout(1, TILE))
    if MASK:
        rstd = gl.load(RSTD + row0 + r, r < rows_left, 0.0, cache_modifier=".cg")
    else:
        rstd = gl.load(RSTD + row0 + r, cache_modifier=".cg")
    return rstd


@gluon.jit
def load_weight(W, col0, weight_offset):
    w = None
    if W is not None:
        w = gl.load(W + col0 + gl.arange(0, 128, gl.SliceLayout(0, TILE))).to(gl.float32)
        if weight_offset is not None:
            w = w + weight_offset
    return w


@gluon.jit
def normed(half, rstd, w):
    """y of 64 rows that have arrived."""
    y = widen(half.load(TILE)) * gl.expand_dims(rstd, 1)
    if w is not None:
        y = y * gl.expand_dims(w, 0)
    return y


@gluon.jit
def place(t, across, M):
    """(block, first row, rows left, first column) of a tile; columns vary fastest."""
    block = t // across
    return block, block * 128, M - block * 128, (t % across) * 128


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("M", "tiles", "stride_s", "stride_st", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "launch_pdl": a.AFTER is not None},
)  # fmt: skip
def rms_norm_tiles(
    X, W, RSTD, Q, S, QT, ST, tiles, M, N, stride_s, stride_st, weight_offset, PROGRAMS,
    FORMAT: gl.constexpr, MASK: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """AFTER: the launch just before writes "rstd", or "x" too; None if all was there already."""
    # An allocation a half: the compiler puts a barrier between any two uses of one allocation if either is a copy
    half0 = gl.allocate_shared_memory(X.dtype, [64, 128], X.layout)
    half1 = gl.allocate_shared_memory(X.dtype, [64, 128], X.layout)
    ready0 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready1 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready0.index(0), count=1)
    mbarrier.init(ready1.index(0), count=1)
    if AFTER == "x":
        wait_for_launch_before()
    across = N // 128
    first = gl.program_id(0)
    block, row0, rows_left, col0 = place(tiles - 1 - first, across, M)
    mbarrier.expect(ready0.index(0), BYTES)
    async_load(X, [row0, col0], ready0.index(0), half0)
    mbarrier.expect(ready1.index(0), BYTES)
    async_load(X, [row0 + 64, col0], ready1.index(0), half1)
    if AFTER == "rstd":
        wait_for_launch_before()
    r0 = load_rstd(RSTD, row0, rows_left, 0, MASK)
    r1 = load_rstd(RSTD, row0, rows_left, 64, MASK)
    phase = 0
    for t in range(first + PROGRAMS, tiles + PROGRAMS, PROGRAMS):
        next_block, next_row, next_left, next_col = place(gl.maximum(tiles - 1 - t, 0), across, M)
        more = t < tiles
        w = load_weight(W, col0, weight_offset)
        mbarrier.wait(ready0.index(0), phase)
        y0 = normed(half0, r0, w)
        mbarrier.expect(ready0.index(0), BYTES, pred=more)
        barrier()
        async_load(X, [next_row, next_col], ready0.index(0), half0, pred=more)
        mbarrier.wait(ready1.index(0), phase)
        y1 = normed(half1, r1, w)
        mbarrier.expect(ready1.index(0), BYTES, pred=more)
        barrier()
        async_load(X, [next_row + 64, next_col], ready1.index(0), half1, pred=more)
        r0 = load_rstd(RSTD, next_row, next_left, 0, MASK)
        r1 = load_rstd(RSTD, next_row, next_left, 64, MASK)
        phase ^= 1
        store_tile(y0, y1, Q, S, QT, ST, block, row0, rows_left, col0, M, N, stride_s, stride_st, FORMAT, MASK, False)
        block, row0, rows_left, col0 = next_block, next_row, next_left, next_col


def takes(target: Target, x: Tensor, format: Format | None, out: Quantized | None = None) -> bool:
    """Whether the kernel above takes this x into this format. With fewer tiles than programs there is none to fetch ahead."""
    return tiles_in_bulk(target, x, format, out) and cdiv(x.numel() // x.shape[-1], 128) * (x.shape[-1] // 128) >= (
        PER_SM * target.sms
    )


def store_normed_tiles(
    q: Quantized, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, after: str | None
) -> None:
    """Fill q with the norm of x [M, N] by a known rstd; `after` is what `rms_norm_tiles` says of it."""
    M, N = x.shape
    tiles = cdiv(M, 128) * (N // 128)
    # As many programs as share the tiles evenly
    programs = cdiv(tiles, cdiv(tiles, PER_SM * Target.at(x.device).sms))
    layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    box = TensorDescriptor(x, [M, N], [N, 1], [64, 128], layout)
    strides = q.format.scale_stride(q, "row"), q.format.scale_stride(q, "col")
    outputs = q.data, q.scale, q.data_t, q.scale_t, tiles, M, N, *strides
    rms_norm_tiles(
        box, weight, rstd, *outputs, weight_offset or None, programs,
        FORMAT=q.format.device_format(True), MASK=M % 128 != 0, AFTER=after,
    )  # fmt: skip


def fits_tiles(target: Target, a: SimpleNamespace) -> bool:
    """Whether the kernel above takes this call. x is None where a backward has another residual instead."""
    return a.x is not None and single(target, a) and takes(target, a.x, a.out_format, getattr(a, "out", None))
