"""Which tile dense FP8 products take on Hopper, and which calls they take at all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewright.core.target import TARGETS
from tilewright.gemm.hopper import scaled_mm as hopper_scaled_mm
from tilewright.gemm.hopper.scaled_mm import TILES, tile_for
from tilewright.gemm.operands import scale_shape

HOPPER = replace(TARGETS["sm_90"], gluon=True)
WIDE, TALL = TILES


# Measured on an H200, November 2026: each is the faster of the two
@pytest.mark.parametrize(
    ("M", "N", "best"),
    [(4096, 4096, WIDE), (8192, 8192, WIDE), (4096, 7168, WIDE), (4096, 2112, TALL), (4096, 24576, WIDE)],
)
def test_the_faster_tile_is_taken(M, N, best):
    assert tile_for(M, N, 132) == best


@pytest.mark.parametrize(("M", "N"), [(1, 1), (128, 256), (192, 128), (10**6, 10**6)])
def test_no_other_tile_has_less_to_do(M, N):
    """Against the formula written out: rounds of all programs, times what a round takes."""
    taken = tile_for(M, N, 7)
    work = {t: -(-(-(-M // t.rows) * -(-N // t.columns)) // 7) * t.rows * t.columns / t.rate for t in TILES}
    assert work[taken] == min(work.values())


def call(M=64, N=96, K=256, recipes=("BlockWise1x128", "BlockWise128x128"), kinds=("float8_e4m3fn",) * 2, **other):
    (a, scale_a), (b, scale_b) = (
        (
            torch.empty(rows, K, dtype=getattr(torch, kind), device="meta"),
            torch.empty(scale_shape(recipe, rows, K), device="meta"),
        )
        for rows, recipe, kind in zip((M, N), recipes, kinds)
    )
    plain = {
        "bias": None,
        "act": None,
        "c": None,
        "beta": 0.0,
        "out_dtype": "bfloat16",
        "out_format": None,
        "out": None,
    }
    given = {"a": a, "b": b.t(), "scale_a": scale_a, "scale_b": scale_b, "recipe_a": recipes[0], "recipe_b": recipes[1]}
    return SimpleNamespace(**{"accumulate": "full", **plain, **given, **other})


def blank(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"M": 1, "N": 1, "K": 16},
        {"N": 33},  # results are then stored one by one
        {"recipes": ("RowWise", "TensorWise"), "kinds": ("float8_e4m3fn", "float8_e5m2")},
        {"c": blank(64, 96), "beta": 0.5, "out": blank(64, 200)[:, :96]},
    ],
)
def test_takes(values):
    assert hopper_scaled_mm.fits(HOPPER, call(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"K": 40},  # rows that do not begin at multiples of 16 bytes
        {"M": 0},
        {"K": 0},
        {"recipes": ("BlockWise128x128", "BlockWise1x128")},
        {"recipes": ("RowWise", "RowWise"), "accumulate": "fast"},
        {"kinds": ("float8_e4m3fn", "int8")},
        {"out": blank(96, 64).t()},
        {"c": blank(96, 64).t(), "beta": 0.5},
        {"b": torch.empty(256, 96, dtype=torch.float8_e4m3fn, device="meta")},  # columns contiguous
        {"a": torch.empty(1, 256, dtype=torch.float8_e4m3fn, device="meta").expand(64, 256)},
    ],
)
def test_leaves_to_others(values):
    assert not hopper_scaled_mm.fits(HOPPER, call(**values))


def test_other_chips_have_no_such_kernel():
    assert not any(hopper_scaled_mm.fits(t, call()) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False)))
