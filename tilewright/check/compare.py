"""An outcome held against the truth: plain results and gradients within their bars, quantised ones code by code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..op import Op
from .codes import near_codes
from .oracle import BARS, Outcome, contract, expectation, gradient_bar, near, result_bar, rms, specified


def check(op: Op, label: str, values: Mapping[str, Any], actual: Outcome) -> None:
    """Hold an outcome against the truth: plain results and gradients within their bars, quantised ones code by code."""
    exact, noise = expectation(op, values, actual)
    # Differences of terms as large as the upstream gradient, when they vanish, leave fp32 noise of that size.
    floor = 2.0**-22 * max((float(g.abs().max()) for g in actual.grads if g is not None and g.numel()), default=0.0)
    values = contract(values, actual)
    for name, there in exact.items():
        gradient = name.startswith("d_")
        bar = gradient_bar(op, name[2:]) if gradient else result_bar(op, values)
        if name in actual:
            cut = [specified(values, name, t) for t in (actual[name], there, noise[name])]
            near(f"{label}: {name}", *cut, bar, floor if gradient else 0.0)
        else:
            assert not gradient, f"{label}: there is no gradient of {name[2:]}"
            rough = None if bar == BARS["G"] else noise[name]
            if bar == BARS["F"]:  # FP8 tensor cores' own precision
                rough = rough.clamp(min=bar.single * rms(there))
            near_codes(f"{label}: {name}", name, values, actual, there, rough, op.bars.get("twin"))
