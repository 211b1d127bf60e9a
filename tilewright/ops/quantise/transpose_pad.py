"""Batched transpose, the new last dimension zero-padded to a multiple: y[..., h, l] = x[..., l, h], 0 for l >= length.

Backward: dx[..., l, h] = dy[..., h, l] for l < length, by the same kernel.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.signature import at_least
from ...core.tensor import BITS, cdiv
from ...op import Bars, Gradient, Op, Out, Sharding, Triton
from ...runtime.kernel import kernel


def reference(x: Tensor, *, multiple: int = 1) -> Tensor:
    """x [..., length, hidden] as [..., hidden, length rounded up to a `multiple`], zeros after the last column.

    Elements are of any type of up to 8 bytes. Rows grouped by expert need no form of their own: where groups begin at multiples
    of 16 or 128 rows, as `moe_permute` aligns them, the columns from one offset to the next are the group's transpose.
    """
    codes = x.element_size() == 1  # torch pads no float8
    length = x.shape[-2]
    rows = x.view(torch.uint8) if codes else x.narrow(-2, 0, length)  # all of it: so its gradient is contiguous
    y = F.pad(rows.transpose(-1, -2), (0, -length % multiple))
    return y.view(x.dtype) if codes else y


def inputs(draw: Draw) -> dict:
    # The number of matrices is that of tokens: what belongs to one of them stays there
    codes = draw.option("codes", False, True)
    shape = draw.dim("tokens"), draw.dim("length"), draw.dim("hidden")
    x = draw.integers(*shape, high=256, dtype=torch.uint8) if codes else draw.tensor(*shape)
    return {"x": x, "multiple": draw.option("multiple", 1, 16, 32)}


def _tile(a, rows: int = 128, cols: int = 128, warps: int = 4) -> dict:
    """A tile by the bytes of its sides: whole 128-byte lines both ways."""
    size = a.X.element_size()
    return {"ROWS": max(16, rows // size), "COLS": max(16, cols // size), "num_warps": warps}


@kernel(
    grid=lambda a: (a.B * cdiv(a.A, a.COLS) * cdiv(a.K, a.ROWS),),
    tokens=("B", "M", "L"),
    tune_by=("K",),
    default=_tile,
    candidates=lambda a: [_tile(a, 128, 128, 4), _tile(a, 256, 256, 8)],
)
def transpose_tiles(
    X, Y, B, M, K, L, A, stride_b, stride_m, stride_k, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Y [B, L, A] from X [B, M, K]: L <= K of its columns are rows of Y, and A >= M. K and A, in whose direction vectors lie, are
    specialised; M and L are not, and are masked row by row."""
    across, down = tl.cdiv(K, ROWS), tl.cdiv(A, COLS)
    tile = tl.program_id(0)
    b = (tile // (across * down)).to(tl.int64)
    m = (tile // across % down) * COLS + tl.arange(0, COLS)
    k = (tile % across) * ROWS + tl.arange(0, ROWS)
    at = X + b * stride_b + m[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k
    x = tl.load(at, (m[:, None] < M) & (k[None, :] < K), 0)
    to = Y + b * L * A + k[:, None].to(tl.int64) * A + m[None, :]
    tl.store(to, tl.trans(x), (k[:, None] < L) & (m[None, :] < A))


def transpose(x: Tensor, rows: int, cols: int) -> Tensor:
    """The first columns of x [..., M, K] as rows, each padded with zeros to `cols`."""
    (M, K), leading = x.shape[-2:], x.shape[:-2]
    y = torch.empty((*leading, rows, cols), dtype=x.dtype, device=x.device)
    flat = x.reshape(math.prod(leading), M, K)
    bits = BITS[x.element_size()]
    transpose_tiles(flat.view(bits), y.view(bits), flat.shape[0], M, K, rows, cols, *flat.stride())
    return y


def padded(x: Tensor, multiple: int) -> int:
    """The new last dimension."""
    return cdiv(x.shape[-2], multiple) * multiple


def forward(x, *, multiple) -> Tensor:
    return transpose(x, x.shape[-1], padded(x, multiple))


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor]:
    return (transpose(dy, *saved.x.shape[-2:]),)


def check(x, *, multiple) -> None:
    if x.element_size() not in BITS:
        raise TypeError(f"transpose_pad: x must have elements of {', '.join(map(str, BITS))} bytes, got {x.dtype}")


transpose_pad = Op(
    "transpose_pad", reference, inputs, Triton(forward, backward), check=check,
    where={"x": "any[... length hidden]", "multiple": at_least(1)},
    results={"out": "x[... hidden padded]"}, sizes=lambda a: {"padded": padded(a.x, a.multiple)},
    out=Out(contiguous=("out",)), gradient=Gradient(of=("x",), saves=(), shape_only=lambda values: ("x",)),
    sharding=Sharding(("...", "hidden")), bars=Bars("G", gradient="G"),
)  # fmt: skip
