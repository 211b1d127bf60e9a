"""The engine `product`: matrices times matrices, one by one or in batches, and times vectors; with alpha and beta.

Sums are fp32, whatever torch's settings allow beneath that (`allow_bf16_reduced_precision_reduction` and its like permit less, and
ask for nothing). fp32 factors are multiplied exactly, in pieces of bf16 (`device/products.py`), unless TF32 is allowed. Large
products of 16 bits are the gemm folder's; large batches of them go by bulk copies too, where the chip has these.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..core.memory import overlapping
from ..core.target import INTERPRETING, Target
from ..core.tensor import cdiv, piece_count
from ..device.products import add_product
from ..gemm.matmul import box, lies_by_columns
from ..gemm.matmul import product as gemm_product
from ..gemm.tiles import BAND, tile_of
from ..runtime.kernel import kernel
from . import plans
from .plans import bits_of, own
from .pointwise import SMALL, number, whole_words
from .row import Declined, of_numbers, taken

TAKEN = (torch.bfloat16, torch.float16, torch.float32)
LARGE = 1 << 27  # products of a call, from which host time does not count
FEW = 1 << 22  # products, below which one small tile serves every call


# ---- kernels ---------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (cdiv(a.M, a.BLOCK_M) * cdiv(a.N, a.BLOCK_N) * a.BATCH,),
    tokens=(
        "BATCH", "M", "N", "K", "a_b", "a_m", "a_k", "b_b", "b_k", "b_n", "c_b", "c_m", "c_n", "y_b", "y_m", "y_n", "ALPHA", "BETA",
    ),
    default=lambda a: {"num_warps": 8 if a.BLOCK_M * a.BLOCK_N > 64 * 64 else 4},
)  # fmt: skip
def product_tiles(
    A, B, C, Y, BATCH, M, N, K, a_b, a_m, a_k, b_b, b_k, b_n, c_b, c_m, c_n, y_b, y_m, y_n, ALPHA: tl.int64, BETA: tl.int64,
    PIECES: tl.constexpr, TF32: tl.constexpr, UNIT_A: tl.constexpr, UNIT_B: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ALPHA A @ B + BETA C, a tile a program. UNIT: which of a factor's two strides is 1, or -1. ROWS: C and Y lie by rows.
    EVEN: sizes and other strides are whole words."""
    M = whole_words(M, EVEN)
    N = whole_words(N, EVEN)
    K = whole_words(K, EVEN)
    a_b = whole_words(a_b, EVEN)
    a_m = whole_words(a_m, EVEN)
    a_k = whole_words(a_k, EVEN)
    b_b = whole_words(b_b, EVEN)
    b_k = whole_words(b_k, EVEN)
    b_n = whole_words(b_n, EVEN)
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (down * across)).to(tl.int64)
    tile, column = tile_of(pid % (down * across), down, across, BAND)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    if UNIT_A == 0:
        a_m = 1
    if UNIT_A == 1:
        a_k = 1
    if UNIT_B == 0:
        b_k = 1
    if UNIT_B == 1:
        b_n = 1
    if ROWS:
        c_n = 1
        y_n = 1
        c_b = whole_words(c_b, EVEN)
        c_m = whole_words(c_m, EVEN)
        y_b = whole_words(y_b, EVEN)
        y_m = whole_words(y_m, EVEN)
    at_a = A + batch * a_b + m[:, None] * a_m
    at_b = B + batch * b_b + n[None, :] * b_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # A loop that may not run leaves zeros in the accumulator from elsewhere, for which ptxas serialises all products
    tl.assume(K > 0)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K).to(tl.int64)
        a = tl.load(at_a + k[None, :] * a_k, (m < M)[:, None] & (k < K)[None, :], 0.0)
        b = tl.load(at_b + k[:, None] * b_k, (k < K)[:, None] & (n < N)[None, :], 0.0)
        if TF32:
            total = tl.dot(a, b, total, input_precision="tf32")
        elif PIECES == 1:
            total = tl.dot(a, b, total)
        else:
            # Tensor cores cut off what an addition leaves over, so that six products of pieces would each take from the whole sum;
            # a tile's own sum is small, and one addition that rounds takes it over
            total += add_product(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), a, b, PIECES, PIECES)
    total = total * number(ALPHA, tl.float32)
    ok = (m < M)[:, None] & (n < N)[None, :]
    if C is not None:
        c = tl.load(C + batch * c_b + m[:, None] * c_m + n[None, :] * c_n, ok, 0).to(tl.float32)
        total += c * number(BETA, tl.float32)
    tl.store(Y + batch * y_b + m[:, None] * y_m + n[None, :] * y_n, total.to(Y.dtype.element_ty), ok)


@kernel(grid=lambda a: (a.PROGRAMS,), tokens=("BATCH", "PROGRAMS"), default=lambda a: {"num_warps": 8})
def batch_tiles(
    A, B, Y, BATCH, M, N, K, PROGRAMS, BY_COLUMNS_A: tl.constexpr, BY_COLUMNS_B: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products of matrices that follow each other, as boxes of memory: A of [BATCH * M, K], B of [BATCH * K, N], or BY_COLUMNS of
    their transposes. BLOCK_K divides K, so that no sum has terms of two; rows and columns of the next are not stored."""
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    tl.assume(K > 0)
    for t in tl.range(tl.program_id(0), BATCH * down * across, PROGRAMS):
        batch = t // (down * across)
        tile, column = tile_of(t % (down * across), down, across, BAND)
        row0 = tile * BLOCK_M
        col0 = column * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            a = A.load([batch * K + k0, row0]).T if BY_COLUMNS_A else A.load([batch * M + row0, k0])
            b = B.load([batch * N + col0, k0]).T if BY_COLUMNS_B else B.load([batch * K + k0, col0])
            total = tl.dot(a, b, total)
        row = row0 + tl.arange(0, BLOCK_M)
        col = col0 + tl.arange(0, BLOCK_N)
        at = Y + (batch.to(tl.int64) * M + row)[:, None] * N + col[None, :]
        tl.store(at, total.to(Y.dtype.element_ty), (row < M)[:, None] & (col < N)[None, :])


@kernel(
    grid=lambda a: (cdiv(a.M, a.BLOCK_M),),
    tokens=("M", "K", "a_m", "a_k", "x_k", "c_m", "y_m", "ALPHA", "BETA"),
    default=lambda a: {"num_warps": 4},
)
def vector_product(
    A, X, C, Y, M, K, a_m, a_k, x_k, c_m, y_m, ALPHA: tl.int64, BETA: tl.int64, UNIT_A: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ALPHA A @ X + BETA C of vectors X, C, Y; else as above."""
    M = whole_words(M, EVEN)
    K = whole_words(K, EVEN)
    a_m = whole_words(a_m, EVEN)
    a_k = whole_words(a_k, EVEN)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if UNIT_A == 0:
        a_m = 1
    if UNIT_A == 1:
        a_k = 1
    total = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K).to(tl.int64)
        x = tl.load(X + k * x_k, k < K, 0).to(tl.float32)
        a = tl.load(A + m[:, None] * a_m + k[None, :] * a_k, (m < M)[:, None] & (k < K)[None, :], 0).to(tl.float32)
        total += a * x[None, :]
    y = tl.sum(total, 1) * number(ALPHA, tl.float32)
    if C is not None:
        y += tl.load(C + m * c_m, m < M, 0).to(tl.float32) * number(BETA, tl.float32)
    tl.store(Y + m * y_m, y.to(Y.dtype.element_ty), m < M)


# ---- host ------------------------------------------------------------------------------------------------------------


def settings() -> Any:
    """What of torch's settings a product goes by: part of a plan's key, for no guard sees it."""
    own_ = torch.backends.cuda.matmul
    return own_.fp32_precision if hasattr(own_, "fp32_precision") else "tf32" if own_.allow_tf32 else "ieee"


def by_settings(form: Any) -> Any:
    form.settings = settings
    return form


def is_zero(number_: float) -> bool:
    return number_ == 0


def unit(t: Tensor, *, small: bool) -> int:
    """Which of a matrix's strides is 1, of those of the last two dimensions: -1 where none is, or that is not told."""
    if small:
        return -1
    return 1 if t.stride(-1) == 1 else 0 if t.stride(-2) == 1 else -1


def even(*numbers: int) -> bool:
    """Whether all are whole words."""
    return not any(n % 16 for n in numbers)


def factors(a: Tensor, b: Tensor, *others: Tensor | None) -> None:
    there = [t for t in others if t is not None]
    taken(a, b, *there)
    if a.dtype not in TAKEN or any(t.dtype != a.dtype for t in (b, *there)):
        raise Declined("other dtypes than 16 bits and fp32, or several")


def result(out: Tensor | None, shape: tuple[int, ...], like: Tensor, *operands: Tensor | None) -> Tensor:
    """Memory for the result. What is resized, cast or read is left to aten."""
    if out is None:
        return own(torch.empty(shape, dtype=like.dtype, device=like.device))
    taken(out)
    if (
        tuple(out.shape) != shape
        or out.dtype != like.dtype
        or any(s == 0 and n > 1 for s, n in zip(out.stride(), shape))
    ):
        raise Declined("a result that is resized, cast or expanded")
    if any(t is not None and overlapping(out, t) for t in operands):
        raise Declined("a result that overlaps an operand", lasting=False)
    return out


def follows(t: Tensor, by_columns: bool | None) -> bool:
    """Whether matrices of a batch follow each other without gaps, each by rows or by columns."""
    if by_columns is None:
        return False
    rows, columns = (t.shape[2], t.shape[1]) if by_columns else (t.shape[1], t.shape[2])
    return t.stride(0) == rows * columns and t.stride(2 - by_columns) == 1 and t.stride(1 + by_columns) == columns


def in_bulk(a: Tensor, b: Tensor, y: Tensor) -> bool:
    """Multiply a batch by bulk copies, if the chip has them and the matrices lie for it; whether it was done."""
    (batch, M, K), N = a.shape, b.shape[2]
    turned = lies_by_columns(a[0]), lies_by_columns(b[0])
    fits = Target.at(a.device).tma and follows(a, turned[0]) and follows(b, turned[1]) and y.is_contiguous()
    if not fits or K % 64 or batch * max(M, N, K) >= 2**31:
        return False
    plans.only_now()
    columns = 256 if N > 128 else 128
    flat = [
        t.transpose(1, 2).reshape(-1, t.shape[1]).t() if by else t.reshape(-1, t.shape[2])
        for t, by in zip((a, b), turned)
    ]
    # Of a transpose the batches follow each other along its columns, which are rows of the memory
    boxes = [box(t, by, block) for t, by, block in zip(flat, turned, ((128, 64), (64, columns)))]
    programs = min(batch * cdiv(M, 128) * cdiv(N, columns), Target.at(a.device).sms)
    batch_tiles(
        *boxes, y, batch, M, N, K, programs, BY_COLUMNS_A=turned[0], BY_COLUMNS_B=turned[1], BAND=BAND, BLOCK_M=128,
        BLOCK_N=columns, BLOCK_K=64, STAGES=4,
    )  # fmt: skip
    return True


def multiply(a: Tensor, b: Tensor, c: Tensor | None, y: Tensor, alpha: Any, beta: Any) -> Tensor:
    """Fill y [batch, M, N] with alpha a @ b + beta c."""
    (batch, M, K), N = a.shape, b.shape[2]
    plain = c is None and type(alpha) is int and alpha == 1
    work, wide = batch * M * N * K, a.dtype == torch.float32
    if plain and work >= LARGE and not wide and not INTERPRETING:
        if batch == 1 and min(M, N) >= 128:
            plans.only_now()
            gemm_product(a[0], b[0], y[0])
            return y
        if in_bulk(a, b, y):
            return y
    if wide:
        plans.by_key_alone()
    tf32 = wide and settings() == "tf32"
    small = work < FEW
    sides = unit(a, small=small), unit(b, small=small)
    steps = [s for t, side in zip((a, b), sides) for at, s in enumerate(t.stride()[1:]) if at != side]
    whole = -1 not in sides and even(M, N, K, a.stride(0) if batch > 1 else 0, b.stride(0) if batch > 1 else 0, *steps)
    double = torch.float64
    strides = (0, 0, 0) if c is None else c.stride()
    by_rows = not small and y.stride(2) == 1 and (c is None or strides[2] == 1)
    ends = (y.stride(0), y.stride(1), *strides[:2]) if by_rows else ()
    whole = whole and even(*ends[batch == 1 : 2], *ends[2 + (batch == 1) :])
    tile = (64, 64, 32) if wide else (128, 128, 64) if whole else (64, 64, 64)
    plans.launch(
        product_tiles, (a, b, c, y), (batch, M, N, K, *a.stride(), *b.stride(), *strides, *y.stride()),
        (bits_of(alpha, double), bits_of(beta, double)), PIECES=piece_count(a, b) if wide else 1, TF32=tf32,
        UNIT_A=sides[0], UNIT_B=sides[1], ROWS=by_rows, EVEN=whole, BAND=BAND, BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=tile[2],
        STAGES=3 if wide or small else 4,
    )  # fmt: skip
    return y


def run(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor | None, alpha: Any = 1, beta: Any = 0) -> Tensor:
    """A product of matrices, and beta times a term. Where beta is 0 this is not read; its shape is refused as elsewhere."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise Declined("no two matrices that fit")
    factors(a, b, c)
    shape = a.shape[0], b.shape[1]
    if c is not None:
        wanted = (1,) * (2 - c.dim()) + tuple(c.shape)
        if c.dim() > 2 or any(n not in (1, m) for n, m in zip(wanted, shape)):
            raise Declined("a term of another shape")
    if 0 in shape or not a.shape[1]:
        raise Declined("no elements")
    c = None if beta == 0 else c
    y = result(out, shape, a, a, b, c)
    seen = None if c is None else c.expand(shape)[None]
    multiply(a[None], b[None], seen, y[None], alpha, beta)
    return y


@by_settings
def mm(self: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    return run(self, mat2, None, out)


@by_settings
@of_numbers("alpha", "beta", asks={"beta": is_zero})
def addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
) -> Tensor:
    return run(mat1, mat2, self, out, alpha, beta)


@by_settings
def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    if self.dim() != 3 or mat2.dim() != 3 or self.shape[0] != mat2.shape[0] or self.shape[2] != mat2.shape[1]:
        raise Declined("no two batches that fit")
    factors(self, mat2)
    shape = self.shape[0], self.shape[1], mat2.shape[2]
    if 0 in shape or not self.shape[2]:
        raise Declined("no elements")
    return multiply(self, mat2, None, result(None, shape, self), 1, 0)


def vector(a: Tensor, x: Tensor, c: Tensor | None, out: Tensor | None, alpha: Any = 1, beta: Any = 0) -> Tensor:
    """A product of a matrix and a vector, which reads the matrix once."""
    if a.dim() != 2 or x.dim() != 1 or a.shape[1] != x.shape[0]:
        raise Declined("no matrix and vector that fit")
    factors(a, x, c)
    M, K = a.shape
    if c is not None and (c.dim() > 1 or c.numel() not in (1, M)):
        raise Declined("a term of another shape")
    if not M or not K:
        raise Declined("no elements")
    y = result(out, (M,), a, a, x, c)
    small = M * K < SMALL
    side = unit(a, small=small)
    # Of columns that lie side by side fewer rows, where there are not many: programs are more, and loops shorter
    by_columns = (128, 32) if M >= 1 << 14 else (32, 128)
    tile = (16, 64) if small else by_columns if side == 0 else (4, 1024)
    double = torch.float64
    step = 0 if c is None or c.numel() == 1 else c.stride(0)
    plans.launch(
        vector_product, (a, x, c, y), (M, K, *a.stride(), x.stride(0), step, y.stride(0)),
        (bits_of(alpha, double), bits_of(beta, double)), UNIT_A=side, EVEN=side >= 0 and even(M, K, a.stride(1 - side)),
        BLOCK_M=tile[0], BLOCK_K=tile[1],
    )  # fmt: skip
    return y


def mv(self: Tensor, vec: Tensor) -> Tensor:
    return vector(self, vec, None, None)


@of_numbers("alpha", "beta", asks={"beta": is_zero})
def addmv(
    self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
) -> Tensor:
    factors(mat, vec, self)
    if beta == 0 and (self.dim() > 1 or self.numel() not in (1, mat.shape[0])):
        raise Declined("a term of another shape")
    return vector(mat, vec, None if beta == 0 else self, out, alpha, beta)


FORMS = {
    "mm": mm, "mm.out": mm, "addmm": addmm, "addmm.out": addmm, "bmm": bmm, "mv": mv, "addmv": addmv, "addmv.out": addmv,
}  # fmt: skip
