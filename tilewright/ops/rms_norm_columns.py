"""The column-wise half of a quantised `rms_norm` on Hopper, in Gluon: codes qt [N, M] and scales [M / 128, N], rstd given.

It computes what `rms_norm.produce` and `quantize_tiles` compute, bit for bit, with the layouts written out: 128 rows by 64
columns on two warps, 16-byte loads and stores, four rows of a column packed into one int32 before the transposition. On an
H200 both ways of 8192 x 2048 then take 25.4 us against 28.0 (November 2026).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.kernel import kernel
from ..core.target import Target
from ..core.tensor import cdiv
from ..formats.fp8 import Fp8

PROPAGATE = gl.constexpr(tl.PropagateNan.ALL)
COLUMNS = 64
# Gluon is experimental: what it is called with is known for this version alone
SUPPORTED = triton.__version__.startswith("3.6.")


def fits(target: Target, x: Tensor, fmt: Fp8) -> bool:
    """Whether the kernel below can make the column-wise half."""
    known = SUPPORTED and target.arch == "sm_90" and target.tma
    same_bits = fmt.granularity == "1x128" and fmt.dtype == "e4m3" and fmt.pow2 and fmt.rule != "linghe"
    return known and same_bits and x.shape[0] % 128 == 0 and x.shape[1] % COLUMNS == 0 and x.stride(1) == 1


@gluon.jit
def max_nan(a, b):
    return gl.maximum(a, b, propagate_nan=PROPAGATE)


@gluon.jit
def load_scaled(R, x, g, k: gl.constexpr):
    return x * gl.expand_dims(gl.load(R + 4 * g + k), 1)


@gluon.jit
def pack4(a, b, c, d):
    """Four fp32 -> four saturated e4m3 in an int32, a in the lowest byte."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pow2(amax):
    """(stored scale, multiplier); see `device.quantize.scale_of`."""
    e = ((amax.to(gl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - 0x4000000
    e = gl.maximum(e, 0x00800000)
    poison = amax * 0.0
    scale = gl.where(amax == 0.0, 1.0, e.to(gl.float32, bitcast=True))
    return scale + poison, (0x7F000000 - e).to(gl.float32, bitcast=True) + poison


@gluon.jit
def wait_for_rows():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@kernel(
    grid=lambda a: (cdiv(a.M, 128) * (a.N // COLUMNS),),
    jit=gluon.jit,
    tokens=("M",),
    default=lambda a: dict(BC=COLUMNS, num_warps=2, launch_pdl=True),
)
def rms_norm_columns(
    X, W, RSTD, QT, ST, M, N, stride_xm, stride_st, weight_offset, EARLY: gl.constexpr, BC: gl.constexpr
):
    """EARLY: X is not what the row launch writes, so it may be read before that has ended."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0])
    # The last bands first: their x is what the row launch left in the L2
    pid = gl.num_programs(0) - 1 - gl.program_id(0)
    blocks = N // BC
    band = (pid // blocks).to(gl.int64)
    col0 = (pid % blocks) * BC
    g = gl.arange(0, 32, gl.SliceLayout(1, L))
    c = gl.arange(0, BC, gl.SliceLayout(0, L))
    if not EARLY:
        wait_for_rows()
    at = X + band * 128 * stride_xm + col0 + gl.expand_dims(4 * g * stride_xm, 1) + gl.expand_dims(c, 0)
    x0 = gl.load(at, eviction_policy="evict_first").to(gl.float32)
    x1 = gl.load(at + stride_xm, eviction_policy="evict_first").to(gl.float32)
    x2 = gl.load(at + 2 * stride_xm, eviction_policy="evict_first").to(gl.float32)
    x3 = gl.load(at + 3 * stride_xm, eviction_policy="evict_first").to(gl.float32)
    if W is not None:
        w = gl.load(W + col0 + c).to(gl.float32) + weight_offset
    if EARLY:
        wait_for_rows()
    r = RSTD + band * 128
    x0 = load_scaled(r, x0, g, 0)
    x1 = load_scaled(r, x1, g, 1)
    x2 = load_scaled(r, x2, g, 2)
    x3 = load_scaled(r, x3, g, 3)
    largest = max_nan(max_nan(gl.abs(x0), gl.abs(x1)), max_nan(gl.abs(x2), gl.abs(x3)))
    largest = gl.reduce(largest, 0, max_nan)
    # The weight stays out of the element loop: rounding is monotonic, so max |x rstd| * |w| is the amax exactly, and w * m is
    # exact because m is a power of two
    if W is not None:
        scale, m = pow2(largest * gl.abs(w))
        m = m * w
    else:
        scale, m = pow2(largest)
    gl.store(ST + band * stride_st + col0 + c, scale)
    m = gl.expand_dims(m, 0)
    words = gl.convert_layout(pack4(x0 * m, x1 * m, x2 * m, x3 * m).permute((1, 0)), LT)
    tn = gl.arange(0, BC, gl.SliceLayout(1, LT))
    tg = gl.arange(0, 32, gl.SliceLayout(0, LT))
    quads = (M // 16) * 4  # whole int32 in a row of qt; written so that the compiler sees its alignment
    out = QT.to(gl.pointer_type(gl.int32), bitcast=True) + (col0 * 1).to(gl.int64) * quads + band * 32
    gl.store(
        out + gl.expand_dims(tn.to(gl.int64) * quads, 1) + gl.expand_dims(tg, 0), words, eviction_policy="evict_first"
    )
