"""Products of scaled codes in Triton: every format, size, layout and chip (`scaled_mm.py` has the contract).

A step goes over 128 of the inner dimension, or 64 where codes are widened. Scales of small blocks are multiplied into the codes,
which is exact in bf16: e8m0 changes exponents alone, e4m3 times e2m1 has 6 significant bits; only beyond bf16's range, 2**-133 to
2**128, do such numbers become 0 or infinite. Scales of 128 elements multiply the sum of a step, those of rows and of the whole the
sum. Zero points are subtracted from the codes before they are multiplied (`device/load.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv, power_of_two
from ..device.activation import activate
from ..device.load import four_bits, load_bytes, load_operand, load_scales
from ..device.matrices import Added, Factor, Strides
from ..device.products import add_product
from ..device.store import block_of, store_rows
from ..op import single
from ..runtime.kernel import kernel
from .arithmetic import math_of
from .destination import destination
from .operands import BLOCKS, inner_of, kind_of
from .tiles import BAND, matrix, tile_of

EXACT = 131071  # so many products of two int8 codes, also of -128, stay below 2**31
LARGEST = 2**31 - 256  # rows, columns and inner elements are counted in 32 bits
NARROW, WIDEST = 64, 128  # columns of a tile


class Coding(NamedTuple):
    """How an operand is stored and multiplied: the kind of its codes; for how many rows and inner elements a scale is, 0 for all of
    them; and how many bf16 numbers hold one of its values (`device/products.py`)."""

    KIND: str
    DOWN: int
    ACROSS: int
    PIECES: int


@triton.jit
def load_line(
    S, row0, first, ROWS, STRIDES, DOWN: tl.constexpr, ACROSS: tl.constexpr, COUNT: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Scales, or zero points, at element `first`, each for DOWN rows (0: all) and ACROSS elements (0: all), along AXIS of a matrix:
    one for each of COUNT rows, or one for all of them, for tiles do not go beyond a block of 128 rows."""
    at = S
    if ACROSS > 0:
        at += (first // ACROSS).to(tl.int64) * STRIDES.k
    if DOWN == 1:
        row = row0 + tl.expand_dims(tl.arange(0, COUNT), 1 - AXIS)
        return tl.load(at + row.to(tl.int64) * STRIDES.r, row < ROWS, 0.0)
    else:
        # Of one element, not a scalar: pipelined loads of scalars are reported to race in a fork of Triton
        line = (row0 // 128 if DOWN > 0 else 0) + tl.arange(0, 1)[:, None]
        return tl.load(at + line.to(tl.int64) * STRIDES.r)


@triton.jit
def multiply_scaled_codes(
    A, B, row0, col0, M, N, K, STRIDES_SA, STRIDES_SB, CODING_A: tl.constexpr, CODING_B: tl.constexpr, STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The tile at `row0`, `col0` by instructions that take codes and scales of small blocks; STEP divides K."""
    KIND_A: tl.constexpr = CODING_A.KIND
    KIND_B: tl.constexpr = CODING_B.KIND
    ACROSS: tl.constexpr = CODING_A.ACROSS
    row, col = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(0, K, STEP, num_stages=STAGES):
        first = tl.multiple_of(at, STEP)
        a = load_bytes(A.codes, row, first, M, K, A.stride_r, A.stride_k, KIND_A, STEP)
        b = load_bytes(B.codes, col, first, N, K, B.stride_r, B.stride_k, KIND_B, STEP)
        sa = load_scales(A.scale, row, first, M, K, STRIDES_SA.r, STRIDES_SA.k, ACROSS, STEP)
        sb = load_scales(B.scale, col, first, N, K, STRIDES_SB.r, STRIDES_SB.k, ACROSS, STEP)
        total = tl.dot_scaled(a, sa, KIND_A, b.T, sb, KIND_B, total)
    return total


@triton.jit
def multiply_steps(
    A, B, row0, col0, M, N, K, STRIDES_SA, STRIDES_SB, STRIDES_ZB, CODING_A: tl.constexpr, CODING_B: tl.constexpr,
    MATH: tl.constexpr, PROMOTE: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The tile at `row0`, `col0`, in int32 where MATH is int8 and nothing is to be added up beyond a step (PROMOTE)."""
    KIND_A: tl.constexpr = CODING_A.KIND
    KIND_B: tl.constexpr = CODING_B.KIND
    ACROSS_A: tl.constexpr = CODING_A.ACROSS
    ACROSS_B: tl.constexpr = CODING_B.ACROSS
    DOWN_A: tl.constexpr = CODING_A.DOWN
    DOWN_B: tl.constexpr = CODING_B.DOWN
    PIECES_A: tl.constexpr = CODING_A.PIECES
    PIECES_B: tl.constexpr = CODING_B.PIECES
    HALVES: tl.constexpr = four_bits(KIND_A) or four_bits(KIND_B)
    SUM: tl.constexpr = tl.int32 if MATH == "int8" else tl.float32
    SMALL_A: tl.constexpr = ACROSS_A if ACROSS_A < 128 else 0
    SMALL_B: tl.constexpr = ACROSS_B if ACROSS_B < 128 else 0
    row, col = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if PROMOTE else SUM)
    # A loop that may not run leaves zeros in the accumulator from elsewhere, for which ptxas serialises all products
    stop = tl.maximum(K, 1)
    tl.assume(stop > 0)
    for at in tl.range(0, stop, STEP, num_stages=STAGES):
        first = tl.multiple_of(at, STEP)
        zero = None
        if B.zero is not None:
            zero = load_line(B.zero, col0, first, N, STRIDES_ZB, DOWN_B, ACROSS_B, BLOCK_N, 0)
        a, odd_a = load_operand(
            A.codes, A.scale, row, first, M, K, A.stride_r, A.stride_k, STRIDES_SA.r, STRIDES_SA.k, None, KIND_A, SMALL_A,
            MATH if PIECES_A == 1 else "f32", HALVES, STEP,
        )  # fmt: skip
        b, odd_b = load_operand(
            B.codes, B.scale, col, first, N, K, B.stride_r, B.stride_k, STRIDES_SB.r, STRIDES_SB.k, zero, KIND_B, SMALL_B,
            MATH if PIECES_B == 1 else "f32", HALVES, STEP,
        )  # fmt: skip
        if PROMOTE:
            part = tl.zeros([BLOCK_M, BLOCK_N], SUM)
            part = add_codes(part, a, b, odd_a, odd_b, PIECES_A, PIECES_B, HALVES).to(tl.float32)
            if ACROSS_A == 128:
                sa = load_line(A.scale, row0, first, M, STRIDES_SA, DOWN_A, ACROSS_A, BLOCK_M, 0)
            if ACROSS_B == 128:
                sb = load_line(B.scale, col0, first, N, STRIDES_SB, DOWN_B, ACROSS_B, BLOCK_N, 1)
            if ACROSS_A == 128 and ACROSS_B == 128 and (DOWN_A == 128 or DOWN_B == 128):
                part *= sa * sb  # one of them is one number
            else:
                if ACROSS_A == 128:
                    part *= sa
                if ACROSS_B == 128:
                    part *= sb
            total += part
        else:
            total = add_codes(total, a, b, odd_a, odd_b, PIECES_A, PIECES_B, HALVES)
    return total


@triton.jit
def add_codes(
    total, a, b, odd_a, odd_b, PIECES_A: tl.constexpr, PIECES_B: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """total + a @ b.T, and + odd_a @ odd_b.T where operands come in halves."""
    if a.dtype == tl.int8:
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
        if HALVES:
            total = tl.dot(odd_a, odd_b.T, total, out_dtype=tl.int32)
    else:
        total = add_product(total, a, b.T, PIECES_A, PIECES_B)
        if HALVES:
            total = add_product(total, odd_a, odd_b.T, PIECES_A, PIECES_B)
    return total


def is_narrow(b: Coding, math: str, promote: bool) -> bool:
    """Whether tiles have at most NARROW columns: with scales of all columns in every step, or wide operands beside two sums, more
    would spill."""
    return (b.DOWN == 1 and b.ACROSS == 128) or (math in ("bf16", "fp16") and promote)


def _shape(a: Any) -> dict[str, Any]:
    codes_a, codes_b = a.A.codes, a.B.codes
    target = Target.at(codes_a.device)
    widened = a.MATH in ("bf16", "fp16")
    most = WIDEST if target.shared_memory > 100 * 1024 else 64
    M, N = (max(16, min(most, power_of_two(size))) for size in (a.M, a.N))
    # Of fewer rows the compiler makes fp16 products on Hopper, and widens block-scaled codes on Blackwell
    M = {"fp8": max(M, 64), "scaled": most}.get(a.MATH, M)
    if is_narrow(a.CODING_B, a.MATH, a.PROMOTE):
        N = min(NARROW, N)
    N = max(N, 1 if a.FORMAT is None else block_of(a.FORMAT))
    STEP = 64 if widened and not a.PROMOTE else 128
    # Codes as they come, several steps at a time, and what they are widened to, once
    codes = (M * codes_a.element_size() + N * codes_b.element_size()) * STEP
    wide = 2 * (M + N) * STEP * max(a.CODING_A.PIECES, a.CODING_B.PIECES) if widened else 0
    STAGES = max(1, min(3 if widened else 4, (target.shared_memory - wide) // codes))
    work = M * N * (2 if widened else 1)
    return {"BLOCK_M": M, "BLOCK_N": N, "STEP": STEP, "STAGES": STAGES, "num_warps": 8 if work >= 64 * 128 else 4}


@kernel(
    grid=lambda a: (cdiv(a.M, a.BLOCK_M) * cdiv(a.N, a.BLOCK_N),), default=_shape,
    tokens=("M", "stride_s", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "stride_zn", "stride_zk"),
)  # fmt: skip
def scaled_product(
    A, B, ADDED, Y, ROW, M, N, K, stride_bias, stride_s, stride_sam, stride_sak, stride_sbn, stride_sbk, stride_zn, stride_zk,
    CODING_A: tl.constexpr, CODING_B: tl.constexpr, MATH: tl.constexpr, PROMOTE: tl.constexpr, ACT: tl.constexpr,
    FORMAT: tl.constexpr, BAND: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of Y [M, N] from factors A [M, K] and B [N, K] or, with FORMAT, its codes in ROW."""
    STRIDES_SA = Strides(stride_sam, stride_sak)
    STRIDES_SB = Strides(stride_sbn, stride_sbk)
    down, across = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), BAND)
    row0, col0 = down * BLOCK_M, across * BLOCK_N
    if MATH == "scaled":
        y = multiply_scaled_codes(
            A, B, row0, col0, M, N, K, STRIDES_SA, STRIDES_SB, CODING_A, CODING_B, STEP, BLOCK_M, BLOCK_N, STAGES
        )  # fmt: skip
    else:
        y = multiply_steps(
            A, B, row0, col0, M, N, K, STRIDES_SA, STRIDES_SB, Strides(stride_zn, stride_zk), CODING_A, CODING_B, MATH, PROMOTE,
            STEP, BLOCK_M, BLOCK_N, STAGES,
        ).to(tl.float32)  # fmt: skip
    if A.scale is not None and CODING_A.ACROSS == 0:
        y *= load_line(A.scale, row0, 0, M, STRIDES_SA, CODING_A.DOWN, 0, BLOCK_M, 0)
    if B.scale is not None and CODING_B.ACROSS == 0:
        y *= load_line(B.scale, col0, 0, N, STRIDES_SB, CODING_B.DOWN, 0, BLOCK_N, 1)
    row, col = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N)
    if A.shared is not None:
        y *= tl.load(A.shared)
    if B.shared is not None:
        y *= tl.load(B.shared)
    if ADDED.bias is not None:
        y += tl.load(ADDED.bias + col.to(tl.int64) * stride_bias, col < N, 0.0).to(tl.float32)[None, :]
    inside = (row < M)[:, None] & (col < N)[None, :]
    C = ADDED.c
    if C.data is not None:
        at = C.data + row.to(tl.int64)[:, None] * C.stride_r + col.to(tl.int64)[None, :] * C.stride_c
        y += ADDED.beta * tl.load(at, inside, 0.0).to(tl.float32)
    if ACT is not None:
        y = activate(y, 1.0, ACT)
    if FORMAT is None:
        at = Y.data + row.to(tl.int64)[:, None] * Y.stride_r + col.to(tl.int64)[None, :] * Y.stride_c
        tl.store(at, y.to(Y.data.dtype.element_ty), inside)
    else:
        y = tl.where((col < N)[None, :], y, 0.0)  # not every activation of 0 is 0
        store_rows(y, ROW, row.to(tl.int64)[:, None], col0, (row < M)[:, None], N, stride_s, FORMAT, "")


# ---- host ------------------------------------------------------------------------------------------------------------


def fits(target: Target, a: SimpleNamespace) -> bool:
    return single(target, a) and max(a.a.shape[0], a.b.shape[1], inner_of(a.a)) < LARGEST


def settings(target: Target, a: Tensor, b: Tensor, recipe_a, recipe_b, zero_b, accumulate: str) -> dict[str, Any]:
    """The constants that the kernel is compiled with for a product of a [M, K] and b [N, K]."""
    kinds, K = (kind_of(a, recipe_a), kind_of(b, recipe_b)), inner_of(a)
    half = torch.float16 in (a.dtype, b.dtype)
    math = math_of(target, kinds, (recipe_a, recipe_b), zero_b is not None, half, K % 128 == 0)
    made: dict[str, Any] = {"MATH": math, "PROMOTE": False}
    for side, codes, kind, recipe in (("A", a, kinds[0], recipe_a), ("B", b, kinds[1], recipe_b)):
        down, across = BLOCKS.get(recipe or "", (0, 0))
        # int8 times e4m3 has 11 significant bits, as fp16 has
        two = codes.dtype == torch.float16 or (kind == "int8" and recipe == "BlockWise1x16")
        made[f"CODING_{side}"] = Coding(kind, down, across, 2 if math == "bf16" and two else 1)
        made["PROMOTE"] |= across == 128
    # Hopper's tensor cores keep 14 bits of sums of FP8 products
    made["PROMOTE"] |= math == "fp8" and accumulate == "full"
    made["PROMOTE"] |= math == "int8" and K > EXACT
    return made


def for_kernel(t: Tensor | None, target: Target) -> Tensor | None:
    """Codes or scales as the kernel takes them: as bytes where Triton has no such type on the chip."""
    bytewise = t is not None and t.is_floating_point() and t.element_size() == 1
    return t.view(torch.uint8) if bytewise and (t.dtype == torch.float8_e8m0fnu or not target.fp8_products) else t


def strides(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if t is None else t.stride()


def forward(
    a, b, scale_a, scale_b, recipe_a, recipe_b, *, shared_a, shared_b, zero_b, bias, act, c, beta, out_dtype, accumulate,
    out_format, out, **_,
) -> Tensor:  # fmt: skip
    b, target = b.t(), Target.at(a.device)
    M, N, K = a.shape[0], b.shape[0], inner_of(a)
    if K == 0:  # nothing that could be scaled: there may be no scales, and those that there are may be NaN
        scale_a = scale_b = recipe_a = recipe_b = shared_a = shared_b = zero_b = None
    how = settings(target, a, b, recipe_a, recipe_b, zero_b, accumulate)
    columns = NARROW if is_narrow(how["CODING_B"], how["MATH"], how["PROMOTE"]) else WIDEST
    to = destination(out, out_format, (M, N), getattr(torch, out_dtype), a.device, range(columns + 1))
    codes_a, codes_b, sa, sb = (for_kernel(t, target) for t in (a, b, scale_a, scale_b))
    scaled_product(
        Factor(codes_a, *a.stride(), sa, None, shared_a), Factor(codes_b, *b.stride(), sb, zero_b, shared_b),
        Added(bias, matrix(c if beta != 0.0 else None), float(beta)), matrix(to.y), to.row, M, N, K,
        None if bias is None else bias.stride(0), to.stride_s, *strides(scale_a), *strides(scale_b), *strides(zero_b), **how,
        ACT=act, FORMAT=to.FORMAT, BAND=BAND,
    )  # fmt: skip
    return to.result()
