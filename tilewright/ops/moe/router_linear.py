"""A router's linear layer: logits[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n], in fp32.

bf16 and fp16 factors are multiplied exactly and summed in fp32, from low-precision memory: no fp32 copy is made. Backward, with
the fp32 gradient dy of the logits: dx = dy @ weight, dweight = dy.T @ x, dbias the sum of dy over rows. An fp32 factor enters
the tensor cores as a sum of bf16 pieces (`device/products.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.target import Target
from ...core.tensor import cdiv, piece_count, power_of_two, rows, vector
from ...device.products import multiply, peel, sum_parts
from ...op import Bars, Cost, Gradient, Op, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from ..norm.rms_norm import sum_columns


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    precision: Literal["high", "ieee"] = "high",
) -> Tensor:
    """fp32 logits `x @ weight.T + bias`, from exact products of bf16 or fp16 `x` and `weight`.

    Factors enter the product as they are, fp32 ones too (but from 3.4e38 on, which counts as infinite). Only the gradient of
    the logits may be rounded in the backward, as `precision` says: "high" takes the nearest sum of two bf16 numbers (relative
    error 2**-17; TF32's is 2**-12), "ieee" all of it.
    """
    logits = upcast(x) @ upcast(weight).t()
    return logits if bias is None else logits + upcast(bias)


def inputs(draw: Draw) -> dict:
    draw.dim("experts", (1, 2, 7, 16, 33, 64, 100, 257))
    return {
        "x": draw.tensor("tokens", "hidden"),
        "weight": draw.tensor("experts", "hidden", scale=0.05),
        "bias": draw.maybe("bias", lambda: draw.tensor("experts")),
        "precision": draw.option("precision", "high", "ieee"),
    }


UNIT = 128  # the inner dimension is divided between programs in units of this, which every BLOCK_K divides
MOST_EXPERTS = 256  # whose gradients, BLOCK_H columns of them, one program holds in registers
# Tokens and columns of a step of the fused backward: the fewest rows that a warpgroup multiplies, and as many columns as leave
# room for three steps
BLOCK_T, BLOCK_H = 64, 128
ROWS = 16  # of the gradient that one program takes apart


def pieces_of_gradient(precision: str) -> int:
    """Of how many bf16 numbers the gradient of the logits is taken to consist."""
    return 3 if precision == "ieee" else 2


def stages(device: torch.device, bytes_a_step: int) -> int:
    """Blocks of both factors in shared memory at a time: as many as fit, four at most."""
    return max(1, min(4, Target.at(device).shared_memory // bytes_a_step))


def width(size: int, most: int) -> int:
    """Of a tile, in a dimension of this size."""
    return min(most, max(16, power_of_two(size)))


def _tile(a: Tensor, b: Tensor, M: int, N: int, BLOCK_K: int, num_warps: int, temporaries: int = 1) -> dict:
    """A configuration for tiles of M rows and N columns of a @ b."""
    bytes_a_step = BLOCK_K * (M * a.element_size() + N * b.element_size()) * temporaries
    STAGES = stages(a.device, bytes_a_step)
    return {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_K": BLOCK_K, "STAGES": STAGES, "num_warps": num_warps}


def _pieced(a: Tensor, b: Tensor, M: int, N: int) -> dict:
    """The same where programs take the factors apart: small tiles, for all pieces of a step live in registers and beside the
    factors in shared memory."""
    return _tile(a, b, width(M, 64), width(N, 64), 32, 4, temporaries=2)


def _default(a) -> dict:
    if max(a.PIECES_X, a.PIECES_W) > 1:
        return _pieced(a.X, a.W, 64, a.N)
    # 128 x 128 brings the least of both factors to each of a Hopper's 132 processors at 8192 x 256
    return _tile(a.X, a.W, 128, width(a.N, 128), 64, 8 if a.N > 64 else 4)


TILES = (128, 128, 64, 4), (64, 256, 64, 8), (64, 256, 64, 4), (64, 128, 64, 4), (128, 256, 64, 8), (128, 128, 128, 8)


def _candidates(a) -> list[dict]:
    found = [_default(a)]
    if a.PIECES_X == a.PIECES_W == 1:
        for M, N, BLOCK_K, warps in TILES:
            one = _tile(a.X, a.W, M, width(a.N, N), BLOCK_K, warps)
            # The fp32 tile passes through shared memory on its way out
            if one not in found and 4 * M * one["BLOCK_N"] <= Target.at(a.X.device).shared_memory:
                found.append(one)
    return found


def _default_backward(a, factor: Tensor, M: int, PIECES: int) -> dict:
    if max(a.PIECES_Y, PIECES) > 1:
        return _pieced(a.DY, factor, M, a.K)
    return _tile(a.DY, factor, width(M, 128), width(a.K, 128), 64, 8)


@kernel(
    grid=lambda a: (cdiv(a.M, a.BLOCK_M) * cdiv(a.N, a.BLOCK_N), a.SPLITS),
    tokens=("M", "SPLITS", "UNITS"),
    tune_by=("N", "K"),
    default=_default,
    candidates=_candidates,
)
def router_linear_forward(
    X, W, BIAS, Y, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk, SPLITS, UNITS,
    PIECES_X: tl.constexpr, PIECES_W: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y[split] is the sum over its UNITS units of the inner dimension; the bias is the first one's."""
    # Tiles of the same rows are neighbours, so that x comes from memory once and then from the L2
    tile = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    row = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    start = split * UNITS * UNIT
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    y = multiply(
        y, X, W, row, col, start, tl.minimum(start + UNITS * UNIT, K), M, N, stride_xm, stride_xk, stride_wk, stride_wn,
        PIECES_X, PIECES_W, BLOCK_K, STAGES,
    )  # fmt: skip
    if BIAS is not None:
        if split == 0:
            y += tl.load(BIAS + col, col < N, 0.0).to(tl.float32)[None, :]
    at = (split.to(tl.int64) * M + row)[:, None] * N + col[None, :]
    tl.store(Y + at, y, (row < M)[:, None] & (col < N)[None, :])


@kernel(
    grid=lambda a: (cdiv(a.M, a.BLOCK_M) * cdiv(a.K, a.BLOCK_N),),
    tokens=("M",),
    default=lambda a: _default_backward(a, a.W, 128, a.PIECES_W),
)
def router_linear_backward_x(
    DY, W, ADD, DX, M, N, K, stride_ym, stride_yn, stride_wn, stride_wk,
    STORED: tl.constexpr, PIECES_Y: tl.constexpr, PIECES_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DX from STORED matrices DY, one after the other in memory, that add up to the gradient; plus ADD unless that is None."""
    tile = tl.program_id(0)
    across = tl.cdiv(K, BLOCK_N)
    row = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    dx = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for piece in tl.static_range(STORED):
        dx = multiply(
            dx, DY + piece * M.to(tl.int64) * stride_ym, W, row, col, 0, N, M, K,
            stride_ym, stride_yn, stride_wn, stride_wk, PIECES_Y, PIECES_W, BLOCK_K, STAGES,
        )  # fmt: skip
    inside = (row < M)[:, None] & (col < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + col[None, :]
    if ADD is not None:
        dx += tl.load(ADD + at, inside, 0.0).to(tl.float32)
    tl.store(DX + at, dx.to(DX.dtype.element_ty), inside)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK_M) * cdiv(a.K, a.BLOCK_N), a.SPLITS),
    tokens=("M", "SPLITS", "UNITS"),
    default=lambda a: _default_backward(a, a.X, a.N, a.PIECES_X),
)
def router_linear_backward_weight(
    DY, X, DW, M, N, K, stride_ym, stride_yn, stride_xm, stride_xk, SPLITS, UNITS,
    STORED: tl.constexpr, PIECES_Y: tl.constexpr, PIECES_X: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DW[split] is the sum over its UNITS units of tokens, of STORED matrices DY."""
    tile = tl.program_id(0)
    across = tl.cdiv(K, BLOCK_N)
    row = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    start = split * UNITS * UNIT
    dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for piece in tl.static_range(STORED):
        dw = multiply(
            dw, DY + piece * M.to(tl.int64) * stride_ym, X, row, col, start, tl.minimum(start + UNITS * UNIT, M), N, K,
            stride_yn, stride_ym, stride_xm, stride_xk, PIECES_Y, PIECES_X, BLOCK_K, STAGES,
        )  # fmt: skip
    at = (split.to(tl.int64) * N + row)[:, None] * K + col[None, :]
    tl.store(DW + at, dw, (row < N)[:, None] & (col < K)[None, :])


MERGE = {
    "grid": lambda a: (cdiv(a.COUNT, a.BLOCK),),
    "tokens": ("COUNT", "PARTS"),
    "default": lambda a: {"BLOCK": 1024, "num_warps": 4},
}


@kernel(**MERGE)
def router_linear_merge(P, Y, COUNT, PARTS, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, sum_parts(P, at, COUNT, PARTS), at < COUNT)


@kernel(**MERGE)
def router_linear_merge_weight(P, DW, COUNT, PARTS, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(DW + at, sum_parts(P, at, COUNT, PARTS).to(DW.dtype.element_ty), at < COUNT)


@kernel(
    grid=lambda a: (cdiv(a.M, a.ROWS), cdiv(a.WIDTH, a.BLOCK)),
    tokens=("M",),
    default=lambda a: {"BLOCK": min(256, power_of_two(a.WIDTH)), "num_warps": 4},
)
def router_linear_split(
    DY, PIECE, DB, M, N, WIDTH, stride_ym, stride_yn, PIECES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """PIECE[piece, m, :WIDTH] are the bf16 pieces of DY's rows, DB[program] is the sum of DY over the program's rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < M) & (col < N)[None, :]
    rest = tl.load(DY + row * stride_ym + col.to(tl.int64)[None, :] * stride_yn, inside, 0.0)
    if DB is not None:
        tl.store(DB + tl.program_id(0).to(tl.int64) * N + col, tl.sum(rest, axis=0), col < N)
    if PIECE is not None:
        for piece in tl.static_range(PIECES):
            top, rest = peel(rest)
            at = (row + piece * M.to(tl.int64)) * WIDTH + col[None, :]
            tl.store(PIECE + at, top, (row < M) & (col < WIDTH)[None, :])


def _fused(target: Target, experts: int) -> list[dict]:
    """How the fused backward can hold all experts at once; empty where they do not fit into shared memory."""
    E = width(experts, 2 * MOST_EXPERTS)
    held = 2 * BLOCK_H * (E + BLOCK_T)  # columns of the weight, and a tile of dx on its way out
    fitting = [n for n in (3, 2) if held + n * 2 * BLOCK_T * (E + BLOCK_H) <= target.shared_memory]
    return [{"STAGES": n, "num_warps": 8} for n in fitting if E <= MOST_EXPERTS]


@kernel(
    grid=lambda a: (cdiv(a.K, a.BLOCK_H), a.RANGES),
    tokens=("M", "RANGES", "STEPS"),
    tune_by=("N", "K"),
    default=lambda a: _fused(Target.at(a.X.device), a.N)[0],
    candidates=lambda a: _fused(Target.at(a.X.device), a.N),
)
def router_linear_backward(
    PIECE, X, W, ADD, DX, DW, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk, RANGES, STEPS,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_H columns of DX, plus ADD unless that is None, and of DW[range], for a range of STEPS blocks of tokens: one load of
    dy serves both."""
    expert = tl.arange(0, EXPERTS)
    lane = tl.arange(0, BLOCK_T)
    col = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = col.to(tl.int64)[None, :]
    part = tl.program_id(1)
    inside = (expert < N)[:, None] & (col < K)[None, :]
    if DX is not None:
        w = tl.load(W + expert.to(tl.int64)[:, None] * stride_wn + column * stride_wk, inside, 0.0)
    before = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    dw = tl.zeros([EXPERTS, BLOCK_H], tl.float32)
    # A step is one piece of a block of tokens: all pieces at once would leave no room for a second step on its way
    for step in tl.range(0, STEPS * PIECES, num_stages=STAGES):
        token = (part * STEPS + step // PIECES).to(tl.int64) * BLOCK_T
        live = (token + lane < M)[:, None]
        at = (token + (step % PIECES) * M.to(tl.int64)) * WIDTH
        dy = tl.load(PIECE + at + lane[:, None] * WIDTH + expert[None, :], live & (expert < WIDTH)[None, :], 0.0)
        if DW is not None:
            row = lane.to(tl.int64)[:, None] * stride_xm + column * stride_xk
            x = tl.load(X + token * stride_xm + row, live & (col < K)[None, :], 0.0)
            dw = tl.dot(tl.trans(dy), x, dw)
        if DX is not None:
            # After dw, and in an accumulator of its own: in another order, or added up in one, ptxas serialises the products
            share = tl.dot(dy, w)
            there = token * K + lane.to(tl.int64)[:, None] * K + col[None, :]
            if step % PIECES == PIECES - 1:
                dx = (before + share).to(DX.dtype.element_ty)
                tl.store(DX + there, dx, live & (col < K)[None, :])
            if ADD is not None:
                # With the first piece: to the sum of all it would be added in another layout, with registers that are not there
                if step % PIECES == 0:
                    share += tl.load(ADD + there, live & (col < K)[None, :], 0.0).to(tl.float32)
            if PIECES == 2:
                before = share
            else:
                before = tl.where(step % PIECES == 0, share, before + share)
    if DW is not None:
        at = (part.to(tl.int64) * N + expert)[:, None] * K + col[None, :]
        tl.store(DW + at, dw, inside)


def shares(device: torch.device, tiles: int, length: int) -> tuple[int, int]:
    """(how many programs share a tile's sum of this length, how many units of it each takes): enough to fill the chip, but of
    two units at least, for every share is written and read once more."""
    units = cdiv(length, UNIT)
    each = max(2, cdiv(units, max(1, Target.at(device).sms // max(1, tiles))))
    return max(1, cdiv(units, each)), each


def forward(x, weight, bias, *, precision, out) -> Tensor:
    x2, N = rows(x), weight.shape[0]
    M, K = x2.shape
    y = out
    if y is None or not y.is_contiguous():
        y = torch.empty(*x.shape[:-1], N, dtype=torch.float32, device=x.device)
    SPLITS, UNITS = shares(x.device, cdiv(M, 128) * cdiv(N, 128), K)
    part = torch.empty(SPLITS, M, N, dtype=torch.float32, device=x.device) if SPLITS > 1 else y
    router_linear_forward(
        x2, weight, vector(bias), part, M, N, K, *x2.stride(), *weight.stride(), SPLITS, UNITS,
        PIECES_X=piece_count(x, weight), PIECES_W=piece_count(weight, x), UNIT=UNIT,
    )  # fmt: skip
    if part is not y:
        router_linear_merge(part, y, y.numel(), SPLITS)
    return y if out is None or y is out else out.copy_(y)


def split(dy: Tensor, PIECES: int, saved: SimpleNamespace) -> tuple[Tensor | None, Tensor | None]:
    """(the pieces of dy, none if PIECES is 0; dbias if it is needed), from one pass over dy [M, N]."""
    M, N = dy.shape
    WIDTH = 16 * cdiv(N, 16)  # rows of whole 16-byte words
    found = torch.empty(PIECES, M, WIDTH, dtype=torch.bfloat16, device=dy.device) if PIECES else None
    part = dbias = None
    if "bias" in saved.needs:
        part = torch.empty(cdiv(M, ROWS), N, dtype=torch.float32, device=dy.device)
        dbias = torch.empty(N, dtype=saved.bias.dtype, device=dy.device)
    if found is not None or part is not None:
        router_linear_split(dy, found, part, M, N, WIDTH, *dy.stride(), PIECES=PIECES, ROWS=ROWS)
    if part is not None:
        sum_columns(part, dbias, part.shape[0], N)
    return found, dbias


def fused_backward(saved: SimpleNamespace, dy: Tensor, add: Tensor | None = None) -> tuple:
    """dx and dweight in one launch over tiles of the hidden dimension, from dy as bf16 pieces. `add`, of x's shape, is added to
    dx before its rounding."""
    x, weight, dy = rows(saved.x), saved.weight, rows(dy)
    (M, K), N = x.shape, weight.shape[0]
    products = saved.needs & {"x", "weight"}
    found, dbias = split(dy, pieces_of_gradient(saved.precision) if products else 0, saved)
    dx = torch.empty_like(saved.x, memory_format=torch.contiguous_format) if "x" in saved.needs else None
    dweight = part = None
    blocks = cdiv(M, BLOCK_T)
    target = Target.at(x.device)
    STEPS = max(1, cdiv(blocks, max(1, target.sms // max(1, cdiv(K, BLOCK_H)))))
    RANGES = cdiv(blocks, STEPS)
    if "weight" in saved.needs:
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        part = torch.empty(RANGES, N, K, dtype=torch.float32, device=x.device)
    more = add if add is None else rows(add).contiguous()
    if products:
        router_linear_backward(
            found, x, weight, more, dx, part, M, N, K, *x.stride(), *weight.stride(), RANGES, STEPS,
            WIDTH=found.shape[-1], PIECES=found.shape[0], EXPERTS=width(N, MOST_EXPERTS), BLOCK_T=BLOCK_T, BLOCK_H=BLOCK_H,
        )  # fmt: skip
    if part is not None:
        router_linear_merge_weight(part, dweight, dweight.numel(), RANGES)
    return dx, dweight, dbias


def backward(saved: SimpleNamespace, dy: Tensor, add: Tensor | None = None) -> tuple:
    """The same by a launch for each product; factors that are not bf16 are taken apart by the programs that use them."""
    x, weight, dy = rows(saved.x), saved.weight, rows(dy)
    (M, K), N = x.shape, weight.shape[0]
    STORED, PIECES_Y = 1, pieces_of_gradient(saved.precision)
    stored = x.dtype == weight.dtype == torch.bfloat16 and bool(saved.needs & {"x", "weight"})
    found, dbias = split(dy, PIECES_Y if stored else 0, saved)
    if found is not None:
        dy, STORED, PIECES_Y = found, PIECES_Y, 1
    common = {"STORED": STORED, "PIECES_Y": PIECES_Y}
    dx = dweight = None
    if "x" in saved.needs:
        dx = torch.empty_like(saved.x, memory_format=torch.contiguous_format)
        PIECES_W = min(PIECES_Y, piece_count(weight, dy))
        more = add if add is None else rows(add).contiguous()
        strides = *dy.stride()[-2:], *weight.stride()
        router_linear_backward_x(dy, weight, more, dx, M, N, K, *strides, PIECES_W=PIECES_W, **common)
    if "weight" in saved.needs:
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        SPLITS, UNITS = shares(x.device, cdiv(N, 128) * cdiv(K, 128), M)
        part = torch.empty(SPLITS, N, K, dtype=torch.float32, device=x.device)
        PIECES_X = min(PIECES_Y, piece_count(x, dy))
        strides = *dy.stride()[-2:], *x.stride()
        router_linear_backward_weight(
            dy, x, part, M, N, K, *strides, SPLITS, UNITS, PIECES_X=PIECES_X, UNIT=UNIT, **common
        )
        router_linear_merge_weight(part, dweight, dweight.numel(), SPLITS)
    return dx, dweight, dbias


def fuses(target: Target, a: SimpleNamespace) -> bool:
    """bf16 factors, and all experts fit into one program."""
    low = a.x.dtype == a.weight.dtype == torch.bfloat16
    return low and single(target, a) and bool(_fused(target, a.weight.shape[0]))


router_linear = Op(
    "router_linear", reference, inputs, Triton(forward, fused_backward, fuses, "fused", out=True),
    Triton(forward, backward, single, "products", out=True),
    cost=Cost(flops=lambda x, weight, **_: 2 * x.numel() * weight.shape[0]),
    where={"x": "float[... hidden]", "weight": "float[experts+ hidden]", "bias": "float[experts+]"},
    results={"out": "wide(x)[... experts]"}, sharding=Sharding(("...", "experts")), bars=Bars("E", gradient="F"),
    gradient=Gradient(of=("x", "weight", "bias"), shape_only=lambda values: ("bias",)),
)  # fmt: skip
