"""Attention over caches of latents by pairs of blocks, played from its own source by `gluon_machine`: values, whatever order
barriers allow, numbers of blocks that are odd, NaN in all that nobody sees, pages that there are not. And that the machine sees
what is wrong with such a kernel."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests import gluon_machine
from tests.cached_oracle import agrees
from tests.cached_play import has_its_own_bits, played
from tests.interpreter.test_latent import growing, hard
from tests.latent_oracle import CALLS, call
from tilewright.attention.hopper import latent, latent_pairs


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    a = CALLS[name]()
    agrees(a, *played(a, 0, latent_pairs))


@pytest.mark.parametrize("page", [0, 64])
def test_any_number_of_blocks(page):
    """One to seven, with and without keys that nobody sees; in parts, some of which nobody sees keys of."""
    lengths = tuple(64 * n - 5 * (n % 3) for n in range(1, 8))
    for split in (None, 192):
        a = call(lengths, page=page, values=256, split=split)
        agrees(a, *played(a, 1, latent_pairs))


def test_any_order_gives_the_same_bits():
    """In a batch as alone."""
    a = call((300, 129), page=64, split=128, tokens=2, values=256)
    found = [played(a, seed, latent_pairs) for seed in range(6)]
    has_its_own_bits(a, found, latent_pairs)


@pytest.mark.parametrize("length", [448, 384])
def test_largest_scores_that_grow(length):
    a = growing(length, signs=False)
    agrees(a, *played(a, 0, latent_pairs))


def test_scores_far_below_zero():
    """The least of which bf16 has products: a row's first score is above what stands for none."""
    a = call((130,), scale=1.0, values=256, heads=4)
    a["k_cache"] = torch.full_like(a["k_cache"], 1e3)
    a["q"] = torch.full_like(a["q"], -1e3)
    agrees(a, *played(a, 0, latent_pairs))


# ---- mutants ---------------------------------------------------------------------------------------------------------

GIVE_FAR = "            mbarrier.arrive(memory.far.empty.index(1 - W), count=1)\n"
AWAIT_OTHER = "            o = warpgroup_mma_wait(1, deps=(o,))\n"
GIVE_NEAR = "    mbarrier.arrive(memory.near.empty.index(W), count=1)\n"
AWAIT_OWN = "    o = warpgroup_mma_wait(0, deps=(o,))\n" + GIVE_NEAR
AWAIT_SCORES = (
    "            s = finish_scores(s, memory, phase, W, PLAN)\n            s = warpgroup_mma_wait(0, deps=(s,))\n"
)
TELL = "    fence_async_shared()\n    mbarrier.arrive(memory.told.index(W), count=1)\n"
TAKE_LAST = """            o, top, total = take_other(o, top, total, memory, behind, live, W, PLAN)
            o = warpgroup_mma_wait(0, deps=(o,))
"""
STORE = "    matrices(memory.k_rope, STAGES, WIDE).index(W).store(weights)\n"
MUTANTS = {
    "far columns are given back before their product ends": (AWAIT_OTHER + GIVE_FAR, GIVE_FAR + AWAIT_OTHER),
    "the other's product is not waited for": (AWAIT_OTHER, AWAIT_OTHER.replace("(1", "(2")),
    "far columns are never given back": (GIVE_FAR, ""),
    "far columns are given back twice": (GIVE_FAR, GIVE_FAR.replace("count=1", "count=2")),
    "near columns are given back before their product ends": (AWAIT_OWN, GIVE_NEAR + AWAIT_OWN.replace(GIVE_NEAR, "")),
    "near columns are never given back": (GIVE_NEAR, ""),
    "one's own far columns are given back": (GIVE_FAR, GIVE_FAR.replace("1 - W", "W")),
    "scores are not waited for": (AWAIT_SCORES, AWAIT_SCORES.replace("(0", "(1")),
    "weights are not waited for": ("    mbarrier.wait(memory.told.index(1 - W), phase)\n", ""),
    "weights are not shown": (TELL, TELL.replace("    fence_async_shared()\n", "")),
    "weights are told before they are stored": (STORE, TELL + STORE),
    "weights are told for nothing to read": (TELL, ""),
    "tops are told too late": (
        "    memory.tops.index(W).store(top)\n" + TELL,
        TELL + "    memory.tops.index(W).store(top)\n",
    ),
    "near columns are not waited for": ("    mbarrier.wait(memory.near.full.index(W), phase)\n", ""),
    "far columns are not waited for": ("    mbarrier.wait(memory.far.full.index(W), phase)\n", ""),
    "the rest is not waited for": ("    mbarrier.wait(memory.rest.index(W), phase)\n", ""),
    "queries are not waited for": ("        mbarrier.wait(memory.queries, 0)\n", ""),
    "near is copied into before it is given back": (
        "            mbarrier.wait(memory.near.empty.index(stage), phase)\n",
        "",
    ),
    "far is copied into before it is given back": (
        "            mbarrier.wait(memory.far.empty.index(stage), phase)\n",
        "",
    ),
    "near values are not cleared": ("        if (block + 1) * BLOCK > span.stop:\n", "        if False:\n"),
    "far values are not cleared": ("        if live < BLOCK:\n", "        if False:\n"),
    "values are cleared again": ("            live = gl.maximum(live, BLOCK)  # of later blocks all keys\n", ""),
    "sums are not faded by the other's": (
        "    o = scaled_where_moved(o, fade)\n    other =",
        "    other =",
    ),
    "sums are not faded by one's own": (
        "    o = scaled_where_moved(o, fade)\n    v = matrices(memory.k_near",
        "    v = matrices(memory.k_near",
    ),
    "totals are not faded": ("return o, new, scaled_rows(total, fade)", "return o, new, total"),
    "the other's tops are not taken over": ("return o, new, scaled_rows", "return o, top, scaled_rows"),
    "the last of the other's is left out": (
        TAKE_LAST,
        TAKE_LAST.splitlines(True)[1],
    ),
    "a lost page is not told": ("        lost |= missing\n", "        pass\n"),
    "a lost page at the edge is not told": ("        s = lost_keys(TABLE, s, missing, PLAN)\n", ""),
    "the phase does not flip": ("            phase ^= 1\n", ""),
    "the other's phase does not flip": ("            behind ^= 1\n", ""),
    "a block before the part is seen": (
        "key = gl.where(block < span.low, UNSEEN, block * BLOCK)",
        "key = block * BLOCK",
    ),
    "a block before the part is not hidden": ("if (block >= upper) | (block < span.low):", "if block >= upper:"),
    "the last pair is left out where its second is not there": (
        "(span.high - span.low + 1) // 2 * 2",
        "(span.high - span.low) // 2 * 2",
    ),
    "the other's sums are not waited for": ("    mbarrier.wait(memory.done.index(1 - W), 0)\n", ""),
    "the other's sums are left out": ("    whole += memory.sums.index(1 - W).load(BY_ROW)\n", ""),
}


def uneven():
    """Five blocks with a part of two and one of three, beside the calls of `hard`."""
    return call((300,), split=192, values=256, heads=70)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    kept, instead = MUTANTS[name]
    with gluon_machine.broken(latent_pairs, kept, instead, tmp_path) as mutant, pytest.raises(AssertionError):
        for seed in range(6):
            for made in (hard, partial(growing, signs=False), uneven):
                a = made()
                agrees(a, *played(a, seed, mutant))


def test_it_takes_what_the_other_takes():
    assert latent_pairs.takes is latent.takes
