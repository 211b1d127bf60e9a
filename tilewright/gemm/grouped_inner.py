"""Products over groups of the inner dimension: y[e] = a[:, t] @ b[t, :], t the tokens of group e. These are gradients of
matrices that groups of rows were multiplied with.

In FP8 every 128 tokens of a row of `a` and of a column of `b` have a scale, as `grouped_rows` has it.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from ..core.debug import check_ends
from ..core.draw import Draw
from ..core.kernel import kernel
from ..core.op import Op, Triton, single, upcast
from ..core.tensor import cdiv, pieces, power_of_two
from ..device.products import multiply, multiply_scaled
from . import hopper_inner
from .tiles import ROWS, codes, group_of, group_range, rounded, stages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Out = Literal["float32", "bfloat16", "float16"]


def by_group(a: Tensor, b: Tensor, ends: Tensor, experts: int) -> Tensor:
    group = group_of(ends, a.shape[1])
    parts = [torch.where(group == e, a, 0.0) @ torch.where((group == e)[:, None], b, 0.0) for e in range(experts)]
    return torch.stack(parts)


def reference(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """For each group of tokens `a` [rows, tokens] times `b` [tokens, columns]: [experts, rows, columns], in the dtype of `a`.

    `offsets` [experts] are end tokens of the groups. fp32 sums, rounded once; an empty group's product is 0. Tokens past the
    last group are never read.
    """
    return by_group(upcast(a), upcast(b), offsets, offsets.shape[0]).to(a.dtype)


def inputs(draw: Draw) -> dict:
    tokens, rows, columns = draw.dim("tokens"), draw.dim("hidden"), draw.option("columns", 64, 33, 130)
    a, b = draw.tensor(tokens, rows), draw.tensor(tokens, columns)
    return {"a": a.t(), "b": b, "offsets": draw.ends(tokens)}


def reference_fp8(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    *,
    out_dtype: Out = "float32",
) -> Tensor:
    """The same of FP8 codes: `scale_a` [tokens / 128, rows] and `scale_b` [tokens / 128, columns], as `fp8("1x128")` has them
    column-wise; rounded once to `out_dtype`.

    Groups are whole blocks of 128 tokens: an end that 128 does not divide is taken up to the next block's.
    """
    ends = rounded(offsets, a.shape[1], ROWS)
    wide_a = upcast(a) * upcast(scale_a).t().repeat_interleave(ROWS, 1)[:, : a.shape[1]]
    wide_b = upcast(b) * upcast(scale_b).repeat_interleave(ROWS, 0)[: b.shape[0]]
    dtype = torch.float64 if wide_a.dtype == torch.float64 else DTYPES[out_dtype]
    return by_group(wide_a, wide_b, ends, offsets.shape[0]).to(dtype)


def inputs_fp8(draw: Draw) -> dict:
    tokens, rows, columns = draw.dim("tokens"), draw.dim("hidden"), draw.option("columns", 64, 33, 130)
    code, blocks = torch.float8_e4m3fn, cdiv(tokens, ROWS)
    return {
        "a": draw.tensor(rows, tokens, dtype=code, scale=20.0),
        "scale_a": draw.uniform(blocks, rows, low=0.01, high=0.1, dtype=torch.float32),
        "b": draw.tensor(columns, tokens, dtype=code, scale=20.0).t(),
        "scale_b": draw.uniform(blocks, columns, low=0.01, high=0.1, dtype=torch.float32),
        "offsets": draw.ends(tokens),
        "out_dtype": draw.option("out_dtype", *DTYPES),
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _shape(a) -> dict:
    wide, BLOCK_K, most = max(a.A.element_size(), a.B.element_size()), 64, 128
    if (
        max(a.PIECES_A, a.PIECES_B) > 1
    ):  # all pieces of a step live in registers, and beside the operands in shared memory
        wide, BLOCK_K, most = 2 * wide, 32, 64
    M, N = max(16, min(most, power_of_two(a.M))), max(16, min(most, power_of_two(a.N)))
    bytes_a_step = BLOCK_K * (M + N) * wide
    STAGES = stages(a.A.device, bytes_a_step)
    return {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_K": BLOCK_K, "STAGES": STAGES, "num_warps": 8}


def _shape_fp8(a) -> dict:
    most = 128 if a.NATIVE else 64  # widened codes take more registers
    M, N = max(16, min(most, power_of_two(a.M))), max(16, min(most, power_of_two(a.N)))
    return {"BLOCK_M": M, "BLOCK_N": N, "STAGES": stages(a.A.device, 128 * (M + N)), "num_warps": 8}


GRID = {"grid": lambda a: (cdiv(a.M, a.BLOCK_M) * cdiv(a.N, a.BLOCK_N), a.E)}


@kernel(**GRID, tokens=("T", "E"), default=_shape)
def grouped_inner(
    A, B, OFFSETS, Y, T, M, N, E, stride_am, stride_at, stride_bt, stride_bn, stride_ye, stride_ym, stride_yn,
    PIECES_A: tl.constexpr, PIECES_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1)
    start, end = group_range(e, OFFSETS, T, 1)
    across = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    y = multiply(
        y,
        A,
        B,
        row,
        col,
        start,
        end,
        M,
        N,
        stride_am,
        stride_at,
        stride_bt,
        stride_bn,
        PIECES_A,
        PIECES_B,
        BLOCK_K,
        STAGES,
    )
    at = Y + e.to(tl.int64) * stride_ye + row.to(tl.int64)[:, None] * stride_ym + col.to(tl.int64)[None, :] * stride_yn
    tl.store(at, y.to(Y.dtype.element_ty), (row < M)[:, None] & (col < N)[None, :])


# T is specialised: where 16 divides it codes are loaded by words
@kernel(**GRID, tokens=("E",), default=_shape_fp8)
def grouped_inner_fp8(
    A, SA, B, SB, OFFSETS, Y, T, M, N, E, stride_am, stride_at, stride_sk, stride_sm, stride_bt, stride_bn, stride_sbk,
    stride_sn,
    NATIVE: tl.constexpr, E5M2_A: tl.constexpr, E5M2_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1)
    start, end = group_range(e, OFFSETS, T, 128)
    across = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    y = multiply_scaled(
        A, B, SA, SB, row, col, start, end, M, N, T, stride_am, stride_at, stride_bt, stride_bn, stride_sk, stride_sm, stride_sbk,
        stride_sn, 1, NATIVE, E5M2_A, E5M2_B, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    at = Y + (e.to(tl.int64) * M + row)[:, None] * N + col[None, :]
    tl.store(at, y.to(Y.dtype.element_ty), (row < M)[:, None] & (col < N)[None, :])


# ---- host ------------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, offsets: Tensor, y: Tensor) -> None:
    """Fill y [experts, rows, columns], of any strides."""
    (M, T), N, E = a.shape, b.shape[1], offsets.shape[0]
    check_ends("grouped_mm_inner", "offsets", offsets, T)
    if y.numel():
        grouped_inner(
            a, b, offsets.contiguous(), y, T, M, N, E, *a.stride(), *b.stride(), *y.stride(),
            PIECES_A=pieces(a, b), PIECES_B=pieces(b, a),
        )  # fmt: skip


def gradient_of_matrices(a: Tensor, dy: Tensor, offsets: Tensor, b: Tensor) -> Tensor:
    """d(b) of y[m] = a[m] @ b[e], contiguous."""
    db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    product(a.t(), dy, offsets, db)
    return db


def forward(a, b, offsets) -> Tensor:
    y = torch.empty(offsets.shape[0], a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    product(a, b, offsets, y)
    return y


def forward_fp8(a, scale_a, b, scale_b, offsets, *, out_dtype) -> Tensor:
    (M, T), N, E = a.shape, b.shape[1], offsets.shape[0]
    check_ends("grouped_mm_inner_fp8", "offsets", offsets, T)
    y = torch.empty(E, M, N, dtype=DTYPES[out_dtype], device=a.device)
    if y.numel():
        A, B, how = codes(a, b)
        grouped_inner_fp8(
            A, scale_a, B, scale_b, offsets.contiguous(), y, T, M, N, E, *a.stride(), *scale_a.stride(), *b.stride(),
            *scale_b.stride(), **how,
        )  # fmt: skip
    return y


def check(a, b, offsets) -> None:
    check_tokens("grouped_mm_inner", a)


def check_tokens(op: str, a: Tensor) -> None:
    if a.shape[1] >= 2**31 - ROWS:
        raise ValueError(f"{op}: a must have fewer than 2**31 - {ROWS} tokens, got {a.shape[1]}")


def check_fp8(a, scale_a, b, scale_b, offsets, *, out_dtype) -> None:
    check_tokens("grouped_mm_inner_fp8", a)
    blocks = cdiv(a.shape[1], ROWS)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.shape[0] < blocks:
            raise ValueError(
                f"grouped_mm_inner_fp8: {name} has {scale.shape[0]} rows, but there are {blocks} blocks of tokens"
            )


def flops(a, b, **_) -> int:
    return 2 * a.numel() * b.shape[1]


grouped_mm_inner = Op(
    "grouped_mm_inner", reference, inputs, Triton(forward, None, single),
    where={"a": "float[rows tokens]", "b": "float[tokens columns]", "offsets": "int[experts]"}, graded_results=(),
    check=check, flops=flops, bars={"class": "E"},
)  # fmt: skip
grouped_mm_inner_fp8 = Op(
    "grouped_mm_inner_fp8", reference_fp8, inputs_fp8, Triton(hopper_inner.forward, None, hopper_inner.fits, "hopper"),
    Triton(forward_fp8, None, single, "portable"),
    where={
        "a": "codes[rows tokens]", "scale_a": "float32[blocks rows]", "b": "codes[tokens columns]",
        "scale_b": "float32[blocks columns]", "offsets": "int[experts]",
    },
    graded_results=(), check=check_fp8, flops=flops, bars={"class": "F"},
)  # fmt: skip
