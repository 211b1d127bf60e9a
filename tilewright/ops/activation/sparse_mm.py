"""A product with a factor most of which is 0: y = sum over i of a[i] * b[i], over those i alone where a is not 0.

A product for a few tokens is bound by reading b. Behind an activation that leaves few numbers, as the squared ReLU of RWKV's
channel mix does, a tenth of its rows may count. A program has some columns of a part of the inner dimension. It numbers the
weights a that are not 0 and reads the rows of sixteen at a time: each load is wanted, where a mask over all rows would issue ten
times as many. Parts are added up in their order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, rows
from ...device.dependent import begin_dependent
from ...gemm.tiles import matrix
from ...op import Bars, Cost, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel
from ..norm.rms_norm import sum_columns


def reference(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, of weights `a` [..., inner], most of which are 0, and rows `b` [inner, columns]: summed in fp32, rounded once.

    A weight of 0 leaves its row out: that is not read, and whatever it holds, 0 times infinity is 0 here. A row that several tokens
    want is read for each of them, which finds it in the L2: with many tokens, or few zeros, `matmul` is faster. There is no
    gradient, for it would be dense in both arguments: train with `matmul`.
    """
    wide = upcast(a)
    kept = torch.where(wide[..., None] != 0, upcast(b), 0.0)
    return (wide[..., None, :] @ kept).squeeze(-2).to(a.dtype)


def inputs(draw: Draw) -> dict[str, Tensor]:
    tokens, inner, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    kept = draw.uniform(tokens, inner, dtype=torch.float32) < draw.option("share", 0.1, 0.5, 1.0)
    return {"a": torch.where(kept, draw.tensor(tokens, inner), 0.0), "b": draw.tensor(inner, columns, scale=0.5)}


# ---- kernels ---------------------------------------------------------------------------------------------------------

CHUNK = 256  # weights that are numbered at a time
SLOTS = 16  # rows that are read at a time
COLUMNS = 256  # of a program, at most
ON_SM = 8  # programs on one SM: each waits for its weights, and then for its rows


@triton.jit
def find_slots(place, i, wanted):
    """[n]: the i of each place that is wanted, places being numbers of their own; 0 where none has it."""
    return tl.sum(tl.where(place[None, :] == wanted[:, None], i[None, :], 0), axis=1)


@kernel(
    grid=lambda a: (a.M * cdiv(a.N, a.BLOCK) * a.parts,), tokens=("M", "per", "parts"),
    default=lambda a: {"CHUNK": CHUNK, "SLOTS": SLOTS, "num_warps": 4}, dependent=True,
)  # fmt: skip
def sparse_mm_parts(
    A, B, Y, M, N, K, per, parts, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Some columns of a row of Y [parts, M, N] from weights A [M, K] and rows B [K, N], of `per` chunks of K for each part."""
    begin_dependent(DEPENDENT)
    # Programs of one part and the same columns come together: what several tokens want is then in the L2
    m = (tl.program_id(0) % M).to(tl.int64)
    unit = tl.program_id(0) // M
    across = tl.cdiv(N, BLOCK)
    col = unit % across * BLOCK + tl.arange(0, BLOCK)
    part = unit // across
    slot = tl.arange(0, SLOTS)
    total = tl.zeros([SLOTS, BLOCK], tl.float32)
    for chunk in range(part * per, tl.minimum(part * per + per, tl.cdiv(K, CHUNK))):
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        w = tl.load(A.data + m * A.stride_r + i.to(tl.int64) * A.stride_c, i < K, 0.0)
        counts = (w != 0.0).to(tl.int32)
        place = tl.where(counts > 0, tl.cumsum(counts, 0) - 1, -1)
        count = tl.sum(counts, 0)
        for first in range(0, count, SLOTS):
            there = first + slot < count
            own = find_slots(place, i, first + slot).to(tl.int64)
            weight = tl.load(A.data + m * A.stride_r + own * A.stride_c, there, 0.0).to(tl.float32)
            at = own[:, None] * B.stride_r + col.to(tl.int64)[None, :] * B.stride_c
            row = tl.load(B.data + at, there[:, None] & (col < N)[None, :], 0.0).to(tl.float32)
            total += weight[:, None] * row
    to = Y + (part.to(tl.int64) * M + m) * N + col
    tl.store(to, tl.sum(total, 0).to(Y.dtype.element_ty), col < N)


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(a: Tensor, b: Tensor) -> Tensor:
    (K, N), flat = b.shape, rows(a)
    M = flat.shape[0]
    y = torch.empty(*a.shape[:-1], N, dtype=a.dtype, device=a.device)
    if not y.numel():
        return y
    BLOCK, chunks, target = min(COLUMNS, power_of_two(N)), cdiv(K, CHUNK), Target.at(a.device)
    per = cdiv(chunks, max(1, ON_SM * target.sms // (M * cdiv(N, BLOCK))))
    parts = cdiv(chunks, max(1, per)) or 1  # of no weights at all the sum is 0
    to = torch.empty(parts, M, N, dtype=torch.float32, device=a.device) if parts > 1 else y
    sparse_mm_parts(matrix(flat), matrix(b), to, M, N, K, per, parts, BLOCK=BLOCK)
    if parts > 1:
        sum_columns(to, y, parts, M * N, PDL=target.early_launch)
    return y


def moved(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Bytes read and written: of rows those that a token wants."""
    wanted, columns, size = int((rows(a) != 0).any(0).sum()), b.shape[1], b.element_size()
    return size * (a.numel() + wanted * columns), size * math.prod(a.shape[:-1]) * columns


sparse_mm = Op(
    "sparse_mm", reference, inputs, Triton(forward, None, single),
    where={"a": "float[... inner]", "b": "a[inner columns]"}, results={"out": "a[... columns]"}, out=Out(contiguous=("out",)),
    cost=Cost(moved), bars=Bars("E"),
)  # fmt: skip
