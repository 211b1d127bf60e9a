"""Rows grouped by expert as TransformerEngine and Megatron hold them, and back: row maps, and FP8 values group by group.

Here a map is [tokens, slots], the rows of a token ascending and then -1, and a grouped FP8 value has one layout for all rows.
There a map is dense over experts, and every expert's part of a flat buffer has a layout of its own. Lossless both ways,
nothing is read on the host; plain torch, for interchange and not for every step.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.format import Quantized
from .fp8 import CODES, Fp8, ceil128, check_one_of, padded
from .interchange import te_codes

MAPS = ("experts", "tokens", "compact")


def to_row_id_map(
    row_map: Tensor, offsets: Tensor, layout: Literal["experts", "tokens", "compact"] = "experts"
) -> Tensor:
    """`row_map` dense over the experts whose groups end at `offsets`; -1 where a token does not go to an expert.

    "experts" is [experts, tokens], "tokens" its transpose. "compact" is [tokens, 2 * experts + 1]: the rows of a token,
    descending, from column 0; their experts from column `experts`; how many there are in the last. All int32.
    """
    check_one_of("layout", layout, MAPS)
    (tokens, _), experts = row_map.shape, offsets.shape[0]
    row = row_map.to(torch.int64)
    expert = torch.searchsorted(offsets.to(torch.int64), row.contiguous(), right=True)
    expert = torch.where(row >= 0, expert, experts)
    dense = torch.full((tokens, experts + 1), -1, dtype=torch.int64, device=row.device).scatter(1, expert, row)
    dense = dense[:, :experts].to(torch.int32)
    if layout == "tokens":
        return dense.contiguous()
    if layout == "experts":
        return dense.t().contiguous()
    rows, order = dense.sort(1, descending=True)
    order = torch.where(rows >= 0, order, -1).to(torch.int32)
    return torch.cat([rows, order, (rows >= 0).sum(1, keepdim=True).to(torch.int32)], 1)


def from_row_id_map(
    row_id_map: Tensor,
    layout: Literal["experts", "tokens", "compact"] = "experts",
    *,
    slots: int | None = None,
    align: int = 1,
) -> tuple[Tensor, Tensor]:
    """(row_map [tokens, slots], offsets [experts]), int32: the inverse of `to_row_id_map`.

    `slots`, by default the number of experts, is how many rows a token has at most; `align` what the groups were padded to.
    """
    check_one_of("layout", layout, MAPS)
    if layout == "experts":
        row_id_map = row_id_map.t()
    elif layout == "compact":
        experts = row_id_map.shape[1] // 2
        row, expert, count = row_id_map.to(torch.int64).split([experts, experts, 1], 1)
        live = torch.arange(experts, device=row.device) < count
        dense = torch.full((row.shape[0], experts + 1), -1, dtype=torch.int64, device=row.device)
        row_id_map = dense.scatter(1, torch.where(live, expert, experts), row)[:, :experts]
    row = row_id_map.to(torch.int64)
    last = torch.iinfo(torch.int64).max
    ascending = torch.where(row >= 0, row, last).sort(1).values[:, : row.shape[1] if slots is None else slots]
    counts = (row >= 0).sum(0)
    offsets = ((counts + align - 1) // align * align).cumsum(0)
    return torch.where(ascending < last, ascending, -1).to(torch.int32), offsets.to(torch.int32)


def _groups(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(first row of its group, number of rows of its group) for each row. Rows past the last group are one more group."""
    row = torch.arange(rows, device=offsets.device)
    ends = torch.cat([offsets.to(torch.int64).clamp(0, rows), offsets.new_full((1,), rows, dtype=torch.int64)])
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    group = torch.searchsorted(ends, row, right=True)
    return starts[group], (ends - starts)[group]


def _private(outer: int, offsets: Tensor, rows: int) -> Tensor:
    """The flat index of each element [i, r] of an [outer, rows] matrix where every group has an [outer, rows of the group] matrix
    of its own, one after the other."""
    start, count = _groups(rows, offsets)
    row = torch.arange(rows, device=offsets.device)
    return (start * outer + row - start) + torch.arange(outer, device=offsets.device)[:, None] * count


def _check(format: Fp8) -> None:
    if format.granularity != "1x128":
        raise ValueError(f"q: TransformerEngine's grouped layout is for 1x128, not {format}")


def to_te_grouped(q: Quantized) -> dict[str, Tensor | str | None]:
    """A grouped value in flat buffers in which every group has its own layout, one after the other.

    Of a group of c rows from row s on, of n columns: `rowwise_data` rows s.. of [rows, n]; `rowwise_scale_inv` [n / 128, c]
    at s * n / 128; `columnwise_data` [n, c] at s * n; `columnwise_scale_inv` [blocks, n], rows group after group. While it
    runs the column-wise codes take 8 bytes an element.
    """
    _check(q.format)
    if q.offsets is None:
        raise ValueError("q: it has no groups; see to_te_blockwise")
    rows, columns = q.shape
    fields: dict[str, Tensor | str | None] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if q.data is not None:
        at = _private(ceil128(columns), q.offsets, rows).reshape(-1)
        fields["rowwise_data"] = q.data.view(torch.uint8)
        fields["rowwise_scale_inv"] = torch.empty_like(at, dtype=torch.float32).scatter(0, at, q.scale.reshape(-1))
    if q.data_t is not None:
        at = _private(columns, q.offsets, rows).reshape(-1)
        codes = q.data_t.view(torch.uint8).reshape(-1)
        fields["columnwise_data"] = torch.empty_like(codes).scatter(0, at, codes)
        fields["columnwise_scale_inv"] = q.scale_t.contiguous()
    return {**fields, "fp8_dtype": CODES[q.format.dtype].te_name}


def from_te_grouped(
    fields: dict[str, Tensor | str | None],
    offsets: Tensor,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    pow2: bool = True,
    rule: str = "te",
) -> Quantized:
    """The inverse of `to_te_grouped`: `offsets` are the end rows of the groups, `columns` the size of a row."""
    name, ways = te_codes(fields)
    data, codes_t = fields["rowwise_data"], fields["columnwise_data"]
    rows = (data if data is not None else codes_t).numel() // max(1, columns)
    code, tensors = CODES[name].dtype, []
    if data is not None:
        at = _private(ceil128(columns), offsets, rows)
        tensors += [data.view(code).reshape(rows, columns), padded(fields["rowwise_scale_inv"][at])]
    if codes_t is not None:
        at = _private(columns, offsets, rows)
        tensors += [codes_t.view(torch.uint8).reshape(-1)[at].view(code), padded(fields["columnwise_scale_inv"])]
    return Quantized.from_tensors(Fp8("1x128", name, ways, pow2, rule), dtype, (rows, columns), tensors, offsets)
