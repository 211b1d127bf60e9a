"""Whether a timed output is right: float64 formulas on a few bands of rows, and no element left unwritten anywhere.

The formulas are written out here, not taken from the ops, so that they are a second opinion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0
# Relative RMS error against float64 truth, by dtype of the result: a correctly rounded bf16 result has 1.66e-3.
ROW_BARS = {torch.bfloat16: 1.70e-3, torch.float16: 2.2e-4, torch.float32: 2e-6}
GRADIENT_BARS = {torch.bfloat16: 2.0e-3, torch.float16: 2.5e-4, torch.float32: 2e-6}
COLUMN_BARS = {torch.bfloat16: 1.9e-3, torch.float16: 2.4e-4, torch.float32: 2e-6}  # few elements, so more scatter
ULPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-5}
MOST_CODES_OFF = 1e-3
MOST_SCALES_OFF = 1e-4


class Wrong(Exception):
    """The output is not what it should be; the message says where."""


def bands(rows: int, height: int = BLOCK, count: int = 6) -> list[slice]:
    """Up to `count` bands of rows beginning at multiples of `height`: the first, the last (maybe short), others."""
    blocks = -(-rows // height)
    picked = sorted({i * (blocks - 1) // max(count - 1, 1) for i in range(count)})
    return [slice(i * height, min((i + 1) * height, rows)) for i in picked]


def chunks(rows: int, columns: int, elements: int = 1 << 25) -> Iterator[slice]:
    """All rows, in slices of about `elements` elements."""
    step = max(1, elements // max(columns, 1))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def poison(nbytes: int, device: str = "cuda") -> None:
    """Leave free memory full of NaN behind, for the next outputs to be carved from: what a kernel skips will show."""
    if device != "cuda":
        return
    torch.cuda.empty_cache()
    large = torch.empty(2 * nbytes + (64 << 20), dtype=torch.uint8, device=device)
    small = [torch.empty(1 << 19, dtype=torch.uint8, device=device) for _ in range(16)]
    for block in (large, *small):
        block.fill_(0xFF)
    torch.cuda.synchronize()


def all_written(tensor: Tensor, what: str) -> None:
    """Raise if any element is NaN, which finite inputs never give."""
    flat = tensor.reshape(1, -1) if tensor.dim() < 2 else tensor
    for part in chunks(flat.shape[0], flat.shape[-1], 1 << 28):
        piece = flat[part]
        if piece.element_size() == 1:  # torch has no isnan for float8; both formats' NaN codes end in seven ones
            nan = (piece.view(torch.uint8) & 0x7F) == 0x7F
        else:
            nan = piece.isnan()
        if bool(nan.any()):
            raise Wrong(f"{what}: {int(nan.sum())} elements from row {part.start} on are NaN or were never written")


def compare(pairs: Iterable[tuple[Tensor, Tensor]], bar: float, ulp: float, what: str) -> float:
    """Relative RMS error of (got, float64 truth) pairs; raises above `bar`, or if one element is off by over an ulp."""
    wrong = total = 0.0
    for got, want in pairs:
        difference = (got.double() - want).abs()
        typical = want.square().mean().sqrt()
        if not bool((difference <= ulp * want.abs() + 1e-4 * typical).all()):
            raise Wrong(
                f"{what}: an element is off by {float(difference.max()):.3g} (typical size {float(typical):.3g})"
            )
        wrong += float(difference.square().sum())
        total += float(want.square().sum())
    error = math.sqrt(wrong / total) if total else math.sqrt(wrong)
    if not error <= bar:
        raise Wrong(f"{what}: relative RMS error {error:.3g}, allowed {bar:.3g}")
    return error


def compare_rows(got: Tensor, truth: Callable[[slice], Tensor], bars: dict, what: str) -> float:
    """`compare` on the bands of a result whose rows `truth` gives."""
    all_written(got, what)
    pairs = ((got[band], truth(band)) for band in bands(got.shape[0]))
    return compare(pairs, bars[got.dtype], ULPS[got.dtype], what)


def expected_codes(y: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of groups of 128 along the last dimension, by the default rule: m = 2^floor(log2(448 / amax))."""
    pad = -y.shape[-1] % BLOCK
    groups = torch.nn.functional.pad(y, (0, pad)).unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True)
    # The exponent field of the float64 quotient is the floor of its logarithm, exactly.
    exponent = (E4M3_MAX / amax.double().clamp_min(1e-35)).view(torch.int64) >> 52
    multiplier = (exponent << 52).view(torch.float64)
    codes = (groups.double() * multiplier).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
    scales = torch.where(amax == 0, 1.0, 1.0 / multiplier).float().squeeze(-1)
    return codes.flatten(-2)[..., : y.shape[-1]], scales


def _steps(codes: Tensor) -> Tensor:
    """Codes as whole numbers in the order of their values, so that neighbours differ by one."""
    bits = codes.view(torch.uint8).to(torch.int16)
    return torch.where(bits < 128, bits, 128 - bits)


def compare_codes(groups: Iterable[tuple[Tensor, Tensor, Tensor]], what: str) -> float:
    """Share of differing codes of (codes, scales, truth), groups along the last dimension; raises above the bars."""
    off = elements = scales_off = scale_count = 0
    for codes, scales, truth in groups:
        want_codes, want_scales = expected_codes(truth.float())
        same_scale = scales == want_scales
        distance = (_steps(codes) - _steps(want_codes)).abs()
        trusted = same_scale.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
        if bool((distance[trusted] > 1).any()):
            raise Wrong(f"{what}: a code is {int(distance[trusted].max())} steps from the truth")
        off += int((distance[trusted] != 0).sum())
        elements += codes.numel()
        scales_off += int((~same_scale).sum())
        scale_count += scales.numel()
    if scales_off > MOST_SCALES_OFF * scale_count:
        raise Wrong(f"{what}: {scales_off} of {scale_count} scales differ")
    if off > MOST_CODES_OFF * elements:
        raise Wrong(f"{what}: {off} of {elements} codes differ by a step")
    return off / elements


def compare_quantized(q: Any, truth: Callable[[slice], Tensor], what: str) -> float:
    """Check a blockwise `Quantized`, whichever ways it has, on the bands of its rows."""
    rows = 0
    errors = []
    for tensor, part in ((q.data, "data"), (q.scale, "scale"), (q.data_t, "data_t"), (q.scale_t, "scale_t")):
        if tensor is not None:
            all_written(tensor, f"{what}.{part}")
    if q.data is not None:
        rows = q.data.shape[0]
        triples = ((q.data[b], q.scale[:, b].t(), truth(b)) for b in bands(rows))
        errors.append(compare_codes(triples, f"{what} row-wise"))
    if q.data_t is not None:
        rows = q.data_t.shape[1]
        picked = bands(rows)
        triples = (
            (q.data_t[:, b].contiguous(), q.scale_t[b.start // BLOCK, :, None], truth(b).t().contiguous())
            for b in picked
        )
        errors.append(compare_codes(triples, f"{what} column-wise"))
    if not errors:
        raise Wrong(f"{what}: neither row-wise nor column-wise codes")
    return max(errors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def rms_norm_gradients(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(dx, the rows' share of dweight)."""
    x, dy = x.double(), dy.double()
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scaled = dy * weight.double()
    dx = r * scaled - r**3 * x * (x * scaled).mean(-1, keepdim=True)
    return dx, (dy * x * r).sum(0)


def glu(x: Tensor) -> Tensor:
    """silu(gate) * up of `[gate | up]`."""
    gate, up = x.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def glu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    dy = dy.double()
    s = torch.sigmoid(gate)
    return torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), -1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logsumexp(z) - z[label], row by row."""
    z = logits.double()
    return torch.logsumexp(z, -1) - z.gather(-1, labels[:, None]).squeeze(-1)


def cross_entropy_gradient(logits: Tensor, labels: Tensor, dloss: Tensor) -> Tensor:
    """(softmax(z) - onehot(label)) * dloss."""
    p = torch.softmax(logits.double(), -1)
    p.scatter_add_(-1, labels[:, None], torch.full_like(labels[:, None], -1, dtype=torch.float64))
    return p * dloss.double()[:, None]
