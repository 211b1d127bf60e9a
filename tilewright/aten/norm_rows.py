"""Layer and RMS norm, of rows that one program holds, and their gradients. Longer rows are cells of `norm.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..core.target import Target
from ..core.tensor import cdiv
from ..ops.norm.modulated_norm import centre, columns_at, mean_of, modulate, pick, square_pieces, sum_pieces
from ..ops.norm.modulated_norm_backward import add_if, times_if
from ..ops.norm.rms_norm import add_pairs
from ..ops.norm.row_pieces import (
    inside_piece,
    load_pieces,
    plain_rows,
    programs_per_sm,
    split_backward,
    split_plain,
    weight_pieces,
)
from ..runtime.kernel import kernel
from . import norm, plans
from .functions import reciprocal_root
from .layout import contiguous_strides
from .norm import Cells, add, backward, dense, empty_like, floats, forward, parameters, scratch, sum_columns
from .plans import bits_of, own
from .pointwise import SMALL, number, stored, whole_words
from .row import Declined, compute_dtype, of_numbers
from .softmax import contiguous

ROW_BYTES = 1 << 16  # of the longest row that a program's registers hold
FEW_BLOCKS = 4  # of rows, whose gradients one program sums: each is a wait of some 0.4 us, a launch to add parts is one of 1 (H200)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def rows_at_once(a) -> dict[str, int]:
    """As a plain norm of `ops/norm` takes rows, by what was measured there."""
    return dict(zip(("ROWS", "num_warps"), plain_rows(a.BLOCK, a.PIECES)))


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "N", "EPS", "INV_N"), default=rows_at_once)
def normalise_rows(
    X, Y, W, B, MEAN, RSTD, M, N, EPS: tl.int64, INV_N: tl.int64, EVEN: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A norm over rows [M, N], held as PIECES of BLOCK columns, in fp32. MEAN is None of an RMS norm. LATE: weights are loaded
    after the sums, for which a wide row leaves no registers."""
    N = whole_words(N, EVEN)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = r[:, None]
    live = row < M
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    xs = load_pieces(X, row, col, live, N, N, 1, "", BLOCK, PIECES)
    if not LATE:
        ws = weight_pieces(W, N, None, BLOCK, PIECES)  # before the sums, which everything after them waits for
        bs = weight_pieces(B, N, None, BLOCK, PIECES)
    inv_n = number(INV_N, tl.float32)
    mean = None
    if MEAN is not None:
        mean = mean_of(tl.sum(sum_pieces(xs, PIECES), 1), N, inv_n)[:, None]
        tl.store(MEAN + row, stored(mean, MEAN), live)
    about = tl.sum(square_pieces(xs, mean, col, N, BLOCK, PIECES), 1)
    rstd = reciprocal_root(mean_of(about, N, inv_n) + number(EPS, tl.float32))[:, None]
    tl.store(RSTD + row, stored(rstd, RSTD), live)
    for i in tl.static_range(PIECES):
        y = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
        if LATE:
            c = i * BLOCK + lane
            y = modulate(y, columns_at(W, c, c < N, None), columns_at(B, c, c < N, None), None, None)
        else:
            y = modulate(y, pick(ws, i), pick(bs, i), None, None)
        tl.store(Y + row * N + col + i * BLOCK, stored(y, Y), inside_piece(live, col, N, i, BLOCK, PIECES))


def rows_walked(a) -> dict[str, int]:
    """As many warps as a row needs, and three stages where shared memory has room for two blocks of both operands."""
    columns = a.BLOCK * a.PIECES
    held = 2 * 2 * a.ROWS * columns * a.X.element_size()
    stages = 3 if a.AHEAD and held + 1024 <= Target.at(a.X.device).shared_memory else 1
    return {"num_warps": 4 if columns <= 3584 else 8 if columns <= 5120 else 16, "STAGES": stages}


@kernel(grid=lambda a: (a.PROGRAMS,), tokens=("M", "N", "PROGRAMS", "INV_N"), default=rows_walked)
def rows_backward(
    DY, X, W, MEAN, RSTD, DX, DW, DB, M, N, PROGRAMS, INV_N: tl.int64, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of a norm over rows [M, N], held as PIECES of BLOCK columns, in fp32. A program takes every PROGRAMS-th block
    of ROWS, and loads those AHEAD meanwhile. DW, DB [PROGRAMS, N]: sums over its rows, the gradients themselves if it is the only
    one. MEAN is None of an RMS norm."""
    N = whole_words(N, EVEN)
    share = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    inv_n = number(INV_N, tl.float32)
    ws = weight_pieces(W, N, None, BLOCK, PIECES)
    dws = ()
    dbs = ()
    for _ in tl.static_range(PIECES):
        dws = dws + (tl.zeros([ROWS, BLOCK], tl.float32),)
        dbs = dbs + (tl.zeros([ROWS, BLOCK], tl.float32),)
    for block in tl.range(share, tl.cdiv(M, ROWS), PROGRAMS, num_stages=STAGES):
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < M
        xs = load_pieces(X, row, col, live, N, N, 1, "", BLOCK, PIECES)
        dys = load_pieces(DY, row, col, live, N, N, 1, "", BLOCK, PIECES)
        rstd = tl.load(RSTD + row, live, 0.0).to(tl.float32)
        mean = None
        if MEAN is not None:
            mean = tl.load(MEAN + row, live, 0.0).to(tl.float32)
        if DX is not None:
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            cross = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(PIECES):
                g = times_if(dys[i].to(tl.float32), pick(ws, i))
                total += g
                cross += g * centre(xs[i], mean, col, N, i, BLOCK, PIECES)
            total, cross = tl.reduce((total, cross), 1, add_pairs)
            level = mean_of(total, N, inv_n)[:, None]
            about = mean_of(cross, N, inv_n)[:, None] * rstd
        more_w = ()
        more_b = ()
        for i in tl.static_range(PIECES):
            n = centre(xs[i], mean, col, N, i, BLOCK, PIECES) * rstd
            dy = dys[i].to(tl.float32)
            more_w = more_w + (add_if(dws[i], dy * n, DW is not None),)
            more_b = more_b + (add_if(dbs[i], dy, DB is not None),)
            if DX is not None:
                dx = times_if(dy, pick(ws, i)) - n * about
                if MEAN is not None:
                    dx = dx - level
                inside = inside_piece(live, col, N, i, BLOCK, PIECES)
                tl.store(DX + row * N + col + i * BLOCK, stored(dx * rstd, DX), inside)
        dws = more_w
        dbs = more_b
    for i in tl.static_range(PIECES):
        c = i * BLOCK + lane
        at = share.to(tl.int64) * N + c
        if DW is not None:
            tl.store(DW + at, stored(tl.sum(dws[i], 0), DW), c < N)
        if DB is not None:
            tl.store(DB + at, stored(tl.sum(dbs[i], 0), DB), c < N)


# ---- host ------------------------------------------------------------------------------------------------------------


def matrix(x: Tensor, normalized_shape: Any) -> tuple[int, int]:
    """(rows, elements of each)."""
    shape, kept = tuple(normalized_shape), x.dim() - len(normalized_shape)
    if not shape or kept < 0 or tuple(x.shape[kept:]) != shape:
        raise Declined("a shape that is refused")
    return math.prod(x.shape[:kept]), math.prod(shape)


def rows(m: int, n: int) -> Cells:
    """A cell of each row [m, n], of which every element is a channel."""
    return Cells(m, n, 1, max(1, m), (n, 0, 1, 0), 0, "element")


def moments_like(x: Tensor, ones: int, dtype: torch.dtype) -> Tensor:
    """Memory for a number of each row, whose last dimensions are 1."""
    shape = (*x.shape[: x.dim() - ones], *(1,) * ones)
    return own(torch.empty(shape, dtype=dtype, device=x.device))


@of_numbers("eps")
def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    floats(input, weight, bias)
    m, n = matrix(input, normalized_shape)
    mixed = parameters(input, tuple(normalized_shape), weight, bias, alike=input.is_cuda)
    weight, bias = dense(weight, bias)
    if not m or not n:
        raise Declined("no elements")
    # On a GPU moments are of the dtype that is computed in; on a processor, of the weights'
    kind = compute_dtype(input.dtype) if input.is_cuda else torch.float32 if mixed else input.dtype
    x = contiguous(input)
    y = empty_like(x)
    mean, rstd = (moments_like(x, len(normalized_shape), kind) for _ in range(2))
    if not normalise_matrix(x, y, weight, bias, mean, rstd, m, n, eps):
        forward("moments", x, y, rows(m, n), (x.view(m, n), (1,)), weight, bias, mean, rstd, eps)
    return y, mean, rstd


def normalise_matrix(x: Tensor, y: Tensor, w: Any, b: Any, mean: Any, rstd: Tensor, m: int, n: int, eps: Any) -> bool:
    """A norm over rows that programs hold; False where they do not, or where there is little to do."""
    if m * n < SMALL or n * x.element_size() > ROW_BYTES or x.dtype == torch.float64:
        return False
    block, pieces = split_plain(n)
    numbers = bits_of(eps, torch.float64), bits_of(1.0 / n, torch.float64)
    plans.launch(
        normalise_rows, (x, y, w, b, mean, rstd), (m, n), numbers, EVEN=n % 16 == 0, LATE=block * pieces > 8192,
        BLOCK=block, PIECES=pieces,
    )  # fmt: skip
    return True


def rows_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    m: int,
    n: int,
    dx: Any,
    dw: Any,
    db: Any,
) -> None:
    """The gradients of a norm over rows. Where rows are longer than tiles, weights' are of a pass of their own."""
    if n <= norm.LONGEST_OF_TWO and x.dtype != torch.float64:
        small = m * n < SMALL
        block, pieces = (512, 1) if small and n <= 512 else split_backward(n)
        tall = 8 if small else max(1, min(16, 4096 // (block * pieces)))
        parts = min(cdiv(m, tall), programs_per_sm(n) * Target.at(x.device).sms)
        if small and parts <= FEW_BLOCKS:
            parts = 1
        made = [dw, db] if parts == 1 else [None if t is None else scratch(x, parts, n) for t in (dw, db)]
        plans.launch(
            rows_backward, (grad, x, weight, mean, rstd, dx, *made), (m, n, parts), (bits_of(1.0 / n, torch.float64),),
            EVEN=n % 16 == 0 and not small, AHEAD=not small, BLOCK=block, PIECES=pieces, ROWS=tall,
        )  # fmt: skip
        if parts > 1 and (dw is not None or db is not None):
            add(made, dw, db, parts, n, x)
        return
    if dx is not None:
        kind = "moments" if mean is not None else "mean"
        backward(kind, grad, x, weight, mean, rstd, dx, None, None, rows(m, n))
    if dw is not None or db is not None:
        sum_columns(grad, x, mean, rstd, dw, db, m, n, "row")


def layer_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Any, mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, output_mask: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    floats(grad_out, input, mean, rstd, weight, bias)
    m, n = matrix(input, normalized_shape)
    parameters(input, tuple(normalized_shape), weight, bias, alike=input.is_cuda)
    if not m or not n or grad_out.shape != input.shape or grad_out.dtype != input.dtype:
        raise Declined("no elements, or a gradient that is not like the result")
    if mean.numel() != m or rstd.numel() != m or mean.dtype != rstd.dtype:
        raise Declined("moments that are refused")
    if (output_mask[1] and weight is None) or (output_mask[2] and bias is None):
        raise Declined("gradients of weights that are not there")
    x, grad, mean, rstd = map(contiguous, (input, grad_out, mean, rstd))
    weight, bias = dense(weight, bias)
    dx, dw, db = (empty_like(t) if asked else None for t, asked in zip((x, weight, bias), output_mask))
    if any(output_mask):
        rows_gradients(grad, x, mean, rstd, weight, m, n, dx, dw, db)
    return dx, dw, db


def in_order(t: Tensor) -> bool:
    """Whether strides are those of new memory, of dimensions of 1 too, which is_contiguous does not look at."""
    return t.stride() == contiguous_strides(t.shape)


@of_numbers("eps")
def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    floats(input, weight)
    m, n = matrix(input, normalized_shape)
    if parameters(input, tuple(normalized_shape), weight) or not m or not n:
        raise Declined("no elements, or weights of another dtype")
    if not input.is_cuda and not all(in_order(t) for t in (input, weight) if t is not None):
        raise Declined("gaps, which a processor's result keeps")
    x, (weight,), wide = contiguous(input), dense(weight), compute_dtype(input.dtype)
    y, rstd = empty_like(x), moments_like(x, len(normalized_shape), wide)
    if eps is None and wide != input.dtype:
        raise Declined("no epsilon, of which there are two for 16 bits")
    eps = torch.finfo(wide).eps if eps is None else eps
    if not normalise_matrix(x, y, weight, None, None, rstd, m, n, eps):
        forward("mean", x, y, rows(m, n), None, weight, None, None, rstd, eps)
    return y, rstd


def rms_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Any, rstd: Tensor, weight: Tensor | None, output_mask: Any
) -> tuple[Tensor | None, ...]:
    floats(grad_out, input, rstd, weight)
    m, n = matrix(input, normalized_shape)
    if parameters(input, tuple(normalized_shape), weight) or not m or not n:
        raise Declined("no elements, or weights of another dtype")
    if grad_out.shape != input.shape or grad_out.dtype != input.dtype or rstd.numel() != m:
        raise Declined("a gradient that is not like the result")
    x, grad, rstd = map(contiguous, (input, grad_out, rstd))
    (weight,) = dense(weight)
    dx = empty_like(x) if output_mask[0] else None
    dw = empty_like(weight) if output_mask[1] and weight is not None else None
    if dx is not None or dw is not None:
        rows_gradients(grad, x, None, rstd, weight, m, n, dx, dw, None)
    return dx, dw


FORMS = {
    "native_layer_norm": layer_norm, "native_layer_norm_backward": layer_norm_backward, "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
}  # fmt: skip
