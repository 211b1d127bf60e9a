"""Softmax and its logarithm over any one dimension, and their gradients: the first part of the engine `rows`.

A tensor is seen as [outer, N, inner], N being the dimension. A *row* is N elements, side by side where there is no inner dimension;
else rows lie side by side, and a tile has a few of them. Where a tile holds all N, every element is read once. Where it does not,
the largest element and the sum are found as tiles come by, and a second pass goes back from the last tile, of which the cache still
has the most; of rows side by side, `softmax_columns.py` has both passes, and of long rows, `softmax_long.py` programs that hold a
part each.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv, power_of_two
from ..runtime.kernel import kernel
from . import forms, plans, pointwise, softmax_columns, softmax_long
from .functions import exp, log
from .plans import own
from .pointwise import IN_TRITON, SMALL, over, stored, whole_words
from .row import Declined, compute_dtype, taken
from .softmax_formulas import exp_for, finite_or_zero, gradient, normalised, term

TOKENS = ("ROWS", "N", "INNER", "x_outer", "x_n", "x_inner", "y_outer", "y_n", "y_inner")
SMALL_TILES = (64, 32), (4, 512)  # rows, and elements of each, of the forms that all small tensors take
LONGEST = {False: 32768, True: 16384}  # elements of a row that a tile holds, of one operand and of two
ACROSS = 32, 512  # the tile where rows lie side by side


def warps(a) -> dict[str, int]:
    tile = a.BLOCK_K * a.BLOCK_R
    if a.FORM == "along" and not a.ONCE:
        # rows that are read twice, few at a time: the cache is to hold them until then
        return {"num_warps": 16}
    return {"num_warps": 4 if tile <= 4096 else 8 if tile <= 8192 else 16 if tile <= 16384 else 32}


def warps_forward(a) -> dict[str, int]:
    """Of rows side by side a thread takes 64 elements of 16 bits, for it has much to do for each row; along rows, 16."""
    tile = a.BLOCK_K * a.BLOCK_R
    if a.FORM == "across":
        return {"num_warps": max(4, min(16, tile * a.X.element_size() // 4096))}
    if a.FORM == "along" and a.ONCE and tile <= 8192:
        return {"num_warps": max(4, tile // 512)}
    return warps(a)


def programs(a) -> tuple[int]:
    """Of tiles that go across, none reaches beyond its outer index."""
    blocks = cdiv(a.INNER, a.BLOCK_K) * (a.ROWS // a.INNER) if a.FORM == "across" else cdiv(a.ROWS, a.BLOCK_K)
    return (blocks,)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def rows_of(ROWS, INNER, BLOCK_K: tl.constexpr, FORM: tl.constexpr):
    """(outer indices, inner indices) of a program's rows."""
    pid = tl.program_id(0).to(tl.int64)
    if FORM == "across":
        blocks = tl.cdiv(INNER, BLOCK_K)
        outer = (tl.program_id(0) // blocks).to(tl.int64)
        return outer + tl.zeros([BLOCK_K], tl.int64), (pid - outer * blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    elif FORM == "along":
        k = pid * BLOCK_K + tl.arange(0, BLOCK_K)
        return k, tl.zeros([BLOCK_K], tl.int64)
    else:
        outer, inner = over(pid * BLOCK_K + tl.arange(0, BLOCK_K), INNER, ROWS)
        return outer.to(tl.int64), inner.to(tl.int64)


@triton.jit
def start_of(pid, outer, inner, s_outer, s_inner, BLOCK_K: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr):
    """Where rows begin [BLOCK_K, 1]."""
    if FORM == "across":
        return (whole_words(s_outer, EVEN) * outer + inner)[:, None]
    elif FORM == "along":
        return (whole_words(s_outer, EVEN) * outer)[:, None]
    else:
        return (outer * s_outer + inner * s_inner)[:, None]


@triton.jit
def step_of(r, stride, FORM: tl.constexpr, EVEN: tl.constexpr):
    """Where elements of a row lie from its beginning [1, BLOCK_R]."""
    if FORM == "across":
        return (r * whole_words(stride, EVEN))[None, :]
    elif FORM == "along":
        return r[None, :]
    else:
        return (r * stride)[None, :]


@triton.jit
def inside_of(outer, inner, ROWS, INNER, FORM: tl.constexpr, EVEN: tl.constexpr):
    if FORM == "across":
        return (inner < whole_words(INNER, EVEN))[:, None]
    elif FORM == "along":
        return (outer < ROWS)[:, None]
    else:
        return (outer * INNER + inner < ROWS)[:, None]


@kernel(grid=programs, tokens=TOKENS, default=warps_forward)
def softmax_rows(
    X, Y, ROWS, N, INNER, x_outer, x_n, x_inner, y_outer, y_n, y_inner, LOG: tl.constexpr, COMPUTE: tl.constexpr,
    FORM: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """FORM: "along" where a row's elements lie side by side, "across" where rows do, "any". EVEN: sizes and strides are whole
    words. ONCE: a tile holds all of a row."""
    pid = tl.program_id(0)
    outer, inner = rows_of(ROWS, INNER, BLOCK_K, FORM)
    inside = inside_of(outer, inner, ROWS, INNER, FORM, EVEN)
    at_x = start_of(pid, outer, inner, x_outer, x_inner, BLOCK_K, FORM, EVEN)
    at_y = start_of(pid, outer, inner, y_outer, y_inner, BLOCK_K, FORM, EVEN)
    if FORM == "along":
        N = whole_words(N, EVEN)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    if ONCE:
        ok = inside & (r < N)[None, :]
        x = tl.load(X + at_x + step_of(r, x_n, FORM, EVEN), ok, float("-inf")).to(COMPUTE)
        shift = finite_or_zero(tl.max(x, 1))[:, None]
        total = tl.sum(exp_for(x - shift, Y), 1)[:, None]
        if LOG:
            total = log(total)
        y = normalised(x, shift, total, Y, LOG)
        tl.store(Y + at_y + step_of(r, y_n, FORM, EVEN), stored(y, Y), ok)
    else:
        largest = tl.full([BLOCK_K], float("-inf"), COMPUTE)
        total = tl.zeros([BLOCK_K], COMPUTE)
        for first in tl.range(0, N, BLOCK_R):
            own = first + r
            ok = inside & (own < N)[None, :]
            x = tl.load(X + at_x + step_of(own, x_n, FORM, EVEN), ok, float("-inf")).to(COMPUTE)
            larger = tl.maximum(largest, tl.max(x, 1))
            shift = finite_or_zero(larger)
            total = total * exp(largest - shift) + tl.sum(exp_for(x - shift[:, None], Y), 1)
            largest = larger
        shift = finite_or_zero(largest)[:, None]
        total = total[:, None]
        if LOG:
            total = log(total)
        tiles = tl.cdiv(N, BLOCK_R)
        for back in tl.range(0, tiles):
            own = (tiles - 1 - back) * BLOCK_R + r
            ok = inside & (own < N)[None, :]
            x = tl.load(X + at_x + step_of(own, x_n, FORM, EVEN), ok, 0, eviction_policy="evict_first").to(COMPUTE)
            y = normalised(x, shift, total, Y, LOG)
            tl.store(Y + at_y + step_of(own, y_n, FORM, EVEN), stored(y, Y), ok)


@kernel(
    grid=programs,
    tokens=(*TOKENS, "g_outer", "g_n", "g_inner"),
    default=warps,
)
def softmax_rows_backward(
    Y, DY, DX, ROWS, N, INNER, x_outer, x_n, x_inner, g_outer, g_n, g_inner, y_outer, y_n, y_inner, LOG: tl.constexpr,
    COMPUTE: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Strides x of the result Y of the forward pass, g of DY, y of DX; else as above."""
    pid = tl.program_id(0)
    outer, inner = rows_of(ROWS, INNER, BLOCK_K, FORM)
    inside = inside_of(outer, inner, ROWS, INNER, FORM, EVEN)
    at_y = start_of(pid, outer, inner, x_outer, x_inner, BLOCK_K, FORM, EVEN)
    at_g = start_of(pid, outer, inner, g_outer, g_inner, BLOCK_K, FORM, EVEN)
    at_x = start_of(pid, outer, inner, y_outer, y_inner, BLOCK_K, FORM, EVEN)
    if FORM == "along":
        N = whole_words(N, EVEN)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    if ONCE:
        ok = inside & (r < N)[None, :]
        y = tl.load(Y + at_y + step_of(r, x_n, FORM, EVEN), ok, 0)
        dy = tl.load(DY + at_g + step_of(r, g_n, FORM, EVEN), ok, 0)
        # Of -y and -dy, which the compiler takes for other numbers: what it converts here it does not keep until it is used again
        total = tl.sum(term((-y).to(COMPUTE), (-dy).to(COMPUTE), LOG), 1)[:, None]
        total = -total if LOG else total
        dx = gradient(y.to(COMPUTE), dy.to(COMPUTE), total, DX, LOG)
        tl.store(DX + at_x + step_of(r, y_n, FORM, EVEN), stored(dx, DX), ok)
    else:
        terms = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)
        for first in tl.range(0, N, BLOCK_R):
            own = first + r
            ok = inside & (own < N)[None, :]
            dy = tl.load(DY + at_g + step_of(own, g_n, FORM, EVEN), ok, 0).to(COMPUTE)
            y = dy
            if not LOG:
                y = tl.load(Y + at_y + step_of(own, x_n, FORM, EVEN), ok, 0).to(COMPUTE)
            terms += term(y, dy, LOG)
        total = tl.sum(terms, 1)[:, None]
        tiles = tl.cdiv(N, BLOCK_R)
        for back in tl.range(0, tiles):
            own = (tiles - 1 - back) * BLOCK_R + r
            ok = inside & (own < N)[None, :]
            y = tl.load(Y + at_y + step_of(own, x_n, FORM, EVEN), ok, 0, eviction_policy="evict_first").to(COMPUTE)
            dy = tl.load(DY + at_g + step_of(own, g_n, FORM, EVEN), ok, 0, eviction_policy="evict_first").to(COMPUTE)
            tl.store(DX + at_x + step_of(own, y_n, FORM, EVEN), stored(gradient(y, dy, total, DX, LOG), DX), ok)


# ---- host ------------------------------------------------------------------------------------------------------------


def stride_of(shape: tuple[int, ...], strides: tuple[int, ...], alone: int) -> int | None:
    """The stride of dimensions seen as one, `alone` of those that have but one index; None where they cannot be."""
    merged: int | None = None
    size = 1
    for n, s in reversed(list(zip(shape, strides))):
        if n == 1:
            continue
        if merged is None:
            merged = s
        elif s != merged * size:
            return None
        size *= n
    return alone if merged is None else merged


def strides_of(x: Tensor, dim: int) -> tuple[int, int, int] | None:
    """The strides of a tensor seen as [outer, N, inner]; None where it cannot be."""
    shape, strides = tuple(x.shape), x.stride()
    outer, inner = stride_of(shape[:dim], strides[:dim], 0), stride_of(shape[dim + 1 :], strides[dim + 1 :], 1)
    return None if outer is None or inner is None else (outer, strides[dim], inner)


def contiguous(x: Tensor) -> Tensor:
    """A tensor, or a copy of it that lies in the order of its dimensions: where aten makes one too."""
    if x.is_contiguous():
        return x
    return pointwise.run(forms.COPY, {"self": x}, own(torch.empty(x.shape, dtype=x.dtype, device=x.device)))


def launch(kernel_, operands: list[Tensor], out: Tensor, dim: int, **constants) -> None:
    """Of operands of one shape into `out`, which lies in the order of its dimensions."""
    shape, several = tuple(out.shape), len(operands) > 1
    n, inner = shape[dim], math.prod(shape[dim + 1 :])
    rows = out.numel() // n
    small = out.numel() < SMALL
    unit = 2 if inner == 1 else 0  # where a stride of 1 makes a form

    def seen(x: Tensor) -> tuple[int, int, int] | None:
        found = strides_of(x, dim)
        if small or found is None:
            return found
        return found if (found[1] == 1 if unit else found[2] == 1) else None

    operands = [x if seen(x) is not None else contiguous(x) for x in operands]
    steps = [strides_of(t, dim) for t in (*operands, out)]
    if small:
        form, even, (block_k, block_r) = "any", False, SMALL_TILES[n > 32]
        once = n <= block_r
    elif unit:
        form, even = "along", not any(s[0] % 16 for s in steps) and n % 16 == 0
        once = n <= LONGEST[several]
        if not once and softmax_long.takes(n, len(operands), out.device):
            softmax_long.launch(operands, out, [s[0] for s in steps], n, even, constants["LOG"])
            return
        block_r = max(16, power_of_two(n)) if once else LONGEST[several] // 2
        block_k = max(1, 2048 // block_r)
    else:
        form, even = "across", not any(s[0] % 16 or s[1] % 16 for s in steps) and inner % 16 == 0
        block_k, longest = ACROSS
        if n > longest:
            softmax_columns.launch(operands, out, [s[:2] for s in steps], n, inner, constants["LOG"])
            return
        once, block_r = True, max(16, power_of_two(n))
        block_k *= max(1, 64 // block_r)
    sizes = rows, n, inner, *(s for own_ in steps for s in own_)
    compute = IN_TRITON[compute_dtype(operands[-1].dtype)]
    plans.launch(
        kernel_, (*operands, out), sizes, COMPUTE=compute, FORM=form, EVEN=even, ONCE=once, BLOCK_K=block_k, BLOCK_R=block_r,
        **constants,
    )  # fmt: skip


def widens(x: Tensor) -> bool:
    """Whether fp32 may be asked for as the result of 16 bits: of a GPU's tensors alone."""
    return x.is_cuda


def run(log_: bool, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    taken(x)
    width = max(1, x.dim())
    if not x.is_floating_point() or not -width <= dim < width:
        raise Declined("no floats, or a dimension that is not there")
    if half_to_float and not (widens(x) and x.dtype == torch.float16):
        raise Declined("a wide result that is refused")
    dtype = torch.float32 if half_to_float else x.dtype
    out = own(torch.empty(x.shape, dtype=dtype, device=x.device))
    if out.numel():
        seen = [t.reshape(1) if t.dim() == 0 else t for t in (x, out)]
        launch(softmax_rows, seen[:1], seen[1], dim % width, LOG=log_)
    return out


def run_backward(log_: bool, grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    taken(grad, output)
    width = max(1, output.dim())
    if grad.shape != output.shape or grad.dtype != output.dtype or not -width <= dim < width:
        raise Declined("a gradient that is not like the result, or a dimension that is not there")
    wide = grad.dtype == torch.float32 and dtype == torch.float16 and widens(grad)
    if not grad.is_floating_point() or not (wide or dtype == grad.dtype):
        raise Declined("dtypes that are refused")
    out = own(torch.empty(grad.shape, dtype=dtype, device=grad.device))
    if out.numel():
        seen = [t.reshape(1) if t.dim() == 0 else t for t in (output, grad, out)]
        launch(softmax_rows_backward, seen[:2], seen[2], dim % width, LOG=log_)
    return out


def softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return run(False, self, dim, half_to_float)


def log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return run(True, self, dim, half_to_float)


def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return run_backward(False, grad_output, output, dim, input_dtype)


def log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return run_backward(True, grad_output, output, dim, input_dtype)


FORMS = {
    "_softmax": softmax, "_softmax_backward_data": softmax_backward, "_log_softmax": log_softmax,
    "_log_softmax_backward_data": log_softmax_backward,
}  # fmt: skip
