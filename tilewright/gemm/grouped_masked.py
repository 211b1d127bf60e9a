"""Products of a few rows for each of many experts: y[e, m] = a[e, m] @ b[e] for the first counts[e] rows m of expert e.

Decoding has few tokens for an expert, in a buffer that holds more: how many is known on the device alone, and what bounds the
product is reading the matrices of the experts that have any. In FP8 every 128 columns of a row of `a` have a scale, and every
128x128 block of `b`: the sum of each block of the inner dimension, times both scales, is added up in fp32.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton.language as tl
from torch import Tensor

from ..core.debug import check_indices
from ..core.draw import Draw
from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.matrices import Factor, Strides
from ..op import Bars, Cost, Op, Out, Triton, single, upcast
from ..runtime.kernel import kernel
from .few import COLUMNS, codes_for_math, sum_blocks
from .hopper import few as hopper_few
from .operands import DTYPES, FLOATS, OutDtype
from .tiles import matrices, stages

MOST = 64  # rows of a tile
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def reference(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    out_dtype: OutDtype = "bfloat16",
) -> Tensor:
    """The first `counts[e]` rows of `a[e]` [experts, rows, inner] times `b[e]` [experts, inner, columns], summed in fp32 and
    rounded once to `out_dtype`.

    bf16 and fp16 are as they are; FP8 codes have `scale_a` [experts, rows, inner / 128] and `scale_b` [experts, columns / 128,
    inner / 128], sizes that 128 does not divide being rounded up. Rows of the result past `counts` are unspecified, as rows of `a`
    are. `b` may lie in memory either way; fastest is what `weight.transpose(1, 2)` of [experts, columns, inner] gives.
    """
    wide_a, wide_b = upcast(a), upcast(b)
    if scale_a is not None and scale_b is not None:
        wide_a = wide_a * upcast(scale_a).repeat_interleave(128, 2)[:, :, : a.shape[2]]
        by_block = upcast(scale_b).repeat_interleave(128, 1).repeat_interleave(128, 2)
        wide_b = wide_b * by_block[:, : b.shape[2], : b.shape[1]].transpose(1, 2)
    live = torch.arange(a.shape[1], device=a.device) < counts[:, None]
    y = torch.where(live[:, :, None], wide_a, 0.0) @ wide_b
    return y if y.dtype == torch.float64 else y.to(DTYPES[out_dtype])


def inputs(draw: Draw) -> dict:
    experts, inner = draw.dim("experts", (1, 2, 5)), draw.dim("hidden")
    rows, columns = draw.dim("rows", (16, 1, 33)), draw.dim("columns", (64, 33, 130))
    codes = draw.option("fp8", True, False)
    dtype = torch.float8_e4m3fn if codes else draw.dtype if draw.dtype != torch.float32 else torch.bfloat16
    size = 20.0 if codes else 0.5
    scales = {}
    if codes:
        blocks = cdiv(inner, 128)
        scales = {
            "scale_a": draw.uniform(experts, rows, blocks, low=0.01, high=0.1, dtype=torch.float32),
            "scale_b": draw.uniform(experts, cdiv(columns, 128), blocks, low=0.01, high=0.1, dtype=torch.float32),
        }
    return {
        "a": draw.tensor(experts, rows, inner, dtype=dtype, scale=size),
        "b": draw.tensor(experts, columns, inner, dtype=dtype, scale=size).transpose(1, 2),
        "counts": draw.integers(
            experts, low=min(1, rows), high=rows + 1, dtype=draw.option("index", torch.int32, torch.int64)
        ),
        **scales,
        "out_dtype": draw.option("out_dtype", *DTYPES),
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK_N), cdiv(a.R, a.BLOCK_M), a.E),
    tokens=("E", "R", "stride_sae", "stride_sam", "stride_sak"),
    default=lambda a: {"STAGES": stages(a.Y.device, 128 * 2 * (a.BLOCK_M + a.BLOCK_N), 5), "num_warps": 4},
)  # fmt: skip
def grouped_masked(
    A, B, Y, SA, SB, COUNTS, E, R, N, K, stride_sae, stride_sam, stride_sak, KIND_A: tl.constexpr, KIND_B: tl.constexpr,
    MATH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y[e] = A[e] @ B[e] for the first COUNTS[e] of R rows; scales, if there are any, are for blocks of both."""
    e = tl.program_id(2).to(tl.int64)
    row0 = tl.program_id(1) * BLOCK_M
    count = tl.minimum(tl.load(COUNTS + e).to(tl.int64), R).to(tl.int32)  # device data: whatever it holds
    if row0 < count:
        row = row0 + tl.arange(0, BLOCK_M)
        col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        SCALED: tl.constexpr = SA is not None
        scale_a = SA
        scale_b = SB.data
        if SCALED:
            scale_a += e * stride_sae
            scale_b += e * SB.stride_e
        y = sum_blocks(
            Factor(A.data + e * A.stride_e, A.stride_r, A.stride_c, scale_a, None, None),
            Factor(B.data + e * B.stride_e, B.stride_c, B.stride_r, scale_b, None, None), row, col, 0, tl.cdiv(K, 128), count, N, K,
            Strides(stride_sam, stride_sak), Strides(SB.stride_r, SB.stride_c), KIND_A, KIND_B, MATH, 128, SCALED, SCALED, STAGES,
        )  # fmt: skip
        at = Y + (e * R + row)[None, :] * N + col[:, None]
        tl.store(at, y.to(Y.dtype.element_ty), (col < N)[:, None] & (row < count)[None, :])


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(a, b, counts, scale_a, scale_b, *, out_dtype) -> Tensor:
    (E, R, K), N = a.shape, b.shape[2]
    check_indices("grouped_mm_masked", "counts", counts, 0, R + 1)
    y = torch.empty(E, R, N, dtype=DTYPES[out_dtype], device=a.device)
    if not y.numel():
        return y
    kinds = FP8.get(a.dtype, "float"), FP8.get(b.dtype, "float")
    native = Target.at(a.device).fp8
    math = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(a.dtype, "fp8" if native else "bf16")
    A, B = (matrices(codes_for_math(t, math)) for t in (a, b))
    grouped_masked(
        A, B, y, scale_a, matrices(scale_b), counts.contiguous(), E, R, N, K,
        *((0, 0, 0) if scale_a is None else scale_a.stride()),
        KIND_A=kinds[0], KIND_B=kinds[1], MATH=math, BLOCK_M=max(16, min(MOST, power_of_two(R))), BLOCK_N=COLUMNS,
    )  # fmt: skip
    return y


def fits_hopper(target: Target, a: SimpleNamespace) -> bool:
    """Whether factors are FP8 codes whose inner dimension is contiguous, in rows that begin at multiples of 16 bytes."""
    if not target.hopper_gluon or a.scale_a is None:
        return False
    if a.a.shape[0] > hopper_few.EXPERTS or 0 in a.a.shape or 0 in a.b.shape:
        return False
    return hopper_few.copies_in_bulk(a.a, a.b.transpose(1, 2)) and max(a.a.shape + a.b.shape) < 2**31 - 256


def forward_hopper(a, b, counts, scale_a, scale_b, *, out_dtype) -> Tensor:
    check_indices("grouped_mm_masked", "counts", counts, 0, a.shape[1] + 1)
    y = torch.empty(*a.shape[:2], b.shape[2], dtype=DTYPES[out_dtype], device=a.device)
    hopper_few.multiply_masked(a, b, counts.contiguous(), scale_a, scale_b, y)
    return y


def check(a, b, counts, scale_a, scale_b, *, out_dtype) -> None:
    op = "grouped_mm_masked"
    codes = a.dtype in FP8
    if (codes and b.dtype not in FP8) or (not codes and (a.dtype not in FLOATS or a.dtype != b.dtype)):
        raise TypeError(f"{op}: a and b must both be FP8 codes, or bf16, or fp16, got {a.dtype} and {b.dtype}")
    if codes != (scale_a is not None) or codes != (scale_b is not None):
        raise ValueError(
            f"{op}: scale_a and scale_b must both be given for FP8 codes, and neither for codes_for_math numbers"
        )
    if codes:
        across, down = cdiv(a.shape[2], 128), cdiv(b.shape[2], 128)
        if scale_a.shape[2] != across or tuple(scale_b.shape[1:]) != (down, across):
            raise ValueError(
                f"{op}: scale_a is {list(scale_a.shape)} and scale_b {list(scale_b.shape)}, but there are {across} blocks of"
                f" 128 of the inner dimension and {down} of columns"
            )


def cost(a, b, counts, scale_a, scale_b, *, out_dtype) -> tuple[int, int]:
    """Bytes read and written: of the rows that are there, and of the matrices of experts that have any."""
    counts = counts.clamp(0, a.shape[1])
    rows, live, scales = int(counts.sum()), int((counts > 0).sum()), 0
    if scale_a is not None:
        scales = 4 * (rows * scale_a.shape[2] + live * scale_b[0].numel())
    read = rows * a.shape[2] * a.element_size() + live * b[0].numel() * b.element_size() + scales
    return read, rows * b.shape[2] * DTYPES[out_dtype].itemsize


def flops(a, b, **_) -> int:
    return 2 * a.numel() * b.shape[2]


grouped_mm_masked = Op(
    "grouped_mm_masked", reference, inputs, Triton(forward_hopper, None, fits_hopper, "hopper"),
    Triton(forward, None, single, "portable"),
    where={
        "a": "operand[experts+ rows inner]", "b": "operand[experts+ inner columns]", "counts": "int[experts+]",
        "scale_a": "float32[experts+ rows blocks]", "scale_b": "float32[experts+ column_blocks blocks]",
    },
    results={"out": lambda a: f"{a.out_dtype}[experts rows columns]"},
    out=Out(contiguous=("out",), live={"rows": "counts"}), check=check, cost=Cost(cost, flops), bars=Bars("F", whole=True),
)  # fmt: skip
