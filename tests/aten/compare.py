"""Whether a result of ours is aten's: values, dtype, shape, strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def flat(made: Any) -> list[Any]:
    return [one for part in made for one in flat(part)] if isinstance(made, (tuple, list)) else [made]


def as_double(value: Any) -> Any:
    """Arguments of a call, floats in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(as_double(v) for v in value)
    if isinstance(value, dict):
        return {k: as_double(v) for k, v in value.items()}
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def ulps(values: Tensor, truth: Tensor, scale: float) -> Tensor:
    """How far values are from the truth, in steps of their dtype there, or at `scale` where the truth is smaller."""
    info = torch.finfo(values.dtype)
    step = 2.0 ** torch.floor(torch.log2(truth.abs().clamp(min=max(scale, info.smallest_normal)))) * info.eps
    apart = (values.double() - truth).abs() / step
    return torch.where(values.double() == truth, 0.0, apart).nan_to_num(nan=0.0)


def differences(made: Any, aten: Any, truth: Any = None, scale: float = 0.0) -> list[str]:
    """What tells our results from aten's. `truth` is of float64: an error may be twice aten's largest, or one step of the dtype;
    with a scale, three steps there."""
    made, aten = flat(made), flat(aten)
    truths: Sequence[Any] = [None] * len(aten) if truth is None else flat(truth)
    if len(made) != len(aten):
        return [f"{len(made)} results, not {len(aten)}"]
    found: list[str] = []
    for own, other, exact in zip(made, aten, truths):
        if type(own) is not type(other) or not isinstance(other, Tensor):
            found += [] if type(own) is type(other) and own == other else [f"{own!r}, not {other!r}"]
            continue
        for what in ("dtype", "shape", "device"):
            if getattr(own, what) != getattr(other, what):
                found.append(f"{what} {getattr(own, what)}, not {getattr(other, what)}")
        if own.stride() != other.stride():
            found.append(f"strides {own.stride()}, not {other.stride()}")
        if not found:
            found += wrong_values(own, other, exact, scale)
    return found


def wrong_values(own: Tensor, other: Tensor, exact: Tensor | None, scale: float) -> list[str]:
    if own.is_complex():
        own, other, exact = (None if t is None else torch.view_as_real(t) for t in (own, other, exact))
    same = (own == other) | ((own != own) & (other != other))
    if bool(same.all()):
        return []
    one = int((~same).sum())
    if not own.is_floating_point() or own.dtype == torch.float64 or exact is None or exact.shape != own.shape:
        loose = own.is_floating_point() and torch.allclose(own, other, 1e-12, 1e-12, equal_nan=True)
        return [] if loose and own.dtype == torch.float64 else [f"{one} values, the first {first(own, other, same)}"]
    exact = exact.double()
    both = torch.isfinite(exact) & torch.isfinite(other)
    if bool((~same & ~both).any()):
        return [f"{one} values, where aten has no finite one: {first(own, other, same | both)}"]
    here, there = (float(ulps(t, exact, scale)[both].max()) for t in (own, other))
    least = 3.0 if scale else 1.0
    return [f"an error of {here:.1f} ulp, aten's is {there:.1f}"] if here > max(least, 2.0 * there) else []


def first(own: Tensor, other: Tensor, same: Tensor) -> str:
    return f"{own[~same].flatten()[0].item()} for {other[~same].flatten()[0].item()}"
