"""Reductions that Triton before 3.7 lowers wrongly: the rule on layouts made by hand, what the compiler makes of such layouts,
and the router's broken sibling."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import tilewright as tw
from tests.compile import table
from tests.mutants import COMPILED, declared
from tilewright.check.variants import FORWARD, Call, launches, variant
from tilewright.op import Op
from tilewright.toolchain.aot import Compiled, compile_for
from tilewright.toolchain.reductions import Layout, fault, layout_of, misread, reductions

OLDEST = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="needs Triton 3.6: what it makes of this is held"
)

# Tiles of rows and columns, reduced along the columns: which dimension each bit of lane and warp walks along, "-" for none.
RIGHT = [
    ("ccccc", ""),
    ("ccrrr", ""),
    ("rrrcc", ""),
    ("rccrr", ""),
    ("rrrrr", ""),
    ("-----", ""),
    ("cc---", ""),
    ("--ccr", ""),
    ("r-ccr", ""),
    ("ccrrr", "cc"),
    ("rrrcc", "rcc"),
    ("c-rrr", "c-c"),
    ("rrrrr", "c"),
    ("rcr--", "rr"),  # with no other warp along the columns nobody asks who stores
    ("rc-rr", "r-"),
]
WRONG = [
    ("crrcc", "", "lane bits [0, 3, 4]"),
    ("c-crr", "", "lane bits [0, 2]"),
    ("rcrrc", "c", "lane bits [1, 4]"),
    ("rcrrr", "c", "lane bits [1]"),
    ("rc-r-", "c", "lane bits [1]"),
    ("rrrrc", "crc", "warp bits [0, 2]"),
    ("ccrrr", "rcr", "warp bits [1]"),
]


def bases(word: str, reach: dict[str, int]) -> list[list[int]]:
    """Steps of 1, 2, 4 … along each dimension, as its letters come."""
    out = []
    for letter in word:
        out.append([reach["r"] * (letter == "r"), reach["c"] * (letter == "c")])
        if letter in reach:
            reach[letter] *= 2
    return out


def spelt(lanes: str, warps: str) -> tuple[list[list[int]], list[list[int]], list[int]]:
    reach = {"r": 1, "c": 1}
    made = bases(lanes, reach), bases(warps, reach)
    return *made, [reach["r"], reach["c"]]


def layout(lanes: str, warps: str) -> Layout:
    made = spelt(lanes, warps)
    return Layout(*(tuple(map(tuple, part)) for part in made[:2]))


@pytest.mark.parametrize("lanes, warps", RIGHT)
def test_right_layouts(lanes, warps):
    assert fault(layout(lanes, warps), 1) is None


@pytest.mark.parametrize("lanes, warps, says", WRONG)
def test_wrong_layouts(lanes, warps, says):
    assert fault(layout(lanes, warps), 1).startswith(says)


def test_the_order_of_steps_along_one_dimension_is_free():
    lanes = ((0, 4), (0, 1), (0, 2), (2, 0), (1, 0))
    assert fault(Layout(lanes, ()), 1) is None and fault(Layout(lanes, ()), 0) is None


def test_encodings_as_ttgir_spells_them():
    blocked = "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], warpsPerCTA = [2, 2], order = [1, 0]}>"
    lanes = ((0, 4), (0, 8), (0, 16), (1, 0), (2, 0))
    assert layout_of(blocked, (16, 128)) == Layout(lanes, ((0, 32), (4, 0)))
    assert layout_of(blocked, (2, 8)) == Layout(((0, 4), (0, 0), (0, 0), (1, 0), (0, 0)), ((0, 0), (0, 0)))
    sliced = f"#ttg.slice<{{dim = 1, parent = {blocked}}}>"
    assert layout_of(sliced, (16,)) == Layout(((0,), (0,), (0,), (1,), (2,)), ((0,), (4,)))
    linear = (
        "#ttg.linear<{register = [[0, 8]], lane = [[0, 1], [1, 0], [2, 0], [0, 2], [0, 4]], warp = [], block = []}>"
    )
    assert layout_of(linear, (4, 16)) == Layout(((0, 1), (1, 0), (2, 0), (0, 2), (0, 4)), ())
    product = "#ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 1], instrShape = [16, 8]}>"
    assert layout_of(product, (32, 8)) == Layout(((0, 2), (0, 4), (2, 0), (4, 0), (8, 0)), ((16, 0),))
    with pytest.raises(ValueError, match="which is not known here"):
        layout_of("#ttg.other<{width = 1}>", (16, 16))


# ---------------------------------------------------------------- what the compiler makes of them


@gluon.jit
def sum_of_rows(X, Y, R: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    row = gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(Y + row, gl.sum(gl.load(X + row[:, None] * C + col[None, :]), axis=1))


def compiled_sum(lanes: str, warps: str) -> Compiled:
    in_lanes, in_warps, (R, C) = spelt(lanes, warps)
    tile = gl.DistributedLinearLayout([], in_lanes, in_warps, [], [R, C])
    constants = {"R": R, "C": C, "LAYOUT": tile}
    return compile_for(sum_of_rows, {"X": "*fp32", "Y": "*fp32"}, constants, "sm_90", num_warps=2 ** len(warps))


@OLDEST
@pytest.mark.parametrize("lanes, warps", [("ccrrr", ""), ("rccrr", ""), ("crrcc", ""), ("rcrcr", ""), ("c-crr", "")])
def test_the_rule_is_what_the_compiler_does(lanes, warps):
    """Shuffles go over the bits along the columns where the rule calls the layout right, and over others where it does not."""
    made = compiled_sum(lanes, warps)
    shuffled = {int(n) for n in re.findall(r"shfl\.sync\.bfly\.b32\s+\S+ \S+ (\d+),", made.text)}
    along = {2**bit for bit, letter in enumerate(lanes) if letter == "c"}
    assert (shuffled == along) == (fault(layout(lanes, warps), 1) is None)
    assert bool(misread(made.ir)) == (shuffled != along)


@OLDEST
def test_every_reduction_is_read():
    made = compiled_sum("crrcc", "c")
    (one,) = reductions(made.ir)
    assert made.ir.count('"tt.reduce"') == 1 and one.axis == 1 and one.layout == layout("crrcc", "c")
    assert one.lines.startswith("test_reductions.py:")


def routing(op: Op, **settings) -> Compiled:
    values = {"k": 8, "score": "sigmoid", "groups": 32, "group_topk": 4, **settings}
    call = Call({"logits": torch.empty(8192, 256, device="meta"), **values}, FORWARD)
    return variant(launches(op, call)[0]).compile()


@OLDEST
@pytest.mark.parametrize("mutant", COMPILED, ids=lambda m: m.name.replace(" ", "-"))
def test_a_router_that_joins_groups_is_caught(mutant, tmp_path):
    with declared(mutant, tmp_path) as (op, _):
        found = table.wrong_code(op.name, routing(op))
    assert found and all(re.search(mutant.says, line) for line in found)


@OLDEST
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 8, 16, 32])
def test_the_router_has_no_such_reduction(groups, biased, score):
    bias = torch.empty(256, device="meta") if biased else None
    made = routing(tw.catalogue()["topk_routing"], score=score, bias=bias, groups=groups, group_topk=min(groups, 4))
    assert made.spills == 0 and misread(made.ir) == []
