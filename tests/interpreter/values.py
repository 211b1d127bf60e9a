"""Every value of the small types, torch's casts as a GPU does them, and comparison bit by bit."""

from __future__ import annotations

from fractions import Fraction

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = [BF16, F16, F32, E4M3, E5M2]
TOP = {E4M3: 448.0, E5M2: 57344.0}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a type of up to 16 bits; of float32, every bf16 value with its neighbours and every FP8 tie."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    high = torch.arange(65536, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] + low).reshape(-1)
    codes = torch.cat([every_value(t).float() for t in (E4M3, E5M2)])
    codes = codes[codes.isfinite()].sort().values
    ties = ((codes[1:].double() + codes[:-1].double()) / 2).float()
    near = torch.cat([torch.nextafter(ties, torch.tensor(s)) for s in (float("inf"), float("-inf"))])
    return torch.cat([torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(F32), ties, near])


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, except that any NaN stands for any other."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.dtype.is_floating_point:
        nan = expected.float().isnan()
        assert torch.equal(actual.float().isnan(), nan)
        view = BITS[expected.dtype.itemsize]
        actual, expected = actual.view(view)[~nan], expected.view(view)[~nan]
    assert torch.equal(actual, expected)


def as_gpu(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's cast, with FP8 saturating as the hardware's does."""
    if dtype in TOP and dtype != x.dtype:
        x = x.float()
        x = torch.where(x.isnan(), x, x.clamp(-TOP[dtype], TOP[dtype]))
    return x.to(dtype)


def round_to(values: list, bits: int) -> list[float]:
    """Each rational rounded to `bits` significant bits, ties to even, in integers alone."""
    out = []
    for value in map(Fraction, values):
        numerator, denominator = abs(value.numerator), value.denominator
        shift = numerator.bit_length() - denominator.bit_length() - bits
        while Fraction(numerator, denominator) >= Fraction(2) ** (shift + bits):
            shift += 1
        scaled = Fraction(numerator, denominator) / Fraction(2) ** shift
        whole, rest = divmod(scaled.numerator, scaled.denominator)
        whole += 2 * rest > scaled.denominator or (2 * rest == scaled.denominator and whole % 2)
        out.append(float((-1 if value < 0 else 1) * whole * Fraction(2) ** shift) if numerator else 0.0)
    return out
