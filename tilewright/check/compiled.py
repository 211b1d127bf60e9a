"""Every op's calls, what they launch on a chip, and the compiled variants that they need: what the compile net is about."""

from __future__ import annotations

from functools import cache
from typing import Any

import tilewright as tw

from ..core.target import TARGETS
from ..op import Op
from ..runtime.kernel import Wanted
from .models import covering, place_calls, settings
from .variants import Call, Variant, calls, hardest, kept_back, launches, variant


@cache
def drawn_calls(op: Op) -> tuple[Call, ...]:
    """The calls of an op's declaration, and of its places in models those that give a kernel's constant another value; drawn once
    for all chips."""
    declared = tuple(calls(op))
    seen = [one for call in declared for wanted in launches(op, call) for one in settings(wanted)]
    further = covering(op, place_calls(op), TARGETS["sm_90"], seen)
    return *declared, *(Call(one.values(op)) for one in further)


@cache
def all_launches(op: Op, arch: str = "sm_90") -> tuple[tuple[Call, tuple[Wanted, ...]], ...]:
    """What each of an op's calls launches on a chip, and those that name what the chip has and is not taken unasked."""
    return tuple((call, tuple(launches(op, call, arch))) for call in (*drawn_calls(op), *kept_back(op, arch)))


@cache
def variants(op: Op) -> tuple[Variant, ...]:
    """All variants of an op's calls on sm_90."""
    by_name = {one.name: one for _, launched in all_launches(op) for one in map(variant, launched)}
    return tuple(by_name[name] for name in sorted(by_name))


@cache
def own_variants() -> dict[str, tuple[Variant, ...]]:
    """By op, its variants that no op before it has."""
    found: dict[str, tuple[Variant, ...]] = {}
    seen: set[str] = set()
    for op in tw.catalogue().values():
        found[op.name] = tuple(one for one in variants(op) if one.name not in seen)
        seen.update(one.name for one in found[op.name])
    return found


@cache
def chip_variants(arch: str) -> dict[str, tuple[Variant, ...]]:
    """By op, one variant of each kernel for a chip, and one more where it quantises, for the longest rows and for many experts.
    A kernel of several ops is the last one's."""
    found: dict[str, tuple[Variant, ...]] = {}
    seen: set[Any] = set()
    for op in reversed(tw.catalogue().values()):
        mine: dict[str, Variant] = {}
        rest = [(call, tuple(launches(op, call, arch))) for call in hardest(op)]
        for at, (_, launched) in enumerate((*all_launches(op, arch), *rest)):
            kind = max(0, at + 1 - len(all_launches(op, arch)))
            for wanted in launched:
                one = variant(wanted, arch)
                key = wanted.kernel.name, one.constants.get("FORMAT") is not None, kind
                if key not in seen:
                    seen.add(key)
                    mine[one.name] = one
        found[op.name] = tuple(mine.values())
    return found
