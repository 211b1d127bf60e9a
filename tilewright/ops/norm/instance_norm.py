"""Instance norm: each plane of x [batch, channels, ...], all that one image has of one channel, brought to mean 0 and variance 1:

    y = (x - mean) * rstd * weight[channel] + bias[channel],  rstd = 1 / sqrt(mean((x - mean)**2) + eps)

Backward, with n = (x - mean) * rstd and means over the plane: dx = rstd * weight * (dy - mean(dy) - n * mean(dy * n)); dweight is
the sum over a channel's planes of dy * n, and dbias that of dy.

A plane is a row of a norm over rows, whose device functions these kernels are made of. What differs is that a row has one number
of the weight, and so one of its gradient.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.signature import at_least
from ...core.target import Target
from ...core.tensor import cdiv
from ...device.groups import Rows
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .modulated_norm import MOST_ROWS, centre, laid_pieces, load_at, mean_of, modulate, square_pieces, sum_pieces
from .modulated_norm_backward import add_triples, sum_norm_shares, times_if
from .row_pieces import HELD, inside_piece, plain_rows, split_columns


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Bring each plane of `x` [batch, channels, size] to mean 0 and variance 1, then `* weight + bias`, which have a number for
    each channel; all in fp32, rounded once. What is None is left out.

    The variance is that of the whole plane (divided by its size, not by one less). `tw.instance_norm` takes images of any number of
    dimensions, [batch, channels, ...].
    """
    wide = upcast(x)  # once: autograd would round a gradient for each use of x itself
    wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * upcast(weight)[:, None]
    y = y if bias is None else y + upcast(bias)[:, None]
    return y.to(x.dtype)


def inputs(draw: Draw) -> dict[str, Any]:
    channels = draw.dim("heads")  # a name that all nets know
    return {
        "x": draw.tensor("batch", channels, "hidden", shift=0.5),
        "weight": draw.maybe("weight", lambda: draw.tensor(channels, scale=0.5, shift=1.0)),
        "bias": draw.maybe("bias", lambda: draw.tensor(channels, scale=0.5)),
        "eps": draw.option("eps", 1e-5, 1e-6),
    }


# ---------------------------------------------------------------- kernels

# Bytes between neighbours in a plane from which it is copied first: a sector of memory, of which a warp would read one for each
FAR = 32
# Of the pieces of a plane: coarser than those of a row, since a plane may have any size and each split is a variant
BROADEST, NARROWEST, IDLE = 4096, 512, 8


def _default(a) -> dict:
    ROWS, num_warps = plain_rows(a.BLOCK, a.PIECES)
    return {"ROWS": ROWS, "num_warps": num_warps}


PLANES = {"grid": lambda a: (cdiv(a.M, a.ROWS),), "tokens": ("M",), "default": _default}


@triton.jit
def number_of(P, row, live, CHANNELS):
    """The weight, or bias, of each row's channel in fp32, [rows, 1]; None if there is none."""
    found = load_at(P, row, CHANNELS, tl.zeros([1, 1], tl.int32), live)
    if found is not None:
        found = found.to(tl.float32)
    return found


@triton.jit
def mean_of_planes(X, row, live, CHANNELS, N, inv_n, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """(pieces of planes, their means [ROWS, 1]). With PIECES 0 a plane is read here alone, and is no pieces."""
    col = tl.arange(0, BLOCK)[None, :]
    xs = ()
    if PIECES > 0:
        xs = laid_pieces(X, row, CHANNELS, col, live, N, BLOCK, PIECES)
        total = sum_pieces(xs, PIECES)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            total += sum_pieces(laid_pieces(X, row, CHANNELS, start + col, live, N, BLOCK, 1), 1)
    return xs, mean_of(tl.sum(total, axis=1), N, inv_n)[:, None]


@kernel(**PLANES)
def instance_norm_forward(
    X, W, B, Y, M, CHANNELS, N, eps, inv_n, BLOCK: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr
):
    """A program has ROWS planes, of X as [images, CHANNELS, N]. A plane is held as PIECES of BLOCK elements, or with PIECES 0 read
    again for each sum."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = row < M
    # Before the sums, which everything after them waits for
    w = number_of(W, row, live, CHANNELS)
    b = number_of(B, row, live, CHANNELS)
    xs, mean = mean_of_planes(X, row, live, CHANNELS, N, inv_n, ROWS, BLOCK, PIECES)
    if PIECES > 0:
        total = square_pieces(xs, mean, col, N, BLOCK, PIECES)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            again = laid_pieces(X, row, CHANNELS, start + col, live, N, BLOCK, 1)
            total += square_pieces(again, mean, start + col, N, BLOCK, 1)
    rstd = tl.rsqrt(tl.sum(total, axis=1) * inv_n + eps)[:, None]
    if PIECES > 0:
        for i in tl.static_range(PIECES):
            y = modulate(centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd, w, b, None, None)
            inside = inside_piece(live, col, N, i, BLOCK, PIECES)
            tl.store(Y + row * N + col + i * BLOCK, y.to(Y.dtype.element_ty), inside)
    else:
        for start in range(0, N, BLOCK):
            again = laid_pieces(X, row, CHANNELS, start + col, live, N, BLOCK, 1)
            y = modulate(centre(again[0], mean, start + col, N, 0, BLOCK, 1) * rstd, w, b, None, None)
            tl.store(Y + row * N + start + col, y.to(Y.dtype.element_ty), live & (start + col < N))


@kernel(**PLANES)
def instance_norm_backward(
    X, W, DY, DX, SUMS, M, CHANNELS, N, eps, inv_n, PDL: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """As the forward, of X and DY. SUMS [2, M]: of each plane the sums of dy * n and of dy. PDL: the launch that adds them up over
    images may begin, and waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = row < M
    w = number_of(W, row, live, CHANNELS)
    if PIECES > 0:
        dys = laid_pieces(DY, row, CHANNELS, col, live, N, BLOCK, PIECES)
    xs, mean = mean_of_planes(X, row, live, CHANNELS, N, inv_n, ROWS, BLOCK, PIECES)
    if PIECES > 0:
        squares = square_pieces(xs, mean, col, N, BLOCK, PIECES)
        total = sum_pieces(dys, PIECES)
        cross = dys[0].to(tl.float32) * centre(xs[0], mean, col, N, 0, BLOCK, PIECES)
        for i in tl.static_range(1, PIECES):
            cross += dys[i].to(tl.float32) * centre(xs[i], mean, col, N, i, BLOCK, PIECES)
    else:
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        cross = tl.zeros([ROWS, BLOCK], tl.float32)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            again = laid_pieces(X, row, CHANNELS, start + col, live, N, BLOCK, 1)
            more = laid_pieces(DY, row, CHANNELS, start + col, live, N, BLOCK, 1)
            x = centre(again[0], mean, start + col, N, 0, BLOCK, 1)
            squares += x * x
            cross += more[0].to(tl.float32) * x
            total += more[0].to(tl.float32)
    square, cross, total = tl.reduce((squares, cross, total), 1, add_triples)
    rstd = tl.rsqrt(square * inv_n + eps)[:, None]
    cross = cross[:, None] * rstd
    if SUMS is not None:
        tl.store(SUMS + row, cross, live)
        tl.store(SUMS + M + row, total[:, None], live)
    if DX is not None:
        level = mean_of(total, N, inv_n)[:, None]
        slope = cross * inv_n
        factor = times_if(rstd, w)
        if PIECES > 0:
            for i in tl.static_range(PIECES):
                n = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
                dx = (dys[i].to(tl.float32) - level - n * slope) * factor
                inside = inside_piece(live, col, N, i, BLOCK, PIECES)
                tl.store(DX + row * N + col + i * BLOCK, dx.to(DX.dtype.element_ty), inside)
        else:
            for start in range(0, N, BLOCK):
                again = laid_pieces(X, row, CHANNELS, start + col, live, N, BLOCK, 1)
                more = laid_pieces(DY, row, CHANNELS, start + col, live, N, BLOCK, 1)
                n = centre(again[0], mean, start + col, N, 0, BLOCK, 1) * rstd
                dx = (more[0].to(tl.float32) - level - n * slope) * factor
                tl.store(DX + row * N + start + col, dx.to(DX.dtype.element_ty), live & (start + col < N))


# ---------------------------------------------------------------- host


def near(t: Tensor) -> Tensor:
    """t, or a copy where neighbours in a plane lie far apart: channels that are last."""
    return t.contiguous() if t.shape[2] > 1 and t.stride(2) * t.element_size() >= FAR else t


def split_plane(t: Tensor, operands: int) -> tuple[int, int]:
    """(BLOCK, PIECES), with PIECES 0 where a plane of so many operands is more than registers hold."""
    N = t.shape[2]
    BLOCK, PIECES = split_columns(N, BROADEST, NARROWEST, IDLE)
    return (BROADEST, 0) if PIECES > 1 and operands * N * t.element_size() > HELD else (BLOCK, PIECES)


def of_channels(t: Tensor | None) -> Rows:
    """A weight or bias as kernels take it: an operand of rows [images, channels] with one number for each."""
    return Rows() if t is None else Rows(t, 0, t.stride(0), 0)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        x = near(x)
        images, channels, N = x.shape
        BLOCK, PIECES = split_plane(x, 1)
        instance_norm_forward(
            Rows(x, *x.stride()), of_channels(weight), of_channels(bias), y, images * channels, channels, N, eps, 1.0 / N,
            BLOCK=BLOCK, PIECES=PIECES,
        )  # fmt: skip
    return y


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    """All gradients. Those of weight and bias are summed in fp32, over planes and then over images, without atomics."""
    x, weight, needs = saved.x, saved.weight, saved.needs
    like = {"x": x, "weight": weight, "bias": saved.bias}
    made = {n: torch.empty(t.shape, dtype=t.dtype, device=x.device) for n, t in like.items() if n in needs}
    names = [n for n in ("weight", "bias") if n in made]
    if not x.numel():
        for n in names:
            made[n].zero_()
        return tuple(map(made.get, like))
    x, dy = near(x), near(dy)
    images, channels, N = x.shape
    sums = torch.empty(2, images, channels, dtype=torch.float32, device=x.device) if names else None
    PDL = bool(names) and Target.at(x.device).early_launch
    BLOCK, PIECES = split_plane(x, 2)
    instance_norm_backward(
        Rows(x, *x.stride()), of_channels(weight), Rows(dy, *dy.stride()), made.get("x"), sums, images * channels,
        channels, N, saved.eps, 1.0 / N, PDL=PDL, BLOCK=BLOCK, PIECES=PIECES,
    )  # fmt: skip
    if names:
        first = sums if "weight" in made else sums[1:]
        sum_norm_shares(first, tuple(made[n] for n in names), 1, images, channels, PDL=PDL)
    return tuple(map(made.get, like))


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    if x.shape[0] * x.shape[1] > MOST_ROWS:
        raise ValueError(
            f"instance_norm: x has {x.shape[0] * x.shape[1]} planes, but a launch takes at most {MOST_ROWS}"
        )


norm_of_planes = Op(
    "instance_norm", reference, inputs, Triton(forward, backward, single),
    where={"x": "float[batch channels size]", "weight": "float[channels]", "bias": "float[channels]", "eps": at_least(0.0)},
    results={"out": "x[batch channels size]"}, out=Out(contiguous=("out",)), check=check,
    gradient=Gradient(of=("x", "weight", "bias"), shape_only=lambda values: ("bias",)), sharding=Sharding(("batch", "channels")),
    # Of planes of three numbers some nearly are their mean, whose own rounding then shows: 1.6 of a thousand, and 2.4 with torch's
    # operator in fp32
    bars=Bars(misrounded=0.002),
)  # fmt: skip


def instance_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """Bring each plane of `x` [batch, channels, ...] to mean 0 and variance 1, then `* weight + bias`, which have a number for
    each channel; all in fp32, rounded once. What is None is left out.

    It is torch's `instance_norm` without running statistics, and so is the variance: that of the whole plane, divided by its size.
    One or more dimensions follow the channels, and a plane is all of them. It is read as it lies where they can be seen as one
    whose elements are near each other; if channels are last it is copied before. The result is contiguous, and so must `out` be.
    """
    if not isinstance(x, Tensor) or x.dim() <= 3:
        return norm_of_planes.function(x, weight, bias, eps, out=out)
    if out is not None and not (out.shape == x.shape and out.is_contiguous()):
        raise ValueError(f"instance_norm: out must be contiguous, of shape {list(x.shape)}, got strides {out.stride()}")
    y = norm_of_planes.function(x.flatten(2), weight, bias, eps, out=None if out is None else out.flatten(2))
    return y.view(x.shape) if out is None else out
