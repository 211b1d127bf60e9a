"""Whether a quantised result is right: code by code and scale by scale, against what quantising the true value gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.format import Format
from ..op import Op
from .oracle import Contract, Outcome, bits, contract, lift, same_bits, specified


def near_codes(
    op: Op,
    label: str,
    name: str,
    values: Mapping[str, Any],
    actual: Outcome,
    there: Tensor,
    noise: Tensor | None,
) -> None:
    """A quantised result: what quantising the true value gives; a producer's last bit may move a scale or, in one element of
    a thousand, a code by one step. Without `noise` every bit must be right. The column-wise operand's value may be another: the
    op's `twin` gives it from the arguments."""
    agreed, twin = contract(op, values, actual), op.bars.twin
    if twin is None:
        near_pieces(label, name, agreed, actual, there, noise)
        return
    ways = [n for n in agreed.format.tensor_names if n.startswith("data")]
    other, single = (
        twin(**{n: lift(v, d) for n, v in values.items() if n != "out"}) for d in (torch.float64, torch.float32)
    )
    rough = (single.double() - other).square().mean(tuple(range(other.dim() - 1)), keepdim=True).sqrt()
    for way, value, error in (("data", there, noise), ("data_t", other, rough)):
        if way in ways:
            one = dataclasses.replace(agreed.format, ways="row" if way == "data" else "col")
            near_pieces(label, name, agreed._replace(format=one), actual, value, error)


def near_pieces(
    label: str, name: str, agreed: Contract, actual: Mapping[str, Tensor], there: Tensor, noise: Tensor | None
) -> float:
    """The tensors of a quantised value, each under its name in `actual`, beside those of the true value, which may be off by an
    error per row. Scales may be off by 5e-7, the eight units in the last place that five roundings and an approximate rsqrt
    make. Gives the largest share of codes that are a step off."""
    share = 0.0
    fmt, offsets, exact = agreed.format, agreed.ends, noise is None
    offsets = None if offsets is None else offsets.to(there.device)
    fmt = fmt if fmt.tensor is None else fmt.bare().with_scale(fmt.tensor.to(there.device))
    step = torch.zeros_like(there) if exact else there.sign() * (3e-7 * there.abs() + 8 * noise)
    # Towards zero, not past it: the scale of a value that is all noise may be as small as one likes
    smaller = torch.where(step.abs() < there.abs(), there - step, 2.0**-10 * there)
    # Or nothing, which has a scale of its own
    nothing = torch.where(step.abs() < there.abs(), there, 0.0)
    moved = (there,) if exact else (there, smaller, there + step, *_apart_from_each_other(fmt, there, step), nothing)
    options = [fmt.quantize(value, torch.float32, offsets) for value in moved]
    for i, part in enumerate(fmt.tensor_names):
        wanted = [q.tensors()[i] for q in options]
        found = actual[f"{name}.{part}"].to(there.device)
        assert found.shape == wanted[0].shape, (
            f"{label}.{part}: shape {tuple(found.shape)}, not {tuple(wanted[0].shape)}"
        )
        if part.startswith("data"):
            clear = torch.ones_like(there, dtype=torch.bool) if exact else 512 * step.abs() <= there.abs()
            clear = clear.reshape(math.prod(there.shape[:-1]), there.shape[-1]).t() if part == "data_t" else clear
            per = 2 if 2 * found.shape[-1] == clear.shape[-1] else 1  # codes in a byte
            parts = [specified(agreed, f"{name}.{part}", clear[..., k::per]) for k in range(per)]
            clear = torch.stack(parts, -1).flatten(-2)
        found, *wanted = (specified(agreed, f"{name}.{part}", t) for t in (found, *wanted))
        if part.startswith("data"):
            found, *wanted = (_apart(t, fmt) if per == 2 else t for t in (found, *wanted))
            share = max(share, _near_code(f"{label}.{part}", found, wanted, clear, exact))
        else:
            _near_scale(f"{label}.{part}", found, wanted, exact)
    return share


def _apart(codes: Tensor, fmt: Format) -> Tensor:
    """4-bit codes, two to a byte, as one int8 each, in the order of what they stand for."""
    pairs = codes.contiguous().view(torch.uint8)
    code = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int8)
    return torch.where(code < 8, code, code - 16 if fmt.name == "int4" else 7 - code)


def _near_code(label: str, found: Tensor, wanted: list[Tensor], clear: Tensor, exact: bool) -> float:
    def order(t: Tensor) -> Tensor:
        code = t.contiguous().view(torch.uint8).to(torch.int16)
        return t.to(torch.int16) if t.dtype == torch.int8 else torch.where(code < 128, code, 127 - code)

    right = ~clear.expand(found.shape)
    for w in wanted:
        right |= (bits(found) == bits(w)) | (found.float().isnan() & w.float().isnan())
    wrong = int((~right).sum())
    # Where a scale moved, all codes under it did
    away = torch.stack([(order(found) - order(w)).abs() for w in wanted]).amin(0)
    far = int((away > 1)[~right].sum())
    allowed = 0 if exact else 1 + right.numel() // 1000
    assert wrong <= allowed and far == 0, f"{label}: {wrong} of {right.numel()} codes differ, {far} by more than a step"
    return wrong / max(1, right.numel())


def near_stored(label: str, found: Tensor, there: Tensor, noise: Tensor) -> None:
    """Codes that an op makes, or writes, of numbers that it makes, without a format: as in the truth, but for one in a thousand, a
    step off, and for rows whose codes an honest fp32 computation gets wrong as well."""
    clear = (noise == 0.0).to(found.device).expand(found.shape)
    there = there.to(found.device, found.dtype)
    assert found.shape == there.shape, f"{label}: shape {tuple(found.shape)}, not {tuple(there.shape)}"
    _near_code(label, found, [there], clear, exact=False)


def _near_scale(label: str, found: Tensor, wanted: list[Tensor], exact: bool) -> None:
    if exact:
        return same_bits(label, found, wanted[0])
    found, *wanted, nothing = (t.float() for t in (found, *wanted))
    low, high = torch.stack(wanted).amin(0), torch.stack(wanted).amax(0)
    # Zero points may be negative
    right = (low - 2e-7 * low.abs() <= found) & (found <= high + 2e-7 * high.abs()) | (found == nothing)
    right |= found.isnan() & low.isnan()
    assert bool(right.all()), (
        f"{label}: {int((~right).sum())} of {right.numel()} scales differ, one is {found[~right][0]}"
    )
    return None


def _apart_from_each_other(fmt: Format, there: Tensor, step: Tensor) -> list[Tensor]:
    """Values whose parts that decide a number of few digits have moved against each other: zero points follow from the largest and
    the smallest of a block, a block's scale from its largest and from the whole's where there is a scale of that."""
    names, found = fmt.tensor_names, []
    if any(name.startswith("zero") for name in names):
        found += [there + step.abs(), there - step.abs()]
    if any(name.startswith("shared") for name in names):
        size = torch.where(there.abs() < torch.inf, there.abs(), 0.0)
        top = torch.where(size == size.max(), -1.0, 1.0) if there.numel() else step
        found += [there + top * step, there - top * step]
    return found
