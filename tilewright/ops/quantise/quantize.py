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
from ...core.signature import shape_words
from ...core.tensor import cdiv, name_of, rows
from ...device.load import kind_of
from ...device.store import Way, codes_in_byte
from ...formats.dequantize import load_way
from ...formats.fill import as_bytes, fill_from
from ...formats.fp8 import CODES, fp8
from ...formats.integers import Int4, int4, int8
from ...formats.mx import mx
from ...formats.nvfp4 import nvfp4
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
    fill_from(q, X, out_format.tensor)
    return q


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor]:
    return (dy.clone(),)  # a registered op's result may not be its argument


quantize = Op(
    "quantize", reference, inputs, Triton(forward, backward),
    groups="offsets", where={"x": "float[... hidden]", "offsets": "int[experts+]"},
    results={"out": "x[... hidden]"}, out=Out(live={"...": "offsets"}), gradient=Gradient(of=("x",)),
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
    shared: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """(code - zero) * scale * shared in fp32, rounded to `dtype`: the matrix whose row-wise operand, or twin, these are.

    `codes`, as bytes, `scale`, as bytes where it is not in fp32, `shared` and `zero` are laid out as `format`, a canonical string,
    has them, a scale of one dimension being one row. `dequantize` is easier to call.
    """
    fmt, shape = one_way(format, way), matrix_shape(codes, format, way)
    parts = {"data": codes.view(code_dtype(fmt)), "scale": scale, "shared": shared, "zero": zero}
    if fmt.small:
        parts["scale"] = scale.view(fmt.scale_dtype)
    if len(scale_shape(fmt, shape, offsets)) == 1:
        parts["scale"] = parts["scale"][0]
    tensors = [parts[name.removesuffix("_t")] for name in fmt.tensor_names]
    return fmt.dequantize(Quantized.from_tensors(fmt, getattr(torch, dtype), shape, tensors, offsets))


def one_way(format: str, way: str) -> Format:
    return dataclasses.replace(Format.parse(format), ways=way)


def matrix_shape(codes: Tensor, format: str, way: str) -> tuple[int, int]:
    """(rows, columns) of the matrix whose codes these are."""
    outer, inner = codes.shape[0], codes.shape[1] * codes_in_byte(Format.parse(format).device_format(False))
    return (outer, inner) if way == "row" else (inner, outer)


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of a format's codes, of bytes where there are two in one."""
    kind = kind_of(fmt.device_format(False))
    return CODES[kind].dtype if kind in CODES else torch.int8 if kind == "int8" else torch.uint8


def groups_in(offsets: Tensor | None) -> int:
    return 0 if offsets is None else offsets.shape[0]


def scale_shape(fmt: Format, shape: tuple[int, int], offsets: Tensor | None) -> tuple[int, ...]:
    """The shape of the scale of a matrix's one way; those of integers are FP8's."""
    if fmt.small:
        return fmt.scale_shape(*(shape if fmt.ways == "row" else shape[::-1]))
    return fp8(fmt.granularity).scale_sizes(*shape, groups_in(offsets))["scale" if fmt.ways == "row" else "scale_t"]


def two_dimensional(scale: Tensor) -> Tensor:
    return scale if scale.dim() == 2 else scale.reshape(1, scale.shape[0])


def inputs_codes(draw: Draw) -> dict:
    way = draw.option("way", "row", "col")
    format = dataclasses.replace(drawn_format(draw), ways=way)
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    per = codes_in_byte(format.device_format(False))
    tokens, hidden = (tokens, cdiv(hidden, per) * per) if way == "row" else (cdiv(tokens, per) * per, hidden)
    offsets = draw.maybe("offsets", lambda: draw.ends(tokens)) if has_groups(format) else None
    q = format.quantize(draw.tensor(tokens, hidden, dtype=torch.float32), draw.dtype, offsets)
    parts = {name.removesuffix("_t"): t for name, t in zip(format.tensor_names, q.tensors())}
    return {
        "codes": parts["data"].view(torch.uint8), "scale": two_dimensional(as_bytes(parts["scale"])),
        "format": dataclasses.replace(format, ways="both").key, "way": way, "dtype": name_of(draw.dtype),
        "offsets": offsets, "shared": parts.get("shared"), "zero": parts.get("zero"),
    }  # fmt: skip


def drawn_format(draw: Draw) -> Format:
    family = draw.option("family", "fp8", "int8", "int4", "int4 with zero points", "mx", "nvfp4")
    if family in ("fp8", "int8"):
        granularity = draw.option("granularity", "1x128", "128x128", "row", "tensor")
        if family == "int8":
            return int8(granularity)
        return fp8(granularity, draw.option("code", *CODES), pow2=draw.option("pow2", True, False))
    if family == "mx":
        return mx(draw.option("code", *CODES, "e2m1"), swizzled=draw.option("swizzled", False, True))
    if family == "nvfp4":
        return nvfp4(swizzled=draw.option("swizzled", False, True))
    zero = family != "int4"
    return int4("1x128" if zero else draw.option("scales", "1x128", "row"), zero=zero)


def has_groups(format: Format) -> bool:
    return not isinstance(format, Int4) and (format.ways == "row" or not format.small)


def forward_codes(codes, scale, format, way, dtype, *, offsets, shared, zero) -> Tensor:
    y = torch.empty(matrix_shape(codes, format, way), dtype=getattr(torch, dtype), device=codes.device)
    OFFSETS = None if offsets is None else offsets.contiguous()
    SCALE, ZERO = scale, zero
    if scale.stride(1) != 1 or (zero is not None and zero.stride() != scale.stride()):
        SCALE, ZERO = scale.contiguous(), None if zero is None else zero.contiguous()
    load_way(Way(codes.contiguous(), SCALE, shared, ZERO), Format.parse(format), y, OFFSETS, way == "col")
    return y


def check_codes(codes, scale, format, way, dtype, *, offsets, shared, zero) -> None:
    fmt, shape = one_way(format, way), matrix_shape(codes, format, way)
    try:
        fmt.check(shape, groups_in(offsets))
    except ValueError as error:
        raise ValueError(f"dequantize_codes: {error}") from None
    size = scale_shape(fmt, shape, offsets)
    size = size if len(size) == 2 else (1, *size)
    wanted = {"scale": (size, torch.uint8 if fmt.small else torch.float32), "shared": ((1,), torch.float32),
              "zero": (size, torch.float32)}  # fmt: skip
    names = [name.removesuffix("_t") for name in fmt.tensor_names]
    for name, given in (("scale", scale), ("shared", shared), ("zero", zero)):
        if (name in names) != (given is not None):
            must = "given" if name in names else "None"
            raise ValueError(f"dequantize_codes: {name} must be {must}, as the format is {fmt}")
        like, like_dtype = wanted[name]
        if given is not None and (given.shape, given.dtype) != (like, like_dtype):
            raise ValueError(
                f"dequantize_codes: {name} must be {name_of(like_dtype)}{[*like]}, got {shape_words(given)}"
            )


dequantize_codes = Op(
    "dequantize_codes", reference_codes, inputs_codes, Triton(forward_codes), groups="offsets",
    where={
        "codes": "uint8[first second]", "scale": "float32|uint8[outer inner]", "offsets": "int[experts+]", "shared": "float32[1]",
        "zero": "float32[outer inner]",
    },
    results={"out": lambda a: f"{a.dtype}[rows columns]"},
    sizes=lambda a: dict(zip(("rows", "columns"), matrix_shape(a.codes, a.format, a.way))),
    out=Out(contiguous=("out",), live={"rows": "offsets"}), check=check_codes, bars=Bars("G"), internal=True,
)  # fmt: skip


class _Through(torch.autograd.Function):
    """Gives the value of `y`, and sends the gradient to `carrier`."""

    @staticmethod
    def forward(ctx, carrier, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def stored_in(key: str) -> tuple[str, ...]:
    """The names of the tensors of values in the format with this canonical string."""
    return Format.parse(key).tensor_names


# torch.compile reads a string off an intermediate value, but neither format nor fields. It is told so as `assume_constant_result`
# tells it, which would import torch's compiler into every program, for 3 s
stored_in._dynamo_marked_constant = True


def dequantize(q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """The plain tensor that `q` stands for, in its logical dtype or `dtype`: from the row-wise operand if it has one."""
    carrier, tensors = unpack(q, dtype)
    parts = dict(zip(stored_in(q.key), tensors))
    way, tail = ("row", "") if "data" in parts else ("col", "_t")
    y = dequantize_codes.function(
        rows(parts[f"data{tail}"]).view(torch.uint8), two_dimensional(as_bytes(parts[f"scale{tail}"])), q.key, way,
        name_of(carrier.dtype), offsets=q.offsets, shared=parts.get(f"shared{tail}"), zero=parts.get(f"zero{tail}"),
    )  # fmt: skip
    y = y.reshape(q.shape)
    return _Through.apply(carrier, y) if torch.is_grad_enabled() and carrier.requires_grad else y
