"""Gated linear unit: y = act(gate) * up * scale, gate and up being the halves of x's last dimension or two tensors.

With a limit, gate is first clamped to at most it and up to [-limit, limit]. Backward, with w = dy * scale:
dgate = w * up * act'(gate), dup = w * act(gate), both 0 where clamped; dscale = sum over a row of dy * act(gate) * up.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_ends
from ...core.draw import Draw
from ...core.format import Format, Quantized, store
from ...core.signature import above
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, rows, vector
from ...device.activation import gated, gated_gradient
from ...device.blocks import find_block
from ...device.dependent import begin_dependent
from ...formats.fill import fill
from ...gemm.tiles import matrix
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .glu_hopper import store_pairs, takes

# The gelus as torch has them, but without 1 + tanh and 1 + erf, which leave nothing of a small result.
ACTIVATIONS = {
    "silu": lambda a, alpha: a * torch.sigmoid(alpha * a),
    "gelu_tanh": lambda a, alpha: a * torch.sigmoid(1.5957691216057308 * (a + 0.044715 * a**3)),
    "gelu_erf": lambda a, alpha: a * torch.erfc(a * -0.7071067811865476) * 0.5,
    "relu": lambda a, alpha: torch.relu(a),
    "sigmoid": lambda a, alpha: torch.sigmoid(a),
}


def reference(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    scale: Tensor | None = None,
    offsets: Tensor | None = None,
    out_format: Format | None = None,
) -> Tensor:
    """`act(gate) * up`, in fp32 and rounded once: gate and up are the first and second half of `x`, or `x` and `up`.

    silu is `a * sigmoid(alpha * a)`. `limit` clamps gate to at most it and up to [-limit, limit] before. `scale`, a
    number per row (a router's probability), multiplies the result. `offsets`, on the device, are end rows of groups,
    one per expert: 128-row blocks of a quantised result begin anew at each, and rows past the last are neither read nor
    specified. `out_format` gives a `Quantized` result.
    """
    gate, up = (x, up) if up is not None else x.chunk(2, -1)
    a, b = upcast(gate), upcast(up)
    if limit is not None:
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    y = ACTIVATIONS[act](a, alpha) * b
    if scale is not None:
        y = y * upcast(scale).unsqueeze(-1)
    return store(y, out_format, x.dtype, offsets)


def inputs(draw: Draw) -> dict:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    up = draw.maybe("up", lambda: draw.tensor(tokens, hidden))
    act = draw.option("act", *ACTIVATIONS)
    return {
        "x": draw.tensor(tokens, hidden if up is not None else 2 * hidden, scale=2.0),
        "up": up,
        "act": act,
        "limit": draw.option("limit", None, 3.0),
        "alpha": draw.option("alpha", 1.0, 1.702) if act == "silu" else 1.0,
        "scale": draw.maybe("scale", lambda: draw.uniform(tokens, dtype=torch.float32)),
        "offsets": draw.maybe("offsets", lambda: draw.ends(tokens)),
    }


@triton.jit
def live_rows(OFFSETS, E, M):
    """How many rows there are: all, or those below the last offset, which is device data and so clamped."""
    if OFFSETS is None:
        return M
    else:
        last = tl.load(OFFSETS + E - 1, E > 0, 0).to(tl.int64)
        return tl.minimum(tl.maximum(last, 0), M.to(tl.int64))


def _shape(a, size: int = 1024, cols: int = 1024, warps: int = 4) -> dict:
    # In bf16 one 16-byte access a thread of each operand, whatever the shape of the tile
    COLS = min(cols, power_of_two(a.N))
    return {"ROWS": max(1, size // COLS), "COLS": COLS, "num_warps": warps}


TILES = {
    "tokens": ("M", "E"),
    "tune_by": ("N",),
    "default": _shape,
    "candidates": lambda a: [
        _shape(a, size, cols, warps) for size in (1024, 2048, 4096) for cols in (512, 1024, 2048) for warps in (4, 8)
    ],
}


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.N, a.COLS),), **TILES, dependent=True)
def glu_forward(
    A, B, SCALE, OFFSETS, Y, M, N, E, stride_s, limit, alpha, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_dependent(DEPENDENT)
    across = tl.cdiv(N, COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    live = row < live_rows(OFFSETS, E, M)
    inside = live & (col < N)
    a = tl.load(A.data + row * A.stride_r + col * A.stride_c, inside, 0.0)
    b = tl.load(B.data + row * B.stride_r + col * B.stride_c, inside, 0.0)
    y = gated(a, b, limit, alpha, ACT)
    if SCALE is not None:
        y *= tl.load(SCALE + row * stride_s, live, 0.0).to(tl.float32)
    tl.store(Y.data + row * Y.stride_r + col * Y.stride_c, y.to(Y.data.dtype.element_ty), inside)


@triton.jit
def backward_tile(A, B, DY, DA, DB, scale, row, col, live, N, limit, alpha, ACT: tl.constexpr):
    """Store dgate and dup of one tile where they are wanted, columns of both being dense; the terms of dscale."""
    inside = live & (col < N)
    a = tl.load(A.data + row * A.stride_r + col * A.stride_c, inside, 0.0)
    b = tl.load(B.data + row * B.stride_r + col * B.stride_c, inside, 0.0)
    dy = tl.load(DY.data + row * DY.stride_r + col * DY.stride_c, inside, 0.0)
    da, db, terms = gated_gradient(a, b, dy, scale, limit, alpha, ACT)
    if DA.data is not None:
        tl.store(DA.data + row * DA.stride_r + col, da.to(DA.data.dtype.element_ty), inside)
    if DB.data is not None:
        tl.store(DB.data + row * DB.stride_r + col, db.to(DB.data.dtype.element_ty), inside)
    return terms


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS) * (cdiv(a.N, a.COLS) if a.DSCALE is None else 1),), **TILES)
def glu_backward(
    A, B, SCALE, OFFSETS, DY, DA, DB, DSCALE, M, N, E, stride_s, limit, alpha, ACT: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """With DSCALE a program takes whole rows, and their sums need neither atomics nor a second launch."""
    across = 1
    if DSCALE is None:
        across = tl.cdiv(N, COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    live = row < live_rows(OFFSETS, E, M)
    scale = None
    if SCALE is not None:
        scale = tl.load(SCALE + row * stride_s, live, 0.0).to(tl.float32)
    if DSCALE is None:
        backward_tile(A, B, DY, DA, DB, scale, row, col, live, N, limit, alpha, ACT)
    else:
        total = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, N, COLS):
            total += backward_tile(A, B, DY, DA, DB, scale, row, start + col, live, N, limit, alpha, ACT)
        tl.store(DSCALE + row, tl.sum(total, axis=1)[:, None].to(DSCALE.dtype.element_ty), live)


@kernel(grid=lambda a: (a.count,), tokens=("M", "E", "count"), default=lambda a: {"num_warps": 1})
def list_blocks(OFFSETS, BLOCKS, M, E, count, BLOCK_E: tl.constexpr):
    """BLOCKS[b] = first row, rows from there to its group's end, of 128-row block b; no rows when there is no such block."""
    block = tl.program_id(0)
    _, row0, rows_left = find_block(block, OFFSETS, E, M, BLOCK_E)
    tl.store(BLOCKS + 2 * block, row0.to(tl.int32))
    tl.store(BLOCKS + 2 * block + 1, rows_left.to(tl.int32))


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "E"), default=lambda a: {"ROWS": 512, "num_warps": 4})
def sum_tiles(P, DSCALE, OFFSETS, M, tiles, E, ROWS: tl.constexpr):
    """DSCALE[m] = sum over tiles of P[tile, m], always in the same order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < live_rows(OFFSETS, E, M)
    at = P + row
    total = tl.zeros([ROWS], tl.float32)
    for _ in range(tiles):
        total += tl.load(at, live, 0.0)
        at += M
    tl.store(DSCALE + row, total.to(DSCALE.dtype.element_ty), live)


@triton.jit
def produce(SOURCE, row, col, inside, MODE: tl.constexpr):
    """Rows of y. A and B have rows of their own strides and columns one apart."""
    A, B, SCALE, stride_a, stride_b, limit, alpha = SOURCE
    if SCALE is not None:
        scale = tl.load(SCALE + row)
    a = tl.load(A + row * stride_a + col, inside, 0.0)
    b = tl.load(B + row * stride_b + col, inside, 0.0)
    y = gated(a, b, limit, alpha, MODE)
    if SCALE is not None:
        y *= scale
    return y


@triton.jit
def produce_gradient(SOURCE, row, col, inside, MODE: tl.constexpr):
    """A tile of [dgate | dup], wholly in one: `hidden`, which is also the row stride of DY, is a multiple of 128."""
    A, B, SCALE, DY, stride, hidden, limit, alpha = SOURCE
    scale = None
    if SCALE is not None:
        scale = tl.load(SCALE + row)
    in_up = tl.min(col) >= hidden
    col -= tl.where(in_up, hidden, 0)
    a = tl.load(A + row * stride + col, inside, 0.0)
    # dup does not depend on up, but for where it is clamped
    b = tl.load(B + row * stride + col, inside & ((limit is not None) | (not in_up)), 0.0)
    dy = tl.load(DY + row * hidden + col, inside, 0.0)
    da, db, _ = gated_gradient(a, b, dy, scale, limit, alpha, MODE)
    return tl.where(in_up, db, da)


def halves(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as matrices."""
    if up is not None:
        return rows(x), rows(up)
    x = rows(x)
    hidden = x.shape[1] // 2
    return x[:, :hidden], x[:, hidden:]


def row_scale(scale: Tensor | None) -> tuple[Tensor | None, int]:
    """A number per row as a vector, and its stride."""
    if scale is None:
        return None, 0
    flat = scale.reshape(-1)
    return flat, flat.stride(0)


def columns(t: Tensor) -> Tensor:
    """A matrix whose columns are one element apart: `t` itself, or a copy."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def grouping(offsets: Tensor | None) -> tuple[Tensor | None, int]:
    """The end rows of groups, contiguous, and how many groups there are."""
    return (None, 0) if offsets is None else (offsets.contiguous(), offsets.shape[0])


def block_list(OFFSETS: Tensor | None, M: int, E: int) -> Tensor | None:
    if OFFSETS is None:
        return None
    blocks = torch.empty(cdiv(M, 128) + E, 2, dtype=torch.int32, device=OFFSETS.device)
    list_blocks(OFFSETS, blocks, M, E, blocks.shape[0], BLOCK_E=power_of_two(E))
    return blocks


def width_of(x: Tensor, up: Tensor | None) -> int:
    """How many columns the unit's value has."""
    return x.shape[-1] if up is not None else x.shape[-1] // 2


def result(x, up, offsets, out_format, out) -> Quantized:
    """The storage that a quantised y goes to: `out`, or a new one."""
    OFFSETS, E = grouping(offsets)
    shape = (*x.shape[:-1], width_of(x, up))
    if out is not None:
        return Quantized.from_tensors(out_format, x.dtype, shape, out.tensors(), OFFSETS)
    return out_format.empty(shape, x.dtype, x.device, E, OFFSETS)


def forward_pairs(x, up, *, act, limit, alpha, scale, offsets, out_format, out) -> Tensor:
    y, x = result(x, up, offsets, out_format, out), rows(x)
    check_ends("glu", "offsets", offsets, x.shape[0])
    blocks = block_list(y.offsets, x.shape[0], grouping(offsets)[1])
    store_pairs(y, x, None, vector(scale, torch.float32), None, blocks, limit, alpha, act)
    return y if out is None else out


def forward(x, up, *, act, limit, alpha, scale, offsets, out_format, out) -> Tensor:
    A, B = halves(x, up)
    check_ends("glu", "offsets", offsets, A.shape[0])
    if out_format is not None:
        y = result(x, up, offsets, out_format, out)
        A, B = columns(A), columns(B)
        source = (A, B, vector(scale, torch.float32), A.stride(0), B.stride(0), limit, alpha)
        fill(y, produce, source, act, out_format.tensor)
        return y if out is None else out
    OFFSETS, E = grouping(offsets)
    y = out if out is not None else torch.empty((*x.shape[:-1], A.shape[1]), dtype=x.dtype, device=x.device)
    Y = rows(y)
    SCALE, stride_s = row_scale(scale)
    glu_forward(matrix(A), matrix(B), SCALE, OFFSETS, matrix(Y), *A.shape, E, stride_s, limit, alpha, ACT=act)
    if Y.data_ptr() != y.data_ptr():
        y.copy_(Y.view(y.shape))  # leading dimensions that no one stride describes
    return y


def backward(saved: SimpleNamespace, dy: Tensor, grad_format: Format | None = None) -> tuple:
    """The gradients. With `grad_format`, which composite ops give, that of x, which must be merged, is `Quantized`."""
    x, up, scale = saved.x, saved.up, saved.scale
    A, B = halves(x, up)
    DY = rows(dy)
    OFFSETS, E = grouping(saved.offsets)
    dx = DA = DB = dup = dscale = None
    if "up" in saved.needs:
        DB = dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if "scale" in saved.needs:
        dscale = torch.empty(scale.shape, dtype=scale.dtype, device=scale.device)
    if "x" in saved.needs and grad_format is not None:
        dx = grad_format.empty(x.shape, x.dtype, x.device, E, OFFSETS)
        if quantized_gradient(dx, saved, A, B, DY, dscale, grad_format):
            return dx, dup, dscale
    elif "x" in saved.needs:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        DA, DB = (dx, DB) if up is not None else halves(dx, None)
    if not (DA is DB is dscale is None):
        SCALE, stride_s = row_scale(scale)
        DA, DB = (t if t is None else rows(t) for t in (DA, DB))
        glu_backward(
            matrix(A), matrix(B), SCALE, OFFSETS, matrix(DY), matrix(DA), matrix(DB), dscale, *A.shape, E, stride_s,
            saved.limit, saved.alpha, ACT=saved.act,
        )  # fmt: skip
    return dx, dup, dscale


def quantized_gradient(
    dx: Quantized, saved: SimpleNamespace, A: Tensor, B: Tensor, DY: Tensor, dscale: Tensor | None, format: Format
) -> bool:
    """Fill dx, and say whether dscale was filled too."""
    (M, hidden), x, scale = A.shape, saved.x, vector(saved.scale, torch.float32)
    if saved.up is not None:
        raise ValueError("glu: grad_format wants gate and up merged in x, not two tensors")
    if hidden % 128:
        raise ValueError(
            f"glu: grad_format wants whole 128-column blocks of gate and of up, got {hidden} columns of each"
        )
    DY = DY.contiguous()
    if takes(Target.at(x.device), x, None, format) and DY.data_ptr() % 16 == 0:
        E = grouping(dx.offsets)[1]
        part = None if dscale is None else torch.empty(hidden // 128, M, dtype=torch.float32, device=x.device)
        store_pairs(dx, rows(x), DY, scale, part, block_list(dx.offsets, M, E), saved.limit, saved.alpha, saved.act)
        if part is not None:
            sum_tiles(part, dscale, dx.offsets, M, hidden // 128, E)
        return True
    if A.stride(1) != 1:
        A, B = halves(x.contiguous(), None)
    source = (A, B, scale, DY, A.stride(0), hidden, saved.limit, saved.alpha)
    fill(dx, produce_gradient, source, saved.act, format.tensor, tiles_only=True)
    return dscale is None


def check_unit(op: str, x: Tensor, up: Tensor | None, act: str, alpha: float) -> None:
    """Raise unless these arguments of `op` are those of a gated unit."""
    if up is None and x.shape[-1] % 2:
        raise ValueError(f"{op}: x holds gate and up in its last dimension, which must be even, got {x.shape[-1]}")
    if act != "silu" and alpha != 1.0:
        raise ValueError(f"{op}: alpha belongs to act='silu'; with act={act!r} it must be 1, got {alpha}")


def check(x, up, *, act, limit, alpha, scale, offsets, out_format) -> None:
    check_unit("glu", x, up, act, alpha)


MOST_TILES = (
    30  # an SM, of ungrouped rows: with more of them the Triton kernel, three programs to an SM, overlaps as well
)


def fits_pairs(target: Target, a: SimpleNamespace) -> bool:
    if not takes(target, a.x, a.up, a.out_format, getattr(a, "out", None)):
        return False
    hidden = a.x.shape[-1] // 2
    tiles = cdiv(a.x.numel() // (2 * hidden), 128) * (hidden // 128)
    return a.offsets is not None or tiles <= MOST_TILES * target.sms


# Both share the backward, which looks at the format of the gradient: no predicate sees that.
def sharding(a: SimpleNamespace) -> Sharding:
    """Gate and up in one tensor are far apart in its last dimension, which therefore is not sharded, and groups of rows are
    counted over all ranks."""
    if a.offsets is not None:
        return Sharding(())
    return Sharding() if a.up is None else Sharding(("...", "width"), {"hidden": "width"})


glu = Op(
    "glu", reference, inputs, Triton(forward_pairs, backward, fits_pairs, "gluon", out=True),
    Triton(forward, backward, single, out=True),
    groups="offsets", where={
        "x": "float[... width]", "up": "x[... width]", "limit": above(0.0), "scale": "float[...]",
        "offsets": "int[experts+]",
    },
    results={"out": "x[... hidden]"}, sizes=lambda a: {"hidden": width_of(a.x, a.up)}, out=Out(live={"...": "offsets"}),
    gradient=Gradient(of=("x", "up", "scale")), check=check, sharding=sharding, bars=Bars("A"),
)  # fmt: skip
