"""What matrix products multiply: codes, the scales that go with them, and the names of how scales are laid out.

An operand is [rows, inner], for the second factor its transpose. Its codes are e4m3 or e5m2, int8, or bytes of two 4-bit codes
each, of which the low nibble comes first: e2m1 where a scale is for 16 or 32 of them, int4 otherwise. bf16 and fp16 are operands
as they are. The names of scale layouts are those of `torch.nn.functional.ScalingType`; here a scale is always a matrix,
[rows or blocks of rows, blocks of the inner dimension]:

| recipe           | scale of [M, K]                | dtype                     |
|------------------|--------------------------------|---------------------------|
| TensorWise       | [1, 1]                         | float32                   |
| RowWise          | [M, 1]                         | float32                   |
| BlockWise1x128   | [M, ceil(K/128)]               | float32                   |
| BlockWise128x128 | [ceil(M/128), ceil(K/128)]     | float32                   |
| BlockWise1x32    | [M, ceil(K/32)]                | e8m0: a power of two      |
| BlockWise1x16    | [M, ceil(K/16)]                | e4m3, and one float32 for the whole, `shared` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..core.format import Quantized
from ..core.tensor import cdiv

Recipe = Literal["TensorWise", "RowWise", "BlockWise1x16", "BlockWise1x32", "BlockWise1x128", "BlockWise128x128"]
# Rows and inner elements that one scale is for; 0: all of them
BLOCKS: dict[str, tuple[int, int]] = {
    "TensorWise": (0, 0),
    "RowWise": (1, 0),
    "BlockWise1x16": (1, 16),
    "BlockWise1x32": (1, 32),
    "BlockWise1x128": (1, 128),
    "BlockWise128x128": (128, 128),
}
SCALES = {"BlockWise1x16": torch.float8_e4m3fn, "BlockWise1x32": torch.float8_e8m0fnu}  # the others' are float32
FLOATS = (torch.bfloat16, torch.float16)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
ONCE = ("TensorWise", "RowWise")  # scales that multiply a whole sum
OutDtype = Literal["bfloat16", "float16", "float32"]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(OutDtype)}


def result_row(dims: str) -> Callable[[SimpleNamespace], str]:
    """The row of a product of these dimensions: in `out_dtype`, or as `a` is where that is None or float64, the oracle's."""

    def row(a: SimpleNamespace) -> str:
        same = a.out_dtype is None or a.a.dtype == torch.float64
        return f"{'a' if same else a.out_dtype}[{dims}]"

    return row


def kind_of(codes: Tensor, recipe: str | None) -> str:
    """The kind of these codes: e4m3, e5m2, int8, int4, e2m1, or `float` for bf16 and fp16, which are no codes."""
    if codes.dtype == torch.uint8:
        return "e2m1" if recipe in SCALES else "int4"
    return KINDS.get(codes.dtype, "float")


def inner_of(codes: Tensor) -> int:
    """The inner dimension of codes [rows, ...]: two codes are in a byte of uint8."""
    return codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)


def scale_shape(recipe: str, rows: int, inner: int) -> tuple[int, int]:
    """The shape of an operand's scale, as in the table above."""
    down, across = BLOCKS[recipe]
    return cdiv(rows, down) if down else 1, cdiv(inner, across) if across else 1


# ---- references ------------------------------------------------------------------------------------------------------


def decode(codes: Tensor, recipe: str | None) -> Tensor:
    """The numbers that codes stand for without their scales. They are in float64, for in float32 their products would not be exact;
    floats stay as they are."""
    if codes.dtype != torch.uint8:
        return codes.double() if codes.dtype == torch.int8 else codes if codes.dtype == torch.float64 else codes.float()
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    if kind_of(codes, recipe) == "int4":
        return ((nibbles ^ 8).to(torch.int8) - 8).double()
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=codes.device)
    return table[nibbles.to(torch.int64)]


def spread(t: Tensor, recipe: str, rows: int, inner: int) -> Tensor:
    """A scale or a zero point, repeated for every element that it is for."""
    down, across = BLOCKS[recipe]
    t = t.repeat_interleave(down, 0)[:rows] if down else t.expand(rows, t.shape[1])
    return t.repeat_interleave(across, 1)[:, :inner] if across else t.expand(rows, inner)


def values(
    codes: Tensor,
    scale: Tensor | None,
    recipe: str | None,
    shared: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """The numbers [rows, inner] that an operand stands for: (code - zero) * scale * shared."""
    wide = decode(codes, recipe)
    if zero is not None:
        wide = wide - spread(zero, recipe, *wide.shape)
    if scale is not None:
        scale = scale if scale.dtype == torch.float64 else scale.float()
        wide = wide * spread(scale, recipe, *wide.shape)
    return wide if shared is None else wide * shared


# ---- from what the caller has ----------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """An operand [rows, inner] of a product in flat tensors."""

    codes: Tensor
    scale: Tensor | None
    recipe: str | None
    shared: Tensor | None = None
    zero: Tensor | None = None


def names_of(recipe: Any) -> list[str]:
    """The names of a recipe given as string, as torch's enum, or as a list of either."""
    many = recipe if isinstance(recipe, (list, tuple)) else [recipe]
    return [r if isinstance(r, str) else getattr(r, "name", repr(r)) for r in many]


def operand(op: str, name: str, t: Tensor, scale: Any, recipe: Any) -> Operand:
    """The operand that argument `name` is: codes with scales as torch lays them out, a `Quantized`, or plain numbers. `b` is given
    as [inner, columns]."""
    second = name == "b"
    if isinstance(t, Quantized):
        if scale is not None or recipe is not None:
            raise ValueError(f"{op}: {name} is Quantized, so that scale_{name} and recipe_{name} must be None")
        return of_quantized(op, name, t)
    codes = t.view(torch.uint8) if t.dtype == torch.float4_e2m1fn_x2 else t
    codes = codes.t() if second and codes.dim() == 2 else codes
    if recipe is None:
        if scale is not None:
            raise ValueError(f"{op}: recipe_{name} must say what scale_{name} is for: one of {', '.join(BLOCKS)}")
        return Operand(codes, None, None)
    recipes = names_of(recipe)
    scales = list(scale) if isinstance(scale, (list, tuple)) else [scale]
    if recipes[0] not in BLOCKS or len(recipes) > 2 or recipes[1:] not in ([], ["TensorWise"]):
        raise ValueError(f"{op}: recipe_{name} must be one of {', '.join(BLOCKS)}, got {recipe!r}")
    if len(scales) != len(recipes) or not all(isinstance(s, Tensor) for s in scales):
        raise ValueError(f"{op}: scale_{name} must be {len(recipes)} tensors, one for each recipe")
    shared = scales[1].reshape(1) if len(scales) > 1 else None
    if codes.dim() != 2:
        raise ValueError(f"{op}: {name} must have 2 dimensions, got {list(codes.shape)}")
    return Operand(codes, flat_scale(op, name, scales[0], recipes[0], codes), recipes[0], shared)


def flat_scale(op: str, name: str, scale: Tensor, recipe: str, codes: Tensor) -> Tensor:
    """A scale in torch's layout as [rows or blocks of rows, blocks]: torch has 128x128 blocks with the inner dimension first,
    and a one-dimensional scale of small blocks is in tiles of 128x4 (`swizzle_scale`), of which this makes a copy."""
    from ..formats.swizzle import unswizzle_scale

    rows, inner = codes.shape[0], inner_of(codes)
    wanted = scale_shape(recipe, rows, inner)
    if recipe in SCALES and scale.dim() == 1:
        return unswizzle_scale(scale, *wanted)
    if recipe == "BlockWise128x128" and scale.dim() == 2:
        scale = scale[: wanted[1]].t()  # the inner dimension may be padded
    elif recipe == "TensorWise" and scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif recipe == "RowWise" and scale.numel() == rows:
        scale = scale.reshape(rows, 1)
    if scale.shape != wanted:
        raise ValueError(
            f"{op}: scale_{name} is {list(scale.shape)}, but {recipe} of {rows} by {inner} elements has {list(wanted)}"
        )
    return scale


def of_quantized(op: str, name: str, q: Quantized) -> Operand:
    """The operand that a `Quantized` is: its row-wise one as the first factor, its column-wise twin as the second. The inner
    dimension of those is contiguous."""
    second = name == "b"
    fields: Sequence[str] = ("data_t", "scale_t") if second else ("data", "scale")
    if q.dim() != 2 or q.offsets is not None:
        raise ValueError(f"{op}: {name} must be a matrix that is not grouped, got {q!r}")
    codes, scale = (getattr(q, field) for field in fields)
    if codes is None:
        way = "column-wise" if second else "row-wise"
        raise ValueError(
            f"{op}: {name} has no {way} operand: quantise it with ways='both', or its transpose and pass .t()"
        )
    scale, recipe = q.format.recipe(scale)
    if recipe in SCALES:
        scale = flat_scale(op, name, scale, recipe, codes)
    return Operand(codes, scale, recipe, *q.format.extras(q, "col" if second else "row"))
