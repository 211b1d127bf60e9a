"""Products of groups of rows, each with a matrix of its own: y[m] = a[m] @ b[e] for the rows m of group e.

In FP8 every 128 columns of a row of `a` have a scale, and every 128x128 block of `b`: for each block of the inner dimension
the codes are multiplied and summed in the tensor cores and that sum, times both scales, is added up in fp32.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.target import Target
from ..core.tensor import cdiv, name_of, piece_count, power_of_two
from ..device.matrices import Matrices, Matrix
from ..device.products import multiply, multiply_scaled
from ..op import Bars, Cost, Gradient, Op, Out, Triton, single, upcast
from ..runtime.kernel import kernel
from .epilogue import columns_of, store_finished
from .grouped_inner import grouped_mm_inner
from .hopper import grouped_rows as hopper
from .hopper import grouped_rows_fp8 as hopper_fp8
from .operands import DTYPES, OutDtype, result_row
from .scaled_mm import ACTS, Act
from .tiles import (
    BAND,
    ROWS,
    group_of,
    matrices,
    matrix,
    operands_for_kernel,
    stages,
    tile_entry,
    tile_list,
    tile_of,
)


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Rows of `a` times the matrix of their group; rows without a group are 0. For references."""
    group = group_of(offsets, a.shape[0])[:, None]
    y = a.new_zeros(a.shape[0], b.shape[2])
    for e in range(b.shape[0]):
        y = torch.where(group == e, a @ b[e], y)
    return y


def with_epilogue(y: Tensor, bias: Tensor | None, offsets: Tensor, act: str | None, glu: str | None) -> Tensor:
    """A product with its bias and its activation or gated unit; for references.

    Rows past the last group have a bias of their own, 0: their gradients, which may be anything, are no expert's.
    """
    if bias is not None:
        y = y + F.pad(upcast(bias), (0, 0, 0, 1))[group_of(offsets, y.shape[0])]
    if glu is not None:
        gate, up = y.chunk(2, -1)
        return ACTS[glu](gate) * up
    return y if act is None else ACTS[act](y)


def reference(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    act: Act | None = None,
    glu: Act | None = None,
    out_dtype: OutDtype | None = None,
) -> Tensor:
    """The rows of `a` [rows, inner], each times the matrix of its group in `b` [experts, inner, columns]; `offsets` [experts] are
    the end rows of the groups, as in `torch`'s grouped products.

    `bias` [experts, columns] is added to that, and either `act` is applied or `glu`: the activation of the first half of the
    columns times the second half, half as many columns. Sums are fp32 and rounded once, to the dtype of `a` if there is no
    `out_dtype`. Rows past the last group are unspecified. `b` may lie in memory either way; fastest is what
    `weight.transpose(1, 2)` of [experts, columns, inner] gives. There is a gradient of the product alone; with a bias, `act` or
    `glu` take `grouped_mm`, which has one of all.
    """
    y = with_epilogue(grouped_product(upcast(a), upcast(b), offsets), bias, offsets, act, glu)
    return y.to(a.dtype if out_dtype is None or y.dtype == torch.float64 else DTYPES[out_dtype])


def inputs(draw: Draw) -> dict:
    rows, inner, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    offsets = draw.ends(rows)
    shape = (offsets.shape[0], inner, columns)
    if draw.option("transposed", True, False):
        b = draw.tensor(shape[0], columns, inner, scale=0.1).transpose(1, 2)
    else:
        b = draw.tensor(*shape, scale=0.1)
    return {"a": draw.tensor(rows, inner), "b": b, "offsets": offsets}


def scaled(values: Tensor, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Codes times their scales. A scale is for 128 codes along every dimension in `dims`, or for one code, or for all."""
    for dim in dims:
        if scale.shape[dim] not in (1, values.shape[dim]):
            scale = scale.repeat_interleave(ROWS, dim).narrow(dim, 0, values.shape[dim])
    return upcast(values) * scale


def reference_fp8(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    act: Act | None = None,
    glu: Act | None = None,
    out_dtype: OutDtype = "bfloat16",
) -> Tensor:
    """The same of FP8 codes: `scale_a` [inner / 128, rows] for `a`, `scale_b` [experts, columns / 128, inner / 128] for `b`, as
    `fp8("1x128")` and `fp8("128x128")` have them; sizes that 128 does not divide are rounded up. Either may be for whole rows:
    `scale_a` [1, rows], `scale_b` [experts, columns, 1].

    fp32 sums of whole blocks, then `bias`, `act` and `glu` as in `grouped_mm_rows`; rounded once to `out_dtype`. Rows past the
    last group are unspecified.
    """
    wide_a = scaled(a, upcast(scale_a).t(), (1,))
    wide_b = scaled(b, upcast(scale_b).transpose(1, 2), (1, 2))
    y = with_epilogue(grouped_product(wide_a, wide_b, offsets), bias, offsets, act, glu)
    return y if y.dtype == torch.float64 else y.to(DTYPES[out_dtype])


def inputs_fp8(draw: Draw) -> dict:
    rows, inner, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    glu = draw.option("glu", None, "silu")
    columns += columns % 2 if glu else 0
    code, offsets = torch.float8_e4m3fn, draw.ends(rows)
    E, across, down = offsets.shape[0], cdiv(inner, ROWS), cdiv(columns, ROWS)
    if draw.option("scales", "block", "row") == "row":
        across, down = 1, columns
    return {
        "a": draw.tensor(rows, inner, dtype=code, scale=20.0),
        "scale_a": draw.uniform(across, rows, low=0.01, high=0.1, dtype=torch.float32),
        "b": draw.tensor(E, columns, inner, dtype=code, scale=20.0).transpose(1, 2),
        "scale_b": draw.uniform(E, down, across, low=0.01, high=0.1, dtype=torch.float32),
        "offsets": offsets,
        "bias": draw.maybe("bias", lambda: draw.tensor(E, columns)),
        "act": None if glu else draw.option("act", None, "relu"),
        "glu": glu,
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
    # Widened codes take more registers, and so do the places of columns that alternate
    BLOCK_N = max(16, min(128 if a.NATIVE and a.GLU is None else 64, power_of_two(a.N)))
    return {"BLOCK_N": BLOCK_N, "STAGES": stages(a.A.data.device, 128 * (ROWS + BLOCK_N)), "num_warps": 8}


@kernel(
    grid=lambda a: (a.count * cdiv(a.N, a.BLOCK_N),), tokens=("count",), default=_shape,
)  # fmt: skip
def grouped_rows(
    A, B, BIAS, TILES, Y, count, N, K, stride_am, stride_ak, stride_be, stride_bk, stride_bn,
    PIECES_A: tl.constexpr, PIECES_B: tl.constexpr, ACT: tl.constexpr, GLU: tl.constexpr,
    BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, across = tile_of(tl.program_id(0), count, tl.cdiv(N, BLOCK_N), BAND)
    group, row0, rows = tile_entry(TILES, tile)
    group, row0 = group.to(tl.int64), row0.to(tl.int64)
    if rows > 0:
        row = tl.arange(0, BLOCK_M)
        col = columns_of(across, N, BLOCK_N, GLU)
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        y = multiply(
            y, A + row0 * stride_am, B + group * stride_be, row, col, 0, K, rows, N, stride_am, stride_ak, stride_bk,
            stride_bn, PIECES_A, PIECES_B, BLOCK_K, STAGES,
        )  # fmt: skip
        if BIAS is not None:
            BIAS += group * N
        Y += row0 * (N if GLU is None else N // 2)
        store_finished(y, Y, BIAS, row, col, across, rows, N, ACT, GLU, BLOCK_N)


@kernel(
    grid=lambda a: (a.count * cdiv(a.N, a.BLOCK_N),), tokens=("count", "stride_sk"), default=_shape_fp8,
)  # fmt: skip
def grouped_rows_fp8(
    TILES, count, A, SA, B, SB, BIAS, Y, N, K, stride_sk, stride_sm, NATIVE: tl.constexpr, E5M2_A: tl.constexpr,
    E5M2_B: tl.constexpr, COLUMNS: tl.constexpr, ACT: tl.constexpr, GLU: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scales are SA [blocks, rows], with these two strides, and SB [experts, columns / COLUMNS, blocks]."""
    tile, across = tile_of(tl.program_id(0), count, tl.cdiv(N, BLOCK_N), BAND)
    group, row0, rows = tile_entry(TILES, tile)
    group, row0 = group.to(tl.int64), row0.to(tl.int64)
    if rows > 0:
        row = tl.arange(0, BLOCK_M)
        col = columns_of(across, N, BLOCK_N, GLU)
        y = multiply_scaled(
            Matrix(A.data + row0 * A.stride_r, A.stride_r, A.stride_c),
            Matrix(B.data + group * B.stride_e, B.stride_r, B.stride_c), Matrix(SA + row0 * stride_sm, stride_sk, stride_sm),
            Matrix(SB.data + group * SB.stride_e, SB.stride_c, SB.stride_r), row, col, 0, K, rows, N, K, COLUMNS, NATIVE, E5M2_A,
            E5M2_B, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
        if BIAS is not None:
            BIAS += group * N
        Y += row0 * (N if GLU is None else N // 2)
        store_finished(y, Y, BIAS, row, col, across, rows, N, ACT, GLU, BLOCK_N)


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(a, b, offsets, *, bias=None, act=None, glu=None, out_dtype=None) -> Tensor:
    (M, K), N = a.shape, b.shape[2]
    dtype = a.dtype if out_dtype is None else DTYPES[out_dtype]
    y = torch.empty(M, N if glu is None else N // 2, dtype=dtype, device=a.device)
    if y.numel():
        tiles = tile_list(offsets, M)
        grouped_rows(
            a, b, bias if bias is None else bias.contiguous(), tiles, y, tiles.shape[0], N, K, *a.stride(), *b.stride(),
            PIECES_A=piece_count(a, b), PIECES_B=piece_count(b, a), ACT=act, GLU=glu, BAND=BAND, BLOCK_M=ROWS,
        )  # fmt: skip
    return y


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    """The gradients of both factors. They are grouped products too, by whichever kernels take them."""
    a, b, offsets = saved.a, saved.b, saved.offsets

    def product(op: Op, first: Tensor, second: Tensor, like: Tensor) -> Tensor:
        dtype = name_of(like.dtype)
        return op.run(op.signature.bind((first, second, offsets), {"out_dtype": dtype}))

    da = product(grouped_mm_rows, dy, b.transpose(1, 2), a) if "a" in saved.needs else None
    db = product(grouped_mm_inner, a.t(), dy, b) if "b" in saved.needs else None
    return da, db


def has_gradient(target: Target, a: SimpleNamespace) -> bool:
    """Whether nothing but the product is asked for: of that alone there is a gradient."""
    return single(target, a) and a.bias is None and a.act is None and a.glu is None


def has_gradient_hopper(target: Target, a: SimpleNamespace) -> bool:
    return has_gradient(target, a) and hopper.fits(target, a)


def forward_fp8(a, scale_a, b, scale_b, offsets, *, bias, act, glu, out_dtype) -> Tensor:
    (M, K), N = a.shape, b.shape[2]
    y = torch.empty(M, N if glu is None else N // 2, dtype=DTYPES[out_dtype], device=a.device)
    if y.numel():
        tiles = tile_list(offsets, M)
        A, B, how = operands_for_kernel(a, b)
        (stride_sk, stride_sm), (stride_se, stride_sn, stride_sbk) = scale_a.stride(), scale_b.stride()
        # One scale for all blocks of the inner dimension is every block's
        stride_sk, stride_sbk = stride_sk * (scale_a.shape[0] > 1), stride_sbk * (scale_b.shape[2] > 1)
        grouped_rows_fp8(
            tiles, tiles.shape[0], matrix(A), scale_a, matrices(B), Matrices(scale_b, stride_se, stride_sn, stride_sbk),
            bias if bias is None else bias.contiguous(), y, N, K, stride_sk, stride_sm, **how,
            COLUMNS=1 if scale_b.shape[1] == N else ROWS, ACT=act, GLU=glu, BAND=BAND, BLOCK_M=ROWS,
        )  # fmt: skip
    return y


def fits_hopper(target: Target, a: SimpleNamespace) -> bool:
    """Whether scales are for blocks of both factors or for rows of both, and there is no gated unit."""
    blocks = cdiv(a.a.shape[1], ROWS), cdiv(a.b.shape[2], ROWS)
    by_block = a.scale_a.shape[0] == blocks[0] and a.scale_b.shape[1:] == blocks[::-1]
    by_row = a.scale_a.shape[0] == 1 and a.scale_b.shape[1:] == (a.b.shape[2], 1)
    return (by_block or by_row) and a.glu is None and single(target, a) and hopper_fp8.fits(target, a)


def forward_hopper(a, scale_a, b, scale_b, offsets, *, bias, act, glu, out_dtype) -> Tensor:
    return hopper_fp8.forward(a, scale_a, b, scale_b, offsets, out_dtype=out_dtype, bias=bias, act=act)


def check(a, b, offsets, *, bias, act, glu, out_dtype) -> None:
    if b.shape[0] != offsets.shape[0]:
        raise ValueError(f"grouped_mm_rows: b has {b.shape[0]} matrices, offsets {offsets.shape[0]} groups")
    check_rows("grouped_mm_rows", a)
    check_epilogue("grouped_mm_rows", b, act, glu)


def check_rows(op: str, a: Tensor) -> None:
    if a.shape[0] >= 2**31 - ROWS:
        raise ValueError(f"{op}: a must have fewer than 2**31 - {ROWS} rows, got {a.shape[0]}")


def check_epilogue(op: str, b: Tensor, act: str | None, glu: str | None) -> None:
    if act is not None and glu is not None:
        raise ValueError(f"{op}: glu names an activation itself, so that act must be None, got {act!r}")
    if glu is not None and b.shape[2] % 2:
        raise ValueError(f"{op}: b must have as many columns for gate as for up with glu, got {b.shape[2]} in all")


def check_fp8(a, scale_a, b, scale_b, offsets, *, bias, act, glu, out_dtype) -> None:
    op = "grouped_mm_rows_fp8"
    check_rows(op, a)
    check_epilogue(op, b, act, glu)
    inner, down, columns = cdiv(a.shape[1], ROWS), cdiv(b.shape[2], ROWS), b.shape[2]
    if scale_a.shape[0] not in (inner, 1):
        raise ValueError(f"{op}: scale_a has {scale_a.shape[0]} rows, but a has {inner} blocks of 128 columns")
    if tuple(scale_b.shape[1:]) not in ((down, inner), (columns, 1)):
        raise ValueError(
            f"{op}: scale_b is {list(scale_b.shape)}, but b has {down} by {inner} blocks of 128x128, or {columns} columns"
        )


def flops(a, b, **_) -> int:
    return 2 * a.numel() * b.shape[2]


def sizes_of(a: SimpleNamespace) -> dict[str, int]:
    """A gated unit has half as many columns."""
    return {"width": a.b.shape[2] if a.glu is None else a.b.shape[2] // 2}


WHERE = {
    "a": "float[tokens inner]", "b": "float[experts+ inner columns]", "offsets": "int[experts+]", "bias": "float[experts+ columns]",
}  # fmt: skip
IN_GROUPS = Out(contiguous=("out",), live={"tokens": "offsets"})
grouped_mm_rows = Op(
    "grouped_mm_rows", reference, inputs, Triton(hopper.forward, backward, has_gradient_hopper, "hopper"),
    Triton(hopper.forward, None, hopper.fits, "hopper_fused"),
    Triton(forward, backward, has_gradient, "portable"), Triton(forward, None, single, "portable_fused"),
    groups="offsets", where=WHERE, results={"out": result_row("tokens width")}, sizes=sizes_of, gradient=Gradient(of=("a", "b")),
    out=IN_GROUPS, check=check, cost=Cost(flops=flops), bars=Bars("E", gradient="E", whole=True),
)  # fmt: skip
grouped_mm_rows_fp8 = Op(
    "grouped_mm_rows_fp8", reference_fp8, inputs_fp8, Triton(forward_hopper, None, fits_hopper, "hopper"),
    Triton(forward_fp8, None, single, "portable"),
    groups="offsets", where={
        "a": "codes[tokens inner]", "scale_a": "float32[inner_blocks tokens]", "b": "codes[experts+ inner columns]",
        "scale_b": "float32[experts+ column_blocks blocks]", "offsets": "int[experts+]", "bias": "float[experts+ columns]",
    },
    results={"out": lambda a: f"{a.out_dtype}[tokens width]"}, sizes=sizes_of,
    out=IN_GROUPS, check=check_fp8, cost=Cost(flops=flops), bars=Bars("F", whole=True),
)  # fmt: skip
