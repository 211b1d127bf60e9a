"""INT8 and INT4 written out from their definition, block by block in numpy and float64: what `formats/integers.py` is held against;
and the values that they are tried on.

A quotient or a sum of fp32 numbers rounded to float64 and then to fp32 is the one rounded to fp32 once: 53 >= 2 * 24 + 2.
"""

from __future__ import annotations

import numpy as np

FLOOR = 2.0**-100


def rounded(x: np.ndarray | float) -> np.ndarray:
    """The nearest fp32 number, kept in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.float64(np.float32(x))


def block(x: np.ndarray, largest: int, zero: bool = False) -> tuple[np.ndarray, float, float]:
    """(codes, scale, zero point) of all elements of one block."""
    x = x.astype(np.float64)
    if not np.isfinite(x).all():
        return np.zeros(x.shape), np.nan, 0.0
    low, high = min(0.0, x.min(initial=0.0)), max(0.0, x.max(initial=0.0))
    if low == high == 0.0:
        return np.full(x.shape, -8.0 if zero else 0.0), 1.0, -8.0
    if not zero:
        scale = max(float(rounded(max(-low, high) / largest)), FLOOR)
        return np.clip(np.rint(rounded(x / scale)), -largest, largest), scale, 0.0
    scale = max(float(2 * rounded(rounded(high / 2 - low / 2) / 15)), FLOOR)
    point = -8 - np.rint(rounded(low / scale))
    return np.clip(np.rint(rounded(x / scale)) + point, -8, 7), scale, float(point)


def blocks(
    x: np.ndarray, rows: int, columns: int, largest: int, zero: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes like x, and scales and zero points [blocks down, blocks across], of blocks of rows x columns (0: all of them)."""
    M, N = x.shape
    rows, columns = rows or max(1, M), columns or max(1, N)
    down, across = -(-M // rows) or 1, -(-N // columns) or 1
    codes, scales, points = np.zeros(x.shape), np.ones((down, across)), np.zeros((down, across))
    for i in range(down):
        for j in range(across):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            codes[at], scales[i, j], points[i, j] = block(x[at], largest, zero)
    return codes, scales.astype(np.float32), points.astype(np.float32)


def matrix(M: int, N: int, seed: int = 0) -> np.ndarray:
    """Rows of many sizes, with zeros, and at places far apart what is not finite, very large or very small."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((M, N)) * 2.0 ** rng.integers(-20, 20, (M, 1))
    x[rng.random((M, N)) < 0.05] = 0.0
    odd = {1: np.nan, 2: -np.inf, 3: 3.3e38, 4: 1e-40, 5: 0.0}
    for row, value in odd.items():
        if row < M:
            x[row, : N // 2 if row > 2 else 1] = value
        if row in (4, 5) and row < M:
            x[row] = value
    if M > 3 and N > 1:
        x[3, N - 1] = -3.3e38
    return x.astype(np.float32)


def ties(largest: int, rows: int, seed: int = 0) -> np.ndarray:
    """Rows of values at, just under and just over every boundary between two codes, the scale being any number."""
    rng = np.random.default_rng(seed)
    top = np.float32(rng.uniform(1, 2, (rows, 1)) * 2.0 ** rng.integers(-95, 120, (rows, 1)))
    scale = np.maximum(rounded(top / np.float64(largest)), FLOOR)
    edge = np.float32(scale * (np.arange(-largest, largest) + 0.5))
    under, over = np.nextafter(edge, np.float32(-np.inf)), np.nextafter(edge, np.float32(np.inf))
    inside = np.clip(np.concatenate([edge, under, over], 1), -top, top)
    return np.concatenate([inside, top, -top], 1)
