"""Hadamard rotation: y = x H along the features or H x along the tokens, block by block; H is symmetric, its own inverse.

H is Sylvester's matrix of a power-of-two size `block` over its square root, H[i, j] = (-1)**(ones in i & j) / sqrt(block).
Backward: the same rotation of dy. `hadamard_quantize` gives both operands of a matrix product's two passes, each rotated
along the dimension that the product sums over, where the rotations of two factors cancel: (x H)(w H)^T = x w^T.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.format import Format, Quantized, pack, store
from ...core.tensor import cdiv, rows
from ...device.quantize import amax, amax4, finite, has
from ...device.store import Way, store_given, store_tile
from ...formats.fill import alignment, amax_bits, column_way, is_fast, row_way, some_codes
from ...formats.fp8 import fp8
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .sylvester import rotate_columns, rotate_rows4

TILE = 128  # rows and columns of a quantised tile: no rotated run is longer


def reference(
    x: Tensor,
    *,
    block: Literal[16, 32, 64, 128, 256] = 64,
    dim: Literal[-1, 0] = -1,
    out_format: Format | None = None,
) -> Tensor:
    """`x` rotated by Hadamard matrices of size `block`, which must divide the size along `dim`; in fp32, rounded once.

    `dim` is -1 for the last dimension, 0 for the rows, all leading dimensions being one. `out_format` gives a `Quantized`
    result, of blocks up to 128. The rotation is its own inverse.
    """
    return store(rotate(x, block, dim), out_format, x.dtype)


def rotate(x: Tensor, block: int, dim: int) -> Tensor:
    """The rotation in fp32, or float64 of float64: additions alone, then one product."""
    y = upcast(x)
    if dim == 0:
        return rotate(y.reshape(rows(y).shape).t(), block, -1).t().reshape(x.shape)
    y = y.unflatten(-1, (y.shape[-1] // block, 1, block))
    while y.shape[-1] > 1:  # Sylvester's order: the halves of what is left, then their halves
        first, second = y.chunk(2, -1)
        y = torch.stack((first + second, first - second), -2).flatten(-3, -2)
    return y.reshape(x.shape) * block**-0.5


def inputs(draw: Draw) -> dict:
    block = draw.option("block", 64, 16, 128)
    dim = draw.options.get("dim", -1)  # along the rows no row stands alone
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    tokens, hidden = (tokens, round_up(hidden, block)) if dim else (round_up(tokens, block), hidden)
    return {"x": draw.tensor(tokens, hidden), "block": block, "dim": dim}


def round_up(size: int, block: int) -> int:
    return cdiv(size, block) * block


@triton.jit
def tile_at(P, row, col, stride_m, stride_n):
    return P + row.to(tl.int64) * stride_m + col.to(tl.int64) * stride_n


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.N, max(128, a.BLOCK)),),
    tokens=("M", "N"),
    default=lambda a: {"ROWS": 64 if a.X.dtype == torch.float32 else 128, "num_warps": 8},
)
def hadamard_forward(
    X, Y, M, N, stride_xm, stride_xn, stride_ym, stride_yn, scale, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Y = X rotated along its columns. A rotation along rows is this one of the transposed matrices; ALIGN divides M."""
    RUN: tl.constexpr = min(BLOCK, 128)
    HALVES: tl.constexpr = BLOCK // RUN
    across = tl.cdiv(N, 128 * HALVES)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % across) * (128 * HALVES) + tl.arange(0, 128)[None, :]
    # Written so that the compiler sees what divides them: a mask of whole vectors leaves the vectors whole
    inside = (row < M // ALIGN * ALIGN) & (col < N // 16 * 16)
    y = rotate_columns(tl.load(tile_at(X, row, col, stride_xm, stride_xn), inside, 0.0), RUN)
    if HALVES == 2:
        z = rotate_columns(tl.load(tile_at(X, row, col + 128, stride_xm, stride_xn), inside, 0.0), RUN)
        difference = ((y - z) * scale).to(Y.dtype.element_ty)
        tl.store(tile_at(Y, row, col + 128, stride_ym, stride_yn), difference, inside)
        y += z
    tl.store(tile_at(Y, row, col, stride_ym, stride_yn), (y * scale).to(Y.dtype.element_ty), inside)


@triton.jit
def load_fourth(X, k: tl.constexpr, row0, col0, rows_left, N, stride_m, stride_n, FULL: tl.constexpr):
    """Rows 4g+k of a tile, 0 outside the matrix."""
    r = 4 * tl.arange(0, 32)[:, None] + k
    c = col0 + tl.arange(0, 128)[None, :]
    at = tile_at(X, row0 + r, c, stride_m, stride_n)
    if FULL:
        x = tl.load(at)
    else:
        x = tl.load(at, (r < rows_left) & (c < N), 0.0)
    return x


@triton.jit
def rotated_tile(
    X, row0, col0, rows_left, N, stride_m, stride_n, scale, BLOCK: tl.constexpr, DIM: tl.constexpr, FULL: tl.constexpr
):
    """A tile in four tensors, rotated."""
    x0 = load_fourth(X, 0, row0, col0, rows_left, N, stride_m, stride_n, FULL)
    x1 = load_fourth(X, 1, row0, col0, rows_left, N, stride_m, stride_n, FULL)
    x2 = load_fourth(X, 2, row0, col0, rows_left, N, stride_m, stride_n, FULL)
    x3 = load_fourth(X, 3, row0, col0, rows_left, N, stride_m, stride_n, FULL)
    if DIM == 0:
        y0, y1, y2, y3 = rotate_rows4(x0, x1, x2, x3, BLOCK)
    else:
        y0 = rotate_columns(x0, BLOCK)
        y1 = rotate_columns(x1, BLOCK)
        y2 = rotate_columns(x2, BLOCK)
        y3 = rotate_columns(x3, BLOCK)
    return y0 * scale, y1 * scale, y2 * scale, y3 * scale


@triton.jit
def raise_amax(y0, y1, y2, y3, AMAX, row0, col0, rows_left, N, FORMAT: tl.constexpr, WAY: tl.constexpr):
    """Bits of amax into zeroed memory, of each row or column or of the tensor: as integers they keep their order."""
    if has(FORMAT, "tensor", "nvfp4"):
        if has(FORMAT, "nvfp4"):
            y0, y1, y2, y3 = finite(y0), finite(y1), finite(y2), finite(y3)
        whole = amax(amax(amax4(y0, y1, y2, y3), 0), 0)
        tl.atomic_max(AMAX, whole.to(tl.int32, bitcast=True), sem="relaxed")
    elif WAY == "row":
        raise_rows(y0, 0, AMAX, row0, rows_left)
        raise_rows(y1, 1, AMAX, row0, rows_left)
        raise_rows(y2, 2, AMAX, row0, rows_left)
        raise_rows(y3, 3, AMAX, row0, rows_left)
    else:
        c = col0 + tl.arange(0, 128)
        column = amax(amax4(y0, y1, y2, y3), 0)
        tl.atomic_max(AMAX + c, column.to(tl.int32, bitcast=True), c < N, sem="relaxed")


@triton.jit
def raise_rows(y, k: tl.constexpr, AMAX, row0, rows_left):
    r = 4 * tl.arange(0, 32) + k
    tl.atomic_max(AMAX + row0 + r, amax(y, 1).to(tl.int32, bitcast=True), r < rows_left, sem="relaxed")


@kernel(
    grid=lambda a: (max(1, cdiv(a.M, TILE)) * max(1, cdiv(a.N, TILE)),),  # one stores the scale of an empty tensor
    tokens=("M", "stride_s", "stride_st"),
    # Two programs an SM; the three pieces of fp32 do not fit into half of the registers
    default=lambda a: {"num_warps": 8} if a.X.dtype == torch.float32 else {"num_warps": 8, "maxnreg": 128},
)
def hadamard_tiles(
    X, ROW, COL, M, N, stride_xm, stride_xn, stride_s, stride_st, scale,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_T: tl.constexpr, FORMAT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, MEASURE: tl.constexpr,
):  # fmt: skip
    """One program, one tile: the row-wise operand rotated along DIM, the column-wise one along DIM_T. With MEASURE only what
    their scales follow from, into `given`; a way without codes is left out."""
    tiles = tl.maximum(tl.cdiv(N, 128), 1)
    block = tl.program_id(0) // tiles
    col0 = tl.program_id(0) % tiles * 128
    row0 = block.to(tl.int64) * 128
    rows_left = M - row0
    if not MEASURE:
        store_given(ROW, COL, row0, col0, block, 1, rows_left, N, stride_st, FORMAT)
    if not FULL:
        if (rows_left <= 0) | (col0 >= N):
            return
    if ROW.codes is not None:
        y0, y1, y2, y3 = rotated_tile(X, row0, col0, rows_left, N, stride_xm, stride_xn, scale, BLOCK, DIM, FULL)
        if MEASURE:
            raise_amax(y0, y1, y2, y3, ROW.given, row0, col0, rows_left, N, FORMAT, "row")
        else:
            store_tile(
                y0, y1, y2, y3, ROW, Way(), row0, col0, block, block * 0, rows_left, M, N, stride_s, stride_st, FORMAT,
                ALIGN, False, FULL,
            )  # fmt: skip
    if COL.codes is not None:
        # Read again, from the cache: registers that held it on would leave room for one program where there are two
        y0, y1, y2, y3 = rotated_tile(X, row0, col0, rows_left, N, stride_xm, stride_xn, scale, BLOCK, DIM_T, FULL)
        if MEASURE:
            raise_amax(y0, y1, y2, y3, COL.given, row0, col0, rows_left, N, FORMAT, "col")
        else:
            store_tile(
                y0, y1, y2, y3, Way(), COL, row0, col0, block, block * 0, rows_left, M, N, stride_s, stride_st, FORMAT,
                ALIGN, False, FULL,
            )  # fmt: skip


def store_rotated(q: Quantized, x: Tensor, block: int, dim: int, dim_t: int, static: Tensor | None) -> None:
    """Fill `q`: its row-wise operand from x rotated along `dim`, its column-wise one from x rotated along `dim_t`."""
    X = rows(x)
    M, N = X.shape
    bits = bits_t = static
    settings = {
        "BLOCK": block, "DIM": dim, "DIM_T": dim_t, "FORMAT": q.format.device_format(is_fast(some_codes(q))),
        "ALIGN": alignment(q.data_t, M),
        "FULL": M * N > 0 and M % TILE == 0 and N % TILE == 0,
    }  # fmt: skip
    strides = (*X.stride(), q.format.scale_stride(q, "row"), q.format.scale_stride(q, "col"))

    def launch(bits: Tensor | None, bits_t: Tensor | None, measure: bool) -> None:
        ways = row_way(q, bits), column_way(q, bits_t)
        hadamard_tiles(X, *ways, M, N, *strides, block**-0.5, **settings, MEASURE=measure)

    if q.format.reach in ("tensor", "row"):
        bits, bits_t = amax_bits(q, apart=True)
        launch(bits, bits_t, True)
    launch(bits, bits_t, False)


def forward(x, *, block, dim, out_format) -> Tensor:
    if out_format is not None:
        q = out_format.empty(x.shape, x.dtype, x.device)
        store_rotated(q, x, block, dim, dim, out_format.tensor)
        return q
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    X, Y = rows(x), rows(y)
    if dim == 0:
        X, Y = X.t(), Y.t()
    ALIGN = 16 if dim == 0 and X.shape[0] % 16 == 0 else 1  # along the features rows are tokens, of any number
    hadamard_forward(X, Y, *X.shape, *X.stride(), *Y.stride(), block**-0.5, BLOCK=block, ALIGN=ALIGN)
    return y


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor]:
    return (forward(dy, block=saved.block, dim=saved.dim, out_format=None),)


def divides(op: str, x: Tensor, block: int, dim: int) -> None:
    size = x.shape[-1] if dim else rows(x).shape[0]
    if size % block:
        where = "its last dimension" if dim else "its rows"
        raise ValueError(f"{op}: x is {list(x.shape)}, but block {block} must divide the size of {where}, {size}")


def within_tile(op: str, block: int, out_format: Format) -> None:
    if block > TILE:
        raise ValueError(f"{op}: block must be at most {TILE} for a result in {out_format}, got {block}")


def check(x, *, block, dim, out_format) -> None:
    divides("hadamard", x, block, dim)
    if out_format is not None:
        within_tile("hadamard", block, out_format)


hadamard = Op(
    "hadamard", reference, inputs, Triton(forward, backward, single),
    where={"x": "float[... hidden]"}, results={"out": "x[... hidden]"}, out=Out(contiguous=("out",)),
    gradient=Gradient(of=("x",), shape_only=lambda values: ("x",)), check=check, bars=Bars("A"),
    sharding=lambda a: Sharding() if a.dim == -1 else Sharding(("hidden",)),
)  # fmt: skip


# ---- both operands ---------------------------------------------------------------------------------------------------


def reference_both(x: Tensor, out_format: Format, *, block: Literal[16, 32, 64, 128] = 64) -> Tensor:
    """The matrix `x` for a product that sums over features and one that sums over tokens, in one pass.

    The row-wise operand holds x H, the column-wise twin H x, transposed; the ways of `out_format` decide which there are, and
    `block` must divide the size along each.

    A product of two values rotated along the dimension that it sums over needs no inverse. `dequantize` gives the rotated
    value: x H, of a column-wise format H x. There is no gradient; `hadamard` with `out_format` has one.
    """
    along = rotate(x, block, -1)
    if out_format is None:
        return along.to(x.dtype)
    names = out_format.tensor_names
    made = dict(zip(names, out_format.quantize(along, x.dtype).tensors())) if "data" in names else {}
    if "data_t" in names:
        twin = dict(zip(names, out_format.quantize(rotate(x, block, 0), x.dtype).tensors()))
        made.update({name: tensor for name, tensor in twin.items() if name.endswith("_t")})
    carrier = x.new_empty((1,)).expand(x.shape)
    return pack(carrier, tuple(made[name] for name in names), out_format)


def inputs_both(draw: Draw) -> dict:
    block = draw.option("block", 64, 16)
    return {
        "x": draw.tensor(round_up(draw.dim("tokens"), block), round_up(draw.dim("hidden"), block)),
        "out_format": draw.option("out_format", fp8("1x128", ways="both")),
        "block": block,
    }


def forward_both(x, out_format, *, block) -> Quantized:
    q = out_format.empty(x.shape, x.dtype, x.device)
    store_rotated(q, x, block, -1, 0, out_format.tensor)
    return q


def check_both(x, out_format, *, block) -> None:
    within_tile("hadamard_quantize", block, out_format)
    for name, dim in (("data", -1), ("data_t", 0)):
        if name in out_format.tensor_names:
            divides("hadamard_quantize", x, block, dim)


def twin(x, out_format, *, block) -> Tensor:
    """The value that the column-wise operand holds."""
    return rotate(x, block, 0)


hadamard_quantize = Op(
    "hadamard_quantize", reference_both, inputs_both, Triton(forward_both, when=single),
    where={"x": "float[tokens hidden]"}, results={"out": "x[tokens hidden]"}, check=check_both, bars=Bars("A", twin=twin),
)  # fmt: skip
