"""What a chip multiplies where operands are stored as codes, and the words for it: "native", or "INT4 storage, INT8 math".

Codes are multiplied as they are where the chip has an instruction for them. Elsewhere they are widened to what it does multiply,
which holds them exactly, and the rate to be had is that of the wider math.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..core.target import Target
from .operands import SCALES, inner_of, kind_of

FP8 = ("e4m3", "e5m2")
INTEGERS = ("int8", "int4")


def block_scaled(target: Target, kinds: tuple[str, str], recipes: tuple[str | None, str | None]) -> bool:
    """Whether the chip multiplies these codes and their scales in one instruction."""
    known = target.block_scaled
    if recipes[0] != recipes[1] or recipes[0] not in known or not set(kinds) <= {*FP8, "e2m1"}:
        return False
    if recipes[0] == "BlockWise1x16" and kinds != ("e2m1", "e2m1"):
        return False
    return not known[recipes[0]] or len({kind in FP8 for kind in kinds}) == 1


def math_of(
    target: Target,
    kinds: tuple[str, str],
    recipes: tuple[str | None, str | None],
    zero: bool = False,
    half: bool = False,
    whole: bool = True,
) -> str:
    """What the chip multiplies: fp8, int8, bf16, fp16, or "scaled" for codes together with their scales.

    `zero` says that integer codes have zero points, `half` that the operand without codes is fp16, and `whole` that 128 divides the
    inner dimension, as instructions that take scales need it.
    """
    if whole and block_scaled(target, kinds, recipes):
        return "scaled"
    if not any(recipe in SCALES for recipe in recipes):
        if set(kinds) <= set(INTEGERS) and not zero:
            return "int8"
        if set(kinds) <= set(FP8) and target.fp8_products:
            return "fp8"
        if half:
            return "fp16"
    return "bf16"


def storage(kind: str, recipe: str | None) -> str:
    """The common name of codes with scales of a recipe."""
    prefix = {"BlockWise1x32": "MX", "BlockWise1x16": "NV"}.get(recipe or "", "")
    return prefix + {"e4m3": "FP8", "e5m2": "FP8", "int8": "INT8", "int4": "INT4", "e2m1": "FP4"}[kind]


def words_for(
    kinds: tuple[str, str],
    recipes: tuple[str | None, str | None],
    target: Target,
    zero: bool = False,
    half: bool = False,
    whole: bool = True,
) -> str:
    """How a chip computes a product of kinds of codes (`operands.kind_of`): "native", or what is stored and what is multiplied."""
    math = math_of(target, kinds, recipes, zero, half, whole)
    if math == "scaled":
        return "native"
    own = {"fp8": FP8, "int8": ("int8",)}.get(math, ())
    foreign = [storage(kind, recipe) for kind, recipe in zip(kinds, recipes) if kind != "float" and kind not in own]
    if not foreign:
        return "native"
    return f"{' and '.join(dict.fromkeys(foreign))} storage, {math.upper()} math"


def emulated(target: Target, pairs: Mapping[str, tuple[str, str, str | None, str | None]]) -> dict[str, str]:
    """The words for each of the pairs (`scaled_mm.PAIRS`) that a chip does not multiply as they are."""
    found = {name: words_for(pair[:2], pair[2:], target) for name, pair in pairs.items()}
    return {name: words for name, words in found.items() if words != "native"}


class Computed(NamedTuple):
    """How a product is computed: in words, as `words_for` gives them, and as the name that `math_of` gives the math alone."""

    words: str
    math: str


def computed(values: Mapping[str, Any], target: Target) -> Computed:
    """How a chip computes the product of the arguments `a` and `b`. Where there are no recipes, every scale is a float."""
    a, b = values["a"], values["b"]
    recipes = values.get("recipe_a"), values.get("recipe_b")
    kinds = kind_of(a, recipes[0]), kind_of(b, recipes[1])
    rest = values.get("zero_b") is not None, torch.float16 in (a.dtype, b.dtype), inner_of(a) % 128 == 0
    return Computed(words_for(kinds, recipes, target, *rest), math_of(target, kinds, recipes, *rest))
