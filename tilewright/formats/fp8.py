"""FP8: codes in e4m3 or e5m2 and fp32 scales per tensor, per row, per 1x128 or per 128x128 block; x ~ code * scale.

With F the largest finite code (448, 57344) and a = max|x| of a block, all in fp32:

| rule   | power-of-two scales                    | fp32 scales                                 | smallest scale | a = 0     |
|--------|----------------------------------------|---------------------------------------------|----------------|-----------|
| te     | m = 2^floor(log2(F/a)), x*m, scale 1/m | m = RN(F/a), code of RN(x*m), scale RN(1/m) | 2^-126         | scale 1   |
| exact  | the same                               | scale s = RN(a/F), code of RN(x/s)          | 2^-126         | scale 1   |
| linghe | the same                               | the same                                    | 1e-30 (2^-99)  | the floor |

Codes round to nearest even and saturate; zeros keep their sign. A NaN or Inf gives its block scale NaN and codes 0x7F. A static
or unit scale s takes m = RN(1/s) (te) or RN(x/s), and a NaN or Inf becomes 0x7F alone.

Row-wise: data as the value, scale [M] or [ceil(N/128), M] or [ceil(M/128), ceil(N/128)]. Column-wise: data_t [N, M], scale_t
[N] or [ceil(M/128), N] or [ceil(N/128), ceil(M/128)]. Leading dimensions flatten to M. A two-dimensional scale has its rows padded
to a multiple of 4 (contents unspecified). `offsets` restart the 128-row blocks at each of E groups: there are then
ceil(M/128) + E block rows, numbered group after group, and one row of column scales per group; rows past the last
offset are unspecified.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.core.format import Format, Quantized, pack

BLOCK = 128
INF_BITS = 0x7F800000


class Codes(NamedTuple):
    """An 8-bit code: its torch dtype, its largest value 1.75 * 2**exponent, its name in TransformerEngine."""

    dtype: torch.dtype
    max: float
    exponent: int
    te_name: str


class Rule(NamedTuple):
    """How a scale follows from amax: codes from a quotient or a product, smallest scale, scale of an all-zero block."""

    divide: bool
    floor: float
    zero: float | None


CODES = {
    "e4m3": Codes(torch.float8_e4m3fn, 448.0, 8, "kFloat8E4M3"),
    "e5m2": Codes(torch.float8_e5m2, 57344.0, 15, "kFloat8E5M2"),
}
RULES = {
    "te": Rule(divide=False, floor=2.0**-126, zero=1.0),
    "exact": Rule(divide=True, floor=2.0**-126, zero=1.0),
    "linghe": Rule(divide=True, floor=1e-30, zero=None),
}
GRANULARITIES = ("tensor", "row", "1x128", "128x128")
WAYS = {
    "row": ("data", "scale"),
    "col": ("data_t", "scale_t"),
    "both": ("data", "scale", "data_t", "scale_t"),
}


# torch's name of a granularity, and how a stored scale becomes [rows or blocks of rows, blocks]: "t" by transposing
RECIPES = {
    "tensor": ("TensorWise", (1, 1)),
    "row": ("RowWise", (-1, 1)),
    "1x128": ("BlockWise1x128", "t"),
    "128x128": ("BlockWise128x128", None),
}


class Scaled(Format):
    """A format with one code for each element and fp32 scales, laid out as above.

    A subclass gives `_scales`, `_encode` and `_given`.
    """

    granularity: str
    ways: str
    code_dtype: torch.dtype

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The tensors of a value in this format, in order."""
        return WAYS[self.ways]

    def transposed(self) -> Scaled:
        return dataclasses.replace(self, ways={"row": "col", "col": "row"}.get(self.ways, self.ways))

    def recipe(self, scale: Tensor) -> tuple[Tensor, str]:
        name, shape = RECIPES[self.granularity]
        return (scale if shape is None else scale.t() if shape == "t" else scale.reshape(shape)), name

    def check(self, shape: Sequence[int], groups: int = 0) -> None:
        if len(shape) == 0:
            raise ValueError(f"y: a value in {self} has at least one dimension, got none")

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        groups: int = 0,
        offsets: Tensor | None = None,
    ) -> Quantized:
        self.check(shape)
        M, N = flat_rows(shape), shape[-1]
        sizes = dict(data=tuple(shape), data_t=(N, M), **self.scale_sizes(M, N, groups))
        made = {}
        for name in self.tensor_names:
            if name.startswith("data"):
                made[name] = torch.empty(sizes[name], dtype=self.code_dtype, device=device)
            else:
                *outer, inner = sizes[name]
                width = round4(inner) if outer else inner
                made[name] = torch.empty((*outer, width), dtype=torch.float32, device=device)[..., :inner]
        return Quantized.from_tensors(self, dtype, shape, tuple(made.values()), offsets)

    def scale_sizes(self, M: int, N: int, groups: int = 0) -> dict[str, tuple[int, ...]]:
        """Shapes of `scale` and `scale_t`, without padding, of an [M, N] value."""
        rows, cols = ceil128(M) + groups, ceil128(N)
        scale, scale_t = {
            "tensor": ((1,), (1,)),
            "row": ((M,), (groups, N) if groups else (N,)),
            "1x128": ((cols, M), (rows, N)),
            "128x128": ((rows, cols), (cols, rows)),
        }[self.granularity]
        return dict(scale=scale, scale_t=scale_t)

    def quantize(self, y: Tensor, dtype: torch.dtype | None = None, offsets: Tensor | None = None) -> Quantized:
        self.check(y.shape)
        dtype = dtype or y.dtype
        with torch.no_grad():
            x = y.detach().to(torch.float32).reshape(flat_rows(y.shape), y.shape[-1])
            if offsets is not None:
                if not offsets.numel():
                    raise ValueError("offsets is empty: it needs the end row of at least one group")
                row = torch.arange(x.shape[0], device=x.device)[:, None]
                x = torch.where(row < offsets[-1], x, 0.0)
            data, scale, data_t, scale_t = self._tensors(x, offsets)
            made = dict(data=data.reshape(y.shape), scale=scale, data_t=data_t, scale_t=scale_t)
            made = {name: padded(t) if name.startswith("scale") else t for name, t in made.items()}
        needs_edge = torch.is_grad_enabled() and y.requires_grad
        carrier = y.to(dtype) if needs_edge else y.new_empty((1,), dtype=dtype).expand(y.shape)
        return pack(carrier, tuple(made[name] for name in self.tensor_names), self, offsets)

    def _tensors(self, x: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The codes and scales of a matrix, both ways and without padding."""
        bits = x.abs().view(torch.int32)  # as integers, NaN > Inf > every number
        if self.granularity == "tensor":
            s, m = self._given(x) if self.source != "dynamic" else self._scales(F.pad(bits.reshape(-1), (0, 1)).amax(0))
            data = self._encode(x, s, m)
            return data, s.reshape(1), _t(data), s.reshape(1).clone()
        if self.granularity == "row":
            s, m = self._scales(F.pad(bits, (0, 1)).amax(1))
            group, count = _group_of(x.shape[0], offsets, x.device)
            st, mt = self._scales(_amax_by(bits, group, count))
            data_t = _t(self._encode(x, st[group], mt[group]))
            return self._encode(x, s[:, None], m[:, None]), s, data_t, st if offsets is not None else st[0]
        block, count = _block_of(x.shape[0], offsets, x.device)
        st, mt = self._scales(_amax_by(bits, block, count))
        if self.granularity == "1x128":
            s, m = self._scales(_col_blocks(bits))
            data = self._encode(x, _spread(s, x.shape[1]), _spread(m, x.shape[1]))
            return data, s.t(), _t(self._encode(x, st[block], mt[block])), st
        s, m = self._scales(_col_blocks(_amax_by(bits, block, count)))
        data = self._encode(x, _spread(s, x.shape[1])[block], _spread(m, x.shape[1])[block])
        return data, s, _t(data), s.t()

    def dequantize(self, q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
        M, N = flat_rows(q.shape), q.shape[-1]
        if q.data is not None:
            x, s = q.data.reshape(M, N).to(torch.float32), q.scale.to(torch.float32)
            if self.granularity == "1x128":
                s = _spread(s.t(), N)
            elif self.granularity == "128x128":
                s = _spread(s, N)[_block_of(M, q.offsets, x.device)[0]]
            elif self.granularity == "row":
                s = s[:, None]
        else:
            x, s = q.data_t.to(torch.float32).t(), q.scale_t.to(torch.float32)
            if self.granularity == "128x128":
                s = _spread(s.t(), N)
            if self.granularity.endswith("128"):
                s = s[_block_of(M, q.offsets, x.device)[0]]
            elif q.offsets is not None and self.granularity == "row":
                s = s[_group_of(M, q.offsets, x.device)[0]]
        return (x * s).to(dtype or q.dtype).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class Fp8(Scaled):
    """FP8 in one granularity, made by `fp8(...)`; `source` says whence a per-tensor scale comes."""

    name: ClassVar[str] = "fp8"
    granularity: str = "1x128"
    dtype: str = "e4m3"
    ways: str = "row"
    pow2: bool = True
    rule: str = "te"
    source: str = "dynamic"
    tensor: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)
    key: str = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_one_of("granularity", self.granularity, GRANULARITIES)
        check_one_of("dtype", self.dtype, CODES)
        check_one_of("ways", self.ways, WAYS)
        check_one_of("rule", self.rule, RULES)
        check_one_of("scale", self.source, ("dynamic", "static", "unit"))
        if self.source != "dynamic" and self.granularity != "tensor":
            raise ValueError(f"scale: only granularity 'tensor' takes one, not {self.granularity!r}")
        if self.tensor is not None and (self.tensor.numel() != 1 or self.tensor.dtype != torch.float32):
            found = f"{tuple(self.tensor.shape)} of {self.tensor.dtype}"
            raise ValueError(f"scale: must be one element of torch.float32, not {found}")
        fields = [self.dtype, self.granularity, self.ways, "pow2" if self.pow2 else "fp32", self.rule]
        fields += [self.source] if self.granularity == "tensor" else []
        object.__setattr__(self, "key", ":".join(["fp8", *fields]))

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> Fp8:
        if len(fields) != (6 if fields[1:2] == ["tensor"] else 5):
            raise ValueError(f"format: 'fp8:{':'.join(fields)}' is not dtype:granularity:ways:scales:rule[:source]")
        dtype, granularity, ways, scales, rule = fields[:5]
        check_one_of("scales", scales, ("pow2", "fp32"))
        return cls(granularity, dtype, ways, scales == "pow2", rule, *fields[5:])

    @property
    def code_dtype(self) -> torch.dtype:
        """The torch dtype of the codes."""
        return CODES[self.dtype].dtype

    def device_format(self, fast: bool) -> str:
        scaling = self.source if self.source != "dynamic" else self.granularity
        words = [self.dtype, scaling, "pow2" if self.pow2 else "fp32", self.rule]
        return ":".join([*words, "fast"] if fast else words)

    def with_scale(self, scale: Tensor) -> Fp8:
        if self.source != "static":
            return super().with_scale(scale)
        return dataclasses.replace(self, tensor=scale)

    def bare(self) -> Fp8:
        return self if self.tensor is None else dataclasses.replace(self, tensor=None)

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.source == "unit":
            one = torch.ones((), device=x.device)
            return one, one
        if self.tensor is None:
            raise ValueError(f"scale: {self} needs its static scale, see Format.with_scale")
        s = self.tensor.to(x.device).reshape(())
        return s, _divide(1.0, s)

    def _scales(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """(stored scale, multiplier) from the bits of amax."""
        codes, rule = CODES[self.dtype], RULES[self.rule]
        amax = bits.view(torch.float32)
        if self.pow2:
            # 1.75 is the mantissa of F: the exponent grows by one iff the mantissa of amax exceeds .75
            e = ((bits + 0x1FFFFF) & INF_BITS) - (codes.exponent << 23)
            e = e.clamp(min=_ceil_pow2_bits(rule.floor))
            s, m = e.view(torch.float32), (0x7F000000 - e).view(torch.float32)
        elif rule.divide:
            s = _divide(amax, codes.max).clamp(min=rule.floor)
            m = _divide(1.0, s)
        else:
            m = _divide(codes.max, amax).clamp(max=1.0 / rule.floor)
            s = _divide(1.0, m)
        if rule.zero is not None:
            s, m = torch.where(bits == 0, rule.zero, s), torch.where(bits == 0, 1.0 / rule.zero, m)
        bad = bits >= INF_BITS
        return s.masked_fill(bad, torch.nan), m.masked_fill(bad, torch.nan)

    def _encode(self, x: Tensor, scale: Tensor, mult: Tensor) -> Tensor:
        codes = CODES[self.dtype]
        v = x / scale if RULES[self.rule].divide else x * mult
        if self.source != "dynamic":
            v = torch.where(x.isfinite(), v, torch.nan)
        q = v.clamp(-codes.max, codes.max).to(codes.dtype).view(torch.uint8)
        return torch.where(v.isnan(), 0x7F, q).view(codes.dtype)


def fp8(
    granularity: str = "1x128",
    dtype: str = "e4m3",
    *,
    ways: str = "row",
    pow2: bool = True,
    rule: str = "te",
    scale: Tensor | str | None = None,
) -> Fp8:
    """An FP8 format.

    `granularity`: "tensor", "row", "1x128", "128x1" (1x128 column-wise) or "128x128". `ways`: the row-wise operand, the
    column-wise twin (transposed, its own scales) or both. `scale`, per tensor only: None for amax of the value, a
    one-element fp32 tensor for a static dequantisation scale, "unit" for 1.
    """
    if granularity == "128x1":
        if ways == "both":
            raise ValueError("ways: granularity '128x1' is column-wise only; 'both' belongs to '1x128'")
        granularity, ways = "1x128", "col"
    if scale is None:
        return Fp8(granularity, dtype, ways, pow2, rule)
    if isinstance(scale, Tensor):
        return Fp8(granularity, dtype, ways, pow2, rule, "static", scale)
    if scale != "unit":
        raise ValueError(f"scale: must be None, 'unit' or a tensor, not {scale!r}")
    return Fp8(granularity, dtype, ways, pow2, rule, "unit")


def check_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise unless the argument `name` has an allowed value."""
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(allowed)}, not {value!r}")


def flat_rows(shape: Sequence[int]) -> int:
    """The number of rows when leading dimensions are flattened."""
    rows = 1
    for size in shape[:-1]:
        rows = rows * size
    return rows


def ceil128(n: int) -> int:
    """How many blocks of 128 hold n elements."""
    return (n + BLOCK - 1) // BLOCK


def round4(n: int) -> int:
    """n rounded up to a multiple of 4."""
    return (n + 3) // 4 * 4


def _t(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)  # contiguous() would keep odd strides where a size is 1


def padded(scale: Tensor) -> Tensor:
    """A two-dimensional scale with its rows padded to a multiple of 4; any other scale as it is."""
    if scale.dim() < 2:
        return scale
    outer, inner = scale.shape
    wide = scale.new_zeros(outer, round4(inner))
    wide[:, :inner] = scale
    return wide[:, :inner]


def _divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """RN(a / b), of two tensors. Where one of them is a number, torch multiplies by a rounded reciprocal instead."""
    a = a if isinstance(a, Tensor) else torch.full_like(b, a)
    return a / (b if isinstance(b, Tensor) else torch.full_like(a, b))


def _ceil_pow2_bits(value: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return (bits + 0x7FFFFF) & INF_BITS


def _spread(x: Tensor, size: int) -> Tensor:
    """A value per 128 columns, repeated for each column."""
    return x.repeat_interleave(BLOCK, 1)[:, :size]


def _col_blocks(bits: Tensor) -> Tensor:
    M, N = bits.shape
    return F.pad(bits, (0, ceil128(N) * BLOCK - N)).reshape(M, ceil128(N), BLOCK).amax(2)


def _amax_by(bits: Tensor, index: Tensor, count: int) -> Tensor:
    """The maximum over the rows of `bits` that have the same `index`, for `count` indices."""
    zeros = bits.new_zeros(count, bits.shape[1])
    return zeros.scatter_reduce(0, index[:, None].expand(bits.shape), bits, "amax")


def _group_of(M: int, offsets: Tensor | None, device: torch.device) -> tuple[Tensor, int]:
    row = torch.arange(M, device=device)
    if offsets is None:
        return torch.zeros_like(row), 1
    groups = offsets.shape[0]
    return torch.searchsorted(offsets.to(torch.int64), row, right=True).clamp(max=groups - 1), groups


def _block_of(M: int, offsets: Tensor | None, device: torch.device) -> tuple[Tensor, int]:
    """The 128-row block of each row, and how many blocks there are. Rows past the last group share one more, the last."""
    row = torch.arange(M, device=device)
    if offsets is None:
        return row // BLOCK, ceil128(M)
    ends = offsets.to(torch.int64)
    starts = F.pad(ends, (1, 0))[:-1]
    blocks = (ends - starts + BLOCK - 1) // BLOCK
    first = blocks.cumsum(0) - blocks
    group, groups = _group_of(M, offsets, device)
    count = ceil128(M) + groups
    return torch.where(row < ends[-1], first[group] + (row - starts[group]) // BLOCK, count - 1), count
