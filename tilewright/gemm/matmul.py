"""A matrix product: y = a @ b; backward da = dy @ b.T, db = a.T @ dy.

fp32 factors enter bf16 tensor cores as exact sums of pieces (`device/products.py`). Sums of FP8 codes leave the tensor cores,
which keep about 14 bits of an addition on Hopper, after every 128 products. Programs go over tiles, one to an SM, where bulk
copies bring the operands, and have a tile each elsewhere.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..core.draw import Draw
from ..core.target import Target
from ..core.tensor import cdiv, name_of, piece_count, power_of_two, rows
from ..device.products import add_product, widen_codes
from ..op import Bars, Cost, Gradient, Op, Sharding, Triton, single, upcast
from ..runtime.kernel import kernel
from . import library
from .tiles import BAND, operands_for_kernel, tile_of

OutDtype = Literal["bfloat16", "float16", "float32", "int32"]
Acc = Literal["float32", "float16", "int32"]
Backend = Literal["auto", "triton", "cublaslt", "portable"]  # as in `scaled_mm.py`
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEFAULTS = {**dict.fromkeys(FP8, torch.bfloat16), torch.int8: torch.int32}


def reference(
    a: Tensor,
    b: Tensor,
    *,
    acc_dtype: Acc | None = None,
    out_dtype: OutDtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`a` [..., K] times `b` [K, N], both of one dtype or both FP8, summed in `acc_dtype` and rounded once to `out_dtype`.

    Sums are fp32, int32 (exact) of int8. `acc_dtype="float16"`, for fp16 and FP8, may keep them in fp16: three digits, infinite
    from 65520 on; it is faster on some consumer chips, not on Hopper. fp32 factors are multiplied as they are (but from 3.4e38
    on, which counts as infinite). `out_dtype` is that of `a`; of FP8 it is bfloat16, of int8 always int32. Any strides; FP8 and
    int8 are fastest with K contiguous, as in `weight.t()`, and have no gradients.

    `backend="auto"` takes the faster of cuBLAS and our kernels by recorded measurements (`tilewright explain matmul` says which and
    why), "triton" a kernel of ours, any other name that implementation or raises; in a compiled function too.
    """
    if a.dtype == torch.int8:
        return (a.double() @ b.double()).to(torch.int64).to(torch.int32)  # float64 products are fast, and exact here
    y = upcast(a) @ upcast(b)
    return y if y.dtype == torch.float64 else y.to(dtype_of(a, out_dtype))


def dtype_of(a: Tensor, out_dtype: str | None) -> torch.dtype:
    return DEFAULTS.get(a.dtype, a.dtype) if out_dtype is None else getattr(torch, out_dtype)


KINDS = {"e4m3": (torch.float8_e4m3fn,) * 2, "mixed": FP8[::-1], "int8": (torch.int8,) * 2}


def inputs(draw: Draw) -> dict:
    count, inner, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    kind = draw.option("kind", "float", "e4m3", "float", "float", "int8", "float", "mixed")
    shapes = (count, inner), (columns, inner)
    if kind == "int8":
        a, b = (draw.integers(*shape, low=-128, high=128, dtype=torch.int8) for shape in shapes)
    else:
        dtypes = KINDS.get(kind, (draw.dtype, draw.dtype))
        a, b = (draw.tensor(*shape, dtype=dtype, scale=s) for shape, dtype, s in zip(shapes, dtypes, (1.0, 0.5)))
    b = b.t() if draw.option("turned", True, False) else b.t().contiguous()
    return {"a": a, "b": b, "out_dtype": None if kind == "int8" else draw.option("out_dtype", None, "float32")}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def add_tile(total, a, b, HOW: tl.constexpr, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr, E5M2: tl.constexpr):
    """total + a @ b. HOW: `pieces` of floats, `half` sums of fp16 or FP8, `integer`, `codes` of FP8; bytes are FP8 codes where the
    chip has none, and E5M2 says which of a and b are e5m2."""
    if a.dtype == tl.uint8:
        a = widen_codes(a, E5M2 % 2 == 1)
        b = widen_codes(b, E5M2 // 2 == 1)
        if HOW == "half":
            total = tl.dot(a.to(tl.float16), b.to(tl.float16), total, out_dtype=tl.float16)
        else:
            total = tl.dot(a, b, total)
    elif HOW == "half":
        total = tl.dot(a, b, total, out_dtype=tl.float16)
    elif HOW == "integer":
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    elif HOW == "codes":
        total += tl.dot(a, b)
    else:
        total = add_product(total, a, b, PIECES_A, PIECES_B)
    return total


@kernel(grid=lambda a: (a.PROGRAMS,), tokens=("M", "PROGRAMS"), default=lambda a: {"num_warps": 8})
def matmul_tiles(
    A, B, Y, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_ym, stride_yn, PROGRAMS,
    HOW: tl.constexpr, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr, E5M2: tl.constexpr, BULK: tl.constexpr,
    BY_COLUMNS_A: tl.constexpr, BY_COLUMNS_B: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BULK: A and B are boxes of memory that lies as [rows, inner] and [inner, columns], or the other way round: BY_COLUMNS."""
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    ACC: tl.constexpr = tl.float16 if HOW == "half" else tl.int32 if HOW == "integer" else tl.float32
    # A loop that may not run leaves zeros in the accumulator from elsewhere, for which ptxas serialises all products
    tl.assume(K > 0)
    for t in tl.range(tl.program_id(0), down * across, PROGRAMS):
        tile, column = tile_of(t, down, across, BAND)
        row0 = tile * BLOCK_M
        col0 = column * BLOCK_N
        row = row0 + tl.arange(0, BLOCK_M)
        col = col0 + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        if BULK:
            for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                a = A.load([k0, row0]).T if BY_COLUMNS_A else A.load([row0, k0])
                b = B.load([col0, k0]).T if BY_COLUMNS_B else B.load([k0, col0])
                total = add_tile(total, a, b, HOW, PIECES_A, PIECES_B, E5M2)
        else:
            at_a = A + row.to(tl.int64)[:, None] * stride_am
            at_b = B + col.to(tl.int64)[None, :] * stride_bn
            NOTHING: tl.constexpr = 0 if HOW == "integer" or A.dtype.element_ty == tl.uint8 else 0.0
            for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)
                step = k.to(tl.int64)
                a = tl.load(at_a + step[None, :] * stride_ak, (row < M)[:, None] & (k < K)[None, :], NOTHING)
                b = tl.load(at_b + step[:, None] * stride_bk, (k < K)[:, None] & (col < N)[None, :], NOTHING)
                total = add_tile(total, a, b, HOW, PIECES_A, PIECES_B, E5M2)
        at = Y + row.to(tl.int64)[:, None] * stride_ym + col.to(tl.int64)[None, :] * stride_yn
        tl.store(at, total.to(Y.dtype.element_ty), (row < M)[:, None] & (col < N)[None, :])


# ---- host ------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The sizes that a program works on at a time, and how many steps along K are in shared memory."""

    M: int
    N: int
    K: int
    stages: int


def tile_for(a: Tensor, b: Tensor, columns: int, how: str, bulk: bool, words: bool) -> Tile:
    """The largest tile that registers and shared memory take. `words` says that all rows, or all columns, are whole words."""
    memory = Target.at(a.device).shared_memory
    wide = max(a.element_size(), b.element_size())
    if how == "pieces" and max(piece_count(a, b), piece_count(b, a)) > 1:
        # All pieces of a step are in registers and shared memory
        N, K, wide = 64, 32, 2 * wide
    else:
        # Beside sums of 256 columns there are no registers for addresses, nor for sums of codes, which are there twice
        N = 256 if bulk and how != "codes" and memory > 200 * 1024 else 128
        # What is not copied as it is, or has to be widened, passes through registers
        K = (128 if memory > 100 * 1024 and words and a.dtype != torch.uint8 else 64) // wide
    N = max(16, min(N, power_of_two(columns)))
    return Tile(128, N, K, max(1, min(4, memory // (K * (128 + N) * wide))))


def lies_by_columns(t: Tensor) -> bool | None:
    """Whether a matrix lies in memory column by column; None where bulk copies do not take it either way."""
    for answer, (long, short) in ((False, (0, 1)), (True, (1, 0))):
        step = t.stride(long)
        if t.stride(short) == 1 and step >= t.shape[short] and step * t.element_size() % 16 == 0 == t.data_ptr() % 16:
            return answer
    return None


def box(t: Tensor, by_columns: bool, block: tuple[int, int]) -> TensorDescriptor:
    """The descriptor by which bulk copies read a matrix; of one that lies by columns it is that of the transpose."""
    if by_columns:
        t, block = t.t(), block[::-1]
    made = TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))
    made.layout = "tiles"  # part of a variant's key
    return made


def how_of(a: Tensor, acc_dtype: str | None) -> str:
    if a.dtype == torch.int8:
        return "integer"
    return "half" if acc_dtype == "float16" else "codes" if a.dtype in FP8 else "pieces"


def product(a: Tensor, b: Tensor, y: Tensor, acc_dtype: str | None = None) -> Tensor:
    """Fill y [M, N], of any strides, with a [M, K] @ b [K, N]."""
    (M, K), N, how = a.shape, b.shape[1], how_of(a, acc_dtype)
    if K == 0:
        return y.zero_()
    if not y.numel():
        return y
    target, by_columns, e5m2 = Target.at(a.device), (lies_by_columns(a), lies_by_columns(b)), 0
    if a.dtype in FP8:
        e5m2 = (a.dtype == torch.float8_e5m2) + 2 * (b.dtype == torch.float8_e5m2)
        a, b, _ = operands_for_kernel(a, b)
    pieces = (piece_count(a, b), piece_count(b, a)) if how == "pieces" else (1, 1)
    words = None not in by_columns
    BULK = target.tma and pieces == (1, 1) and words
    tile = tile_for(a, b, N, how, BULK, words)
    A = box(a, by_columns[0], (tile.M, tile.K)) if BULK else a
    B = box(b, by_columns[1], (tile.K, tile.N)) if BULK else b
    tiles = cdiv(M, tile.M) * cdiv(N, tile.N)
    strides = (0,) * 4 if BULK else (*a.stride(), *b.stride())
    matmul_tiles(
        A, B, y, M, N, K, *strides, *y.stride(), min(tiles, target.sms) if BULK else tiles,
        HOW=how, PIECES_A=pieces[0], PIECES_B=pieces[1], E5M2=e5m2, BULK=BULK, BY_COLUMNS_A=BULK and by_columns[0],
        BY_COLUMNS_B=BULK and by_columns[1], BAND=BAND, BLOCK_M=tile.M, BLOCK_N=tile.N, BLOCK_K=tile.K, STAGES=tile.stages,
    )  # fmt: skip
    return y


def forward(a, b, *, acc_dtype, out_dtype, out, **_) -> Tensor:
    shape = (*a.shape[:-1], b.shape[1])
    y = torch.empty(shape, dtype=dtype_of(a, out_dtype), device=a.device) if out is None else out
    flat = y if y.dim() == 2 else y.view(math.prod(shape[:-1]), shape[-1]) if viewable(y) else None
    if flat is None:  # leading dimensions of out that cannot be one
        y.copy_(product(rows(a), b, rows(torch.empty(shape, dtype=y.dtype, device=y.device)), acc_dtype).view(shape))
        return y
    product(rows(a), b, flat, acc_dtype)
    return y


def viewable(y: Tensor) -> bool:
    """Whether the leading dimensions can be merged into one without a copy."""
    merged = [(n, s) for n, s in zip(y.shape[:-1], y.stride()) if n != 1]
    return all(s == n * t for (_, s), (n, t) in zip(merged, merged[1:]))


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b, flat = saved.a, saved.b, rows(dy)
    da = db = None
    if a.dtype not in FLOATS:  # codes, whose gradients warming up asks for all the same
        return da, db
    if "a" in saved.needs:
        da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        product(flat, b.t(), da.view(flat.shape[0], b.shape[0]))
    if "b" in saved.needs:
        db = product(rows(a).t(), flat, torch.empty(b.shape, dtype=b.dtype, device=b.device))
    return da, db


def backward_by_library(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The backward by cuBLAS, but by our kernels for an fp32 gradient of 16-bit factors.

    cuBLAS would round such a gradient, or multiply it without tensor cores.
    """
    return (library.multiply_backward if dy.dtype == saved.a.dtype else backward)(saved, dy)


def check(a, b, *, acc_dtype, out_dtype, **_) -> None:
    name = {t: name_of(t.dtype) for t in (a, b)}
    for which, t in (("a", a), ("b", b)):
        if t.dtype not in (*FLOATS, *FP8, torch.int8):
            raise TypeError(f"matmul: {which} must be a float of 16, 32 or 64 bits, FP8 or int8, got {name[t]}")
        if t.dtype in FP8 and t.requires_grad and torch.is_grad_enabled():
            raise TypeError(f"matmul: there is no gradient for FP8: pass {which}.detach()")
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise TypeError(f"matmul: a and b must have one dtype, or both be FP8, got {name[a]} and {name[b]}")
    fitting = {torch.int8: ("int32",), torch.float16: ("float32", "float16")}
    sums = fitting.get(a.dtype, ("float32", "float16") if a.dtype in FP8 else ("float32",))
    if acc_dtype not in (None, *sums):
        raise ValueError(f"matmul: acc_dtype of {name[a]} factors must be {' or '.join(sums)}, got {acc_dtype}")
    if out_dtype is not None and (out_dtype == "int32") != (a.dtype == torch.int8):
        raise ValueError(f"matmul: out_dtype must be int32 of int8, and of nothing else, got {out_dtype} of {name[a]}")
    if max(math.prod(a.shape[:-1]), *b.shape) >= 2**31 - 256:
        raise ValueError(
            f"matmul: a and b must have fewer than 2**31 - 256 rows and columns, got {list(a.shape)}, {list(b.shape)}"
        )


def flops(a, b, **_) -> int:
    return 2 * a.numel() * b.shape[1]


def result_row(a: SimpleNamespace) -> str:
    dtype = a.a.dtype if a.a.dtype == torch.float64 else dtype_of(a.a, a.out_dtype)
    return f"{name_of(dtype)}[... columns]"


matmul = Op(
    "matmul", reference, inputs,
    Triton(library.multiply, backward_by_library, library.fits_matmul, "cublaslt", library=True, out=True),
    Triton(forward, backward, single, "portable", out=True), check=check, cost=Cost(flops=flops),
    asks="backend", where={"a": "any[... inner]", "b": "any[inner columns]"}, results={"out": result_row},
    gradient=Gradient(of=("a", "b")), sharding=Sharding(("...", "columns", "inner")), bars=Bars("E", gradient="E", codes="F"),
)  # fmt: skip
