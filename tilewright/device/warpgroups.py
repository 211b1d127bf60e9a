"""What warp-specialised Gluon products on Hopper share: the ring of shared memory between the warp that copies and the
warpgroups that multiply, and the order in which these issue their products."""

from ..core.triton_versions import async_store, fence_async_shared, gl, gluon, reinterpret, tma
from .store import block_of, codes_in_byte, row_codes, row_scales, store_codes, store_scales, store_whole, whole_of

# A warpgroup's accumulator of 64 rows and 128 columns, of products of 8-bit operands
PART = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
SYNC = gl.constexpr(
    ("bar.sync 10, 256; mov.u32 $0, 0;", "bar.sync 11, 256; mov.u32 $0, 0;", "bar.sync 12, 256; mov.u32 $0, 0;")
)
ARRIVE = gl.constexpr(
    ("bar.arrive 10, 256; mov.u32 $0, 0;", "bar.arrive 11, 256; mov.u32 $0, 0;", "bar.arrive 12, 256; mov.u32 $0, 0;")
)


@gluon.jit
def await_turn(W: gl.constexpr):
    """Warpgroup W waits until the one before it has issued: products of one fill the tensor cores while the others add up.
    5 % of a promoted FP8 product's time (H200, November 2026). Barriers 10 to 12 are no one else's."""
    gl.inline_asm_elementwise(SYNC[W], "=r", [], gl.int32, False, 1)


@gluon.jit
def give_turn(W: gl.constexpr, COUNT: gl.constexpr = 2):
    """Let the next of COUNT warpgroups issue. The last does so once before its first turn."""
    gl.inline_asm_elementwise(ARRIVE[(W + 1) % COUNT], "=r", [], gl.int32, False, 1)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and the phase of its barriers."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def codes_at(ring, at):
    """A 128x128 box of codes in a ring of them, whatever its descriptor's rank, as a product takes it."""
    return reinterpret(ring.index(at), ring.dtype, [128, 128], CODES)


@gluon.jit
def store_part(acc, box, C, at):
    """An accumulator by a bulk copy through `box`, which the copy before may still be leaving."""
    tma.store_wait(0)
    box.store(acc.to(box.dtype).reshape(box.shape))
    fence_async_shared()
    async_store(C, at, box)


@gluon.jit
def store_in_format(acc, WAY, box, C, row0, rows, col0, N, stride_s, FORMAT: gl.constexpr):
    """An accumulator as codes and scales, of which `rows` rows there are: what `store.store_rows` stores. Codes go by a bulk copy,
    which clips them where the matrix ends, or one by one where C is None."""
    PER: gl.constexpr = codes_in_byte(FORMAT)
    BLOCK: gl.constexpr = block_of(FORMAT)
    first = (row0 == 0) & (col0 == 0)
    whole = whole_of(WAY, FORMAT)
    s, m, z = row_scales(acc, WAY, whole, FORMAT)
    if BLOCK > 0:
        r, block = indices(s)
        row = (row0 + r).to(gl.int64)
        store_scales(s, z, WAY, row, col0 // BLOCK + block, r < rows, first, N, stride_s, FORMAT)
    else:
        store_scales(s, z, WAY, None, None, None, first, N, stride_s, FORMAT)
    made = row_codes(acc, s, m, z, FORMAT)
    store_whole(whole, WAY, first)
    if C is None:
        r, c = indices(made)
        store_codes(made, WAY, (row0 + r).to(gl.int64), col0 // PER + c, r < rows, N, FORMAT, "")
    else:
        store_part(made, box, C, [row0, col0 // PER])


@gluon.jit
def indices(x):
    """Of the rows [n, 1] and of the columns [1, n] of a tile."""
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return gl.expand_dims(r, 1), gl.expand_dims(c, 0)
