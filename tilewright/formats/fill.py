"""Quantised values from rows and tiles: kernels whose numbers an injected device function produces, in any format.

A producer is a `triton.jit` function PRODUCE(SOURCE, row, col, inside, MODE). SOURCE is a tuple of whatever it needs: pointers,
strides, numbers. It returns the fp32 numbers at rows `row` (int64, [R, 1]) and columns `col` ([1, C]), and 0 in columns that are
not `inside` ([1, C]): those may lie outside of the tensor, rows never do.
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
from ..device.blocks import find_tile
from ..device.dependent import begin_dependent
from ..device.quantize import amax, finite, has, max_nan
from ..device.store import NOWHERE, Way, store_given, store_rows, store_tile
from ..runtime.kernel import kernel
from .fp8 import Fp8, flat_rows

WIDEST = 16384  # longest row that a program holds whole
FEW = 64  # rows, at most, of which pieces are stored and not tiles, most of whose rows would be repeated ones


@jit
def produce_quarter(
    r, SOURCE, row0, col0, rows_left, N, PRODUCE: tl.constexpr, MODE: tl.constexpr, COLS: tl.constexpr,
    FULL: tl.constexpr,
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
    return PRODUCE(SOURCE, row, col0 + c, tl.full([1, 128], True, tl.int1), MODE)


def tile_grid(a: Any) -> tuple[int]:
    """A program a tile; at least one, which stores the scale of an empty tensor."""
    return (max(1, cdiv(a.M, 128) + a.E) * max(1, cdiv(a.N, 128)),)


def _tile_config(a: Any) -> dict[str, int]:
    # 128 registers hold the tile; at 168 three blocks fit an SM, and a few registers more cost a fifth (H200, November 2026).
    # Integers and small blocks both ways, zero points and NVFP4's quotients would spill beside it
    words, both = a.FORMAT.split(":"), a.ROW.codes is not None and a.COL.codes is not None
    plain = words[0] in ("e4m3", "e5m2")
    if plain or not (both or "zero" in words or "nvfp4" in words):
        return {"num_warps": 4, "maxnreg": 168}
    return {"num_warps": 8}


# Codes down the columns are for gradients of weights, which stand in no chain of small launches. Beside them a wait costs: where
# numbers are not aligned, 736 bytes a thread are spilled and not 184 (sm_90, Triton 3.6)
@kernel(
    grid=tile_grid, tokens=("M", "stride_s", "stride_st"), default=_tile_config,
    dependent=lambda a: a.COL.codes is None,
)  # fmt: skip
def quantize_tiles(
    SOURCE, ROW, COL, OFFSETS, M, N, E, stride_s, stride_st, PRODUCE: tl.constexpr, MODE: tl.constexpr,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr, BLOCK_E: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program, one tile: produced once, stored in the ways that have codes."""
    begin_dependent(DEPENDENT)
    block, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    store_given(ROW, COL, row0, col0, block, tl.maximum(E, 1), rows_left, N, stride_st, FORMAT)
    if not FULL:
        if (rows_left <= 0) | (col0 >= N):
            return
    r = 4 * tl.arange(0, 32)
    y0 = produce_quarter(r, SOURCE, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL)
    y1 = produce_quarter(r + 1, SOURCE, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL)
    y2 = produce_quarter(r + 2, SOURCE, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL)
    y3 = produce_quarter(r + 3, SOURCE, row0, col0, rows_left, N, PRODUCE, MODE, COLS, FULL)
    if has(FORMAT, "1x32", "1x16") and not FULL:
        # Small blocks may begin inside and end outside: there what is repeated would count
        inside = col0 + tl.arange(0, 128)[None, :] < N
        y0 = tl.where(inside & (r < rows_left)[:, None], y0, 0.0)
        y1 = tl.where(inside & (r + 1 < rows_left)[:, None], y1, 0.0)
        y2 = tl.where(inside & (r + 2 < rows_left)[:, None], y2, 0.0)
        y3 = tl.where(inside & (r + 3 < rows_left)[:, None], y3, 0.0)
    store_tile(
        y0, y1, y2, y3, ROW, COL, row0, col0, block, group, rows_left, M, N, stride_s, stride_st, FORMAT, ALIGN,
        OFFSETS is not None, FULL,
    )  # fmt: skip


def _rows_config(a: Any) -> dict[str, int]:
    if (
        a.BLOCK == 128
    ):  # 8 numbers a thread, for as many programs as there can be: with few rows all wait for memory but once
        return {"ROWS": 1, "COLS": 512, "num_warps": 2}
    if a.BLOCK:  # 64 numbers a thread
        return {"ROWS": 16 if a.BLOCK == 16 else 32, "COLS": 256, "num_warps": 4}
    COLS = max(2, power_of_two(a.N))
    ROWS = max(1, 2048 // COLS)
    return {"ROWS": ROWS, "COLS": COLS, "num_warps": max(1, min(16, ROWS * COLS // 512))}


@kernel(
    grid=lambda a: (max(1, cdiv(a.M, a.ROWS)) * max(1, cdiv(a.N, a.COLS)),),
    tokens=("M", "stride_s"),
    default=_rows_config,
    dependent=lambda a: a.BLOCK == 128,
)
def quantize_rows(
    SOURCE, ROW, OFFSETS, M, N, E, stride_s, PRODUCE: tl.constexpr, MODE: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program holds all that its scales need, blocks of some rows (of BLOCK numbers, or given scales: 128) or whole rows (0): one
    trip to memory."""
    begin_dependent(DEPENDENT)
    tiles = tl.maximum(tl.cdiv(N, COLS), 1)
    first = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    start = tl.program_id(0) % tiles * COLS
    rows = M.to(tl.int64)
    if OFFSETS is not None:
        rows = tl.minimum(tl.maximum(tl.load(OFFSETS + E - 1).to(tl.int64), 0), rows)
    if has(FORMAT, "nvfp4"):
        store_given(ROW, Way(), first, start, tl.program_id(0), 1, rows, N, 0, FORMAT)
    if first >= rows:
        return
    row = first + tl.arange(0, ROWS)[:, None]
    col = start + tl.arange(0, COLS)[None, :]
    y = PRODUCE(SOURCE, tl.minimum(row, rows - 1), col, col < N, MODE)
    store_rows(y, ROW, row, start, row < rows, N, stride_s, FORMAT, "")


@kernel(grid=tile_grid, tokens=("M",), default=lambda a: {"num_warps": 4})
def amax_tiles(
    SOURCE, AMAX, AMAX_T, OFFSETS, M, N, E, PRODUCE: tl.constexpr, MODE: tl.constexpr, FORMAT: tl.constexpr,
    COLS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Bits of amax into zeroed memory: of the tensor (in NVFP4 of its finite numbers), or of each row and of each group's columns.

    As integers, bits of absolute values keep their order, NaN above Inf: the maximum does not depend on the order of the
    programs, and no NaN is lost.
    """
    block, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    if (rows_left <= 0) | (col0 >= N):
        return
    column = tl.zeros([32, 128], tl.float32)
    for k in range(4):
        r = 32 * k + tl.arange(0, 32)
        y = produce_quarter(r, SOURCE, row0, col0, rows_left, N, PRODUCE, MODE, COLS, False)
        if has(FORMAT, "nvfp4"):
            y = finite(y)
        column = max_nan(column, tl.abs(y))
        if has(FORMAT, "row") and AMAX is not None:
            tl.atomic_max(AMAX + row0 + r, amax(y, 1).to(tl.int32, bitcast=True), r < rows_left, sem="relaxed")
    if has(FORMAT, "tensor", "nvfp4"):
        tl.atomic_max(AMAX, amax(amax(column, 0), 0).to(tl.int32, bitcast=True), sem="relaxed")
    elif AMAX_T is not None:
        cols = col0 + tl.arange(0, 128)
        at = AMAX_T + group.to(tl.int64) * N + cols
        tl.atomic_max(at, amax(column, 0).to(tl.int32, bitcast=True), cols < N, sem="relaxed")


@jit
def read(SOURCE, row, col, inside, MODE: tl.constexpr):
    """The producer that reads a matrix as it is: (its pointer, the strides of its rows and columns)."""
    X, stride_m, stride_n = SOURCE
    return tl.load(X + row * stride_m + col.to(tl.int64) * stride_n, inside, 0.0).to(tl.float32)


# ---- host ------------------------------------------------------------------------------------------------------------


def fill(
    q: Quantized,
    produce: JITFunction,
    source: tuple,
    mode: Any = 0,
    scale: Tensor | None = None,
    tiles_only: bool = False,
) -> None:
    """Fill `q`, made by `format.empty`, with what `produce` makes of `source`; `scale` is a static one. `tiles_only`: the producer
    is to be asked for columns of one 128x128 tile at a time.

    It takes one launch, and one before it for amax where no program sees all that a scale depends on.
    """
    format, M, N = q.format, flat_rows(q.shape), q.shape[-1]
    groups = 0 if q.offsets is None else q.offsets.shape[0]
    shape = (q.offsets, M, N, groups)
    made = {"PRODUCE": produce, "MODE": mode, "FORMAT": format.device_format(is_fast(some_codes(q)))}
    tiles = {"COLS": 128 if N % 128 == 0 else 16 if N % 16 == 0 else 1, "BLOCK_E": power_of_two(groups)}
    few = in_pieces(q, groups)
    by_rows = (in_rows(q) or few) and not tiles_only
    bits = bits_t = scale
    if format.reach == "tensor" or (format.reach == "row" and not by_rows):
        bits, bits_t = amax_bits(q, groups)
        whole = format.reach == "tensor"
        found = (bits if bits is not None else bits_t, None) if whole else (bits, bits_t)
        amax_tiles(source, *found, *shape, **made, **tiles)
    if by_rows:
        block = 128 if few else 0 if format.reach == "row" else format.block
        quantize_rows(source, row_way(q, bits), *shape, format.scale_stride(q, "row"), **made, BLOCK=block)
        return
    quantize_tiles(
        source, row_way(q, bits), column_way(q, bits_t), *shape, format.scale_stride(q, "row"),
        format.scale_stride(q, "col"), **made, **tiles,
        ALIGN=alignment(q.data_t, M),
        # An empty tensor has no whole tile, though 128 divides its sizes
        FULL=groups == 0 and M * N > 0 and M % 128 == 0 and N % 128 == 0,
    )  # fmt: skip


def fill_from(q: Quantized, x: Tensor, scale: Tensor | None = None) -> None:
    """Fill `q` with the numbers of the matrix x."""
    fill(q, read, (x, *x.stride()), scale=scale)


def in_rows(q: Quantized) -> bool:
    """Whether programs that hold rows fill `q` in one trip: row-wise, scales for small blocks or for a row that is not too long."""
    if q.data_t is not None:
        return False
    return q.format.small or (q.format.reach == "row" and 0 < q.shape[-1] <= WIDEST)


def in_pieces(q: Quantized, groups: int) -> bool:
    """Whether pieces of single rows fill `q`: few rows of FP8, row-wise, whose scales are given or for blocks of a row."""
    M, N = flat_rows(q.shape), q.shape[-1]
    plain = isinstance(q.format, Fp8) and q.data_t is None and q.format.reach in ("given", "tensor", "block")
    return plain and groups == 0 and 0 < M <= FEW and N > 0


def amax_bits(q: Quantized, groups: int = 0, apart: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Zeroed memory for bits of amax, for the ways that there are: of each row and each group's columns, or of the whole, which
    both ways share unless `apart`."""
    M, N = flat_rows(q.shape), q.shape[-1]
    row, column = (1, 1) if q.format.reach == "tensor" else (M, max(1, groups) * N)
    bits = None if q.data is None else torch.zeros(row, dtype=torch.int32, device=q.device)
    if bits is not None and q.format.reach == "tensor" and not apart:
        return bits, bits
    return bits, None if q.data_t is None else torch.zeros(column, dtype=torch.int32, device=q.device)


def row_way(q: Quantized, given: Tensor | None = None) -> Way:
    """The row-wise operand as the store takes it."""
    if q.data is None:
        return NOWHERE
    return Way(codes_for_kernel(q.data, is_fast(q.data)), as_bytes(q.scale), q.shared, q.zero, given)


def column_way(q: Quantized, given: Tensor | None = None) -> Way:
    """The column-wise twin as the store takes it."""
    if q.data_t is None:
        return NOWHERE
    return Way(codes_for_kernel(q.data_t, is_fast(q.data_t)), as_bytes(q.scale_t), q.shared_t, q.zero_t, given)


def some_codes(q: Quantized) -> Tensor:
    return q.data if q.data is not None else q.data_t


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
    """Codes as a kernel takes them: FP8 as bytes on chips that cannot convert e4m3, where Triton does not know it."""
    return data if data is None or fast or not data.is_floating_point() else data.view(torch.uint8)


def as_bytes(scale: Tensor | None) -> Tensor | None:
    """Scales as a kernel takes them: those of small blocks as bytes, for Triton knows no e8m0, and e4m3 not on every chip."""
    return None if scale is None else scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
