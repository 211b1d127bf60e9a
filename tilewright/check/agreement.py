"""Small inputs for the calls behind the coverage lists, and the comparison of their results with float64 truth.

A plain result is the truth rounded once. A quantised one is held against the definition of its format: scales follow from the
largest value of their block, 1.0 where that is 0, and a code is the nearest one to value / scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import tilewright as tw

from ..core.format import Format, Quantized
from .oracle import BARS, near, rms

BF16, FP16 = torch.bfloat16, torch.float16
E4M3_MAX = 448.0
NOISE = 1e-6  # relative: what fp32 arithmetic before the rounding may have moved
STATIC = 0.013


def normal(device: str, *shape: int, dtype: torch.dtype = BF16, seed: int = 0, scale: float = 1.0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=source)).to(dtype).to(device)


def forms(device: str) -> dict[str, Format | None]:
    """The formats that the lists ask for."""
    return {
        "plain": None,
        "blocks": tw.fp8("1x128", ways="both"),
        "static": tw.fp8("tensor", scale=torch.tensor([STATIC], device=device)),
        "unit": tw.fp8("tensor", scale="unit"),
        "dynamic": tw.fp8("tensor", pow2=False),
    }


def end_rows(device: str, ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


# ---- comparing -------------------------------------------------------------------------------------------------------


def agrees(
    label: str, result: Tensor, exact: Tensor, bar: str = "B", ends: list[int] | None = None, noise: float = 0.0
) -> None:
    """`result`, plain or quantised, is the float64 `exact` rounded once; `ends` are the end rows of groups, `noise` is the
    error, relative to the RMS of `exact`, of what a plain result was computed from."""
    live = exact.shape[0] if ends is None else ends[-1]
    if isinstance(result, Quantized):
        for way, codes, scale, index in operands(result, exact.shape, ends):
            _codes_agree(f"{label}, {way}-wise", result.format, codes[:live], scale, index[:live], exact[:live].cpu())
    else:
        exact = exact[:live].cpu()
        near(label, result[:live], exact, torch.tensor(noise * rms(exact), dtype=torch.float64), BARS[bar])


def operands(q: Quantized, shape: Any, ends: list[int] | None) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(way, codes [M, N], scales, the number of each element's scale among them) as the contract lays them out."""
    M, N = shape
    bounds = [0, M] if ends is None else [0, *ends, M]
    block = [-1] * M  # 128-row blocks begin anew at each group and are numbered on
    for start, end in zip(bounds, bounds[1:]):
        first = max(block[:start], default=-1) + 1
        block[start:end] = [first + (row - start) // 128 for row in range(start, end)]
    rows, cols, zero = torch.arange(M), torch.arange(N), torch.zeros(1, dtype=torch.int64)
    tall, wide = torch.tensor(block), cols // 128
    keys = {
        "tensor": ((zero, zero), (zero, zero)),
        "row": ((rows, zero), (zero, cols)),
        "1x128": ((rows, wide), (tall, cols)),
        "128x128": ((tall, wide), (tall, wide)),
    }[q.format.granularity]
    for way, data, scale, (down, across) in (
        ("row", q.data, q.scale, keys[0]),
        ("column", None if q.data_t is None else q.data_t.t(), q.scale_t, keys[1]),
    ):
        if data is None:
            continue
        scale = scale.cpu().double()
        if scale.dim() == 2 and (q.format.granularity, way) in (("1x128", "row"), ("128x128", "column")):
            scale = scale.t()
        width = scale.shape[1] if scale.dim() == 2 else int(across.max()) + 1
        index = (down[:, None] * width + across).expand(M, N)
        yield way, data.cpu().float().double(), scale.reshape(-1), index


def _codes_agree(label: str, form: Any, codes: Tensor, scales: Tensor, index: Tensor, exact: Tensor) -> None:
    amax = torch.zeros_like(scales).scatter_reduce(0, index.flatten(), exact.abs().flatten(), "amax")
    used = index.unique()
    s, a = scales[used], amax[used]
    if form.source != "dynamic":
        right = s == (1.0 if form.source == "unit" else torch.tensor(STATIC).double())
    elif form.pow2:
        inside = (a <= E4M3_MAX * s * (1 + NOISE)) & (a > E4M3_MAX / 2 * s * (1 - NOISE))
        right = (torch.frexp(s).mantissa == 0.5) & inside
    else:
        right = (s - a / E4M3_MAX).abs() <= NOISE * s
    if form.source == "dynamic":
        right = torch.where(a == 0, s == 1.0, right)
    assert bool(right.all()), f"{label}: {int((~right).sum())} of {right.numel()} scales are wrong"
    wanted = (exact / scales[index]).clamp(-E4M3_MAX, E4M3_MAX)
    # Neighbouring codes are 2^-3 of their power of two apart, and below 2^-6 evenly 2^-9
    half = torch.exp2((torch.frexp(wanted).exponent - 1).clamp(min=-6).double() - 4)
    off = (codes - wanted).abs() > half + NOISE * wanted.abs()
    assert not bool(off.any()), f"{label}: {int(off.sum())} of {off.numel()} codes are not the nearest"
