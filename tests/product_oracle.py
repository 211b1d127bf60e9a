"""Products of which every partial sum is exact, in codes of every pair of formats: a kernel gives these to the last bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.core.draw import Draw
from tilewright.gemm.operands import BLOCKS, SCALES, scale_shape, values
from tilewright.gemm.scaled_mm import PAIRS, draw_operand

VIEWS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
ONES = {"e4m3": 0x38, "e5m2": 0x3C, "int8": 1, "int4": 1, "e2m1": 2}
FOURS = {"e4m3": 0x48, "e5m2": 0x44, "int8": 4, "int4": 4, "e2m1": 6}


class Exact(NamedTuple):
    """a [M, K], b [N, K], their scales and recipes, and the product in float64."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    recipe_a: str | None
    recipe_b: str | None
    wanted: Tensor

    def arguments(self, device: str = "cpu") -> dict:
        """As `scaled_mm`'s op takes them."""
        a, b, scale_a, scale_b = (None if t is None else t.to(device) for t in self[:4])
        sides = {"scale_a": scale_a, "scale_b": scale_b, "recipe_a": self.recipe_a, "recipe_b": self.recipe_b}
        return {"a": a, "b": b.t(), **sides}


def encoded(numbers: Tensor, kind: str) -> Tensor:
    """Codes of a matrix of zeros, ones and fours."""
    if kind == "float":
        return numbers.bfloat16()
    codes = torch.zeros(numbers.shape, dtype=torch.uint8)
    codes[numbers == 1], codes[numbers == 4] = ONES[kind], FOURS[kind]
    return codes[:, ::2] | codes[:, 1::2] << 4 if kind in ("int4", "e2m1") else codes.view(VIEWS[kind])


def ones(recipe: str | None, rows: int, inner: int) -> Tensor | None:
    """Scales that change nothing, those of 1x128 blocks laid out block by block as formats have them."""
    if recipe is None:
        return None
    shape = scale_shape(recipe, rows, inner)
    made = torch.ones(shape[::-1]).t() if recipe == "BlockWise1x128" else torch.ones(shape)
    return made.to(SCALES.get(recipe, torch.float32))


def every_code(kind: str, rows: int, inner: int) -> Tensor:
    """All that are finite, one after the other."""
    codes = torch.arange(256, dtype=torch.uint8)
    if kind in VIEWS:
        codes = codes[codes.view(VIEWS[kind]).float().isfinite()]
    wide = inner // 2 if kind in ("int4", "e2m1") else inner
    found = codes[torch.arange(rows * wide) % len(codes)].reshape(rows, wide)
    return found.view(VIEWS[kind]) if kind in VIEWS else found


def one_hot_rows(pair: str, rows: int, columns: int, inner: int) -> Exact:
    """Each row of a has a single one, and so picks numbers of b."""
    kind_a, kind_b, recipe_a, recipe_b = PAIRS[pair]
    picked = torch.arange(rows) * 37 % inner
    a = torch.zeros(rows, inner)
    a[torch.arange(rows), picked] = 1
    b, scale_b = every_code(kind_b, columns, inner), draw_operand(Draw(5), kind_b, recipe_b, columns, inner)[1]
    wanted = values(b, scale_b, recipe_b).double()[:, picked].t()
    return Exact(encoded(a, kind_a), b, ones(recipe_a, rows, inner), scale_b, recipe_a, recipe_b, wanted)


def larger_block(pair: str, rows: int, columns: int, inner: int) -> Exact:
    """Zeros and ones, of which one block of b along the inner dimension counts fourfold: by its scale, or by its codes where scales
    are for a whole row."""
    kind_a, kind_b, recipe_a, recipe_b = PAIRS[pair]
    source = torch.Generator().manual_seed(4)
    a, b = (torch.randint(0, 2, (n, inner), generator=source).float() for n in (rows, columns))
    across = BLOCKS[recipe_b][1]
    scale_b, larger = ones(recipe_b, columns, inner), b.clone()
    larger[:, (across or 128) : 2 * (across or 128)] *= 4
    if across:
        times = scale_b.float()
        times[:, 1] = 4.0
        scale_b = times.to(scale_b.dtype)
    codes = encoded(a, kind_a), encoded(b if across else larger, kind_b)
    scales = ones(recipe_a, rows, inner), scale_b
    return Exact(*codes, *scales, recipe_a, recipe_b, a.double() @ larger.double().t())


def integers(kinds: tuple[str, str], rows: int, columns: int, inner: int) -> Exact:
    """Codes over all of their range, the first rows at the far end of it; sums stay within what fp32 holds."""
    a, b = (
        draw_operand(Draw(i), kind, "RowWise", n, inner)[0] for i, (kind, n) in enumerate(zip(kinds, (rows, columns)))
    )
    for t, kind in zip((a, b), kinds):
        t[0] = -128 if kind == "int8" else 0x88
    wanted = values(a, None, "RowWise").double() @ values(b, None, "RowWise").double().t()
    assert wanted.abs().max() <= 2**24
    return Exact(a, b, ones("RowWise", rows, inner), ones("RowWise", columns, inner), "RowWise", "RowWise", wanted)
