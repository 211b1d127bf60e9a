"""Smoothed quantisation: z = x / smooth per column, then codes and scales of z in the given format.

`column_amax` and `smooth_scale` make `smooth` from data: outliers of a column of x move into the same row of the weight, and
(x / smooth)(smooth * w) = x w. Backward: dx = dz / smooth.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_ends
from ...core.draw import Draw
from ...core.format import Format, Quantized, store
from ...core.tensor import cdiv, power_of_two, rows
from ...device.blocks import find_block, find_tile
from ...device.quantize import max_nan, quotient
from ...formats.fill import amax_tiles, fill, read
from ...formats.fp8 import fp8
from ...op import Bars, Gradient, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel
from ..activation.glu import columns, grouping

TINY = 1e-30  # no column is divided by less
SMALLEST = tl.constexpr(TINY)


def reference(
    x: Tensor, smooth: Tensor, out_format: Format, *, reverse: bool = False, offsets: Tensor | None = None
) -> Tensor:
    """`x / smooth` per column in `out_format`, or `x * smooth` if `reverse`: in fp32, one rounding, then the format's.

    `smooth` has one row for all rows of x or, with `offsets`, one per group; a divisor below 1e-30 counts as 1e-30.
    `offsets`, on the device, are end rows of groups: 128-row blocks begin anew at each, and rows past the last are neither
    read nor specified. Quotients of |x| under 2**-100 may be off by their last bit. `smooth` has no gradient.
    """
    s = smooth if reverse else smooth.clamp(min=TINY)
    s = s[0] if offsets is None else s[group_of(rows(x).shape[0], offsets)].reshape(x.shape)
    return store(upcast(x) * s if reverse else upcast(x) / s, out_format, x.dtype, offsets)


def group_of(count: int, offsets: Tensor) -> Tensor:
    """The group of each of `count` rows; those past the last are taken for the last one's."""
    row = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, row, right=True).clamp(max=offsets.shape[0] - 1)


def inputs(draw: Draw) -> dict:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    offsets = draw.maybe("offsets", lambda: draw.ends(tokens))
    groups = 1 if offsets is None else draw.dim("experts")
    return {
        "x": draw.tensor(tokens, hidden, scale=3.0),
        "smooth": draw.uniform(groups, hidden, low=0.01, high=4.0, dtype=torch.float32),
        "out_format": draw.option("out_format", fp8("1x128")),
        "reverse": draw.option("reverse", False, True),
        "offsets": offsets,
    }


@kernel(grid=lambda a: (a.count,), tokens=("M", "E", "count"), default=lambda a: {"num_warps": 1})
def list_groups(OFFSETS, GROUP, M, E, count, BLOCK_E: tl.constexpr):
    """GROUP[b] = the group of 128-row block b; 0 when there is no such block."""
    group, _, _ = find_block(tl.program_id(0), OFFSETS, E, M, BLOCK_E)
    tl.store(GROUP + tl.program_id(0), group)


@triton.jit
def produce(SOURCE, row, col, inside, MODE: tl.constexpr):
    """A tile of z, wholly in one group."""
    X, SMOOTH, GROUP, stride, N = SOURCE
    at = SMOOTH + col
    if GROUP is not None:
        # The block by the number of the program, not from its rows: the four parts of a tile then load and invert once
        at += tl.load(GROUP + tl.program_id(0) // tl.maximum(tl.cdiv(N, 128), 1)).to(tl.int64) * N
    x = tl.load(X + row * stride + col, inside, 0.0).to(tl.float32)
    s = tl.load(at)
    if MODE == "times":
        z = x * s
    else:
        s = max_nan(s, SMALLEST)
        z = quotient(x, s, tl.div_rn(1.0, s))
    return z


@kernel(grid=lambda a: ((cdiv(a.M, 128) + a.E) * cdiv(a.N, 128),), tokens=("M",), default=lambda a: {"num_warps": 4})
def smooth_backward(DZ, SMOOTH, OFFSETS, DX, M, N, E, stride_m, stride_n, MODE: tl.constexpr, BLOCK_E: tl.constexpr):
    """DX = DZ over or times SMOOTH; one program, one tile of one group."""
    _, group, row0, rows_left, col0 = find_tile(OFFSETS, M, N, E, BLOCK_E)
    col = col0 + tl.arange(0, 128)[None, :]
    s = tl.load(SMOOTH + group.to(tl.int64) * N + col, col < N, 1.0)
    if MODE == "over":
        s = max_nan(s, SMALLEST)
    for k in tl.static_range(4):
        r = 32 * k + tl.arange(0, 32)[:, None]
        inside = (r < rows_left) & (col < N)
        dz = tl.load(DZ + (row0 + r) * stride_m + col.to(tl.int64) * stride_n, inside, 0.0).to(tl.float32)
        if MODE == "times":
            dx = dz * s
        else:
            dx = tl.div_rn(dz, s)
        tl.store(DX + (row0 + r) * N + col, dx.to(DX.dtype.element_ty), inside)


def group_list(OFFSETS: Tensor | None, M: int) -> Tensor | None:
    """The group of each 128-row block."""
    if OFFSETS is None:
        return None
    E = OFFSETS.shape[0]
    group = torch.empty(cdiv(M, 128) + E, dtype=torch.int32, device=OFFSETS.device)
    list_groups(OFFSETS, group, M, E, group.shape[0], BLOCK_E=power_of_two(E))
    return group


def forward(x, smooth, out_format, *, reverse, offsets) -> Quantized:
    OFFSETS, groups = grouping(offsets)
    q = out_format.empty(x.shape, x.dtype, x.device, groups, OFFSETS)
    X = columns(rows(x))
    check_ends("smooth_quantize", "offsets", offsets, X.shape[0])
    source = (X, smooth.contiguous(), group_list(OFFSETS, X.shape[0]), X.stride(0), X.shape[1])
    fill(q, produce, source, "times" if reverse else "over", out_format.tensor, tiles_only=True)
    return q


def backward(saved: SimpleNamespace, dz: Tensor) -> tuple[Tensor]:
    DZ, (OFFSETS, E) = rows(dz), grouping(saved.offsets)
    dx = torch.empty(dz.shape, dtype=dz.dtype, device=dz.device)
    smooth_backward(
        DZ, saved.smooth.contiguous(), OFFSETS, dx, *DZ.shape, E, *DZ.stride(),
        MODE="times" if saved.reverse else "over", BLOCK_E=power_of_two(E),
    )  # fmt: skip
    return (dx,)


def check(x, smooth, out_format, *, reverse, offsets) -> None:
    if offsets is None and smooth.shape[0] != 1:
        raise ValueError(f"smooth_quantize: smooth is {list(smooth.shape)}, but has one row where there are no offsets")


smooth_quantize = Op(
    "smooth_quantize", reference, inputs, Triton(forward, backward, single),
    groups="offsets", where={"x": "float[... hidden]", "smooth": "float32[experts+ hidden]", "offsets": "int[experts+]"},
    results={"out": "x[... hidden]"}, gradient=Gradient(of=("x",), shape_only=lambda values: ("x",)), check=check,
    out=Out(live={"...": "offsets"}), bars=Bars("A"),
)  # fmt: skip


# ---- calibration -----------------------------------------------------------------------------------------------------


def reference_amax(x: Tensor, *, offsets: Tensor | None = None) -> Tensor:
    """max |x| of each column in fp32, [1, hidden] or, with `offsets` (end rows of groups), [experts, hidden]; 0 of no rows.

    A NaN shows in its own column. Rows past the last offset do not count.
    """
    X = rows(x).abs()
    X = X if X.dtype == torch.float64 else X.float()
    if offsets is None:
        return torch.nn.functional.pad(X, (0, 0, 0, 1)).amax(0, keepdim=True)
    live = torch.arange(X.shape[0], device=X.device)[:, None] < offsets[-1]
    group = group_of(X.shape[0], offsets)[:, None].expand(X.shape)
    zeros = X.new_zeros(offsets.shape[0], X.shape[1])
    return zeros.scatter_reduce(0, group, torch.where(live, X, 0.0), "amax")


def inputs_amax(draw: Draw) -> dict:
    tokens = draw.dim("tokens")
    return {
        "x": draw.tensor(tokens, "hidden", scale=3.0),
        "offsets": draw.maybe("offsets", lambda: draw.ends(tokens)),
    }


def forward_amax(x, *, offsets) -> Tensor:
    OFFSETS, groups = grouping(offsets)
    X = rows(x)
    M, N = X.shape
    check_ends("column_amax", "offsets", offsets, M)
    found = torch.zeros(max(1, groups), N, dtype=torch.float32, device=x.device)
    # Bits of absolute values keep their order as integers, NaN above all: the programs' order does not matter
    amax_tiles(
        (X, *X.stride()), None, found.view(torch.int32), OFFSETS, M, N, groups, PRODUCE=read, MODE=0, FORMAT="row",
        COLS=128 if N % 128 == 0 else 16 if N % 16 == 0 else 1,
        BLOCK_E=power_of_two(groups),
    )  # fmt: skip
    return found


def row_amax(a: SimpleNamespace) -> str:
    dtype = "float64" if a.x.dtype == torch.float64 else "float32"
    return f"{dtype}[1 hidden]" if a.offsets is None else f"{dtype}[experts hidden]"


column_amax = Op(
    "column_amax", reference_amax, inputs_amax, Triton(forward_amax, when=single),
    groups="offsets", where={"x": "float[... hidden]", "offsets": "int[experts+]"},
    results={"out": row_amax}, out=Out(contiguous=("out",)), bars=Bars("G"),
)  # fmt: skip


def smooth_scale(
    amax: Tensor, weight_amax: Tensor | None = None, *, coef: float = 0.5, power_of_two: bool = False
) -> Tensor:
    """What to smooth with, element by element in fp32: `amax ** coef`, over `weight_amax ** (1 - coef)` if given.

    Both are floored at 1e-30. With a coef of 0.5 and the largest weights the columns of `x / s` and of `w * s` are equally
    large; `smooth_quantize` takes s for x and, reversed, for w. `power_of_two` rounds up to one, and the smoothing is exact.
    """
    if not 0.0 <= coef <= 1.0:
        raise ValueError(f"smooth_scale: coef must be in [0, 1], got {coef}")
    s = amax.float().clamp(min=TINY) ** coef
    if weight_amax is not None:
        s = s / weight_amax.float().clamp(min=TINY) ** (1.0 - coef)
    if power_of_two:
        s = torch.where(s.isfinite(), ((s.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32), s)
    return s
