"""What warp-specialised Gluon products on Hopper share: the ring of shared memory between the warp that copies and the
warpgroups that multiply, and the order in which these issue their products."""

from ..core.triton_versions import async_store, fence_async_shared, gl, gluon, reinterpret, tma

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
