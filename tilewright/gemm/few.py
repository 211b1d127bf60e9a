"""Products of few rows, on any chip: `scaled_mm` of up to 64 rows.

Few rows are bound by reading `b`, whose columns are the first factor here, y.T = b.T @ a.T: tensor cores want 64 rows of that
one, and as few as 8 columns of the other. Where the columns make too few programs to keep memory busy, each has a part of the
inner dimension; the parts are added up in their order.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.activation import activate
from ..device.dependent import begin_dependent
from ..device.load import four_bits, load_operand
from ..device.matrices import Added, Factor, Matrix, Strides
from ..op import single
from ..runtime.kernel import Arguments, kernel
from .operands import BLOCKS, DTYPES, inner_of, kind_of
from .tiles import matrix, stages

MOST = 64  # rows; with more, products of whole tiles are as fast
COLUMNS = 64  # of a tile
LEAST = 8  # blocks of 128 that a part of the inner dimension has: fewer are over before memory is busy
# Blocks of 128 that are copied ahead, by how many programs an SM has in all: measured on an H200 over 1 to 16 rows. One alone needs
# more of them to keep memory busy, three run at a time only if each has few.
AHEAD = {1: 6, 2: 4, 3: 3}
FEWEST = 8  # rows up to which parts are so small that two of them pay where one leaves a quarter of the SMs idle
ALONG = ("BlockWise1x128", "BlockWise128x128")  # scales that change along the inner dimension


def splits_for(tiles: int, blocks: int, sms: int, least: int = LEAST) -> int:
    """How many parts, none of them empty, the inner dimension is cut into so that there is a program for every SM."""
    if 2 * tiles > sms:
        return 1
    parts = min(sms // tiles, blocks // least)
    return cdiv(blocks, cdiv(blocks, parts)) if parts > 1 else 1


def parts_for(rows: int, tiles: int, blocks: int, sms: int) -> int:
    """`splits_for` of products of few rows."""
    halves = rows <= FEWEST and sms < 2 * tiles <= sms * 3 // 2 and blocks >= 2 * LEAST
    return 2 if halves else splits_for(tiles, blocks, sms)


def blocks_ahead(a: Arguments) -> int:
    """STAGES of `small_rows`."""
    device, programs = a.Y.data.device, cdiv(a.N, a.BLOCK_N) * a.parts
    most = AHEAD.get(cdiv(programs, Target.at(device).sms), 4)
    return stages(device, 128 * 2 * (a.BLOCK_M + a.BLOCK_N), most)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def sum_blocks(
    A, B, row, col, first, end, M, N, K, STRIDES_SA, STRIDES_SB, KIND_A: tl.constexpr, KIND_B: tl.constexpr, MATH: tl.constexpr,
    DOWN: tl.constexpr, ALONG_A: tl.constexpr, ALONG_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums [columns, rows] of factors A [M, K] and B [N, K] over blocks of 128 of the inner dimension from `first` to `end`. Scales
    that change along it are multiplied in: ALONG_A and ALONG_B; one of B, and a zero point, is for DOWN columns."""
    HALVES: tl.constexpr = four_bits(KIND_A) or four_bits(KIND_B)
    SUM: tl.constexpr = tl.int32 if MATH == "int8" else tl.float32
    if B.scale is not None:
        scaled = (col // DOWN).to(tl.int64) * STRIDES_SB.r
    total = tl.zeros([col.shape[0], row.shape[0]], tl.float32 if ALONG_A or ALONG_B else SUM)
    for block in tl.range(first, end, num_stages=STAGES):
        at = tl.multiple_of(block * 128, 128)
        zero = None
        if B.zero is not None:
            zero = tl.load(B.zero + scaled + block.to(tl.int64) * STRIDES_SB.k, col < N, 0.0)[:, None]
        b, b_odd = load_operand(
            B.codes, None, col, at, N, K, B.stride_r, B.stride_k, 0, 0, zero, KIND_B, 0, MATH, HALVES, 128
        )  # fmt: skip
        a, a_odd = load_operand(
            A.codes, None, row, at, M, K, A.stride_r, A.stride_k, 0, 0, None, KIND_A, 0, MATH, HALVES, 128
        )  # fmt: skip
        part = tl.dot(b, a.T, out_dtype=SUM)
        if HALVES:
            part = tl.dot(b_odd, a_odd.T, part, out_dtype=SUM)
        if ALONG_A or ALONG_B:
            part = part.to(tl.float32)
        if ALONG_A:
            at_a = A.scale + row.to(tl.int64) * STRIDES_SA.r + block.to(tl.int64) * STRIDES_SA.k
            part *= tl.load(at_a, row < M, 0.0)[None, :]
        if ALONG_B:
            part *= tl.load(B.scale + scaled + block.to(tl.int64) * STRIDES_SB.k, col < N, 0.0)[:, None]
        total += part
    return total


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK_N), a.parts),
    tokens=("M", "per", "parts", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk"),
    default=lambda a: {"STAGES": blocks_ahead(a), "num_warps": 4},
    dependent=True,
)  # fmt: skip
def small_rows(
    A, B, Y, ADDED, M, N, K, per, parts, stride_sam, stride_sak, stride_sbn, stride_sbk, KIND_A: tl.constexpr,
    KIND_B: tl.constexpr, MATH: tl.constexpr, DOWN: tl.constexpr, ALONG_A: tl.constexpr, ALONG_B: tl.constexpr,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Columns of Y [parts, M, N] from factors A [M, K] and B [N, K], of `per` blocks of the inner dimension for each part."""
    begin_dependent(DEPENDENT)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * per
    end = tl.minimum(first + per, tl.cdiv(K, 128))
    y = sum_blocks(
        A, B, row, col, first, end, M, N, K, Strides(stride_sam, stride_sak), Strides(stride_sbn, stride_sbk), KIND_A, KIND_B,
        MATH, DOWN, ALONG_A, ALONG_B, STAGES,
    ).to(tl.float32)  # fmt: skip
    if A.scale is not None and not ALONG_A:
        y *= tl.load(A.scale + row.to(tl.int64) * stride_sam, row < M, 0.0)[None, :]
    if B.scale is not None and not ALONG_B:
        y *= tl.load(B.scale + (col // DOWN).to(tl.int64) * stride_sbn, col < N, 0.0)[:, None]
    inside = (col < N)[:, None] & (row < M)[None, :]
    if ADDED.bias is not None:
        y += tl.load(ADDED.bias + col, col < N, 0.0).to(tl.float32)[:, None]
    C = ADDED.c
    if C.data is not None:
        at = C.data + row.to(tl.int64)[None, :] * C.stride_r + col.to(tl.int64)[:, None] * C.stride_c
        y += tl.load(at, inside, 0.0).to(tl.float32) * ADDED.beta
    if ACT is not None:
        y = activate(y, 1.0, ACT)
    at = Y.data + part.to(tl.int64) * M * N
    at = at + row.to(tl.int64)[None, :] * Y.stride_r + col.to(tl.int64)[:, None] * Y.stride_c
    tl.store(at, y.to(Y.data.dtype.element_ty), inside)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK), a.M), tokens=("M", "parts"),
    default=lambda a: {"BLOCK": 512, "num_warps": 4}, dependent=True,
)  # fmt: skip
def small_add_parts(
    P,
    Y,
    BIAS,
    ADD,
    M,
    N,
    parts,
    stride_ym,
    stride_yn,
    stride_cm,
    stride_cn,
    beta,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """act(the sum of P[parts, M, N] over its parts, in their order, + bias + beta * c)."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < N
    y = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        y += tl.load(P + (part.to(tl.int64) * M + row) * N + col, inside, 0.0)
    if BIAS is not None:
        y += tl.load(BIAS + col, inside, 0.0).to(tl.float32)
    if ADD is not None:
        y += tl.load(ADD + row * stride_cm + col.to(tl.int64) * stride_cn, inside, 0.0).to(tl.float32) * beta
    if ACT is not None:
        y = activate(y, 1.0, ACT)
    tl.store(Y + row * stride_ym + col.to(tl.int64) * stride_yn, y.to(Y.dtype.element_ty), inside)


# ---- host ------------------------------------------------------------------------------------------------------------


def add_parts(parts: Tensor, y: Tensor, bias: Tensor | None, add: Tensor | None, beta: float, act: str | None) -> None:
    """Add up parts [parts, M, N] into y, with what follows the product, by `small_add_parts`."""
    small_add_parts(
        parts, y, None if bias is None else bias.contiguous(), add, *y.shape, parts.shape[0], *y.stride(),
        *((0, 0) if add is None else add.stride()), beta, ACT=act,
    )  # fmt: skip


def math_of(kind_a: str, kind_b: str, a: Tensor) -> str | None:
    """What these kernels multiply (`device/load.py`), None where they do not."""
    if kind_a == "float":
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[a.dtype] if kind_b != "e2m1" else None
    if {kind_a, kind_b} <= {"int8", "int4"}:
        return "int8"
    if {kind_a, kind_b} <= {"e4m3", "e5m2"}:
        return "fp8" if Target.at(a.device).fp8 else "bf16"
    return None


def codes_for_math(codes: Tensor, math: str) -> Tensor:
    """Codes as kernels take them: FP8 as bytes unless it is FP8 that is multiplied."""
    return (
        codes.view(torch.uint8) if codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and math != "fp8" else codes
    )


def strides_of(scale: Tensor | None) -> list[int]:
    """The strides of a scale, 0 along a dimension of one element: that scale is for all."""
    return [0, 0] if scale is None else [stride if size > 1 else 0 for size, stride in zip(scale.shape, scale.stride())]


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether there are up to 64 rows, and scales are for 128 elements, for rows or for the whole; `a` may be plain numbers. Zero
    points must lie as their scales do."""
    kinds = kind_of(a.a, a.recipe_a), kind_of(a.b.t(), a.recipe_b)
    known = all(r is None or r in (*ALONG, "RowWise", "TensorWise") for r in (a.recipe_a, a.recipe_b))
    if not known or a.out_format is not None or a.a.shape[0] > MOST or a.accumulate != "full" or not single(target, a):
        return False
    if "e2m1" in kinds or {"int8", "int4"} & {kinds[0]} and kinds[1] not in ("int8", "int4"):
        return False
    if a.zero_b is not None and a.zero_b.stride() != a.scale_b.stride():
        return False
    return a.b.shape[1] < 2**31 - COLUMNS and inner_of(a.a) < 2**31 - 128


def forward(a, b, scale_a, scale_b, recipe_a, recipe_b, *, zero_b, bias, act, c, beta, out_dtype, out, **_) -> Tensor:
    (M, K), N = (a.shape[0], inner_of(a)), b.shape[1]
    y = torch.empty(M, N, dtype=DTYPES[out_dtype], device=a.device) if out is None else out
    if not y.numel():
        return y
    kind_a, kind_b = kind_of(a, recipe_a), kind_of(b.t(), recipe_b)
    math = math_of(kind_a, kind_b, a)
    blocks, add = cdiv(K, 128), None if beta == 0.0 else c
    parts = parts_for(M, cdiv(N, COLUMNS), blocks, Target.at(a.device).sms)
    later = parts > 1
    target = torch.empty(parts, M, N, dtype=torch.float32, device=a.device) if later else y
    added = Added(None if bias is None or later else bias.contiguous(), matrix(None if later else add), beta)
    A = Factor(codes_for_math(a, math), *a.stride(), scale_a)
    B = Factor(codes_for_math(b, math), *b.t().stride(), scale_b, zero_b)
    small_rows(
        A, B, Matrix(target, *target.stride()[-2:]), added, M, N, K, cdiv(blocks, parts), parts, *strides_of(scale_a),
        *strides_of(scale_b),
        KIND_A=kind_a, KIND_B=kind_b, MATH=math, DOWN=max(1, BLOCKS[recipe_b][0]) if recipe_b else 1,
        ALONG_A=recipe_a in ALONG, ALONG_B=recipe_b in ALONG, ACT=None if later else act,
        BLOCK_M=max(16, power_of_two(M)), BLOCK_N=COLUMNS,
    )  # fmt: skip
    if later:
        add_parts(target, y, bias, add, beta, act)
    return y
