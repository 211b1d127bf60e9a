"""Products over groups of the inner dimension: y[e] = a[:, t] @ b[t, :], t the tokens of group e. These are gradients of
matrices that groups of rows were multiplied with.

In FP8 every 128 tokens of a row of `a` and of a column of `b` have a scale, as `grouped_rows` has it, or those of a group have
one. What was there before may be added: y[e] + beta * c[e], for gradients that are summed over micro-batches.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_ends
from ..core.draw import Draw
from ..core.tensor import cdiv, piece_count, power_of_two
from ..device.matrices import Matrices
from ..device.products import multiply, multiply_codes, multiply_scaled
from ..op import Bars, Cost, Op, Out, Triton, single, upcast
from ..runtime.kernel import kernel
from .hopper import grouped_inner as hopper_grouped_inner
from .hopper import wgrad as hopper_wgrad
from .operands import DTYPES, OutDtype, result_row
from .tiles import ROWS, group_of, group_range, matrices, matrix, operands_for_kernel, rounded_ends, stages

Scales = Literal["BlockWise1x128", "RowWise"]


def grouped_product(a: Tensor, b: Tensor, ends: Tensor, experts: int) -> Tensor:
    group = group_of(ends, a.shape[1])
    parts = [torch.where(group == e, a, 0.0) @ torch.where((group == e)[:, None], b, 0.0) for e in range(experts)]
    return torch.stack(parts)


def added(y: Tensor, c: Tensor | None, beta: float) -> Tensor:
    return y if c is None or beta == 0.0 else y + beta * upcast(c)


def reference(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    c: Tensor | None = None,
    beta: float = 0.0,
    out_dtype: OutDtype | None = None,
) -> Tensor:
    """The product of `a` [rows, tokens] and `b` [tokens, columns] over the tokens of each group, plus `beta * c`.

    The result is [experts, rows, columns], in the dtype of `a` if there is no `out_dtype`. `offsets` [experts] are end tokens of
    the groups. Sums are fp32 and rounded once; an empty group's product is 0. Tokens past the last group are never read. `out` may
    be `c`: fp32 gradients are added up in place with `beta=1.0`.
    """
    y = added(grouped_product(upcast(a), upcast(b), offsets, offsets.shape[0]), c, beta)
    return y.to(a.dtype if out_dtype is None or y.dtype == torch.float64 else DTYPES[out_dtype])


def inputs(draw: Draw) -> dict:
    tokens, rows, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    a, b, offsets = draw.tensor(tokens, rows), draw.tensor(tokens, columns), draw.ends(tokens)
    return {"a": a.t(), "b": b, "offsets": offsets, **draw_c(draw, offsets, rows, columns, draw.dtype)}


def draw_c(draw: Draw, offsets: Tensor, rows: int, columns: int, dtype: torch.dtype) -> dict:
    out_dtype, E = draw.option("out_dtype", "float32", "bfloat16"), offsets.shape[0]
    dtype = dtype if dtype == torch.float64 else DTYPES[out_dtype]
    c = draw.maybe("c", lambda: draw.tensor(E, rows, columns, dtype=dtype))
    return {"c": c, "beta": draw.option("beta", 0.5, 0.0), "out_dtype": out_dtype}


def reference_fp8(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    *,
    recipe: Scales = "BlockWise1x128",
    c: Tensor | None = None,
    beta: float = 0.0,
    out_dtype: OutDtype = "float32",
) -> Tensor:
    """The same of FP8 codes: `scale_a` [tokens / 128, rows] and `scale_b` [tokens / 128, columns], as `fp8("1x128")` has them
    column-wise; rounded once to `out_dtype`. Groups are whole blocks of 128 tokens: an end that 128 does not divide is taken up to
    the next block's.

    With `recipe="RowWise"` every group has scales of its own, as `fp8("row")` has them column-wise: `scale_a` [experts, rows] and
    `scale_b` [experts, columns]. Groups then end anywhere.
    """
    if recipe == "RowWise":
        y = grouped_product(upcast(a), upcast(b), offsets, offsets.shape[0])
        y = y * upcast(scale_a)[:, :, None] * upcast(scale_b)[:, None, :]
    else:
        wide_a = upcast(a) * upcast(scale_a).t().repeat_interleave(ROWS, 1)[:, : a.shape[1]]
        wide_b = upcast(b) * upcast(scale_b).repeat_interleave(ROWS, 0)[: b.shape[0]]
        y = grouped_product(wide_a, wide_b, rounded_ends(offsets, a.shape[1], ROWS), offsets.shape[0])
    y = added(y, c, beta)
    return y if y.dtype == torch.float64 else y.to(DTYPES[out_dtype])


def inputs_fp8(draw: Draw) -> dict:
    tokens, rows, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    code, offsets, recipe = torch.float8_e4m3fn, draw.ends(tokens), draw.option("recipe", "BlockWise1x128", "RowWise")
    blocks = cdiv(tokens, ROWS) if recipe == "BlockWise1x128" else offsets.shape[0]
    return {
        "a": draw.tensor(rows, tokens, dtype=code, scale=20.0),
        "scale_a": draw.uniform(blocks, rows, low=0.01, high=0.1, dtype=torch.float32),
        "b": draw.tensor(columns, tokens, dtype=code, scale=20.0).t(),
        "scale_b": draw.uniform(blocks, columns, low=0.01, high=0.1, dtype=torch.float32),
        "offsets": offsets,
        "recipe": recipe,
        **draw_c(draw, offsets, rows, columns, torch.float32),
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _shape(a) -> dict:
    wide, BLOCK_K, most = max(a.A.data.element_size(), a.B.data.element_size()), 64, 128
    if (
        max(a.PIECES_A, a.PIECES_B) > 1
    ):  # all pieces of a step live in registers, and beside the operands in shared memory
        wide, BLOCK_K, most = 2 * wide, 32, 64
    M, N = max(16, min(most, power_of_two(a.M))), max(16, min(most, power_of_two(a.N)))
    bytes_a_step = BLOCK_K * (M + N) * wide
    STAGES = stages(a.A.data.device, bytes_a_step)
    return {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_K": BLOCK_K, "STAGES": STAGES, "num_warps": 8}


def _shape_fp8(a) -> dict:
    # Widened codes take more registers, and so do codes that are loaded one by one since groups begin anywhere
    most = 128 if a.NATIVE and not a.ROWWISE else 64
    M, N = max(16, min(most, power_of_two(a.M))), max(16, min(most, power_of_two(a.N)))
    return {"BLOCK_M": M, "BLOCK_N": N, "STAGES": stages(a.A.data.device, 128 * (M + N)), "num_warps": 8}


GRID = {"grid": lambda a: (cdiv(a.M, a.BLOCK_M) * cdiv(a.N, a.BLOCK_N), a.E)}


@triton.jit
def store_sum(y, Y, C, beta, e, row, col, M, N):
    """y + beta * C[e] into Y[e], which C may be."""
    to = Y.data + e.to(tl.int64) * Y.stride_e
    if C.data is not None:
        at = C.data + e.to(tl.int64) * C.stride_e
    r, c = row.to(tl.int64)[:, None], col.to(tl.int64)[None, :]
    inside = (row < M)[:, None] & (col < N)[None, :]
    if C.data is not None:
        y += beta * tl.load(at + r * C.stride_r + c * C.stride_c, inside, 0.0).to(tl.float32)
    tl.store(to + r * Y.stride_r + c * Y.stride_c, y.to(Y.data.dtype.element_ty), inside)


@kernel(**GRID, tokens=("T", "E"), default=_shape)
def grouped_inner(
    A, B, OFFSETS, Y, C, beta, T, M, N, E, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1)
    start, end = group_range(e, OFFSETS, T, 1)
    across = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    y = multiply(
        y, A.data, B.data, row, col, start, end, M, N, A.stride_r, A.stride_c, B.stride_r, B.stride_c, PIECES_A, PIECES_B, BLOCK_K,
        STAGES,
    )  # fmt: skip
    store_sum(y, Y, C, beta, e, row, col, M, N)


# T is specialised: where 16 divides it codes are loaded by words
@kernel(**GRID, tokens=("E",), default=_shape_fp8)
def grouped_inner_fp8(
    A, SA, B, SB, OFFSETS, Y, C, beta, T, M, N, E, ROWWISE: tl.constexpr, NATIVE: tl.constexpr, E5M2_A: tl.constexpr,
    E5M2_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scales are SA [blocks of tokens, M] and SB [blocks of tokens, N], ROWWISE with a group in the place of a block."""
    e = tl.program_id(1)
    start, end = group_range(e, OFFSETS, T, 1 if ROWWISE else 128)
    across = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    if ROWWISE:
        y = multiply_codes(A, B, row, col, start, end, M, N, NATIVE, E5M2_A, E5M2_B, BLOCK_M, BLOCK_N, STAGES)
        sa = tl.load(SA.data + e.to(tl.int64) * SA.stride_r + row.to(tl.int64) * SA.stride_c, row < M, 0.0)
        sb = tl.load(SB.data + e.to(tl.int64) * SB.stride_r + col.to(tl.int64) * SB.stride_c, col < N, 0.0)
        y = y * sa[:, None] * sb[None, :]
    else:
        y = multiply_scaled(
            A, B, SA, SB, row, col, start, end, M, N, T, 1, NATIVE, E5M2_A, E5M2_B, BLOCK_M, BLOCK_N, STAGES
        )  # fmt: skip
    store_sum(y, Y, C, beta, e, row, col, M, N)


# ---- host ------------------------------------------------------------------------------------------------------------


def addend(c: Tensor | None, beta: float) -> Matrices:
    """What is to be added. Where beta is 0 nothing is, whatever c holds."""
    return matrices(None if beta == 0.0 else c)


def forward(a, b, offsets, *, c, beta, out_dtype, out) -> Tensor:
    (M, T), N, E = a.shape, b.shape[1], offsets.shape[0]
    check_ends("grouped_mm_inner", "offsets", offsets, T)
    y = out
    if y is None:
        y = torch.empty(E, M, N, dtype=a.dtype if out_dtype is None else DTYPES[out_dtype], device=a.device)
    if y.numel():
        grouped_inner(
            matrix(a), matrix(b), offsets.contiguous(), matrices(y), addend(c, beta), beta, T, M, N, E,
            PIECES_A=piece_count(a, b), PIECES_B=piece_count(b, a),
        )  # fmt: skip
    return y


def forward_fp8(a, scale_a, b, scale_b, offsets, *, recipe, c, beta, out_dtype, out) -> Tensor:
    (M, T), N, E = a.shape, b.shape[1], offsets.shape[0]
    check_ends("grouped_mm_inner_fp8", "offsets", offsets, T)
    y = torch.empty(E, M, N, dtype=DTYPES[out_dtype], device=a.device) if out is None else out
    if y.numel():
        A, B, how = operands_for_kernel(a, b)
        grouped_inner_fp8(
            matrix(A), matrix(scale_a), matrix(B), matrix(scale_b), offsets.contiguous(), matrices(y), addend(c, beta), beta, T, M,
            N, E, ROWWISE=recipe == "RowWise", **how,
        )  # fmt: skip
    return y


def check(a, b, offsets, *, c, beta, out_dtype) -> None:
    check_tokens("grouped_mm_inner", a)


def check_tokens(op: str, a: Tensor) -> None:
    if a.shape[1] >= 2**31 - ROWS:
        raise ValueError(f"{op}: a must have fewer than 2**31 - {ROWS} tokens, got {a.shape[1]}")


def check_fp8(a, scale_a, b, scale_b, offsets, *, recipe, c, beta, out_dtype) -> None:
    op = "grouped_mm_inner_fp8"
    check_tokens(op, a)
    blocks, experts = cdiv(a.shape[1], ROWS), offsets.shape[0]
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if recipe == "RowWise" and scale.shape[0] != experts:
            raise ValueError(f"{op}: {name} has {scale.shape[0]} rows, but there are {experts} groups")
        if recipe != "RowWise" and scale.shape[0] < blocks:
            raise ValueError(f"{op}: {name} has {scale.shape[0]} rows, but there are {blocks} blocks of tokens")


def flops(a, b, **_) -> int:
    return 2 * a.numel() * b.shape[1]


OVER_C = Out(lies_on={"out": ("c",)})
grouped_mm_inner = Op(
    "grouped_mm_inner", reference, inputs,
    Triton(hopper_grouped_inner.forward, None, hopper_grouped_inner.fits, "hopper", out=True),
    Triton(forward, None, single, "portable", out=True),
    groups="offsets", where={
        "a": "float[rows tokens]", "b": "float[tokens columns]", "offsets": "int[experts+]",
        "c": "float[experts+ rows columns]",
    },
    results={"out": result_row("experts rows columns")},
    check=check, cost=Cost(flops=flops), out=OVER_C, bars=Bars("E", whole=True),
)  # fmt: skip
grouped_mm_inner_fp8 = Op(
    "grouped_mm_inner_fp8", reference_fp8, inputs_fp8,
    Triton(hopper_wgrad.forward, None, hopper_wgrad.fits, "hopper", out=True),
    Triton(forward_fp8, None, single, "portable", out=True),
    groups="offsets", where={
        "a": "codes[rows tokens]", "scale_a": "float32[blocks rows]", "b": "codes[tokens columns]",
        "scale_b": "float32[blocks columns]", "offsets": "int[experts+]", "c": "float[experts+ rows columns]",
    },
    results={"out": lambda a: f"{a.out_dtype}[experts rows columns]"},
    check=check_fp8, cost=Cost(flops=flops), out=OVER_C, bars=Bars("F", whole=True),
)  # fmt: skip
