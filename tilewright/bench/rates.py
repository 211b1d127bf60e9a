"""Rates of matrix products: docs/rates.md from the evidence, and what is multiplied where operands are codes.

A rate is 2 M N K over the time of a product, as a burst and sustained, with the clock at the end of a second of work. Its share
is of the best burst recorded of the math that was used: of BF16 for MXFP8 that is widened to BF16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import tilewright as tw

from ..check.variants import Blank
from ..core.target import TARGETS, Target
from ..gemm.arithmetic import Computed, computed
from .cases import CASES, Case
from .markdown import GENERATED, code, table
from .results import understand
from .work import arguments

ABOUT = """\
TFLOP/s (of integers TOP/s) of our kernels: as a burst, in a graph of a few calls, and sustained, after a second of calls
has brought the chip to the clock that its power allows; the clock is the one then. Codes that a chip does not multiply
are widened to what it does: the column `math` says so, and the share is of the best burst recorded on that GPU in that
math."""


def arithmetic_of(case: Case, target: Target) -> Computed | None:
    """How a case's product is computed; None where it is no product by kernels of ours alone."""
    op = tw.catalogue().get(case.op)
    if op is None or op.cost.flops is None or (any(one.library for one in op.implementations) and not case.ours):
        return None
    values = arguments(case, Blank(op, case.dims, case.options, dtype=getattr(torch, case.dtype)))
    return computed(values, target) if {"a", "b"} <= set(values) else None


def page(recorded: Iterable[Mapping[str, Any]], cases: Mapping[str, Case] = CASES) -> str:
    """docs/rates.md."""
    found = []
    for row in recorded:
        case, target = cases.get(row["case"]), TARGETS.get(row["arch"])
        kind = arithmetic_of(case, target) if case is not None and target is not None and "rates" in row else None
        if kind is not None:
            found.append((row, kind))
    best: dict[tuple[str, str], float] = {}
    for row, kind in found:
        at = row["gpu"], kind.math
        best[at] = max(best.get(at, 0.0), row["rates"]["burst"])
    lines = ["# Rates of matrix products", "", GENERATED, "", *ABOUT.splitlines(), ""]
    heads = ("case", "GPU", "math", "burst", "sustained", "MHz", "share")
    lines += table(heads, (_line(row, kind, best[row["gpu"], kind.math]) for row, kind in found))
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any], kind: Computed, best: float) -> tuple[str, ...]:
    rates = row["rates"]
    words = f"{kind.math.upper()}, native" if kind.words == "native" else kind.words
    clock = "" if rates["clock_mhz"] is None else str(rates["clock_mhz"])
    speeds = f"{rates['burst']:.0f}", f"{rates['sustained']:.0f}"
    return code(understand(row, {}, ()).label), row["gpu"], words, *speeds, clock, f"{rates['burst'] / best:.2f}"
