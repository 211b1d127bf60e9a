"""RMS norm and the router's product of what it gives: y = x * rstd * weight, rstd = 1 / sqrt(mean(x**2) + eps), and
logits[m, e] = sum over k of y[m, k] * router[e, k] in fp32, of y rounded to x's dtype: `rms_norm`, then `router_linear`.

Backward, with the gradient g = dy + dlogits @ router of y: dx and dweight are those of `rms_norm` for g, drouter is
dlogits.T @ y. y is computed again from x and rstd: a quantised one is not what was multiplied, and a plain one, kept, would
cost its memory until the backward.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.format import Format, store
from ...core.signature import at_least
from ...core.target import Target
from ...core.tensor import cdiv, rows, vector
from ...device.store import Way, store_tile
from ...formats.fill import alignment, column_way, is_fast, row_way
from ...formats.fp8 import Fp8
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from ..moe.router_linear import backward as product_backward
from ..moe.router_linear import forward as product
from ..moe.router_linear import fused_backward, fuses, width
from .rms_norm import gradients, launch_rows, load_weight, normalised, quantised


def reference(
    x: Tensor, weight: Tensor | None, router: Tensor, eps: float = 1e-6, *, out_format: Format | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, logits): `rms_norm(x, weight, eps)`, and the fp32 logits `y @ router.T` from exact products of `y` in x's dtype.

    These are the logits of the layers one by one, `router_linear(rms_norm(x, weight, eps), router)`, where y is rounded between
    the two; a product of the fp32 y would not be. `out_format` gives a `Quantized` y; the logits are those of the plain one. The
    gradient of the logits enters the products of the backward as the nearest sum of two bf16 numbers, and the gradient of y is
    rounded to x's dtype once.
    """
    wide = upcast(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y * upcast(weight)
    logits = upcast(y.to(x.dtype)) @ upcast(router).t()
    return store(y, out_format, x.dtype), logits, rstd.squeeze(-1).detach()


def inputs(draw: Draw) -> dict:
    draw.dim("experts", (1, 7, 33, 257))
    return {
        "x": draw.tensor("tokens", "hidden"),
        "weight": draw.maybe("weight", lambda: draw.tensor("hidden", scale=0.5, shift=1.0)),
        "router": draw.tensor("experts", "hidden", scale=0.05),
    }


BLOCK_K = 64  # columns of a step of the product
TILE = 128  # rows and columns of a block that is stored as codes
MOST_EXPERTS = 512  # beyond, too many programs would read the same rows


def _config(a, BLOCK_M: int, BLOCK_N: int, num_warps: int) -> dict:
    # Beside the steps on their way there is a block of y that leaves, and one that enters a product
    steps = Target.at(a.X.device).shared_memory // (2 * BLOCK_K * (BLOCK_M + BLOCK_N)) - 1
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "STAGES": max(1, min(4, steps)), "num_warps": num_warps}


def _candidates(a) -> list[dict]:
    """The first is the default."""
    if a.FORMAT is not None:
        # Two programs share a block of rows: 8192 rows are 64 blocks, and a Hopper has 132 processors
        return [_config(a, TILE, min(128, max(16, width(a.E, 256) // 2)), 8)]
    if a.E <= 128:
        return [_config(a, 64, width(a.E, 128), 4), _config(a, 64, width(a.E, 128), 8)]
    return [_config(a, 128, 128, 8), _config(a, 64, 256, 8), _config(a, 64, 128, 4)]


@triton.jit
def normed(x, rstd, W, k, N):
    """y in fp32 from x [m, n] and rstd [m, 1], at columns `k` [n]."""
    y = x.to(tl.float32) * rstd
    if W is not None:
        y = y * load_weight(W, k, k < N, None)[None, :]
    return y


@triton.jit
def rows_of_four(x):
    """[4n, k] as four [n, k], the i-th of rows 4g+i."""
    pairs = tl.permute(tl.reshape(x, (x.shape[0] // 4, 2, 2, x.shape[1])), (0, 3, 1, 2))
    even, odd = tl.split(pairs)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def load_tile(X, start, left, N, stride_xm, stride_xn):
    """128 rows of x from column `start` on, as four tensors; 0 outside."""
    # start // N is 0 (where it is not, nothing is read), which no compiler knows: it would keep all row offsets, and spill
    r = 4 * tl.arange(0, 32)[:, None] + start // N
    k = start + tl.arange(0, 128)[None, :]
    at = X + r.to(tl.int64) * stride_xm + k.to(tl.int64) * stride_xn
    down = tl.full((), 1, tl.int64) * stride_xm
    x0 = tl.load(at, (r < left) & (k < N), 0.0)
    x1 = tl.load(at + down, (r + 1 < left) & (k < N), 0.0)
    x2 = tl.load(at + 2 * down, (r + 2 < left) & (k < N), 0.0)
    x3 = tl.load(at + 3 * down, (r + 3 < left) & (k < N), 0.0)
    return x0, x1, x2, x3


@triton.jit
def store_codes(
    X, W, Y, S, YT, ST, block, turn, across, rstd, M, N, stride_xm, stride_xn, stride_s, stride_st,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Codes of 128 rows of y, row-wise, column-wise or both: every `across`-th block of 128 columns, one fetched ahead."""
    first = block.to(tl.int64) * 128
    left = tl.minimum(M - first, 128).to(tl.int32)
    X += first * stride_xm
    if Y is not None:
        Y += first * N
        S += first
    if YT is not None:
        YT += first
    s0, s1, s2, s3 = rows_of_four(rstd)
    x0, x1, x2, x3 = load_tile(X, turn * 128, left, N, stride_xm, stride_xn)
    for start in range(turn * 128, N, across * 128):
        a0, a1, a2, a3 = load_tile(X, start + across * 128, left, N, stride_xm, stride_xn)
        k = start + tl.arange(0, 128)
        y0 = normed(x0, s0, W, k, N)
        y1 = normed(x1, s1, W, k, N)
        y2 = normed(x2, s2, W, k, N)
        y3 = normed(x3, s3, W, k, N)
        store_tile(
            y0, y1, y2, y3, Way(Y, S, None, None, None), Way(YT, ST, None, None, None), start // N, start, block, block * 0,
            left, M, N, stride_s, stride_st, FORMAT, ALIGN, False, FULL,
        )  # fmt: skip
        x0, x1, x2, x3 = a0, a1, a2, a3


@kernel(
    grid=lambda a: (cdiv(a.M, a.BLOCK_M) * cdiv(a.E, a.BLOCK_N),),
    tokens=("M", "stride_s", "stride_st"),
    tune_by=("N", "E"),
    default=lambda a: _candidates(a)[0],
    candidates=_candidates,
)
def rms_norm_router_forward(
    X, W, R, Y, S, YT, ST, L, RSTD, M, N, E, stride_xm, stride_xn, stride_re, stride_rn, stride_s, stride_st, eps, inv_n,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N experts. The programs of the same rows each go over all of x for rstd, again (x is in the L2) for
    their product, and take turns to store the blocks of y; codes in a loop of their own, for which the products leave no room."""
    across = tl.cdiv(E, BLOCK_N)
    block = tl.program_id(0) // across
    turn = tl.program_id(0) % across
    r = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = r[:, None]
    live = row < M
    expert = turn * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    # Of a loop that may not run ptxas would serialise the products
    tl.assume(N > 0)
    total = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in tl.range(0, N, BLOCK_K, num_stages=STAGES):
        k = start + lane
        at = X + row * stride_xm + k.to(tl.int64)[None, :] * stride_xn
        x = tl.load(at, live & (k < N)[None, :], 0.0, eviction_policy="evict_last").to(tl.float32)
        total += x * x
    rstd = tl.rsqrt(tl.sum(total, axis=1) * inv_n + eps)
    if turn == 0:
        tl.store(RSTD + r, rstd, r < M)
    # 0 past the last row: with an eps of 0 the column-wise scales would see 0 * inf
    rstd = tl.where(r < M, rstd, 0.0)[:, None]
    column = R + expert.to(tl.int64)[None, :] * stride_re
    logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, N, BLOCK_K, num_stages=STAGES):
        k = start + lane
        at = X + row * stride_xm + k.to(tl.int64)[None, :] * stride_xn
        y = normed(tl.load(at, live & (k < N)[None, :], 0.0), rstd, W, k, N).to(X.dtype.element_ty)
        at = column + k.to(tl.int64)[:, None] * stride_rn
        logits = tl.dot(y, tl.load(at, (k < N)[:, None] & (expert < E)[None, :], 0.0), logits)
        if FORMAT is None:
            if start // BLOCK_K % across == turn:
                tl.store(Y + row * N + k[None, :], y, live & (k < N)[None, :])
    tl.store(L + row * E + expert[None, :], logits, live & (expert < E)[None, :])
    if FORMAT is not None:
        store_codes(
            X, W, Y, S, YT, ST, block, turn, across, rstd, M, N, stride_xm, stride_xn, stride_s, stride_st,
            FORMAT, ALIGN, FULL,
        )  # fmt: skip


def empty_results(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised tensors for the logits and rstd."""
    logits = torch.empty(*x.shape[:-1], router.shape[0], dtype=torch.float32, device=x.device)
    return logits, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def forward(x, weight, router, eps, *, out_format) -> tuple[Tensor, Tensor, Tensor]:
    """Everything in one launch."""
    x2 = rows(x)
    (M, N), E = x2.shape, router.shape[0]
    logits, rstd = empty_results(x, router)
    S = YT = ST = FORMAT = None
    strides = (0, 0)
    if out_format is None:
        y = Y = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        y = out_format.empty(x.shape, x.dtype, x.device)
        (Y, S, *_), (YT, ST, *_) = row_way(y), column_way(y)
        FORMAT = out_format.device_format(is_fast(x))
        strides = (out_format.scale_stride(y, "row"), out_format.scale_stride(y, "col"))
    rms_norm_router_forward(
        x2, vector(weight), router, Y, S, YT, ST, logits, rstd, M, N, E, *x2.stride(), *router.stride(), *strides,
        eps, 1.0 / N if N else math.nan, FORMAT=FORMAT,
        BLOCK_K=BLOCK_K, ALIGN=alignment(YT, M),
        FULL=out_format is not None and M * N > 0 and M % TILE == 0 and N % TILE == 0,
    )  # fmt: skip
    return y, logits, rstd


def forward_apart(x, weight, router, eps, *, out_format) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels of `rms_norm` and `router_linear` one after the other. Beside codes a plain y is made for the product."""
    logits, rstd = empty_results(x, router)
    y = normalised(x, None, weight, None, None, rstd, eps, 0.0, out_format, None, quantised)
    plain = y if out_format is None else normed_by(rstd, x, weight, eps)
    return y, product(plain, router, None, precision="high", out=logits), rstd


def normed_by(rstd: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The plain y, from an rstd that is known."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_rows(rows(x), None, vector(weight), vector(rstd), y, None, None, eps, 0.0)
    return y


def backward(saved: SimpleNamespace, dy: Tensor | None, dlogits: Tensor | None) -> tuple:
    x, weight, router, needs = saved.x, saved.weight, saved.router, saved.needs
    wanted = {"x"} if needs & {"x", "weight"} else set()
    g, drouter = dy, None
    if dlogits is not None:
        wanted |= {"weight"} if "router" in needs else set()
        y = normed_by(saved.rstd, x, weight, saved.eps) if "weight" in wanted else x
        inner = SimpleNamespace(x=y, weight=router, bias=None, precision="high", needs=frozenset(wanted))
        way = fused_backward if fuses(Target.at(x.device), inner) else product_backward
        g, drouter, _ = way(inner, dlogits, add=dy)
    if not wanted & {"x"}:
        return None, None, drouter
    return *gradients(x, weight, saved.rstd, g, None, saved.eps, 0.0, needs), drouter


def fits_one_launch(target: Target, a: SimpleNamespace) -> bool:
    """Whether both factors are of one piece (not fp32), and y is plain or in codes whose scales one program can make."""
    fmt = a.out_format
    return (
        single(target, a)
        and a.x.dtype == a.router.dtype != torch.float32
        and a.x.shape[-1] > 0  # the logits of no columns are 0, and their rstd is NaN
        and a.router.shape[0] <= MOST_EXPERTS
        and (fmt is None or (isinstance(fmt, Fp8) and fmt.granularity == "1x128"))
    )


rms_norm_router = Op(
    "rms_norm_router", reference, inputs, Triton(forward, backward, fits_one_launch, "one_launch"),
    Triton(forward_apart, backward, single, "apart"),
    where={
        "x": "float[... hidden]", "weight": "float[hidden]", "router": "float[experts+ hidden]", "eps": at_least(0.0),
    },
    results={"y": "x[... hidden]", "logits": "wide(x)[... experts]"}, hidden=("rstd",), out=Out(contiguous=("y", "logits")),
    gradient=Gradient(
        of=("x", "weight", "router"), through=("y", "logits"), saves=("x", "weight", "router", "rstd")
    ),
    sharding=Sharding(), bars=Bars("E", gradient="F", rounds=("logits",)),
)  # fmt: skip
