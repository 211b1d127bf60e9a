"""Quantisation as ops of its own: `quantize(x, format)`, x ~ code * scale in the given format, and `dequantize(q)`.

Rules and layouts are the format's, bit for bit. The gradient passes both unchanged.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from ...core.debug import check_ends
from ...core.draw import Draw
from ...core.format import Format, Quantized, store, unpack
from ...core.tensor import name_of, rows
from ...formats.fp8 import CODES, WAYS, Fp8, fp8
from ...formats.tiles import load_tile, load_tiles, store_tiles
from ...op import Bars, Gradient, Op, Out, Triton


def reference(x: Tensor, out_format: Format, *, offsets: Tensor | None = None) -> Tensor:
    """`x` in `out_format`, rounded to fp32 first if it is float64; the gradient passes unchanged.

    `offsets`, on the device, are end rows of groups: 128-row blocks begin anew at each, and rows past the last are neither
    read nor specified.
    """
    return store(x, out_format, x.dtype, offsets)


def inputs(draw: Draw) -> dict:
    tokens = draw.dim("tokens")
    return {
        "x": draw.tensor(tokens, "hidden", scale=3.0),
        "out_format": draw.option(
            "out_format", fp8("1x128", ways="both"), fp8("row", "e5m2"), fp8("tensor", ways="col")
        ),
        "offsets": draw.maybe("offsets", lambda: draw.ends(tokens)),
    }


def forward(x, out_format, *, offsets) -> Quantized:
    OFFSETS = None if offsets is None else offsets.contiguous()
    groups = 0 if OFFSETS is None else OFFSETS.shape[0]
    q = out_format.empty(x.shape, x.dtype, x.device, groups, OFFSETS)
    X = rows(x)
    check_ends("quantize", "offsets", offsets, X.shape[0])
    if isinstance(out_format, Fp8):
        store_tiles(q, load_tile, (X,), X.stride(), scale=out_format.tensor)
    else:
        out_format.fill(q, X, OFFSETS)
    return q


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor]:
    return (dy.clone(),)  # a registered op's result may not be its argument


def check(x, out_format, *, offsets) -> None:
    out_format.check(x.shape)


quantize = Op(
    "quantize", reference, inputs, Triton(forward, backward),
    groups="offsets", where={"x": "float[... hidden]", "offsets": "int[experts+]"},
    results={"out": "x[... hidden]"}, out=Out(any_format=True), gradient=Gradient(of=("x",)), check=check,
    bars=Bars("G", gradient="G"),
)  # fmt: skip


# ---- back ------------------------------------------------------------------------------------------------------------


def reference_codes(
    codes: Tensor,
    scale: Tensor,
    format: str,
    way: Literal["row", "col"] = "row",
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16",
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """code * scale in fp32, rounded to `dtype`: the matrix whose row-wise operand, or column-wise twin, these are.

    `codes`, as bytes, and `scale` are laid out as `format`, a canonical string, has them, a scale of one dimension being
    one row. `dequantize` is easier to call.
    """
    fmt, shape = one_way(format, way), matrix_shape(codes, way)
    return fmt.dequantize(as_quantized(codes, scale, fmt, shape, getattr(torch, dtype), offsets))


def one_way(format: str, way: str) -> Fp8:
    return dataclasses.replace(Format.parse(format), ways=way)


def matrix_shape(codes: Tensor, way: str) -> tuple[int, int]:
    M, N = codes.shape if way == "row" else codes.shape[::-1]
    return M, N


def as_quantized(codes: Tensor, scale: Tensor, fmt: Fp8, shape: tuple, dtype: torch.dtype, offsets) -> Quantized:
    if len(scale_size(fmt, shape, offsets)) == 1:
        scale = scale[0]
    return Quantized.from_tensors(fmt, dtype, shape, (codes.view(CODES[fmt.dtype].dtype), scale), offsets)


def scale_size(fmt: Fp8, shape: tuple[int, int], offsets: Tensor | None) -> tuple[int, ...]:
    groups = 0 if offsets is None else offsets.shape[0]
    return fmt.scale_sizes(*shape, groups)[WAYS[fmt.ways][1]]


def two_dimensional(scale: Tensor) -> Tensor:
    return scale if scale.dim() == 2 else scale.reshape(1, scale.shape[0])


def inputs_codes(draw: Draw) -> dict:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    granularity = draw.option("granularity", "1x128", "128x128", "row", "tensor")
    format = fp8(granularity, draw.option("code", *CODES), ways="both", pow2=draw.option("pow2", True, False))
    offsets = draw.maybe("offsets", lambda: draw.ends(tokens))
    q = format.quantize(draw.tensor(tokens, hidden, dtype=torch.float32), draw.dtype, offsets)
    way = draw.option("way", "row", "col")
    codes, scale = (q.data, q.scale) if way == "row" else (q.data_t, q.scale_t)
    dtype = name_of(draw.dtype)
    codes, scale = codes.view(torch.uint8), two_dimensional(scale)
    return {"codes": codes, "scale": scale, "format": format.key, "way": way, "dtype": dtype, "offsets": offsets}


def forward_codes(codes, scale, format, way, dtype, *, offsets) -> Tensor:
    fmt, shape = one_way(format, way), matrix_shape(codes, way)
    y = torch.empty(shape, dtype=getattr(torch, dtype), device=codes.device)
    OFFSETS = None if offsets is None else offsets.contiguous()
    SCALE = scale if scale.stride(-1) == 1 else scale.contiguous()
    load_tiles(as_quantized(codes.contiguous(), SCALE, fmt, shape, y.dtype, OFFSETS), y)
    return y


def check_codes(codes, scale, format, way, dtype, *, offsets) -> None:
    fmt = Format.parse(format)
    if not isinstance(fmt, Fp8):
        raise ValueError(f"dequantize_codes: format must be an fp8 one, got {format}")
    size = scale_size(one_way(format, way), matrix_shape(codes, way), offsets)
    size = size if len(size) == 2 else (1, *size)
    if scale.shape != size:
        raise ValueError(f"dequantize_codes: scale must be of shape {list(size)}, got {list(scale.shape)}")


dequantize_codes = Op(
    "dequantize_codes", reference_codes, inputs_codes, Triton(forward_codes),
    groups="offsets", where={"codes": "uint8[first second]", "scale": "float32[outer inner]", "offsets": "int[experts+]"},
    results={"out": lambda a: f"{a.dtype}[first second]" if a.way == "row" else f"{a.dtype}[second first]"},
    out=Out(contiguous=("out",)), check=check_codes, bars=Bars("G"), internal=True,
)  # fmt: skip


class _Through(torch.autograd.Function):
    """Gives the value of `y`, and sends the gradient to `carrier`."""

    @staticmethod
    def forward(ctx, carrier, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def dequantize(q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """The plain tensor that `q` stands for, in its logical dtype or `dtype`: from the row-wise operand if it has one."""
    if not q.key.startswith("fp8:"):
        return q.dequantize(dtype)
    way = "row" if q.data is not None else "col"
    carrier, tensors = unpack(q, dtype)
    codes = rows(tensors[0]).view(torch.uint8)
    name = name_of(carrier.dtype)
    y = dequantize_codes.function(codes, two_dimensional(tensors[1]), q.key, way, name, offsets=q.offsets)
    y = y.reshape(q.shape)
    return _Through.apply(carrier, y) if torch.is_grad_enabled() and carrier.requires_grad else y
