"""FP8 values as other libraries hold them, and back: operands of torch's `scaled_mm`, fields of TransformerEngine's tensor.

Lossless both ways: codes and scales keep their bits, and memory is shared wherever the two layouts agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from tilewright.core.format import Quantized
from tilewright.formats.fp8 import CODES, Fp8, ceil128, check_one_of, flat_rows, padded, round4


class Operand(NamedTuple):
    """One operand of `torch.nn.functional.scaled_mm`: matrix, scale and scale recipe."""

    mat: Tensor
    scale: Tensor
    recipe: ScalingType


RECIPES = {
    "tensor": ScalingType.TensorWise,
    "row": ScalingType.RowWise,
    "1x128": ScalingType.BlockWise1x128,
    "128x128": ScalingType.BlockWise128x128,
}


def to_scaled_mm(q: Quantized, side: str = "a", way: str = "row") -> Operand:
    """The operand `a` [rows, K] or `b` [K, rows] that the row-wise data or the column-wise twin of `q` is.

    Shares memory with `q` wherever torch's layout allows it: 1x128 scales are copied when the rows are not a multiple of 4.
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
    rule: str = "te",
    source: str = "dynamic",
) -> Quantized:
    """The inverse of `to_scaled_mm`: the value whose row-wise and column-wise operands on this side are these.

    `pow2`, `rule` and `source` say how the scales were made, which operands do not tell.
    """
    check_one_of("side", side, ("a", "b"))
    given = {name: operand for name, operand in (("row", row), ("col", col)) if operand is not None}
    if not given:
        raise ValueError("row, col: at least one operand is needed")
    tensors: list[Tensor] = []
    for operand in given.values():
        mat = operand.mat if side == "a" else operand.mat.t()
        granularity = next((g for g, r in RECIPES.items() if r == operand.recipe), None)
        if granularity is None:
            raise ValueError(
                f"recipe: must be one of {', '.join(r.name for r in RECIPES.values())}, not {operand.recipe}"
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
    format = Fp8(granularity, name, "both" if len(given) == 2 else next(iter(given)), pow2, rule, source)
    return Quantized.from_tensors(format, dtype, (M, N), tensors)


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
