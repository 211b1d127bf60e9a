"""FP8 written out from the definition of the codes and of the rules, in numpy: what `formats/fp8.py` is held against; and
the values that formats are tried on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
# Forms that between them have every code, kind of scale and rule.
SOME = [
    ("e4m3", True, "te"),
    ("e4m3", False, "te"),
    ("e5m2", True, "linghe"),
    ("e4m3", False, "exact"),
    ("e5m2", False, "linghe"),
]
FLOORS = {"te": 2.0**-126, "exact": 2.0**-126, "linghe": float(np.float32(1e-30))}


def decode_table(code: str) -> np.ndarray:
    """The value of each of the 256 codes, in float64."""
    mantissa, bias = (3, 7) if code == "e4m3" else (2, 15)
    values = np.empty(256)
    for c in range(256):
        sign = -1.0 if c & 0x80 else 1.0
        exponent, fraction = (c & 0x7F) >> mantissa, (c & ((1 << mantissa) - 1)) / (1 << mantissa)
        if code == "e4m3" and (c & 0x7F) == 0x7F:
            values[c] = np.nan
        elif code == "e5m2" and exponent == 31:
            values[c] = np.nan if fraction else sign * np.inf
        elif exponent == 0:
            values[c] = sign * fraction * 2.0 ** (1 - bias)
        else:
            values[c] = sign * (1 + fraction) * 2.0 ** (exponent - bias)
    return values


def encode(v: np.ndarray, code: str) -> np.ndarray:
    """The nearest code, ties to the even one, saturating; NaN is 0x7F, and zeros keep their sign."""
    positive = decode_table(code)[:128]
    positive = positive[np.isfinite(positive)]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        size = np.minimum(np.abs(v.astype(np.float64)), positive[-1])
    size = np.where(np.isnan(v), 0.0, size)
    high = np.minimum(np.searchsorted(positive, size), len(positive) - 1)
    low = np.maximum(high - 1, 0)
    up, down = positive[high] - size, size - positive[low]
    best = np.where(up < down, high, np.where(down < up, low, np.where(high % 2 == 0, high, low)))
    best = np.where(size == positive[high], high, best)
    best = best | np.where(np.signbit(v), 0x80, 0)
    return np.where(np.isnan(v), 0x7F, best).astype(np.uint8)


def scales(amax: np.ndarray, code: str, pow2: bool, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """(stored scale, what codes are made with) for each fp32 amax: the multiplier for te, else the scale to divide by."""
    largest, floor = np.float32(MAX[code]), FLOORS[rule]
    amax = amax.astype(np.float32)
    finite = np.isfinite(amax)
    a = np.where(finite & (amax > 0), amax, 1.0).astype(np.float32)
    if pow2:
        wide = a.astype(np.float64)
        k = np.floor(np.log2(float(largest) / wide))
        k = np.where(wide * 2.0 ** (k + 1) <= float(largest), k + 1, k)  # log2 may be off by one at a boundary
        k = np.where(wide * 2.0**k > float(largest), k - 1, k)
        smallest = 2.0 ** np.ceil(np.log2(floor))
        scale = np.maximum(2.0**-k, smallest).astype(np.float32)
        mult = (1.0 / scale.astype(np.float64)).astype(np.float32)
        zero = np.float32(smallest)
    elif rule == "te":
        with np.errstate(over="ignore"):
            mult = np.minimum(largest / a, np.float32(1 / floor)).astype(np.float32)
        scale = np.float32(1) / mult
        zero = np.float32(0)
    else:
        scale = np.maximum(a / largest, np.float32(floor)).astype(np.float32)
        mult = np.float32(1) / scale
        zero = np.float32(floor)
    if rule != "linghe":
        zero = np.float32(1)
    scale = np.where(amax == 0, zero, scale).astype(np.float32)
    mult = np.where(amax == 0, np.float32(1) / zero, mult).astype(np.float32)
    scale[~finite] = np.nan
    mult[~finite] = np.nan
    return scale, mult if rule == "te" else scale


def quantize_block(x: np.ndarray, code: str, pow2: bool, rule: str) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one block of fp32 values."""
    amax = np.float32(0) if x.size == 0 else np.abs(x).max()  # numpy's max keeps NaN
    scale, factor = scales(np.array([amax]), code, pow2, rule)
    with np.errstate(invalid="ignore", over="ignore"):
        v = x * factor[0] if rule == "te" else x / factor[0]
    return encode(v, code), scale[0]


def groups_of(M: int, ends: list[int] | None) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each group."""
    if ends is None:
        return [(0, M)]
    return list(zip([0, *ends[:-1]], ends))


def row_blocks(M: int, ends: list[int] | None) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each 128-row block, group after group."""
    return [(r, min(r + 128, end)) for start, end in groups_of(M, ends) for r in range(start, end, 128)]


def quantize(x: np.ndarray, granularity: str, code: str, pow2: bool, rule: str, ends: list[int] | None = None) -> dict:
    """data, scale, data_t and scale_t of a matrix, block by block; only what the layout specifies is filled."""
    M, N = x.shape
    blocks, groups = row_blocks(M, ends), groups_of(M, ends)
    live = M if ends is None else ends[-1]
    cols = [(c, min(c + 128, N)) for c in range(0, N, 128)]
    one = [(0, live)]
    # (row intervals, column intervals) of the blocks, and whether a scale's first index is the column's
    ways = {
        "tensor": ((one, [(0, N)], False), (one, [(0, N)], False)),
        "row": (([(r, r + 1) for r in range(live)], [(0, N)], False), (groups, [(c, c + 1) for c in range(N)], False)),
        "1x128": (([(r, r + 1) for r in range(live)], cols, True), (blocks, [(c, c + 1) for c in range(N)], False)),
        "128x128": ((blocks, cols, False), (blocks, cols, True)),
    }[granularity]
    made: dict[str, np.ndarray] = {}
    for tail, (rows, columns, flip) in zip(("", "_t"), ways):
        data = np.zeros((M, N), np.uint8)
        scale = np.zeros((len(rows), len(columns)), np.float32)
        for i, (r0, r1) in enumerate(rows):
            for j, (c0, c1) in enumerate(columns):
                data[r0:r1, c0:c1], scale[i, j] = quantize_block(x[r0:r1, c0:c1], code, pow2, rule)
        made[f"data{tail}"] = data.T if tail else data
        made[f"scale{tail}"] = scale.T if flip else scale
    return made


# ---- values ----------------------------------------------------------------------------------------------------------


def codes(t: Tensor) -> np.ndarray:
    """Codes as bytes, all NaN alike."""
    u = t.contiguous().view(torch.uint8).numpy()
    return np.where(np.isnan(t.float().numpy()), 0x7F, u)


def bits(s: Tensor | np.ndarray) -> np.ndarray:
    """Scales as integers, all NaN alike."""
    s = np.ascontiguousarray(s.numpy() if isinstance(s, Tensor) else s, np.float32)
    return np.where(np.isnan(s), 0x7FC00000, s.view(np.int32))


def every(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit type, as fp32."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).float()


def ties(code: str) -> Tensor:
    """Codes' values, the midpoints between them, what saturates, and the fp32 neighbours of all."""
    table = decode_table(code)[:128]
    table = table[np.isfinite(table)]
    exact = np.concatenate(
        [table, (table[1:] + table[:-1]) / 2, table[-1] * np.array([1.03, 1.04, 1.0357143, 1.0715, 2])]
    )
    middle = exact.astype(np.float32)
    near = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    both = np.concatenate([*near, *[-n for n in near]])
    return torch.from_numpy(np.concatenate([both, np.float32([0.0, -0.0, 1e-45, 3e38, np.nan])]))


def amaxes(code: str) -> np.ndarray:
    """Block maxima at which rules go wrong: F * 2**k and neighbours, powers of two, subnormals, the largest, many at random."""
    k = 2.0 ** np.arange(-149, 128)
    corners = np.concatenate([k, np.float64(MAX[code]) * k[k < 2.0**110], 1.75 * k[:-1]])
    corners = corners[corners < 3.4028235e38].astype(np.float32)
    corners = np.concatenate([corners, np.nextafter(corners, np.float32(np.inf)), np.nextafter(corners, np.float32(0))])
    random = np.random.default_rng(0).integers(1, 0x7F800000, 40_000).astype(np.int32).view(np.float32)
    rest = np.float32([0.0, 1e-30, 1e-36, 3.4028235e38, np.inf, np.nan])
    return np.concatenate([corners, random, rest])


def matrix(M: int, N: int) -> Tensor:
    """Rows and columns of many magnitudes, with a zero block, signed zeros, tiny values, a NaN and an Inf."""
    source = torch.Generator().manual_seed(M * 1000 + N)
    x = torch.randn(M, N, generator=source) * torch.exp2(torch.randint(-12, 12, (M, 1), generator=source).float())
    x = x * torch.exp2(torch.randint(-3, 3, (1, N), generator=source).float())
    x[:, N // 2 : N // 2 + 3] = 0.0
    x[0, :] = -0.0
    x[1, :] = 1e-44
    if M > 140:
        x[140, 2], x[3, N - 1] = float("nan"), float("-inf")
    return x.bfloat16().float()
