"""INT8 and INT4: integer codes with fp32 scales, x ~ code * scale, or (code - zero) * scale.

With a = max|x| of a block, l = min(x, 0) and h = max(x, 0) over it, all in fp32:

| format     | codes     | scale s, at least 2^-100 | zero point z      | code                     |
|------------|-----------|--------------------------|-------------------|--------------------------|
| int8       | -127..127 | RN(a/127)                |                   | RNE(RN(x/s))             |
| int4       | -7..7     | RN(a/7)                  |                   | RNE(RN(x/s))             |
| int4, zero | -8..7     | RN(RN(h-l)/15)           | -8 - RNE(RN(l/s)) | min(RNE(RN(x/s)) + z, 7) |

RNE is to the nearest integer, ties to even. A block of zeros has scale 1. A NaN or Inf gives its block scale NaN, codes 0 and zero
point 0. Zero points are integers from -8 to 7, stored in fp32 and laid out as scales: 0 is always a code.

INT8 is laid out as FP8 is (`fp8.py`). INT4 has two codes a byte along the rows, the low nibble first: data [..., N/2] of uint8, and
column-wise data_t [N, M/2], so that N, or M, must be even; scales per row, [M] and [N], or per 1x128 block, [ceil(N/128), M] and
[ceil(M/128), N]. It has no groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.format import Format, Quantized, pack
from .fp8 import BLOCK, GRANULARITIES, INF_BITS, RECIPES, WAYS, Scaled, ceil128, check_one_of, flat_rows, padded, round4

SMALLEST = 2.0**-100


@dataclasses.dataclass(frozen=True)
class Int8(Scaled):
    """INT8 in one granularity, made by `int8(...)`."""

    name: ClassVar[str] = "int8"
    code_dtype: ClassVar[torch.dtype] = torch.int8
    granularity: str = "row"
    ways: str = "row"
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_one_of("granularity", self.granularity, GRANULARITIES)
        check_one_of("ways", self.ways, WAYS)
        object.__setattr__(self, "key", f"int8:{self.granularity}:{self.ways}")

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> Int8:
        if len(fields) != 2:
            raise ValueError(f"format: 'int8:{':'.join(fields)}' is not granularity:ways")
        return cls(*fields)

    def _scales(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        s = symmetric_scale(bits, 127.0)
        return s, s

    def _encode(self, x: Tensor, scale: Tensor, _: Tensor) -> Tensor:
        return _integers(x / scale).to(torch.int8)

    def device_format(self, fast: bool) -> str:
        return f"int8:{self.granularity}" + (":fast" if fast else "")


@dataclasses.dataclass(frozen=True)
class Int4(Format):
    """INT4 in one granularity, made by `int4(...)`."""

    name: ClassVar[str] = "int4"
    granularity: str = "row"
    ways: str = "row"
    zero: bool = False
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_one_of("granularity", self.granularity, ("row", "1x128"))
        check_one_of("ways", self.ways, WAYS)
        if self.zero and self.granularity != "1x128":
            raise ValueError(f"zero: only granularity '1x128' has zero points, not {self.granularity!r}")
        object.__setattr__(self, "key", ":".join(["int4", self.granularity, self.ways, *["zero"] * self.zero]))

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> Int4:
        if len(fields) not in (2, 3) or list(fields[2:]) not in ([], ["zero"]):
            raise ValueError(f"format: 'int4:{':'.join(fields)}' is not granularity:ways[:zero]")
        return cls(*fields[:2], len(fields) == 3)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The tensors of a value in this format, in order."""
        names = {"row": ("data", "scale", "zero"), "col": ("data_t", "scale_t", "zero_t")}
        some = names["row"] + names["col"] if self.ways == "both" else names[self.ways]
        return tuple(n for n in some if self.zero or not n.startswith("zero"))

    def transposed(self) -> Int4:
        return dataclasses.replace(self, ways={"row": "col", "col": "row"}.get(self.ways, self.ways))

    def recipe(self, scale: Tensor) -> tuple[Tensor, str]:
        return scale[:, None] if self.granularity == "row" else scale.t(), RECIPES[self.granularity][0]

    def extras(self, q: Quantized, way: str) -> tuple[None, Tensor | None]:
        zero = q.zero if way == "row" else q.zero_t
        return None, None if zero is None else zero.t()

    def check(self, shape: Sequence[int], groups: int = 0) -> None:
        if groups:
            raise ValueError(f"offsets: a value in {self} has no groups")
        if len(shape) == 0:
            raise ValueError(f"y: a value in {self} has at least one dimension, got none")
        for way, size, what in (("row", shape[-1], "elements in a row"), ("col", flat_rows(shape), "rows")):
            if self.ways in (way, "both") and size % 2:
                raise ValueError(f"y: a value in {self}, two codes a byte, has an even number of {what}, not {size}")

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        groups: int = 0,
        offsets: Tensor | None = None,
    ) -> Quantized:
        self.check(shape, groups if offsets is None else offsets.shape[0])
        M, N = flat_rows(shape), shape[-1]
        made = []
        for name in self.tensor_names:
            rows, inner = (N, M) if name.endswith("_t") else (M, N)
            if name.startswith("data"):
                size = (rows, inner // 2) if name.endswith("_t") else (*shape[:-1], inner // 2)
                made.append(torch.empty(size, dtype=torch.uint8, device=device))
            elif self.granularity == "row":
                made.append(torch.empty(rows, dtype=torch.float32, device=device))
            else:
                made.append(torch.empty(ceil128(inner), round4(rows), dtype=torch.float32, device=device)[:, :rows])
        return Quantized.from_tensors(self, dtype, shape, made)

    def quantize(self, y: Tensor, dtype: torch.dtype | None = None, offsets: Tensor | None = None) -> Quantized:
        self.check(y.shape, 0 if offsets is None else offsets.shape[0])
        dtype = dtype or y.dtype
        with torch.no_grad():
            x = y.detach().to(torch.float32).reshape(flat_rows(y.shape), y.shape[-1])
            made = []
            if self.ways != "col":
                codes, *rest = self._row_wise(x)
                made += [codes.reshape(*y.shape[:-1], y.shape[-1] // 2), *rest]
            if self.ways != "row":
                made += self._row_wise(x.t().clone(memory_format=torch.contiguous_format))
        needs_edge = torch.is_grad_enabled() and y.requires_grad
        carrier = y.to(dtype) if needs_edge else y.new_empty((1,), dtype=dtype).expand(y.shape)
        return pack(carrier, tuple(made), self)

    def _row_wise(self, x: Tensor) -> list[Tensor]:
        """Bytes, scales and, if there are any, zero points of the rows of a matrix."""
        rows, inner = x.shape
        if self.granularity == "row":
            blocks = F.pad(x, (0, 2 * (inner == 0)))[:, None]  # a row without elements has a maximum of 0
        else:
            blocks = F.pad(x, (0, ceil128(inner) * BLOCK - inner)).reshape(rows, ceil128(inner), BLOCK)
        if self.zero:
            scale, zero, codes = _with_zero(blocks)
        else:
            scale = symmetric_scale(blocks.abs().view(torch.int32).amax(-1), 7.0)
            zero, codes = None, _integers(blocks / scale[..., None])
        packed = pack_nibbles(codes.flatten(1)[:, :inner].to(torch.int8))
        if self.granularity == "row":
            return [packed, scale[:, 0].clone()]
        return [packed, *(padded(t.t()) for t in (scale, zero) if t is not None)]

    def dequantize(self, q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
        M, N = flat_rows(q.shape), q.shape[-1]
        if q.data is not None:
            data, scale, zero, rows, inner = q.data.reshape(M, N // 2), q.scale, q.zero, M, N
        else:
            data, scale, zero, rows, inner = q.data_t, q.scale_t, q.zero_t, N, M
        x = unpack_nibbles(data).to(torch.float32)
        if zero is not None:
            x = x - _along(zero, rows, inner)
        x = x * _along(scale, rows, inner)
        return (x if q.data is not None else x.t()).to(dtype or q.dtype).reshape(q.shape)

    def device_format(self, fast: bool) -> str:
        return ":".join(["int4", self.granularity, *["zero"] * self.zero])


def int8(granularity: str = "row", *, ways: str = "row") -> Int8:
    """INT8 with symmetric codes.

    `granularity`: "tensor", "row", "1x128" or "128x128". `ways`: the row-wise operand, the column-wise twin (transposed, its own
    scales) or both.
    """
    return Int8(granularity, ways)


def int4(granularity: str = "row", *, zero: bool = False, ways: str = "row") -> Int4:
    """INT4, two codes a byte.

    `granularity`: "row" or "1x128". `zero`, of 1x128 alone: codes from the smallest to the largest value of a block, with a zero
    point. `ways`: the row-wise operand, the column-wise twin (transposed, its own scales) or both.
    """
    return Int4(granularity, ways, zero)


def symmetric_scale(bits: Tensor, largest: float) -> Tensor:
    """The scale of blocks from the bits of their amax: as integers, NaN > Inf > every number."""
    amax = bits.view(torch.float32)
    scale = (amax / torch.full_like(amax, largest)).clamp(
        min=SMALLEST
    )  # by a number torch divides through a reciprocal
    return torch.where(bits == 0, 1.0, scale).masked_fill(bits >= INF_BITS, torch.nan)


def _with_zero(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, zero point, codes) of blocks that lie along the last dimension."""
    low, high = blocks.amin(-1).clamp(max=0.0), blocks.amax(-1).clamp(min=0.0)
    half = high * 0.5 - low * 0.5  # the whole range may overflow
    scale = (half / torch.full_like(half, 15.0) * 2.0).clamp(min=SMALLEST)
    scale = torch.where(half == 0, 1.0, scale).masked_fill(~half.isfinite(), torch.nan)
    zero = (-8 - _integers(low / scale)).masked_fill(scale.isnan(), 0.0)
    codes = (_integers(blocks / scale[..., None]) + zero[..., None]).clamp(max=7)
    return scale, zero, codes.masked_fill(scale.isnan()[..., None], 0.0)


def _integers(x: Tensor) -> Tensor:
    """The nearest integers, ties to even, as fp32; 0 for NaN."""
    return torch.where(x.isnan(), 0.0, x.round())


def _along(t: Tensor, rows: int, inner: int) -> Tensor:
    """A stored scale or zero point repeated for every element of a row-wise operand, or one for every row."""
    return t[:, None] if t.dim() == 1 else t.t().repeat_interleave(BLOCK, 1)[:rows, :inner]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes from -8 to 7, int8 [..., n], two to a byte: uint8 [..., n/2], the even ones in the low nibbles."""
    nibbles = codes.view(torch.uint8) & 15
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    nibbles = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return (nibbles ^ 8).view(torch.int8) - 8
