"""MX and NVFP4 written out in numpy: every code compared with every number in float64, every power of two found by trying."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BIG = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
EMAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
FIELDS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}  # exponent bits, mantissa bits, bias


def values(kind: str) -> np.ndarray:
    """The numbers that the codes 0, 1, 2 ... of one sign stand for, up to the largest finite one."""
    bits, mantissa, bias = FIELDS[kind]
    found = []
    for code in range(1 << (bits + mantissa)):
        e, m = code >> mantissa, code % (1 << mantissa)
        found.append((m / 2**mantissa if e == 0 else 1 + m / 2**mantissa) * 2.0 ** (max(e, 1) - bias))
    return np.array([v for v in found if v <= BIG[kind]])


def nearest(v: np.ndarray, kind: str) -> np.ndarray:
    """Codes of numbers: the nearest, of two as near the even one; the largest beyond it; the sign as the highest bit."""
    table = values(kind)
    a = np.minimum(np.abs(v), table[-1])
    above = np.minimum(np.searchsorted(table, a), len(table) - 1)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - a, a - table[below]
    even = np.where(above % 2 == 0, above, below)
    code = np.where(up < down, above, np.where(up > down, below, even))
    width = sum(FIELDS[kind][:2])
    return (code + (np.signbit(v).astype(np.int64) << width)).astype(np.uint8)


def exponent(amax: float, kind: str, rule: str) -> int:
    """k of the scale 2^k of a block."""
    if amax == 0:
        return -127
    mantissa, e = math.frexp(amax)
    floor = e - 1
    if rule == "even":
        bits = FIELDS[kind][1]
        floor += int(np.round(2 * mantissa * 2**bits)) >= 2 ** (bits + 1)
    k = floor - EMAX[kind]
    if rule == "rceil":
        k -= 2
        while BIG[kind] * 2.0**k < amax:
            k += 1
    if rule == "ceil":
        k += amax > 2.0**floor
    return max(k, -127)


def amaxes(x: np.ndarray, size: int) -> np.ndarray:
    """max|x| of each block, in the dtype of x; NaN or Inf where it has one."""
    padded = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % size)))
    return padded.reshape(x.shape[0], -1, size).max(2)


def spread(t: np.ndarray, x: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(t, size, 1)[:, : x.shape[1]]


def mx(x: np.ndarray, kind: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes, one a byte; e8m0 codes) of a float32 matrix."""
    amax = amaxes(x, 32).astype(np.float64)
    good = np.isfinite(amax)
    k = np.vectorize(lambda a: exponent(a, kind, rule) if np.isfinite(a) else 0, otypes=[np.int64])(amax)
    kept = spread(good, x, 32)
    codes = nearest(np.where(kept, x, 0).astype(np.float64) / spread(2.0**k, x, 32), kind)
    return np.where(kept, codes, 0 if kind == "e2m1" else 0x7F), np.where(good, k + 127, 0xFF)


def nvfp4(x: np.ndarray, static: float | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, one a byte; e4m3 codes; the scale of the whole) of a float32 matrix; numpy rounds float32 operations to nearest."""
    amax = np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max(initial=np.float32(0))
    g = max(amax / np.float32(2688), np.float32(2.0**-80)) if amax else np.float32(1)
    g = g if static is None else np.float32(min(max(static, 2.0**-80), 2.0**100))
    a = amaxes(x, 16)
    good = np.isfinite(a)
    with np.errstate(over="ignore"):
        code = nearest((np.where(good, a, 0) / np.float32(6) / g).astype(np.float64), "e4m3")
        t = spread(g * values("e4m3").astype(np.float32)[code] * good, x, 16)
        v = np.divide(np.where(np.isfinite(x), x, 0), t, where=t > 0, out=np.zeros_like(x))
    return (
        np.where(t > 0, nearest(v.astype(np.float64), "e2m1"), 0),
        np.where(good, code, 0x7F),
        np.array([g], np.float32),
    )


def unpacked(data: Tensor, kind: str) -> np.ndarray:
    """Codes one a byte, of stored ones."""
    codes = data.view(torch.uint8).numpy()
    codes = codes.reshape(-1, codes.shape[-1])
    return np.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1) if kind == "e2m1" else codes


def differences(q, x: Tensor, static: float | None = None) -> list[str]:
    """Which tensors of a quantised value are not what the definitions say of the float32 values of x."""
    format, wrong = q.format, []
    wide = x.float().reshape(-1, x.shape[-1]).numpy()
    for suffix in {"row": ("",), "col": ("_t",), "both": ("", "_t")}[format.ways]:
        matrix = np.ascontiguousarray(wide.T) if suffix else wide
        if format.name == "mx":
            codes, scale = mx(matrix, format.dtype, format.rule)
        else:
            codes, scale, shared = nvfp4(matrix, static)
            if getattr(q, f"shared{suffix}").numpy().view(np.int32) != shared.view(np.int32):
                wrong.append(f"shared{suffix}")
        if not np.array_equal(unpacked(getattr(q, f"data{suffix}"), format.dtype), codes):
            wrong.append(f"data{suffix}")
        if not np.array_equal(getattr(q, f"scale{suffix}").view(torch.uint8).numpy(), scale):
            wrong.append(f"scale{suffix}")
    return wrong
