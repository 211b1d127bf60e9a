"""Products of groups of rows, each with a matrix of its own: y[m] = a[m] @ b[e] for the rows m of group e.

In FP8 every 128 columns of a row of `a` have a scale, and every 128x128 block of `b`: for each block of the inner dimension
the codes are multiplied and summed in the tensor cores and that sum, times both scales, is added up in fp32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.kernel import kernel
from ..core.op import Op, Triton, single, upcast
from ..core.tensor import cdiv, pieces, power_of_two
from ..device.products import multiply, multiply_scaled
from . import hopper_rows
from .grouped_inner import gradient_of_matrices
from .tiles import BAND, ROWS, codes, group_of, stages, tile_list, tile_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Out = Literal["bfloat16", "float16", "float32"]


def by_group(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Rows of `a` times the matrix of their group, 0 where there is none."""
    group = group_of(offsets, a.shape[0])[:, None]
    y = a.new_zeros(a.shape[0], b.shape[2])
    for e in range(b.shape[0]):
        y = torch.where(group == e, a @ b[e], y)
    return y


def reference(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Rows of `a` [rows, inner] times the matrix of their group in `b` [experts, inner, columns]: as `torch`'s grouped products
    have them, `offsets` [experts] being end rows of the groups.

    fp32 sums, rounded once. Rows past the last group are unspecified. `b` may lie in memory either way; fastest is what
    `weight.transpose(1, 2)` of [experts, columns, inner] gives.
    """
    return by_group(upcast(a), upcast(b), offsets).to(a.dtype)


def inputs(draw: Draw) -> dict:
    rows, inner, columns = draw.dim("tokens"), draw.dim("hidden"), draw.option("columns", 64, 33, 130)
    offsets = draw.ends(rows)
    shape = (offsets.shape[0], inner, columns)
    if draw.option("transposed", True, False):
        b = draw.tensor(shape[0], columns, inner, scale=0.1).transpose(1, 2)
    else:
        b = draw.tensor(*shape, scale=0.1)
    return {"a": draw.tensor(rows, inner), "b": b, "offsets": offsets}


def scaled(values: Tensor, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Codes times their scales, each of which is for 128 of them along every dimension in `dims`."""
    for dim in dims:
        scale = scale.repeat_interleave(ROWS, dim).narrow(dim, 0, values.shape[dim])
    return upcast(values) * scale


def reference_fp8(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    *,
    out_dtype: Out = "bfloat16",
) -> Tensor:
    """The same of FP8 codes: `scale_a` [inner / 128, rows] for `a`, `scale_b` [experts, columns / 128, inner / 128] for `b`, as
    `fp8("1x128")` and `fp8("128x128")` have them; sizes that 128 does not divide are rounded up.

    fp32 sums of whole blocks, rounded once to `out_dtype`. Rows past the last group are unspecified.
    """
    wide_a = scaled(a, upcast(scale_a).t(), (1,))
    wide_b = scaled(b, upcast(scale_b).transpose(1, 2), (1, 2))
    dtype = torch.float64 if wide_a.dtype == torch.float64 else DTYPES[out_dtype]
    return by_group(wide_a, wide_b, offsets).to(dtype)


def inputs_fp8(draw: Draw) -> dict:
    rows, inner, columns = draw.dim("tokens"), draw.dim("hidden"), draw.option("columns", 64, 33, 130)
    code = torch.float8_e4m3fn
    offsets = draw.ends(rows)
    E, across, down = offsets.shape[0], cdiv(inner, ROWS), cdiv(columns, ROWS)
    return {
        "a": draw.tensor(rows, inner, dtype=code, scale=20.0),
        "scale_a": draw.uniform(across, rows, low=0.01, high=0.1, dtype=torch.float32),
        "b": draw.tensor(E, columns, inner, dtype=code, scale=20.0).transpose(1, 2),
        "scale_b": draw.uniform(E, down, across, low=0.01, high=0.1, dtype=torch.float32),
        "offsets": offsets,
        "out_dtype": draw.option("out_dtype", *DTYPES),
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _shape(a) -> dict:
    wide = max(a.A.element_size(), a.B.element_size())
    BLOCK_N, BLOCK_K = max(16, min(128, power_of_two(a.N))), 64
    if (
        max(a.PIECES_A, a.PIECES_B) > 1
    ):  # all pieces of a step live in registers, and beside the operands in shared memory
        BLOCK_N, BLOCK_K, wide = min(64, BLOCK_N), 32, 2 * wide
    bytes_a_step = BLOCK_K * (ROWS + BLOCK_N) * wide
    return {"BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "STAGES": stages(a.A.device, bytes_a_step), "num_warps": 8}


def _shape_fp8(a) -> dict:
    BLOCK_N = max(16, min(128 if a.NATIVE else 64, power_of_two(a.N)))  # widened codes take more registers
    return {"BLOCK_N": BLOCK_N, "STAGES": stages(a.A.device, 128 * (ROWS + BLOCK_N)), "num_warps": 8}


@kernel(
    grid=lambda a: (a.count * cdiv(a.N, a.BLOCK_N),), tokens=("count",), default=_shape,
)  # fmt: skip
def grouped_rows(
    A, B, TILES, Y, count, N, K, stride_am, stride_ak, stride_be, stride_bk, stride_bn,
    PIECES_A: tl.constexpr, PIECES_B: tl.constexpr,
    BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, across = tile_of(tl.program_id(0), count, tl.cdiv(N, BLOCK_N), BAND)
    group = tl.load(TILES + 4 * tile).to(tl.int64)
    row0 = tl.load(TILES + 4 * tile + 1).to(tl.int64)
    rows = tl.load(TILES + 4 * tile + 2)
    if rows > 0:
        row = tl.arange(0, BLOCK_M)
        col = across * BLOCK_N + tl.arange(0, BLOCK_N)
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        y = multiply(
            y, A + row0 * stride_am, B + group * stride_be, row, col, 0, K, rows, N, stride_am, stride_ak, stride_bk,
            stride_bn, PIECES_A, PIECES_B, BLOCK_K, STAGES,
        )  # fmt: skip
        at = Y + (row0 + row)[:, None] * N + col[None, :]
        tl.store(at, y.to(Y.dtype.element_ty), (row < rows)[:, None] & (col < N)[None, :])


@kernel(
    grid=lambda a: (a.count * cdiv(a.N, a.BLOCK_N),), tokens=("count", "stride_sk"), default=_shape_fp8,
)  # fmt: skip
def grouped_rows_fp8(
    A, SA, B, SB, TILES, Y, count, N, K, stride_am, stride_ak, stride_sk, stride_sm, stride_be, stride_bk, stride_bn,
    stride_se, stride_sn, stride_sbk,
    NATIVE: tl.constexpr, E5M2_A: tl.constexpr, E5M2_B: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, across = tile_of(tl.program_id(0), count, tl.cdiv(N, BLOCK_N), BAND)
    group = tl.load(TILES + 4 * tile).to(tl.int64)
    row0 = tl.load(TILES + 4 * tile + 1).to(tl.int64)
    rows = tl.load(TILES + 4 * tile + 2)
    if rows > 0:
        row = tl.arange(0, BLOCK_M)
        col = across * BLOCK_N + tl.arange(0, BLOCK_N)
        y = multiply_scaled(
            A + row0 * stride_am, B + group * stride_be, SA + row0 * stride_sm, SB + group * stride_se, row, col, 0, K, rows, N,
            K, stride_am, stride_ak, stride_bk, stride_bn, stride_sk, stride_sm, stride_sbk, stride_sn, 128,
            NATIVE, E5M2_A, E5M2_B, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
        at = Y + (row0 + row)[:, None] * N + col[None, :]
        tl.store(at, y.to(Y.dtype.element_ty), (row < rows)[:, None] & (col < N)[None, :])


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(a, b, offsets) -> Tensor:
    (M, K), N = a.shape, b.shape[2]
    y = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if y.numel():
        tiles = tile_list(offsets, M)
        grouped_rows(
            a, b, tiles, y, tiles.shape[0], N, K, *a.stride(), *b.stride(), PIECES_A=pieces(a, b), PIECES_B=pieces(b, a),
            BAND=BAND, BLOCK_M=ROWS,
        )  # fmt: skip
    return y


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    a, b, offsets = saved.a, saved.b, saved.offsets
    da = forward(dy, b.transpose(1, 2), offsets) if "a" in saved.needs else None
    db = None
    if "b" in saved.needs:
        db = gradient_of_matrices(a, dy, offsets, b)
    return da, db


def forward_fp8(a, scale_a, b, scale_b, offsets, *, out_dtype) -> Tensor:
    (M, K), N = a.shape, b.shape[2]
    y = torch.empty(M, N, dtype=DTYPES[out_dtype], device=a.device)
    if y.numel():
        tiles = tile_list(offsets, M)
        A, B, how = codes(a, b)
        grouped_rows_fp8(
            A, scale_a, B, scale_b, tiles, y, tiles.shape[0], N, K, *a.stride(), *scale_a.stride(), *b.stride(),
            *scale_b.stride(), **how, BAND=BAND, BLOCK_M=ROWS,
        )  # fmt: skip
    return y


def check(a, b, offsets) -> None:
    if b.shape[0] != offsets.shape[0]:
        raise ValueError(f"grouped_mm_rows: b has {b.shape[0]} matrices, offsets {offsets.shape[0]} groups")
    check_rows("grouped_mm_rows", a)


def check_rows(op: str, a: Tensor) -> None:
    if a.shape[0] >= 2**31 - ROWS:
        raise ValueError(f"{op}: a must have fewer than 2**31 - {ROWS} rows, got {a.shape[0]}")


def check_fp8(a, scale_a, b, scale_b, offsets, *, out_dtype) -> None:
    op = "grouped_mm_rows_fp8"
    check_rows(op, a)
    inner, down = cdiv(a.shape[1], ROWS), cdiv(b.shape[2], ROWS)
    if scale_a.shape[0] != inner:
        raise ValueError(f"{op}: scale_a has {scale_a.shape[0]} rows, but a has {inner} blocks of 128 columns")
    if tuple(scale_b.shape[1:]) != (down, inner):
        raise ValueError(f"{op}: scale_b is {list(scale_b.shape)}, but b has {down} by {inner} blocks of 128x128")


def flops(a, b, **_) -> int:
    return 2 * a.numel() * b.shape[2]


WHERE = {"a": "float[tokens inner]", "b": "float[experts inner columns]", "offsets": "int[experts]"}
grouped_mm_rows = Op(
    "grouped_mm_rows", reference, inputs, Triton(forward, backward, single), where=WHERE, differentiable=("a", "b"),
    check=check, flops=flops, bars={"class": "E", "gradient": "E"},
)  # fmt: skip
grouped_mm_rows_fp8 = Op(
    "grouped_mm_rows_fp8", reference_fp8, inputs_fp8, Triton(hopper_rows.forward, None, hopper_rows.fits, "hopper"),
    Triton(forward_fp8, None, single, "portable"),
    where={
        "a": "codes[tokens inner]", "scale_a": "float32[inner_blocks tokens]", "b": "codes[experts inner columns]",
        "scale_b": "float32[experts column_blocks blocks]", "offsets": "int[experts]",
    },
    graded_results=(), check=check_fp8, flops=flops, bars={"class": "F"},
)  # fmt: skip
