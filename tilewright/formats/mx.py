"""MX, the microscaling formats of the Open Compute Project: blocks of 32 codes and a power of two; x ~ code * scale.

With F = f * 2^emax the largest code (e4m3: 448 = 1.75 * 2^8, e5m2: 57344 = 1.75 * 2^15, e2m1: 6 = 1.5 * 2^2) and a = max|x| of a
block, the scale is

| rule  | scale                                                                |
|-------|----------------------------------------------------------------------|
| rceil | the smallest power of two that is at least a/F: no code saturates    |
| floor | 2^(floor(log2 a) - emax), the rule of the standard                   |
| ceil  | 2^(ceil(log2 a) - emax)                                              |
| even  | as floor, of a rounded to nearest even at the precision of the codes |

and at least 2^-127, which is also that of a block of zeros. A code is x/scale, exact, rounded to nearest even, saturating; zeros
keep their sign. A NaN or Inf gives its block scale NaN (0xFF) and codes 0x7F, in e2m1 0.

Row-wise: data as the value, of e2m1 [..., N/2] bytes with two codes each, the low nibble first; scale [M, ceil(N/32)] of dtype
float8_e8m0fnu, leading dimensions flattened to M. Column-wise: data_t and scale_t are those of the transpose, [N, M]. The last
block may be short; rows of e2m1 have an even number of codes. `offsets`, ends of groups of rows, are for the row-wise way alone:
rows past the last are unspecified. Where the format is `swizzled`, scale and scale_t are flat, each in the order that Blackwell's
tensor cores read and padded with 0, by which no code 0 becomes NaN: `formats/swizzle.py` has that order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.core.format import Format, Quantized, pack
from tilewright.core.tensor import cdiv
from tilewright.formats.fp8 import check_one_of, flat_rows
from tilewright.formats.swizzle import padded_blocks, swizzle_scale, tiled_size, unswizzle_scale

INF_BITS = 0x7F800000
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Codes(NamedTuple):
    """What there is to know of a code: the torch dtype that stores it and how many codes one element of that holds; its largest
    value, also as exponent and mantissa bits of fp32; how many mantissa bits it has itself."""

    dtype: torch.dtype
    per: int
    max: float
    exponent: int
    largest: int
    mantissa: int


CODES = {
    "e4m3": Codes(torch.float8_e4m3fn, 1, 448.0, 8, 0x600000, 3),
    "e5m2": Codes(torch.float8_e5m2, 1, 57344.0, 15, 0x600000, 2),
    "e2m1": Codes(torch.uint8, 2, 6.0, 2, 0x400000, 1),
}
RULES = ("rceil", "floor", "ceil", "even")
SUFFIXES = {"row": ("",), "col": ("_t",), "both": ("", "_t")}


class SmallBlocks(Format):
    """A format of small blocks: the layouts and the two ways that all of them have in common."""

    scale_dtype: ClassVar[torch.dtype]
    parts: ClassVar[tuple[str, ...]] = ("data", "scale")
    recipe_name: ClassVar[str]
    fields: ClassVar[str]  # what the canonical string has behind the name
    dtype: str
    ways: str
    swizzled: bool

    @property
    def tensor_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The tensors of a value in this format, in order."""
        return tuple(part + suffix for suffix in SUFFIXES[self.ways] for part in self.parts)

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> SmallBlocks:
        swizzled = list(fields[-1:]) == ["swizzled"]
        plain = fields[:-1] if swizzled else fields
        if len(plain) != cls.fields.count(":") + 1:
            raise ValueError(f"format: '{':'.join((cls.name, *fields))}' is not {cls.fields} or {cls.fields}:swizzled")
        return cls(*plain, swizzled=swizzled)

    def set_key(self, *fields: str) -> None:
        """Check `swizzled` and make `key`, whose last word it is."""
        if not isinstance(self.swizzled, bool):
            raise TypeError(f"swizzled: must be True or False, not {self.swizzled!r}")
        object.__setattr__(self, "key", ":".join((self.name, *fields, *(["swizzled"] if self.swizzled else []))))

    def device_words(self, fast: bool) -> str:
        """The words of `device_format` that all of these formats have in common."""
        return f":{self.granularity}" + (":swizzled" if self.swizzled else "") + (":fast" if fast else "")

    def encode(self, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        """(codes, scales) of a matrix along its rows; codes of e2m1 are not packed yet, scales are [rows, blocks]."""
        raise NotImplementedError(f"{type(self).__name__}.encode")

    def shared_of(self, x: Tensor) -> Tensor | None:
        """The scale of the whole, [1], where the format has one."""
        return None

    def transposed(self) -> SmallBlocks:
        return dataclasses.replace(self, ways={"row": "col", "col": "row"}.get(self.ways, self.ways))

    def recipe(self, scale: Tensor) -> tuple[Tensor, str]:
        return scale, self.recipe_name

    def scale_stride(self, q: Quantized, way: str) -> int:
        if not self.swizzled:
            return super().scale_stride(q, way)
        if (q.scale_t if way == "col" else q.scale) is None:
            return 0
        return padded_blocks(cdiv(flat_rows(q.shape) if way == "col" else q.shape[-1], self.block))

    def scale_shape(self, rows: int, inner: int) -> tuple[int, ...]:
        """The shape of the scales of a matrix [rows, inner]."""
        blocks = cdiv(inner, self.block)
        return (tiled_size(rows, blocks),) if self.swizzled else (rows, blocks)

    def empty_scale(self, rows: int, inner: int, device: torch.device | str) -> Tensor:
        """Storage for the scales of a matrix [rows, inner]: zeros where there is padding, which no kernel writes."""
        shape = self.scale_shape(rows, inner)
        make = torch.zeros if math.prod(shape) > rows * cdiv(inner, self.block) else torch.empty
        # As bytes, for no number of e8m0 is 0
        return make(shape, dtype=torch.uint8, device=device).view(self.scale_dtype)

    def check(self, shape: Sequence[int], groups: int = 0) -> None:
        if groups and self.ways != "row":
            raise ValueError(f"offsets: groups of rows are for ways='row' alone, and this is {self}")
        if len(shape) == 0:
            raise ValueError(f"y: a value in {self.name} has at least one dimension, got none")
        per = CODES[self.dtype].per
        if self.ways != "col" and shape[-1] % per:
            raise ValueError(f"y: {self} has two codes in a byte: the last dimension must be even, got {shape[-1]}")
        if self.ways != "row" and flat_rows(shape) % per:
            found = flat_rows(shape)
            raise ValueError(f"y: {self} has two codes in a byte: the number of rows must be even, got {found}")

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        groups: int = 0,
        offsets: Tensor | None = None,
    ) -> Quantized:
        self.check(shape, groups)
        M, N = flat_rows(shape), shape[-1]
        codes, made = CODES[self.dtype], []
        for suffix in SUFFIXES[self.ways]:
            rows, inner = (N, M) if suffix else (M, N)
            leading = (N,) if suffix else tuple(shape[:-1])
            made.append(torch.empty((*leading, inner // codes.per), dtype=codes.dtype, device=device))
            made.append(self.empty_scale(rows, inner, device))
            if "shared" in self.parts:
                made.append(torch.empty(1, dtype=torch.float32, device=device))
        return Quantized.from_tensors(self, dtype, shape, tuple(made), offsets)

    def quantize(self, y: Tensor, dtype: torch.dtype | None = None, offsets: Tensor | None = None) -> Quantized:
        self.check(y.shape, 0 if offsets is None else offsets.shape[0])
        dtype = dtype or y.dtype
        with torch.no_grad():
            x = y.detach().to(torch.float32).reshape(flat_rows(y.shape), y.shape[-1])
            if offsets is not None:
                if not offsets.numel():
                    raise ValueError("offsets is empty: it needs the end row of at least one group")
                row = torch.arange(x.shape[0], device=x.device)[:, None]
                x = torch.where(row < offsets[-1], x, 0.0)
            shared, made = self.shared_of(x), []
            for suffix in SUFFIXES[self.ways]:
                codes, scale = self.encode(x.t() if suffix else x, shared)
                codes = pack_nibbles(codes) if CODES[self.dtype].per == 2 else codes
                scale = swizzle_scale(scale) if self.swizzled else scale
                made += [codes if suffix else codes.reshape(*y.shape[:-1], codes.shape[1]), scale]
                made += [] if shared is None else [shared.clone()]
        needs_edge = torch.is_grad_enabled() and y.requires_grad
        carrier = y.to(dtype) if needs_edge else y.new_empty((1,), dtype=dtype).expand(y.shape)
        return pack(carrier, tuple(made), self, offsets)

    def dequantize(self, q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
        suffix = SUFFIXES[self.ways][0]
        codes, scale = getattr(q, f"data{suffix}"), getattr(q, f"scale{suffix}")
        rows, inner = flat_rows(q.shape), q.shape[-1]
        rows, inner = (inner, rows) if suffix else (rows, inner)
        codes = codes.reshape(rows, inner // CODES[self.dtype].per)
        x = widen_nibbles(codes) if codes.dtype == torch.uint8 else codes.to(torch.float32)
        scale = unswizzle_scale(scale, rows, cdiv(inner, self.block)) if self.swizzled else scale
        x = x * wide_scale(scale).repeat_interleave(self.block, 1)[:, :inner]
        shared, _ = self.extras(q, "col" if suffix else "row")
        x = x if shared is None else x * shared
        x = (x.t() if suffix else x).to(dtype or q.dtype)
        return x.contiguous().reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class Mx(SmallBlocks):
    """A microscaling format, made by `mx(...)`."""

    name: ClassVar[str] = "mx"
    granularity: ClassVar[str] = "1x32"
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu
    recipe_name: ClassVar[str] = "BlockWise1x32"
    fields: ClassVar[str] = "dtype:ways:rule"
    dtype: str = "e4m3"
    ways: str = "row"
    rule: str = "rceil"
    swizzled: bool = False
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, CODES)
        check_one_of("ways", self.ways, SUFFIXES)
        check_one_of("scale_rule", self.rule, RULES)
        self.set_key(self.dtype, self.ways, self.rule)

    def device_format(self, fast: bool) -> str:
        return f"mx:{self.dtype}:{self.rule}:pow2" + self.device_words(fast)

    def encode(self, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        codes = CODES[self.dtype]
        bits = block_bits(x, self.block)
        bad = bits >= INF_BITS
        # What is added carries into the exponent where the scale is to be the next power of two
        carry = {"rceil": 0x7FFFFF - codes.largest, "floor": 0, "ceil": 0x7FFFFF, "even": 1 << (22 - codes.mantissa)}
        e = (((bits.masked_fill(bad, 0) + carry[self.rule]) >> 23) - codes.exponent).clamp(min=0)
        mult = ((254 - e) << 23).view(torch.float32).masked_fill(bad, torch.nan)
        v = x * mult.repeat_interleave(self.block, 1)[:, : x.shape[1]]
        scale = e.masked_fill(bad, 255).to(torch.uint8).view(self.scale_dtype)
        return encode_e2m1(v) if codes.per == 2 else encode_fp8(v, codes), scale


def mx(dtype: str = "e4m3", *, scale_rule: str = "rceil", ways: str = "row", swizzled: bool = False) -> Mx:
    """A microscaling format: blocks of 32 numbers along the last dimension, each with a power of two.

    `dtype`: "e4m3", "e5m2" or "e2m1" codes. `scale_rule`: "rceil", "floor", "ceil" or "even", as `formats/mx.py` has them.
    `ways`: the row-wise operand, the column-wise twin (transposed, its own blocks) or both. `swizzled`: whether scales are stored
    flat, in the order that Blackwell's tensor cores read, rather than as [rows, blocks].
    """
    return Mx(dtype, ways, scale_rule, swizzled)


def block_bits(x: Tensor, block: int) -> Tensor:
    """The bits of max|x| of each block along the rows, [rows, blocks]. As integers, NaN > Inf > every number."""
    bits = x.abs().contiguous().view(torch.int32)
    M, N = bits.shape
    return F.pad(bits, (0, -N % block)).reshape(M, cdiv(N, block), block).amax(2)


def encode_fp8(v: Tensor, codes: Codes) -> Tensor:
    """The nearest codes, saturating; NaN becomes 0x7F."""
    q = v.clamp(-codes.max, codes.max).to(codes.dtype).view(torch.uint8)
    q = torch.where(v.isnan(), 0x7F, q)
    return q.clone(memory_format=torch.contiguous_format).view(codes.dtype)


def encode_e2m1(v: Tensor) -> Tensor:
    """The nearest e2m1 codes, one a byte, midpoints to the even one, saturating; NaN becomes 0."""
    a, code = v.abs(), torch.zeros_like(v, dtype=torch.uint8)
    for i, midpoint in enumerate((low + high) / 2 for low, high in zip(E2M1, E2M1[1:])):
        code += (a >= midpoint) if i % 2 else (a > midpoint)
    code += torch.where(v.signbit() & ~v.isnan(), 8, 0).to(torch.uint8)
    return code


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pairs of 4-bit codes along rows in a byte each, the first in the low nibble."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).clone(memory_format=torch.contiguous_format)


def widen_nibbles(codes: Tensor) -> Tensor:
    """The fp32 numbers that bytes of two e2m1 codes stand for."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float32, device=codes.device)
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(torch.int64)]


def wide_scale(scale: Tensor) -> Tensor:
    """Scales in fp32; exact. Written out for e8m0, whose conversion not every device and compiler has."""
    if scale.dtype != torch.float8_e8m0fnu:
        return scale.to(torch.float32)
    e = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(e == 0, 0x00400000, e << 23)  # 2^-127 is a subnormal
    return torch.where(e == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
