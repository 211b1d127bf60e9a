"""FP8 on hardware, bit for bit against the reference on a CPU: every bf16 and fp16 value, every tie and its neighbours, in every
granularity, direction, rule and kind of code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.oracle import pieces, same_bits
from tilewright.formats.fp8 import CODES

pytestmark = pytest.mark.gpu
FORMATS = [
    tw.fp8(granularity, code, ways="both", pow2=pow2, rule=rule)
    for granularity, code, pow2, rule in itertools.product(
        ("1x128", "128x128", "row", "tensor"), ("e4m3", "e5m2"), (True, False), ("te", "exact", "linghe")
    )
]


def every(dtype: torch.dtype) -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def ties() -> Tensor:
    """Half way between neighbouring codes of either kind, a step of fp32 either side, and what lies past the largest."""
    found = []
    for codes in CODES.values():
        values = torch.arange(256, dtype=torch.uint8).view(codes.dtype).double()
        values = values[values.isfinite()].unique()
        middle = ((values[1:] + values[:-1]) / 2).float()
        top = torch.tensor([1.0, 1.03125, 1.0357, 1.0625, 1.125, 2.0]) * codes.max
        found += [values.float(), middle, top, -top]
    exact = torch.cat(found)
    up, down = torch.tensor(float("inf")), torch.tensor(float("-inf"))
    return torch.cat([exact, torch.nextafter(exact, up), torch.nextafter(exact, down)])


def agree(label: str, x: Tensor, fmt) -> None:
    made, expected = tw.quantize(x.cuda(), fmt), fmt.quantize(x)
    for (tail, found), right in zip(pieces(made).items(), pieces(expected).values()):
        same_bits(f"{label} in {fmt}{tail}", found.cpu(), right)


@pytest.mark.parametrize("code", list(CODES))
@pytest.mark.parametrize("source", ["bfloat16", "float16", "ties"])
def test_codes_of_every_value(source, code):
    """With scale 1 the codes are the casts themselves."""
    x = ties() if source == "ties" else every(getattr(torch, source))
    x = torch.nn.functional.pad(x, (0, -x.numel() % 128)).reshape(-1, 128)
    agree(source, x, tw.fp8("tensor", code, ways="both", scale="unit"))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_blocks_of_every_value(fmt):
    """Every finite bf16 value as a member of some block, blocks of every size of amax, ragged edges."""
    x = every(torch.bfloat16)
    x = x[x.float().isfinite()]
    mixed = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    for order, width in ((mixed, 255), (x[x.float().abs().argsort()], 192)):
        rows = order.numel() // width
        agree(f"{rows} x {width}", order[: rows * width].reshape(rows, width), fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scales_at_powers_of_two_and_their_neighbours(fmt):
    """amax = max * 2^k and a step either side, and every size down to the smallest subnormal."""
    top = CODES[fmt.dtype].max * torch.exp2(torch.arange(-140, 110).double())
    amax = torch.cat([top, torch.exp2(torch.arange(-149, 128).double())]).float()
    near = [torch.nextafter(amax, torch.tensor(end)) for end in (float("inf"), 0.0)]
    amax = torch.cat([amax, *near])
    amax = amax[amax.isfinite()]
    source = torch.Generator().manual_seed(1)
    x = (torch.rand(amax.numel(), 128, generator=source) * 2 - 1) * amax[:, None]
    x[:, 5] = amax
    agree("powers of two", x, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_is_not_a_number(fmt):
    """NaN, infinities, signed zeros and empty blocks."""
    source = torch.Generator().manual_seed(2)
    x = torch.randn(300, 300, generator=source)
    for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        x[7 + 60 * i, 11 + 90 * i] = value
    x[128:256, 128:256] = 0.0
    x[130, 140] = -0.0
    agree("special", x, fmt)
    agree("zeros", torch.zeros(129, 130), fmt)
    agree("nothing", torch.zeros(0, 130), fmt)
