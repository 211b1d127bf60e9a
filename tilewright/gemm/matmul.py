"""A matrix product: y = act(a @ b + bias + beta * c); with dz the gradient of what act is applied to, the backward is
da = dz @ b.T, db = a.T @ dz, dbias the sum of dz over rows, dc = beta * dz. Where there is an activation, the backward multiplies
again, and a tile's sums become its part of dz: nothing of the size of y is kept for it.

fp32 factors enter bf16 tensor cores as exact sums of pieces (`device/products.py`). Sums of FP8 codes leave the tensor cores,
which keep about 14 bits of an addition on Hopper, after every 128 products. Programs go over tiles, one to an SM, where bulk
copies bring the operands, and have a tile each elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..core.draw import Draw
from ..core.format import Format, store
from ..core.target import Target
from ..core.tensor import cdiv, name_of, piece_count, power_of_two, rows
from ..device.activation import activate, activate_slope
from ..device.dependent import begin_dependent
from ..device.matrices import Added
from ..device.products import add_product, widen_codes
from ..device.store import block_of, store_rows
from ..op import Bars, Cost, Gradient, Op, Out, Sharding, Triton, single, upcast
from ..runtime.kernel import kernel
from . import few, library
from .destination import Destination, by_rows, destination
from .scaled_mm import ACTS, LARGE, Act
from .tiles import BAND, ROWS, matrix, operands_for_kernel, tile_of

OutDtype = Literal["bfloat16", "float16", "float32", "int32"]
Acc = Literal["float32", "float16", "int32"]
Backend = Literal["auto", "triton", "cublaslt", "few", "portable"]  # as in `scaled_mm.py`
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEFAULTS = {**dict.fromkeys(FP8, torch.bfloat16), torch.int8: torch.int32}


def reference(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    act: Act | None = None,
    c: Tensor | None = None,
    beta: float = 0.0,
    acc_dtype: Acc | None = None,
    out_dtype: OutDtype | None = None,
    out_format: Format | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`act(a @ b + bias + beta * c)` of `a` [..., K] and `b` [K, N], both of one dtype or both FP8: summed in `acc_dtype`, all else
    in fp32, and rounded once, to `out_dtype` or into `out_format`.

    Sums are fp32, int32 (exact) of int8. `acc_dtype="float16"`, for fp16 and FP8, may keep them in fp16: three digits, infinite
    from 65520 on; it is faster on some consumer chips, not on Hopper. fp32 factors are multiplied as they are (but from 3.4e38
    on, which counts as infinite). `out_dtype` is that of `a`; of FP8 it is bfloat16, of int8 always int32. Any strides; FP8 and
    int8 are fastest with K contiguous, as in `weight.t()`, and have no gradients. `bias` is [N] and `c` is [..., N], of any float
    dtype; `out` may be `c`. Nothing is added to sums of int8, which are integers. With `act` the gradient of what it is applied
    to stays in fp32.

    `backend="auto"` takes the faster of cuBLAS and our kernels by recorded measurements (`tilewright explain matmul` says which and
    why), "triton" a kernel of ours, any other name that implementation or raises; in a compiled function too.
    """
    if a.dtype == torch.int8:
        y = (a.double() @ b.double()).to(torch.int64).to(torch.int32)  # float64 products are fast, and exact here
        return y if out_format is None else store(y.float(), out_format, torch.float32)
    y = upcast(a) @ upcast(b)
    if bias is not None:
        y = y + upcast(bias)
    if c is not None and beta != 0.0:
        y = y + beta * upcast(c)
    if act is not None:
        y = ACTS[act](y)
    return y if y.dtype == torch.float64 and out_format is None else store(y, out_format, dtype_of(a, out_dtype))


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
    made = {"a": a, "b": b, "out_dtype": None if kind == "int8" else draw.option("out_dtype", None, "float32")}
    if kind != "int8":
        made["bias"] = draw.maybe("bias", lambda: draw.tensor(columns))
        made["c"] = draw.maybe("c", lambda: draw.tensor(count, columns))
        made["act"] = draw.option("act", None, None, "silu")
        made["beta"] = 0.0 if made["c"] is None else draw.option("beta", 1.0, 0.5)
    return made


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


@kernel(
    grid=lambda a: (a.PROGRAMS,), tokens=("M", "stride_s", "PROGRAMS"),
    default=lambda a: {"num_warps": 8 if a.BLOCK_M * a.BLOCK_N > ROWS * 64 else 4}, dependent=True,
)  # fmt: skip
def matmul_tiles(
    A, B, ADDED, DY, Y, ROW, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_bias, stride_s, PROGRAMS,
    HOW: tl.constexpr, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr, E5M2: tl.constexpr, BULK: tl.constexpr,
    BY_COLUMNS_A: tl.constexpr, BY_COLUMNS_B: tl.constexpr, ACT: tl.constexpr, FORMAT: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Tiles of Y [M, N] or, with FORMAT, its codes in ROW; where DY is given, of dy times the slope of ACT.

    BULK: A and B are boxes of memory that lies as [rows, inner] and [inner, columns], or the other way round: BY_COLUMNS."""
    begin_dependent(DEPENDENT)
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    C = ADDED.c  # not in the loop, where Triton 3.6 would take a stride of 1 in it for None
    ACC: tl.constexpr = tl.float16 if HOW == "half" else tl.int32 if HOW == "integer" else tl.float32
    # A loop that may not run leaves zeros in the accumulator from elsewhere, for which ptxas serialises all products
    stop = tl.maximum(K, 1)
    tl.assume(stop > 0)
    for t in tl.range(tl.program_id(0), down * across, PROGRAMS):
        tile, column = tile_of(t, down, across, BAND)
        row0 = tile * BLOCK_M
        col0 = column * BLOCK_N
        row = row0 + tl.arange(0, BLOCK_M)
        col = col0 + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        if BULK:
            for k0 in tl.range(0, stop, BLOCK_K, num_stages=STAGES):
                a = A.load([k0, row0]).T if BY_COLUMNS_A else A.load([row0, k0])
                b = B.load([col0, k0]).T if BY_COLUMNS_B else B.load([k0, col0])
                total = add_tile(total, a, b, HOW, PIECES_A, PIECES_B, E5M2)
        else:
            at_a = A + row.to(tl.int64)[:, None] * stride_am
            at_b = B + col.to(tl.int64)[None, :] * stride_bn
            NOTHING: tl.constexpr = 0 if HOW == "integer" or A.dtype.element_ty == tl.uint8 else 0.0
            for k0 in tl.range(0, stop, BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)
                step = k.to(tl.int64)
                a = tl.load(at_a + step[None, :] * stride_ak, (row < M)[:, None] & (k < K)[None, :], NOTHING)
                b = tl.load(at_b + step[:, None] * stride_bk, (k < K)[:, None] & (col < N)[None, :], NOTHING)
                total = add_tile(total, a, b, HOW, PIECES_A, PIECES_B, E5M2)
        inside = (row < M)[:, None] & (col < N)[None, :]
        y = total
        if HOW != "integer" or FORMAT is not None:
            y = total.to(tl.float32)
        if ADDED.bias is not None:
            y += tl.load(ADDED.bias + col.to(tl.int64) * stride_bias, col < N, 0.0).to(tl.float32)[None, :]
        if C.data is not None:
            at = C.data + row.to(tl.int64)[:, None] * C.stride_r + col.to(tl.int64)[None, :] * C.stride_c
            y += ADDED.beta * tl.load(at, inside, 0.0).to(tl.float32)
        if DY.data is not None:
            at = DY.data + row.to(tl.int64)[:, None] * DY.stride_r + col.to(tl.int64)[None, :] * DY.stride_c
            _, slope = activate_slope(y, 1.0, ACT)
            y = slope * tl.load(at, inside, 0.0).to(tl.float32)
        elif ACT is not None:
            y = activate(y, 1.0, ACT)
        if FORMAT is None:
            at = Y.data + row.to(tl.int64)[:, None] * Y.stride_r + col.to(tl.int64)[None, :] * Y.stride_c
            tl.store(at, y.to(Y.data.dtype.element_ty), inside)
        else:
            y = tl.where((col < N)[None, :], y, 0.0)  # not every activation of 0 is 0
            store_rows(y, ROW, row.to(tl.int64)[:, None], col0, (row < M)[:, None], N, stride_s, FORMAT, "")


# ---- host ------------------------------------------------------------------------------------------------------------

# Inner elements whose products are summed in the tensor cores. These cut off what fp32 would round, up to 2^-24 of a sum for every
# sixteen: some 5e-5 of a sum of so many random terms, and of 600,000 up to 1e-3 (seen on an H200)
LONG = 1 << 15


class Tile(NamedTuple):
    """The sizes that a program works on at a time, and how many steps along K are in shared memory."""

    M: int
    N: int
    K: int
    stages: int


STORED = 128  # columns of a tile that stores codes, at the most: beside sums of 256 there are no registers for them


def tile_for(
    a: Tensor, b: Tensor, how: str, bulk: bool, words: bool, matrices: bool, FORMAT: str | None
) -> Tile:  # fmt: skip
    """The largest tile that registers and shared memory take, or a smaller one where that leaves SMs without a tile. `words` says
    that all rows, or all columns, are whole words, and `matrices` that a tile reads another of its size after its sums."""
    target, columns = Target.at(a.device), b.shape[1]
    memory, wide = target.shared_memory, max(a.element_size(), b.element_size())
    pieces = how == "pieces" and max(piece_count(a, b), piece_count(b, a)) > 1
    if pieces:
        # All pieces of a step are in registers and shared memory
        N, K, wide = 64, 32, 2 * wide
    else:
        # Beside sums of 256 columns there are no registers for addresses, another matrix, or sums of codes, which are there twice
        N = 256 if bulk and how != "codes" and not matrices and memory > 200 * 1024 else 128
        # What is not copied as it is, or has to be widened, passes through registers
        K = (128 if memory > 100 * 1024 and words and a.dtype != torch.uint8 else 64) // wide
    N = max(16, min(N, power_of_two(columns)))
    if FORMAT is not None:
        N = max(min(N, STORED), block_of(FORMAT))
    largest = Tile(ROWS, N, K, max(1, min(4, memory // (K * (ROWS + N) * wide))))
    if pieces or FORMAT is not None or count_of(largest, a.shape[0], columns) >= target.sms:
        return largest
    sides = ((M, across, K * longer) for M, across, longer in SMALLER if across <= N)
    smaller = [Tile(*three, stages_of(*three, wide, memory)) for three in sides]
    return min([largest, *smaller], key=lambda tile: cycles_of(tile, *a.shape, columns, wide, target.sms))


# Rows and columns of tiles for products of which the largest would leave SMs idle, and how many times as long their steps are: one
# of the smallest would be over before its barriers are
SMALLER = ((ROWS, 128, 1), (ROWS, 64, 1), (64, 128, 1), (64, 64, 2))
SPARE = 16 * 1024  # bytes of shared memory that barriers and results on their way out may take


def stages_of(M: int, N: int, K: int, wide: int, memory: int) -> int:
    """Steps of a smaller tile in shared memory: where programs have a tile each, nothing but copies that are under way hides the
    microsecond that memory takes to answer, which is four steps of 128 x 128 x 64."""
    return max(1, min(8, (memory - SPARE) // ((M + N) * K * wide)))


def count_of(tile: Tile, rows: int, columns: int) -> int:
    return cdiv(rows, tile.M) * cdiv(columns, tile.N)


def cycles_of(tile: Tile, rows: int, inner: int, columns: int, wide: int, sms: int) -> float:
    """How long the SM with the most tiles works: an SM takes in 64 bytes a cycle, and multiplies 2048 pairs of 16 bits (the rate of
    Hopper; other chips are slower by about as much in both). Results leave at some 8 a cycle, with a bias and an activation."""
    step = max((tile.M + tile.N) * wide / 64, tile.M * tile.N * wide / 4096)
    return cdiv(count_of(tile, rows, columns), sms) * (inner * step + tile.M * tile.N / 8)


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
    return multiply(a, b, Destination(y), acc_dtype)


def multiply(
    a: Tensor,
    b: Tensor,
    to: Destination,
    acc_dtype: str | None = None,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    c: Tensor | None = None,
    beta: float = 0.0,
    dy: Tensor | None = None,
) -> Tensor:
    """Fill `to` with act(a [M, K] @ b [K, N] + bias + beta * c) or, where `dy` is given, with dy times the slope of act there."""
    (M, K), N, how = a.shape, b.shape[1], how_of(a, acc_dtype)
    if M * N == 0:
        return to.result()
    if how == "pieces" and K > LONG:
        so_far = torch.empty(M, N, dtype=torch.float32, device=a.device)
        last = (K - 1) // LONG * LONG
        for k in range(0, last, LONG):
            multiply(a[:, k : k + LONG], b[k : k + LONG], Destination(so_far), c=c, beta=beta)
            c, beta = so_far, 1.0
        return multiply(a[:, last:], b[last:], to, bias=bias, act=act, c=c, beta=beta, dy=dy)
    target, by_columns, e5m2 = Target.at(a.device), (lies_by_columns(a), lies_by_columns(b)), 0
    if a.dtype in FP8:
        e5m2 = (a.dtype == torch.float8_e5m2) + 2 * (b.dtype == torch.float8_e5m2)
        a, b, _ = operands_for_kernel(a, b)
    pieces = (piece_count(a, b), piece_count(b, a)) if how == "pieces" else (1, 1)
    words = None not in by_columns
    BULK = target.tma and pieces == (1, 1) and words and K > 0
    added = matrix(c if beta != 0.0 else None)
    tile = tile_for(a, b, how, BULK, words, added.data is not None or dy is not None, to.FORMAT)
    A = box(a, by_columns[0], (tile.M, tile.K)) if BULK else a
    B = box(b, by_columns[1], (tile.K, tile.N)) if BULK else b
    tiles = count_of(tile, M, N)
    strides = (0,) * 4 if BULK else (*a.stride(), *b.stride())
    matmul_tiles(
        A, B, Added(bias, added, float(beta)), matrix(dy), matrix(to.y), to.row, M, N, K, *strides,
        None if bias is None else bias.stride(0), to.stride_s, min(tiles, target.sms) if BULK else tiles,
        HOW=how, PIECES_A=pieces[0], PIECES_B=pieces[1], E5M2=e5m2, BULK=BULK, BY_COLUMNS_A=BULK and by_columns[0],
        BY_COLUMNS_B=BULK and by_columns[1], ACT=act, FORMAT=to.FORMAT, BAND=BAND, BLOCK_M=tile.M, BLOCK_N=tile.N,
        BLOCK_K=tile.K, STAGES=tile.stages,
    )  # fmt: skip
    return to.result()


def forward(a, b, *, bias, act, c, beta, acc_dtype, out_dtype, out_format, out, **_) -> Tensor:
    shape, flat = (*a.shape[:-1], b.shape[1]), None if c is None else rows(c)
    after = {"bias": bias, "act": act, "c": flat, "beta": beta}
    if out_format is not None:
        dtype = torch.float32 if a.dtype == torch.int8 else dtype_of(a, out_dtype)
        to = destination(out, out_format, shape, dtype, a.device, range(STORED + 1))
        return multiply(rows(a), b, to, acc_dtype, **after)
    y = torch.empty(shape, dtype=dtype_of(a, out_dtype), device=a.device) if out is None else out
    return by_rows(y, lambda to: multiply(rows(a), b, Destination(to), acc_dtype, **after))


def forward_few(a, b, *, bias, act, c, beta, out_dtype, out, **_) -> Tensor:
    """Into `few.py`'s kernels: numbers as they are have neither scales nor recipes."""
    dtype = dtype_of(a, out_dtype)
    y = torch.empty(*a.shape[:-1], b.shape[1], dtype=dtype, device=a.device) if out is None else out
    flat = None if c is None else rows(c)

    def fill(to: Tensor) -> None:
        few.forward(
            rows(a), b, None, None, None, None, zero_b=None, bias=bias, act=act, c=flat, beta=beta, out_dtype=name_of(dtype), out=to
        )  # fmt: skip

    return by_rows(y, fill)


def fits_few(target: Target, a: SimpleNamespace) -> bool:
    """Whether there are up to 64 rows of 16-bit floats, and `b` is so large that reading it is all there is to do."""
    count = math.prod(a.a.shape[:-1])
    plain = a.a.dtype in library.SIXTEEN and a.out_format is None and a.acc_dtype != "float16"
    return plain and count <= few.MOST and a.b.numel() >= LARGE and single(target, a)


def gradient_of_sums(saved: SimpleNamespace, dy: Tensor) -> Tensor:
    """The gradient [rows, columns] of what the activation is applied to, in fp32 where there is one."""
    flat = rows(dy)
    if saved.act is None:
        return flat
    to = Destination(torch.empty(flat.shape, dtype=torch.float32, device=dy.device))
    after = {"bias": saved.bias, "c": None if saved.c is None else rows(saved.c), "beta": saved.beta}
    return multiply(rows(saved.a), saved.b, to, saved.acc_dtype, act=saved.act, dy=flat, **after)


def column_sums(dz: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over rows, as a product with a row of ones, whose inner dimension programs share."""
    y = torch.empty(1, dz.shape[1], dtype=dtype, device=dz.device)
    if dz.dtype in library.SIXTEEN:
        ones = torch.full((1, dz.shape[0]), 1.0, dtype=dz.dtype, device=dz.device)
        none = dict.fromkeys(("zero_b", "bias", "act", "c"))
        few.forward(ones, dz, None, None, None, None, **none, beta=0.0, out_dtype=name_of(dtype), out=y)
    else:
        product(torch.full((1, dz.shape[0]), 1.0, dtype=torch.bfloat16, device=dz.device), dz, y)
    return y.view(-1)


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor | None, ...]:
    return gradients(saved, gradient_of_sums(saved, dy), product)


def gradients(
    saved: SimpleNamespace, dz: Tensor, multiplied: Callable[[Tensor, Tensor, Tensor], object]
) -> tuple[Tensor | None, ...]:
    """The gradients that are asked for, by `multiplied(a, b, y)`, which fills y with a product."""
    a, b = saved.a, saved.b
    da = db = dbias = dc = None
    has_gradient = a.dtype in FLOATS  # codes have none, but warming up asks for it all the same
    if has_gradient and "a" in saved.needs:
        da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        multiplied(dz, b.t(), da.view(dz.shape[0], b.shape[0]))
    if has_gradient and "b" in saved.needs:
        db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
        multiplied(rows(a).t(), dz, db)
    if "bias" in saved.needs:
        dbias = column_sums(dz, saved.bias.dtype)
    if "c" in saved.needs:
        dc = (dz.float() * saved.beta).to(saved.c.dtype).view(saved.c.shape)
    return da, db, dbias, dc


def backward_by_library(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The backward by cuBLAS, but by our kernels for an fp32 gradient of 16-bit factors.

    cuBLAS would round such a gradient, or multiply it without tensor cores.
    """
    return gradients(saved, rows(dy), library.fill_product if dy.dtype == saved.a.dtype else product)


def check(a, b, *, bias, act, c, acc_dtype, out_dtype, **_) -> None:
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
    given = [n for n, v in (("bias", bias), ("act", act), ("c", c)) if v is not None]
    if a.dtype == torch.int8 and given:
        raise ValueError(
            f"matmul: {given[0]} must be None for int8, whose sums stay integers: scaled_mm has scales too"
        )
    if max(math.prod(a.shape[:-1]), *b.shape) >= 2**31 - 256:
        raise ValueError(
            f"matmul: a and b must have fewer than 2**31 - 256 rows and columns, got {list(a.shape)}, {list(b.shape)}"
        )


def flops(a, b, **_) -> int:
    return 2 * a.numel() * b.shape[1]


def result_row(a: SimpleNamespace) -> str:
    dtype = a.a.dtype if a.a.dtype == torch.float64 else dtype_of(a.a, a.out_dtype)
    return f"{name_of(dtype)}[... columns]"


def sharding(a: SimpleNamespace) -> Sharding:
    """Sums over ranks are still to be activated or quantised: then the inner dimension is not sharded."""
    return Sharding(
        ("...", "columns", *(("inner",) if a.act is None and a.out_format is None else ())), once=("bias", "c")
    )


matmul = Op(
    "matmul", reference, inputs,
    Triton(library.multiply, backward_by_library, library.fits_matmul, "cublaslt", library=True, out=True),
    Triton(forward_few, backward, fits_few, "few", out=True), Triton(forward, backward, single, "portable", out=True),
    check=check, cost=Cost(flops=flops), asks="backend", where={
        "a": "any[... inner]", "b": "any[inner columns]", "bias": "float[columns]", "c": "float[... columns]",
    },
    results={"out": result_row}, out=Out(lies_on={"out": ("c",)}), sharding=sharding, bars=Bars("E", gradient="E", codes="F"),
    gradient=Gradient(
        of=("a", "b", "bias", "c"), shape_only=lambda values: ("bias", "c") if values["act"] is None else ()
    ),
)  # fmt: skip
