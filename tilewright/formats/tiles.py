"""FP8 values from tiles: kernels over 128x128 tiles whose contents an injected device function produces, and back.

A producer is a `triton.jit` function PRODUCE(A, B, C, D, stride_a, stride_b, p0, p1, row, col, inside, MODE); it
returns the fp32 tile at rows `row` (int64, [R, 1]) and columns `col` ([1, C]). Both lie in the tensor even where the tile
does not: nothing need be masked, and `inside` is true throughout.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import JITFunction, jit

from ..core.format import Format, Quantized
from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.quantize import amax, decode, find_block, has, max_nan, store_given, store_tile4
from ..runtime.kernel import kernel
from .fp8 import Fp8, flat_rows


@jit
def find_tile(OFFSETS, M, N, E, BLOCK_E: tl.constexpr):
    """(block, group, first row, rows left, first column) of this program's tile; columns vary fastest."""
    tiles = tl.maximum(tl.cdiv(N, 128), 1)
    block = tl.program_id(0) // tiles
    col0 = tl.program_id(0) % tiles * 128
    if OFFSETS is None:
        group = block * 0
        row0 = block.to(tl.int64) * 128
        rows_left = M - row0
    else:
        group, row0, rows_left = find_block(block, OFFSETS, E, M, BLOCK_E)
    return block, group, row0, rows_left, col0


@jit
def produce_rows(
    r, A, B, C, D, stride_a, stride_b, p0, p1, row0, col0, rows_left, N, PRODUCE: tl.constexpr, MODE: tl.constexpr,
    COLS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Rows r [32] of a tile. What lies past the end repeats a row or column of the same tile, and so changes no maximum.

    COLS, one of 128, 16 and 1, divides N: at 16 the first 16 columns are repeated, so that wide loads stay possible.
    """
    row = row0 + r[:, None]
    c = tl.arange(0, 128)[None, :]
    if not FULL:
        row = row0 + tl.minimum(r, rows_left - 1)[:, None]
        if COLS == 16:
            c = tl.where(col0 + c < N, c, c % 16)
        elif COLS == 1:
            # Said to be contiguous, for lanes must run along columns; nothing is said of alignment, so loads stay narrow
            c = tl.max_contiguous(tl.minimum(c, N - 1 - col0), [1, 128])
    return PRODUCE(A, B, C, D, stride_a, stride_b, p0, p1, row, col0 + c, tl.full([32, 128], True, tl.int1), MODE)


def _grid(a: Any) -> tuple[int]:
    # At least one program, which stores the scale of an empty tensor
    return (max(1, cdiv(a.M, 128) + a.E) * max(1, cdiv(a.N, 128)),)


# 128 registers hold the tile; at 168 three blocks fit an SM, and a few registers more cost a fifth (H200, November 2026)
@kernel(
    grid=_grid,
    tokens=("M", "stride_s", "stride_qt", "stride_st"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)
def quantize_tiles(
    A, B, C, D, Q, S, QT, ST, AMAX, AMAX_T, OFFSETS, M, N, E, stride_a, stride_b, stride_s, stride_qt, stride_st, p0, p1,
    PRODUCE: tl.constexpr, MODE: tl.constexpr, FORMAT: tl.constexpr, ALIGN: tl.constexpr, COLS: tl.constexpr,
    FULL: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program, one tile: produced once, stored in all the ways that are not None."""
    block, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    store_given(S, ST, AMAX, AMAX_T, row0, col0, block, tl.maximum(E, 1), rows_left, N, stride_st, FORMAT)
    if not FULL:
        if (rows_left <= 0) | (col0 >= N):
            return
    r = 4 * tl.arange(0, 32)
    y0 = produce_rows(r, A, B, C, D, stride_a, stride_b, p0, p1, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL)
    y1 = produce_rows(
        r + 1, A, B, C, D, stride_a, stride_b, p0, p1, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL
    )
    y2 = produce_rows(
        r + 2, A, B, C, D, stride_a, stride_b, p0, p1, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL
    )
    y3 = produce_rows(
        r + 3, A, B, C, D, stride_a, stride_b, p0, p1, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL
    )
    store_tile4(
        y0, y1, y2, y3, Q, S, QT, ST, AMAX, AMAX_T, row0, col0, block, group, rows_left, N, N, stride_s, stride_qt,
        stride_st, FORMAT, ALIGN, OFFSETS is not None, FULL,
    )  # fmt: skip


@kernel(grid=_grid, tokens=("M",), default=lambda a: {"num_warps": 4})
def amax_tiles(
    A, B, C, D, AMAX, AMAX_T, OFFSETS, M, N, E, stride_a, stride_b, p0, p1, PRODUCE: tl.constexpr, MODE: tl.constexpr,
    FORMAT: tl.constexpr, COLS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Bits of amax into zeroed memory: of the tensor, or of each row and of each group's columns.

    As integers, bits of absolute values keep their order, NaN above Inf: the maximum does not depend on the order of the
    programs, and no NaN is lost.
    """
    block, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    if (rows_left <= 0) | (col0 >= N):
        return
    column = tl.zeros([32, 128], tl.float32)
    for k in range(4):
        r = 32 * k + tl.arange(0, 32)
        y = produce_rows(
            r, A, B, C, D, stride_a, stride_b, p0, p1, row0, col0, rows_left, N, PRODUCE, MODE, COLS, False
        )
        column = max_nan(column, tl.abs(y))
        if has(FORMAT, "row") and AMAX is not None:
            tl.atomic_max(AMAX + row0 + r, amax(y, 1).to(tl.int32, bitcast=True), r < rows_left, sem="relaxed")
    if has(FORMAT, "tensor"):
        tl.atomic_max(AMAX, amax(amax(column, 0), 0).to(tl.int32, bitcast=True), sem="relaxed")
    elif AMAX_T is not None:
        cols = col0 + tl.arange(0, 128)
        at = AMAX_T + group.to(tl.int64) * N + cols
        tl.atomic_max(at, amax(column, 0).to(tl.int32, bitcast=True), cols < N, sem="relaxed")


@kernel(grid=_grid, tokens=("M", "stride_s", "stride_q"), default=lambda a: {"num_warps": 4})
def dequantize_tiles(
    Q, S, Y, OFFSETS, M, N, E, stride_q, stride_s, TRANSPOSED: tl.constexpr, FORMAT: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Y = code * scale in the dtype of Y; Q and S are the row-wise operand, or the column-wise twin when TRANSPOSED."""
    block, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    if (rows_left <= 0) | (col0 >= N):
        return
    c = col0 + tl.arange(0, 128)
    for k in range(4):
        r = 32 * k + tl.arange(0, 32)
        if TRANSPOSED:
            at = Q + c.to(tl.int64)[:, None] * stride_q + (row0 + r)[None, :]
            codes = tl.trans(load_codes(at, (c[:, None] < N) & (r[None, :] < rows_left), FORMAT))
        else:
            at = Q + (row0 + r)[:, None] * stride_q + c[None, :]
            codes = load_codes(at, (r[:, None] < rows_left) & (c[None, :] < N), FORMAT)
        s = load_scale(S, block, group, row0, r, c, rows_left, N, stride_s, TRANSPOSED, FORMAT)
        at = Y + (row0 + r)[:, None] * N + c[None, :]
        tl.store(at, (codes * s).to(Y.dtype.element_ty), (r[:, None] < rows_left) & (c[None, :] < N))


@jit
def load_codes(at, inside, FORMAT: tl.constexpr):
    codes = tl.load(at.to(tl.pointer_type(tl.uint8), bitcast=True), inside, 0)
    if not has(FORMAT, "fast"):
        x = decode(codes, FORMAT)
    elif has(FORMAT, "e4m3"):
        x = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        x = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    return x


@jit
def load_scale(S, block, group, row0, r, c, rows_left, N, stride_s, TRANSPOSED: tl.constexpr, FORMAT: tl.constexpr):
    """The scales of a [32, 128] tile, in a shape that broadcasts to it."""
    tile = (tl.min(c, 0) // 128).to(tl.int64)
    if has(FORMAT, "128x128"):
        if TRANSPOSED:
            s = tl.load(S + tile * stride_s + block)
        else:
            s = tl.load(S + block.to(tl.int64) * stride_s + tile)
    elif has(FORMAT, "1x128", "row"):
        if TRANSPOSED:
            s = tl.load(S + (block if has(FORMAT, "1x128") else group).to(tl.int64) * stride_s + c, c < N, 0.0)[None, :]
        else:
            s = tl.load(S + tile * stride_s + row0 + r, r < rows_left, 0.0)[:, None]
    else:
        s = tl.load(S)
    return s


@jit
def load_tile(A, B, C, D, stride_a, stride_b, p0, p1, row, col, inside, MODE: tl.constexpr):
    """The producer that reads a tensor as it is; stride_b is that of its columns."""
    return tl.load(A + row * stride_a + col.to(tl.int64) * stride_b, inside, 0.0).to(tl.float32)


# ---- host ------------------------------------------------------------------------------------------------------------


def is_fast(tensor: Tensor) -> bool:
    """Whether the tensor's chip has the conversion instructions that the format word fast stands for."""
    target = Target.at(tensor.device)
    return target.fp8 and target.nvidia


def tiles_in_bulk(target: Target, x: Tensor, format: Format | None, out: Quantized | None = None) -> bool:
    """Whether Gluon kernels may fetch 128x128 tiles of x by bulk tensor copies and store them both ways by whole words."""
    M, N = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    return (
        target.hopper_gluon
        and x.dtype == torch.bfloat16
        and isinstance(format, Fp8)
        and (format.granularity, format.ways, format.pow2) == ("1x128", "both", True)
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and M % 16 == 0
        and 0 < M < 2**24  # offsets within a tile are 32-bit
        and 0 < N < 2**24
        and N % 128 == 0
        and (out is None or all(t.data_ptr() % 16 == 0 for t in out.tensors()))
    )


def store_tiles(
    q: Quantized,
    produce: JITFunction,
    operands: tuple[Tensor | None, ...],
    strides: tuple[int, int],
    params: tuple[float, float] = (0.0, 0.0),
    mode: Any = 0,
    scale: Tensor | None = None,
) -> None:
    """Fill `q`, made by `format.empty`, with what `produce` makes of up to four operands; `scale` is a static one.

    It takes one launch; per-row and dynamic per-tensor scales take another before it, for amax.
    """
    format: Fp8 = q.format
    M, N = flat_rows(q.shape), q.shape[-1]
    some = q.data if q.data is not None else q.data_t
    groups = 0 if q.offsets is None else q.offsets.shape[0]
    operands = (*operands, *(None,) * (4 - len(operands)))
    fast = is_fast(some)
    common = {"PRODUCE": produce, "MODE": mode, "FORMAT": format.device_format(fast)}
    common.update(BLOCK_E=power_of_two(groups), COLS=128 if N % 128 == 0 else 16 if N % 16 == 0 else 1)
    bits = bits_t = None
    if format.source == "static":
        bits = scale
    elif format.source == "dynamic" and format.granularity in ("tensor", "row"):
        by_row = format.granularity == "row"
        if q.data is not None or not by_row:
            bits = torch.zeros(M if by_row else 1, dtype=torch.int32, device=some.device)
        if q.data_t is not None and by_row:
            bits_t = torch.zeros(max(1, groups) * N, dtype=torch.int32, device=some.device)
        amax_tiles(*operands, bits, bits_t, q.offsets, M, N, groups, *strides, *params, **common)
    quantize_tiles(
        *operands, codes_for_kernel(q.data, fast), q.scale, codes_for_kernel(q.data_t, fast), q.scale_t, bits, bits_t, q.offsets,
        M, N, groups, *strides, row_stride(q.scale), M, row_stride(q.scale_t), *params, **common,
        ALIGN=alignment(q.data_t, M),
        # An empty tensor has no whole tile, though 128 divides its sizes
        FULL=groups == 0 and M * N > 0 and M % 128 == 0 and N % 128 == 0,
    )  # fmt: skip


def alignment(data_t: Tensor | None, M: int) -> int:
    """16, 4 or 1: the largest of these that divides the length of the rows of transposed codes and the address of the first.

    Without such codes it is always 16, so that all numbers of rows share a binary.
    """
    if data_t is None:
        return 16
    if data_t.data_ptr() % 16:
        return 1
    return 16 if M % 16 == 0 else 4 if M % 4 == 0 else 1


def codes_for_kernel(data: Tensor | None, fast: bool) -> Tensor | None:
    """Codes as a kernel takes them: as bytes on chips that cannot convert e4m3, where Triton does not know it."""
    return data if data is None or fast else data.view(torch.uint8)


def row_stride(scale: Tensor | None) -> int:
    """The distance between rows of a two-dimensional scale."""
    return scale.stride(0) if scale is not None and scale.dim() == 2 else 0


def load_tiles(q: Quantized, y: Tensor) -> None:
    """Dequantise `q` into `y`, contiguous and of its shape."""
    transposed = q.data is None
    data, scale = (q.data_t, q.scale_t) if transposed else (q.data, q.scale)
    M, N = flat_rows(q.shape), q.shape[-1]
    groups = 0 if q.offsets is None else q.offsets.shape[0]
    fast = is_fast(data)
    dequantize_tiles(
        codes_for_kernel(data, fast), scale, y, q.offsets, M, N, groups, M if transposed else N, row_stride(scale),
        TRANSPOSED=transposed, FORMAT=q.format.device_format(fast), BLOCK_E=power_of_two(groups),
    )  # fmt: skip
