"""Softmax over the last dimension: y = exp(x - m) / sum(exp(x - m)), m the largest of a row; backward dx = y * (dy - sum(dy * y)).

A row that is all -inf, masked from end to end, gives 0, and so does its backward. The backward computes y anew from x, so that its
gradient is rounded once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.tensor import cdiv, power_of_two, rows
from ...device.dependent import begin_dependent
from ...device.softmax import LOG2E, finite_or_zero
from ...gemm.tiles import matrix
from ...op import Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel

HELD = 16384  # columns, the longest row that a program holds; of a longer one it takes CHUNK after CHUNK, twice
CHUNK = 4096
LANES = 512


def reference(x: Tensor) -> Tensor:
    """The softmax of each row of `x`, in fp32 and rounded once; a row that is all -inf gives 0. It may be stored over `x`."""
    z = upcast(x)
    masked = (z == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(z.masked_fill(masked, 0.0), -1).masked_fill(masked, 0.0).to(x.dtype)


def inputs(draw: Draw) -> dict[str, Any]:
    x = draw.tensor("tokens", "hidden", scale=draw.option("spread", 2.0, 8.0))
    masked = draw.option("masked", "none", "some", "rows")
    if masked == "some":
        x = x.masked_fill(draw.uniform("tokens", "hidden") < 0.3, -torch.inf)
    elif masked == "rows":
        x = x.masked_fill(draw.uniform("tokens", 1) < 0.5, -torch.inf)
    return {"x": x}


@triton.jit
def shift_of(m):
    """What is subtracted from a row: its largest number, but 0 where that is -inf, so that no term is NaN."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def share_of(m, s):
    """1 / sum; 0 where there is nothing. A row with an infinity above is NaN, as in torch."""
    r = tl.where(s == 0.0, 0.0, tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s))
    return tl.where(m == float("inf"), float("nan"), r)


@triton.jit
def row_sums(X, DY, row, N, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """(largest, sum of exponentials, sum of those times dy) of a long row, each [1, 1], in one trip over it. Lanes keep their own
    largest number, so that a step needs no exchange between threads."""
    m = tl.full([LANES], -float("inf"), tl.float32)
    s = tl.zeros([LANES], tl.float32)
    t = tl.zeros([LANES], tl.float32)
    lane = tl.arange(0, CHUNK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, N, CHUNK):
        col = (start + lane).to(tl.int64)
        x = tl.load(X.data + row * X.stride_r + col * X.stride_c, col < N, -float("inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(x, 0))
        base = finite_or_zero(new)
        e = tl.exp2((x - base[None, :]) * LOG2E)
        old = tl.exp2((m - base) * LOG2E)
        s = s * old + tl.sum(e, 0)
        if DY is not None:
            dy = tl.load(DY.data + row * DY.stride_r + col * DY.stride_c, col < N, 0.0).to(tl.float32)
            t = t * old + tl.sum(e * dy, 0)
        m = new
    largest = tl.max(m, 0)
    old = tl.exp2((m - finite_or_zero(largest)) * LOG2E)
    one = tl.zeros([1, 1], tl.float32)
    return one + largest, one + tl.sum(s * old, 0), one + tl.sum(t * old, 0)


def _rows(a: Any) -> dict[str, int]:
    # A tile has 1024 numbers or more: a number at least for each thread, and 32 at most
    size = a.BLOCK if a.HELD else CHUNK
    return {"ROWS": max(1, 1024 // a.BLOCK) if a.HELD else 1, "num_warps": min(16, max(4, size // 1024))}


ROWS = {"grid": lambda a: (cdiv(a.M, a.ROWS),), "tokens": ("M",), "default": _rows}


@kernel(**ROWS, dependent=True)
def softmax_forward(
    X, Y, M, N, HELD: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """If HELD, BLOCK columns are whole rows; else a program goes over a row in steps of BLOCK."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    if HELD:
        inside = (row < M) & (lane < N)
        x = tl.load(X.data + row * X.stride_r + lane * X.stride_c, inside, -float("inf")).to(tl.float32)
        m = tl.max(x, 1, keep_dims=True)
        e = tl.exp2((x - shift_of(m)) * LOG2E)
        y = e * share_of(m, tl.sum(e, 1, keep_dims=True))
        tl.store(Y.data + row * Y.stride_r + lane * Y.stride_c, y.to(Y.data.dtype.element_ty), inside)
    else:
        m, s, _ = row_sums(X, None, row, N, BLOCK, LANES)
        share = share_of(m, s)
        for start in range(0, N, BLOCK):
            col = start + lane
            x = tl.load(X.data + row * X.stride_r + col * X.stride_c, col < N, -float("inf")).to(tl.float32)
            y = tl.exp2((x - shift_of(m)) * LOG2E) * share
            tl.store(Y.data + row * Y.stride_r + col * Y.stride_c, y.to(Y.data.dtype.element_ty), col < N)


@kernel(**ROWS)
def softmax_backward(X, DY, DX, M, N, HELD: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """DX is contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    if HELD:
        inside = (row < M) & (lane < N)
        x = tl.load(X.data + row * X.stride_r + lane * X.stride_c, inside, -float("inf")).to(tl.float32)
        dy = tl.load(DY.data + row * DY.stride_r + lane * DY.stride_c, inside, 0.0).to(tl.float32)
        m = tl.max(x, 1, keep_dims=True)
        e = tl.exp2((x - shift_of(m)) * LOG2E)
        y = e * share_of(m, tl.sum(e, 1, keep_dims=True))
        dx = y * (dy - tl.sum(dy * y, 1, keep_dims=True))
        tl.store(DX + row * N + lane, dx.to(DX.dtype.element_ty), inside)
    else:
        m, s, t = row_sums(X, DY, row, N, BLOCK, LANES)
        share = share_of(m, s)
        mean = t * share
        for start in range(0, N, BLOCK):
            col = start + lane
            x = tl.load(X.data + row * X.stride_r + col * X.stride_c, col < N, -float("inf")).to(tl.float32)
            dy = tl.load(DY.data + row * DY.stride_r + col * DY.stride_c, col < N, 0.0).to(tl.float32)
            dx = tl.exp2((x - shift_of(m)) * LOG2E) * share * (dy - mean)
            tl.store(DX + row * N + col, dx.to(DX.dtype.element_ty), col < N)


def held(N: int) -> dict[str, Any]:
    """How a program takes rows of N columns."""
    return {"HELD": N <= HELD, "BLOCK": power_of_two(N) if N <= HELD else CHUNK, "LANES": LANES}


def forward(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    X, Y = rows(x), rows(y)
    softmax_forward(matrix(X), matrix(Y), *X.shape, **held(X.shape[1]))
    return y if Y.data_ptr() == y.data_ptr() else y.copy_(Y.view(y.shape))  # dimensions that no one stride describes


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor]:
    X, DY = rows(saved.x), rows(dy)
    dx = torch.empty(saved.x.shape, dtype=saved.x.dtype, device=saved.x.device)
    softmax_backward(matrix(X), matrix(DY), dx, *X.shape, **held(X.shape[1]))
    return (dx,)


softmax = Op(
    "softmax", reference, inputs, Triton(forward, backward, single), where={"x": "float[... hidden]"},
    results={"y": "x[... hidden]"}, out=Out(lies_on={"y": ("x",)}), gradient=Gradient(of=("x",)), sharding=Sharding(),
)  # fmt: skip
