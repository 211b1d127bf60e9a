"""Attention of few rows over caches of latents for Hopper, played from its own source by `gluon_machine`: values, whatever order
barriers allow, NaN in all that nobody sees, pages that there are not. And that the machine sees what is wrong with such kernels."""

from __future__ import annotations

import pytest

from tests import gluon_machine
from tests.cached_oracle import agrees
from tests.cached_play import has_its_own_bits, played
from tests.interpreter.test_latent import growing
from tests.latent_oracle import CALLS, FEW, call
from tilewright.attention.hopper import latent_few


@pytest.mark.parametrize("name", FEW)
def test_values(name):
    a = CALLS[name]()
    agrees(a, *played(a, 0, latent_few))


@pytest.mark.parametrize(("rows", "values"), [(16, 512), (32, 512), (17, 256)])
def test_any_order_gives_the_same_bits(rows, values):
    """In a batch as alone, of rows that fill products and that do not, of a block in pieces and whole."""
    a = call((300, 129), page=64, split=256, heads=rows, values=values)
    found = [played(a, seed, latent_few) for seed in range(3)]
    has_its_own_bits(a, found, latent_few)


def test_largest_scores_that_grow():
    """Blocks are walked over from the last to the first: sums are multiplied in some, and the base of weights lags in others."""
    a = growing()
    agrees(a, *played(a, 0, latent_few))


# ---- mutants ---------------------------------------------------------------------------------------------------------

AWAIT = "                    o = warpgroup_mma_wait(SLABS - 1 - piece * PIECE - n, deps=(issued[piece * PIECE + n],))\n"
GIVE = "            mbarrier.arrive(memory.empty.index(stages[piece]), count=1)\n"
SHOW = "        fence_async_shared()\n        barrier()\n"
MUTANTS = {
    "stages are given back while products read them": (
        "        sums = ()\n        for piece in gl.static_range(PIECES):\n",
        "        sums = ()\n        for piece in gl.static_range(PIECES):\n" + GIVE,
    ),
    "stages are never given back": (GIVE, ""),
    "stages are given back twice": (GIVE, GIVE.replace("count=1", "count=2")),
    "a sum is not waited for": (AWAIT, AWAIT.replace("SLABS - 1 -", "SLABS -")),
    "stages are not waited for": ("            mbarrier.wait(memory.full.index(stage), phase)\n", ""),
    "stages are not empty": ("                mbarrier.wait(memory.empty.index(stage), phase)\n", ""),
    "queries are not waited for": ("        mbarrier.wait(memory.queries, 0)\n", ""),
    "scores are not waited for": (
        "        s = warpgroup_mma_wait(0, deps=(s,))\n",
        "        s = warpgroup_mma_wait(1, deps=(s,))\n",
    ),
    "weights are not shown": (SHOW, "        barrier()\n"),
    "values are not cleared": ("            if key + BLOCK > span.stop:\n", "            if False:\n"),
    "sums are not faded": ("            o = scaled_where_any(sums[n], fade, moved)\n", "            o = sums[n]\n"),
    "a lost page is not told": ("            lost |= missing\n", "            pass\n"),
    "a lost page at the edge is not told": (
        "            s = spoilt_rows(TABLE, s, missing, PLAN)\n",
        "            pass\n",
    ),
    "what is missing is of another block": ("missing_of(TABLE, memory, at)", "missing_of(TABLE, memory, stage)"),
    "the table is read a block late": ("            missing = missing_then\n", "            missing = missing\n"),
    "keys are not hidden": ("        s = hidden_rows(s, WINDOW, rows, key)\n", "        s = s\n"),
    "columns after the values are from elsewhere": ("[page, place, rope_at]", "[page, place, 0]"),
    "a sum begins with what was there": ("use_acc=piece + n > 0", "use_acc=n > 0"),
}


def hard(values):
    """Keys past the last that is seen, blocks at the edge and after it, more of them than the ring holds; a page that is not there
    in a first block, in one that all rows see, and in none."""
    a = call((332, 332, 332), page=64, split=512, tokens=14, heads=2, values=values, scale=1.0)
    for b, at in enumerate((5, 1)):
        a["block_table"][b, at] = 999
    return a


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    kept, instead = MUTANTS[name]
    a = hard(512)
    with gluon_machine.broken(latent_few, kept, instead, tmp_path) as mutant, pytest.raises(AssertionError):
        for seed in range(6):
            agrees(a, *played(a, seed, mutant))
