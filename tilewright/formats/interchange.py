"""Values as other libraries hold them, and back: operands of torch's `scaled_mm`, fields of TransformerEngine's FP8 tensor.

Lossless both ways: codes and scales keep their bits, and memory is shared wherever the two layouts agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from tilewright.core.format import Quantized
from tilewright.formats.fp8 import CODES, Fp8, ceil128, check_one_of, flat_rows, padded, round4
from tilewright.formats.mx import CODES as SMALL_CODES
from tilewright.formats.mx import Mx
from tilewright.formats.nvfp4 import Nvfp4
from tilewright.formats.swizzle import swizzle_scale


class Operand(NamedTuple):
    """One operand of `torch.nn.functional.scaled_mm`: matrix, scale, scale recipe, and in which order the scale lies. In NVFP4 the
    last three are lists of two, for the scales of blocks and that of the whole."""

    mat: Tensor
    scale: Tensor | list[Tensor]
    recipe: ScalingType | list[ScalingType]
    swizzle: SwizzleType | list[SwizzleType] = SwizzleType.NO_SWIZZLE


RECIPES = {
    "tensor": ScalingType.TensorWise,
    "row": ScalingType.RowWise,
    "1x128": ScalingType.BlockWise1x128,
    "128x128": ScalingType.BlockWise128x128,
}
SMALL = {"1x32": ScalingType.BlockWise1x32, "1x16": ScalingType.BlockWise1x16}
TILES = SwizzleType.SWIZZLE_32_4_4


def to_scaled_mm(q: Quantized, side: str = "a", way: str = "row") -> Operand:
    """The operand `a` [rows, K] or `b` [K, rows] that the row-wise data or the column-wise twin of `q` is.

    Shares memory with `q` wherever torch's layout allows it: 1x128 scales are copied when the rows are not a multiple of 4, scales
    of MX and NVFP4 unless the format is swizzled.
    """
    check_one_of("side", side, ("a", "b"))
    check_one_of("way", way, ("row", "col"))
    data, scale = (q.data, q.scale) if way == "row" else (q.data_t, q.scale_t)
    if data is None:
        raise ValueError(f"way: {q.format} has no {way} operand")
    if q.offsets is not None:
        raise ValueError("q: scaled_mm takes no grouped operand")
    mat = data.reshape(-1, data.shape[-1])
    granularity = q.format.granularity
    if granularity in SMALL:
        mat = mat.view(torch.float4_e2m1fn_x2) if mat.dtype == torch.uint8 else mat
        scale, recipe = scale if q.format.swizzled else swizzle_scale(scale), SMALL[granularity]
        shared, _ = q.format.extras(q, way)
        if shared is None:
            return Operand(mat if side == "a" else mat.t(), scale, recipe, TILES)
        recipes, swizzles = [recipe, ScalingType.TensorWise], [TILES, SwizzleType.NO_SWIZZLE]
        return Operand(mat if side == "a" else mat.t(), [scale, shared], recipes, swizzles)
    if granularity == "row":
        scale = scale[:, None] if side == "a" else scale[None, :]
    elif granularity == "1x128":
        scale = scale.reshape(-1).view(scale.shape).t()  # torch wants the stride to be exactly the number of rows
    elif granularity == "128x128":
        scale = _whole(scale).t()
    return Operand(mat if side == "a" else mat.t(), scale, RECIPES[granularity])


def from_scaled_mm(
    row: Operand | None = None,
    col: Operand | None = None,
    *,
    side: str = "a",
    dtype: torch.dtype = torch.bfloat16,
    pow2: bool = True,
    rule: str | None = None,
    source: str = "dynamic",
) -> Quantized:
    """The inverse of `to_scaled_mm`: the value whose row-wise and column-wise operands on this side are these. MX and NVFP4 are in
    swizzled formats where the operands are.

    `pow2`, `rule` (by default "te" of FP8, "rceil" of MX) and `source` say how the scales were made, which operands do not tell.
    """
    check_one_of("side", side, ("a", "b"))
    given = {name: operand for name, operand in (("row", row), ("col", col)) if operand is not None}
    if not given:
        raise ValueError("row, col: at least one operand is needed")
    if _first(next(iter(given.values())).recipe) in SMALL.values():
        return _from_small(given, side, dtype, rule or "rceil", source)
    tensors: list[Tensor] = []
    for operand in given.values():
        mat = operand.mat if side == "a" else operand.mat.t()
        granularity = next((g for g, r in RECIPES.items() if r == operand.recipe), None)
        if granularity is None:
            raise ValueError(
                f"recipe: must be one of {', '.join(r.name for r in (RECIPES | SMALL).values())}, not {operand.recipe}"
            )
        scale = operand.scale
        if granularity in ("tensor", "row"):
            scale = scale.reshape(-1)
        elif granularity == "1x128":
            scale = scale.t() if scale.stride(1) % 4 == 0 else padded(scale.t())
        else:
            scale = scale.t()[:, : ceil128(mat.shape[1])]
        tensors += [mat, scale]
    M, N = mat.shape if "row" in given and len(given) == 1 else tensors[-2].t().shape
    name = next(n for n, c in CODES.items() if c.dtype == mat.dtype)
    format = Fp8(granularity, name, "both" if len(given) == 2 else next(iter(given)), pow2, rule or "te", source)
    return Quantized.from_tensors(format, dtype, (M, N), tensors)


def _first(x: Any) -> Any:
    return x[0] if isinstance(x, (list, tuple)) else x


def _from_small(given: Mapping[str, Operand], side: str, dtype: torch.dtype, rule: str, source: str) -> Quantized:
    """`from_scaled_mm` of operands in MX or NVFP4."""
    alike = {(_first(o.recipe), _first(o.swizzle), o.mat.dtype) for o in given.values()}
    if len(alike) > 1:
        raise ValueError("row, col: both operands must have the same recipe, swizzle and codes")
    ((recipe, swizzle, code),) = alike
    ways, tiles = "both" if len(given) == 2 else next(iter(given)), swizzle == TILES
    code = torch.uint8 if code == torch.float4_e2m1fn_x2 else code
    name = next((n for n, c in SMALL_CODES.items() if c.dtype == code), None)
    if name is None or (recipe == SMALL["1x16"] and name != "e2m1"):
        raise ValueError(f"mat: {recipe.name} is of e2m1 codes or, in blocks of 32, of e4m3 or e5m2, not {code}")
    format = Nvfp4(ways, source, swizzled=tiles) if recipe == SMALL["1x16"] else Mx(name, ways, rule, tiles)
    tensors: list[Tensor] = []
    for operand in given.values():
        codes = (operand.mat if side == "a" else operand.mat.t()).view(code)
        rows, inner = codes.shape[0], codes.shape[1] * SMALL_CODES[name].per
        scales = list(operand.scale) if isinstance(operand.scale, (list, tuple)) else [operand.scale]
        if len(scales) != len(format.parts) - 1:
            raise ValueError(f"scale: {format} has {len(format.parts) - 1} for each operand, got {len(scales)}")
        wanted = format.scale_shape(rows, inner)
        if scales[0].numel() != math.prod(wanted):
            raise ValueError(
                f"scale: {rows} by {inner} codes in {format} have {list(wanted)}, got {list(scales[0].shape)}"
            )
        tensors += [codes, scales[0].reshape(wanted), *scales[1:]]
    shape = (inner, rows) if "col" in given else (rows, inner)
    return Quantized.from_tensors(format, dtype, shape, tensors)


def to_te_blockwise(q: Quantized) -> dict[str, Tensor | str | bool | None]:
    """The fields of TransformerEngine's `Float8BlockwiseQTensor`, sharing memory with `q`."""
    if q.format.granularity not in ("1x128", "128x128") or q.offsets is not None:
        raise ValueError(f"q: TransformerEngine's blockwise tensor is 1x128 or 128x128 and not grouped, not {q.format}")
    data_t = None if q.data_t is None else q.data_t.view(torch.uint8).reshape(q.shape[-1], *q.shape[:-1])
    return dict(
        rowwise_data=None if q.data is None else q.data.view(torch.uint8),
        rowwise_scale_inv=None if q.scale is None else _whole(q.scale),
        columnwise_data=data_t,
        columnwise_scale_inv=None if q.scale_t is None else _whole(q.scale_t),
        fp8_dtype=CODES[q.format.dtype].te_name,
        is_2D_scaled=q.format.granularity == "128x128",
    )


def te_codes(fields: Mapping[str, Any]) -> tuple[str, str]:
    """(name of the code, ways) that TransformerEngine's fields have."""
    name = next((n for n, c in CODES.items() if c.te_name == fields["fp8_dtype"]), None)
    if name is None:
        raise ValueError(f"fp8_dtype: must be one of {', '.join(c.te_name for c in CODES.values())}")
    row, column = (fields[f"{way}_data"] is not None for way in ("rowwise", "columnwise"))
    if not row and not column:
        raise ValueError("rowwise_data, columnwise_data: at least one is needed")
    return name, "both" if row and column else "row" if row else "col"


def from_te_blockwise(
    fields: dict[str, Tensor | str | bool | None],
    dtype: torch.dtype = torch.bfloat16,
    *,
    pow2: bool = True,
    rule: str = "te",
) -> Quantized:
    """The inverse of `to_te_blockwise`, sharing memory with the fields."""
    name, ways = te_codes(fields)
    data, data_t = fields["rowwise_data"], fields["columnwise_data"]
    format = Fp8("128x128" if fields["is_2D_scaled"] else "1x128", name, ways, pow2, rule)
    shape = tuple(data.shape) if data is not None else (*data_t.shape[1:], data_t.shape[0])
    M, N = flat_rows(shape), shape[-1]
    code, sizes = CODES[name].dtype, format.scale_sizes(M, N, 0)
    tensors = []
    for way, codes, scale, size in (
        ("rowwise", data, "scale", shape),
        ("columnwise", data_t, "scale_t", (N, M)),
    ):
        if codes is not None:
            tensors += [codes.view(code).reshape(size), fields[f"{way}_scale_inv"][:, : sizes[scale][1]]]
    return Quantized.from_tensors(format, dtype, shape, tensors)


def _whole(scale: Tensor) -> Tensor:
    """A two-dimensional scale with its padding. It is not copied where the padding is there already."""
    rows, inner = scale.shape
    width = round4(inner)
    behind = scale.untyped_storage().nbytes() // scale.element_size() - scale.storage_offset()
    if scale.stride() == (width, 1) and behind >= rows * width:
        return scale.as_strided((rows, width), (width, 1))
    return F.pad(scale, (0, width - inner))
