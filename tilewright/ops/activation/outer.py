"""The outer product of two vectors: out[m, n] = x[m] * y[n]; backward dx[m] = sum over n of dout[m, n] * y[n], and
dy[n] = sum over m of dout[m, n] * x[m].

With no inner dimension to sum over it is no work for tensor cores: it is bound by writing the result, as what follows a product is,
and so it stands beside `epilogue` and shares its tiles. The backward reads dout once for both sums. A program keeps its share of dy
in registers, and has dx of its own columns alone; `sum_columns` adds up the shares of either.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from ..norm.rms_norm import sum_columns
from .epilogue import tile


def reference(x: Tensor, y: Tensor) -> Tensor:
    """`x[:, None] * y[None, :]` of two vectors of one dtype, in fp32 and rounded once; torch's `outer`. Either may be a slice or
    expanded, and is read as it lies."""
    return (upcast(x)[:, None] * upcast(y)).to(x.dtype)


def inputs(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.tensor("tokens"), "y": draw.tensor("hidden")}


# ---- kernels ---------------------------------------------------------------------------------------------------------

SIZE = 4096  # elements of the forward's tiles: four 16-byte stores a thread in bf16
ROWS_BACKWARD = 16  # of a block
LINE = 512  # bytes of a row of dout that a program of the backward has: what one load of a warp covers, so that dx needs no barrier
ON_SM = 3  # programs of the backward on one SM: of 8 warps with 80 registers a thread


def _default(a) -> dict:
    COLS = min(1024, power_of_two(a.N))
    return {"ROWS": SIZE // COLS, "COLS": COLS, "num_warps": 4}


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.N, a.COLS),), tokens=("M",), default=_default)
def outer_forward(X, Y, OUT, M, N, stride_x, stride_y, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col, inside = tile(M, N, ROWS, COLS)
    x = tl.load(X + row * stride_x, row < M, 0.0).to(tl.float32)
    y = tl.load(Y + col * stride_y, col < N, 0.0).to(tl.float32)
    tl.store(OUT + row * N + col, (x * y).to(OUT.dtype.element_ty), inside)


@kernel(
    grid=lambda a: (cdiv(a.N, a.COLS) * a.BANDS,), tokens=("M", "BANDS"), default=lambda a: {"num_warps": 8}
)  # fmt: skip
def outer_backward(
    X, Y, DOUT, DX, DY, M, N, BANDS, stride_x, stride_y, stride_m, stride_n, ROWS: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program takes some columns of every BANDS-th block of rows. DX [columns / COLS, blocks * ROWS] and DY [BANDS, N] are its
    shares; where there is one of DX, that is the gradient. PDL: the launch that sums shares may begin, and waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    across = tl.cdiv(N, COLS)
    part = (tl.program_id(0) % across).to(tl.int64)
    band = tl.program_id(0) // across
    col = part * COLS + tl.arange(0, COLS)
    y = tl.load(Y + col * stride_y, col < N, 0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLS], tl.float32)
    blocks = tl.cdiv(M, ROWS)
    for block in tl.range(band, blocks, BANDS, num_stages=3):
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (col < N)[None, :]
        d = tl.load(DOUT + row[:, None] * stride_m + col[None, :] * stride_n, inside, 0.0).to(tl.float32)
        if DX is not None:
            # Past the last row as well: there is room
            tl.store(DX + part * blocks * ROWS + row, tl.sum(d * y[None, :], axis=1).to(DX.dtype.element_ty))
        if DY is not None:
            x = tl.load(X + row * stride_x, row < M, 0.0).to(tl.float32)
            total += d * x[:, None]
    if DY is not None:
        tl.store(DY + band.to(tl.int64) * N + col, tl.sum(total, axis=0).to(DY.dtype.element_ty), col < N)


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], y.shape[0], dtype=x.dtype, device=x.device)
    outer_forward(x, y, out, *out.shape, x.stride(0), y.stride(0))
    return out


def backward(saved: SimpleNamespace, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, summed in fp32 in an order that follows from the shape and the chip alone, without atomics."""
    x, y = saved.x, saved.y
    (M, N), target = dout.shape, Target.at(dout.device)
    if not dout.numel():
        return tuple(t.new_zeros(t.shape) if n in saved.needs else None for n, t in (("x", x), ("y", y)))
    COLS = min(LINE // dout.element_size(), power_of_two(N))
    across, blocks = cdiv(N, COLS), cdiv(M, ROWS_BACKWARD)
    bands = max(1, min(ON_SM * target.sms // across, blocks))
    # dx as whole blocks of rows, whose number divides by 16: so its sum is one variant for all M
    shares = {"x": (across, blocks * ROWS_BACKWARD), "y": (bands, N)}
    made = {n: torch.empty(shares[n][1], dtype=x.dtype, device=x.device) for n in ("x", "y") if n in saved.needs}
    parts = {n: torch.empty(shares[n], dtype=torch.float32, device=x.device) for n in made if n == "y" or across > 1}
    to = {**made, **parts}
    PDL = bool(parts) and target.early_launch
    outer_backward(
        x, y, dout, to.get("x"), to.get("y"), M, N, bands, x.stride(0), y.stride(0), *dout.stride(), ROWS=ROWS_BACKWARD,
        COLS=COLS, PDL=PDL,
    )  # fmt: skip
    for n, part in parts.items():  # the second waits for the first, which is over when the shares are there
        sum_columns(part, made[n], *shares[n], PDL=PDL)
    return made["x"][:M] if "x" in made else None, made.get("y")


outer = Op(
    "outer", reference, inputs, Triton(forward, backward, single),
    where={"x": "float[tokens]", "y": "x[columns]"}, results={"out": "x[tokens columns]"}, out=Out(contiguous=("out",)),
    gradient=Gradient(of=("x", "y")), sharding=Sharding(("tokens", "columns")), bars=Bars("A"),
)  # fmt: skip
