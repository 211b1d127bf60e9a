"""NVFP4: blocks of 16 e2m1 codes with an e4m3 scale each, and one fp32 scale for the whole; x ~ code * scale * shared.

With A = max|x| of the whole and a = max|x| of a block, every operation rounded to fp32, in this order:

    shared = max(A / 2688, 2^-80), and 1 where A = 0           2688 = 6 * 448, the largest codes
    scale  = e4m3((a / 6) / shared)                            nearest even, saturating
    t      = shared * scale
    code   = e2m1(x / t), 0 where t = 0                        nearest even, saturating; zeros keep their sign

A static `shared` is taken as it is, but at least 2^-80, also for NaN, and at most 2^100. A NaN or Inf gives its block scale NaN and
codes 0, and does not enter A. Back it is RN((code * scale) * shared), of which the first product is exact.

Layouts are those of `formats/mx.py`: data [..., N/2], scale [M, ceil(N/16)] or, swizzled, flat, shared [1]; column-wise the same of
the transpose, where `shared_t` is equal to `shared`. Where `offsets` end groups of rows, rows past the last do not enter A.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tilewright.core.format import Quantized
from tilewright.formats.fp8 import check_one_of
from tilewright.formats.mx import INF_BITS, SUFFIXES, SmallBlocks, block_bits, encode_e2m1

SMALLEST, LARGEST = 2.0**-80, 2.0**100


@dataclasses.dataclass(frozen=True)
class Nvfp4(SmallBlocks):
    """NVFP4, made by `nvfp4(...)`; `source` says whence the scale of the whole comes."""

    name: ClassVar[str] = "nvfp4"
    granularity: ClassVar[str] = "1x16"
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    parts: ClassVar[tuple[str, ...]] = ("data", "scale", "shared")
    recipe_name: ClassVar[str] = "BlockWise1x16"
    fields: ClassVar[str] = "ways:source"
    dtype: ClassVar[str] = "e2m1"
    ways: str = "row"
    source: str = "dynamic"
    tensor: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)
    swizzled: bool = False
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_one_of("ways", self.ways, SUFFIXES)
        check_one_of("scale", self.source, ("dynamic", "static"))
        if self.tensor is not None and (self.tensor.numel() != 1 or self.tensor.dtype != torch.float32):
            found = f"{tuple(self.tensor.shape)} of {self.tensor.dtype}"
            raise ValueError(f"scale: must be one element of torch.float32, not {found}")
        self.set_key(self.ways, self.source)

    def device_format(self, fast: bool) -> str:
        return f"nvfp4:e2m1:{self.source}" + self.device_words(fast)

    @property
    def reach(self) -> str:
        return "tensor" if self.source == "dynamic" else "block"

    def with_scale(self, scale: Tensor) -> Nvfp4:
        if self.source != "static":
            return super().with_scale(scale)
        return dataclasses.replace(self, tensor=scale)

    def bare(self) -> Nvfp4:
        return self if self.tensor is None else dataclasses.replace(self, tensor=None)

    def extras(self, q: Quantized, way: str) -> tuple[Tensor | None, Tensor | None]:
        return (q.shared_t if way == "col" else q.shared), None

    def shared_of(self, x: Tensor) -> Tensor:
        if self.source == "static":
            if self.tensor is None:
                raise ValueError(f"scale: {self} needs its static scale, see Format.with_scale")
            g = self.tensor.to(x.device).reshape(1)
            return torch.where(g > SMALLEST, g, SMALLEST).clamp(max=LARGEST)
        a = torch.where(x.isfinite(), x.abs(), 0.0).reshape(-1)
        a = torch.cat((a, a.new_zeros(1))).amax(0, keepdim=True)  # there may be no element
        return torch.where(a == 0, 1.0, (a / torch.full_like(a, 2688.0)).clamp(min=SMALLEST))

    def encode(self, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        bits = block_bits(x, self.block)
        a = bits.view(torch.float32)
        # Torch divides by a number through its rounded reciprocal
        r = (a / torch.full_like(a, 6.0)) / shared.expand(a.shape)
        r = r.masked_fill(bits >= INF_BITS, torch.nan)
        code = r.clamp(-448.0, 448.0).to(self.scale_dtype).view(torch.uint8)
        scale = torch.where(r.isnan(), 0x7F, code).view(self.scale_dtype)
        t = (shared * scale.to(torch.float32)).repeat_interleave(self.block, 1)[:, : x.shape[1]]
        return encode_e2m1(x / t) * (t > 0), scale


def nvfp4(*, ways: str = "row", scale: Tensor | None = None, swizzled: bool = False) -> Nvfp4:
    """NVFP4: blocks of 16 numbers along the last dimension.

    `scale`: None to take the scale of the whole from the largest number, or a one-element fp32 tensor for a static one.
    `ways`: the row-wise operand, the column-wise twin (transposed, its own blocks) or both. `swizzled`: whether scales of blocks
    are stored flat, in the order that Blackwell's tensor cores read, rather than as [rows, blocks].
    """
    return Nvfp4(ways, "dynamic" if scale is None else "static", scale, swizzled)
