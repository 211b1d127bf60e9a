"""Which code made a number: a hash over the kernels that a case launches and the constants they are launched with.

It is found without a GPU, on tensors without memory, so that anybody can tell whether a recorded number is still of the code
before them. Nothing counts that the case does not launch.
"""

from __future__ import annotations

from functools import cache

from ..core.target import TARGETS, Target, pretend
from ..runtime.source import hashed
from .cases import CASES, Case
from .work import launches


@cache
def source(case: str, target: Target = TARGETS["sm_90"]) -> str:
    """Sixteen hexadecimal digits that stand for the code of a case on a chip."""
    return digest(CASES[case], target)


def digest(case: Case, target: Target) -> str:
    with pretend(target):  # a grid may depend on the chip
        return hashed(launches(case, target))
