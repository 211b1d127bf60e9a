"""An outcome held against the truth: plain results and gradients within their bars, quantised ones code by code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..op import Op
from .cases import tensors
from .codes import near_codes, near_stored
from .oracle import (
    BARS,
    SHARE_OF_BF16,
    Bar,
    Contract,
    Outcome,
    contract,
    each,
    expectation,
    gradient_bar,
    jitter,
    near,
    result_bar,
    rms,
    same_bits,
    specified,
    truth,
    weighty,
)

TERMS = 2048  # of a product, for which class E's bar is
TIES = 8  # slightly moved inputs that a choice is made from again, to find where it hangs by a rounding


def check(op: Op, label: str, values: Mapping[str, Any], actual: Outcome) -> None:
    """Hold an outcome against the truth: plain results and gradients within their bars, quantised ones code by code."""
    exact, noise = expectation(op, values, actual)
    # Differences of terms as large as the upstream gradient, when they vanish, leave fp32 noise of that size.
    floor = 2.0**-22 * max((float(g.abs().max()) for g in actual.grads if g is not None and g.numel()), default=0.0)
    agreed = contract(op, values, actual)
    for name, there in exact.items():
        gradient = name.startswith("d_")
        bar = gradient_bar(op, name[2:], values) if gradient else result_bar(op, values)
        if op.resume is not None and name in op.saves and not there.is_floating_point():
            same_choice(f"{label}: {name}", op, values, name, actual[name], there)
        elif name in actual and bar != BARS["G"] and actual[name].dtype in (torch.int8, torch.float8_e4m3fn):
            near_stored(f"{label}: {name}", actual[name], there, noise[name])
        elif name in actual:
            given = op, f"{label}: {name}", name, values, actual, there, agreed
            least = floor if gradient else 0.0
            try:
                near_plain(*given, torch.zeros((), dtype=torch.float64, device=there.device), bar, least, strict=True)
            except AssertionError:
                near_plain(*given, noise[name], bar, least)
        else:
            assert not gradient, f"{label}: there is no gradient of {name[2:]}"
            rough = None if bar == BARS["G"] else noise[name]
            if bar == BARS["F"]:  # FP8 tensor cores' own precision
                rough = rough.clamp(min=bar.single * rms(there))
            elif bar == BARS["E"]:
                rough = of_long_sums(rough, there, values)
            near_codes(op, f"{label}: {name}", name, values, actual, there, rough)


def near_plain(
    op: Op, label: str, name: str, values: Mapping[str, Any], actual: Outcome, there: Tensor, agreed: Contract, noise: Tensor,
    bar: Bar, negligible: float, strict: bool = False,
) -> None:  # fmt: skip
    """A plain result or gradient is as near as its bar and the noise allow."""
    found, gradient = actual[name], name.startswith("d_")
    if bar == BARS["E"] and there.is_floating_point():  # integers are summed without rounding
        noise = of_long_sums(noise, there, values)
    if gradient and bar is BARS["M"] and found.dtype == torch.float32:
        noise = of_rounded_weights(noise, there, tensors(op, values).values())
    near(label, *(specified(agreed, name, t) for t in (found, there, noise)), bar, negligible, strict=strict)


def of_rounded_weights(noise: Tensor, exact: Tensor, arguments: Iterable[Tensor]) -> Tensor:
    """The noise of an fp32 gradient, a decay's, where weights on the way to it were rounded as 16-bit arguments are: it comes as
    near as theirs do (`oracle._near_low`)."""
    shares = [SHARE_OF_BF16[t.dtype] for t in arguments if t.dtype in SHARE_OF_BF16]
    finite = exact[exact.isfinite()]
    if not shares or not finite.numel():
        return noise
    limit = BARS["M"].low * max(shares) * rms(finite) * (1 + 16 / weighty(finite) ** 0.5)
    return noise.clamp(min=limit / 4)  # four times it is allowed


def of_long_sums(noise: Tensor, exact: Tensor, values: Mapping[str, Any]) -> Tensor:
    """The noise of a product of as many terms as its arguments are long, where these are more than its bar is for: a tensor core
    cuts off a little of each partial sum, so that what is lost grows with their number."""
    longest = max((size for v in values.values() if isinstance(v, Tensor) for size in v.shape), default=0)
    if longest <= TERMS:
        return noise
    return noise.clamp(min=longest / TERMS * BARS["E"].single * rms(exact) / 4)  # four times it is allowed


def same_choice(label: str, op: Op, values: Mapping[str, Any], name: str, actual: Tensor, there: Tensor) -> None:
    """A choice that the op goes on from: as in the truth, but in rows where a few fp32 steps of the inputs would change it."""
    differs = (actual.to(there.device) != there).reshape(-1, there.shape[-1]).any(-1) if there.dim() else None
    if differs is None or not bool(differs.any()):
        return same_bits(label, actual.to(there.device), there.to(actual.dtype))
    source = torch.Generator(there.device).manual_seed(11)
    hangs = torch.zeros_like(differs)
    for _ in range(TIES):
        moved = {n: each(lambda t: jitter(t, source, 2.0**-21), v) for n, v in values.items()}
        hangs |= (truth(op, moved, [])[name] != there).reshape(-1, there.shape[-1]).any(-1)
    wrong = differs & ~hangs
    assert not bool(wrong.any()), (
        f"{label}: {int(wrong.sum())} of {wrong.numel()} rows chose others, first row {int(wrong.nonzero()[0])}; in"
        f" {int((differs & hangs).sum())} more the choice hangs by a rounding"
    )
    return None
