"""Bytes brought into the L2 before anybody asks for them. Nothing changes but the time that a later read takes."""

import triton
import triton.language as tl

BULK_PREFETCH = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)


@triton.jit
def prefetch(P, nbytes, wanted):
    """Where `wanted`, ask for `nbytes` bytes from P on, rounded outwards to 16: for chips with bulk copies. A thread asks for
    each element that it holds, so that tensors should have as many elements as there are threads."""
    at = P.to(tl.int64)
    start = at & -16
    size = (((at + nbytes + 15) & -16) - start).to(tl.int32)
    tl.inline_asm_elementwise(
        BULK_PREFETCH, "=r,l,r,r", [start, size, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )
