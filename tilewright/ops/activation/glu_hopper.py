"""glu in FP8 both ways on Hopper, in Gluon: loads overlap the quantisation of the tile before.

Two programs to an SM walk over 128x128 tiles of the result. A tile comes in two halves of 64 rows, each with a barrier of
its own, by bulk tensor copies; as soon as a half is in registers the same half of the program's next tile is on its way.
A thread holds four rows of twice eight columns: shared memory is read without bank conflicts, and the codes of four rows
of a column are one word, so that the transposed store moves words. The backward makes both halves of the gradient from one
read of its operands: while dgate is quantised, dup waits where gate and up were.
"""

from __future__ import annotations

from torch import Tensor

from ...core.format import Format, Quantized
from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import (
    TensorDescriptor,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)
from ...device.activation import gated, gated_gradient
from ...device.hopper import TILE, store_tile, widen
from ...formats.fill import tiles_in_bulk
from ...runtime.kernel import kernel

# Programs; 250 registers on four warps leave room for no more. Three of 168 were slower at every size (H200, November 2026)
PER_SM = 2
PAIR = gl.constexpr(gl.BlockedLayout([2, 4, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0]))  # gate's and up's TILE
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PAIR_ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(0, PAIR.value)))
TILE_ROWS = gl.constexpr(gl.SliceLayout(1, TILE.value))


@gluon.jit
def locate(t, BLOCKS, across, M):
    """(block, first row, rows left, first column) of a tile; columns vary fastest."""
    block = t // across
    col0 = (t % across) * 128
    if BLOCKS is None:
        row0 = block * 128
        rows_left = M - row0
    else:
        row0 = gl.load(BLOCKS + 2 * block)
        rows_left = gl.load(BLOCKS + 2 * block + 1)
    return block, row0, rows_left, col0


@gluon.jit
def clear(memory, rows_left, AT: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Zeros over the rows of a half that are another group's: few tiles have such rows, masks would cost all of them."""
    if rows_left < AT + 64:
        x = memory.load(LAYOUT)
        keep = gl.expand_dims(gl.where(AT + gl.arange(0, 64, ROWS) < rows_left, -1, 0).to(gl.int16), 1)
        if len(x.shape) == 3:
            keep = gl.expand_dims(keep, 0)
        keep, _ = gl.broadcast(keep, x)
        x = gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, keep], dtype=x.dtype, is_pure=True, pack=2)
        memory.store(x)
        fence_async_shared()  # before the copy of the next tile
        barrier()


@gluon.jit
def load_pair(half):
    """Gate and up of 64 rows."""
    a, b = gl.split(half.load(PAIR).permute((1, 2, 0)))
    return gl.convert_layout(a, TILE, assert_trivial=True), gl.convert_layout(b, TILE, assert_trivial=True)


@gluon.jit
def row_scale(SCALE, row0, rows_left, AT: gl.constexpr, MASK: gl.constexpr):
    """The scales of 64 rows from row AT of the tile, as a column."""
    r = AT + gl.arange(0, 64, gl.SliceLayout(1, TILE))
    if MASK:
        scale = gl.load(SCALE + row0 + r, r < rows_left, 0.0)
    else:
        scale = gl.load(SCALE + row0 + r)
    return gl.expand_dims(scale, 1)


@gluon.jit
def parked(half):
    """Gate's and up's memory as 64x128 numbers in fp32, the two fours of eight columns apart: no bank conflicts."""
    return reinterpret(half, gl.float32, [1, 2, 4096], FLAT).index(0)


@gluon.jit
def to_parked(u):
    return u.reshape([64, 16, 2, 4]).permute((2, 0, 1, 3)).reshape([2, 4096])


@gluon.jit
def unpark(half):
    like = to_parked(gl.zeros([64, 128], gl.float32, TILE))
    u = parked(half).load(like.type.layout).reshape([2, 64, 16, 4]).permute((1, 2, 0, 3)).reshape([64, 128])
    return gl.convert_layout(u, TILE, assert_trivial=True)


@gluon.jit
def gated_half(
    half, ready, phase, SCALE, row0, rows_left, limit, alpha, AT: gl.constexpr, ACT: gl.constexpr, MASK: gl.constexpr,
    GROUPED: gl.constexpr,
):  # fmt: skip
    if SCALE is not None:
        scale = row_scale(SCALE, row0, rows_left, AT, MASK)
    mbarrier.wait(ready.index(0), phase)
    if GROUPED:
        clear(half, rows_left, AT, PAIR, PAIR_ROWS)
    a, b = load_pair(half)
    y = gated(widen(a), widen(b), limit, alpha, ACT)
    if SCALE is not None:
        y = y * scale
    return y


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("M", "tiles", "stride_s", "stride_st", "PROGRAMS"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def glu_forward_pairs(
    X, SCALE, BLOCKS, Q, S, QT, ST, tiles, M, N, stride_s, stride_st, limit, alpha, PROGRAMS,
    ACT: gl.constexpr, FORMAT: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    GROUPED: gl.constexpr = BLOCKS is not None
    # An allocation a half: the compiler puts a barrier between any two uses of one allocation if either is a copy
    half0 = gl.allocate_shared_memory(X.dtype, [2, 64, 128], X.layout)
    half1 = gl.allocate_shared_memory(X.dtype, [2, 64, 128], X.layout)
    ready0 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready1 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready0.index(0), count=1)
    mbarrier.init(ready1.index(0), count=1)
    BYTES: gl.constexpr = 2 * 64 * 128 * 2
    across = N // 128
    first = gl.program_id(0)
    block, row0, rows_left, col0 = locate(first, BLOCKS, across, M)
    more = rows_left > 0
    mbarrier.expect(ready0.index(0), BYTES, pred=more)
    async_load(X, [0, row0, col0], ready0.index(0), half0, pred=more)
    mbarrier.expect(ready1.index(0), BYTES, pred=more)
    async_load(X, [0, row0 + 64, col0], ready1.index(0), half1, pred=more)
    phase = 0
    for t in range(first + PROGRAMS, tiles + PROGRAMS, PROGRAMS):
        if rows_left > 0:
            next_block, next_row, next_left, next_col = locate(gl.minimum(t, tiles - 1), BLOCKS, across, M)
            more = (t < tiles) & (next_left > 0)
            y0 = gated_half(half0, ready0, phase, SCALE, row0, rows_left, limit, alpha, 0, ACT, MASK, GROUPED)
            mbarrier.expect(ready0.index(0), BYTES, pred=more)
            barrier()
            async_load(X, [0, next_row, next_col], ready0.index(0), half0, pred=more)
            y1 = gated_half(half1, ready1, phase, SCALE, row0, rows_left, limit, alpha, 64, ACT, MASK, GROUPED)
            mbarrier.expect(ready1.index(0), BYTES, pred=more)
            barrier()
            async_load(X, [0, next_row + 64, next_col], ready1.index(0), half1, pred=more)
            phase ^= 1
            store_tile(
                y0, y1, Q, S, QT, ST, block, row0, rows_left, col0, M, N, stride_s, stride_st, FORMAT, MASK, GROUPED
            )
            block, row0, rows_left, col0 = next_block, next_row, next_left, next_col


@gluon.jit
def gradient_half(
    half, dy, ready, phase, DY, SCALE, DSCALE, row0, rows_left, col0, next_row, next_col, more, M, limit, alpha,
    AT: gl.constexpr, ACT: gl.constexpr, MASK: gl.constexpr, GROUPED: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """dgate of 64 rows, its dup left in `half`, its sums of dscale stored; the next tile's dy is on its way."""
    scale = None
    if SCALE is not None:
        scale = row_scale(SCALE, row0, rows_left, AT, MASK)
    mbarrier.wait(ready, phase)
    if GROUPED:
        clear(half, rows_left, AT, PAIR, PAIR_ROWS)
        clear(dy, rows_left, AT, TILE, TILE_ROWS)
    a, b = load_pair(half)
    g = dy.load(TILE)
    mbarrier.expect(ready, BYTES, pred=more)
    barrier()  # all threads have read: dy may come, and dup overwrite what other threads read
    async_load(DY, [next_row + AT, next_col], ready, dy, pred=more)
    a = widen(a)
    b = widen(b)
    g = widen(g)
    da, db, terms = gated_gradient(a, b, g, scale, limit, alpha, ACT)
    parked(half).store(to_parked(db))
    if DSCALE is not None:
        r = AT + gl.arange(0, 64, gl.SliceLayout(1, TILE))
        at = DSCALE + (col0 // 128).to(gl.int64) * M + row0 + r
        if MASK:
            gl.store(at, gl.sum(terms, 1), r < rows_left)
        else:
            gl.store(at, gl.sum(terms, 1))
    return da


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("M", "tiles", "stride_s", "stride_st", "PROGRAMS"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def glu_backward_pairs(
    X, DY, SCALE, DSCALE, BLOCKS, Q, S, QT, ST, tiles, M, N, stride_s, stride_st, limit, alpha, PROGRAMS,
    ACT: gl.constexpr, FORMAT: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """DSCALE [N/128, M] takes one sum per tile and row, for `sum_tiles` to add up."""
    GROUPED: gl.constexpr = BLOCKS is not None
    half0 = gl.allocate_shared_memory(X.dtype, [2, 64, 128], X.layout)
    half1 = gl.allocate_shared_memory(X.dtype, [2, 64, 128], X.layout)
    dy0 = gl.allocate_shared_memory(DY.dtype, [64, 128], DY.layout)
    dy1 = gl.allocate_shared_memory(DY.dtype, [64, 128], DY.layout)
    bar0 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    bar1 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready0 = bar0.index(0)
    ready1 = bar1.index(0)
    mbarrier.init(ready0, count=1)
    mbarrier.init(ready1, count=1)
    BYTES: gl.constexpr = 3 * 64 * 128 * 2
    across = N // 128
    first = gl.program_id(0)
    block, row0, rows_left, col0 = locate(first, BLOCKS, across, M)
    more = rows_left > 0
    mbarrier.expect(ready0, BYTES, pred=more)
    async_load(DY, [row0, col0], ready0, dy0, pred=more)
    async_load(X, [0, row0, col0], ready0, half0, pred=more)
    mbarrier.expect(ready1, BYTES, pred=more)
    async_load(DY, [row0 + 64, col0], ready1, dy1, pred=more)
    async_load(X, [0, row0 + 64, col0], ready1, half1, pred=more)
    phase = 0
    for t in range(first + PROGRAMS, tiles + PROGRAMS, PROGRAMS):
        if rows_left > 0:
            next_block, next_row, next_left, next_col = locate(gl.minimum(t, tiles - 1), BLOCKS, across, M)
            more = (t < tiles) & (next_left > 0)
            y0 = gradient_half(
                half0, dy0, ready0, phase, DY, SCALE, DSCALE, row0, rows_left, col0, next_row, next_col, more, M, limit,
                alpha, 0, ACT, MASK, GROUPED, BYTES,
            )  # fmt: skip
            y1 = gradient_half(
                half1, dy1, ready1, phase, DY, SCALE, DSCALE, row0, rows_left, col0, next_row, next_col, more, M, limit,
                alpha, 64, ACT, MASK, GROUPED, BYTES,
            )  # fmt: skip
            phase ^= 1
            store_tile(
                y0, y1, Q, S, QT, ST, block, row0, rows_left, col0, M, 2 * N, stride_s, stride_st, FORMAT, MASK, GROUPED
            )
            y0 = unpark(half0)
            y1 = unpark(half1)
            fence_async_shared()  # ordinary writes to this memory come before the copies into it
            barrier()
            async_load(X, [0, next_row, next_col], ready0, half0, pred=more)
            async_load(X, [0, next_row + 64, next_col], ready1, half1, pred=more)
            store_tile(
                y0, y1, Q, S, QT, ST, block, row0, rows_left, N + col0, M, 2 * N, stride_s, stride_st, FORMAT, MASK,
                GROUPED,
            )  # fmt: skip
            block, row0, rows_left, col0 = next_block, next_row, next_left, next_col


def takes(target: Target, x: Tensor, up: Tensor | None, format: Format | None, out: Quantized | None = None) -> bool:
    """Whether the kernels above take this x, gate and up merged, into this format."""
    return up is None and tiles_in_bulk(target, x, format, out) and x.shape[-1] % 256 == 0 and x.shape[-1] < 2**23


def boxes(x: Tensor, block: list[int], shape: list[int], strides: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, shape, strides, block, layout)


def store_pairs(
    q: Quantized,
    x: Tensor,
    dy: Tensor | None,
    scale: Tensor | None,
    dscale: Tensor | None,
    blocks: Tensor | None,
    limit: float | None,
    alpha: float,
    act: str,
) -> None:
    """Fill q with glu of x [M, 2N], or with its gradient if dy [M, N] is given; `blocks` is that of `list_blocks`."""
    M, N = x.shape[0], x.shape[1] // 2
    tiles = (cdiv(M, 128) if blocks is None else blocks.shape[0]) * (N // 128)
    programs = min(tiles, PER_SM * Target.at(x.device).sms)
    if blocks is None:
        # As many as share the tiles evenly: at 1024 tiles 256, of 264 that would fit, were faster (H200, November 2026)
        programs = cdiv(tiles, cdiv(tiles, programs))
    X = boxes(x, [2, 64, 128], [2, M, N], [N, 2 * N, 1])
    rest = (
        blocks, q.data, q.scale, q.data_t, q.scale_t, tiles, M, N, q.format.scale_stride(q, "row"),
        q.format.scale_stride(q, "col"), limit, alpha,
        programs,
    )  # fmt: skip
    constants = {"ACT": act, "FORMAT": q.format.device_format(True), "MASK": blocks is not None or M % 128 != 0}
    if dy is None:
        glu_forward_pairs(X, scale, *rest, **constants)
    else:
        glu_backward_pairs(X, boxes(dy, [64, 128], [M, N], [N, 1]), scale, dscale, *rest, **constants)
